/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_portable.c - the inner loops in plain C: all other variants must give the same bits.
 *
 * Blocks of constant length keep the sums in a small array that the compiler turns into vector registers; the order of
 * additions within an element is always that of the contract.
 */
#include "backend/host/rows_variants.h"
#include "core/bf16.h"

#include <float.h>
#include <math.h>

#if FLT_EVAL_METHOD != 0
#error "sums must be rounded to single precision after each addition; on 32-bit x86 compile with -msse2 -mfpmath=sse"
#endif

#define BLOCK 128 /* with shorter blocks gcc 12 -O3 generates code that is three times slower */
#define GROUP 8   /* every count is a multiple of it */
#define INLINE static inline __attribute__((always_inline))

void ep_rows_copy(void *const *dst, int n, const void *src, size_t bytes)
{
    int i;

    for (i = 0; i < n; i++)
        memcpy(dst[i], src, bytes);
}

INLINE void load_bf16(float *ret_sum, const uint16_t *row, int length)
{
    int i;

    for (i = 0; i < length; i++)
        ret_sum[i] = ep_bf16_widen(row[i]);
}

INLINE void add_bf16(float *sum, const uint16_t *row, int length)
{
    int i;

    for (i = 0; i < length; i++)
        sum[i] += ep_bf16_widen(row[i]);
}

INLINE void add_f32(float *sum, const float *row, int length)
{
    int i;

    for (i = 0; i < length; i++)
        sum[i] += row[i];
}

INLINE void round_to_bf16(uint16_t *out, const float *sum, int length)
{
    int i;

    for (i = 0; i < length; i++)
        out[i] = ep_bf16_round(sum[i]);
}

INLINE void store_f32(float *out, const float *sum, int length)
{
    int i;

    for (i = 0; i < length; i++)
        out[i] = ep_f32_plain_nan(sum[i]);
}

INLINE void sum_rows(float *ret_sum, const uint16_t *const *rows, int n, int start, int length)
{
    int i;

    load_bf16(ret_sum, rows[0] + start, length);
    for (i = 1; i < n; i++)
        add_bf16(ret_sum, rows[i] + start, length);
}

INLINE void sum_terms(float *ret_sum, const struct ep_row_term *terms, int n, int start, int length)
{
    int i;

    if (terms[0].is_f32)
        memcpy(ret_sum, (const float *)terms[0].row + start, sizeof(float) * (size_t)length);
    else
        load_bf16(ret_sum, (const uint16_t *)terms[0].row + start, length);
    for (i = 1; i < n; i++) {
        if (terms[i].is_f32)
            add_f32(ret_sum, (const float *)terms[i].row + start, length);
        else
            add_bf16(ret_sum, (const uint16_t *)terms[i].row + start, length);
    }
}

INLINE void add_weighted(float *sum, const uint16_t *const *rows, const float *weights, int n, int start, int length)
{
    int i, j;

    for (i = 0; i < n; i++) {
        for (j = 0; j < length; j++)
            sum[j] = fmaf(weights[i], ep_bf16_widen(rows[i][start + j]), sum[j]);
    }
}

INLINE void add_rounded(float *sum, const float *partial, int length)
{
    int i;

    for (i = 0; i < length; i++)
        sum[i] += ep_bf16_widen(ep_bf16_round(partial[i]));
}

INLINE void sum_groups(float *ret_sum, const uint16_t *const *rows, const float *weights, const int *sizes,
                       int n_groups, int start, int length)
{
    float partial[BLOCK];
    int group, i = 0;

    memset(ret_sum, 0, sizeof(float) * (size_t)length);
    for (group = 0; group < n_groups; i += sizes[group++]) {
        if (sizes[group] == 1) {
            add_weighted(ret_sum, rows + i, weights + i, 1, start, length);
            continue;
        }
        memset(partial, 0, sizeof(float) * (size_t)length);
        add_weighted(partial, rows + i, weights + i, sizes[group], start, length);
        add_rounded(ret_sum, partial, length);
    }
}

/* Runs the block for the elements of a row from `at` on, `length` of them at a time: a constant for the compiler. */
#define FOR_BLOCKS(at, length, block)                                                                                  \
    for (at = 0; at + BLOCK <= count; at += BLOCK) {                                                                   \
        enum { length = BLOCK };                                                                                       \
        block                                                                                                          \
    }                                                                                                                  \
    for (; at < count; at += GROUP) {                                                                                  \
        enum { length = GROUP };                                                                                       \
        block                                                                                                          \
    }

static void sum_bf16(uint16_t *out, const uint16_t *const *rows, int n, int count)
{
    float sum[BLOCK];
    int i;

    FOR_BLOCKS(i, length, {
        sum_rows(sum, rows, n, i, length);
        round_to_bf16(out + i, sum, length);
    })
}

static void sum_mixed(uint16_t *out, const struct ep_row_term *terms, int n, int count)
{
    float sum[BLOCK];
    int i;

    FOR_BLOCKS(i, length, {
        sum_terms(sum, terms, n, i, length);
        round_to_bf16(out + i, sum, length);
    })
}

static void sum_to_f32(float *out, const uint16_t *const *rows, int n, int count)
{
    float sum[BLOCK];
    int i;

    FOR_BLOCKS(i, length, {
        sum_rows(sum, rows, n, i, length);
        store_f32(out + i, sum, length);
    })
}

static void weighted_sum_bf16(uint16_t *out, const uint16_t *const *rows, const float *weights, int n, int count)
{
    float sum[BLOCK];
    int i;

    FOR_BLOCKS(i, length, {
        memset(sum, 0, sizeof(float) * length);
        add_weighted(sum, rows, weights, n, i, length);
        round_to_bf16(out + i, sum, length);
    })
}

static void grouped_sum_bf16(uint16_t *out, const uint16_t *const *rows, const float *weights, const int *sizes,
                             int n_groups, int count)
{
    float sum[BLOCK];
    int i;

    FOR_BLOCKS(i, length, {
        sum_groups(sum, rows, weights, sizes, n_groups, i, length);
        round_to_bf16(out + i, sum, length);
    })
}

/* C has no non-temporal store: the stream variants are the plain ones. */
const struct ep_rows_ops ep_rows_portable = {
    .name = "portable",
    .copy = ep_rows_copy,
    .copy_stream = ep_rows_copy,
    .sum_bf16 = sum_bf16,
    .sum_bf16_stream = sum_bf16,
    .sum_mixed = sum_mixed,
    .sum_mixed_stream = sum_mixed,
    .sum_to_f32 = sum_to_f32,
    .weighted_sum_bf16 = weighted_sum_bf16,
    .grouped_sum_bf16 = grouped_sum_bf16,
};
