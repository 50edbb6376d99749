/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Calls in their streams. An operation is launched in the stream of its call. The next operation waits for it on the
 * device if it is called in another stream, because the kernels of the ranks synchronise in the order of the calls. The
 * host waits, asleep, only in ep_stream_sync() and for events.
 */
#include "backend/cuda/plan.h"
#include "group/failure.h"

#include <stdlib.h>

#define CHECK_NS 2000000u /* between checks of the group */
/* A layer of a model takes less; a sleep, from which the host wakes up late, would leave the GPU idle. */
#define NUMBER_SPIN_NS 50000000u
#define END_NS 2000000000u /* a stopped kernel ends much sooner */
/* The host's limit in deadlines of the kernels: for those of an operation, and for what the caller queued before it. */
#define DEADLINES 6

/* --- calls ------------------------------------------------------------------------------------------------------- */

static ep_status find_capture(cudaStream_t stream, unsigned long long *ret_capture)
{
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    unsigned long long number = 0;

    /* The runtime's signature grows a parameter with CUDA 13. */
#if CUDART_VERSION >= 13000
    CUDA_TRY(cudaStreamGetCaptureInfo(stream, &capturing, &number, NULL, NULL, NULL, NULL));
#else
    CUDA_TRY(cudaStreamGetCaptureInfo(stream, &capturing, &number, NULL, NULL, NULL));
#endif
    if (capturing == cudaStreamCaptureStatusInvalidated)
        return ep_fail(EP_E_STATE, "the capture of the stream is invalid");
    *ret_capture = capturing == cudaStreamCaptureStatusActive ? number + 1 : 0;
    return EP_OK;
}

bool cuda_is_capturing(ep_comm *comm, ep_stream stream)
{
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    struct cuda_scope scope;
    cudaError_t error;

    if (cuda_scope_begin_uncaptured(cuda_of(comm), &scope) != EP_OK)
        return false;
    error = cudaStreamIsCapturing(cuda_stream_of(cuda_of(comm), stream), &capturing);
    cuda_scope_end(&scope);
    /* The call itself reports an error. */
    if (error != cudaSuccess)
        cudaGetLastError();
    return error == cudaSuccess && capturing != cudaStreamCaptureStatusNone;
}

/*
 * Is it the stream of the last operation outside of captures? The handle alone does not tell: a stream that was created
 * after another one was destroyed may have its handle, and cudaStreamPerThread is another stream in each thread.
 */
static bool is_last_stream(const struct cuda_comm *cuda, cudaStream_t stream, unsigned long long id)
{
    return cuda->operations && stream == cuda->stream && id == cuda->stream_id;
}

/*
 * A kernel cannot be launched in a stream of another GPU; CUDA reports an invalid handle, which explains nothing.
 * Checked when the stream changes; skipped if the runtime or driver cannot report the device of a stream.
 */
static ep_status check_stream(const struct cuda_call *call)
{
    int device = call->cuda->device;

    if (call->capture || is_last_stream(call->cuda, call->stream, call->id) || !call->stream ||
        call->stream == cudaStreamLegacy || call->stream == cudaStreamPerThread)
        return EP_OK;
#if CUDART_VERSION >= 12080
    if (cudaStreamGetDevice(call->stream, &device) != cudaSuccess) {
        cudaGetLastError();
        return EP_OK;
    }
#endif
    if (device == call->cuda->device)
        return EP_OK;
    return ep_fail(EP_E_ARG, "the stream is of GPU %d, but rank %d uses GPU %d: make it after cudaSetDevice(%d)",
                   device, call->cuda->group.comm->rank, call->cuda->device, call->cuda->device);
}

/*
 * Orders the call after the last operation. The caller, which launches the graph, orders captured operations and those
 * outside the capture. Within a capture handles suffice, as a stream in capture cannot be destroyed; only two threads
 * that both capture cudaStreamPerThread in one graph must order their operations themselves.
 */
static ep_status order_after_last(const struct cuda_call *call)
{
    const struct cuda_comm *cuda = call->cuda;

    if (!call->capture && cuda->operations && !is_last_stream(cuda, call->stream, call->id))
        CUDA_TRY(cudaStreamWaitEvent(call->stream, cuda->order, 0));
    if (call->capture && call->capture == cuda->capture && call->stream != cuda->captured_stream)
        CUDA_TRY(cudaStreamWaitEvent(call->stream, cuda->captured_order, 0));
    return EP_OK;
}

ep_status cuda_call_begin(struct cuda_comm *cuda, ep_stream stream, bool operation, struct cuda_call *ret_call)
{
    struct cuda_call *call = ret_call;
    ep_status status;

    *call = (struct cuda_call){.cuda = cuda, .stream = cuda_stream_of(cuda, stream)};
    EP_TRY(cuda_check(cuda));
    EP_TRY(cuda_scope_begin_uncaptured(cuda, &call->scope));
    status = find_capture(call->stream, &call->capture);
    if (status == EP_OK && !call->capture)
        status = cuda_status(cudaStreamGetId(call->stream, &call->id), "cudaStreamGetId");
    if (call->capture && call->capture != cuda->capture)
        cuda->captured_plans = 0;
    if (status == EP_OK)
        status = check_stream(call);
    if (status == EP_OK && operation)
        status = order_after_last(call);
    if (status == EP_OK && operation)
        status = cuda_map_new(cuda);
    return status == EP_OK ? EP_OK : cuda_call_end(call, status);
}

ep_status cuda_call_end(struct cuda_call *call, ep_status status)
{
    struct cuda_comm *cuda = call->cuda;
    cudaError_t error = cudaSuccess;

    if (call->queued && call->capture) {
        error = cudaEventRecord(cuda->captured_order, call->stream);
        cuda->capture = call->capture;
        cuda->captured_stream = call->stream;
    } else if (call->queued || cuda->copied) {
        error = cudaEventRecord(cuda->order, call->stream);
        cuda->stream = call->stream;
        cuda->stream_id = call->id;
        cuda->operations++;
    }
    cuda->copied = false;
    if (status == EP_OK)
        status = cuda_status(error, "cudaEventRecord");
    /* The peers' kernels wait for the operation that this rank has begun: the failure spares them the deadline. */
    if (status != EP_OK && call->queued && !call->capture)
        status = ep_group_set_own_failure(&cuda->group, status, cuda->group.comm->rank, EP_GROUP_IDLE);
    cuda_scope_end(&call->scope);
    return status;
}

/* --- waits of the host ------------------------------------------------------------------------------------------- */

/* Each rank that low latency masks may take a deadline of its own. */
static uint64_t limit_of(const struct cuda_comm *cuda)
{
    uint64_t deadline_ns = (uint64_t)cuda->group.comm->config.timeout_ms * 1000000u, deadlines = DEADLINES;

    if (atomic_load(&cuda->masking))
        deadlines += 2 * (uint64_t)cuda->group.comm->nranks;
    return ep_now_ns() + deadlines * deadline_ns;
}

/* Operations between nodes take as long as the network does: the limit counts from the last progress. */
static void restart_limit(const struct cuda_comm *cuda, uint64_t *moved, uint64_t *limit)
{
    uint64_t now = cuda_proxy_count_chunks(cuda);

    if (now == *moved)
        return;
    *moved = now;
    *limit = limit_of(cuda);
}

ep_status cuda_wait_event(struct cuda_comm *cuda, cudaEvent_t event, enum ep_group_phase phase)
{
    uint64_t limit = limit_of(cuda), next_check = ep_now_ns() + CHECK_NS, moved = cuda_proxy_count_chunks(cuda);
    struct cuda_backoff backoff = {.begin_ns = 0};
    ep_status status = EP_OK;
    cudaError_t error;

    while ((error = cudaEventQuery(event)) == cudaErrorNotReady) {
        uint64_t now = ep_now_ns();

        cuda_backoff(&backoff);
        if (now < next_check)
            continue;
        next_check = now + CHECK_NS;
        if (status == EP_OK) {
            restart_limit(cuda, &moved, &limit);
            status = now < limit ? cuda_check(cuda)
                                 : ep_group_set_failure(&cuda->group, EP_E_TIMEOUT, cuda->group.comm->rank, phase);
            /* Gives the stopped kernels time to end, so that the caller owns its buffers again. */
            if (status != EP_OK) {
                cuda_stop_kernels(cuda);
                limit = now + END_NS;
            }
        } else if (now >= limit) {
            break;
        }
    }
    cudaGetLastError();
    if (status == EP_OK && error != cudaSuccess)
        status = ep_group_set_own_failure(&cuda->group, cuda_status(error, "kernel"), cuda->group.comm->rank, phase);
    return status == EP_OK ? cuda_check(cuda) : status;
}

ep_status cuda_wait_number(struct cuda_comm *cuda, const uint64_t *word, uint64_t number, enum ep_group_phase phase)
{
    uint64_t limit = limit_of(cuda), next_check = ep_now_ns() + CHECK_NS;
    struct cuda_backoff backoff = {.spin_ns = NUMBER_SPIN_NS};

    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != number) {
        uint64_t now = ep_now_ns();
        cudaError_t error;

        cuda_backoff(&backoff);
        if (now < next_check)
            continue;
        next_check = now + CHECK_NS;
        /* Nothing runs in this stream: the query returns what has made the context unusable, if anything has. */
        error = cudaStreamQuery(cuda->internal_stream);
        if (error != cudaSuccess && error != cudaErrorNotReady)
            return ep_group_set_own_failure(&cuda->group, cuda_status(error, "kernel"), cuda->group.comm->rank, phase);
        EP_TRY(cuda_check(cuda));
        if (now >= limit)
            return ep_group_set_failure(&cuda->group, EP_E_TIMEOUT, cuda->group.comm->rank, phase);
    }
    return EP_OK;
}

ep_status cuda_drain(struct cuda_comm *cuda)
{
    bool open = cuda->complete < cuda->operations;
    ep_status status = open ? cuda_wait_event(cuda, cuda->order, EP_GROUP_IDLE) : cuda_check(cuda);

    cuda->complete = cuda->operations;
    return status;
}

static ep_status sync_stream(struct cuda_comm *cuda, cudaStream_t stream)
{
    unsigned long long capture = 0, id = 0;

    EP_TRY(find_capture(stream, &capture));
    if (capture)
        return ep_fail(EP_E_STATE, "ep_stream_sync: the stream is being captured");
    CUDA_TRY(cudaStreamGetId(stream, &id));
    /*
     * Does not wait for what the caller has queued after the last operation, unless operations have ever been captured:
     * then it may be a graph that contains them.
     */
    if (is_last_stream(cuda, stream, id) && !cuda->capture)
        return cuda_drain(cuda);
    CUDA_TRY(cudaEventRecord(cuda->end, stream));
    return cuda_wait_event(cuda, cuda->end, EP_GROUP_IDLE);
}

ep_status cuda_stream_sync(ep_comm *comm, ep_stream stream)
{
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    EP_TRY(cuda_scope_begin(cuda, &scope));
    status = sync_stream(cuda, cuda_stream_of(cuda, stream));
    cuda_scope_end(&scope);
    cuda_plans_poll(cuda);
    return status == EP_OK ? cuda_check_refused(cuda) : status;
}

/* --- events ------------------------------------------------------------------------------------------------------ */

/*
 * An event of the caller is a word in mapped host memory: a stream waits for it with a kernel, which has a deadline.
 * The memory lives as long as the communicator, because queued waits refer to it.
 */
struct event {
    struct ep_event base;
    cudaEvent_t event; /* NULL: the caller signals `word` */
    _Atomic uint32_t *word;
    const uint32_t *word_device;
};

#define WORDS 1024

static ep_status alloc_word(struct cuda_comm *cuda, struct event *event)
{
    struct cuda_host_block *block = cuda->host_blocks[CUDA_HOST_EVENTS];

    if (!block || cuda->event_words == WORDS) {
        EP_TRY(cuda_host_block_acquire(cuda, "ep_event_new", CUDA_HOST_EVENTS, WORDS * sizeof(uint32_t), false, true,
                                       &block));
        cuda->event_words = 0;
    }
    event->word = (_Atomic uint32_t *)block->pinned.memory + cuda->event_words;
    event->word_device = (const uint32_t *)block->pinned.device + cuda->event_words++;
    *event->word = 0;
    return EP_OK;
}

static ep_status record_event(struct event *event, cudaStream_t stream)
{
    CUDA_TRY(cudaEventCreateWithFlags(&event->event, cudaEventDisableTiming));
    CUDA_TRY(cudaEventRecord(event->event, stream));
    return EP_OK;
}

/* `recorded`: records what is queued in `stream` now; otherwise the event is a word that ep_event_signal() sets. */
static ep_status new_event(ep_comm *comm, bool recorded, ep_stream stream, ep_event **ret_event)
{
    struct event *event = calloc(1, sizeof(*event));
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_scope scope;
    ep_status status;

    if (!event)
        return ep_fail(EP_E_MEMORY, "no memory for an event");
    event->base.comm = comm;
    status = cuda_scope_begin_uncaptured(cuda, &scope);
    if (status == EP_OK) {
        status = recorded ? record_event(event, cuda_stream_of(cuda, stream)) : alloc_word(cuda, event);
        cuda_scope_end(&scope);
    }
    if (status == EP_OK)
        *ret_event = &event->base;
    else
        cuda_event_free(&event->base);
    return status;
}

ep_status cuda_event_new(ep_comm *comm, ep_event **ret_event)
{
    return new_event(comm, false, NULL, ret_event);
}

ep_status cuda_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    return new_event(comm, true, stream, ret_event);
}

ep_status cuda_event_signal(ep_event *base)
{
    struct event *event = (struct event *)base;
    uint32_t open = 0;

    if (event->word && atomic_compare_exchange_strong(event->word, &open, 1))
        return EP_OK;
    return ep_fail(EP_E_STATE, "ep_event_signal: %s",
                   event->word ? "the event was signalled before" : "the event is not from ep_event_new");
}

static ep_status query(const struct event *event, bool *ret_done)
{
    cudaError_t error = cudaSuccess;

    if (event->word)
        *ret_done = atomic_load(event->word);
    else
        *ret_done = (error = cudaEventQuery(event->event)) == cudaSuccess;
    cudaGetLastError();
    return error == cudaErrorNotReady ? EP_OK : cuda_status(error, "cudaEventQuery");
}

/* From any thread: during a regroup there is no group to ask, and the failure of before is about to be forgotten. */
static ep_status check_now(struct cuda_comm *cuda)
{
    ep_comm *comm = cuda->group.comm;
    ep_status status;

    if (!ep_comm_enter(comm))
        return EP_OK;
    status = cuda_check(cuda);
    ep_comm_exit(comm);
    return status;
}

ep_status cuda_event_query(const ep_event *base, int *ret_done)
{
    bool done = false;

    EP_TRY(query((const struct event *)base, &done));
    *ret_done = done;
    if (done)
        cuda_plans_poll(cuda_of(base->comm));
    return done ? check_now(cuda_of(base->comm)) : EP_OK;
}

ep_status cuda_event_wait(ep_event *base, int timeout_ms)
{
    const struct event *event = (struct event *)base;
    struct cuda_comm *cuda = cuda_of(base->comm);
    int limit_ms = timeout_ms >= 0 || !event->word ? timeout_ms : base->comm->config.timeout_ms;
    uint64_t limit = limit_ms < 0 ? limit_of(cuda) : ep_deadline_ns(limit_ms), moved = cuda_proxy_count_chunks(cuda);
    struct cuda_backoff backoff = {.begin_ns = 0};
    bool done = false;

    for (;;) {
        EP_TRY(query(event, &done));
        if (done) {
            cuda_plans_poll(cuda);
            return check_now(cuda);
        }
        /* After a failure the kernels end soon, so the failure is returned at once. */
        EP_TRY(check_now(cuda));
        if (limit_ms < 0)
            restart_limit(cuda, &moved, &limit);
        if (ep_now_ns() >= limit)
            return ep_fail(EP_E_TIMEOUT, "ep_event_wait: not complete after %d ms", limit_ms);
        cuda_backoff(&backoff);
    }
}

void cuda_event_free(ep_event *base)
{
    struct event *event = (struct event *)base;

    if (event->event)
        cudaEventDestroy(event->event);
    free(event);
}

ep_status cuda_stream_wait(ep_comm *comm, ep_stream stream, ep_event *base)
{
    const struct event *event = (struct event *)base;
    struct cuda_comm *cuda = cuda_of(comm);
    struct cuda_waits waits;
    struct cuda_scope scope;
    cudaError_t error;

    EP_TRY(cuda_scope_begin(cuda, &scope));
    if (event->event) {
        error = cudaStreamWaitEvent(cuda_stream_of(cuda, stream), event->event, 0);
    } else {
        cuda_fill_waits(cuda, EP_GROUP_STREAM_WAIT, EP_GROUP_STREAM_WAIT, &waits);
        error = cuda_launch_wait(&waits, event->word_device, cuda_stream_of(cuda, stream));
    }
    cuda_scope_end(&scope);
    return cuda_status(error, "cudaStreamWaitEvent");
}

ep_status cuda_stream_call(ep_comm *comm, ep_stream stream, ep_stream_fn function, void *context)
{
    CUDA_ON_DEVICE(comm, cuda_status(cudaLaunchHostFunc(cuda_stream_of(cuda_of(comm), stream), function, context),
                                     "cudaLaunchHostFunc"));
}

/* --- barrier ----------------------------------------------------------------------------------------------------- */

ep_status cuda_barrier_on(ep_comm *comm, ep_stream stream)
{
    struct cuda_op_desc desc = {.kind = CUDA_DISPATCH, .words = {[CUDA_DESC_PHASE] = EP_GROUP_BARRIER}};
    struct cuda_waits waits;
    struct cuda_call call;
    ep_status status;

    EP_TRY(cuda_call_begin(cuda_of(comm), stream, true, &call));
    cuda_fill_waits(call.cuda, EP_GROUP_BARRIER, EP_GROUP_BARRIER, &waits);
    status = cuda_status(cuda_launch_barrier(&waits, &desc, call.stream), "barrier kernel");
    call.queued = status == EP_OK;
    /* A barrier of this node, one message from a rank of each other node, and again a barrier of this node. */
    if (status == EP_OK && comm->nnodes > 1)
        status = cuda_nodes_barrier(&call);
    /* A rank that waits for another node must name the rank there before the ranks of its own node blame it. */
    waits.deadline_ns *= 2;
    if (status == EP_OK && comm->nnodes > 1)
        status = cuda_status(cuda_launch_barrier(&waits, &desc, call.stream), "barrier kernel");
    return cuda_call_end(&call, status);
}
