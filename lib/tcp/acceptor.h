/* SPDX-License-Identifier: Apache-2.0 */
/*
 * acceptor.h - a listener and its accepted connections that are not authenticated yet.
 *
 * Their number is bounded, and each has a short deadline of its own: connections of other programs, which send nothing
 * or invalid data, are dropped and counted, and delay no rank.
 */
#ifndef EP_TCP_ACCEPTOR_H
#define EP_TCP_ACCEPTOR_H

#include "tcp/handshake.h"

#include <poll.h>

#define TCP_ACCEPTOR_PENDING 128

/* Called when a connection is authenticated: EP_OK accepts it; otherwise it is rejected with the text in ret_reason. */
typedef ep_status (*tcp_acceptor_check_fn)(void *context, const struct tcp_handshake *hs, char *ret_reason,
                                           size_t bytes);
/* Called for an accepted connection; the callee owns the descriptor. */
typedef void (*tcp_acceptor_accept_fn)(void *context, const struct tcp_handshake *hs, int fd);

struct tcp_acceptor {
    int fd; /* -1: none */
    struct tcp_key key;
    struct tcp_handshake *pending; /* [TCP_ACCEPTOR_PENDING]; NULL: not allocated yet */
    int n;
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
