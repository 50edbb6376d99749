/* SPDX-License-Identifier: Apache-2.0 */
/*
 * routing.h - checks a routing in host memory and counts its tokens per rank, node and expert.
 *
 * Linear in the number of top-k entries. Communicates with no peer.
 */
#ifndef EP_CORE_ROUTING_H
#define EP_CORE_ROUTING_H

#include "core/core.h"

struct ep_routing_shape {
    int n_tokens, topk, n_experts; /* n_experts: a multiple of nranks */
    int nranks, ranks_per_node;    /* ranks_per_node divides nranks */
    bool distinct;                 /* no token may choose an expert twice */
    int max_rows;                  /* at least n_tokens: most choices of one expert; 0: any number */
};

static inline struct ep_routing_shape ep_routing_shape_of(const ep_comm *comm, int n_tokens, int topk, int n_experts)
{
    return (struct ep_routing_shape){.n_tokens = n_tokens,
                                     .topk = topk,
                                     .n_experts = n_experts,
                                     .nranks = comm->nranks,
                                     .ranks_per_node = comm->ranks_per_node,
                                     .distinct = comm->config.flags & EP_COMM_CHECK_DISTINCT};
}

/*
 * Checks topk_idx [N,K] of idx_type (EP_I32 or EP_I64) and converts it into ret_idx [N,K]. EP_E_ROUTING with token,
 * position and value of the first entry that is neither -1 nor in 0..n_experts-1 or, if there is none, of the first
 * that breaks `distinct` or `max_rows`; ret_idx is then undefined.
 */
ep_status ep_routing_check(const struct ep_routing_shape *shape, const void *topk_idx, int idx_type, int32_t *ret_idx);

/*
 * Choices of experts of absent ranks in a routing [N,K] that ep_routing_check() has accepted: with `drop` they become
 * -1 and are counted, otherwise EP_E_ROUTING names the first.
 */
ep_status ep_routing_drop_absent(const ep_comm *comm, const struct ep_routing_shape *shape, bool drop, int32_t *idx,
                                 int64_t *ret_dropped);

/* Arrays for the counts; each may be NULL. All elements are written. */
struct ep_routing_counts {
    int32_t *per_rank;   /* [R] tokens with at least one expert on the rank */
    int32_t *per_node;   /* [nodes] the same per node */
    int32_t *per_expert; /* [E] */
    uint8_t *in_rank;    /* [N,R] 1 where the token goes to the rank, else 0 */
};

/* The most choices of one expert that a token can have; a mask does not say how many it has. */
static inline int ep_routing_most_choices(const ep_comm *comm, bool from_mask, int topk)
{
    return comm->config.flags & EP_COMM_CHECK_DISTINCT ? 1 : from_mask ? EP_MAX_TOPK : topk;
}

/* Counts of a routing that ep_routing_check() has accepted. Fails only with EP_E_MEMORY. */
ep_status ep_routing_count(const struct ep_routing_shape *shape, const int32_t *idx,
                           const struct ep_routing_counts *counts);

/* ep_plan_layout() for routings in host memory: check, then count. The outputs do not change if the check fails. */
ep_status ep_routing_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

#endif
