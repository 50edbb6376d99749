/* SPDX-License-Identifier: Apache-2.0 */
/* peers.h - what a rank sees of its peers, and how it wakes them. */
#ifndef EP_GROUP_PEERS_H
#define EP_GROUP_PEERS_H

#include "group/group.h"

static inline uint32_t ep_group_doorbell(const struct ep_group *group)
{
    return atomic_load_explicit(&group->control->doorbell, memory_order_acquire);
}

/* Rings the doorbells of the ranks of this node, or of one rank. */
void ep_group_ring_node(struct ep_group *group);
void ep_group_ring_rank(struct ep_group *group, int rank);
void ep_group_ring_all(struct ep_group *group);

/*
 * Publishes the rank that this rank waits for and the time of this probe, which it returns. Also for waits without an
 * ep_group_wait.
 */
uint64_t ep_group_publish_wait(struct ep_group *group, int rank, enum ep_group_phase phase);
void ep_group_publish_wait_end(struct ep_group *group);

/* Makes the thread of the control links check the state of this rank. Async-signal-safe. */
void ep_group_link_wake(struct ep_group *group);
/* True only if it is certain; a process with unreadable state is not dead. */
bool ep_group_peer_dead(const struct ep_group *group, int rank);
/* It has freed its communicator, on any host, as far as this rank knows. */
bool ep_group_has_left(const struct ep_group *group, int rank);
/* Dead, or left: no rank waits for it any more. */
bool ep_group_dead_or_left(const struct ep_group *group, int rank);

/* Copies a reason that a peer may be overwriting; terminates it and replaces control characters. */
void ep_group_read_reason(char ret[EP_GROUP_REASON_BYTES], const char from[EP_GROUP_REASON_BYTES]);

#endif
