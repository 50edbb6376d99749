/* SPDX-License-Identifier: Apache-2.0 */
/* ops.c - dispatch and combine on a plan, beside memcpy and MPI_Alltoallv. */
#include "bench/case.h"

#include "bench/pattern.h"

#include <string.h>

struct op {
    struct bench_case *bench;
    bool is_fp8;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    struct bench_phases phases;
    size_t copy_bytes; /* the row bytes that this rank receives */
};

static ep_status run_dispatch(void *context)
{
    struct op *op = context;

    return ep_dispatch(op->bench->plan, &op->dispatch, NULL);
}

static ep_status run_combine(void *context)
{
    struct op *op = context;

    return ep_combine(op->bench->plan, &op->combine, NULL);
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

static ep_status run_byhand_dispatch(void *context)
{
    struct op *op = context;

    return byhand_dispatch(&op->bench->hand, op->bench->x, op->bench->x_scales, op->is_fp8);
}

static ep_status run_byhand_combine(void *context)
{
    struct op *op = context;

    return byhand_combine(&op->bench->hand, op->bench->recv_x, op->bench->out_byhand);
}

/*
 * A rank that is done must not sleep in our barrier while MPI still has something of it to deliver: it goes on only
 * when all are done.
 */
static ep_status after_byhand(void *context, int round)
{
    struct ranks_ctx *ctx = ((struct op *)context)->bench->ctx;

    (void)round;
    return ctx->mpi->barrier(ctx->mpi_boot);
}

static int run_checked(struct op *op, ep_status (*run)(void *), const char *what)
{
    ep_status status = run(op);

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
    int code;

    memset(bench->out, PATTERN_POISON, (size_t)bench->route.n_tokens * 2 * (size_t)bench->request->hidden);
    code = run_checked(op, run_combine, "combine");
    return code ? code : verify_combine(bench, bench->out, bench->ranks_per_node, "verifying combine");
}

/* After the rounds; the receiving buffers hold what the last turn left. */
static int check_byhand(struct op *op, bool is_combine)
{
    struct bench_case *bench = op->bench;

    if (!bench_has_mpi(bench))
        return 0;
    /* It knows no nodes: one row after the other, by rank. */
    if (is_combine)
        return verify_combine(bench, bench->out_byhand, bench->ctx->nranks, "verifying MPI_Alltoallv");
    return verify_byhand_dispatch(bench, op->is_fp8);
}

static int measure(struct op *op, bool is_combine)
{
    struct bench_case *bench = op->bench;
    struct bench_turn turns[BENCH_MAX_TURNS] = {
        [TURN_OURS] = {.what = is_combine ? "combine" : "dispatch",
                       .run = is_combine ? run_combine : run_dispatch,
                       .after = after_ours,
                       .context = op},
        [TURN_COPY] = {.what = "memcpy", .run = run_copy, .context = op},
        [TURN_BYHAND] = {.what = "MPI_Alltoallv",
                         .run = is_combine ? run_byhand_combine : run_byhand_dispatch,
                         .after = after_byhand,
                         .context = op},
    };
    int n_turns = bench_has_mpi(bench) ? 3 : bench_has_yardsticks(bench) ? 2 : 1;
    struct bench_measurement measurement = {
        .op = is_combine ? "combine" : "dispatch",
        .type = op->is_fp8 ? "fp8" : "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(op->is_fp8, bench->request->hidden),
        .counts = bench->route.counts,
        .phases = &op->phases,
        .ours = &turns[TURN_OURS],
        .copy = n_turns > 1 ? &turns[TURN_COPY] : NULL,
        .byhand = n_turns > 2 ? &turns[TURN_BYHAND] : NULL,
    };
    int code;

    op->copy_bytes = (size_t)(bench->route.n_recv * measurement.row_bytes);
    memset(&op->phases, 0, sizeof(op->phases));
    code = is_combine ? check_combine(op) : check_dispatch(op);
    if (code == 0)
        code = bench_rounds(bench->ctx, turns, n_turns, bench->request->iters, bench->one_clock);
    if (code == 0)
        code = is_combine ? check_combine(op) : check_dispatch(op);
    if (code == 0)
        code = check_byhand(op, is_combine);
    return code ? code : bench_emit_row(bench, &measurement);
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
                    .x = bench->recv_x,
                    .dtype = EP_BF16,
                    .hidden = bench->request->hidden,
                    .out = bench->out},
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
