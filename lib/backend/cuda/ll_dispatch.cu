/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch.
 *
 * Sending: each block claims a token, quantises its row, and builds the image of its slot in shared memory, with the
 * token's experts and its index among this rank's rows for each of them. The threads store the image into the token's
 * slot on each of its ranks, and set the flag of the slot. The row counts of each expert are sent ahead.
 *
 * Receiving: the counts determine each row's destination without the other rows, so each warp claims a slot, waits for
 * its flag and packs it. Half of the warps of a block begin with sending, the other half with receiving.
 */
#include "backend/cuda/ll_arrival.cuh"
#include "backend/cuda/quantize.cuh"

namespace
{

/* The choices of the token being sent. */
struct choices {
    int before[CUDA_LL_MAX_TOPK];      /* rows of the same expert before this choice's: of lower tokens and choices */
    uint8_t choice_of[EP_MAX_EXPERTS]; /* 1 + the first choice of the expert; 0: none */
    uint32_t ranks;                    /* mask of its ranks; between nodes their number */
    uint16_t rank[CUDA_LL_MAX_TOPK];   /* between nodes: the ranks, starting after this one */
};

/* --- the routing ------------------------------------------------------------------------------------------------- */

/*
 * Is every entry of this thread's part -1 or an expert, of a rank that is not absent? `twice` is set if a token names
 * an expert twice. The threads of each block together check everything, so that all blocks come to the same result.
 * Each lane has one entry, each warp a few whole tokens.
 */
__device__ bool entries_are_valid(const cuda_ll_dispatch &d, const ll_call &call, bool &twice)
{
    int topk = d.ll.topk, n_experts = d.ll.n_local * d.ll.waits.nranks, lane = (int)threadIdx.x % WARP;
    int tokens = WARP / topk, own = lane / topk, step = (int)(blockDim.x / WARP) * tokens;
    bool valid = !is_masked(call, d.ll.waits.rank), refuses = !d.ll.drops && !ll_is_empty(call.mask);

    for (int first = (int)(threadIdx.x / WARP) * tokens; first < d.n_tokens; first += step) {
        bool active = own < tokens && first + own < d.n_tokens;
        int64_t expert = active ? read_choice(d.topk_idx, d.idx64, (int64_t)first * topk + lane) : -1;
        int narrow = (int)expert;

        valid &= expert >= -1 && expert < n_experts;
        if (refuses && expert >= 0 && expert < n_experts)
            valid &= !is_masked(call, narrow / d.ll.n_local);
        /* Compare with every other choice of the token. match.any takes much longer where all are different. */
        for (int i = 1; i < topk; i++) {
            int other = lane % topk + i;

            other = __shfl_sync(ALL_LANES, narrow, min(own * topk + (other < topk ? other : other - topk), WARP - 1));
            twice |= active && expert >= 0 && other == narrow;
        }
    }
    return valid;
}

/* An expert of the routing; -1 also where the entry is not valid. */
__device__ int read_expert(const cuda_ll_dispatch &d, int64_t at)
{
    int64_t expert = read_choice(d.topk_idx, d.idx64, at);

    return expert >= 0 && expert < (int64_t)d.ll.n_local * d.ll.waits.nranks ? (int)expert : -1;
}

/* The number of blocks that send the row counts: those without a token, if there are any; counted from the last one. */
__device__ int counting_blocks(const cuda_ll_dispatch &d)
{
    int all = (int)gridDim.x, idle = all - min(all, d.n_tokens);

    return min(idle ? idle : all, d.ll.waits.nranks);
}

/* Counts this rank's rows for each expert. Called by all threads. */
__device__ void count_rows(const cuda_ll_dispatch &d, int32_t *bins)
{
    int64_t n_experts = (int64_t)d.ll.n_local * d.ll.waits.nranks;

    for (int i = (int)threadIdx.x; i < n_experts; i += (int)blockDim.x)
        bins[i] = 0;
    __syncthreads();
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < (int64_t)d.n_tokens * d.ll.topk; i += blockDim.x) {
        int expert = read_expert(d, i); /* not checked yet */

        if (expert >= 0)
            atomicAdd(&bins[expert], 1);
    }
    __syncthreads();
}

/*
 * Is the routing valid? `valid`, `twice`: the results of entries_are_valid(). With repeated choices an expert may have
 * more rows than there is room for; `bins` are then counted, unless they are. Called by all threads.
 */
__device__ bool routing_is_valid(const cuda_ll_dispatch &d, bool valid, bool twice, bool counted, int32_t *bins)
{
    if (!__syncthreads_or(!valid || twice))
        return true;
    if (!counted)
        count_rows(d, bins);
    for (int i = (int)threadIdx.x; i < d.ll.n_local * d.ll.waits.nranks; i += (int)blockDim.x)
        valid &= bins[i] <= d.ll.max_tokens;
    return __syncthreads_and(valid && !(twice && d.distinct));
}

/*
 * Sends each rank the row counts of its experts, and the format. Each word holds the number of the call and the count,
 * so no flag is needed. Sent before the ranks synchronise: otherwise the counts would queue on the links behind the
 * rows of other blocks. The routing is valid. Called by the threads of the counting blocks.
 */
__device__ void send_counts(const cuda_ll_dispatch &d, const ll_call &call, const int32_t *bins)
{
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks, me = ll.waits.rank, counting = counting_blocks(d);

    for (int i = (int)(gridDim.x - 1 - blockIdx.x); i < n; i += counting) {
        int rank = (me + i) % n;
        volatile uint64_t *there = counts_of(ll, call, rank, me);

        for (int j = (int)threadIdx.x; j <= ll.n_local && !is_masked(call, rank); j += (int)blockDim.x)
            there[j] = call.number << 32 | (uint32_t)(j < ll.n_local ? bins[rank * ll.n_local + j] : d.format);
    }
}

/* Between nodes: lists each rank of the token once, by the lane of its first choice. Called by a warp. */
__device__ void list_ranks(const cuda_ll &ll, int rank, choices &c)
{
    int lane = (int)threadIdx.x % WARP, me = ll.waits.rank, position = 0;
    uint32_t same = __match_any_sync(ALL_LANES, rank);
    bool lists = rank >= 0 && __ffs((int)same) - 1 == lane;
    uint32_t votes = __ballot_sync(ALL_LANES, lists);
    int rotated = rank > me ? rank : rank + ll.waits.nranks;

    /* Each rank starts with another destination. */
    for (uint32_t left = votes; left; left &= left - 1)
        position += __shfl_sync(ALL_LANES, rotated, __ffs((int)left) - 1) < rotated;
    if (lists)
        c.rank[position] = (uint16_t)rank;
    if (lane == 0)
        c.ranks = (uint32_t)__popc(votes);
}

/*
 * Writes the choices of token t, with the row of each among those of its expert, into the image of its slot, and keeps
 * them for the combine. Each thread passes the choice that it has prefetched.
 */
__device__ void prepare_choices(const cuda_ll_dispatch &d, const ll_call &call, int t, int expert, choices &c,
                                unsigned char *image, const team &by)
{
    const cuda_ll &ll = d.ll;
    int k = by.thread, topk = ll.topk;
    int32_t *index =
        ll_own<int32_t>(ll, ll.index_at) + ((call.dispatch & 1) * (int64_t)ll.segment_tokens + t) * ll.segment_topk;
    uint32_t earlier = 0; /* choices of the same expert */

    if (k < WARP) {
        int rank = expert < 0 ? -1 : expert / ll.n_local;

        for (int i = 0; i < topk; i++)
            earlier |= (uint32_t)(__shfl_sync(ALL_LANES, expert, i) == expert) << i;
        earlier &= expert < 0 ? 0 : (1u << k) - 1;
        if (k < topk)
            index[k] = expert;
        c.before[k] = 0;
        if (expert >= 0 && !earlier)
            c.choice_of[expert] = (uint8_t)(k + 1);
        if (LL_NODES) {
            list_ranks(ll, rank, c);
        } else {
            rank = (int)__reduce_or_sync(ALL_LANES, rank < 0 ? 0 : 1u << rank);
            if (k == 0)
                c.ranks = (uint32_t)rank;
        }
    }
    team_sync(by);
#pragma unroll 2
    for (int64_t i = k; i < (int64_t)t * topk; i += by.threads) {
        int other = read_expert(d, i);
        int choice = other < 0 ? 0 : c.choice_of[other];

        if (choice)
            atomicAdd(&c.before[choice - 1], 1);
    }
    team_sync(by);
    /* Beyond the call's K: -1. */
    if (k < ll.segment_topk)
        reinterpret_cast<int2 *>(image)[k] =
            make_int2(expert, c.before[earlier ? __ffs((int)earlier) - 1 : k] + __popc(earlier));
    /* For the next token; a barrier follows before that is processed. */
    if (k < topk && expert >= 0)
        c.choice_of[expert] = 0;
    team_sync(by);
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

__device__ sixteen load_sixteen(const cuda_ll_dispatch &d, int t, int unit)
{
    const uint4 *row = static_cast<const uint4 *>(d.x) + (int64_t)t * (d.ll.hidden / 8);
    sixteen v = {};

    if (unit < d.ll.hidden / 16)
        v = {__ldg(row + 2 * unit), __ldg(row + 2 * unit + 1)};
    return v;
}

/* `first`: the part of the row that this thread has prefetched. */
__device__ void make_quantised(const cuda_ll_dispatch &d, unsigned char *image, int t, sixteen first, const team &by)
{
    int units = d.ll.hidden / 16, all = (units + WARP - 1) / WARP * WARP;
    quantizer q = {d.block, d.rounds != 0, d.packed != 0, d.global_scale ? __ldg(d.global_scale) : 1.0f};

    for (int unit = by.thread; unit < all; unit += by.threads)
        quantise_unit(q, unit == by.thread ? first : load_sixteen(d, t, unit), unit, unit < units, image + d.ll.row_at,
                      image + d.ll.scales_at);
}

__device__ uint4 load_eight(const cuda_ll_dispatch &d, int t, int unit)
{
    const uint4 *row = static_cast<const uint4 *>(d.x) + (int64_t)t * (d.ll.hidden / 8);

    return unit < d.ll.hidden / 8 ? __ldg(row + unit) : uint4{};
}

/* `first`: the part of the row that this thread has prefetched, its first two units. */
__device__ void make_plain(const cuda_ll_dispatch &d, unsigned char *image, int t, sixteen first, const team &by)
{
    int unit = by.thread;

    for (int i = 0; unit < d.ll.hidden / 8; i++, unit += by.threads)
        reinterpret_cast<uint4 *>(image + d.ll.row_at)[unit] = i == 0   ? first.low
                                                               : i == 1 ? first.high
                                                                        : load_eight(d, t, unit);
}

/* What a thread prefetches of the next token. */
struct prefetched {
    sixteen row;
    int expert; /* choice k, by thread k; -1: none */
};

__device__ prefetched prefetch(const cuda_ll_dispatch &d, int t, const team &by)
{
    int i = by.thread;
    prefetched a = {};

    if (t >= d.n_tokens)
        return a;
    a.expert = i < d.ll.topk ? read_expert(d, (int64_t)t * d.ll.topk + i) : -1;
    if (d.block)
        a.row = load_sixteen(d, t, i);
    else
        a.row = {load_eight(d, t, i), load_eight(d, t, i + by.threads)};
    return a;
}

/* Builds the image of token t's slot; it is complete on return. */
__device__ void make_image(const cuda_ll_dispatch &d, const ll_call &call, int t, const prefetched &a, choices &c,
                           unsigned char *image, const team &by)
{
    if (d.block)
        make_quantised(d, image, t, a.row, by);
    else
        make_plain(d, image, t, a.row, by);
    prepare_choices(d, call, t, a.expert, c, image, by);
}

/* Between nodes: is the rank in the list? */
__device__ inline bool has_rank(const choices &c, int rank)
{
    bool has = false;

    for (int i = 0; i < (int)c.ranks; i++)
        has |= c.rank[i] == rank;
    return has;
}

/*
 * Stores the slot of token t to `ranks`; each rank starts with another destination. Between nodes: to those of the
 * list in `c` that are not masked. Threads store it, because the copy engine takes longer with several destinations (a
 * model on 4 GPUs, 128 tokens: 16 instead of 13 us from the synchronisation to the last row; bf16: 30 instead of 21
 * us).
 */
__device__ void store_slot(const cuda_ll_dispatch &d, const ll_call &call, const choices &c, int t, uint32_t ranks,
                           const unsigned char *image, const team &by)
{
    int me = d.ll.waits.rank, vectors = d.image_bytes / VECTOR;
    uint32_t rotated = __funnelshift_r(ranks, ranks, (uint32_t)me + 1);

    for (int i = by.thread; i < vectors; i += by.threads) {
        uint4 v = reinterpret_cast<const uint4 *>(image)[i];

        for (int j = 0; LL_NODES && j < (int)ranks; j++)
            if (!is_masked(call, c.rank[j]))
                reinterpret_cast<uint4 *>(slot_of(d.ll, c.rank[j], me, t))[i] = v;
        for (uint32_t left = LL_NODES ? 0 : rotated; left; left &= left - 1)
            reinterpret_cast<uint4 *>(slot_of(d.ll, (__ffs((int)left) + me) % CUDA_MAX_RANKS, me, t))[i] = v;
    }
}

/* Sends the tokens of this block; `image` is that of the first. */
__device__ void send_tokens(const cuda_ll_dispatch &d, const ll_call &call, choices &c, unsigned char *image,
                            const team &by)
{
    const cuda_ll &ll = d.ll;
    int me = ll.waits.rank, i = by.thread, next;

    for (int t = (int)blockIdx.x; t < d.n_tokens; t = next) {
        uint32_t ranks = ll_unmasked(c.ranks, call.mask);
        bool has_row = !LL_NODES || has_rank(c, i);
        prefetched a;

        next = t + (int)gridDim.x;
        a = prefetch(d, next, by);
        store_slot(d, call, c, t, ranks, image, by);
        HOLD(ll.waits, CUDA_POINT_ROW);
        team_sync(by);
        /* While the rows arrive, for which the flag must wait. */
        if (next < d.n_tokens)
            make_image(d, call, next, a, c, image, by);
        if (i < ll.waits.nranks && !is_masked(call, i))
            store_release(slot_flag_of(ll, i, me, t), call.number << 1 | (LL_NODES ? has_row : ranks >> i & 1));
    }
}

__device__ void send(const cuda_ll_dispatch &d, const ll_call &call, choices &c, unsigned char *image, const team &by)
{
    int i = by.thread;

    send_tokens(d, call, c, image, by);
    /* The slots beyond n_tokens are empty. No data precedes their flags, which so need no release. */
    for (int t = d.n_tokens + (int)blockIdx.x; t < d.ll.max_tokens; t += (int)gridDim.x)
        if (i < d.ll.waits.nranks && !is_masked(call, i))
            *(volatile uint64_t *)slot_flag_of(d.ll, i, d.ll.waits.rank, t) = call.number << 1;
    ll_notify_peers(d.ll, call, &ll_wire_segment::rows_ready, false, d.image_bytes);
}

/*
 * Everything that can be done before the ranks synchronise, and the synchronisation. Called by all threads. Returns
 * false if the kernel must exit.
 */
__device__ bool prepare(const cuda_ll_dispatch &d, ll_call &call, choices &c, int32_t *bins, unsigned char *image)
{
    const cuda_ll &ll = d.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    team all = whole_block();
    int t = (int)blockIdx.x;
    cuda_ll_segment *entry = ll_load_entry(ll);
    prefetched a = prefetch(d, t, all);
    bool counts = (int)gridDim.x - 1 - t < counting_blocks(d), twice = false, valid;

    ll_begin(ll, entry);
    for (int i = (int)threadIdx.x; i < EP_MAX_EXPERTS / 4; i += (int)blockDim.x)
        reinterpret_cast<uint32_t *>(c.choice_of)[i] = 0;
    __syncthreads();
    if (counts)
        count_rows(d, bins);
    valid = entries_are_valid(d, call, twice);
    ll_set_entry(ll, entry); /* routing_is_valid() begins with a barrier */
    if (counts && routing_is_valid(d, valid, twice, counts, bins))
        send_counts(d, call, bins);
    HOLD(ll.waits, CUDA_POINT_PUBLISHED);
    if (t < d.n_tokens)
        make_image(d, call, t, a, c, image, all);
    if (!routing_is_valid(d, valid, twice, counts, bins)) {
        ll_refuse(ll, d.queued, ll.waits.ready_phase);
        return false;
    }
    return ll_sync(ll, call, &ll_wire_segment::completed, mine->last_dispatch, CUDA_LL_SYNC_SEND, ll.waits.ready_phase);
}

} /* namespace */

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(CUDA_LL_THREADS, 1) LL_NAME(dispatch_ll)(const __grid_constant__ cuda_ll_dispatch d)
{
    await_stream();
    extern __shared__ __align__(128) unsigned char image[]; /* of a slot */
    __shared__ int32_t bins[EP_MAX_EXPERTS];
    __shared__ choices c;
    __shared__ receive_state state;
    const cuda_ll &ll = d.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    ll_call call = {mine->call + 1, mine->dispatches + 1, {}};
    bool sends = d.phases & CUDA_LL_SEND, receives = d.phases & CUDA_LL_RECEIVE;
    /*
     * This many threads begin with sending, the others with receiving; 0: all threads do one after the other. With
     * masking nothing is received before the participating ranks are known. Between nodes ll_notify_peers() needs all
     * threads of a block.
     */
    int half = sends && receives && !ll.masking && !LL_NODES ? (int)blockDim.x / 2 : 0, i = (int)threadIdx.x;
    team all = whole_block(), joint = {i, 2 * half, TEAM_JOINS};

    ll_load_mask(mine, call.mask);
    if (sends && !prepare(d, call, c, bins, image))
        return;
    HOLD(ll.waits, CUDA_POINT_BEGUN);
    if (sends && (i < half || !half))
        send(d, call, c, image, half ? team{i, half, TEAM_SENDS} : all);
    HOLD(ll.waits, CUDA_POINT_MOVED);
    if (!receives)
        return;
    if (i >= half)
        await_counts(d, call, state, half ? team{i - half, half, TEAM_RECEIVES} : all);
    /* The senders join the receivers when the destinations of rows are known. Nobody waits for the senders. */
    if (i < half)
        team_sync(joint);
    else if (half)
        team_arrive(joint);
    if (state.active)
        receive(d, call, state);
    ll_end(ll, call, false);
}

} /* namespace ep */

cudaError_t LL_NAME(cuda_launch_ll_dispatch)(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream)
{
    return launch(ep::LL_NAME(dispatch_ll), (unsigned)blocks, CUDA_LL_THREADS, (size_t)dispatch->image_bytes, stream,
                  *dispatch);
}

cudaError_t LL_NAME(cuda_ll_dispatch_load)(int shared_bytes)
{
    struct cudaFuncAttributes kernel;
    cudaError_t error = cudaFuncGetAttributes(&kernel, ep::LL_NAME(dispatch_ll));

    if (error != cudaSuccess)
        return error;
    /* A part of the limit is used by static variables; an image is aligned to 128 bytes. */
    return cudaFuncSetAttribute(ep::LL_NAME(dispatch_ll), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared_bytes - (int)kernel.sharedSizeBytes - 128);
}
