/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine.
 *
 * Sending: a rank reduces the rows that its experts made of a token and sends one row to the token's owner. Each warp
 * reduces a part of the row: the copy engine loads the rows into shared memory, even before the ranks have
 * synchronised, and stores the sum. The weights of other ranks' tokens are sent ahead. If a token has a single row
 * here, that row is sent unchanged.
 *
 * Receiving: each block claims a token, waits for its rows, and adds them up in the order of their first choices.
 */
#include "backend/cuda/ll_sum.cuh"

/*
 * Bytes of each of a warp's two slots, which hold the tile of all rows to be reduced; between nodes other arrays in
 * shared memory are longer.
 */
#define SLOT_BYTES (LL_NODES ? 6656 : 7168)
#define TILE_ALIGN 8 /* vectors; tiles and parts of rows are multiples */
#define SHARED_BYTES (CUDA_LL_THREADS / WARP * 2 * SLOT_BYTES)

namespace
{

/*
 * Replaces the weight of a choice that the combine omits. The row is sent and waited for all the same, because a later
 * call uses its entry for another row.
 */
#define WEIGHT_OMITTED 0xffffffffu

/*
 * Does this thread's part of the routing match that of the dispatch, except for omitted choices? The threads of each
 * block together check everything, so that all blocks come to the same result.
 */
__device__ bool matches_dispatch(const cuda_ll_combine &c, const ll_call &call)
{
    const cuda_ll &ll = c.ll;
    const int32_t *index = index_of(ll, call);
    int n = c.n_tokens * ll.topk;
    bool same = true;

    /* Mostly the call has the topk of ep_ll_new(); without a division in the loop its loads are in flight together. */
    if (ll.topk == ll.segment_topk) {
#pragma unroll 4
        for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
            int64_t given = read_choice(c.topk_idx, c.idx64, i);

            same &= given == index[i] || given == -1;
        }
        return same;
    }
    for (int i = (int)threadIdx.x; i < n; i += (int)blockDim.x) {
        int64_t given = read_choice(c.topk_idx, c.idx64, i);

        same &= given == index[entry_of(ll, i)] || given == -1;
    }
    return same;
}

/* The bits that are sent. One NaN pattern is reserved for WEIGHT_OMITTED. */
__device__ __forceinline__ uint32_t weight_bits(float weight)
{
    uint32_t bits = __float_as_uint(weight);

    return bits == WEIGHT_OMITTED ? WEIGHT_OMITTED >> 1 : bits;
}

/* --- sending ----------------------------------------------------------------------------------------------------- */

/* Index among all threads of the kernel. */
__device__ __forceinline__ int global_thread()
{
    return (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

__device__ const uint64_t *weight_words(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<uint64_t>(ll, rank, source, ll.weight_at) +
           ((int64_t)source * ll.segment_tokens + t) * ll.segment_topk;
}

/*
 * Sends the weight of each choice to the rank of its expert. Each word holds the number of the call and the weight, so
 * no flag is needed. The first blocks do it, so that blocks that start late delay nobody. `first`: the weight of this
 * thread's first choice.
 */
__device__ void send_weights(const cuda_ll_combine &c, const ll_call &call, float first)
{
    const cuda_ll &ll = c.ll;
    int me = ll.waits.rank, all = c.n_tokens * ll.topk, begin = global_thread();
    const int32_t *index = index_of(ll, call);

    for (int i = begin; i < all; i += (int)(gridDim.x * blockDim.x)) {
        int given = (int)read_choice(c.topk_idx, c.idx64, i), entry = entry_of(ll, i);
        int expert = given < 0 ? index[entry] : given;
        int rank = expert < 0 ? -1 : expert / ll.n_local;
        float weight = i == begin ? first : __ldg(c.weights + i);

        if (expert >= 0 && !is_masked(call, rank))
            *const_cast<volatile uint64_t *>(weight_words(ll, rank, me, 0) + entry) =
                call.number << 32 | (given < 0 ? WEIGHT_OMITTED : weight_bits(weight));
    }
}

/*
 * A rank that was suspended during a call may find that `owner` has continued without it and uses the entry for the row
 * of another rank. Checked directly before each store, so that at most the stores in flight go wrong.
 */
__device__ bool may_write_to(const cuda_ll &ll, int owner)
{
    return !ll.masking || (!ll_has(ll_mine(ll)->mask, owner) &&
                           !*(const volatile uint32_t *)&ll_from(ll, owner)->words.masked_by[owner]);
}

/*
 * What a warp sends: a part of a token's row. Neighbours go to different SMs and to different ranks. Without partial
 * reduction each choice has a row, and an item, of its own.
 */
struct item {
    uint32_t at;
    int source, token, choice, part; /* choice -1: all choices */
};

__device__ item item_at(const cuda_ll &ll, uint32_t at)
{
    uint32_t parts = (uint32_t)ll.parts, topk = (uint32_t)ll.segment_topk, n = (uint32_t)ll.waits.nranks;
    uint32_t rows = at / parts, slots = ll.no_partial_reduce ? rows / topk : rows;

    return {at, (int)(slots % n), (int)(slots / n), ll.no_partial_reduce ? (int)(rows % topk) : -1, (int)(at % parts)};
}

/* A tile of an item: as many vectors as fit into a slot for all rows that are reduced. */
struct tile {
    item of;
    uint32_t votes;      /* choices whose rows are reduced; 0: there is nothing more to send */
    int32_t row;         /* of this lane's choice */
    int at, end, length; /* vectors of a row: begin of the tile, end of the item, length of the tile */
    bool first;          /* of its item */
};

__device__ __forceinline__ bool is_single(const tile &p)
{
    return !(p.votes & (p.votes - 1));
}

__device__ int tile_length(const tile &p)
{
    int most = SLOT_BYTES / VECTOR / __popc(p.votes) / TILE_ALIGN * TILE_ALIGN;

    return min(most, p.end - p.at);
}

/* The receive row of this lane's choice, if the item covers it; -1: none. */
__device__ int32_t origin_of(const cuda_ll &ll, const ll_call &call, const item &s, int lane)
{
    bool asked = lane < ll.segment_topk && (s.choice < 0 || s.choice == lane) && s.token < ll.max_tokens;

    return asked && !is_masked(call, s.source) ? __ldg(origins_of(ll, call, s.source, s.token) + lane) : -1;
}

/*
 * The first tile of the item, or of the next one that has rows here. `row`: origin_of() the item. Called by all lanes.
 */
__device__ tile find_tile(const cuda_ll &ll, const ll_call &call, item s, int32_t row, int lane)
{
    int grains = ll.hidden / 8 / TILE_ALIGN;
    uint32_t votes;

    while (!(votes = __ballot_sync(ALL_LANES, row >= 0)) && s.token < ll.max_tokens) {
        s = item_at(ll, s.at + gridDim.x * blockDim.x / WARP);
        row = origin_of(ll, call, s, lane);
    }
    tile p = {s, votes, row, grains * s.part / ll.parts * TILE_ALIGN, grains * (s.part + 1) / ll.parts * TILE_ALIGN,
              0, true};

    if (votes)
        p.length = tile_length(p);
    return p;
}

__device__ tile next_tile(const cuda_ll &ll, const ll_call &call, const tile &p, int lane)
{
    tile next = p;

    next.at += p.length;
    if (next.at == p.end) {
        item s = item_at(ll, p.of.at + gridDim.x * blockDim.x / WARP);

        return find_tile(ll, call, s, origin_of(ll, call, s, lane), lane);
    }
    next.length = tile_length(next);
    next.first = false;
    return next;
}

/* The two slots of a warp, and the state of the item that it sends. */
struct pipe_state {
    unsigned char *slots;
    uint64_t *full;
    uint32_t parity; /* one bit per slot */
    int lane;
    float weight;   /* of this lane's choice */
    uint32_t kept;  /* choices that are not omitted; of an item with several rows */
    uint64_t *flag; /* of an item in flight; NULL: none */
    int flag_owner; /* the owner of that item's token */
};

__device__ __forceinline__ unsigned char *slot_at(const pipe_state &pipe, int slot)
{
    return pipe.slots + slot * SLOT_BYTES;
}

/* Loads the rows of a tile into a free slot, one after the other. Called by all lanes. */
__device__ void load_tile(const cuda_ll_combine &c, const tile &p, pipe_state &pipe, int slot)
{
    uint32_t bytes = (uint32_t)p.length * VECTOR;
    int before = __popc(p.votes & ((1u << pipe.lane) - 1));

    if (pipe.lane == 0)
        barrier_expect(pipe.full + slot, bytes * __popc(p.votes));
    __syncwarp();
    if (p.votes >> pipe.lane & 1)
        bulk_load(slot_at(pipe, slot) + before * bytes,
                  static_cast<const unsigned char *>(c.x) + (int64_t)p.row * c.ll.hidden * 2 + (int64_t)p.at * VECTOR,
                  bytes, pipe.full + slot);
}

/* Has a counter of c.signals reached its value? Remembers what it was. */
struct has_signalled {
    const uint32_t *counter;
    uint32_t wanted, *ret_value;

    __device__ __forceinline__ bool operator()() const
    {
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(*ret_value) : "l"(counter) : "memory");
        return *ret_value >= wanted;
    }
};

/*
 * Are the rows of an item written? `wait`: waits for it; false then: the kernel must exit, and the failure is reported.
 * Called by all lanes.
 */
__device__ __noinline__ bool rows_ready(const cuda_ll_combine &c, const tile &p, int lane, bool wait)
{
    const cuda_ll &ll = c.ll;
    bool ours = p.votes >> lane & 1, ok = true;
    int32_t of_expert = ll.waits.nranks * ll.max_tokens;
    int32_t expert = ours ? p.row / of_expert : 0, block = ours ? p.row % of_expert / c.signal_rows : 0;
    uint32_t value = 0;
    has_signalled met = {c.signals + (int64_t)expert * c.signal_blocks + block, c.signal_value, &value};

    if (ours && !wait) {
        ok = met();
    } else if (ours) {
        wait_end end = wait_for(ll.waits, met, nullptr, 0);
        volatile uint32_t *detail = ll.waits.report->detail;

        ok = end == WAIT_OK;
        if (end == WAIT_TIMEOUT) {
            detail[CUDA_DETAIL_RANK] = (uint32_t)expert;
            detail[CUDA_DETAIL_WORD] = (uint32_t)block;
            detail[CUDA_DETAIL_MINE] = c.signal_value;
            detail[CUDA_DETAIL_THEIRS] = value;
            __threadfence_system();
        }
        if (!ok)
            set_failure(ll.waits, end == WAIT_TIMEOUT ? CUDA_FAILED_SIGNAL : 0, ll.waits.rank, c.signal_phase);
    }
    ok = __all_sync(ALL_LANES, ok);
    /* The copy engine reads what other SMs have written, each row loaded by the lane that has found it complete. */
    if (ok)
        bulk_fence_global();
    __syncwarp();
    return ok;
}

__device__ void await_tile(pipe_state &pipe, int slot)
{
    barrier_wait(pipe.full + slot, pipe.parity >> slot & 1);
    pipe.parity ^= 1u << slot;
}

/* Only one row of the token is not omitted: moves it unchanged to where the first one is. Called by all lanes. */
__device__ void move_single(const tile &p, const pipe_state &pipe, int slot)
{
    uint4 *rows = reinterpret_cast<uint4 *>(slot_at(pipe, slot));
    int from = __popc(p.votes & ((pipe.kept & p.votes) - 1));

    for (int i = pipe.lane; i < p.length && from; i += WARP)
        rows[i] = rows[from * p.length + i];
    bulk_fence_shared();
    __syncwarp();
}

/*
 * Replaces the first row of a tile by the sum of the rows that are not omitted. `all`: none is, and the loop has no
 * check that a load would wait for. Called by all lanes.
 */
template <bool all> __device__ __forceinline__ void reduce_rows(const tile &p, const pipe_state &pipe, int slot)
{
    uint4 *rows = reinterpret_cast<uint4 *>(slot_at(pipe, slot));
    int n = __popc(p.votes);

    for (int i = pipe.lane; i - pipe.lane < p.length; i += WARP) {
        float sum[8] = {};
        uint32_t left = p.votes;

        for (int j = 0; j < n; j++, left &= left - 1) {
            int k = __ffs((int)left) - 1;
            float weight = __shfl_sync(ALL_LANES, pipe.weight, k);

            if (i < p.length && (all || (pipe.kept >> k & 1)))
                add_weighted(sum, rows[j * p.length + i], weight);
        }
        if (i < p.length)
            rows[i] = round_vector(sum);
    }
    /* The copy engine reads what the lanes have written, and overwrites what they have read. */
    bulk_fence_shared();
    __syncwarp();
}

/* Waits for the weights of an item, at its first tile. Called by all lanes. Returns false if the kernel must exit. */
__device__ bool await_weights(const cuda_ll &ll, const ll_call &call, const tile &p, pipe_state &pipe)
{
    const uint64_t *word = weight_words(ll, ll.waits.rank, p.of.source, p.of.token) + pipe.lane;
    bool ours = p.votes >> pipe.lane & 1;

    if (!__all_sync(ALL_LANES, !ours || await_word(ll, call, word, p.of.source, ll.waits.ready_phase)))
        return false;
    uint32_t bits = ours ? (uint32_t) * (const volatile uint64_t *)word : 0;

    pipe.weight = __uint_as_float(bits);
    pipe.kept = __ballot_sync(ALL_LANES, ours && bits != WEIGHT_OMITTED);
    return true;
}

/* Publishes the previous item to the owner of its token, once it is stored. Called by one lane. */
__device__ void flag_item(const cuda_ll &ll, const ll_call &call, pipe_state &pipe)
{
    if (!pipe.flag)
        return;
    bulk_wait_all();
    HOLD(ll.waits, CUDA_POINT_ROW);
    if (may_write_to(ll, pipe.flag_owner))
        store_release(pipe.flag, call.number);
    pipe.flag = nullptr;
}

/* Stores a tile where the owner of its token reduces. Called by one lane. */
__device__ void store_tile(const cuda_ll &ll, const ll_call &call, const tile &p, pipe_state &pipe, int slot)
{
    int owner = p.of.source;
    int64_t entry = (int64_t)p.of.token * ll.segment_topk + __ffs((int)p.votes) - 1;
    unsigned char *to =
        ll_at<unsigned char>(ll, owner, ll.waits.rank, ll.rows_at) + entry * ll.hidden * 2 + (int64_t)p.at * VECTOR;

    if (may_write_to(ll, owner))
        bulk_store(to, slot_at(pipe, slot), (uint32_t)p.length * VECTOR);
    bulk_commit();
    if (p.at + p.length != p.end)
        return;
    pipe.flag = ll_at<uint64_t>(ll, owner, ll.waits.rank, ll.row_flag_at) + entry * ll.parts + p.of.part;
    pipe.flag_owner = owner;
}

__device__ pipe_state pipe_init(unsigned char *slots, uint64_t *barriers)
{
    int warp = (int)threadIdx.x / WARP;
    pipe_state pipe = {
        slots + warp * 2 * SLOT_BYTES, barriers + warp * 2, 0, (int)threadIdx.x % WARP, 0, 0, nullptr, 0};

    if (pipe.lane == 0) {
        barrier_init(pipe.full);
        barrier_init(pipe.full + 1);
        barriers_publish();
    }
    __syncwarp();
    return pipe;
}

/* Loads a tile into the slot of an earlier one, whose store must have completed its reads. Called by all lanes. */
__device__ __forceinline__ void load_next(const cuda_ll_combine &c, const tile &next, pipe_state &pipe, int slot)
{
    if (pipe.lane == 0)
        bulk_wait_all_read();
    __syncwarp();
    load_tile(c, next, pipe, slot);
}

/* Sends all items of this warp. `p`: the first tile, which is being loaded, unless its rows must be signalled. */
__device__ void send_rows(const cuda_ll_combine &c, const ll_call &call, tile p, pipe_state &pipe)
{
    const cuda_ll &ll = c.ll;
    bool ok = true;

    if (c.signals && p.votes) {
        ok = rows_ready(c, p, pipe.lane, true);
        if (ok)
            load_tile(c, p, pipe, 0);
        else
            p.votes = 0;
    }
    for (int slot = 0; p.votes; slot ^= 1) {
        tile next = next_tile(ll, call, p, pipe.lane);
        bool early = ok && next.votes && (!c.signals || !next.first || rows_ready(c, next, pipe.lane, false));

        if (early)
            load_next(c, next, pipe, slot ^ 1);
        await_tile(pipe, slot);
        if (!ok)
            break;
        /* Before this item possibly waits for another rank. */
        if (p.first && pipe.lane == 0)
            flag_item(ll, call, pipe);
        if (p.first && !is_single(p))
            ok = await_weights(ll, call, p, pipe);
        if (ok && !is_single(p)) {
            if (pipe.kept == p.votes)
                reduce_rows<true>(p, pipe, slot);
            else if (__popc(pipe.kept) == 1)
                move_single(p, pipe, slot);
            else
                reduce_rows<false>(p, pipe, slot);
        }
        if (ok && pipe.lane == 0)
            store_tile(ll, call, p, pipe, slot);
        if (ok && next.votes && !early) {
            /* The owner may have this item now. */
            if (pipe.lane == 0)
                flag_item(ll, call, pipe);
            __syncwarp();
            if (!rows_ready(c, next, pipe.lane, true))
                break;
            load_next(c, next, pipe, slot ^ 1);
        }
        if (!ok && !early)
            break; /* nothing is on its way to the other slot */
        p = next;
    }
    if (pipe.lane == 0) {
        flag_item(ll, call, pipe);
        /* The copy engine must have finished with the block's shared memory. */
        bulk_wait_all();
    }
    __syncwarp();
    /* With masking nothing above returns early; without it an early return has set a failure. */
    ll_notify_peers(ll, call, &ll_wire_segment::rows_ready, true);
}

/*
 * Without masking: adds the time until the weights of each rank were here, for which its partial sums wait. As
 * time_rows().
 */
__device__ bool time_weights(const cuda_ll_combine &c, const ll_call &call)
{
    __shared__ unsigned long long longest[LL_RANKS];
    const cuda_ll &ll = c.ll;
    uint64_t begin = global_ns();
    int me = ll.waits.rank, i = (int)threadIdx.x, of_rank = ll.max_tokens * ll.segment_topk;
    bool ok = true;

    if (i < LL_RANKS)
        longest[i] = 0;
    __syncthreads();
    for (int at = i; at < ll.waits.nranks * of_rank && ok; at += (int)blockDim.x) {
        int source = at / of_rank, choice = at % of_rank;
        const uint64_t *word = weight_words(ll, me, source, 0) + choice;

        if (is_masked(call, source) || __ldg(origins_of(ll, call, source, 0) + choice) < 0 ||
            has_call_number{word, (uint32_t)call.number}())
            continue;
        ok = ll_wait_or_fail(ll, has_call_number{word, (uint32_t)call.number}, source, ll.waits.ready_phase);
        atomicMax(&longest[source], (unsigned long long)(global_ns() - begin));
    }
    ok = __syncthreads_and(ok);
    if (i < ll.waits.nranks && i != me && ok)
        c.wait_added[i] += (int64_t)longest[i];
    return ok;
}

/*
 * With masking the ranks synchronise after the weights, so that no rank masks another one that is itself waiting.
 * Called by all threads of every block.
 */
__device__ bool sync_to_send(const cuda_ll_combine &c, ll_call &call)
{
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    bool after_weights = ll.masking && !ll.no_partial_reduce;

    if (c.wait_added && !ll.masking && !ll.no_partial_reduce && blockIdx.x == 0 && !time_weights(c, call))
        return false;
    return ll_sync(ll, call, after_weights ? &ll_wire_segment::weights_ready : &ll_wire_segment::completed,
                   after_weights ? call.number : mine->last_combine, CUDA_LL_SYNC_SEND, ll.waits.ready_phase,
                   after_weights ? c.wait_added : nullptr);
}

} /* namespace */

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(CUDA_LL_THREADS, 1) LL_NAME(combine_ll)(const __grid_constant__ cuda_ll_combine c)
{
    await_stream();
    extern __shared__ __align__(128) unsigned char slots[];
    __shared__ uint64_t barriers[CUDA_LL_THREADS / WARP * 2];
    __shared__ terms terms;
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    ll_call call = {mine->call + 1, mine->dispatches - (uint32_t)c.age, {}};

    ll_load_mask(mine, call.mask);
    if (c.phases & CUDA_LL_SEND) {
        cuda_ll_segment *entry = ll_load_entry(ll);
        int lane = (int)threadIdx.x % WARP;
        item own = item_at(ll, threadIdx.x / WARP * gridDim.x + blockIdx.x);
        pipe_state pipe;
        tile first;
        int32_t row;
        float weight;
        bool matches;

        ll_begin(ll, entry);
        /* Loads in flight together with those of the routing. */
        row = origin_of(ll, call, own, lane);
        weight = global_thread() < c.n_tokens * ll.topk ? __ldg(c.weights + global_thread()) : 0;
        matches = matches_dispatch(c, call) && !is_masked(call, ll.waits.rank);
        ll_set_entry(ll, entry);
        if (!__syncthreads_and(matches)) {
            ll_refuse(ll, c.queued, ll.waits.ready_phase);
            return;
        }
        /* Only when the routing is known to be valid: a rejected call may be repeated with other weights. */
        if (!ll.no_partial_reduce) {
            send_weights(c, call, weight);
            ll_notify_peers(ll, call, &ll_wire_segment::weights_ready, true);
        }
        HOLD(ll.waits, CUDA_POINT_PUBLISHED);
        pipe = pipe_init(slots, barriers);
        first = find_tile(ll, call, own, row, lane);
        /* Only when the routing has been read, whose loads would otherwise queue behind all the rows. */
        if (first.votes && !c.signals)
            load_tile(c, first, pipe, 0);
        if (!sync_to_send(c, call)) {
            /* The copy engine must have finished with the block's shared memory. */
            if (first.votes && !c.signals)
                await_tile(pipe, 0);
            return;
        }
        HOLD(ll.waits, CUDA_POINT_BEGUN);
        send_rows(c, call, first, pipe);
        HOLD(ll.waits, CUDA_POINT_MOVED);
    }
    if (!(c.phases & CUDA_LL_RECEIVE))
        return;
    receive(c, call, terms);
    ll_end(ll, call, true);
}

} /* namespace ep */

cudaError_t LL_NAME(cuda_launch_ll_combine)(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream)
{
    return launch(ep::LL_NAME(combine_ll), (unsigned)blocks, CUDA_LL_THREADS, SHARED_BYTES, stream, *combine);
}

cudaError_t LL_NAME(cuda_ll_combine_load)(int)
{
    return cudaFuncSetAttribute(ep::LL_NAME(combine_ll), cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
}
