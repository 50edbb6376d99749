/* SPDX-License-Identifier: Apache-2.0 */
#include "group/route.h"

#include <stdlib.h>

/* Experts and rows of one token, as the route is built from them. */
struct token {
    const int32_t *index, *row, *expert_rank;
    int topk, first_rank, nlocal;
};

/* Index on this node of the rank that owns the token's k-th expert, or -1. */
static int local_of(const struct token *token, int k)
{
    int32_t expert = token->index[k];
    int local = expert < 0 ? -1 : token->expert_rank[expert] - token->first_rank;

    return local < token->nlocal ? local : -1;
}

/*
 * Rank layout: the first expert of a token on a rank stands for all of them. A mask of ranks gives them in order,
 * without sorting.
 */
static int entries_by_rank(const struct token *token, struct ep_group_entry *entries)
{
    int n = 0;

    for (int base = 0; base < token->nlocal; base += 64) {
        struct ep_group_entry found[64];
        uint64_t mask = 0;

        for (int k = 0; k < token->topk; k++) {
            int local = local_of(token, k) - base;

            if (local < 0 || local >= 64 || mask >> local & 1)
                continue;
            mask |= UINT64_C(1) << local;
            found[local] =
                (struct ep_group_entry){.row = token->row[k], .local = (uint16_t)(local + base), .k = (uint16_t)k};
        }
        for (; mask; mask &= mask - 1)
            entries[n++] = found[__builtin_ctzll(mask)];
    }
    return n;
}

/* Expanded layout: every expert, in ascending order. K is small, so insertion is the fastest sort. */
static int entries_by_expert(const struct token *token, struct ep_group_entry *entries)
{
    int n = 0;

    for (int k = 0; k < token->topk; k++) {
        int local = local_of(token, k), at;

        if (local < 0)
            continue;
        for (at = n++; at > 0 && token->index[entries[at - 1].k] > token->index[k]; at--)
            entries[at] = entries[at - 1];
        entries[at] = (struct ep_group_entry){.row = token->row[k], .local = (uint16_t)local, .k = (uint16_t)k};
    }
    return n;
}

ep_status ep_group_route_init(struct ep_group_route *route, int n_tokens, int topk, const int32_t *expert_rank,
                              int first_rank, int nlocal, bool expanded, int32_t *index, const int32_t *row)
{
    int per_token = expanded || topk < nlocal ? topk : nlocal;
    int64_t n = 0;

    *route = (struct ep_group_route){.n_tokens = n_tokens, .index = index};
    if ((int64_t)n_tokens * per_token > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "plan: %d tokens of %d rows each", n_tokens, per_token);
    route->start = malloc(((size_t)n_tokens + 1) * sizeof(*route->start));
    route->entry = malloc(((size_t)n_tokens * (size_t)per_token + 1) * sizeof(*route->entry));
    if (!route->start || !route->entry)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the route of %d tokens", n_tokens);
    for (int t = 0; t < n_tokens; t++) {
        struct token token = {.index = index + (size_t)t * (size_t)topk,
                              .row = row + (size_t)t * (size_t)topk,
                              .expert_rank = expert_rank,
                              .topk = topk,
                              .first_rank = first_rank,
                              .nlocal = nlocal};

        route->start[t] = (int32_t)n;
        n += expanded ? entries_by_expert(&token, route->entry + n) : entries_by_rank(&token, route->entry + n);
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
