/* SPDX-License-Identifier: Apache-2.0 */
#include "group/peers.h"

#include "base/fd.h"
#include "base/futex.h"

#include <unistd.h>

static void ring(struct ep_group_control *control)
{
    atomic_fetch_add(&control->doorbell, 1);
    /*
     * Sequentially consistent on both sides: a rank that reads 0 here has rung before the futex call of the sleeper
     * compares.
     */
    if (atomic_load(&control->sleeping))
        ep_futex_wake(&control->doorbell);
}

void ep_group_ring_rank(struct ep_group *group, int rank)
{
    if (group->peers[rank].control)
        ring(group->peers[rank].control);
}

void ep_group_ring_node(struct ep_group *group)
{
    for (int i = 1; i < group->nlocal; i++)
        ep_group_ring_rank(group, group->first + (group->local + i) % group->nlocal);
}

void ep_group_ring_all(struct ep_group *group)
{
    for (int rank = 0; rank < group->comm->nranks; rank++)
        ep_group_ring_rank(group, rank);
}

void ep_group_link_wake(struct ep_group *group)
{
    uint64_t one = 1;

    if (group->link_event >= 0 && ep_fd_is_ours(group->link_event))
        (void)!write(group->link_event, &one, sizeof(one));
}

bool ep_group_peer_dead(const struct ep_group *group, int rank)
{
    const struct ep_group_peer *peer = &group->peers[rank];

    if (!ep_comm_has(group->comm, rank))
        return false;
    if (!peer->control && group->remote)
        return atomic_load(&group->remote[rank].lost) && !ep_group_has_left(group, rank);
    return !peer->same_process && ep_process_probe(&peer->process) == EP_PROCESS_DEAD;
}

bool ep_group_has_left(const struct ep_group *group, int rank)
{
    return atomic_load(&ep_group_state_of(group, rank)->left);
}

bool ep_group_dead_or_left(const struct ep_group *group, int rank)
{
    return ep_group_peer_dead(group, rank) || ep_group_has_left(group, rank);
}

uint64_t ep_group_publish_wait(struct ep_group *group, int rank, enum ep_group_phase phase)
{
    uint64_t now = ep_now_ns();

    atomic_store(&group->control->state.probed_ns, now);
    atomic_store(&group->control->state.waiting, (uint32_t)(rank + 1) << 8 | (uint32_t)phase);
    return now;
}

void ep_group_publish_wait_end(struct ep_group *group)
{
    atomic_store(&group->control->state.waiting, 0);
}

void ep_group_read_reason(char ret[EP_GROUP_REASON_BYTES], const char from[EP_GROUP_REASON_BYTES])
{
    ep_group_read_shared(ret, from, EP_GROUP_REASON_BYTES);
    ret[EP_GROUP_REASON_BYTES - 1] = '\0';
    for (char *at = ret; *at; at++)
        if ((unsigned char)*at < ' ' || *at == 0x7f)
            *at = '?';
}
