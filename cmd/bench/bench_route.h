/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bench_route.h - rows that a routing sends from and to a rank, computed by the reference (check/reference.h) and
 * without the library: to verify results, and for the offsets of the naive baseline.
 */
#ifndef EP_BENCH_BENCH_ROUTE_H
#define EP_BENCH_BENCH_ROUTE_H

#include "account.h"
#include "cmd/test/check/reference.h"

struct bench_route {
    struct reference_group group; /* the selections of all ranks */
    struct reference_counts sent;
    struct reference_layout received;
    int rank, n_tokens; /* of this rank */
    int32_t *experts;   /* [N,K] of its tokens */
    float *weights;     /* [N,K] */
    struct bench_counts counts;
};

/* `expanded`: the received rows by expert, as in the low-latency layout. False if out of memory. */
bool bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int n_nodes, bool expanded);

/* Accepts a zeroed route. */
void bench_route_done(struct bench_route *route);

#endif
