/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency on GPUs: the layout of segments, and opening and closing an ep_ll. */
#include "backend/cuda/ll_impl.h"

#include <stdlib.h>
#include <string.h>

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

    for (int i = 0; i < CUDA_LL_SEGMENTS; i++) {
        struct cuda_ll_cached_segment *segment = &cuda->ll_segments[i];

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

size_t cuda_ll_combine_buffer_bytes(const ep_ll_config *config)
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
    *ret_combine_bytes = (int64_t)cuda_block_bytes(cuda_ll_combine_buffer_bytes(config));
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
    impl->report = memset(impl->host_block->pinned.memory, 0, sizeof(*impl->report));
    impl->device.report = impl->host_block->pinned.device;
    impl->blocks = cuda_ll_sms(cuda);
    if (cuda_crosses_nodes(cuda))
        EP_TRY(cuda_ll_net_prepare(ll, &impl->device, &wire, bytes, impl->report, &impl->net));
    /* Work queued by an earlier ep_ll must end before the peers learn of this one. */
    return cuda_drain(cuda);
}

/*
 * Maps the segments of this node and passes their addresses to the kernels: in their arguments or, between nodes, in
 * the own segment. After the first barrier no rank writes into the segment any more; after the second one peers may.
 */
static ep_status clear_and_map(struct cuda_ll_impl *impl, const struct ep_group_address *all)
{
    struct cuda_ll_segment *segments[CUDA_LL_MAX_RANKS] = {NULL};
    struct cuda_comm *cuda = impl->cuda;
    struct cuda_ll *device = &impl->device;
    struct cuda_waits *waits = &device->waits;
    size_t bytes = (size_t)cuda->group.comm->nranks * sizeof(segments[0]);

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
        void *segment;

        EP_TRY(cuda_map(cuda, rank, &all[rank], impl->bytes, &segment));
        segments[rank] = segment;
    }
    cuda_ll_net_get_segments(impl->net, segments);
    device->own = segments[waits->rank];
    if (!device->landing) {
        memcpy(device->peer, segments, bytes);
        return EP_OK;
    }
    return cuda_transfer(cuda, device->own->peer_table, segments, bytes);
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
    struct cuda_ll_impl *impl = calloc(1, sizeof(*impl));
    struct cuda_scope scope = {.previous = -1};
    /* A rank that fails takes part all the same: its peers learn why, instead of waiting for it. */
    ep_status status = impl ? cuda_check(cuda) : ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");

    if (impl)
        impl->cuda = cuda;
    if (status == EP_OK)
        status = cuda_scope_begin(cuda, &scope);
    if (status == EP_OK)
        status = open_local(ll, impl);
    if (status == EP_OK && !cuda_find(cuda, impl->segment->memory, 1, &where))
        status = ep_fail(EP_E_STATE, "ep_ll_new: the segment is not in symmetric memory (a bug of epkit)");
    status = ep_group_ll_exchange(ll, status, &where, all);
    if (status == EP_OK && impl->segment) /* every rank has a segment if the exchange has succeeded */
        status = clear_and_map(impl, all);
    if (cuda_crosses_nodes(cuda)) {
        status = ep_group_agree_within(ll->comm, "ep_ll_new", status);
        if (status == EP_OK)
            status = cuda_ll_net_open(impl->net);
    }
    status = ep_group_agree_within(ll->comm, "ep_ll_new", status);
    if (status == EP_OK)
        ll->impl = impl;
    else
        free_impl(impl);
    if (status == EP_OK && impl->device.masking)
        atomic_fetch_add(&cuda->masking, 1);
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
