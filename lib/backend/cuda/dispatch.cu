/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch: each warp streams (token, chunk of its row) units through a ring in shared memory, one bulk load and a bulk
 * store for each destination, straight into the final rows. The lanes place what travels with a row meanwhile.
 */
#include "backend/cuda/device.cuh"

#define WARP 32

namespace
{

struct ring {
    unsigned char *slot;
    uint64_t *full;
    int stages, chunk;
};

__device__ uint32_t chunk_length(int64_t row_bytes, int chunk_bytes, int chunk)
{
    int64_t left = row_bytes - (int64_t)chunk * chunk_bytes;

    return (uint32_t)(left < chunk_bytes ? left : chunk_bytes);
}

__device__ void load_unit(const cuda_dispatch &d, const ring &r, uint32_t number, int slot)
{
    int64_t token = number / (uint32_t)d.n_chunks;
    int chunk = (int)(number % (uint32_t)d.n_chunks);
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, chunk);

    barrier_expect(r.full + slot, bytes);
    bulk_load(r.slot + (size_t)slot * r.chunk, d.x + token * d.row_bytes + (int64_t)chunk * d.chunk_bytes, bytes,
              r.full + slot);
}

/* What a lane needs of a unit, fetched one unit ahead: a load from device memory takes as long as a row on its way. */
struct unit {
    int64_t token;
    int chunk, n;
    cuda_entry entry;  /* lane i: the i-th */
    uint32_t scale[2]; /* words lane and lane + 32 */
    int expert;        /* lane k: the k-th */
    float weight;
};

__device__ unit fetch_unit(const cuda_dispatch &d, uint32_t number, int lane)
{
    const cuda_route &route = d.route;
    unit u = {};

    u.token = number / (uint32_t)d.n_chunks;
    u.chunk = (int)(number % (uint32_t)d.n_chunks);
    u.n = __ldg(route.count + u.token);
    if (lane < route.width)
        u.entry = route.entry[u.token * route.width + lane];
    if (!d.extras || u.chunk)
        return u;
    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            u.scale[i] = __ldg(d.scales + u.token * d.scale_stride_token + (lane + i * WARP) * d.scale_stride_block);
    if (lane < route.topk) {
        u.expert = __ldg(route.index + u.token * route.topk + lane);
        u.weight = d.weights ? __ldg(d.weights + u.token * route.topk + lane) : 0.0f;
    }
    return u;
}

/* One of the K choices of a token, as rank `local` sees it. */
__device__ void place_choice(const cuda_dispatch &d, int local, int64_t at, int expert, float weight)
{
    int own = expert - local * d.route.n_local_experts;
    bool mine = expert >= 0 && own >= 0 && own < d.route.n_local_experts;

    if (d.out_index[local] && d.route.wide)
        static_cast<int64_t *>(d.out_index[local])[at] = mine ? own : -1;
    else if (d.out_index[local])
        static_cast<int32_t *>(d.out_index[local])[at] = mine ? own : -1;
    if (d.out_weights[local])
        d.out_weights[local][at] = mine ? weight : 0.0f;
}

/* Scales, indices and weights of a token on one destination. By all lanes. */
__device__ void place_extras(const cuda_dispatch &d, const unit &u, cuda_entry entry, int lane)
{
    const cuda_route &route = d.route;
    int local = entry.local, topk = route.topk;
    int64_t row = route.base[local] + entry.row;
    uint32_t *scales = d.out_scales[local] + row * d.scale_words;

    for (int i = 0; i < 2; i++)
        if (lane + i * WARP < d.scale_words)
            scales[lane + i * WARP] = u.scale[i];
    for (int w = lane + 2 * WARP; w < d.scale_words; w += WARP)
        scales[w] = __ldg(d.scales + u.token * d.scale_stride_token + w * d.scale_stride_block);
    if (route.expanded) {
        if (d.out_weights[local] && lane == 0)
            d.out_weights[local][row] = __ldg(d.weights + u.token * topk + entry.k);
        return;
    }
    if (!d.out_index[local] && !d.out_weights[local])
        return;
    if (lane < topk)
        place_choice(d, local, row * topk + lane, u.expert, u.weight);
    for (int k = lane + WARP; k < topk; k += WARP)
        place_choice(d, local, row * topk + k, __ldg(route.index + u.token * topk + k),
                     d.weights ? __ldg(d.weights + u.token * topk + k) : 0.0f);
}

__device__ cuda_entry entry_of_lane(cuda_entry entry, int lane)
{
    entry.row = __shfl_sync(0xffffffffu, entry.row, lane);
    entry.local = (uint16_t)__shfl_sync(0xffffffffu, entry.local, lane);
    entry.k = (uint16_t)__shfl_sync(0xffffffffu, entry.k, lane);
    return entry;
}

__device__ void place_unit(const cuda_dispatch &d, const ring &r, const unit &u, int slot, int lane)
{
    const cuda_route &route = d.route;
    uint32_t bytes = chunk_length(d.row_bytes, d.chunk_bytes, u.chunk);
    const cuda_entry *entries = route.entry + u.token * route.width;
    const unsigned char *from = r.slot + (size_t)slot * r.chunk;

    for (int i = lane; i < u.n; i += WARP) {
        cuda_entry entry = i < WARP ? u.entry : entries[i];
        unsigned char *to = d.out_x[entry.local] + (route.base[entry.local] + entry.row) * d.row_bytes;

        bulk_store(to + (int64_t)u.chunk * d.chunk_bytes, from, bytes);
    }
    bulk_commit();
    for (int i = 0; d.extras && u.chunk == 0 && i < u.n; i++) {
        cuda_entry entry;

        if (i >= WARP) {
            place_extras(d, u, entries[i], lane);
            continue;
        }
        entry = entry_of_lane(u.entry, i);
        place_extras(d, u, entry, lane);
    }
}

/*
 * Which units a warp moves. Those that it begins with are its by its place; the others it takes as it comes to them, so
 * that the warps end together however many rows their tokens have. Asked for ahead, because the answer takes as long as
 * a load: the k-th by lane k % 32, which keeps it until it is wanted.
 */
struct turns {
    uint32_t number; /* of the lane's */
    uint32_t me, all;
    int given; /* turns that are the warp's by its place */
};

__device__ void ask_turn(const cuda_dispatch &d, turns &t, int k, int lane)
{
    if (lane != k % WARP)
        return;
    if (k < t.given)
        t.number = (uint32_t)k * t.all + t.me;
    else
        t.number = (uint32_t)t.given * t.all + take_unit(d.waits);
}

__device__ uint32_t unit_of_turn(const turns &t, int k)
{
    return __shfl_sync(0xffffffffu, t.number, k % WARP);
}

__global__ void __launch_bounds__(512, 1) dispatch_kernel(const __grid_constant__ cuda_dispatch d, int stages)
{
    extern __shared__ __align__(128) unsigned char shared[];
    int warps = (int)blockDim.x / WARP, warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    uint64_t *barriers = reinterpret_cast<uint64_t *>(shared);
    unsigned char *slots = shared + (size_t)(warps * stages * 8 + 127) / 128 * 128;
    ring r = {slots + (size_t)warp * stages * d.chunk_bytes, barriers + warp * stages, stages, d.chunk_bytes};
    uint32_t units = (uint32_t)d.route.n_tokens * (uint32_t)d.n_chunks;
    turns t = {0, (uint32_t)warp * gridDim.x + blockIdx.x, gridDim.x * (uint32_t)warps, stages + 1};
    int slot = 0, next_slot = stages - 1;
    uint32_t parity = 0;
    unit u = {}, next = {};
    uint64_t number;
    bool sound;

    number = operation_signal(d.waits);
    for (int k = 0; k < t.given; k++)
        ask_turn(d, t, k, lane);
    if (lane == 0) {
        for (int i = 0; i < stages; i++)
            barrier_init(r.full + i);
        barriers_publish();
        /* Inputs are this rank's own: they may be loaded before the peers are ready. */
        for (int k = 0; k < stages - 1 && (uint32_t)k * t.all + t.me < units; k++)
            load_unit(d, r, (uint32_t)k * t.all + t.me, k);
    }
    if (t.me < units)
        next = fetch_unit(d, t.me, lane);
    __syncwarp();
    sound = operation_begin(d.waits, number);
    for (int k = 0; unit_of_turn(t, k) < units; k++) {
        uint32_t following = unit_of_turn(t, k + 1), loading;

        u = next;
        if (following < units)
            next = fetch_unit(d, following, lane);
        ask_turn(d, t, k + t.given, lane);
        barrier_wait(r.full + slot, parity);
        if (sound)
            place_unit(d, r, u, slot, lane);
        else if (k == stages - 2 || following >= units)
            break; /* nothing more is on its way into shared memory */
        loading = unit_of_turn(t, k + stages - 1);
        if (sound && loading < units) {
            /* The stores of the unit before have read the slot that is loaded next. */
            bulk_wait_read();
            __syncwarp();
            if (lane == 0)
                load_unit(d, r, loading, next_slot);
            next_slot = next_slot + 1 == stages ? 0 : next_slot + 1;
        }
        if (++slot == stages) {
            slot = 0;
            parity ^= 1;
        }
    }
    bulk_wait_all();
    operation_end(d.waits, number, sound);
}

} /* namespace */

cudaError_t cuda_launch_dispatch(const struct cuda_dispatch *dispatch, const struct cuda_shape *shape,
                                 cudaStream_t stream)
{
    dispatch_kernel<<<(unsigned)shape->blocks, (unsigned)shape->warps * WARP, shape->shared_bytes, stream>>>(
        *dispatch, shape->stages);
    return cudaGetLastError();
}

cudaError_t cuda_dispatch_load(int shared_bytes)
{
    return cudaFuncSetAttribute(dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}
