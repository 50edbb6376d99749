/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench.h - measures dispatch and combine, and baselines, on every rank of a group.
 *
 * Launcher: fill in a request, call bench_collect(), print the rows. Ranks: bench_job(), a row of ranks_jobs[]; its
 * parameters are the request as JSON.
 *
 * Method: in each round the operation and its baselines run once, in rotating order, so that noise of the machine
 * affects all of them. Each sample starts with a barrier; its time is from the first rank's start to the last rank's
 * end. Buffers are touched and results verified before the rounds; results are verified again after them.
 */
#ifndef EP_BENCH_BENCH_H
#define EP_BENCH_BENCH_H

#include "cmd/test/check/routings.h"
#include "common/cmd.h"
#include "common/output.h"
#include "common/ranks/ranks.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#define BENCH_JOB "bench"
#define BENCH_MAX_TOKEN_COUNTS 32
#define BENCH_MAX_ITERS 100000

/* What to measure. */
enum {
    BENCH_DISPATCH = 1u << 0, /* with an existing plan */
    BENCH_COMBINE = 1u << 1,
    BENCH_PLAN = 1u << 2,   /* creation of a plan, and the first dispatch of a new routing, including its plan */
    BENCH_LL = 1u << 3,     /* low-latency dispatch and combine */
    BENCH_ENGINE = 1u << 4, /* as engines call them; not one of BENCH_ALL */
    BENCH_ALL = BENCH_DISPATCH | BENCH_COMBINE | BENCH_PLAN | BENCH_LL
};

/* Element types of the dispatched rows. Combined rows are always bf16. */
enum {
    BENCH_BF16 = 1u << 0,
    BENCH_FP8 = 1u << 1 /* with one f32 scale for each 128 elements */
};

struct bench_request {
    unsigned ops;   /* BENCH_DISPATCH ... */
    unsigned types; /* BENCH_BF16 ... */
    enum routing_kind routing;
    uint64_t seed;
    int n_token_counts;
    int tokens[BENCH_MAX_TOKEN_COUNTS]; /* per rank; each is measured */
    int ll_tokens;                      /* per rank, low latency */
    int hidden, topk, experts;
    int iters;      /* rounds of each measurement; 0: as many as make a stable figure, at least 5 */
    bool baselines; /* memcpy, and MPI_Alltoallv where the ranks run under MPI; on GPUs the copy engine and raw rows */
    int sms;        /* multiprocessors of an operation on GPUs; 0: the backend's default */
    bool no_partial_reduce; /* low latency: EP_LL_NO_PARTIAL_REDUCE */
};

/* DeepSeek-V3's shape: hidden 7168, top-8 of 256 experts, uniform, bf16, 512 tokens (low latency 128), all of
 * BENCH_ALL. */
#define BENCH_REQUEST_INIT                                                                                             \
    {                                                                                                                  \
        .ops = BENCH_ALL, .types = BENCH_BF16, .routing = ROUTING_UNIFORM, .seed = 1, .n_token_counts = 1,             \
        .tokens = {512}, .ll_tokens = 128, .hidden = 7168, .topk = 8, .experts = 256, .baselines = true                \
    }

/*
 * Runs the request on the ranks of `spec`. If it returns 0, *results is a new reference if it was NULL, else the rows
 * and memory of these ranks have been appended to it:
 *   "device"   "host", or the name of the GPU
 *   "sms"      multiprocessors of an operation, on GPUs
 *   "mpi"      version text of the MPI that the ranks run under, or null
 *   "rows"     array of measurements, see cmd/bench/schema.json
 *   "memory"   array: memory of the library in addition to the caller's buffers, for each token count
 * Otherwise an exit code of the command, after reporting the reason.
 */
int bench_collect(const struct ranks_spec *spec, const struct bench_request *request, json_t **results);

/* Checks whether the request can run on n_ranks ranks. NULL, or a phrase for a usage error, in `buffer`. */
const char *bench_check(const struct bench_request *request, int n_ranks, char *buffer, size_t buffer_bytes);

/* Total bytes of memory of the request on n_ranks ranks of one host. */
uint64_t bench_bytes(const struct bench_request *request, int n_ranks, bool under_mpi);

/*
 * The main baseline of a row: memcpy of the same bytes on the host, all-to-all copies by the copy engine on GPUs.
 * `key`: its object in the row; vs_<key>: the ratio. `kind`: " queued" where both figures of the ratio are of queued
 * operations, as on GPUs, else "".
 */
struct bench_baseline {
    const char *key, *name, *kind;
};
struct bench_baseline bench_baseline_of(const json_t *row);

/* The measured figures of that ratio: logical GB/s, and microseconds. */
double bench_rate_of(const json_t *row);
double bench_time_of(const json_t *row);

/* That ratio, or NULL. Borrowed. */
const json_t *bench_ratio_of(const json_t *row);

/* The row with the most ranks, tokens and bytes of a row, in this order; of `op` if it is not NULL. NULL: none. */
const json_t *bench_largest(const json_t *rows, const char *op);

/* Provenance of a record: {"commit", "compiler", "build_type", "date" in UTC}. A new reference. */
json_t *bench_provenance(void);

/* The parameters of a request, for a result, and with "bits" for the ranks. A new reference. */
json_t *bench_request_to_json(const struct bench_request *request);

/* Parses the output of bench_request_to_json(). 0, or -1 if it is malformed. */
int bench_request_from_json(const json_t *json, struct bench_request *ret_request);

/* Runs the request on a rank. */
int bench_job(struct ranks_ctx *ctx, const json_t *parameters);

/* --- render.c: measurements as text and HTML --- */

/* `rows` of bench_collect(). 0, or -1 after reporting a write error. */
int bench_print_rows(FILE *stream, const json_t *rows, const char *device, enum out_format format);

/* "8 ranks: dispatch runs at 0.92 of memcpy and 3.4 times MPI_Alltoallv, ...": of the largest group and token count. */
void bench_verdict(const json_t *rows, char *ret_text, size_t bytes);

/* The lines below the table: memory, cost of a new routing. */
void bench_print_notes(const json_t *rows, const json_t *memory);

#endif
