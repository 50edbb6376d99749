/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arenas.h - memory that holds the chunks of an operation between nodes until they are sent: two arenas, used
 * alternately. They are GPU memory where the NIC reads it, otherwise pinned memory; what the network can register, it
 * sends without a copy. Kernels and graphs keep the addresses that they were given, so an outgrown arena is kept until
 * the communicator closes. Used by the caller's thread only.
 */
#ifndef EP_CUDA_ARENAS_H
#define EP_CUDA_ARENAS_H

#include "backend/cuda/pinned.h"
#include "net/stream.h"

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
 * Grows each arena to `bytes` or more: with headroom for operations that grow gradually, so that all together never
 * exceed five times the largest need. EP_E_MEMORY beyond the limit; then nothing has changed. After another failure one
 * of the two may have grown.
 */
ep_status cuda_arenas_grow(struct cuda_arenas *arenas, const char *call, size_t bytes);
/* The same without headroom. */
ep_status cuda_arenas_reserve(struct cuda_arenas *arenas, const char *call, size_t bytes);

#endif
