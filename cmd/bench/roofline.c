/* SPDX-License-Identifier: Apache-2.0 */
/*
 * roofline.c - upper bounds by the copy engines of the GPUs: copies between one pair, and all-to-all copies with the
 * bytes that the measured operation moves from each rank to each rank, including itself.
 */
#include "bench_case.h"

#include "backend/cuda/module.h"
#include "base/error.h"

/* Published by each rank: its buffer, and where each source's rows begin in it. */
struct peer_buffer {
    struct ep_cuda_address address;
    int64_t capacity_bytes;
    int64_t start[EP_CUDA_GPUS];
};

/* Maps the buffers of all ranks and finds the offsets of this rank's rows in them. */
static ep_status exchange_buffers(struct bench_roofline *roofline)
{
    struct bench_case *bench = roofline->bench;
    struct ranks_ctx *ctx = bench->ctx;
    void *buffer = mirrors_address(&bench->mirrors, bench->copy_to);
    struct peer_buffer mine = {.capacity_bytes = bench->capacity_rows * 2 * bench->request->hidden};
    struct peer_buffer all[EP_CUDA_GPUS];

    for (int rank = 0; rank < ctx->nranks; rank++)
        mine.start[rank] = bench->route.received.recv_from_rank[rank];
    EP_TRY(ctx->gpu->get_address(ctx->comm, buffer, (size_t)mine.capacity_bytes, &mine.address));
    EP_TRY(ep_comm_allgather(ctx->comm, &mine, sizeof(mine), all));
    for (int rank = 0; rank < ctx->nranks; rank++) {
        EP_TRY(ctx->gpu->map_address(ctx->comm, rank, &all[rank].address, &roofline->peers[rank]));
        roofline->at[rank] = all[rank].start[ctx->rank];
        if (rank == 0 || (size_t)all[rank].capacity_bytes < roofline->pair_bytes)
            roofline->pair_bytes = (size_t)all[rank].capacity_bytes;
    }
    return EP_OK;
}

int bench_roofline_init(struct bench_roofline *roofline, struct bench_case *bench)
{
    ep_status status;

    *roofline = (struct bench_roofline){.bench = bench};
    status = exchange_buffers(roofline);
    return status == EP_OK ? 0 : ranks_emit_error(bench->ctx, status, "preparing the roofline");
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
