/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_internal.h - what tcp.c (data) and tcp_open.c (opening, closing) share of the network over TCP. */
#ifndef EP_NET_TCP_INTERNAL_H
#define EP_NET_TCP_INTERNAL_H

#include "net/tcp.h"
#include "net/tcp_wire.h"

/* Records that may wait for room in a socket; more are "again" for the caller. */
#define RECORDS 64

struct record {
    struct tcp_wire_record head;
    const unsigned char *data;
    size_t bytes;
};

/* A connection: a channel to a rail peer, both ways. */
struct stream {
    int fd; /* -1: closed */
    int index;
    struct tcp_address far;
    struct record records[RECORDS]; /* a ring: the first `first`, `count` of them */
    int first, count;
    size_t sent;    /* of the first one, head and data */
    size_t waiting; /* bytes of all of them, less `sent` */
    uint32_t number;
    bool readable, writable; /* as far as is known: until the kernel says EAGAIN */
    bool discards;           /* the peer takes nothing any more: what is sent is thrown away */
    bool ended;              /* nothing comes any more */
    uint64_t ended_ns;
    int error;      /* errno with which it ended, 0: the peer closed it */
    int send_error; /* errno of a send that no connection is to blame for: memory that cannot be read */
    struct tcp_wire in;
};

struct tcp_net {
    struct ep_net net;
    int rank, ranks_per_node, n; /* streams */
    int timeout_ms;
    bool tolerant;
    int epoll;
    struct stream *streams; /* [npeers][channels] */
    int *links;             /* [npeers] control links that nobody has taken yet */
    struct ep_net_tcp_rendezvous rendezvous;
    ep_status broken;
    char reason[256];
};

static inline struct tcp_net *tcp_of(struct ep_net *net)
{
    return (struct tcp_net *)net;
}

/* --- tcp.c --- */

extern const struct ep_net_ops ep_net_tcp_ops;

/* Sends as much as the socket takes; true: something. */
bool tcp_stream_push(struct stream *stream);
/* false: there is no room. */
bool tcp_stream_add_record(struct stream *stream, uint32_t kind, uint64_t place, uint64_t amount, const void *data,
                           size_t bytes);
/* Nobody over there reads any more. What still comes from there is read all the same. */
void tcp_stream_discard_output(struct stream *stream);
/* 0: the peer closed it. */
void tcp_stream_end(struct stream *stream, int error);

/* --- tcp_open.c --- */

void ep_net_tcp_free(struct ep_net *net);

#endif
