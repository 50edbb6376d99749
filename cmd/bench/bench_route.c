/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_route.h"

#include <string.h>

bool bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int n_nodes, bool expanded)
{
    const struct reference_group *group = &route->group;

    memset(route, 0, sizeof(*route));
    if (!reference_group_init(routing, n_nodes, &route->group, NULL) ||
        !reference_counts_init(group, rank, &route->sent, NULL) ||
        !reference_layout_init(group, rank, expanded, 1, &route->received, NULL)) {
        bench_route_done(route);
        return false;
    }
    route->rank = rank;
    route->n_tokens = group->n_tokens[rank];
    route->experts = group->experts[rank];
    route->weights = group->weights[rank];
    route->counts = (struct bench_counts){.recv = route->received.n_rows,
                                          .net = route->received.n_net,
                                          .own_node = route->sent.tokens_per_node[rank / group->ranks_per_node]};
    for (int to = 0; to < group->n_ranks; to++)
        route->counts.wire += to == rank ? 0 : route->sent.tokens_per_rank[to];
    return true;
}

void bench_route_done(struct bench_route *route)
{
    reference_layout_done(&route->received);
    reference_counts_done(&route->sent);
    reference_group_done(&route->group);
    memset(route, 0, sizeof(*route));
}
