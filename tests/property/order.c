/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_COMBINE_BY_CHOICE as specified in epkit/ops.h: which rows are terms, and in which order. Rows are fetched one at a
 * time, by their choice.
 */
#include "sequence.h"

#include "cmd/test/check/number_formats.h"
#include "cmd/test/check/reference.h"

/* Adds a row. Contraction is off: every addition is rounded to single precision. */
static void add(float *sum, const uint16_t *row, int hidden)
{
    for (int i = 0; i < hidden; i++)
        sum[i] += format_from_bf16(row[i]);
}

static int rank_of(const struct reference_group *group, const int32_t *experts, int k)
{
    return experts[k] < 0 ? -1 : experts[k] / group->n_local;
}

static bool is_last_of_rank(const struct reference_group *group, const int32_t *experts, int k)
{
    for (int later = k + 1; later < group->topk; later++)
        if (rank_of(group, experts, later) == rank_of(group, experts, k))
            return false;
    return true;
}

/* The ranks of a token in the order of the sum: by their last choices, or from a mask by their numbers. */
struct term {
    int rank, k;
};

static int list_ranks(const struct reference_group *group, const int32_t *experts, bool mask, struct term *ret_terms)
{
    int n = 0;

    for (int pass = 0; pass < (mask ? group->n_ranks : 1); pass++)
        for (int k = 0; k < group->topk; k++) {
            int rank = rank_of(group, experts, k);

            if (rank >= 0 && is_last_of_rank(group, experts, k) && (!mask || rank == pass))
                ret_terms[n++] = (struct term){rank, k};
        }
    return n;
}

/* Adds the term of a rank: its row, or expanded the rounded sum of its rows. */
static void add_rank(const struct reference_group *group, const struct reference_combine *combine, int source,
                     int token, const struct term *term, struct reference_scratch *scratch, float *sum)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    if (!combine->expanded) {
        combine->reply(combine->context, term->rank, -1, source, token, scratch->row);
        add(sum, scratch->row, combine->hidden);
        return;
    }
    for (int i = 0; i < combine->hidden; i++)
        scratch->partial[i] = 0;
    for (int j = 0; j <= term->k; j++) {
        if (rank_of(group, experts, j) != term->rank)
            continue;
        combine->reply(combine->context, term->rank, j, source, token, scratch->row);
        add(scratch->partial, scratch->row, combine->hidden);
    }
    for (int i = 0; i < combine->hidden; i++)
        scratch->row[i] = format_to_bf16(scratch->partial[i]);
    add(sum, scratch->row, combine->hidden);
}

/* Several nodes: the rounded sum of each, in the order of the last rank of each. */
static void add_terms(const struct reference_group *group, const struct reference_combine *combine, int source,
                      int token, const struct term *terms, int n, struct reference_scratch *scratch)
{
    for (int last = 0; last < n; last++) {
        int node = terms[last].rank / group->ranks_per_node;
        float sum[MAX_HIDDEN] = {0};
        bool more = false;

        if (group->n_nodes == 1) {
            add_rank(group, combine, source, token, &terms[last], scratch, scratch->total);
            continue;
        }
        for (int i = last + 1; i < n; i++)
            more |= terms[i].rank / group->ranks_per_node == node;
        for (int i = 0; i <= last && !more; i++)
            if (terms[i].rank / group->ranks_per_node == node)
                add_rank(group, combine, source, token, &terms[i], scratch, sum);
        for (int i = 0; i < combine->hidden; i++)
            scratch->row[i] = format_to_bf16(sum[i]);
        if (!more)
            add(scratch->total, scratch->row, combine->hidden);
    }
}

static void add_choices(const struct reference_group *group, const struct reference_combine *combine, int source,
                        int token, struct reference_scratch *scratch)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    for (int k = 0; k < group->topk; k++) {
        if (experts[k] < 0)
            continue;
        combine->reply(combine->context, rank_of(group, experts, k), k, source, token, scratch->row);
        add(scratch->total, scratch->row, combine->hidden);
    }
}

void combine_by_choice(const struct reference_group *group, const struct reference_combine *combine, uint32_t flags,
                       bool mask, int rank, int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                       uint16_t *ret_row)
{
    const int32_t *experts = group->experts[rank] + (size_t)token * (size_t)group->topk;
    const uint16_t *first = bias[0] ? bias[0] : bias[1];
    struct term terms[16];

    for (int i = 0; i < combine->hidden; i++)
        scratch->total[i] = first ? format_from_bf16(first[i]) : 0;
    if (bias[0] && bias[1])
        add(scratch->total, bias[1], combine->hidden);
    if (combine->expanded && !(flags & EP_COMBINE_ROUND_PARTIAL))
        add_choices(group, combine, rank, token, scratch);
    else
        add_terms(group, combine, rank, token, terms, list_ranks(group, experts, mask, terms), scratch);
    for (int i = 0; i < combine->hidden; i++)
        ret_row[i] = format_to_bf16(scratch->total[i]);
}
