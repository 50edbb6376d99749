/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The host's wait for a kernel. The kernel's own waits have the deadline; the host looks for what a kernel cannot see:
 * a failure that a peer has raised, a process that died. Then it stops the kernel by the abort word, so that the stream
 * and the context stay usable.
 */
#include "backend/cuda/cuda.h"

#include "base/futex.h"

#include <sched.h>
#include <stddef.h>
#include <string.h>

#define LOOK_NS 20000000u  /* at processes */
#define GLANCE_NS 20000u   /* at failure words */
#define END_NS 2000000000u /* a stopped kernel ends sooner by far */
#define SPINS 64
#define ASK 65536 /* spins between questions to the driver */

struct watch {
    struct cuda_comm *cuda;
    enum host_phase phase;
    uint64_t glance_ns, look_ns, limit_ns;
    int gone; /* 1 + the rank that the last look found dead or gone */
    int spins;
    uint32_t *lost; /* low latency with masking: lost ranks are noted here, a bit for each, and do not fail the group */
};

static uint32_t read_failure(const struct cuda_comm *cuda)
{
    return *(volatile uint32_t *)&cuda->report->failure;
}

/* Stops what runs and waits for its end; buffers are the caller's again. */
static void stop(struct cuda_comm *cuda)
{
    uint64_t limit = ep_now_ns() + END_NS;

    *(volatile uint32_t *)&cuda->report->abort = 1;
    while (cudaStreamQuery(cuda->stream) == cudaErrorNotReady && ep_now_ns() < limit)
        sched_yield();
    cudaGetLastError();
}

static ep_status look_for_lost(struct watch *watch)
{
    struct host_comm *host = &watch->cuda->host;
    uint32_t known = watch->lost ? *watch->lost : watch->cuda->report->left;

    for (int rank = 0; rank < host->comm->nranks; rank++) {
        bool dead, left;

        if (rank == host->comm->rank || known >> rank & 1)
            continue;
        dead = host_peer_dead(host, rank);
        left = atomic_load(&host->peers[rank].control->left);
        if (!dead && !left)
            continue;
        /* It may have done its part before: once more. */
        if (watch->gone != rank + 1) {
            watch->gone = rank + 1;
            return EP_OK;
        }
        /* All that a rank sends has arrived before it leaves: whether that is enough the kernel knows alone. */
        if (watch->lost || left)
            __atomic_fetch_or(watch->lost ? watch->lost : &watch->cuda->report->left, 1u << rank, __ATOMIC_RELEASE);
        else
            return host_raise(host, EP_E_PEER_DEAD, rank, watch->phase);
    }
    return EP_OK;
}

/* What a kernel has reported as the reason for its end. */
static ep_status raise_reported(struct cuda_comm *cuda, uint32_t failure)
{
    int rank = (int)(failure >> 8 & 0xff), me = cuda->host.comm->rank;
    enum host_phase phase = (enum host_phase)(failure & 0xff);
    int none = EP_OK;

    switch (failure >> 16) {
    case CUDA_FAILED_MISMATCH:
        return ep_fail(
            host_raise(&cuda->host, EP_E_MISMATCH, rank, phase),
            "ep_ll_dispatch: ranks disagree: out_dtype, scale_type or the rounding of scales is not the same "
            "on rank %d and rank %d, or what rank %d has sent is damaged",
            me, rank, rank);
    case CUDA_FAILED_EXCLUDED:
        return ep_fail(EP_E_EXCLUDED, "rank %d has masked this rank in \"%s\"", rank, host_phase_name(phase));
    case CUDA_FAILED_LEFT:
        return host_raise(&cuda->host, EP_E_PEER_LEFT, rank, phase);
    case CUDA_FAILED_OWN_ROUTING:
        atomic_compare_exchange_strong(&cuda->host.comm->failed, &none, (int)EP_E_ROUTING);
        return ep_fail(EP_E_ROUTING, "low latency: a call that nobody waited for (EP_LL_ASYNC, or in a CUDA graph) had "
                                     "routing that is not valid; the other ranks go on without this one");
    case CUDA_FAILED_ROUTING:
        if (rank != me)
            return host_raise(&cuda->host, EP_E_ROUTING, rank, phase);
        ep_fail(EP_E_ROUTING,
                "low latency: a call that nobody waited for (EP_LL_ASYNC, or in a CUDA graph) had routing "
                "that is not valid");
        return host_raise_own(&cuda->host, EP_E_ROUTING, me, phase);
    default:
        return host_raise(&cuda->host, EP_E_TIMEOUT, rank, phase);
    }
}

/* Between two looks at what is waited for. */
static ep_status watch_once(struct watch *watch)
{
    struct cuda_comm *cuda = watch->cuda;
    uint32_t failure = read_failure(cuda);
    uint64_t now;

    if (failure)
        return raise_reported(cuda, failure);
    if (cuda->host.spin)
        ep_cpu_relax();
    else
        sched_yield();
    if (watch->spins++ % SPINS)
        return EP_OK;
    now = ep_now_ns();
    if (now < watch->glance_ns)
        return EP_OK;
    watch->glance_ns = now + GLANCE_NS;
    EP_TRY(watch->lost ? host_check_abort(&cuda->host) : host_check(&cuda->host));
    if (now < watch->look_ns)
        return EP_OK;
    watch->look_ns = now + LOOK_NS;
    if (now >= watch->limit_ns)
        return host_raise(&cuda->host, EP_E_TIMEOUT, cuda->host.comm->rank, watch->phase);
    return look_for_lost(watch);
}

static void begin(struct watch *watch, struct cuda_comm *cuda, enum host_phase phase)
{
    uint64_t now = ep_now_ns();

    /*
     * What the caller has queued before may take a deadline of its own, and a kernel has two waits; a low-latency one
     * three, of which a combine's last may take two.
     */
    *watch = (struct watch){.cuda = cuda, .phase = phase, .glance_ns = now + GLANCE_NS, .look_ns = now + LOOK_NS};
    watch->limit_ns = now + (uint64_t)cuda->host.comm->config.timeout_ms * 6000000u;
}

static bool has_completed(const struct cuda_pending *pending)
{
    return __atomic_load_n(&pending->cuda->report->completed, __ATOMIC_ACQUIRE) >= pending->operation;
}

static cudaError_t query(const struct cuda_pending *pending)
{
    return pending->behind ? cudaEventQuery(pending->behind) : cudaStreamQuery(pending->cuda->stream);
}

static ep_status wait_for_end(const struct cuda_pending *pending)
{
    struct cuda_comm *cuda = pending->cuda;
    struct watch watch;

    begin(&watch, cuda, pending->phase);
    for (;;) {
        cudaError_t error = cudaErrorNotReady;

        /* The kernel's own word comes sooner than the driver's; the driver is asked now and then, for errors. */
        if (!pending->behind && has_completed(pending))
            return EP_OK;
        if (pending->behind || watch.spins % ASK == ASK - 1)
            error = query(pending);
        if (error == cudaSuccess && has_completed(pending))
            return EP_OK;
        if (error != cudaSuccess && error != cudaErrorNotReady)
            return host_raise_own(&cuda->host, cuda_status(error, "kernel"), cuda->host.comm->rank, pending->phase);
        EP_TRY(watch_once(&watch));
    }
}

ep_status cuda_queued(struct cuda_pending *pending, bool more_behind)
{
    pending->launched_ns = ep_now_ns();
    if (!more_behind || cuda_is_capturing(pending->cuda))
        return EP_OK;
    CUDA_TRY(cudaEventCreateWithFlags(&pending->behind, cudaEventDisableTiming));
    CUDA_TRY(cudaEventRecord(pending->behind, pending->cuda->stream));
    return EP_OK;
}

ep_status cuda_wait(void *argument)
{
    struct cuda_pending *pending = argument;
    struct cuda_comm *cuda = pending->cuda;
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(cuda_enter(cuda, &scope));
    status = wait_for_end(pending);
    if (status != EP_OK)
        stop(cuda);
    if (pending->behind)
        cudaEventDestroy(pending->behind);
    cuda_leave(&scope);
    if (status != EP_OK)
        return status;
    pending->stats.ns_move = ep_now_ns() - pending->launched_ns;
    pending->stats.ns_total = ep_now_ns() - pending->begin_ns;
    ep_comm_set_stats(cuda->host.comm, &pending->stats);
    return EP_OK;
}

/* --- operations in the queue ------------------------------------------------------------------------------------ */

static ep_status start_on_device(ep_plan *plan, cuda_start_fn start, const void *args, struct cuda_pending *ret_pending)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_scope scope;
    ep_status status;

    *ret_pending = (struct cuda_pending){.cuda = cuda, .begin_ns = ep_now_ns(), .stats = {.size = sizeof(ep_stats)}};
    EP_TRY(host_check(&cuda->host));
    EP_TRY(cuda_enter(cuda, &scope));
    status = start(plan, args, ret_pending);
    if (status != EP_OK && ret_pending->behind)
        cudaEventDestroy(ret_pending->behind);
    /* The hosts of the peers have met this one and their kernels wait: they need not do so until the deadline. */
    if (status != EP_OK && ret_pending->operation)
        status = host_raise_own(&cuda->host, status, plan->comm->rank, ret_pending->phase);
    cuda_leave(&scope);
    return status;
}

/*
 * Into a graph. What the hosts say to each other happens now, once; the kernels meet anew whenever the graph is
 * launched.
 */
static ep_status capture(ep_plan *plan, cuda_start_fn start, const void *args)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_pending pending;
    ep_status status;

    EP_TRY(host_drain(&cuda->host));
    /* A peer's memory may have to be mapped, which is nothing of the stream's. */
    CUDA_TRY(cudaThreadExchangeStreamCaptureMode(&mode));
    status = start_on_device(plan, start, args, &pending);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return status;
}

ep_status cuda_submit(ep_plan *plan, cuda_start_fn start, const void *args)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_pending pending;

    if (cuda_is_capturing(cuda))
        return capture(plan, start, args);
    EP_TRY(start_on_device(plan, start, args, &pending));
    return host_submit(&cuda->host, NULL, cuda_wait, &pending, sizeof(pending));
}

ep_status cuda_wait_event(struct cuda_comm *cuda, cudaEvent_t event, enum host_phase phase, uint32_t *lost)
{
    cudaError_t error = cudaErrorNotReady;
    ep_status status = EP_OK;
    struct watch watch;

    begin(&watch, cuda, phase);
    watch.lost = lost;
    /* Each rank that does not come takes two deadlines of a kernel. */
    if (lost)
        watch.limit_ns += (uint64_t)cuda->host.comm->config.timeout_ms * 2000000u * (uint64_t)cuda->host.comm->nranks;
    while (status == EP_OK && error == cudaErrorNotReady) {
        error = cudaEventQuery(event);
        if (error == cudaErrorNotReady)
            status = watch_once(&watch);
    }
    if (status == EP_OK && error != cudaSuccess)
        status = host_raise_own(&cuda->host, cuda_status(error, "kernel"), cuda->host.comm->rank, phase);
    if (status == EP_OK)
        status = cuda_check_reported(cuda);
    if (status != EP_OK)
        stop(cuda);
    return status;
}

ep_status cuda_check_reported(struct cuda_comm *cuda)
{
    uint32_t failure = read_failure(cuda);

    return failure ? raise_reported(cuda, failure) : EP_OK;
}

ep_status cuda_wait_counted(struct cuda_comm *cuda)
{
    struct watch watch;
    ep_status status = EP_OK;

    begin(&watch, cuda, HOST_PLAN_COUNTS);
    while (status == EP_OK && __atomic_load_n(&cuda->report->counted, __ATOMIC_ACQUIRE) < cuda->counted) {
        cudaError_t error;

        status = watch_once(&watch);
        if (status == EP_OK && watch.spins % 65536 == 0 && (error = cudaStreamQuery(cuda->stream)) != cudaErrorNotReady)
            status = cuda_status(error, "kernel");
    }
    return status;
}

void cuda_fill_waits(struct cuda_comm *cuda, enum host_phase ready, enum host_phase done, struct cuda_waits *ret_waits)
{
    const ep_comm *comm = cuda->host.comm;

    *ret_waits = (struct cuda_waits){.mine = cuda->signals,
                                     .report = cuda->report_device,
                                     .ticket = cuda_is_capturing(cuda) ? 0 : cuda->host.operation,
                                     .deadline_ns = (uint64_t)comm->config.timeout_ms * 1000000u,
                                     .rank = comm->rank,
                                     .nranks = comm->nranks,
                                     .ready_phase = (int32_t)ready,
                                     .done_phase = (int32_t)done};
    for (int rank = 0; rank < comm->nranks; rank++)
        ret_waits->peer[rank] = rank == comm->rank ? cuda->signals : cuda->peers[rank].signals.base;
}
