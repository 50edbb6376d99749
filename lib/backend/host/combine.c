/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combine within a node: no rank sends. Each rank reads the rows of its tokens from the memory of the peers, adds them
 * in fp32 in the fixed order and writes the result once.
 */
#include "backend/host/host.h"

#include "group/failure.h"
#include "group/plan.h"
#include "group/queue.h"

#include <stdlib.h>
#include <string.h>

#define BATCH 64

int host_bias_terms(const struct host_sum *sum, int t, struct ep_row_term *ret_terms)
{
    int n = 0;

    for (int b = 0; b < 2; b++)
        if (sum->args->bias[b])
            ret_terms[n++] = (struct ep_row_term){.row = (const char *)sum->args->bias[b] + (size_t)t * sum->row_bytes};
    return n;
}

int host_row_terms(const struct host_sum *sum, const struct ep_group_route *route, int t, struct ep_row_term *ret_terms)
{
    const struct ep_group_entry *entry = route->entry + route->start[t];
    int n = route->start[t + 1] - route->start[t];

    for (int i = 0; i < n; i++)
        ret_terms[i] =
            (struct ep_row_term){.row = sum->in[entry[i].local][EP_GROUP_AT_X] + (size_t)entry[i].row * sum->row_bytes};
    return n;
}

void host_sum_terms(const struct host_sum *sum, int t, const struct ep_row_term *terms, int n)
{
    void *out = (char *)sum->args->out + (size_t)t * sum->row_bytes;

    if (n == 0)
        memset(out, 0, sum->row_bytes);
    else
        sum->sum_bf16(out, terms, n, sum->args->hidden);
}

void host_sum_weights(const struct host_sum *sum, const struct ep_group_route *route, int t, float *ret_sum)
{
    size_t topk = (size_t)sum->plan->args.topk;

    for (int32_t i = route->start[t]; i < route->start[t + 1]; i++) {
        const struct ep_group_entry *entry = &route->entry[i];
        const float *weights = (const float *)(void *)sum->in[entry->local][EP_GROUP_AT_WEIGHTS];

        if (sum->plan->args.flags & EP_PLAN_EXPANDED) {
            ret_sum[entry->k] += weights[entry->row];
            continue;
        }
        for (size_t k = 0; k < topk; k++)
            ret_sum[k] += weights[(size_t)entry->row * topk + k];
    }
}

/*
 * --- the order of EP_COMBINE_BY_CHOICE: see ep_combine() ---
 *
 * The rows of a token are few, so they are sorted by insertion.
 */

struct term {
    int local; /* rank of the node that has the row */
    int32_t row;
    int k; /* choice that it is sorted by */
};

static void insert(struct term *terms, int n, struct term term)
{
    int at = n;

    for (; at > 0 && terms[at - 1].k > term.k; at--)
        terms[at] = terms[at - 1];
    terms[at] = term;
}

static struct ep_row_term row_of(const struct host_sum *sum, const struct term *term)
{
    return (struct ep_row_term){.row = sum->in[term->local][EP_GROUP_AT_X] + (size_t)term->row * sum->row_bytes};
}

/* The last choice of a token that is on a rank of the node. */
static int last_choice(const struct host_sum *sum, const struct ep_group_route *route, int t, int local)
{
    const int32_t *index = route->index + (size_t)t * (size_t)sum->plan->args.topk;
    int n_local = sum->plan->info.n_local_experts, rank = sum->group->first + local;
    int k = sum->plan->args.topk - 1;

    while (k > 0 && (index[k] < 0 || index[k] / n_local != rank))
        k--;
    return k;
}

static int sort_terms(const struct host_sum *sum, const struct ep_group_route *route, int t, struct term *ret_terms)
{
    bool expanded = sum->plan->args.flags & EP_PLAN_EXPANDED;
    int n = 0;

    for (int32_t i = route->start[t]; i < route->start[t + 1]; i++) {
        const struct ep_group_entry *entry = &route->entry[i];
        struct term term = {.local = entry->local, .row = entry->row};

        term.k = expanded ? entry->k : last_choice(sum, route, t, entry->local);
        insert(ret_terms, n++, term);
    }
    return n;
}

/*
 * Adds up rows sorted by choice for each rank: the position of a rank is that of its last row. Returns the number of
 * sums.
 */
static int add_by_rank(const struct host_sum *sum, const struct term *terms, int n, struct ep_row_term *ret_terms)
{
    int hidden = sum->args->hidden, n_sums = 0;

    for (int last = 0; last < n; last++) {
        uint16_t *partial = sum->scratch + (size_t)(n_sums + 1) * (size_t)hidden;
        struct ep_row_term rows[EP_MAX_TOPK + 1] = {{.row = sum->scratch}};
        bool is_last = true;
        int n_rows = 1;

        for (int i = last + 1; i < n; i++)
            is_last &= terms[i].local != terms[last].local;
        if (!is_last)
            continue;
        for (int i = 0; i <= last; i++)
            if (terms[i].local == terms[last].local)
                rows[n_rows++] = row_of(sum, &terms[i]);
        ep_rows_get()->sum_bf16(partial, rows, n_rows, hidden);
        ret_terms[n_sums++] = (struct ep_row_term){.row = partial};
    }
    return n_sums;
}

int host_choice_terms(const struct host_sum *sum, const struct ep_group_route *route, int t,
                      struct ep_row_term *ret_terms)
{
    struct term terms[EP_MAX_TOPK];
    int n = sort_terms(sum, route, t, terms);

    if ((sum->args->flags & EP_COMBINE_ROUND_PARTIAL) && (sum->plan->args.flags & EP_PLAN_EXPANDED))
        return add_by_rank(sum, terms, n, ret_terms);
    for (int i = 0; i < n; i++)
        ret_terms[i] = row_of(sum, &terms[i]);
    return n;
}

/* --- sums of tokens --- */

/* Tokens [begin, end) of this rank, all of whose rows are on this node. */
static void sum_tokens(const struct host_sum *sum, int begin, int end)
{
    const struct ep_group_route *route = &((struct ep_group_plan *)sum->plan->impl)->own;
    size_t topk = (size_t)sum->plan->args.topk;

    for (int t = begin; t < end; t++) {
        struct ep_row_term terms[EP_MAX_TOPK + 2];
        int n = host_bias_terms(sum, t, terms);

        if (!(sum->args->flags & EP_COMBINE_BY_CHOICE)) {
            n += host_row_terms(sum, route, t, terms + n);
        } else {
            if (n == 0)
                terms[n++] = (struct ep_row_term){.row = sum->scratch};
            n += host_choice_terms(sum, route, t, terms + n);
        }
        host_sum_terms(sum, t, terms, n);
        if (sum->args->out_topk_weights) {
            float *weights = sum->args->out_topk_weights + (size_t)t * topk;

            memset(weights, 0, topk * sizeof(*weights));
            host_sum_weights(sum, route, t, weights);
        }
    }
}

static ep_status sum_node(const struct host_sum *sum)
{
    int n = ep_group_plan_of(sum->plan)->n_tokens;

    for (int t = 0; t < n; t += BATCH) {
        EP_TRY(ep_group_check(sum->group));
        sum_tokens(sum, t, t + BATCH < n ? t + BATCH : n);
    }
    return EP_OK;
}

/* --- one combine ------------------------------------------------------------------------------------------------ */

struct combine_job {
    ep_plan *plan;
    ep_combine_args args;
};

/* Publishes one input, which is copied into staging unless it is symmetric memory. */
static ep_status publish_input(struct host_sum *sum, int which, const void *input, size_t bytes,
                               struct ep_group_address *ret_address)
{
    uint64_t begin = ep_now_ns();
    void *published = (void *)(uintptr_t)input;

    EP_TRY(host_publish(sum->group, "ep_combine", which, true, bytes, &published, ret_address));
    if (!input || published == input)
        return EP_OK;
    memcpy(published, input, bytes);
    sum->stats->ns_copy += ep_now_ns() - begin;
    return EP_OK;
}

/* Checks the weights of the received rows; padding between the experts of an expanded plan is not used. */
static ep_status check_values(const struct host_sum *sum)
{
    const ep_plan *plan = sum->plan;
    const struct ep_group_plan *inner = plan->impl;
    const float *weights = sum->args->topk_weights;
    bool found = false;

    if (!weights || !(sum->group->comm->config.flags & EP_COMM_CHECK_VALUES))
        return EP_OK;
    if (!(plan->args.flags & EP_PLAN_EXPANDED))
        found = host_has_nan(weights, (size_t)plan->full.n_recv * (size_t)plan->args.topk);
    for (int local = 0; plan->args.flags & EP_PLAN_EXPANDED && local < plan->info.n_local_experts; local++)
        found |= host_has_nan(weights + inner->expert_start[local], (size_t)inner->recv_exact[local]);
    return found ? ep_fail(EP_E_VALUE, "ep_combine: NaN in topk_weights of rank %d", sum->group->comm->rank) : EP_OK;
}

static ep_status combine_body(struct host_sum *sum)
{
    struct ep_group *group = sum->group;
    const ep_combine_args *args = sum->args;
    struct ep_group_descriptor descriptor = {.phase = EP_GROUP_COMBINE_READY,
                                             .plan_number = ep_group_plan_of(sum->plan)->number,
                                             .dtype = args->dtype,
                                             .hidden = args->hidden,
                                             .outputs = args->out_topk_weights ? EP_GROUP_OUT_WEIGHTS : 0};
    const void *inputs[EP_GROUP_AT_COUNT] = {[EP_GROUP_AT_X] = args->x, [EP_GROUP_AT_WEIGHTS] = args->topk_weights};
    uint64_t begin = ep_now_ns(), at;
    size_t row_bytes[EP_GROUP_AT_COUNT] = {0}, n_bytes;
    ep_status status;

    EP_TRY(ep_group_plan_complete(group, (ep_plan *)(uintptr_t)sum->plan));
    sum->row_bytes = (size_t)args->hidden * sizeof(uint16_t);
    row_bytes[EP_GROUP_AT_X] = sum->row_bytes;
    if (args->out_topk_weights)
        row_bytes[EP_GROUP_AT_WEIGHTS] =
            (sum->plan->args.flags & EP_PLAN_EXPANDED ? 1 : (size_t)sum->plan->args.topk) * sizeof(float);
    n_bytes = (size_t)ep_group_plan_of(sum->plan)->n_tokens * sum->row_bytes * (size_t)group->nlocal;
    sum->sum_bf16 = n_bytes > EP_ROWS_STREAM_BYTES ? ep_rows_get()->sum_bf16_stream : ep_rows_get()->sum_bf16;
    EP_TRY(check_values(sum));
    descriptor.rows = sum->plan->full.n_recv;
    for (int i = 0; i < EP_GROUP_AT_COUNT; i++)
        EP_TRY(publish_input(sum, i, inputs[i], (size_t)descriptor.rows * row_bytes[i], &descriptor.at[i]));
    EP_TRY(host_op_begin(group, sum->plan, &descriptor));
    EP_TRY(host_op_map(group, EP_GROUP_COMBINE_READY, row_bytes, sum->in));
    at = ep_now_ns();
    sum->stats->ns_wait_ready = at - begin - sum->stats->ns_copy;
    status = group->comm->nnodes > 1 ? host_internode_combine(sum) : sum_node(sum);
    if (status != EP_OK)
        return ep_group_set_own_failure(group, status, group->comm->rank, EP_GROUP_COMBINE_MOVE);
    sum->stats->ns_move = ep_now_ns() - at;
    at = ep_now_ns();
    EP_TRY(host_op_end(group, EP_GROUP_COMBINE_DONE));
    sum->stats->ns_wait_done = ep_now_ns() - at;
    sum->stats->ns_total = ep_now_ns() - begin;
    host_op_set_stats(sum->plan, sum->row_bytes, sum->stats);
    return EP_OK;
}

static ep_status run_combine(void *arguments)
{
    struct combine_job *job = arguments;
    struct ep_group *group = ep_group_of(job->plan->comm);
    ep_stats stats = {.size = sizeof(stats)};
    struct host_sum sum = {.group = group, .plan = job->plan, .args = &job->args, .stats = &stats};
    ep_status status;

    sum.in = calloc((size_t)group->nlocal, sizeof(*sum.in));
    if (job->args.flags & EP_COMBINE_BY_CHOICE)
        sum.scratch = calloc((size_t)job->plan->args.topk + 2, (size_t)job->args.hidden * sizeof(*sum.scratch));
    if (sum.in && (sum.scratch || !(job->args.flags & EP_COMBINE_BY_CHOICE)))
        status = combine_body(&sum);
    else
        status = ep_fail(EP_E_MEMORY, "ep_combine: no memory for %d ranks", group->nlocal);
    free(sum.in);
    free(sum.scratch);
    return ep_group_plan_is_refused(job->plan) ? status
                                               : ep_group_fail_queued(group, status, EP_GROUP_COMBINE_READY, false);
}

ep_status host_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream)
{
    struct combine_job job = {.plan = plan, .args = *args};

    return ep_group_submit(ep_group_of(plan->comm), stream, run_combine, &job, sizeof(job));
}
