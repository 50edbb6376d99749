/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans within a node: the devices count their routing, exchange the counts and assign the rows, in the order of the
 * stream, for a new plan as for an update. The host of a plan of exact counts waits for them; that of a plan of fixed
 * capacity gets them when it next waits.
 */
#include "backend/cuda/plan.h"
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

/* Divides the plan's block; `memory` NULL: only computes its size. */
static size_t lay_out(const ep_plan *plan, char *memory, struct cuda_plan *device)
{
    const struct cuda_comm *cuda = cuda_of(plan->comm);
    const ep_plan_args *args = &plan->args;
    size_t nranks = (size_t)plan->comm->nranks, blocks = (size_t)device->max_tokens / CUDA_COUNT_TOKENS + 1;
    size_t experts = (size_t)args->n_experts, word = sizeof(int32_t), at = 0;
    struct cuda_update *update = &device->update;
    struct cuda_count *count = &update->count;

    cuda_plan_lay_out(plan, device->max_tokens, memory, &at, device);
    *update = (struct cuda_update){
        .count = cuda_count_of(plan, device),
        .counts = (struct cuda_counts *)(uintptr_t)device->route.counts,
        .expert_start = device->expert_start,
        .expert_exact = device->expert_exact,
        .expanded = device->route.expanded,
        .alignment = args->expert_alignment,
        .exact = !args->max_recv_tokens,
        .capacity =
            (int32_t)(args->max_recv_tokens && args->max_recv_tokens < INT32_MAX ? args->max_recv_tokens : INT32_MAX)};
    update->prefix = cuda_carve(memory, &at, nranks * nranks, word);
    update->expert_base = cuda_carve(memory, &at, experts, word);
    if (update->expanded)
        update->block_experts = cuda_carve(memory, &at, blocks * experts, word);
    count->totals = cuda_carve(memory, &at, nranks + experts, word);
    count->ret_found = cuda_carve(memory, &at, CUDA_FOUND_WORDS, word);
    count->per_expert = cuda->scratch;
    count->blocks_done = (uint32_t *)cuda->scratch + CUDA_SCRATCH_BLOCKS_DONE;
    count->found = (uint32_t *)cuda->scratch + CUDA_SCRATCH_FOUND;
    return at;
}

struct cuda_op_desc cuda_update_desc(const ep_plan *plan, int number)
{
    const ep_plan_args *args = &plan->args;

    return (struct cuda_op_desc){
        .kind = CUDA_DISPATCH,
        .words = {[CUDA_DESC_PHASE] = EP_GROUP_PLAN_COUNTS,
                  [CUDA_DESC_PLAN] = (uint32_t)number,
                  [CUDA_DESC_PLAN_INDEX] = plan->from_mask ? 0 : (uint32_t)args->idx_type,
                  [CUDA_DESC_PLAN_EXPERTS] = (uint32_t)args->n_experts,
                  [CUDA_DESC_PLAN_TOPK] = (uint32_t)args->topk,
                  [CUDA_DESC_PLAN_FLAGS] = args->flags | (args->max_recv_tokens ? CUDA_DESC_PLAN_FIXED : 0),
                  [CUDA_DESC_PLAN_ALIGNMENT] = (uint32_t)args->expert_alignment}};
}

/*
 * Queues the kernels. The routing is in memory that the device can access. `number`: of a plan that is new, renewed or
 * of a capture; else 0.
 */
static ep_status update(struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *routing, int number,
                        struct cuda_host_block *info)
{
    struct cuda_update *u = &cuda_plan_of(plan)->update;
    ep_status status;

    EP_TRY(cuda_check_routing(call->cuda, "ep_plan_update", routing));
    cuda_plan_of(plan)->has_slots = false;
    cuda_plan_of(plan)->order = 0;
    cuda_plan_of(plan)->updated_in_graph |= call->capture != 0;
    u->count.topk_idx = routing->topk_idx;
    u->count.mask = routing->token_in_rank;
    u->count.mask_experts = routing->tokens_per_expert; /* not NULL: the routing is given by the mask */
    u->count.n_tokens = routing->n_tokens;
    u->blocks = (routing->n_tokens + CUDA_COUNT_TOKENS - 1) / CUDA_COUNT_TOKENS;
    u->blocks = u->blocks ? u->blocks : 1;
    u->info = info ? info->pinned.device : NULL;
    u->number = ++call->cuda->updates;
    u->desc = cuda_update_desc(plan, number);
    cuda_fill_waits(call->cuda, EP_GROUP_PLAN_COUNTS, EP_GROUP_PLAN_COUNTS, &u->waits);
    status = cuda_status(cuda_launch_update(u, call->stream), "update kernels");
    call->queued = status == EP_OK;
    return status;
}

/* The host gets no counts of a plan that was updated. */
static void remove_pending(struct cuda_comm *cuda, struct cuda_plan *device)
{
    struct cuda_plan **at = &cuda->pending_plans;

    pthread_mutex_lock(&cuda->pending_lock);
    while (*at && *at != device)
        at = &(*at)->next_pending;
    if (*at)
        *at = device->next_pending;
    device->next_pending = NULL;
    pthread_mutex_unlock(&cuda->pending_lock);
}

/* A routing in host memory is copied: the caller need not keep it until the device reads it. */
static ep_status open_device_part(const struct cuda_call *call, ep_plan *plan, ep_plan_update_args *routing)
{
    struct cuda_comm *cuda = call->cuda;
    struct cuda_plan_info *info;
    struct cuda_plan *device;
    size_t bytes;

    EP_TRY(cuda_plan_new_device(plan));
    device = cuda_plan_of(plan);
    device->on_device = true;
    device->captured = call->capture != 0;
    device->max_tokens = ep_plan_most_tokens(plan);
    EP_TRY(cuda_routing_to_device(call, plan, &device->routing, routing));
    bytes = lay_out(plan, NULL, device);
    EP_TRY(cuda_pool_alloc(cuda, bytes, cuda_plan_block_use(plan), &device->block));
    lay_out(plan, device->block.memory, device);
    /* A captured plan has no info slot: a graph that runs again would write stale counts, or into another plan's slot.
     */
    if (device->captured)
        return EP_OK;
    bytes = sizeof(*info) + (size_t)plan->info.n_local_experts * sizeof(info->exact[0]);
    EP_TRY(cuda_host_block_acquire(cuda, "ep_plan_new", CUDA_HOST_COUNTS, bytes, false, false, &device->info));
    info = device->info->pinned.memory;
    info->number = 0;
    return EP_OK;
}

/* --- counts for the host ------------------------------------------------------------------------------------------ */

static void complete_plan(struct cuda_plan *device)
{
    ep_plan *plan = device->plan;
    struct ep_group_plan *inner = plan->impl;
    const struct cuda_plan_info *info = device->info->pinned.memory;

    plan->full = plan->info;
    memcpy(inner->recv_exact, info->exact, (size_t)plan->info.n_local_experts * sizeof(info->exact[0]));
    ep_group_plan_place_experts(plan);
    for (int rank = 0; rank < plan->comm->nranks; rank++) {
        inner->rows_on[rank] = info->rows_on[rank];
        plan->full.most_recv = info->rows_on[rank] > plan->full.most_recv ? info->rows_on[rank] : plan->full.most_recv;
        inner->recv_from_rank[rank + 1] = info->first[rank + 1];
        inner->tokens_per_rank[rank] = info->sent[rank];
    }
    plan->full.n_recv = info->rows_on[plan->comm->rank];
    if (!plan->args.max_recv_tokens)
        plan->full.out_rows = plan->full.n_recv;
    plan->full.n_send = info->n_send;
    plan->full.n_wire = info->n_wire;
    plan->full.n_dropped = info->n_dropped;
    atomic_store_explicit(&plan->counted, true, memory_order_release);
}

static ep_status fail_refused(const volatile int64_t *refused)
{
    return ep_fail(EP_E_CAPACITY, "plan: rank %d receives %lld rows but its max_recv_tokens is %lld",
                   (int)refused[0] - 1, (long long)refused[1], (long long)refused[2]);
}

/* The operation of a routing that is not valid has not begun: the peers wait for this rank to make the plan again. */
static ep_status refuse_routing(struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *routing)
{
    struct ep_routing_shape shape =
        ep_routing_shape_of(plan->comm, plan->args.n_tokens, plan->args.topk, plan->args.n_experts);

    call->queued = false;
    call->cuda->copied = true; /* later calls are ordered after its kernels all the same */
    if (plan->from_mask)
        return ep_fail(EP_E_ROUTING,
                       "routing: tokens_per_expert does not match token_in_rank: a count below 0 or "
                       "above the choices that the tokens for its rank can have, or too few for a rank%s",
                       plan->comm->n_members < plan->comm->nranks && !cuda_drops_absent(plan->comm)
                           ? "; or a token goes to a rank that is absent"
                           : "");
    return cuda_explain_routing(plan->comm, &shape, cuda_drops_absent(plan->comm), routing->topk_idx,
                                plan->args.idx_type, call->stream, "routing: topk_idx changed while it was checked");
}

static ep_status await_exact(struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *routing)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    const struct cuda_plan_info *info = device->info->pinned.memory;

    EP_TRY(cuda_wait_number(call->cuda, &info->number, device->expected, EP_GROUP_PLAN_COUNTS));
    if (info->bad)
        return refuse_routing(call, plan, routing);
    if (info->refused[0])
        return fail_refused(info->refused);
    complete_plan(device);
    return EP_OK;
}

void cuda_plans_poll(struct cuda_comm *cuda)
{
    pthread_mutex_lock(&cuda->pending_lock);
    for (struct cuda_plan **at = &cuda->pending_plans; *at;) {
        struct cuda_plan *device = *at;
        const struct cuda_plan_info *info = device->info->pinned.memory;

        if (__atomic_load_n(&info->number, __ATOMIC_ACQUIRE) != device->expected) {
            at = &device->next_pending;
            continue;
        }
        *at = device->next_pending;
        device->next_pending = NULL;
        if (!info->refused[0])
            complete_plan(device);
    }
    pthread_mutex_unlock(&cuda->pending_lock);
}

ep_status cuda_plan_wait(ep_plan *plan)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    const struct cuda_plan *device = cuda_plan_of(plan);
    const struct cuda_plan_info *info;
    struct cuda_scope scope;
    ep_status status;

    if (!device->info || plan->updated)
        return ep_fail(EP_E_STATE, "ep_plan_settle: the host gets no counts of this plan: %s",
                       plan->updated ? "it was updated" : "it was made in a capture");
    info = device->info->pinned.memory;
    EP_TRY(cuda_scope_begin_uncaptured(cuda, &scope));
    status = cuda_wait_number(cuda, &info->number, device->expected, EP_GROUP_PLAN_COUNTS);
    cuda_scope_end(&scope);
    if (status == EP_OK && info->refused[0])
        status = fail_refused(info->refused);
    cuda_plans_poll(cuda);
    return status;
}

/* --- new plans --------------------------------------------------------------------------------------------------- */

static void add_pending(struct cuda_comm *cuda, struct cuda_plan *device)
{
    pthread_mutex_lock(&cuda->pending_lock);
    device->next_pending = cuda->pending_plans;
    cuda->pending_plans = device;
    pthread_mutex_unlock(&cuda->pending_lock);
}

ep_status cuda_plan_open_on_device(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args)
{
    struct cuda_comm *cuda = call->cuda;
    ep_plan_update_args routing = cuda_routing_of(args);
    /* So a new member that captures what others have captured has their numbers, and counts other plans as they do. */
    int *counter = call->capture ? &cuda->captured_plans : &cuda->group.plans;
    struct ep_group_plan *inner;
    struct cuda_plan *device;
    ep_status status;

    EP_TRY(ep_group_plan_prepare(plan, false));
    inner = plan->impl;
    inner->number = call->capture ? -++*counter : ++*counter;
    inner->complete = true;
    ep_group_plan_fill_info(plan);
    plan->info.n_send = plan->info.n_wire = -1;
    if (plan->comm->n_members < plan->comm->nranks)
        plan->info.n_dropped = -1;
    status = open_device_part(call, plan, &routing);
    device = inner->device;
    if (status == EP_OK)
        status = update(call, plan, &routing, inner->number, device->info);
    if (status == EP_OK && !device->captured) {
        device->expected = cuda->updates;
        if (args->max_recv_tokens)
            add_pending(cuda, device);
        else
            status = await_exact(call, plan, &routing);
    }
    if (status != EP_OK) {
        /* The peers count only plans whose operation has begun. */
        if (!call->queued)
            --*counter;
        cuda_plan_free_device(cuda, device);
        ep_group_plan_discard(plan);
    }
    return status;
}

ep_status cuda_plan_new_device(ep_plan *plan)
{
    struct cuda_plan *device = calloc(1, sizeof(*device));

    if (!device)
        return ep_fail(EP_E_MEMORY, "ep_plan_new: no memory");
    device->plan = plan;
    ep_group_plan_of(plan)->device = device;
    return EP_OK;
}

void cuda_plan_free_device(struct cuda_comm *cuda, struct cuda_plan *device)
{
    if (!device)
        return;
    remove_pending(cuda, device);
    if (device->info)
        device->info->used = false;
    cuda_lists_free(cuda, device->lists);
    cuda_pool_free(cuda, &device->block);
    cuda_pool_free(cuda, &device->ordered);
    cuda_pool_free(cuda, &device->metadata_counts);
    cuda_pool_free(cuda, &device->sources);
    cuda_pool_free(cuda, &device->slots);
    cuda_pool_free(cuda, &device->routing);
    free(device);
}

ep_status cuda_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_plan *device = cuda_plan_of(plan);
    struct ep_group_plan *inner = ep_group_plan_of(plan);
    bool renews = plan->generation != plan->comm->generation;
    /* The counts of a plan that was made in a capture have no number before its graph runs. */
    int number = renews ? cuda->group.plans + 1 : inner->number < 0 ? inner->number : 0;
    struct cuda_call call;
    ep_status status;

    if (cuda_crosses_nodes(cuda))
        return cuda_nodes_plan_update(plan, args, stream);
    if (args->n_tokens > device->max_tokens)
        return ep_fail(EP_E_ARG, "ep_plan_update: n_tokens is %d, but the plan has room for %d", args->n_tokens,
                       device->max_tokens);
    EP_TRY(cuda_call_begin(cuda, stream, true, &call));
    remove_pending(cuda, device);
    status = update(&call, plan, args, number, NULL);
    if (status == EP_OK && renews)
        cuda->group.plans = inner->number = number;
    return cuda_call_end(&call, status);
}

ep_status cuda_find_refused(const struct cuda_comm *cuda)
{
    if (!__atomic_load_n(&cuda->report->refused[0], __ATOMIC_ACQUIRE))
        return EP_OK;
    return fail_refused(cuda->report->refused);
}

ep_status cuda_check_refused(struct cuda_comm *cuda)
{
    ep_status status = cuda_find_refused(cuda);

    /* Reported once: refused operations have left the group as it was. */
    if (status != EP_OK)
        __atomic_store_n(&cuda->report->refused[0], 0, __ATOMIC_RELEASE);
    return status;
}
