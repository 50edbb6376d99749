/* SPDX-License-Identifier: Apache-2.0 */
/*
 * probe.h - bandwidth baselines for the benchmark: the network engine of a communicator alone, and plain sockets
 * between the same ranks.
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
 * Opens an endpoint like that of the communicator and, with the network "tcp", as many plain sockets. Each iteration
 * sends `bytes` to each rail peer; the same on all ranks. Collective. EP_E_UNSUPPORTED: one node, or not the host
 * backend.
 */
EP_PRIVATE_API ep_status ep_net_probe_new(ep_comm *comm, size_t bytes, struct ep_net_probe **ret_probe);

/* One iteration: sends to and receives from all rail peers, in puts of EP_NET_PROBE_CHUNK. Collective. */
EP_PRIVATE_API ep_status ep_net_probe_puts(struct ep_net_probe *probe);

/* The same with send() and recv() on the same memory, with one socket for each channel. */
EP_PRIVATE_API bool ep_net_probe_has_sockets(const struct ep_net_probe *probe);
EP_PRIVATE_API ep_status ep_net_probe_sockets(struct ep_net_probe *probe);

/* Accepts NULL. */
EP_PRIVATE_API void ep_net_probe_free(struct ep_net_probe *probe);

/* Number of puts on the communicator's own endpoint so far; 0 on one node. */
EP_PRIVATE_API uint64_t ep_net_probe_count(const ep_comm *comm);

#define EP_NET_PROBE_CHUNK (256u << 10)

#endif
