/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of device memory of freed plans. cudaFree() waits for kernels on the device, which may wait for this rank, and
 * a capture forbids it. So returned blocks are reused, not freed. Blocks beyond the size of the pool go to a list of
 * spares, which is freed where waiting is allowed: between the barriers of ep_free(), when the communicator closes, and
 * when memory is short otherwise.
 */
#include "backend/cuda/cuda.h"

#include <stdlib.h>

struct cuda_spare {
    struct cuda_spare *next;
    struct cuda_block block;
};

/* Takes the smallest unused block that fits from the pool or the list. Under the lock. */
static bool find_block(struct cuda_comm *cuda, size_t bytes, bool captured, struct cuda_block *ret_block)
{
    struct cuda_spare **best_spare = NULL;
    struct cuda_block *best = NULL;

    for (int i = 0; i < CUDA_POOL; i++) {
        struct cuda_block *block = &cuda->pool[i];

        if (block->memory && block->bytes >= bytes && block->captured == captured &&
            (captured || block->free_after <= cuda->complete) && (!best || block->bytes < best->bytes))
            best = block;
    }
    for (struct cuda_spare **at = &cuda->spares; *at; at = &(*at)->next) {
        struct cuda_block *block = &(*at)->block;

        if (block->bytes < bytes || block->captured != captured || (!captured && block->free_after > cuda->complete) ||
            (best && best->bytes <= block->bytes))
            continue;
        best = block;
        best_spare = at;
    }
    if (!best)
        return false;
    *ret_block = *best;
    if (best_spare) {
        struct cuda_spare *out = *best_spare;

        *best_spare = out->next;
        free(out);
    } else {
        *best = (struct cuda_block){.bytes = 0};
    }
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

/* Under the lock. Without memory for the list entry the driver frees the block when the process ends. */
static void add_spare(struct cuda_comm *cuda, const struct cuda_block *block)
{
    struct cuda_spare *spare = malloc(sizeof(*spare));

    if (!spare)
        return;
    *spare = (struct cuda_spare){.next = cuda->spares, .block = *block};
    cuda->spares = spare;
}

void cuda_pool_free(struct cuda_comm *cuda, const struct cuda_block *block)
{
    struct cuda_block out = *block;
    int i = 0;

    if (!block->memory)
        return;
    out.free_after = cuda->operations;
    pthread_mutex_lock(&cuda->memory_lock);
    while (i < CUDA_POOL && cuda->pool[i].memory)
        i++;
    if (i < CUDA_POOL)
        cuda->pool[i] = out;
    else
        add_spare(cuda, &out);
    pthread_mutex_unlock(&cuda->memory_lock);
}

size_t cuda_pool_bytes(struct cuda_comm *cuda)
{
    size_t bytes = 0;

    for (int i = 0; i < CUDA_POOL; i++)
        bytes += cuda->pool[i].bytes;
    for (const struct cuda_spare *spare = cuda->spares; spare; spare = spare->next)
        bytes += spare->block.bytes;
    return bytes;
}

static void free_spares(struct cuda_spare *spares)
{
    while (spares) {
        struct cuda_spare *next = spares->next;

        cudaFree(spares->block.memory);
        free(spares);
        spares = next;
    }
}

void cuda_pool_trim(struct cuda_comm *cuda)
{
    struct cuda_spare *out = NULL;

    update_complete(cuda);
    pthread_mutex_lock(&cuda->memory_lock);
    for (struct cuda_spare **at = &cuda->spares; *at;) {
        struct cuda_spare *spare = *at;

        if (spare->block.captured || spare->block.free_after > cuda->complete) {
            at = &spare->next;
            continue;
        }
        *at = spare->next;
        spare->next = out;
        out = spare;
    }
    pthread_mutex_unlock(&cuda->memory_lock);
    free_spares(out);
}

ep_status cuda_host_block_acquire(struct cuda_comm *cuda, const char *call, enum cuda_host_words words, size_t bytes,
                                  bool captured, bool fresh, struct cuda_host_block **ret_block)
{
    struct cuda_host_block *block = fresh ? NULL : cuda->host_blocks[words];
    ep_status status;

    while (block && (block->used || block->captured != captured || block->bytes < bytes))
        block = block->next;
    if (!block) {
        block = calloc(1, sizeof(*block));
        if (!block)
            return ep_fail(EP_E_MEMORY, "%s: no memory", call);
        status = cuda_host_alloc(bytes, &block->memory, &block->device);
        if (status != EP_OK) {
            free(block);
            return status;
        }
        block->bytes = bytes;
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
    for (int i = 0; i < CUDA_POOL; i++)
        cudaFree(cuda->pool[i].memory);
    free_spares(cuda->spares);
    cuda->spares = NULL;
    for (int words = 0; words < CUDA_HOST_WORDS; words++)
        while (cuda->host_blocks[words]) {
            struct cuda_host_block *block = cuda->host_blocks[words];

            cuda->host_blocks[words] = block->next;
            cudaFreeHost(block->memory);
            free(block);
        }
}
