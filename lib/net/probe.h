/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h - what the network of a communicator carries by itself, and what plain sockets carry between the same ranks:
 * for the benchmark, beside operations of the same bytes.
 */
#ifndef EP_NET_PROBE_H
#define EP_NET_PROBE_H

#include "base/error.h"

#include <epkit/comm.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ep_net_probe;

/*
 * An endpoint like that of the communicator, and over the network "tcp" as many plain sockets. `bytes` go to each rail
 * peer in a turn, the same on all ranks. Collective. EP_E_UNSUPPORTED: one node, or not the host backend.
 */
EP_PRIVATE_API ep_status ep_net_probe_new(ep_comm *comm, size_t bytes, struct ep_net_probe **ret_probe);

/* Sends to all rail peers and receives from all, in puts of EP_NET_PROBE_CHUNK. Collective. */
EP_PRIVATE_API ep_status ep_net_probe_puts(struct ep_net_probe *probe);

/* The same with send() and recv(), a socket for each channel, from and into the same memory. */
EP_PRIVATE_API bool ep_net_probe_has_sockets(const struct ep_net_probe *probe);
EP_PRIVATE_API ep_status ep_net_probe_sockets(struct ep_net_probe *probe);

/* NULL is fine. */
EP_PRIVATE_API void ep_net_probe_free(struct ep_net_probe *probe);

/* Puts of the communicator's own endpoint so far; 0 on one node. */
EP_PRIVATE_API uint64_t ep_net_probe_count(const ep_comm *comm);

#define EP_NET_PROBE_CHUNK (256u << 10)

#endif
