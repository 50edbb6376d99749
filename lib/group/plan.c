/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan: every rank publishes the numbers of its tokens for each rank and expert; from all of these rows each sender
 * computes the final row of each of its tokens on each destination, so that data is copied once, into its final place.
 *
 * opening: check the routing, count, publish (does not wait) completion: read all rows, compute positions
 * (plan_rows.c); between nodes send each rail peer the rows on its node. Completion is immediate, or part of the first
 * operation for plans with max_recv_tokens.
 */
#include "group/plan_internal.h"

#include "core/routing.h"
#include "group/exchange.h"
#include "group/failure.h"
#include "group/queue.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t plan_row_bytes(const ep_plan *plan)
{
    size_t counts = (size_t)plan->comm->nranks + (size_t)plan->comm->nnodes + (size_t)plan->args.n_experts;

    return sizeof(struct plan_row) + counts * sizeof(int32_t);
}

/* Its place in the list of pending plans, or the end of that. */
static int find_pending(const struct ep_group *group, const ep_plan *plan)
{
    int i = 0;

    while (i < group->n_pending && group->pending[i] != plan)
        i++;
    return i;
}

static void remove_pending(struct ep_group *group, const ep_plan *plan)
{
    int i = find_pending(group, plan);

    if (i == group->n_pending)
        return;
    group->n_pending--;
    memmove(group->pending + i, group->pending + i + 1, (size_t)(group->n_pending - i) * sizeof(group->pending[0]));
}

static ep_status set_complete(struct ep_group_plan *inner, ep_status status)
{
    inner->complete = true;
    inner->status = status;
    if (status != EP_OK)
        snprintf(inner->status_text, sizeof(inner->status_text), "%s", ep_last_error());
    return status;
}

static void free_routes(struct ep_group_plan *inner, int nnodes)
{
    for (int node = 0; node < nnodes; node++) {
        ep_group_route_done(&inner->rail[node]);
        free(inner->net_tokens[node]);
        inner->net_tokens[node] = NULL;
        inner->n_net_tokens[node] = 0;
    }
    ep_group_route_done(&inner->own);
    free(inner->index);
    inner->index = NULL;
}

static void free_inner(struct ep_group_plan *inner, int nnodes)
{
    if (inner->rail && inner->net_tokens && inner->n_net_tokens)
        free_routes(inner, nnodes);
    for (int i = 0; i < inner->n_owned; i++)
        free(inner->owned[i]);
    free(inner);
}

/* --- completion ------------------------------------------------------------------------------------------------- */

static void complete(struct ep_group *group, ep_plan *plan)
{
    struct ep_group_plan *inner = plan->impl;
    size_t nranks = (size_t)group->comm->nranks;
    size_t bases = nranks > (size_t)plan->args.n_experts ? nranks : (size_t)plan->args.n_experts;
    size_t row_bytes = (plan_row_bytes(plan) + 7) / 8 * 8;
    struct ep_group_completion c = {.plan = plan, .inner = inner, .group = group};
    const struct ep_group_extent extent = {
        "n_experts", plan_row_bytes(plan) - (size_t)plan->args.n_experts * sizeof(int32_t), sizeof(int32_t)};
    unsigned char *copies = NULL;
    ep_status status;

    status = ep_group_exchange_complete(group, inner->exchange, EP_GROUP_PLAN_COUNTS, &extent);
    if (status != EP_OK)
        goto done;
    copies = calloc(nranks, row_bytes); /* absent ranks have no tokens */
    c.rows = malloc(nranks * sizeof(*c.rows));
    c.base = malloc(bases * sizeof(*c.base));
    c.row = malloc(((size_t)inner->n_tokens + 1) * (size_t)plan->args.topk * sizeof(*c.row));
    c.expert_rank = malloc((size_t)plan->args.n_experts * sizeof(*c.expert_rank));
    if (!copies || !c.rows || !c.base || !c.row || !c.expert_rank) {
        status = ep_fail(EP_E_MEMORY, "plan: no memory for the rows of %d tokens", inner->n_tokens);
        goto release;
    }
    for (size_t rank = 0; rank < nranks; rank++) {
        struct plan_row *row = (struct plan_row *)(void *)(copies + rank * row_bytes);

        ep_group_exchange_read(group, inner->exchange, (int)rank, row, plan_row_bytes(plan));
        c.rows[rank] = row;
    }
    for (int expert = 0; expert < plan->args.n_experts; expert++)
        c.expert_rank[expert] = expert / plan->info.n_local_experts;
    status = ep_group_plan_build(&c);
release:
    ep_group_exchange_release(group, inner->exchange);
    free(copies);
    free(c.rows);
    free(c.base);
    free(c.row);
    free(c.expert_rank);
done:
    set_complete(inner, status);
}

/* EP_OK if the plan may be used. */
static ep_status status_of(const ep_plan *plan)
{
    const struct ep_group_plan *inner = plan->impl;

    return inner->status == EP_OK ? EP_OK : ep_fail(inner->status, "%s", inner->status_text);
}

/* Completes the oldest plan whose exchange is pending, and frees it if it is orphaned. */
static void complete_oldest(struct ep_group *group)
{
    ep_plan *oldest = group->pending[0];

    remove_pending(group, oldest);
    complete(group, oldest);
    if (!ep_group_plan_of(oldest)->orphaned)
        return;
    ep_group_plan_discard(oldest);
    free(oldest);
}

ep_status ep_group_plan_complete(struct ep_group *group, ep_plan *plan)
{
    while (group->n_pending > 0 && !(plan && ep_group_plan_of(plan)->complete)) {
        bool is_wanted = plan && plan == group->pending[0];
        ep_status status;

        complete_oldest(group);
        /* The status of an unusable plan goes to its users; only a failed group concerns the other plans. */
        status = ep_group_check(group);
        if (status != EP_OK)
            return is_wanted && status_of(plan) == status ? status : ep_group_check(group);
    }
    return plan ? status_of(plan) : EP_OK;
}

/* --- opening ---------------------------------------------------------------------------------------------------- */

static ep_status publish(void *arguments)
{
    ep_plan *plan = *(ep_plan **)arguments;
    struct ep_group_plan *inner = plan->impl;
    struct ep_group *group = ep_group_of(plan->comm);
    ep_status status;

    if (group->n_pending == EP_GROUP_EXCHANGES)
        complete_oldest(group);
    *inner->row = (struct plan_row){
        .n_tokens = inner->n_tokens,
        .topk = plan->args.topk,
        .n_experts = plan->args.n_experts,
        .idx_type = plan->args.idx_type,
        .flags = plan->args.flags,
        .expert_alignment = plan->args.expert_alignment,
        .max_recv_tokens = plan->args.max_recv_tokens,
        .from_mask = plan->from_mask,
        .max_tokens = plan->args.max_tokens > inner->n_tokens ? plan->args.max_tokens : inner->n_tokens,
    };
    status = ep_group_exchange_start(group, EP_GROUP_PLAN_COUNTS, inner->row, plan_row_bytes(plan), &inner->exchange);
    if (status != EP_OK)
        return set_complete(inner, status);
    group->pending[group->n_pending++] = plan;
    return EP_OK;
}

static int64_t sum(const int32_t *counts, int n)
{
    int64_t total = 0;

    for (int i = 0; i < n; i++)
        total += counts[i];
    return total;
}

/* Number of rows that this rank's tokens become. */
static void count_sent(const ep_plan *plan)
{
    struct ep_group_plan *inner = plan->impl;

    inner->n_send = plan->args.flags & EP_PLAN_EXPANDED ? sum(inner->tokens_per_expert, plan->args.n_experts)
                                                        : sum(inner->tokens_per_rank, plan->comm->nranks);
}

void ep_group_plan_fill_info(ep_plan *plan)
{
    const struct ep_group_plan *inner = plan->impl;
    const ep_comm *comm = plan->comm;
    int n_local = plan->args.n_experts / comm->nranks;
    int64_t to_self = plan->args.flags & EP_PLAN_EXPANDED
                          ? sum(inner->tokens_per_expert + (size_t)comm->rank * (size_t)n_local, n_local)
                          : inner->tokens_per_rank[comm->rank];

    plan->info = (ep_plan_info){.size = sizeof(plan->info),
                                .n_tokens = plan->args.n_tokens,
                                .topk = plan->args.topk,
                                .n_experts = plan->args.n_experts,
                                .n_local_experts = n_local,
                                .flags = plan->args.flags,
                                .n_recv = -1,
                                .most_recv = -1,
                                .out_rows = plan->args.max_recv_tokens,
                                .n_send = inner->n_send,
                                .n_wire = inner->n_send - to_self,
                                .n_net = sum(inner->tokens_per_node, comm->nnodes) - inner->tokens_per_node[comm->node],
                                .n_dropped = inner->n_dropped};
}

/* Memory that lives as long as the plan. */
static void *own(struct ep_group_plan *inner, size_t n, size_t bytes)
{
    return inner->owned[inner->n_owned++] = calloc(n, bytes);
}

static struct ep_group_plan *new_inner(const ep_plan *plan, bool routes)
{
    struct ep_group_plan *inner = calloc(1, sizeof(*inner));
    size_t nranks = (size_t)plan->comm->nranks, nnodes = (size_t)plan->comm->nnodes;
    size_t n_local = (size_t)plan->args.n_experts / nranks;
    bool all = true;

    if (!inner)
        return NULL;
    inner->n_tokens = plan->args.n_tokens;
    inner->row = own(inner, 1, plan_row_bytes(plan));
    inner->rail = own(inner, nnodes, sizeof(*inner->rail));
    inner->net_tokens = own(inner, nnodes, sizeof(*inner->net_tokens));
    inner->n_net_tokens = own(inner, nnodes, sizeof(*inner->n_net_tokens));
    inner->recv_per_expert = own(inner, n_local, sizeof(*inner->recv_per_expert));
    inner->recv_exact = own(inner, n_local, sizeof(*inner->recv_exact));
    inner->recv_from_rank = own(inner, nranks + 1, sizeof(*inner->recv_from_rank));
    inner->expert_start = own(inner, n_local + 1, sizeof(*inner->expert_start));
    inner->rows_on = own(inner, nranks, sizeof(*inner->rows_on));
    inner->prefix = own(inner, nranks * nranks, sizeof(*inner->prefix));
    inner->max_tokens = own(inner, nranks, sizeof(*inner->max_tokens));
    for (int i = 0; i < inner->n_owned; i++)
        all &= inner->owned[i] != NULL;
    if (all && routes) {
        inner->index = malloc(((size_t)plan->args.n_tokens + 1) * (size_t)plan->args.topk * sizeof(*inner->index));
        all = inner->index != NULL;
    }
    if (!all) {
        free_inner(inner, (int)nnodes);
        return NULL;
    }
    inner->tokens_per_rank = inner->row->counts;
    inner->tokens_per_node = inner->tokens_per_rank + nranks;
    inner->tokens_per_expert = inner->tokens_per_node + nnodes;
    return inner;
}

void ep_group_plan_discard(ep_plan *plan)
{
    free_inner(plan->impl, plan->comm->nnodes);
    plan->impl = NULL;
}

ep_status ep_group_plan_prepare(ep_plan *plan, bool routes)
{
    plan->impl = new_inner(plan, routes);
    return plan->impl ? EP_OK : ep_fail(EP_E_MEMORY, "ep_plan_new: no memory for %d tokens", plan->args.n_tokens);
}

/* Undoes everything on failure. */
static ep_status publish_plan(ep_plan *plan)
{
    struct ep_group *group = ep_group_of(plan->comm);
    struct ep_group_plan *inner = plan->impl;
    ep_status status;

    inner->number = ++group->plans;
    count_sent(plan);
    ep_group_plan_fill_info(plan);
    /* A plan of fixed capacity waits for no rank, nor for queued jobs. */
    if (plan->args.max_recv_tokens > 0 && !ep_group_is_idle(group)) {
        status = ep_group_submit(group, NULL, publish, &plan, sizeof(plan));
    } else {
        status = ep_group_run(group, publish, &plan);
        if (status == EP_OK && plan->args.max_recv_tokens == 0)
            status = ep_group_plan_complete(group, plan);
        /* Only here, where no job is left: the list belongs to the worker while it has jobs. */
        if (status != EP_OK)
            remove_pending(group, plan);
    }
    if (status != EP_OK)
        ep_group_plan_discard(plan);
    return status;
}

ep_status ep_group_plan_exchange_sizes(ep_plan *plan)
{
    ep_status status = ep_group_plan_prepare(plan, false);

    if (status == EP_OK)
        status = publish_plan(plan);
    if (status == EP_OK)
        status = ep_group_plan_complete(ep_group_of(plan->comm), plan);
    if (status != EP_OK) {
        ep_group_plan_close(plan);
        return status;
    }
    plan->info.n_send = plan->info.n_wire = plan->info.n_net = -1;
    atomic_store_explicit(&plan->counted, false, memory_order_release);
    return EP_OK;
}

/* --- routing ---------------------------------------------------------------------------------------------------- */

/* As passed by the caller: choices, or a mask with its counts. */
struct routing {
    const void *topk_idx;
    const uint8_t *token_in_rank;
    const int32_t *tokens_per_expert;
};

/* Converts a mask as if each token had chosen the first expert of every rank that it goes to, with K = R. */
static ep_status read_mask(const ep_plan *plan, const uint8_t *token_in_rank)
{
    struct ep_group_plan *inner = plan->impl;
    int nranks = plan->comm->nranks, n_local = plan->args.n_experts / nranks;
    size_t n = (size_t)inner->n_tokens * (size_t)nranks;

    for (size_t i = 0; i < n; i++) {
        if (token_in_rank[i] > 1)
            return ep_fail(EP_E_ROUTING, "routing: token %zu: token_in_rank is %u for rank %zu", i / (size_t)nranks,
                           token_in_rank[i], i % (size_t)nranks);
        inner->index[i] = token_in_rank[i] ? (int32_t)(i % (size_t)nranks) * n_local : -1;
    }
    return EP_OK;
}

/* The counts per expert, which the mask does not contain. They must be possible for some choice of experts. */
static ep_status read_counts(const ep_plan *plan, const int32_t *tokens_per_expert)
{
    struct ep_group_plan *inner = plan->impl;
    int n_local = plan->args.n_experts / plan->comm->nranks;
    int64_t most = ep_routing_most_choices(plan->comm, true, 0);

    for (int rank = 0; rank < plan->comm->nranks; rank++) {
        int64_t sum = 0;

        if (!ep_comm_has(plan->comm, rank))
            continue;
        for (int expert = rank * n_local; expert < (rank + 1) * n_local; expert++) {
            int32_t n = tokens_per_expert[expert];

            if (n < 0 || n > inner->tokens_per_rank[rank] * most)
                return ep_fail(EP_E_ROUTING,
                               "routing: tokens_per_expert is %d for expert %d, but %d tokens go to its rank %d", n,
                               expert, inner->tokens_per_rank[rank], rank);
            sum += n;
        }
        if (sum < inner->tokens_per_rank[rank])
            return ep_fail(EP_E_ROUTING,
                           "routing: tokens_per_expert is %lld for the experts of rank %d together, but %d tokens go "
                           "there",
                           (long long)sum, rank, inner->tokens_per_rank[rank]);
    }
    for (int expert = 0; expert < plan->args.n_experts; expert++)
        inner->tokens_per_expert[expert] = ep_comm_has(plan->comm, expert / n_local) ? tokens_per_expert[expert] : 0;
    return EP_OK;
}

/* Fills index and counts of the plan for inner->n_tokens tokens, or fails with the reason. */
static ep_status read_routing(const ep_plan *plan, const struct routing *routing)
{
    struct ep_group_plan *inner = plan->impl;
    /* plan->args.n_tokens is the caller's, who may set it meanwhile. */
    struct ep_routing_shape shape =
        ep_routing_shape_of(plan->comm, inner->n_tokens, plan->args.topk, plan->args.n_experts);
    struct ep_routing_counts counts = {
        .per_rank = inner->tokens_per_rank, .per_node = inner->tokens_per_node, .per_expert = inner->tokens_per_expert};

    EP_TRY(plan->from_mask ? read_mask(plan, routing->token_in_rank)
                           : ep_routing_check(&shape, routing->topk_idx, plan->args.idx_type, inner->index));
    EP_TRY(ep_routing_drop_absent(plan->comm, &shape, plan->comm->config.flags & EP_COMM_DROP_ABSENT, inner->index,
                                  &inner->n_dropped));
    EP_TRY(ep_routing_count(&shape, inner->index, &counts));
    return plan->from_mask ? read_counts(plan, routing->tokens_per_expert) : EP_OK;
}

ep_status ep_group_plan_open(ep_plan *plan, const ep_plan_args *args)
{
    struct routing routing = {args->topk_idx, args->token_in_rank, args->tokens_per_expert};
    ep_status status;

    EP_TRY(ep_group_stream_ready(plan->comm, args->stream));
    EP_TRY(ep_group_plan_prepare(plan, true));
    status = read_routing(plan, &routing);
    if (status == EP_OK)
        return publish_plan(plan);
    ep_group_plan_discard(plan);
    return status;
}

struct update_job {
    ep_plan *plan;
    ep_plan_update_args args;
};

/* Frees the routes of the previous version; its exchange is complete, as are those of all plans before it. */
static ep_status start_update(ep_plan *plan, const ep_plan_update_args *args)
{
    struct routing routing = {args->topk_idx, args->token_in_rank, args->tokens_per_expert};
    struct ep_group_plan *inner = plan->impl;

    free_routes(inner, plan->comm->nnodes);
    inner->complete = false;
    inner->status = EP_OK;
    inner->n_tokens = args->n_tokens;
    inner->index = malloc(((size_t)args->n_tokens + 1) * (size_t)plan->args.topk * sizeof(*inner->index));
    if (!inner->index)
        return ep_fail(EP_E_MEMORY, "ep_plan_update: no memory for %d tokens", args->n_tokens);
    EP_TRY(read_routing(plan, &routing));
    count_sent(plan);
    return publish(&plan);
}

static ep_status run_update(void *arguments)
{
    const struct update_job *job = arguments;
    struct ep_group *group = ep_group_of(job->plan->comm);
    ep_status status;

    EP_TRY(ep_group_plan_complete(group, NULL));
    status = start_update(job->plan, &job->args);
    if (status == EP_OK)
        status = ep_group_plan_complete(group, NULL);
    /* A status that all ranks share is reported by the next operation. */
    if (status == EP_OK && !ep_group_plan_is_refused(job->plan))
        status = status_of(job->plan);
    return ep_group_fail_queued(group, status, EP_GROUP_PLAN_COUNTS, false);
}

ep_status ep_group_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    struct update_job job = {.plan = plan, .args = *args};
    struct ep_group *group = ep_group_of(plan->comm);
    bool renews = plan->generation != plan->comm->generation;
    ep_status status;

    /* No job uses a plan of former members, which is new to those of now. */
    if (renews)
        ep_group_plan_of(plan)->number = ++group->plans;
    status = ep_group_submit(group, stream, run_update, &job, sizeof(job));
    group->plans -= renews && status != EP_OK;
    return status;
}

ep_status ep_group_plan_renew(ep_plan *plan, const ep_plan_update_args *args)
{
    struct update_job job = {.plan = plan, .args = *args};
    struct ep_group *group = ep_group_of(plan->comm);
    ep_status status;

    ep_group_plan_of(plan)->number = ++group->plans;
    status = run_update(&job);
    /* The others have this plan now, or wait for it. */
    if (status != EP_OK && !ep_status_is_fatal(status))
        status = ep_group_set_own_failure(group, status, plan->comm->rank, EP_GROUP_PLAN_COUNTS);
    return status == EP_OK ? status_of(plan) : status;
}

void ep_group_plan_close(ep_plan *plan)
{
    struct ep_group *group = ep_group_of(plan->comm);
    int i;

    if (!plan->impl)
        return;
    ep_group_drain(group);
    i = find_pending(group, plan);
    if (i < group->n_pending) {
        /*
         * The plan was never used, but its exchange is pending and the peers wait for it: it stays until the next
         * collective call completes it. Only if there is no memory for that is it completed here, which waits.
         */
        ep_plan *orphan = malloc(sizeof(*orphan));

        if (orphan) {
            *orphan = (ep_plan){.comm = plan->comm,
                                .impl = plan->impl,
                                .args = plan->args,
                                .info = plan->info,
                                .from_mask = plan->from_mask};
            ep_group_plan_of(plan)->orphaned = true;
            group->pending[i] = orphan;
            plan->impl = NULL;
            return;
        }
        ep_group_plan_complete(group, plan);
        remove_pending(group, plan);
    }
    ep_group_plan_discard(plan);
}

void ep_group_plan_drop_pending(struct ep_group *group)
{
    while (group->n_pending > 0) {
        ep_plan *plan = group->pending[--group->n_pending];
        struct ep_group_plan *inner = plan->impl;

        if (!inner->orphaned)
            continue;
        free_inner(inner, plan->comm->nnodes);
        free(plan);
    }
}
