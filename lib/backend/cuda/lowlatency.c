/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency on GPUs: the host's part. It makes the segments and starts kernels; how ranks wait for each other is in
 * lowlatency.h and the kernels alone, so a call that nobody waits for costs the host one launch.
 */
#include "backend/cuda/ll_nodes.h"

#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

struct inner {
    struct cuda_comm *cuda;
    struct cuda_ll device; /* what every launch is told */
    struct cuda_ll_report *report;
    struct cuda_ll_place *place;
    struct cuda_ll_net *net;          /* NULL on one node */
    struct cuda_block combine_buffer; /* made on first use */
    bool handed_out;                  /* ... for the combine that is next */
    cudaEvent_t done;
    int blocks;
    size_t bytes;     /* of each rank's segment */
    bool in_dispatch; /* the call that ep_ll_finish() completes */
    bool open;        /* it is to be completed, */
    uint64_t number;  /* ... the dispatch that it is, or answers, */
    uint64_t in;      /* ... and the capture that it was made in; 0: none */
    struct cuda_ll_dispatch dispatch;
    struct cuda_ll_combine combine;
    cudaStream_t stream; /* of the call under way, */
    uint64_t capture;    /* ... its capture; 0: none */
    bool waits;          /* ... which the host waits for */
};

/* --- opening ----------------------------------------------------------------------------------------------------- */

static int64_t take(int64_t *at, int64_t bytes)
{
    int64_t begin = *at;

    *at += (bytes + 127) / 128 * 128;
    return begin;
}

/*
 * Warps for each row that a combine returns: so many that all ranks' tokens together occupy the warps of a whole
 * device, each with a round of its lanes at least. All ranks must come to the same, whatever their devices are.
 */
static int32_t parts_of(int64_t rows, int32_t hidden)
{
    const int64_t warps = 2112, round = 32 * 16 / 2; /* of an H200; elements */
    int64_t parts = warps / rows, most = hidden / round;

    parts = parts > CUDA_LL_MOST_PARTS ? CUDA_LL_MOST_PARTS : parts;
    parts = parts > most ? most : parts;
    return parts > 1 ? (int32_t)parts : 1;
}

/* Returns the bytes of a segment. */
static size_t lay_out(const ep_ll *ll, struct cuda_ll *device)
{
    int64_t n = ll->comm->nranks, m = ll->config.max_tokens, k = ll->config.topk, local = ll->n_local;
    int64_t hidden = ll->config.hidden, at = 0;

    device->most_tokens = device->max_tokens = ll->config.max_tokens;
    device->hidden = ll->config.hidden;
    device->topk = ll->config.topk;
    device->n_local = ll->n_local;
    device->masking = ll->config.flags & EP_LL_MASK_DEAD ? 1 : 0;
    /* With fewer rows than a call can have there are more parts, but never more than with those of a token alone. */
    device->parts = CUDA_LL_MOST_PARTS;
    device->scales_at = (k * 8 + 15) / 16 * 16;
    device->row_at = (device->scales_at + hidden / EP_SCALE_BLOCK * 4 + 127) / 128 * 128;
    device->slot_bytes = device->row_at + 2 * hidden;
    take(&at, (int64_t)sizeof(struct cuda_ll_segment));
    device->counts_at = take(&at, 2 * n * (local + 1) * 8);
    device->slot_flag_at = take(&at, n * m * 8);
    device->row_flag_at = take(&at, m * k * device->parts * 8);
    device->weight_at = take(&at, n * m * k * 8);
    device->index_at = take(&at, 2 * m * k * 4);
    device->origin_at = take(&at, 2 * n * m * k * 4);
    device->slots_at = take(&at, n * m * device->slot_bytes);
    device->rows_at = take(&at, m * k * hidden * 2);
    return (size_t)at;
}

/* Kernels of ranks that are threads of one process run on one GPU at the same time, if they are: all must fit. */
int cuda_ll_sms(const struct cuda_comm *cuda)
{
    return cuda->all_sms / cuda->sharing ? cuda->all_sms / cuda->sharing : 1;
}

/* A segment that a former ep_ll has left, or a new one. */
static ep_status take_place(struct cuda_comm *cuda, size_t bytes, struct cuda_ll_place **ret_place)
{
    struct cuda_ll_place *empty = NULL;

    for (int i = 0; i < CUDA_LL_PLACES; i++) {
        struct cuda_ll_place *place = &cuda->ll_places[i];

        if (!place->memory)
            empty = empty ? empty : place;
        if (!place->memory || place->used || place->bytes < bytes)
            continue;
        place->used = true;
        *ret_place = place;
        return EP_OK;
    }
    if (!empty)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: this rank already has %d layouts of other sizes", CUDA_LL_PLACES);
    EP_TRY(cuda_alloc_internal(cuda, bytes, &empty->memory));
    empty->bytes = bytes;
    empty->used = true;
    *ret_place = empty;
    return EP_OK;
}

/* What the kernels can number. */
static ep_status check_numbers(const ep_comm *comm, const ep_ll_config *config, const char *call)
{
    int64_t rows = config->max_tokens;

    if (comm->nranks > CUDA_MAX_RANKS)
        return ep_fail(EP_E_UNSUPPORTED, "%s: the CUDA backend has low latency for up to %d ranks, not %d", call,
                       CUDA_MAX_RANKS, comm->nranks);
    if (config->topk > CUDA_LL_MAX_TOPK)
        return ep_fail(EP_E_UNSUPPORTED, "%s: topk is %d, but the CUDA backend has low latency up to %d", call,
                       config->topk, CUDA_LL_MAX_TOPK);
    /* Kernels number rows and what warps do by 32 bits. */
    if (rows * config->n_experts > INT32_MAX || rows * comm->nranks * config->topk * CUDA_LL_MOST_PARTS > INT32_MAX)
        return ep_fail(EP_E_UNSUPPORTED,
                       "%s: max_tokens is %d, which with %d experts and topk %d on %d ranks makes "
                       "more rows than the CUDA backend numbers",
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
    size_t bytes;

    if (check_numbers(comm, config, "ep_ll_get_sizes") != EP_OK)
        return -1;
    *ret_combine_bytes = (int64_t)cuda_block_bytes(combine_buffer_bytes(config));
    bytes = lay_out(&ll, &device);
    return (int64_t)(cuda_whole_bytes(bytes) + cuda_ll_net_bytes(&ll, &device, bytes));
}

static ep_status open_own(const ep_ll *ll, struct inner *inner)
{
    struct cuda_comm *cuda = inner->cuda;
    size_t bytes;
    void *report;

    EP_TRY(check_numbers(ll->comm, &ll->config, "ep_ll_new"));
    bytes = lay_out(ll, &inner->device);
    inner->bytes = bytes;
    EP_TRY(take_place(cuda, bytes, &inner->place));
    CUDA_TRY(cudaEventCreateWithFlags(&inner->done, cudaEventDisableTiming));
    CUDA_TRY(cudaHostAlloc((void **)&inner->report, sizeof(*inner->report), cudaHostAllocMapped));
    memset(inner->report, 0, sizeof(*inner->report));
    CUDA_TRY(cudaHostGetDevicePointer(&report, inner->report, 0));
    inner->device.report = report;
    inner->blocks = cuda_ll_sms(cuda);
    if (cuda_crosses_nodes(cuda))
        EP_TRY(cuda_ll_net_prepare(ll, &inner->device, bytes, inner->report, &inner->net));
    /* What an earlier ep_ll has queued is over before the peers hear of this one. */
    return cuda_drain(cuda);
}

/* Behind the first meeting nobody writes into the segment any more, and behind the second one somebody may. */
static ep_status clear_and_reach(struct inner *inner, const struct ep_group_address *all)
{
    struct cuda_comm *cuda = inner->cuda;
    struct cuda_waits *waits = &inner->device.waits;

    CUDA_TRY(cudaMemsetAsync(inner->place->memory, 0, (size_t)inner->device.slots_at, cuda->own));
    CUDA_TRY(cudaStreamSynchronize(cuda->own));
    cuda_fill_waits(cuda, EP_GROUP_LL_SEND, EP_GROUP_LL_RECV, waits);
    /* All ranks are numbered in the group here. */
    waits->rank = cuda->group.comm->rank;
    waits->nranks = cuda->group.comm->nranks;
    waits->first = 0;
    inner->device.first = cuda->group.first;
    inner->device.n_near = cuda->group.nlocal;
    for (int rank = cuda->group.first; rank < cuda_end_of_node(cuda); rank++) {
        void *segment;

        EP_TRY(cuda_map(cuda, rank, &all[rank], inner->bytes, &segment));
        inner->device.peer[rank] = segment;
    }
    return EP_OK;
}

static void free_inner(struct inner *inner)
{
    if (inner->done)
        cudaEventDestroy(inner->done);
    cuda_ll_net_close(inner->net); /* which uses the report */
    cudaFreeHost(inner->report);
    cuda_give(inner->cuda, &inner->combine_buffer);
    if (inner->place)
        inner->place->used = false;
    cudaGetLastError();
    free(inner);
}

ep_status cuda_ll_open(ep_ll *ll)
{
    struct ep_group_address where = {.slot = EP_GROUP_UNMAPPED}, all[EP_MAX_RANKS] = {{.slot = EP_GROUP_UNMAPPED}};
    struct cuda_comm *cuda = cuda_of(ll->comm);
    struct inner *inner = calloc(1, sizeof(*inner));
    struct cuda_scope scope;
    ep_status status;

    if (!inner)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    inner->cuda = cuda;
    status = cuda_check(cuda);
    if (status == EP_OK)
        status = cuda_enter(cuda, &scope);
    if (status != EP_OK) {
        free(inner);
        return status;
    }
    status = open_own(ll, inner);
    if (status == EP_OK && !cuda_find(cuda, inner->place->memory, 1, &where))
        status = ep_fail(EP_E_STATE, "ep_ll_new: the segment is not where it was");
    status = ep_group_ll_exchange(ll, status, &where, all);
    if (status == EP_OK && inner->place) /* which no rank is without when all have met without a failure */
        status = clear_and_reach(inner, all);
    if (cuda_crosses_nodes(cuda)) {
        status = ep_group_agree_within(ll->comm, "ep_ll_new", status);
        if (status == EP_OK)
            status = cuda_ll_net_open(inner->net);
    }
    status = ep_group_agree_within(ll->comm, "ep_ll_new", status);
    if (status == EP_OK)
        ll->impl = inner;
    else
        free_inner(inner);
    if (status == EP_OK && inner->device.masking)
        atomic_fetch_add(&cuda->masking, 1);
    cuda_leave(&scope);
    return status;
}

void cuda_ll_close(ep_ll *ll)
{
    struct inner *inner = ll->impl;
    struct cuda_comm *cuda;
    struct cuda_scope scope;

    if (!inner)
        return;
    cuda = inner->cuda;
    if (cuda_enter(cuda, &scope) == EP_OK) {
        /* Kernels that wait for a peer have a deadline; of a failed group many may be queued, each with its own. */
        if (atomic_load(&ll->comm->failed))
            cuda_stop_kernels(cuda);
        cuda_drain(cuda);
        if (inner->device.masking)
            atomic_fetch_sub(&cuda->masking, 1);
        free_inner(inner);
        cuda_leave(&scope);
    } else {
        cuda_ll_net_stop(inner->net);
    }
    ll->impl = NULL;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* What is wrong with the routing that a kernel has refused. */
static ep_status explain(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens)
{
    const struct inner *inner = ll->impl;
    struct ep_routing_shape shape = {.n_tokens = n_tokens,
                                     .topk = ll->config.topk,
                                     .n_experts = ll->config.n_experts,
                                     .nranks = ll->comm->nranks,
                                     .ranks_per_node = ll->comm->ranks_per_node};
    size_t entries = (size_t)n_tokens * (size_t)ll->config.topk;
    int32_t *index = malloc((entries + 1) * sizeof(*index));
    void *copy = NULL;
    ep_status status = EP_E_MEMORY;

    if (!index)
        return ep_fail(status, "routing: no memory");
    status = cuda_fetch_routing(topk_idx, entries * ep_dtype_bytes((ep_dtype)idx_type), inner->stream, &copy);
    if (status == EP_OK)
        status = ep_routing_check(&shape, copy, idx_type, index);
    if (status == EP_OK)
        status = inner->in_dispatch
                     ? ep_fail(EP_E_ROUTING, "ep_ll_dispatch: topk_idx changed while it was checked")
                     : ep_fail(EP_E_ROUTING, "ep_ll_combine: topk_idx is not that of the dispatch that it answers");
    free(copy);
    free(index);
    return status;
}

static ep_status launch(struct inner *inner, int phases)
{
    cudaError_t error;

    if (inner->in_dispatch) {
        inner->dispatch.phases = phases;
        error = cuda_launch_ll_dispatch(&inner->dispatch, inner->blocks, inner->stream);
    } else {
        inner->combine.phases = phases;
        error = cuda_launch_ll_combine(&inner->combine, inner->blocks, inner->stream);
    }
    EP_TRY(cuda_status(error, "low-latency kernel"));
    return cuda_ll_net_launched(inner->net, inner->stream, inner->capture);
}

/* Starts a part of the call and, for the forms that wait, waits for it. */
static ep_status run(const ep_ll *ll, int phases)
{
    struct inner *inner = ll->impl;
    struct cuda_comm *cuda = inner->cuda;
    enum ep_group_phase phase = inner->in_dispatch ? EP_GROUP_LL_RECV : EP_GROUP_LL_COMBINE;

    EP_TRY(launch(inner, phases));
    inner->open = !(phases & CUDA_LL_RECEIVE);
    inner->in = inner->capture;
    if (!inner->waits)
        return EP_OK;
    CUDA_TRY(cudaEventRecord(inner->done, inner->stream));
    return cuda_wait_event(cuda, inner->done, phase);
}

/* The same, with the routing looked at when a kernel has refused it. */
static ep_status run_checked(const ep_ll *ll, int phases, const void *topk_idx, int idx_type, int n_tokens)
{
    struct inner *inner = ll->impl;
    volatile uint32_t *bad = &inner->report->bad;

    inner->dispatch.queued = inner->combine.queued = !inner->waits;
    EP_TRY(run(ll, phases));
    if (!*bad)
        return EP_OK;
    *bad = 0;
    inner->open = false;
    return explain(ll, topk_idx, idx_type, n_tokens);
}

/*
 * Kernels keep one call that is half done, so the one before is received when the next is sent; its ep_ll_finish() has
 * nothing left to do then. Every rank makes the same calls, so all do it at the same place.
 */
static ep_status receive_open(const ep_ll *ll, const char *call)
{
    const struct inner *inner = ll->impl;

    if (!inner->open)
        return EP_OK;
    if (inner->in != inner->capture)
        return ep_fail(EP_E_STATE,
                       "%s: a call with EP_LL_RECV_HOOK is open that was made %s: call ep_ll_finish() there first",
                       call, inner->in ? "in a capture" : "before the capture began");
    return run(ll, CUDA_LL_RECEIVE);
}

static int phases_of(uint32_t flags)
{
    return flags & EP_LL_RECV_HOOK ? CUDA_LL_SEND : CUDA_LL_SEND | CUDA_LL_RECEIVE;
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
    struct inner *inner = ll->impl;
    bool fp8 = args->out_dtype == EP_F8E4M3, packed = args->scale_type == EP_UE8M0;
    bool rounds = packed || (args->flags & EP_LL_ROUND_SCALE);

    EP_TRY(check_dispatch_pointers(inner->cuda, args));
    EP_TRY(receive_open(ll, "ep_ll_dispatch"));
    inner->in_dispatch = true;
    inner->number = number;
    inner->dispatch = (struct cuda_ll_dispatch){.ll = inner->device,
                                                .x = args->x,
                                                .topk_idx = args->topk_idx,
                                                .wide = args->idx_type == EP_I64,
                                                .n_tokens = args->n_tokens,
                                                .fp8 = fp8,
                                                .rounds = rounds,
                                                .packed = packed,
                                                .format = args->out_dtype | args->scale_type << 8 | (int)rounds << 16,
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
        inner->dispatch.scale_stride_token = ll->config.hidden / (packed ? 4 * EP_SCALE_BLOCK : EP_SCALE_BLOCK);
        inner->dispatch.scale_stride_block = 1;
    }
    inner->dispatch.ll.max_tokens = args->max_tokens;
    return run_checked(ll, phases_of(args->flags), args->topk_idx, args->idx_type, args->n_tokens);
}

/* What the call has queued is behind the last operation, and the next one behind it. */
static ep_status begin(ep_ll *ll, ep_stream stream, struct cuda_call *ret_call)
{
    struct inner *inner = ll->impl;

    EP_TRY(cuda_call_begin(inner->cuda, stream, true, ret_call));
    inner->stream = ret_call->stream;
    inner->capture = ret_call->capture;
    inner->waits = ll->comm->blocking && !ret_call->capture;
    return EP_OK;
}

/* A call that was refused leaves the group as it is. */
static ep_status end(struct cuda_call *call, ep_status status)
{
    return cuda_call_end(call, EP_OK, true) == EP_OK ? status : status == EP_OK ? EP_E_DEVICE : status;
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

static ep_status combine(ep_ll *ll, const ep_ll_combine_args *args)
{
    const struct ep_ll_call *answers = &ll->call[args->call % 2];
    struct inner *inner = ll->impl;
    int64_t rows = (int64_t)ll->comm->nranks * answers->max_tokens;
    struct cuda_ll *device;
    ep_status status;

    EP_TRY(check_combine_pointers(inner->cuda, args));
    if ((args->flags & EP_LL_ZERO_COPY) && (!inner->handed_out || args->x != inner->combine_buffer.memory))
        return ep_fail(EP_E_ARG, "ep_ll_combine: with EP_LL_ZERO_COPY x must be the buffer that "
                                 "ep_ll_get_combine_buffer gave for this combine");
    EP_TRY(receive_open(ll, "ep_ll_combine"));
    inner->in_dispatch = false;
    inner->number = args->call;
    inner->combine = (struct cuda_ll_combine){.ll = inner->device,
                                              .x = args->x,
                                              .topk_idx = args->topk_idx,
                                              .weights = args->topk_weights,
                                              .out = args->out,
                                              .wide = args->idx_type == EP_I64,
                                              .n_tokens = args->n_tokens,
                                              .age = (int32_t)(ll->dispatches - args->call),
                                              .wait_added = args->wait_cost_add};
    device = &inner->combine.ll;
    device->max_tokens = answers->max_tokens;
    device->sum_once = args->flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0;
    device->parts = parts_of(device->sum_once ? rows * ll->config.topk : rows, ll->config.hidden);
    device->waits.ready_phase = EP_GROUP_LL_OFFER;
    device->waits.done_phase = EP_GROUP_LL_COMBINE;
    status = run_checked(ll, phases_of(args->flags), args->topk_idx, args->idx_type, args->n_tokens);
    if (status == EP_OK)
        inner->handed_out = false;
    return status;
}

ep_status cuda_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    struct cuda_call call;

    EP_TRY(begin(ll, stream, &call));
    return end(&call, combine(ll, args));
}

ep_status cuda_ll_finish(ep_ll *ll, uint64_t number, ep_stream stream)
{
    const struct inner *inner = ll->impl;
    ep_status status = EP_OK;
    struct cuda_call call;

    EP_TRY(begin(ll, stream, &call));
    /* Otherwise the call after it has received it: this stream is behind that one by now. */
    if (inner->open && inner->number == number)
        status = run(ll, CUDA_LL_RECEIVE);
    return end(&call, status);
}

static ep_status run_mask(ep_ll *ll, uint32_t set, uint32_t clear, int32_t *out, ep_stream stream)
{
    struct inner *inner = ll->impl;
    struct cuda_ll_mask mask = {.ll = inner->device, .set = set, .clear = clear, .out = out};
    struct cuda_call call;
    ep_status status;

    EP_TRY(cuda_call_begin(inner->cuda, stream, true, &call));
    status = cuda_check_pointer(inner->cuda, "ep_ll_query_mask", "out", out);
    if (status == EP_OK)
        status = cuda_status(cuda_launch_ll_mask(&mask, call.stream), "mask kernel");
    if (status == EP_OK)
        status = cuda_ll_net_launched(inner->net, call.stream, call.capture);
    return cuda_call_end(&call, status, status == EP_OK);
}

ep_status cuda_ll_set_mask(ep_ll *ll, int rank, bool on, ep_stream stream)
{
    uint32_t ranks = rank < 0 ? UINT32_MAX : UINT32_C(1) << rank;

    return run_mask(ll, on ? ranks : 0, on ? 0 : ranks, NULL, stream);
}

ep_status cuda_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream)
{
    return run_mask(ll, 0, 0, out, stream);
}

ep_status cuda_ll_barrier(ep_ll *ll, ep_stream stream)
{
    struct inner *inner = ll->impl;
    struct cuda_ll device = inner->device;
    struct cuda_call call;
    ep_status status;

    EP_TRY(cuda_call_begin(inner->cuda, stream, true, &call));
    device.waits.ready_phase = device.waits.done_phase = EP_GROUP_LL_BARRIER;
    status = cuda_status(cuda_launch_ll_barrier(&device, call.stream), "barrier kernel");
    if (status == EP_OK)
        status = cuda_ll_net_launched(inner->net, call.stream, call.capture);
    return cuda_call_end(&call, status, status == EP_OK);
}

/* One is enough: what the next combine's input is written over has been sent, in stream order. */
ep_status cuda_ll_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    struct inner *inner = ll->impl;
    struct cuda_scope scope;
    size_t bytes = combine_buffer_bytes(&ll->config);
    ep_status status = EP_OK;

    EP_TRY(cuda_enter_uncaptured(inner->cuda, &scope));
    if (!inner->combine_buffer.memory)
        status = cuda_take(inner->cuda, bytes, &inner->combine_buffer);
    cuda_leave_uncaptured(&scope);
    if (status != EP_OK)
        return status;
    inner->handed_out = true;
    *ret_buffer = inner->combine_buffer.memory;
    return EP_OK;
}

ep_status cuda_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    const struct inner *inner = ll->impl;
    uint32_t mask;

    /* Whatever its status is: the masks tell. */
    cuda_drain(inner->cuda);
    mask = *(const volatile uint32_t *)&inner->report->mask;
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        ret_masked[rank] = (int32_t)(mask >> rank & 1);
    return EP_OK;
}
