/* SPDX-License-Identifier: Apache-2.0 */
/*
 * link.h - a thread that serves the control links to the rail peers: heartbeats with the state of all ranks of the
 * node, and failures.
 */
#ifndef EP_GROUP_LINK_H
#define EP_GROUP_LINK_H

#include "group/group.h"

/* Takes the sockets of the network. */
ep_status ep_group_link_open(struct ep_group *group);
/* Sends the state a last time: the peers learn whether this rank has left the group. */
void ep_group_link_close(struct ep_group *group);

#endif
