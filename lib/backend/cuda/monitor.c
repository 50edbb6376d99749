/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The monitor: a thread of each communicator that mostly sleeps. Kernels have deadlines of their own. The monitor
 * reports to them what they cannot see: dead processes, ranks that have left, failures set by peers. It publishes to
 * the peers what a kernel has reported, whatever the caller's thread does, and maps what the peers allocate.
 */
#include "backend/cuda/cuda.h"

#include "backend/cuda/memory.h"
#include "backend/cuda/report.h"
#include "base/fd.h"
#include "base/thread.h"
#include "group/failure.h"
#include "group/peers.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The poll interval. With pidfds the death of a process is noticed at once. */
#define POLL_MS 20

void cuda_stop_kernels(struct cuda_comm *cuda)
{
    __atomic_store_n(&cuda->report->abort, 1, __ATOMIC_RELEASE);
}

static bool is_lost(const struct cuda_comm *cuda, int local)
{
    return __atomic_load_n(&cuda->report->lost, __ATOMIC_RELAXED) >> local & 1;
}

/* What a lost rank has sent has arrived; only the kernels know whether that is all they need. */
static void find_lost(struct cuda_comm *cuda)
{
    struct ep_group *group = &cuda->group;

    for (int local = 0; local < group->nlocal; local++) {
        int rank = group->first + local;

        if (rank == group->comm->rank || is_lost(cuda, local))
            continue;
        if (ep_group_dead_or_left(group, rank))
            __atomic_fetch_or(&cuda->report->lost, 1u << local, __ATOMIC_RELEASE);
    }
}

/*
 * Finds dead ranks of other nodes on this host; on other hosts the control links find them. It is unknown which of
 * their data has arrived, so the group fails, as when a control link ends.
 */
static ep_status find_remote_dead(struct cuda_comm *cuda)
{
    struct ep_group *group = &cuda->group;

    for (int rank = 0; rank < group->comm->nranks; rank++) {
        if ((rank >= group->first && rank < cuda_end_of_node(cuda)) || !group->peers[rank].control ||
            ep_group_has_left(group, rank))
            continue;
        if (ep_group_peer_dead(group, rank))
            return ep_group_set_failure(group, EP_E_PEER_DEAD, rank, EP_GROUP_IDLE);
    }
    return EP_OK;
}

static void probe_peers(struct cuda_comm *cuda, bool *failed)
{
    struct ep_group *group = &cuda->group;
    ep_status status = cuda_check_reported(cuda);

    /* Low latency with masking goes on after failures of other ranks, but not after an abort. */
    if (status == EP_OK)
        status = atomic_load(&cuda->masking) ? ep_group_check_abort(group) : ep_group_check(group);
    if (status == EP_OK && !atomic_load(&cuda->masking))
        status = find_remote_dead(cuda);
    if (status == EP_OK) {
        status = cuda_map_new(cuda);
        if (status != EP_OK)
            status = ep_group_set_own_failure(group, status, group->comm->rank, EP_GROUP_IDLE);
    }
    if (status != EP_OK && !*failed) {
        *failed = true;
        cuda_stop_kernels(cuda);
        ep_comm_record(group->comm, status);
    }
    find_lost(cuda);
}

/* The pidfds of the peers that are not lost, and the descriptor that ends the monitor. Returns their number. */
static nfds_t list_fds(const struct cuda_comm *cuda, struct pollfd *fds)
{
    nfds_t n = 0;

    fds[n++] = (struct pollfd){.fd = cuda->stop, .events = POLLIN};
    for (int local = 0; local < cuda->group.nlocal; local++) {
        int pidfd = cuda->group.peers[cuda->group.first + local].process.pidfd;

        if (pidfd >= 0 && !is_lost(cuda, local))
            fds[n++] = (struct pollfd){.fd = pidfd, .events = POLLIN};
    }
    return n;
}

static void *monitor_main(void *argument)
{
    struct cuda_comm *cuda = argument;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    struct pollfd fds[CUDA_MAX_RANKS + 1];
    bool failed = false;

    cudaSetDevice(cuda->device);
    /* Its CUDA calls are not part of captures in other threads. */
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (;;) {
        int n = poll(fds, list_fds(cuda, fds), POLL_MS);

        if (n > 0 && fds[0].revents)
            return NULL;
        probe_peers(cuda, &failed);
    }
}

ep_status cuda_monitor_start(struct cuda_comm *cuda)
{
    cuda->stop = ep_fd_above_stdio(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (cuda->stop < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_comm_new: eventfd");
    return ep_thread_begin(&cuda->monitor, &cuda->monitored, monitor_main, cuda, "ep_comm_new: pthread_create");
}

void cuda_monitor_stop(struct cuda_comm *cuda)
{
    uint64_t one = 1;

    if (cuda->monitored && ep_fd_is_ours(cuda->stop) && write(cuda->stop, &one, sizeof(one)) == sizeof(one))
        pthread_join(cuda->monitor, NULL);
    if (cuda->stop >= 0)
        ep_fd_close(cuda->stop);
    cuda->monitored = false;
    cuda->stop = -1;
}
