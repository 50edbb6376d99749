/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Writes metadata of a plan to the caller's memory, in the order of the stream. The counts of a plan that
 * the devices have made are there; those of a plan that the host has made are uploaded once.
 */
#include "backend/cuda/plan.h"
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

/* [R+1] first tokens, [L] exact counts, [R,R] prefix sums. */
size_t cuda_metadata_counts_bytes(const ep_plan *plan)
{
    size_t nranks = (size_t)plan->comm->nranks, n_local = (size_t)plan->args.n_experts / nranks;

    return (nranks + 1) * sizeof(int64_t) + (n_local + nranks * nranks) * sizeof(int32_t);
}

void cuda_metadata_counts_write(const ep_plan *plan, int64_t *ret_counts)
{
    const struct ep_group_plan *inner = plan->impl;
    size_t nranks = (size_t)plan->comm->nranks, n_local = (size_t)plan->args.n_experts / nranks;
    int32_t *words = (int32_t *)(ret_counts + nranks + 1);

    memcpy(ret_counts, inner->recv_from_rank, (nranks + 1) * sizeof(*ret_counts));
    memcpy(words, inner->recv_exact, n_local * sizeof(*words));
    memcpy(words + n_local, inner->prefix, nranks * nranks * sizeof(*words));
}

static ep_status find_exact_counts(struct cuda_comm *cuda, const ep_plan *plan)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    struct cuda_block *block = &device->metadata_counts;
    size_t bytes = cuda_metadata_counts_bytes(plan);
    int64_t *counts;
    ep_status status;

    if (device->exact_counts)
        return EP_OK;
    if (!block->memory)
        EP_TRY(cuda_pool_alloc(cuda, bytes, CUDA_BLOCK_ANY, block));
    counts = malloc(bytes);
    if (!counts)
        return ep_fail(EP_E_MEMORY, "ep_plan_get_metadata: no memory");
    cuda_metadata_counts_write(plan, counts);
    status = cuda_transfer(cuda, block->memory, counts, bytes);
    free(counts);
    if (status == EP_OK)
        device->exact_counts = block->memory;
    return status;
}

/* Divides the block; `memory` NULL: only computes its size. */
static size_t lay_out(const ep_plan *plan, char *memory, struct cuda_metadata *m)
{
    const struct cuda_plan *device = cuda_plan_of(plan);
    size_t n = (size_t)(device->on_device ? device->max_tokens : plan->args.n_tokens), topk = (size_t)plan->args.topk;
    size_t rows = (size_t)cuda_plan_rows(plan), row_bytes = (size_t)m->row_words * sizeof(int32_t), at = 0;

    m->rows = cuda_carve(memory, &at, n + 1, row_bytes);
    m->recv_rows = cuda_carve(memory, &at, rows + 1, row_bytes);
    if (!device->route.expanded)
        return at;
    m->choices = cuda_carve(memory, &at, n * topk + 1, sizeof(float));
    m->recv_choices = cuda_carve(memory, &at, rows + 1, sizeof(float));
    return at;
}

/* Where slots and sources are that combines read, whatever the caller does with its own. */
static ep_status place_slots(struct cuda_comm *cuda, const ep_plan *plan, int32_t **ret_slot, int32_t **ret_source)
{
    size_t rows = (size_t)cuda_plan_rows(plan), slots = rows * (size_t)plan->args.topk + 1;
    struct cuda_block *block = &cuda_plan_of(plan)->slots;

    if (!block->memory)
        EP_TRY(cuda_pool_alloc(cuda, (slots + rows) * sizeof(int32_t), cuda_plan_block_use(plan), block));
    *ret_slot = block->memory;
    *ret_source = *ret_slot + slots;
    return EP_OK;
}

static ep_status alloc_sources(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_metadata *m)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    int words = device->route.expanded ? 4 + plan->comm->nranks : 4;

    m->row_words = (words + 3) / 4 * 4;
    if (!device->sources.memory)
        EP_TRY(cuda_pool_alloc(cuda, lay_out(plan, NULL, m), cuda_plan_block_use(plan), &device->sources));
    lay_out(plan, device->sources.memory, m);
    if (!m->recv_slot && !m->own_slot)
        m->choices = m->recv_choices = NULL;
    return EP_OK;
}

/* Points to the counts in device memory. */
static ep_status find_counts(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_metadata *m)
{
    const struct cuda_plan *device = cuda_plan_of(plan);

    m->exact = device->expert_exact;
    if (device->on_device && device->lists) {
        m->later_prefix = m->rank_prefix;
        m->rank_prefix = NULL;
        m->first = device->lists->update->first;
        m->exact = device->lists->update->expert_exact;
        m->start = device->lists->update->start;
        return EP_OK;
    }
    if (device->on_device) {
        m->first = m->route.counts->first;
        m->prefix = device->update.prefix;
    } else {
        EP_TRY(find_exact_counts(cuda, plan));
        m->first = device->exact_counts;
        m->exact = (const int32_t *)(m->first + plan->comm->nranks + 1);
        m->prefix = m->exact + plan->info.n_local_experts;
    }
    m->start = m->rank ? m->prefix + (m->rank - 1) * m->nranks : NULL;
    return EP_OK;
}

static ep_status fill(struct cuda_comm *cuda, const ep_plan *plan, const ep_plan_metadata *dst, bool slots,
                      const struct cuda_route *route, struct cuda_metadata *ret_metadata)
{
    struct cuda_metadata *m = ret_metadata;

    *m = (struct cuda_metadata){.route = *route,
                                .rank = plan->comm->rank,
                                .nranks = plan->comm->nranks,
                                .alignment = plan->args.expert_alignment,
                                .stride = dst->source_stride,
                                .max_rows = cuda_plan_rows(plan),
                                .out_rows = ep_plan_info_now(plan)->out_rows,
                                .recv_source = dst->recv_source,
                                .recv_slot = dst->recv_slot,
                                .n_recv_tokens = dst->n_recv_tokens,
                                .psum_rank = dst->psum_rank,
                                .psum_expert = dst->psum_expert,
                                .count_exact = dst->count_exact,
                                .rank_prefix = dst->rank_prefix};
    EP_TRY(find_counts(cuda, plan, m));
    cuda_fill_waits(cuda, EP_GROUP_DISPATCH_READY, EP_GROUP_DISPATCH_DONE, &m->waits);
    if (slots)
        EP_TRY(place_slots(cuda, plan, &m->own_slot, &m->own_source));
    return dst->recv_source || dst->recv_slot || slots ? alloc_sources(cuda, plan, m) : EP_OK;
}

static ep_status check_pointers(struct cuda_comm *cuda, const ep_plan *plan, const ep_plan_metadata *dst)
{
    static const char call[] = "ep_plan_get_metadata";
    bool receives = cuda_plan_rows(plan);

    EP_TRY(cuda_check_pointer(cuda, call, "recv_source", receives ? dst->recv_source : NULL));
    EP_TRY(cuda_check_pointer(cuda, call, "recv_slot", receives ? dst->recv_slot : NULL));
    EP_TRY(cuda_check_pointer(cuda, call, "n_recv_tokens", dst->n_recv_tokens));
    EP_TRY(cuda_check_pointer(cuda, call, "psum_rank", dst->psum_rank));
    EP_TRY(cuda_check_pointer(cuda, call, "psum_expert", dst->psum_expert));
    EP_TRY(cuda_check_pointer(cuda, call, "count_exact", dst->count_exact));
    return cuda_check_pointer(cuda, call, "rank_prefix", dst->rank_prefix);
}

/* Dispatches the rows that hold their own source; the statistics stay those of the caller's last operation. */
static ep_status send_sources(ep_plan *plan, const struct cuda_metadata *m, ep_stream stream)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_stats stats = EP_STATS_INIT;
    ep_status status;

    args.x = m->rows;
    args.dtype = EP_BF16;
    args.hidden = 2 * m->row_words;
    args.recv_x = m->recv_rows;
    args.out_rows = m->max_rows;
    args.topk_weights = m->choices;
    args.recv_topk_weights = m->recv_choices;
    EP_TRY(ep_comm_get_stats(plan->comm, &stats));
    status = cuda_dispatch(plan, &args, stream);
    ep_comm_set_stats(plan->comm, &stats);
    return status;
}

/* `slots`: those that combines read, too. */
static ep_status metadata(struct cuda_call *call, ep_plan *plan, const ep_plan_metadata *dst, bool slots)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    struct cuda_route route;
    struct cuda_metadata m;

    EP_TRY(cuda_plan_ready(call, plan, &route));
    EP_TRY(check_pointers(call->cuda, plan, dst));
    EP_TRY(fill(call->cuda, plan, dst, slots, &route, &m));
    EP_TRY(cuda_status(cuda_launch_metadata_counts(&m, call->stream), "metadata kernel"));
    call->queued = true;
    if (dst->rank_prefix && device->on_device && device->lists)
        EP_TRY(cuda_nodes_plan_prefix(call, plan, dst->rank_prefix));
    if (!m.rows)
        return EP_OK;
    EP_TRY(send_sources(plan, &m, call->stream));
    if (slots)
        device->has_slots = !call->capture;
    return cuda_status(cuda_launch_sources(&m, call->stream), "metadata kernel");
}

/* An operation that contains a dispatch: later calls are ordered after both. */
ep_status cuda_plan_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream)
{
    struct cuda_call call;

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), stream, true, &call));
    /* The combine that follows would need an exchange of its own. */
    return cuda_call_end(&call, metadata(&call, plan, dst, dst->recv_slot && !cuda_crosses_nodes(call.cuda)));
}

ep_status cuda_plan_slots(struct cuda_call *call, ep_plan *plan, struct cuda_reduce *reduce)
{
    const struct cuda_plan *device = cuda_plan_of(plan);
    ep_plan_metadata none = EP_PLAN_METADATA_INIT;
    int32_t *slot, *source;

    EP_TRY(place_slots(call->cuda, plan, &slot, &source));
    reduce->slots = slot;
    reduce->source = source;
    reduce->stride = none.source_stride = CUDA_SOURCE_STRIDE(plan->comm->nranks);
    if (!device->has_slots || device->updated_in_graph || call->capture)
        EP_TRY(metadata(call, plan, &none, true));
    reduce->first = device->on_device ? device->route.counts->first : device->exact_counts;
    return EP_OK;
}

/* --- the layout: the device makes it if the outputs are in device memory, otherwise the host does ----------------- */

static ep_status lay_out_on_host(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    struct cuda_comm *cuda = cuda_of(comm);
    size_t bytes = (size_t)args->n_tokens * (size_t)args->topk * ep_dtype_bytes((ep_dtype)args->idx_type);
    ep_plan_args mine = *args;
    struct cuda_scope scope;
    void *copy = NULL;
    ep_status status;

    EP_TRY(cuda_scope_begin(cuda, &scope));
    status = cuda_fetch_routing(args->topk_idx, bytes, cuda_stream_of(cuda, args->stream), &copy);
    cuda_scope_end(&scope);
    mine.topk_idx = copy;
    if (status == EP_OK)
        status = ep_routing_layout(comm, &mine, layout);
    free(copy);
    return status;
}

static ep_status lay_out_on_device(const struct cuda_call *call, const ep_comm *comm, const ep_plan_args *args,
                                   const ep_layout *layout)
{
    static const char name[] = "ep_plan_layout";
    struct cuda_layout l = {.topk_idx = args->topk_idx,
                            .distinct = cuda_checks_distinct(comm),
                            .drops = cuda_drops_absent(comm),
                            .scratch = call->cuda->scratch,
                            .per_rank = layout->tokens_per_rank,
                            .per_node = layout->tokens_per_node,
                            .per_expert = layout->tokens_per_expert,
                            .in_rank = layout->token_in_rank,
                            .idx64 = args->idx_type == EP_I64,
                            .n_tokens = args->n_tokens,
                            .topk = args->topk,
                            .n_experts = args->n_experts,
                            .nranks = comm->nranks,
                            .ranks_per_node = comm->ranks_per_node};

    EP_TRY(cuda_check_pointer(call->cuda, name, "topk_idx", args->n_tokens ? l.topk_idx : NULL));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_rank", l.per_rank));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_node", l.per_node));
    EP_TRY(cuda_check_pointer(call->cuda, name, "tokens_per_expert", l.per_expert));
    EP_TRY(cuda_check_pointer(call->cuda, name, "token_in_rank", args->n_tokens ? l.in_rank : NULL));
    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &l.waits);
    return cuda_status(cuda_launch_layout(&l, call->stream), "layout kernel");
}

/* A wait for the stream must wait for this, too, so it counts as an operation, although no peer takes part. */
ep_status cuda_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    const void *outputs[] = {layout->tokens_per_rank, layout->tokens_per_node, layout->tokens_per_expert,
                             layout->token_in_rank};
    struct cuda_call call;
    bool device = false;
    ep_status status;

    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]) && !device; i++)
        if (outputs[i])
            EP_TRY(cuda_is_device_memory(cuda_of(comm), outputs[i], &device));
    if (!device)
        return lay_out_on_host(comm, args, layout);
    EP_TRY(cuda_call_begin(cuda_of(comm), args->stream, true, &call));
    status = lay_out_on_device(&call, comm, args, layout);
    call.queued = status == EP_OK;
    return cuda_call_end(&call, status);
}
