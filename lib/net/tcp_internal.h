/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_internal.h - shared by tcp.c (data), tcp_mesh.c (connecting) and tcp_open.c (opening, closing). */
#ifndef EP_NET_TCP_INTERNAL_H
#define EP_NET_TCP_INTERNAL_H

#include "net/tcp.h"
#include "net/tcp_wire.h"

/* Puts and records that may be queued for a socket; beyond that put and signal return false. */
#define RECORDS 64
/* Signals of a connection that may be held. */
#define HELD 4

struct record {
    struct tcp_wire_record head;
    const unsigned char *data;
    size_t bytes;
    bool joined; /* a put that continues the record before: no head is sent for it */
};

/* The connection of one channel to a rail peer. */
struct tcp_conn {
    int fd; /* -1: closed */
    int index;
    struct tcp_address remote;
    struct record records[RECORDS]; /* ring: `count` records from `first` on */
    int first, count;
    struct record *open; /* the last put that is no joined one, if all records after it have joined it; NULL: none */
    struct {
        uint32_t index;
        uint64_t add;
    } held[HELD]; /* signals that become records before the next send */
    int n_held;
    size_t sent;    /* bytes of the first record, head and data */
    size_t waiting; /* unsent bytes of all of them */
    uint32_t number;
    bool readable, writable; /* assumed until the kernel returns EAGAIN */
    bool discards;           /* the peer no longer reads: output is discarded */
    bool bye_queued;
    bool ended; /* no more input */
    uint64_t ended_ns;
    int error;      /* errno with which it ended, 0: the peer closed it */
    int send_error; /* errno of a send that is not the connection's fault: unreadable source memory */
    struct tcp_wire in;
    int unacknowledged;       /* bytes in the socket when the endpoint is freed, */
    uint64_t acknowledged_ns; /* and when their number has last changed */
};

struct tcp_net {
    struct ep_net net;
    int epoll;
    int n;                             /* connections */
    struct tcp_conn *conns;            /* [npeers][channels] */
    int *links;                        /* [npeers] control links that are not detached */
    struct ep_net_tcp_context context; /* the bootstrap may have been freed when another endpoint is opened like this */
};

static inline bool tcp_conn_has_output(const struct tcp_conn *conn)
{
    return conn->count || conn->n_held;
}

static inline struct tcp_net *tcp_of(struct ep_net *net)
{
    return (struct tcp_net *)net;
}

/* --- tcp.c --- */

extern const struct ep_net_ops ep_net_tcp_ops;

/* Sends as much as the socket accepts; true: at least one byte. */
bool tcp_conn_push(struct tcp_conn *conn);
/* Queues the last record, once, if there is room. */
void tcp_conn_queue_bye(struct tcp_conn *conn);
/* The peer no longer reads. Its data is still received. */
void tcp_conn_discard_output(struct tcp_conn *conn);
/* 0: the peer closed it. */
void tcp_conn_end(struct tcp_conn *conn, int error);

/* --- tcp_mesh.c --- */

/*
 * Connects this rank with its rail peers, all channels and the control links; succeeds on all ranks or on none, also if
 * this rank has failed already, with the status `mine`.
 */
ep_status ep_net_tcp_connect(struct tcp_net *t, const struct ep_net_params *params,
                             const struct ep_net_tcp_context *context, ep_status mine);

/* --- tcp_open.c --- */

void ep_net_tcp_free(struct ep_net *net);

#endif
