/* SPDX-License-Identifier: Apache-2.0 */
/*
 * op_ring.h - the descriptor ring: which operation between nodes is next, as the device says.
 *
 * The caller's thread describes an operation (struct cuda_ring_op) and launches kernels that know it by a number, its
 * id. The first of them posts id and number of the operation when it runs, and the proxy takes the posts in their
 * order. So an operation in a CUDA graph is posted again whenever the graph is launched, without the host.
 */
#ifndef EP_CUDA_OP_RING_H
#define EP_CUDA_OP_RING_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/nodes.h"
#include "backend/cuda/pinned.h"

/* First in the description of an operation, which is one block of malloc(). The ring's, from add() on. */
struct cuda_ring_op {
    uint64_t id;
    bool captured; /* in a graph: stays until the communicator ends. Others are freed behind their post. */
};

struct cuda_op_ring {
    struct cuda_op_post *posts, *posts_device; /* pinned, in `kept`, [CUDA_OP_POSTS] */
    uint64_t number;                           /* of the last operation taken; the proxy's own */
    long backoff_ns;                           /* the proxy's own */
    pthread_mutex_t lock;                      /* of what follows */
    pthread_cond_t changed;
    struct cuda_ring_op **ops; /* [room] by id; NULL: not used */
    size_t capacity, next;     /* next: where a place is looked for first */
    size_t called, captured;   /* so many there are, outside of captures and in graphs */
    bool stop;
};

void cuda_op_ring_init(struct cuda_op_ring *ring);
/* `kept` outlives the ring. */
ep_status cuda_op_ring_open(struct cuda_op_ring *ring, struct cuda_net_memory *memory);
/* Of one that was initialised; behind the last kernel and the end of the proxy. */
void cuda_op_ring_close(struct cuda_op_ring *ring);

/* Before the kernels are launched: sets op->id, and wakes the proxy. On failure `op` is the caller's. */
ep_status cuda_op_ring_add(struct cuda_op_ring *ring, struct cuda_ring_op *op);
/* Frees it. No kernel that posts it was launched, or it has been posted and is done. */
void cuda_op_ring_remove(struct cuda_op_ring *ring, struct cuda_ring_op *op);
/* From now on wait() returns at once. No kernel runs any more. */
void cuda_op_ring_stop(struct cuda_op_ring *ring);

/* --- by the proxy ------------------------------------------------------------------------------------------------- */

/* The next operation that was posted; NULL: there is none now. EP_E_DEVICE: what was posted is no operation. */
ep_status cuda_op_ring_pop(struct cuda_op_ring *ring, struct cuda_ring_op **ret_op);

enum cuda_ring_state {
    CUDA_RING_STOPPED,
    CUDA_RING_PENDING, /* an operation was called and is still to come: look at once */
    CUDA_RING_IDLE     /* only launches of graphs may bring one */
};

/* To be asked before take(): behind CUDA_RING_STOPPED it sees all that was ever posted. */
enum cuda_ring_state cuda_op_ring_state(struct cuda_op_ring *ring);
/* Sleeps until an operation is called, or for a moment where there are graphs, or until stop(). */
void cuda_op_ring_sleep(struct cuda_op_ring *ring);
/* The group has failed: nothing more is taken. */
void cuda_op_ring_await_stop(struct cuda_op_ring *ring);

#endif
