/* SPDX-License-Identifier: Apache-2.0 */
/* plan_internal.h - what plan.c, plan_rows.c and plan_rails.c share. */
#ifndef EP_GROUP_PLAN_INTERNAL_H
#define EP_GROUP_PLAN_INTERNAL_H

#include "group/plan.h"

/* What a rank publishes about its plan. counts: per rank [R], per node [nnodes], per expert [E]. */
struct plan_row {
    int32_t n_tokens, topk, n_experts, idx_type;
    uint32_t flags;
    int32_t expert_alignment;
    int64_t max_recv_tokens;
    int32_t from_mask;
    int32_t max_tokens; /* of a later update */
    int32_t counts[];
};

struct ep_group_completion {
    ep_plan *plan;
    struct ep_group_plan *inner;
    struct ep_group *group;
    const struct plan_row **rows; /* [R] copies */
    int64_t *base;                /* next row on each rank [R], expanded: on each expert [E] */
    int32_t *row;                 /* [N,K] */
    int32_t *expert_rank; /* [E] rank of each expert: a table, because divisions would take half the time of the plan */
};

/* plan_rows.c */
/*
 * Builds the route of tokens onto the ranks of this node from experts and rows per (token, k). `index` and `row` are
 * [n_tokens,K]; the route takes index (freed by ep_group_route_done), row stays the caller's.
 */
ep_status ep_group_route_init(const struct ep_group_completion *c, int n_tokens, int32_t *index, const int32_t *row,
                              struct ep_group_route *ret_route);
void ep_group_route_done(struct ep_group_route *route);

/* Checks the rows that the ranks have published, computes counts and rows, and makes the routes. */
ep_status ep_group_plan_build(struct ep_group_completion *c);

/*
 * plan_rails.c. Between nodes: every rank sends its rail peers the experts and rows of the tokens that they will place
 * for it, and makes routes from those that it receives. Fills net_tokens and rail of the plan.
 */
ep_status ep_group_plan_exchange_routes(struct ep_group_completion *c);

#endif
