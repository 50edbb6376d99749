/* SPDX-License-Identifier: Apache-2.0 */
/* Turns the failures that kernels report into statuses and error texts, and fills the kernels' waits. */
#include "backend/cuda/cuda.h"
#include "base/fd.h"
#include "base/thread.h"
#include "group/failure.h"
#include "group/peers.h"
#include "group/wait.h"

#include <errno.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

/* The part of the deadline after which a late rank of another node is blamed. */
#define GRACE_PART 4

ep_status cuda_fail_disagree(const struct cuda_comm *cuda, enum ep_group_phase phase, uint32_t word, int rank,
                             uint32_t mine, uint32_t theirs)
{
    static const char plan[] = "the plan (in order of creation; below 0: in a capture)";
    static const char *const of_operation[] = {[CUDA_DESC_PLAN] = plan,
                                               [CUDA_DESC_DTYPE] = "dtype",
                                               [CUDA_DESC_HIDDEN] = "hidden",
                                               [CUDA_DESC_SCALE_TYPE] = "scale_type",
                                               [CUDA_DESC_SCALE_WORDS] = "scale_words"};
    static const char *const of_plan[] = {[CUDA_DESC_PLAN] = plan,
                                          [CUDA_DESC_PLAN_INDEX] = "idx_type (0: token_in_rank in place of topk_idx)",
                                          [CUDA_DESC_PLAN_EXPERTS] = "n_experts",
                                          [CUDA_DESC_PLAN_TOPK] = "topk",
                                          [CUDA_DESC_PLAN_FLAGS] = "flags",
                                          [CUDA_DESC_PLAN_ALIGNMENT] = "expert_alignment"};
    const uint32_t fixed = CUDA_DESC_PLAN_FIXED;
    bool is_plan = phase == EP_GROUP_PLAN_COUNTS;
    int me = cuda->group.comm->rank;

    if (word == CUDA_DESC_PHASE || word >= CUDA_DESC_COMPARED)
        return ep_group_fail_calls(mine, me, theirs, rank);
    if (is_plan && word == CUDA_DESC_PLAN_FLAGS && (mine ^ theirs) & fixed)
        return ep_group_fail_disagree("ep_plan_new", "max_recv_tokens (1: fixed capacity)", !!(mine & fixed), me,
                                      !!(theirs & fixed), rank);
    if (!is_plan && word == CUDA_DESC_OUTPUTS && (mine ^ theirs) << (32 - EP_GROUP_OUTPUT_BITS) == 0)
        return ep_group_fail_disagree("ep_dispatch", "source_stride", mine >> EP_GROUP_OUTPUT_BITS, me,
                                      theirs >> EP_GROUP_OUTPUT_BITS, rank);
    if (!is_plan && word == CUDA_DESC_OUTPUTS)
        return ep_group_fail_outputs(mine, me, theirs, rank);
    return ep_group_fail_disagree(is_plan && word != CUDA_DESC_PLAN ? "ep_plan_new" : "",
                                  (is_plan ? of_plan : of_operation)[word], (int32_t)mine, me, (int32_t)theirs, rank);
}

static ep_status fail_lost(struct cuda_comm *cuda, int rank, enum ep_group_phase phase)
{
    return ep_group_set_failure(&cuda->group, ep_group_has_left(&cuda->group, rank) ? EP_E_PEER_LEFT : EP_E_PEER_DEAD,
                                rank, phase);
}

/* Waits for what another rank reports, which knows more than this one. */
static ep_status wait_for_others_report(struct cuda_comm *cuda)
{
    uint64_t limit = ep_now_ns() + (uint64_t)cuda->group.comm->config.timeout_ms * 1000000u / GRACE_PART;
    struct cuda_backoff backoff = {.begin_ns = 0};
    ep_status status = ep_group_check(&cuda->group);

    while (status == EP_OK && ep_now_ns() < limit) {
        cuda_backoff(&backoff);
        status = ep_group_check(&cuda->group);
    }
    return status;
}

/*
 * A rank that is late may have died or left: kernels do not learn that of ranks of other nodes. A rank of another node
 * may be late because it waits for a rank of its own node. Its deadline ends at about the same time, and the rank that
 * it blames is the right one. Ranks of this node say whom they wait for.
 */
static ep_status fail_late(struct cuda_comm *cuda, int rank, enum ep_group_phase phase)
{
    bool remote = rank < cuda->group.first || rank >= cuda_end_of_node(cuda);
    int late = remote ? rank : ep_group_find_failed_rank(&cuda->group, rank);

    if (remote && cuda->group.nlocal > 1 && !atomic_load(&cuda->masking))
        EP_TRY(wait_for_others_report(cuda));
    if (ep_group_dead_or_left(&cuda->group, late))
        return fail_lost(cuda, late, phase);
    return ep_group_set_failure(&cuda->group, EP_E_TIMEOUT, late, phase);
}

/* A kernel of `rank` has failed, and has stopped this rank's kernels: the host of that rank knows more about it. */
static ep_status fail_stopped(struct cuda_comm *cuda, ep_status status, int rank, enum ep_group_phase phase)
{
    if (!atomic_load(&cuda->masking))
        EP_TRY(wait_for_others_report(cuda));
    return ep_group_set_failure(&cuda->group, status, rank, phase);
}

static ep_status fail_routing(struct cuda_comm *cuda, int rank, enum ep_group_phase phase)
{
    if (rank != cuda->group.comm->rank)
        return fail_stopped(cuda, EP_E_ROUTING, rank, phase);
    if (phase == EP_GROUP_PLAN_COUNTS)
        ep_fail(
            EP_E_ROUTING,
            "new routing of rank %d is not valid: an expert that does not exist%s, or tokens_per_expert that do not "
            "match the mask",
            rank, cuda_checks_distinct(cuda->group.comm) ? " or is twice in a token" : "");
    else
        ep_fail(EP_E_ROUTING, "low latency: a queued call had routing that is not valid");
    return ep_group_set_own_failure(&cuda->group, EP_E_ROUTING, rank, phase);
}

static ep_status fail_tokens(struct cuda_comm *cuda, int rank, enum ep_group_phase phase)
{
    const volatile uint32_t *detail = cuda->report->detail;

    if (rank != cuda->group.comm->rank)
        return fail_stopped(cuda, EP_E_STATE, rank, phase);
    ep_fail(
        EP_E_STATE,
        "the latest ep_plan_update() of the plan has %u tokens on rank %d, but the operation was called for %u: keep "
        "n_tokens, or update the plan before the operation in the same graph, or outside of graphs",
        detail[CUDA_DETAIL_THEIRS], rank, detail[CUDA_DETAIL_MINE]);
    return ep_group_set_own_failure(&cuda->group, EP_E_STATE, rank, phase);
}

static ep_status fail_former(struct cuda_comm *cuda, int rank, enum ep_group_phase phase)
{
    if (rank != cuda->group.comm->rank)
        return fail_stopped(cuda, EP_E_STATE, rank, phase);
    ep_fail(EP_E_STATE,
            "a graph was launched with calls on an ep_ll or a plan of former members: call ep_ll_renew() or "
            "ep_plan_update() before; with a plan of exact counts, or between nodes one of the capture, it must be "
            "captured again");
    return ep_group_set_own_failure(&cuda->group, EP_E_STATE, rank, phase);
}

static ep_status fail_reported(struct cuda_comm *cuda, uint32_t failure)
{
    int rank = (int)(failure >> 8 & 0xffff), me = cuda->group.comm->rank;
    enum ep_group_phase phase = (enum ep_group_phase)(failure & 0xff);
    const volatile uint32_t *detail = cuda->report->detail;
    int none = EP_OK;
    ep_status status;

    if (rank >= cuda->group.comm->nranks)
        rank = me;
    switch (failure >> 24) {
    case CUDA_FAILED_MISMATCH:
        return ep_fail(
            ep_group_set_failure(&cuda->group, EP_E_MISMATCH, rank, phase),
            "ep_ll_dispatch: ranks disagree: out_dtype, scale_type or the rounding of scales is not the same "
            "on rank %d and rank %d, or what rank %d has sent is damaged",
            me, rank, rank);
    case CUDA_FAILED_DISAGREE:
        status = cuda_fail_disagree(cuda, phase, detail[CUDA_DETAIL_WORD], (int)detail[CUDA_DETAIL_RANK],
                                    detail[CUDA_DETAIL_MINE], detail[CUDA_DETAIL_THEIRS]);
        break;
    case CUDA_FAILED_DAMAGE:
        status = ep_fail(EP_E_MISMATCH,
                         "what rank %d has published is damaged: the address of a buffer or the index of a row", rank);
        break;
    case CUDA_FAILED_UNMAPPED:
        status = ep_fail(EP_E_TIMEOUT, "rank %d has not mapped memory of rank %d within %d ms", me, rank,
                         cuda->group.comm->config.timeout_ms);
        rank = me;
        break;
    case CUDA_FAILED_STRIDE:
        status = ep_fail(EP_E_ARG, "ep_plan_get_metadata: rank %d has more tokens than source_stride", rank);
        break;
    case CUDA_FAILED_TOKENS:
        return fail_tokens(cuda, rank, phase);
    case CUDA_FAILED_SIGNAL:
        status = ep_ll_fail_signal(cuda->group.comm, (int)detail[CUDA_DETAIL_RANK], detail[CUDA_DETAIL_WORD],
                                   detail[CUDA_DETAIL_THEIRS], detail[CUDA_DETAIL_MINE]);
        break;
    case CUDA_FAILED_EXCLUDED:
        return ep_fail(EP_E_EXCLUDED, "rank %d has masked this rank in \"%s\"", rank, ep_group_phase_name(phase));
    case CUDA_FAILED_FORMER:
        return fail_former(cuda, rank, phase);
    case CUDA_FAILED_LOST:
        return fail_lost(cuda, rank, phase);
    case CUDA_FAILED_OWN_ROUTING:
        atomic_compare_exchange_strong(&cuda->group.comm->failed, &none, (int)EP_E_ROUTING);
        return ep_fail(EP_E_ROUTING, "low latency: a queued call had routing that is not valid; the "
                                     "other ranks go on without this one");
    case CUDA_FAILED_ROUTING:
        return fail_routing(cuda, rank, phase);
    default:
        return fail_late(cuda, rank, phase);
    }
    return ep_group_set_own_failure(&cuda->group, status, rank, phase);
}

ep_status cuda_check_reported(struct cuda_comm *cuda)
{
    uint32_t failure = __atomic_load_n(&cuda->report->failure, __ATOMIC_ACQUIRE);

    return failure ? fail_reported(cuda, failure) : EP_OK;
}

void cuda_fill_waits(struct cuda_comm *cuda, enum ep_group_phase ready, enum ep_group_phase done,
                     struct cuda_waits *ret_waits)
{
    const ep_comm *comm = cuda->group.comm;

    *ret_waits = (struct cuda_waits){.mine = cuda->signals,
                                     .report = cuda->report_device,
                                     .map_entries = cuda->map_entries,
                                     .host_map_entries = cuda->host_map_entries_device,
                                     .deadline_ns = (uint64_t)comm->config.timeout_ms * 1000000u,
                                     .rank = cuda->group.local,
                                     .nranks = cuda->group.nlocal,
                                     .first = cuda->group.first,
                                     .ready_phase = (int32_t)ready,
                                     .done_phase = (int32_t)done};
}

ep_status cuda_check(struct cuda_comm *cuda)
{
    EP_TRY(cuda_check_reported(cuda));
    /* Low latency with masking goes on after failures of other ranks, but not after an abort. */
    EP_TRY(atomic_load(&cuda->masking) ? ep_group_check_abort(&cuda->group) : ep_group_check(&cuda->group));
    /* Graphs of a rank that could not join a group reach nobody, and the group has no failure. */
    return cuda->let_go ? ep_fail((ep_status)atomic_load(&cuda->group.comm->failed),
                                  "ep_comm_regroup() failed before on rank %d: call it again", cuda->group.comm->rank)
                        : EP_OK;
}

/* --- the monitor ------------------------------------------------------------------------------------------------- */

/*
 * The monitor: a thread of each communicator that mostly sleeps. Kernels have deadlines of their own. The monitor
 * reports to them what they cannot see: dead processes, ranks that have left, failures set by peers. It publishes to
 * the peers what a kernel has reported, whatever the caller's thread does, and maps what the peers allocate.
 */

/* The poll interval. With pidfds the death of a process is noticed at once. */
#define POLL_MS 20
/* In which kernels that wait are sure to say so again, also between time slices of other processes. */
#define SAID_INTERVALS 5

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

        if (!cuda_is_peer(cuda, rank) || is_lost(cuda, local))
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
    ep_status status = cuda_check(cuda);

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

/*
 * Told by a rank that was found to have left one interval ago: kernels that have all they need of it have ended. Memory
 * of a thread of this process cannot be unmapped: its members wait until this rank frees its communicator.
 */
static void check_left_out(struct cuda_comm *cuda)
{
    struct ep_group *group = &cuda->group;
    int by = (int)atomic_load(&group->control->left_out) - 1;

    for (int rank = group->first; rank < cuda_end_of_node(cuda); rank++)
        if (cuda_is_peer(cuda, rank) && cuda->peers[rank].same_process)
            return;
    if (by >= group->first && by < cuda_end_of_node(cuda) && is_lost(cuda, by - group->first) &&
        !ep_group_has_left(group, group->comm->rank))
        cuda_let_go(cuda, by);
}

/* Publishes whom kernels of this rank wait for, and no longer once they have not said so for `said` intervals. */
static void publish_wait(struct cuda_comm *cuda, int *said)
{
    uint32_t waits_for = __atomic_exchange_n(&cuda->report->waits_for, 0, __ATOMIC_ACQUIRE);

    if (waits_for) {
        ep_group_publish_wait(&cuda->group, cuda->group.first + (int)(waits_for >> 8) - 1,
                              (enum ep_group_phase)(waits_for & 0xff));
        *said = SAID_INTERVALS;
    } else if (*said && !--*said) {
        ep_group_publish_wait_end(&cuda->group);
    }
}

static void *monitor_main(void *argument)
{
    struct cuda_comm *cuda = argument;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    struct pollfd fds[CUDA_MAX_RANKS + 1];
    bool failed = false;
    int said = 0;

    cudaSetDevice(cuda->device);
    /* Its CUDA calls are not part of captures in other threads. */
    cudaThreadExchangeStreamCaptureMode(&mode);
    for (;;) {
        int n = poll(fds, list_fds(cuda, fds), POLL_MS);

        if (n > 0 && fds[0].revents)
            return NULL;
        check_left_out(cuda);
        probe_peers(cuda, &failed);
        publish_wait(cuda, &said);
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
