/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verbs.h - the network over RDMA NICs: InfiniBand and RoCE, by libibverbs.
 *
 * A reliable queue pair for each (rail peer, channel). A put is copied into a registered ring and leaves as RDMA
 * writes; a signal is a message of 16 bytes behind them on the same queue pair, whose arrival the receiver counts. So
 * the caller's memory needs no registration, and is free again when put() returns. A receiver that does not look holds
 * its senders back: its NIC has no room for signals.
 *
 * An endpoint of the tcp network beside it brings what a NIC does not have: proof of the shared secret, the control
 * link, and the end of a process at once, where a queue pair shows it after seconds. The keys of the regions go through
 * the boot's all-gather. InfiniBand and RoCE themselves prove nothing: the fabric has to be one whose members are
 * trusted.
 *
 * ep_net_verbs.open: `context` as of ep_net_tcp. verbs_device.h has the choice of the NIC.
 */
#ifndef EP_NET_VERBS_H
#define EP_NET_VERBS_H

#include "net/net.h"

/* The endpoint of ep_net_tcp beside an endpoint of ep_net_verbs, borrowed. */
struct ep_net *ep_net_verbs_get_tcp(struct ep_net *net);

#endif
