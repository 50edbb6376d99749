/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_mix_cuda [--ranks N] [--seed N] [--only SCENARIO]: low latency in combinations, against the host backend.
 *
 *   graph       a captured graph that is launched with different data and routings, mixed with calls: plain, with
 *               hooks, with zero copy, with masking (no rank masked), two results in use, all of these; with both sums;
 *               with less than the topk of the ep_ll, another one on each rank and in each exchange
 *   objects     two ep_ll of one communicator alternate, by calls, asynchronously and in one graph
 *   throughput  dispatch and combine on a plan while a low-latency dispatch waits for its combine
 *   reopen      one ep_ll after the other, in the memory of earlier ones
 *   formats     one rank uses a different format, and all get an error
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "ll_case.h"

#include <stdio.h>

#define TIMEOUT_MS 10000
#define HOOK EP_LL_RECV_HOOK
#define ASYNC TEST_ASYNC
#define ZERO EP_LL_ZERO_COPY

enum { LAUNCHES = 6, TURNS = 8, REOPENS = 24, MOST = 2, TOPK = 4 };

struct scenario {
    const char *name;
    int (*run)(struct group *group, const struct scenario *scenario);
    /* graph */
    bool masking, overlap;
    int n;    /* exchanges in it */
    int topk; /* of the ep_ll, more than calls have; 0: TOPK, which all calls have */
    uint32_t dispatch_flags, combine_flags;
    uint32_t sum; /* EP_LL_NO_PARTIAL_REDUCE or 0: both, one after the other */
    uint64_t seed;
};

static ep_ll_config config_for(const struct group *g, int max_tokens, int hidden, int local, uint32_t flags)
{
    ep_ll_config config = args_ll(max_tokens, hidden, g->nranks * local, TOPK);

    config.flags = flags;
    return config;
}

static uint64_t seed_of(const struct group *g, const struct scenario *scenario, int step, int i)
{
    return scenario->seed * 104729u + (uint64_t)step * 4096 + (uint64_t)i * 64 + (uint64_t)g->rank;
}

static void set_context(const struct group *g, const struct scenario *scenario, int step)
{
    test_set_context("rank %d of %d, %s%s, step %d (seed %llu)", g->rank, g->nranks, scenario->name,
                     scenario->sum ? ", summed once" : "", step, (unsigned long long)scenario->seed);
}

static int compare_all(struct exchange **x, int n, const char *phase)
{
    int code = PASSED;

    for (int i = 0; i < n; i++)
        code |= exchange_compare(x[i], phase);
    return code;
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

static int launch_graph(struct group *g, const struct scenario *scenario, struct exchange **x, cudaGraphExec_t exec)
{
    int code = PASSED;

    for (int step = 0; step < LAUNCHES; step++) {
        set_context(g, scenario, step);
        for (int i = 0; i < scenario->n; i++)
            TRY(exchange_load(x[i], seed_of(g, scenario, step, i)));
        if (step % 2) {
            TRY(exchange_call_all(x, scenario->n, !scenario->overlap));
            code |= compare_all(x, scenario->n, "calls between graphs");
            for (int i = 0; i < scenario->n; i++)
                TRY(exchange_poison(x[i]));
        }
        for (int again = 0; again <= step % 3; again++)
            CUDA(cudaGraphLaunch(exec, g->stream));
        code |= compare_all(x, scenario->n, "graph");
        CALL(ep_comm_async_error(g->cuda));
    }
    return code;
}

static int use_graph(struct group *g, const struct scenario *scenario, struct ll_pair *pair, struct exchange **x)
{
    cudaGraphExec_t exec;
    int code;

    for (int i = 0; i < scenario->n; i++) {
        struct ll_round round = {.n_tokens = (g->rank + i) % 4 == 3 ? 0 : 20 + i,
                                 .topk = scenario->topk ? 1 + (g->rank + 3 * i) % (scenario->topk - 1) : 0,
                                 .format = i ? LL_F32 : LL_BF16,
                                 .echo = i == 0,
                                 .idx_type = i ? EP_I32 : EP_I64,
                                 .sources = true,
                                 .holes = i == 0,
                                 .dispatch_flags = scenario->dispatch_flags,
                                 .combine_flags = scenario->combine_flags,
                                 .seed = seed_of(g, scenario, 99, i)};

        TRY(exchange_new(pair, &round, &x[i]));
    }
    /* Makes the combine buffer before, too. */
    TRY(exchange_call_all(x, scenario->n, scenario->overlap));
    code = compare_all(x, scenario->n, "before the capture");
    TRY(capture_begin(g));
    TRY(exchange_call_all(x, scenario->n, scenario->overlap));
    TRY(capture_end(g, &exec));
    code |= launch_graph(g, scenario, x, exec);
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

static int run_graph_summed(struct group *g, const struct scenario *scenario)
{
    ep_ll_config config = config_for(g, 24, 1024, 8, scenario->sum | (scenario->masking ? EP_LL_MASK_DEAD : 0));
    struct exchange *x[MOST] = {NULL};
    int32_t masked[MAX_RANKS];
    struct ll_pair pair;
    int code;

    config.topk = scenario->topk ? scenario->topk : TOPK;
    code = ll_pair_open(g, &config, &pair);
    set_context(g, scenario, 0);
    if (!code)
        code = use_graph(g, scenario, &pair, x);
    if (!code && scenario->masking) {
        CALL(ep_ll_get_mask(pair.cuda, masked));
        for (int rank = 0; rank < g->nranks; rank++)
            EXPECT(!masked[rank], "rank %d is masked, but no rank was absent", rank);
    }
    for (int i = 0; i < MOST; i++)
        code |= exchange_free(x[i], code & FAILED);
    ll_pair_close(&pair);
    return code;
}

static int run_graph(struct group *g, const struct scenario *scenario)
{
    int code = run_graph_summed(g, scenario);
    struct scenario once = *scenario;

    once.sum = EP_LL_NO_PARTIAL_REDUCE;
    return code & FAILED ? code : code | run_graph_summed(g, &once);
}

/* --- two objects ------------------------------------------------------------------------------------------------- */

/* Their dispatches, then their combines; then with the combines in reverse order. */
static int alternate(struct exchange **x, uint32_t flags, bool reversed)
{
    for (int i = 0; i < 2; i++)
        CALL(exchange_dispatch(x[i], flags));
    for (int i = 0; i < 2; i++)
        CALL(exchange_combine(x[reversed ? 1 - i : i], flags));
    return 0;
}

static int use_objects(struct group *g, const struct scenario *scenario, struct exchange **x)
{
    cudaGraphExec_t exec;
    int code = PASSED;

    TRY(capture_begin(g));
    TRY(alternate(x, 0, false));
    TRY(alternate(x, 0, true));
    TRY(capture_end(g, &exec));
    for (int step = 0; step < TURNS; step++) {
        set_context(g, scenario, step);
        for (int i = 0; i < 2; i++)
            TRY(exchange_load(x[i], seed_of(g, scenario, step, i)));
        TRY(alternate(x, step % 2 ? ASYNC : 0, step / 2 % 2));
        /* Calls one of them alone, so that their numbers of calls differ. */
        CALL(exchange_dispatch(x[0], ASYNC));
        CALL(exchange_combine(x[0], ASYNC));
        code |= compare_all(x, 2, "in turn");
        for (int i = 0; i < 2; i++)
            TRY(exchange_poison(x[i]));
        CUDA(cudaGraphLaunch(exec, g->stream));
        code |= compare_all(x, 2, "in turn in a graph");
        CALL(ep_comm_async_error(g->cuda));
    }
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

static int run_objects(struct group *g, const struct scenario *scenario)
{
    const ep_ll_config configs[2] = {config_for(g, 24, 1024, 8, 0),
                                     config_for(g, 40, 512, 6, EP_LL_MASK_DEAD | EP_LL_NO_PARTIAL_REDUCE)};
    struct ll_pair pairs[2] = {{.group = g}, {.group = g}};
    struct exchange *x[2] = {NULL};
    int code = 0;

    set_context(g, scenario, 0);
    for (int i = 0; i < 2 && !code; i++) {
        struct ll_round round = {.n_tokens = 17 + 5 * i + g->rank % 2,
                                 .format = i ? LL_UE8M0 : LL_BF16,
                                 .idx_type = EP_I64,
                                 .seed = seed_of(g, scenario, 99, i)};

        code = ll_pair_open(g, &configs[i], &pairs[i]);
        if (!code)
            code = exchange_new(&pairs[i], &round, &x[i]);
    }
    if (!code)
        code = use_objects(g, scenario, x);
    for (int i = 0; i < 2; i++) {
        code |= exchange_free(x[i], code & FAILED);
        ll_pair_close(&pairs[i]);
    }
    return code;
}

/* --- with throughput --------------------------------------------------------------------------------------------- */

static int interleave(struct group *g, const struct scenario *scenario, struct exchange *x)
{
    int code = PASSED;

    for (int step = 0; step < TURNS; step++) {
        uint32_t flags = (step % 2 ? ASYNC : 0) | (step / 2 % 2 ? HOOK : 0);
        struct shape shape = {.n_tokens = 30 + 7 * g->rank,
                              .hidden = 768,
                              .topk = 5,
                              .n_experts = 10 * g->nranks,
                              .dtype = EP_BF16,
                              .idx_type = EP_I32,
                              .symmetric = step % 2,
                              .choice = true,
                              .fixed_capacity = step % 3 == 0,
                              .async = step / 4,
                              .seed = seed_of(g, scenario, step, 1)};

        set_context(g, scenario, step);
        TRY(exchange_load(x, seed_of(g, scenario, step, 0)));
        CALL(exchange_dispatch(x, flags));
        code |= case_run(g, &shape);
        if (code & FAILED)
            return code;
        if (flags & HOOK)
            CALL(exchange_finish(x));
        shape.seed++;
        code |= case_run(g, &shape);
        if (code & FAILED)
            return code;
        CALL(exchange_combine(x, flags));
        code |= case_run(g, &shape);
        if (code & FAILED)
            return code;
        if (flags & HOOK)
            CALL(exchange_finish(x));
        code |= exchange_compare(x, "around throughput");
    }
    return code;
}

static int run_throughput(struct group *g, const struct scenario *scenario)
{
    const ep_ll_config config = config_for(g, 32, 1024, 8, 0);
    struct ll_round round = {.n_tokens = 30 - g->rank % 3, .format = LL_F32, .idx_type = EP_I32};
    struct exchange *x = NULL;
    struct ll_pair pair;
    int code = ll_pair_open(g, &config, &pair);

    set_context(g, scenario, 0);
    round.seed = seed_of(g, scenario, 99, 0);
    if (!code)
        code = exchange_new(&pair, &round, &x);
    if (!code)
        code = interleave(g, scenario, x);
    code |= exchange_free(x, code & FAILED);
    ll_pair_close(&pair);
    return code;
}

/* --- again and again --------------------------------------------------------------------------------------------- */

static int run_reopen(struct group *g, const struct scenario *scenario)
{
    int code = PASSED;

    for (int step = 0; step < REOPENS && !(code & FAILED); step++) {
        /* Four sizes, the largest first: each finds the contents of an earlier one in its memory. */
        int size = 4 - step % 4;
        struct ll_shape shape = {.config = config_for(g, 8 * size, 512 * size, 4 * size, 0),
                                 .n_rounds = 1 + step % LL_MAX_ROUNDS};

        set_context(g, scenario, step);
        for (int i = 0; i < shape.n_rounds; i++)
            shape.round[i] = (struct ll_round){.n_tokens = 8 * size - g->rank % 2,
                                               .format = (enum ll_format)((step + i) % LL_FORMATS),
                                               .idx_type = EP_I64,
                                               .sources = true,
                                               .combine_flags = i == 1 ? ZERO : 0,
                                               .seed = seed_of(g, scenario, step, i)};
        code |= ll_case_run(g, &shape);
    }
    return code;
}

/* --- other formats ----------------------------------------------------------------------------------------------- */

/* Checks that the group has failed on every rank. */
static int disagree(struct group *g, struct exchange *x)
{
    ep_status expected = g->nranks > 1 ? EP_E_MISMATCH : EP_OK;
    double begin = now_ms();
    bool named = false;

    TRY(group_barrier(g));
    TRY(expect_status("ep_ll_dispatch in another format", exchange_dispatch(x, 0), expected, NULL));
    EXPECT(now_ms() - begin < TIMEOUT_MS, "the dispatch ended after %.0f ms", now_ms() - begin);
    for (int rank = 0; rank < g->nranks; rank++)
        named |= names_rank(ep_last_error(), rank);
    EXPECT(expected == EP_OK || named, "no rank is named: %s", ep_last_error());
    return group_barrier(g);
}

static int run_formats(struct group *g, const struct scenario *scenario)
{
    const ep_ll_config config = config_for(g, 32, 1024, 8, 0);
    const enum ll_format formats[] = {LL_BF16, LL_F32};
    struct exchange *x[2] = {NULL, NULL};
    struct ll_pair pair;
    int code = ll_pair_open(g, &config, &pair);

    set_context(g, scenario, 0);
    for (int i = 0; i < 2 && !code; i++) {
        struct ll_round round = {
            .n_tokens = 32 - i, .format = formats[i], .idx_type = EP_I64, .seed = seed_of(g, scenario, 0, i)};

        code = exchange_new(&pair, &round, &x[i]);
    }
    if (!code)
        code = exchange_call_all(x, 2, false);
    if (!code)
        code = disagree(g, x[g->rank == g->nranks - 1]);
    for (int i = 0; i < 2; i++)
        code |= exchange_free(x[i], code & FAILED);
    ll_pair_close(&pair);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------- */

static const struct scenario scenarios[] = {
    {.name = "graph", .run = run_graph, .n = 1},
    {.name = "graph-hooks", .run = run_graph, .n = 1, .dispatch_flags = HOOK, .combine_flags = HOOK},
    {.name = "graph-zero-copy", .run = run_graph, .n = 1, .combine_flags = ZERO},
    {.name = "graph-masking", .run = run_graph, .n = 1, .masking = true},
    {.name = "graph-two", .run = run_graph, .n = 2, .overlap = true},
    {.name = "graph-all",
     .run = run_graph,
     .n = 2,
     .overlap = true,
     .masking = true,
     .dispatch_flags = HOOK,
     .combine_flags = HOOK | ZERO},
    {.name = "graph-topk", .run = run_graph, .n = 2, .topk = 7},
    {.name = "graph-topk-all",
     .run = run_graph,
     .n = 2,
     .topk = 8,
     .overlap = true,
     .masking = true,
     .dispatch_flags = HOOK,
     .combine_flags = HOOK | ZERO},
    {.name = "objects", .run = run_objects},
    {.name = "throughput", .run = run_throughput},
    {.name = "reopen", .run = run_reopen},
    {.name = "formats", .run = run_formats},
};

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    struct scenario scenario = *(const struct scenario *)run->scenario;
    struct group own = *group;

    scenario.seed = run->seed;
    return scenario.run(&own, &scenario);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    struct scenario_run run = {.program = "ll_mix_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
