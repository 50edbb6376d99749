/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on GPUs: the host's part of a call. Ranks wait for each other in the kernels only (lowlatency.h), so a
 * call that no host waits for costs the host one launch.
 */
#include "backend/cuda/ll_impl.h"
#include "base/array.h"
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

/* --- beginning and end -------------------------------------------------------------------------------------------- */

size_t cuda_ll_lay_out(const ep_ll *ll, struct cuda_ll *device, struct ll_wire *ret_wire)
{
    int64_t n = ll->comm->nranks, m = ll->config.max_tokens, k = ll->config.topk, hidden = ll->config.hidden, bytes;
    struct ll_wire wire = {.me = ll->comm->rank,
                           .nranks = ll->comm->nranks,
                           .segment_tokens = ll->config.max_tokens,
                           .hidden = ll->config.hidden,
                           .topk = ll->config.topk,
                           .n_counts = ll->n_local + 1};

    device->segment_tokens = device->max_tokens = ll->config.max_tokens;
    device->hidden = ll->config.hidden;
    device->segment_topk = device->topk = ll->config.topk;
    device->n_local = ll->n_local;
    device->masking = ll->config.flags & EP_LL_MASK_DEAD ? 1 : 0;
    device->drops = device->masking || cuda_drops_absent(ll->comm);
    /* The maximum: calls with fewer rows use more parts, up to this. */
    device->parts = LL_WIRE_MAX_PARTS;
    device->scales_at = (k * 8 + 15) / 16 * 16;
    device->row_at = (device->scales_at + hidden / EP_SCALE_BLOCK * 4 + 127) / 128 * 128;
    device->slot_bytes = wire.slot_bytes = device->row_at + 2 * hidden;
    bytes = (int64_t)ll_wire_lay_out(&wire, sizeof(struct cuda_ll_segment), LL_WIRE_MAX_PARTS);
    device->counts_at = wire.counts_at;
    device->row_flag_at = wire.row_flag_at;
    device->slot_flag_at = wire.slot_flag_at;
    device->weight_at = wire.weight_at;
    device->slots_at = wire.slots_at;
    device->rows_at = wire.rows_at;
    /* What the rank alone uses. */
    device->index_at = bytes;
    device->origin_at = device->index_at + (2 * m * k * 4 + 127) / 128 * 128;
    *ret_wire = wire;
    return (size_t)(device->origin_at + 2 * n * m * k * 4);
}

/* The kernels of ranks that are threads of one process may run on one GPU concurrently, and all must fit. */
int cuda_ll_sms(const struct cuda_comm *cuda)
{
    return cuda->all_sms / cuda->sharing ? cuda->all_sms / cuda->sharing : 1;
}

/* Acquires the segment of an ep_ll that was freed, or allocates a new one. */
static ep_status acquire_segment(struct cuda_comm *cuda, size_t bytes, struct cuda_ll_cached_segment **ret_segment)
{
    struct cuda_ll_cached_segment *empty = NULL;

    FOR_EACH (segment, cuda->ll_segments, CUDA_LL_SEGMENTS) {
        if (!segment->memory)
            empty = empty ? empty : segment;
        if (!segment->memory || segment->used || segment->bytes < bytes)
            continue;
        segment->used = true;
        *ret_segment = segment;
        return EP_OK;
    }
    if (!empty)
        return ep_fail(
            EP_E_MEMORY,
            "ep_ll_new: this rank already holds segments of %d other sizes, the maximum: use the sizes of an earlier "
            "ep_ll, or a new communicator",
            CUDA_LL_SEGMENTS);
    EP_TRY(cuda_alloc_kind(cuda, bytes, CUDA_MEMORY_INTERNAL, &empty->memory));
    empty->bytes = bytes;
    empty->used = true;
    *ret_segment = empty;
    return EP_OK;
}

/* The kernels' index ranges. */
static ep_status check_numbers(const ep_comm *comm, const ep_ll_config *config, const char *call)
{
    int64_t rows = config->max_tokens;

    if (comm->nranks > CUDA_LL_MAX_RANKS)
        return ep_fail(EP_E_UNSUPPORTED, "%s: the CUDA backend supports low latency on up to %d ranks, not %d", call,
                       CUDA_LL_MAX_RANKS, comm->nranks);
    if (config->topk > CUDA_LL_MAX_TOPK)
        return ep_fail(EP_E_UNSUPPORTED, "%s: topk is %d, but the CUDA backend supports low latency with topk up to %d",
                       call, config->topk, CUDA_LL_MAX_TOPK);
    /* Kernels use 32-bit indices for rows and for the items of warps. */
    if (rows * config->n_experts > INT32_MAX || rows * comm->nranks * config->topk * LL_WIRE_MAX_PARTS > INT32_MAX)
        return ep_fail(EP_E_UNSUPPORTED,
                       "%s: max_tokens is %d, which with %d experts and topk %d on %d ranks exceeds "
                       "the 32-bit row indices of the CUDA backend: reduce max_tokens",
                       call, config->max_tokens, config->n_experts, config->topk, comm->nranks);
    return EP_OK;
}

static size_t combine_buffer_bytes(const ep_ll_config *config)
{
    return (size_t)config->n_experts * (size_t)config->max_tokens * (size_t)config->hidden * 2;
}

int64_t cuda_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes)
{
    ep_ll ll = {.comm = (ep_comm *)comm, .config = *config, .n_local = config->n_experts / comm->nranks};
    struct cuda_ll device;
    struct ll_wire wire;
    size_t bytes;

    if (check_numbers(comm, config, "ep_ll_get_sizes") != EP_OK)
        return -1;
    *ret_combine_bytes = (int64_t)cuda_block_bytes(combine_buffer_bytes(config));
    bytes = cuda_ll_lay_out(&ll, &device, &wire);
    return (int64_t)(cuda_whole_bytes(bytes) + cuda_ll_net_bytes(&ll, &device, bytes));
}

static ep_status open_local(const ep_ll *ll, struct cuda_ll_impl *impl)
{
    struct cuda_comm *cuda = impl->cuda;
    struct ll_wire wire;
    size_t bytes;

    EP_TRY(check_numbers(ll->comm, &ll->config, "ep_ll_new"));
    bytes = cuda_ll_lay_out(ll, &impl->device, &wire);
    impl->bytes = bytes;
    EP_TRY(acquire_segment(cuda, bytes, &impl->segment));
    CUDA_TRY(cudaEventCreateWithFlags(&impl->done, cudaEventDisableTiming));
    EP_TRY(cuda_host_block_acquire(cuda, "ep_ll_new", CUDA_HOST_LL, sizeof(*impl->report), false, false,
                                   &impl->host_block));
    impl->report = impl->host_block->pinned.memory;
    impl->device.report = impl->host_block->pinned.device;
    if (cuda_crosses_nodes(cuda))
        EP_TRY(cuda_ll_net_prepare(ll, &impl->device, &wire, bytes, impl->report, &impl->net));
    /* Work queued by an earlier ep_ll must end before the peers learn of this one. */
    return cuda_drain(cuda);
}

/*
 * Maps the segments of this node, and writes their addresses to the own segment for the kernels. After the first
 * barrier no rank writes into the segment any more; after the second one peers may.
 */
static ep_status clear_and_map(struct cuda_ll_impl *impl, const struct ep_group_address *all)
{
    struct cuda_ll_segment *segments[CUDA_LL_MAX_RANKS] = {NULL};
    struct cuda_comm *cuda = impl->cuda;
    struct cuda_ll *device = &impl->device;
    struct cuda_waits *waits = &device->waits;
    size_t bytes = (size_t)cuda->group.comm->nranks * sizeof(segments[0]);

    memset(impl->report, 0, sizeof(*impl->report));
    for (int rank = 0; rank < cuda->group.comm->nranks; rank++)
        if (!ep_comm_has(cuda->group.comm, rank))
            ll_mask_add(impl->report->mask, rank);
    CUDA_TRY(cudaMemsetAsync(impl->segment->memory, 0, impl->bytes, cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->internal_stream));
    cuda_fill_waits(cuda, EP_GROUP_LL_SEND, EP_GROUP_LL_RECV, waits);
    /* Ranks of the group, not of the node. */
    waits->rank = cuda->group.comm->rank;
    waits->nranks = cuda->group.comm->nranks;
    waits->first = 0;
    device->node_first = cuda->group.first;
    device->n_node_ranks = cuda->group.nlocal;
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        void *segment = NULL;

        if (ep_comm_has(cuda->group.comm, rank))
            EP_TRY(cuda_map(cuda, rank, &all[rank], impl->bytes, &segment));
        segments[rank] = segment;
    }
    cuda_ll_net_get_segments(impl->net, segments);
    device->own = segments[waits->rank];
    EP_TRY(cuda_transfer(cuda, device->own->mask, impl->report->mask, sizeof(impl->report->mask)));
    return cuda_transfer(cuda, device->own->peer_table, segments, bytes);
}

/* Calls of a graph with this segment reach no rank, and say that it was not renewed. */
static ep_status void_segment(struct cuda_comm *cuda, struct cuda_ll_segment *segment, bool running)
{
    struct cuda_ll_segment *table[CUDA_LL_MAX_RANKS];

    for (int rank = 0; rank < CUDA_LL_MAX_RANKS; rank++)
        table[rank] = running ? segment : NULL;
    if (!running)
        CUDA_TRY(cudaMemsetAsync(segment, 0, sizeof(*segment), cuda->internal_stream));
    CUDA_TRY(cudaMemsetAsync(segment->mask, 0xff, sizeof(segment->mask), cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->internal_stream));
    return cuda_transfer(cuda, segment->peer_table, table, sizeof(table));
}

ep_status cuda_ll_void_all(struct cuda_comm *cuda, bool running)
{
    for (int i = 0; i < CUDA_LL_SEGMENTS; i++)
        if (cuda->ll_segments[i].used)
            EP_TRY(void_segment(cuda, cuda->ll_segments[i].memory, running));
    return EP_OK;
}

static void free_impl(struct cuda_ll_impl *impl)
{
    if (!impl)
        return;
    if (impl->done)
        cudaEventDestroy(impl->done);
    cuda_ll_net_close(impl->net); /* it uses the report */
    if (impl->host_block)
        impl->host_block->used = false;
    cuda_pool_free(impl->cuda, &impl->combine_buffer);
    if (impl->segment)
        impl->segment->used = false;
    cudaGetLastError();
    free(impl);
}

ep_status cuda_ll_open(ep_ll *ll)
{
    struct ep_group_address where = {.slot = EP_GROUP_UNMAPPED}, all[EP_MAX_RANKS] = {{.slot = EP_GROUP_UNMAPPED}};
    struct cuda_comm *cuda = cuda_of(ll->comm);
    struct cuda_ll_impl *impl = ll->impl ? ll->impl : calloc(1, sizeof(*impl));
    struct cuda_scope scope = {.previous = -1};
    /* A rank that fails takes part all the same: its peers learn why, instead of waiting for it. */
    ep_status status = impl ? cuda_check(cuda) : ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    bool renews = ll->impl;

    if (impl)
        impl->cuda = cuda;
    if (status == EP_OK)
        status = cuda_scope_begin(cuda, &scope);
    if (status == EP_OK)
        status = renews ? cuda_drain(cuda) : open_local(ll, impl);
    if (status == EP_OK)
        impl->blocks = cuda_ll_sms(cuda); /* members share devices otherwise now */
    if (status == EP_OK)
        cuda_find(cuda, impl->segment->memory, 1, &where);
    status = ep_group_ll_exchange(ll, status, &where, all);
    /* Every rank has one, with a segment, if the exchange has succeeded; clang-tidy does not see that. */
    if (status == EP_OK && impl && impl->segment)
        status = clear_and_map(impl, all);
    if (cuda_crosses_nodes(cuda)) {
        status = ep_group_agree_within(ll->comm, ep_ll_open_call(ll), status);
        if (status == EP_OK && impl)
            status = cuda_ll_net_open(impl->net);
    }
    status = ep_group_agree_within(ll->comm, ep_ll_open_call(ll), status);
    if (status == EP_OK && impl) {
        ll->impl = impl;
        impl->open = false;
        atomic_fetch_add(&cuda->masking, !renews && impl->device.masking);
    } else if (!renews) {
        free_impl(impl);
    } else {
        (void)void_segment(cuda, impl->segment->memory, false);
        cuda_ll_net_leave(impl->net);
    }
    cuda_scope_end(&scope);
    return status;
}

void cuda_ll_close(ep_ll *ll)
{
    struct cuda_ll_impl *impl = ll->impl;
    struct cuda_comm *cuda;
    struct cuda_scope scope;

    if (!impl)
        return;
    cuda = impl->cuda;
    if (cuda_scope_begin(cuda, &scope) == EP_OK) {
        /* Each kernel that waits for a peer has a deadline of its own; in a failed group many may be queued. */
        if (atomic_load(&ll->comm->failed))
            cuda_stop_kernels(cuda);
        cuda_drain(cuda);
        if (impl->device.masking)
            atomic_fetch_sub(&cuda->masking, 1);
        free_impl(impl);
        cuda_scope_end(&scope);
    } else {
        cuda_ll_net_stop(impl->net);
    }
    ll->impl = NULL;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */

static ep_status launch(struct cuda_ll_impl *impl, int phases)
{
    bool few = !impl->in_dispatch && phases & CUDA_LL_SEND && impl->max_blocks && impl->max_blocks < impl->blocks;
    int blocks = few ? impl->max_blocks : impl->blocks;
    cudaError_t error;

    if (impl->in_dispatch) {
        impl->dispatch.phases = phases;
        error = (impl->device.landing ? cuda_launch_ll_dispatch_nodes : cuda_launch_ll_dispatch)(&impl->dispatch,
                                                                                                 blocks, impl->stream);
    } else {
        impl->combine.phases = phases;
        error = (impl->device.landing ? cuda_launch_ll_combine_nodes : cuda_launch_ll_combine)(&impl->combine, blocks,
                                                                                               impl->stream);
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

    shape.max_rows = impl->in_dispatch ? impl->dispatch.ll.max_tokens : 0;
    impl->dispatch.queued = impl->combine.queued = !impl->blocking;
    EP_TRY(run_phases(ll, flags & EP_LL_RECV_HOOK ? CUDA_LL_SEND : CUDA_LL_SEND | CUDA_LL_RECEIVE));
    if (!*bad)
        return EP_OK;
    *bad = 0;
    impl->open = false;
    return cuda_explain_routing(ll->comm, &shape, impl->device.drops, topk_idx, idx_type, impl->stream,
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
    EP_TRY(cuda_check_pointer(cuda, call, "global_scale", args->global_scale));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_count", args->recv_count));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_source", args->recv_source));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_stats_add", args->recv_stats_add));
    EP_TRY(cuda_check_pointer(cuda, call, "wait_cost_add", args->wait_cost_add));
    return cuda_check_pointer(cuda, call, "recv_range", args->recv_range);
}

static ep_status dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number)
{
    struct cuda_ll_impl *impl = ll->impl;
    bool packed = args->scale_type == EP_UE8M0 || args->scale_type == EP_UE8M0_32;
    int64_t words = ep_ll_scale_words(ll, args), row = ep_ll_row_bytes(ll, args);
    struct cuda_ll *device;

    EP_TRY(check_dispatch_pointers(impl->cuda, args));
    EP_TRY(receive_open(ll, "ep_ll_dispatch"));
    impl->in_dispatch = true;
    impl->number = number;
    impl->dispatch = (struct cuda_ll_dispatch){.ll = impl->device,
                                               .x = args->x,
                                               .topk_idx = args->topk_idx,
                                               .idx64 = args->idx_type == EP_I64,
                                               .n_tokens = args->n_tokens,
                                               .distinct = cuda_checks_distinct(ll->comm),
                                               .block = words ? ep_scale_block(args->out_dtype, args->scale_type) : 0,
                                               .rounds = ep_ll_rounds_scales(args),
                                               .packed = packed,
                                               .row_vectors = (int32_t)(row / 16),
                                               .scale_words = (int32_t)words,
                                               .swizzled = args->flags & EP_LL_SWIZZLED_SCALES ? 1 : 0,
                                               .global_scale = args->global_scale,
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
        impl->dispatch.scale_stride_token = words;
        impl->dispatch.scale_stride_block = args->flags & EP_LL_SWIZZLED_SCALES ? 128 : 1;
    }
    device = &impl->dispatch.ll;
    device->max_tokens = args->max_tokens;
    device->topk = args->topk;
    impl->dispatch.image_bytes = (int32_t)(device->row_at + row);
    /* Scales of nvfp4 have no room before the row, which leaves some behind it. */
    if (args->out_dtype == EP_F4E2M1) {
        device->scales_at = device->row_at + row;
        impl->dispatch.image_bytes += (int32_t)(words * 4 + 15) / 16 * 16;
    }
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
    EP_TRY(cuda_check_pointer(cuda, call, "signals", args->signals));
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
                                             .wait_added = args->wait_cost_add,
                                             .signals = args->signals,
                                             .signal_rows = args->signal_rows,
                                             .signal_value = args->signal_value,
                                             .signal_phase = EP_GROUP_LL_SIGNALS};
    if (args->signals)
        impl->combine.signal_blocks = (int32_t)ep_ll_signal_blocks(ll, args, answers->max_tokens);
    impl->max_blocks = args->max_sms;
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
    size_t bytes = combine_buffer_bytes(&ll->config);
    ep_status status = EP_OK;

    EP_TRY(cuda_scope_begin_uncaptured(impl->cuda, &scope));
    if (!impl->combine_buffer.memory)
        status = cuda_pool_alloc(impl->cuda, bytes, CUDA_BLOCK_ANY, &impl->combine_buffer);
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
