/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_avx2.c - the inner loops in vectors of eight floats. Empty if the target is not x86-64.
 *
 * Target attributes instead of compiler flags: no code outside these functions uses instructions that the machine may
 * lack, and no build has to set flags.
 */
#include "backend/host/rows_variants.h"

#if defined(__x86_64__)

#define ROWS_TARGET __attribute__((target("avx2,fma")))
#define ROWS_NAME "avx2"
#define ROWS_OPS ep_rows_avx2
#define ROWS_LANES 8

#include "backend/host/rows_x86_group.h"

typedef __m256 vec;

struct quad {
    vec a, b, c, d;
};

INLINE vec vec_zero(void)
{
    return _mm256_setzero_ps();
}

INLINE vec vec_set(float value)
{
    return _mm256_set1_ps(value);
}

INLINE vec vec_add(vec a, vec b)
{
    return _mm256_add_ps(a, b);
}

INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE vec vec_load_bf16(const uint16_t *p)
{
    return group_load_bf16(p);
}

INLINE vec vec_load_f32(const float *p)
{
    return _mm256_loadu_ps(p);
}

INLINE void vec_store_f32(float *p, vec value)
{
    group_store_f32(p, value);
}

INLINE vec vec_round(vec value)
{
    return group_round_f32(value);
}

/* 16 elements. The pack works within halves of a register, so its quarters come out as 0 2 1 3. */
INLINE __m256i pair_round(vec first, vec second)
{
    __m256i packed = _mm256_packus_epi32(group_round(first), group_round(second));

    return _mm256_permute4x64_epi64(packed, 0xd8);
}

INLINE void quad_store_bf16(uint16_t *p, struct quad sum)
{
    _mm256_store_si256((__m256i *)p, pair_round(sum.a, sum.b));
    _mm256_store_si256((__m256i *)(p + 16), pair_round(sum.c, sum.d));
}

INLINE void quad_stream_bf16(uint16_t *p, struct quad sum)
{
    _mm256_stream_si256((__m256i *)p, pair_round(sum.a, sum.b));
    _mm256_stream_si256((__m256i *)(p + 16), pair_round(sum.c, sum.d));
}

INLINE void line_stream(unsigned char *to, const unsigned char *from)
{
    __m256i first = _mm256_loadu_si256((const __m256i *)from);
    __m256i second = _mm256_loadu_si256((const __m256i *)(from + 32));

    _mm256_stream_si256((__m256i *)to, first);
    _mm256_stream_si256((__m256i *)(to + 32), second);
}

#include "backend/host/rows_x86.h"

#endif
