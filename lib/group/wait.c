/* SPDX-License-Identifier: Apache-2.0 */
#include "group/wait.h"

#include "base/backoff.h"
#include "base/futex.h"
#include "group/failure.h"
#include "group/peers.h"

#include <poll.h>
#include <stdio.h>

/* Interval at which a sleeping rank probes for dead peers; also the longest delay of a lost wake-up. */
#define PROBE_NS 20000000u
/* Checks of the condition before sleeping: a peer on another processor usually answers within a few microseconds. */
#define SPINS_ALONE 2000
#define SPINS_SHARED 4
/* Fraction of the deadline for which a rank that has just ended a wait is not named as failed. */
#define GRACE_FRACTION 4

/* The first dead rank, or -1. */
static int find_dead(struct ep_group *group, int only)
{
    struct pollfd fds[EP_MAX_RANKS];
    bool polled;

    if (only >= 0)
        return ep_group_peer_dead(group, only) ? only : -1;
    for (int rank = 0; rank < group->comm->nranks; rank++)
        fds[rank] = (struct pollfd){.fd = group->peers[rank].process.pidfd, .events = POLLIN};
    /* All in one system call. It refuses if RLIMIT_NOFILE now allows fewer descriptors. */
    polled = poll(fds, (nfds_t)group->comm->nranks, 0) >= 0;
    for (int rank = 0; rank < group->comm->nranks; rank++) {
        const struct ep_group_peer *peer = &group->peers[rank];

        if ((!peer->control && !group->remote) || (polled && peer->process.pidfd >= 0 && !fds[rank].revents))
            continue;
        if (!ep_group_has_left(group, rank) && ep_group_peer_dead(group, rank))
            return rank;
    }
    return -1;
}

/* A rank that has not probed its peers, or sent a heartbeat, for half the deadline counts as stopped. */
static bool is_stale(const struct ep_group *group, uint64_t last_ns, uint64_t now)
{
    uint64_t stale_ns = (uint64_t)group->comm->config.timeout_ms * 500000u;

    if (stale_ns < 2 * PROBE_NS)
        stale_ns = 2 * PROBE_NS;
    return last_ns + stale_ns < now; /* it may be later than our clock */
}

/* The rank that a rank waits for; -1: none. *ret_waiting: as in its state. */
static int waits_for(const struct ep_group *group, int rank, uint64_t now, uint32_t *ret_waiting)
{
    const struct ep_group_state *state = ep_group_state_of(group, rank);
    uint32_t waiting = atomic_load(&state->waiting);
    int next = (int)(waiting >> 8) - 1;

    *ret_waiting = waiting;
    if (!waiting || is_stale(group, atomic_load(&state->probed_ns), now) || next >= group->comm->nranks)
        return -1;
    return next;
}

/*
 * The rail peer on the node of `rank`, if it has stopped and is another rank; -1: it has not. Only its heartbeats say
 * what the ranks of its node wait for: most likely for that one.
 */
static int find_stopped_rail(const struct ep_group *group, int rank, uint64_t now)
{
    int rail = ep_group_rail(group, rank / group->nlocal);

    if (group->peers[rank].control || !group->remote || rail == rank || ep_group_dead_or_left(group, rail) ||
        !is_stale(group, atomic_load(&group->remote[rail].heard_ns), now))
        return -1;
    return rail;
}

int ep_group_find_failed_rank(struct ep_group *group, int rank)
{
    uint64_t now = ep_now_ns();

    for (int step = 0; step < group->comm->nranks; step++) {
        uint32_t waiting;
        int next;

        if (ep_group_peer_dead(group, rank))
            return rank;
        next = waits_for(group, rank, now, &waiting);
        if (next < 0)
            next = find_stopped_rail(group, rank, now);
        /* A rank that waits for us was only slow, but it is late. */
        if (next < 0 || next == group->comm->rank)
            return rank;
        rank = next;
    }
    return rank;
}

void ep_group_wait_begin(struct ep_group_wait *wait, struct ep_group *group, enum ep_group_phase phase)
{
    *wait = (struct ep_group_wait){.group = group, .phase = phase};
    ep_group_wait_reset(wait);
}

void ep_group_wait_reset(struct ep_group_wait *wait)
{
    wait->deadline_ns = ep_deadline_ns(wait->group->comm->config.timeout_ms);
    wait->grace_ns = 0;
    wait->peer_wait = 0;
    wait->peer_waits = 0;
    wait->spins = 0;
}

/* True if the last data that a rank sent before it left may still be in flight. */
static bool may_be_in_flight(const struct ep_group_wait *wait, int rank)
{
    const struct ep_group *group = wait->group;

    if (wait->in_flight != EP_GROUP_IN_FLIGHT_UNKNOWN)
        return wait->in_flight == EP_GROUP_IN_FLIGHT;
    if (!wait->polls || !group->remote)
        return wait->polls;
    return !group->peers[rank].control && rank % group->nlocal == group->local &&
           !ep_streams_ended(group->streams, rank / group->nlocal);
}

/*
 * A rank that waited for others until recently is between two waits: what it does next shows whether it is late by
 * itself or because of a rank that it waits for next. The state of a rank of another host is also up to one heartbeat
 * old. So it gets a fraction of the deadline, several heartbeats, once in a wait.
 */
static bool is_between_waits(struct ep_group_wait *wait, int rank, uint64_t now)
{
    const struct ep_group *group = wait->group;
    uint64_t part_ns = (uint64_t)group->comm->config.timeout_ms * 1000000u / GRACE_FRACTION;
    const struct ep_group_state *state = ep_group_state_of(group, rank);

    if (ep_group_dead_or_left(group, rank) || atomic_load(&state->waiting))
        return false;
    if (!wait->grace_ns)
        wait->grace_ns = now + part_ns;
    return now < wait->grace_ns && atomic_load(&state->probed_ns) + part_ns > now;
}

/*
 * Nothing is known of a rank whose rail peer here has stopped. It may wait for that one, first for a rank that did so
 * before: two deadlines, and the time to arrive then.
 */
static bool may_wait_for_stopped(const struct ep_group *group, int rank, uint64_t now)
{
    uint64_t timeout_ns = (uint64_t)group->comm->config.timeout_ms * 1000000u;
    int rail = find_stopped_rail(group, rank, now);

    return rail >= 0 && now < atomic_load(&group->remote[rail].heard_ns) + 2 * timeout_ns + timeout_ns / GRACE_FRACTION;
}

/*
 * A rank that is late because it waits for others is not masked: it masks them at its own deadline, and arrives. It
 * gets a deadline for each of these waits, as many as there are ranks, and the time between two of them.
 */
static bool is_blocked(struct ep_group_wait *wait, int rank, uint64_t now)
{
    const struct ep_group *group = wait->group;
    uint32_t waiting;
    int next;

    if (ep_group_dead_or_left(group, rank))
        return false;
    next = waits_for(group, rank, now, &waiting);
    if (next < 0 && may_wait_for_stopped(group, rank, now))
        return true;
    if (next < 0 && wait->peer_waits < group->comm->nranks)
        return is_between_waits(wait, rank, now);
    if (next < 0 || next == group->comm->rank)
        return false;
    if (waiting != wait->peer_wait) {
        wait->peer_wait = waiting;
        wait->peer_deadline_ns = now + (uint64_t)group->comm->config.timeout_ms * 1000000u;
        wait->peer_waits++;
        wait->grace_ns = 0;
    }
    return wait->peer_waits <= group->comm->nranks && now < wait->peer_deadline_ns;
}

/* Two ranks that wait for each other are usually in different calls: where the late one waits, if it does. */
static ep_status fail_late(struct ep_group *group, int late, enum ep_group_phase phase)
{
    char reason[96] = "";
    uint32_t waiting = 0;
    int next = waits_for(group, late, ep_now_ns(), &waiting);

    if (next >= 0)
        snprintf(reason, sizeof(reason), "it waits for rank %d in \"%s\"", next,
                 ep_group_phase_name((enum ep_group_phase)(waiting & 0xff)));
    return ep_group_set_late(group, late, phase, reason);
}

static ep_status probe_peers(struct ep_group_wait *wait, int rank, uint64_t now)
{
    struct ep_group *group = wait->group;
    int dead = find_dead(group, wait->tolerant ? rank : -1), failed_rank;
    /* While data is in flight, it may be the last that the rank sent before it left. */
    bool left = ep_group_has_left(group, rank) && (!may_be_in_flight(wait, rank) || now >= wait->deadline_ns);
    ep_status status;

    wait->next_probe_ns = now + PROBE_NS;
    if (dead < 0 && !left && now < wait->deadline_ns)
        return EP_OK;
    failed_rank = dead >= 0 ? dead : left || wait->tolerant ? rank : ep_group_find_failed_rank(group, rank);
    if (dead < 0 && !left &&
        (wait->tolerant ? is_blocked(wait, failed_rank, now) : is_between_waits(wait, failed_rank, now)))
        return EP_OK;
    /* It may have satisfied the condition after the last check and before it ended: the caller checks once more. */
    if ((dead >= 0 || left) && wait->suspect != failed_rank + 1) {
        wait->suspect = failed_rank + 1;
        wait->next_probe_ns = now;
        return EP_OK;
    }
    status = ep_group_has_left(group, failed_rank) ? EP_E_PEER_LEFT : dead >= 0 ? EP_E_PEER_DEAD : EP_E_TIMEOUT;
    /* The rank named by the chain of waits may have died since the last probe. */
    if (status == EP_E_TIMEOUT && ep_group_peer_dead(group, failed_rank))
        status = EP_E_PEER_DEAD;
    if (wait->tolerant)
        return ep_fail(status, "rank %d in \"%s\"", failed_rank, ep_group_phase_name(wait->phase));
    if (status == EP_E_TIMEOUT)
        return fail_late(group, failed_rank, wait->phase);
    return ep_group_set_failure(group, status, failed_rank, wait->phase);
}

static int max_spins(const struct ep_group *group)
{
    return group->spin ? SPINS_ALONE : SPINS_SHARED;
}

static void sleep_on_doorbell(struct ep_group_wait *wait, uint32_t seen)
{
    struct ep_group_control *control = wait->group->control;
    uint64_t now = ep_now_ns();
    bool passed = now >= wait->deadline_ns;
    uint64_t until = passed || wait->next_probe_ns < wait->deadline_ns ? wait->next_probe_ns : wait->deadline_ns;

    if (wait->polls) {
        ep_backoff_sleep_again((unsigned)(wait->spins - max_spins(wait->group)));
        return;
    }
    atomic_store(&control->sleeping, 1);
    ep_futex_wait(&control->doorbell, seen, until > now ? until - now : 1);
    atomic_store(&control->sleeping, 0);
}

ep_status ep_group_wait_check(struct ep_group_wait *wait, int rank)
{
    struct ep_group *group = wait->group;
    ep_status status = wait->tolerant ? ep_group_check_abort(group) : ep_group_check(group);

    if (status == EP_OK) {
        uint64_t now = ep_group_publish_wait(group, rank, wait->phase);

        if (now >= wait->next_probe_ns || now >= wait->deadline_ns)
            status = probe_peers(wait, rank, now);
    }
    if (status != EP_OK)
        ep_group_wait_end(wait);
    return status;
}

ep_status ep_group_wait(struct ep_group_wait *wait, uint32_t seen, int rank)
{
    struct ep_group *group = wait->group;

    if (wait->spins++ < max_spins(group)) {
        if (group->spin)
            ep_cpu_relax();
        else if (ep_backoff_yield())
            wait->spins = SPINS_SHARED;
        return EP_OK;
    }
    EP_TRY(ep_group_wait_check(wait, rank));
    sleep_on_doorbell(wait, seen);
    return EP_OK;
}

void ep_group_wait_end(struct ep_group_wait *wait)
{
    ep_group_publish_wait_end(wait->group);
}

/* The peers wait for data that this rank can no longer send: it publishes the reason. */
ep_status ep_group_net_fail(struct ep_group *group, struct ep_streams *streams, ep_status status,
                            enum ep_group_phase phase)
{
    int node = ep_streams_broken_peer(streams);
    int rank = node < 0 ? group->comm->rank : ep_net_rail(ep_streams_get_net(streams), node);

    return status == EP_OK ? EP_OK : ep_group_set_own_failure(group, status, rank, phase);
}

static ep_status progress(struct ep_group *group, enum ep_group_phase phase, bool *ret_moved)
{
    return ep_group_net_fail(group, group->streams, ep_streams_progress(group->streams, ret_moved), phase);
}

/* Waits until the counter of one rank reaches `value`; *ret_at is the counter then. */
static ep_status wait_counter(struct ep_group_wait *wait, int rank, const _Atomic uint64_t *counter, uint64_t value,
                              uint64_t *ret_at)
{
    struct ep_group *group = wait->group;

    for (;;) {
        uint32_t seen = ep_group_doorbell(group);
        bool moved = false;

        if (wait->polls)
            EP_TRY(progress(group, wait->phase, &moved));
        if (moved)
            wait->spins = 0;
        *ret_at = atomic_load_explicit(counter, memory_order_acquire);
        if (*ret_at >= value)
            return EP_OK;
        EP_TRY(ep_group_wait(wait, seen, rank));
    }
}

ep_status ep_group_wait_node(struct ep_group *group, size_t word, uint64_t value, enum ep_group_phase phase)
{
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    ep_group_wait_begin(&wait, group, phase);
    /* Nothing wakes a sleeping thread when such a network has input. */
    wait.polls = group->streams && !ep_streams_get_net(group->streams)->can_sleep;
    for (int i = 1; status == EP_OK && i < group->nlocal; i++) {
        int rank = group->first + (group->local + i) % group->nlocal;
        uint64_t at;

        if (!ep_comm_has(group->comm, rank))
            continue;
        status = wait_counter(&wait, rank, (_Atomic uint64_t *)((char *)group->peers[rank].control + word), value, &at);
        /* No rank can be further ahead than the number of exchanges in flight. */
        if (status == EP_OK && at - value > 2 * EP_GROUP_EXCHANGES)
            status = ep_group_fail_damaged(group, rank, phase, "a counter of its operations", (int64_t)at);
    }
    ep_group_wait_end(&wait);
    return status;
}

/* --- between nodes --- */

ep_status ep_group_net_run(struct ep_group *group, enum ep_group_phase phase, ep_group_pass_fn pass, void *context)
{
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    ep_group_wait_begin(&wait, group, phase);
    while (status == EP_OK) {
        uint32_t seen = ep_group_doorbell(group);
        bool moved, busy = false;
        int node = -1;

        status = progress(group, phase, &moved);
        if (status == EP_OK)
            status = pass(context, &moved, &busy, &node);
        if (status != EP_OK || (!busy && ep_streams_flushed(group->streams)))
            break;
        if (moved) {
            ep_group_wait_reset(&wait);
            status = ep_group_check(group);
            continue;
        }
        wait.polls = !ep_streams_get_net(group->streams)->can_sleep;
        if (node < 0)
            node = ep_streams_unflushed_peer(group->streams);
        if (node >= 0)
            status = ep_group_wait(&wait, seen, ep_group_rail(group, node));
    }
    ep_group_wait_end(&wait);
    return status;
}
