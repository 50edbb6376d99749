/* SPDX-License-Identifier: Apache-2.0 */
/* emulation.h - how badly the emulated network behaves: for the tests and the command, which want it to. */
#ifndef EP_NET_EMULATION_H
#define EP_NET_EMULATION_H

#include "base/error.h"

#include <stdint.h>

/*
 * The network between nodes when all ranks live on one host ("emulated"): how badly it behaves. Order holds only within
 * one (peer, channel). All zero is a well-behaved network.
 */
typedef struct ep_net_emulation {
    uint64_t seed;        /* of the random choices below; the same seed gives the same choices */
    uint32_t delay_us;    /* each write lands up to this much later, drawn anew for each */
    uint32_t ring_bytes;  /* capacity of the wire per (peer, channel), at least 256; 0: default. Tiny ones force
                             back-pressure */
    uint32_t split_bytes; /* writes land in pieces of at most this; 0: whole */
    uint32_t reorder;     /* 1: channels are served in random order instead of in turn */
    uint32_t stall_rank;  /* with stall_ms: this rank's network stops once for stall_ms */
    uint32_t stall_ms;    /* 0: never */
} ep_net_emulation;

/* Of the communicators that the calling thread makes from now on. NULL: well-behaved, as in the beginning. */
EP_PRIVATE_API void ep_net_emulate(const ep_net_emulation *emulation);

/* What was set so, for ep_comm_new(). */
const ep_net_emulation *ep_net_emulation_get(void);

#endif
