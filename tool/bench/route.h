/* SPDX-License-Identifier: Apache-2.0 */
/*
 * route.h - which rows a routing sends where, worked out without the library: what results are verified against, and
 * the offsets that an engineer with MPI alone would compute by hand.
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

    /* Where a token's rows are among those sent, in rank order: part[part_start[t] .. part_start[t+1]]. */
    int32_t *part_start; /* [N+1] */
    int32_t *part;

    int64_t n_recv, n_send;
    struct bench_counts counts;
};

/* 0, or -1 without memory (or with more than 2^31 rows). */
int bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int ranks_per_node);

/* A zeroed route is fine. */
void bench_route_done(struct bench_route *route);

/*
 * What a row for rank `holder` carries of its token's top-k: local expert numbers and their weights, -1 and 0 where the
 * expert is another rank's. [K] each.
 */
void bench_route_meta(const struct bench_route *route, const int32_t *experts, const float *weights, int holder,
                      int32_t *ret_experts, float *ret_weights);

#endif
