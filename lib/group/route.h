/* SPDX-License-Identifier: Apache-2.0 */
/* route.h - the rows of the tokens of one source on the ranks of one node. */
#ifndef EP_GROUP_ROUTE_H
#define EP_GROUP_ROUTE_H

#include "core/core.h"

struct ep_group_entry {
    int32_t row;
    uint16_t local; /* destination: index among the ranks of the node */
    uint16_t k;     /* expanded layout: which of the token's experts */
};

struct ep_group_route {
    int n_tokens;
    int32_t *index;               /* [n_tokens,K] expert or -1 */
    int32_t *start;               /* [n_tokens+1] */
    struct ep_group_entry *entry; /* of token t: start[t]..start[t+1], in the order of the sum */
    int64_t n_entries;
};

/*
 * Builds the route of tokens onto the ranks [first_rank, first_rank + nlocal) from experts and rows per (token, k).
 * `index` and `row` are [n_tokens,K]; the route takes index (freed by ep_group_route_done), row stays the caller's.
 * `expert_rank` [E] is the rank of each expert.
 */
ep_status ep_group_route_init(struct ep_group_route *route, int n_tokens, int topk, const int32_t *expert_rank,
                              int first_rank, int nlocal, bool expanded, int32_t *index, const int32_t *row);
void ep_group_route_done(struct ep_group_route *route);

#endif
