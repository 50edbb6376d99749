/* SPDX-License-Identifier: Apache-2.0 */
/* bench_ops.c - dispatch and combine with a plan, and plans, with their baselines. */
#include "bench_case.h"

#include "base/error.h"

/*
 * --- upper bounds by the copy engines of the GPUs ---
 *
 * Copies between one pair, and all-to-all copies with the bytes that the measured operation moves from each rank to
 * each rank, including itself.
 */

struct roofline {
    struct bench_case *bench;
    void *peers[EP_CUDA_GPUS]; /* copy_to of each rank, mapped into this rank */
    int64_t at[EP_CUDA_GPUS];  /* index of this rank's first row in it */
    size_t row_bytes;
    size_t pair_bytes;
};

/* Published by each rank: its buffer, and where each source's rows begin in it. */
struct peer_buffer {
    struct ep_cuda_address address;
    int64_t capacity_bytes;
    int64_t start[EP_CUDA_GPUS];
};

/* Maps the buffers of all ranks and finds the offsets of this rank's rows in them. */
static ep_status exchange_buffers(struct roofline *roofline)
{
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;
    void *buffer = mirrors_address(&bench->mirrors, bench->copy_to);
    struct peer_buffer mine = {.capacity_bytes = bench->capacity_rows * 2 * bench->request->hidden};
    struct peer_buffer all[EP_CUDA_GPUS];

    for (int rank = 0; rank < ctx->nranks; rank++)
        mine.start[rank] = bench->route.received.recv_from_rank[rank];
    EP_TRY(ctx->gpu->get_address(ctx->comm, buffer, (size_t)mine.capacity_bytes, &mine.address));
    EP_TRY(ep_comm_allgather(ctx->comm, &mine, sizeof(mine), all));
    for (int rank = 0; rank < ctx->nranks; rank++) {
        EP_TRY(ctx->gpu->map_address(ctx->comm, rank, &all[rank].address, &roofline->peers[rank]));
        roofline->at[rank] = all[rank].start[ctx->rank];
        if (rank == 0 || (size_t)all[rank].capacity_bytes < roofline->pair_bytes)
            roofline->pair_bytes = (size_t)all[rank].capacity_bytes;
    }
    return EP_OK;
}

/* The ranks are of one node. Collective. 0 or an exit code. */
static int roofline_init(struct roofline *roofline, struct bench_case *bench)
{
    *roofline = (struct roofline){.bench = bench};
    BENCH_TRY(bench->ctx, exchange_buffers(roofline), "preparing the roofline");
    return 0;
}

static ep_status engine_pair(void *context)
{
    struct roofline *roofline = context;
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;

    /* Rank 0 to rank 1; with one rank, within its own memory. */
    if (ctx->rank != 0)
        return EP_OK;
    EP_TRY(ctx->gpu->engine_copy(ctx->comm, 0, roofline->peers[ctx->nranks > 1],
                                 mirrors_address(&bench->mirrors, bench->copy_from), roofline->pair_bytes));
    return ctx->gpu->engine_join(ctx->comm);
}

static ep_status engine_all(void *context)
{
    struct roofline *roofline = context;
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;
    const char *from = mirrors_address(&bench->mirrors, bench->copy_from);

    /* Each rank begins with the next rank, so that no rank receives from all others at once. */
    for (int i = 1; i <= ctx->nranks; i++) {
        int rank = (ctx->rank + i) % ctx->nranks;
        size_t rows = (size_t)bench->route.sent.tokens_per_rank[rank];

        EP_TRY(ctx->gpu->engine_copy(ctx->comm, i % EP_CUDA_COPY_STREAMS,
                                     (char *)roofline->peers[rank] + (size_t)roofline->at[rank] * roofline->row_bytes,
                                     from, rows * roofline->row_bytes));
    }
    return ctx->gpu->engine_join(ctx->comm);
}

/* --- dispatch and combine --- */

struct op {
    struct bench_case *bench;
    bool is_combine, is_fp8;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    struct bench_phases phases;
    struct roofline roofline;
    struct bench_series series[BENCH_MAX_SERIES];
    int n_series;
};

static ep_status run_op(void *context)
{
    struct op *op = context;
    ep_plan *plan = op->bench->plan;

    /* On GPUs it is only queued, and its time taken in the stream. */
    if (op->bench->ctx->gpu)
        return op->is_combine ? ep_combine(plan, &op->combine, NULL) : ep_dispatch(plan, &op->dispatch, NULL);
    return op->is_combine ? ep_combine_sync(plan, &op->combine) : ep_dispatch_sync(plan, &op->dispatch);
}

static ep_status finish_op(void *context)
{
    struct op *op = context;

    return ep_stream_sync(op->bench->ctx->comm, NULL);
}

static ep_status run_raw(void *context)
{
    struct op *op = context;
    struct ranks_ctx *ctx = op->bench->ctx;

    return ctx->gpu->repeat_bare(ctx->comm, op->is_combine);
}

static ep_status after_op(void *context, int round)
{
    struct op *op = context;

    if (round >= 0)
        bench_phases_add(&op->phases, op->bench->ctx->comm);
    return EP_OK;
}

static ep_status run_naive(void *context)
{
    struct op *op = context;
    struct bench_case *bench = op->bench;

    return op->is_combine ? naive_combine(&bench->naive, bench->recv_x, bench->out_naive)
                          : naive_dispatch(&bench->naive, bench->x, bench->x_scales, op->is_fp8);
}

/*
 * A rank that is done must not sleep in the library's barrier while MPI still has to deliver its data: waits in MPI
 * until all ranks are done.
 */
static ep_status after_naive(void *context, int round)
{
    struct bench_case *bench = ((struct op *)context)->bench;

    (void)round;
    return bench->mpi->barrier(bench->ctx->spec->timeout_ms);
}

/* Runs the operation once with poisoned outputs and verifies everything. */
static int check_op(struct op *op)
{
    struct bench_case *bench = op->bench;
    size_t out_bytes = (size_t)bench->route.n_tokens * 2 * (size_t)bench->request->hidden;
    const char *what = op->is_combine ? "combine" : "dispatch";

    if (op->is_combine)
        mirrors_poison(&bench->mirrors, bench->out, out_bytes);
    else
        verify_poison_received(bench, &bench->route);
    BENCH_TRY(bench->ctx, bench_mirrors_status(&bench->mirrors), what);
    BENCH_TRY(bench->ctx, run_op(op), what);
    BENCH_TRY(bench->ctx, finish_op(op), what);
    if (!op->is_combine)
        return verify_dispatch(bench, &bench->route, op->is_fp8);
    mirrors_pull(&bench->mirrors, bench->out, out_bytes);
    return verify_combine(bench, bench->out, false, false, "verifying combine");
}

/* After the rounds: the receive buffers hold the results of the last sample. */
static int check_naive(struct op *op)
{
    struct bench_case *bench = op->bench;

    if (!bench_has_mpi(bench))
        return 0;
    if (op->is_combine)
        return verify_combine(bench, bench->out_naive, true, false, "verifying MPI_Alltoallv");
    return verify_naive_dispatch(bench, op->is_fp8);
}

/* Only on one node: between nodes there are other kernels, and the copy engine cannot reach other nodes. */
static bool has_roofline(const struct bench_case *bench)
{
    return bench->ctx->gpu && bench_has_baselines(bench) && bench->ctx->nnodes < 2;
}

static struct bench_series *add_series(struct op *op, const char *what, const char *key, ep_status (*run)(void *),
                                       void *context)
{
    struct bench_series *series = &op->series[op->n_series++];

    *series = (struct bench_series){.what = what, .key = key, .run = run, .context = context};
    return series;
}

static void add_host_series(struct op *op)
{
    if (bench_has_baselines(op->bench))
        add_series(op, "memcpy", "memcpy", bench_copy, op->bench);
    if (bench_has_mpi(op->bench))
        add_series(op, "MPI_Alltoallv", "alltoallv", run_naive, op)->after = after_naive;
}

/* The operation queued after other work; its raw rows, without plan and waits; the copy engine. */
static void add_gpu_series(struct op *op)
{
    op->series[op->n_series++] = op->series[0];
    op->series[1].key = "queued";
    if (has_roofline(op->bench)) {
        add_series(op, "raw rows", "bare", run_raw, op);
        add_series(op, "copy engine, one pair", "engine_pair", engine_pair, &op->roofline);
        add_series(op, "copy engine, all to all", "engine_all", engine_all, &op->roofline);
    }
    for (int i = 1; i < op->n_series; i++)
        op->series[i].queued = true;
}

static int measure(struct op *op)
{
    struct bench_case *bench = op->bench;
    bool gpu = bench->ctx->gpu;
    struct bench_measurement measurement = {
        .op = op->is_combine ? "combine" : "dispatch",
        .type = op->is_fp8 ? "fp8" : "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(op->is_fp8, bench->request->hidden),
        .counts = bench->route.counts,
        .phases = &op->phases,
        .series = op->series,
    };
    struct bench_series *first;

    if (has_roofline(bench))
        CMD_TRY(roofline_init(&op->roofline, bench));
    op->roofline.row_bytes = (size_t)measurement.row_bytes;
    bench->copy_bytes = (size_t)(bench->route.counts.recv * measurement.row_bytes);
    CMD_TRY(check_op(op));
    first = add_series(op, measurement.op, NULL, run_op, op);
    first->finish = finish_op;
    first->after = after_op;
    (gpu ? add_gpu_series : add_host_series)(op);
    CMD_TRY(bench_rounds(bench->ctx, op->series, op->n_series, bench->request->iters, bench->one_clock));
    CMD_TRY(check_op(op));
    CMD_TRY(check_naive(op));
    measurement.n_series = op->n_series;
    measurement.pair_bytes = (double)op->roofline.pair_bytes;
    return bench_emit_row(bench, &measurement);
}

static int measure_dispatch(struct bench_case *bench, bool is_fp8)
{
    struct op op = {.bench = bench, .is_fp8 = is_fp8};

    verify_fill_x(bench, is_fp8);
    bench_dispatch_args(bench, is_fp8, &op.dispatch);
    return measure(&op);
}

static int measure_combine(struct bench_case *bench)
{
    struct op op = {.bench = bench, .is_combine = true};

    verify_fill_returned(bench);
    bench_combine_args(bench, &op.combine);
    return measure(&op);
}

int bench_run_ops(struct bench_case *bench)
{
    const struct bench_request *request = bench->request;

    if ((request->ops & BENCH_DISPATCH) && (request->types & BENCH_BF16))
        CMD_TRY(measure_dispatch(bench, false));
    if ((request->ops & BENCH_DISPATCH) && (request->types & BENCH_FP8))
        CMD_TRY(measure_dispatch(bench, true));
    return request->ops & BENCH_COMBINE ? measure_combine(bench) : 0;
}

/* --- cost of a new routing: its plan, and its first dispatch compared with that of an existing plan --- */

struct plans {
    struct bench_case *bench;
    const struct bench_route *route; /* of the next plan */
    ep_dispatch_args dispatch;
    ep_plan *plan;
};

static void choose_route(struct plans *plans, const struct bench_route *route)
{
    plans->route = route;
    plans->dispatch.topk_weights = mirrors_address(&plans->bench->mirrors, route->weights);
}

/* Each sample has another routing than the one before. */
static ep_status prepare_new(void *context, int round)
{
    struct plans *plans = context;

    choose_route(plans, &plans->bench->new_routes[(round + BENCH_WARM_UP) % BENCH_VARIANTS]);
    return EP_OK;
}

static ep_status run_plan(void *context)
{
    struct plans *plans = context;

    return bench_plan_new(plans->bench, plans->route, 0, 0, &plans->plan);
}

static ep_status run_first(void *context)
{
    struct plans *plans = context;

    EP_TRY(run_plan(plans));
    return ep_dispatch_sync(plans->plan, &plans->dispatch);
}

static ep_status after_new(void *context, int round)
{
    struct plans *plans = context;

    (void)round;
    ep_plan_free(plans->plan);
    plans->plan = NULL;
    return EP_OK;
}

static ep_status run_cached(void *context)
{
    struct plans *plans = context;
    ep_dispatch_args args = plans->dispatch;

    args.topk_weights = mirrors_address(&plans->bench->mirrors, plans->bench->route.weights);
    return ep_dispatch_sync(plans->bench->plan, &args);
}

static int check_first(struct plans *plans, const struct bench_route *route)
{
    struct bench_case *bench = plans->bench;

    choose_route(plans, route);
    verify_poison_received(bench, route);
    BENCH_TRY(bench->ctx, run_first(plans), "first dispatch");
    after_new(plans, 0);
    return verify_dispatch(bench, route, false);
}

/* The mean of the routings, which are used equally often. */
static struct bench_counts mean_counts(const struct bench_case *bench)
{
    struct bench_counts mean = {0};

    for (int v = 0; v < BENCH_VARIANTS; v++)
        bench_counts_add(&mean, &bench->new_routes[v].counts);
    mean.recv /= BENCH_VARIANTS;
    mean.wire /= BENCH_VARIANTS;
    mean.net /= BENCH_VARIANTS;
    mean.own_node /= BENCH_VARIANTS;
    return mean;
}

static int measure_plans(struct plans *plans)
{
    struct bench_case *bench = plans->bench;
    struct bench_series series[] = {
        {.what = "first dispatch", .prepare = prepare_new, .run = run_first, .after = after_new, .context = plans},
        {.what = "dispatch", .key = "cached", .run = run_cached, .context = plans},
        {.what = "plan", .prepare = prepare_new, .run = run_plan, .after = after_new, .context = plans},
    };
    struct bench_measurement first = {
        .op = "first-dispatch",
        .type = "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(0, bench->request->hidden),
        .counts = mean_counts(bench),
        .series = series,
        .n_series = 2,
    };
    struct bench_measurement plan = {.op = "plan",
                                     .type = "",
                                     .tokens = bench->tokens,
                                     .counts = mean_counts(bench),
                                     .series = &series[2],
                                     .n_series = 1};

    for (int v = 0; v < BENCH_VARIANTS; v++)
        CMD_TRY(check_first(plans, &bench->new_routes[v]));
    CMD_TRY(bench_rounds(bench->ctx, series, 3, bench->request->iters, bench->one_clock));
    CMD_TRY(check_first(plans, &bench->new_routes[0]));
    CMD_TRY(bench_emit_row(bench, &plan));
    return bench_emit_row(bench, &first);
}

int bench_run_plans(struct bench_case *bench)
{
    struct plans plans = {.bench = bench};
    int code;

    verify_fill_x(bench, false);
    bench_dispatch_args(bench, false, &plans.dispatch);
    code = measure_plans(&plans);
    ep_plan_free(plans.plan);
    return code;
}
