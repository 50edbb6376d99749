/* SPDX-License-Identifier: Apache-2.0 */
/*
 * route.h - rows that a routing sends from and to a rank, computed without the library: to verify results, and for the
 * offsets of the naive baseline.
 */
#ifndef EP_BENCH_ROUTE_H
#define EP_BENCH_ROUTE_H

#include "bench/account.h"
#include "check/routing.h"

#include <stdint.h>

struct bench_route {
    int rank, n_ranks, ranks_per_node;
    int n_tokens, topk, n_experts, n_local_experts;
    int32_t *experts; /* [N,K] of this rank's tokens */
    float *weights;   /* [N,K] */

    /* Rows received, by (source, token): recv_token[recv_start[s] .. recv_start[s+1]]. */
    int32_t *recv_start; /* [R+1] */
    int32_t *recv_token;

    /* Rows sent, by (destination, token). */
    int32_t *send_start; /* [R+1] */
    int32_t *send_token;

    /* Indices of a token's rows in send_token, in rank order: part[part_start[t] .. part_start[t+1]]. */
    int32_t *part_start; /* [N+1] */
    int32_t *part;

    int64_t n_recv, n_send;
    struct bench_counts counts;
};

/* 0, or -1 if out of memory (or with more than 2^31 rows). */
int bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int ranks_per_node);

/* Accepts a zeroed route. */
void bench_route_done(struct bench_route *route);

/*
 * The top-k sent with a row to rank `holder`: local expert numbers and their weights; -1 and 0 for experts of other
 * ranks. [K] each.
 */
void bench_route_meta(const struct bench_route *route, const int32_t *experts, const float *weights, int holder,
                      int32_t *ret_experts, float *ret_weights);

#endif
