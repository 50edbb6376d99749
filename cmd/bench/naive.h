/* SPDX-License-Identifier: Apache-2.0 */
/*
 * naive.h - naive baseline: dispatch and combine with MPI's all-to-all (MPI_Ialltoallv, which has a deadline). Counts
 * are known, rows are packed by destination and arrive in (source rank, token) order, and a rank's own rows are copied
 * directly.
 */
#ifndef EP_BENCH_NAIVE_H
#define EP_BENCH_NAIVE_H

#include "bench_route.h"
#include "cmd/bench/mpi/module.h"
#include "cmd/test/check/mirrors.h"
#include "reduce.h"

#include <stdbool.h>

struct naive {
    const struct bench_mpi_module *mpi;
    const struct bench_route *route;
    bench_reduce_fn reduce;
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

#endif
