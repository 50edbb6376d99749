/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on GPUs: the host's part of a call. Ranks wait for each other in the kernels only (lowlatency.h), so a
 * call that no host waits for costs the host one launch.
 */
#include "backend/cuda/ll_impl.h"

#include "core/routing.h"

#include <string.h>

static ep_status launch(struct cuda_ll_impl *impl, int phases)
{
    cudaError_t error;

    if (impl->in_dispatch) {
        impl->dispatch.phases = phases;
        error = (impl->device.landing ? cuda_launch_ll_dispatch_nodes
                                      : cuda_launch_ll_dispatch)(&impl->dispatch, impl->blocks, impl->stream);
    } else {
        impl->combine.phases = phases;
        error = (impl->device.landing ? cuda_launch_ll_combine_nodes
                                      : cuda_launch_ll_combine)(&impl->combine, impl->blocks, impl->stream);
    }
    EP_TRY(cuda_status(error, "low-latency kernel"));
    cuda_ll_net_launched(impl->net);
    return EP_OK;
}

/* Launches phases of the call; a blocking call waits for them. */
static ep_status run_phases(const ep_ll *ll, int phases)
{
    struct cuda_ll_impl *impl = ll->impl;
    struct cuda_comm *cuda = impl->cuda;
    enum ep_group_phase phase = impl->in_dispatch ? EP_GROUP_LL_RECV : EP_GROUP_LL_COMBINE;

    EP_TRY(launch(impl, phases));
    impl->open = !(phases & CUDA_LL_RECEIVE);
    impl->open_capture = impl->capture;
    if (!impl->blocking)
        return EP_OK;
    CUDA_TRY(cudaEventRecord(impl->done, impl->stream));
    return cuda_wait_event(cuda, impl->done, phase);
}

/* Makes the call with these flags, and finds out why the routing is not valid if a kernel has rejected it. */
static ep_status run_checked(const ep_ll *ll, uint32_t flags, const void *topk_idx, int idx_type, int n_tokens,
                             int topk)
{
    struct cuda_ll_impl *impl = ll->impl;
    volatile uint32_t *bad = &impl->report->bad;
    struct ep_routing_shape shape = ep_routing_shape_of(ll->comm, n_tokens, topk, ll->config.n_experts);

    impl->dispatch.queued = impl->combine.queued = !impl->blocking;
    EP_TRY(run_phases(ll, flags & EP_LL_RECV_HOOK ? CUDA_LL_SEND : CUDA_LL_SEND | CUDA_LL_RECEIVE));
    if (!*bad)
        return EP_OK;
    *bad = 0;
    impl->open = false;
    return cuda_explain_routing(&shape, topk_idx, idx_type, impl->stream,
                                impl->in_dispatch
                                    ? "ep_ll_dispatch: topk_idx changed while it was checked"
                                    : "ep_ll_combine: topk_idx is not that of the dispatch that it answers");
}

/*
 * The kernels support one open call only. So the open call is received when the next one is sent, and its
 * ep_ll_finish() has nothing left to do. All ranks make the same calls, so all do this at the same point.
 */
static ep_status receive_open(const ep_ll *ll, const char *call)
{
    const struct cuda_ll_impl *impl = ll->impl;

    if (!impl->open)
        return EP_OK;
    if (impl->open_capture != impl->capture)
        return ep_fail(EP_E_STATE,
                       "%s: a call with EP_LL_RECV_HOOK, made %s, is still open: call ep_ll_finish() there first", call,
                       impl->open_capture ? "in a capture" : "before the capture began");
    return run_phases(ll, CUDA_LL_RECEIVE);
}

static ep_status check_dispatch_pointers(struct cuda_comm *cuda, const ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";

    EP_TRY(cuda_check_pointer(cuda, call, "x", args->n_tokens ? args->x : NULL));
    EP_TRY(cuda_check_pointer(cuda, call, "topk_idx", args->n_tokens ? args->topk_idx : NULL));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_x", args->recv_x));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_scales", args->recv_scales));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_count", args->recv_count));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_source", args->recv_source));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_stats_add", args->recv_stats_add));
    EP_TRY(cuda_check_pointer(cuda, call, "wait_cost_add", args->wait_cost_add));
    return cuda_check_pointer(cuda, call, "recv_range", args->recv_range);
}

static ep_status dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number)
{
    struct cuda_ll_impl *impl = ll->impl;
    bool fp8 = args->out_dtype == EP_F8E4M3, packed = args->scale_type == EP_UE8M0;

    EP_TRY(check_dispatch_pointers(impl->cuda, args));
    EP_TRY(receive_open(ll, "ep_ll_dispatch"));
    impl->in_dispatch = true;
    impl->number = number;
    impl->dispatch = (struct cuda_ll_dispatch){.ll = impl->device,
                                               .x = args->x,
                                               .topk_idx = args->topk_idx,
                                               .idx64 = args->idx_type == EP_I64,
                                               .n_tokens = args->n_tokens,
                                               .fp8 = fp8,
                                               .rounds = ep_ll_rounds_scales(args),
                                               .packed = packed,
                                               .format = ep_ll_format(args),
                                               .recv_x = args->recv_x,
                                               .recv_scales = args->recv_scales,
                                               .recv_count = args->recv_count,
                                               .recv_source = args->recv_source,
                                               .recv_range = args->recv_range,
                                               .scale_stride_token = args->recv_scale_stride_token,
                                               .scale_stride_block = args->recv_scale_stride_block,
                                               .stats_add = args->recv_stats_add,
                                               .wait_added = args->wait_cost_add};
    if (!args->recv_scale_stride_token) {
        impl->dispatch.scale_stride_token = ll->config.hidden / (packed ? 4 * EP_SCALE_BLOCK : EP_SCALE_BLOCK);
        impl->dispatch.scale_stride_block = 1;
    }
    impl->dispatch.ll.max_tokens = args->max_tokens;
    impl->dispatch.ll.topk = args->topk;
    return run_checked(ll, args->flags, args->topk_idx, args->idx_type, args->n_tokens, args->topk);
}

/* Orders the call after the last operation, and the next one after it. */
static ep_status begin(ep_ll *ll, ep_stream stream, struct cuda_call *ret_call)
{
    struct cuda_ll_impl *impl = ll->impl;

    EP_TRY(cuda_call_begin(impl->cuda, stream, true, ret_call));
    impl->stream = ret_call->stream;
    impl->capture = ret_call->capture;
    impl->blocking = ll->comm->blocking && !ret_call->capture;
    return EP_OK;
}

/* A rejected call leaves the group usable. */
static ep_status end(struct cuda_call *call, ep_status status)
{
    call->queued = true;
    return cuda_call_end(call, EP_OK) == EP_OK ? status : status == EP_OK ? EP_E_DEVICE : status;
}

ep_status cuda_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream)
{
    struct cuda_call call;

    EP_TRY(begin(ll, stream, &call));
    return end(&call, dispatch(ll, args, number));
}

static ep_status check_combine_pointers(struct cuda_comm *cuda, const ep_ll_combine_args *args)
{
    static const char call[] = "ep_ll_combine";

    EP_TRY(cuda_check_pointer(cuda, call, "x", args->x));
    EP_TRY(cuda_check_pointer(cuda, call, "wait_cost_add", args->wait_cost_add));
    if (!args->n_tokens)
        return EP_OK;
    EP_TRY(cuda_check_pointer(cuda, call, "topk_idx", args->topk_idx));
    EP_TRY(cuda_check_pointer(cuda, call, "topk_weights", args->topk_weights));
    return cuda_check_pointer(cuda, call, "out", args->out);
}

/*
 * Number of warps per row that a combine returns: so many that the rows of all ranks occupy the warps of a whole
 * device, each lane with at least one vector. All ranks must get the same number, whatever their devices are.
 */
static int32_t parts_of(int64_t rows, int32_t hidden)
{
    const int64_t warps = 2112, round = 32 * 16 / 2; /* of an H200; elements */
    int64_t parts = warps / rows, most = hidden / round;

    parts = parts > LL_WIRE_MAX_PARTS ? LL_WIRE_MAX_PARTS : parts;
    parts = parts > most ? most : parts;
    return parts > 1 ? (int32_t)parts : 1;
}

static ep_status combine(ep_ll *ll, const ep_ll_combine_args *args)
{
    const struct ep_ll_call *answers = &ll->call[args->call % 2];
    struct cuda_ll_impl *impl = ll->impl;
    int64_t rows = (int64_t)ll->comm->nranks * answers->max_tokens;
    struct cuda_ll *device;

    EP_TRY(check_combine_pointers(impl->cuda, args));
    EP_TRY(receive_open(ll, "ep_ll_combine"));
    impl->in_dispatch = false;
    impl->number = args->call;
    impl->combine = (struct cuda_ll_combine){.ll = impl->device,
                                             .x = args->x,
                                             .topk_idx = args->topk_idx,
                                             .weights = args->topk_weights,
                                             .out = args->out,
                                             .idx64 = args->idx_type == EP_I64,
                                             .n_tokens = args->n_tokens,
                                             .age = (int32_t)(ll->dispatches - args->call),
                                             .wait_added = args->wait_cost_add};
    device = &impl->combine.ll;
    device->max_tokens = answers->max_tokens;
    device->topk = args->topk;
    device->no_partial_reduce = args->flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0;
    /* With the K of ep_ll_new(): those of the calls may differ between ranks. */
    device->parts = parts_of(device->no_partial_reduce ? rows * ll->config.topk : rows, ll->config.hidden);
    device->waits.ready_phase = EP_GROUP_LL_COMBINE_BUFFER;
    device->waits.done_phase = EP_GROUP_LL_COMBINE;
    return run_checked(ll, args->flags, args->topk_idx, args->idx_type, args->n_tokens, args->topk);
}

ep_status cuda_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    struct cuda_call call;

    EP_TRY(begin(ll, stream, &call));
    return end(&call, combine(ll, args));
}

ep_status cuda_ll_finish(ep_ll *ll, uint64_t number, ep_stream stream)
{
    const struct cuda_ll_impl *impl = ll->impl;
    ep_status status = EP_OK;
    struct cuda_call call;

    EP_TRY(begin(ll, stream, &call));
    /* Otherwise a later call has received it, and this stream is ordered after that one. */
    if (impl->open && impl->number == number)
        status = run_phases(ll, CUDA_LL_RECEIVE);
    return end(&call, status);
}

ep_status cuda_ll_control(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream)
{
    static const int32_t changes[] = {[EP_LL_CONTROL_MASK] = CUDA_LL_MASK_SET,
                                      [EP_LL_CONTROL_UNMASK] = CUDA_LL_MASK_CLEAR,
                                      [EP_LL_CONTROL_MERGE] = CUDA_LL_MASK_MERGE,
                                      [EP_LL_CONTROL_QUERY] = CUDA_LL_MASK_KEEP,
                                      [EP_LL_CONTROL_BARRIER] = CUDA_LL_MASK_KEEP};
    struct cuda_ll_impl *impl = ll->impl;
    struct cuda_ll_mask mask = {
        .ll = impl->device, .rank = control->rank, .change = changes[control->kind], .out = control->out};
    bool nodes = impl->device.landing;
    cudaError_t error = cudaSuccess;
    struct cuda_call call;
    ep_status status;

    mask.ll.waits.ready_phase = mask.ll.waits.done_phase = EP_GROUP_LL_BARRIER;
    if (control->kind == EP_LL_CONTROL_MERGE)
        mask.from = ((const struct cuda_ll_impl *)control->from->impl)->device.own;
    EP_TRY(cuda_call_begin(impl->cuda, stream, true, &call));
    status = cuda_check_pointer(impl->cuda, "ep_ll_query_mask", "out", mask.out);
    if (status == EP_OK && control->kind == EP_LL_CONTROL_BARRIER)
        error = (nodes ? cuda_launch_ll_barrier_nodes : cuda_launch_ll_barrier)(&mask.ll, call.stream);
    else if (status == EP_OK)
        error = (nodes ? cuda_launch_ll_mask_nodes : cuda_launch_ll_mask)(&mask, call.stream);
    if (status == EP_OK)
        status = cuda_status(error, control->kind == EP_LL_CONTROL_BARRIER ? "barrier kernel" : "mask kernel");
    if (status == EP_OK)
        cuda_ll_net_launched(impl->net);
    call.queued = status == EP_OK;
    return cuda_call_end(&call, status);
}

/* One buffer is enough: in stream order, the previous combine has sent its input before the next one's is written. */
ep_status cuda_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    struct cuda_ll_impl *impl = ll->impl;
    struct cuda_scope scope;
    size_t bytes = cuda_ll_combine_buffer_bytes(&ll->config);
    ep_status status = EP_OK;

    EP_TRY(cuda_scope_begin_uncaptured(impl->cuda, &scope));
    if (!impl->combine_buffer.memory)
        status = cuda_pool_alloc(impl->cuda, bytes, false, &impl->combine_buffer);
    cuda_scope_end(&scope);
    if (status == EP_OK)
        *ret_buffer = impl->combine_buffer.memory;
    return status;
}

ep_status cuda_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct cuda_ll_impl *impl = ll->impl;

    /* The status does not matter: the masks are valid in any case. */
    cuda_drain(impl->cuda);
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        ret_masked[rank] = ll_mask_has(impl->report->mask, rank);
    return EP_OK;
}
