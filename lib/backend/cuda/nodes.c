/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Operations between nodes. The host makes the routes, as for the host backend. The lists of a plan hold the tokens of
 * this rank for each node, and the rows on this node of its rail peers' tokens.
 */
#include "backend/cuda/plan.h"

#include <stdlib.h>
#include <string.h>

/* Blocks per SM, of the SMs that an operation may use: they wait for memory across PCIe. */
#define BLOCKS_PER_SM 4

static struct cuda_lists *lists_of(const ep_plan *plan)
{
    return cuda_plan_of(plan)->lists;
}

/* --- the lists of a plan, made on the host ----------------------------------------------------------------------- */

void cuda_lists_lay_out(const ep_plan *plan, size_t own, size_t rails, size_t n, void *memory, size_t *at,
                        struct cuda_list_memory *l)
{
    size_t nnodes = (size_t)plan->comm->nnodes, topk = (size_t)plan->args.topk, word = sizeof(int32_t);
    size_t width = (size_t)cuda_plan_of(plan)->route.width;

    l->net = cuda_carve(memory, at, nnodes, sizeof(*l->net));
    l->rail = cuda_carve(memory, at, nnodes, sizeof(*l->rail));
    l->token = cuda_carve(memory, at, own, word);
    l->net_units = cuda_carve(memory, at, own + nnodes, word);
    l->rail_units = cuda_carve(memory, at, rails + nnodes, word);
    l->rail_count = cuda_carve(memory, at, rails, word);
    l->rail_index = cuda_carve(memory, at, rails * topk, word);
    l->rail_entry = cuda_carve(memory, at, rails * width, sizeof(*l->rail_entry));
    l->remote_count = cuda_carve(memory, at, n, word);
    l->remote = cuda_carve(memory, at, n * (size_t)cuda_remote_width(plan), sizeof(*l->remote));
}

void cuda_lists_point_to(const ep_plan *plan, const struct cuda_list_memory *host,
                         const struct cuda_list_memory *device, struct cuda_lists *lists)
{
    lists->net.rail = host->net;
    lists->net.rail_device = device->net;
    lists->net.units = host->net_units;
    lists->rails.rail = host->rail;
    lists->rails.rail_device = device->rail;
    lists->rails.units = host->rail_units;
    lists->device = *device;
    lists->route = (struct cuda_rail_route){.entry = device->rail_entry,
                                            .count = device->rail_count,
                                            .index = device->rail_index,
                                            .width = cuda_plan_of(plan)->route.width};
}

/* Number of rows of this rank's token on `node`. */
static int rows_there(const ep_plan *plan, int token, int node)
{
    const int32_t *index =
        ((const struct ep_group_plan *)plan->impl)->own.index + (size_t)token * (size_t)plan->args.topk;
    int per_rank = plan->info.n_local_experts, per_node = plan->comm->ranks_per_node, n = 0;
    uint64_t ranks = 0;

    for (int k = 0; k < plan->args.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / per_rank;

        if (rank < 0 || rank / per_node != node)
            continue;
        ranks |= UINT64_C(1) << rank % per_node;
        n++;
    }
    return plan->args.flags & EP_PLAN_EXPANDED ? n : __builtin_popcountll(ranks);
}

/* Units of the sum of this many rows. */
static int units_of(const ep_plan *plan, int rows)
{
    return rows == 1 || plan->comm->config.partial_type == EP_BF16 ? 1 : 2;
}

static void fill_own(const ep_plan *plan, const struct cuda_list_memory *l, struct cuda_lists *lists)
{
    const struct ep_group_plan *inner = plan->impl;
    int n = 0, width = cuda_remote_width(plan);

    memset(l->remote_count, 0, (size_t)inner->n_tokens * sizeof(int32_t));
    /* For each token in ascending order of nodes. */
    for (int node = 0; node < plan->comm->nnodes; node++) {
        l->net[node] = (struct cuda_node_range){n, inner->n_net_tokens[node]};
        l->net_units[n + node] = 0;
        for (int i = 0; i < inner->n_net_tokens[node]; i++, n++) {
            int token = inner->net_tokens[node][i];

            l->token[n] = token;
            l->net_units[n + node + 1] = l->net_units[n + node] + units_of(plan, rows_there(plan, token, node));
            l->remote[token * width + l->remote_count[token]++] = (struct cuda_remote_term){node, n};
        }
    }
    for (int64_t i = 0; i < inner->own.n_entries; i++)
        (*(inner->own.entry[i].local == plan->comm->rank % plan->comm->ranks_per_node ? &lists->rows_self
                                                                                      : &lists->rows_node))++;
}

static void fill_rails(const ep_plan *plan, const struct cuda_list_memory *l, struct cuda_lists *lists)
{
    const struct ep_group_plan *inner = plan->impl;
    size_t topk = (size_t)plan->args.topk, width = (size_t)cuda_plan_of(plan)->route.width;
    int n = 0;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        const struct ep_group_route *route = &inner->rail[node];

        lists->rows_forward += (uint64_t)route->n_entries;
        l->rail[node] = (struct cuda_node_range){n, route->n_tokens};
        l->rail_units[n + node] = 0;
        if (route->n_tokens)
            memcpy(l->rail_index + (size_t)n * topk, route->index, (size_t)route->n_tokens * topk * sizeof(int32_t));
        for (int i = 0; i < route->n_tokens; i++, n++) {
            l->rail_count[n] = cuda_copy_entries(route, i, &l->rail_entry[(size_t)n * width]);
            l->rail_units[n + node + 1] = l->rail_units[n + node] + units_of(plan, l->rail_count[n]);
        }
    }
}

void cuda_lists_fill(const ep_plan *plan, const struct cuda_list_memory *l, struct cuda_lists *lists)
{
    fill_own(plan, l, lists);
    fill_rails(plan, l, lists);
}

void cuda_lists_free(struct cuda_comm *cuda, struct cuda_lists *lists)
{
    if (!lists)
        return;
    cuda_pool_free(cuda, &lists->block);
    if (lists->info)
        lists->info->used = false;
    free(lists->update);
    free(lists->copy);
    free(lists);
}

/* Counts the tokens. Indices in the lists have 32 bits, and the sum of a token takes two units at most. */
static ep_status count_tokens(const ep_plan *plan, size_t *ret_own, size_t *ret_rails)
{
    const struct ep_group_plan *inner = plan->impl;
    int64_t own = 0, rails = 0, entries = 0;

    for (int node = 0; node < plan->comm->nnodes; node++) {
        own += inner->n_net_tokens[node];
        rails += inner->rail[node].n_tokens;
        entries += inner->rail[node].n_entries;
    }
    *ret_own = (size_t)own;
    *ret_rails = (size_t)rails;
    if (own < INT32_MAX / 2 && rails < INT32_MAX / 2 && entries < INT32_MAX)
        return EP_OK;
    return ep_fail(EP_E_UNSUPPORTED,
                   "plan: rank %d sends %lld tokens to other nodes and places %lld of theirs in %lld rows; "
                   "the CUDA backend supports %d tokens and %d rows",
                   plan->comm->rank, (long long)own, (long long)rails, (long long)entries, INT32_MAX / 2, INT32_MAX);
}

static ep_status make_lists(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_lists *lists)
{
    size_t own, rails, n = (size_t)ep_group_plan_of(plan)->n_tokens, bytes = 0, at[2] = {0};
    struct cuda_list_memory host, device;

    EP_TRY(count_tokens(plan, &own, &rails));
    cuda_lists_lay_out(plan, own, rails, n, NULL, &bytes, &host);
    lists->copy = malloc(bytes);
    if (!lists->copy)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the routes between nodes");
    cuda_lists_lay_out(plan, own, rails, n, lists->copy, &at[0], &host);
    cuda_lists_fill(plan, &host, lists);
    EP_TRY(cuda_pool_alloc(cuda, bytes, CUDA_BLOCK_ANY, &lists->block));
    cuda_lists_lay_out(plan, own, rails, n, lists->block.memory, &at[1], &device);
    cuda_lists_point_to(plan, &host, &device, lists);
    return cuda_transfer(cuda, lists->block.memory, lists->copy, bytes);
}

ep_status cuda_lists_make(struct cuda_comm *cuda, ep_plan *plan)
{
    struct cuda_lists *lists = calloc(1, sizeof(*lists));
    ep_status status;

    if (!lists)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the routes between nodes");
    status = make_lists(cuda, plan, lists);
    /* If this fails, the plan's next operation tries again. */
    if (status == EP_OK)
        cuda_plan_of(plan)->lists = lists;
    else
        cuda_lists_free(cuda, lists);
    return status;
}

/* --- operations -------------------------------------------------------------------------------------------------- */

ep_status cuda_nodes_dispatch(struct cuda_call *call, ep_plan *plan, const struct cuda_dispatch *own, int weight_words)
{
    struct cuda_comm *cuda = call->cuda;
    const struct cuda_lists *lists = lists_of(plan);
    size_t token_bytes = (size_t)own->row_bytes + ((size_t)own->scale_words + (size_t)weight_words) * 4;
    const struct cuda_net_op_params params = {.name = "ep_dispatch",
                                              .phase = EP_GROUP_DISPATCH_MOVE,
                                              .desc = own->desc.words,
                                              .plan = ep_group_plan_of(plan)->number,
                                              .out = &lists->net,
                                              .in = &lists->rails,
                                              .tokens = cuda_net_chunk_tokens(cuda, token_bytes),
                                              .token_bytes = token_bytes};
    struct cuda_nodes_dispatch place = {.own = *own, .meta = {own->scale_words, weight_words}};
    struct cuda_pack pack = {.waits = own->waits,
                             .counts = own->route.counts,
                             .n_tokens = own->route.n_tokens,
                             .token = lists->device.token,
                             .x = own->x,
                             .scales = own->scales,
                             .weights = own->weights,
                             .scale_stride_token = own->scale_stride_token,
                             .scale_stride_block = own->scale_stride_block,
                             .row_bytes = own->row_bytes,
                             .meta = place.meta};
    struct cuda_net_op *op;

    EP_TRY(cuda_net_op_prepare(call, &params, &pack.op, &pack.out, &place.in, &op));
    place.op = pack.op;
    place.rail = lists->route;
    pack.blocks = place.blocks = cuda->sms * BLOCKS_PER_SM;
    EP_TRY(cuda_net_op_end_launch(cuda, op, cuda_status(cuda_launch_pack(&pack, call->stream), "pack kernel")));
    /* After a failure from here on the peers must be notified: cuda_call_end() does that. */
    call->queued = true;
    return cuda_status(cuda_launch_nodes_dispatch(&place, call->stream), "dispatch kernel");
}

ep_status cuda_nodes_combine(struct cuda_call *call, ep_plan *plan, const struct cuda_combine *own)
{
    struct cuda_comm *cuda = call->cuda;
    const struct cuda_lists *lists = lists_of(plan);
    int weight_words = own->out_weights ? plan->args.topk : 0;
    bool by_choice = own->by_choice; /* each token sends one row of bf16 */
    size_t units = by_choice ? 0 : cuda->group.comm->config.partial_type == EP_BF16 ? 1 : 2;
    size_t row_bytes = (size_t)own->row_bytes, token_bytes = (size_t)weight_words * 4 + (by_choice ? row_bytes : 0);
    const struct cuda_net_op_params params = {.name = "ep_combine",
                                              .phase = EP_GROUP_COMBINE_MOVE,
                                              .desc = own->desc.words,
                                              .plan = ep_group_plan_of(plan)->number,
                                              .out = &lists->rails,
                                              .in = &lists->net,
                                              .tokens = cuda_net_chunk_tokens(cuda, units * row_bytes + token_bytes),
                                              .token_bytes = token_bytes,
                                              .unit_bytes = by_choice ? 0 : row_bytes,
                                              .max_units = units};
    struct cuda_nodes_combine sum = {.own = *own,
                                     .rail = lists->route,
                                     .rail_units = by_choice ? NULL : lists->device.rail_units,
                                     .net_units = by_choice ? NULL : lists->device.net_units,
                                     .remote_count = lists->device.remote_count,
                                     .remote = lists->device.remote,
                                     .remote_width = cuda_remote_width(plan),
                                     .weight_words = weight_words,
                                     .blocks = cuda->sms * BLOCKS_PER_SM};
    struct cuda_net_op *op;
    ep_status status;

    EP_TRY(cuda_net_op_prepare(call, &params, &sum.op, &sum.out, &sum.in, &op));
    status = cuda_status(cuda_launch_nodes_combine(&sum, call->stream), "combine kernel");
    call->queued = status == EP_OK;
    return cuda_net_op_end_launch(cuda, op, status);
}

ep_status cuda_nodes_barrier(const struct cuda_call *call)
{
    struct cuda_comm *cuda = call->cuda;
    const uint32_t desc[CUDA_DESC_COMPARED] = {[CUDA_DESC_PHASE] = EP_GROUP_BARRIER};
    const struct cuda_net_op_params params = {
        .name = "ep_barrier_on", .phase = EP_GROUP_BARRIER, .desc = desc, .tokens = 1};
    struct cuda_nodes_barrier barrier;
    struct cuda_chunks in;
    struct cuda_net_op *op;

    cuda_fill_waits(cuda, EP_GROUP_BARRIER, EP_GROUP_BARRIER, &barrier.waits);
    EP_TRY(cuda_net_op_prepare(call, &params, &barrier.op, &barrier.chunks, &in, &op));
    return cuda_net_op_end_launch(cuda, op,
                                  cuda_status(cuda_launch_nodes_barrier(&barrier, call->stream), "barrier kernel"));
}
