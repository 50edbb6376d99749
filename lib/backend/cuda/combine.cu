/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combine: each warp pulls the chunks of a token's rows from where they lie into a ring in shared memory, adds them up
 * in fp32 in the order of the route, rounds once and writes the result.
 */
#include "backend/cuda/device.cuh"

#include <cuda_bf16.h>

#define WARP 32
#define VECTOR 16 /* bytes that a lane takes at once: 8 elements */

namespace
{

struct ring {
    unsigned char *slot; /* stages of route.width chunks */
    uint64_t *full;
};

/* Nearest even, every NaN the same one: as ep_bf16_round() on the host. */
__device__ uint32_t round_bf16(float value)
{
    return isnan(value) ? 0x7fc0u : __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__device__ void add_vector(float (&sum)[8], uint4 v, bool first)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        float low = __uint_as_float(words[i] << 16), high = __uint_as_float(words[i] & 0xffff0000u);

        /* The first term as it is: adding it to zero would turn -0 into +0. */
        sum[2 * i] = first ? low : __fadd_rn(sum[2 * i], low);
        sum[2 * i + 1] = first ? high : __fadd_rn(sum[2 * i + 1], high);
    }
}

__device__ uint4 round_vector(const float (&sum)[8])
{
    uint32_t words[4];

#pragma unroll
    for (int i = 0; i < 4; i++)
        words[i] = round_bf16(sum[2 * i]) | round_bf16(sum[2 * i + 1]) << 16;
    return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ uint32_t chunk_length(const cuda_combine &c, int chunk)
{
    int64_t left = c.row_bytes - (int64_t)chunk * c.chunk_bytes;

    return (uint32_t)(left < c.chunk_bytes ? left : c.chunk_bytes);
}

/*
 * A warp's place among the units: it takes consecutive chunks, so that what is known of a token serves all of them.
 * Lane i knows where the token's i-th row lies; the next token's entries are fetched while this one's chunks move.
 */
struct place {
    int64_t token;
    int chunk, n, next_n;
    const unsigned char *row;
    cuda_entry next_entry;
};

__device__ void fetch_next(const cuda_combine &c, place &p, int64_t token, int lane)
{
    if (token >= c.route.n_tokens)
        return;
    p.next_n = __ldg(c.route.count + token);
    if (lane < c.route.width)
        p.next_entry = c.route.entry[token * c.route.width + lane];
}

__device__ const unsigned char *row_of(const cuda_combine &c, cuda_entry entry)
{
    return c.x[entry.local] + (c.route.base[entry.local] + entry.row) * c.row_bytes;
}

__device__ void enter_token(const cuda_combine &c, place &p, int64_t token, int lane)
{
    p.token = token;
    p.n = p.next_n;
    p.row = lane < p.n ? row_of(c, p.next_entry) : nullptr;
    fetch_next(c, p, token + 1, lane);
}

/* By all lanes. */
__device__ void load_unit(const cuda_combine &c, const ring &r, place &p, int slot, int lane)
{
    uint32_t bytes = chunk_length(c, p.chunk);
    int64_t at = (int64_t)p.chunk * c.chunk_bytes;
    unsigned char *to = r.slot + (size_t)slot * c.route.width * c.chunk_bytes;

    if (lane == 0)
        barrier_expect(r.full + slot, (uint32_t)p.n * bytes);
    __syncwarp();
    for (int i = lane; i < p.n; i += WARP) {
        const unsigned char *row = i < WARP ? p.row : row_of(c, c.route.entry[p.token * c.route.width + i]);

        bulk_load(to + (size_t)i * c.chunk_bytes, row + at, bytes, r.full + slot);
    }
    if (++p.chunk == c.n_chunks) {
        p.chunk = 0;
        enter_token(c, p, p.token + 1, lane);
    }
}

/* N terms at once, because loads from shared memory that follow each other wait less. */
template <int N> __device__ void add_terms(float (&sum)[8], const unsigned char *terms, int stride, bool first)
{
    uint4 v[N];

#pragma unroll
    for (int i = 0; i < N; i++)
        v[i] = *reinterpret_cast<const uint4 *>(terms + (size_t)i * stride);
#pragma unroll
    for (int i = 0; i < N; i++)
        add_vector(sum, v[i], first && i == 0);
}

__device__ void add_all(float (&sum)[8], const unsigned char *terms, int stride, int n, bool first)
{
    for (; n >= 4; n -= 4, terms += 4 * stride, first = false)
        add_terms<4>(sum, terms, stride, first);
    if (n == 3)
        add_terms<3>(sum, terms, stride, first);
    else if (n == 2)
        add_terms<2>(sum, terms, stride, first);
    else if (n == 1)
        add_terms<1>(sum, terms, stride, first);
}

__device__ void sum_unit(const cuda_combine &c, const ring &r, int64_t token, int chunk, int slot, int lane)
{
    int n = __ldg(c.route.count + token);
    int64_t at = token * c.row_bytes + (int64_t)chunk * c.chunk_bytes;
    uint32_t bytes = chunk_length(c, chunk);
    const unsigned char *terms = r.slot + (size_t)slot * c.route.width * c.chunk_bytes;

#pragma unroll 2
    for (uint32_t offset = (uint32_t)lane * VECTOR; offset < bytes; offset += WARP * VECTOR) {
        float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        bool first = true;

        for (int b = 0; b < 2; b++)
            if (c.bias[b]) {
                add_vector(sum, *reinterpret_cast<const uint4 *>(c.bias[b] + at + offset), first);
                first = false;
            }
        add_all(sum, terms + offset, c.chunk_bytes, n, first);
        *reinterpret_cast<uint4 *>(c.out + at + offset) = round_vector(sum);
    }
}

/* Volatile, because the peers write the weights before this kernel learns that they are ready. */
__device__ void sum_weights(const cuda_combine &c, int64_t token, int lane)
{
    const cuda_route &route = c.route;
    int n = __ldg(route.count + token), topk = route.topk;

    for (int k = lane; k < topk; k += WARP) {
        float sum = 0.0f;

        for (int i = 0; i < n; i++) {
            cuda_entry entry = route.entry[token * route.width + i];
            int64_t row = route.base[entry.local] + entry.row;
            const volatile float *weights = c.weights[entry.local];

            if (!route.expanded)
                sum = __fadd_rn(sum, weights[row * topk + k]);
            else if (entry.k == k)
                sum = __fadd_rn(sum, weights[row]);
        }
        c.out_weights[token * topk + k] = sum;
    }
}

__global__ void __launch_bounds__(512, 1) combine_kernel(const __grid_constant__ cuda_combine c, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
    unsigned char *slots = shared + (size_t)(warps * stages * 8 + 127) / 128 * 128;
    ring r = {slots + (size_t)warp * stages * c.route.width * c.chunk_bytes, barriers + warp * stages};
    int64_t units = (int64_t)c.route.n_tokens * c.n_chunks, all = (int64_t)gridDim.x * warps;
    int64_t me = (int64_t)blockIdx.x * warps + warp, begin = units * me / all, end = units * (me + 1) / all;
    int64_t issued = begin, token = begin / c.n_chunks;
    int chunk = (int)(begin % c.n_chunks), slot = 0, next = 0;
    uint32_t parity = 0;
    place p = {};
    uint64_t number;
    bool sound;

    number = operation_signal(c.waits);
    if (lane == 0) {
        for (int i = 0; i < stages; i++)
            barrier_init(r.full + i);
        barriers_publish();
    }
    __syncwarp();
    p.chunk = chunk;
    if (begin < end) {
        fetch_next(c, p, token, lane);
        enter_token(c, p, token, lane);
    }
    sound = operation_begin(c.waits, number);
    /* What the peers wrote before may be read by the copy engine now. */
    asm volatile("fence.proxy.async.global;" ::: "memory");
    if (!sound)
        end = begin;
    for (; issued < begin + stages - 1 && issued < end; issued++) {
        load_unit(c, r, p, next, lane);
        next = next + 1 == stages ? 0 : next + 1;
    }
    for (int64_t i = begin; i < end; i++) {
        if (issued < end) {
            load_unit(c, r, p, next, lane);
            issued++;
            next = next + 1 == stages ? 0 : next + 1;
        }
        barrier_wait(r.full + slot, parity);
        sum_unit(c, r, token, chunk, slot, lane);
        if (c.out_weights && chunk == 0)
            sum_weights(c, token, lane);
        /* All lanes have read the slot before it is loaded again. */
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (++chunk == c.n_chunks) {
            chunk = 0;
            token++;
        }
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    operation_end(c.waits, number, sound);
}

} /* namespace */

cudaError_t cuda_launch_combine(const struct cuda_combine *combine, const struct cuda_shape *shape, cudaStream_t stream)
{
    combine_kernel<<<(unsigned)shape->blocks, (unsigned)shape->warps * WARP, shape->shared_bytes, stream>>>(
        *combine, shape->stages);
    return cudaGetLastError();
}

cudaError_t cuda_combine_load(int shared_bytes)
{
    return cudaFuncSetAttribute(combine_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
