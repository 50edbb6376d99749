/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_async_cuda [--ranks N] [--seed N] [--only SCENARIO]: low-latency calls without waits.
 *
 * flight: many calls queued in a stream that is held; they return, and the results are those of the host backend. With
 * both kinds of sums.
 *
 * hooks: what is sent arrives without the sender's ep_ll_finish(), two calls may be open, and calls out of order are
 * refused. With both kinds of sums.
 *
 * bad-*: invalid routing gives EP_E_ROUTING on that rank, and soon a status that names it on its peers; the CUDA
 * context survives, and a new group of the same processes works. With one kind of sums or the other.
 *
 * Exit 77 when there is no GPU.
 */
#include "ll_case.h"

#include <epkit/cuda.h>
#include <stdatomic.h>
#include <stdio.h>

#define TIMEOUT_MS 3000
#define SLACK_MS 2000 /* allowed after a deadline, on a busy machine */

enum { IN_FLIGHT = 4, PASSES = 3, DEEP = 40 };

enum how { CALLS, HOOKS, GRAPHS };
static const char *const how_names[] = {"calls", "hooks", "graphs"};

/* A rank spoils the routing of a call of this kind. */
static const struct bad {
    const char *name;
    enum spoil spoil;
    enum how how;
} bads[] = {
    {"bad-twice", SPOIL_TWICE, CALLS},        {"bad-wide", SPOIL_WIDE, CALLS},
    {"bad-other", SPOIL_OTHER, CALLS},        {"bad-hook", SPOIL_BEYOND, HOOKS},
    {"bad-hook-other", SPOIL_OTHER, HOOKS},   {"bad-graph", SPOIL_BELOW, GRAPHS},
    {"bad-graph-twice", SPOIL_TWICE, GRAPHS}, {"bad-graph-other", SPOIL_OTHER, GRAPHS},
};
enum { N_BADS = sizeof(bads) / sizeof(bads[0]) };

struct scenario {
    ep_boot_shm *second, *third; /* for the host backend, for the new group */
    const struct bad *bad;       /* NULL: flight or hooks */
    int (*run)(struct group *group, struct scenario *scenario);
    _Atomic int *go; /* [2 * PASSES] */
    uint64_t seed;
    int failed_rank;
    uint32_t sum; /* EP_LL_NO_PARTIAL_REDUCE or 0; flight and hooks use both */
};

static const char *sum_name(uint32_t sum)
{
    return sum ? "summed once" : "summed by rank";
}

static ep_ll_config config_for(const struct group *g, int max_tokens, int hidden, uint32_t sum)
{
    ep_ll_config config = args_ll(max_tokens, hidden, g->nranks * 8, 4);

    config.flags = sum;
    return config;
}

static uint64_t seed_of(const struct group *g, const struct scenario *scenario, int pass, int i)
{
    return scenario->seed * 7919u + (uint64_t)(pass * 1000 + i * 40 + g->rank);
}

/* --- flight ------------------------------------------------------------------------------------------------------ */

static int new_flight(const struct group *g, const struct scenario *scenario, const struct ll_pair *pair,
                      struct exchange **x)
{
    static const struct ll_round rounds[IN_FLIGHT] = {
        {.format = LL_BF16, .echo = true, .dispatch_flags = TEST_ASYNC, .combine_flags = TEST_ASYNC, .sources = true},
        {.format = LL_F32, .dispatch_flags = TEST_ASYNC, .combine_flags = TEST_ASYNC | EP_LL_ZERO_COPY},
        {.format = LL_BF16,
         .echo = true,
         .dispatch_flags = TEST_ASYNC | EP_LL_RECV_HOOK,
         .combine_flags = TEST_ASYNC | EP_LL_RECV_HOOK | EP_LL_ZERO_COPY,
         .holes = true},
        {.format = LL_UE8M0, .dispatch_flags = TEST_ASYNC, .combine_flags = TEST_ASYNC | EP_LL_RECV_HOOK},
    };

    for (int i = 0; i < IN_FLIGHT; i++) {
        struct ll_round round = rounds[i];

        round.n_tokens = (g->rank + i) % 3 == 0 ? 0 : 24 + 3 * g->rank % 16;
        round.idx_type = i % 2 ? EP_I32 : EP_I64;
        round.seed = seed_of(g, scenario, 0, i);
        TRY(exchange_new(pair, &round, &x[i]));
    }
    return 0;
}

static int queue_flight(struct group *g, struct scenario *scenario, struct exchange **x)
{
    int code = PASSED;

    /* Once without a held stream, so that all that is made on first use exists. */
    TRY(exchange_call_all(x, IN_FLIGHT, true));
    for (int i = 0; i < IN_FLIGHT; i++)
        code |= exchange_compare(x[i], "first pass");
    for (int pass = 0; pass < PASSES; pass++) {
        static struct hold hold; /* static: outlives a failure */
        _Atomic int *go = &scenario->go[pass + (scenario->sum ? PASSES : 0)];

        hold = (struct hold){.word = go, .ms = 20000};
        test_set_context("rank %d of %d, flight, %s, pass %d (seed %llu)", g->rank, g->nranks, sum_name(scenario->sum),
                         pass, (unsigned long long)scenario->seed);
        for (int i = 0; i < IN_FLIGHT; i++)
            TRY(exchange_load(x[i], seed_of(g, scenario, pass + 1, i)));
        TRY(hold_stream(g->stream, &hold));
        TRY(exchange_call_all(x, IN_FLIGHT, true));
        EXPECT(!atomic_load(&hold.ended) && cudaStreamQuery(g->stream) == cudaErrorNotReady,
               "the calls have waited for their stream (%d: its time limit has ended the hold)",
               atomic_load(&hold.ended));
        cudaGetLastError();
        TRY(group_barrier(g));
        atomic_store(go, 1);
        for (int i = 0; i < IN_FLIGHT; i++)
            code |= exchange_compare(x[i], "queued");
        CALL(ep_comm_async_error(g->cuda));
    }
    /* Now far more calls are in flight than there are results. */
    for (int i = 0; i < IN_FLIGHT; i++)
        TRY(exchange_poison(x[i]));
    for (int i = 0; i < DEEP; i++)
        TRY(exchange_call_all(x, IN_FLIGHT, i % 2));
    for (int i = 0; i < IN_FLIGHT; i++)
        code |= exchange_compare(x[i], "queued deeply");
    CALL(ep_comm_async_error(g->cuda));
    return code;
}

static int run_flight(struct group *g, struct scenario *scenario)
{
    const ep_ll_config config = config_for(g, 48, 1024, scenario->sum);
    struct exchange *x[IN_FLIGHT] = {NULL};
    struct ll_pair pair;
    int code = ll_pair_open(g, &config, &pair);

    if (!code)
        code = new_flight(g, scenario, &pair, x);
    if (!code)
        code = queue_flight(g, scenario, x);
    for (int i = 0; i < IN_FLIGHT; i++)
        code |= exchange_free(x[i], code);
    ll_pair_close(&pair);
    return code;
}

/* --- hooks ------------------------------------------------------------------------------------------------------- */

/* Rank 0 receives only after all others have. */
static int finish_late(struct group *g, struct exchange *x)
{
    if (g->rank != 0) {
        CALL(exchange_finish(x));
        CUDA(cudaStreamSynchronize(g->stream));
    }
    TRY(group_barrier(g));
    if (g->rank == 0)
        CALL(exchange_finish(x));
    return 0;
}

static int use_hooks(struct group *g, struct scenario *scenario, struct exchange *x)
{
    int code = PASSED;

    for (int pass = 0; pass < 2 * PASSES; pass++) {
        uint32_t flags = EP_LL_RECV_HOOK | (pass % 2 ? TEST_ASYNC : 0);

        test_set_context("rank %d of %d, hooks, %s, pass %d%s (seed %llu)", g->rank, g->nranks, sum_name(scenario->sum),
                         pass, pass % 2 ? ", asynchronous" : "", (unsigned long long)scenario->seed);
        TRY(exchange_load(x, seed_of(g, scenario, pass, 0)));
        TRY(expect_status("ep_ll_finish before all", exchange_finish(x), EP_E_STATE, NULL));
        CALL(exchange_dispatch(x, flags));
        TRY(expect_status("ep_ll_combine with an open hook", exchange_combine(x, flags), EP_E_STATE, "ep_ll_finish"));
        TRY(finish_late(g, x));
        TRY(expect_status("a second ep_ll_finish", exchange_finish(x), EP_E_STATE, NULL));
        CALL(exchange_combine(x, flags));
        TRY(finish_late(g, x));
        code |= exchange_compare(x, "with hooks");
        CALL(ep_comm_async_error(g->cuda));
    }
    return code;
}

/* Two dispatches open, two combines open, then a combine and the dispatch after it. */
static int open_two(struct group *g, struct exchange **x, uint32_t flags)
{
    CALL(exchange_dispatch(x[0], flags));
    CALL(exchange_dispatch(x[1], flags));
    TRY(expect_status("a third ep_ll_dispatch", exchange_dispatch(x[0], flags), EP_E_STATE, "ep_ll_finish"));
    TRY(finish_late(g, x[0]));
    TRY(finish_late(g, x[1]));
    TRY(expect_status("a third ep_ll_finish", exchange_finish(x[0]), EP_E_STATE, NULL));
    CALL(exchange_combine(x[0], flags));
    CALL(exchange_combine(x[1], flags));
    TRY(finish_late(g, x[1]));
    TRY(finish_late(g, x[0]));
    TRY(exchange_compare(x[0], "the first of two combines that were open"));
    TRY(exchange_compare(x[1], "the second of two combines that were open"));
    for (int i = 0; i < 2; i++)
        TRY(exchange_poison(x[i]));
    CALL(exchange_dispatch(x[0], flags));
    CALL(exchange_finish(x[0]));
    CALL(exchange_combine(x[0], flags));
    CALL(exchange_dispatch(x[1], flags));
    TRY(finish_late(g, x[0]));
    CALL(exchange_finish(x[1]));
    CALL(exchange_combine(x[1], flags));
    CALL(exchange_finish(x[1]));
    TRY(exchange_compare(x[0], "a combine with a later dispatch open"));
    return exchange_compare(x[1], "a dispatch with a combine open before it");
}

static int use_two_hooks(struct group *g, struct scenario *scenario, struct exchange **x)
{
    int code = PASSED;

    for (int pass = 0; pass < 2 * PASSES; pass++) {
        test_set_context("rank %d of %d, two hooks, %s, pass %d%s (seed %llu)", g->rank, g->nranks,
                         sum_name(scenario->sum), pass, pass % 2 ? ", asynchronous" : "",
                         (unsigned long long)scenario->seed);
        for (int i = 0; i < 2; i++)
            TRY(exchange_load(x[i], seed_of(g, scenario, pass, i)));
        code |= open_two(g, x, EP_LL_RECV_HOOK | (pass % 2 ? TEST_ASYNC : 0));
        CALL(ep_comm_async_error(g->cuda));
    }
    return code;
}

static int run_hooks(struct group *g, struct scenario *scenario)
{
    const ep_ll_config config = config_for(g, 32, 512, scenario->sum);
    struct ll_round round = {.n_tokens = 20 + g->rank, .format = LL_F32, .idx_type = EP_I64, .sources = true};
    struct exchange *x[2] = {NULL};
    struct ll_pair pair;
    int code = ll_pair_open(g, &config, &pair);

    for (int i = 0; i < 2 && !code; i++)
        code = exchange_new(&pair, &round, &x[i]);
    if (!code)
        code = use_hooks(g, scenario, x[0]);
    if (!code)
        code = use_two_hooks(g, scenario, x);
    for (int i = 0; i < 2; i++)
        code |= exchange_free(x[i], code);
    ll_pair_close(&pair);
    return code;
}

/* --- routing that is not valid ----------------------------------------------------------------------------------- */

struct attempt {
    struct group *group;
    const struct scenario *scenario;
    struct exchange *x;
    cudaGraphExec_t dispatch, combine;
    bool open;   /* a hook: ep_ll_finish() is the next call */
    bool failed; /* a call has reported it */
};

static bool is_failed_rank(const struct attempt *a)
{
    return a->group->rank == a->scenario->failed_rank;
}

static int capture(struct attempt *a)
{
    TRY(capture_begin(a->group));
    CALL(exchange_dispatch(a->x, 0));
    TRY(capture_end(a->group, &a->dispatch));
    TRY(capture_begin(a->group));
    CALL(exchange_combine(a->x, 0));
    return capture_end(a->group, &a->combine);
}

/* A call that may already return the failure; if it does, checks its status. */
static int expect_ok_or_failure(struct attempt *a, const char *call, ep_status status)
{
    if (status == EP_OK)
        return 0;
    a->failed = true;
    if (is_failed_rank(a))
        return expect_status(call, status, EP_E_ROUTING, NULL);
    EXPECT(names_rank(ep_last_error(), a->scenario->failed_rank), "%s gave %s (%s) without the failed_rank, rank %d",
           call, ep_status_name(status), ep_last_error(), a->scenario->failed_rank);
    return 0;
}

static int expect_failure(struct attempt *a, const char *call, ep_status status)
{
    EXPECT(status != EP_OK, "%s is EP_OK, though rank %d had %s", call, a->scenario->failed_rank,
           spoil_names[a->scenario->bad->spoil]);
    return expect_ok_or_failure(a, call, status);
}

/* The dispatch, or the combine. */
static int queue_half(struct attempt *a, bool dispatches)
{
    enum how how = a->scenario->bad->how;
    uint32_t flags = TEST_ASYNC | (how == HOOKS ? EP_LL_RECV_HOOK : 0);

    if (how == GRAPHS) {
        CUDA(cudaGraphLaunch(dispatches ? a->dispatch : a->combine, a->group->stream));
        return 0;
    }
    if (a->failed)
        return 0;
    if (dispatches)
        TRY(expect_ok_or_failure(a, "ep_ll_dispatch", exchange_dispatch(a->x, flags)));
    else
        TRY(expect_ok_or_failure(a, "ep_ll_combine", exchange_combine(a->x, flags)));
    if (how != HOOKS || a->failed)
        return 0;
    /* When the first half is complete, a rank has checked its own routing. */
    a->open = true;
    CUDA(cudaStreamSynchronize(a->group->stream));
    if (is_failed_rank(a) && dispatches == (a->scenario->bad->spoil != SPOIL_OTHER))
        TRY(expect_failure(a, "ep_ll_finish", exchange_finish(a->x)));
    else
        TRY(expect_ok_or_failure(a, "ep_ll_finish", exchange_finish(a->x)));
    a->open = a->failed;
    return 0;
}

/* Checks that the communicator has failed, and reports it repeatedly. */
static int check_failed(struct attempt *a)
{
    for (int i = 0; i < 2; i++) {
        ep_status status = ep_comm_async_error(a->group->cuda);

        EXPECT(status != EP_OK && (status == EP_E_ROUTING || !is_failed_rank(a)),
               "ep_comm_async_error is %s, though rank %d had %s", ep_status_name(status), a->scenario->failed_rank,
               spoil_names[a->scenario->bad->spoil]);
        if (a->open)
            TRY(expect_failure(a, "ep_ll_finish once more", exchange_finish(a->x)));
        else
            TRY(expect_failure(a, "the next ep_ll_dispatch", exchange_dispatch(a->x, i ? TEST_ASYNC : 0)));
        TRY(expect_failure(a, "ep_comm_barrier", ep_comm_barrier(a->group->cuda)));
    }
    return 0;
}

static int check_context(struct attempt *a)
{
    double begin = now_ms();
    void *memory;

    if (a->dispatch) {
        CUDA(cudaGraphLaunch(a->dispatch, a->group->stream));
        CUDA(cudaStreamSynchronize(a->group->stream));
        EXPECT(now_ms() - begin < SLACK_MS, "a graph of the failed group took %.0f ms", now_ms() - begin);
    }
    CUDA(cudaMalloc(&memory, 1 << 20));
    CUDA(cudaMemset(memory, 0, 1 << 20));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(memory));
    return 0;
}

static int spoil_one(struct attempt *a)
{
    const struct scenario *scenario = a->scenario;
    bool mine = is_failed_rank(a), other = scenario->bad->spoil == SPOIL_OTHER;
    double begin, took;

    TRY(exchange_load(a->x, scenario->seed * 31 + (uint64_t)a->group->rank));
    if (mine && !other)
        TRY(exchange_spoil(a->x, scenario->bad->spoil));
    TRY(group_barrier(a->group));
    begin = now_ms();
    TRY(queue_half(a, true));
    if (mine && other)
        TRY(exchange_spoil(a->x, scenario->bad->spoil));
    TRY(queue_half(a, false));
    CUDA(cudaStreamSynchronize(a->group->stream));
    took = now_ms() - begin;
    EXPECT(took < TIMEOUT_MS + SLACK_MS, "the calls ended after %.0f ms", took);
    /* First the peers, by their devices, then the failed rank; a peer that needs none of its rows learns it on the
     * host. */
    if (!other && !mine)
        TRY(check_failed(a));
    TRY(group_barrier(a->group));
    if (mine)
        TRY(check_failed(a));
    TRY(group_barrier(a->group));
    if (other && !mine)
        TRY(check_failed(a));
    if (a->group->rank == 0)
        printf("ll_async_cuda: %s: after %.0f ms: %s\n", scenario->bad->name, took, ep_last_error());
    TRY(check_context(a));
    return group_barrier(a->group);
}

/* An exchange on a new ep_ll, which must work; `spoils`: its routing is spoilt afterwards. */
static int with_exchange(struct group *g, const struct scenario *scenario, const char *phase, bool spoils)
{
    const ep_ll_config config = config_for(g, 32, 512, scenario->sum);
    struct ll_round round = {.n_tokens = 24, .format = LL_BF16, .echo = true, .idx_type = EP_I64};
    struct attempt attempt = {.group = g, .scenario = scenario};
    struct ll_pair pair;
    int code = ll_pair_open(g, &config, &pair);

    test_set_context("rank %d of %d, %s %s, %s (seed %llu), the failed_rank is rank %d", g->rank, g->nranks,
                     scenario->bad->name, phase, sum_name(scenario->sum), (unsigned long long)scenario->seed,
                     scenario->failed_rank);
    round.dispatch_flags = round.combine_flags = TEST_ASYNC;
    round.seed = scenario->seed + (uint64_t)g->rank;
    if (!code)
        code = exchange_new(&pair, &round, &attempt.x);
    for (int pass = 0; pass < 2 && !code; pass++)
        code = exchange_call_all(&attempt.x, 1, false) | exchange_compare(attempt.x, phase);
    if (!code && spoils && scenario->bad->how == GRAPHS)
        code = capture(&attempt);
    if (!code && spoils)
        code = spoil_one(&attempt);
    if (attempt.dispatch)
        cudaGraphExecDestroy(attempt.dispatch);
    if (attempt.combine)
        cudaGraphExecDestroy(attempt.combine);
    code |= exchange_free(attempt.x, code);
    ll_pair_close(&pair);
    return code;
}

static int make_new_group(struct group *g, struct scenario *scenario)
{
    ep_boot boot;

    TRY(group_barrier(g));
    ep_comm_free(g->cuda);
    g->cuda = NULL;
    CALL(ep_boot_shm_join(scenario->third, g->rank, &boot));
    return group_next(&boot, "cuda", TIMEOUT_MS, &g->cuda);
}

static int run_bad(struct group *g, struct scenario *scenario)
{
    TRY(with_exchange(g, scenario, "before", true));
    TRY(make_new_group(g, scenario));
    return with_exchange(g, scenario, "in the new group", false);
}

/* ----------------------------------------------------------------------------------------------------------------- */

static int run_sums(struct group *g, struct scenario *scenario)
{
    int code = PASSED;

    if (scenario->bad)
        return scenario->run(g, scenario);
    for (int i = 0; i < 2 && !(code & FAILED); i++) {
        scenario->sum = i ? EP_LL_NO_PARTIAL_REDUCE : 0;
        code |= scenario->run(g, scenario);
    }
    return code;
}

static int run_rank(const ep_boot *boot, void *argument)
{
    struct scenario *scenario = argument;
    struct group group;
    int code = group_open(boot, scenario->second, TIMEOUT_MS, &group);

    if (!code)
        code = run_sums(&group, scenario);
    group_close(&group, code);
    return code;
}

static int run_scenario(struct options *options, int index)
{
    struct scenario scenario = {.seed = options->seed, .failed_rank = index % options->ranks};
    struct launch launch = {
        .ranks = options->ranks, .seconds = 100, .victim = -1, .run = run_rank, .argument = &scenario};
    int code = 1;

    scenario.bad = index < N_BADS ? &bads[index] : NULL;
    scenario.sum = index % 2 ? EP_LL_NO_PARTIAL_REDUCE : 0;
    scenario.run = scenario.bad ? run_bad : index == N_BADS ? run_flight : run_hooks;
    launch.name = scenario.bad ? scenario.bad->name : index == N_BADS ? "flight" : "hooks";
    if (!options_select(options, launch.name))
        return SKIPPED;
    scenario.go = share(2 * (size_t)PASSES * sizeof(*scenario.go));
    if (ep_boot_shm_new(options->ranks, &scenario.second) == EP_OK &&
        ep_boot_shm_new(options->ranks, &scenario.third) == EP_OK && scenario.go)
        code = launch_ranks(&launch);
    else
        test_report("%s", ep_last_error());
    ep_boot_shm_free(scenario.second);
    ep_boot_shm_free(scenario.third);
    printf("ll_async_cuda: %d ranks, %s%s%s%s%s: %s\n", options->ranks, launch.name, scenario.bad ? " in " : "",
           scenario.bad ? how_names[scenario.bad->how] : "", scenario.bad ? ", " : "",
           scenario.bad ? sum_name(scenario.sum) : "", result_name(code));
    fflush(stdout);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    int code = SKIPPED;

    if (!options_read(argc, argv, 1, &options))
        return 2;
    group_flags = EP_COMM_CHECK_DISTINCT;
    for (int i = N_BADS + 1; i >= 0; i--)
        code = merge_codes(code, run_scenario(&options, i));
    return options_code(&options, code);
}
