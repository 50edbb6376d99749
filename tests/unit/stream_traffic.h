/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream_traffic.h - random messages between all rail peers, on all channels and in both directions at once, each
 * checked byte by byte. One rank's side; used over every executor.
 */
#ifndef EP_TESTS_STREAM_TRAFFIC_H
#define EP_TESTS_STREAM_TRAFFIC_H

#include "net/stream.h"

#include <stdatomic.h>

#define TRAFFIC_MOST_RANKS 8

/* One per rank, in memory that all ranks share: what the wake callback rings. */
struct traffic_bells {
    struct {
        _Alignas(64) _Atomic uint32_t word;
    } rank[TRAFFIC_MOST_RANKS];
};

struct traffic_spec {
    const struct ep_net_provider *provider; /* NULL: the one of the boot */
    int ranks_per_node, channels;
    size_t ring_bytes;
    int messages; /* of each stream, each way */
    uint64_t seed;
    int slow_rank; /* -1: none; this one reads a message now and then only */
    int idle_s;    /* the run fails when this rank has sent and received nothing for so long */
    ep_net_emulation emulation;
    struct traffic_bells *bells; /* NULL: only for executors that do not sleep */
};

struct traffic_result {
    uint64_t messages, bytes; /* received */
    uint64_t laps;            /* of the ring that went round most often */
    uint64_t refused;         /* sends */
    uint64_t flushes;         /* times that everything sent had left */
    uint64_t naps;            /* times it slept until somebody woke it */
    uint64_t lost_wakes;      /* something moved after a sleep that nobody had ended */
    char why[512];            /* "" or what went wrong */
};

/* 0, or -1 with result->why. Runs until everything has been sent and received, or nothing moves any more. */
int traffic_run(const ep_boot *boot, const struct traffic_spec *spec, struct traffic_result *result);

#endif
