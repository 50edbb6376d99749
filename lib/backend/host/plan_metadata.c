/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Metadata of a plan that ranks exchange on demand: the source token of each received row, and the rows of each token.
 * It is exchanged as rows of a dispatch that contain their own source, counted from 1: padding rows stay 0.
 */
#include "backend/host/host.h"

#include "group/plan.h"
#include "group/queue.h"

#include <stdlib.h>

/* One row: its source rank and token. */
struct source {
    int32_t rank, token, unused[2];
};

#define SOURCE_HIDDEN 8 /* its size in bf16 elements */

/* The received rows; `choice`, in the expanded layout: the choice of its token that each row belongs to. */
struct sources {
    struct source *mine, *all;
    float *choices, *choice;
};

static void free_sources(struct sources *sources)
{
    free(sources->mine);
    free(sources->all);
    free(sources->choices);
    free(sources->choice);
}

/* On the thread that runs jobs. `with_choice`: in the expanded layout only. */
static ep_status exchange_sources(ep_plan *plan, bool with_choice, struct sources *ret_sources)
{
    size_t n = (size_t)ep_group_plan_of(plan)->n_tokens, out = (size_t)plan->full.out_rows;
    size_t entries = n * (size_t)plan->args.topk;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    struct sources sources = {.mine = calloc(n + 1, sizeof(*sources.mine)),
                              .all = calloc(out + 1, sizeof(*sources.all))};
    ep_status status;

    if (with_choice) {
        sources.choices = malloc((entries + 1) * sizeof(*sources.choices));
        sources.choice = calloc(out + 1, sizeof(*sources.choice));
    }
    if (!sources.mine || !sources.all || (with_choice && (!sources.choices || !sources.choice))) {
        free_sources(&sources);
        return ep_fail(EP_E_MEMORY, "plan: no memory for the sources of %zu rows", out);
    }
    for (size_t t = 0; t < n; t++)
        sources.mine[t] = (struct source){.rank = plan->comm->rank + 1, .token = (int32_t)t + 1};
    for (size_t i = 0; with_choice && i < entries; i++)
        sources.choices[i] = (float)(i % (size_t)plan->args.topk);
    args.x = sources.mine;
    args.dtype = EP_BF16;
    args.hidden = SOURCE_HIDDEN;
    args.recv_x = sources.all;
    args.out_rows = (int64_t)out;
    args.topk_weights = sources.choices;
    args.recv_topk_weights = sources.choice;
    status = host_dispatch_internal(plan, &args);
    if (status == EP_OK)
        *ret_sources = sources;
    else
        free_sources(&sources);
    return status;
}

struct sources_job {
    ep_plan *plan;
    int32_t *ret_rank, *ret_token;
};

static ep_status run_sources(void *arguments)
{
    const struct sources_job *job = arguments;
    struct sources sources;

    EP_TRY(exchange_sources(job->plan, false, &sources));
    for (int64_t row = 0; row < job->plan->full.n_recv; row++) {
        if (job->ret_rank)
            job->ret_rank[row] = sources.all[row].rank - 1;
        if (job->ret_token)
            job->ret_token[row] = sources.all[row].token - 1;
    }
    free_sources(&sources);
    return EP_OK;
}

ep_status host_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    struct sources_job job = {.plan = plan, .ret_rank = ret_rank, .ret_token = ret_token};

    return ep_group_run(ep_group_of(plan->comm), run_sources, &job);
}

/* --- metadata --------------------------------------------------------------------------------------------------- */

struct metadata_job {
    ep_plan *plan;
    ep_plan_metadata dst;
};

static ep_status check_token(const ep_plan *plan, const ep_plan_metadata *dst, const struct source *source)
{
    if (source->rank < 1 || source->rank > plan->comm->nranks || source->token < 1)
        return ep_fail(EP_E_MISMATCH,
                       "ep_plan_get_metadata: the sources received from a rank are damaged: rank %d, token %d",
                       source->rank - 1, source->token - 1);
    if (source->token > dst->source_stride)
        return ep_fail(EP_E_ARG, "ep_plan_get_metadata: source_stride is %d, but rank %d has token %d",
                       dst->source_stride, source->rank - 1, source->token - 1);
    return EP_OK;
}

static int32_t source_number(const ep_plan_metadata *dst, const struct source *source)
{
    return (source->rank - 1) * dst->source_stride + source->token - 1;
}

static int compare_numbers(const void *a, const void *b)
{
    int32_t left = *(const int32_t *)a, right = *(const int32_t *)b;

    return (left > right) - (left < right);
}

/* Lists the tokens of all rows, each once, ordered by number. */
static ep_status list_tokens(const ep_plan *plan, const ep_plan_metadata *dst, const struct source *all,
                             int32_t *tokens)
{
    int64_t n = 0, unique = 0, expected = ep_group_plan_of(plan)->recv_from_rank[plan->comm->nranks];

    for (int64_t row = 0; row < plan->full.n_recv; row++) {
        if (!all[row].rank)
            continue;
        EP_TRY(check_token(plan, dst, &all[row]));
        tokens[n++] = source_number(dst, &all[row]);
    }
    qsort(tokens, (size_t)n, sizeof(*tokens), compare_numbers);
    for (int64_t i = 0; i < n; i++)
        if (!i || tokens[i] != tokens[unique - 1])
            tokens[unique++] = tokens[i];
    return unique == expected ? EP_OK
                              : ep_fail(EP_E_MISMATCH,
                                        "ep_plan_get_metadata: the sources received from the ranks are damaged: %lld "
                                        "tokens, not %lld",
                                        (long long)unique, (long long)expected);
}

/* Writes the rows of each token. */
static ep_status place_slots(const ep_plan *plan, const ep_plan_metadata *dst, const struct sources *sources,
                             const int32_t *tokens)
{
    size_t n = (size_t)ep_group_plan_of(plan)->recv_from_rank[plan->comm->nranks], topk = (size_t)plan->args.topk;

    for (size_t i = 0; i < (size_t)plan->full.out_rows * topk; i++)
        dst->recv_slot[i] = i < n * topk ? -1 : 0;
    for (int64_t row = 0; row < plan->full.n_recv; row++) {
        int32_t number, *found;

        if (!sources->all[row].rank)
            continue;
        number = source_number(dst, &sources->all[row]);
        found = bsearch(&number, tokens, n, sizeof(*tokens), compare_numbers);
        if (!found || !(sources->choice[row] >= 0 && sources->choice[row] < (float)topk))
            return ep_fail(EP_E_MISMATCH,
                           "ep_plan_get_metadata: the sources received from a rank are damaged: choice %g",
                           (double)sources->choice[row]);
        dst->recv_slot[(size_t)(found - tokens) * topk + (size_t)sources->choice[row]] = (int32_t)row;
    }
    return EP_OK;
}

static ep_status write_tokens(const ep_plan *plan, const ep_plan_metadata *dst, const struct sources *sources)
{
    int64_t n_rows = plan->full.n_recv, n = ep_group_plan_of(plan)->recv_from_rank[plan->comm->nranks];
    int32_t *tokens = malloc(((size_t)n_rows + 1) * sizeof(*tokens));
    ep_status status;

    if (!tokens)
        return ep_fail(EP_E_MEMORY, "ep_plan_get_metadata: no memory for %lld rows", (long long)n_rows);
    status = list_tokens(plan, dst, sources->all, tokens);
    for (int64_t i = 0; status == EP_OK && dst->recv_source && i < plan->full.out_rows; i++)
        dst->recv_source[i] = i < n ? tokens[i] : 0;
    if (status == EP_OK && dst->recv_slot)
        status = place_slots(plan, dst, sources, tokens);
    free(tokens);
    return status;
}

static void write_counts(const ep_plan *plan, const ep_plan_metadata *dst)
{
    const struct ep_group_plan *inner = plan->impl;
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    size_t nranks = (size_t)plan->comm->nranks;

    if (dst->n_recv_tokens)
        *dst->n_recv_tokens = (int32_t)inner->recv_from_rank[nranks];
    for (size_t rank = 0; dst->psum_rank && rank < nranks; rank++)
        dst->psum_rank[rank] = (int32_t)inner->recv_from_rank[rank + 1];
    for (int local = 0; dst->psum_expert && local < plan->info.n_local_experts; local++)
        dst->psum_expert[local] = (int32_t)(expanded ? inner->expert_start[local] + inner->recv_exact[local]
                                                     : inner->expert_start[local + 1]);
    for (int local = 0; dst->count_exact && local < plan->info.n_local_experts; local++)
        dst->count_exact[local] = inner->recv_exact[local];
    if (dst->rank_prefix)
        memcpy(dst->rank_prefix, inner->prefix, nranks * nranks * sizeof(*inner->prefix));
}

/* For a plan that is refused: whoever reads these as sizes must find none. */
static void clear(const ep_plan *plan, const ep_plan_metadata *dst)
{
    size_t nranks = (size_t)plan->comm->nranks, n_local = (size_t)plan->info.n_local_experts;
    size_t rows = (size_t)plan->args.max_recv_tokens;
    const struct {
        int32_t *at;
        size_t n;
    } outputs[] = {{dst->recv_source, rows},
                   {dst->recv_slot, rows * (size_t)plan->args.topk},
                   {dst->n_recv_tokens, 1},
                   {dst->psum_rank, nranks},
                   {dst->psum_expert, n_local},
                   {dst->count_exact, n_local},
                   {dst->rank_prefix, nranks * nranks}};

    for (size_t i = 0; i < sizeof(outputs) / sizeof(outputs[0]); i++)
        if (outputs[i].at)
            memset(outputs[i].at, 0, outputs[i].n * sizeof(int32_t));
}

static ep_status run_metadata(void *arguments)
{
    const struct metadata_job *job = arguments;
    struct ep_group *group = ep_group_of(job->plan->comm);
    const ep_plan_metadata *dst = &job->dst;
    struct sources sources;
    ep_status status;

    status = ep_group_plan_complete(group, job->plan);
    if (status == EP_E_CAPACITY)
        clear(job->plan, dst);
    EP_TRY(status);
    write_counts(job->plan, dst);
    if (!dst->recv_source && !dst->recv_slot)
        return EP_OK;
    EP_TRY(exchange_sources(job->plan, dst->recv_slot, &sources));
    status = write_tokens(job->plan, dst, &sources);
    free_sources(&sources);
    return ep_group_fail_queued(group, status, EP_GROUP_DISPATCH_DONE, false);
}

ep_status host_plan_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream)
{
    struct metadata_job job = {.plan = plan, .dst = *dst};

    return ep_group_submit(ep_group_of(plan->comm), stream, run_metadata, &job, sizeof(job));
}
