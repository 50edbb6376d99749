/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arenas.h - memory that holds the chunks of an operation between nodes until they are sent: two arenas, used
 * alternately. They are GPU memory where the NIC reads it, otherwise pinned memory; what the network can register, it
 * sends without a copy. Kernels and graphs keep the addresses that they were given, so an outgrown arena is kept until
 * the communicator closes. Used by the caller's thread only.
 */
#ifndef EP_CUDA_ARENAS_H
#define EP_CUDA_ARENAS_H

#include "backend/cuda/cuda.h"
#include "net/messages.h"

/* Zeroed, except for `memory`: empty, no limit. */
struct cuda_arenas {
    struct cuda_kept *memory;
    struct ep_net *net;       /* sends the chunks; NULL: nothing is registered with it */
    bool direct;              /* new arenas are to be GPU memory */
    struct cuda_pinned of[2]; /* for even and odd operation numbers; in GPU memory, both addresses are the device's */
    size_t held;              /* bytes of all arenas, outgrown ones included */
    size_t needed;            /* the most that an operation has needed */
    size_t limit;             /* on `held`; 0: none */
};

/*
 * Registers the arenas that were made for an earlier endpoint with `net`: graphs go on using them. Fails if it does not
 * read those in GPU memory.
 */
ep_status cuda_arenas_attach(const struct cuda_arenas *arenas);
/*
 * Grows each arena to `bytes` or more: with headroom for operations that grow gradually, so that all together never
 * exceed five times the largest need. EP_E_MEMORY beyond the limit; then nothing has changed. After another failure one
 * of the two may have grown.
 */
ep_status cuda_arenas_grow(struct cuda_arenas *arenas, const char *call, size_t bytes);
/* cuda_arenas_reserve() grows each arena to `bytes` or more, without headroom. */
ep_status cuda_arenas_reserve(struct cuda_arenas *arenas, const char *call, size_t bytes);

/*
 * GPU memory that NICs read and write without a copy in host memory (GPUDirect RDMA), for networks with
 * ep_net_provider.uses_device_memory.
 */

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
