/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_wire.h - low latency between nodes: what a rank has in the segment that stands for another one, as messages of a
 * stream; and messages of other ranks, put at the same offsets of the landing segment. Host memory alone, no CUDA.
 *
 * What a kernel writes it makes known by words that only grow: `ahead` and `sent` hold the number of the call whose
 * weights or rows are there, and struct cuda_ll_desc says in which shape. The receiver gets them behind what they are
 * for, as the kernels wait for them.
 */
#ifndef EP_CUDA_LL_WIRE_H
#define EP_CUDA_LL_WIRE_H

#include "backend/cuda/ll_segment.h"
#include "net/stream.h"

/* Of a segment, as in struct cuda_ll. */
struct ll_wire {
    int me, nranks;
    int32_t segment_tokens, hidden, topk, n_local;
    int64_t counts_at, slot_flag_at, row_flag_at, weight_at, slots_at, rows_at, slot_bytes;
};

/* What a rank says of itself: see struct cuda_ll_segment. */
struct ll_words {
    uint64_t completed, weights_ready, rows_ready, barriers, masked, unused;
};

enum ll_task_kind { LL_TASK_NONE, LL_TASK_WEIGHTS, LL_TASK_DISPATCH, LL_TASK_COMBINE };

/* What is being sent of a call. */
struct ll_task {
    enum ll_task_kind kind;
    struct cuda_ll_desc desc;
    int64_t next;
};

/* To one rank: zeroed, with the segment that stands for it, which is read until ep_streams_flushed_to(). */
struct ll_sender {
    const unsigned char *segment;
    struct ll_words last_words;       /* as they were last sent */
    uint64_t weights_sent, rows_sent; /* calls whose weights and rows have been sent */
    struct ll_task task;
};

/* Sends what is there as far as the network takes it. true: something. */
bool ll_wire_send(const struct ll_wire *wire, struct ep_streams *streams, int rank, struct ll_sender *sender);

/* Is there more to be sent? What is there only now may be missed. */
bool ll_wire_is_pending(const struct ll_wire *wire, const struct ll_sender *sender);

/*
 * Takes a message of `source`. `finished`: the last call that is complete here. Rows of it and of calls before it come
 * late, of a rank that was masked, and change nothing. false: it is none that a rank sends, and has changed nothing.
 */
bool ll_wire_deliver(const struct ll_wire *wire, unsigned char *landing, int source, const void *message, size_t bytes,
                     uint64_t finished);

/* Kernels that wait look anew at what has landed. `lost`: CUDA_LL_EVENT_LOST or 0. By the thread that takes messages.
 */
void ll_wire_add_event(struct cuda_ll_segment *landing, uint32_t lost);

#define LL_WIRE_BATCH 64 /* messages from one rank before the others get their turn */

struct ll_received {
    int n; /* messages that were taken */
    /*
     * Further ones are there: what had come is not all in the landing segment. Says nothing of those for which the
     * sender finds no room in the ring: a full ring of large rows is taken in one turn, and they come after it.
     */
    bool more;
    size_t damaged_bytes;
};

/* Takes messages of `source` that have come, LL_WIRE_BATCH at most. false: one of damaged_bytes is none. */
bool ll_wire_receive(const struct ll_wire *wire, struct ep_streams *streams, unsigned char *landing, int source,
                     uint64_t finished, struct ll_received *ret_received);

#endif
