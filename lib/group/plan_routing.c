/* SPDX-License-Identifier: Apache-2.0 */
/* The routing of a plan as passed by the caller: the experts of each token, or a mask of ranks. */
#include "core/routing.h"
#include "group/plan.h"

/* Converts a mask as if each token had chosen the first expert of every rank that it goes to, with K = R. */
static ep_status read_mask(const ep_plan *plan, const uint8_t *token_in_rank)
{
    struct ep_group_plan *inner = plan->impl;
    int nranks = plan->comm->nranks, n_local = plan->args.n_experts / nranks;
    size_t n = (size_t)inner->n_tokens * (size_t)nranks;

    for (size_t i = 0; i < n; i++) {
        if (token_in_rank[i] > 1)
            return ep_fail(EP_E_ROUTING, "routing: token %zu: token_in_rank is %u for rank %zu", i / (size_t)nranks,
                           token_in_rank[i], i % (size_t)nranks);
        inner->index[i] = token_in_rank[i] ? (int32_t)(i % (size_t)nranks) * n_local : -1;
    }
    return EP_OK;
}

/* The counts per expert, which the mask does not contain. They must be possible for some choice of experts. */
static ep_status read_counts(const ep_plan *plan, const int32_t *tokens_per_expert)
{
    struct ep_group_plan *inner = plan->impl;
    int n_local = plan->args.n_experts / plan->comm->nranks;

    for (int rank = 0; rank < plan->comm->nranks; rank++) {
        int64_t sum = 0;

        for (int expert = rank * n_local; expert < (rank + 1) * n_local; expert++) {
            int32_t n = tokens_per_expert[expert];

            if (n < 0 || n > inner->tokens_per_rank[rank])
                return ep_fail(EP_E_ROUTING,
                               "routing: tokens_per_expert is %d for expert %d, but %d tokens go to its rank %d", n,
                               expert, inner->tokens_per_rank[rank], rank);
            sum += n;
        }
        if (sum < inner->tokens_per_rank[rank])
            return ep_fail(EP_E_ROUTING,
                           "routing: tokens_per_expert is %lld for the experts of rank %d together, but %d tokens go "
                           "there",
                           (long long)sum, rank, inner->tokens_per_rank[rank]);
    }
    memcpy(inner->tokens_per_expert, tokens_per_expert, (size_t)plan->args.n_experts * sizeof(int32_t));
    return EP_OK;
}

ep_status ep_group_plan_read_routing(const ep_plan *plan, const struct ep_group_routing *routing)
{
    struct ep_group_plan *inner = plan->impl;
    struct ep_routing_shape shape =
        ep_routing_shape_of(plan->comm, plan->args.n_tokens, plan->args.topk, plan->args.n_experts);
    struct ep_routing_counts counts = {
        .per_rank = inner->tokens_per_rank, .per_node = inner->tokens_per_node, .per_expert = inner->tokens_per_expert};

    shape.n_tokens = inner->n_tokens;
    EP_TRY(plan->from_mask ? read_mask(plan, routing->token_in_rank)
                           : ep_routing_check(&shape, routing->topk_idx, plan->args.idx_type, inner->index));
    EP_TRY(ep_routing_count(&shape, inner->index, &counts));
    return plan->from_mask ? read_counts(plan, routing->tokens_per_expert) : EP_OK;
}
