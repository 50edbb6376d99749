/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/host/host.h"

#include <stdlib.h>
#include <string.h>

/* Experts and rows of one token, as the route is built from them. */
struct token {
    const int32_t *index, *row;
    int topk, n_local_experts, first_rank, nlocal;
    bool expanded;
};

/*
 * Entries of one token, in the order of the sum: by rank, expanded by expert. K is small, so insertion is the fastest
 * sort, and in the rank layout the first expert of a rank stands for all of them.
 */
static int build_entries(const struct token *token, struct host_entry *entries)
{
    int32_t keys[EP_MAX_TOPK];
    int n = 0;

    for (int k = 0; k < token->topk; k++) {
        int32_t expert = token->index[k];
        int local = expert < 0 ? -1 : expert / token->n_local_experts - token->first_rank;
        int32_t key = token->expanded ? expert : local;
        int at = n;

        if (local < 0 || local >= token->nlocal)
            continue;
        while (at > 0 && keys[at - 1] > key)
            at--;
        if (at > 0 && keys[at - 1] == key)
            continue;
        memmove(keys + at + 1, keys + at, (size_t)(n - at) * sizeof(*keys));
        memmove(entries + at + 1, entries + at, (size_t)(n - at) * sizeof(*entries));
        keys[at] = key;
        entries[at] = (struct host_entry){.row = token->row[k], .local = (uint16_t)local, .k = (uint16_t)k};
        n++;
    }
    return n;
}

ep_status host_route_init(struct host_route *route, int n_tokens, int topk, int n_local_experts, int first_rank,
                          int nlocal, bool expanded, int32_t *index, const int32_t *row)
{
    int per_token = expanded || topk < nlocal ? topk : nlocal;
    int64_t n = 0;

    *route = (struct host_route){.n_tokens = n_tokens, .index = index};
    if ((int64_t)n_tokens * per_token > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "plan: %d tokens of %d rows each", n_tokens, per_token);
    route->start = malloc(((size_t)n_tokens + 1) * sizeof(*route->start));
    /* One token more than there are: build_entries sorts in place at the end. */
    route->entry = malloc(((size_t)n_tokens * (size_t)per_token + EP_MAX_TOPK) * sizeof(*route->entry));
    if (!route->start || !route->entry)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the route of %d tokens", n_tokens);
    for (int t = 0; t < n_tokens; t++) {
        struct token token = {.index = index + (size_t)t * (size_t)topk,
                              .row = row + (size_t)t * (size_t)topk,
                              .topk = topk,
                              .n_local_experts = n_local_experts,
                              .first_rank = first_rank,
                              .nlocal = nlocal,
                              .expanded = expanded};

        route->start[t] = (int32_t)n;
        n += build_entries(&token, route->entry + n);
    }
    route->start[n_tokens] = (int32_t)n;
    route->n_entries = n;
    return EP_OK;
}

void host_route_done(struct host_route *route)
{
    free(route->index);
    free(route->start);
    free(route->entry);
    *route = (struct host_route){.n_tokens = 0};
}
