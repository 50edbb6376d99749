/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Finds out whether the group of a shrink across hosts is confirmed, for ranks that lose the leader during the
 * confirmation.
 *
 * Such a rank cannot know whether others have received the confirmation. If they have and this rank gives up, it would
 * shrink the old group again while they use the new one: two groups. So it queries them over the control blocks and
 * links of the new group, which exist by then. Each rank publishes there that it has received the confirmation, or that
 * it has lost the leader. The group is confirmed if any live rank has received the confirmation. It is not confirmed if
 * all have lost the leader, or if one leaves the new group without the confirmation. The outcomes of ranks can differ
 * only if another rank dies or stops as well: a rank without an answer at its deadline gives up. Until then it does not
 * react to ep_comm_abort(), by which it would give up alone.
 */
#include "group/shrink_linked.h"

#include "group/peers.h"
#include "group/wait.h"

static uint32_t confirmation_of(const struct ep_group *group, int rank)
{
    return atomic_load(&ep_group_state_of(group, rank)->confirmation);
}

static void set_confirmation(struct ep_group *group, uint32_t confirmation)
{
    atomic_store(&group->control->state.confirmation, confirmation);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
}

void shrink_confirm_set(ep_comm *next)
{
    set_confirmation(ep_group_of(next), EP_GROUP_CONFIRM_RECEIVED);
}

bool shrink_confirm_is_refused(const ep_comm *next)
{
    const struct ep_group *group = ep_group_of(next);

    for (int rank = 0; rank < next->nranks; rank++) {
        /* Read before its confirmation: a rank may have published the confirmation, and then left. */
        bool left = rank != next->rank && ep_group_has_left(group, rank);

        if (left && confirmation_of(group, rank) != EP_GROUP_CONFIRM_RECEIVED)
            return true;
    }
    return false;
}

/*
 * True if this rank can still learn that `rank` has the confirmation. That arrives over the link to its node. If the
 * link has ended, it arrives from the rank of this node that has a link to `rank`, until that one has given up.
 */
static bool may_confirm(const struct ep_group *group, int rank)
{
    int source = rank;

    if (!group->peers[rank].control && group->remote &&
        atomic_load(&group->remote[ep_group_rail(group, rank / group->nlocal)].lost))
        source = group->first + rank % group->nlocal;
    if (rank == group->comm->rank || source == group->comm->rank || ep_group_dead_or_left(group, rank) ||
        ep_group_dead_or_left(group, source))
        return false;
    return source != rank || confirmation_of(group, rank) == EP_GROUP_CONFIRM_PENDING;
}

bool shrink_confirm_query(struct linked *l, ep_comm *next)
{
    struct ep_group *group = ep_group_of(next);
    uint64_t deadline_ns = ep_deadline_ns(l->timeout_ms);
    bool pending = true;

    set_confirmation(group, EP_GROUP_CONFIRM_LEADER_LOST);
    while (pending && ep_now_ns() < deadline_ns) {
        uint32_t seen = ep_group_doorbell(group);
        bool refused = shrink_confirm_is_refused(next);

        pending = false;
        for (int rank = 0; rank < next->nranks; rank++) {
            pending |= may_confirm(group, rank);
            if (confirmation_of(group, rank) == EP_GROUP_CONFIRM_RECEIVED)
                return true;
        }
        if (refused)
            return false;
        if (pending)
            ep_group_wait_doorbell(group, seen);
    }
    l->group->shrink_deadlines += pending;
    return false;
}
