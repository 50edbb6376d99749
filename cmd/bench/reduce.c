/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Compiled with -O3 (see CMakeLists.txt). Uses vector types of GCC and Clang, because GCC 12 does not keep the sums of
 * a plain loop in registers: 15 instead of 50 GB/s from the L2 cache.
 */
#include "reduce.h"

#include <string.h>

#define LANES 16
#define VECTORS 4 /* sums kept in registers at a time, for 64 elements */

typedef uint16_t half_vector __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_vector __attribute__((vector_size(4 * LANES)));
typedef float float_vector __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* Vectors are passed by pointer: by value the ABI would differ between the functions below. */
INLINE void widen(const uint16_t *values, float_vector *ret_wide)
{
    half_vector half;

    memcpy(&half, values, sizeof(half));
    *ret_wide = (float_vector)(__builtin_convertvector(half, bits_vector) << 16);
}

INLINE void narrow(uint16_t *out, const float_vector *values)
{
    bits_vector bits = (bits_vector)*values;
    half_vector half = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, half_vector);

    memcpy(out, &half, sizeof(half));
}

INLINE void reduce_vectors(uint16_t *out, const uint16_t *const *rows, int n_rows, int first, int n_vectors)
{
    float_vector sums[VECTORS];

    for (int v = 0; v < n_vectors; v++)
        widen(rows[0] + first + v * LANES, &sums[v]);
    for (int r = 1; r < n_rows; r++) {
        for (int v = 0; v < n_vectors; v++) {
            float_vector wide;

            widen(rows[r] + first + v * LANES, &wide);
            sums[v] += wide;
        }
    }
    for (int v = 0; v < n_vectors; v++)
        narrow(out + first + v * LANES, &sums[v]);
}

/* The elements that do not fill a vector. */
INLINE void reduce_rest(uint16_t *out, const uint16_t *const *rows, int n_rows, int first, int count)
{
    for (; first < count; first++) {
        float sum = 0;
        uint32_t bits;

        for (int r = 0; r < n_rows; r++) {
            float value;

            bits = (uint32_t)rows[r][first] << 16;
            memcpy(&value, &bits, sizeof(value));
            sum = r == 0 ? value : sum + value;
        }
        memcpy(&bits, &sum, sizeof(bits));
        out[first] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

INLINE void reduce_body(uint16_t *out, const uint16_t *const *rows, int n_rows, int count)
{
    int first = 0;

    if (n_rows == 0) {
        memset(out, 0, (size_t)count * sizeof(*out));
        return;
    }
    for (; first + VECTORS * LANES <= count; first += VECTORS * LANES)
        reduce_vectors(out, rows, n_rows, first, VECTORS);
    for (; first + LANES <= count; first += LANES)
        reduce_vectors(out, rows, n_rows, first, 1);
    reduce_rest(out, rows, n_rows, first, count);
}

static void reduce_plain(uint16_t *out, const uint16_t *const *rows, int n_rows, int count)
{
    reduce_body(out, rows, n_rows, count);
}

#if defined(__x86_64__)
static __attribute__((target("avx2"))) void reduce_avx2(uint16_t *out, const uint16_t *const *rows, int n_rows,
                                                        int count)
{
    reduce_body(out, rows, n_rows, count);
}

static __attribute__((target("avx512f,avx512bw,avx512vl"))) void
reduce_avx512(uint16_t *out, const uint16_t *const *rows, int n_rows, int count)
{
    reduce_body(out, rows, n_rows, count);
}
#endif

bench_reduce_fn bench_reduce_get(void)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
        return reduce_avx512;
    if (__builtin_cpu_supports("avx2"))
        return reduce_avx2;
#endif
    return reduce_plain;
}
