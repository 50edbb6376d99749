/* SPDX-License-Identifier: Apache-2.0 */
/* collective.h - barrier, all-gather and agreement of all ranks. */
#ifndef EP_GROUP_COLLECTIVE_H
#define EP_GROUP_COLLECTIVE_H

#include "group/group.h"

ep_status ep_group_barrier(ep_comm *comm);
ep_status ep_group_barrier_on(ep_comm *comm, ep_stream stream);
ep_status ep_group_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all);
/* ep_group_boot() returns a bootstrap on the communicator, for objects that are opened after creation. */
ep_boot ep_group_boot(ep_comm *comm);

/* Steps of creation succeed on all ranks or on none. The result of a step on one rank: */
struct ep_group_result {
    int32_t status;
    int32_t rank; /* that failed: the rank that reports it, or a peer that it found dead */
    int32_t flag; /* see ep_group_agree_about() */
    char reason[EP_GROUP_REASON_BYTES];
};

/* Call it directly after `status` of the public call was set: copies its text. */
void ep_group_result_init(struct ep_group_result *result, const char *call, ep_status status, int rank);
/*
 * EP_OK, or the failure that explains the others; `mine` is this rank's own result. `all` holds a result every `stride`
 * bytes.
 */
ep_status ep_group_result_reduce(const char *call, const struct ep_group_result *mine, int nranks, const void *all,
                                 size_t stride);
/* Collective: EP_OK if all ranks have succeeded. `mine` is this rank's own status. */
ep_status ep_group_agree(const ep_boot *boot, int timeout_ms, ep_status mine);
/*
 * ep_group_agree_about() takes a failure of `rank`. *flag: in, this rank's flag; out, true if any rank had set it;
 * NULL: not needed.
 */
ep_status ep_group_agree_about(const ep_boot *boot, int timeout_ms, ep_status mine, int rank, bool *flag);
/* As ep_group_agree(), among the ranks of an existing communicator. */
ep_status ep_group_agree_within(ep_comm *comm, const char *call, ep_status mine);

/*
 * ep_ll_new: all-gathers the status so far and the address of the segment, and compares configurations. ret_all [R]
 * receives the segments. Then creation succeeds on all ranks or on none: ep_group_agree_within().
 */
ep_status ep_group_ll_exchange(ep_ll *ll, ep_status mine, const struct ep_group_address *address,
                               struct ep_group_address *ret_all);

#endif
