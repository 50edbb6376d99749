/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which aborts end a shrink. On one host those after the call of this rank began; the rest is about several hosts.
 *
 * Counts of aborts arrive with heartbeats, at any time after the abort: the abort that was the reason to shrink may
 * arrive after the shrink has begun. Then the rank that called it begins the shrink as well, and its heartbeats report
 * both in order, however late they are. So an abort ends the shrink if its rank has not begun one within ABORT_MS after
 * the abort was first seen.
 *
 * An abort by a rank that is in the shrink ends the call of all ranks: the rank sends it to its leader over their
 * connection. If the connection is not complete and the leader answers too late, the rank reports the abort when it
 * joins again. By the heartbeats alone, the abort would count as the reason for its next call.
 */
#include "group/shrink.h"

#include "group/failure.h"
#include "group/peers.h"

#include <stdlib.h>

/* Time between an abort and the shrink that it is the reason for. At most half a deadline. */
#define ABORT_MS 2000

ep_status shrink_aborts_init(struct shrink_aborts *aborts, struct ep_group *group)
{
    int nranks = group->comm->nranks, aborted_by = ep_group_aborted_by(group);
    int half_ms = group->comm->config.timeout_ms / 2;

    *aborts = (struct shrink_aborts){.group = group, .grace_ms = half_ms < ABORT_MS ? half_ms : ABORT_MS};
    aborts->ranks = calloc((size_t)nranks, sizeof(*aborts->ranks));
    if (!aborts->ranks)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", nranks);
    for (int rank = 0; rank < nranks; rank++) {
        uint32_t count = atomic_load(&ep_group_state_of(group, rank)->aborts);

        /* The abort that failed this group does not end its shrink, even if its count has not arrived yet. */
        if (rank == aborted_by && count == 0)
            count = 1;
        aborts->ranks[rank].at_begin = aborts->ranks[rank].before = count;
    }
    atomic_store(&group->control->state.aborts_before, aborts->ranks[group->comm->rank].before + 1);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
    return EP_OK;
}

int shrink_aborts_find(struct shrink_aborts *aborts)
{
    const struct ep_group *group = aborts->group;
    uint64_t now = ep_now_ns();

    for (int rank = 0; rank < group->comm->nranks; rank++) {
        const struct ep_group_state *state = ep_group_state_of(group, rank);
        struct shrink_abort *abort = &aborts->ranks[rank];
        uint32_t count = atomic_load(&state->aborts);

        if ((int32_t)(count - abort->before) <= 0)
            continue;
        if (rank == group->comm->rank || !group->remote)
            return rank;
        /* It has begun a shrink since then. */
        if (atomic_load(&state->aborts_before) == count + 1) {
            abort->before = count;
            abort->seen_ns = 0;
        } else if (!abort->seen_ns) {
            abort->seen_ns = now;
        } else if (now - abort->seen_ns >= (uint64_t)aborts->grace_ms * 1000000u &&
                   !ep_group_dead_or_left(group, rank)) {
            return rank;
        }
    }
    return -1;
}

bool shrink_aborts_is_new(const struct shrink_aborts *aborts, int rank, uint64_t count)
{
    return count && (int32_t)((uint32_t)count - aborts->ranks[rank].at_begin) > 0;
}
