/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_loops.h - the sums of rows.h: rows_portable.c, rows_avx2.c and rows_avx512.c include it once each.
 *
 *   ROWS_NAME, ROWS_OPS  name of the variant, of its table of operations
 *   ROWS_LANES           floats in a vector: 4, 8 or 16
 *   ROWS_TARGET          the attribute that enables the instructions. Instead of compiler flags: no code outside these
 *                        functions uses instructions that the machine may lack, and no build has to set flags
 *
 * A word of a bf16 row holds two elements. A shift makes the lower one a float, and a mask the upper one, so sums are
 * kept as vectors of even and of odd elements, and nothing is shuffled.
 */
#include "backend/host/rows.h"
#include "core/bf16.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if FLT_EVAL_METHOD != 0
#error "sums must be rounded to single precision after each addition; on 32-bit x86 compile with -msse2 -mfpmath=sse"
#endif

#define LINE 64               /* bytes of a cache line */
#define STEP (4 * ROWS_LANES) /* elements of the main loop's step */
#define UPPER 0xffff0000u     /* of a word: its upper bf16 element, or the bits of a float that bf16 has */

/*
 * Bytes in flight from memory for all rows of a sum together. Of 14 KiB rows from random places in 300 MB, 1, 2, 4 and
 * 8 at a time, the sum read 0.65, 1.02, 1.33 and 1.45 times as fast as memcpy copied, against 0.38, 0.58, 0.80 and 1.08
 * without prefetch: the hardware prefetcher restarts with each row and each page. 3 KiB gave 0.61 .. 1.34, 8 and 12 KiB
 * no more than this. Rows contiguous in memory: 1.1 .. 1.8 with, 1.0 .. 1.9 without. (Zen 5, the slower of two
 * concurrent processes.)
 */
#define AHEAD_BYTES 6144
#define AHEAD_MAX 4096
#define AHEAD_MIN 256

#define INLINE ROWS_TARGET static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * ROWS_LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * ROWS_LANES)));

/* Elements 0, 2, 4, .. of the first and of the second half of a step, then elements 1, 3, 5, .. of both. */
struct quad {
    vec even, even2, odd, odd2;
};

/* The source of the elements: terms, or rows with weights. */
struct source {
    const struct ep_row_term *terms;
    const uint16_t *const *rows;
    const float *weights;
    int n, count;
};

enum kind { TERMS, WEIGHTED };

/* --- what vectors of the compiler do not have --- */

INLINE void store(void *to, bits words)
{
    memcpy(to, &words, sizeof(words));
}

#if ROWS_LANES == 16

INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* Bypasses the caches; `to` is aligned to the vector. */
INLINE void stream(void *to, bits words)
{
    _mm512_stream_si512(to, (__m512i)words);
}

#elif ROWS_LANES == 8

INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE void stream(void *to, bits words)
{
    _mm256_stream_si256(to, (__m256i)words);
}

#else

INLINE vec vec_fma(vec a, vec b, vec c)
{
    for (int i = 0; i < ROWS_LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

#define stream store

#endif

/* --- elements --- */

/* A vector of `n` elements of a row, at most; zeros for the others. In the main loop all are there: n is a constant. */
INLINE bits load(const void *from, int n)
{
    bits words = {0};

    memcpy(&words, from, n >= 2 * ROWS_LANES ? sizeof(words) : n > 0 ? 2 * (size_t)n : 0);
    return words;
}

INLINE struct quad load_bf16(const uint16_t *row, int n)
{
    bits first = load(row, n), second = load(row + 2 * ROWS_LANES, n - 2 * ROWS_LANES);

    return (struct quad){(vec)(first << 16), (vec)(second << 16), (vec)(first & UPPER), (vec)(second & UPPER)};
}

INLINE struct quad load_f32(const float *even, const float *odd, int n)
{
    return (struct quad){(vec)load(even, n), (vec)load(even + ROWS_LANES, n - 2 * ROWS_LANES), (vec)load(odd, n),
                         (vec)load(odd + ROWS_LANES, n - 2 * ROWS_LANES)};
}

INLINE struct quad load_term(const struct ep_row_term *term, int at, int n, int count)
{
    const float *wide = (const float *)term->row + at / 2;

    return term->is_f32 ? load_f32(wide, wide + count / 2, n) : load_bf16((const uint16_t *)term->row + at, n);
}

INLINE bits plain_nan(vec value, bits number)
{
    bits is_nan = (bits)(value != value); /* NOLINT(misc-redundant-expression) */

    return (is_nan & EP_F32_NAN_BITS) | (~is_nan & number);
}

/* The nearest bf16, or EP_BF16_NAN, in the upper half; the lower half is undefined. */
INLINE bits round_up(vec value)
{
    bits word = (bits)value;

    return plain_nan(value, word + 0x7fff + (word >> 16 & 1));
}

INLINE struct quad quad_add(struct quad x, struct quad y)
{
    return (struct quad){x.even + y.even, x.even2 + y.even2, x.odd + y.odd, x.odd2 + y.odd2};
}

INLINE struct quad quad_fma(float weight, struct quad x, struct quad y)
{
    vec w = weight - (vec){0}; /* -0 + 0 would be 0 */

    return (struct quad){vec_fma(w, x.even, y.even), vec_fma(w, x.even2, y.even2), vec_fma(w, x.odd, y.odd),
                         vec_fma(w, x.odd2, y.odd2)};
}

INLINE bits pack(vec even, vec odd)
{
    return round_up(even) >> 16 | (round_up(odd) & UPPER);
}

INLINE void put_bf16(uint16_t *out, struct quad sum, void (*put)(void *to, bits words))
{
    put(out, pack(sum.even, sum.odd));
    put(out + 2 * ROWS_LANES, pack(sum.even2, sum.odd2));
}

INLINE void put_f32(float *even, float *odd, struct quad sum)
{
    store(even, plain_nan(sum.even, (bits)sum.even));
    store(even + ROWS_LANES, plain_nan(sum.even2, (bits)sum.even2));
    store(odd, plain_nan(sum.odd, (bits)sum.odd));
    store(odd + ROWS_LANES, plain_nan(sum.odd2, (bits)sum.odd2));
}

/* --- sums of a step: of `n` elements at `at`. With `ahead`, prefetches the elements at that distance. --- */

INLINE void prefetch(const struct source *source, enum kind kind, int i, int at)
{
    const char *row = kind == TERMS ? source->terms[i].row : (const void *)source->rows[i];
    const char *from = row + (size_t)at * sizeof(uint16_t);

    for (int offset = 0; offset < (int)(STEP * sizeof(uint16_t)); offset += LINE) {
        __builtin_prefetch(from + offset);
        if (kind == TERMS && source->terms[i].is_f32)
            __builtin_prefetch(from + (size_t)source->count * sizeof(uint16_t) + offset);
    }
}

INLINE struct quad sum_step(const struct source *source, enum kind kind, int at, int n, int ahead)
{
    struct quad sum = {{0}, {0}, {0}, {0}};
    int i = 0;

    if (ahead && kind == TERMS)
        prefetch(source, kind, 0, at + ahead);
    if (kind == TERMS)
        sum = load_term(&source->terms[i++], at, n, source->count);
    for (; i < source->n; i++) {
        if (ahead)
            prefetch(source, kind, i, at + ahead);
        sum = kind == TERMS ? quad_add(sum, load_term(&source->terms[i], at, n, source->count))
                            : quad_fma(source->weights[i], load_bf16(source->rows[i] + at, n), sum);
    }
    return sum;
}

/* --- sums of rows --- */

/* Prefetch distance in elements, a multiple of STEP; prefetches the first of them. */
INLINE int prefetch_start(const struct source *source, enum kind kind, int at)
{
    int bytes = source->n ? AHEAD_BYTES / source->n : AHEAD_BYTES, ahead;

    bytes = bytes > AHEAD_MAX ? AHEAD_MAX : bytes < AHEAD_MIN ? AHEAD_MIN : bytes;
    ahead = bytes / (int)sizeof(uint16_t) / STEP * STEP;
    for (int next = at; next < at + ahead && next < source->count; next += STEP)
        for (int i = 0; i < source->n; i++)
            prefetch(source, kind, i, next);
    return ahead;
}

/* The ends of a row. */
INLINE void sum_part(uint16_t *out, const struct source *source, enum kind kind, int at, int n)
{
    uint16_t part[STEP];

    put_bf16(part, sum_step(source, kind, at, n, 0), store);
    memcpy(out + at, part, (size_t)n * sizeof(*part));
}

/*
 * put() is a function instead of a flag and an if at the stores: clang merges the stores of the two branches into one
 * before the flag is known, and that one is not non-temporal.
 */
INLINE void sum_to_bf16(uint16_t *out, const struct source *source, enum kind kind, void (*put)(void *to, bits words))
{
    int count = source->count, head = (int)((0 - (uintptr_t)out) % sizeof(vec) / sizeof(*out));
    int at = head < count ? head : count, ahead;

    if (at)
        sum_part(out, source, kind, 0, at);
    ahead = prefetch_start(source, kind, at);
    for (; at + ahead + STEP <= count; at += STEP)
        put_bf16(out + at, sum_step(source, kind, at, STEP, ahead), put);
    for (; at + STEP <= count; at += STEP)
        put_bf16(out + at, sum_step(source, kind, at, STEP, 0), put);
    if (at < count)
        sum_part(out, source, kind, at, count - at);
}

ROWS_TARGET static void sum_bf16(uint16_t *out, const struct ep_row_term *terms, int n, int count)
{
    sum_to_bf16(out, &(struct source){.terms = terms, .n = n, .count = count}, TERMS, store);
}

ROWS_TARGET static void sum_bf16_stream(uint16_t *out, const struct ep_row_term *terms, int n, int count)
{
    sum_to_bf16(out, &(struct source){.terms = terms, .n = n, .count = count}, TERMS, stream);
}

ROWS_TARGET static void weighted_sum_bf16(uint16_t *out, const uint16_t *const *rows, const float *weights, int n,
                                          int count)
{
    sum_to_bf16(out, &(struct source){.rows = rows, .weights = weights, .n = n, .count = count}, WEIGHTED, store);
}

ROWS_TARGET static void sum_f32(float *out, const struct ep_row_term *terms, int n, int count)
{
    struct source source = {.terms = terms, .n = n, .count = count};
    int ahead = prefetch_start(&source, TERMS, 0);

    int half = count / 2, at = 0;
    float part[STEP];

    for (; at + STEP <= count; at += STEP)
        put_f32(out + at / 2, out + half + at / 2, sum_step(&source, TERMS, at, STEP, at + ahead < count ? ahead : 0));
    if (at < count) {
        put_f32(part, part + STEP / 2, sum_step(&source, TERMS, at, count - at, 0));
        memcpy(out + at / 2, part, (size_t)(half - at / 2) * sizeof(*part));
        memcpy(out + half + at / 2, part + STEP / 2, (size_t)(half - at / 2) * sizeof(*part));
    }
}

/* --- copies --- */

#if ROWS_LANES > 4

INLINE void stream_16(unsigned char *to, const unsigned char *from)
{
    _mm_stream_si128((__m128i *)to, _mm_load_si128((const __m128i *)from));
}

/* With stores of 16 bytes only it is up to 1.4 times as slow. */
ROWS_TARGET static void stream_range(void *to, const void *from, size_t bytes)
{
    const unsigned char *in = from;
    unsigned char *out = to;
    size_t at = 0;

    for (; at < bytes && (uintptr_t)(out + at) % LINE; at += 16)
        stream_16(out + at, in + at);
    for (; at + LINE <= bytes; at += LINE)
        for (size_t i = at; i < at + LINE; i += sizeof(bits))
            stream(out + i, load(in + i, STEP));
    for (; at < bytes; at += 16)
        stream_16(out + at, in + at);
}

#else

/* C has no non-temporal store. */
static void stream_range(void *to, const void *from, size_t bytes)
{
    memcpy(to, from, bytes);
}

#endif

const struct ep_rows_ops ROWS_OPS = {
    .name = ROWS_NAME,
    .sum_bf16 = sum_bf16,
    .sum_bf16_stream = sum_bf16_stream,
    .sum_f32 = sum_f32,
    .weighted_sum_bf16 = weighted_sum_bf16,
    .stream_range = stream_range,
};
