/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_x86.h - the inner loops, over vectors that the includer defines: rows_avx2.c and rows_avx512.c, once each.
 *
 *   ROWS_TARGET                       the attribute that enables the instructions
 *   ROWS_NAME, ROWS_OPS               name of the variant, of its table of operations
 *   ROWS_LANES                        floats in a vec
 *   vec_zero, vec_set, vec_add, vec_fma(a, b, c) = a * b + c
 *   vec_load_bf16, vec_load_f32       from any alignment
 *   vec_round                         to the nearest bf16, still floats; a NaN stays a NaN
 *   vec_store_f32                     to any alignment; every NaN as EP_F32_NAN_BITS
 *   quad_store_bf16, quad_stream_bf16 four vectors rounded to bf16, every NaN as EP_BF16_NAN; to a whole line
 *   line_stream(to, from)             64 bytes, `to` aligned to a line
 *
 * The includer includes rows_x86_group.h first.
 */
#include <string.h>

#define LINE 64               /* bytes of a cache line */
#define GROUP 8               /* elements; every count is a multiple of it */
#define QUAD (4 * ROWS_LANES) /* elements of the main loop's step */

/*
 * Bytes in flight from memory for all rows of a sum together. Of 14 KiB rows from random places in 300 MB, 1, 2, 4 and
 * 8 at a time, the sum read 0.65, 1.02, 1.33 and 1.45 times as fast as memcpy copied, against 0.38, 0.58, 0.80 and 1.08
 * without prefetch: the hardware prefetcher restarts with each row and each page. 3 KiB gave 0.61 .. 1.34, 8 and 12 KiB
 * no more than this. Rows contiguous in memory: 1.1 .. 1.8 with, 1.0 .. 1.9 without. (Zen 5, the slower of two
 * concurrent processes, as below.)
 */
#define AHEAD_BYTES 6144
#define AHEAD_MAX 4096
#define AHEAD_MIN 256

/*
 * Bytes written to one destination before the next one. To 2, 4 and 8 destinations 4 KiB at a time wrote 1.64, 1.79 and
 * 2.03 times the rate of memcpy of 300 MB; a whole row of 14 KiB 1.50, 1.66 and 1.82, 256 bytes 1.65, 1.75 and 1.82. A
 * page at a time also needs one translation at a time.
 */
#define CHUNK_BYTES 4096

/* The source of the elements: rows, or terms of a mixed sum; with weights a weighted sum, with sizes one of groups. */
struct source {
    const uint16_t *const *rows;
    const struct ep_row_term *terms;
    const float *weights;
    const int *sizes;
    int n, n_groups;
};

enum kind { PLAIN, MIXED, WEIGHTED, GROUPED };

/* --- eight elements: the ends of rows --- */

INLINE __m256 group_load(const struct source *source, enum kind kind, int i, int at)
{
    if (kind != MIXED)
        return group_load_bf16(source->rows[i] + at);
    if (source->terms[i].is_f32)
        return _mm256_loadu_ps((const float *)source->terms[i].row + at);
    return group_load_bf16((const uint16_t *)source->terms[i].row + at);
}

/* `sum` and the weighted rows from..to. */
INLINE __m256 group_add_weighted(const struct source *source, int from, int to, int at, __m256 sum)
{
    int i;

    for (i = from; i < to; i++)
        sum = _mm256_fmadd_ps(_mm256_set1_ps(source->weights[i]), group_load_bf16(source->rows[i] + at), sum);
    return sum;
}

INLINE __m256 group_sum_groups(const struct source *source, int at)
{
    __m256 sum = _mm256_setzero_ps();
    int group, i = 0;

    for (group = 0; group < source->n_groups; i += source->sizes[group++]) {
        int end = i + source->sizes[group];

        if (source->sizes[group] == 1)
            sum = group_add_weighted(source, i, end, at, sum);
        else
            sum = _mm256_add_ps(sum, group_round_f32(group_add_weighted(source, i, end, at, _mm256_setzero_ps())));
    }
    return sum;
}

INLINE __m256 group_sum(const struct source *source, enum kind kind, int at)
{
    __m256 sum;
    int i;

    if (kind == WEIGHTED)
        return group_add_weighted(source, 0, source->n, at, _mm256_setzero_ps());
    if (kind == GROUPED)
        return group_sum_groups(source, at);
    sum = group_load(source, kind, 0, at);
    for (i = 1; i < source->n; i++)
        sum = _mm256_add_ps(sum, group_load(source, kind, i, at));
    return sum;
}

/* --- four vectors: everything else --- */

INLINE struct quad quad_load_bf16(const uint16_t *p)
{
    return (struct quad){vec_load_bf16(p), vec_load_bf16(p + ROWS_LANES), vec_load_bf16(p + 2 * ROWS_LANES),
                         vec_load_bf16(p + 3 * ROWS_LANES)};
}

INLINE struct quad quad_load_f32(const float *p)
{
    return (struct quad){vec_load_f32(p), vec_load_f32(p + ROWS_LANES), vec_load_f32(p + 2 * ROWS_LANES),
                         vec_load_f32(p + 3 * ROWS_LANES)};
}

INLINE struct quad quad_load(const struct source *source, enum kind kind, int i, int at)
{
    if (kind != MIXED)
        return quad_load_bf16(source->rows[i] + at);
    if (source->terms[i].is_f32)
        return quad_load_f32((const float *)source->terms[i].row + at);
    return quad_load_bf16((const uint16_t *)source->terms[i].row + at);
}

INLINE struct quad quad_add(struct quad x, struct quad y)
{
    return (struct quad){vec_add(x.a, y.a), vec_add(x.b, y.b), vec_add(x.c, y.c), vec_add(x.d, y.d)};
}

INLINE struct quad quad_fma(vec w, struct quad x, struct quad y)
{
    return (struct quad){vec_fma(w, x.a, y.a), vec_fma(w, x.b, y.b), vec_fma(w, x.c, y.c), vec_fma(w, x.d, y.d)};
}

INLINE struct quad quad_round(struct quad x)
{
    return (struct quad){vec_round(x.a), vec_round(x.b), vec_round(x.c), vec_round(x.d)};
}

/* Prefetches the QUAD elements of term i at `at`. */
INLINE void prefetch(const struct source *source, enum kind kind, int i, int at)
{
    bool wide = kind == MIXED && source->terms[i].is_f32;
    const char *row = kind == MIXED ? source->terms[i].row : (const void *)source->rows[i];
    size_t size = wide ? sizeof(float) : sizeof(uint16_t);
    const char *from = row + (size_t)at * size;
    size_t offset;

    for (offset = 0; offset < QUAD * size; offset += LINE)
        _mm_prefetch(from + offset, _MM_HINT_T0);
}

/* `sum` plus the weighted rows from..to. With `fetch`, prefetches the elements `ahead` of `at`. */
INLINE struct quad quad_add_weighted(const struct source *source, int from, int to, int at, bool fetch, int ahead,
                                     struct quad sum)
{
    int i;

    for (i = from; i < to; i++) {
        if (fetch)
            prefetch(source, WEIGHTED, i, at + ahead);
        sum = quad_fma(vec_set(source->weights[i]), quad_load_bf16(source->rows[i] + at), sum);
    }
    return sum;
}

INLINE struct quad quad_sum_groups(const struct source *source, int at, bool fetch, int ahead)
{
    const struct quad zero = {vec_zero(), vec_zero(), vec_zero(), vec_zero()};
    struct quad sum = zero;
    int group, i = 0;

    for (group = 0; group < source->n_groups; i += source->sizes[group++]) {
        int end = i + source->sizes[group];

        if (source->sizes[group] == 1)
            sum = quad_add_weighted(source, i, end, at, fetch, ahead, sum);
        else
            sum = quad_add(sum, quad_round(quad_add_weighted(source, i, end, at, fetch, ahead, zero)));
    }
    return sum;
}

INLINE struct quad quad_sum(const struct source *source, enum kind kind, int at, bool fetch, int ahead)
{
    struct quad sum;
    int i;

    if (kind == WEIGHTED) {
        sum = (struct quad){vec_zero(), vec_zero(), vec_zero(), vec_zero()};
        return quad_add_weighted(source, 0, source->n, at, fetch, ahead, sum);
    }
    if (kind == GROUPED)
        return quad_sum_groups(source, at, fetch, ahead);
    if (fetch)
        prefetch(source, kind, 0, at + ahead);
    sum = quad_load(source, kind, 0, at);
    for (i = 1; i < source->n; i++) {
        if (fetch)
            prefetch(source, kind, i, at + ahead);
        sum = quad_add(sum, quad_load(source, kind, i, at));
    }
    return sum;
}

/* Prefetch distance in elements, a multiple of QUAD; prefetches the first of them. */
INLINE int prefetch_start(const struct source *source, enum kind kind, int at, int count)
{
    int bytes = source->n ? AHEAD_BYTES / source->n : AHEAD_BYTES;
    int ahead, i, next;

    bytes = bytes > AHEAD_MAX ? AHEAD_MAX : bytes < AHEAD_MIN ? AHEAD_MIN : bytes;
    ahead = bytes / (int)sizeof(uint16_t) / QUAD * QUAD;
    for (next = at; next < at + ahead && next < count; next += QUAD) {
        for (i = 0; i < source->n; i++)
            prefetch(source, kind, i, next);
    }
    return ahead;
}

/*
 * How results are written. Function pointers instead of a flag and an if at the stores: clang merges the stores of the
 * two branches into one before the flag is known, and that one is not non-temporal.
 */
struct sink {
    void (*group)(uint16_t *p, __m256 value);
    void (*quad)(uint16_t *p, struct quad sum);
};

INLINE void sum_to_bf16(uint16_t *out, const struct source *source, enum kind kind, int count, struct sink sink)
{
    int at = 0, ahead;

    for (; at < count && (uintptr_t)(out + at) % LINE; at += GROUP)
        sink.group(out + at, group_sum(source, kind, at));
    ahead = prefetch_start(source, kind, at, count);
    for (; at + ahead + QUAD <= count; at += QUAD)
        sink.quad(out + at, quad_sum(source, kind, at, true, ahead));
    for (; at + QUAD <= count; at += QUAD)
        sink.quad(out + at, quad_sum(source, kind, at, false, 0));
    for (; at < count; at += GROUP)
        sink.group(out + at, group_sum(source, kind, at));
}

ROWS_TARGET static void sum_bf16(uint16_t *out, const uint16_t *const *rows, int n, int count)
{
    struct source source = {.rows = rows, .n = n};

    sum_to_bf16(out, &source, PLAIN, count, (struct sink){group_store_bf16, quad_store_bf16});
}

ROWS_TARGET static void sum_bf16_stream(uint16_t *out, const uint16_t *const *rows, int n, int count)
{
    struct source source = {.rows = rows, .n = n};

    sum_to_bf16(out, &source, PLAIN, count, (struct sink){group_stream_bf16, quad_stream_bf16});
}

ROWS_TARGET static void sum_mixed(uint16_t *out, const struct ep_row_term *terms, int n, int count)
{
    struct source source = {.terms = terms, .n = n};

    sum_to_bf16(out, &source, MIXED, count, (struct sink){group_store_bf16, quad_store_bf16});
}

ROWS_TARGET static void sum_mixed_stream(uint16_t *out, const struct ep_row_term *terms, int n, int count)
{
    struct source source = {.terms = terms, .n = n};

    sum_to_bf16(out, &source, MIXED, count, (struct sink){group_stream_bf16, quad_stream_bf16});
}

ROWS_TARGET static void weighted_sum_bf16(uint16_t *out, const uint16_t *const *rows, const float *weights, int n,
                                          int count)
{
    struct source source = {.rows = rows, .weights = weights, .n = n};

    sum_to_bf16(out, &source, WEIGHTED, count, (struct sink){group_store_bf16, quad_store_bf16});
}

ROWS_TARGET static void grouped_sum_bf16(uint16_t *out, const uint16_t *const *rows, const float *weights,
                                         const int *sizes, int n_groups, int count)
{
    struct source source = {.rows = rows, .weights = weights, .sizes = sizes, .n_groups = n_groups};
    int group;

    for (group = 0; group < n_groups; group++)
        source.n += sizes[group];
    sum_to_bf16(out, &source, GROUPED, count, (struct sink){group_store_bf16, quad_store_bf16});
}

ROWS_TARGET static void sum_to_f32(float *out, const uint16_t *const *rows, int n, int count)
{
    struct source source = {.rows = rows, .n = n};
    int at = 0, ahead = prefetch_start(&source, PLAIN, 0, count);

    for (; at + QUAD <= count; at += QUAD) {
        struct quad sum = quad_sum(&source, PLAIN, at, at + ahead < count, ahead);

        vec_store_f32(out + at, sum.a);
        vec_store_f32(out + at + ROWS_LANES, sum.b);
        vec_store_f32(out + at + 2 * ROWS_LANES, sum.c);
        vec_store_f32(out + at + 3 * ROWS_LANES, sum.d);
    }
    for (; at < count; at += GROUP)
        group_store_f32(out + at, group_sum(&source, PLAIN, at));
}

/* --- copies --- */

INLINE void stream_16(unsigned char *to, const unsigned char *from)
{
    _mm_stream_si128((__m128i *)to, _mm_load_si128((const __m128i *)from));
}

INLINE void range_stream(unsigned char *to, const unsigned char *from, size_t bytes)
{
    size_t at = 0;

    for (; at < bytes && (uintptr_t)(to + at) % LINE; at += 16)
        stream_16(to + at, from + at);
    for (; at + LINE <= bytes; at += LINE)
        line_stream(to + at, from + at);
    for (; at < bytes; at += 16)
        stream_16(to + at, from + at);
}

/*
 * End of the chunk that ends near `at`, aligned to a line of this destination: otherwise the halves of a line would be
 * written separately.
 */
INLINE size_t chunk_end(const unsigned char *to, size_t at, size_t bytes)
{
    size_t end = at + (0 - (uintptr_t)to) % LINE;

    return end < bytes ? end : bytes;
}

ROWS_TARGET static void copy_stream(void *const *dst, int n, const void *src, size_t bytes)
{
    size_t chunk;
    int i;

    for (chunk = 0; chunk < bytes; chunk += CHUNK_BYTES) {
        for (i = 0; i < n; i++) {
            unsigned char *to = dst[i];
            size_t start = chunk ? chunk_end(to, chunk, bytes) : 0;
            size_t end = chunk_end(to, chunk + CHUNK_BYTES, bytes);

            range_stream(to + start, (const unsigned char *)src + start, end - start);
        }
    }
}

const struct ep_rows_ops ROWS_OPS = {
    .name = ROWS_NAME,
    .copy = ep_rows_copy,
    .copy_stream = copy_stream,
    .sum_bf16 = sum_bf16,
    .sum_bf16_stream = sum_bf16_stream,
    .sum_mixed = sum_mixed,
    .sum_mixed_stream = sum_mixed_stream,
    .sum_to_f32 = sum_to_f32,
    .weighted_sum_bf16 = weighted_sum_bf16,
    .grouped_sum_bf16 = grouped_sum_bf16,
};
