/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mirrors.h - the buffers of the benchmark. They are filled and verified in host memory; on GPUs each has a mirror in
 * device memory, which is passed to the library. On the host backend a buffer is its own mirror, and nothing is copied.
 *
 * Errors are sticky: after the first one all calls do nothing, and mirrors_status() returns it.
 */
#ifndef EP_BENCH_MIRRORS_H
#define EP_BENCH_MIRRORS_H

#include "ranks/ranks.h"

#include <stdbool.h>

#define MIRRORS_MAX 24

struct bench_mirrors {
    struct ranks_ctx *ctx;
    ep_status status;
    int n;
    struct bench_mirror {
        void *host, *address;
        bool own_host, symmetric;
    } at[MIRRORS_MAX];
};

enum {
    MIRRORS_SYMMETRIC = 1u << 0, /* from ep_alloc: collective */
    MIRRORS_UNTOUCHED = 1u << 1  /* not zeroed: pages are allocated when they are first written */
};

/* A buffer, zeroed so that all pages are allocated before anything is timed. NULL after an error. */
void *mirrors_alloc(struct bench_mirrors *mirrors, size_t bytes, unsigned flags);
/* Adds a mirror of an array of the caller, which must outlive it. */
void mirrors_add(struct bench_mirrors *mirrors, void *host, size_t bytes);
/* The address to pass to the library. */
void *mirrors_address(const struct bench_mirrors *mirrors, const void *host);
/* Copies `bytes` of a buffer, or of a part of one, to the mirror, and back. */
void mirrors_push(struct bench_mirrors *mirrors, void *host, size_t bytes);
void mirrors_pull(struct bench_mirrors *mirrors, void *host, size_t bytes);
/* Fills buffer and mirror with PATTERN_POISON. */
void mirrors_poison(struct bench_mirrors *mirrors, void *host, size_t bytes);
/* Frees all. Collective if some are symmetric. */
void mirrors_free(struct bench_mirrors *mirrors);

static inline ep_status mirrors_status(const struct bench_mirrors *mirrors)
{
    return mirrors->status;
}

#endif
