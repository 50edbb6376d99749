/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool of device memory of freed plans. cudaFree() waits for kernels on the device, which may wait for this rank, and
 * a capture forbids it. So returned blocks are reused, not freed. Blocks beyond the size of the pool are freed where
 * waiting is allowed: between the barriers of ep_free(), when the communicator closes, and when memory is short
 * otherwise.
 */
#include "backend/cuda/cuda.h"
#include "base/reserve.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* An unused block. The list begins with the one returned last. */
struct cuda_pooled {
    struct cuda_pooled *next;
    struct cuda_block block;
};

/* Takes the smallest unused block that fits. Under the lock. */
static bool find_block(struct cuda_comm *cuda, size_t bytes, enum cuda_block_use use, struct cuda_block *ret_block)
{
    struct cuda_pooled **best = NULL, *out;

    for (struct cuda_pooled **at = &cuda->pool; *at; at = &(*at)->next) {
        const struct cuda_block *block = &(*at)->block;

        if (block->bytes >= bytes && block->captured == (use == CUDA_BLOCK_OF_GRAPHS) &&
            (use != CUDA_BLOCK_ANY || block->free_after <= cuda->complete) &&
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

ep_status cuda_pool_alloc(struct cuda_comm *cuda, size_t bytes, enum cuda_block_use use, struct cuda_block *ret_block)
{
    cudaError_t error;
    bool found;

    if (use == CUDA_BLOCK_ANY)
        update_complete(cuda);
    pthread_mutex_lock(&cuda->memory_lock);
    found = find_block(cuda, bytes, use, ret_block);
    pthread_mutex_unlock(&cuda->memory_lock);
    if (found)
        return EP_OK;
    ret_block->bytes = cuda_block_bytes(bytes);
    ret_block->captured = use == CUDA_BLOCK_OF_GRAPHS;
    error = cudaMalloc(&ret_block->memory, ret_block->bytes);
    if (error == cudaErrorMemoryAllocation && use != CUDA_BLOCK_OF_GRAPHS) {
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

/* --- memory that is kept until the communicator closes ----------------------------------------------------------- */

struct kept_allocation {
    struct kept_allocation *next;
    struct cuda_pinned of; /* memory NULL: device memory */
};

static ep_status register_memory(struct cuda_pinned *pinned)
{
    CUDA_TRY(cudaHostRegister(pinned->memory, pinned->bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    CUDA_TRY(cudaHostGetDevicePointer(&pinned->device, pinned->memory, 0));
    return EP_OK;
}

static void unpin(struct cuda_pinned *pinned)
{
    cudaHostUnregister(pinned->memory);
    munmap(pinned->memory, pinned->bytes);
}

static ep_status pin(size_t bytes, struct cuda_pinned *ret_pinned)
{
    struct cuda_pinned pinned = {.bytes = ep_net_whole_pages(bytes)};
    ep_status status;

    *ret_pinned = (struct cuda_pinned){.bytes = 0};
    EP_TRY(ep_reserve_check(pinned.bytes));
    /*
     * Not inherited by children: after a fork, a write here would copy the shared page, and the GPU would keep using
     * the old one.
     */
    pinned.memory = mmap(NULL, pinned.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pinned.memory == MAP_FAILED)
        return ep_fail_errno(EP_E_MEMORY, errno, "mmap of %zu bytes that kernels use", pinned.bytes);
    madvise(pinned.memory, pinned.bytes, MADV_DONTFORK);
    status = register_memory(&pinned);
    if (status == EP_OK)
        *ret_pinned = pinned;
    else
        unpin(&pinned);
    return status;
}

static ep_status new_allocation(struct cuda_kept *memory, struct kept_allocation **ret_new)
{
    struct kept_allocation *made = calloc(1, sizeof(*made));

    if (!made)
        return ep_fail(EP_E_MEMORY, "no memory for %zu bytes", sizeof(*made));
    made->next = memory->first;
    memory->first = *ret_new = made;
    return EP_OK;
}

ep_status cuda_keep_pinned(struct cuda_kept *memory, size_t bytes, struct cuda_pinned *ret_pinned)
{
    struct kept_allocation *made = NULL;

    EP_TRY(new_allocation(memory, &made));
    EP_TRY(pin(bytes, &made->of));
    memory->pinned_bytes += made->of.bytes;
    *ret_pinned = made->of;
    return EP_OK;
}

ep_status cuda_keep_device(struct cuda_kept *memory, size_t bytes, void **ret_memory)
{
    struct kept_allocation *made = NULL;

    EP_TRY(new_allocation(memory, &made));
    CUDA_TRY(cudaMalloc(&made->of.device, bytes));
    made->of.bytes = bytes;
    memory->device_bytes += bytes;
    *ret_memory = made->of.device;
    return EP_OK;
}

void cuda_kept_retire(struct cuda_kept *memory)
{
    memory->first->of.bytes = 0;
}

bool cuda_kept_next(const struct cuda_kept *memory, const struct kept_allocation **at, struct cuda_pinned *ret_next)
{
    do
        *at = *at ? (*at)->next : memory->first;
    while (*at && !(*at)->of.bytes); /* there was no memory for it, or it is retired */
    if (*at)
        *ret_next = (*at)->of;
    return *at;
}

ep_status cuda_kept_clear(const struct cuda_kept *memory, cudaStream_t stream)
{
    const struct kept_allocation *at = NULL;
    struct cuda_pinned kept;

    while (cuda_kept_next(memory, &at, &kept))
        if (kept.memory)
            memset(kept.memory, 0, kept.bytes);
        else
            CUDA_TRY(cudaMemsetAsync(kept.device, 0, kept.bytes, stream));
    return cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

void cuda_kept_free(struct cuda_kept *memory)
{
    while (memory->first) {
        struct kept_allocation *next = memory->first->next;

        if (memory->first->of.memory)
            unpin(&memory->first->of);
        else
            cudaFree(memory->first->of.device);
        free(memory->first);
        memory->first = next;
    }
    memory->pinned_bytes = memory->device_bytes = 0;
}
