/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp.h - the network over TCP sockets.
 *
 * For each rail peer there is a connection for each channel, on which records follow one another in order, and one for
 * the control link of the communicator. Payload goes from the caller's memory into the socket and from the socket into
 * the region; nothing is copied in between but what comes in the same read as a header.
 *
 * ep_net_tcp.open: `context` NULL takes the secret from $EPKIT_SECRET and the interface from $EPKIT_TCP_INTERFACE.
 */
#ifndef EP_NET_TCP_H
#define EP_NET_TCP_H

#include "net/net.h"
#include "tcp/handshake.h"

/* What a boot knows. */
struct ep_net_tcp_context {
    struct tcp_key key;
    struct tcp_address local; /* by which the bootstrap has reached this host; family 0: not known */
    char interface[256];      /* as tcp_find_interfaces() takes it; "": none was named */
    /* As in ep_net_params, of who brings the all-gathers. NULL: nobody is asked. */
    ep_status (*check)(void *check_context);
    void *check_context;
};

/* What an endpoint keeps so that its ranks can connect to each other once more, when the group shrinks. */
struct ep_net_tcp_rendezvous {
    struct ep_net_tcp_context context;
    struct tcp_key key;
    uint64_t session;
    int listener;            /* -1: none */
    struct tcp_address from; /* to bind connections to; family 0: any */
    struct {
        int n;
        struct tcp_address addresses[TCP_ADDRESSES]; /* at which this rank may try it */
    } * ranks;                                       /* [R] */
};

/* Of an endpoint of ep_net_tcp, borrowed. */
const struct ep_net_tcp_rendezvous *ep_net_tcp_get_rendezvous(struct ep_net *net);

#endif
