/* SPDX-License-Identifier: Apache-2.0 */
/* The backend's part of ep_comm_regroup(): leaving the group of before, the fence, and joining that of now. */
#include "base/backoff.h"
#include "group/group.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/queue.h"

#include <stdio.h>
#include <stdlib.h>

ep_status ep_group_regroup_drain(ep_comm *comm)
{
    (void)ep_group_drain(ep_group_of(comm));
    return EP_OK;
}

static bool find_former(const struct ep_group *group, int rank, uint64_t id)
{
    const struct ep_group_former *former = group->former;

    while (former && (former->rank != rank || former->id != id))
        former = former->next;
    return former;
}

/* Notes the ranks that can write to memory of this one: those of its node. With others it shares endpoints alone. */
static ep_status note_former(struct ep_group *group)
{
    ep_status status = EP_OK;

    for (int rank = group->first; rank < group->first + group->nlocal; rank++) {
        struct ep_group_peer *peer = &group->peers[rank];
        struct ep_group_former *former;

        if (rank == group->comm->rank || !peer->control || ep_group_dead_or_left(group, rank) ||
            find_former(group, rank, group->comm->id_of[rank]))
            continue;
        former = malloc(sizeof(*former));
        if (!former) {
            group->unknown_former = 1 + rank;
            status = ep_fail(EP_E_MEMORY, "ep_comm_regroup: no memory");
            continue;
        }
        *former = (struct ep_group_former){.next = group->former,
                                           .rank = rank,
                                           .id = group->comm->id_of[rank],
                                           .same_process = peer->same_process,
                                           .process = peer->process,
                                           .shm = peer->shm};
        group->former = former;
        peer->process = (struct ep_process){.pidfd = -1};
        peer->shm = (struct ep_shm){.fd = -1};
    }
    return status;
}

static bool is_member(const ep_comm *comm, int rank, uint64_t id)
{
    return ep_comm_has(comm, rank) && comm->id_of[rank] == id;
}

static bool is_gone(const struct ep_group_former *former)
{
    const struct ep_group_control *control = former->shm.base;

    return atomic_load(&control->state.left) ||
           (!former->same_process &&
            (atomic_load(&control->let_go) || ep_process_probe(&former->process) == EP_PROCESS_DEAD));
}

/* Waits until then for a process that is about to end. */
static bool is_gone_by(const struct ep_group_former *former, uint64_t deadline_ns)
{
    bool gone = is_gone(former);

    while (!gone && ep_now_ns() < deadline_ns) {
        ep_backoff_sleep();
        gone = is_gone(former);
    }
    return gone;
}

/*
 * A rank that is absent from now on must not write any more. A process that has ended cannot, nor can a rank that has
 * freed its communicator, or one of another node, whose connections are closed. One of this node that still lives has
 * mapped memory of this rank: then all of it moves to new pages, at the same addresses. Where memory cannot move, the
 * members wait for it: a process that is killed needs a while to end, one that is told that it is left out to unmap the
 * memory, by which it has left. After that the call is refused.
 */
static ep_status fence(struct ep_group *group, const ep_comm *next)
{
    bool may_write = group->unknown_former > 0, fixed = group->backend->fixed_memory;
    uint64_t deadline_ns = ep_deadline_ns(fixed ? group->comm->config.timeout_ms / 2 : 0);

    for (struct ep_group_former **at = &group->former; *at;) {
        const struct ep_group_former *former = *at;
        bool absent = !is_member(next, former->rank, former->id);

        if (is_gone_by(former, absent && !former->same_process ? deadline_ns : 0)) {
            ep_group_forget_former(at);
            continue;
        }
        if (absent) {
            if (former->same_process)
                return ep_fail(
                    EP_E_STATE,
                    "ep_comm_regroup: rank %d is a thread of this process, which nothing keeps from writing: "
                    "free its communicator first",
                    former->rank);
            if (fixed)
                return ep_fail(EP_E_STATE,
                               "ep_comm_regroup: rank %d lives, and has not let go of memory of rank %d, which cannot "
                               "move (it is stopped, or a kernel on its GPU does not end): end its process first",
                               former->rank, group->comm->rank);
            may_write = true;
        }
        at = &(*at)->next;
    }
    if (may_write && fixed)
        return ep_fail(EP_E_STATE, "ep_comm_regroup: it is not known whether rank %d, which was not noted, still lives",
                       group->unknown_former - 1);
    return may_write ? ep_group_move_memory(group) : EP_OK;
}

/*
 * Before this rank leaves the group of before: what the others notice first is the reason. Where a rank of its own node
 * tells it, that one counts, because it waits for it.
 */
static void tell_left_out(struct ep_group *group, const ep_comm *next)
{
    for (int rank = 0; rank < next->nranks; rank++) {
        struct ep_group_control *control = group->peers[rank].control;
        uint32_t none = 0, mine = 1 + (uint32_t)group->comm->rank;

        if (control && !is_member(next, rank, group->comm->id_of[rank]) &&
            !atomic_compare_exchange_strong(&control->left_out, &none, mine) &&
            rank / group->nlocal == group->comm->node)
            atomic_store(&control->left_out, mine);
    }
}

ep_status ep_group_regroup_leave(ep_comm *comm, const ep_comm *next)
{
    struct ep_group *group = ep_group_of(comm);
    ep_status status;

    tell_left_out(group, next);
    ep_streams_abandon(group->streams);
    ep_group_disconnect(group);
    status = note_former(group); /* the thread of the links has ended, which watches the processes */
    ep_group_forget_peers(group);
    ep_group_free_stages(group);
    return status == EP_OK ? fence(group, next) : status;
}

/* A new control block, because those that are absent have mapped the old one. */
static ep_status renew_control(struct ep_group *group)
{
    struct ep_shm shm, old = group->shm;

    EP_TRY(ep_shm_new(ep_group_control_bytes(group), &shm));
    pthread_mutex_lock(&group->memory_lock);
    group->shm = shm;
    group->control = shm.base;
    pthread_mutex_unlock(&group->memory_lock);
    ep_shm_done(&old);
    return ep_group_publish_memory(group);
}

ep_status ep_group_regroup_join(ep_comm *comm, const ep_boot *boot, ep_status mine)
{
    struct ep_group *group = ep_group_of(comm);
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status;

    snprintf(text, sizeof(text), "%s", ep_last_error());
    status = renew_control(group);
    if (mine != EP_OK)
        status = ep_fail(mine, "%s", text);
    ep_group_set_alone(group);
    group->operation = group->exchange = 0;
    group->plans = 0;
    atomic_store(&group->link_owes_failure, 0);
    for (struct ep_group_queue *queue = &group->queue; queue; queue = queue->next)
        queue->status = EP_OK;
    status = ep_group_join(group, boot, status);
    /* All that stay are attached again; from the others the memory has moved. */
    while (status == EP_OK && group->former)
        ep_group_forget_former(&group->former);
    if (status == EP_OK)
        group->unknown_former = 0;
    return status;
}
