/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_case.h - internals of the benchmark on the ranks.
 *
 *   bench_case.c  the request; buffers and routes of one configuration; memory of the library; MPI
 *   bench_ops.c   dispatch, combine, plans, and their baselines      lowlat.c  the low-latency layout
 *   bench_verify.c  contents, comparison with the reference          naive.c   MPI's all-to-all
 *   rounds.c      rounds, statistics, rates, and measurements as JSON
 *   engine_calls.c      operations as engines call them
 */
#ifndef EP_BENCH_BENCH_CASE_H
#define EP_BENCH_BENCH_CASE_H

#include "backend/cuda/module.h"
#include "bench.h"
#include "cmd/bench/mpi/module.h"
#include "cmd/test/check/data.h"
#include "cmd/test/check/mirrors.h"
#include "cmd/test/check/reference.h"

/* Emits the error of a call that has failed, and returns its exit code from the function. */
#define BENCH_TRY(ctx, call, what)                                                                                     \
    do {                                                                                                               \
        ep_status failed_ = (call);                                                                                    \
        if (failed_ != EP_OK)                                                                                          \
            return ranks_emit_error(ctx, failed_, what);                                                               \
    } while (0)

/*
 * --- rounds.c: accounting of rows and bytes; pure functions ---
 *
 * All rates are GB/s (10^9 bytes) of one rank: the mean over the ranks.
 *   logical   rows received, including the rank's own, times the bytes of a row with its scales: as printed by DeepEP
 *   wire      rows sent to other ranks only. In a low-latency combine the host backend reads all rows at the token's
 *             rank and sums there; it is counted as if partial sums were sent, for comparison with GPU backends
 *   printed   between nodes, as printed by DeepEP: each token once per distinct destination node, including its own
 *   net       between nodes: bytes actually put on the network; low latency: of rows alone
 */

/* Rows of one rank, or summed over ranks. */
struct bench_counts {
    int64_t recv; /* rows received, own included; low latency: one per (token, expert) */
    int64_t
        wire;    /* rows sent to other ranks: one per (token, rank); EP_LL_NO_PARTIAL_REDUCE: one per (token, expert) */
    int64_t net; /* (token, other node) pairs */
    int64_t own_node;  /* tokens that go to their own node */
    int64_t net_bytes; /* put on the network */
};

struct bench_rates {
    double logical, wire, printed, net;
};

/* Bytes of a row with its f32 scales. */
int64_t bench_row_bytes(int is_fp8, int hidden);

void bench_counts_add(struct bench_counts *sum, const struct bench_counts *rank);

/* `sum` over n_ranks ranks; all rates are 0 if `seconds` is. */
struct bench_rates bench_rates_of(const struct bench_counts *sum, int n_ranks, int64_t row_bytes, double seconds);

/* --- rounds.c: statistics of a series of measurements; pure functions --- */

struct bench_summary {
    size_t n;
    double median, p10, p90, min, max;
};

/*
 * Quantile q (0..1) of n >= 1 ascending values, linear between the two nearest ones (definition 7 of Hyndman and Fan,
 * the default of numpy and R).
 */
double bench_quantile(const double *sorted, size_t n, double q);

/* Sorts `values`. With n 0 all results are 0. */
void bench_summarise(double *values, size_t n, struct bench_summary *ret_summary);

/* A sample of one rank. */
struct bench_span {
    uint64_t begin_ns, end_ns;
};

/*
 * Seconds of a sample of the group. With one clock: from the first rank's begin to the last rank's end, so that ranks
 * that share a CPU are not timed as if each had its own. Without: the longest span.
 */
double bench_window(const struct bench_span *spans, int n_ranks, int one_clock);

/* Number of rounds of `seconds` each that take `fill_seconds`, limited to least..most. */
int bench_rounds_for(double seconds, double fill_seconds, int least, int most);

/*
 * --- rounds.c: several series in rounds, with one sample of each series per round, on all ranks ---
 *
 * On GPUs the time of a sample is between two events in the stream, around everything that it queues; the slowest rank
 * counts.
 */

#define BENCH_WARM_UP 2
#define BENCH_MAX_SERIES 6

struct bench_series {
    const char *what; /* for error texts: "dispatch" */
    const char *key;  /* of a baseline in the row of the measurement: "memcpy"; NULL: what is measured */
    /* Before the barrier, not timed; may be NULL. `round` is -2 and -1 in the warm-up. */
    ep_status (*prepare)(void *context, int round);
    ep_status (*run)(void *context);              /* timed */
    ep_status (*finish)(void *context);           /* waits for what run started; on GPUs not timed; may be NULL */
    ep_status (*after)(void *context, int round); /* not timed; may be NULL */
    void *context;
    int repeats;     /* operations of one run(), back to back; the time is divided by it; 0: one */
    int most_rounds; /* of series[0]; 0: 1000 */
    bool queued; /* on GPUs: after other work, which flushes the cache and hides the launch; else on an idle device */

    struct bench_summary summary; /* seconds of the group */
};

/*
 * Runs the rounds: series[0] is measured, the others are baselines. Collective. `iters` 0: as many rounds as take
 * series[0] 0.3 s, at least 5, at most `most_rounds`. Returns 0, or an exit code after emitting the error.
 */
int bench_rounds(struct ranks_ctx *ctx, struct bench_series *series, int n_series, int iters, bool one_clock);

/* Whether all ranks run on one host and share its clock. Collective. */
ep_status bench_one_clock(struct ranks_ctx *ctx, bool *ret_one);

/*
 * --- bench_case.c: rows that a routing sends from and to a rank ---
 *
 * Computed by the reference and without the library: to verify results, and for the offsets of the naive baseline.
 */

struct bench_route {
    struct reference_group group; /* the selections of all ranks */
    struct reference_counts sent;
    struct reference_layout received;
    int rank, n_tokens; /* of this rank */
    int32_t *experts;   /* [N,K] of its tokens */
    float *weights;     /* [N,K] */
    struct bench_counts counts;
};

/* `expanded`: the received rows by expert, as in the low-latency layout. */
void bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int n_nodes, bool expanded);

/* Accepts a zeroed route. */
void bench_route_done(struct bench_route *route);

/*
 * --- naive.c: baseline with MPI's all-to-all (MPI_Ialltoallv, which has a deadline) ---
 *
 * Counts are known, rows are packed by destination and arrive in (source rank, token) order, and a rank's own rows are
 * copied directly. The sum shares no code with the library.
 */

/* out = rows[0] + rows[1] + ...: bf16 rows of `count` elements, a multiple of 8, fp32 in that order, rounded to nearest
 * even once. */
void naive_sum(uint16_t *out, const uint16_t *const *rows, int n_rows, int count);

struct naive {
    const struct bench_mpi_module *mpi;
    const struct bench_route *route;
    int hidden, timeout_ms;
    bool busy;          /* an exchange has failed: MPI may access the buffers until the process ends */
    size_t scale_bytes; /* of a row; 0 in bf16 */
    /* Rows by rank; the own rank's are not counted. */
    int send_counts[EP_MAX_RANKS], send_offsets[EP_MAX_RANKS], recv_counts[EP_MAX_RANKS], recv_offsets[EP_MAX_RANKS];
    unsigned char *packed, *packed_meta; /* [n_send]: rows; records of scales, experts, weights */
    unsigned char *recv_meta;

    /* Results. */
    unsigned char *recv_rows; /* [n_recv] */
    float *recv_scales;
    int32_t *recv_experts; /* [n_recv,K] */
    float *recv_weights;
};

/* Adds buffers for rows of either type to the mirrors, on whose ranks it runs. */
void naive_init(struct naive *naive, const struct bench_mpi_module *mpi, struct mirrors *mirrors,
                const struct bench_route *route, int hidden);

/* Bytes that naive_init() allocates for these numbers of rows. */
uint64_t naive_bytes(int64_t n_send, int64_t n_recv, int hidden, int topk);

/* x [N,H] bf16, or fp8 with scales [N,H/128]. */
ep_status naive_dispatch(struct naive *naive, const void *x, const float *scales, bool is_fp8);

/* x [n_recv,H] bf16; out [N,H]. */
ep_status naive_combine(struct naive *naive, const uint16_t *x, uint16_t *out);

/* --- bench_case.c: one configuration on one rank --- */

/* Number of routings that plans are measured with, used round-robin. */
#define BENCH_VARIANTS 4

struct bench_case {
    struct ranks_ctx *ctx;
    const struct bench_request *request;
    int tokens; /* per rank; some routings give some ranks fewer */
    bool one_clock;
    const struct bench_mpi_module *mpi; /* NULL: MPI_Alltoallv is not measured */
    struct bench_route route;
    struct bench_route new_routes[BENCH_VARIANTS]; /* with BENCH_PLAN or BENCH_ENGINE, else zeroed */
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
    size_t copy_bytes; /* of the rows that this rank receives, for bench_copy() */
    void *recv_x;      /* [n_recv,H]: output of the dispatch, input of the combine */
    float *recv_scales;
    int32_t *recv_experts; /* [n_recv,K] */
    float *recv_weights;
    int64_t capacity_rows; /* received rows that they hold */
    struct naive naive;    /* with MPI and baselines */
};

/* Frees the routes and the buffers. */
void bench_case_done(struct bench_case *bench);

/* The route of this rank by the routing of the case; variants have different seeds. 0, or an exit code after emitting
 * the error. */
int bench_case_route(const struct bench_case *bench, int variant, bool expanded, struct bench_route *ret_route);

/* EP_OK, or the first error of these buffers. */
ep_status bench_mirrors_status(const struct mirrors *mirrors);

/* The baseline memcpy: a bench_series.run for a case. */
ep_status bench_copy(void *context);

/* Adds mirrors of the experts and weights of a route. */
void bench_mirror_route(struct mirrors *mirrors, const struct bench_route *route);

/* `flags`, `max_recv_tokens`: as in ep_plan_args. */
ep_status bench_plan_new(struct bench_case *bench, const struct bench_route *route, unsigned flags,
                         int64_t max_recv_tokens, ep_plan **ret_plan);
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

/* --- bench_verify.c: collective; an error on one rank is returned on all ranks --- */

/* Outputs are filled with this byte before a verified operation: NaN in bf16, fp8 and f32, index -1. */
#define VERIFY_POISON 0xff

/* The rows of tokens and the replies to them, which any rank can compute. */
struct data verify_data(const struct bench_request *request, bool is_fp8);

void verify_fill_x(struct bench_case *bench, bool is_fp8);
void verify_poison_received(struct bench_case *bench, const struct bench_route *route);
int verify_dispatch(struct bench_case *bench, const struct bench_route *route, bool is_fp8);
void verify_fill_returned(struct bench_case *bench);
/* Verifies the sums of the replies of ranks, or of experts in the low-latency layout. `one_node`: added in the order of
 * the ranks, whatever their nodes. */
int verify_combine(struct bench_case *bench, const uint16_t *out, bool one_node, bool low_latency, const char *what);
/* Compares the results of MPI_Alltoallv with those of the library, which have been verified. */
int verify_naive_dispatch(struct bench_case *bench, bool is_fp8);

/* Collective. If `wrong` is not "" on some rank, emits its text and returns CMD_FAILED on all ranks, else 0. */
int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong);

/* --- rounds.c: measurements as JSON --- */

/* Phases of an operation by ep_comm_get_stats(): sums over the rounds of this rank. */
struct bench_phases {
    int64_t ready, move, done, copy, total;
    int64_t net_bytes, n;
};

void bench_phases_add(struct bench_phases *phases, const ep_comm *comm);

struct bench_measurement {
    const char *op;   /* "dispatch", "combine", "plan", "first-dispatch", "ll-dispatch", "ll-combine", "ll-pair",
                         "call-dispatch", "call-combine", "layer" */
    const char *type; /* "bf16", "fp8" */
    /* As engines call it: "symmetric", "ordinary"; "rank", "expanded"; "cached", "update", "plan". Else NULL. */
    const char *memory, *layout, *routing;
    int tokens;
    int64_t row_bytes; /* 0: no rates */
    struct bench_counts counts;
    const struct bench_phases *phases; /* NULL: none */
    /*
     * The first is measured. Keys of baselines: "memcpy", "alltoallv", "cached"; on GPUs "queued" (the same after other
     * work), "bare" (raw rows), "engine_pair", "engine_all".
     */
    const struct bench_series *series;
    int n_series;
    double pair_bytes; /* of a sample of engine_pair */
};

/* Sums over the ranks; rank 0 emits the row. Collective. */
int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement);

/* --- measurements: 0, or an exit code --- */

int bench_run_ops(struct bench_case *bench);
int bench_run_plans(struct bench_case *bench);
int bench_run_engine(struct bench_case *bench);
int bench_run_lowlat(const struct bench_case *common);

#endif
