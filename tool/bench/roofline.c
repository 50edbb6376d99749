/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roofline.c - upper bounds by the copy engines of the GPUs: copies between one pair, and all-to-all copies with the
 * bytes that the measured operation moves from each rank to each rank, including itself.
 */
#include "bench/case.h"

#include "backend/cuda/module.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

/* Published by each rank. */
struct peer_buffer {
    struct ep_cuda_address address;
    int64_t capacity_bytes;
};

static ep_status map_peers(struct bench_roofline *roofline, const struct peer_buffer *all)
{
    struct ranks_ctx *ctx = roofline->bench->ctx;

    for (int rank = 0; rank < ctx->nranks; rank++)
        EP_TRY(ctx->gpu->map_address(ctx->comm, rank, &all[rank].address, &roofline->peers[rank]));
    return EP_OK;
}

/* Maps the buffers of all ranks and finds the offsets of this rank's rows in them. */
static ep_status exchange_addresses(struct bench_roofline *roofline)
{
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;
    size_t n = (size_t)ctx->nranks, row = 2 * (size_t)bench->request->hidden;
    void *buffer = mirrors_address(&bench->mirrors, bench->copy_to);
    struct peer_buffer mine = {.capacity_bytes = bench->capacity_rows * (int64_t)row};
    struct peer_buffer *all = calloc(n, sizeof(*all));
    int64_t *starts = calloc(n * (n + 1), sizeof(*starts));
    ep_status status = EP_E_MEMORY;

    if (!all || !starts) {
        ep_fail(status, "benchmark: no memory for %zu ranks", n);
        goto free_all;
    }
    status = ctx->gpu->get_address(ctx->comm, buffer, (size_t)mine.capacity_bytes, &mine.address);
    if (status == EP_OK)
        status = ep_comm_allgather(ctx->comm, &mine, sizeof(mine), all);
    if (status == EP_OK)
        status = ep_comm_allgather(ctx->comm, bench->route.received.recv_from_rank, (n + 1) * sizeof(*starts), starts);
    if (status == EP_OK)
        status = map_peers(roofline, all);
    for (size_t rank = 0; status == EP_OK && rank < n; rank++) {
        roofline->at[rank] = starts[rank * (n + 1) + (size_t)ctx->rank];
        if (rank == 0 || (size_t)all[rank].capacity_bytes < roofline->pair_bytes)
            roofline->pair_bytes = (size_t)all[rank].capacity_bytes;
    }
free_all:
    free(all);
    free(starts);
    return status;
}

int bench_roofline_init(struct bench_roofline *roofline, struct bench_case *bench)
{
    size_t n = (size_t)bench->ctx->nranks;
    ep_status status = EP_E_MEMORY;

    *roofline = (struct bench_roofline){.bench = bench};
    roofline->peers = calloc(n, sizeof(*roofline->peers));
    roofline->at = calloc(n, sizeof(*roofline->at));
    if (!roofline->peers || !roofline->at)
        ep_fail(status, "benchmark: no memory for %zu ranks", n);
    else
        status = exchange_addresses(roofline);
    return status == EP_OK ? 0 : ranks_emit_error(bench->ctx, status, "preparing the roofline");
}

void bench_roofline_done(struct bench_roofline *roofline)
{
    free(roofline->peers);
    free(roofline->at);
    *roofline = (struct bench_roofline){.bench = NULL};
}

ep_status bench_engine_pair(void *context)
{
    struct bench_roofline *roofline = context;
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;

    /* Rank 0 to rank 1; with one rank, within its own memory. */
    if (ctx->rank != 0)
        return EP_OK;
    EP_TRY(ctx->gpu->engine_copy(ctx->comm, 0, roofline->peers[ctx->nranks > 1],
                                 mirrors_address(&bench->mirrors, bench->copy_from), roofline->pair_bytes));
    return ctx->gpu->engine_join(ctx->comm);
}

ep_status bench_engine_all(void *context)
{
    struct bench_roofline *roofline = context;
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;
    const char *from = mirrors_address(&bench->mirrors, bench->copy_from);

    /* Each rank begins with the next rank, so that no rank receives from all others at once. */
    for (int i = 1; i <= ctx->nranks; i++) {
        int rank = (ctx->rank + i) % ctx->nranks;
        size_t rows = (size_t)bench->route.sent.tokens_per_rank[rank];

        EP_TRY(ctx->gpu->engine_copy(ctx->comm, i % EP_CUDA_COPY_STREAMS,
                                     (char *)roofline->peers[rank] + (size_t)roofline->at[rank] * roofline->row_bytes,
                                     from, rows * roofline->row_bytes));
    }
    return ctx->gpu->engine_join(ctx->comm);
}
