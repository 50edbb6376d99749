/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plans of the CUDA backend. In the rank layout the device counts and numbers the rows. Only the counts go to the host,
 * which exchanges them with its peers through the control plane; the index of a row is its number plus one base per
 * destination. In the expanded layout, and in both between nodes, the host gets the routing and uploads the routes.
 */
#include "backend/cuda/lists.h"
#include "backend/cuda/proxy.h"

#include "core/routing.h"

#include <stdlib.h>
#include <string.h>

static size_t align16(size_t bytes)
{
    return (bytes + 15) / 16 * 16;
}

static bool is_made_on_host(const ep_plan *plan)
{
    return plan->args.flags & EP_PLAN_EXPANDED || plan->comm->nnodes > 1;
}

/* Within a node the counts for ep_plan_get_metadata() are few, and are uploaded with those for the operations. */
static size_t metadata_bytes(const ep_plan *plan)
{
    return plan->comm->nnodes == 1 ? align16(cuda_metadata_counts_bytes(plan)) : 0;
}

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

/* Memory of a route: entries, counts, indices, rows of the counting blocks, and counts of the plan. */
static ep_status new_route(struct cuda_comm *cuda, ep_plan *plan, int32_t **ret_block_rows)
{
    struct cuda_route route = cuda_route_shape(plan);
    struct ep_group_plan *inner = plan->impl;
    bool expanded = route.expanded;
    size_t n = (size_t)plan->args.n_tokens, topk = (size_t)plan->args.topk, nranks = (size_t)plan->comm->nranks;
    size_t width = (size_t)route.width;
    size_t entries = align16(n * width * sizeof(struct cuda_entry)), counts = align16(n * sizeof(int32_t));
    size_t indices = align16(n * topk * sizeof(int32_t)), blocks = n / CUDA_COUNT_TOKENS + 1;
    size_t rows = align16(blocks * nranks * sizeof(int32_t));
    size_t starts = expanded ? align16(((size_t)plan->args.n_experts / nranks + 1) * sizeof(int32_t)) : 0;
    struct cuda_plan *device = calloc(1, sizeof(*device));
    char *memory;
    ep_status status;

    if (!device)
        return ep_fail(EP_E_MEMORY, "ep_plan_new: no memory");
    status = cuda_pool_alloc(cuda,
                             entries + counts + indices + rows + 2 * starts + align16(sizeof(struct cuda_counts)) +
                                 metadata_bytes(plan),
                             &device->block);
    if (status != EP_OK) {
        free(device);
        return status;
    }
    inner->device = device;
    memory = device->block.memory;
    route.entry = (const struct cuda_entry *)memory;
    route.count = (const int32_t *)(memory + entries);
    route.index = (const int32_t *)(memory + entries + counts);
    device->route = route;
    *ret_block_rows = (int32_t *)(memory + entries + counts + indices);
    device->route.block_rows = is_made_on_host(plan) ? NULL : *ret_block_rows;
    device->expert_start = (int32_t *)(memory + entries + counts + indices + rows);
    device->expert_exact = (int32_t *)(memory + entries + counts + indices + rows + starts);
    device->route.counts = (const struct cuda_counts *)(memory + entries + counts + indices + rows + 2 * starts);
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

ep_status cuda_explain_routing(const struct ep_routing_shape *shape, const void *topk_idx, int idx_type,
                               cudaStream_t stream, const char *otherwise)
{
    size_t entries = (size_t)shape->n_tokens * (size_t)shape->topk;
    int32_t *index = malloc((entries + 1) * sizeof(*index));
    void *copy = NULL;
    ep_status status;

    if (!index)
        return ep_fail(EP_E_MEMORY, "routing: no memory");
    status = cuda_fetch_routing(topk_idx, entries * ep_dtype_bytes((ep_dtype)idx_type), stream, &copy);
    if (status == EP_OK)
        status = ep_routing_check(shape, copy, idx_type, index);
    if (status == EP_OK)
        status = ep_fail(EP_E_ROUTING, "%s", otherwise);
    free(copy);
    free(index);
    return status;
}

/* The kernel reads device memory: copies a routing that is in host memory to the device first. */
static ep_status copy_to_device(struct cuda_comm *cuda, const ep_plan_args *args, const void *topk_idx,
                                struct cuda_block *ret_copy, const void **ret_routing)
{
    struct cudaPointerAttributes attributes;

    *ret_routing = topk_idx;
    if (!routing_bytes(args))
        return EP_OK;
    CUDA_TRY(cudaPointerGetAttributes(&attributes, topk_idx));
    if (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged)
        return cuda_check_pointer(cuda, "ep_plan_new", "topk_idx", topk_idx);
    EP_TRY(cuda_pool_alloc(cuda, routing_bytes(args), ret_copy));
    *ret_routing = ret_copy->memory;
    CUDA_TRY(cudaMemcpyAsync(ret_copy->memory, topk_idx, routing_bytes(args), cudaMemcpyDefault,
                             cuda_stream_of(cuda, args->stream)));
    return EP_OK;
}

static ep_status fail_mask(void)
{
    return ep_fail(EP_E_ROUTING, "routing: tokens_per_expert does not match token_in_rank: a count below 0 "
                                 "or above the tokens for its rank, or too few for a rank");
}

static ep_status count(struct cuda_comm *cuda, ep_plan *plan, const ep_plan_args *args, const void *routing,
                       int32_t *block_rows)
{
    const struct cuda_route *route = &cuda_plan_of(plan)->route;
    cudaStream_t stream = cuda_stream_of(cuda, plan->args.stream);
    struct ep_routing_shape shape =
        ep_routing_shape_of(plan->comm, plan->args.n_tokens, plan->args.topk, plan->args.n_experts);
    struct ep_group_plan *inner = plan->impl;
    size_t nranks = (size_t)plan->comm->nranks, experts = (size_t)plan->args.n_experts;
    struct cuda_count c = {
        .topk_idx = routing,
        .mask = plan->from_mask ? args->token_in_rank : NULL,
        .mask_experts = plan->from_mask ? args->tokens_per_expert : NULL,
        .index = (int32_t *)(uintptr_t)route->index,
        .entry = (struct cuda_entry *)(uintptr_t)route->entry,
        .count = (int32_t *)(uintptr_t)route->count,
        .block_rows = block_rows,
        .per_expert = cuda->scratch,
        .blocks_done = (uint32_t *)cuda->scratch + EP_MAX_EXPERTS,
        .bad = (uint32_t *)cuda->scratch + EP_MAX_EXPERTS + 1,
        .totals = cuda->totals_device,
        .report = cuda->report_device,
        .number = ++cuda->counted,
        .idx64 = route->idx64,
        .n_tokens = route->n_tokens,
        .topk = route->topk,
        .n_experts = plan->args.n_experts,
        .nranks = plan->comm->nranks,
        .width = route->width,
    };

    CUDA_TRY(cuda_launch_count(&c, stream));
    EP_TRY(cuda_wait_counted(cuda, stream));
    if (*(volatile uint64_t *)&cuda->report->bad)
        return plan->from_mask ? fail_mask()
                               : cuda_explain_routing(&shape, routing, plan->args.idx_type, stream,
                                                      "routing: topk_idx changed while it was checked");
    memcpy(inner->tokens_per_rank, cuda->totals, nranks * sizeof(int32_t));
    memcpy(inner->tokens_per_expert, cuda->totals + nranks, experts * sizeof(int32_t));
    return EP_OK;
}

/* Finds or makes the device memory that the counting kernel reads. */
static ep_status find_routing(struct cuda_comm *cuda, const ep_plan *plan, const ep_plan_args *args,
                              struct cuda_block *ret_copy, const void **ret_routing)
{
    *ret_routing = NULL;
    if (!plan->from_mask)
        return copy_to_device(cuda, &plan->args, args->topk_idx, ret_copy, ret_routing);
    EP_TRY(cuda_check_pointer(cuda, "ep_plan_new", "token_in_rank", args->n_tokens ? args->token_in_rank : NULL));
    return cuda_check_pointer(cuda, "ep_plan_new", "tokens_per_expert", args->tokens_per_expert);
}

static ep_status open_rank_layout(struct cuda_comm *cuda, ep_plan *plan, const ep_plan_args *args)
{
    struct cuda_block copy = {.memory = NULL};
    struct cuda_plan *device;
    struct ep_group_plan *inner;
    const void *routing;
    int32_t *block_rows;
    ep_status status;

    EP_TRY(ep_group_plan_prepare(plan, false));
    inner = plan->impl;
    status = new_route(cuda, plan, &block_rows);
    if (status == EP_OK)
        status = find_routing(cuda, plan, args, &copy, &routing);
    if (status == EP_OK)
        status = count(cuda, plan, args, routing, block_rows);
    cuda_pool_free(cuda, &copy);
    if (status != EP_OK) {
        cuda_plan_free_device(cuda, plan);
        ep_group_plan_discard(plan);
        return status;
    }
    device = inner->device;
    status = ep_group_plan_publish(plan);
    if (status == EP_OK)
        return EP_OK;
    cuda_pool_free(cuda, &device->block);
    free(device);
    return status;
}

static ep_status upload_plan(const struct cuda_call *call, ep_plan *plan);

/* Plans of fixed capacity are completed by their first operation. */
static ep_status upload_if_complete(const struct cuda_call *call, ep_plan *plan)
{
    ep_status status;

    if (!((struct ep_group_plan *)plan->impl)->complete)
        return EP_OK;
    status = upload_plan(call, plan);
    if (status == EP_OK)
        return EP_OK;
    cuda_plan_free_device(call->cuda, plan);
    ep_group_plan_close(plan);
    return status;
}

/* A copy on the host of a mask and its counts. */
static ep_status fetch_mask(struct cuda_comm *cuda, const ep_plan *plan, const ep_plan_args *args, ep_plan_args *mine,
                            void **ret_mask, void **ret_counts)
{
    cudaStream_t stream = cuda_stream_of(cuda, args->stream);
    size_t mask = (size_t)args->n_tokens * (size_t)plan->comm->nranks;

    EP_TRY(cuda_check_pointer(cuda, "ep_plan_new", "token_in_rank", args->n_tokens ? args->token_in_rank : NULL));
    EP_TRY(cuda_check_pointer(cuda, "ep_plan_new", "tokens_per_expert", args->tokens_per_expert));
    EP_TRY(cuda_fetch_routing(args->token_in_rank, mask, stream, ret_mask));
    EP_TRY(cuda_fetch_routing(args->tokens_per_expert, (size_t)plan->args.n_experts * sizeof(int32_t), stream,
                              ret_counts));
    mine->token_in_rank = *ret_mask;
    mine->tokens_per_expert = *ret_counts;
    return EP_OK;
}

static ep_status open_on_host(const struct cuda_call *call, ep_plan *plan, const ep_plan_args *args)
{
    struct cuda_comm *cuda = call->cuda;
    ep_plan_args mine = *args;
    void *copy = NULL, *counts = NULL;
    int32_t *block_rows;
    ep_status status;

    if (plan->from_mask) {
        status = fetch_mask(cuda, plan, args, &mine, &copy, &counts);
    } else {
        status = cuda_fetch_routing(args->topk_idx, routing_bytes(args), cuda_stream_of(cuda, args->stream), &copy);
        mine.topk_idx = copy;
    }
    mine.stream = NULL; /* the copy is complete */
    if (status == EP_OK)
        status = ep_group_plan_open(plan, &mine);
    free(copy);
    free(counts);
    if (status != EP_OK)
        return status;
    status = new_route(cuda, plan, &block_rows);
    if (status == EP_OK)
        return upload_if_complete(call, plan);
    ep_group_plan_close(plan);
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

/* Otherwise the devices count, and the hosts do not synchronise. */
static bool is_counted_by_hosts(const struct cuda_comm *cuda, const ep_plan_args *args)
{
    return args->max_recv_tokens <= 0 || cuda_crosses_nodes(cuda);
}

static ep_status open_plan(const struct cuda_call *call, ep_plan *plan, const ep_plan_args *args, bool *ret_queued)
{
    struct cuda_comm *cuda = call->cuda;

    if (!is_counted_by_hosts(cuda, args))
        return cuda_plan_open_fixed(call, plan, args, ret_queued);
    if (call->capture && args->max_recv_tokens <= 0)
        return ep_fail(EP_E_STATE,
                       "ep_plan_new: the stream is being captured, and a plan made in a capture needs max_recv_tokens: "
                       "set it, or make the plan before");
    EP_TRY(check_nodes(plan));
    cuda_reserve_stages(cuda, args);
    if (call->capture)
        return cuda_nodes_plan_capture(call, plan, args, ret_queued);
    return is_made_on_host(plan) ? open_on_host(call, plan, args) : open_rank_layout(cuda, plan, args);
}

/* Ordered by the caller's stream. A plan of fixed capacity is an operation; another one waits for no operation. */
ep_status cuda_plan_open(ep_plan *plan, const ep_plan_args *args)
{
    struct cuda_call call;
    bool queued = false;
    ep_status status;

    EP_TRY(cuda_call_begin(cuda_of(plan->comm), args->stream, args->max_recv_tokens > 0, &call));
    status = open_plan(&call, plan, args, &queued);
    return cuda_call_end(&call, status, queued);
}

/* Queued operations may still use the plan's memory: the pool gives it to another plan only after them. */
void cuda_plan_close(ep_plan *plan)
{
    struct cuda_comm *cuda = cuda_of(plan->comm);
    struct cuda_scope scope;

    if (cuda_scope_begin_uncaptured(cuda, &scope) == EP_OK) {
        cuda_plan_free_device(cuda, plan);
        cuda_scope_end_uncaptured(&scope);
    }
    ep_group_plan_close(plan);
}

/* Uploads the routes that the host has made, in the format of the kernels. */
static ep_status upload_route(struct cuda_comm *cuda, const ep_plan *plan)
{
    const struct ep_group_route *own = &((struct ep_group_plan *)plan->impl)->own;
    struct cuda_route *route = &cuda_plan_of(plan)->route;
    size_t n = (size_t)own->n_tokens, width = (size_t)route->width, topk = (size_t)route->topk;
    struct cuda_entry *entries = calloc(n * width + 1, sizeof(*entries));
    int32_t *counts = calloc(n + 1, sizeof(*counts));
    ep_status status = EP_E_MEMORY;

    if (!entries || !counts) {
        ep_fail(status, "plan: no memory for the route of %zu tokens", n);
        goto free_all;
    }
    for (size_t t = 0; t < n; t++) {
        counts[t] = own->start[t + 1] - own->start[t];
        for (int32_t i = 0; i < counts[t]; i++) {
            const struct ep_group_entry *from = &own->entry[own->start[t] + i];

            entries[t * width + (size_t)i] = (struct cuda_entry){.row = from->row, .local = from->local, .k = from->k};
        }
    }
    const struct cuda_transfer parts[] = {
        {(void *)(uintptr_t)route->entry, entries, n * width * sizeof(*entries)},
        {(void *)(uintptr_t)route->count, counts, n * sizeof(*counts)},
        {(void *)(uintptr_t)route->index, own->index, n * topk * sizeof(int32_t)},
    };
    status = cuda_transfer(cuda, parts, sizeof(parts) / sizeof(parts[0]));
free_all:
    free(entries);
    free(counts);
    return status;
}

static void fill_counts(const struct cuda_comm *cuda, const ep_plan *plan, struct cuda_counts *ret_counts)
{
    const struct ep_group_plan *inner = plan->impl;

    for (int local = 0; local < cuda->group.nlocal; local++) {
        int rank = cuda->group.first + local;

        ret_counts->base[local] = is_made_on_host(plan) ? 0 : inner->first_row[rank];
        ret_counts->rows_on[local] = inner->rows_on[rank];
        /* Used on one node only. */
        ret_counts->first[local + 1] = inner->recv_from_rank[local + 1];
    }
    ret_counts->n_tokens = plan->args.n_tokens;
}

/*
 * Copies the counts, which are few: then the call returns before the copy is complete, and the operations are ordered
 * after it by their streams. A captured operation is not, and its copy would read host memory when the graph runs.
 */
static ep_status copy_counts(const struct cuda_call *call, const ep_plan *plan, char *memory, const char *counts,
                             size_t bytes)
{
    if (call->capture || is_made_on_host(plan)) {
        EP_TRY(cuda_transfer(call->cuda, &(struct cuda_transfer){memory, counts, bytes}, 1));
        cuda_plan_of(plan)->waited = true;
        return EP_OK;
    }
    call->cuda->copied = true;
    return cuda_status(cudaMemcpyAsync(memory, counts, bytes, cudaMemcpyHostToDevice, call->stream), "cudaMemcpyAsync");
}

/* One copy for the counts of the operations and of the metadata: a second one would make plans slower. */
static ep_status upload_counts(const struct cuda_call *call, const ep_plan *plan)
{
    struct cuda_plan *device = cuda_plan_of(plan);
    size_t at = align16(sizeof(struct cuda_counts)), metadata = metadata_bytes(plan), bytes = at + metadata;
    char *counts = calloc(1, bytes), *memory = (char *)(uintptr_t)device->route.counts;
    ep_status status;

    if (!counts)
        return ep_fail(EP_E_MEMORY, "plan: no memory for its counts");
    fill_counts(call->cuda, plan, (struct cuda_counts *)(void *)counts);
    if (metadata)
        cuda_metadata_counts_write(plan, (int64_t *)(void *)(counts + at));
    status = copy_counts(call, plan, memory, counts, bytes);
    free(counts);
    if (status == EP_OK && metadata)
        device->exact_counts = (const int64_t *)(void *)(memory + at);
    return status;
}

static ep_status upload_experts(struct cuda_comm *cuda, const ep_plan *plan)
{
    const struct ep_group_plan *inner = plan->impl;
    const struct cuda_plan *device = inner->device;
    size_t n_local = (size_t)plan->info.n_local_experts;
    int32_t start[EP_MAX_EXPERTS + 1];

    for (size_t i = 0; i <= n_local; i++)
        start[i] = (int32_t)inner->expert_start[i];
    const struct cuda_transfer parts[] = {
        {device->expert_start, start, (n_local + 1) * sizeof(*start)},
        {device->expert_exact, inner->recv_exact, n_local * sizeof(*start)},
    };
    return cuda_transfer(cuda, parts, 2);
}

static ep_status upload_plan(const struct cuda_call *call, ep_plan *plan)
{
    struct cuda_comm *cuda = call->cuda;
    struct cuda_plan *device = cuda_plan_of(plan);

    if (is_made_on_host(plan))
        EP_TRY(upload_route(cuda, plan));
    if (device->route.expanded)
        EP_TRY(upload_experts(cuda, plan));
    if (cuda_crosses_nodes(cuda) && !device->lists)
        EP_TRY(cuda_lists_make(cuda, plan));
    EP_TRY(upload_counts(call, plan));
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
    } else if (call->capture && !device->waited) {
        EP_TRY(upload_counts(call, plan)); /* the same again: no kernel reads anything else meanwhile */
    }
    /* A captured operation must use the counts of later updates. */
    return call->capture && plan->args.max_recv_tokens > 0 ? cuda_nodes_plan_make_updatable(cuda, plan) : EP_OK;
}

ep_status cuda_plan_ready(const struct cuda_call *call, ep_plan *plan, struct cuda_route *ret_route)
{
    struct cuda_plan *device = cuda_plan_of(plan);

    if (!device->fixed)
        EP_TRY(complete(call, plan));
    *ret_route = device->route;
    ret_route->n_tokens = ep_plan_tokens(plan, call->capture != 0);
    return EP_OK;
}

void cuda_plan_count(const ep_plan *plan, uint64_t row_bytes)
{
    const ep_plan_info *info = ep_plan_info_now(plan);
    ep_stats stats = {.size = sizeof(stats)};

    if (cuda_plan_of(plan)->lists) {
        cuda_lists_count(plan, row_bytes, &stats);
    } else if (info->n_send >= 0) {
        /* Without statistics for a plan whose counts only the device has. */
        stats.rows_node = (uint64_t)info->n_wire;
        stats.rows_self = (uint64_t)(info->n_send - info->n_wire);
    }
    stats.bytes_node = stats.rows_node * row_bytes;
    stats.bytes_self = stats.rows_self * row_bytes;
    ep_comm_set_stats(plan->comm, &stats);
}

ep_status cuda_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    /* Dispatches rows of one vector that hold their own rank and token, counted from 1; padding rows stay 0. */
    enum { HIDDEN = 8 };
    struct source {
        int32_t rank, token, unused[2];
    };
    struct cuda_comm *cuda = cuda_of(plan->comm);
    size_t n = (size_t)plan->info.n_tokens, out = (size_t)plan->full.out_rows;
    struct source *rows = calloc((n > out ? n : out) + 1, sizeof(*rows));
    struct cuda_block mine = {.memory = NULL}, all = {.memory = NULL};
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    struct cuda_scope scope;
    ep_status status;

    if (!rows)
        return ep_fail(EP_E_MEMORY, "ep_plan_get_sources: no memory for %zu rows", out);
    status = cuda_scope_begin(cuda, &scope);
    if (status != EP_OK)
        goto free_rows;
    for (size_t t = 0; t < n; t++)
        rows[t] = (struct source){.rank = plan->comm->rank + 1, .token = (int32_t)t + 1};
    status = cuda_pool_alloc(cuda, (n + 1) * sizeof(*rows), &mine);
    if (status == EP_OK)
        status = cuda_pool_alloc(cuda, (out + 1) * sizeof(*rows), &all);
    if (status == EP_OK)
        status =
            cuda_status(cudaMemcpyAsync(mine.memory, rows, n * sizeof(*rows), cudaMemcpyDefault, cuda->default_stream),
                        "cudaMemcpyAsync");
    if (status == EP_OK)
        status = cuda_status(cudaMemsetAsync(all.memory, 0, (out + 1) * sizeof(*rows), cuda->default_stream),
                             "cudaMemsetAsync");
    args.x = mine.memory;
    args.dtype = EP_BF16;
    args.hidden = HIDDEN;
    args.recv_x = all.memory;
    args.out_rows = (int64_t)out;
    if (status == EP_OK)
        status = cuda_dispatch(plan, &args, NULL);
    if (status == EP_OK)
        status = cuda_stream_sync(plan->comm, NULL);
    if (status == EP_OK)
        status =
            cuda_status(cudaMemcpyAsync(rows, all.memory, out * sizeof(*rows), cudaMemcpyDefault, cuda->default_stream),
                        "cudaMemcpyAsync");
    if (status == EP_OK)
        status = cuda_status(cudaStreamSynchronize(cuda->default_stream), "cudaStreamSynchronize");
    for (int64_t row = 0; status == EP_OK && row < plan->full.n_recv; row++) {
        if (ret_rank)
            ret_rank[row] = rows[row].rank - 1;
        if (ret_token)
            ret_token[row] = rows[row].token - 1;
    }
    cuda_pool_free(cuda, &mine);
    cuda_pool_free(cuda, &all);
    cuda_scope_end(&scope);
free_rows:
    free(rows);
    return status;
}
