/* SPDX-License-Identifier: Apache-2.0 */
/* emulation.h - the faults that the emulated network injects: for the tests and the command. */
#ifndef EP_NET_EMULATION_H
#define EP_NET_EMULATION_H

#include "base/error.h"

#include <stdint.h>

/* A put of at least as many bytes usually has rows of data in its middle. With smaller split_bytes there is none. */
#define EP_NET_FLIP_BYTES 256

/*
 * Fault injection of the network "emulated", whose nodes are all on one host. Only the order within one (peer, channel)
 * is kept. All zero: no faults.
 */
typedef struct ep_net_emulation {
    uint64_t seed;        /* of the random choices below; the same seed gives the same choices */
    uint32_t delay_us;    /* each write is delayed by a random time of up to this */
    uint32_t ring_bytes;  /* capacity of the wire per (peer, channel), at least 256; 0: default. Small ones force
                             back-pressure */
    uint32_t split_bytes; /* writes take effect in pieces of at most this; 0: whole */
    uint32_t reorder;     /* 1: channels are processed in random order instead of round-robin */
    uint32_t flip_put;    /* this put of EP_NET_FLIP_BYTES or more that a rank receives, counted from 1, arrives with a
                             wrong bit; 0: none. To see that a check of results can fail */
} ep_net_emulation;

/* Applies to communicators that the calling thread creates from now on. NULL: no faults, the default. */
EP_PRIVATE_API void ep_net_emulate(const ep_net_emulation *emulation);

#endif
