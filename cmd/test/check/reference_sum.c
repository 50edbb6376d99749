/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arithmetic. Compiled with -ffp-contract=off: a*b+c is two roundings here, and fmaf() one.
 */
#include "number_formats.h"
#include "reference.h"

#include <epkit/types.h>

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
    const int32_t *experts = group->experts[source] + (size_t)token * (size_t)group->topk;
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

/* Number of choices in from..to whose experts are on the rank of `expert`. */
static int count_choices(const struct reference_group *group, const int32_t *experts, int expert, int from, int to)
{
    int n = 0;

    for (int k = from; k < to; k++)
        n += experts[k] >= 0 && experts[k] / group->n_local == expert / group->n_local;
    return n;
}

void reference_ll_combine_row(const struct reference_group *group, const struct reference_combine *combine, int rank,
                              int token, struct reference_scratch *scratch, uint16_t *ret_row)
{
    const int32_t *experts = group->experts[rank] + (size_t)token * (size_t)group->topk;
    int hidden = combine->hidden, topk = group->topk;
    float *total = scratch->total, *partial = scratch->partial;

    for (int i = 0; i < hidden; i++)
        total[i] = 0;
    for (int k = 0; k < topk; k++) {
        if (experts[k] < 0)
            continue;
        if (combine->no_partial_reduce || count_choices(group, experts, experts[k], 0, topk) == 1) {
            add_choice(group, combine, rank, token, k, scratch->row, total);
            continue;
        }
        if (count_choices(group, experts, experts[k], 0, k) > 0)
            continue; /* included in the partial sum of its rank's first choice */
        for (int i = 0; i < hidden; i++)
            partial[i] = 0;
        for (int j = k; j < topk; j++)
            if (count_choices(group, experts, experts[k], j, j + 1))
                add_choice(group, combine, rank, token, j, scratch->row, partial);
        for (int i = 0; i < hidden; i++)
            total[i] += format_from_bf16(format_to_bf16(partial[i]));
    }
    for (int i = 0; i < hidden; i++)
        ret_row[i] = format_to_bf16(total[i]);
}
