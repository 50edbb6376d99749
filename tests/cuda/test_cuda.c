/* SPDX-License-Identifier: Apache-2.0 */
/*
 * test_cuda [--ll] [--nodes N [--network NAME | --bad-network] [--bf16]] [--threads | --hide] [--ranks N] [--rounds N]
 * [--seed N] [--only CASE] [--cases N] [--small] [--timeout S]: the CUDA backend against the host backend, bit for bit:
 * edge cases, then N random shapes; --cases: a limit for both. --ll: low latency instead of dispatch and combine on
 * plans.
 * --hide: each rank sees one GPU, as batch systems arrange it. --nodes: number of nodes; --bf16: sums between them are
 * rounded. --small, and --timeout, the deadline of each wait, are for slow tools. Exit 77 if there is no GPU.
 */
#include "shapes.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST_DIFFERENCES 5

static struct {
    int ranks, rounds, only, timeout, cases;
    int gpus; /* with `hide` */
    bool ll, threads, hide, small;
    uint64_t seed;
} options = {.ranks = 2, .rounds = 20, .only = -1, .timeout = 20, .cases = 1 << 30, .seed = 1};

static int edges(void)
{
    return options.ll ? ll_shapes_edges(options.small) : shapes_edges(options.small);
}

/* --- progress ---------------------------------------------------------------------------------------------------- */

struct progress {
    double begin, last, slowest; /* ms */
    int slowest_case, done;
};

/* On a terminal about every second, otherwise every hundred cases. By rank 0. */
static void show_progress(struct progress *p, int index, double ms)
{
    bool terminal = isatty(2);
    double now = now_ms();

    p->done++;
    if (ms > p->slowest) {
        p->slowest = ms;
        p->slowest_case = index;
    }
    if (terminal ? now - p->last < 1000 : p->done % 100)
        return;
    p->last = now;
    fprintf(stderr, "%s%d of %d cases, %.1f ms a case, the slowest %.0f ms (case %d)%s", terminal ? "\r" : "", p->done,
            edges() + options.rounds, (now - p->begin) / p->done, p->slowest, p->slowest_case, terminal ? "" : "\n");
}

/* --- cases ------------------------------------------------------------------------------------------------------- */

/* Draws for skipped cases, too, so that a case number always means the same case. */
static int run_case(const struct group *g, int index, uint64_t *random, bool wanted)
{
    const struct shape_of of = {.rank = g->rank, .nranks = g->nranks, .small = options.small, .seed = options.seed};
    struct ll_shape ll_shape;
    struct shape shape;
    char text[1024];
    int code;

    if (options.ll && index < edges())
        ll_shape_edge(&of, index, &ll_shape);
    else if (options.ll)
        ll_shape_random(&of, index, random, &ll_shape);
    else if (index < edges())
        shape_edge(&of, index, &shape);
    else
        shape_random(&of, index, random, &shape);
    if (!wanted)
        return 0;
    code = options.ll ? ll_case_run(g, &ll_shape) : case_run(g, &shape);
    if (!code)
        return 0;
    if (options.ll)
        ll_shape_print(&ll_shape, text, sizeof(text));
    else
        shape_print(&shape, text, sizeof(text));
    test_report("%s: %s", code & FAILED ? "a call failed" : "the backends differ", text);
    test_report("again: test_cuda%s%s%s%s --ranks %d --seed %llu --only %d", options.ll ? " --ll" : "",
                options.threads ? " --threads" : "", options.hide ? " --hide" : "", options.small ? " --small" : "",
                g->nranks, (unsigned long long)options.seed, index);
    return code;
}

static int run_cases(const struct group *g)
{
    struct progress progress = {.begin = now_ms(), .last = now_ms()};
    uint64_t random = options.seed;
    int last = options.only < 0 ? edges() + options.rounds - 1 : options.only, differences = 0;

    for (int i = 0; i <= last && i < options.cases; i++) {
        bool wanted = options.only < 0 || options.only == i;
        double begin = now_ms();
        int mine, merged;

        test_set_context("rank %d of %d, case %d (seed %llu)", g->rank, g->nranks, i, (unsigned long long)options.seed);
        mine = run_case(g, i, &random, wanted);
        if (mine & FAILED)
            return FAILED;
        if (!wanted)
            continue;
        /* Whichever rank found a difference, all ranks continue or none does. */
        TRY(group_merge_codes(g, mine, &merged));
        CALL(ep_comm_async_error(g->cuda));
        differences += merged != 0;
        if (differences > MOST_DIFFERENCES)
            return DIFFERS;
        if (g->rank == 0)
            show_progress(&progress, i, now_ms() - begin);
    }
    if (g->rank == 0 && isatty(2))
        fputs("\n", stderr);
    return differences ? DIFFERS : PASSED;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct group group;
    int code;

    if (options.hide)
        TRY(hide_other_gpus(boot->rank, options.gpus));
    code = group_open(boot, argument, options.timeout * 1000, &group);

    if (!code)
        code = run_cases(&group);
    group_close(&group, code & FAILED);
    return code;
}

static bool read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *option = argv[i], *value = i + 1 < argc ? argv[i + 1] : NULL;
        long long number = 0;
        bool ok = true;

        if (!strcmp(option, "--threads"))
            options.threads = true;
        else if (!strcmp(option, "--hide"))
            options.hide = true;
        else if (!strcmp(option, "--small"))
            options.small = true;
        else if (!strcmp(option, "--bad-network"))
            group_division.bad = true;
        else if (!strcmp(option, "--bf16"))
            group_division.partial_type = EP_BF16;
        else if (!strcmp(option, "--nodes"))
            ok = option_number(option, value, 1, MAX_RANKS, &number), group_division.nodes = (int)number, i++;
        else if (!strcmp(option, "--network"))
            ok = value != NULL, group_division.network = value, i++;
        else if (!strcmp(option, "--ll"))
            options.ll = true;
        else if (!strcmp(option, "--ranks"))
            ok = option_number(option, value, 1, MAX_RANKS, &number), options.ranks = (int)number, i++;
        else if (!strcmp(option, "--rounds"))
            ok = option_number(option, value, 0, 1000000, &number), options.rounds = (int)number, i++;
        else if (!strcmp(option, "--only"))
            ok = option_number(option, value, 0, 2000000, &number), options.only = (int)number, i++;
        else if (!strcmp(option, "--cases"))
            ok = option_number(option, value, 1, 2000000, &number), options.cases = (int)number, i++;
        else if (!strcmp(option, "--timeout"))
            ok = option_number(option, value, 1, 3600, &number), options.timeout = (int)number, i++;
        else if (!strcmp(option, "--seed"))
            ok = option_number(option, value, 0, INT64_MAX, &number), options.seed = (uint64_t)number, i++;
        else
            ok = false, test_report("%s: unknown option", option);
        if (!ok)
            return false;
    }
    if (options.threads && options.hide)
        test_report("--hide: threads all see the same GPUs");
    return !options.threads || !options.hide;
}

int main(int argc, char **argv)
{
    struct launch launch = {.name = "test_cuda", .victim = -1, .run = run_rank};
    ep_boot_shm *second = NULL;
    double begin = now_ms();
    int code, cases;

    if (!read_options(argc, argv))
        return 2;
    if (ep_boot_shm_new(options.ranks, &second) != EP_OK)
        return test_report("%s", ep_last_error()), 2;
    if (options.hide && count_gpus_in_child(&options.gpus) != 0)
        return 1;
    cases = options.only < 0 ? edges() + options.rounds : 1;
    cases = cases < options.cases ? cases : options.cases;
    launch.ranks = options.ranks;
    launch.threads = options.threads;
    launch.argument = second;
    /* The library's deadlines end a hang; this is for hangs that they do not cover. */
    launch.seconds = 300 + 2 * cases + 10 * options.timeout;
    code = launch_ranks(&launch);
    ep_boot_shm_free(second);
    printf("test_cuda%s: %d ranks (%s%s, %d nodes), seed %llu, %d cases in %.1f s: %s\n", options.ll ? " --ll" : "",
           options.ranks, options.threads ? "threads" : "processes", options.hide ? ", one GPU visible to each" : "",
           group_division.nodes > 1 ? group_division.nodes : 1, (unsigned long long)options.seed, cases,
           (now_ms() - begin) / 1e3, result_name(code));
    return code;
}
