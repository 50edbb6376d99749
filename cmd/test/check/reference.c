/* SPDX-License-Identifier: Apache-2.0 */
/* The layouts, and the arithmetic. Compiled with -ffp-contract=off: a*b+c is two roundings here, and fmaf() one. */
#include "reference.h"
#include "common/memory.h"
#include "number_formats.h"

#include <stdlib.h>

/* The selections of a token. */
static const int32_t *experts_of(const struct reference_group *group, int rank, int token)
{
    return group->experts[rank] + (size_t)token * (size_t)group->topk;
}

static int rank_of_expert(const struct reference_group *group, int expert)
{
    return expert / group->n_local;
}

/* Number of choices in from..to whose experts are on the rank. */
static int count_choices(const struct reference_group *group, const int32_t *experts, int rank, int from, int to)
{
    int n = 0;

    for (int k = from; k < to; k++)
        n += experts[k] >= 0 && rank_of_expert(group, experts[k]) == rank;
    return n;
}

static bool goes_to_rank(const struct reference_group *group, int source, int token, int rank)
{
    return count_choices(group, experts_of(group, source, token), rank, 0, group->topk) > 0;
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
    group.n_tokens = memory_new(n_ranks, sizeof(*group.n_tokens));
    group.experts = memory_new(n_ranks, sizeof(*group.experts));
    group.weights = memory_new(n_ranks, sizeof(*group.weights));
    for (int rank = 0; rank < group.n_ranks; rank++) {
        size_t n_items;

        group.n_tokens[rank] = routing_tokens(routing, rank);
        n_items = (size_t)group.n_tokens[rank] * (size_t)group.topk;
        group.experts[rank] = memory_new(n_items, sizeof(int32_t));
        group.weights[rank] = memory_new(n_items, sizeof(float));
        routing_fill(routing, rank, group.experts[rank], group.weights[rank]);
    }
    *ret_group = group;
    return true;
}

void reference_group_done(struct reference_group *group)
{
    if (!group)
        return;
    for (int rank = 0; rank < group->n_ranks; rank++) {
        free(group->experts[rank]);
        free(group->weights[rank]);
    }
    free(group->n_tokens);
    free(group->experts);
    free(group->weights);
    *group = (struct reference_group){0};
}

void reference_counts_init(const struct reference_group *group, int rank, struct reference_counts *ret_counts)
{
    int n_tokens = group->n_tokens[rank];
    struct reference_counts counts = {
        .tokens_per_rank = memory_new((size_t)group->n_ranks, sizeof(int32_t)),
        .tokens_per_node = memory_new((size_t)group->n_nodes, sizeof(int32_t)),
        .tokens_per_expert = memory_new((size_t)group->n_experts, sizeof(int32_t)),
        .token_in_rank = memory_new((size_t)n_tokens, (size_t)group->n_ranks),
    };

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
            int rows = count_choices(group, experts, to, 0, group->topk);

            rows = layout->expanded ? rows : rows > 0;
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

void reference_layout_init(const struct reference_group *group, int rank, bool expanded, int alignment,
                           struct reference_layout *ret_layout)
{
    struct reference_layout layout = {.rank = rank, .expanded = expanded};

    layout.recv_per_expert = memory_new((size_t)group->n_local, sizeof(int32_t));
    if (expanded)
        layout.expert_start = memory_new((size_t)group->n_local + 1, sizeof(int64_t));
    else
        layout.recv_from_rank = memory_new((size_t)group->n_ranks + 1, sizeof(int64_t));
    list_rows(group, alignment, &layout); /* counts only: rows is NULL */
    layout.rows = memory_new((size_t)layout.n_rows, sizeof(*layout.rows));
    list_rows(group, alignment, &layout);
    count_sent(group, &layout);
    *ret_layout = layout;
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

/* --- sums and number formats --- */

/* Adds a row; the first term is copied. */
static void add_row(float *sum, int *n_terms, const uint16_t *row, int hidden)
{
    for (int i = 0; i < hidden; i++)
        sum[i] = *n_terms ? sum[i] + format_from_bf16(row[i]) : format_from_bf16(row[i]);
    ++*n_terms;
}

/* Adds the replies of one node for the token, in rank order; in the expanded layout in that of experts, then
 * selections. */
static void add_node(const struct reference_group *group, const struct reference_combine *combine, int node, int source,
                     int token, float *sum, int *n_terms, uint16_t *row)
{
    const int32_t *experts = experts_of(group, source, token);
    int experts_per_node = group->ranks_per_node * group->n_local;
    int last_rank = -1;

    for (int expert = node * experts_per_node; expert < (node + 1) * experts_per_node; expert++) {
        int rank = expert / group->n_local;

        for (int k = 0; k < group->topk; k++) {
            if (experts[k] != expert || (!combine->expanded && rank == last_rank))
                continue;
            last_rank = rank;
            combine->reply(combine->context, rank, combine->expanded ? k : -1, source, token, row);
            add_row(sum, n_terms, row, combine->hidden);
        }
    }
}

void reference_combine_row(const struct reference_group *group, const struct reference_combine *combine, int rank,
                           int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                           uint16_t *ret_row)
{
    int hidden = combine->hidden;
    float *total = scratch->total, *partial = scratch->partial;
    int n_terms = 0;

    for (int i = 0; i < 2; i++)
        if (bias[i])
            add_row(total, &n_terms, bias[i], hidden);
    for (int node = 0; node < group->n_nodes; node++) {
        int n_partial = 0;

        if (node == rank / group->ranks_per_node) {
            add_node(group, combine, node, rank, token, total, &n_terms, scratch->row);
            continue;
        }
        add_node(group, combine, node, rank, token, partial, &n_partial, scratch->row);
        if (!n_partial)
            continue;
        for (int i = 0; i < hidden; i++) {
            if (combine->bf16_partials)
                partial[i] = format_from_bf16(format_to_bf16(partial[i]));
            total[i] = n_terms ? total[i] + partial[i] : partial[i];
        }
        n_terms++;
    }
    for (int i = 0; i < hidden; i++)
        ret_row[i] = n_terms ? format_to_bf16(total[i]) : 0;
}

static float amax_of(const uint16_t *row, int n)
{
    float amax = 0;

    for (int i = 0; i < n; i++) {
        float magnitude = fabsf(format_from_bf16(row[i]));

        amax = magnitude > amax ? magnitude : amax;
    }
    return amax;
}

void reference_quantize(const uint16_t *row, int hidden, bool round_scale, uint8_t *ret_row, float *ret_factors)
{
    for (int block = 0; block < hidden / EP_SCALE_BLOCK; block++) {
        const uint16_t *in = row + block * EP_SCALE_BLOCK;
        uint8_t *out = ret_row + block * EP_SCALE_BLOCK;
        float factor = fmaxf(amax_of(in, EP_SCALE_BLOCK), 1e-4f) / 448.0f;

        if (round_scale)
            factor = format_power_of_two(factor);
        for (int i = 0; i < EP_SCALE_BLOCK; i++)
            out[i] = format_to_e4m3(format_from_bf16(in[i]) / factor);
        ret_factors[block] = factor;
    }
}

static uint8_t quantize_32(const uint16_t *row, uint8_t *ret_codes)
{
    float amax = amax_of(row, 32), factor = ldexpf(1, -127);

    if (amax > 0)
        factor = fmaxf(format_power_of_two(amax / 448.0f), factor);
    for (int i = 0; i < 32; i++)
        ret_codes[i] = format_to_e4m3(format_from_bf16(row[i]) / factor);
    return (uint8_t)(127 + ilogbf(factor));
}

static uint8_t quantize_16(const uint16_t *row, float global_scale, uint8_t *ret_codes)
{
    uint8_t scale = format_to_e4m3(global_scale * (amax_of(row, 16) / 6.0f));
    float q = scale ? global_scale / format_from_e4m3(scale) : 0;

    for (int i = 0; i < 16; i += 2) {
        int low = format_to_e2m1(fabsf(format_from_bf16(row[i])) * q) | row[i] >> 15 << 3;
        int high = format_to_e2m1(fabsf(format_from_bf16(row[i + 1])) * q) | row[i + 1] >> 15 << 3;

        ret_codes[i / 2] = (uint8_t)(low | high << 4);
    }
    return scale;
}

void reference_quantize_blocks(const uint16_t *row, int hidden, int block, float global_scale, uint8_t *ret_row,
                               uint8_t *ret_scales)
{
    for (int i = 0; i < hidden; i += block)
        ret_scales[i / block] =
            block == 32 ? quantize_32(row + i, ret_row + i) : quantize_16(row + i, global_scale, ret_row + i / 2);
}

void reference_pack_ue8m0(const float *factors, int n, int32_t *ret_packed)
{
    for (int i = 0; i < n / 4; i++) {
        uint32_t packed = 0;

        for (int j = 0; j < 4; j++)
            packed |= (format_bits(factors[4 * i + j]) >> 23 & 255) << 8 * j;
        memcpy(&ret_packed[i], &packed, sizeof(packed));
    }
}

void reference_dequantize(const uint8_t *row, const float *factors, int hidden, uint16_t *ret_row)
{
    float value[256];

    for (int code = 0; code < 256; code++)
        value[code] = format_from_e4m3((uint8_t)code);
    for (int i = 0; i < hidden; i++)
        ret_row[i] = format_to_bf16(value[row[i]] * factors[i / EP_SCALE_BLOCK]);
}

/* Adds the weighted row of choice k of a token. */
static void add_choice(const struct reference_group *group, const struct reference_combine *combine, int source,
                       int token, int k, uint16_t *row, float *sum)
{
    size_t choice = (size_t)token * (size_t)group->topk + (size_t)k;
    int expert = group->experts[source][choice];
    float weight = group->weights[source][choice];

    combine->reply(combine->context, expert / group->n_local, k, source, token, row);
    for (int i = 0; i < combine->hidden; i++)
        sum[i] = fmaf(weight, format_from_bf16(row[i]), sum[i]);
}

void reference_ll_combine_row(const struct reference_group *group, const struct reference_combine *combine, int rank,
                              int token, struct reference_scratch *scratch, uint16_t *ret_row)
{
    const int32_t *experts = experts_of(group, rank, token);
    int hidden = combine->hidden, topk = group->topk;
    float *total = scratch->total, *partial = scratch->partial;

    for (int i = 0; i < hidden; i++)
        total[i] = 0;
    for (int k = 0; k < topk; k++) {
        int holder = rank_of_expert(group, experts[k]);

        if (experts[k] < 0)
            continue;
        if (combine->no_partial_reduce || count_choices(group, experts, holder, 0, topk) == 1) {
            add_choice(group, combine, rank, token, k, scratch->row, total);
            continue;
        }
        if (count_choices(group, experts, holder, 0, k) > 0)
            continue; /* included in the partial sum of its rank's first choice */
        for (int i = 0; i < hidden; i++)
            partial[i] = 0;
        for (int j = k; j < topk; j++)
            if (count_choices(group, experts, holder, j, j + 1))
                add_choice(group, combine, rank, token, j, scratch->row, partial);
        for (int i = 0; i < hidden; i++)
            total[i] += format_from_bf16(format_to_bf16(partial[i]));
    }
    for (int i = 0; i < hidden; i++)
        ret_row[i] = format_to_bf16(total[i]);
}
