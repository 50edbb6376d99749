/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Plan in the rank layout: a thread checks the experts of one token and finds the ranks that it goes to. Rows are
 * numbered within the block by ballots. The block that counts last exchanges the counts with the other ranks. If there
 * are several, a second kernel adds the rows of the blocks before each.
 *
 * The layout of a routing is counted by a thread for each token, too.
 */
#include "backend/cuda/exchange.cuh"
#include "backend/cuda/lowlatency.h"

#define MOST 1024 /* threads of a block, each with a token */
#define GROUP_WARPS (CUDA_COUNT_TOKENS / WARP)
static_assert(MOST / WARP <= WARP && MOST % CUDA_COUNT_TOKENS == 0, "a lane for each warp, and whole groups of tokens");

namespace
{

/* Counts a token's experts, and returns the bit mask of its ranks; `last`: the last choice on each. */
__device__ uint32_t count_token(const cuda_count &c, int token, int32_t *per_expert, uint8_t *last)
{
    size_t start = (size_t)token * c.topk;
    int n_local = c.n_experts / c.nranks;
    uint32_t ranks = 0, bad = 0, dropped = 0, missing = __ldg(c.absent);

    for_choices(c, start, [&](int k, int64_t expert) {
        bool valid = expert >= 0 && expert < c.n_experts, absent = valid && is_absent(missing, (int)expert / n_local);

        c.index[start + k] = absent ? -1 : (int32_t)expert;
        bad |= (!valid && expert != -1) || (absent && !c.drops);
        dropped += absent;
        if (!valid || absent)
            return;
        for (int j = 0; j < k && c.distinct; j++)
            bad |= expert_at(c, start + j) == expert;
        ranks |= 1u << ((int)expert / n_local);
        last[(int)expert / n_local] = (uint8_t)k;
        atomicAdd(&per_expert[expert], 1);
    });
    note_found(c, bad, dropped);
    return ranks;
}

/* Each rank is a choice. */
__device__ uint32_t ranks_of_mask(const cuda_count &c, int token, uint8_t *last)
{
    uint32_t ranks = 0, missing = __ldg(c.absent);

    for (int rank = 0; rank < c.nranks; rank++) {
        ranks |= (uint32_t)(c.mask[(size_t)token * c.nranks + rank] != 0) << rank;
        last[rank] = (uint8_t)rank;
    }
    note_found(c, ranks & missing && !c.drops, (uint32_t)__popc(ranks & missing));
    return ranks & ~missing;
}

/*
 * Writes the entries of this thread's token in rank order, numbered within the block, and the rows per rank of each
 * CUDA_COUNT_TOKENS tokens.
 */
__device__ void number_rows(const cuda_update &u, int token, uint32_t ranks, const uint8_t *last)
{
    __shared__ int32_t rows[CUDA_MAX_RANKS][MOST / WARP]; /* of each warp, then those before it */
    const cuda_count &c = u.count;
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP, n = 0, warps = (int)blockDim.x / WARP;
    int group = ((int)blockIdx.x * warps + lane) / GROUP_WARPS;

    for (int rank = 0; rank < c.nranks; rank++) {
        uint32_t votes = __ballot_sync(ALL_LANES, ranks >> rank & 1);

        if (lane == 0)
            rows[rank][warp] = __popc(votes);
    }
    __syncthreads();
    for (int rank = warp; rank < c.nranks; rank += warps) { /* a lane for each warp */
        int own = lane < warps ? rows[rank][lane] : 0, sum = sum_lanes(own);
        int begin = __shfl_sync(ALL_LANES, sum - own, lane / GROUP_WARPS * GROUP_WARPS);

        if (lane < warps)
            rows[rank][lane] = sum - own;
        if (lane < warps && lane % GROUP_WARPS == GROUP_WARPS - 1 && group < u.blocks)
            c.block_rows[group * c.nranks + rank] = sum - begin;
    }
    __syncthreads();
    for (int rank = 0; rank < c.nranks; rank++) {
        uint32_t votes = __ballot_sync(ALL_LANES, ranks >> rank & 1);
        int before = rows[rank][warp] + __popc(votes & ((1u << lane) - 1));

        if (ranks >> rank & 1)
            c.entry[(size_t)token * c.width + n++] = {before, (uint16_t)rank, last[rank]};
    }
    if (token < c.n_tokens)
        c.count[token] = n;
}

/* Makes the rows of each CUDA_COUNT_TOKENS tokens of a rank those before them; returns their sum. By a warp. */
__device__ int sum_groups(const cuda_update &u, int rank)
{
    int total = 0;

    for (int first = 0; first < u.blocks; first += WARP) {
        int group = first + (int)threadIdx.x % WARP;
        int32_t *rows = &u.count.block_rows[group * u.count.nranks + rank];
        int n = group < u.blocks ? __ldcg(rows) : 0, sum = sum_lanes(n);

        if (group < u.blocks)
            *rows = total + sum - n;
        total += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    return total;
}

/* By the block that finishes last: writes the totals and resets the scratch memory. */
__device__ void write_totals(const cuda_update &u)
{
    const cuda_count &c = u.count;
    int n_local = c.n_experts / c.nranks, threads = (int)blockDim.x;
    uint32_t missing = __ldg(c.absent);

    for (int rank = (int)threadIdx.x / WARP; rank < c.nranks; rank += threads / WARP) {
        int total = sum_groups(u, rank);

        if (threadIdx.x % WARP == 0)
            c.totals[rank] = total;
        if (threadIdx.x % WARP == 0 && c.mask_experts && !is_absent(missing, rank) &&
            !counts_are_possible(c.mask_experts + rank * n_local, n_local, total, c.distinct))
            note_found(c, true, 0);
    }
    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += threads) {
        const int32_t *counts = c.mask_experts ? c.mask_experts : c.per_expert;

        c.totals[c.nranks + expert] = is_absent(missing, expert / n_local) ? 0 : __ldcg(&counts[expert]);
        c.per_expert[expert] = 0;
    }
    __syncthreads();
    move_found(c);
}

__global__ void __launch_bounds__(MOST, 1) count_kernel(const __grid_constant__ cuda_update u)
{
    await_stream();
    __shared__ exchange x;
    const cuda_count &c = u.count;
    int token = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    uint8_t last[CUDA_MAX_RANKS];
    uint32_t ranks = 0;

    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += (int)blockDim.x)
        x.total[expert] = 0;
    __syncthreads();
    if (token < c.n_tokens)
        ranks = c.mask ? ranks_of_mask(c, token, last) : count_token(c, token, x.total, last);
    number_rows(u, token, ranks, last);
    __syncthreads();
    for (int expert = (int)threadIdx.x; expert < c.n_experts; expert += (int)blockDim.x)
        if (x.total[expert])
            atomicAdd(&c.per_expert[expert], x.total[expert]);
    if (!is_last_block(c.blocks_done))
        return;
    write_totals(u);
    exchange_counts(u, x);
}

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) add_blocks_kernel(const __grid_constant__ cuda_count c)
{
    await_stream();
    int block = (int)blockIdx.x + 1, token = block * CUDA_COUNT_TOKENS + (int)threadIdx.x;

    for (int i = 0; token < c.n_tokens && i < c.count[token]; i++) {
        cuda_entry *entry = &c.entry[(size_t)token * c.width + i];

        entry->row += c.block_rows[block * c.nranks + entry->local];
    }
}

/* The last choice of a token whose expert is on the rank. */
__device__ int last_choice(const cuda_route &route, int token, int rank)
{
    int k = route.topk - 1;

    for (; k > 0; k--) {
        int expert = route.index[(size_t)token * route.topk + k];

        if (expert >= 0 && expert / route.n_local_experts == rank)
            break;
    }
    return k;
}

/* Of entries that are together by rank, keeps the last one of each; returns their number. */
__device__ int keep_last(cuda_entry *entries, int n)
{
    int kept = 0;

    for (int i = 0; i < n; i++)
        if (i == n - 1 || entries[i].local != entries[i + 1].local)
            entries[kept++] = entries[i];
    return kept;
}

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) order_kernel(const __grid_constant__ cuda_order o)
{
    await_stream();
    const cuda_route &route = o.route;
    int token = (int)(blockIdx.x * CUDA_COUNT_TOKENS + threadIdx.x);
    size_t start = (size_t)token * route.width;
    uint32_t keys[EP_MAX_TOPK]; /* of the entries sorted so far */

    for (int n = 0; token < route.n_tokens && n < route.count[token]; n++) {
        cuda_entry entry = route.entry[start + n];
        uint32_t key = entry.k;
        int at = n;

        if (o.by_rank)
            key |= (uint32_t)last_choice(route, token, entry.local) << 8;
        for (; at > 0 && keys[at - 1] > key; at--) {
            keys[at] = keys[at - 1];
            o.ret_entry[start + at] = o.ret_entry[start + at - 1];
        }
        keys[at] = key;
        o.ret_entry[start + at] = entry;
    }
    if (o.ret_count && token < route.n_tokens)
        o.ret_count[token] = keep_last(o.ret_entry + start, route.count[token]);
}

/* --- the layout of a routing ------------------------------------------------------------------------------------- */

/* Of a block, which adds them to those of the others at its end. */
struct sums {
    int32_t per_rank[EP_MAX_RANKS], per_expert[EP_MAX_EXPERTS];
    int32_t per_node[EP_MAX_RANKS]; /* tokens with an expert there */
    int32_t bad;
};

__device__ __forceinline__ bool is_within(int64_t expert, int first, int n)
{
    return expert >= first && expert < first + n;
}

/* Counts a token's experts, and each of its ranks and nodes once. */
__device__ void count_token(const cuda_layout &l, int token, sums &sum)
{
    size_t start = (size_t)token * l.topk;
    int n_local = l.n_experts / l.nranks, on_node = n_local * l.ranks_per_node;
    uint8_t *in_rank = l.in_rank ? l.in_rank + (size_t)token * l.nranks : nullptr;

    for (int rank = 0; rank < l.nranks && in_rank; rank++)
        in_rank[rank] = 0;
    for_choices(l, start, [&](int k, int64_t expert) {
        bool bad = expert < -1 || expert >= l.n_experts, new_rank = true, new_node = true;
        int rank = bad || expert < 0 ? 0 : (int)expert / n_local, node = rank / l.ranks_per_node;

        if (!bad && expert >= 0 && is_absent(l.waits, rank)) {
            bad = !l.drops;
            expert = -1;
        }
        for (int j = 0; j < k && expert >= 0; j++) {
            int64_t other = expert_at(l, start + j);

            bad |= l.distinct && other == expert;
            new_rank &= !is_within(other, rank * n_local, n_local);
            new_node &= !is_within(other, node * on_node, on_node);
        }
        if (bad)
            sum.bad = 1;
        if (bad || expert < 0)
            return;
        atomicAdd(&sum.per_expert[expert], 1);
        if (new_rank)
            atomicAdd(&sum.per_rank[rank], 1);
        if (new_node)
            atomicAdd(&sum.per_node[node], 1);
        if (in_rank)
            in_rank[rank] = 1;
    });
}

/* By all threads of a block. */
__device__ void add_counts(int32_t *scratch, const int32_t *counts, int n)
{
    for (int i = (int)threadIdx.x; i < n; i += CUDA_COUNT_TOKENS)
        if (counts[i])
            atomicAdd(&scratch[i], counts[i]);
}

/* By all threads of the last block. `to` may be NULL. */
__device__ void move_counts(int32_t *to, int32_t *scratch, int n)
{
    for (int i = (int)threadIdx.x; i < n; i += CUDA_COUNT_TOKENS) {
        if (to)
            to[i] = __ldcg(&scratch[i]);
        scratch[i] = 0;
    }
}

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) layout_kernel(const __grid_constant__ cuda_layout l)
{
    await_stream();
    __shared__ sums sum;
    int i = (int)threadIdx.x, token = (int)(blockIdx.x * CUDA_COUNT_TOKENS + threadIdx.x);

    for (int expert = i; expert < l.n_experts; expert += CUDA_COUNT_TOKENS)
        sum.per_expert[expert] = 0;
    for (int rank = i; rank < l.nranks; rank += CUDA_COUNT_TOKENS)
        sum.per_rank[rank] = sum.per_node[rank] = 0;
    if (i == 0)
        sum.bad = 0;
    __syncthreads();
    if (token < l.n_tokens)
        count_token(l, token, sum);
    __syncthreads();
    add_counts(l.scratch + CUDA_SCRATCH_EXPERTS, sum.per_expert, l.n_experts);
    add_counts(l.scratch + CUDA_SCRATCH_RANKS, sum.per_rank, l.nranks);
    add_counts(l.scratch + CUDA_SCRATCH_NODES, sum.per_node, l.nranks / l.ranks_per_node);
    if (sum.bad)
        refuse_routing(l.waits);
    if (!is_last_block((uint32_t *)l.scratch + CUDA_SCRATCH_BLOCKS_DONE))
        return;
    move_counts(l.per_expert, l.scratch + CUDA_SCRATCH_EXPERTS, l.n_experts);
    move_counts(l.per_rank, l.scratch + CUDA_SCRATCH_RANKS, l.nranks);
    move_counts(l.per_node, l.scratch + CUDA_SCRATCH_NODES, l.nranks / l.ranks_per_node);
}

} /* namespace */

cudaError_t cuda_launch_order(const struct cuda_order *order, cudaStream_t stream)
{
    unsigned blocks = (unsigned)(order->route.n_tokens + CUDA_COUNT_TOKENS - 1) / CUDA_COUNT_TOKENS;

    return blocks ? launch(order_kernel, blocks, CUDA_COUNT_TOKENS, 0, stream, *order) : cudaSuccess;
}

cudaError_t cuda_launch_count(const struct cuda_update *update, cudaStream_t stream)
{
    /* One block needs no kernel after it, but its loads and stores are those of one multiprocessor. */
    unsigned groups = (unsigned)update->blocks, blocks = groups * CUDA_COUNT_TOKENS > MOST ? groups : 1;
    cudaError_t error = launch(count_kernel, blocks, groups / blocks * CUDA_COUNT_TOKENS, 0, stream, *update);

    if (error != cudaSuccess || blocks < 2)
        return error;
    return launch(add_blocks_kernel, blocks - 1, CUDA_COUNT_TOKENS, 0, stream, update->count);
}

cudaError_t cuda_launch_layout(const struct cuda_layout *layout, cudaStream_t stream)
{
    unsigned blocks = (unsigned)(layout->n_tokens + CUDA_COUNT_TOKENS - 1) / CUDA_COUNT_TOKENS;

    return launch(layout_kernel, blocks ? blocks : 1, CUDA_COUNT_TOKENS, 0, stream, *layout);
}

cudaError_t cuda_kernels_load(int shared_bytes)
{
    static cuda_load_fn *const loads[] = {
        cuda_barrier_load,
        cuda_update_load,
        cuda_nodes_load,
        cuda_nodes_combine_load,
        cuda_slices_load,
        cuda_lists_load,
        cuda_metadata_load,
        cuda_dispatch_load,
        cuda_combine_load,
        cuda_quantize_load,
        cuda_ll_dispatch_load,
        cuda_ll_combine_load,
        cuda_ll_mask_load,
        cuda_ll_dispatch_load_nodes,
        cuda_ll_combine_load_nodes,
        cuda_ll_mask_load_nodes,
    };
    cudaError_t error = load_kernels(count_kernel, add_blocks_kernel, order_kernel, layout_kernel);

    for (size_t i = 0; error == cudaSuccess && i < sizeof(loads) / sizeof(loads[0]); i++)
        error = loads[i](shared_bytes);
    return error;
}
