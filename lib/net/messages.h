/* SPDX-License-Identifier: Apache-2.0 */
/*
 * messages.h - bounded, ordered message streams over struct ep_net: one per (peer, channel) and direction.
 *
 * A stream is a ring buffer in the receiver's region. The sender puts a message into it and signals the new tail; the
 * receiver reads in place and signals the head back (credit). A sender without credit waits, so a slow receiver
 * throttles its senders and memory use is bounded. Ring positions are 64-bit byte counts that never wrap.
 */
#ifndef EP_NET_MESSAGES_H
#define EP_NET_MESSAGES_H

#include "net/net.h"

struct ep_streams;

/* A piece of a message. It is not copied: it must not change until ep_streams_flushed(). */
struct ep_piece {
    const void *data;
    size_t bytes;
};

#define EP_STREAM_HEAD_BYTES 1024 /* most bytes of a message head, which ep_stream_send() copies */
#define EP_STREAM_PIECES 8

/* Bytes of the region of an endpoint with such streams. */
ep_status ep_streams_region_bytes(const struct ep_net_params *params, size_t ring_bytes, size_t *ret_bytes);

/* Opens the endpoint from `provider` and the streams on it. params->region_bytes and n_signals are set here. */
ep_status ep_streams_open(const struct ep_net_provider *provider, const struct ep_net_params *params, size_t ring_bytes,
                          struct ep_streams **ret_streams);
void ep_streams_free(struct ep_streams *streams);

/* Largest message (head and pieces) of a stream: half a ring. */
size_t ep_streams_max_message(const struct ep_streams *streams);

/*
 * Queues one message: `head` (copied), then the pieces. false: nothing was queued, because there is no credit or the
 * previous message is still being sent; call ep_streams_progress() and try again.
 */
bool ep_stream_send(struct ep_streams *streams, int peer, int channel, const void *head, size_t head_bytes,
                    const struct ep_piece *pieces, int n_pieces);

/*
 * The oldest complete message of (peer, channel), aligned to 16 bytes, or NULL. Valid until ep_stream_pop(). Its pieces
 * follow the head; if ep_net.payload is not the region, they are at the same offset of the payload region instead.
 */
const void *ep_stream_peek(struct ep_streams *streams, int peer, int channel, size_t *ret_bytes);
void ep_stream_pop(struct ep_streams *streams, int peer, int channel);

/* Sends pending messages and credits, and calls progress() of the network. *ret_moved as in ep_net_ops. */
ep_status ep_streams_progress(struct ep_streams *streams, bool *ret_moved);

/* All messages have left, and their pieces may be changed. */
bool ep_streams_flushed(struct ep_streams *streams);

/* All messages to `peer` have left, and their pieces may be changed. */
bool ep_streams_flushed_to(struct ep_streams *streams, int peer);

/* A node with unflushed messages, or -1. */
int ep_streams_unflushed_peer(struct ep_streams *streams);

/* The node that broke the streams, or -1. */
int ep_streams_broken_peer(const struct ep_streams *streams);

/* ep_net_ops.ended of the endpoint; false where it has none. */
bool ep_streams_ended(struct ep_streams *streams, int peer);

/* The endpoint below, borrowed. */
struct ep_net *ep_streams_get_net(struct ep_streams *streams);

/* Before ep_streams_free(): the group has failed, and data in flight is not needed. */
void ep_streams_abandon(struct ep_streams *streams);

/* Bytes of memory held by the streams and the endpoint. */
size_t ep_streams_bytes(const struct ep_streams *streams);

#endif
