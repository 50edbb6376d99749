/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pinned.h - memory that kernels and a thread of ours use until the communicator ends. Host memory is mapped here and
 * registered with CUDA, so that it stays when CUDA ends before the thread does: memory of cudaHostAlloc() goes with the
 * context, at exit(), while the thread reads it.
 */
#ifndef EP_CUDA_PINNED_H
#define EP_CUDA_PINNED_H

#include <epkit/status.h>
#include <stddef.h>

struct cuda_pinned {
    void *memory, *device; /* zeroed, and its address on the device */
    size_t bytes;          /* whole pages */
};

/* Zeroed: none. */
struct cuda_net_memory {
    struct net_allocation *first;
    size_t pinned_bytes;
};

/* EP_E_MEMORY, or what CUDA says. What is there stays as it is. */
ep_status cuda_net_alloc_pinned(struct cuda_net_memory *memory, size_t bytes, struct cuda_pinned *ret_pinned);
/* Of the current device; not zeroed. */
ep_status cuda_net_alloc_device(struct cuda_net_memory *memory, size_t bytes, void **ret_memory);
/* Kernels and the thread have ended. */
void cuda_net_memory_free(struct cuda_net_memory *memory);

#endif
