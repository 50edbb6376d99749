/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The layouts. reference_sum.c has the arithmetic.
 */
#include "reference.h"

#include <stdlib.h>
#include <string.h>

/* The selections of a token. */
static const int32_t *experts_of(const struct reference_group *group, int rank, int token)
{
    return group->experts[rank] + (size_t)token * (size_t)group->topk;
}

static int rank_of_expert(const struct reference_group *group, int expert)
{
    return expert / group->n_local;
}

static bool goes_to_rank(const struct reference_group *group, int source, int token, int rank)
{
    const int32_t *experts = experts_of(group, source, token);

    for (int k = 0; k < group->topk; k++)
        if (experts[k] >= 0 && rank_of_expert(group, experts[k]) == rank)
            return true;
    return false;
}

static bool goes_to_node(const struct reference_group *group, int source, int token, int node)
{
    for (int i = 0; i < group->ranks_per_node; i++)
        if (goes_to_rank(group, source, token, node * group->ranks_per_node + i))
            return true;
    return false;
}

bool reference_group_init(const struct routing *routing, int n_nodes, struct reference_group *ret_group,
                          struct check_error *error)
{
    const struct routing_spec *spec = routing_get_spec(routing);
    struct reference_group group = {
        .n_ranks = spec->n_ranks, .n_nodes = n_nodes, .topk = spec->topk, .n_experts = spec->n_experts};
    size_t n_ranks = (size_t)spec->n_ranks;

    if (n_nodes < 1 || spec->n_ranks % n_nodes)
        return check_fail(error, "%d ranks do not divide among %d nodes", spec->n_ranks, n_nodes);
    group.ranks_per_node = group.n_ranks / n_nodes;
    group.n_local = group.n_experts / group.n_ranks;
    group.n_tokens = calloc(n_ranks, sizeof(*group.n_tokens));
    group.experts = calloc(n_ranks, sizeof(*group.experts));
    group.weights = calloc(n_ranks, sizeof(*group.weights));
    if (!group.n_tokens || !group.experts || !group.weights)
        goto no_memory;
    for (int rank = 0; rank < group.n_ranks; rank++) {
        size_t n_items;

        group.n_tokens[rank] = routing_tokens(routing, rank);
        n_items = (size_t)group.n_tokens[rank] * (size_t)group.topk;
        group.experts[rank] = calloc(n_items ? n_items : 1, sizeof(int32_t));
        group.weights[rank] = calloc(n_items ? n_items : 1, sizeof(float));
        if (!group.experts[rank] || !group.weights[rank])
            goto no_memory;
        routing_fill(routing, rank, group.experts[rank], group.weights[rank]);
    }
    *ret_group = group;
    return true;
no_memory:
    reference_group_done(&group);
    return check_fail(error, "no memory for the routing of %d ranks", spec->n_ranks);
}

void reference_group_done(struct reference_group *group)
{
    if (!group)
        return;
    for (int rank = 0; rank < group->n_ranks; rank++) {
        if (group->experts)
            free(group->experts[rank]);
        if (group->weights)
            free(group->weights[rank]);
    }
    free(group->n_tokens);
    free(group->experts);
    free(group->weights);
    *group = (struct reference_group){0};
}

bool reference_counts_init(const struct reference_group *group, int rank, struct reference_counts *ret_counts,
                           struct check_error *error)
{
    int n_tokens = group->n_tokens[rank];
    struct reference_counts counts = {
        .tokens_per_rank = calloc((size_t)group->n_ranks, sizeof(int32_t)),
        .tokens_per_node = calloc((size_t)group->n_nodes, sizeof(int32_t)),
        .tokens_per_expert = calloc((size_t)group->n_experts, sizeof(int32_t)),
        .token_in_rank = calloc((size_t)n_tokens + 1, (size_t)group->n_ranks),
    };

    if (!counts.tokens_per_rank || !counts.tokens_per_node || !counts.tokens_per_expert || !counts.token_in_rank) {
        reference_counts_done(&counts);
        return check_fail(error, "no memory for the layout of %d tokens", n_tokens);
    }
    for (int token = 0; token < n_tokens; token++) {
        const int32_t *experts = experts_of(group, rank, token);

        for (int k = 0; k < group->topk; k++)
            if (experts[k] >= 0)
                counts.tokens_per_expert[experts[k]]++;
        for (int to = 0; to < group->n_ranks; to++)
            if (goes_to_rank(group, rank, token, to)) {
                counts.tokens_per_rank[to]++;
                counts.token_in_rank[(size_t)token * (size_t)group->n_ranks + (size_t)to] = 1;
            }
        for (int node = 0; node < group->n_nodes; node++)
            if (goes_to_node(group, rank, token, node))
                counts.tokens_per_node[node]++;
    }
    *ret_counts = counts;
    return true;
}

void reference_counts_done(struct reference_counts *counts)
{
    if (!counts)
        return;
    free(counts->tokens_per_rank);
    free(counts->tokens_per_node);
    free(counts->tokens_per_expert);
    free(counts->token_in_rank);
    *counts = (struct reference_counts){0};
}

/* Counts the rows that this rank sends. */
static void count_sent(const struct reference_group *group, struct reference_layout *layout)
{
    int rank = layout->rank;

    for (int token = 0; token < group->n_tokens[rank]; token++) {
        const int32_t *experts = experts_of(group, rank, token);

        for (int to = 0; to < group->n_ranks; to++) {
            int64_t rows = goes_to_rank(group, rank, token, to);

            if (layout->expanded) {
                rows = 0;
                for (int k = 0; k < group->topk; k++)
                    rows += experts[k] >= 0 && rank_of_expert(group, experts[k]) == to;
            }
            layout->n_send += rows;
            if (to != rank)
                layout->n_wire += rows;
        }
        for (int node = 0; node < group->n_nodes; node++)
            if (node != rank / group->ranks_per_node && goes_to_node(group, rank, token, node))
                layout->n_net++;
    }
}

static void append_row(struct reference_layout *layout, int rank, int token, int k)
{
    if (layout->rows)
        layout->rows[layout->n_rows] = (struct reference_row){rank, token, k};
    layout->n_rows++;
}

/* One row per received token, by (source rank, token). */
static void list_rank_layout(const struct reference_group *group, int alignment, struct reference_layout *layout)
{
    int32_t *counts = layout->recv_per_expert;

    memset(counts, 0, (size_t)group->n_local * sizeof(*counts));
    for (int source = 0; source < group->n_ranks; source++) {
        layout->recv_from_rank[source] = layout->n_rows;
        for (int token = 0; token < group->n_tokens[source]; token++) {
            const int32_t *experts = experts_of(group, source, token);

            if (goes_to_rank(group, source, token, layout->rank))
                append_row(layout, source, token, -1);
            for (int k = 0; k < group->topk; k++)
                if (experts[k] >= 0 && rank_of_expert(group, experts[k]) == layout->rank)
                    counts[experts[k] % group->n_local]++;
        }
    }
    layout->recv_from_rank[group->n_ranks] = layout->n_rows;
    for (int local = 0; local < group->n_local; local++)
        counts[local] = (counts[local] + alignment - 1) / alignment * alignment;
}

/* Expert after expert, each by (source rank, token, selection) and padded to a multiple of the alignment. */
static void list_expanded_layout(const struct reference_group *group, int alignment, struct reference_layout *layout)
{
    for (int local = 0; local < group->n_local; local++) {
        int expert = layout->rank * group->n_local + local;

        layout->expert_start[local] = layout->n_rows;
        for (int source = 0; source < group->n_ranks; source++)
            for (int token = 0; token < group->n_tokens[source]; token++)
                for (int k = 0; k < group->topk; k++)
                    if (experts_of(group, source, token)[k] == expert)
                        append_row(layout, source, token, k);
        while (layout->n_rows % alignment)
            append_row(layout, -1, -1, -1);
        layout->recv_per_expert[local] = (int32_t)(layout->n_rows - layout->expert_start[local]);
    }
    layout->expert_start[group->n_local] = layout->n_rows;
}

static void list_rows(const struct reference_group *group, int alignment, struct reference_layout *layout)
{
    layout->n_rows = 0;
    if (layout->expanded)
        list_expanded_layout(group, alignment, layout);
    else
        list_rank_layout(group, alignment, layout);
}

bool reference_layout_init(const struct reference_group *group, int rank, bool expanded, int alignment,
                           struct reference_layout *ret_layout, struct check_error *error)
{
    struct reference_layout layout = {.rank = rank, .expanded = expanded};

    layout.recv_per_expert = calloc((size_t)group->n_local, sizeof(int32_t));
    if (expanded)
        layout.expert_start = calloc((size_t)group->n_local + 1, sizeof(int64_t));
    else
        layout.recv_from_rank = calloc((size_t)group->n_ranks + 1, sizeof(int64_t));
    if (!layout.recv_per_expert || (!layout.expert_start && !layout.recv_from_rank))
        goto no_memory;
    list_rows(group, alignment, &layout); /* counts only: rows is NULL */
    layout.rows = calloc((size_t)layout.n_rows + 1, sizeof(*layout.rows));
    if (!layout.rows)
        goto no_memory;
    list_rows(group, alignment, &layout);
    count_sent(group, &layout);
    *ret_layout = layout;
    return true;
no_memory:
    reference_layout_done(&layout);
    return check_fail(error, "no memory for the rows of rank %d", rank);
}

void reference_layout_done(struct reference_layout *layout)
{
    if (!layout)
        return;
    free(layout->rows);
    free(layout->recv_per_expert);
    free(layout->recv_from_rank);
    free(layout->expert_start);
    *layout = (struct reference_layout){0};
}

void reference_row_selections(const struct reference_group *group, int rank, const struct reference_row *row,
                              int32_t *ret_experts, float *ret_weights)
{
    const int32_t *experts = experts_of(group, row->rank, row->token);
    const float *weights = group->weights[row->rank] + (size_t)row->token * (size_t)group->topk;

    for (int k = 0; k < group->topk; k++) {
        bool here = experts[k] >= 0 && rank_of_expert(group, experts[k]) == rank;

        ret_experts[k] = here ? experts[k] - rank * group->n_local : -1;
        ret_weights[k] = here ? weights[k] : 0;
    }
}

float reference_row_weight(const struct reference_group *group, const struct reference_row *row)
{
    if (row->rank < 0)
        return 0;
    return group->weights[row->rank][(size_t)row->token * (size_t)group->topk + (size_t)row->k];
}
