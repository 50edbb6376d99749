/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs.h - the network over RDMA NICs: InfiniBand and RoCE, by libibverbs.
 *
 * One reliable connected (RC) queue pair for each (rail peer, channel). A put is sent as RDMA writes, and a signal is a
 * SEND of 16 bytes after them on the same queue pair, which the receiver adds up when it polls. Memory of attach() is
 * read by the NIC; all other memory is copied into a registered ring buffer, so it needs no registration and may be
 * reused when put() returns. A receiver that does not poll throttles its senders: its receive queue is full.
 *
 * GPU memory can be attached and be the payload region, by its dma-buf or through a peer-memory module. A rank whose
 * GPU memory cannot be registered receives payload in its region; its peers write there by the same calls.
 *
 * Each endpoint also opens an endpoint of the tcp network, for what a NIC does not provide: authentication by the
 * shared secret, the control link, and immediate detection of the exit of a process, which a queue pair reports only
 * after seconds. The keys of the regions are exchanged by the boot's all-gather. InfiniBand and RoCE do not
 * authenticate: all hosts of the fabric must be trusted.
 *
 * ep_net_verbs.open: `context` as for ep_net_tcp. verbs_device.h describes the choice of the NIC.
 */
#ifndef EP_NET_VERBS_H
#define EP_NET_VERBS_H

#include "net/net.h"

/* The tcp endpoint of an endpoint of ep_net_verbs, borrowed. */
struct ep_net *ep_net_verbs_get_tcp(struct ep_net *net);

#endif
