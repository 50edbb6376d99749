/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_wire.h - low latency between nodes: sends the contents of an outgoing segment as messages of a stream, and stores
 * received messages at the same offsets of the landing segment. Host memory only, no CUDA.
 *
 * Kernels publish what they have written by words that only grow: weights_ready and rows_ready hold the number of the
 * call, and struct cuda_ll_desc describes it. The words are sent after the data that they cover, as the kernels of the
 * receiver require.
 */
#ifndef EP_CUDA_LL_WIRE_H
#define EP_CUDA_LL_WIRE_H

#include "backend/cuda/ll_segment.h"
#include "net/stream.h"

struct ll_wire {
    struct ep_streams *streams;
    unsigned char *landing; /* segment */
    int me, nranks;
    /* The layout of a segment, as in struct cuda_ll. */
    int32_t segment_tokens, hidden, topk, n_local;
    int64_t counts_at, slot_flag_at, row_flag_at, weight_at, slots_at, rows_at, slot_bytes;
};

/* The words that a rank publishes: see struct cuda_ll_segment. */
struct ll_words {
    uint64_t completed, weights_ready, rows_ready, barriers, masked, unused;
};

enum ll_task_kind { LL_TASK_NONE, LL_TASK_WEIGHTS, LL_TASK_DISPATCH, LL_TASK_COMBINE };

/* The part of a call that is being sent. */
struct ll_task {
    enum ll_task_kind kind;
    struct cuda_ll_desc desc;
    int64_t next;
};

/*
 * State of sending to one rank. Zeroed, except for the rank and its outgoing segment, which is read until
 * ep_streams_flushed_to().
 */
struct ll_sender {
    int rank;
    const unsigned char *segment;
    struct ll_words last_words;       /* as last sent */
    uint64_t weights_sent, rows_sent; /* the last calls whose weights and rows have been sent */
    struct ll_task task;
};

/* Sends what the kernels have published, as far as the network accepts it. Returns true if anything was sent. */
bool ll_wire_send(const struct ll_wire *wire, struct ll_sender *sender);

/* Is there more to send? May miss what is published concurrently. */
bool ll_wire_is_pending(const struct ll_wire *wire, const struct ll_sender *sender);

/*
 * Stores a message of `source`. `finished`: the last call that is complete here. Rows of that call or of earlier ones
 * are late, from a rank that was masked, and are dropped. Returns false if the message is not valid; then nothing has
 * changed.
 */
bool ll_wire_deliver(const struct ll_wire *wire, int source, const void *message, size_t bytes, uint64_t finished);

/*
 * Adds an event, on which waiting kernels evaluate their conditions again. `lost`: CUDA_LL_EVENT_LOST or 0. Called by
 * the thread that receives messages.
 */
void ll_wire_add_event(struct cuda_ll_segment *landing, uint32_t lost);

#define LL_WIRE_BATCH 64 /* messages received from one rank before the next rank */

struct ll_received {
    int n; /* messages stored */
    /*
     * Further messages have arrived, so the landing segment is not up to date. Does not cover messages that wait for
     * space in the ring at the sender: a full ring of large rows is received in one pass, and they follow later.
     */
    bool more;
    size_t damaged_bytes;
};

/*
 * Stores up to LL_WIRE_BATCH messages of `source` that have arrived. Returns false if one, of damaged_bytes, is not
 * valid.
 */
bool ll_wire_receive(const struct ll_wire *wire, int source, uint64_t finished, struct ll_received *ret_received);

#endif
