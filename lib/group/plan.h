/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - counts of a plan, and the final row of each token, computed with the peers. */
#ifndef EP_GROUP_PLAN_H
#define EP_GROUP_PLAN_H

#include "group/group.h"

struct plan_row;

struct ep_group_entry {
    int32_t row;
    uint16_t local; /* destination: index among the ranks of the node */
    uint16_t k;     /* expanded layout: which of the token's experts */
};

/* The rows of the tokens of one source on the ranks of one node. */
struct ep_group_route {
    int n_tokens;
    int32_t *index;               /* [n_tokens,K] expert or -1 */
    int32_t *start;               /* [n_tokens+1] */
    struct ep_group_entry *entry; /* of token t: start[t]..start[t+1], in the order of the sum */
    int64_t n_entries;
};

struct ep_group_plan {
    int number;
    int n_tokens;      /* of the routing that operations use: the caller may have called an update meanwhile */
    int64_t n_send;    /* rows that its tokens become */
    int64_t n_dropped; /* choices of absent ranks */
    uint64_t exchange;
    int32_t *index;             /* [N,K] as int32, until the route takes it over */
    struct plan_row *row;       /* what this rank publishes, with these counts: */
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nnodes] */
    int32_t *tokens_per_expert; /* [E] */
    bool complete;
    bool orphaned;    /* freed by the user before its exchange was complete */
    ep_status status; /* of the completion, returned to every later user */
    char status_text[256];
    struct ep_group_route own;   /* this rank's tokens on this node */
    struct ep_group_route *rail; /* [nnodes] tokens of the rail peers on this node; own node empty */
    int32_t **net_tokens;        /* [nnodes] this rank's tokens with a row on that node, ascending */
    int32_t *n_net_tokens;       /* [nnodes] */
    int32_t *recv_per_expert;
    int64_t *recv_from_rank;
    int64_t *expert_start;
    int32_t *recv_exact; /* [L] not rounded up */
    void *device;        /* state of a device backend, which frees it */
    int64_t *rows_on;    /* [R] rows that each rank receives */
    int32_t *prefix;     /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t *max_tokens; /* [R] that each rank may have after an update */
    void *owned[16];     /* memory of these arrays */
    int n_owned;
};

static inline struct ep_group_plan *ep_group_plan_of(const ep_plan *plan)
{
    return plan->impl;
}

ep_status ep_group_plan_open(ep_plan *plan, const ep_plan_args *args);
/*
 * For a backend whose devices make the plan. prepare makes plan->impl, without counts; `routes`: with room for the
 * choices. discard undoes it. fill_info sets plan->info from the arguments, and from the counts of this rank.
 */
ep_status ep_group_plan_prepare(ep_plan *plan, bool routes);
void ep_group_plan_discard(ep_plan *plan);
void ep_group_plan_fill_info(ep_plan *plan);
/* From recv_exact, the rows of this rank's experts, and their place in plan->full. */
void ep_group_plan_place_experts(ep_plan *plan);
/*
 * A plan of fixed capacity whose counts the hosts never know, because a device reads its routing later: the ranks
 * exchange sizes only, and wait for each other. Nothing remains on failure.
 */
ep_status ep_group_plan_exchange_sizes(ep_plan *plan);
void ep_group_plan_close(ep_plan *plan);
ep_status ep_group_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/*
 * The same for a plan of former members, in place of the ep_plan_new() of new ones, and at once: waits until these have
 * completed theirs. A status that not all ranks get fails the group.
 */
ep_status ep_group_plan_renew(ep_plan *plan, const ep_plan_update_args *args);
/* Completes the plans up to and including `plan` (NULL: all): exchanges counts and routes. */
ep_status ep_group_plan_complete(struct ep_group *group, ep_plan *plan);
/* Frees orphaned plans whose exchange is pending. */
void ep_group_plan_drop_pending(struct ep_group *group);
/* True if every rank refuses the plan. Then an operation on it concerns no other rank. */
static inline bool ep_group_plan_is_refused(const ep_plan *plan)
{
    ep_status status = ((const struct ep_group_plan *)plan->impl)->status;

    return status != EP_OK && status / 100 != EP_E_MEMORY / 100;
}

#endif
