/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_case.h - one configuration on one rank: shape, routing, buffers. Internal to the benchmark.
 *
 *   job.c      runs the request
 *   case.c     buffers
 *   verify.c   poison, contents, comparison with the oracle
 *   ops.c      dispatch, combine          plans.c   plans and first dispatches
 *   lowlat.c   the low-latency layout     row.c     measurements as JSON
 *   footprint.c  memory of the library    roofline.c  baselines on GPUs
 *   mpirun.c     ranks under MPI, for the baseline naive.c
 */
#ifndef EP_BENCH_BENCH_CASE_H
#define EP_BENCH_BENCH_CASE_H

#include "account.h"
#include "backend/cuda/module.h"
#include "bench.h"
#include "bench_route.h"
#include "cmd/test/check/mirrors.h"
#include "naive.h"
#include "rounds.h"

/* Number of routings that plans are measured with, used round-robin. */
#define BENCH_VARIANTS 4

struct bench_case {
    struct ranks_ctx *ctx;
    const struct bench_request *request;
    int tokens; /* per rank; some routings give some ranks fewer */
    bool one_clock;
    const struct bench_mpi_module *mpi; /* NULL: MPI_Alltoallv is not measured */
    struct bench_route route;
    struct bench_route new_routes[BENCH_VARIANTS]; /* with BENCH_PLAN, else zeroed */
    ep_plan *plan;                                 /* of `route` */

    /*
     * Buffers of this rank, see mirrors.h. x, x_scales, out, out_naive and copy_from: private memory. The others:
     * symmetric memory.
     */
    struct mirrors mirrors;
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
    int64_t capacity_rows;   /* received rows that they hold */
    struct naive naive;      /* with MPI and baselines */
};

/*
 * Creates the routes and the buffers, with all pages touched. `common`: what the cases of a request have in common:
 * ctx, request, one_clock, mpi, and mirrors without buffers. Collective. 0, or an exit code after emitting the error;
 * bench_case_done() is allowed after both.
 */
int bench_case_init(struct bench_case *bench, const struct bench_case *common, int tokens);
void bench_case_done(struct bench_case *bench);

/* The route of this rank by the routing of the case; variants have different seeds. 0, or an exit code after emitting
 * the error. */
int bench_case_route(const struct bench_case *bench, int variant, bool expanded, struct bench_route *ret_route);

/* EP_OK, or the first error of these buffers. */
ep_status bench_mirrors_status(const struct mirrors *mirrors);

/* Adds mirrors of the experts and weights of a route. */
void bench_mirror_route(struct mirrors *mirrors, const struct bench_route *route);

ep_status bench_plan_new(struct bench_case *bench, const struct bench_route *route, ep_plan **ret_plan);
void bench_dispatch_args(const struct bench_case *bench, bool is_fp8, ep_dispatch_args *ret_args);
void bench_combine_args(const struct bench_case *bench, ep_combine_args *ret_args);

/* Adds up the values of all ranks, in place. `bytes`: of an array or a struct of int64_t. Collective. */
ep_status bench_sum(struct ranks_ctx *ctx, void *values, size_t bytes);

/* Whether baselines that need their own buffers are measured. */
static inline bool bench_has_baselines(const struct bench_case *bench)
{
    return bench->request->baselines && (bench->request->ops & (BENCH_DISPATCH | BENCH_COMBINE));
}

static inline bool bench_has_mpi(const struct bench_case *bench)
{
    return bench->mpi && bench_has_baselines(bench);
}

/* --- verify.c: collective; an error on one rank is returned on all ranks --- */

void verify_fill_x(struct bench_case *bench, bool is_fp8);
void verify_poison_received(struct bench_case *bench, const struct bench_route *route);
int verify_dispatch(struct bench_case *bench, const struct bench_route *route, bool is_fp8);
void verify_fill_returned(struct bench_case *bench);
/* Verifies the sums of the rows of verify_fill_returned(), or of rows with keys of PATTERN_LL_RETURN. `one_node`: added
 * in the order of the ranks, whatever their nodes. */
int verify_combine(struct bench_case *bench, const uint16_t *out, bool one_node, bool low_latency, const char *what);
/* Compares the results of MPI_Alltoallv with those of the library, which have been verified. */
int verify_naive_dispatch(struct bench_case *bench, bool is_fp8);

/* Collective. If `wrong` is not "" on some rank, emits its text and returns CMD_FAILED on all ranks, else 0. */
int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong);

/* --- row.c --- */

/* Phases of an operation by ep_comm_get_stats(): sums over the rounds of this rank. */
struct bench_phases {
    int64_t ready, move, done, copy, total;
    int64_t net_bytes, n;
};

void bench_phases_add(struct bench_phases *phases, const ep_comm *comm);

struct bench_measurement {
    const char *op;   /* "dispatch", "combine", "plan", "first-dispatch", "ll-dispatch", "ll-combine", "ll-pair" */
    const char *type; /* "bf16", "fp8" */
    int tokens;
    int64_t row_bytes; /* 0: no rates */
    struct bench_counts counts;
    const struct bench_phases *phases; /* NULL: none */
    /*
     * The first is measured. Keys of baselines: "memcpy", "alltoallv", "cached"; on GPUs "queued" (the same after other
     * work), "bare" (raw rows), "engine_pair", "engine_all"; between nodes "puts" (raw), "sockets" (plain).
     */
    const struct bench_series *series;
    int n_series;
    double pair_bytes; /* of a sample of engine_pair */
    double net_bytes;  /* of one rank in a sample of puts or sockets */
    double n_puts;     /* of one operation of this rank */
};

/* Sums over the ranks; rank 0 emits the row. Collective. */
int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement);

/* --- roofline.c: upper bounds of the GPUs of this machine --- */

struct bench_roofline {
    struct bench_case *bench;
    void *peers[EP_CUDA_GPUS]; /* copy_to of each rank, mapped into this rank */
    int64_t at[EP_CUDA_GPUS];  /* index of this rank's first row in it */
    size_t row_bytes;
    size_t pair_bytes;
};

/* The ranks are of one node. Collective. 0 or an exit code. */
int bench_roofline_init(struct bench_roofline *roofline, struct bench_case *bench);
/* Copies by the copy engine: from rank 0 to rank 1, and the bytes of all rows from all to all. */
ep_status bench_engine_pair(void *roofline);
ep_status bench_engine_all(void *roofline);

/* --- measurements, called by job.c: 0, or an exit code --- */

int bench_run_ops(struct bench_case *bench);
int bench_run_plans(struct bench_case *bench);
int bench_run_lowlat(const struct bench_case *common);
int bench_run_footprint(struct bench_case *bench);

#endif
