/* SPDX-License-Identifier: Apache-2.0 */
/*
 * acceptor.h - a listener and the connections that have come to it and have not proved themselves yet.
 *
 * Their number is bounded, and each has a short deadline of its own: strangers who connect, say nothing or send rubbish
 * are dropped and counted, and delay no rank.
 */
#ifndef EP_TCP_ACCEPTOR_H
#define EP_TCP_ACCEPTOR_H

#include "tcp/handshake.h"

#include <poll.h>

#define TCP_ACCEPTOR_PENDING 128

/* Asked when a connection has proved itself: EP_OK, or why it is not taken (text in ret_reason). */
typedef ep_status (*tcp_acceptor_check_fn)(void *context, const struct tcp_handshake *hs, char *ret_reason,
                                           size_t bytes);
/* It is welcome, and the descriptor is the callee's. */
typedef void (*tcp_acceptor_accept_fn)(void *context, const struct tcp_handshake *hs, int fd);

struct tcp_acceptor {
    int fd; /* -1: none */
    struct tcp_key key;
    struct tcp_handshake pending[TCP_ACCEPTOR_PENDING];
    int n;
    int error; /* errno with which the kernel gives out no connection now: descriptors or memory are used up; 0: none */
    uint64_t dropped;                                     /* connections that were not taken */
    char last_drop[TCP_WHY_BYTES + TCP_ADDRESS_TEXT + 4]; /* "10.0.0.9:4242 has another secret" */
};

/* Takes the listener. */
void tcp_acceptor_open(struct tcp_acceptor *acceptor, int fd, const struct tcp_key *key);
/* Most entries that tcp_acceptor_get_polls() writes. */
#define TCP_ACCEPTOR_POLLS (TCP_ACCEPTOR_PENDING + 1)
int tcp_acceptor_get_polls(const struct tcp_acceptor *acceptor, struct pollfd *ret_polls);
/* Goes on with all of them; never blocks. */
void tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn accept,
                       void *context);
void tcp_acceptor_close(struct tcp_acceptor *acceptor);

#endif
