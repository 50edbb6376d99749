/* SPDX-License-Identifier: Apache-2.0 */
/*
 * twins.h - the buffers of the benchmark. They are filled and verified in host memory; on GPUs each has a twin in
 * device memory, which is what the library is given. On the host backend a buffer is its own twin, and nothing is
 * copied.
 *
 * The first failure is kept: what is done after it does nothing, and twins_status() tells.
 */
#ifndef EP_BENCH_TWINS_H
#define EP_BENCH_TWINS_H

#include "ranks/ranks.h"

#include <stdbool.h>

#define TWINS_MAX 24

struct bench_twins {
    struct ranks_ctx *ctx;
    ep_status status;
    int n;
    struct bench_twin {
        void *host, *place;
        bool own_host, symmetric;
    } at[TWINS_MAX];
};

enum {
    TWINS_SYMMETRIC = 1u << 0, /* from ep_alloc: collective */
    TWINS_UNTOUCHED = 1u << 1  /* pages that are never written do not exist */
};

/* A buffer, zeroed so that every page exists before anything is timed. NULL after a failure. */
void *twins_take(struct bench_twins *twins, size_t bytes, unsigned flags);
/* A twin for an array of the caller's, which outlives it. */
void twins_mirror(struct bench_twins *twins, void *host, size_t bytes);
/* Where the library finds it. */
void *twins_place(const struct bench_twins *twins, const void *host);
/* The first `bytes` of a buffer, or of a part of one: to the twin, and back. */
void twins_push(struct bench_twins *twins, const void *host, size_t bytes);
void twins_pull(struct bench_twins *twins, void *host, size_t bytes);
/* Frees all. Collective where some are symmetric. */
void twins_drop(struct bench_twins *twins);

static inline ep_status twins_status(const struct bench_twins *twins)
{
    return twins->status;
}

#endif
