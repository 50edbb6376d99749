/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream_traffic.h - sends random messages between all rail peers, on all channels and in both directions concurrently,
 * and verifies every byte. Runs on one rank; used with every engine.
 */
#ifndef EP_TESTS_STREAM_TRAFFIC_H
#define EP_TESTS_STREAM_TRAFFIC_H

#include "net/messages.h"

#include <stdatomic.h>

#define TRAFFIC_MAX_RANKS 8

/* Doorbells rung by the wake callback, one per rank, in shared memory. */
struct traffic_doorbells {
    struct {
        _Alignas(64) _Atomic uint32_t word;
    } rank[TRAFFIC_MAX_RANKS];
};

struct traffic_spec {
    const struct ep_net_provider *provider; /* NULL: that of the boot */
    int ranks_per_node, channels;
    size_t ring_bytes;
    int messages; /* of each stream and direction */
    uint64_t seed;
    int slow_rank; /* -1: none; this rank reads messages rarely */
    int idle_s;    /* the run fails when this rank has neither sent nor received for so long */
    ep_net_emulation emulation;
    struct traffic_doorbells *doorbells; /* NULL: only for executors that do not sleep */
};

struct traffic_result {
    uint64_t messages, bytes; /* received */
    uint64_t laps;            /* most laps of any ring */
    uint64_t refused;         /* sends */
    uint64_t flushes;         /* number of complete flushes */
    uint64_t sleeps;          /* sleeps on the doorbell */
    uint64_t lost_wakeups;    /* sleeps that timed out although there was work */
    char why[512];            /* "" or what went wrong */
};

/* 0, or -1 with result->why. Runs until everything has been sent and received, or nothing moves any more. */
int traffic_run(const ep_boot *boot, const struct traffic_spec *spec, struct traffic_result *result);

#endif
