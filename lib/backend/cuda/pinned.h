/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pinned.h - memory that kernels use until the communicator closes. Host memory comes from mmap() and is registered
 * with CUDA, so that it remains valid if CUDA shuts down before the threads of the communicator, its monitor and its
 * proxy, end: memory of cudaHostAlloc() is freed with the context, at exit(), while they read it.
 */
#ifndef EP_CUDA_PINNED_H
#define EP_CUDA_PINNED_H

#include <epkit/status.h>
#include <stddef.h>

struct cuda_pinned {
    void *memory, *device; /* zeroed; its device address */
    size_t bytes;          /* whole pages */
};

/* Memory that is kept until all of it is freed. Zeroed: empty. */
struct cuda_kept {
    struct kept_allocation *first;
    size_t pinned_bytes, device_bytes;
};

/* EP_E_MEMORY, or the error of CUDA. Earlier allocations are not affected. */
ep_status cuda_keep_pinned(struct cuda_kept *memory, size_t bytes, struct cuda_pinned *ret_pinned);
/* On the current device; not zeroed. */
ep_status cuda_keep_device(struct cuda_kept *memory, size_t bytes, void **ret_memory);
/* The kernels and the threads that use it must have ended. */
void cuda_kept_free(struct cuda_kept *memory);

#endif
