/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.cuh - rows of bf16 to fp8 and fp4 in blocks with a scale each, bit for bit by the rule of ep_ll_dispatch().
 */
#ifndef EP_CUDA_QUANTIZE_CUH
#define EP_CUDA_QUANTIZE_CUH

#include <cuda_fp8.h>
#include <epkit/types.h>
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
__device__ inline float factor_of(sixteen v, int block, bool rounds)
{
    uint32_t largest = max(largest_of(v.low), largest_of(v.high));
    float factor;

    for (int distance = block / 32; distance; distance /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
    /* mxfp8 has no least factor but that of its scales. */
    factor = __fdiv_rn(fmaxf(__uint_as_float(largest << 16), block == EP_SCALE_BLOCK ? 1e-4f : 0.0f), 448.0f);
    return rounds ? float_of_ue8m0(ue8m0_of(factor)) : factor;
}

/* Two bf16 elements as e2m1 in the low byte. Ties go to even codes; a NaN fails every comparison and becomes 6. */
__device__ inline uint32_t quantise_pair(uint32_t pair, float q)
{
    uint32_t codes = 0;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t bits = i ? pair & 0xffff0000u : pair << 16;
        float v = __fmul_rn(__uint_as_float(bits & 0x7fffffffu), q);
        uint32_t code =
            !(v <= 0.25f) + !(v < 0.75f) + !(v <= 1.25f) + !(v < 1.75f) + !(v <= 2.5f) + !(v < 3.5f) + !(v <= 5.0f);

        codes |= (code | bits >> 31 << 3) << 4 * i;
    }
    return codes;
}

__device__ inline uint32_t quantise_eight(uint4 v, float q)
{
    return quantise_pair(v.x, q) | quantise_pair(v.y, q) << 8 | quantise_pair(v.z, q) << 16 |
           quantise_pair(v.w, q) << 24;
}

/* How rows are quantised. */
struct quantizer {
    int block;           /* elements that share a scale: 16 (nvfp4), 32 or 128 */
    bool rounds, packed; /* scales of 32 or 128: powers of two; as exponent bytes */
    float global;        /* of nvfp4 */
};

/* A block of nvfp4: its codes and its scale. */
__device__ inline void quantise_fp4(const quantizer &q, sixteen v, int unit, unsigned char *row, unsigned char *scales)
{
    uint32_t largest = max(largest_of(v.low), largest_of(v.high));
    float amax = __uint_as_float(largest << 16);
    __nv_fp8_storage_t scale =
        __nv_cvt_float_to_fp8(__fmul_rn(q.global, __fdiv_rn(amax, 6.0f)), __NV_SATFINITE, __NV_E4M3);
    float by = scale ? __fdiv_rn(q.global, __half2float(__half(__nv_cvt_fp8_to_halfraw(scale, __NV_E4M3)))) : 0.0f;

    reinterpret_cast<uint2 *>(row)[unit] = make_uint2(quantise_eight(v.low, by), quantise_eight(v.high, by));
    scales[unit] = scale;
}

/* Quantises 16 elements, number `unit` of the row, if it has them; all lanes of the warp call it, for successive ones.
 */
__device__ inline void quantise_unit(const quantizer &q, sixteen v, int unit, bool has, unsigned char *row,
                                     unsigned char *scales)
{
    int lanes = q.block / 16;
    float factor;

    if (lanes == 1) {
        if (has)
            quantise_fp4(q, v, unit, row, scales);
        return;
    }
    factor = factor_of(v, q.block, q.rounds);
    if (!has)
        return;
    reinterpret_cast<uint4 *>(row)[unit] = quantise(v, factor);
    if (unit % lanes)
        return;
    if (q.packed)
        scales[unit / lanes] = (unsigned char)ue8m0_of(factor);
    else
        reinterpret_cast<float *>(scales)[unit / lanes] = factor;
}

#endif
