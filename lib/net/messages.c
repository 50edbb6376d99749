/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Layout of a ring: for each message a header of 16 bytes, the message, padding to 16 bytes. A message never wraps:
 * where the rest of the ring is too short, a header of kind SKIP fills it. A message takes at most half a ring, so an
 * empty ring has room for it at any position of its head.
 *
 * Signals of an endpoint, per (rail peer, channel): bytes that the peer has put into our ring, and bytes of our
 * messages that the peer has read (credit). Both are running totals.
 */
#include "net/messages.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define RING_MIN_BYTES 4096u

enum message_kind { KIND_MESSAGE = 0x6d657373, KIND_SKIP = 0x736b6970 };

struct message_header {
    uint32_t kind;
    uint32_t position; /* low half of its ring position: detects a stale header of an earlier lap */
    uint64_t bytes;
};

/* Must not change until the network has read it. */
struct staging {
    struct message_header skip, message;
    unsigned char head[EP_STREAM_HEAD_BYTES];
};

/*
 * Messages that may be sent before the oldest has been flushed. Each needs a staging buffer of its own, and
 * flush_test() covers all of them together.
 */
#define STAGED 16

struct sender {
    uint64_t tail; /* end of the last queued message */
    struct staging staged[STAGED];
    int n_staged;
    bool unflushed;
    /* The message being sent: the puts from `next` on are left, and then the signal. */
    bool sending;
    int next, n_puts;
    struct {
        uint64_t offset; /* in the peer's region */
        const void *src;
        size_t bytes;
    } puts[2 + EP_STREAM_PIECES]; /* skip, header and head, pieces */
    uint64_t announced;           /* bytes of the ring that the signal adds */
};

struct receiver {
    uint64_t head;     /* of the message that peek returns */
    uint64_t returned; /* credit returned so far */
    size_t peeked;     /* bytes in the ring of the message at head, 0: not peeked yet */
    bool credit_due;   /* credit is to be returned */
};

struct ep_streams {
    struct ep_net *net;
    size_t ring_bytes;
    int n; /* (rail peer, channel) pairs */
    struct sender *senders;
    struct receiver *receivers;
};

enum stream_signal { SIGNAL_TAIL = 0, SIGNAL_CREDIT = 1, SIGNALS };

/* The index of this rank's stream among the streams of its peer. */
static int index_at_peer(const struct ep_streams *streams, int peer, int channel)
{
    return ep_net_peer_index(peer, streams->net->node) * streams->net->channels + channel;
}

static size_t padded(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

/* Breaks the endpoint below. */
static const void *damaged(struct ep_streams *streams, int index, uint64_t position, const char *what)
{
    int peer = ep_net_index_peer(streams->net, index);

    ep_net_break(streams->net,
                 ep_fail(EP_E_MISMATCH, "streams: node %d, channel %d, byte %llu of the stream: %s", peer,
                         index % streams->net->channels, (unsigned long long)position, what),
                 peer);
    return NULL;
}

static size_t full_ring(size_t ring_bytes)
{
    return (ring_bytes + 63) & ~(size_t)63;
}

ep_status ep_streams_region_bytes(const struct ep_net_params *params, size_t ring_bytes, size_t *ret_bytes)
{
    size_t ring = full_ring(ring_bytes), n;

    if (ring < RING_MIN_BYTES || ring < ring_bytes)
        return ep_fail(EP_E_ARG, "streams: rings of %zu bytes, at least %u", ring_bytes, RING_MIN_BYTES);
    if (params->ranks_per_node < 1 || params->nranks / params->ranks_per_node < 2 || params->channels < 1)
        return ep_fail(EP_E_ARG, "streams: %d ranks with %d per node and %d channels", params->nranks,
                       params->ranks_per_node, params->channels);
    n = (size_t)(params->nranks / params->ranks_per_node - 1) * (size_t)params->channels;
    if (__builtin_mul_overflow(n, ring, ret_bytes) || n > UINT32_MAX / SIGNALS)
        return ep_fail(EP_E_OVERFLOW, "streams: %zu rings of %zu bytes", n, ring);
    return EP_OK;
}

ep_status ep_streams_open(const struct ep_net_provider *provider, const struct ep_net_params *params, size_t ring_bytes,
                          struct ep_streams **ret_streams)
{
    struct ep_net_params full = *params;
    struct ep_streams *streams = NULL;
    struct ep_net *net;
    size_t ring = full_ring(ring_bytes), n;

    EP_TRY(ep_streams_region_bytes(params, ring_bytes, &full.region_bytes));
    n = full.region_bytes / ring;
    full.n_signals = (uint32_t)n * SIGNALS;
    /* The collective call comes first, so that a rank without memory does not leave the others waiting. */
    EP_TRY(provider->open(provider, &full, &net));
    streams = calloc(1, sizeof(*streams));
    if (!streams)
        goto no_memory;
    *streams = (struct ep_streams){.ring_bytes = ring, .n = (int)n};
    streams->senders = calloc(n, sizeof(*streams->senders));
    streams->receivers = calloc(n, sizeof(*streams->receivers));
    if (!streams->senders || !streams->receivers)
        goto no_memory;
    net->batch_signals = true; /* a system call for the signal of each message would cost as much as its payload */
    streams->net = net;
    *ret_streams = streams;
    return EP_OK;
no_memory:
    net->ops->free(net);
    ep_streams_free(streams);
    return ep_fail(EP_E_MEMORY, "streams: no memory for %zu streams", n);
}

void ep_streams_free(struct ep_streams *streams)
{
    if (!streams)
        return;
    if (streams->net)
        streams->net->ops->free(streams->net);
    free(streams->senders);
    free(streams->receivers);
    free(streams);
}

size_t ep_streams_max_message(const struct ep_streams *streams)
{
    return streams->ring_bytes / 2 - sizeof(struct message_header);
}

/* --- sending --- */

/* `base` is added to the offset: 0, or ep_net.payload_base. */
static void add_put(struct ep_streams *streams, int index, uint64_t base, uint64_t position, const void *src,
                    size_t bytes)
{
    int peer = ep_net_index_peer(streams->net, index), channel = index % streams->net->channels;
    uint64_t ring = (uint64_t)index_at_peer(streams, peer, channel) * streams->ring_bytes;
    struct sender *sender = &streams->senders[index];
    int n = sender->n_puts++;

    sender->puts[n].offset = base + ring + position % streams->ring_bytes;
    sender->puts[n].src = src;
    sender->puts[n].bytes = bytes;
}

static bool signal_peer(struct ep_streams *streams, int index, enum stream_signal which, uint64_t add)
{
    struct ep_net *net = streams->net;
    int peer = ep_net_index_peer(streams->net, index), channel = index % net->channels;
    int at_peer = index_at_peer(streams, peer, channel);

    return net->ops->signal(net, peer, channel, (uint32_t)at_peer * SIGNALS + which, add);
}

/* Continues the message being sent as far as the network has room. */
static bool push(struct ep_streams *streams, int index)
{
    struct ep_net *net = streams->net;
    struct sender *sender = &streams->senders[index];
    int peer = ep_net_index_peer(streams->net, index), channel = index % net->channels, first = sender->next;

    if (!sender->sending)
        return false;
    while (sender->next < sender->n_puts &&
           net->ops->put(net, peer, channel, sender->puts[sender->next].offset, sender->puts[sender->next].src,
                         sender->puts[sender->next].bytes))
        sender->next++;
    if (sender->next == sender->n_puts)
        sender->sending = !signal_peer(streams, index, SIGNAL_TAIL, sender->announced);
    return sender->next > first || !sender->sending;
}

/* Everything that was put has left: the staging buffers may be reused. */
static bool flushed(struct ep_streams *streams, int index)
{
    struct ep_net *net = streams->net;
    struct sender *sender = &streams->senders[index];

    if (sender->sending)
        return false;
    if (sender->unflushed && !net->ops->flush_test(net, ep_net_index_peer(streams->net, index), index % net->channels))
        return false;
    sender->unflushed = false;
    sender->n_staged = 0;
    return true;
}

/* false: the message can never be sent; ep_streams_progress() then reports the reason. */
static bool check_message(struct ep_streams *streams, size_t head_bytes, const struct ep_piece *pieces, int n_pieces,
                          size_t *ret_bytes)
{
    size_t bytes = head_bytes, most = ep_streams_max_message(streams);
    ep_status status = EP_OK;

    if (head_bytes > EP_STREAM_HEAD_BYTES || n_pieces < 0 || n_pieces > EP_STREAM_PIECES)
        status = ep_fail(EP_E_ARG, "streams: a message with a head of %zu bytes and %d pieces", head_bytes, n_pieces);
    for (int i = 0; status == EP_OK && i < n_pieces; i++)
        if (__builtin_add_overflow(bytes, pieces[i].bytes, &bytes))
            bytes = SIZE_MAX;
    if (status == EP_OK && bytes > most)
        status = ep_fail(EP_E_ARG, "streams: a message of %zu bytes, at most %zu", bytes, most);
    if (status != EP_OK)
        ep_net_break(streams->net, status, -1);
    *ret_bytes = bytes;
    return status == EP_OK;
}

bool ep_stream_send(struct ep_streams *streams, int peer, int channel, const void *head, size_t head_bytes,
                    const struct ep_piece *pieces, int n_pieces)
{
    int index = ep_net_index(streams->net, peer, channel);
    struct sender *sender = &streams->senders[index];
    size_t bytes, need, skip = 0;
    uint64_t credit = streams->net->signals[(size_t)index * SIGNALS + SIGNAL_CREDIT], begin;
    struct staging *staging;

    if (streams->net->broken != EP_OK || !check_message(streams, head_bytes, pieces, n_pieces, &bytes) ||
        sender->sending)
        return false;
    if (credit > sender->tail) {
        damaged(streams, index, sender->tail, "credit for more bytes than were sent");
        return false;
    }
    if (streams->net->copies)
        sender->n_staged = 0; /* heads have been copied; only pieces may be in use */
    if (sender->n_staged == STAGED && !flushed(streams, index))
        return false;
    need = sizeof(struct message_header) + padded(bytes);
    if (sender->tail % streams->ring_bytes + need > streams->ring_bytes)
        skip = streams->ring_bytes - (size_t)(sender->tail % streams->ring_bytes);
    if (sender->tail + skip + need - credit > streams->ring_bytes)
        return false;

    staging = &sender->staged[sender->n_staged++];
    begin = sender->tail + skip;
    staging->skip = (struct message_header){.kind = KIND_SKIP, .position = (uint32_t)sender->tail, .bytes = skip};
    staging->message = (struct message_header){.kind = KIND_MESSAGE, .position = (uint32_t)begin, .bytes = bytes};
    if (head_bytes)
        memcpy(staging->head, head, head_bytes);
    sender->next = sender->n_puts = 0;
    if (skip)
        add_put(streams, index, 0, sender->tail, &staging->skip, sizeof(staging->skip));
    add_put(streams, index, 0, begin, &staging->message, sizeof(staging->message) + head_bytes);
    for (size_t i = 0, at = sizeof(staging->message) + head_bytes; i < (size_t)n_pieces; at += pieces[i++].bytes)
        if (pieces[i].bytes)
            add_put(streams, index, streams->net->payload_base, begin + at, pieces[i].data, pieces[i].bytes);
    sender->announced = skip + need;
    sender->tail = begin + need;
    sender->sending = sender->unflushed = true;
    push(streams, index);
    return true;
}

int ep_streams_unflushed_peer(struct ep_streams *streams)
{
    int peer = -1;

    for (int index = 0; index < streams->n; index++)
        if (!flushed(streams, index))
            peer = ep_net_index_peer(streams->net, index);
    return peer;
}

bool ep_streams_flushed_to(struct ep_streams *streams, int peer)
{
    bool all = true;

    for (int channel = 0; channel < streams->net->channels; channel++)
        all &= flushed(streams, ep_net_index(streams->net, peer, channel));
    return all;
}

bool ep_streams_flushed(struct ep_streams *streams)
{
    return ep_streams_unflushed_peer(streams) < 0;
}

/* --- receiving --- */

static const struct message_header *header_at(const struct ep_streams *streams, int index, uint64_t position)
{
    const unsigned char *ring = streams->net->region + (size_t)index * streams->ring_bytes;

    return (const struct message_header *)(const void *)(ring + position % streams->ring_bytes);
}

const void *ep_stream_peek(struct ep_streams *streams, int peer, int channel, size_t *ret_bytes)
{
    int index = ep_net_index(streams->net, peer, channel);
    struct receiver *receiver = &streams->receivers[index];
    uint64_t tail = streams->net->signals[(size_t)index * SIGNALS + SIGNAL_TAIL];
    const struct message_header *header;
    size_t rest;

    if (receiver->head == tail)
        return NULL;
    if (tail - receiver->head > streams->ring_bytes)
        return damaged(streams, index, receiver->head, "more bytes than the ring holds");
    header = header_at(streams, index, receiver->head);
    rest = streams->ring_bytes - (size_t)(receiver->head % streams->ring_bytes);
    if (header->kind == KIND_SKIP && header->position == (uint32_t)receiver->head && rest < tail - receiver->head) {
        receiver->head += rest;
        header = header_at(streams, index, receiver->head);
        rest = streams->ring_bytes;
    }
    if (header->kind != KIND_MESSAGE || header->position != (uint32_t)receiver->head)
        return damaged(streams, index, receiver->head, "no message where one was announced");
    if (header->bytes > ep_streams_max_message(streams) || sizeof(*header) + padded(header->bytes) > rest ||
        sizeof(*header) + padded(header->bytes) > tail - receiver->head)
        return damaged(streams, index, receiver->head, "a message that is longer than what was announced");
    receiver->peeked = sizeof(*header) + padded(header->bytes);
    *ret_bytes = header->bytes;
    return header + 1;
}

/* false: no credit is due, or the network has no room. */
static bool return_credit(struct ep_streams *streams, int index)
{
    struct receiver *receiver = &streams->receivers[index];

    if (!receiver->credit_due || !signal_peer(streams, index, SIGNAL_CREDIT, receiver->head - receiver->returned))
        return false;
    receiver->returned = receiver->head;
    receiver->credit_due = false;
    return true;
}

void ep_stream_pop(struct ep_streams *streams, int peer, int channel)
{
    int index = ep_net_index(streams->net, peer, channel);
    struct receiver *receiver = &streams->receivers[index];

    receiver->head += receiver->peeked;
    receiver->peeked = 0;
    /* One credit for many messages while the ring has unread ones; all of it when there is nothing left to read. */
    if (receiver->head - receiver->returned >= streams->ring_bytes / 4 ||
        receiver->head == streams->net->signals[(size_t)index * SIGNALS + SIGNAL_TAIL])
        receiver->credit_due = receiver->head != receiver->returned;
    return_credit(streams, index);
}

ep_status ep_streams_progress(struct ep_streams *streams, bool *ret_moved)
{
    bool moved;

    EP_TRY(streams->net->ops->progress(streams->net, &moved));
    for (int index = 0; index < streams->n; index++) {
        moved |= return_credit(streams, index);
        moved |= push(streams, index);
    }
    *ret_moved = moved;
    return EP_OK;
}

int ep_streams_broken_peer(const struct ep_streams *streams)
{
    return streams->net->broken_by - 1;
}

bool ep_streams_ended(struct ep_streams *streams, int peer)
{
    struct ep_net *net = streams->net;

    return net->ops->ended && net->ops->ended(net, peer);
}

struct ep_net *ep_streams_get_net(struct ep_streams *streams)
{
    return streams->net;
}

void ep_streams_abandon(struct ep_streams *streams)
{
    if (streams)
        streams->net->abandoned = true;
}

size_t ep_streams_bytes(const struct ep_streams *streams)
{
    const struct ep_net *net = streams->net;

    return sizeof(*streams) + (size_t)streams->n * (sizeof(*streams->senders) + sizeof(*streams->receivers)) +
           net->region_bytes + net->n_signals * sizeof(*net->signals) + net->wire_bytes;
}
