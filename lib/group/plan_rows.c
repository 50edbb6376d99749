/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The rows of a plan: from the counts that all ranks have published, and which are checked first, each rank computes by
 * prefix sums the final row of each of its tokens on each destination.
 */
#include "group/plan_internal.h"

#include "core/routing.h"
#include "group/failure.h"

#include <stdlib.h>
#include <string.h>

static int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static const int32_t *expert_counts(const struct ep_group_completion *c, int rank)
{
    return c->rows[rank]->counts + c->plan->comm->nranks + c->plan->comm->nnodes;
}

static ep_status compare_rows(const struct ep_group_completion *c)
{
    static const struct ep_group_field fields[] = {
        /* First: topk and idx_type of a mask are numbers of the library. */
        {"token_in_rank in place of topk_idx", offsetof(struct plan_row, from_mask)},
        {"topk", offsetof(struct plan_row, topk)},
        {"n_experts", offsetof(struct plan_row, n_experts)},
        {"idx_type", offsetof(struct plan_row, idx_type)},
        {"flags", offsetof(struct plan_row, flags)},
        {"expert_alignment", offsetof(struct plan_row, expert_alignment)},
    };

    int first = ep_comm_first(c->plan->comm);

    for (int rank = first + 1; rank < c->plan->comm->nranks; rank++) {
        if (!ep_comm_has(c->plan->comm, rank))
            continue;
        EP_TRY(ep_group_compare("ep_plan_new", fields, sizeof(fields) / sizeof(fields[0]), c->rows[first], first,
                                c->rows[rank], rank));
        if ((c->rows[first]->max_recv_tokens > 0) != (c->rows[rank]->max_recv_tokens > 0))
            return ep_group_fail_disagree("ep_plan_new", "max_recv_tokens", c->rows[first]->max_recv_tokens, first,
                                          c->rows[rank]->max_recv_tokens, rank);
    }
    return EP_OK;
}

/* Names the first count that is impossible, which means damage. The final row of every token is computed from them. */
static const char *check_counts(const struct ep_group_completion *c, int rank, int64_t *ret_value)
{
    const struct plan_row *row = c->rows[rank];
    const int32_t *per_expert = expert_counts(c, rank), *per_node = row->counts + c->plan->comm->nranks;
    int n_local = c->plan->info.n_local_experts, per = c->plan->comm->ranks_per_node, nnodes = c->plan->comm->nnodes;
    int64_t most = ep_routing_most_choices(c->plan->comm, c->plan->from_mask, c->plan->args.topk);

    *ret_value = row->n_tokens;
    if (row->n_tokens < 0 || (int64_t)row->n_tokens * c->plan->args.topk > INT32_MAX)
        return "its number of tokens";
    *ret_value = row->max_recv_tokens;
    if (row->max_recv_tokens < 0)
        return "its max_recv_tokens";
    *ret_value = row->max_tokens;
    if (row->max_tokens < row->n_tokens)
        return "its max_tokens";
    for (int to = 0; to < c->plan->comm->nranks; to++) {
        int64_t sum = 0;

        *ret_value = row->counts[to];
        if (row->counts[to] && !ep_comm_has(c->plan->comm, to))
            return "its number of tokens for an absent rank";
        if (row->counts[to] < 0 || row->counts[to] > per_node[to / per])
            return "its number of tokens for a rank";
        for (int expert = to * n_local; expert < (to + 1) * n_local; expert++) {
            *ret_value = per_expert[expert];
            if (per_expert[expert] < 0 || per_expert[expert] > row->counts[to] * most)
                return "its number of choices of an expert";
            sum += per_expert[expert];
        }
        *ret_value = sum;
        if (sum < row->counts[to])
            return "the sum of its choices of the experts of a rank";
    }
    for (int node = 0; node < nnodes; node++) {
        *ret_value = per_node[node];
        if (per_node[node] < 0 || per_node[node] > row->n_tokens)
            return "its number of tokens for a node";
    }
    return NULL;
}

static ep_status check_rows(struct ep_group_completion *c)
{
    for (int rank = 0; rank < c->plan->comm->nranks; rank++) {
        int64_t value;
        const char *what = check_counts(c, rank, &value);

        if (what)
            return ep_group_fail_damaged(c->group, rank, EP_GROUP_PLAN_COUNTS, what, value);
    }
    return EP_OK;
}

/* Number of rows that `rank` receives; sets the first rows of this rank's tokens there. */
static int64_t place_on_rank(struct ep_group_completion *c, int rank)
{
    const ep_plan *plan = c->plan;
    int me = plan->comm->rank, n_local = plan->info.n_local_experts;
    int64_t total = 0;

    if (!(plan->args.flags & EP_PLAN_EXPANDED)) {
        for (int source = 0; source < plan->comm->nranks; source++) {
            if (source == me)
                c->base[rank] = total;
            total += c->rows[source]->counts[rank];
        }
        return total;
    }
    for (int expert = rank * n_local; expert < (rank + 1) * n_local; expert++) {
        for (int source = 0; source < plan->comm->nranks; source++) {
            if (source == me)
                c->base[expert] = total;
            total += expert_counts(c, source)[expert];
        }
        total = round_up(total, plan->args.expert_alignment);
    }
    return total;
}

static ep_status place_all(struct ep_group_completion *c)
{
    ep_plan *plan = c->plan;

    plan->full.most_recv = 0;
    for (int rank = 0; rank < plan->comm->nranks; rank++) {
        int64_t total = place_on_rank(c, rank);
        int64_t capacity = c->rows[rank]->max_recv_tokens;

        if (total > INT32_MAX)
            return ep_fail(EP_E_OVERFLOW, "plan: rank %d would receive %lld rows", rank, (long long)total);
        if (capacity > 0 && total > capacity)
            return ep_fail(EP_E_CAPACITY, "plan: rank %d receives %lld rows but its max_recv_tokens is %lld", rank,
                           (long long)total, (long long)capacity);
        c->inner->rows_on[rank] = total;
        plan->full.most_recv = total > plan->full.most_recv ? total : plan->full.most_recv;
        if (rank == plan->comm->rank)
            plan->full.n_recv = total;
    }
    plan->full.out_rows = plan->args.max_recv_tokens > 0 ? plan->args.max_recv_tokens : plan->full.n_recv;
    return EP_OK;
}

void ep_group_plan_place_experts(ep_plan *plan)
{
    struct ep_group_plan *inner = plan->impl;
    int n_local = plan->info.n_local_experts;

    for (int local = 0; local < n_local; local++) {
        int64_t rows = round_up(inner->recv_exact[local], plan->args.expert_alignment);

        inner->recv_per_expert[local] = (int32_t)rows;
        inner->expert_start[local + 1] = inner->expert_start[local] + rows;
    }
    plan->full.recv_per_expert = inner->recv_per_expert;
    if (plan->args.flags & EP_PLAN_EXPANDED)
        plan->full.expert_start = inner->expert_start;
    else
        plan->full.recv_from_rank = inner->recv_from_rank;
}

/* Counts of the rows that this rank receives: per expert, per source. */
static void count_received(struct ep_group_completion *c)
{
    ep_plan *plan = c->plan;
    struct ep_group_plan *inner = c->inner;
    int me = plan->comm->rank, n_local = plan->info.n_local_experts, nranks = plan->comm->nranks;

    for (int local = 0; local < n_local; local++) {
        int64_t n = 0;

        for (int source = 0; source < nranks; source++)
            n += expert_counts(c, source)[me * n_local + local];
        inner->recv_exact[local] = (int32_t)n;
    }
    for (int source = 0; source < nranks; source++) {
        int32_t *prefix = inner->prefix + (size_t)source * (size_t)nranks;

        inner->recv_from_rank[source + 1] = inner->recv_from_rank[source] + c->rows[source]->counts[me];
        for (int rank = 0; rank < nranks; rank++)
            prefix[rank] = c->rows[source]->counts[rank] + (source ? prefix[rank - nranks] : 0);
    }
    ep_group_plan_place_experts(plan);
}

/* The final row of each (token, k) on its destination. */
static void assign_rows(struct ep_group_completion *c)
{
    const ep_plan *plan = c->plan;
    const int32_t *index = c->inner->index;
    int topk = plan->args.topk;
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    int64_t row_on[EP_MAX_RANKS];
    int32_t seen_at[EP_MAX_RANKS];

    memset(seen_at, 0xff, sizeof(seen_at));
    for (int32_t t = 0; t < c->inner->n_tokens; t++) {
        for (int k = 0; k < topk; k++) {
            size_t at = (size_t)t * (size_t)topk + (size_t)k;
            int32_t expert = index[at];
            int rank = expert < 0 ? -1 : c->expert_rank[expert];

            if (rank < 0) {
                c->row[at] = -1;
            } else if (expanded) {
                c->row[at] = (int32_t)c->base[expert]++;
            } else {
                if (seen_at[rank] != t) {
                    seen_at[rank] = t;
                    row_on[rank] = c->base[rank]++;
                }
                c->row[at] = (int32_t)row_on[rank];
            }
        }
    }
}

/* --- routes --- */

/* Index on this node of the rank that owns the expert, or -1. */
static int local_of(const struct ep_group_completion *c, int32_t expert)
{
    int local = expert < 0 ? -1 : c->expert_rank[expert] - c->group->first;

    return local < c->group->nlocal ? local : -1;
}

/*
 * Rank layout: the first expert of a token on a rank stands for all of them. A mask of ranks gives them in order,
 * without sorting.
 */
static int entries_by_rank(const struct ep_group_completion *c, const int32_t *index, const int32_t *row,
                           struct ep_group_entry *entries)
{
    int n = 0;

    for (int base = 0; base < c->group->nlocal; base += 64) {
        struct ep_group_entry found[64];
        uint64_t mask = 0;

        for (int k = 0; k < c->plan->args.topk; k++) {
            int local = local_of(c, index[k]) - base;

            if (local < 0 || local >= 64 || mask >> local & 1)
                continue;
            mask |= UINT64_C(1) << local;
            found[local] = (struct ep_group_entry){.row = row[k], .local = (uint16_t)(local + base), .k = (uint16_t)k};
        }
        for (; mask; mask &= mask - 1)
            entries[n++] = found[__builtin_ctzll(mask)];
    }
    return n;
}

/* Expanded layout: every expert, in ascending order. K is small, so insertion is the fastest sort. */
static int entries_by_expert(const struct ep_group_completion *c, const int32_t *index, const int32_t *row,
                             struct ep_group_entry *entries)
{
    int n = 0;

    for (int k = 0; k < c->plan->args.topk; k++) {
        int local = local_of(c, index[k]), at;

        if (local < 0)
            continue;
        for (at = n++; at > 0 && index[entries[at - 1].k] > index[k]; at--)
            entries[at] = entries[at - 1];
        entries[at] = (struct ep_group_entry){.row = row[k], .local = (uint16_t)local, .k = (uint16_t)k};
    }
    return n;
}

ep_status ep_group_route_init(const struct ep_group_completion *c, int n_tokens, int32_t *index, const int32_t *row,
                              struct ep_group_route *ret_route)
{
    struct ep_group_route *route = ret_route;
    bool expanded = c->plan->args.flags & EP_PLAN_EXPANDED;
    int topk = c->plan->args.topk, per_token = expanded || topk < c->group->nlocal ? topk : c->group->nlocal;
    int64_t n = 0;

    *route = (struct ep_group_route){.n_tokens = n_tokens, .index = index};
    if ((int64_t)n_tokens * per_token > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "plan: %d tokens of %d rows each", n_tokens, per_token);
    route->start = malloc(((size_t)n_tokens + 1) * sizeof(*route->start));
    route->entry = malloc(((size_t)n_tokens * (size_t)per_token + 1) * sizeof(*route->entry));
    if (!route->start || !route->entry)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the route of %d tokens", n_tokens);
    for (int t = 0; t < n_tokens; t++) {
        size_t at = (size_t)t * (size_t)topk;

        route->start[t] = (int32_t)n;
        n += (expanded ? entries_by_expert : entries_by_rank)(c, index + at, row + at, route->entry + n);
    }
    route->start[n_tokens] = (int32_t)n;
    route->n_entries = n;
    return EP_OK;
}

void ep_group_route_done(struct ep_group_route *route)
{
    free(route->index);
    free(route->start);
    free(route->entry);
    *route = (struct ep_group_route){.n_tokens = 0};
}

/* --- all of it --- */

ep_status ep_group_plan_build(struct ep_group_completion *c)
{
    ep_plan *plan = c->plan;
    struct ep_group_plan *inner = c->inner;

    EP_TRY(compare_rows(c));
    EP_TRY(check_rows(c));
    for (int rank = 0; rank < plan->comm->nranks; rank++)
        inner->max_tokens[rank] = c->rows[rank]->max_tokens;
    /* Values that the caller has read stay as they are: an update changes only the state used by the worker. */
    if (!atomic_load_explicit(&plan->counted, memory_order_relaxed))
        plan->full = plan->info;
    EP_TRY(place_all(c));
    count_received(c);
    if (inner->index) {
        assign_rows(c);
        if (plan->comm->nnodes > 1)
            EP_TRY(ep_group_plan_exchange_routes(c));
        EP_TRY(ep_group_route_init(c, inner->n_tokens, inner->index, c->row, &inner->own));
        inner->index = NULL; /* owned by the route */
    }
    atomic_store_explicit(&plan->counted, true, memory_order_release);
    return EP_OK;
}
