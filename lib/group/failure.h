/* SPDX-License-Identifier: Apache-2.0 */
/* failure.h - the failure of a group: the first that a rank finds, published to all; and the texts of mismatches. */
#ifndef EP_GROUP_FAILURE_H
#define EP_GROUP_FAILURE_H

#include "group/group.h"

/* Publishes a failure and wakes all ranks; returns the failure of the group, with text. */
ep_status ep_group_set_failure(struct ep_group *group, ep_status status, int failed_rank, enum ep_group_phase phase);
/* ep_group_set_late() publishes that a rank did not answer. reason: what is known of it, or "". */
ep_status ep_group_set_late(struct ep_group *group, int late, enum ep_group_phase phase, const char *reason);
/*
 * ep_group_set_own_failure() keeps the last error of the thread as the text and publishes it to the peers, unless
 * another failure was first. A status of the 1xx or 2xx kind is a failure of this rank, whatever `failed_rank` is. The
 * text must name the failed rank before any other rank.
 */
ep_status ep_group_set_own_failure(struct ep_group *group, ep_status status, int failed_rank,
                                   enum ep_group_phase phase);

/* An int32_t in a struct that ranks exchange, which must be equal on all ranks. */
struct ep_group_field {
    const char *name;
    size_t at;
};
/*
 * EP_E_MISMATCH with the first field that differs between `mine`, of rank `me`, and `theirs`. `call`: its name, or "".
 */
ep_status ep_group_compare(const char *call, const struct ep_group_field *fields, size_t n, const void *mine, int me,
                           const void *theirs, int rank);
/* EP_E_MISMATCH and its text only. */
ep_status ep_group_fail_disagree(const char *call, const char *field, int64_t mine, int me, int64_t theirs, int rank);
ep_status ep_group_fail_calls(uint32_t mine, int me, uint32_t theirs, int rank);
/* `mine` and `theirs`: EP_GROUP_RECV_INDEX ... */
ep_status ep_group_fail_outputs(uint32_t mine, int me, uint32_t theirs, int rank);

/* EP_E_MISMATCH: a value in the memory of `rank` is one that no rank writes. */
ep_status ep_group_fail_damaged(struct ep_group *group, int rank, enum ep_group_phase phase, const char *what,
                                int64_t value);

/* EP_OK, or the failure set by this rank or a peer. Cheap. */
ep_status ep_group_check(struct ep_group *group);
/* ep_group_check_abort() fails only after ep_comm_abort(): for calls that tolerate dead peers. */
ep_status ep_group_check_abort(struct ep_group *group);
void ep_group_abort(ep_comm *comm);
ep_status ep_group_poll(ep_comm *comm);
const char *ep_group_phase_name(enum ep_group_phase phase);

/* As ep_comm_get_failed(). */
void ep_group_get_failed(const ep_comm *comm, int32_t *ret_failed);

/* The failure of the group in one word, if a rank of this node knows one; 0: none. */
uint64_t ep_group_get_failure(const struct ep_group *group);
/* Takes over a failure received over the control link of rank `from`. `word` may be invalid. */
void ep_group_receive_failure(struct ep_group *group, uint64_t word, int from);

#endif
