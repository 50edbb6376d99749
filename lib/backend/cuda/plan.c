/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans of the CUDA backend. Within a node the devices make them (update.c). Between nodes the host gets the routing
 * and uploads the routes.
 */
#include "backend/cuda/plan.h"
#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

struct cuda_route cuda_route_shape(const ep_plan *plan)
{
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    int topk = plan->args.topk, nlocal = plan->comm->ranks_per_node;

    return (struct cuda_route){.width = expanded || topk < nlocal ? topk : nlocal,
                               .n_tokens = plan->args.n_tokens,
                               .topk = topk,
                               .n_local_experts = plan->args.n_experts / plan->comm->nranks,
                               .expanded = expanded,
                               .idx64 = plan->args.idx_type == EP_I64};
}

void cuda_plan_lay_out(const ep_plan *plan, int max_tokens, char *memory, size_t *at, struct cuda_plan *device)
{
    struct cuda_route *route = &device->route;
    size_t n = (size_t)max_tokens, blocks = n / CUDA_COUNT_TOKENS + 1, n_local, word = sizeof(int32_t);

    *route = cuda_route_shape(plan);
    n_local = (size_t)route->n_local_experts;
    route->counts = cuda_carve(memory, at, 1, sizeof(*route->counts));
    route->entry = cuda_carve(memory, at, n * (size_t)route->width, sizeof(*route->entry));
    route->count = cuda_carve(memory, at, n, word);
    route->index = cuda_carve(memory, at, n * (size_t)route->topk, word);
    if (!route->expanded && plan->comm->nnodes == 1)
        route->block_rows = cuda_carve(memory, at, blocks * (size_t)plan->comm->nranks, word);
    device->expert_start = cuda_carve(memory, at, n_local + 1, word);
    device->expert_exact = cuda_carve(memory, at, n_local, word);
}

struct cuda_count cuda_count_of(const ep_plan *plan, const struct cuda_plan *device)
{
    const struct cuda_route *route = &device->route;

    return (struct cuda_count){.entry = (struct cuda_entry *)(uintptr_t)route->entry,
                               .count = (int32_t *)(uintptr_t)route->count,
                               .index = (int32_t *)(uintptr_t)route->index,
                               .block_rows = (int32_t *)(uintptr_t)route->block_rows,
                               .idx64 = route->idx64,
                               .topk = route->topk,
                               .n_experts = plan->args.n_experts,
                               .nranks = plan->comm->nranks,
                               .width = route->width,
                               .distinct = cuda_checks_distinct(plan->comm),
                               .drops = cuda_drops_absent(plan->comm),
                               .absent = cuda_of(plan->comm)->signals->absent};
}

/* Makes the device part of a plan of exact counts. If it fails, cuda_plan_free_device() frees the rest. */
static ep_status new_route(struct cuda_comm *cuda, ep_plan *plan)
{
    int n = ep_group_plan_of(plan)->n_tokens;
    size_t bytes = 0, at = 0;
    struct cuda_plan *device;

    EP_TRY(cuda_plan_new_device(plan));
    device = cuda_plan_of(plan);
    cuda_plan_lay_out(plan, n, NULL, &bytes, device);
    EP_TRY(cuda_pool_alloc(cuda, bytes, CUDA_BLOCK_ANY, &device->block));
    cuda_plan_lay_out(plan, n, device->block.memory, &at, device);
    return EP_OK;
}

static size_t routing_bytes(const ep_plan_args *args)
{
    return (size_t)args->n_tokens * (size_t)args->topk * ep_dtype_bytes((ep_dtype)args->idx_type);
}

ep_status cuda_fetch_routing(const void *topk_idx, size_t bytes, cudaStream_t stream, void **ret_copy)
{
    void *copy = malloc(bytes + 1);
    ep_status status = EP_OK;

    if (!copy)
        return ep_fail(EP_E_MEMORY, "routing: no memory for %zu bytes", bytes);
    if (bytes)
        status = cuda_status(cudaMemcpyAsync(copy, topk_idx, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
    if (status == EP_OK)
        status = cuda_status(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    if (status == EP_OK)
        *ret_copy = copy;
    else
        free(copy);
    return status;
}

ep_status cuda_explain_routing(const ep_comm *comm, const struct ep_routing_shape *shape, bool drop,
                               const void *topk_idx, int idx_type, cudaStream_t stream, const char *otherwise)
{
    size_t entries = (size_t)shape->n_tokens * (size_t)shape->topk;
    int32_t *index = malloc((entries + 1) * sizeof(*index));
    void *copy = NULL;
    int64_t n_dropped;
    ep_status status;

    if (!index)
        return ep_fail(EP_E_MEMORY, "routing: no memory");
    status = cuda_fetch_routing(topk_idx, entries * ep_dtype_bytes((ep_dtype)idx_type), stream, &copy);
    if (status == EP_OK)
        status = ep_routing_check(shape, copy, idx_type, index);
    if (status == EP_OK)
        status = ep_routing_drop_absent(comm, shape, drop, index, &n_dropped);
    if (status == EP_OK)
        status = ep_fail(EP_E_ROUTING, "%s", otherwise);
    free(copy);
    free(index);
    return status;
}

ep_status cuda_check_routing(struct cuda_comm *cuda, const char *call, const ep_plan_update_args *routing)
{
    EP_TRY(cuda_check_pointer(cuda, call, "topk_idx", routing->n_tokens ? routing->topk_idx : NULL));
    EP_TRY(cuda_check_pointer(cuda, call, "token_in_rank", routing->n_tokens ? routing->token_in_rank : NULL));
    return cuda_check_pointer(cuda, call, "tokens_per_expert", routing->tokens_per_expert);
}

ep_status cuda_routing_to_device(const struct cuda_call *call, const ep_plan *plan, struct cuda_block *ret_copy,
                                 ep_plan_update_args *routing)
{
    size_t bytes = routing_bytes(&plan->args);
    bool on_device = true;

    if (bytes && !plan->from_mask)
        EP_TRY(cuda_is_device_memory(call->cuda, routing->topk_idx, &on_device));
    if (on_device)
        return cuda_check_routing(call->cuda, "ep_plan_new", routing);
    if (call->capture)
        return ep_fail(
            EP_E_ARG, "ep_plan_new: topk_idx is host memory, and the stream is being captured: device memory is needed "
                      "in a capture");
    EP_TRY(cuda_pool_alloc(call->cuda, bytes, CUDA_BLOCK_OF_OPERATIONS, ret_copy));
    call->cuda->copied = true;
    CUDA_TRY(cudaMemcpyAsync(ret_copy->memory, routing->topk_idx, bytes, cudaMemcpyDefault, call->stream));
    routing->topk_idx = ret_copy->memory;
    return EP_OK;
}

static ep_status upload_plan(const struct cuda_call *call, ep_plan *plan);

ep_status cuda_plan_make_on_host(const struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *routing,
                                 bool renews)
{
    const void *from[] = {routing->topk_idx, routing->token_in_rank, routing->tokens_per_expert};
    ep_plan_args mine = plan->args;
    ep_plan_update_args copies;
    void *copy[3] = {NULL};
    ep_status status = EP_OK;

    mine.n_tokens = routing->n_tokens;
    mine.stream = NULL; /* the copies are complete */
    const size_t bytes[] = {routing_bytes(&mine), (size_t)mine.n_tokens * (size_t)plan->comm->nranks,
                            (size_t)mine.n_experts * sizeof(int32_t)};
    if (plan->from_mask)
        EP_TRY(cuda_check_routing(call->cuda, renews ? "ep_plan_update" : "ep_plan_new", routing));
    for (int i = 0; i < 3 && status == EP_OK; i++)
        if (from[i])
            status = cuda_fetch_routing(from[i], bytes[i], call->stream, &copy[i]);
    mine.topk_idx = copy[0];
    mine.token_in_rank = copy[1];
    mine.tokens_per_expert = copy[2];
    copies = cuda_routing_of(&mine);
    if (status == EP_OK)
        status = renews ? ep_group_plan_renew(plan, &copies) : ep_group_plan_open(plan, &mine);
    for (int i = 0; i < 3; i++)
        free(copy[i]);
    if (status != EP_OK || renews)
        return status;
    status = new_route(call->cuda, plan);
    /* Plans of fixed capacity are completed by their first operation. */
    if (status == EP_OK && ep_group_plan_of(plan)->complete)
        status = upload_plan(call, plan);
    if (status != EP_OK) {
        cuda_plan_free_device(call->cuda, cuda_plan_of(plan));
        ep_group_plan_close(plan);
    }
    return status;
}

/* The kernels handle tokens with experts on up to CUDA_MAX_REMOTE_NODES other nodes. */
static ep_status check_nodes(const ep_plan *plan)
{
    int nodes = plan->comm->nnodes;

    if (nodes - 1 <= CUDA_MAX_REMOTE_NODES || plan->args.topk <= CUDA_MAX_REMOTE_NODES)
        return EP_OK;
    return ep_fail(EP_E_UNSUPPORTED,
                   "ep_plan_new: topk is %d on %d nodes, but with the CUDA backend a token has experts on up to %d "
                   "other nodes",
                   plan->args.topk, nodes, CUDA_MAX_REMOTE_NODES);
}

static ep_status open_plan(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args)
{
    const ep_plan_update_args routing = cuda_routing_of(args);
    struct cuda_comm *cuda = call->cuda;

    if (call->capture && args->max_recv_tokens <= 0)
        return ep_fail(EP_E_STATE,
                       "ep_plan_new: the stream is being captured, and a plan made in a capture needs max_recv_tokens: "
                       "set it, or make the plan before");
    if (!cuda_crosses_nodes(cuda)) {
        if (!args->max_recv_tokens)
            cuda_reserve_stages(cuda, args);
        return cuda_plan_open_on_device(call, plan, args);
    }
    EP_TRY(check_nodes(plan));
    cuda_reserve_stages(cuda, args);
    if (call->capture)
        return cuda_nodes_plan_capture(call, plan, args);
    return cuda_plan_make_on_host(call, plan, &routing, false);
}

/* Ordered by the caller's stream. An operation, but for a plan of exact counts between nodes, which only hosts make. */
ep_status cuda_plan_open(ep_plan *plan, const ep_plan_args *args)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_call call;

    EP_TRY(cuda_call_begin(cuda, args->stream, !cuda_crosses_nodes(cuda) || args->max_recv_tokens > 0, &call));
    return cuda_call_end(&call, open_plan(&call, plan, args));
}

/* Queued operations may still use the plan's memory: the pool gives it to another plan only after them. */
void cuda_plan_close(ep_plan *plan)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_scope scope;

    if (cuda_scope_begin_uncaptured(cuda, &scope) == EP_OK) {
        cuda_plan_free_device(cuda, cuda_plan_of(plan));
        cuda_scope_end(&scope);
    }
    ep_group_plan_close(plan);
}

int32_t cuda_copy_entries(const struct ep_group_route *route, int token, struct cuda_entry *ret_entries)
{
    const struct ep_group_entry *from = route->entry + route->start[token];
    int32_t n = route->start[token + 1] - route->start[token];

    for (int32_t i = 0; i < n; i++)
        ret_entries[i] = (struct cuda_entry){.row = from[i].row, .local = from[i].local, .k = from[i].k};
    return n;
}

static void fill_counts(const struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_plan *image)
{
    struct cuda_counts *counts = (struct cuda_counts *)(uintptr_t)image->route.counts;
    const struct ep_group_plan *inner = plan->impl;

    for (int local = 0; local < cuda->group.nlocal; local++) {
        int rank = cuda->group.first + local;

        counts->rows_on[local] = inner->rows_on[rank];
    }
    counts->n_tokens = inner->n_tokens;
    counts->number = (uint32_t)inner->number;
    counts->generation = plan->comm->generation;
}

void cuda_plan_fill(const struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_plan *image)
{
    const struct ep_group_plan *inner = plan->impl;
    struct cuda_count to = cuda_count_of(plan, image);
    size_t n_local = (size_t)plan->info.n_local_experts;

    fill_counts(cuda, plan, image);
    for (int t = 0; t < inner->own.n_tokens; t++)
        to.count[t] = cuda_copy_entries(&inner->own, t, &to.entry[(size_t)t * (size_t)to.width]);
    memcpy(to.index, inner->own.index, (size_t)inner->own.n_tokens * (size_t)to.topk * sizeof(*to.index));
    for (size_t i = 0; i <= n_local; i++)
        image->expert_start[i] = (int32_t)inner->expert_start[i];
    memcpy(image->expert_exact, inner->recv_exact, n_local * sizeof(*image->expert_exact));
}

/* Uploads what the host knows, by one copy, since a second one would make plans slower. */
static ep_status upload(const struct cuda_call *call, const ep_plan *plan)
{
    int n = ep_group_plan_of(plan)->n_tokens;
    struct cuda_plan image = {.on_device = false};
    size_t bytes = 0, at = 0;
    ep_status status;
    char *memory;

    cuda_plan_lay_out(plan, n, NULL, &bytes, &image);
    memory = calloc(1, bytes);
    if (!memory)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the route of %d tokens", n);
    cuda_plan_lay_out(plan, n, memory, &at, &image);
    cuda_plan_fill(call->cuda, plan, &image);
    status = cuda_transfer(call->cuda, cuda_plan_of(plan)->block.memory, memory, bytes);
    free(memory);
    return status;
}

static ep_status upload_plan(const struct cuda_call *call, ep_plan *plan)
{
    struct cuda_plan *device = cuda_plan_of(plan);

    if (cuda_crosses_nodes(call->cuda) && !device->lists)
        EP_TRY(cuda_lists_make(call->cuda, plan));
    EP_TRY(upload(call, plan));
    device->uploaded = true;
    return EP_OK;
}

/* Gives the plan what its operations need on the device. */
static ep_status complete(const struct cuda_call *call, ep_plan *plan)
{
    struct cuda_comm *cuda = call->cuda;
    const struct cuda_plan *device = cuda_plan_of(plan);

    EP_TRY(ep_group_plan_complete(&cuda->group, plan));
    if (!device->uploaded) {
        /* Maps the staging that all ranks have reserved for it. */
        EP_TRY(cuda_map_new(cuda));
        EP_TRY(upload_plan(call, plan));
    }
    /* A captured operation must use the counts of later updates. */
    return call->capture && plan->args.max_recv_tokens > 0 ? cuda_nodes_plan_make_lists(cuda, plan, true) : EP_OK;
}

ep_status cuda_plan_ready(const struct cuda_call *call, ep_plan *plan, struct cuda_route *ret_route)
{
    struct cuda_plan *device = cuda_plan_of(plan);

    /* One that is `on_device` is complete, but may have been refused when it was renewed. */
    EP_TRY(device->on_device ? ep_group_plan_complete(&call->cuda->group, plan) : complete(call, plan));
    *ret_route = device->route;
    ret_route->n_tokens = ep_plan_tokens(plan, call->capture != 0);
    return EP_OK;
}

/* This rank's tokens that one rank or several ranks have rows of. */
static uint64_t count_tokens_on(const ep_plan *plan, int first, int n)
{
    const int32_t *tokens_per_rank = ((const struct ep_group_plan *)plan->impl)->tokens_per_rank;
    uint64_t tokens = 0;

    for (int rank = first; rank < first + n; rank++)
        tokens += (uint64_t)tokens_per_rank[rank];
    return tokens;
}

void cuda_plan_count(const ep_plan *plan, uint64_t row_bytes, bool reduced)
{
    const ep_plan_info *info = ep_plan_info_now(plan);
    const struct cuda_lists *lists = cuda_plan_of(plan)->lists;
    ep_stats stats = {.size = sizeof(stats)};

    if (lists) {
        stats.rows_self = lists->rows_self;
        stats.rows_node = lists->rows_node;
        stats.rows_forward = lists->rows_forward;
        stats.bytes_forward = stats.rows_forward * row_bytes;
        stats.rows_net = cuda_of(plan->comm)->net_rows;
        stats.bytes_net = cuda_of(plan->comm)->net_bytes;
    } else if (info->n_send >= 0) {
        /* Without statistics for a plan whose counts only the device has. */
        stats.rows_node = (uint64_t)info->n_wire;
        stats.rows_self = (uint64_t)(info->n_send - info->n_wire);
        if (reduced) {
            stats.rows_self = count_tokens_on(plan, plan->comm->rank, 1);
            stats.rows_node = count_tokens_on(plan, 0, plan->comm->nranks) - stats.rows_self;
        }
    }
    stats.bytes_node = stats.rows_node * row_bytes;
    stats.bytes_self = stats.rows_self * row_bytes;
    ep_comm_set_stats(plan->comm, &stats);
}

struct source {
    int32_t rank, token, unused[2];
};

/*
 * Dispatches rows of one vector that hold their own rank and token, counted from 1; padding rows stay 0. `rows`: those
 * sent, then those received. The blocks are the caller's to free.
 */
static ep_status dispatch_sources(struct cuda_comm *cuda, ep_plan *plan, struct source *rows, struct cuda_block *mine,
                                  struct cuda_block *all)
{
    size_t n = (size_t)plan->info.n_tokens, out = (size_t)plan->full.out_rows, bytes = sizeof(*rows);
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;

    for (size_t t = 0; t < n; t++)
        rows[t] = (struct source){.rank = plan->comm->rank + 1, .token = (int32_t)t + 1};
    EP_TRY(cuda_pool_alloc(cuda, (n + 1) * bytes, CUDA_BLOCK_ANY, mine));
    EP_TRY(cuda_pool_alloc(cuda, (out + 1) * bytes, CUDA_BLOCK_ANY, all));
    CUDA_TRY(cudaMemcpyAsync(mine->memory, rows, n * bytes, cudaMemcpyDefault, cuda->default_stream));
    CUDA_TRY(cudaMemsetAsync(all->memory, 0, (out + 1) * bytes, cuda->default_stream));
    args.x = mine->memory;
    args.dtype = EP_BF16;
    args.hidden = (int32_t)(bytes / sizeof(uint16_t));
    args.recv_x = all->memory;
    args.out_rows = (int64_t)out;
    EP_TRY(cuda_dispatch(plan, &args, NULL));
    EP_TRY(cuda_stream_sync(plan->comm, NULL));
    CUDA_TRY(cudaMemcpyAsync(rows, all->memory, out * bytes, cudaMemcpyDefault, cuda->default_stream));
    CUDA_TRY(cudaStreamSynchronize(cuda->default_stream));
    return EP_OK;
}

ep_status cuda_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    size_t n = (size_t)plan->info.n_tokens, out = (size_t)plan->full.out_rows;
    struct source *rows = calloc((n > out ? n : out) + 1, sizeof(*rows));
    struct cuda_block mine = {.memory = NULL}, all = {.memory = NULL};
    struct cuda_scope scope;
    ep_status status;

    if (!rows)
        return ep_fail(EP_E_MEMORY, "ep_plan_get_sources: no memory for %zu rows", out);
    status = cuda_scope_begin(cuda, &scope);
    if (status == EP_OK) {
        status = dispatch_sources(cuda, plan, rows, &mine, &all);
        cuda_pool_free(cuda, &mine);
        cuda_pool_free(cuda, &all);
        cuda_scope_end(&scope);
    }
    for (int64_t row = 0; status == EP_OK && row < plan->full.n_recv; row++) {
        if (ret_rank)
            ret_rank[row] = rows[row].rank - 1;
        if (ret_token)
            ret_token[row] = rows[row].token - 1;
    }
    free(rows);
    return status;
}
