/* SPDX-License-Identifier: Apache-2.0 */
/*
 * case.h - one configuration on one rank: shape, routing, buffers. Inside of the benchmark.
 *
 *   job.c      goes through the request
 *   case.c     buffers
 *   verify.c   poison, contents, comparison with the oracle
 *   ops.c      dispatch, combine          plans.c   plans and first dispatches
 *   lowlat.c   the low-latency layout     row.c     measurements as JSON
 *   footprint.c  memory of the library    mirrors.c  buffers    roofline.c  baselines on GPUs
 */
#ifndef EP_BENCH_CASE_H
#define EP_BENCH_CASE_H

#include "bench/account.h"
#include "bench/bench.h"
#include "bench/mirrors.h"
#include "bench/naive.h"
#include "bench/rounds.h"
#include "bench/route.h"

struct bench_case {
    struct ranks_ctx *ctx;
    const struct bench_request *request;
    int tokens; /* of this rank and every other, unless the routing says otherwise */
    int ranks_per_node;
    bool one_clock;
    struct routing *routing;
    struct bench_route route;
    ep_plan *plan;

    /*
     * Of one rank, as mirrors.h says. Private memory: x, x_scales, out, out_naive, copy_from. From ep_alloc: the
     * others.
     */
    struct bench_mirrors mirrors;
    void *x;         /* [N,H] bf16 or fp8 */
    float *x_scales; /* [N,H/128] */
    uint16_t *out;   /* [N,H] of the combine */
    uint16_t *out_naive;
    void *copy_from; /* [n_recv,H] */
    void *copy_to;
    void *recv_x; /* [n_recv,H]: output of the dispatch, input of the combine */
    float *recv_scales;
    int32_t *recv_experts; /* [n_recv,K] */
    float *recv_weights;
    int64_t symmetric_bytes; /* of the buffers above */
    int64_t room_rows;       /* received rows that they hold */
    struct naive naive;      /* with MPI and baselines */
};

/*
 * Makes routing and buffers, all touched. `least_rows`: room for at least so many received rows. Collective. 0, or an
 * exit code after a failure that has been emitted; bench_case_done() is always allowed.
 */
int bench_case_init(struct bench_case *bench, struct ranks_ctx *ctx, const struct bench_request *request, int tokens,
                    int64_t least_rows);
void bench_case_done(struct bench_case *bench);

/* The routing of a request, and what follows from it for this rank; variants differ in their seed. 0, or an exit code
 * after a failure that has been emitted. */
int bench_routing_new(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int variant,
                      int ranks_per_node, struct routing **ret_routing, struct bench_route *ret_route);

/* Mirrors of what a routing gives to the library: experts and weights. */
void bench_mirror_route(struct bench_mirrors *mirrors, const struct bench_route *route);

/* `mirrors`: where those of the route are. */
ep_status bench_plan_new(struct bench_case *bench, const struct bench_mirrors *mirrors, const struct bench_route *route,
                         ep_plan **ret_plan);
void bench_dispatch_args(const struct bench_case *bench, bool is_fp8, ep_dispatch_args *ret_args);

/* Baselines that need buffers of their own. */
static inline bool bench_has_baselines(const struct bench_case *bench)
{
    return bench->request->baselines && (bench->request->ops & (BENCH_DISPATCH | BENCH_COMBINE));
}

static inline bool bench_has_mpi(const struct bench_case *bench)
{
    return bench->ctx->mpi && !bench->ctx->memory && bench_has_baselines(bench);
}

/* --- verify.c: all of these are collective, and fail on every rank when they fail on one --- */

void verify_fill_x(struct bench_case *bench, bool is_fp8);
void verify_poison_received(struct bench_case *bench, const struct bench_route *route);
int verify_dispatch(struct bench_case *bench, const struct routing *routing, const struct bench_route *route,
                    bool is_fp8);
void verify_fill_returned(struct bench_case *bench);
/* Sums of what verify_fill_returned() has filled in, or of rows with keys of PATTERN_LL_RETURN. `ranks_per_node`: of
 * the order of addition. */
int verify_combine(struct bench_case *bench, const uint16_t *out, int ranks_per_node, bool low_latency,
                   const char *what);
/* Results of MPI_Alltoallv against those of the library, which have been verified. */
int verify_naive_dispatch(struct bench_case *bench, bool is_fp8);

/* All ranks fail when one has found something wrong; emits that rank's text. 0 or CMD_FAILED on all of them. */
int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong);

/* --- row.c --- */

/* Where the time of an operation went, by ep_comm_get_stats(): sums over rounds of this rank. */
struct bench_phases {
    uint64_t ready, move, done, copy, total;
    uint64_t net_bytes, n;
};

enum { TURN_OURS = 0, TURN_COPY, TURN_NAIVE };
enum { TURN_QUEUED = 1, TURN_BARE, TURN_ENGINE_PAIR, TURN_ENGINE_ALL }; /* on GPUs, after TURN_OURS */

void bench_phases_add(struct bench_phases *phases, const ep_comm *comm);

struct bench_measurement {
    const char *op;   /* "dispatch", "combine", "plan", "first-dispatch", "ll-dispatch", "ll-combine", "ll-pair" */
    const char *type; /* "bf16", "fp8" */
    int tokens;
    int64_t row_bytes; /* 0: nothing that has a rate */
    struct bench_counts counts;
    const struct bench_phases *phases;                                 /* NULL: none */
    const struct bench_turn *ours, *copy, *naive, *cached;             /* NULL: not measured */
    const struct bench_turn *queued, *bare, *engine_pair, *engine_all; /* on GPUs */
    double pair_bytes;                                                 /* of a turn of engine_pair */
    const struct bench_turn *puts, *sockets; /* between nodes: the network by itself, plain sockets; NULL */
    double net_bytes;                        /* of one rank in a turn of these */
    double n_puts;                           /* of one operation of this rank */
};

/* Adds up over the ranks; rank 0 emits the row. Collective. */
int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement);

/* --- roofline.c: what the GPUs of this machine give at best --- */

struct bench_roofline {
    struct bench_case *bench;
    void **peers; /* [R] their copy_to, as mapped here */
    int64_t *at;  /* [R] where the rows of this rank begin there, in rows */
    size_t row_bytes;
    size_t pair_bytes;
};

/* Collective. 0 or an exit code; bench_roofline_done() is always allowed. */
int bench_roofline_init(struct bench_roofline *roofline, struct bench_case *bench);
void bench_roofline_done(struct bench_roofline *roofline);
/* Turns: the copy engine, one pair in one direction, and as many bytes from all to all as the rows have. */
ep_status bench_engine_pair(void *roofline);
ep_status bench_engine_all(void *roofline);

/* --- what job.c goes through: 0, or an exit code --- */

int bench_run_ops(struct bench_case *bench);
int bench_run_plans(struct bench_case *bench);
int bench_run_lowlat(struct ranks_ctx *ctx, const struct bench_request *request, bool one_clock);
int bench_run_footprint(struct bench_case *bench);

#endif
