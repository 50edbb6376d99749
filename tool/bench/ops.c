/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c - dispatch and combine on a plan, beside memcpy and MPI_Alltoallv; on GPUs beside their roofline. */
#include "bench/case.h"

#include "backend/cuda/module.h"
#include "bench/pattern.h"
#include "net/probe.h"

#include <stdlib.h>
#include <string.h>

struct op {
    struct bench_case *bench;
    bool is_fp8;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    struct bench_phases phases;
    struct bench_roofline roofline;
    struct ep_net_probe *probe; /* between nodes, with baselines */
    double probe_bytes;         /* of one rank in a turn of it */
    double puts;                /* of one operation */
    size_t copy_bytes;          /* the row bytes that this rank receives */
};

static ep_status run_dispatch(void *context)
{
    struct op *op = context;

    /* On GPUs it is only queued, and its time taken in the stream. */
    return op->bench->ctx->gpu ? ep_dispatch(op->bench->plan, &op->dispatch, NULL)
                               : ep_dispatch_sync(op->bench->plan, &op->dispatch);
}

static ep_status run_combine(void *context)
{
    struct op *op = context;

    /* On GPUs it is only queued, and its time taken in the stream. */
    return op->bench->ctx->gpu ? ep_combine(op->bench->plan, &op->combine, NULL)
                               : ep_combine_sync(op->bench->plan, &op->combine);
}

static ep_status finish_ours(void *context)
{
    struct op *op = context;

    return ep_stream_sync(op->bench->ctx->comm, NULL);
}

static ep_status run_bare_dispatch(void *context)
{
    struct ranks_ctx *ctx = ((struct op *)context)->bench->ctx;

    return ctx->gpu->repeat_bare(ctx->comm, 0);
}

static ep_status run_bare_combine(void *context)
{
    struct ranks_ctx *ctx = ((struct op *)context)->bench->ctx;

    return ctx->gpu->repeat_bare(ctx->comm, 1);
}

static ep_status after_ours(void *context, int round)
{
    struct op *op = context;

    if (round >= 0)
        bench_phases_add(&op->phases, op->bench->ctx->comm);
    return EP_OK;
}

static ep_status run_copy(void *context)
{
    struct op *op = context;

    memcpy(op->bench->copy_to, op->bench->copy_from, op->copy_bytes);
    return EP_OK;
}

static ep_status run_naive_dispatch(void *context)
{
    struct op *op = context;

    return naive_dispatch(&op->bench->naive, op->bench->x, op->bench->x_scales, op->is_fp8);
}

static ep_status run_naive_combine(void *context)
{
    struct op *op = context;

    return naive_combine(&op->bench->naive, op->bench->recv_x, op->bench->out_naive);
}

static ep_status run_puts(void *context)
{
    return ep_net_probe_puts(((struct op *)context)->probe);
}

static ep_status run_sockets(void *context)
{
    return ep_net_probe_sockets(((struct op *)context)->probe);
}

/*
 * A rank that is done must not sleep in our barrier while MPI still has something of it to deliver: it goes on only
 * when all are done.
 */
static ep_status after_naive(void *context, int round)
{
    struct ranks_ctx *ctx = ((struct op *)context)->bench->ctx;

    (void)round;
    return ctx->mpi->barrier(ctx->mpi_boot);
}

static int run_checked(struct op *op, ep_status (*run)(void *), const char *what)
{
    ep_status status = mirrors_status(&op->bench->mirrors);
    uint64_t puts = ep_net_probe_count(op->bench->ctx->comm);

    if (status == EP_OK)
        status = run(op);
    if (status == EP_OK)
        status = finish_ours(op);
    op->puts = (double)(ep_net_probe_count(op->bench->ctx->comm) - puts);
    return status == EP_OK ? 0 : ranks_emit_error(op->bench->ctx, status, what);
}

/* The operation once, into poisoned outputs, everything compared. */
static int check_dispatch(struct op *op)
{
    struct bench_case *bench = op->bench;
    int code;

    verify_poison_received(bench, &bench->route);
    code = run_checked(op, run_dispatch, "dispatch");
    return code ? code : verify_dispatch(bench, bench->routing, &bench->route, op->is_fp8);
}

static int check_combine(struct op *op)
{
    struct bench_case *bench = op->bench;
    size_t bytes = (size_t)bench->route.n_tokens * 2 * (size_t)bench->request->hidden;
    int code;

    mirrors_poison(&bench->mirrors, bench->out, bytes);
    code = run_checked(op, run_combine, "combine");
    mirrors_pull(&bench->mirrors, bench->out, bytes);
    return code ? code : verify_combine(bench, bench->out, bench->ranks_per_node, false, "verifying combine");
}

/* After the rounds; the receiving buffers hold what the last turn left. */
static int check_naive(struct op *op, bool is_combine)
{
    struct bench_case *bench = op->bench;

    if (!bench_has_mpi(bench))
        return 0;
    /* It knows no nodes: one row after the other, by rank. */
    if (is_combine)
        return verify_combine(bench, bench->out_naive, bench->ctx->nranks, false, "verifying MPI_Alltoallv");
    return verify_naive_dispatch(bench, op->is_fp8);
}

/* As many bytes to each rail peer as the operation that was last made has sent on the mean. Collective. */
static int probe_init(struct op *op)
{
    struct ranks_ctx *ctx = op->bench->ctx;
    ep_stats stats = {.size = sizeof(stats)};
    uint64_t mine, *all = calloc((size_t)ctx->nranks, sizeof(*all)), sum = 0;
    ep_status status = all ? ep_comm_get_stats(ctx->comm, &stats) : EP_E_MEMORY;

    mine = stats.bytes_net;
    if (status == EP_OK)
        status = ep_comm_allgather(ctx->comm, &mine, sizeof(mine), all);
    for (int rank = 0; status == EP_OK && rank < ctx->nranks; rank++)
        sum += all[rank];
    free(all);
    op->probe_bytes = 0;
    if (status == EP_OK && sum > 0) {
        size_t each = (size_t)(sum / (uint64_t)(ctx->nranks * (ctx->nnodes - 1))) + 1;

        op->probe_bytes = (double)each * (ctx->nnodes - 1);
        status = ep_net_probe_new(ctx->comm, each, &op->probe);
    }
    return status == EP_OK ? 0 : ranks_emit_error(ctx, status, "preparing the probe of the network");
}

/* The network by itself, and plain sockets with the same streams and chunks; behind the other turns. */
static void net_turns(struct op *op, int *n_turns, struct bench_turn *turns, struct bench_measurement *measurement)
{
    if (!op->probe)
        return;
    turns[*n_turns] = (struct bench_turn){.what = "bare puts", .run = run_puts, .context = op};
    measurement->puts = &turns[(*n_turns)++];
    measurement->net_bytes = op->probe_bytes;
    measurement->n_puts = op->puts;
    if (!ep_net_probe_has_sockets(op->probe))
        return;
    turns[*n_turns] = (struct bench_turn){.what = "plain sockets", .run = run_sockets, .context = op};
    measurement->sockets = &turns[(*n_turns)++];
}

static void host_turns(struct op *op, bool is_combine, struct bench_turn *turns, struct bench_measurement *measurement)
{
    struct bench_case *bench = op->bench;

    turns[TURN_COPY] = (struct bench_turn){.what = "memcpy", .run = run_copy, .context = op};
    turns[TURN_NAIVE] = (struct bench_turn){.what = "MPI_Alltoallv",
                                            .run = is_combine ? run_naive_combine : run_naive_dispatch,
                                            .after = after_naive,
                                            .context = op};
    measurement->copy = bench_has_baselines(bench) ? &turns[TURN_COPY] : NULL;
    measurement->naive = bench_has_mpi(bench) ? &turns[TURN_NAIVE] : NULL;
}

/* Baselines of GPUs that reach each other: between nodes other kernels run, and no copy engine goes there. */
static bool has_roofline(const struct bench_case *bench)
{
    return bench->ctx->gpu && bench_has_baselines(bench) && bench->ctx->nnodes < 2;
}

/* The operation once more behind other work; the same rows without waits; the copy engine. */
static void gpu_turns(struct op *op, bool is_combine, struct bench_turn *turns, struct bench_measurement *measurement)
{
    turns[TURN_QUEUED] = turns[TURN_OURS];
    turns[TURN_QUEUED].queued = true;
    turns[TURN_BARE] = (struct bench_turn){
        .what = "bare rows", .run = is_combine ? run_bare_combine : run_bare_dispatch, .queued = true, .context = op};
    turns[TURN_ENGINE_PAIR] = (struct bench_turn){
        .what = "copy engine, one pair", .run = bench_engine_pair, .queued = true, .context = &op->roofline};
    turns[TURN_ENGINE_ALL] = (struct bench_turn){
        .what = "copy engine, all to all", .run = bench_engine_all, .queued = true, .context = &op->roofline};
    measurement->queued = &turns[TURN_QUEUED];
    if (!has_roofline(op->bench))
        return;
    measurement->bare = &turns[TURN_BARE];
    measurement->engine_pair = &turns[TURN_ENGINE_PAIR];
    measurement->engine_all = &turns[TURN_ENGINE_ALL];
    measurement->pair_bytes = (double)op->roofline.pair_bytes;
}

static int measure(struct op *op, bool is_combine)
{
    struct bench_case *bench = op->bench;
    bool gpu = bench->ctx->gpu;
    struct bench_turn turns[BENCH_MAX_TURNS] = {
        [TURN_OURS] = {.what = is_combine ? "combine" : "dispatch",
                       .run = is_combine ? run_combine : run_dispatch,
                       .finish = finish_ours,
                       .after = after_ours,
                       .context = op},
    };
    int n_turns = gpu ? (has_roofline(bench) ? 5 : 2) : bench_has_mpi(bench) ? 3 : bench_has_baselines(bench) ? 2 : 1;
    struct bench_measurement measurement = {
        .op = is_combine ? "combine" : "dispatch",
        .type = op->is_fp8 ? "fp8" : "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(op->is_fp8, bench->request->hidden),
        .counts = bench->route.counts,
        .phases = &op->phases,
        .ours = &turns[TURN_OURS],
    };
    int code = has_roofline(bench) ? bench_roofline_init(&op->roofline, bench) : 0;

    op->roofline.row_bytes = (size_t)measurement.row_bytes;
    (gpu ? gpu_turns : host_turns)(op, is_combine, turns, &measurement);
    op->copy_bytes = (size_t)(bench->route.n_recv * measurement.row_bytes);
    memset(&op->phases, 0, sizeof(op->phases));
    if (code == 0)
        code = is_combine ? check_combine(op) : check_dispatch(op);
    if (code == 0 && !gpu && bench_has_baselines(bench) && bench->ctx->nnodes > 1)
        code = probe_init(op);
    net_turns(op, &n_turns, turns, &measurement);
    if (code == 0)
        code = bench_rounds(bench->ctx, turns, n_turns, bench->request->iters, bench->one_clock);
    if (code == 0)
        code = is_combine ? check_combine(op) : check_dispatch(op);
    if (code == 0)
        code = check_naive(op, is_combine);
    if (code == 0)
        code = bench_emit_row(bench, &measurement);
    bench_roofline_done(&op->roofline);
    ep_net_probe_free(op->probe);
    op->probe = NULL;
    return code;
}

static int measure_dispatch(struct bench_case *bench, bool is_fp8)
{
    struct op op = {.bench = bench, .is_fp8 = is_fp8};

    verify_fill_x(bench, is_fp8);
    bench_dispatch_args(bench, is_fp8, &op.dispatch);
    return measure(&op, false);
}

static int measure_combine(struct bench_case *bench)
{
    struct op op = {
        .bench = bench,
        .combine = {.size = sizeof(ep_combine_args),
                    .x = mirrors_address(&bench->mirrors, bench->recv_x),
                    .dtype = EP_BF16,
                    .hidden = bench->request->hidden,
                    .out = mirrors_address(&bench->mirrors, bench->out)},
    };

    verify_fill_returned(bench);
    return measure(&op, true);
}

int bench_run_ops(struct bench_case *bench)
{
    const struct bench_request *request = bench->request;
    int code = 0;

    if ((request->ops & BENCH_DISPATCH) && (request->types & BENCH_BF16))
        code = measure_dispatch(bench, false);
    if (code == 0 && (request->ops & BENCH_DISPATCH) && (request->types & BENCH_FP8))
        code = measure_dispatch(bench, true);
    if (code == 0 && (request->ops & BENCH_COMBINE))
        code = measure_combine(bench);
    return code;
}
