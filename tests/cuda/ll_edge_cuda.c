/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_edge_cuda [--ranks N] [--rounds N] [--seed N]: low latency with masking, where the last rank is late by about the
 * deadline, before a dispatch or before a combine. The others may mask it while it sends, or only some of them may.
 * Whatever they decide, a call that succeeds has all rows of a rank or none, and all are correct, also in later calls,
 * each with a different routing; a masked rank is notified.
 *
 * Trials alternate between the two kinds of sums. The delay of each trial is adapted to the results of earlier ones, so
 * that it stays near the deadline. Exit 77 if there is no GPU.
 */
#include "ll_model.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>

#define DEADLINE_MS 400
#define FIRST_STEP_MS 3.0
#define LEAST_STEP_MS 0.02

enum { MAX_TOKENS = 256, HIDDEN = 8192, HEALTHY = 2, ROUNDS = 6 };

struct shared {
    int trials;
    uint64_t seed;
    ep_boot_shm *second, **boots; /* [trials] */
};

/* Delays before a dispatch, and before a combine. */
struct edge {
    double delay_ms, step_ms;
};

struct trial {
    struct group *group; /* holds the communicator of the trial */
    struct model model;
    uint32_t sum;          /* EP_LL_NO_PARTIAL_REDUCE or 0 */
    bool in_combine, late; /* `late`: this rank is late */
    double delay_ms;
    uint64_t lost; /* ranks that this one has missed */
    bool excluded; /* this rank is masked */
};

static void wait_until_ms(double time)
{
    while (now_ms() < time - 1)
        sleep_ms(0);
    while (now_ms() < time)
        ;
}

/* Checks the status of a call that may be the last one of this rank. */
static int may_exclude(struct trial *trial, const char *call, ep_status status)
{
    if (status == EP_OK)
        return 0;
    trial->excluded = true;
    return expect_status(call, status, EP_E_EXCLUDED, "masked");
}

/* The rows here must not be of a rank that was missed before. */
static int check_missing(struct trial *trial, const char *call, uint64_t here, uint64_t missing)
{
    EXPECT(!(here & trial->lost), "round %d: %s: rows of ranks 0x%llx, which this rank has masked before",
           trial->model.round, call, (unsigned long long)(here & trial->lost));
    EXPECT(!(missing >> trial->group->rank & 1), "round %d: %s: its own rows are missing", trial->model.round, call);
    trial->lost |= missing;
    return 0;
}

/* `delayed_from`: 0, or the time when the ranks began this round, if this rank is late in it. */
static int run_round(struct trial *trial, int round, double delayed_from)
{
    struct model *m = &trial->model;
    uint64_t here, missing;

    if (!delayed_from)
        TRY(model_load(m, round));
    if (delayed_from && !trial->in_combine)
        wait_until_ms(delayed_from + trial->delay_ms);
    TRY(may_exclude(trial, "ep_ll_dispatch", model_dispatch(m, 0)));
    if (trial->excluded)
        return 0;
    if (delayed_from && trial->in_combine)
        wait_until_ms(now_ms() + trial->delay_ms);
    TRY(may_exclude(trial, "ep_ll_combine", model_combine(m, 0)));
    if (trial->excluded)
        return 0;
    TRY(model_check_dispatch(m, &here, &missing));
    TRY(check_missing(trial, "recv_x", here, missing));
    TRY(model_check_combine(m, &here, &missing));
    return check_missing(trial, "out", here, missing);
}

static int run_rounds(struct trial *trial)
{
    uint64_t all = UINT64_MAX >> (64 - trial->group->nranks);

    TRY(model_open(trial->group, MAX_TOKENS, HIDDEN, EP_LL_MASK_DEAD | trial->sum, NULL, &trial->model));
    for (int round = 0; round < HEALTHY; round++)
        TRY(model_round(&trial->model, round, 0, all));
    TRY(model_load(&trial->model, HEALTHY));
    TRY(group_barrier(trial->group));
    TRY(run_round(trial, HEALTHY, trial->late ? now_ms() : 0));
    for (int round = HEALTHY + 1; round < ROUNDS && !trial->excluded; round++)
        TRY(run_round(trial, round, 0));
    return 0;
}

static int run_trial(const struct group *home, ep_boot_shm *shm, struct trial *trial)
{
    struct group group = *home;
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_boot boot;
    int code;

    config.backend = "cuda";
    config.timeout_ms = DEADLINE_MS;
    CALL(ep_boot_shm_join(shm, home->rank, &boot));
    TRY(group_barrier(home));
    CALL(ep_comm_new(&boot, &config, &group.cuda));
    trial->group = &group;
    code = run_rounds(trial);
    /* Ranks that have masked each other synchronise here. */
    if (!code)
        code = group_barrier(home);
    model_close(&trial->model);
    ep_comm_free(group.cuda);
    return code;
}

/* Increases the delay if the late rank was in time for all, otherwise decreases it. */
static void move_edge(struct edge *edge, bool in_time, uint64_t *random)
{
    edge->delay_ms += in_time ? edge->step_ms : -edge->step_ms;
    edge->step_ms = edge->step_ms * 0.7 > LEAST_STEP_MS ? edge->step_ms * 0.7 : LEAST_STEP_MS;
    edge->delay_ms += ((double)(next_random(random) % 1000) / 500 - 1) * edge->step_ms;
}

static int run_trials(struct group *g, const struct shared *shared)
{
    struct edge edges[2] = {{DEADLINE_MS, FIRST_STEP_MS}, {DEADLINE_MS, FIRST_STEP_MS}};
    uint64_t random = shared->seed;
    int n_lost = 0, n_split = 0, n_valid = 0;

    for (int i = 0; i < shared->trials; i++) {
        struct edge *edge = &edges[i % 2];
        struct trial trial = {.sum = i / 2 % 2 ? EP_LL_NO_PARTIAL_REDUCE : 0,
                              .in_combine = i % 2,
                              .late = g->rank == g->nranks - 1,
                              .delay_ms = edge->delay_ms};
        struct view {
            uint64_t lost, excluded;
        } mine, all[MAX_RANKS];
        int lost = 0, last = g->nranks - 1;
        uint64_t in_time = 0; /* ranks that were masked although they called in time: they wait for the late one */

        test_set_context("rank %d of %d, trial %d (seed %llu), the last rank late by %.3f ms for a %s%s", g->rank,
                         g->nranks, i, (unsigned long long)shared->seed, edge->delay_ms,
                         trial.in_combine ? "combine" : "dispatch", trial.sum ? ", summed once" : "");
        TRY(run_trial(g, shared->boots[i], &trial));
        mine = (struct view){trial.lost, trial.excluded};
        CALL(ep_comm_allgather(g->host, &mine, sizeof(mine), all));
        for (int rank = 0; rank < last; rank++) {
            lost += all[rank].lost >> last & 1;
            in_time |= (all[rank].lost & ~(UINT64_C(1) << last)) | (uint64_t)all[rank].excluded << rank;
        }
        n_lost += lost > 0;
        n_split += lost > 0 && lost < last;
        n_valid += in_time != 0;
        move_edge(edge, lost == 0 && !all[last].excluded, &random);
    }
    /* With more than two ranks, one that waits for the late rank may itself be late for others. */
    EXPECT(g->nranks > 2 || !n_valid, "%d times the rank that was in time was masked", n_valid);
    if (g->rank == 0)
        printf(
            "ll_edge_cuda: masked in %d of %d trials, by some and not by others in %d, another rank than the late one "
            "in %d; at the edge after %.3f and %.3f ms\n",
            n_lost, shared->trials, n_split, n_valid, edges[0].delay_ms, edges[1].delay_ms);
    return 0;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    const struct shared *shared = argument;
    struct group group;
    int code = group_open(boot, shared->second, 20000, &group);

    if (!code)
        code = run_trials(&group, shared);
    group_close(&group, code);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 3, .rounds = 24, .seed = 1};
    struct launch launch = {.name = "ll_edge_cuda", .victim = -1, .run = run_rank};
    struct shared shared = {.trials = 0};
    int code = 1;
    bool ok;

    if (!options_read(argc, argv, 2, &options))
        return 2;
    shared.trials = options.rounds;
    shared.seed = options.seed;
    shared.boots = calloc((size_t)options.rounds, sizeof(*shared.boots));
    ok = shared.boots && ep_boot_shm_new(options.ranks, &shared.second) == EP_OK;
    for (int i = 0; i < options.rounds && ok; i++)
        ok = ep_boot_shm_new(options.ranks, &shared.boots[i]) == EP_OK;
    launch.ranks = options.ranks;
    launch.seconds = 60 + 8 * options.rounds;
    launch.argument = &shared;
    if (ok)
        code = launch_ranks(&launch);
    else
        test_report("%s", ep_last_error());
    for (int i = 0; shared.boots && i < options.rounds; i++)
        ep_boot_shm_free(shared.boots[i]);
    free(shared.boots);
    ep_boot_shm_free(shared.second);
    printf("ll_edge_cuda: %d ranks, %d trials: %s\n", options.ranks, options.rounds, result_name(code));
    return code;
}
