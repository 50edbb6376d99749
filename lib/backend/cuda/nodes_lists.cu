/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The lists of a plan update between nodes, built when all counts are known: the tokens that go to each other node, and
 * the rows of the rail peers' tokens on this one. Rows are numbered in the order of the tokens, as on the host
 * (group/plan.c).
 */
#include "backend/cuda/nodes.cuh"
#include "backend/cuda/update.cuh"

#define LIST_THREADS 1024
#define TILE CUDA_COUNT_TOKENS /* tokens numbered at a time, one per thread */
#define MASK_WORDS CUDA_MASK_WORDS

namespace
{

/* Has an earlier kernel failed? The same result for all threads of a block. */
__device__ bool has_given_up(const cuda_nodes_update &u)
{
    return __syncthreads_or(threadIdx.x == 0 && is_stopped(u.waits));
}

/* --- the lists --------------------------------------------------------------------------------------------------- */

/* Sum of the values of all lower threads, and of all threads; 32 warps at most. Called by all threads of the block. */
__device__ uint32_t sum_before(uint32_t value, uint32_t &ret_all)
{
    __shared__ uint32_t sums[WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    uint32_t sum = sum_lanes(value), before = 0, all = 0;

    __syncthreads();
    if (lane == WARP - 1)
        sums[warp] = sum;
    __syncthreads();
    for (int w = 0; w < warps; w++) {
        before += w < warp ? sums[w] : 0;
        all += sums[w];
    }
    ret_all = all;
    return before + sum - value;
}

__device__ __forceinline__ int units_of(const cuda_nodes_update &u, int rows)
{
    return rows == 1 || u.bf16_sums ? 1 : 2;
}

/* The number of rows of this rank's token on that node. *ret_before: lower remote nodes on which the token has rows. */
__device__ int rows_there(const cuda_nodes_update &u, int token, int node, int &ret_before)
{
    const int32_t *index = u.index + (size_t)token * u.topk;
    uint32_t ranks = 0;
    int n = 0, before = 0;

    for (int k = 0; k < u.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / u.n_local_experts, there = rank / u.waits.nranks;
        bool seen = false;

        if (rank < 0 || there > node || there == u.words.node)
            continue;
        if (there == node) {
            ranks |= 1u << rank % u.waits.nranks;
            n++;
            continue;
        }
        for (int j = 0; j < k; j++)
            seen |= index[j] >= 0 && index[j] / experts_of_node(u) == there;
        before += !seen;
    }
    ret_before = before;
    return u.expanded ? n : __popc(ranks);
}

/* Counts the remote nodes on which each token has rows. */
__device__ void count_remote_nodes(const cuda_nodes_update &u)
{
    for (int token = (int)threadIdx.x; token < u.n_tokens; token += (int)blockDim.x) {
        int n;

        /* With a node beyond the last one, all are lower. */
        rows_there(u, token, u.words.nnodes, n);
        u.list.remote_count[token] = n;
    }
}

/* One block per node: the list of this rank's tokens for it, and the terms that return from it. */
__global__ void __launch_bounds__(LIST_THREADS) list_tokens_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    int node = (int)blockIdx.x, first, at, units = 0;
    int32_t *of = u.list.net_units + node, *pinned = u.pinned.net_units + node; /* of the list */

    if (has_given_up(u))
        return;
    if (node == u.words.node)
        count_remote_nodes(u);
    first = at = u.list.net[node].first;
    for (int tile = 0; tile < u.n_tokens && u.list.net[node].n; tile += LIST_THREADS) {
        int token = tile + (int)threadIdx.x, before = 0;
        int rows = token < u.n_tokens ? rows_there(u, token, node, before) : 0, mine = rows ? units_of(u, rows) : 0;
        uint32_t all, sum = sum_before((uint32_t)mine << 16 | (rows ? 1 : 0), all);
        int here = at + (int)(sum & 0xffff);

        if (rows) {
            u.list.token[here] = token;
            of[here] = pinned[here] = units + (int)(sum >> 16);
            u.list.remote[(size_t)token * u.remote_width + before] = {node, here};
        }
        at += (int)(all & 0xffff);
        units += (int)(all >> 16);
    }
    if (threadIdx.x == 0)
        of[at] = pinned[at] = units;
    if (threadIdx.x == 0 && at - first != u.list.net[node].n)
        set_failure(u.waits, CUDA_FAILED_DAMAGE, u.waits.rank, u.waits.ready_phase);
    __threadfence_system();
}

/* Receives the experts of the rail peers' tokens. They are validated, because they determine where rows are written. */
__global__ void __launch_bounds__(LIST_THREADS, 1) receive_lists_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    __shared__ const unsigned char *arrived;
    net_run run = run_of(u.waits, u.lists);
    bool ok = __syncthreads_and(threadIdx.x || may_begin(u.waits, u.waits.ready_phase));

    for (uint32_t number = 0; number < count_chunks(u.in) && ok; number++) {
        chunk c = find_chunk(u.in, number);

        if (!c.n)
            continue;
        if (threadIdx.x == 0)
            arrived = await_chunk(u.waits, u.lists, run, u.in, c.node, c.slot);
        __syncthreads();
        ok = arrived;
        for (int i = (int)threadIdx.x; i < c.n * u.topk && ok; i += (int)blockDim.x) {
            int32_t expert = load_word(reinterpret_cast<const int32_t *>(arrived) + i);

            u.list.rail_index[(size_t)c.first * u.topk + i] = expert;
            if (expert < -1 || expert >= u.n_experts) {
                set_failure(u.waits, CUDA_FAILED_DAMAGE, rail_peer_of(u.waits, c.node), u.waits.ready_phase);
                ok = false;
            }
        }
        ok = __syncthreads_and(ok);
        if (ok && threadIdx.x == 0)
            release_chunk(run, c.slot);
    }
    if (ok && threadIdx.x == 0)
        complete_net(u.waits, run);
}

/* --- rows on this node ------------------------------------------------------------------------------------------- */

/* The tokens of one rank that have rows on this node. */
struct token_set {
    const int32_t *index;
    cuda_entry *entry;
    int32_t *count;
    int n;
};

__device__ token_set tokens_of(const cuda_nodes_update &u, int node)
{
    cuda_node_range rail = u.list.rail[node];

    if (node == u.words.node)
        return {u.index, u.entry, u.count, u.n_tokens};
    return {u.list.rail_index + (size_t)rail.first * u.topk, u.list.rail_entry + (size_t)rail.first * u.width,
            u.list.rail_count + rail.first, rail.n};
}

/* The rank (rank layout) or expert (expanded layout) on this node of a choice; -1: none. */
__device__ __forceinline__ int target_of(const cuda_nodes_update &u, int expert)
{
    int here = expert - u.words.node * experts_of_node(u);

    if (expert < 0 || here < 0 || here >= experts_of_node(u))
        return -1;
    return u.expanded ? here : here / u.n_local_experts;
}

/* The rows of a target in tokens that name it more than once, of the tile's tokens below `end`: repeats_before(). */
__device__ int repeats_of(const cuda_nodes_update &u, const int32_t *tile, const uint32_t *repeats, int target, int end)
{
    if (!u.expanded)
        return 0;
    return repeats_before(tile, u.topk, repeats, u.words.node * experts_of_node(u) + target, end);
}

/*
 * In ascending order of ranks, of each the first choice, or of experts and choices. `tile`: the choices of the tile's
 * first token. Returns the number of entries; -1: a row is beyond those of its rank.
 */
__device__ int list_entries(const cuda_nodes_update &u, const int32_t *tile, const uint32_t *masks,
                            const uint32_t *repeats, const int32_t *next, cuda_entry *entry)
{
    const int32_t *index = tile + (size_t)threadIdx.x * u.topk;
    int n = 0, last = -1;
    int64_t row = 0;

    for (;;) {
        int least = INT32_MAX; /* target and choice */

        for (int k = 0; k < u.topk; k++) {
            int target = target_of(u, index[k]), key = target * EP_MAX_TOPK + k;
            bool listed = key <= last || (!u.expanded && last >= 0 && target == last / EP_MAX_TOPK);

            if (target >= 0 && !listed && key < least)
                least = key;
        }
        if (least == INT32_MAX)
            return n;
        int target = least / EP_MAX_TOPK, local = u.expanded ? target / u.n_local_experts : target;

        row = last >= 0 && target == last / EP_MAX_TOPK
                  ? row + 1
                  : (int64_t)next[target] + rows_before(masks + (size_t)target * MASK_WORDS) +
                        repeats_of(u, tile, repeats, target, (int)threadIdx.x);
        if (n >= u.width || row < 0 || row >= u.counts->rows_on[local])
            return -1;
        entry[n++] = {(int32_t)row, (uint16_t)local, (uint16_t)(least % EP_MAX_TOPK)};
        last = least;
    }
}

/*
 * Numbers the rows of TILE tokens from `first` on. `next` [targets]: their next rows. Called by all threads. Returns
 * false if the data is damaged.
 */
__device__ bool number_tile(const cuda_nodes_update &u, const token_set &of, int first, int targets, uint32_t *masks,
                            int32_t *next, int &ret_n)
{
    __shared__ uint32_t repeats[MASK_WORDS];
    int i = (int)threadIdx.x, token = first + i, n = 0;
    const int32_t *tile = of.index + (size_t)first * u.topk, *index = tile + (size_t)i * u.topk;

    for (int word = i; word < targets * MASK_WORDS; word += TILE)
        masks[word] = 0;
    if (i < MASK_WORDS)
        repeats[i] = 0;
    __syncthreads();
    for (int k = 0; k < u.topk && token < of.n; k++) {
        int target = target_of(u, index[k]);
        uint32_t bit = 1u << i % WARP;

        if (target >= 0 && (atomicOr(&masks[target * MASK_WORDS + i / WARP], bit) & bit) && u.expanded)
            atomicOr(&repeats[i / WARP], bit);
    }
    __syncthreads();
    if (token < of.n) {
        n = list_entries(u, tile, masks, repeats, next, of.entry + (size_t)token * u.width);
        of.count[token] = max(n, 0);
    }
    __syncthreads();
    for (int target = i; target < targets; target += TILE) {
        next[target] += repeats_of(u, tile, repeats, target, TILE);
        for (int word = 0; word < MASK_WORDS; word++)
            next[target] += __popc(masks[target * MASK_WORDS + word]);
    }
    __syncthreads();
    ret_n = n;
    return __syncthreads_and(n >= 0);
}

/* One block per node: the rows on this node of the tokens of its rank on this rail. */
__global__ void __launch_bounds__(TILE) number_rows_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    extern __shared__ uint32_t masks[]; /* [targets, MASK_WORDS], then [targets] next rows */
    int node = (int)blockIdx.x, targets = u.expanded ? experts_of_node(u) : u.waits.nranks, units = 0;
    int32_t *next = reinterpret_cast<int32_t *>(masks + (size_t)targets * MASK_WORDS);
    int32_t *list = u.list.rail_units + node + u.list.rail[node].first,
            *pinned = u.pinned.rail_units + node + u.list.rail[node].first;
    bool own = node == u.words.node, ok = true;
    token_set of = tokens_of(u, node);

    if (has_given_up(u))
        return;
    if (u.counts->refused[0]) {
        /* No entry was written, so none may be read. */
        for (int token = (int)threadIdx.x; own && token < u.n_tokens; token += TILE)
            u.count[token] = 0;
        of.n = 0;
    }
    for (int target = (int)threadIdx.x; target < targets; target += TILE)
        next[target] = u.base[(size_t)node * targets + target];
    __syncthreads();
    for (int first = 0; first < of.n && ok; first += TILE) {
        int token = first + (int)threadIdx.x, n;
        uint32_t all, before;

        ok = number_tile(u, of, first, targets, masks, next, n);
        before = sum_before(token < of.n ? (uint32_t)units_of(u, n) : 0, all);
        if (!own && token < of.n)
            list[token] = pinned[token] = units + (int)before;
        units += (int)all;
    }
    if (threadIdx.x == 0 && !own)
        list[of.n] = pinned[of.n] = units;
    if (threadIdx.x == 0 && own)
        list[0] = pinned[0] = 0;
    if (!ok && threadIdx.x == 0)
        set_failure(u.waits, CUDA_FAILED_DAMAGE, rail_peer_of(u.waits, node), u.waits.ready_phase);
    __threadfence_system();
}

size_t shared_bytes(int targets)
{
    return (size_t)targets * (MASK_WORDS + 1) * sizeof(uint32_t);
}

} /* namespace */

cudaError_t cuda_launch_lists(const struct cuda_nodes_update *update, const struct cuda_pack *pack, cudaStream_t stream)
{
    unsigned nodes = (unsigned)update->words.nnodes;
    int nlocal = update->waits.nranks, targets = update->expanded ? update->n_local_experts * nlocal : nlocal;
    cudaError_t error = launch(list_tokens_kernel, nodes, LIST_THREADS, 0, stream, *update);

    if (error == cudaSuccess)
        error = cuda_launch_pack(pack, stream);
    if (error == cudaSuccess)
        error = launch(receive_lists_kernel, 1, LIST_THREADS, 0, stream, *update);
    if (error == cudaSuccess)
        error = launch(number_rows_kernel, nodes, TILE, shared_bytes(targets), stream, *update);
    return error;
}

cudaError_t cuda_lists_load(int)
{
    cudaError_t error = cudaFuncSetAttribute(number_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)shared_bytes(CUDA_MAX_EXPERTS));

    return error == cudaSuccess ? load_kernels(list_tokens_kernel, receive_lists_kernel) : error;
}
