/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/route.h"

#include <epkit/types.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

static bool selects(const int32_t *experts, int topk, int n_local_experts, int rank)
{
    for (int k = 0; k < topk; k++)
        if (experts[k] >= 0 && experts[k] / n_local_experts == rank)
            return true;
    return false;
}

/* The rows received from each source. Grows recv_token, because their number is not known in advance. */
static int fill_received(struct bench_route *route, const struct routing *routing)
{
    int32_t experts[EP_MAX_TOPK];
    int64_t room = 0;

    route->recv_start[0] = 0;
    for (int source = 0; source < route->n_ranks; source++) {
        int n_tokens = routing_tokens(routing, source);

        if (route->n_recv + n_tokens > room) {
            int32_t *grown;

            room = 2 * room + n_tokens;
            if (room > INT32_MAX)
                return -1;
            grown = realloc(route->recv_token, (size_t)room * sizeof(*grown));
            if (!grown)
                return -1;
            route->recv_token = grown;
        }
        for (int token = 0; token < n_tokens; token++) {
            routing_token(routing, source, token, experts, NULL);
            if (selects(experts, route->topk, route->n_local_experts, route->rank))
                route->recv_token[route->n_recv++] = token;
        }
        route->recv_start[source + 1] = (int32_t)route->n_recv;
    }
    return 0;
}

static void fill_sent(struct bench_route *route)
{
    int32_t used = 0;

    for (int holder = 0; holder < route->n_ranks; holder++) {
        route->send_start[holder] = used;
        for (int token = 0; token < route->n_tokens; token++)
            if (selects(route->experts + (size_t)token * route->topk, route->topk, route->n_local_experts, holder))
                route->send_token[used++] = token;
    }
    route->send_start[route->n_ranks] = used;
    route->n_send = used;
    route->counts.wire = used - (route->send_start[route->rank + 1] - route->send_start[route->rank]);
}

/* Inverts send_token. Destinations ascend, so that the parts of each token are in rank order. */
static void fill_parts(struct bench_route *route)
{
    int32_t *next = route->part_start + 1;

    for (int64_t row = 0; row < route->n_send; row++)
        next[route->send_token[row]]++;
    for (int token = 0; token < route->n_tokens; token++)
        next[token] += route->part_start[token];
    /* part_start[t] is the cursor of token t and ends where t+1 starts: shift the array afterwards. */
    for (int64_t row = 0; row < route->n_send; row++)
        route->part[route->part_start[route->send_token[row]]++] = (int32_t)row;
    memmove(route->part_start + 1, route->part_start, (size_t)route->n_tokens * sizeof(*route->part_start));
    route->part_start[0] = 0;
}

static void count_nodes(struct bench_route *route)
{
    int experts_per_node = route->ranks_per_node * route->n_local_experts;
    int own = route->rank / route->ranks_per_node;
    int n_nodes = route->n_ranks / route->ranks_per_node;

    for (int token = 0; token < route->n_tokens; token++) {
        for (int node = 0; node < n_nodes; node++) {
            bool goes = selects(route->experts + (size_t)token * route->topk, route->topk, experts_per_node, node);

            route->counts.own_node += goes && node == own;
            route->counts.net += goes && node != own;
        }
    }
}

int bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int ranks_per_node)
{
    const struct routing_spec *spec = routing_get_spec(routing);
    size_t n_pairs;
    size_t n_rows;

    memset(route, 0, sizeof(*route));
    route->rank = rank;
    route->n_ranks = spec->n_ranks;
    route->ranks_per_node = ranks_per_node;
    route->n_tokens = routing_tokens(routing, rank);
    route->topk = spec->topk;
    route->n_experts = spec->n_experts;
    route->n_local_experts = spec->n_experts / spec->n_ranks;
    n_pairs = (size_t)route->n_tokens * (size_t)route->topk;
    n_rows = n_pairs ? n_pairs : 1;
    route->experts = malloc(n_rows * sizeof(*route->experts));
    route->weights = malloc(n_rows * sizeof(*route->weights));
    route->recv_start = calloc((size_t)route->n_ranks + 1, sizeof(*route->recv_start));
    route->send_start = calloc((size_t)route->n_ranks + 1, sizeof(*route->send_start));
    route->send_token = malloc(n_rows * sizeof(*route->send_token));
    route->part_start = calloc((size_t)route->n_tokens + 1, sizeof(*route->part_start));
    route->part = malloc(n_rows * sizeof(*route->part));
    if (!route->experts || !route->weights || !route->recv_start || !route->send_start || !route->send_token ||
        !route->part_start || !route->part || fill_received(route, routing) != 0) {
        bench_route_done(route);
        return -1;
    }
    routing_fill(routing, rank, route->experts, route->weights);
    fill_sent(route);
    fill_parts(route);
    count_nodes(route);
    route->counts.recv = route->n_recv;
    return 0;
}

void bench_route_done(struct bench_route *route)
{
    free(route->experts);
    free(route->weights);
    free(route->recv_start);
    free(route->recv_token);
    free(route->send_start);
    free(route->send_token);
    free(route->part_start);
    free(route->part);
    memset(route, 0, sizeof(*route));
}

void bench_route_meta(const struct bench_route *route, const int32_t *experts, const float *weights, int holder,
                      int32_t *ret_experts, float *ret_weights)
{
    int first = holder * route->n_local_experts;

    for (int k = 0; k < route->topk; k++) {
        bool local = experts[k] >= first && experts[k] < first + route->n_local_experts;

        ret_experts[k] = local ? experts[k] - first : -1;
        ret_weights[k] = local ? weights[k] : 0;
    }
}
