/* SPDX-License-Identifier: Apache-2.0 */
/* Plans: made from choices or from a mask, updated in stream order, and queried. */
#include "property.h"

#include <stdlib.h>
#include <string.h>

/* --- routings ---------------------------------------------------------------------------------------------------- */

bool draw_version(const struct run *run, int plan, int number, struct version *ret_version)
{
    const struct plan_shape *shape = &run->shape->plans[plan];
    struct version version = {0};
    size_t n = (size_t)shape->versions[number].n_tokens[run->rank];

    version.index = malloc(n * (size_t)run->shape->topk * 8 + 8);
    version.mask = malloc(n * (size_t)run->shape->nranks + 1);
    version.per_expert = malloc((size_t)run->shape->n_experts * sizeof(int32_t));
    *ret_version = version;
    return version.index && version.mask && version.per_expert &&
           draw_routing(run->shape, plan, number, &ret_version->group) &&
           reference_layout_init(&ret_version->group, run->rank, shape->flags & EP_PLAN_EXPANDED,
                                 shape->alignment ? shape->alignment : 1, &ret_version->layout, NULL);
}

void write_version(struct run *run, const struct plan_shape *shape, struct version *version)
{
    size_t n = (size_t)version->group.n_tokens[run->rank], topk = (size_t)run->shape->topk;
    struct reference_counts counts;

    for (size_t i = 0; i < n * topk; i++) {
        if (shape->idx_type == EP_I64)
            ((int64_t *)version->index)[i] = version->group.experts[run->rank][i];
        else
            ((int32_t *)version->index)[i] = version->group.experts[run->rank][i];
    }
    if (!reference_counts_init(&version->group, run->rank, &counts, NULL)) {
        fail_check(run, "no memory");
        return;
    }
    memcpy(version->mask, counts.token_in_rank, n * (size_t)run->shape->nranks);
    memcpy(version->per_expert, counts.tokens_per_expert, (size_t)run->shape->n_experts * sizeof(int32_t));
    reference_counts_done(&counts);
}

/* All versions, because the plan needs room for each of them. */
static bool draw_versions(struct run *run, int plan)
{
    const struct plan_shape *shape = &run->shape->plans[plan];
    struct plan_state *state = &run->plans[plan];

    for (int v = 0; v < shape->n_versions; v++) {
        if (!draw_version(run, plan, v, &state->versions[v])) {
            fail_check(run, "no memory");
            return false;
        }
        for (int rank = 0; rank < run->shape->nranks; rank++)
            if (shape->versions[v].n_tokens[rank] > state->max_tokens)
                state->max_tokens = shape->versions[v].n_tokens[rank];
    }
    write_version(run, shape, &state->versions[0]);
    return !run->wrong;
}

void plan_done(struct plan_state *state)
{
    ep_plan_free(state->plan);
    for (int v = 0; v < MAX_VERSIONS; v++) {
        struct version *version = &state->versions[v];

        reference_layout_done(&version->layout);
        reference_group_done(&version->group);
        free(version->index);
        free(version->mask);
        free(version->per_expert);
    }
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static bool same_numbers(const int32_t *a, const int32_t *b, int n)
{
    return memcmp(a, b, (size_t)n * sizeof(*a)) == 0;
}

static void check_layout_call(struct run *run, const ep_plan_args *args, const struct reference_group *group)
{
    int32_t ranks[MAX_RANKS], nodes[MAX_RANKS], *experts = calloc((size_t)run->shape->n_experts, sizeof(*experts));
    struct reference_counts counts;
    ep_layout layout = EP_LAYOUT_INIT;

    if (!experts || !reference_counts_init(group, run->rank, &counts, NULL)) {
        fail_check(run, "no memory");
        goto free_experts;
    }
    layout.tokens_per_rank = ranks;
    layout.tokens_per_node = nodes;
    layout.tokens_per_expert = experts;
    if (passed(run, ep_plan_layout(run->comm, args, &layout), "ep_plan_layout") &&
        !(same_numbers(ranks, counts.tokens_per_rank, run->shape->nranks) &&
          same_numbers(nodes, counts.tokens_per_node, run->shape->nnodes) &&
          same_numbers(experts, counts.tokens_per_expert, run->shape->n_experts)))
        fail_check(run, "ep_plan_layout: wrong counts");
    reference_counts_done(&counts);
free_experts:
    free(experts);
}

static void check_info(struct run *run, const struct plan_state *state, bool known)
{
    const struct reference_layout *layout = &state->versions[0].layout;
    int n_local = run->shape->n_experts / run->shape->nranks;
    ep_plan_info info = {.size = sizeof(info)};

    if (!passed(run, ep_plan_get_info(state->plan, &info), "ep_plan_get_info"))
        return;
    if (state->version) {
        if (info.n_recv != -1 || info.n_send != -1 || info.n_wire != -1 || info.n_net != -1 || info.recv_per_expert ||
            info.recv_from_rank || info.expert_start || info.out_rows != state->max_recv_tokens ||
            info.n_tokens != state->versions[state->version].group.n_tokens[run->rank])
            fail_check(run, "counts after an update");
        return;
    }
    if (info.n_send != layout->n_send || info.n_wire != layout->n_wire || info.n_net != layout->n_net)
        fail_check(run, "n_send %lld, n_wire %lld, n_net %lld, should be %lld, %lld, %lld", (long long)info.n_send,
                   (long long)info.n_wire, (long long)info.n_net, (long long)layout->n_send, (long long)layout->n_wire,
                   (long long)layout->n_net);
    if (info.out_rows != (state->max_recv_tokens ? state->max_recv_tokens : layout->n_rows))
        fail_check(run, "out_rows is %lld", (long long)info.out_rows);
    if (!known) {
        if (info.n_recv != -1 || info.recv_per_expert || info.recv_from_rank || info.expert_start)
            fail_check(run, "counts are known before the first dispatch");
        return;
    }
    if (info.n_recv != layout->n_rows || !same_numbers(info.recv_per_expert, layout->recv_per_expert, n_local))
        fail_check(run, "n_recv is %lld, should be %lld, or recv_per_expert is wrong", (long long)info.n_recv,
                   (long long)layout->n_rows);
    else if (layout->expanded && memcmp(info.expert_start, layout->expert_start, ((size_t)n_local + 1) * 8) != 0)
        fail_check(run, "expert_start is wrong");
    else if (!layout->expanded &&
             memcmp(info.recv_from_rank, layout->recv_from_rank, ((size_t)run->shape->nranks + 1) * 8) != 0)
        fail_check(run, "recv_from_rank is wrong");
}

/* Room for the rows of this version, or for the largest possible number. */
static void draw_capacity(struct run *run, const struct plan_shape *shape, ep_plan_args *args, struct plan_state *state)
{
    int64_t most = 0;

    for (int v = 0; v < shape->n_versions; v++)
        most = state->versions[v].layout.n_rows > most ? state->versions[v].layout.n_rows : most;
    state->max_recv_tokens = most + 1 + random_below(&run->local, 5);
    args->max_tokens = state->max_tokens;
    if (state->max_tokens && random_below(&run->local, 3) == 0) {
        if (passed(run, ep_plan_get_max_rows(run->comm, args, &state->max_recv_tokens), "ep_plan_get_max_rows") &&
            state->max_recv_tokens < most)
            fail_check(run, "ep_plan_get_max_rows: %lld, but %lld rows come", (long long)state->max_recv_tokens,
                       (long long)most);
    }
    args->max_recv_tokens = state->max_recv_tokens;
}

void make_plan(struct run *run, const struct op *op)
{
    const struct plan_shape *shape = &run->shape->plans[op->plan];
    struct plan_state *state = &run->plans[op->plan];
    const struct version *version = &state->versions[0];
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    if (!draw_versions(run, op->plan))
        return;
    args.n_tokens = version->group.n_tokens[run->rank];
    args.n_experts = run->shape->n_experts;
    args.flags = shape->flags;
    args.expert_alignment = shape->alignment;
    if (shape->mask) {
        args.token_in_rank = args.n_tokens ? version->mask : NULL;
        args.tokens_per_expert = version->per_expert;
    } else {
        args.topk_idx = args.n_tokens ? version->index : NULL;
        args.idx_type = shape->idx_type;
        args.topk = run->shape->topk;
    }
    if (shape->fixed_capacity)
        draw_capacity(run, shape, &args, state);
    if (!shape->mask && random_below(&run->local, 3) == 0)
        check_layout_call(run, &args, &version->group);
    if (passed(run, ep_plan_new(run->comm, &args, &state->plan), "ep_plan_new"))
        check_info(run, state, !shape->fixed_capacity);
}

/*
 * Pending operations keep the routing with which they were called. The arrays are read in stream order: some are
 * written only after the call.
 */
void update_plan(struct run *run, const struct op *op)
{
    const struct plan_shape *shape = &run->shape->plans[op->plan];
    struct plan_state *state = &run->plans[op->plan];
    struct version *version = &state->versions[op->version];
    ep_plan_update_args args = {.size = sizeof(args), .n_tokens = version->group.n_tokens[run->rank]};
    ep_stream stream = run->queues[random_below(&run->local, N_QUEUES)];
    bool late = random_below(&run->local, 2);
    ep_event *written = NULL;

    if (shape->mask) {
        args.token_in_rank = args.n_tokens ? version->mask : NULL;
        args.tokens_per_expert = version->per_expert;
    } else {
        args.topk_idx = args.n_tokens ? version->index : NULL;
    }
    if (!late)
        write_version(run, shape, version);
    else if (!passed(run, ep_event_new(run->comm, &written), "ep_event_new") ||
             !passed(run, ep_stream_wait(run->comm, stream, written), "ep_stream_wait"))
        return;
    passed(run, ep_plan_update(state->plan, &args, stream), "ep_plan_update");
    state->version = op->version;
    if (late) {
        write_version(run, shape, version);
        passed(run, ep_event_signal(written), "ep_event_signal");
        ep_event_free(written);
    }
    check_info(run, state, false);
}

/*
 * Counts of a plan of fixed capacity may be known before its first operation, but not on some ranks only: not while
 * work of other plans is pending, which exchanges them.
 */
void check_sources(struct run *run, const struct op *op)
{
    struct plan_state *state = &run->plans[op->plan];
    const struct reference_layout *layout = &state->versions[0].layout;
    int32_t *rank = calloc((size_t)layout->n_rows + 1, sizeof(*rank));
    int32_t *token = calloc((size_t)layout->n_rows + 1, sizeof(*token));
    ep_plan_info info = {.size = sizeof(info)};
    bool known = !state->max_recv_tokens || state->used;
    ep_status status;

    drain(run);
    for (int i = 0; i < N_QUEUES; i++)
        passed(run, ep_stream_sync(run->comm, run->queues[i]), "ep_stream_sync");
    if (passed(run, ep_plan_get_info(state->plan, &info), "ep_plan_get_info"))
        known |= info.n_recv >= 0;
    known &= state->version == 0;
    status = ep_plan_get_sources(state->plan, rank, token);
    if (!known && status != EP_E_STATE)
        fail_check(run, "ep_plan_get_sources before the counts are known: %s", ep_status_name(status));
    if (known && passed(run, status, "ep_plan_get_sources")) {
        check_info(run, state, true);
        for (int64_t i = 0; i < layout->n_rows; i++)
            if (rank[i] != layout->rows[i].rank || token[i] != layout->rows[i].token)
                fail_check(run, "source of row %lld is token %d of rank %d, should be %d of %d", (long long)i, token[i],
                           rank[i], layout->rows[i].token, layout->rows[i].rank);
    }
    free(rank);
    free(token);
}

/* --- metadata ---------------------------------------------------------------------------------------------------- */

struct metadata {
    int32_t *source, *slot;
    int32_t n, ranks[MAX_RANKS], prefix[MAX_RANKS * MAX_RANKS];
    int32_t *experts, *exact;
};

static bool metadata_init(const struct run *run, size_t n_rows, struct metadata *ret)
{
    size_t n_local = (size_t)(run->shape->n_experts / run->shape->nranks), topk = (size_t)run->shape->topk;

    *ret = (struct metadata){.source = calloc(n_rows + 1, sizeof(int32_t)),
                             .slot = calloc(n_rows * topk + 1, sizeof(int32_t)),
                             .experts = calloc(n_local, sizeof(int32_t)),
                             .exact = calloc(n_local, sizeof(int32_t))};
    return ret->source && ret->slot && ret->experts && ret->exact;
}

static void metadata_done(struct metadata *metadata)
{
    free(metadata->source);
    free(metadata->slot);
    free(metadata->experts);
    free(metadata->exact);
}

static bool goes_to(const struct reference_group *group, int source, int token, int rank)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    for (int k = 0; k < group->topk; k++)
        if (experts[k] >= 0 && experts[k] / group->n_local == rank)
            return true;
    return false;
}

static int32_t row_of(const struct reference_layout *layout, int source, int token, int k)
{
    for (int64_t i = 0; i < layout->n_rows; i++)
        if (layout->rows[i].rank == source && layout->rows[i].token == token && layout->rows[i].k == k)
            return (int32_t)i;
    return -1;
}

/* The expected values, from the routing of all ranks. */
static void expect_metadata(const struct version *version, int rank, int stride, int alignment, struct metadata *want)
{
    const struct reference_group *group = &version->group;
    int sums[MAX_RANKS] = {0};
    int32_t start = 0;

    for (int source = 0; source < group->n_ranks; source++) {
        for (int t = 0; t < group->n_tokens[source]; t++) {
            for (int to = 0; to < group->n_ranks; to++)
                sums[to] += goes_to(group, source, t, to);
            for (int k = 0; k < group->topk; k++) {
                int32_t local = group->experts[source][t * group->topk + k] - rank * group->n_local;

                if (local >= 0 && local < group->n_local)
                    want->exact[local]++;
            }
            if (!goes_to(group, source, t, rank))
                continue;
            for (int k = 0; version->layout.expanded && k < group->topk; k++)
                want->slot[want->n * group->topk + k] = row_of(&version->layout, source, t, k);
            want->source[want->n++] = source * stride + t;
        }
        want->ranks[source] = sums[rank];
        memcpy(want->prefix + source * group->n_ranks, sums, (size_t)group->n_ranks * sizeof(*sums));
    }
    for (int local = 0; local < group->n_local; local++) {
        want->experts[local] = start + want->exact[local];
        start += (want->exact[local] + alignment - 1) / alignment * alignment;
        if (!version->layout.expanded)
            want->experts[local] = start;
    }
}

static void compare_metadata(struct run *run, bool expanded, const struct metadata *got, const struct metadata *want)
{
    int n_local = run->shape->n_experts / run->shape->nranks;

    if (got->n != want->n)
        fail_check(run, "%d received tokens, should be %d", got->n, want->n);
    else if (!same_numbers(got->source, want->source, want->n))
        fail_check(run, "recv_source");
    else if (expanded && !same_numbers(got->slot, want->slot, want->n * run->shape->topk))
        fail_check(run, "recv_slot");
    else if (!same_numbers(got->ranks, want->ranks, run->shape->nranks))
        fail_check(run, "psum_rank");
    else if (!same_numbers(got->prefix, want->prefix, run->shape->nranks * run->shape->nranks))
        fail_check(run, "rank_prefix");
    else if (!same_numbers(got->exact, want->exact, n_local))
        fail_check(run, "count_exact");
    else if (!same_numbers(got->experts, want->experts, n_local))
        fail_check(run, "psum_expert");
}

void check_metadata(struct run *run, const struct op *op)
{
    const struct plan_shape *shape = &run->shape->plans[op->plan];
    const struct plan_state *state = &run->plans[op->plan];
    const struct version *version = &state->versions[state->version];
    int64_t rows = state->max_recv_tokens ? state->max_recv_tokens : version->layout.n_rows;
    ep_stream stream = run->queues[random_below(&run->local, N_QUEUES)];
    bool expanded = version->layout.expanded;
    ep_plan_metadata args = EP_PLAN_METADATA_INIT;
    struct metadata got = {0}, want = {0};

    if (!metadata_init(run, (size_t)rows, &got) || !metadata_init(run, (size_t)rows, &want)) {
        fail_check(run, "no memory");
        goto free_metadata;
    }
    args.recv_source = got.source;
    args.recv_slot = expanded ? got.slot : NULL;
    args.n_recv_tokens = &got.n;
    args.psum_rank = got.ranks;
    args.psum_expert = got.experts;
    args.count_exact = got.exact;
    args.rank_prefix = got.prefix;
    args.source_stride = state->max_tokens + 1;
    expect_metadata(version, run->rank, args.source_stride, shape->alignment ? shape->alignment : 1, &want);
    if (passed(run, ep_plan_get_metadata(state->plan, &args, stream), "ep_plan_get_metadata") &&
        passed(run, ep_stream_sync(run->comm, stream), "ep_stream_sync"))
        compare_metadata(run, expanded, &got, &want);
free_metadata:
    metadata_done(&got);
    metadata_done(&want);
}
