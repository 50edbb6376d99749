/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_x86_group.h - vectors of eight floats: all of the AVX2 variant, and the ends of rows in the AVX-512 one. Include
 * it once in each, with ROWS_TARGET defined as the attribute that enables its instructions.
 */
#include "core/bf16.h"

#include <immintrin.h>
#include <stdbool.h>

#define INLINE ROWS_TARGET static inline __attribute__((always_inline))

INLINE __m256 group_load_bf16(const uint16_t *p)
{
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));

    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

/* Floats whose upper halves are the nearest bf16, for numbers; the lower halves are undefined. */
INLINE __m256i group_round_up(__m256 value)
{
    __m256i bits = _mm256_castps_si256(value);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));

    return _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
}

/* Upper halves of the rounded floats, not yet packed. */
INLINE __m256i group_round(__m256 value)
{
    __m256i up = group_round_up(value);
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));

    return _mm256_blendv_epi8(_mm256_srli_epi32(up, 16), _mm256_set1_epi32(EP_BF16_NAN), is_nan);
}

/*
 * Rounded, but still floats, to be added up. A NaN stays a NaN with any payload: the end of the sum makes it
 * EP_BF16_NAN.
 */
INLINE __m256 group_round_f32(__m256 value)
{
    __m256i up = group_round_up(value);
    __m256 rounded = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32((int)0xffff0000)));

    return _mm256_or_ps(rounded, _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
}

INLINE __m128i group_pack(__m256 value)
{
    __m256i halves = group_round(value);

    return _mm_packus_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

INLINE void group_store_bf16(uint16_t *p, __m256 value)
{
    _mm_storeu_si128((__m128i *)p, group_pack(value));
}

INLINE void group_stream_bf16(uint16_t *p, __m256 value)
{
    _mm_stream_si128((__m128i *)p, group_pack(value));
}

INLINE void group_store_f32(float *p, __m256 value)
{
    __m256 is_nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    __m256 plain_nan = _mm256_castsi256_ps(_mm256_set1_epi32(EP_F32_NAN_BITS));

    _mm256_storeu_ps(p, _mm256_blendv_ps(value, plain_nan, is_nan));
}
