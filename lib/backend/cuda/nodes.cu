/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch, combine and barrier between nodes. Running blocks claim tiles in ascending order. So the block with the
 * lowest open tile waits for the network only, and the chunks of all lower tiles, which must be released before the
 * network can make progress, have been read.
 *
 * Rows are copied through registers, 16 bytes per lane: the network is slower than any path within a node.
 */
#include "backend/cuda/nodes.cuh"
#include "backend/cuda/sums.cuh"

#include <epkit/types.h>

#define THREADS (CUDA_NODES_WARPS * WARP)
#define VECTORS_IN_FLIGHT 4 /* loaded by a lane before it stores them: a row in host memory is read over PCIe */
#define MAX_TERMS (EP_MAX_TOPK + 2)
/* A rank that waits for another node reports the rank there before the ranks of its own node report this one. */
#define SYNC_DEADLINES 2

namespace
{

/* Claims the next tile for the whole block. */
__device__ uint32_t claim_block_tile(const cuda_waits &waits)
{
    __shared__ uint32_t tile;

    __syncthreads();
    if (threadIdx.x == 0)
        tile = claim_tile(waits);
    __syncthreads();
    return tile;
}

/* --- dispatch ---------------------------------------------------------------------------------------------------- */

/* Copies a row to the addresses of the lanes i < n. Called by all lanes. */
__device__ void copy_row(unsigned char *to, int n, const unsigned char *from, int64_t bytes, int lane)
{
    for (int64_t base = 0; base < bytes; base += VECTORS_IN_FLIGHT * WARP * VECTOR) {
        uint4 v[VECTORS_IN_FLIGHT];

#pragma unroll
        for (int j = 0; j < VECTORS_IN_FLIGHT; j++) {
            int64_t at = base + (j * WARP + lane) * VECTOR;

            if (at < bytes)
                v[j] = load_vector(from + at);
        }
        for (int i = 0; i < n; i++) {
            unsigned char *row =
                reinterpret_cast<unsigned char *>(__shfl_sync(ALL_LANES, reinterpret_cast<unsigned long long>(to), i));

#pragma unroll
            for (int j = 0; j < VECTORS_IN_FLIGHT; j++) {
                int64_t at = base + (j * WARP + lane) * VECTOR;

                if (at < bytes)
                    store_vector(row + at, v[j]);
            }
        }
    }
}

__device__ void pack_token(const cuda_pack &p, const chunk &c, int i, unsigned char *slot, int lane)
{
    int64_t token = p.token[c.first + i];
    uint32_t *scales = reinterpret_cast<uint32_t *>(slot + c.n * p.row_bytes) + i * p.meta.scale_words;
    float *weights =
        reinterpret_cast<float *>(slot + c.n * (p.row_bytes + p.meta.scale_words * 4)) + i * p.meta.weight_words;

    copy_row(slot + i * p.row_bytes, 1, p.x + token * p.row_bytes, p.row_bytes, lane);
    for (int w = lane; w < p.meta.scale_words; w += WARP)
        scales[w] = p.scales[token * p.scale_stride_token + w * p.scale_stride_block];
    for (int k = lane; k < p.meta.weight_words; k += WARP)
        weights[k] = p.weights[token * p.meta.weight_words + k];
}

/* A token's row and metadata, as a rank of this node shall receive them. */
struct token_row {
    const unsigned char *x;
    const uint32_t *scales;
    int64_t scale_stride;
    const float *weights; /* NULL: none */
    const int32_t *index; /* [K] */
};

__device__ void place_meta(const cuda_nodes_dispatch &d, const cuda_target &to, const token_row &t, cuda_entry entry,
                           int lane)
{
    const cuda_route &route = d.own.route;
    int topk = route.topk, first = (d.own.waits.first + entry.local) * route.n_local_experts;
    int64_t row = entry.row;

    for (int w = lane; w < d.meta.scale_words; w += WARP)
        reinterpret_cast<uint32_t *>(to.at[AT_SCALES])[row * d.meta.scale_words + w] =
            load_word(t.scales + w * t.scale_stride);
    if (route.expanded) {
        if (to.at[AT_WEIGHTS] && lane == 0)
            reinterpret_cast<float *>(to.at[AT_WEIGHTS])[row] = load_word(t.weights + entry.k);
        return;
    }
    for (int k = lane; k < topk; k += WARP) {
        int own = t.index[k] - first;
        bool mine = t.index[k] >= 0 && own >= 0 && own < route.n_local_experts;

        if (to.at[AT_INDEX] && route.idx64)
            reinterpret_cast<int64_t *>(to.at[AT_INDEX])[row * topk + k] = mine ? own : -1;
        else if (to.at[AT_INDEX])
            reinterpret_cast<int32_t *>(to.at[AT_INDEX])[row * topk + k] = mine ? own : -1;
        if (to.at[AT_WEIGHTS])
            reinterpret_cast<float *>(to.at[AT_WEIGHTS])[row * topk + k] = mine ? load_word(t.weights + k) : 0.0f;
    }
}

/* Places the rows of a token on this node. Called by all lanes. */
__device__ void place_token(const cuda_nodes_dispatch &d, const targets &targets, const token_row &t,
                            const cuda_entry *entries, int n, int lane)
{
    for (int base = 0; base < n; base += WARP) {
        int some = min(n - base, WARP);
        unsigned char *to = nullptr;

        if (lane < some) {
            cuda_entry entry = entries[base + lane];

            to = targets.of[entry.local].at[AT_X] + entry.row * d.own.row_bytes;
        }
        copy_row(to, some, t.x, d.own.row_bytes, lane);
    }
    for (int i = 0; i < n; i++)
        place_meta(d, targets.of[entries[i].local], t, entries[i], lane);
}

/* Places this rank's own tokens, one per warp. */
__device__ void place_own(const cuda_nodes_dispatch &d, const targets &targets, uint32_t tile)
{
    const cuda_dispatch &o = d.own;
    int64_t token = (int64_t)tile * CUDA_NODES_WARPS + threadIdx.x / WARP;
    token_row t = {};

    if (token >= o.route.n_tokens)
        return;
    t.x = o.x + token * o.row_bytes;
    t.scales = o.scales + token * o.scale_stride_token;
    t.scale_stride = o.scale_stride_block;
    t.weights = o.weights ? o.weights + token * o.route.topk : nullptr;
    t.index = o.route.index + token * o.route.topk;
    place_token(d, targets, t, o.route.entry + token * o.route.width, o.route.count[token], (int)threadIdx.x % WARP);
}

/* Places the tokens of a received chunk. Called by all threads of the block. Returns false if the kernel must exit. */
__device__ bool place_chunk(const cuda_nodes_dispatch &d, const net_run &run, const targets &targets, const chunk &c)
{
    __shared__ const unsigned char *arrived;
    int64_t scale_bytes = (int64_t)d.meta.scale_words * 4;

    if (threadIdx.x == 0)
        arrived = await_chunk(d.own.waits, d.op, run, d.in, c.node, c.slot);
    __syncthreads();
    if (!arrived)
        return false;
    for (int i = (int)threadIdx.x / WARP; i < c.n; i += CUDA_NODES_WARPS) {
        int at = c.first + i;
        token_row t;

        t.x = arrived + i * d.own.row_bytes;
        t.scales = reinterpret_cast<const uint32_t *>(arrived + c.n * d.own.row_bytes + i * scale_bytes);
        t.scale_stride = 1;
        t.weights =
            reinterpret_cast<const float *>(arrived + c.n * (d.own.row_bytes + scale_bytes)) + i * d.meta.weight_words;
        t.index = d.rail.index + (int64_t)at * d.own.route.topk;
        place_token(d, targets, t, d.rail.entry + (int64_t)at * d.rail.width, d.rail.count[at],
                    (int)threadIdx.x % WARP);
    }
    __syncthreads();
    if (threadIdx.x == 0)
        release_chunk(run, c.slot);
    return true;
}

/* --- combine ----------------------------------------------------------------------------------------------------- */

/* The terms of a warp's sum, in shared memory; bit 0 of an address marks fp32. */
struct terms {
    unsigned long long at[MAX_TERMS];
};

#define FP32 1ull

__device__ __forceinline__ void add_fp32(float (&sum)[8], const uint4 (&v)[2], bool first)
{
    const uint32_t words[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};

#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = first ? __uint_as_float(words[i]) : __fadd_rn(sum[i], __uint_as_float(words[i]));
}

__device__ __forceinline__ void add_term(float (&sum)[8], bool fp32, const uint4 (&v)[2], bool first)
{
    if (fp32)
        add_fp32(sum, v, first);
    else if (first)
        add_vector<true>(sum, v[0]);
    else
        add_vector<false>(sum, v[0]);
}

#define TERMS_IN_FLIGHT 4 /* loads in flight: a row of a peer is read over its link */

/* Computes elements [offset / 2, + 8) of the sum. */
__device__ __forceinline__ void add_terms(float (&sum)[8], const terms &t, int n, int64_t offset)
{
#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = 0.0f;
    for (int begin = 0; begin < n; begin += TERMS_IN_FLIGHT) {
        uint4 v[TERMS_IN_FLIGHT][2];

#pragma unroll
        for (int i = 0; i < TERMS_IN_FLIGHT; i++)
            if (begin + i < n) {
                unsigned long long at = t.at[begin + i];
                const unsigned char *from = reinterpret_cast<const unsigned char *>(at & ~FP32);

                v[i][0] = load_vector(from + (at & FP32 ? 2 * offset : offset));
                if (at & FP32)
                    v[i][1] = load_vector(from + 2 * offset + VECTOR);
            }
#pragma unroll
        for (int i = 0; i < TERMS_IN_FLIGHT; i++)
            if (begin + i < n)
                add_term(sum, t.at[begin + i] & FP32, v[i], begin + i == 0);
    }
}

/* Adds the weights of choice k, from the rows on this node, to `sum`. */
__device__ float add_weights(const cuda_nodes_combine &c, const targets &from, const cuda_entry *entries, int n, int k,
                             float sum)
{
    for (int i = 0; i < n; i++) {
        cuda_entry entry = entries[i];
        const float *weights = reinterpret_cast<const float *>(from.of[entry.local].at[AT_WEIGHTS]);

        if (!c.own.route.expanded)
            sum = __fadd_rn(sum, load_word(weights + (int64_t)entry.row * c.own.route.topk + k));
        else if (entry.k == k)
            sum = __fadd_rn(sum, load_word(weights + entry.row));
    }
    return sum;
}

__device__ __forceinline__ unsigned long long row_of(const cuda_nodes_combine &c, const targets &from, cuda_entry entry)
{
    return reinterpret_cast<unsigned long long>(from.of[entry.local].at[AT_X] + entry.row * c.own.row_bytes);
}

/* Reduces a rail peer's token over this node into the chunk. A single row is copied unchanged. Called by all lanes. */
__device__ void sum_rail_token(const cuda_nodes_combine &c, const net_run &run, const targets &from, const chunk &chunk,
                               int i, terms &t, int lane)
{
    int at = chunk.first + i, n = c.rail.count[at];
    const cuda_entry *entries = c.rail.entry + (int64_t)at * c.rail.width;
    const int32_t *of = c.rail_units + chunk.node; /* of its list */
    int begin = of[chunk.first], all = of[chunk.first + chunk.n] - begin, units = of[at + 1] - of[at];
    unsigned char *slot = run.buffers->arena + (size_t)chunk.slot * c.op.slot_bytes;
    unsigned char *to = slot + (of[at] - begin) * c.own.row_bytes;
    float *weights = reinterpret_cast<float *>(slot + all * c.own.row_bytes) + i * c.weight_words, sum[8];

    for (int r = lane; r < n; r += WARP)
        t.at[r] = row_of(c, from, entries[r]);
    __syncwarp();
    for (int64_t offset = lane * VECTOR; offset < c.own.row_bytes; offset += WARP * VECTOR) {
        if (n == 1) {
            store_vector(to + offset, load_vector(reinterpret_cast<const unsigned char *>(t.at[0]) + offset));
            continue;
        }
        add_terms(sum, t, n, offset);
        if (units == 1) {
            store_vector(to + offset, round_vector(sum));
            continue;
        }
        *reinterpret_cast<float4 *>(to + 2 * offset) = make_float4(sum[0], sum[1], sum[2], sum[3]);
        *reinterpret_cast<float4 *>(to + 2 * offset + VECTOR) = make_float4(sum[4], sum[5], sum[6], sum[7]);
    }
    for (int k = lane; k < c.weight_words; k += WARP)
        weights[k] = add_weights(c, from, entries, n, k, 0.0f);
    __syncwarp();
}

__device__ void sum_chunk(const cuda_nodes_combine &c, const net_run &run, const targets &from, const chunk &chunk,
                          terms *all)
{
    int warp = (int)threadIdx.x / WARP;

    for (int i = warp; i < chunk.n; i += CUDA_NODES_WARPS)
        sum_rail_token(c, run, from, chunk, i, all[warp], (int)threadIdx.x % WARP);
    send_chunk(run, chunk.slot);
}

/* The partial sum of a token from a remote node, in a received chunk. */
struct remote_sum {
    chunk in;
    const unsigned char *row;
    const float *weights;
    bool fp32;
};

/* Called by one lane per remote node; row NULL: the kernel must exit. */
__device__ remote_sum await_remote(const cuda_nodes_combine &c, const net_run &run, cuda_remote_term term)
{
    cuda_node_range rail = c.in.rail[term.node];
    int i = (term.at - rail.first) / c.in.tokens, first = rail.first + i * c.in.tokens;
    const int32_t *of = c.net_units + term.node; /* of its list */
    remote_sum remote = {};
    const unsigned char *arrived;
    int begin;

    remote.in = {term.node, first, min(c.in.tokens, rail.first + rail.n - first),
                 CUDA_CHUNK_SLOT(rail.first, c.in.tokens, term.node, i)};
    arrived = await_chunk(c.own.waits, c.op, run, c.in, term.node, remote.in.slot);
    if (!arrived)
        return remote;
    begin = of[first];
    remote.row = arrived + (of[term.at] - begin) * c.own.row_bytes;
    remote.fp32 = of[term.at + 1] - of[term.at] == 2;
    remote.weights = reinterpret_cast<const float *>(arrived + (of[first + remote.in.n] - begin) * c.own.row_bytes) +
                     (term.at - first) * c.weight_words;
    return remote;
}

/* Counts a token of a chunk as read; the reader of the last one releases the chunk. */
__device__ void count_read(const net_run &run, const chunk &chunk)
{
    __threadfence();
    if (atomicAdd(&run.buffers->n_read[chunk.slot], 1u) != (uint32_t)chunk.n - 1)
        return;
    run.buffers->n_read[chunk.slot] = 0;
    release_chunk(run, chunk.slot);
}

__device__ void sum_weights(const cuda_nodes_combine &c, const targets &from, int64_t token, const remote_sum &remote,
                            int n_remote, int before, int lane)
{
    const cuda_route &route = c.own.route;
    const cuda_entry *entries = c.own.by_rank + token * route.width;

    for (int base = 0; base < c.weight_words; base += WARP) {
        int k = base + lane, here = min(k, c.weight_words - 1);
        float sum = 0.0f;

        for (int i = 0; i <= n_remote; i++) {
            const float *weights = reinterpret_cast<const float *>(__shfl_sync(
                ALL_LANES, reinterpret_cast<unsigned long long>(remote.weights), min(i, n_remote - 1) & 31));

            if (i == before)
                sum = add_weights(c, from, entries, route.count[token], here, sum);
            if (i < n_remote)
                sum = __fadd_rn(sum, load_word(weights + here));
        }
        if (k < c.weight_words)
            c.own.out_weights[token * route.topk + k] = sum;
    }
}

/*
 * Reduces a token of this rank: biases, then the nodes in ascending order, the own node row by row. Called by all
 * lanes. Returns false if the kernel must exit.
 */
__device__ bool sum_token(const cuda_nodes_combine &c, const net_run &run, const targets &from, int64_t token, terms &t,
                          int lane)
{
    const cuda_route &route = c.own.route;
    int n_remote = c.remote_count[token], n_own = route.count[token], n = 0, before;
    cuda_remote_term term = lane < n_remote ? c.remote[token * c.remote_width + lane] : cuda_remote_term{0, 0};
    remote_sum remote = lane < n_remote ? await_remote(c, run, term) : remote_sum{};
    float sum[8];

    if (!__all_sync(ALL_LANES, lane >= n_remote || remote.row))
        return false;
    before = __popc(__ballot_sync(ALL_LANES, lane < n_remote && term.node < c.in.node));
    for (int b = 0; b < 2; b++)
        if (c.own.bias[b])
            t.at[n++] = reinterpret_cast<unsigned long long>(c.own.bias[b] + token * c.own.row_bytes);
    if (lane < n_remote)
        t.at[n + lane + (lane < before ? 0 : n_own)] =
            reinterpret_cast<unsigned long long>(remote.row) | (remote.fp32 ? FP32 : 0);
    for (int i = lane; i < n_own; i += WARP)
        t.at[n + before + i] = row_of(c, from, route.entry[token * route.width + i]);
    n += n_remote + n_own;
    __syncwarp();
    for (int64_t offset = lane * VECTOR; offset < c.own.row_bytes; offset += WARP * VECTOR) {
        add_terms(sum, t, n, offset);
        store_vector(c.own.out + token * c.own.row_bytes + offset, round_vector(sum));
    }
    if (c.weight_words)
        sum_weights(c, from, token, remote, n_remote, before, lane);
    __syncwarp();
    if (lane < n_remote)
        count_read(run, remote.in);
    __syncwarp();
    return true;
}

} /* namespace */

/* Profilers show the names. */
namespace ep
{

__global__ void __launch_bounds__(THREADS) pack_rows(const __grid_constant__ cuda_pack p)
{
    await_stream();
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    net_run run = run_of(p.waits, p.op);

    if (!__syncthreads_and(threadIdx.x || (may_begin(p.waits, p.waits.ready_phase) &&
                                           (!p.counts || has_tokens(p.waits, p.counts, p.n_tokens)))) ||
        !await_arena(p.waits, p.op, run, p.out))
        return;
    for (uint32_t number = blockIdx.x; number < count_chunks(p.out); number += gridDim.x) {
        chunk c = find_chunk(p.out, number);

        if (!c.n)
            continue;
        for (int i = warp; i < c.n; i += CUDA_NODES_WARPS)
            pack_token(p, c, i, run.buffers->arena + (size_t)c.slot * p.op.slot_bytes, lane);
        send_chunk(run, c.slot);
    }
}

__global__ void __launch_bounds__(THREADS) dispatch_nodes(const __grid_constant__ cuda_nodes_dispatch d)
{
    await_stream();
    __shared__ targets targets;
    uint64_t number = operation_publish(d.own.waits, d.own.desc);
    bool ok = operation_begin(d.own.waits, d.own.desc, &d.own.route, number, targets, blockIdx.x);
    uint32_t own = ((uint32_t)d.own.route.n_tokens + CUDA_NODES_WARPS - 1) / CUDA_NODES_WARPS;
    uint32_t all =
                 ok && !(targets.refused && is_refused(d.own.waits, d.own.route.counts)) ? own + count_chunks(d.in) : 0,
             tile;
    net_run run = run_of(d.own.waits, d.op);

    while (ok && (tile = claim_block_tile(d.own.waits)) < all) {
        chunk c;

        if (tile < own) {
            place_own(d, targets, tile);
            continue;
        }
        c = find_chunk(d.in, tile - own);
        if (c.n)
            ok = place_chunk(d, run, targets, c);
    }
    if (operation_sync(d.own.waits, number, ok, gridDim.x, SYNC_DEADLINES, {d.own.desc.kind, targets.changed})) {
        operation_complete(d.own.waits, number);
        complete_net(d.own.waits, run);
    }
}

__global__ void __launch_bounds__(THREADS) combine_nodes(const __grid_constant__ cuda_nodes_combine c)
{
    await_stream();
    __shared__ targets from;
    __shared__ terms terms[CUDA_NODES_WARPS];
    uint64_t number = operation_publish(c.own.waits, c.own.desc);
    bool ok = operation_begin(c.own.waits, c.own.desc, &c.own.route, number, from, blockIdx.x);
    uint32_t tokens = (uint32_t)c.own.route.n_tokens, chunks = count_chunks(c.out), tile;
    uint32_t all = chunks + (tokens + CUDA_NODES_WARPS - 1) / CUDA_NODES_WARPS;
    net_run run = run_of(c.own.waits, c.op);

    if (ok && from.refused && is_refused(c.own.waits, c.own.route.counts))
        all = chunks = 0;
    ok = ok && await_arena(c.own.waits, c.op, run, c.out);
    /* The rail peers' tokens first: they wait for no peer. */
    while (ok && (tile = claim_block_tile(c.own.waits)) < all) {
        int warp = (int)threadIdx.x / WARP;
        uint32_t token = (tile - chunks) * CUDA_NODES_WARPS + (uint32_t)warp;

        if (tile < chunks) {
            chunk out = find_chunk(c.out, tile);

            if (out.n)
                sum_chunk(c, run, from, out, terms);
            continue;
        }
        if (token < tokens)
            ok = sum_token(c, run, from, token, terms[warp], (int)threadIdx.x % WARP);
        ok = __syncthreads_and(ok);
    }
    if (operation_sync(c.own.waits, number, ok, gridDim.x, SYNC_DEADLINES, {c.own.desc.kind, from.changed})) {
        operation_complete(c.own.waits, number);
        complete_net(c.own.waits, run);
    }
}

/* Runs between two barriers of the node's ranks. One thread per node. */
__global__ void __launch_bounds__(THREADS) barrier_nodes(const __grid_constant__ cuda_nodes_barrier b)
{
    await_stream();
    net_run run = run_of(b.waits, b.op);
    bool ok = __syncthreads_and(threadIdx.x || may_begin(b.waits, b.waits.ready_phase));

    if (!ok)
        return;
    if (threadIdx.x == 0)
        post_operation(b.op, run);
    for (int node = (int)threadIdx.x; node < b.chunks.nnodes; node += (int)blockDim.x)
        if (node != b.chunks.node)
            store_release(&run.buffers->ready[CUDA_CHUNK_SLOT(node, 1, node, 0)], run.number);
    for (int node = (int)threadIdx.x; node < b.chunks.nnodes && ok; node += (int)blockDim.x) {
        int slot = CUDA_CHUNK_SLOT(node, 1, node, 0);

        if (node == b.chunks.node)
            continue;
        ok = await_chunk(b.waits, b.op, run, b.chunks, node, slot);
        if (ok)
            release_chunk(run, slot);
    }
    if (__syncthreads_and(ok) && threadIdx.x == 0)
        complete_net(b.waits, run);
}

} /* namespace ep */

cudaError_t cuda_launch_pack(const struct cuda_pack *pack, cudaStream_t stream)
{
    return launch(ep::pack_rows, (unsigned)pack->blocks, THREADS, 0, stream, *pack);
}

cudaError_t cuda_launch_nodes_dispatch(const struct cuda_nodes_dispatch *dispatch, cudaStream_t stream)
{
    return launch(ep::dispatch_nodes, (unsigned)dispatch->blocks, THREADS, 0, stream, *dispatch);
}

cudaError_t cuda_launch_nodes_combine(const struct cuda_nodes_combine *combine, cudaStream_t stream)
{
    return launch(ep::combine_nodes, (unsigned)combine->blocks, THREADS, 0, stream, *combine);
}

cudaError_t cuda_launch_nodes_barrier(const struct cuda_nodes_barrier *barrier, cudaStream_t stream)
{
    return launch(ep::barrier_nodes, 1, THREADS, 0, stream, *barrier);
}

cudaError_t cuda_nodes_load(int)
{
    return load_kernels(ep::pack_rows, ep::dispatch_nodes, ep::combine_nodes, ep::barrier_nodes);
}
