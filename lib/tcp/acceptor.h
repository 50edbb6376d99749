/* SPDX-License-Identifier: Apache-2.0 */
/*
 * acceptor.h - a listener and its accepted connections that are not authenticated yet.
 *
 * A stranger is a connection whose HELLO, with its HMAC, has not arrived. Strangers take a bounded number of
 * descriptors, have a short deadline, are read no further than the first wrong message, and are counted when they are
 * dropped. The oldest one is dropped for the next connection, also if this process has no descriptor left. So strangers
 * delay a rank by no more than the time to accept and drop those in front of it, however many connect.
 */
#ifndef EP_TCP_ACCEPTOR_H
#define EP_TCP_ACCEPTOR_H

#include "tcp/handshake.h"

#include <epkit/types.h>
#include <poll.h>

#define TCP_ACCEPTOR_STRANGERS 128
/* With ranks that are in the handshake, or wait for the reply to it. */
#define TCP_ACCEPTOR_PENDING (TCP_ACCEPTOR_STRANGERS + EP_MAX_RANKS)

/* Called when a connection is authenticated: EP_OK accepts it; otherwise it is rejected with the text in ret_reason. */
typedef ep_status (*tcp_acceptor_check_fn)(void *context, const struct tcp_handshake *hs, char *ret_reason,
                                           size_t bytes);
/* Called for an accepted connection; the callee owns the descriptor. */
typedef void (*tcp_acceptor_accept_fn)(void *context, const struct tcp_handshake *hs, int fd);

struct tcp_acceptor {
    int fd; /* -1: none */
    struct tcp_key key;
    struct tcp_handshake *pending; /* [TCP_ACCEPTOR_PENDING]; NULL: not allocated yet */
    int n, most_strangers;
    int error;        /* errno of accept() while descriptors or memory are exhausted; 0: none */
    uint64_t dropped; /* connections that were not accepted; it and the next also after the end */
    char last_drop[TCP_WHY_BYTES + TCP_ADDRESS_TEXT + 4]; /* "10.0.0.9:4242 has another secret" */
};

/* Takes ownership of the listener. */
void tcp_acceptor_open(struct tcp_acceptor *acceptor, int fd, const struct tcp_key *key);
/* Maximum number of entries that tcp_acceptor_get_polls() writes. */
#define TCP_ACCEPTOR_POLLS (TCP_ACCEPTOR_PENDING + 1)
int tcp_acceptor_get_polls(const struct tcp_acceptor *acceptor, struct pollfd *ret_polls);
/* Accepts connections and continues all handshakes; never blocks. */
void tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn accept,
                       void *context);
/* Connections that are not authenticated yet are dropped, and counted, too. Does nothing if fd is -1. */
void tcp_acceptor_close(struct tcp_acceptor *acceptor);

#endif
