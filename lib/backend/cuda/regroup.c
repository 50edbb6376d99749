/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The backend's part of ep_comm_regroup(). Memory, streams and all that kernels are given in their arguments stay where
 * they are. What peers have written, counters, tables, mappings and connections begin anew, as in a creation. Kernels
 * find their peers by tables in device memory, so a captured graph works with the members of now.
 */
#include "backend/cuda/ll_impl.h"

#include <string.h>

ep_status cuda_regroup_drain(ep_comm *comm)
{
    struct cuda_comm *cuda = cuda_of(comm);
    cudaError_t error = cudaSuccess;
    struct cuda_scope scope;

    EP_TRY(cuda_scope_begin(cuda, &scope));
    (void)ep_group_regroup_drain(comm);
    if (atomic_load(&comm->failed))
        cuda_stop_kernels(cuda);
    if (cuda->operations) {
        cuda_drain(cuda);
        error = cudaEventQuery(cuda->order);
    }
    cuda_scope_end(&scope);
    if (error != cudaErrorNotReady)
        return cuda_status(error, "cudaEventQuery");
    cudaGetLastError();
    return ep_fail(EP_E_STATE,
                   "ep_comm_regroup: queued operations of rank %d have not begun, because what is queued "
                   "before them in their stream does not end",
                   comm->rank);
}

/* Peers map all memory again, and count their calls from 0. Those that still live clear their own mark. */
static void reset_control(struct cuda_comm *cuda)
{
    struct cuda_ctrl *ctrl = cuda->ctrl;
    uint32_t may_map = 0;

    for (const struct ep_group_former *former = cuda->group.former; former; former = former->next)
        may_map |= 1u << (former->rank - cuda->group.first);

    cuda->let_go = false;
    cuda->called[0] = 0;
    cuda->last_shape[0].blocks = cuda->last_shape[1].blocks = 0; /* repeat_bare() of the module */
    atomic_store(&ctrl->called[0], 0);
    atomic_fetch_and(&ctrl->mapped_by, may_map);
    for (int local = 0; local < CUDA_MAX_RANKS; local++)
        atomic_store(&ctrl->mapped[local], 0);
    for (int slot = 0; slot < CUDA_SLOTS; slot++)
        atomic_store(&cuda->allocations[slot].mapped, false);
}

/*
 * From now on a graph that is launched finds the communicator failed, and no peer; while kernels may be `running`,
 * which would not expect that, its own rank in place of each.
 */
static ep_status hide_peers(struct cuda_comm *cuda, bool running)
{
    struct cuda_signals *table[CUDA_MAX_RANKS];
    const uint32_t stopped = CUDA_STOPPED;

    for (int local = 0; local < CUDA_MAX_RANKS; local++)
        table[local] = running ? cuda->signals : NULL;
    EP_TRY(cuda_transfer(cuda, &cuda->signals->failure, &stopped, sizeof(stopped)));
    EP_TRY(cuda_transfer(cuda, cuda->signals->peer, table, sizeof(table)));
    return cuda_ll_void_all(cuda, running);
}

/* Kernels that began before may still write: so it waits for them. False: it has to be tried again, as in a capture. */
static bool let_go(struct cuda_comm *cuda)
{
    cuda_stop_kernels(cuda);
    pthread_mutex_lock(&cuda->map_lock);
    cuda->let_go = true;
    pthread_mutex_unlock(&cuda->map_lock);
    if (hide_peers(cuda, true) != EP_OK || cudaDeviceSynchronize() != cudaSuccess) {
        cudaGetLastError();
        return false;
    }
    pthread_mutex_lock(&cuda->map_lock);
    cuda_unmap_all(cuda);
    pthread_mutex_unlock(&cuda->map_lock);
    return true;
}

void cuda_let_go(struct cuda_comm *cuda, int by)
{
    ep_group_set_failure(&cuda->group, EP_E_PEER_LEFT, by, EP_GROUP_IDLE);
    if (let_go(cuda))
        ep_group_leave(&cuda->group); /* otherwise the next interval tries again */
}

ep_status cuda_regroup_leave(ep_comm *comm, const ep_comm *next)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope = {.previous = -1};
    ep_status left, cleared;

    cuda_monitor_stop(cuda);
    /* All members have drained their streams: none of them waits for what this one has yet to send. */
    cuda_ll_nets_leave(cuda);
    if (cuda_scope_begin(cuda, &scope) == EP_OK)
        cuda_unmap_all(cuda); /* before the group unmaps the control pages */
    cuda_proxy_leave(cuda);
    left = ep_group_regroup_leave(comm, next);
    memset(cuda->peers, 0, (size_t)comm->nranks * sizeof(*cuda->peers));
    reset_control(cuda);
    cleared = cuda_comm_clear(cuda); /* after the fence: a process that was about to end may have written until then */
    if (cleared == EP_OK)
        cleared = hide_peers(cuda, false);
    cuda_scope_end(&scope);
    return cleared == EP_OK ? left : cleared;
}

/* It has no monitor that would let go when it is left out: so it does at once. */
static void fail_to_join(struct cuda_comm *cuda)
{
    cuda_monitor_stop(cuda);
    if (let_go(cuda))
        atomic_store(&cuda->group.control->let_go, 1);
}

ep_status cuda_regroup_join(ep_comm *comm, const ep_boot *boot, ep_status mine)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope = {.previous = -1};
    ep_status status = ep_group_regroup_join(comm, boot, mine), here = cuda_scope_begin(cuda, &scope);

    if (status == EP_OK)
        status = cuda_comm_join(cuda, boot, here);
    if (status != EP_OK && here == EP_OK)
        fail_to_join(cuda);
    cuda_scope_end(&scope);
    return status;
}
