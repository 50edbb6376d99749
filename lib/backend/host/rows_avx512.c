/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_avx512.c - the inner loops in vectors of sixteen floats. Empty if the target is not x86-64.
 *
 * Not VCVTNEPS2BF16 and VDPBF16PS: they treat denormals as zero, which the other variants and the contract do not.
 */
#include "backend/host/rows_variants.h"

#if defined(__x86_64__)

#define ROWS_TARGET __attribute__((target("avx512f,avx2,fma")))
#define ROWS_NAME "avx512"
#define ROWS_OPS ep_rows_avx512
#define ROWS_LANES 16

#include "backend/host/rows_x86_group.h"

typedef __m512 vec;

struct quad {
    vec a, b, c, d;
};

INLINE vec vec_zero(void)
{
    return _mm512_setzero_ps();
}

INLINE vec vec_set(float value)
{
    return _mm512_set1_ps(value);
}

INLINE vec vec_add(vec a, vec b)
{
    return _mm512_add_ps(a, b);
}

INLINE vec vec_fma(vec a, vec b, vec c)
{
    return _mm512_fmadd_ps(a, b, c);
}

INLINE vec vec_load_bf16(const uint16_t *p)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));

    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

INLINE vec vec_load_f32(const float *p)
{
    return _mm512_loadu_ps(p);
}

INLINE void vec_store_f32(float *p, vec value)
{
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    __m512 plain_nan = _mm512_castsi512_ps(_mm512_set1_epi32(EP_F32_NAN_BITS));

    _mm512_storeu_ps(p, _mm512_mask_mov_ps(value, is_nan, plain_nan));
}

/* Upper halves of the rounded floats, not yet packed. */
INLINE __m512i vec_halves(vec value)
{
    __m512i bits = _mm512_castps_si512(value);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);

    return _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(EP_BF16_NAN));
}

INLINE vec vec_round(vec value)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(vec_halves(value), 16));
}

INLINE __m512i pair_round(vec first, vec second)
{
    __m256i low = _mm512_cvtepi32_epi16(vec_halves(first)), high = _mm512_cvtepi32_epi16(vec_halves(second));

    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

INLINE void quad_store_bf16(uint16_t *p, struct quad sum)
{
    _mm512_store_si512(p, pair_round(sum.a, sum.b));
    _mm512_store_si512(p + 32, pair_round(sum.c, sum.d));
}

INLINE void quad_stream_bf16(uint16_t *p, struct quad sum)
{
    _mm512_stream_si512((__m512i *)p, pair_round(sum.a, sum.b));
    _mm512_stream_si512((__m512i *)(p + 32), pair_round(sum.c, sum.d));
}

INLINE void line_stream(unsigned char *to, const unsigned char *from)
{
    _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
}

#include "backend/host/rows_x86.h"

#endif
