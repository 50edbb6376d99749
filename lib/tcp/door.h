/* SPDX-License-Identifier: Apache-2.0 */
/*
 * door.h - a listener and the connections that have come to it and have not proved themselves yet.
 *
 * Their number is bounded, and each has a short deadline of its own: strangers who connect, say nothing or send rubbish
 * are dropped and counted, and hold nobody up.
 */
#ifndef EP_TCP_DOOR_H
#define EP_TCP_DOOR_H

#include "tcp/shake.h"

#include <poll.h>

#define TCP_DOOR_PENDING 128

/* Asked when a connection has proved itself: EP_OK, or why it is not taken (text in ret_reason). */
typedef ep_status (*tcp_door_judge_fn)(void *context, const struct tcp_shake *shake, char *ret_reason, size_t bytes);
/* It is welcome, and the descriptor is the callee's. */
typedef void (*tcp_door_take_fn)(void *context, const struct tcp_shake *shake, int fd);

struct tcp_door {
    int fd; /* -1: none */
    struct tcp_key key;
    struct tcp_shake pending[TCP_DOOR_PENDING];
    int n;
    uint64_t dropped;             /* connections that were not taken */
    char last_drop[TCP_WHY_BYTES + TCP_ADDRESS_TEXT]; /* "10.0.0.9:4242 has another secret" */
};

/* Takes the listener. */
void tcp_door_open(struct tcp_door *door, int fd, const struct tcp_key *key);
/* Most entries that tcp_door_fill() writes. */
#define TCP_DOOR_POLLS (TCP_DOOR_PENDING + 1)
int tcp_door_fill(const struct tcp_door *door, struct pollfd *ret_polls);
/* Goes on with all of them; never blocks. */
void tcp_door_step(struct tcp_door *door, tcp_door_judge_fn judge, tcp_door_take_fn take, void *context);
void tcp_door_close(struct tcp_door *door);

#endif
