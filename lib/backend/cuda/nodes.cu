/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Dispatch and barrier between nodes. Rows are copied through registers, 16 bytes per lane: the network is slower than
 * any path within a node.
 */
#include "backend/cuda/nodes.cuh"

#define VECTORS_IN_FLIGHT 4 /* loaded by a lane before it stores them: a row in host memory is read over PCIe */

namespace
{

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

} /* namespace */

/* Profilers show the names. */
namespace ep
{

__global__ void __launch_bounds__(NODES_THREADS) pack_rows(const __grid_constant__ cuda_pack p)
{
    await_stream();
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    net_run run = run_of(p.waits, p.op);

    if (!__syncthreads_and(threadIdx.x || (may_begin(p.waits, p.waits.ready_phase) &&
                                           (!p.counts || (is_current(p.waits, p.counts) &&
                                                          has_tokens(p.waits, p.counts, p.n_tokens))))) ||
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

__global__ void __launch_bounds__(NODES_THREADS) dispatch_nodes(const __grid_constant__ cuda_nodes_dispatch d)
{
    await_stream();
    __shared__ targets targets;
    uint64_t number = operation_publish(d.own.waits, d.own.desc, d.own.route.counts);
    bool ok = operation_begin(d.own.waits, d.own.desc, d.own.route.counts, &d.own.route, number, targets, blockIdx.x);
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

/* Runs between two barriers of the node's ranks. One thread per node. */
__global__ void __launch_bounds__(NODES_THREADS) barrier_nodes(const __grid_constant__ cuda_nodes_barrier b)
{
    await_stream();
    net_run run = run_of(b.waits, b.op);
    bool ok = __syncthreads_and(threadIdx.x || may_begin(b.waits, b.waits.ready_phase));

    if (!ok)
        return;
    if (threadIdx.x == 0)
        post_operation(b.op, run);
    for (int node = (int)threadIdx.x; node < b.chunks.nnodes; node += (int)blockDim.x)
        if (is_other_node(b.waits, b.chunks, node))
            store_release(&run.buffers->ready[CUDA_CHUNK_SLOT(node, 1, node, 0)], run.number);
    for (int node = (int)threadIdx.x; node < b.chunks.nnodes && ok; node += (int)blockDim.x) {
        int slot = CUDA_CHUNK_SLOT(node, 1, node, 0);

        if (!is_other_node(b.waits, b.chunks, node))
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
    return launch(ep::pack_rows, (unsigned)pack->blocks, NODES_THREADS, 0, stream, *pack);
}

cudaError_t cuda_launch_nodes_dispatch(const struct cuda_nodes_dispatch *dispatch, cudaStream_t stream)
{
    return launch(ep::dispatch_nodes, (unsigned)dispatch->blocks, NODES_THREADS, 0, stream, *dispatch);
}

cudaError_t cuda_launch_nodes_barrier(const struct cuda_nodes_barrier *barrier, cudaStream_t stream)
{
    return launch(ep::barrier_nodes, 1, NODES_THREADS, 0, stream, *barrier);
}

cudaError_t cuda_nodes_load(int)
{
    return load_kernels(ep::pack_rows, ep::dispatch_nodes, ep::barrier_nodes);
}
