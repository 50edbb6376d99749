/* SPDX-License-Identifier: Apache-2.0 */
/* quantise.cuh - bf16 to e4m3 in blocks of EP_SCALE_BLOCK with a factor each, bit for bit by the rule in lowlatency.h.
 */
#ifndef EP_CUDA_QUANTISE_CUH
#define EP_CUDA_QUANTISE_CUH

#include <cuda_fp8.h>
#include <stdint.h>

/* The smallest power of two not below the factor, as ep_ue8m0_from_f32() and back: the exponent byte. */
__device__ inline uint32_t ue8m0_of(float value)
{
    uint32_t bits = __float_as_uint(value), up = (bits + 0x7fffffu) >> 23;

    if (bits == 0x7f800000u || (bits & 0x7fffffffu) > 0x7f800000u)
        return 255;
    if (bits >> 31 || bits <= 0x400000u)
        return 0;
    return up < 254 ? up : 254;
}

__device__ inline float float_of_ue8m0(uint32_t byte)
{
    return __uint_as_float(byte == 255 ? 0x7fc00000u : byte ? byte << 23 : 0x400000u);
}

/* Sixteen elements of a row: eight lanes share a block of 128 and its factor. */
struct sixteen {
    uint4 low, high;
};

__device__ inline uint32_t largest_of(uint4 v)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
    uint32_t largest = 0;

#pragma unroll
    for (int i = 0; i < 8; i++) {
        uint32_t magnitude = (i & 1 ? words[i / 2] >> 16 : words[i / 2]) & 0x7fffu;

        largest = max(largest, magnitude <= 0x7f80u ? magnitude : 0u);
    }
    return largest;
}

__device__ inline uint32_t quantise_four(uint32_t a, uint32_t b, float factor)
{
    float4 v =
        make_float4(__fdiv_rn(__uint_as_float(a << 16), factor), __fdiv_rn(__uint_as_float(a & 0xffff0000u), factor),
                    __fdiv_rn(__uint_as_float(b << 16), factor), __fdiv_rn(__uint_as_float(b & 0xffff0000u), factor));

    return (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(v.x, v.y), __NV_SATFINITE, __NV_E4M3) |
           (uint32_t)__nv_cvt_float2_to_fp8x2(make_float2(v.z, v.w), __NV_SATFINITE, __NV_E4M3) << 16;
}

__device__ inline uint4 quantise(sixteen v, float factor)
{
    return make_uint4(quantise_four(v.low.x, v.low.y, factor), quantise_four(v.low.z, v.low.w, factor),
                      quantise_four(v.high.x, v.high.y, factor), quantise_four(v.high.z, v.high.w, factor));
}

/* The factor of the block that this lane shares; all lanes of the warp call it. */
__device__ inline float factor_of(sixteen v, bool rounds)
{
    uint32_t largest = max(largest_of(v.low), largest_of(v.high));
    float factor;

    for (int distance = 4; distance; distance /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    factor = __fdiv_rn(fmaxf(__uint_as_float(largest << 16), 1e-4f), 448.0f);
    return rounds ? float_of_ue8m0(ue8m0_of(factor)) : factor;
}

#endif
