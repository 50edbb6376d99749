/* SPDX-License-Identifier: Apache-2.0 */
/* wait.h - waits for data of peers: each ends by its condition, a failure, or its deadline. */
#ifndef EP_GROUP_WAIT_H
#define EP_GROUP_WAIT_H

#include "group/group.h"

struct ep_group_wait {
    struct ep_group *group;
    enum ep_group_phase phase;
    uint64_t deadline_ns, next_probe_ns;
    uint64_t grace_ns; /* 0, or the end of the grace period of a rank that is between two waits, after the deadline */
    /*
     * Of a tolerant wait, about the rank waited for: the wait it is in, the deadline it gets for that wait, and the
     * number of its waits so far.
     */
    uint32_t peer_wait;
    uint64_t peer_deadline_ns;
    int peer_waits;
    int spins;
    int suspect;   /* 1 + the rank that the last probe found dead or departed */
    bool tolerant; /* report the rank waited for, but do not fail the group: low latency with masking */
    bool polls;    /* the network needs polling: no long sleeps */
    int in_flight; /* EP_GROUP_IN_FLIGHT_*: whether data of the rank waited for may still be in flight */
};

enum {
    EP_GROUP_IN_FLIGHT_UNKNOWN = 0, /* ask the streams of the communicator */
    EP_GROUP_IN_FLIGHT,
    EP_GROUP_NOT_IN_FLIGHT
};

/* Starts a wait with the deadline of the communicator. */
void ep_group_wait_begin(struct ep_group_wait *wait, struct ep_group *group, enum ep_group_phase phase);

/* Progress was made: restarts the deadline. */
void ep_group_wait_reset(struct ep_group_wait *wait);

/*
 * Call it while the condition does not hold. `seen` is the doorbell as read before the condition was checked; `rank` is
 * the rank waited for. Sleeps until the doorbell rings or an interval passes, or returns the failure.
 */
ep_status ep_group_wait(struct ep_group_wait *wait, uint32_t seen, int rank);
/* ep_group_wait_check() returns a failure as ep_group_wait() does, but does not sleep. */
ep_status ep_group_wait_check(struct ep_group_wait *wait, int rank);
void ep_group_wait_end(struct ep_group_wait *wait);

/* The rank that failed when `rank` did not arrive: `rank` may itself be waiting for another rank, and say so. */
int ep_group_find_failed_rank(struct ep_group *group, int rank);

/* Fails the group if `status`, of progress in these streams, is not EP_OK, and names the rank that broke them. */
ep_status ep_group_net_fail(struct ep_group *group, struct ep_streams *streams, ep_status status,
                            enum ep_group_phase phase);

/* Waits until `word` (offset in the control block) of all ranks of this node has reached `value`. */
ep_status ep_group_wait_node(struct ep_group *group, size_t word, uint64_t value, enum ep_group_phase phase);

/*
 * One pass over all work between nodes, which waits for nothing. Sets *ret_moved if it has made progress, and *ret_busy
 * if work is left; *ret_node then is the node waited for, -1: any that has not accepted all data yet.
 */
typedef ep_status (*ep_group_pass_fn)(void *context, bool *ret_moved, bool *ret_busy, int *ret_node);
/*
 * Lets the network make progress and calls `pass`, until no work is left and all data is sent. In between it
 * waits until data moves. A broken network fails the group.
 */
ep_status ep_group_net_run(struct ep_group *group, enum ep_group_phase phase, ep_group_pass_fn pass, void *context);

#endif
