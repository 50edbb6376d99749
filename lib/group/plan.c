/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A plan: every rank publishes how many of its tokens go to each rank and expert; from all of these rows each sender
 * computes the final row of each of its tokens on each destination, so that data is placed once, where it stays.
 *
 * opening:     check the routing, count, publish (does not wait)
 * completion:  read all rows, compute positions; between nodes send each rail peer the rows on its node. At once, or
 *              with the first operation for plans with max_recv_tokens.
 */
#include "group/plan.h"
#include "core/routing.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t plan_row_bytes(const ep_plan *plan)
{
    size_t counts = (size_t)plan->comm->nranks + (size_t)plan->comm->nnodes + (size_t)plan->args.n_experts;

    return sizeof(struct plan_row) + counts * sizeof(int32_t);
}

static int64_t round_up(int64_t value, int64_t multiple)
{
    return (value + multiple - 1) / multiple * multiple;
}

static void fill_row(const ep_plan *plan, struct plan_row *row)
{
    const struct ep_group_plan *inner = plan->impl;
    size_t nranks = (size_t)plan->comm->nranks, nnodes = (size_t)plan->comm->nnodes;

    row->n_tokens = inner->n_tokens;
    row->topk = plan->args.topk;
    row->n_experts = plan->args.n_experts;
    row->idx_type = plan->args.idx_type;
    row->flags = plan->args.flags;
    row->expert_alignment = plan->args.expert_alignment;
    row->max_recv_tokens = plan->args.max_recv_tokens;
    row->from_mask = plan->from_mask;
    row->max_tokens = plan->args.max_tokens > inner->n_tokens ? plan->args.max_tokens : inner->n_tokens;
    memcpy(row->counts, inner->tokens_per_rank, nranks * sizeof(int32_t));
    memcpy(row->counts + nranks, inner->tokens_per_node, nnodes * sizeof(int32_t));
    memcpy(row->counts + nranks + nnodes, inner->tokens_per_expert, (size_t)row->n_experts * sizeof(int32_t));
}

static void forget(struct ep_group *group, const ep_plan *plan)
{
    for (int i = 0; i < group->n_pending; i++) {
        if (group->pending[i] != plan)
            continue;
        group->n_pending--;
        memmove(group->pending + i, group->pending + i + 1, (size_t)(group->n_pending - i) * sizeof(group->pending[0]));
        break;
    }
}

static ep_status settle(struct ep_group_plan *inner, ep_status status)
{
    inner->complete = true;
    inner->verdict = status;
    if (status != EP_OK)
        snprintf(inner->verdict_text, sizeof(inner->verdict_text), "%s", ep_last_error());
    return status;
}

static void free_routes(struct ep_group_plan *inner, int nnodes)
{
    for (int node = 0; node < nnodes; node++) {
        if (inner->rail)
            ep_group_route_done(&inner->rail[node]);
        if (!inner->net_tokens)
            continue;
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
    free_routes(inner, nnodes);
    free(inner->tokens_per_rank);
    free(inner->tokens_per_node);
    free(inner->tokens_per_expert);
    free(inner->rail);
    free(inner->net_tokens);
    free(inner->n_net_tokens);
    free(inner->recv_per_expert);
    free(inner->recv_exact);
    free(inner->recv_from_rank);
    free(inner->expert_start);
    free(inner->rows_on);
    free(inner->first_row);
    free(inner->prefix);
    free(inner->max_tokens);
    free(inner);
}

/* --- completion ------------------------------------------------------------------------------------------------- */

static const int32_t *expert_counts(const struct ep_group_completion *c, int rank)
{
    return c->rows[rank]->counts + c->plan->comm->nranks + c->plan->comm->nnodes;
}

static ep_status compare_rows(const struct ep_group_completion *c)
{
    static const struct ep_group_field fields[] = {
        {"topk", offsetof(struct plan_row, topk)},
        {"n_experts", offsetof(struct plan_row, n_experts)},
        {"idx_type", offsetof(struct plan_row, idx_type)},
        {"flags", offsetof(struct plan_row, flags)},
        {"expert_alignment", offsetof(struct plan_row, expert_alignment)},
        {"token_in_rank in place of topk_idx", offsetof(struct plan_row, from_mask)},
    };

    for (int rank = 1; rank < c->plan->comm->nranks; rank++) {
        EP_TRY(ep_group_compare("ep_plan_new: ", fields, sizeof(fields) / sizeof(fields[0]), c->rows[0], 0,
                                c->rows[rank], rank));
        if ((c->rows[0]->max_recv_tokens > 0) != (c->rows[rank]->max_recv_tokens > 0))
            return ep_group_fail_disagree("ep_plan_new: ", "max_recv_tokens", c->rows[0]->max_recv_tokens, 0,
                                          c->rows[rank]->max_recv_tokens, rank);
    }
    return EP_OK;
}

/* A count is one of tokens: what cannot be is damage. The final row of every token follows from them. */
static const char *check_counts(const struct ep_group_completion *c, int rank, int64_t *ret_value)
{
    const struct plan_row *row = c->rows[rank];
    const int32_t *per_expert = expert_counts(c, rank), *per_node = row->counts + c->plan->comm->nranks;
    int n_local = c->plan->info.n_local_experts, per = c->plan->comm->ranks_per_node, nnodes = c->plan->comm->nnodes;

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
        /* Of one node the CUDA backend counts its tokens for ranks alone. */
        if (row->counts[to] < 0 || row->counts[to] > (nnodes > 1 ? per_node[to / per] : row->n_tokens))
            return "its number of tokens for a rank";
        for (int expert = to * n_local; expert < (to + 1) * n_local; expert++) {
            *ret_value = per_expert[expert];
            if (per_expert[expert] < 0 || per_expert[expert] > row->counts[to])
                return "its number of tokens for an expert";
            sum += per_expert[expert];
        }
        *ret_value = sum;
        if (sum < row->counts[to])
            return "the sum of its tokens for the experts of a rank";
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

/* Rows that `rank` receives; sets what this rank's tokens begin at there. */
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

    for (int rank = 0; rank < plan->comm->nranks; rank++) {
        int64_t total = place_on_rank(c, rank);
        int64_t worst = c->rows[rank]->max_recv_tokens;

        if (total > INT32_MAX)
            return ep_fail(EP_E_OVERFLOW, "plan: rank %d would receive %lld rows", rank, (long long)total);
        if (worst > 0 && total > worst)
            return ep_fail(EP_E_CAPACITY, "plan: rank %d receives %lld rows but its max_recv_tokens is %lld", rank,
                           (long long)total, (long long)worst);
        c->inner->rows_on[rank] = total;
        if (rank == plan->comm->rank)
            plan->full.n_recv = total;
    }
    plan->full.out_rows = plan->args.max_recv_tokens > 0 ? plan->args.max_recv_tokens : plan->full.n_recv;
    return EP_OK;
}

/* What this rank receives: per expert, per source. */
static void count_received(struct ep_group_completion *c)
{
    ep_plan *plan = c->plan;
    struct ep_group_plan *inner = c->inner;
    int me = plan->comm->rank, n_local = plan->info.n_local_experts, nranks = plan->comm->nranks;
    int64_t start = 0;

    for (int local = 0; local < n_local; local++) {
        int64_t n = 0;

        for (int source = 0; source < nranks; source++)
            n += expert_counts(c, source)[me * n_local + local];
        inner->recv_exact[local] = (int32_t)n;
        n = round_up(n, plan->args.expert_alignment);
        inner->recv_per_expert[local] = (int32_t)n;
        inner->expert_start[local] = start;
        start += n;
    }
    inner->expert_start[n_local] = start;
    inner->recv_from_rank[0] = 0;
    for (int source = 0; source < nranks; source++) {
        int32_t *prefix = inner->prefix + (size_t)source * (size_t)nranks;

        inner->recv_from_rank[source + 1] = inner->recv_from_rank[source] + c->rows[source]->counts[me];
        for (int rank = 0; rank < nranks; rank++)
            prefix[rank] = c->rows[source]->counts[rank] + (source ? prefix[rank - nranks] : 0);
    }
    plan->full.recv_per_expert = inner->recv_per_expert;
    if (plan->args.flags & EP_PLAN_EXPANDED)
        plan->full.expert_start = inner->expert_start;
    else
        plan->full.recv_from_rank = inner->recv_from_rank;
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
            int rank = expert < 0 ? -1 : c->home[expert];

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

/* --- completion, all of it -------------------------------------------------------------------------------------- */

static ep_status build(struct ep_group_completion *c)
{
    ep_plan *plan = c->plan;
    struct ep_group_plan *inner = c->inner;
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;

    EP_TRY(compare_rows(c));
    EP_TRY(check_rows(c));
    for (int rank = 0; rank < plan->comm->nranks; rank++)
        inner->max_tokens[rank] = c->rows[rank]->max_tokens;
    /* What the caller has read of the plan stays with it: an update changes what the worker knows alone. */
    if (!atomic_load_explicit(&plan->counted, memory_order_relaxed))
        plan->full = plan->info;
    EP_TRY(place_all(c));
    count_received(c);
    if (!expanded)
        memcpy(inner->first_row, c->base, (size_t)plan->comm->nranks * sizeof(*c->base));
    if (!inner->index) {
        atomic_store_explicit(&plan->counted, true, memory_order_release);
        return EP_OK;
    }
    assign_rows(c);
    if (plan->comm->nnodes > 1)
        EP_TRY(ep_group_plan_exchange_routes(c));
    EP_TRY(ep_group_route_init(&inner->own, inner->n_tokens, plan->args.topk, c->home, c->group->first,
                               c->group->nlocal, expanded, inner->index, c->row));
    inner->index = NULL; /* the route's now */
    atomic_store_explicit(&plan->counted, true, memory_order_release);
    return EP_OK;
}

static ep_status complete(struct ep_group *group, ep_plan *plan)
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
    copies = malloc(nranks * row_bytes);
    c.rows = malloc(nranks * sizeof(*c.rows));
    c.base = malloc(bases * sizeof(*c.base));
    c.row = malloc(((size_t)inner->n_tokens + 1) * (size_t)plan->args.topk * sizeof(*c.row));
    c.home = malloc((size_t)plan->args.n_experts * sizeof(*c.home));
    if (!copies || !c.rows || !c.base || !c.row || !c.home) {
        status = ep_fail(EP_E_MEMORY, "plan: no memory for the rows of %d tokens", inner->n_tokens);
        goto release;
    }
    for (size_t rank = 0; rank < nranks; rank++) {
        struct plan_row *row = (struct plan_row *)(void *)(copies + rank * row_bytes);

        ep_group_exchange_read(group, inner->exchange, (int)rank, row, plan_row_bytes(plan));
        c.rows[rank] = row;
    }
    for (int expert = 0; expert < plan->args.n_experts; expert++)
        c.home[expert] = expert / plan->info.n_local_experts;
    status = build(&c);
release:
    ep_group_exchange_release(group, inner->exchange);
    free(copies);
    free(c.rows);
    free(c.base);
    free(c.row);
    free(c.home);
done:
    return settle(inner, status);
}

ep_status ep_group_plan_verdict(const ep_plan *plan)
{
    const struct ep_group_plan *inner = plan->impl;

    return inner->verdict == EP_OK ? EP_OK : ep_fail(inner->verdict, "%s", inner->verdict_text);
}

/* Of the plans whose exchange is under way. One whose user has freed it goes with that. */
static void complete_oldest(struct ep_group *group)
{
    ep_plan *oldest = group->pending[0];

    group->n_pending--;
    memmove(group->pending, group->pending + 1, (size_t)group->n_pending * sizeof(group->pending[0]));
    complete(group, oldest);
    if (!ep_group_plan_of(oldest)->orphaned)
        return;
    free_inner(oldest->impl, group->comm->nnodes);
    free(oldest);
}

ep_status ep_group_plan_complete(struct ep_group *group, ep_plan *plan)
{
    while (group->n_pending > 0 && !(plan && ep_group_plan_of(plan)->complete)) {
        bool is_wanted = plan && plan == group->pending[0];
        ep_status status;

        complete_oldest(group);
        /* A plan that cannot be used says so to its users; only a failed group concerns the others. */
        status = ep_group_check(group);
        if (status != EP_OK)
            return is_wanted && ep_group_plan_verdict(plan) == status ? status : ep_group_check(group);
    }
    return plan ? ep_group_plan_verdict(plan) : EP_OK;
}

/* --- opening ---------------------------------------------------------------------------------------------------- */

static ep_status publish(void *arguments)
{
    ep_plan *plan = *(ep_plan **)arguments;
    struct ep_group_plan *inner = plan->impl;
    struct ep_group *group = ep_group_of(plan->comm);
    size_t bytes = plan_row_bytes(plan);
    struct plan_row *row;
    ep_status status;

    if (group->n_pending == EP_GROUP_EXCHANGES)
        complete_oldest(group);
    row = malloc(bytes);
    if (!row)
        return settle(inner, ep_fail(EP_E_MEMORY, "plan: no memory for %zu bytes", bytes));
    fill_row(plan, row);
    status = ep_group_exchange_start(group, EP_GROUP_PLAN_COUNTS, row, bytes, &inner->exchange);
    free(row);
    if (status != EP_OK)
        return settle(inner, status);
    group->pending[group->n_pending++] = plan;
    return EP_OK;
}

/* Rows that this rank's tokens become. */
static void count_sent(const ep_plan *plan)
{
    struct ep_group_plan *inner = plan->impl;
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    const int32_t *counts = expanded ? inner->tokens_per_expert : inner->tokens_per_rank;
    int n = expanded ? plan->args.n_experts : plan->comm->nranks;

    inner->n_send = 0;
    for (int i = 0; i < n; i++)
        inner->n_send += counts[i];
}

static void fill_info(ep_plan *plan)
{
    const struct ep_group_plan *inner = plan->impl;
    const ep_comm *comm = plan->comm;
    ep_plan_info *info = &plan->info;

    *info = (ep_plan_info){.size = sizeof(*info), .n_recv = -1, .out_rows = plan->args.max_recv_tokens};
    info->n_tokens = plan->args.n_tokens;
    info->topk = plan->args.topk;
    info->n_experts = plan->args.n_experts;
    info->n_local_experts = plan->args.n_experts / comm->nranks;
    info->flags = plan->args.flags;
    info->n_send = inner->n_send;
    if (plan->args.flags & EP_PLAN_EXPANDED) {
        for (int expert = 0; expert < info->n_experts; expert++) {
            if (expert / info->n_local_experts != comm->rank)
                info->n_wire += inner->tokens_per_expert[expert];
        }
    } else {
        for (int rank = 0; rank < comm->nranks; rank++) {
            if (rank != comm->rank)
                info->n_wire += inner->tokens_per_rank[rank];
        }
    }
    for (int node = 0; node < comm->nnodes; node++)
        if (node != comm->node)
            info->n_net += inner->tokens_per_node[node];
}

static struct ep_group_plan *new_inner(const ep_plan *plan)
{
    struct ep_group_plan *inner = calloc(1, sizeof(*inner));
    size_t nranks = (size_t)plan->comm->nranks, nnodes = (size_t)plan->comm->nnodes;
    size_t n_local = (size_t)plan->args.n_experts / nranks;

    if (!inner)
        return NULL;
    inner->index = malloc(((size_t)plan->args.n_tokens + 1) * (size_t)plan->args.topk * sizeof(*inner->index));
    inner->tokens_per_rank = calloc(nranks, sizeof(*inner->tokens_per_rank));
    inner->tokens_per_node = calloc(nnodes, sizeof(*inner->tokens_per_node));
    inner->tokens_per_expert = calloc((size_t)plan->args.n_experts, sizeof(*inner->tokens_per_expert));
    inner->rail = calloc(nnodes, sizeof(*inner->rail));
    inner->net_tokens = calloc(nnodes, sizeof(*inner->net_tokens));
    inner->n_net_tokens = calloc(nnodes, sizeof(*inner->n_net_tokens));
    inner->recv_per_expert = calloc(n_local, sizeof(*inner->recv_per_expert));
    inner->recv_exact = calloc(n_local, sizeof(*inner->recv_exact));
    inner->recv_from_rank = calloc(nranks + 1, sizeof(*inner->recv_from_rank));
    inner->expert_start = calloc(n_local + 1, sizeof(*inner->expert_start));
    inner->rows_on = calloc(nranks, sizeof(*inner->rows_on));
    inner->first_row = calloc(nranks, sizeof(*inner->first_row));
    inner->prefix = calloc(nranks * nranks, sizeof(*inner->prefix));
    inner->max_tokens = calloc(nranks, sizeof(*inner->max_tokens));
    inner->n_tokens = plan->args.n_tokens;
    if (inner->index && inner->tokens_per_rank && inner->tokens_per_node && inner->tokens_per_expert && inner->rail &&
        inner->net_tokens && inner->n_net_tokens && inner->recv_per_expert && inner->recv_exact &&
        inner->recv_from_rank && inner->expert_start && inner->rows_on && inner->first_row && inner->prefix &&
        inner->max_tokens)
        return inner;
    free_inner(inner, (int)nnodes);
    return NULL;
}

void ep_group_plan_discard(ep_plan *plan)
{
    forget(ep_group_of(plan->comm), plan);
    free_inner(plan->impl, plan->comm->nnodes);
    plan->impl = NULL;
}

ep_status ep_group_plan_prepare(ep_plan *plan)
{
    plan->impl = new_inner(plan);
    return plan->impl ? EP_OK : ep_fail(EP_E_MEMORY, "ep_plan_new: no memory for %d tokens", plan->args.n_tokens);
}

ep_status ep_group_plan_publish(ep_plan *plan)
{
    struct ep_group *group = ep_group_of(plan->comm);
    struct ep_group_plan *inner = plan->impl;
    ep_status status;

    inner->number = ++group->plans;
    count_sent(plan);
    fill_info(plan);
    /* A plan of fixed capacity waits for nobody, not even for its turn. */
    if (plan->args.max_recv_tokens > 0 && !ep_group_is_idle(group))
        status = ep_group_submit(group, NULL, publish, &plan, sizeof(plan));
    else
        status = ep_group_run(group, publish, &plan);
    if (status == EP_OK && plan->args.max_recv_tokens == 0)
        status = ep_group_plan_complete(group, plan);
    if (status != EP_OK)
        ep_group_plan_discard(plan);
    return status;
}

static ep_status exchange_sizes(ep_plan *plan)
{
    struct ep_group_plan *inner;

    EP_TRY(ep_group_plan_prepare(plan));
    inner = plan->impl;
    free(inner->index);
    inner->index = NULL;
    EP_TRY(ep_group_plan_publish(plan));
    return ep_group_plan_complete(ep_group_of(plan->comm), plan);
}

ep_status ep_group_plan_exchange_sizes(ep_plan *plan)
{
    ep_status status = exchange_sizes(plan);

    if (status != EP_OK) {
        ep_group_plan_close(plan);
        return status;
    }
    plan->info.n_send = plan->info.n_wire = plan->info.n_net = -1;
    atomic_store_explicit(&plan->counted, false, memory_order_release);
    return EP_OK;
}

/* --- routing ---------------------------------------------------------------------------------------------------- */

ep_status ep_group_plan_open(ep_plan *plan, const ep_plan_args *args)
{
    struct ep_group_routing routing = {args->topk_idx, args->token_in_rank, args->tokens_per_expert};
    ep_status status;

    EP_TRY(ep_group_stream_ready(plan->comm, args->stream));
    EP_TRY(ep_group_plan_prepare(plan));
    status = ep_group_plan_read_routing(plan, &routing);
    if (status == EP_OK)
        return ep_group_plan_publish(plan);
    ep_group_plan_discard(plan);
    return status;
}

struct update_job {
    ep_plan *plan;
    ep_plan_update_args args;
};

/* The routes of what the plan was before go; its exchange is complete, as that of all plans before it. */
static ep_status start_update(ep_plan *plan, const ep_plan_update_args *args)
{
    struct ep_group_routing routing = {args->topk_idx, args->token_in_rank, args->tokens_per_expert};
    struct ep_group_plan *inner = plan->impl;

    free_routes(inner, plan->comm->nnodes);
    inner->complete = false;
    inner->verdict = EP_OK;
    inner->n_tokens = args->n_tokens;
    inner->index = malloc(((size_t)args->n_tokens + 1) * (size_t)plan->args.topk * sizeof(*inner->index));
    if (!inner->index)
        return ep_fail(EP_E_MEMORY, "ep_plan_update: no memory for %d tokens", args->n_tokens);
    EP_TRY(ep_group_plan_read_routing(plan, &routing));
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
    /* The next operation reports what all ranks refuse. */
    if (status == EP_OK && !ep_group_plan_is_refused(job->plan))
        status = ep_group_plan_verdict(job->plan);
    return ep_group_fail_queued(group, status, EP_GROUP_PLAN_COUNTS, false);
}

ep_status ep_group_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    struct update_job job = {.plan = plan, .args = *args};

    return ep_group_submit(ep_group_of(plan->comm), stream, run_update, &job, sizeof(job));
}

void ep_group_plan_close(ep_plan *plan)
{
    struct ep_group *group = ep_group_of(plan->comm);
    struct ep_group_plan *inner = plan->impl;

    if (!inner)
        return;
    ep_group_drain(group);
    plan->impl = NULL;
    for (int i = 0; i < group->n_pending; i++) {
        ep_plan *orphan;

        if (group->pending[i] != plan)
            continue;
        /*
         * Never used, but its exchange is under way and the peers count on it: it stays until the next collective call
         * completes it. Only where there is no memory for that is it completed, and waited for, at once.
         */
        orphan = malloc(sizeof(*orphan));
        plan->impl = inner;
        if (!orphan) {
            ep_group_plan_complete(group, plan);
            break;
        }
        *orphan = (ep_plan){.comm = plan->comm, .impl = inner, .args = plan->args, .info = plan->info};
        inner->orphaned = true;
        group->pending[i] = orphan;
        plan->impl = NULL;
        return;
    }
    forget(group, plan);
    free_inner(inner, plan->comm->nnodes);
    plan->impl = NULL;
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
