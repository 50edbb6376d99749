/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/mirrors.h"

#include "base/error.h"
#include "bench/pattern.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

static void fail(struct bench_mirrors *mirrors, ep_status status)
{
    if (mirrors->status == EP_OK)
        mirrors->status = status;
}

static struct bench_mirror *add(struct bench_mirrors *mirrors)
{
    if (mirrors->n == MIRRORS_MAX) {
        fail(mirrors, ep_fail(EP_E_STATE, "benchmark: more than %d buffers", MIRRORS_MAX));
        return NULL;
    }
    return &mirrors->at[mirrors->n++];
}

void *mirrors_alloc(struct bench_mirrors *mirrors, size_t bytes, unsigned flags)
{
    size_t whole = (bytes / PAGE + 1) * PAGE;
    struct ranks_ctx *ctx = mirrors->ctx;
    struct bench_mirror *mirror = mirrors->status == EP_OK ? add(mirrors) : NULL;
    bool symmetric = flags & MIRRORS_SYMMETRIC;
    ep_status status = EP_OK;

    if (!mirror)
        return NULL;
    *mirror = (struct bench_mirror){.symmetric = symmetric};
    if (!symmetric || ctx->memory) {
        mirror->host = aligned_alloc(PAGE, whole);
        mirror->own_host = true;
        if (!mirror->host)
            status = ep_fail(EP_E_MEMORY, "benchmark: no memory for a buffer of %zu bytes", whole);
    }
    mirror->address = mirror->host;
    if (status == EP_OK && symmetric)
        status = ep_alloc(ctx->comm, whole, &mirror->address);
    else if (status == EP_OK && ctx->memory)
        status = ctx->memory->alloc(ctx, whole, &mirror->address);
    if (status != EP_OK) {
        free(mirror->host);
        mirrors->n--;
        fail(mirrors, status);
        return NULL;
    }
    if (!mirror->host)
        mirror->host = mirror->address;
    if (!(flags & MIRRORS_UNTOUCHED))
        memset(mirror->host, 0, whole);
    return mirror->host;
}

void mirrors_add(struct bench_mirrors *mirrors, void *host, size_t bytes)
{
    struct ranks_ctx *ctx = mirrors->ctx;
    struct bench_mirror *mirror;
    ep_status status;
    void *address;

    if (!ctx->memory || mirrors->status != EP_OK)
        return;
    status = ctx->memory->alloc(ctx, bytes + 1, &address);
    mirror = status == EP_OK ? add(mirrors) : NULL;
    if (!mirror) {
        fail(mirrors, status);
        return;
    }
    *mirror = (struct bench_mirror){.host = host, .address = address};
    mirrors_push(mirrors, host, bytes);
}

/* The mirror of the buffer that begins at `host`. */
static const struct bench_mirror *find(const struct bench_mirrors *mirrors, const void *host)
{
    for (int i = 0; i < mirrors->n; i++)
        if (mirrors->at[i].host == host)
            return &mirrors->at[i];
    return NULL;
}

void *mirrors_address(const struct bench_mirrors *mirrors, const void *host)
{
    const struct bench_mirror *mirror = host ? find(mirrors, host) : NULL;

    return mirror ? mirror->address : (void *)(uintptr_t)host;
}

static void copy(struct bench_mirrors *mirrors, void *host, size_t bytes, bool to_mirror)
{
    const struct bench_mirror *mirror = NULL;
    struct ranks_ctx *ctx = mirrors->ctx;
    void *there;
    uintptr_t at = (uintptr_t)host;

    if (!ctx->memory || mirrors->status != EP_OK || !bytes)
        return;
    /* `host` may be within a buffer: the last one that begins at or before it. */
    for (int i = 0; i < mirrors->n; i++)
        if ((uintptr_t)mirrors->at[i].host <= at && (!mirror || mirrors->at[i].host > mirror->host))
            mirror = &mirrors->at[i];
    if (!mirror) {
        fail(mirrors, ep_fail(EP_E_STATE, "benchmark: a buffer has no mirror"));
        return;
    }
    there = (char *)mirror->address + (at - (uintptr_t)mirror->host);
    fail(mirrors, ctx->memory->copy(ctx, to_mirror ? there : host, to_mirror ? host : there, bytes));
}

void mirrors_push(struct bench_mirrors *mirrors, void *host, size_t bytes)
{
    copy(mirrors, host, bytes, true);
}

void mirrors_pull(struct bench_mirrors *mirrors, void *host, size_t bytes)
{
    copy(mirrors, host, bytes, false);
}

void mirrors_poison(struct bench_mirrors *mirrors, void *host, size_t bytes)
{
    memset(host, PATTERN_POISON, bytes);
    mirrors_push(mirrors, host, bytes);
}

void mirrors_free(struct bench_mirrors *mirrors)
{
    bool healthy = true;

    /* The first error has been reported; symmetric memory of a failed communicator is freed with the communicator. */
    for (int i = 0; i < mirrors->n; i++) {
        struct bench_mirror *mirror = &mirrors->at[i];

        if (mirror->symmetric)
            healthy = healthy && ep_free(mirrors->ctx->comm, mirror->address) == EP_OK;
        else if (mirror->address != mirror->host)
            mirrors->ctx->memory->free(mirrors->ctx, mirror->address);
        if (mirror->own_host)
            free(mirror->host);
    }
    *mirrors = (struct bench_mirrors){.ctx = mirrors->ctx};
}
