/* SPDX-License-Identifier: Apache-2.0 */
/* sums.cuh - sums in fp32 of bf16 vectors, and their rounding to bf16, bit for bit as ep_bf16_round() on the host. */
#ifndef EP_CUDA_SUMS_CUH
#define EP_CUDA_SUMS_CUH

#include <cuda_bf16.h>
#include <stdint.h>

/*
 * Rounds to nearest even, two at once. The conversion's NaN is 0x7fff (PTX ISA, cvt), the host's is 0x7fc0. No number
 * becomes 0x7fff, so one test of all words finds a NaN; comparing each sum takes longer than the conversion.
 */
__device__ inline uint4 round_vector(const float (&sum)[8])
{
    uint32_t words[4], ones[4];

#pragma unroll
    for (int i = 0; i < 4; i++) {
        __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);

        words[i] = *reinterpret_cast<const uint32_t *>(&pair);
        ones[i] = ((words[i] & 0x7fff7fffu) + 0x00010001u) & 0x80008000u;
    }
    if (ones[0] | ones[1] | ones[2] | ones[3]) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] ^= (ones[i] >> 15) * 0x3fu;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* The first term is assigned, not added: adding it to zero would turn -0 into +0. */
template <bool FIRST> __device__ inline void add_vector(float (&sum)[8], uint4 v)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000u);

        sum[2 * i] = FIRST ? low : __fadd_rn(sum[2 * i], low);
        sum[2 * i + 1] = FIRST ? high : __fadd_rn(sum[2 * i + 1], high);
    }
}

#endif
