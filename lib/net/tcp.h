/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp.h - the network over TCP sockets.
 *
 * Each rail peer has one connection for each channel, which carries a sequence of records, and one for the control link
 * of the communicator. Payload is sent from the caller's memory and received into the region without a copy, except for
 * bytes that are read together with a header.
 *
 * ep_net_tcp.open: with `context` NULL the secret is read from $EPKIT_SECRET, the interface from $EPKIT_TCP_INTERFACE.
 */
#ifndef EP_NET_TCP_H
#define EP_NET_TCP_H

#include "net/net.h"
#include "tcp/acceptor.h"

/* Known to a boot. */
struct ep_net_tcp_context {
    struct tcp_key key;
    struct tcp_address local; /* address of this host in the bootstrap; family 0: not known */
    char interface[256];      /* for tcp_find_interfaces(); "": any */
    /* As in ep_net_params, by the provider of the all-gathers. NULL: no check. */
    ep_status (*check)(void *check_context);
    void *check_context;
};

/* Kept by an endpoint so that its ranks can connect to each other again when the group shrinks. */
struct ep_net_tcp_rendezvous {
    struct ep_net_tcp_context context;
    struct tcp_key key;
    uint64_t session;
    struct tcp_address from; /* local address of outgoing connections; family 0: any */
    struct {
        int n;
        struct tcp_address addresses[TCP_ADDRESSES]; /* usable from this rank */
    } * ranks;                                       /* [R] */
};

/* The checks of params and context (NULL: none), at intervals, while the creation of an endpoint waits for peers. */
struct ep_net_tcp_watch {
    const struct ep_net_params *params;
    const struct ep_net_tcp_context *context;
    uint64_t next_ns; /* 0 at first */
};

/* Call it at every turn of the wait. EP_OK, or the reason to fail: a rank has died, or the call was aborted. */
ep_status ep_net_tcp_check_ranks(struct ep_net_tcp_watch *watch);

/* Of an endpoint of ep_net_tcp, borrowed. */
const struct ep_net_tcp_rendezvous *ep_net_tcp_get_rendezvous(struct ep_net *net);

/*
 * The listener that it keeps for a shrink; its fd is -1 if there is none. A thread of the communicator serves it, so
 * that strangers do not fill the queue of the kernel: it holds ranks that connect (tcp_acceptor_hold()), until a shrink
 * takes the acceptor for itself. get_polls() returns as tcp_acceptor_get_polls().
 */
int ep_net_tcp_get_polls(struct ep_net *net, struct pollfd *ret_polls);
void ep_net_tcp_hold(struct ep_net *net);
/* take false: gives it back. */
struct tcp_acceptor *ep_net_tcp_take_acceptor(struct ep_net *net, bool take);

/* Moves the connected socket of its control link to `peer` to the caller; -1: it was detached before. */
int ep_net_tcp_detach_link(struct ep_net *net, int peer);

#endif
