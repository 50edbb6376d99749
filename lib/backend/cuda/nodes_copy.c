/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Copies what the host has computed for a plan between nodes to the memory that updates on the device write: for
 * operations in a graph, which must follow later updates.
 */
#include "backend/cuda/lists.h"

#include <stdlib.h>
#include <string.h>

/* Number of tokens in all lists of one direction. */
static size_t tokens_in(const ep_plan *plan, const struct cuda_list_side *side)
{
    const struct cuda_node_range *last = &side->rail[plan->comm->nnodes - 1];

    return (size_t)last->first + (size_t)last->n;
}

/*
 * Copies to device memory and, for the proxy, to pinned memory. The copy is immediate and not in stream order, so the
 * proxy must not still read the pinned memory for operations of another plan.
 */
static ep_status copy_lists(struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_lists *from,
                            const struct cuda_lists *to, const struct cuda_nodes_update *u)
{
    const struct cuda_route *route = &cuda_plan_of(plan)->route;
    size_t own = tokens_in(plan, &from->net), rails = tokens_in(plan, &from->rails), word = sizeof(int32_t);
    size_t n = (size_t)plan->args.n_tokens, topk = (size_t)route->topk, width = (size_t)route->width;
    size_t nnodes = (size_t)plan->comm->nnodes, all_rails = nnodes * sizeof(struct cuda_node_range);
    const struct cuda_transfer parts[] = {
        {u->index, route->index, n * topk * word},
        {u->count, route->count, n * word},
        {u->entry, route->entry, n * width * sizeof(*u->entry)},
        {u->counts, route->counts, sizeof(*u->counts)},
        {u->list.net, from->device.net, all_rails},
        {u->list.net_units, from->device.net_units, (own + nnodes) * word},
        {u->list.token, from->device.token, own * word},
        {u->list.remote_count, from->device.remote_count, n * word},
        {u->list.remote, from->device.remote, n * (size_t)from->remote_width * sizeof(*u->list.remote)},
        {u->list.rail, from->device.rail, all_rails},
        {u->list.rail_units, from->device.rail_units, (rails + nnodes) * word},
        {u->list.rail_index, from->device.rail_index, rails * topk * word},
        {u->list.rail_count, from->device.rail_count, rails * word},
        {u->list.rail_entry, from->device.rail_entry, rails * width * sizeof(*u->list.rail_entry)},
    };

    EP_TRY(cuda_transfer(cuda, parts, sizeof(parts) / sizeof(parts[0])));
    memcpy((void *)(uintptr_t)to->net.rail, from->net.rail, all_rails);
    memcpy((void *)(uintptr_t)to->net.units, from->net.units, (own + nnodes) * word);
    memcpy((void *)(uintptr_t)to->rails.rail, from->rails.rail, all_rails);
    memcpy((void *)(uintptr_t)to->rails.units, from->rails.units, (rails + nnodes) * word);
    return EP_OK;
}

/* Copies the counts that the host knows to where an update writes them. */
static ep_status copy_counts(struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_nodes_update *u)
{
    const struct ep_group_plan *inner = ep_group_plan_of(plan);
    size_t nranks = (size_t)plan->comm->nranks, nlocal = (size_t)plan->comm->ranks_per_node;
    size_t n_local = (size_t)plan->info.n_local_experts, word = sizeof(int32_t), me = (size_t)plan->comm->rank;
    size_t first = (size_t)ep_group_of(plan->comm)->first;
    int32_t *prefix = malloc(nranks * nlocal * word), start[EP_MAX_EXPERTS + 1];
    ep_status status;

    if (!prefix)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the counts of %zu ranks", nranks);
    for (size_t i = 0; i < nranks * nlocal; i++)
        prefix[i] = inner->prefix[i / nlocal * nranks + first + i % nlocal];
    for (size_t i = 0; i <= n_local; i++)
        start[i] = (int32_t)inner->expert_start[i];
    const struct cuda_transfer parts[] = {
        {u->prefix, prefix, nranks * nlocal * word},
        {u->first, inner->recv_from_rank, (nranks + 1) * sizeof(*u->first)},
        {u->start, me ? inner->prefix + (me - 1) * nranks : NULL, me ? nranks * word : 0},
        {u->expert_start, start, (n_local + 1) * word},
        {u->expert_exact, inner->recv_exact, n_local * word},
    };
    status = cuda_status(cudaMemsetAsync(u->start, 0, nranks * word, cuda->internal_stream), "cudaMemsetAsync");
    if (status == EP_OK)
        status = cuda_transfer(cuda, parts, sizeof(parts) / sizeof(parts[0]));
    free(prefix);
    return status;
}

ep_status cuda_net_copy_plan(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_lists *to,
                             const struct cuda_nodes_update *u)
{
    const struct cuda_lists *from = cuda_plan_of(plan)->lists;

    EP_TRY(copy_lists(cuda, plan, from, to, u));
    to->rows_self = from->rows_self;
    to->rows_node = from->rows_node;
    to->rows_forward = from->rows_forward;
    return copy_counts(cuda, plan, u);
}
