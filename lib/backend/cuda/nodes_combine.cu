/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Combine between nodes: a kernel adds up the rows on this node of the rail peers' tokens, and the rows of this rank's
 * own tokens with what the other nodes send. Rows are added in registers, 16 bytes per lane.
 */
#include "backend/cuda/nodes.cuh"
#include "backend/cuda/sums.cuh"

#include <epkit/types.h>

#define MAX_TERMS (EP_MAX_TOPK + 2)

namespace
{

/* The terms of a warp's sum, in shared memory: addresses, which are multiples of 16, with these bits. */
struct terms {
    unsigned long long at[MAX_TERMS];
    uint16_t key[EP_MAX_TOPK]; /* of the rows of this node, by which they are sorted */
};

#define FP32 1ull
/* With EP_COMBINE_BY_CHOICE: a row of this node, added to the sum of its rank; the last one of its rank, and of all. */
#define PART 2ull
#define ENDS_RANK 4ull
#define ENDS_NODE 8ull
#define TERM_BITS 15ull

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

/* Adds the sum of a part, rounded, and begins the next part. */
__device__ __forceinline__ void end_part(float (&sum)[8], float (&part)[8])
{
    add_vector<false>(sum, round_vector(part));
#pragma unroll
    for (int i = 0; i < 8; i++)
        part[i] = 0.0f;
}

#define TERMS_IN_FLIGHT 4 /* loads in flight: a row of a peer is read over its link */

/* Computes elements [offset / 2, + 8) of the sum. */
__device__ __forceinline__ void add_terms(float (&sum)[8], const terms &t, int n, int64_t offset)
{
    float node[8] = {}, rank[8] = {};

#pragma unroll
    for (int i = 0; i < 8; i++)
        sum[i] = 0.0f;
    for (int begin = 0; begin < n; begin += TERMS_IN_FLIGHT) {
        uint4 v[TERMS_IN_FLIGHT][2];

#pragma unroll
        for (int i = 0; i < TERMS_IN_FLIGHT; i++)
            if (begin + i < n) {
                unsigned long long at = t.at[begin + i];
                const unsigned char *from = reinterpret_cast<const unsigned char *>(at & ~TERM_BITS);

                v[i][0] = load_vector(from + (at & FP32 ? 2 * offset : offset));
                if (at & FP32)
                    v[i][1] = load_vector(from + 2 * offset + VECTOR);
            }
#pragma unroll
        for (int i = 0; i < TERMS_IN_FLIGHT; i++)
            if (begin + i < n) {
                unsigned long long at = t.at[begin + i];

                if (at & PART)
                    add_vector<false>(rank, v[i][0]);
                else
                    add_term(sum, at & FP32, v[i], begin + i == 0);
                if (at & ENDS_RANK)
                    end_part(node, rank);
                if (at & ENDS_NODE)
                    end_part(sum, node);
            }
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

/* A token's last choice among `n` experts from `first` on; -1: none. */
__device__ __forceinline__ int last_choice(const int32_t *index, int topk, int first, int n)
{
    int k = topk - 1;

    while (k >= 0 && (index[k] < first || index[k] >= first + n))
        k--;
    return k;
}

/* Lists the n rows on this node of a token as terms from `at` on, in the order of the sum. By all lanes. */
__device__ void list_rows(const cuda_nodes_combine &c, const targets &from, const cuda_entry *entries, int n,
                          const int32_t *index, terms &t, int at, int lane)
{
    const cuda_route &route = c.own.route;
    int experts = route.n_local_experts;

    for (int i = lane; i < n && c.own.by_choice; i += WARP) {
        cuda_entry entry = entries[i];
        int last = last_choice(index, route.topk, (c.own.waits.first + entry.local) * experts, experts);

        t.key[i] = (uint16_t)(last * EP_MAX_TOPK + (route.expanded ? entry.k : last));
    }
    __syncwarp();
    for (int i = lane; i < n; i += WARP) {
        cuda_entry entry = entries[i];
        unsigned long long row =
            reinterpret_cast<unsigned long long>(from.of[entry.local].at[AT_X] + entry.row * c.own.row_bytes);
        int before = 0, key;

        if (!c.own.by_choice) {
            t.at[at + i] = row;
            continue;
        }
        key = t.key[i];
        for (int j = 0; j < n; j++)
            before += t.key[j] < key;
        row |= PART | (key / EP_MAX_TOPK == key % EP_MAX_TOPK ? ENDS_RANK : 0) | (before == n - 1 ? ENDS_NODE : 0);
        t.at[at + before] = row;
    }
}

/* Units of the sums of the tokens [first, end) of a list; NULL: each has one. */
__device__ __forceinline__ int units_of(const int32_t *units, int node, int first, int end)
{
    return units ? units[end + node] - units[first + node] : end - first;
}

/* Reduces a rail peer's token over this node into the chunk. A single row is copied unchanged. Called by all lanes. */
__device__ void sum_rail_token(const cuda_nodes_combine &c, const net_run &run, const targets &from, const chunk &chunk,
                               int i, terms &t, int lane)
{
    int at = chunk.first + i, n = c.rail.count[at], units = units_of(c.rail_units, chunk.node, at, at + 1);
    int before = units_of(c.rail_units, chunk.node, chunk.first, at);
    int all = units_of(c.rail_units, chunk.node, chunk.first, chunk.first + chunk.n);
    const cuda_entry *entries = c.rail.entry + (int64_t)at * c.rail.width;
    unsigned char *slot = run.buffers->arena + (size_t)chunk.slot * c.op.slot_bytes;
    unsigned char *to = slot + before * c.own.row_bytes;
    float *weights = reinterpret_cast<float *>(slot + all * c.own.row_bytes) + i * c.weight_words, sum[8];

    list_rows(c, from, entries, n, c.rail.index + (int64_t)at * c.own.route.topk, t, 0, lane);
    __syncwarp();
    for (int64_t offset = lane * VECTOR; offset < c.own.row_bytes; offset += WARP * VECTOR) {
        if (n == 1 && !c.own.by_choice) {
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
    remote_sum remote = {};
    const unsigned char *arrived;
    int all;

    remote.in = {term.node, first, min(c.in.tokens, rail.first + rail.n - first),
                 CUDA_CHUNK_SLOT(rail.first, c.in.tokens, term.node, i)};
    arrived = await_chunk(c.own.waits, c.op, run, c.in, term.node, remote.in.slot);
    if (!arrived)
        return remote;
    all = units_of(c.net_units, term.node, first, first + remote.in.n);
    remote.row = arrived + units_of(c.net_units, term.node, first, term.at) * c.own.row_bytes;
    remote.fp32 = units_of(c.net_units, term.node, term.at, term.at + 1) == 2;
    remote.weights =
        reinterpret_cast<const float *>(arrived + all * c.own.row_bytes) + (term.at - first) * c.weight_words;
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
 * The places of a token's terms: of the node of this lane, in *ret_at, and returned of the first own row. Called by all
 * lanes. `before`: remote nodes that are lower than this one.
 */
__device__ int place_terms(const cuda_nodes_combine &c, int64_t token, cuda_remote_term term, int n_remote, int before,
                           int lane, int &ret_at)
{
    const cuda_route &route = c.own.route;
    const int32_t *index = route.index + token * route.topk;
    int experts = route.n_local_experts * c.own.waits.nranks, n_own = route.count[token], last, own;

    ret_at = lane + (lane < before ? 0 : n_own);
    if (!c.own.by_choice)
        return before;
    last = lane < n_remote ? last_choice(index, route.topk, term.node * experts, experts) : EP_MAX_TOPK;
    own = last_choice(index, route.topk, c.in.node * experts, experts);
    ret_at = last > own ? n_own : 0;
    for (int i = 0; i < n_remote; i++)
        ret_at += __shfl_sync(ALL_LANES, last, i) < last;
    return __popc(__ballot_sync(ALL_LANES, last < own));
}

/*
 * Reduces a token of this rank: biases, then the nodes in ascending order, the own node row by row, or as
 * EP_COMBINE_BY_CHOICE says. Called by all lanes. Returns false if the kernel must exit.
 */
__device__ bool sum_token(const cuda_nodes_combine &c, const net_run &run, const targets &from, int64_t token, terms &t,
                          int lane)
{
    const cuda_route &route = c.own.route;
    int n_remote = c.remote_count[token], n_own = route.count[token], n = 0, before, own, at;
    cuda_remote_term term = lane < n_remote ? c.remote[token * c.remote_width + lane] : cuda_remote_term{0, 0};
    remote_sum remote = lane < n_remote ? await_remote(c, run, term) : remote_sum{};
    float sum[8];

    if (!__all_sync(ALL_LANES, lane >= n_remote || remote.row))
        return false;
    before = __popc(__ballot_sync(ALL_LANES, lane < n_remote && term.node < c.in.node));
    for (int b = 0; b < 2; b++)
        if (c.own.bias[b])
            t.at[n++] = reinterpret_cast<unsigned long long>(c.own.bias[b] + token * c.own.row_bytes);
    own = place_terms(c, token, term, n_remote, before, lane, at);
    if (lane < n_remote)
        t.at[n + at] = reinterpret_cast<unsigned long long>(remote.row) | (remote.fp32 ? FP32 : 0);
    list_rows(c, from, route.entry + token * route.width, n_own, route.index + token * route.topk, t, n + own, lane);
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

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(NODES_THREADS) combine_nodes(const __grid_constant__ cuda_nodes_combine c)
{
    await_stream();
    __shared__ targets from;
    __shared__ terms terms[CUDA_NODES_WARPS];
    uint64_t number = operation_publish(c.own.waits, c.own.desc, c.own.route.counts);
    bool ok = operation_begin(c.own.waits, c.own.desc, c.own.route.counts, &c.own.route, number, from, blockIdx.x);
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

} /* namespace ep */

cudaError_t cuda_launch_nodes_combine(const struct cuda_nodes_combine *combine, cudaStream_t stream)
{
    return launch(ep::combine_nodes, (unsigned)combine->blocks, NODES_THREADS, 0, stream, *combine);
}

cudaError_t cuda_nodes_combine_load(int)
{
    return load_kernels(ep::combine_nodes);
}
