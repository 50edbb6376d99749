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

/* The checks of params and context (NULL: none), at intervals, while the creation of an endpoint waits for peers. */
struct ep_net_tcp_watch {
    const struct ep_net_params *params;
    const struct ep_net_tcp_context *context;
    uint64_t next_ns; /* 0 at first */
};

/* Call it at every turn of the wait. EP_OK, or the reason to fail: a rank has died, or the call was aborted. */
ep_status ep_net_tcp_check_ranks(struct ep_net_tcp_watch *watch);

/* The context with which an endpoint of ep_net_tcp was opened, without its check; borrowed. */
const struct ep_net_tcp_context *ep_net_tcp_get_context(struct ep_net *net);

/* Moves the connected socket of its control link to `peer` to the caller; -1: it was detached before. */
int ep_net_tcp_detach_link(struct ep_net *net, int peer);

#endif
