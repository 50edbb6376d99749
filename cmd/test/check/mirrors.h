/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mirrors.h - the buffers of a job, which are filled and verified in host memory; on GPUs each has a mirror in device
 * memory, which is passed to the library. On the host backend a buffer is its own mirror, and nothing is copied.
 *
 * Errors are sticky: after the first one, which `status` and `call` keep, all calls do nothing.
 */
#ifndef EP_TEST_CHECK_MIRRORS_H
#define EP_TEST_CHECK_MIRRORS_H

#include "common/ranks/ranks.h"

#include <stdbool.h>

#define MIRRORS_MAX 32

struct mirrors {
    struct ranks_ctx *ctx;
    int poison; /* byte that mirrors_poison() writes */
    ep_status status;
    const char *call; /* which one failed: "ep_alloc" */
    size_t missing;   /* bytes that aligned_alloc() did not have */
    int n;
    struct mirror {
        void *host, *address;
        size_t bytes;
        bool own_host, symmetric;
    } at[MIRRORS_MAX];
};

enum {
    MIRRORS_SYMMETRIC = 1u << 0, /* from ep_alloc: collective */
    MIRRORS_UNTOUCHED = 1u << 1  /* not zeroed: pages are allocated when they are first written */
};

/* A buffer, zeroed so that all pages are allocated before anything is timed. NULL after an error. */
void *mirrors_alloc(struct mirrors *mirrors, size_t bytes, unsigned flags);
/* Adds a mirror of an array of the caller, which must outlive it. */
void mirrors_add(struct mirrors *mirrors, void *host, size_t bytes);
/* The address to pass to the library. */
void *mirrors_address(const struct mirrors *mirrors, const void *host);
/* Copies `bytes` of a buffer, or of a part of one, to the mirror or to other device memory, and back. */
void mirrors_push(struct mirrors *mirrors, void *host, size_t bytes);
void mirrors_push_to(struct mirrors *mirrors, void *to, const void *host, size_t bytes);
void mirrors_pull(struct mirrors *mirrors, void *host, size_t bytes);
/* Fills buffer and mirror with the poison. */
void mirrors_poison(struct mirrors *mirrors, void *host, size_t bytes);
/* Records an error unless there is one. */
void mirrors_fail(struct mirrors *mirrors, ep_status status, const char *call);
/* Frees all, and returns the status of ep_free(). Collective if some are symmetric. */
ep_status mirrors_free(struct mirrors *mirrors);

#endif
