/* SPDX-License-Identifier: Apache-2.0 */
/*
 * EP_COMBINE_BY_CHOICE as specified in epkit/ops.h: which rows are terms, and in which order. Rows are fetched one at a
 * time, by their choice.
 */
#include "cmd/test/check/number_formats.h"
#include "property.h"

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

/* The term of the rank whose last choice is k: all its rows. */
static void add_partial(const struct reference_group *group, const struct reference_combine *combine, int source,
                        int token, int k, struct reference_scratch *scratch)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;
    int rank = rank_of(group, experts, k);

    for (int i = 0; i < combine->hidden; i++)
        scratch->partial[i] = 0;
    for (int j = 0; j <= k; j++) {
        if (rank_of(group, experts, j) != rank)
            continue;
        combine->reply(combine->context, rank, j, source, token, scratch->row);
        add(scratch->partial, scratch->row, combine->hidden);
    }
    for (int i = 0; i < combine->hidden; i++)
        scratch->row[i] = format_to_bf16(scratch->partial[i]);
    add(scratch->total, scratch->row, combine->hidden);
}

static void add_ranks(const struct reference_group *group, const struct reference_combine *combine, int source,
                      int token, struct reference_scratch *scratch)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    for (int rank = 0; rank < group->n_ranks; rank++)
        for (int k = 0; k < group->topk; k++) {
            if (rank_of(group, experts, k) != rank || !is_last_of_rank(group, experts, k))
                continue;
            combine->reply(combine->context, rank, -1, source, token, scratch->row);
            add(scratch->total, scratch->row, combine->hidden);
        }
}

static void add_choices(const struct reference_group *group, const struct reference_combine *combine, uint32_t flags,
                        int source, int token, struct reference_scratch *scratch)
{
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;

    for (int k = 0; k < group->topk; k++) {
        bool last = is_last_of_rank(group, experts, k), rounded = flags & EP_COMBINE_ROUND_PARTIAL;

        if (experts[k] < 0 || (!last && (!combine->expanded || rounded)))
            continue;
        if (combine->expanded && rounded) {
            add_partial(group, combine, source, token, k, scratch);
            continue;
        }
        combine->reply(combine->context, rank_of(group, experts, k), combine->expanded ? k : -1, source, token,
                       scratch->row);
        add(scratch->total, scratch->row, combine->hidden);
    }
}

void combine_by_choice(const struct reference_group *group, const struct reference_combine *combine, uint32_t flags,
                       bool mask, int rank, int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                       uint16_t *ret_row)
{
    const uint16_t *first = bias[0] ? bias[0] : bias[1];

    for (int i = 0; i < combine->hidden; i++)
        scratch->total[i] = first ? format_from_bf16(first[i]) : 0;
    if (bias[0] && bias[1])
        add(scratch->total, bias[1], combine->hidden);
    if (mask)
        add_ranks(group, combine, rank, token, scratch);
    else
        add_choices(group, combine, flags, rank, token, scratch);
    for (int i = 0; i < combine->hidden; i++)
        ret_row[i] = format_to_bf16(scratch->total[i]);
}
