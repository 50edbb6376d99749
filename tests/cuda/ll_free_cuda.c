/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_free_cuda [--ranks N] [--seed N] [--only SCENARIO]: rank 0 has no tokens. Right after its last combine it frees
 * its ep_ll and its communicator, while the last rank, whose combine is late, still writes into memory of rank 0, which
 * must still exist. What rank 0 has sent counts for all others.
 *
 *   during, during-threads   the late combine begins around the end of rank 0's, alternately with each kind of sums
 *   after, after-threads     it begins only when rank 0 has freed everything, which does not wait for it. With
 *                            EP_LL_NO_PARTIAL_REDUCE, because otherwise rank 0 needs the weights of the late rank
 *   exit                     as after, but only when the process of rank 0 has ended
 *
 * Exit 77 if there is no GPU.
 */
#include "ll_model.h"

#include <epkit/cuda.h>
#include <stdatomic.h>
#include <stdio.h>

#define TIMEOUT_MS 10000
#define HELD_MS 5000 /* at most */
#define FREE_MS 4000 /* limit of freeing, which must be shorter than the hold */

enum { TOKENS = 32, HIDDEN = 1024, TRIALS = 6, LAST_ROUND = 2 };
enum when { DURING, AFTER, EXIT };

static const struct scenario {
    const char *name;
    enum when when;
    bool threads;
    int trials;
} scenarios[] = {
    {"during", DURING, false, TRIALS},        {"after", AFTER, false, 2},        {"exit", EXIT, false, 1},
    {"during-threads", DURING, true, TRIALS}, {"after-threads", AFTER, true, 2},
};

struct page {
    _Atomic int left[TRIALS]; /* rank 0 has freed its communicator */
    _Atomic int done[TRIALS]; /* others that have seen their results */
};

struct start {
    const struct scenario *scenario;
    struct page *page;
    ep_boot_shm *second, *boots[TRIALS];
    uint64_t seed;
    struct hold hold[TRIALS]; /* of the last rank; outlives a failure */
};

struct trial {
    struct start *start;
    struct group *group; /* holds the communicator of the trial */
    struct model model;
    int number;
};

static int hold_last(struct trial *trial)
{
    struct start *start = trial->start;
    struct hold *hold = &start->hold[trial->number];
    uint64_t random = start->seed * 64 + (uint64_t)trial->number;

    *hold = (struct hold){.ms = HELD_MS};
    if (start->scenario->when == DURING)
        hold->ms = (int)(next_random(&random) % 300);
    else
        hold->word = &start->page->left[trial->number];
    /* The end of a process takes a while: its other communicator waits for the peers, too. */
    if (start->scenario->when == EXIT)
        hold->after_ms = 2500;
    return hold_stream(trial->group->stream, hold);
}

/* The last round: all but the last rank wait for their own results. */
static int call_last(struct trial *trial)
{
    struct model *m = &trial->model;
    bool late = trial->group->rank == trial->group->nranks - 1;
    double begin, took;

    TRY(model_load(m, LAST_ROUND));
    CALL(model_dispatch(m, 0));
    TRY(group_barrier(trial->group));
    if (late)
        TRY(hold_last(trial));
    begin = now_ms();
    CALL(model_combine(m, late ? TEST_ASYNC : 0));
    took = now_ms() - begin;
    /* Otherwise the late combine has begun before rank 0 has left, and nothing is tested. */
    EXPECT(trial->group->rank || trial->start->scenario->when == DURING || took < FREE_MS,
           "the last combine of rank 0 took %.0f ms, though it needs nothing of the late rank", took);
    return 0;
}

static int leave(struct trial *trial)
{
    double begin = now_ms(), took;

    model_close(&trial->model);
    ep_comm_free(trial->group->cuda);
    trial->group->cuda = NULL;
    took = now_ms() - begin;
    atomic_store(&trial->start->page->left[trial->number], 1);
    /* If ranks are threads, CUDA itself may make freeing wait for all that is queued on a device. */
    EXPECT(took < FREE_MS || trial->start->scenario->threads, "ep_ll_free and ep_comm_free took %.0f ms", took);
    if (trial->start->scenario->when == EXIT)
        return 0;
    return await(&trial->start->page->done[trial->number], trial->group->nranks - 1, 2 * HELD_MS,
                 "the others to see their results");
}

static int check_last(struct trial *trial)
{
    uint64_t all = UINT64_MAX >> (64 - trial->group->nranks);

    CUDA(cudaStreamSynchronize(trial->group->stream));
    TRY(model_check(&trial->model, all, all));
    CALL(ep_comm_async_error(trial->group->cuda));
    CUDA(cudaDeviceSynchronize());
    atomic_fetch_add(&trial->start->page->done[trial->number], 1);
    return 0;
}

static int run_trial(struct trial *trial)
{
    struct group *g = trial->group;
    uint64_t all = UINT64_MAX >> (64 - g->nranks);
    bool once = trial->start->scenario->when != DURING || trial->number % 2;
    int tokens[MAX_RANKS], code;

    for (int rank = 0; rank < g->nranks; rank++)
        tokens[rank] = rank ? TOKENS - rank % 3 : 0;
    code = model_open(g, TOKENS, HIDDEN, once ? EP_LL_NO_PARTIAL_REDUCE : 0, tokens, &trial->model);
    for (int round = 0; round < LAST_ROUND && !code; round++)
        code = model_round(&trial->model, round, 0, all);
    if (!code)
        code = call_last(trial);
    if (!code)
        code = g->rank ? check_last(trial) : leave(trial);
    model_close(&trial->model);
    return code;
}

/* A trial on a communicator of its own. */
static int run_one(const struct group *home, struct start *start, int number)
{
    struct group group = *home;
    struct trial trial = {.start = start, .group = &group, .number = number};
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot;
    int code;

    test_set_context("rank %d of %d, %s, trial %d (seed %llu)", home->rank, home->nranks, start->scenario->name, number,
                     (unsigned long long)start->seed);
    config.backend = "cuda";
    config.timeout_ms = TIMEOUT_MS;
    CALL(ep_boot_shm_join(start->boots[number], home->rank, &boot));
    CALL(ep_comm_new(&boot, &config, &group.cuda));
    code = run_trial(&trial);
    if (code)
        ep_comm_abort(group.cuda);
    ep_comm_free(group.cuda);
    return code;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct start *start = argument;
    struct group group;
    int code = group_open(boot, start->second, TIMEOUT_MS, &group);

    for (int i = 0; i < start->scenario->trials && !code; i++)
        code = run_one(&group, start, i);
    group_close(&group, code);
    return code;
}

static int run_scenario(struct options *options, const struct scenario *scenario)
{
    struct start start = {.scenario = scenario, .seed = options->seed};
    struct launch launch = {.name = scenario->name,
                            .ranks = options->ranks,
                            .seconds = 100,
                            .threads = scenario->threads,
                            .victim = -1,
                            .run = run_rank,
                            .argument = &start};
    bool ok = true;
    int code = 1;

    if (!options_select(options, scenario->name))
        return SKIPPED;
    start.page = share(sizeof(*start.page));
    ok = start.page && ep_boot_shm_new(options->ranks, &start.second) == EP_OK;
    for (int i = 0; i < scenario->trials && ok; i++)
        ok = ep_boot_shm_new(options->ranks, &start.boots[i]) == EP_OK;
    if (ok)
        code = launch_ranks(&launch);
    else
        test_report("%s", ep_last_error());
    for (int i = 0; i < scenario->trials; i++)
        ep_boot_shm_free(start.boots[i]);
    ep_boot_shm_free(start.second);
    printf("ll_free_cuda: %d ranks, %s: %s\n", options->ranks, scenario->name, result_name(code));
    fflush(stdout);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    int code = SKIPPED;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++)
        code = merge_codes(code, run_scenario(&options, &scenarios[i]));
    return options_code(&options, code);
}
