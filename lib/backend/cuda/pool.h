/* SPDX-License-Identifier: Apache-2.0 */
/* pool.h - device memory of freed plans, host memory of kernels. */
#ifndef EP_CUDA_POOL_H
#define EP_CUDA_POOL_H

#include "backend/cuda/cuda.h"

/*
 * Allocates device memory that is not symmetric: a block of the pool if an unused one fits. captured: for a plan that
 * is made in a capture. There a freed block may be reused at once: graphs run one after the other, and their nodes in
 * the order of the calls.
 */
ep_status cuda_pool_alloc(struct cuda_comm *cuda, size_t bytes, bool captured, struct cuda_block *ret_block);
/* Size of a new block for `bytes`. */
static inline size_t cuda_block_bytes(size_t bytes)
{
    return bytes + bytes / 4 + 4096;
}
/* Returns a block to the pool. Calls no cudaFree(), so it is allowed during an operation and in a capture. */
void cuda_pool_free(struct cuda_comm *cuda, const struct cuda_block *block);
/* An unused host block of at least `bytes`, or a new one; `fresh`: always a new one. The caller's thread only. */
ep_status cuda_host_block_acquire(struct cuda_comm *cuda, const char *call, enum cuda_host_words words, size_t bytes,
                                  bool captured, bool fresh, struct cuda_host_block **ret_block);
/* Under memory_lock. */
size_t cuda_pool_bytes(struct cuda_comm *cuda);
/* Frees the unused blocks beyond the size of the pool, except those that graphs refer to. May wait for the device. */
void cuda_pool_trim(struct cuda_comm *cuda);
/* Frees the pool and the host blocks of a communicator that has no running kernels. */
void cuda_pool_close(struct cuda_comm *cuda);

#endif
