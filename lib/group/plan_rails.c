/* SPDX-License-Identifier: Apache-2.0 */
#include "group/plan_internal.h"

#include "group/exchange.h"
#include "group/failure.h"
#include "group/wait.h"

#include <stdlib.h>
#include <string.h>

/* One direction of the exchange with one rail peer: experts and rows of each token. */
struct rail_half {
    int32_t *index, *row; /* [n,K] */
    int n, done;
};

static ep_status alloc_half(struct rail_half *half, int n, size_t topk)
{
    half->index = malloc(((size_t)n + 1) * topk * sizeof(*half->index));
    half->row = malloc(((size_t)n + 1) * topk * sizeof(*half->row));
    half->n = n;
    return half->index && half->row ? EP_OK : ep_fail(EP_E_MEMORY, "plan: no memory for the routes between nodes");
}

static void free_halves(struct rail_half *halves, int n)
{
    for (int i = 0; halves && i < n; i++) {
        free(halves[i].index);
        free(halves[i].row);
    }
    free(halves);
}

static int node_of_expert(const struct ep_group_completion *c, int32_t expert)
{
    return expert < 0 ? -1 : c->expert_rank[expert] / c->plan->comm->ranks_per_node;
}

/* Lists the tokens of this rank that have a row on `node`, and packs their experts and rows. */
static ep_status list_tokens(struct ep_group_completion *c, int node, struct rail_half *send)
{
    const ep_plan *plan = c->plan;
    size_t topk = (size_t)plan->args.topk;
    int32_t *tokens;
    int n = 0, room = c->inner->tokens_per_node[node];

    tokens = malloc(((size_t)room + 1) * sizeof(*tokens));
    c->inner->net_tokens[node] = tokens;
    EP_TRY(alloc_half(send, room, topk));
    if (!tokens)
        return ep_fail(EP_E_MEMORY, "plan: no memory for the routes between nodes");
    for (int32_t t = 0; t < c->inner->n_tokens && n < room; t++) {
        const int32_t *index = c->inner->index + (size_t)t * topk;
        bool there = false;

        for (size_t k = 0; k < topk; k++)
            there |= node_of_expert(c, index[k]) == node;
        if (!there)
            continue;
        memcpy(send->index + (size_t)n * topk, index, topk * sizeof(*index));
        memcpy(send->row + (size_t)n * topk, c->row + (size_t)t * topk, topk * sizeof(*index));
        tokens[n++] = t;
    }
    send->n = n;
    c->inner->n_net_tokens[node] = n;
    return EP_OK;
}

static bool send_some(struct ep_group_completion *c, int node, struct rail_half *half)
{
    size_t topk = (size_t)c->plan->args.topk, at = (size_t)half->done * topk, each = topk * sizeof(int32_t);
    size_t room = (ep_streams_max_message(c->group->streams) - sizeof(struct ep_group_message)) / (2 * each);
    int n = half->n - half->done < (int)room ? half->n - half->done : (int)room;
    struct ep_group_message head = {.kind = EP_GROUP_MESSAGE_ROUTE,
                                    .detail = (uint32_t)n,
                                    .number = (uint64_t)c->inner->number,
                                    .index = (uint64_t)half->done};
    struct ep_piece pieces[] = {{half->index + at, (size_t)n * each}, {half->row + at, (size_t)n * each}};

    if (half->done == half->n || !ep_stream_send(c->group->streams, node, 0, &head, sizeof(head), pieces, 2))
        return false;
    half->done += n;
    return true;
}

static ep_status receive_some(struct ep_group_completion *c, int node, struct rail_half *half, bool *ret_moved)
{
    size_t topk = (size_t)c->plan->args.topk, at = (size_t)half->done * topk, bytes, half_bytes;
    const struct ep_group_message *message;

    if (half->done == half->n)
        return EP_OK;
    message = ep_stream_peek(c->group->streams, node, 0, &bytes);
    if (!message)
        return EP_OK;
    if (bytes < sizeof(*message) || message->kind != EP_GROUP_MESSAGE_ROUTE ||
        message->number != (uint64_t)c->inner->number || message->index != (uint64_t)half->done ||
        message->detail > (uint32_t)(half->n - half->done) ||
        bytes != sizeof(*message) + message->detail * 2 * topk * sizeof(int32_t))
        return ep_group_set_own_failure(
            c->group,
            ep_fail(EP_E_MISMATCH,
                    "ranks are in different calls: rank %d waits for token %d of plan %d, rank %d sent "
                    "message kind %u number %llu",
                    c->plan->comm->rank, half->done, c->inner->number, ep_group_rail(c->group, node), message->kind,
                    (unsigned long long)message->number),
            ep_group_rail(c->group, node), EP_GROUP_PLAN_ROUTES);
    half_bytes = (bytes - sizeof(*message)) / 2;
    memcpy(half->index + at, message + 1, half_bytes);
    memcpy(half->row + at, (const char *)(message + 1) + half_bytes, half_bytes);
    half->done += (int)message->detail;
    ep_stream_pop(c->group->streams, node, 0);
    *ret_moved = true;
    return EP_OK;
}

struct rails {
    struct ep_group_completion *c;
    struct rail_half *send, *receive; /* [nnodes] */
};

static ep_status step_routes(void *context, bool *ret_moved, bool *ret_busy, int *ret_node)
{
    const struct rails *rails = context;
    struct ep_group_completion *c = rails->c;
    struct rail_half *send = rails->send, *receive = rails->receive;

    for (int node = 0; node < c->plan->comm->nnodes; node++) {
        if (node == c->plan->comm->node || !ep_group_has_node(c->group, node))
            continue;
        *ret_moved |= send_some(c, node, &send[node]);
        EP_TRY(receive_some(c, node, &receive[node], ret_moved));
        if (send[node].done < send[node].n || receive[node].done < receive[node].n)
            *ret_node = node;
    }
    *ret_busy = *ret_node >= 0;
    return EP_OK;
}

/*
 * Checks that the experts exist, that the rows exist on the ranks of this node, and that each token has at least one of
 * them: this rank will write and read those rows.
 */
static ep_status check_routes(struct ep_group_completion *c, int node, const int32_t *index, const int32_t *row, int n)
{
    const ep_plan *plan = c->plan;
    int topk = plan->args.topk, first = c->group->first, sender = ep_group_rail(c->group, node);

    for (int t = 0; t < n; t++) {
        bool here = false;

        for (int k = 0; k < topk; k++) {
            size_t at = (size_t)t * (size_t)topk + (size_t)k;
            int32_t expert = index[at];

            if (expert < -1 || expert >= plan->args.n_experts)
                return ep_group_fail_damaged(c->group, sender, EP_GROUP_PLAN_ROUTES, "an expert of its tokens", expert);
            if (expert < 0 || c->expert_rank[expert] < first || c->expert_rank[expert] >= first + c->group->nlocal)
                continue;
            here = true;
            if (row[at] < 0 || row[at] >= c->inner->rows_on[c->expert_rank[expert]])
                return ep_group_fail_damaged(c->group, sender, EP_GROUP_PLAN_ROUTES, "a row of its tokens", row[at]);
        }
        if (!here)
            return ep_group_fail_damaged(c->group, sender, EP_GROUP_PLAN_ROUTES,
                                         "a token without an expert on this node", t);
    }
    return EP_OK;
}

/* The route of the tokens of one rail peer onto this node, from the data that it sent. */
static ep_status make_rail_route(struct ep_group_completion *c, int node, struct rail_half *receive)
{
    int32_t *index = receive->index;

    EP_TRY(check_routes(c, node, index, receive->row, receive->n));
    receive->index = NULL; /* owned by the route */
    return ep_group_route_init(c, receive->n, index, receive->row, &c->inner->rail[node]);
}

ep_status ep_group_plan_exchange_routes(struct ep_group_completion *c)
{
    int nnodes = c->plan->comm->nnodes, me = c->plan->comm->node;
    struct rail_half *send = calloc((size_t)nnodes, sizeof(*send)), *receive = calloc((size_t)nnodes, sizeof(*receive));
    ep_status status = EP_OK;

    if (!send || !receive)
        status = ep_fail(EP_E_MEMORY, "plan: no memory for %d nodes", nnodes);
    for (int node = 0; status == EP_OK && node < nnodes; node++) {
        if (node == me || !ep_group_has_node(c->group, node))
            continue;
        status = list_tokens(c, node, &send[node]);
        if (status == EP_OK)
            status =
                alloc_half(&receive[node], c->rows[ep_group_rail(c->group, node)]->counts[c->plan->comm->nranks + me],
                           (size_t)c->plan->args.topk);
    }
    if (status == EP_OK)
        status = ep_group_net_run(c->group, EP_GROUP_PLAN_ROUTES, step_routes,
                                  &(struct rails){.c = c, .send = send, .receive = receive});
    for (int node = 0; status == EP_OK && node < nnodes; node++)
        if (node != me && ep_group_has_node(c->group, node))
            status = make_rail_route(c, node, &receive[node]);
    free_halves(send, nnodes);
    free_halves(receive, nnodes);
    /* The rail peers wait for data that this rank can no longer send. */
    return status == EP_OK ? EP_OK
                           : ep_group_set_own_failure(c->group, status, c->plan->comm->rank, EP_GROUP_PLAN_ROUTES);
}
