/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The pool of device memory: returning blocks frees no memory, however many there are, since it may happen during an
 * operation or in a capture; blocks are reused, and freed in ep_free() or at the end. Needs no GPU: the linker wraps
 * the CUDA calls that allocate and free memory.
 */
#include "backend/cuda/cuda.h"
#include "call.h"

#include <stdio.h>
#include <stdlib.h>

#define BLOCKS (CUDA_POOL + 40)
#define BYTES 1000

cudaError_t __wrap_cudaMalloc(void **ret_memory, size_t bytes);
cudaError_t __wrap_cudaFree(void *memory);
cudaError_t __wrap_cudaEventQuery(cudaEvent_t event);
cudaError_t __wrap_cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret_handle, void *memory);

static int made, freed;
static bool running; /* the last operation */

cudaError_t __wrap_cudaMalloc(void **ret_memory, size_t bytes)
{
    *ret_memory = malloc(bytes);
    made++;
    return *ret_memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t __wrap_cudaFree(void *memory)
{
    freed += memory != NULL;
    free(memory);
    return cudaSuccess;
}

cudaError_t __wrap_cudaEventQuery(cudaEvent_t event)
{
    (void)event;
    return running ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t __wrap_cudaIpcGetMemHandle(cudaIpcMemHandle_t *ret_handle, void *memory)
{
    *ret_handle = (cudaIpcMemHandle_t){.reserved = {0}};
    return memory ? cudaSuccess : cudaErrorInvalidValue;
}

/* Allocates all blocks, and returns them to the pool. */
static int alloc_and_free(struct cuda_comm *cuda, struct cuda_block *blocks, enum cuda_block_use use)
{
    for (int i = 0; i < BLOCKS; i++)
        CALL(cuda_pool_alloc(cuda, BYTES, use, &blocks[i]));
    for (int i = 0; i < BLOCKS; i++)
        cuda_pool_free(cuda, &blocks[i]);
    return PASSED;
}

static int check(struct cuda_comm *cuda, struct cuda_block *blocks)
{
    void *memory;

    cuda->operations = 1;
    running = true;
    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_ANY));
    EXPECT(made == BLOCKS && !freed, "%d blocks were made and %d freed", made, freed);
    EXPECT(cuda_pool_bytes(cuda) == BLOCKS * cuda_block_bytes(BYTES), "%zu bytes are kept", cuda_pool_bytes(cuda));
    /* Queued kernels may still use them. */
    cuda_pool_trim(cuda);
    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_ANY));
    EXPECT(made == 2 * BLOCKS && !freed, "an operation runs: %d blocks were made and %d freed", made, freed);
    /* Operations run one after the other. */
    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_OF_OPERATIONS));
    EXPECT(made == 2 * BLOCKS && !freed, "blocks of operations: %d blocks were made and %d freed", made, freed);
    running = false;
    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_ANY));
    EXPECT(made == 2 * BLOCKS && !freed, "nothing runs: %d blocks were made and %d freed", made, freed);
    CALL(cuda_alloc_kind(cuda, BYTES, CUDA_MEMORY_LOCAL, &memory));
    EXPECT(!freed, "ep_alloc_local() has freed %d", freed);
    /* Freeing would wait for kernels, which may wait for this rank. */
    CALL(cuda_alloc_kind(cuda, BYTES, CUDA_MEMORY_SYMMETRIC, &memory));
    EXPECT(!freed, "ep_alloc() has freed %d", freed);
    /* Frees only the blocks beyond the size of the pool. */
    cuda_pool_trim(cuda);
    EXPECT(freed == 2 * BLOCKS - CUDA_POOL, "%d were freed", freed);
    return PASSED;
}

/* Blocks that graphs refer to stay until the end, and are reused by captures alone. */
static int check_captured(struct cuda_comm *cuda, struct cuda_block *blocks)
{
    int before = made;

    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_OF_GRAPHS));
    TRY(alloc_and_free(cuda, blocks, CUDA_BLOCK_OF_GRAPHS));
    EXPECT(made == before + BLOCKS, "%d blocks were made for captures", made - before);
    before = freed;
    cuda_pool_trim(cuda);
    EXPECT(freed == before, "%d blocks of captures were freed", freed - before);
    CALL(cuda_pool_alloc(cuda, BYTES, CUDA_BLOCK_OF_OPERATIONS, &blocks[0]));
    EXPECT(!blocks[0].captured, "a block of a capture was taken by a call");
    cuda_pool_free(cuda, &blocks[0]);
    return PASSED;
}

int main(void)
{
    struct cuda_comm *cuda = calloc(1, sizeof(*cuda));
    struct cuda_ctrl *ctrl = calloc(1, sizeof(*ctrl));
    struct cuda_block blocks[BLOCKS];
    int code = cuda && ctrl ? PASSED : FAILED;

    test_set_context("pool_cuda");
    if (!code) {
        cuda->ctrl = ctrl;
        pthread_mutex_init(&cuda->memory_lock, NULL);
        code = check(cuda, blocks);
    }
    code = code ? code : check_captured(cuda, blocks);
    if (!code) {
        cuda_pool_close(cuda);
        if (made - freed != 2 || cuda_pool_bytes(cuda) > CUDA_POOL * cuda_block_bytes(BYTES)) {
            test_report("%d allocations were made and %d freed; two are the caller's", made, freed);
            code = FAILED;
        }
    }
    for (int slot = 0; ctrl && cuda && slot < CUDA_SLOTS; slot++)
        free(cuda->allocations[slot].base);
    free(ctrl);
    free(cuda);
    printf("pool_cuda: %s\n", code ? "FAILED" : "passed");
    return code;
}
