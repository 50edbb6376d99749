/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlat.c - dispatch and combine in the low-latency layout. Logical bytes are counted per (token, expert), as DeepEP
 * does; bytes on the wire by the rows that are sent.
 *
 * The layout is sparse; the memcpy baseline copies the same number of bytes from contiguous memory.
 */
#include "bench_case.h"

#include "base/error.h"
#include "core/quantize.h"

#include <epkit/lowlatency.h>
#include <string.h>

#define PAIRS 20 /* dispatches and combines in a row */

struct lowlat {
    struct bench_case bench; /* recv_x, recv_scales: [L,R*M] rows; no plan */
    bool is_fp8;
    ep_ll *ll;
    int32_t *recv_count; /* [L] */
    uint16_t *returned;  /* [L,R*M,H], symmetric: input of the combine */
    int64_t slots;       /* R*M */
};

static ep_status run_dispatch(void *context)
{
    struct lowlat *lowlat = context;
    const struct bench_route *route = &lowlat->bench.route;
    const ep_ll_dispatch_args args = {
        .size = sizeof(args),
        .x = mirrors_address(&lowlat->bench.mirrors, lowlat->bench.x),
        .topk_idx = mirrors_address(&lowlat->bench.mirrors, route->experts),
        .idx_type = EP_I32,
        .n_tokens = route->n_tokens,
        .out_dtype = lowlat->is_fp8 ? EP_F8E4M3 : EP_BF16,
        .scale_type = lowlat->is_fp8 ? EP_F32 : 0,
        .recv_x = mirrors_address(&lowlat->bench.mirrors, lowlat->bench.recv_x),
        .recv_scales = lowlat->is_fp8 ? mirrors_address(&lowlat->bench.mirrors, lowlat->bench.recv_scales) : NULL,
        .recv_count = mirrors_address(&lowlat->bench.mirrors, lowlat->recv_count),
    };

    return lowlat->bench.ctx->gpu ? ep_ll_dispatch(lowlat->ll, &args, NULL) : ep_ll_dispatch_sync(lowlat->ll, &args);
}

static ep_status run_combine(void *context)
{
    struct lowlat *lowlat = context;
    const struct bench_route *route = &lowlat->bench.route;
    const ep_ll_combine_args args = {
        .size = sizeof(args),
        .x = mirrors_address(&lowlat->bench.mirrors, lowlat->returned),
        .topk_idx = mirrors_address(&lowlat->bench.mirrors, route->experts),
        .idx_type = EP_I32,
        .n_tokens = route->n_tokens,
        .topk_weights = mirrors_address(&lowlat->bench.mirrors, route->weights),
        .out = mirrors_address(&lowlat->bench.mirrors, lowlat->bench.out),
        .flags = lowlat->bench.request->no_partial_reduce ? EP_LL_NO_PARTIAL_REDUCE : 0,
    };

    return lowlat->bench.ctx->gpu ? ep_ll_combine(lowlat->ll, &args, NULL) : ep_ll_combine_sync(lowlat->ll, &args);
}

/* On GPUs calls are only queued. */
static ep_status sync_stream(struct lowlat *lowlat)
{
    return lowlat->bench.ctx->gpu ? ep_stream_sync(lowlat->bench.ctx->comm, NULL) : EP_OK;
}

/* Each dispatch needs a combine, which is not timed when the dispatch is measured, and the other way round. */
static ep_status after_dispatch(void *context, int round)
{
    (void)round;
    EP_TRY(run_combine(context));
    return sync_stream(context);
}

static ep_status after_pairs(void *context, int round)
{
    (void)round;
    return sync_stream(context);
}

static ep_status prepare_combine(void *context, int round)
{
    (void)round;
    EP_TRY(run_dispatch(context));
    return sync_stream(context);
}

/* A row that this rank receives: the number of its local expert, its slot in the layout, its source. */
typedef bool (*row_fn)(struct lowlat *lowlat, int local, int64_t slot, const struct reference_row *row);

/* Calls `visit` for the rows that this rank receives, until it returns false. */
static bool each_row(struct lowlat *lowlat, row_fn visit)
{
    const struct reference_layout *received = &lowlat->bench.route.received;

    for (int local = 0; local < lowlat->bench.route.group.n_local; local++)
        for (int64_t i = received->expert_start[local]; i < received->expert_start[local + 1]; i++)
            if (!visit(lowlat, local, local * lowlat->slots + i - received->expert_start[local], &received->rows[i]))
                return false;
    return true;
}

/*
 * Rows that this rank sends to ranks outside of its `share` neighbours, itself among them, without a forwarder: one for
 * each (token, rank) or, `each`, for each (token, expert).
 */
static int64_t count_outside(const struct lowlat *lowlat, int share, bool each)
{
    const struct bench_route *route = &lowlat->bench.route;
    const int32_t *counts = each ? route->sent.tokens_per_expert : route->sent.tokens_per_rank;
    int per_rank = each ? route->group.n_local : 1;
    int64_t n = 0;

    for (int i = 0; i < route->group.n_ranks * per_rank; i++)
        if (i / per_rank / share != route->rank / share)
            n += counts[i];
    return n;
}

static size_t row_bytes(const struct lowlat *lowlat)
{
    return (size_t)lowlat->bench.request->hidden * (lowlat->is_fp8 ? 1 : 2);
}

/* Calls `act` on the rows or scales of each expert. */
static void each_expert(struct lowlat *lowlat, void *rows, size_t bytes,
                        void (*act)(struct mirrors *mirrors, void *host, size_t bytes))
{
    const struct bench_route *route = &lowlat->bench.route;

    for (int local = 0; local < route->group.n_local; local++)
        act(&lowlat->bench.mirrors, (unsigned char *)rows + (size_t)(local * lowlat->slots) * bytes,
            (size_t)route->received.recv_per_expert[local] * bytes);
}

static size_t scale_bytes(const struct lowlat *lowlat)
{
    return (size_t)lowlat->bench.request->hidden / EP_SCALE_BLOCK * sizeof(float);
}

static bool fill_returned(struct lowlat *lowlat, int local, int64_t slot, const struct reference_row *row)
{
    const struct data data = verify_data(lowlat->bench.request, false);

    (void)local;
    data_reply(&data, row->k, row->rank, row->token, lowlat->returned + (size_t)slot * (size_t)data.hidden);
    return true;
}

static bool check_row(struct lowlat *lowlat, int local, int64_t slot, const struct reference_row *row)
{
    size_t hidden = (size_t)lowlat->bench.request->hidden;
    size_t scales = hidden / EP_SCALE_BLOCK;
    const unsigned char *got = (const unsigned char *)lowlat->bench.recv_x + (size_t)slot * row_bytes(lowlat);
    const struct data data = verify_data(lowlat->bench.request, false);
    uint16_t plain[EP_MAX_HIDDEN];
    unsigned char quantised[EP_MAX_HIDDEN];
    float factors[EP_MAX_HIDDEN / EP_SCALE_BLOCK];

    (void)local;
    data_row(&data, row->rank, row->token, plain);
    if (!lowlat->is_fp8)
        return memcmp(got, plain, 2 * hidden) == 0;
    ep_quantize_row(plain, (int)hidden, 0, quantised, factors);
    return memcmp(got, quantised, hidden) == 0 &&
           memcmp(lowlat->bench.recv_scales + (size_t)slot * scales, factors, scales * sizeof(float)) == 0;
}

static int check_dispatch(struct lowlat *lowlat)
{
    const struct bench_route *route = &lowlat->bench.route;
    const char *wrong = "";

    each_expert(lowlat, lowlat->bench.recv_x, row_bytes(lowlat), mirrors_pull);
    each_expert(lowlat, lowlat->bench.recv_scales, scale_bytes(lowlat), mirrors_pull);
    mirrors_pull(&lowlat->bench.mirrors, lowlat->recv_count, (size_t)route->group.n_local * sizeof(int32_t));
    if (!each_row(lowlat, check_row))
        wrong = "a received row differs from what was sent";
    else if (memcmp(lowlat->recv_count, route->received.recv_per_expert,
                    (size_t)route->group.n_local * sizeof(int32_t)) != 0)
        wrong = "the counts per expert are wrong";
    return verify_agree(lowlat->bench.ctx, "verifying low-latency dispatch", wrong);
}

static int check_combine(struct lowlat *lowlat)
{
    struct bench_case *bench = &lowlat->bench;

    mirrors_pull(&lowlat->bench.mirrors, lowlat->bench.out,
                 (size_t)bench->route.n_tokens * 2 * (size_t)bench->request->hidden);
    return verify_combine(bench, lowlat->bench.out, true, true, "verifying low-latency combine");
}

static int run_once(struct lowlat *lowlat, ep_status (*run)(void *context), const char *what)
{
    BENCH_TRY(lowlat->bench.ctx, bench_mirrors_status(&lowlat->bench.mirrors), what);
    BENCH_TRY(lowlat->bench.ctx, run(lowlat), what);
    BENCH_TRY(lowlat->bench.ctx, sync_stream(lowlat), what);
    return 0;
}

/* Runs dispatch and combine once with poisoned outputs and verifies everything. */
static int check_both(struct lowlat *lowlat)
{
    const struct bench_route *route = &lowlat->bench.route;
    struct mirrors *mirrors = &lowlat->bench.mirrors;

    each_expert(lowlat, lowlat->bench.recv_x, row_bytes(lowlat), mirrors_poison);
    each_expert(lowlat, lowlat->bench.recv_scales, scale_bytes(lowlat), mirrors_poison);
    mirrors_poison(mirrors, lowlat->recv_count, (size_t)route->group.n_local * sizeof(int32_t));
    mirrors_poison(mirrors, lowlat->bench.out, (size_t)route->n_tokens * 2 * (size_t)lowlat->bench.request->hidden);
    CMD_TRY(run_once(lowlat, run_dispatch, "low-latency dispatch"));
    CMD_TRY(check_dispatch(lowlat));
    CMD_TRY(run_once(lowlat, run_combine, "low-latency combine"));
    return check_combine(lowlat);
}

static int measure(struct lowlat *lowlat, bool is_combine)
{
    struct bench_case *bench = &lowlat->bench;
    struct bench_series series[] = {
        {.what = "low-latency dispatch", .run = run_dispatch, .after = after_dispatch, .context = lowlat},
        {.what = "memcpy", .key = "memcpy", .run = bench_copy, .context = bench},
    };
    struct bench_series combine = {
        .what = "low-latency combine", .prepare = prepare_combine, .run = run_combine, .context = lowlat};
    bool gpu = bench->ctx->gpu, each = is_combine && bench->request->no_partial_reduce;
    struct bench_measurement measurement = {
        .op = is_combine ? "ll-combine" : "ll-dispatch",
        .type = lowlat->is_fp8 && !is_combine ? "fp8" : "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(lowlat->is_fp8 && !is_combine, bench->request->hidden),
        .counts = bench->route.counts,
        .series = series,
        .n_series = gpu || bench->request->baselines ? 2 : 1,
    };

    if (is_combine)
        series[0] = combine;
    if (gpu) {
        series[1] = series[0];
        series[1].key = "queued";
        series[1].queued = true;
    }
    measurement.counts.wire = count_outside(lowlat, 1, each);
    measurement.counts.net_bytes =
        count_outside(lowlat, bench->route.group.ranks_per_node, each) * measurement.row_bytes;
    bench->copy_bytes = (size_t)(measurement.counts.recv * measurement.row_bytes);
    CMD_TRY(bench_rounds(bench->ctx, series, measurement.n_series, bench->request->iters, bench->one_clock));
    CMD_TRY(check_both(lowlat));
    return bench_emit_row(bench, &measurement);
}

static ep_status run_pairs(void *context)
{
    for (int i = 0; i < PAIRS; i++) {
        EP_TRY(run_dispatch(context));
        EP_TRY(run_combine(context));
    }
    return EP_OK;
}

/*
 * Dispatches and combines back to back, as a decoder queues them. The ranks stay synchronised, so that, unlike in
 * single calls, neither the launch nor the skew between the ranks is included. On GPUs.
 */
static int measure_pairs(struct lowlat *lowlat)
{
    struct bench_case *bench = &lowlat->bench;
    struct bench_series pairs = {
        .what = "low-latency pairs", .run = run_pairs, .after = after_pairs, .context = lowlat, .repeats = PAIRS};
    struct bench_measurement measurement = {.op = "ll-pair",
                                            .type = lowlat->is_fp8 ? "fp8" : "bf16",
                                            .tokens = bench->tokens,
                                            .counts = bench->route.counts,
                                            .series = &pairs,
                                            .n_series = 1};

    CMD_TRY(bench_rounds(bench->ctx, &pairs, 1, bench->request->iters, bench->one_clock));
    CMD_TRY(check_both(lowlat));
    return bench_emit_row(bench, &measurement);
}

/* MIRRORS_UNTOUCHED: the layout is larger than the received data by a factor of about L / K. */
static ep_status alloc_buffers(struct lowlat *lowlat)
{
    const struct bench_route *route = &lowlat->bench.route;
    struct mirrors *mirrors = &lowlat->bench.mirrors;
    size_t row = 2 * (size_t)lowlat->bench.request->hidden;
    size_t x_bytes = ((size_t)lowlat->bench.tokens + 1) * row;
    size_t layout = (size_t)route->group.n_local * (size_t)lowlat->slots;
    size_t received = ((size_t)route->counts.recv + 1) * row;

    lowlat->recv_count = mirrors_alloc(mirrors, (size_t)route->group.n_local * sizeof(int32_t), 0);
    lowlat->bench.x = mirrors_alloc(mirrors, x_bytes, 0);
    lowlat->bench.out = mirrors_alloc(mirrors, x_bytes, 0);
    lowlat->bench.recv_x = mirrors_alloc(mirrors, layout * row, MIRRORS_SYMMETRIC | MIRRORS_UNTOUCHED);
    lowlat->bench.recv_scales =
        mirrors_alloc(mirrors, layout * scale_bytes(lowlat), MIRRORS_SYMMETRIC | MIRRORS_UNTOUCHED);
    lowlat->returned = mirrors_alloc(mirrors, layout * row, MIRRORS_SYMMETRIC | MIRRORS_UNTOUCHED);
    bench_mirror_route(mirrors, route);
    if (lowlat->bench.request->baselines && !lowlat->bench.ctx->gpu) {
        lowlat->bench.copy_to = mirrors_alloc(mirrors, received, MIRRORS_SYMMETRIC);
        lowlat->bench.copy_from = mirrors_alloc(mirrors, received, 0);
    }
    return bench_mirrors_status(mirrors);
}

static ep_status open_layout(struct lowlat *lowlat)
{
    const struct bench_request *request = lowlat->bench.request;
    const ep_ll_config config = {
        .size = sizeof(config),
        .max_tokens = request->ll_tokens,
        .hidden = request->hidden,
        .n_experts = request->experts,
        .topk = request->topk,
    };

    EP_TRY(alloc_buffers(lowlat));
    verify_fill_x(&lowlat->bench, false);
    each_row(lowlat, fill_returned);
    each_expert(lowlat, lowlat->returned, 2 * (size_t)request->hidden, mirrors_push);
    EP_TRY(bench_mirrors_status(&lowlat->bench.mirrors));
    return ep_ll_new(lowlat->bench.ctx->comm, &config, &lowlat->ll);
}

static int measure_types(struct lowlat *lowlat)
{
    const struct bench_request *request = lowlat->bench.request;

    for (int fp8 = 0; fp8 < 2; fp8++) {
        if (!(request->types & (fp8 ? BENCH_FP8 : BENCH_BF16)))
            continue;
        lowlat->is_fp8 = fp8;
        CMD_TRY(check_both(lowlat));
        CMD_TRY(measure(lowlat, false));
    }
    /* Combined rows are always bf16; the dispatch before it has the type measured last. */
    CMD_TRY(measure(lowlat, true));
    return lowlat->bench.ctx->gpu ? measure_pairs(lowlat) : 0;
}

int bench_run_lowlat(const struct bench_case *common)
{
    struct lowlat lowlat = {.bench = *common};
    struct bench_case *bench = &lowlat.bench;
    ep_status status;
    int code;

    bench->tokens = bench->request->ll_tokens;
    lowlat.slots = (int64_t)bench->ctx->nranks * bench->tokens;
    CMD_TRY(bench_case_route(bench, 0, true, &bench->route));
    status = open_layout(&lowlat);
    code = status == EP_OK ? measure_types(&lowlat) : ranks_emit_error(bench->ctx, status, "preparing low latency");
    ep_ll_free(lowlat.ll);
    bench_case_done(bench);
    return code;
}
