/* SPDX-License-Identifier: Apache-2.0 */
/*
 * direct.h - GPU memory that NICs read and write without a copy in host memory (GPUDirect RDMA), for networks with
 * ep_net_provider.device_memory.
 */
#ifndef EP_CUDA_DIRECT_H
#define EP_CUDA_DIRECT_H

#include "backend/cuda/pinned.h"
#include "net/stream.h"

/*
 * Sizes are multiples of this: memory of cudaMalloc() is then no part of a larger block, and begins and ends at page
 * boundaries, which a dma-buf needs.
 */
#define CUDA_DIRECT_GRANULE ((size_t)2 << 20)

/* EP_E_UNSUPPORTED, with the reason, if the GPU, or the order in which it sees writes of a NIC, does not allow it. */
ep_status cuda_direct_check(int device);

/*
 * Memory of the current device until the communicator closes, with a dma-buf if the driver exports one; `bytes` is a
 * multiple of the granule. cuda_direct_close() closes the dma-buf, which a registration does not need any more.
 */
ep_status cuda_direct_alloc(struct cuda_net_memory *memory, size_t bytes, struct ep_net_buffer *ret_buffer);
void cuda_direct_close(struct ep_net_buffer *buffer);

#endif
