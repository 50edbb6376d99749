/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_weights_cuda [--ranks N] [--seed N] [--only SCENARIO]: the weights of a low-latency combine. They are sent
 * to the ranks that hold a token's rows, so weights of another call must not be used: tokens, routing and the experts'
 * results stay the same, and the weights change.
 *
 * refused: a combine is refused, because its routing is not that of the dispatch, before the peers call theirs or while
 * they wait in it, on one rank or on all, and is called again correctly, with other weights; or a second dispatch is
 * refused, whose number the combine then has. Before that the dispatch itself is refused, in the same ways.
 *
 * calls: many calls without waits, each with weights of its own in the same buffer. hooks, waited, graph, graph-hooks:
 * the same with ep_ll_finish(), with waits, in a captured graph, in one with ep_ll_finish().
 *
 * Each with both kinds of sums, with and without masking, and with several parts of rows for a warp. Against the host
 * backend, bit for bit. Exit 77 if there is no GPU.
 */
#include "ll_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 10000
#define PAUSE_MS 30 /* in which the peers begin to wait, and read the weights that are there */

enum { SETS = 24, PASSES = 6, TOPK = 4 };

static const struct variant {
    const char *name;
    uint32_t flags; /* of the ep_ll */
    int max_tokens, hidden;
} variants[] = {
    {"summed by rank", 0, 24, 1024},
    {"summed by rank, many tokens", 0, 1100, 256},
    {"summed once", EP_LL_NO_PARTIAL_REDUCE, 24, 1024},
    {"summed by rank, masking", EP_LL_MASK_DEAD, 24, 1024},
    {"summed once, masking", EP_LL_NO_PARTIAL_REDUCE | EP_LL_MASK_DEAD, 24, 1024},
};
enum { N_VARIANTS = sizeof(variants) / sizeof(variants[0]) };

struct scenario {
    const char *name;
    int (*run)(struct group *group, const struct scenario *scenario, int number, struct exchange *x);
    uint32_t flags; /* of the calls */
    bool graph;
    uint64_t seed;
};

static uint64_t seed_of(const struct group *g, const struct scenario *scenario, int number, int step)
{
    return scenario->seed * 15485863u + (uint64_t)number * 65536 + (uint64_t)step * 64 + (uint64_t)g->rank;
}

static void set_context(const struct group *g, const struct scenario *scenario, int number, int step)
{
    test_set_context("rank %d of %d, %s, %s, step %d (seed %llu)", g->rank, g->nranks, scenario->name,
                     variants[number].name, step, (unsigned long long)scenario->seed);
}

/* --- refused ------------------------------------------------------------------------------------------------------ */

/* The last rank, the first one, all. */
static bool is_refused(const struct group *g, int pass)
{
    return pass % 3 == 2 || g->rank == (pass % 3 ? 0 : g->nranks - 1);
}

static int combine_refused(struct exchange *x, uint32_t flags)
{
    TRY(exchange_spoil(x, SPOIL_OTHER));
    TRY(expect_status("ep_ll_combine with other experts", exchange_combine(x, flags), EP_E_ROUTING,
                      "dispatch that it answers"));
    return exchange_mend(x);
}

static int dispatch_refused(struct exchange *x, uint32_t flags)
{
    TRY(exchange_spoil(x, SPOIL_TWICE));
    TRY(expect_status("ep_ll_dispatch with an expert twice", exchange_dispatch(x, flags), EP_E_ROUTING, ""));
    return exchange_mend(x);
}

/* A call that is refused on some ranks, in the first passes before the peers call, then while they wait in it. */
static int call_again(struct group *g, struct exchange *x, int pass, uint32_t flags,
                      int (*in_vain)(struct exchange *x, uint32_t flags),
                      ep_status (*call)(struct exchange *x, uint32_t flags))
{
    bool refused = is_refused(g, pass), waits = pass / 3;

    if (refused && !waits)
        TRY(in_vain(x, flags));
    TRY(group_barrier(g));
    if (refused)
        sleep_ms(PAUSE_MS);
    if (refused && waits) {
        TRY(in_vain(x, flags));
        sleep_ms(PAUSE_MS);
    }
    CALL(call(x, flags));
    if (flags & EP_LL_RECV_HOOK)
        CALL(exchange_finish(x));
    return 0;
}

static int use_refused(struct group *g, const struct scenario *scenario, int number, struct exchange *x)
{
    int code = PASSED;

    for (int pass = 0; pass < PASSES && !(code & FAILED); pass++) {
        static const uint32_t flags[] = {0, EP_LL_RECV_HOOK, EP_LL_ZERO_COPY, EP_LL_RECV_HOOK | EP_LL_ZERO_COPY};

        set_context(g, scenario, number, pass);
        TRY(exchange_load(x, seed_of(g, scenario, number, pass)));
        TRY(call_again(g, x, pass, pass / 2 % 2 ? EP_LL_RECV_HOOK : 0, dispatch_refused, exchange_dispatch));
        /* After a dispatch that the next combine answers. */
        if (pass % 2 && is_refused(g, pass / 2))
            TRY(dispatch_refused(x, 0));
        TRY(call_again(g, x, pass, flags[(pass + number) % 4], combine_refused, exchange_combine));
        code |= exchange_compare(x, "after a combine that was refused");
        CALL(ep_comm_async_error(g->cuda));
    }
    return code;
}

/* --- one set of weights after the other --------------------------------------------------------------------------- */

struct series {
    struct exchange *x;
    unsigned char *weights, *out; /* [SETS], on the device */
    unsigned char *expected, *got;
};

static int series_open(const struct group *g, const struct scenario *scenario, int number, struct series *s)
{
    const struct mirror *weights = exchange_weights(s->x), *out = exchange_out(s->x);

    CUDA(cudaMalloc((void **)&s->weights, SETS * weights->bytes + GUARD));
    CUDA(cudaMalloc((void **)&s->out, SETS * out->bytes + GUARD));
    s->expected = malloc(SETS * out->bytes + GUARD);
    s->got = malloc(SETS * out->bytes + GUARD);
    EXPECT(s->expected && s->got, "no memory for %d results of %zu bytes", SETS, out->bytes);
    for (int i = 0; i < SETS; i++) {
        TRY(exchange_reweigh(s->x, seed_of(g, scenario, number, i)));
        CUDA(cudaMemcpyAsync(s->weights + (size_t)i * weights->bytes, weights->device, weights->bytes,
                             cudaMemcpyDefault, g->stream));
        memcpy(s->expected + (size_t)i * out->bytes, out->host, out->bytes);
    }
    CUDA(cudaMemsetAsync(s->out, POISON, SETS * out->bytes, g->stream));
    CUDA(cudaStreamSynchronize(g->stream));
    return group_barrier(g);
}

static void series_close(struct series *s)
{
    cudaFree(s->weights);
    cudaFree(s->out);
    free(s->expected);
    free(s->got);
}

/* All of it in the order of the stream. A different rank is late each time. */
static int call_series(const struct group *g, struct series *s, cudaGraphExec_t exec)
{
    const struct mirror *weights = exchange_weights(s->x), *out = exchange_out(s->x);

    for (int i = 0; i < SETS; i++) {
        if (i % g->nranks == g->rank)
            sleep_ms(1);
        TRY(exchange_poison(s->x));
        CUDA(cudaMemcpyAsync(weights->device, s->weights + (size_t)i * weights->bytes, weights->bytes,
                             cudaMemcpyDefault, g->stream));
        if (exec)
            CUDA(cudaGraphLaunch(exec, g->stream));
        else
            TRY(exchange_call_all(&s->x, 1, false));
        CUDA(cudaMemcpyAsync(s->out + (size_t)i * out->bytes, out->device, out->bytes, cudaMemcpyDefault, g->stream));
    }
    return 0;
}

/* A wrong result may be that of another set. */
static void report_difference(const struct series *s, int set, const unsigned char *got, size_t bytes)
{
    const unsigned char *expected = s->expected + (size_t)set * bytes;
    size_t at = 0, row = exchange_out(s->x)->row_bytes;
    int other = -1;

    while (got[at] == expected[at])
        at++;
    for (int i = 0; i < SETS; i++)
        if (memcmp(got + at / row * row, s->expected + (size_t)i * bytes + at / row * row, row) == 0)
            other = i;
    test_report("out of set %d: byte %zu of row %zu is 0x%02x, not 0x%02x", set, at % row, at / row, got[at],
                expected[at]);
    if (other >= 0)
        test_report("out of set %d: row %zu is that of set %d", set, at / row, other);
}

static int compare_series(const struct group *g, const struct series *s)
{
    size_t bytes = exchange_out(s->x)->bytes;
    int code = exchange_compare(s->x, "the last set of weights");

    CUDA(cudaMemcpyAsync(s->got, s->out, SETS * bytes, cudaMemcpyDefault, g->stream));
    CUDA(cudaStreamSynchronize(g->stream));
    for (int i = 0; i < SETS; i++) {
        const unsigned char *got = s->got + (size_t)i * bytes;

        if (memcmp(got, s->expected + (size_t)i * bytes, bytes) == 0)
            continue;
        report_difference(s, i, got, bytes);
        code |= DIFFERS;
    }
    CALL(ep_comm_async_error(g->cuda));
    return code;
}

static int run_sets(struct group *g, const struct scenario *scenario, int number, struct series *s)
{
    cudaGraphExec_t exec = NULL;
    int code;

    TRY(series_open(g, scenario, number, s));
    if (scenario->graph) {
        TRY(capture_begin(g));
        TRY(exchange_call_all(&s->x, 1, false));
        TRY(capture_end(g, &exec));
    }
    TRY(call_series(g, s, exec));
    code = compare_series(g, s);
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    return code;
}

static int use_series(struct group *g, const struct scenario *scenario, int number, struct exchange *x)
{
    struct series series = {.x = x};
    int code = run_sets(g, scenario, number, &series);

    series_close(&series);
    return code;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static const struct scenario scenarios[] = {
    {.name = "refused", .run = use_refused},
    {.name = "calls", .run = use_series, .flags = TEST_ASYNC},
    {.name = "hooks", .run = use_series, .flags = TEST_ASYNC | EP_LL_RECV_HOOK},
    {.name = "waited", .run = use_series},
    {.name = "graph", .run = use_series, .graph = true},
    {.name = "graph-hooks", .run = use_series, .graph = true, .flags = EP_LL_RECV_HOOK},
};

static int check_mask(const struct ll_pair *pair)
{
    int32_t masked[MAX_RANKS];

    CALL(ep_ll_get_mask(pair->cuda, masked));
    for (int rank = 0; rank < pair->group->nranks; rank++)
        EXPECT(!masked[rank], "rank %d is masked, but no rank was absent", rank);
    return 0;
}

/* Makes everything that is made on first use, also the buffer of EP_LL_ZERO_COPY, before any rank waits. */
static int warm_up(struct exchange *x)
{
    CALL(exchange_dispatch(x, 0));
    CALL(exchange_combine(x, EP_LL_ZERO_COPY));
    TRY(exchange_call_all(&x, 1, false));
    return exchange_compare(x, "before all");
}

static int run_variant(struct group *g, const struct scenario *scenario, int number)
{
    const struct variant *variant = &variants[number];
    struct ll_round round = {.n_tokens = variant->max_tokens - g->rank % 3,
                             .format = number % 2 ? LL_F32 : LL_BF16,
                             .idx_type = number % 2 ? EP_I32 : EP_I64,
                             .dispatch_flags = scenario->flags,
                             .combine_flags = scenario->flags,
                             .seed = seed_of(g, scenario, number, 99)};
    struct exchange *x = NULL;
    struct ll_pair pair;
    int code;
    ep_ll_config config = args_ll(variant->max_tokens, variant->hidden, g->nranks > 1 ? 4 * g->nranks : 8, TOPK);

    /* Few, so that a rank has several rows of most tokens. */
    config.flags = variant->flags;
    set_context(g, scenario, number, 0);
    code = ll_pair_open(g, &config, &pair);
    if (!code)
        code = exchange_new(&pair, &round, &x);
    if (!code)
        code = warm_up(x);
    if (!(code & FAILED))
        code |= scenario->run(g, scenario, number, x);
    if (!(code & FAILED) && variant->flags & EP_LL_MASK_DEAD)
        code |= check_mask(&pair);
    code |= exchange_free(x, code & FAILED);
    ll_pair_close(&pair);
    return code;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    struct scenario scenario = *(const struct scenario *)run->scenario;
    struct group own = *group;
    int code = PASSED;

    scenario.seed = run->seed;
    for (int i = 0; i < N_VARIANTS && !(code & FAILED); i++)
        code |= run_variant(&own, &scenario, i);
    return code;
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    struct scenario_run run = {.program = "ll_weights_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 100, .run = run_rank};

    group_flags = EP_COMM_CHECK_DISTINCT;
    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
