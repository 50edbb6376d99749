/* SPDX-License-Identifier: Apache-2.0 */
/*
 * New routing between nodes: see nodes.h. Sums follow the order of the ranks and rows that of the tokens, so the
 * rows are those that the host would assign (group/plan.c).
 */
#include "backend/cuda/nodes.cuh"
#include "backend/cuda/update.cuh"

#define EXCHANGE_THREADS 1024
#define THREADS CUDA_COUNT_TOKENS

namespace
{

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
    return u.totals + 1 + u.words.nnodes + rank;
}

__device__ __forceinline__ int32_t *tokens_for_expert(const cuda_nodes_update &u, int expert)
{
    return u.totals + 1 + u.words.nnodes + u.words.nnodes * u.waits.nranks + expert;
}

/* --- this rank's routing ----------------------------------------------------------------------------------------- */

/* With a mask, each token chooses the first expert of every rank that it goes to. */
__device__ int64_t read_choice(const cuda_nodes_update &u, int token, int k)
{
    size_t at = (size_t)token * u.topk + k;

    if (!u.topk_idx)
        return u.mask[at] ? (int64_t)k * u.n_local_experts : -1;
    return expert_at(u, at);
}

__global__ void __launch_bounds__(THREADS) read_routing_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    int token = (int)(blockIdx.x * THREADS + threadIdx.x), bad = 0;
    int32_t *index = u.index + (size_t)token * u.topk;

    if (token >= u.n_tokens)
        return;
    for (int k = 0; k < u.topk; k++) {
        int64_t choice = read_choice(u, token, k);
        int expert, rank, node;
        bool new_rank = true, new_node = true;

        bad |= choice < -1 || choice >= u.n_experts || (!u.topk_idx && u.mask[(size_t)token * u.topk + k] > 1);
        expert = choice < 0 || choice >= u.n_experts ? -1 : (int)choice;
        rank = expert / u.n_local_experts;
        if (expert >= 0 && is_absent(u.waits, rank)) {
            bad |= !u.drops;
            expert = -1;
        }
        index[k] = expert;
        if (expert < 0)
            continue;
        node = rank / u.waits.nranks;
        for (int j = 0; j < k; j++) {
            int before = index[j] < 0 ? -1 : index[j] / u.n_local_experts;

            bad |= u.distinct && index[j] == expert;
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

/* Are the caller's counts per expert consistent with the mask? Called by all threads. */
__device__ bool mask_is_possible(const cuda_nodes_update &u)
{
    bool possible = true;

    for (int rank = (int)threadIdx.x; rank < u.words.nnodes * u.waits.nranks && u.mask_experts; rank += (int)blockDim.x)
        possible &=
            is_absent(u.waits, rank) || counts_are_possible(u.mask_experts + rank * u.n_local_experts,
                                                            u.n_local_experts, *tokens_for_rank(u, rank), u.distinct);
    return __syncthreads_and(possible);
}

/* A word of the slice for a node. */
__device__ int32_t word_of_slice(const cuda_nodes_update &u, int node, int word)
{
    int rank = word - 1, expert = node * experts_of_node(u) + rank - u.waits.nranks;

    if (!word)
        return *tokens_for_node(u, node);
    if (rank < u.waits.nranks)
        return *tokens_for_rank(u, node * u.waits.nranks + rank);
    if (!u.mask_experts)
        return *tokens_for_expert(u, expert);
    return is_absent(u.waits, expert / u.n_local_experts) ? 0 : u.mask_experts[expert];
}

__device__ __forceinline__ int slot_of(int node)
{
    return CUDA_CHUNK_SLOT(node, 1, node, 0);
}

/* Rejects negative counts, counts greater than those tokens can have, and more tokens than the capacity. */
__device__ bool slices_are_valid(const cuda_nodes_update &u)
{
    int words = slice_words(u);
    int64_t choices = u.distinct ? 1 : u.mask_experts ? EP_MAX_TOPK : u.topk; /* of one expert */
    bool ok = true;

    for (int i = (int)threadIdx.x; i < u.words.nnodes * words && ok; i += (int)blockDim.x) {
        int node = i / words, n = u.slice[(size_t)node * words],
            most = node == u.words.node ? INT32_MAX : u.rail_node_capacity;

        ok = n >= 0 && n <= most && u.slice[i] >= 0 && u.slice[i] <= (i % words > u.waits.nranks ? n * choices : n);
        if (!ok)
            set_failure(u.waits, CUDA_FAILED_DAMAGE, rail_peer_of(u.waits, node), u.waits.ready_phase);
    }
    return __syncthreads_and(ok);
}

/*
 * Exchanges `words` words with each other node: sends it word_of(node, word), and passes what each has sent, zeros of
 * an absent one, and this node's own words, to store(node, word, value). Called by all threads. Returns false if the
 * kernel must exit.
 */
template <typename Word, typename Store>
__device__ __forceinline__ bool exchange_words(const cuda_nodes_update &u, const cuda_net_op_args &op,
                                               const net_run &run, int words, Word word_of, Store store)
{
    __shared__ const unsigned char *arrived;

    if (!await_arena(u.waits, op, run, u.words))
        return false;
    for (int i = (int)threadIdx.x; i < u.words.nnodes * words; i += (int)blockDim.x) {
        int node = i / words, word = i % words, value = word_of(node, word);
        unsigned char *chunk = run.buffers->arena + (size_t)slot_of(node) * op.slot_bytes;

        if (is_other_node(u.waits, u.words, node))
            reinterpret_cast<int32_t *>(chunk)[word] = value;
        else
            store(node, word, node == u.words.node ? value : 0);
    }
    __threadfence_system();
    __syncthreads();
    for (int node = (int)threadIdx.x; node < u.words.nnodes; node += (int)blockDim.x)
        if (is_other_node(u.waits, u.words, node))
            store_release(&run.buffers->ready[slot_of(node)], run.number);
    for (int node = 0; node < u.words.nnodes; node++) {
        if (!is_other_node(u.waits, u.words, node))
            continue;
        if (threadIdx.x == 0)
            arrived = await_chunk(u.waits, op, run, u.words, node, slot_of(node));
        __syncthreads();
        if (!arrived)
            return false;
        for (int i = (int)threadIdx.x; i < words; i += (int)blockDim.x)
            store(node, i, load_word(reinterpret_cast<const int32_t *>(arrived) + i));
        __syncthreads();
        if (threadIdx.x == 0)
            release_chunk(run, slot_of(node));
    }
    __syncthreads();
    return true;
}

/* Exchanges the slices along the rail: afterwards this rank has those for this node. */
__device__ bool exchange_slices(const cuda_nodes_update &u, const net_run &run)
{
    int words = slice_words(u);

    return exchange_words(
               u, u.slices, run, words, [&](int node, int word) { return word_of_slice(u, node, word); },
               [&](int node, int word, int32_t value) { u.slice[(size_t)node * words + word] = value; }) &&
           slices_are_valid(u);
}

/* Publishes them to the ranks of this node. */
__device__ void push_slices(const cuda_nodes_update &u, uint64_t number)
{
    int each = slice_words(u) - 1, words = CUDA_SLICE_WORDS + u.words.nnodes * each;

    for (int i = (int)threadIdx.x; i < u.waits.nranks * words; i += (int)blockDim.x) {
        int word = i % words, at = word - CUDA_SLICE_WORDS;
        uint32_t value = word == CUDA_SLICE_CAPACITY
                             ? (uint32_t)u.capacity
                             : (uint32_t)u.slice[(size_t)(at / each) * (each + 1) + 1 + at % each];

        cuda_signals *peer = signals_of(u.waits, i / words);

        if (peer)
            *(volatile uint64_t *)&peer->counts[u.waits.rank][word] = number << 32 | value;
    }
}

struct node_counts {
    int32_t total[CUDA_MAX_RANKS + CUDA_MAX_EXPERTS]; /* tokens for each rank of the node, then for each expert */
    int64_t rows_on[CUDA_MAX_RANKS];
    int32_t capacity[CUDA_MAX_RANKS];
    int refused; /* the first rank of the node whose capacity is exceeded; the number of its ranks: none */
};

/*
 * Sums up the counts of all ranks, in their order, for one rank or expert of the node. Called by one thread. Returns
 * false if the kernel must exit.
 */
__device__ bool receive_target(const cuda_nodes_update &u, uint64_t number, int at, node_counts &x)
{
    int nlocal = u.waits.nranks, each = slice_words(u) - 1, targets = u.expanded ? experts_of_node(u) : nlocal;
    int target = u.expanded ? at - nlocal : at;
    int64_t total = 0;

    for (int source = 0; source < u.words.nnodes * nlocal; source++) {
        int node = source / nlocal, local = source % nlocal;
        int32_t n;

        if (!receive_count(u.waits, number, local, CUDA_SLICE_WORDS + node * each + at, n))
            return false;
        if (local == u.waits.rank && target >= 0 && target < targets)
            u.base[(size_t)node * targets + target] = (int32_t)total;
        if (local == u.waits.rank && at < nlocal)
            u.rail_start[node * nlocal + at] = (int32_t)total;
        if (at == u.waits.rank)
            u.first[source] = total;
        total += n;
        if (at < nlocal)
            u.prefix[source * nlocal + at] = (int32_t)total;
    }
    if (at == u.waits.rank)
        u.first[u.words.nnodes * nlocal] = total;
    /* No rank has a capacity beyond this. */
    x.total[at] = (int32_t)min(total, (int64_t)INT32_MAX);
    return true;
}

__device__ bool receive_slices(const cuda_nodes_update &u, uint64_t number, node_counts &x)
{
    bool ok = true;

    for (int at = (int)threadIdx.x; at < slice_words(u) - 1 && ok; at += (int)blockDim.x)
        ok = receive_target(u, number, at, x);
    if (ok && (int)threadIdx.x < u.waits.nranks)
        ok = receive_count(u.waits, number, (int)threadIdx.x, CUDA_SLICE_CAPACITY, x.capacity[threadIdx.x]);
    return __syncthreads_and(ok);
}

/* Adds the first row of each expert of a rank to the bases. Called by one thread. Returns the number of rows. */
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
        for (int node = 0; node < u.words.nnodes && u.expanded; node++)
            u.base[(size_t)node * experts_of_node(u) + target] += (int32_t)min(start, (int64_t)INT32_MAX);
        start = (start + exact + u.alignment - 1) / u.alignment * u.alignment;
    }
    if (mine)
        u.expert_start[u.n_local_experts] = (int32_t)min(start, (int64_t)INT32_MAX);
    return start;
}

/*
 * Computes the rows that each rank of the node receives, and checks them against its capacity. Called by all threads.
 */
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

__device__ __forceinline__ int summary_words(const cuda_nodes_update &u)
{
    return CUDA_SUMMARY_STARTS + u.waits.nranks;
}

/* A word of the summary that this node sends to another one. */
__device__ int32_t word_of_summary(const cuda_nodes_update &u, const node_counts &x, int node, int word)
{
    bool none = x.refused == u.waits.nranks;

    if (word >= CUDA_SUMMARY_STARTS)
        return u.rail_start[node * u.waits.nranks + word - CUDA_SUMMARY_STARTS];
    if (none)
        return 0;
    if (word == CUDA_SUMMARY_REFUSED)
        return u.waits.first + x.refused + 1;
    if (word == CUDA_SUMMARY_CAPACITY)
        return x.capacity[x.refused];
    return (int32_t)(x.rows_on[x.refused] >> 32 * (word - CUDA_SUMMARY_ROWS));
}

/* Exchanges the summaries; all ranks get the same ones. */
__device__ bool exchange_summaries(const cuda_nodes_update &u, const net_run &run, const node_counts &x)
{
    int words = summary_words(u);

    return exchange_words(
        u, u.summaries, run, words, [&](int node, int word) { return word_of_summary(u, x, node, word); },
        [&](int node, int word, int32_t value) { u.summary[(size_t)node * words + word] = value; });
}

/* Sets first and n of each node, in device and in pinned memory. */
__device__ bool write_lists(const cuda_nodes_update &u, bool refused)
{
    int net = 0, words = slice_words(u);
    int64_t rails = 0;

    for (int node = 0; node < u.words.nnodes; node++) {
        bool empty = refused || node == u.words.node;

        u.list.net[node] = {net, empty ? 0 : *tokens_for_node(u, node)};
        u.list.rail[node] = {(int32_t)rails, empty ? 0 : u.slice[(size_t)node * words]};
        u.pinned.net[node] = u.list.net[node];
        u.pinned.rail[node] = u.list.rail[node];
        net += u.list.net[node].n;
        rails += u.list.rail[node].n;
        if (rails > u.rail_capacity) {
            set_failure(u.waits, CUDA_FAILED_DAMAGE, rail_peer_of(u.waits, node), u.waits.ready_phase);
            return false;
        }
    }
    return true;
}

/*
 * Writes the counts. If the capacity of any rank is exceeded, they are 0 on all ranks, so that nothing moves. Called by
 * all threads. Returns false if the kernel must exit.
 */
__device__ bool write_counts(const cuda_nodes_update &u, const node_counts &x)
{
    __shared__ int first;
    int i = (int)threadIdx.x, words = summary_words(u), nlocal = u.waits.nranks;
    const int32_t *summary;
    bool refused, ok = true;

    if (i == 0) {
        first = 0;
        while (first < u.words.nnodes && !u.summary[(size_t)first * words + CUDA_SUMMARY_REFUSED])
            first++;
    }
    __syncthreads();
    refused = first < u.words.nnodes;
    summary = u.summary + (size_t)(refused ? first : 0) * words;
    if (i < u.waits.nranks) {
        u.counts->base[i] = 0;
        u.counts->rows_on[i] = refused ? 0 : x.rows_on[i];
    }
    if (i == 0) {
        u.counts->n_tokens = u.n_tokens;
        u.counts->refused[0] = refused ? summary[CUDA_SUMMARY_REFUSED] : 0;
        u.counts->refused[1] =
            refused ? (int64_t)summary[CUDA_SUMMARY_ROWS + 1] << 32 | (uint32_t)summary[CUDA_SUMMARY_ROWS] : 0;
        u.counts->refused[2] = refused ? summary[CUDA_SUMMARY_CAPACITY] : 0;
    }
    for (int rank = i; rank < u.words.nnodes * nlocal; rank += (int)blockDim.x)
        u.start[rank] = u.summary[(size_t)(rank / nlocal) * words + CUDA_SUMMARY_STARTS + rank % nlocal];
    for (int local = i; local < u.n_local_experts && refused; local += (int)blockDim.x)
        u.expert_exact[local] = 0;
    for (int rank = i; rank <= u.words.nnodes * nlocal && refused; rank += (int)blockDim.x)
        u.first[rank] = 0;
    if (i == 0)
        ok = write_lists(u, refused);
    __threadfence_system();
    return __syncthreads_and(ok);
}

__global__ void __launch_bounds__(EXCHANGE_THREADS, 1)
    exchange_slices_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    __shared__ node_counts x;
    __shared__ targets targets;
    net_run run = run_of(u.waits, u.slices);
    net_run next = {run.number + 1, &u.summaries.buffers[(run.number + 1) % 2]};
    uint64_t number;
    bool ok;

    if (!__syncthreads_and(threadIdx.x || is_current(u.waits, u.counts)))
        return;
    if (!mask_is_possible(u) || *u.totals) {
        refuse_routing(u.waits);
        return;
    }
    number = operation_publish(u.waits, u.desc, u.counts);
    ok = operation_begin(u.waits, u.desc, u.counts, nullptr, number, targets, blockIdx.x) && exchange_slices(u, run);
    if (ok) {
        push_slices(u, number);
        ok = receive_slices(u, number, x);
    }
    if (ok) {
        place_ranks(u, x);
        ok = exchange_summaries(u, next, x) && write_counts(u, x);
    }
    if (operation_sync(u.waits, number, ok, 1)) {
        operation_complete(u.waits, number);
        complete_net(u.waits, next);
    }
}

/*
 * A node has the columns of the caller's matrix that are for its ranks. Writes nothing for a plan that is refused.
 */
__global__ void __launch_bounds__(EXCHANGE_THREADS, 1)
    exchange_prefix_kernel(const __grid_constant__ cuda_nodes_update u)
{
    await_stream();
    int nlocal = u.waits.nranks, nranks = u.words.nnodes * nlocal;
    net_run run = run_of(u.waits, u.prefixes);
    bool refused = u.counts->refused[0];

    if (!__syncthreads_and(threadIdx.x || (may_begin(u.waits, u.waits.ready_phase) && is_current(u.waits, u.counts))))
        return;
    if (exchange_words(
            u, u.prefixes, run, nranks * nlocal, [&](int, int word) { return u.prefix[word]; },
            [&](int node, int word, int32_t value) {
                if (!refused)
                    u.all_prefix[(size_t)(word / nlocal) * nranks + node * nlocal + word % nlocal] = value;
            }) &&
        threadIdx.x == 0)
        complete_net(u.waits, run);
}

} /* namespace */

cudaError_t cuda_launch_slices(const struct cuda_nodes_update *update, cudaStream_t stream)
{
    int nnodes = update->words.nnodes, nranks = nnodes * update->waits.nranks;
    unsigned blocks = (unsigned)(update->n_tokens + THREADS - 1) / THREADS;
    cudaError_t error = cudaMemsetAsync(
        update->totals, 0, cuda_update_totals(nnodes, nranks, update->n_experts) * sizeof(int32_t), stream);

    if (error == cudaSuccess && blocks)
        error = launch(read_routing_kernel, blocks, THREADS, 0, stream, *update);
    return error == cudaSuccess ? launch(exchange_slices_kernel, 1, EXCHANGE_THREADS, 0, stream, *update) : error;
}

cudaError_t cuda_launch_prefix(const struct cuda_nodes_update *update, cudaStream_t stream)
{
    return launch(exchange_prefix_kernel, 1, EXCHANGE_THREADS, 0, stream, *update);
}

cudaError_t cuda_slices_load(int)
{
    return load_kernels(read_routing_kernel, exchange_prefix_kernel, exchange_slices_kernel);
}
