/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.h - GPU memory that NICs read and write without a copy in host memory (GPUDirect RDMA), for networks with
 * ep_net_provider.uses_device_memory.
 */
#ifndef EP_CUDA_DIRECT_H
#define EP_CUDA_DIRECT_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/pinned.h"
#include "net/stream.h"

/*
 * Sizes are multiples of this. A dma-buf needs memory that begins and ends at page boundaries; smaller allocations of
 * cudaMalloc() are parts of blocks of this size (as observed, CUDA documents no alignment of pages).
 */
#define CUDA_DIRECT_GRANULE ((size_t)2 << 20)

/* A multiple of the granule; SIZE_MAX on overflow. */
static inline size_t cuda_direct_round_up(size_t bytes)
{
    size_t granules = bytes / CUDA_DIRECT_GRANULE + (bytes % CUDA_DIRECT_GRANULE != 0);

    return granules > SIZE_MAX / CUDA_DIRECT_GRANULE ? SIZE_MAX : granules * CUDA_DIRECT_GRANULE;
}

/* EP_E_UNSUPPORTED, with the reason, if the GPU, or the order in which it sees writes of a NIC, do not allow it. */
ep_status cuda_direct_check(int device);

/*
 * Memory of the current device until the communicator closes, with a dma-buf if the driver exports one; `bytes` is a
 * multiple of the granule. cuda_direct_close() closes the dma-buf, which a registration does not need any more.
 */
ep_status cuda_direct_alloc(struct cuda_kept *memory, size_t bytes, struct ep_net_buffer *ret_buffer);
void cuda_direct_close(struct ep_net_buffer *buffer);

/*
 * Collective, for networks that may use GPU memory, before the streams carry anything else: do the transfers of this
 * rank and of its rail peers arrive? The result may differ between ranks.
 */
ep_status cuda_direct_probe(struct cuda_comm *cuda, struct ep_streams *streams, struct cuda_kept *memory);

#endif
