/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether the group of a shrink across hosts is made, for ranks that lose the leader while it confirms the group.
 *
 * Without an answer a rank cannot know whether others have the confirmation. If they have, and it gave the group up, it
 * would shrink the old group again while they use the new one: two groups. So it asks them, over the control blocks and
 * the links of the new group, which are there by then: each rank says there that it has the confirmation or that it has
 * lost the leader. The group is made if any rank that lives has the confirmation. It is not if all have lost the
 * leader, or one leaves the new group without it. Only when another rank dies or stops as well can the ranks end
 * differently: those without an answer at their deadline give up.
 */
#include "group/shrink_linked.h"

static uint32_t made_on(const struct ep_group *group, int rank)
{
    const struct ep_group_control *control = group->peers[rank].control;

    return atomic_load(control ? &control->shrink.made : &group->remote[rank].made);
}

static void set_made(struct ep_group *group, uint32_t made)
{
    atomic_store(&group->control->shrink.made, made);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
}

void shrink_confirm_set(ep_comm *next)
{
    set_made(ep_group_of(next), EP_GROUP_MADE_YES);
}

/*
 * May this rank still hear that `rank` knows? What that one says comes over the link to its node. Where that has ended,
 * it comes from the rank of this node that has a link to it: until that one has given up.
 */
static bool is_open(const struct ep_group *group, int rank)
{
    int by = rank;

    if (!group->peers[rank].control && group->remote &&
        atomic_load(&group->remote[ep_group_rail(group, rank / group->nlocal)].lost))
        by = group->first + rank % group->nlocal;
    if (rank == group->comm->rank || by == group->comm->rank || ep_group_is_gone(group, rank) ||
        ep_group_is_gone(group, by))
        return false;
    return by != rank || made_on(group, rank) == EP_GROUP_MADE_OPEN;
}

bool shrink_confirm_ask(struct linked *l, ep_comm *next)
{
    struct ep_group *group = ep_group_of(next);
    uint64_t deadline_ns = ep_deadline_ns(l->timeout_ms);
    bool open = true, gave_up = false;

    set_made(group, EP_GROUP_MADE_DOUBT);
    while (open && ep_now_ns() < deadline_ns) {
        uint32_t seen = ep_group_doorbell(group);

        open = false;
        for (int rank = 0; rank < next->nranks; rank++) {
            /* Before its word: it may have said that it knows, and left. */
            bool left = rank != next->rank && ep_group_has_left(group, rank);

            open |= is_open(group, rank);
            if (made_on(group, rank) == EP_GROUP_MADE_YES)
                return true;
            gave_up |= left;
        }
        if (gave_up)
            return false;
        if (open)
            ep_group_wait_doorbell(group, seen);
    }
    l->group->shrink_deadlines += open;
    return false;
}
