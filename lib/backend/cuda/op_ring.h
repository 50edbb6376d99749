/* SPDX-License-Identifier: Apache-2.0 */
/*
 * op_ring.h - the descriptor ring, through which the device tells the proxy the next operation between nodes.
 *
 * The caller's thread adds the descriptor of an operation (struct cuda_ring_op) and launches kernels that know its id.
 * When the first of them runs, it posts the id and the number of the operation, and the proxy pops the posts in order.
 * So an operation in a CUDA graph is posted again by each launch of the graph, without the host.
 */
#ifndef EP_CUDA_OP_RING_H
#define EP_CUDA_OP_RING_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/nodes.h"
#include "backend/cuda/pinned.h"

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

#endif
