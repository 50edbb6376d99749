/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_wire.h - low latency between nodes: sends the contents of an outgoing segment as messages of a stream, and stores
 * received messages at the same offsets of the landing segment. Host memory only, no CUDA.
 *
 * Kernels publish what they have written by words that only grow: weights_ready and rows_ready hold the number of the
 * call, and struct ll_wire_desc describes it. The words are sent after the data that they cover, as the kernels of the
 * receiver require.
 */
#ifndef EP_NET_LL_WIRE_H
#define EP_NET_LL_WIRE_H

#include "net/ll_words.h"
#include "net/messages.h"

struct ll_wire {
    struct ep_streams *streams;
    unsigned char *landing; /* segment */
    int me, nranks;         /* sources of a segment; `me` sends */
    int32_t segment_tokens, hidden, topk;
    int32_t n_counts; /* words of a dispatch for each source, ahead of its rows */
    /*
     * Offsets in a segment, and the size of a slot:
     *   counts  uint64 [2][nranks][n_counts], by parity of the dispatch
     *   slot    [nranks][segment_tokens]; flags uint64: number of the call * 2, + 1 if the slot holds a row
     *   weight  uint64 [nranks][segment_tokens,topk]: number << 32 | weight
     *   row     bf16 [segment_tokens,topk,hidden] of a combine; flags uint64 [segment_tokens,topk,parts]: number
     */
    int64_t counts_at, slot_flag_at, row_flag_at, weight_at, slots_at, rows_at, slot_bytes;
};

/* The words that a rank publishes: see struct ll_wire_segment. */
struct ll_words {
    uint64_t completed, weights_ready, rows_ready, barriers, masked, unused;
};

enum ll_task_kind { LL_TASK_NONE, LL_TASK_WEIGHTS, LL_TASK_DISPATCH, LL_TASK_COMBINE };

/* The part of a call that is being sent. */
struct ll_task {
    enum ll_task_kind kind;
    struct ll_wire_desc desc;
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

/*
 * Sets the offsets from the other fields, for a head of the segment of `head_bytes` and rows of up to `parts` parts,
 * and returns the bytes of a segment.
 */
size_t ll_wire_lay_out(struct ll_wire *wire, size_t head_bytes, int parts);

static inline int64_t ll_wire_counts_at(const struct ll_wire *wire, int parity, int source)
{
    return wire->counts_at + ((int64_t)parity * wire->nranks + source) * wire->n_counts * 8;
}

static inline int64_t ll_wire_slot_at(const struct ll_wire *wire, int source, int64_t token)
{
    return wire->slots_at + ((int64_t)source * wire->segment_tokens + token) * wire->slot_bytes;
}

static inline int64_t ll_wire_slot_flag_at(const struct ll_wire *wire, int source, int64_t token)
{
    return wire->slot_flag_at + ((int64_t)source * wire->segment_tokens + token) * 8;
}

static inline int64_t ll_wire_weight_at(const struct ll_wire *wire, int source, int64_t choice)
{
    return wire->weight_at + ((int64_t)source * wire->segment_tokens * wire->topk + choice) * 8;
}

static inline int64_t ll_wire_row_at(const struct ll_wire *wire, int64_t entry)
{
    return wire->rows_at + entry * wire->hidden * 2;
}

static inline int64_t ll_wire_row_flag_at(const struct ll_wire *wire, int64_t entry, int64_t parts)
{
    return wire->row_flag_at + entry * parts * 8;
}

static inline uint64_t ll_wire_load(const void *segment, int64_t offset)
{
    return __atomic_load_n((const uint64_t *)(const void *)((const unsigned char *)segment + offset), __ATOMIC_ACQUIRE);
}

static inline void ll_wire_store(void *segment, int64_t offset, uint64_t value)
{
    __atomic_store_n((uint64_t *)(void *)((unsigned char *)segment + offset), value, __ATOMIC_RELEASE);
}

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
 * Adds an event, on which waiting kernels evaluate their conditions again. `lost`: LL_WIRE_EVENT_LOST or 0. Called by
 * the thread that receives messages.
 */
void ll_wire_add_event(struct ll_wire_segment *landing, uint32_t lost);

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
