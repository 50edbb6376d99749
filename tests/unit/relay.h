/* SPDX-License-Identifier: Apache-2.0 */
/*
 * relay.h - a TCP relay of the tests: connections to ranks lead through it, and it delays, splits, stalls and cuts
 * them.
 *
 * One thread; what it has taken from one side and not given to the other yet is bounded, so it slows its senders down.
 */
#ifndef EP_TESTS_UNIT_RELAY_H
#define EP_TESTS_UNIT_RELAY_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define RELAY_MOST_RANKS 8

enum relay_mode {
    RELAY_PASS,
    RELAY_SPLIT, /* a few bytes at a time */
    RELAY_DELAY, /* each piece a moment later */
    RELAY_STALL, /* nothing passes, all connections stay open: a host that is cut off */
    RELAY_CUT    /* all connections are reset, new ones are refused */
};

struct relay;

/* Listens at a port of 127.0.0.1 for each of `n` ranks. NULL: it cannot. */
struct relay *relay_new(int n);
uint16_t relay_port(const struct relay *relay, int rank);
/* Where the rank listens in truth; before anybody connects. */
void relay_set_target(struct relay *relay, int rank, uint16_t port);
/* Connections to and from rank `rank` alone, -1: all. */
void relay_set_mode(struct relay *relay, enum relay_mode mode, int rank);
uint64_t relay_bytes(const struct relay *relay);
void relay_free(struct relay *relay);

#endif
