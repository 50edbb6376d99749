/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/twins.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

static void fail(struct bench_twins *twins, ep_status status)
{
    if (twins->status == EP_OK)
        twins->status = status;
}

static struct bench_twin *add(struct bench_twins *twins)
{
    if (twins->n == TWINS_MAX) {
        fail(twins, ep_fail(EP_E_STATE, "benchmark: more than %d buffers", TWINS_MAX));
        return NULL;
    }
    return &twins->at[twins->n++];
}

void *twins_take(struct bench_twins *twins, size_t bytes, unsigned flags)
{
    size_t whole = (bytes / PAGE + 1) * PAGE;
    struct ranks_ctx *ctx = twins->ctx;
    struct bench_twin *twin = twins->status == EP_OK ? add(twins) : NULL;
    bool symmetric = flags & TWINS_SYMMETRIC;
    ep_status status = EP_OK;

    if (!twin)
        return NULL;
    *twin = (struct bench_twin){.symmetric = symmetric};
    if (!symmetric || ctx->memory) {
        twin->host = aligned_alloc(PAGE, whole);
        twin->own_host = true;
        if (!twin->host)
            status = ep_fail(EP_E_MEMORY, "benchmark: no memory for a buffer of %zu bytes", whole);
    }
    twin->place = twin->host;
    if (status == EP_OK && symmetric)
        status = ep_alloc(ctx->comm, whole, &twin->place);
    else if (status == EP_OK && ctx->memory)
        status = ctx->memory->take(ctx, whole, &twin->place);
    if (status != EP_OK) {
        free(twin->host);
        twins->n--;
        fail(twins, status);
        return NULL;
    }
    if (!twin->host)
        twin->host = twin->place;
    if (!(flags & TWINS_UNTOUCHED))
        memset(twin->host, 0, whole);
    return twin->host;
}

void twins_mirror(struct bench_twins *twins, void *host, size_t bytes)
{
    struct ranks_ctx *ctx = twins->ctx;
    struct bench_twin *twin;
    ep_status status;
    void *place;

    if (!ctx->memory || twins->status != EP_OK)
        return;
    status = ctx->memory->take(ctx, bytes + 1, &place);
    twin = status == EP_OK ? add(twins) : NULL;
    if (!twin) {
        fail(twins, status);
        return;
    }
    *twin = (struct bench_twin){.host = host, .place = place};
    twins_push(twins, host, bytes);
}

/* The twin that `host` is the beginning of. */
static const struct bench_twin *find(const struct bench_twins *twins, const void *host)
{
    for (int i = 0; i < twins->n; i++)
        if (twins->at[i].host == host)
            return &twins->at[i];
    return NULL;
}

void *twins_place(const struct bench_twins *twins, const void *host)
{
    const struct bench_twin *twin = host ? find(twins, host) : NULL;

    return twin ? twin->place : (void *)(uintptr_t)host;
}

static void copy(struct bench_twins *twins, const void *host, size_t bytes, bool to_twin)
{
    const struct bench_twin *twin = NULL;
    struct ranks_ctx *ctx = twins->ctx;
    void *there, *here = (void *)(uintptr_t)host;
    uintptr_t at = (uintptr_t)host;

    if (!ctx->memory || twins->status != EP_OK || !bytes)
        return;
    /* Of a part: the buffer that begins last before it. */
    for (int i = 0; i < twins->n; i++)
        if ((uintptr_t)twins->at[i].host <= at && (!twin || twins->at[i].host > twin->host))
            twin = &twins->at[i];
    if (!twin) {
        fail(twins, ep_fail(EP_E_STATE, "benchmark: a buffer has no twin"));
        return;
    }
    there = (char *)twin->place + (at - (uintptr_t)twin->host);
    fail(twins, ctx->memory->copy(ctx, to_twin ? there : here, to_twin ? here : there, bytes));
}

void twins_push(struct bench_twins *twins, const void *host, size_t bytes)
{
    copy(twins, host, bytes, true);
}

void twins_pull(struct bench_twins *twins, void *host, size_t bytes)
{
    copy(twins, host, bytes, false);
}

void twins_drop(struct bench_twins *twins)
{
    bool healthy = true;

    /* The first failure has been reported; a communicator that failed frees what is left when it is freed itself. */
    for (int i = 0; i < twins->n; i++) {
        struct bench_twin *twin = &twins->at[i];

        if (twin->symmetric)
            healthy = healthy && ep_free(twins->ctx->comm, twin->place) == EP_OK;
        else if (twin->place != twin->host)
            twins->ctx->memory->give(twins->ctx, twin->place);
        if (twin->own_host)
            free(twin->host);
    }
    *twins = (struct bench_twins){.ctx = twins->ctx};
}
