/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Which aborts end a shrink across hosts.
 *
 * Counts of aborts come with heartbeats, at any time after the abort: one that was the reason to shrink may come when
 * the shrink has begun. The rank that called it begins the shrink as well, then, and its heartbeats say so, in the
 * order in which it did both, however late they are. So an abort ends the shrink if its rank has not begun one within
 * ABORT_MS since the abort was heard of.
 *
 * An abort by a rank that shrinks ends the call of all: it tells its leader over their connection. Where that is not
 * made yet and the leader answers too late, the rank says so when it joins again: by heartbeats alone its next call
 * would look as if the abort had been the reason for it.
 */
#include "group/shrink.h"

#include <stdlib.h>

/* Between an abort and the shrink that it is the reason for. Half a deadline, at most: */
#define ABORT_MS 2000

static uint32_t count_of(const struct ep_group *group, int rank)
{
    const struct ep_group_control *control = group->peers[rank].control;

    return atomic_load(control ? &control->aborts : &group->remote[rank].aborts);
}

/* Has it begun a shrink since the last of so many aborts? */
static bool has_begun(const struct ep_group *group, int rank, uint32_t count)
{
    const struct ep_group_control *control = group->peers[rank].control;

    return control ? atomic_load(&control->shrink.aborts_before) == count + 1
                   : atomic_load(&group->remote[rank].shrinks) != 0;
}

ep_status shrink_aborts_init(struct shrink_aborts *aborts, struct ep_group *group, int timeout_ms)
{
    int nranks = group->comm->nranks, me = group->comm->rank, aborted_by = ep_group_aborted_by(group);

    *aborts = (struct shrink_aborts){.group = group, .most_ms = timeout_ms / 2 < ABORT_MS ? timeout_ms / 2 : ABORT_MS};
    aborts->at_begin = calloc((size_t)nranks, sizeof(*aborts->at_begin));
    aborts->before = calloc((size_t)nranks, sizeof(*aborts->before));
    aborts->heard_ns = calloc((size_t)nranks, sizeof(*aborts->heard_ns));
    if (!aborts->at_begin || !aborts->before || !aborts->heard_ns)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", nranks);
    for (int rank = 0; rank < nranks; rank++) {
        aborts->before[rank] = count_of(group, rank);
        /* The abort that made this group fail is no abort of its shrink, also when its count is still to come. */
        if (rank == aborted_by && aborts->before[rank] == 0)
            aborts->before[rank] = 1;
        aborts->at_begin[rank] = aborts->before[rank];
    }
    atomic_store(&group->control->shrink.aborts_before, aborts->before[me] + 1);
    ep_group_ring_all(group);
    ep_group_link_wake(group);
    return EP_OK;
}

void shrink_aborts_done(struct shrink_aborts *aborts)
{
    free(aborts->at_begin);
    free(aborts->before);
    free(aborts->heard_ns);
}

int shrink_aborts_find(struct shrink_aborts *aborts)
{
    const struct ep_group *group = aborts->group;
    uint64_t now = ep_now_ns();

    for (int rank = 0; rank < group->comm->nranks; rank++) {
        uint32_t count = count_of(group, rank);

        if ((int32_t)(count - aborts->before[rank]) <= 0)
            continue;
        if (rank == group->comm->rank)
            return rank;
        if (has_begun(group, rank, count)) {
            aborts->before[rank] = count;
            aborts->heard_ns[rank] = 0;
        } else if (!aborts->heard_ns[rank]) {
            aborts->heard_ns[rank] = now;
        } else if (now - aborts->heard_ns[rank] >= (uint64_t)aborts->most_ms * 1000000u &&
                   !ep_group_is_gone(group, rank)) {
            return rank;
        }
    }
    return -1;
}

bool shrink_aborts_is_news(const struct shrink_aborts *aborts, int rank, uint64_t count)
{
    return count && (int32_t)((uint32_t)count - aborts->at_begin[rank]) > 0;
}
