/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which aborts end a shrink across hosts.
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

#include <stdlib.h>

/* Time between an abort and the shrink that it is the reason for. At most half a deadline. */
#define ABORT_MS 2000

ep_status shrink_aborts_init(struct shrink_aborts *aborts, struct ep_group *group, int timeout_ms)
{
    int nranks = group->comm->nranks, me = group->comm->rank, aborted_by = ep_group_aborted_by(group);

    *aborts = (struct shrink_aborts){.group = group, .grace_ms = timeout_ms / 2 < ABORT_MS ? timeout_ms / 2 : ABORT_MS};
    aborts->at_begin = calloc((size_t)nranks, sizeof(*aborts->at_begin));
    aborts->before = calloc((size_t)nranks, sizeof(*aborts->before));
    aborts->seen_ns = calloc((size_t)nranks, sizeof(*aborts->seen_ns));
    if (!aborts->at_begin || !aborts->before || !aborts->seen_ns)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", nranks);
    for (int rank = 0; rank < nranks; rank++) {
        aborts->before[rank] = atomic_load(&ep_group_state_of(group, rank)->aborts);
        /* The abort that failed this group does not end its shrink, even if its count has not arrived yet. */
        if (rank == aborted_by && aborts->before[rank] == 0)
            aborts->before[rank] = 1;
        aborts->at_begin[rank] = aborts->before[rank];
    }
    atomic_store(&group->control->state.aborts_before, aborts->before[me] + 1);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
    return EP_OK;
}

void shrink_aborts_done(struct shrink_aborts *aborts)
{
    free(aborts->at_begin);
    free(aborts->before);
    free(aborts->seen_ns);
}

int shrink_aborts_find(struct shrink_aborts *aborts)
{
    const struct ep_group *group = aborts->group;
    uint64_t now = ep_now_ns();

    for (int rank = 0; rank < group->comm->nranks; rank++) {
        uint32_t count = atomic_load(&ep_group_state_of(group, rank)->aborts);

        if ((int32_t)(count - aborts->before[rank]) <= 0)
            continue;
        if (rank == group->comm->rank)
            return rank;
        /* It has begun a shrink since then. */
        if (atomic_load(&ep_group_state_of(group, rank)->aborts_before) == count + 1) {
            aborts->before[rank] = count;
            aborts->seen_ns[rank] = 0;
        } else if (!aborts->seen_ns[rank]) {
            aborts->seen_ns[rank] = now;
        } else if (now - aborts->seen_ns[rank] >= (uint64_t)aborts->grace_ms * 1000000u &&
                   !ep_group_dead_or_left(group, rank)) {
            return rank;
        }
    }
    return -1;
}

bool shrink_aborts_is_new(const struct shrink_aborts *aborts, int rank, uint64_t count)
{
    return count && (int32_t)((uint32_t)count - aborts->at_begin[rank]) > 0;
}
