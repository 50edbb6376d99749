/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of device memory of freed plans. cudaFree() waits for kernels on the device, which may wait for this rank, and
 * a capture forbids it. So returned blocks are reused, not freed. Blocks beyond the size of the pool are freed where
 * waiting is allowed: between the barriers of ep_free(), when the communicator closes, and when memory is short
 * otherwise.
 */
#include "backend/cuda/cuda.h"

#include "backend/cuda/device.h"
#include "backend/cuda/pool.h"

#include <stdlib.h>

/* An unused block. The list begins with the one returned last. */
struct cuda_pooled {
    struct cuda_pooled *next;
    struct cuda_block block;
};

/* Takes the smallest unused block that fits. Under the lock. */
static bool find_block(struct cuda_comm *cuda, size_t bytes, bool captured, struct cuda_block *ret_block)
{
    struct cuda_pooled **best = NULL, *out;

    for (struct cuda_pooled **at = &cuda->pool; *at; at = &(*at)->next) {
        const struct cuda_block *block = &(*at)->block;

        if (block->bytes >= bytes && block->captured == captured && (captured || block->free_after <= cuda->complete) &&
            (!best || block->bytes < (*best)->block.bytes))
            best = at;
    }
    if (!best)
        return false;
    out = *best;
    *best = out->next;
    *ret_block = out->block;
    free(out);
    return true;
}

static void update_complete(struct cuda_comm *cuda)
{
    if (cuda->complete < cuda->operations && cudaEventQuery(cuda->order) == cudaSuccess)
        cuda->complete = cuda->operations;
    cudaGetLastError();
}

ep_status cuda_pool_alloc(struct cuda_comm *cuda, size_t bytes, bool captured, struct cuda_block *ret_block)
{
    cudaError_t error;
    bool found;

    update_complete(cuda);
    pthread_mutex_lock(&cuda->memory_lock);
    found = find_block(cuda, bytes, captured, ret_block);
    pthread_mutex_unlock(&cuda->memory_lock);
    if (found)
        return EP_OK;
    ret_block->bytes = cuda_block_bytes(bytes);
    ret_block->captured = captured;
    error = cudaMalloc(&ret_block->memory, ret_block->bytes);
    if (error == cudaErrorMemoryAllocation && !captured) {
        cudaGetLastError();
        cuda_pool_trim(cuda);
        error = cudaMalloc(&ret_block->memory, ret_block->bytes);
    }
    return cuda_status(error, "cudaMalloc");
}

void cuda_pool_free(struct cuda_comm *cuda, const struct cuda_block *block)
{
    struct cuda_pooled *pooled;

    if (!block->memory)
        return;
    pooled = malloc(sizeof(*pooled));
    /* Without memory for the list entry the driver frees the block when the process ends. */
    if (!pooled)
        return;
    pooled->block = *block;
    pooled->block.free_after = cuda->operations + cuda->copied;
    pthread_mutex_lock(&cuda->memory_lock);
    pooled->next = cuda->pool;
    cuda->pool = pooled;
    pthread_mutex_unlock(&cuda->memory_lock);
}

size_t cuda_pool_bytes(struct cuda_comm *cuda)
{
    size_t bytes = 0;

    for (const struct cuda_pooled *at = cuda->pool; at; at = at->next)
        bytes += at->block.bytes;
    return bytes;
}

static void free_list(struct cuda_pooled *list)
{
    while (list) {
        struct cuda_pooled *next = list->next;

        cudaFree(list->block.memory);
        free(list);
        list = next;
    }
}

void cuda_pool_trim(struct cuda_comm *cuda)
{
    struct cuda_pooled *out = NULL;
    int kept = 0;

    update_complete(cuda);
    pthread_mutex_lock(&cuda->memory_lock);
    for (struct cuda_pooled **at = &cuda->pool; *at;) {
        struct cuda_pooled *pooled = *at;

        if (pooled->block.captured || kept++ < CUDA_POOL || pooled->block.free_after > cuda->complete) {
            at = &pooled->next;
            continue;
        }
        *at = pooled->next;
        pooled->next = out;
        out = pooled;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    free_list(out);
}

ep_status cuda_host_block_acquire(struct cuda_comm *cuda, const char *call, enum cuda_host_words words, size_t bytes,
                                  bool captured, bool fresh, struct cuda_host_block **ret_block)
{
    struct cuda_host_block *block = fresh ? NULL : cuda->host_blocks[words];
    ep_status status;

    while (block && (block->used || block->captured != captured || block->pinned.bytes < bytes))
        block = block->next;
    if (!block) {
        block = calloc(1, sizeof(*block));
        if (!block)
            return ep_fail(EP_E_MEMORY, "%s: no memory", call);
        status = cuda_keep_pinned(&cuda->memory, bytes, &block->pinned);
        if (status != EP_OK) {
            free(block);
            return status;
        }
        block->captured = captured;
        block->next = cuda->host_blocks[words];
        cuda->host_blocks[words] = block;
    }
    block->used = true;
    *ret_block = block;
    return EP_OK;
}

void cuda_pool_close(struct cuda_comm *cuda)
{
    free_list(cuda->pool);
    cuda->pool = NULL;
    for (int words = 0; words < CUDA_HOST_WORDS; words++)
        while (cuda->host_blocks[words]) {
            struct cuda_host_block *block = cuda->host_blocks[words];

            cuda->host_blocks[words] = block->next;
            free(block);
        }
}
