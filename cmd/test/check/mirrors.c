/* SPDX-License-Identifier: Apache-2.0 */
#include "mirrors.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

void mirrors_fail(struct mirrors *mirrors, ep_status status, const char *call)
{
    if (mirrors->status != EP_OK || status == EP_OK)
        return;
    mirrors->status = status;
    mirrors->call = call;
}

/* Whether there was no error, and there is room for another buffer. */
static bool can_add(struct mirrors *mirrors)
{
    if (mirrors->n == MIRRORS_MAX)
        mirrors_fail(mirrors, EP_E_STATE, "mirrors_alloc");
    return mirrors->status == EP_OK;
}

void *mirrors_alloc(struct mirrors *mirrors, size_t bytes, unsigned flags)
{
    size_t whole = (bytes / PAGE + 1) * PAGE;
    struct ranks_ctx *ctx = mirrors->ctx;
    struct mirror mirror = {.bytes = whole, .symmetric = flags & MIRRORS_SYMMETRIC};

    if (!can_add(mirrors))
        return NULL;
    if (!mirror.symmetric || ctx->memory) {
        mirror.host = aligned_alloc(PAGE, whole);
        mirror.own_host = true;
        if (!mirror.host) {
            mirrors_fail(mirrors, EP_E_MEMORY, "aligned_alloc");
            mirrors->missing = whole;
            return NULL;
        }
    }
    mirror.address = mirror.host;
    if (mirror.symmetric)
        mirrors_fail(mirrors, ep_alloc(ctx->comm, whole, &mirror.address), "ep_alloc");
    else if (ctx->memory)
        mirrors_fail(mirrors, ctx->memory->alloc(ctx, whole, &mirror.address), "alloc");
    if (mirrors->status != EP_OK) {
        free(mirror.host);
        return NULL;
    }
    if (!mirror.host)
        mirror.host = mirror.address;
    if (!(flags & MIRRORS_UNTOUCHED))
        memset(mirror.host, 0, whole);
    mirrors->at[mirrors->n++] = mirror;
    return mirror.host;
}

void mirrors_add(struct mirrors *mirrors, void *host, size_t bytes)
{
    struct mirror mirror = {.host = host, .bytes = bytes};

    if (!mirrors->ctx->memory || !can_add(mirrors))
        return;
    mirrors_fail(mirrors, mirrors->ctx->memory->alloc(mirrors->ctx, bytes + 1, &mirror.address), "alloc");
    if (mirrors->status != EP_OK)
        return;
    mirrors->at[mirrors->n++] = mirror;
    mirrors_push(mirrors, host, bytes);
}

/* The mirror of `host`, which may be within a buffer; NULL: it has none. */
static unsigned char *find(const struct mirrors *mirrors, const void *host)
{
    for (int i = 0; i < mirrors->n; i++) {
        const struct mirror *mirror = &mirrors->at[i];
        uintptr_t offset = (uintptr_t)host - (uintptr_t)mirror->host;

        if ((uintptr_t)host >= (uintptr_t)mirror->host && offset < mirror->bytes)
            return (unsigned char *)mirror->address + offset;
    }
    return NULL;
}

void *mirrors_address(const struct mirrors *mirrors, const void *host)
{
    void *address = find(mirrors, host);

    return address ? address : (void *)(uintptr_t)host;
}

/* Whether there are mirrors to copy to or from. */
static bool copies(const struct mirrors *mirrors, size_t bytes)
{
    return mirrors->ctx->memory && mirrors->status == EP_OK && bytes;
}

void mirrors_push_to(struct mirrors *mirrors, void *to, const void *host, size_t bytes)
{
    if (copies(mirrors, bytes))
        mirrors_fail(mirrors, mirrors->ctx->memory->copy(mirrors->ctx, to, host, bytes), "copy");
}

void mirrors_push(struct mirrors *mirrors, void *host, size_t bytes)
{
    mirrors_push_to(mirrors, find(mirrors, host), host, bytes);
}

void mirrors_pull(struct mirrors *mirrors, void *host, size_t bytes)
{
    if (copies(mirrors, bytes))
        mirrors_fail(mirrors, mirrors->ctx->memory->copy(mirrors->ctx, host, find(mirrors, host), bytes), "copy");
}

void mirrors_poison(struct mirrors *mirrors, void *host, size_t bytes)
{
    if (mirrors->status != EP_OK)
        return;
    memset(host, mirrors->poison, bytes);
    if (copies(mirrors, bytes))
        mirrors_fail(mirrors, mirrors->ctx->memory->fill(mirrors->ctx, find(mirrors, host), mirrors->poison, bytes),
                     "fill");
}

ep_status mirrors_free(struct mirrors *mirrors)
{
    ep_status status = EP_OK;

    /* Symmetric memory of a failed communicator is freed with the communicator. */
    for (int i = 0; i < mirrors->n; i++) {
        struct mirror *mirror = &mirrors->at[i];

        if (mirror->symmetric)
            status = status == EP_OK ? ep_free(mirrors->ctx->comm, mirror->address) : status;
        else if (mirror->address != mirror->host)
            mirrors->ctx->memory->free(mirrors->ctx, mirror->address);
        if (mirror->own_host)
            free(mirror->host);
    }
    mirrors->n = 0;
    return status;
}
