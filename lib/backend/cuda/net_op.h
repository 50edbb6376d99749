/* SPDX-License-Identifier: Apache-2.0 */
/*
 * net_op.h - an operation between nodes, as the proxy sees it: net_op.c makes it on the caller's thread, and proxy.c
 * runs it on a thread of its own.
 */
#ifndef EP_CUDA_NET_OP_H
#define EP_CUDA_NET_OP_H

#include "backend/cuda/arenas.h"
#include "backend/cuda/proxy.h"

/*
 * op_ring.c: the descriptor ring, through which the device tells the proxy the next operation between nodes.
 *
 * The caller's thread adds the descriptor of an operation (struct cuda_ring_op) and launches kernels that know its id.
 * When the first of them runs, it posts the id and the number of the operation, and the proxy pops the posts in order.
 * So an operation in a CUDA graph is posted again by each launch of the graph, without the host.
 */

/* First member of an op descriptor, which is one malloc() block. Owned by the ring after cuda_op_ring_add(). */
struct cuda_ring_op {
    uint64_t id;
    bool captured; /* in a graph: freed with the communicator. Other operations are freed after they are posted */
};

struct cuda_op_ring {
    struct cuda_op_post *posts, *posts_device; /* pinned, in `memory`; [CUDA_OP_POSTS] */
    uint64_t number;                           /* of the last operation popped; used by the proxy only */
    long backoff_ns;                           /* used by the proxy only */
    pthread_mutex_t lock;                      /* protects what follows */
    pthread_cond_t changed;
    struct cuda_ring_op **ops; /* [capacity] by id; NULL: unused */
    size_t capacity, next;     /* next: where the search for a free id begins */
    size_t called, captured;   /* number of operations added, outside of captures and in graphs */
    bool stop;
};

void cuda_op_ring_init(struct cuda_op_ring *ring);
/* `memory` must outlive the ring. */
ep_status cuda_op_ring_open(struct cuda_op_ring *ring, struct cuda_kept *memory);
/* Closes an initialised ring, after the last kernel and the end of the proxy. */
void cuda_op_ring_close(struct cuda_op_ring *ring);

/* Other members: operations in graphs stay, the numbers begin again. The proxy and the kernels have ended. */
void cuda_op_ring_reset(struct cuda_op_ring *ring);
/* Called before the kernels are launched. Sets op->id and wakes the proxy. On failure the caller still owns `op`. */
ep_status cuda_op_ring_add(struct cuda_op_ring *ring, struct cuda_ring_op *op);
/* Frees an operation that has been posted and run, or whose kernels were not launched. */
void cuda_op_ring_remove(struct cuda_op_ring *ring, struct cuda_ring_op *op);
/* Makes cuda_op_ring_sleep() return at once. No kernel may run any more. */
void cuda_op_ring_stop(struct cuda_op_ring *ring);

/* --- by the proxy ------------------------------------------------------------------------------------------------- */

/* Pops the next operation that was posted; NULL: none at present. EP_E_DEVICE: the post names no operation. */
ep_status cuda_op_ring_pop(struct cuda_op_ring *ring, struct cuda_ring_op **ret_op);

enum cuda_ring_state {
    CUDA_RING_STOPPED,
    CUDA_RING_PENDING, /* an operation was called and not yet popped: poll without sleeping */
    CUDA_RING_IDLE     /* only launches of graphs may post one */
};

/* Must be read before cuda_op_ring_pop(): if it is CUDA_RING_STOPPED, that pop sees every post. */
enum cuda_ring_state cuda_op_ring_state(struct cuda_op_ring *ring);
/* Sleeps until an operation is called or the ring is stopped; if there are graphs, for the poll interval at most. */
void cuda_op_ring_sleep(struct cuda_op_ring *ring);
/* For a failed group, of which nothing more is popped. */
void cuda_op_ring_await_stop(struct cuda_op_ring *ring);

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Header of each chunk. A multiple of 16 bytes, so that the rows are aligned. */
struct net_chunk_header {
    uint64_t number;
    uint32_t chunk, bytes;
    uint32_t desc[(CUDA_DESC_COMPARED + 3) / 4 * 4];
};

/*
 * Double-buffered: a kernel may pack the next operation while the previous one is still being sent. The addresses of
 * the same memory for the host and for the kernels; the arenas are set for each operation.
 */
struct net_op_buffers {
    int slots;
    struct cuda_net_buffers host, device;
};

/* One direction: [nnodes] number of chunks and first slot; [nnodes, channels] next chunk. */
struct net_direction_state {
    struct cuda_list_side changing; /* if its capacity is not 0, the lists are measured again at each run */
    int slots;
    int32_t *chunks, *first, *next;
    uint32_t *bytes; /* [slots] size of each chunk */
    int n_chunks;
    int remaining;            /* chunks not yet sent or received */
    uint64_t rows, all_bytes; /* of all chunks */
};

struct cuda_net_op {
    struct cuda_ring_op base;
    enum ep_group_phase phase;
    uint32_t desc[CUDA_DESC_COMPARED];
    struct net_op_buffers buffers[2]; /* as of cuda_net_op_prepare() */
    size_t slot_bytes;                /* of the arena */
    int32_t tokens;                   /* as in struct cuda_net_op_params, like the next two */
    size_t token_bytes, unit_bytes;
    struct net_direction_state out, in;
    /* State of the current run. */
    uint64_t number;
    bool *published; /* [nnodes, channels] the next chunk has been published to the kernels */
    bool sent;
};

struct cuda_proxy {
    struct cuda_comm *cuda;
    struct ep_streams *streams;
    void *region;                  /* registered with CUDA; NULL: payload is received in GPU memory */
    unsigned char *payload_device; /* device address of the payload region */
    int nnodes, node, channels;
    struct cuda_node_range one_each[EP_MAX_RANKS]; /* lists of one token for each other node */
    struct net_op_buffers buffers[2];              /* for even and odd operation numbers */
    struct cuda_arenas arenas;                     /* of the buffers */
    struct cuda_kept memory;                       /* that kernels may use; zeroed when the members change */
    struct cuda_kept arena_memory, net_memory;     /* of the arenas; of the endpoint */
    struct cuda_proxy_words *words, *words_device; /* followed by [nnodes + 1] words: cuda_net_op_args.moved */
    uint64_t *moved;

    pthread_t thread;
    bool started;
    struct cuda_op_ring ring;
    _Atomic uint64_t limit_ns; /* not 0: the communicator closes; peers that accept nothing until then are given up */
    bool broken;               /* used by the proxy only */
};

/* Computes the number and the size of the chunks of one side of the operation. */
void cuda_net_op_measure(const struct cuda_proxy *p, const struct cuda_net_op *op, const struct cuda_list_side *lists,
                         struct net_direction_state *side);

#endif
