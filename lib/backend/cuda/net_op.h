/* SPDX-License-Identifier: Apache-2.0 */
/* net_op.h - what a hop is: net_op.c makes them, by the caller's thread, and proxy.c runs them, in a thread of its own.
 */
#ifndef EP_CUDA_NET_OP_H
#define EP_CUDA_NET_OP_H

#include "backend/cuda/arenas.h"
#include "backend/cuda/op_ring.h"
#include "backend/cuda/pinned.h"
#include "backend/cuda/proxy.h"

/* In front of each chunk. A multiple of 16 bytes, so that the rows are aligned. */
struct net_chunk_header {
    uint64_t number;
    uint32_t chunk, bytes;
    uint32_t desc[(CUDA_DESC_COMPARED + 3) / 4 * 4];
};

/* What two hops in turn use: a kernel may pack the next one while the last one is still leaving. */
struct net_op_buffers {
    unsigned char *arena, *arena_device; /* pinned, as all here but `taken` */
    int slots;
    uint64_t *words; /* [slots] ready, [slots] used, then [slots] struct cuda_landed */
    uint64_t *words_device;
    uint32_t *n_read; /* device memory, [slots] */
};

/* Of one direction: [nnodes] chunks and first slots; [nnodes, channels] next chunk. */
struct net_direction_state {
    int32_t *chunks, *first, *next;
    uint32_t *bytes; /* [slots] of each chunk */
    int n_chunks;
    int remaining;            /* of these */
    uint64_t rows, all_bytes; /* of all chunks */
};

struct cuda_net_op {
    struct cuda_ring_op base;
    enum ep_group_phase phase;
    uint32_t desc[CUDA_DESC_COMPARED];
    struct net_op_buffers buffers[2]; /* as they were when the hop was prepared */
    size_t slot_bytes;                /* of the arena */
    struct net_direction_state out, in;
    struct cuda_net_direction changing[2]; /* what they are measured by in each run, out and in; room 0: once for all */
    /* Of the run that is under way. */
    uint64_t number;
    bool *published; /* [nnodes, channels] the next chunk has been shown to the kernels */
    bool sent;
};

struct cuda_proxy {
    struct cuda_comm *cuda;
    struct ep_streams *streams;
    void *region; /* registered with CUDA, and its address on the device */
    unsigned char *region_device;
    int nnodes, node, channels;
    struct net_op_buffers buffers[2];              /* for even and odd numbers */
    struct cuda_arenas arenas;                     /* theirs */
    struct cuda_net_memory memory;                 /* memory that kernels may still use, until the communicator ends */
    struct cuda_proxy_words *words, *words_device; /* with [nnodes + 1] words behind: struct cuda_chunks.moved */
    uint64_t *moved;

    pthread_t thread;
    bool started;
    struct cuda_op_ring ring;
    _Atomic uint64_t limit_ns; /* not 0: the communicator closes, and peers that take nothing are left by then */
    bool broken;               /* the proxy's own */
};

/* Chunks of the list of a node. */
static inline int cuda_net_direction_chunks(const struct cuda_net_direction *side, int node)
{
    return (side->rail[node].n + side->tokens - 1) / side->tokens;
}

/* Bytes of each chunk, by its slot, and of all. */
void cuda_net_direction_measure(const struct cuda_proxy *p, const struct cuda_net_direction *from,
                                struct net_direction_state *side);

#endif
