/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relay.h - a TCP relay for tests, which delays, splits, stalls and cuts the connections to ranks.
 *
 * It has one thread and bounded buffers, so that it throttles its senders.
 */
#ifndef EP_TESTS_UNIT_RELAY_H
#define EP_TESTS_UNIT_RELAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define RELAY_MAX_RANKS 8

enum relay_mode {
    RELAY_PASS,
    RELAY_SPLIT, /* forwards a few bytes at a time */
    RELAY_DELAY, /* delays each piece */
    RELAY_STALL, /* forwards nothing, but keeps all connections open: an unreachable host */
    RELAY_CUT    /* all connections are reset, new ones are refused */
};

struct relay;

/* Listens on a port of 127.0.0.1 for each of `n` ranks. NULL on failure. */
struct relay *relay_new(int n);
uint16_t relay_port(const struct relay *relay, int rank);
/* The actual port of the rank; to be set before the first connection. */
void relay_set_target(struct relay *relay, int rank, uint16_t port);
/* Applies to connections to rank `rank` only; -1: to all. */
void relay_set_mode(struct relay *relay, enum relay_mode mode, int rank);
uint64_t relay_bytes(const struct relay *relay);
void relay_free(struct relay *relay);

#endif
