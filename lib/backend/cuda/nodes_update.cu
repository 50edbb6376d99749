/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New routing between nodes: see nodes_update.h. Sums are taken in the order of the ranks and rows numbered in that of
 * the tokens, so the rows are those that the host would have placed (group/plan.c).
 */
#include "backend/cuda/nodes.cuh"
#include "backend/cuda/nodes_update.h"

#define EXCHANGE_THREADS 1024
#define LIST_THREADS 1024
#define TILE CUDA_COUNT_TOKENS /* tokens that are numbered at a time, a thread each */
#define MASK_WORDS (TILE / WARP)

namespace
{

/* --- shapes ------------------------------------------------------------------------------------------------------ */

__device__ __forceinline__ int nodes_of(const cuda_nodes_update &u)
{
    return u.words.nnodes;
}

__device__ __forceinline__ int node_of(const cuda_nodes_update &u)
{
    return u.words.node;
}

__device__ __forceinline__ int experts_of_node(const cuda_nodes_update &u)
{
    return u.n_local_experts * u.waits.nranks;
}

__device__ __forceinline__ int slice_words(const cuda_nodes_update &u)
{
    return 1 + u.waits.nranks + experts_of_node(u);
}

__device__ __forceinline__ int32_t *tokens_for_node(const cuda_nodes_update &u, int node)
{
    return u.totals + 1 + node;
}

__device__ __forceinline__ int32_t *tokens_for_rank(const cuda_nodes_update &u, int rank)
{
    return u.totals + 1 + nodes_of(u) + rank;
}

__device__ __forceinline__ int32_t *tokens_for_expert(const cuda_nodes_update &u, int expert)
{
    return u.totals + 1 + nodes_of(u) + nodes_of(u) * u.waits.nranks + expert;
}

/* --- this rank's routing ----------------------------------------------------------------------------------------- */

/* A mask is as if each token had chosen the first expert of every rank that it goes to. */
__device__ int64_t read_choice(const cuda_nodes_update &u, int token, int k)
{
    size_t at = (size_t)token * u.topk + k;

    if (!u.topk_idx)
        return u.mask[at] ? (int64_t)k * u.n_local_experts : -1;
    return u.idx64 ? static_cast<const int64_t *>(u.topk_idx)[at] : static_cast<const int32_t *>(u.topk_idx)[at];
}

__global__ void __launch_bounds__(TILE) read_routing_kernel(const __grid_constant__ cuda_nodes_update u)
{
    int token = (int)(blockIdx.x * TILE + threadIdx.x), bad = 0;
    int32_t *index = u.index + (size_t)token * u.topk;

    if (token >= u.n_tokens)
        return;
    for (int k = 0; k < u.topk; k++) {
        int64_t choice = read_choice(u, token, k);
        int expert, rank, node;
        bool new_rank = true, new_node = true;

        bad |= choice < -1 || choice >= u.n_experts || (!u.topk_idx && u.mask[(size_t)token * u.topk + k] > 1);
        expert = choice < 0 || choice >= u.n_experts ? -1 : (int)choice;
        index[k] = expert;
        if (expert < 0)
            continue;
        rank = expert / u.n_local_experts;
        node = rank / u.waits.nranks;
        for (int j = 0; j < k; j++) {
            int before = index[j] < 0 ? -1 : index[j] / u.n_local_experts;

            bad |= index[j] == expert;
            new_rank &= before != rank;
            new_node &= before < 0 || before / u.waits.nranks != node;
        }
        if (u.topk_idx)
            atomicAdd(tokens_for_expert(u, expert), 1);
        if (new_rank)
            atomicAdd(tokens_for_rank(u, rank), 1);
        if (new_node)
            atomicAdd(tokens_for_node(u, node), 1);
    }
    if (bad)
        atomicOr(u.totals, 1);
}

/* --- exchange ---------------------------------------------------------------------------------------------------- */

/* Can the counts be those of the mask? By all threads. */
__device__ bool mask_is_possible(const cuda_nodes_update &u)
{
    bool possible = true;

    for (int rank = (int)threadIdx.x; rank < nodes_of(u) * u.waits.nranks && !u.topk_idx; rank += (int)blockDim.x) {
        int tokens = *tokens_for_rank(u, rank);
        int64_t sum = 0;

        for (int expert = rank * u.n_local_experts; expert < (rank + 1) * u.n_local_experts; expert++) {
            possible &= u.mask_experts[expert] >= 0 && u.mask_experts[expert] <= tokens;
            sum += u.mask_experts[expert];
        }
        possible &= sum >= tokens;
    }
    return __syncthreads_and(possible);
}

/* Routing that is not valid fails the group: the ranks could not come together again. */
__device__ bool routing_is_valid(const cuda_nodes_update &u)
{
    int i = (int)threadIdx.x, me = u.waits.rank, phase = u.waits.ready_phase;

    if (mask_is_possible(u) && !*u.totals)
        return true;
    if (i == me)
        give_up(u.waits, CUDA_FAILED_ROUTING, me, phase);
    else if (i < u.waits.nranks)
        *(volatile uint32_t *)&u.waits.peer[i]->gave_up = CUDA_FAILURE(CUDA_FAILED_ROUTING, u.waits.first + me, phase);
    return false;
}

/* Word of the slice for that node. */
__device__ int32_t word_of_slice(const cuda_nodes_update &u, int node, int word)
{
    int rank = word - 1, expert = node * experts_of_node(u) + rank - u.waits.nranks;

    if (!word)
        return *tokens_for_node(u, node);
    if (rank < u.waits.nranks)
        return *tokens_for_rank(u, node * u.waits.nranks + rank);
    return u.topk_idx ? *tokens_for_expert(u, expert) : u.mask_experts[expert];
}

__device__ __forceinline__ int slot_of(int node)
{
    return CUDA_CHUNK_SLOT(node, 1, node, 0);
}

/* Behind all that is packed. By all threads. */
__device__ void send_words(const cuda_nodes_update &u, const net_run &run)
{
    __threadfence_system();
    __syncthreads();
    for (int node = (int)threadIdx.x; node < nodes_of(u); node += (int)blockDim.x)
        if (node != node_of(u))
            store_release(&run.half->ready[slot_of(node)], run.number);
}

/* `words` of each other node to ret[node, words]. By all threads; false: leave. */
__device__ bool receive_words(const cuda_nodes_update &u, const cuda_net_op &op, const net_run &run, int words,
                              uint32_t *ret)
{
    __shared__ const unsigned char *landed;

    for (int node = 0; node < nodes_of(u); node++) {
        if (node == node_of(u))
            continue;
        if (threadIdx.x == 0)
            landed = await_chunk(u.waits, op, run, u.words, node, slot_of(node));
        __syncthreads();
        if (!landed)
            return false;
        for (int i = (int)threadIdx.x; i < words; i += (int)blockDim.x)
            ret[(size_t)node * words + i] = load_word(reinterpret_cast<const uint32_t *>(landed) + i);
        __syncthreads();
        if (threadIdx.x == 0)
            give_back(run, slot_of(node));
    }
    return true;
}

/* What cannot be: counts below 0, more of a token than there are, or more tokens than there is room for. */
__device__ bool slices_are_sound(const cuda_nodes_update &u)
{
    int words = slice_words(u);
    bool sound = true;

    for (int i = (int)threadIdx.x; i < nodes_of(u) * words && sound; i += (int)blockDim.x) {
        int node = i / words, n = u.slice[(size_t)node * words], most = node == node_of(u) ? INT32_MAX : u.rail_most;

        sound = n >= 0 && n <= most && u.slice[i] >= 0 && u.slice[i] <= n;
        if (!sound)
            give_up(u.waits, CUDA_FAILED_DAMAGE, rail_of(u.waits, node), u.waits.ready_phase);
    }
    return __syncthreads_and(sound);
}

/* The slices of this node of all ranks of this rail. */
__device__ bool swap_slices(const cuda_nodes_update &u, const net_run &run)
{
    int words = slice_words(u);

    if (!await_arena(u.waits, u.slices, run, u.words))
        return false;
    for (int i = (int)threadIdx.x; i < nodes_of(u) * words; i += (int)blockDim.x) {
        int node = i / words, word = i % words;
        int32_t *to = node == node_of(u)
                          ? u.slice + (size_t)node * words
                          : reinterpret_cast<int32_t *>(run.half->arena + (size_t)slot_of(node) * u.slices.slot_bytes);

        to[word] = word_of_slice(u, node, word);
    }
    send_words(u, run);
    if (!receive_words(u, u.slices, run, words, reinterpret_cast<uint32_t *>(u.slice)))
        return false;
    __syncthreads();
    return slices_are_sound(u);
}

/* The ranks of this node learn them. */
__device__ void push_slices(const cuda_nodes_update &u, uint64_t number)
{
    int each = slice_words(u) - 1, words = CUDA_SLICE_WORDS + nodes_of(u) * each;

    for (int i = (int)threadIdx.x; i < u.waits.nranks * words; i += (int)blockDim.x) {
        int word = i % words, at = word - CUDA_SLICE_WORDS;
        uint32_t value = word == CUDA_SLICE_CAPACITY
                             ? (uint32_t)u.capacity
                             : (uint32_t)u.slice[(size_t)(at / each) * (each + 1) + 1 + at % each];

        *(volatile uint64_t *)&u.waits.peer[i / words]->counts[u.waits.rank][word] = number << 32 | value;
    }
}

struct has_word {
    const uint64_t *word;
    uint32_t number;

    __device__ __forceinline__ bool operator()() const
    {
        return (uint32_t)(*(const volatile uint64_t *)word >> 32) == number;
    }
};

/* False: leave. */
__device__ bool take_word(const cuda_nodes_update &u, uint64_t number, int source, int at, int32_t &ret_value)
{
    const uint64_t *word = &u.waits.mine->counts[source][at];

    if (!wait_until_met(u.waits, has_word{word, (uint32_t)number}, source, u.waits.ready_phase))
        return false;
    ret_value = (int32_t)(uint32_t) * (const volatile uint64_t *)word;
    return true;
}

struct node_counts {
    int32_t total[CUDA_MAX_RANKS + CUDA_MAX_EXPERTS]; /* tokens for each rank of the node, and each expert */
    int64_t rows_on[CUDA_MAX_RANKS];
    int32_t capacity[CUDA_MAX_RANKS];
    int refused; /* the first rank of the node that cannot take its rows; their number: none */
};

/* Adds up what all ranks have for one rank or expert of the node, in their order. By one thread; false: leave. */
__device__ bool take_target(const cuda_nodes_update &u, uint64_t number, int at, node_counts &x)
{
    int nlocal = u.waits.nranks, each = slice_words(u) - 1, targets = u.expanded ? experts_of_node(u) : nlocal;
    int target = u.expanded ? at - nlocal : at;
    int64_t total = 0;

    for (int source = 0; source < nodes_of(u) * nlocal; source++) {
        int node = source / nlocal, local = source % nlocal;
        int32_t n;

        if (!take_word(u, number, local, CUDA_SLICE_WORDS + node * each + at, n))
            return false;
        if (local == u.waits.rank && target >= 0 && target < targets)
            u.base[(size_t)node * targets + target] = (int32_t)total;
        if (at == u.waits.rank)
            u.first[source] = total;
        total += n;
    }
    if (at == u.waits.rank)
        u.first[nodes_of(u) * nlocal] = total;
    /* More than this no rank has room for. */
    x.total[at] = (int32_t)min(total, (int64_t)INT32_MAX);
    return true;
}

__device__ bool take_slices(const cuda_nodes_update &u, uint64_t number, node_counts &x)
{
    bool sound = true;

    for (int at = (int)threadIdx.x; at < slice_words(u) - 1 && sound; at += (int)blockDim.x)
        sound = take_target(u, number, at, x);
    if (sound && (int)threadIdx.x < u.waits.nranks)
        sound = take_word(u, number, (int)threadIdx.x, CUDA_SLICE_CAPACITY, x.capacity[threadIdx.x]);
    return __syncthreads_and(sound);
}

/* Where the rows of each expert of a rank begin: added to the bases. By one thread; returns how many rows there are. */
__device__ int64_t place_experts(const cuda_nodes_update &u, const node_counts &x, int local)
{
    bool mine = local == u.waits.rank;
    int64_t start = 0;

    for (int i = 0; i < u.n_local_experts; i++) {
        int target = local * u.n_local_experts + i, exact = x.total[u.waits.nranks + target];

        if (mine) {
            u.expert_start[i] = (int32_t)min(start, (int64_t)INT32_MAX);
            u.expert_exact[i] = exact;
        }
        for (int node = 0; node < nodes_of(u) && u.expanded; node++)
            u.base[(size_t)node * experts_of_node(u) + target] += (int32_t)min(start, (int64_t)INT32_MAX);
        start = (start + exact + u.alignment - 1) / u.alignment * u.alignment;
    }
    if (mine)
        u.expert_start[u.n_local_experts] = (int32_t)min(start, (int64_t)INT32_MAX);
    return start;
}

/* What each rank of the node receives, and whether it can. By all threads. */
__device__ void place_ranks(const cuda_nodes_update &u, node_counts &x)
{
    int i = (int)threadIdx.x, n = u.waits.nranks;

    if (i == 0)
        x.refused = n;
    __syncthreads();
    if (i < n) {
        int64_t rows = place_experts(u, x, i);

        x.rows_on[i] = u.expanded ? rows : x.total[i];
        if (x.rows_on[i] > x.capacity[i] || x.rows_on[i] >= INT32_MAX)
            atomicMin(&x.refused, i);
    }
    __syncthreads();
}

/* What the nodes say of their ranks; all see the same. */
__device__ bool swap_refusals(const cuda_nodes_update &u, const net_run &run, const node_counts &x)
{
    int words = (int)(sizeof(cuda_refusal) / sizeof(uint32_t)), refused = x.refused;
    bool none = refused == u.waits.nranks;

    if (!await_arena(u.waits, u.refusals, run, u.words))
        return false;
    for (int node = (int)threadIdx.x; node < nodes_of(u); node += (int)blockDim.x) {
        cuda_refusal *to =
            node == node_of(u)
                ? u.refusal + node
                : reinterpret_cast<cuda_refusal *>(run.half->arena + (size_t)slot_of(node) * u.refusals.slot_bytes);

        to->refused[0] = none ? 0 : u.waits.first + refused + 1;
        to->refused[1] = none ? 0 : x.rows_on[refused];
        to->refused[2] = none ? 0 : x.capacity[refused];
        to->unused = 0;
    }
    send_words(u, run);
    if (!receive_words(u, u.refusals, run, words, reinterpret_cast<uint32_t *>(u.refusal)))
        return false;
    __syncthreads();
    return true;
}

/* Sets first and n of each node, in both copies. */
__device__ bool write_lists(const cuda_nodes_update &u, bool refused)
{
    int net = 0, words = slice_words(u);
    int64_t rails = 0;

    for (int node = 0; node < nodes_of(u); node++) {
        bool empty = refused || node == node_of(u);

        u.net[node] = {net, empty ? 0 : *tokens_for_node(u, node)};
        u.rail[node] = {(int32_t)rails, empty ? 0 : u.slice[(size_t)node * words]};
        u.net_pinned[node] = u.net[node];
        u.rail_pinned[node] = u.rail[node];
        net += u.net[node].n;
        rails += u.rail[node].n;
        if (rails > u.rail_room) {
            give_up(u.waits, CUDA_FAILED_DAMAGE, rail_of(u.waits, node), u.waits.ready_phase);
            return false;
        }
    }
    return true;
}

/* Where a rank cannot take its rows nothing is to move, on any rank. By all threads; false: leave. */
__device__ bool write_counts(const cuda_nodes_update &u, const node_counts &x)
{
    __shared__ int first;
    int i = (int)threadIdx.x;
    bool refused, sound = true;

    if (i == 0) {
        first = 0;
        while (first < nodes_of(u) && !u.refusal[first].refused[0])
            first++;
    }
    __syncthreads();
    refused = first < nodes_of(u);
    if (i < u.waits.nranks) {
        u.counts->base[i] = 0;
        u.counts->rows_on[i] = refused ? 0 : x.rows_on[i];
    }
    if (i < 3)
        u.counts->refused[i] = refused ? u.refusal[first].refused[i] : 0;
    for (int local = i; local < u.n_local_experts && refused; local += (int)blockDim.x)
        u.expert_exact[local] = 0;
    for (int rank = i; rank <= nodes_of(u) * u.waits.nranks && refused; rank += (int)blockDim.x)
        u.first[rank] = 0;
    if (i == 0)
        sound = write_lists(u, refused);
    __threadfence_system();
    return __syncthreads_and(sound);
}

__global__ void __launch_bounds__(EXCHANGE_THREADS, 1)
    exchange_slices_kernel(const __grid_constant__ cuda_nodes_update u)
{
    __shared__ node_counts x;
    __shared__ targets targets;
    net_run run = run_of(u.waits, u.slices);
    net_run next = {run.number + 1, &u.refusals.half[(run.number + 1) % 2]};
    uint64_t number;
    bool sound;

    if (!routing_is_valid(u))
        return;
    number = operation_signal(u.waits, u.terms);
    sound = operation_begin(u.waits, u.terms, nullptr, number, targets) && swap_slices(u, run);
    if (sound) {
        push_slices(u, number);
        sound = take_slices(u, number, x);
    }
    if (sound) {
        place_ranks(u, x);
        sound = swap_refusals(u, next, x) && write_counts(u, x);
    }
    if (operation_meet(u.waits, number, sound, 1)) {
        operation_complete(u.waits, number);
        complete_net(u.waits, next);
    }
}

/* A kernel before has. The same for all threads of a block. */
__device__ bool has_given_up(const cuda_nodes_update &u)
{
    return __syncthreads_or(threadIdx.x == 0 && *(const volatile uint32_t *)&u.waits.mine->gave_up);
}

/* --- the lists --------------------------------------------------------------------------------------------------- */

/* The sum of those before this thread, and of all; 32 warps at most. By all threads of the block. */
__device__ uint32_t sum_before(uint32_t value, uint32_t &ret_all)
{
    __shared__ uint32_t sums[WARP];
    int lane = (int)threadIdx.x % WARP, warp = (int)threadIdx.x / WARP, warps = (int)blockDim.x / WARP;
    uint32_t sum = value, before = 0, all = 0;

    for (int step = 1; step < WARP; step *= 2) {
        uint32_t other = __shfl_up_sync(ALL_LANES, sum, step);

        sum += lane >= step ? other : 0;
    }
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

/* Rows that a token of this rank has on that node; *ret_before: other nodes before that on which it has some. */
__device__ int rows_there(const cuda_nodes_update &u, int token, int node, int &ret_before)
{
    const int32_t *index = u.index + (size_t)token * u.topk;
    uint32_t ranks = 0;
    int n = 0, before = 0;

    for (int k = 0; k < u.topk; k++) {
        int rank = index[k] < 0 ? -1 : index[k] / u.n_local_experts, there = rank / u.waits.nranks;
        bool seen = false;

        if (rank < 0 || there > node || there == node_of(u))
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

/* Other nodes on which the tokens have rows. */
__device__ void count_far(const cuda_nodes_update &u)
{
    for (int token = (int)threadIdx.x; token < u.n_tokens; token += (int)blockDim.x) {
        int n;

        /* Behind the last node: all are before it. */
        rows_there(u, token, nodes_of(u), n);
        u.far_count[token] = n;
    }
}

/* A block for each node: its list of this rank's tokens, and the terms that come from there. */
__global__ void __launch_bounds__(LIST_THREADS) list_tokens_kernel(const __grid_constant__ cuda_nodes_update u)
{
    int node = (int)blockIdx.x, first, at, units = 0;
    int32_t *of = u.net_units + node, *pinned = u.net_units_pinned + node; /* the list's */

    if (has_given_up(u))
        return;
    if (node == node_of(u))
        count_far(u);
    first = at = u.net[node].first;
    for (int tile = 0; tile < u.n_tokens && u.net[node].n; tile += LIST_THREADS) {
        int token = tile + (int)threadIdx.x, before = 0;
        int rows = token < u.n_tokens ? rows_there(u, token, node, before) : 0, mine = rows ? units_of(u, rows) : 0;
        uint32_t all, sum = sum_before((uint32_t)mine << 16 | (rows ? 1 : 0), all);
        int here = at + (int)(sum & 0xffff);

        if (rows) {
            u.token[here] = token;
            of[here] = pinned[here] = units + (int)(sum >> 16);
            u.far[(size_t)token * u.far_width + before] = {node, here};
        }
        at += (int)(all & 0xffff);
        units += (int)(all >> 16);
    }
    if (threadIdx.x == 0)
        of[at] = pinned[at] = units;
    if (threadIdx.x == 0 && at - first != u.net[node].n)
        give_up(u.waits, CUDA_FAILED_DAMAGE, u.waits.rank, u.waits.ready_phase);
    __threadfence_system();
}

/* Experts of the rail peers' tokens. What comes is looked at: it says where rows are written. */
__global__ void __launch_bounds__(LIST_THREADS, 1) take_lists_kernel(const __grid_constant__ cuda_nodes_update u)
{
    __shared__ const unsigned char *landed;
    net_run run = run_of(u.waits, u.lists);
    bool sound = __syncthreads_and(threadIdx.x || may_begin(u.waits, u.waits.ready_phase));

    for (uint32_t number = 0; number < count_chunks(u.in) && sound; number++) {
        chunk c = find_chunk(u.in, number);

        if (!c.n)
            continue;
        if (threadIdx.x == 0)
            landed = await_chunk(u.waits, u.lists, run, u.in, c.node, c.slot);
        __syncthreads();
        sound = landed;
        for (int i = (int)threadIdx.x; i < c.n * u.topk && sound; i += (int)blockDim.x) {
            int32_t expert = load_word(reinterpret_cast<const int32_t *>(landed) + i);

            u.rail_index[(size_t)c.first * u.topk + i] = expert;
            if (expert < -1 || expert >= u.n_experts) {
                give_up(u.waits, CUDA_FAILED_DAMAGE, rail_of(u.waits, c.node), u.waits.ready_phase);
                sound = false;
            }
        }
        sound = __syncthreads_and(sound);
        if (sound && threadIdx.x == 0)
            give_back(run, c.slot);
    }
    if (sound && threadIdx.x == 0)
        complete_net(u.waits, run);
}

/* --- rows on this node ------------------------------------------------------------------------------------------- */

/* Tokens of one rank that have rows on this node. */
struct numbered {
    const int32_t *index;
    cuda_entry *entry;
    int32_t *count;
    int n;
};

__device__ numbered tokens_of(const cuda_nodes_update &u, int node)
{
    cuda_rail rail = u.rail[node];

    if (node == node_of(u))
        return {u.index, u.entry, u.count, u.n_tokens};
    return {u.rail_index + (size_t)rail.first * u.topk, u.rail_entry + (size_t)rail.first * u.width,
            u.rail_count + rail.first, rail.n};
}

/* The rank or expert of this node that a choice is of; -1: none. */
__device__ __forceinline__ int target_of(const cuda_nodes_update &u, int expert)
{
    int here = expert - node_of(u) * experts_of_node(u);

    if (expert < 0 || here < 0 || here >= experts_of_node(u))
        return -1;
    return u.expanded ? here : here / u.n_local_experts;
}

__device__ int rows_before(const uint32_t *mask)
{
    int word = (int)threadIdx.x / WARP, n = __popc(mask[word] & ((1u << threadIdx.x % WARP) - 1));

    for (int i = 0; i < word; i++)
        n += __popc(mask[i]);
    return n;
}

/* Ascending ranks, or experts; of a rank the first choice. Returns how many; -1: a row that no rank has room for. */
__device__ int list_entries(const cuda_nodes_update &u, const int32_t *index, const uint32_t *masks,
                            const int32_t *next, cuda_entry *entry)
{
    int n = 0, last = -1;

    for (;;) {
        int target = INT32_MAX, choice = 0, local;
        int64_t row;

        for (int k = 0; k < u.topk; k++) {
            int t = target_of(u, index[k]);

            if (t > last && t < target) {
                target = t;
                choice = k;
            }
        }
        if (target == INT32_MAX)
            return n;
        local = u.expanded ? target / u.n_local_experts : target;
        row = (int64_t)next[target] + rows_before(masks + (size_t)target * MASK_WORDS);
        if (n >= u.width || row < 0 || row >= u.counts->rows_on[local])
            return -1;
        entry[n++] = {(int32_t)row, (uint16_t)local, (uint16_t)choice};
        last = target;
    }
}

/* Numbers TILE tokens from `first` on. `next` [targets]: their rows. By all threads; false: damage. */
__device__ bool number_tile(const cuda_nodes_update &u, const numbered &of, int first, int targets, uint32_t *masks,
                            int32_t *next, int &ret_n)
{
    int i = (int)threadIdx.x, token = first + i, n = 0;
    const int32_t *index = of.index + (size_t)token * u.topk;

    for (int word = i; word < targets * MASK_WORDS; word += TILE)
        masks[word] = 0;
    __syncthreads();
    for (int k = 0; k < u.topk && token < of.n; k++) {
        int target = target_of(u, index[k]);

        if (target >= 0)
            atomicOr(&masks[target * MASK_WORDS + i / WARP], 1u << i % WARP);
    }
    __syncthreads();
    if (token < of.n) {
        n = list_entries(u, index, masks, next, of.entry + (size_t)token * u.width);
        of.count[token] = max(n, 0);
    }
    __syncthreads();
    for (int target = i; target < targets; target += TILE)
        for (int word = 0; word < MASK_WORDS; word++)
            next[target] += __popc(masks[target * MASK_WORDS + word]);
    __syncthreads();
    ret_n = n;
    return __syncthreads_and(n >= 0);
}

/* Nothing moves: nobody is to read what was never written. */
__device__ void clear_counts(const cuda_nodes_update &u)
{
    for (int token = (int)threadIdx.x; token < u.n_tokens; token += (int)blockDim.x)
        u.count[token] = 0;
}

/* A block for each node: where the tokens of its rank on this rail go on this node. */
__global__ void __launch_bounds__(TILE) number_rows_kernel(const __grid_constant__ cuda_nodes_update u)
{
    extern __shared__ uint32_t masks[]; /* [targets, MASK_WORDS], then [targets] next rows */
    int node = (int)blockIdx.x, targets = u.expanded ? experts_of_node(u) : u.waits.nranks, units = 0;
    int32_t *next = reinterpret_cast<int32_t *>(masks + (size_t)targets * MASK_WORDS);
    int32_t *list = u.rail_units + node + u.rail[node].first, *pinned = u.rail_units_pinned + node + u.rail[node].first;
    bool own = node == node_of(u), sound = true;
    numbered of = tokens_of(u, node);

    if (has_given_up(u))
        return;
    if (u.counts->refused[0]) {
        if (own)
            clear_counts(u);
        of.n = 0;
    }
    for (int target = (int)threadIdx.x; target < targets; target += TILE)
        next[target] = u.base[(size_t)node * targets + target];
    __syncthreads();
    for (int first = 0; first < of.n && sound; first += TILE) {
        int token = first + (int)threadIdx.x, n;
        uint32_t all, before;

        sound = number_tile(u, of, first, targets, masks, next, n);
        before = sum_before(token < of.n ? (uint32_t)units_of(u, n) : 0, all);
        if (!own && token < of.n)
            list[token] = pinned[token] = units + (int)before;
        units += (int)all;
    }
    if (threadIdx.x == 0 && !own)
        list[of.n] = pinned[of.n] = units;
    if (threadIdx.x == 0 && own)
        list[0] = pinned[0] = 0;
    if (!sound && threadIdx.x == 0)
        give_up(u.waits, CUDA_FAILED_DAMAGE, rail_of(u.waits, node), u.waits.ready_phase);
    __threadfence_system();
}

size_t shared_bytes(int targets)
{
    return (size_t)targets * (MASK_WORDS + 1) * sizeof(uint32_t);
}

} /* namespace */

cudaError_t cuda_launch_nodes_update(const struct cuda_nodes_update *update, const struct cuda_pack *pack,
                                     cudaStream_t stream)
{
    int nnodes = update->words.nnodes, nlocal = update->waits.nranks;
    unsigned tiles = (unsigned)(update->n_tokens + TILE - 1) / TILE;
    int targets = update->expanded ? update->n_local_experts * nlocal : nlocal;
    cudaError_t error = cudaMemsetAsync(
        update->totals, 0, cuda_update_totals(nnodes, nnodes * nlocal, update->n_experts) * sizeof(int32_t), stream);

    if (error != cudaSuccess)
        return error;
    if (tiles)
        read_routing_kernel<<<tiles, TILE, 0, stream>>>(*update);
    exchange_slices_kernel<<<1, EXCHANGE_THREADS, 0, stream>>>(*update);
    list_tokens_kernel<<<(unsigned)nnodes, LIST_THREADS, 0, stream>>>(*update);
    error = cuda_launch_pack(pack, stream);
    if (error != cudaSuccess)
        return error;
    take_lists_kernel<<<1, LIST_THREADS, 0, stream>>>(*update);
    number_rows_kernel<<<(unsigned)nnodes, TILE, shared_bytes(targets), stream>>>(*update);
    return cudaGetLastError();
}

cudaError_t cuda_nodes_update_load(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncSetAttribute(number_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             (int)shared_bytes(CUDA_MAX_EXPERTS));

    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, read_routing_kernel);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, exchange_slices_kernel);
    if (error == cudaSuccess)
        error = cudaFuncGetAttributes(&attributes, list_tokens_kernel);
    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, take_lists_kernel) : error;
}
