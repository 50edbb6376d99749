/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency dispatch. Sending: a block takes a token, quantises its row and makes the image of a slot in shared
 * memory, with the token's experts and its place among this rank's rows for each of them. The copy engine stores it
 * into the slot of that token on each of its ranks, which is then flagged. The numbers of rows for each expert go
 * ahead. Receiving: from these numbers a row's place is known without the other rows, so each warp takes a slot, waits
 * for its flag and packs it.
 */
#include "backend/cuda/lowlatency.cuh"
#include "backend/cuda/quantise.cuh"

#define FEW_BLOCKS 8
#define AHEAD 8 /* vectors of a lane on their way at once */

namespace
{

/* Of the token being sent. */
struct choices {
    int expert[CUDA_LL_MAX_TOPK];      /* -1: none */
    int before[CUDA_LL_MAX_TOPK];      /* tokens of this rank before it with the same expert */
    uint8_t choice_of[EP_MAX_EXPERTS]; /* 1 + the choice that has the expert; 0: none */
    uint32_t ranks;                    /* all ranks, a bit for each */
};

/* --- the routing ------------------------------------------------------------------------------------------------- */

/*
 * Is every entry of this thread's part -1 or an expert that its token has once? All threads of each block together look
 * at everything, so that all blocks come to the same answer. A lane has one entry, its warp a few whole tokens.
 */
__device__ bool routing_is_valid(const cuda_ll_dispatch &d)
{
    int topk = d.ll.topk, n_experts = d.ll.n_local * d.ll.waits.nranks, lane = (int)threadIdx.x % WARP;
    int tokens = WARP / topk, own = lane / topk, step = (int)(blockDim.x / WARP) * tokens;
    bool good = true;

    for (int first = (int)(threadIdx.x / WARP) * tokens; first < d.n_tokens; first += step) {
        bool active = own < tokens && first + own < d.n_tokens;
        int64_t expert = active ? read_choice(d.topk_idx, d.wide, (int64_t)first * topk + lane) : -1;
        int narrow = (int)expert;

        good &= expert >= -1 && expert < n_experts;
        /* With each other one of the token. match.any takes much longer where all are different. */
        for (int i = 1; i < topk; i++) {
            int other = lane % topk + i;

            other = __shfl_sync(ALL_LANES, narrow, min(own * topk + (other < topk ? other : other - topk), WARP - 1));
            good &= !active || expert < 0 || other != narrow;
        }
    }
    return good;
}

/* Blocks that tell the ranks how many rows come: those without a token, if there are any; from the last one on. */
__device__ int counting_blocks(const cuda_ll_dispatch &d)
{
    int all = (int)gridDim.x, idle = all - min(all, d.n_tokens);

    return min(idle ? idle : all, d.ll.waits.nranks);
}

/* Counts of this rank's rows for each expert. By all threads. */
__device__ void count_rows(const cuda_ll_dispatch &d, int32_t *bins)
{
    int64_t n_experts = (int64_t)d.ll.n_local * d.ll.waits.nranks;

    for (int i = (int)threadIdx.x; i < n_experts; i += (int)blockDim.x)
        bins[i] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < (int64_t)d.n_tokens * d.ll.topk; i += blockDim.x) {
        int64_t expert = read_choice(d.topk_idx, d.wide, i);

        /* The routing may not have been checked yet. */
        if (expert >= 0 && expert < n_experts)
            atomicAdd(&bins[expert], 1);
    }
    __syncthreads();
}

/* Those for the experts of `rank`, put there. By all threads. */
__device__ void send_counts(const cuda_ll_dispatch &d, const ll_call &call, int rank, const int32_t *bins)
{
    const cuda_ll &ll = d.ll;
    int me = ll.waits.rank;
    int32_t *there = ll_at<int32_t>(ll, rank, ll.counts_at) + (int64_t)me * (ll.n_local + 1);

    for (int i = (int)threadIdx.x; i < ll.n_local; i += (int)blockDim.x)
        there[i] = bins[rank * ll.n_local + i];
    if (threadIdx.x == 0) {
        there[ll.n_local] = d.format;
    }
    __syncthreads();
    if (threadIdx.x == 0)
        store_release(&ll.peer[rank]->ahead[me], call.number);
}

/* An expert as it stands in the routing; -1 for none, and where that is not valid. */
__device__ int read_expert(const cuda_ll_dispatch &d, int64_t at)
{
    int64_t expert = read_choice(d.topk_idx, d.wide, at);

    return expert >= 0 && expert < (int64_t)d.ll.n_local * d.ll.waits.nranks ? (int)expert : -1;
}

/* What a lane of the first warp looks at of token t. */
__device__ int fetch_choice(const cuda_ll_dispatch &d, int t)
{
    int k = (int)threadIdx.x;

    return k < d.ll.topk && t < d.n_tokens ? read_expert(d, (int64_t)t * d.ll.topk + k) : -1;
}

/*
 * The choices of token t, and how many tokens before have the same. Kept for the combine. By all threads, of which each
 * brings its fetch_choice().
 */
__device__ void look_at_token(const cuda_ll_dispatch &d, const ll_call &call, int t, int expert, choices &c)
{
    const cuda_ll &ll = d.ll;
    int k = (int)threadIdx.x, topk = ll.topk;
    int32_t *index =
        ll_at<int32_t>(ll, ll.waits.rank, ll.index_at) + (call.dispatch & 1) * ((int64_t)ll.max_tokens * topk);

    if (k < WARP) {
        int rank = expert < 0 ? -1 : expert / ll.n_local;

        if (k < topk)
            index[(int64_t)t * topk + k] = expert;
        c.expert[k] = expert;
        c.before[k] = 0;
        if (expert >= 0)
            c.choice_of[expert] = (uint8_t)(k + 1);
        rank = (int)__reduce_or_sync(ALL_LANES, rank < 0 ? 0 : 1u << rank);
        if (k == 0)
            c.ranks = (uint32_t)rank;
    }
    __syncthreads();
#pragma unroll 2
    for (int64_t i = threadIdx.x; i < (int64_t)t * topk; i += blockDim.x) {
        int other = read_expert(d, i);
        int choice = other < 0 ? 0 : c.choice_of[other];

        if (choice)
            atomicAdd(&c.before[choice - 1], 1);
    }
    __syncthreads();
    /* For the next token, which is looked at behind another barrier. */
    if (k < topk && c.expert[k] >= 0)
        c.choice_of[c.expert[k]] = 0;
}

/* --- rows -------------------------------------------------------------------------------------------------------- */

__device__ unsigned char *slot_of(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<unsigned char>(ll, rank, ll.slots_at) + ((int64_t)source * ll.max_tokens + t) * ll.slot_bytes;
}

__device__ uint64_t *slot_flag_of(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<uint64_t>(ll, rank, ll.slot_flag_at) + (int64_t)source * ll.max_tokens + t;
}

/* Scales of four blocks, of which each lane has one. */
__device__ void store_scales(const cuda_ll_dispatch &d, unsigned char *image, int unit, bool active, float factor)
{
    int lane = unit % WARP, block = unit / 8;
    uint32_t byte = ue8m0_of(factor), packed = 0;

    if (!d.packed) {
        if (active && unit % 8 == 0)
            reinterpret_cast<float *>(image + d.ll.scales_at)[block] = factor;
        return;
    }
    for (int i = 0; i < 4; i++)
        packed |= __shfl_sync(ALL_LANES, byte, 8 * i) << 8 * i;
    if (active && lane == 0)
        reinterpret_cast<uint32_t *>(image + d.ll.scales_at)[block / 4] = packed;
}

__device__ sixteen load_sixteen(const cuda_ll_dispatch &d, int t, int unit)
{
    const uint4 *row = static_cast<const uint4 *>(d.x) + (int64_t)t * (d.ll.hidden / 8);
    sixteen v = {};

    if (unit < d.ll.hidden / 16)
        v = {__ldg(row + 2 * unit), __ldg(row + 2 * unit + 1)};
    return v;
}

/* `first`: what this thread has fetched of the row already. */
__device__ void make_quantised(const cuda_ll_dispatch &d, unsigned char *image, int t, sixteen first)
{
    int units = d.ll.hidden / 16, all = (units + WARP - 1) / WARP * WARP;

    for (int unit = (int)threadIdx.x; unit < all; unit += (int)blockDim.x) {
        sixteen v = unit == (int)threadIdx.x ? first : load_sixteen(d, t, unit);
        float factor = factor_of(v, d.rounds);

        if (unit < units)
            reinterpret_cast<uint4 *>(image + d.ll.row_at)[unit] = quantise(v, factor);
        store_scales(d, image, unit, unit < units, factor);
    }
}

__device__ uint4 load_eight(const cuda_ll_dispatch &d, int t, int unit)
{
    const uint4 *row = static_cast<const uint4 *>(d.x) + (int64_t)t * (d.ll.hidden / 8);

    return unit < d.ll.hidden / 8 ? __ldg(row + unit) : uint4{};
}

/* `first`: what this thread has fetched of the row already, its first two units. */
__device__ void make_plain(const cuda_ll_dispatch &d, unsigned char *image, int t, sixteen first)
{
    int unit = (int)threadIdx.x;

    for (int i = 0; unit < d.ll.hidden / 8; i++, unit += (int)blockDim.x)
        reinterpret_cast<uint4 *>(image + d.ll.row_at)[unit] = i == 0   ? first.low
                                                               : i == 1 ? first.high
                                                                        : load_eight(d, t, unit);
}

/* What a thread fetches of a token ahead of its turn. */
struct ahead {
    sixteen row;
    int expert;
};

__device__ ahead fetch_ahead(const cuda_ll_dispatch &d, int t)
{
    int i = (int)threadIdx.x;
    ahead a = {};

    if (t >= d.n_tokens)
        return a;
    a.expert = fetch_choice(d, t);
    if (d.fp8)
        a.row = load_sixteen(d, t, i);
    else
        a.row = {load_eight(d, t, i), load_eight(d, t, i + (int)blockDim.x)};
    return a;
}

/* The image of token t's slot. By all threads. */
__device__ void make_image(const cuda_ll_dispatch &d, const ll_call &call, int t, const ahead &a, choices &c,
                           unsigned char *image)
{
    if (d.fp8)
        make_quantised(d, image, t, a.row);
    else
        make_plain(d, image, t, a.row);
    look_at_token(d, call, t, a.expert, c);
}

/* Token t to all of its ranks. By all threads. */
__device__ void send_token(const cuda_ll_dispatch &d, const ll_call &call, int t, const choices &c,
                           unsigned char *image)
{
    const cuda_ll &ll = d.ll;
    int i = (int)threadIdx.x, me = ll.waits.rank;
    uint32_t ranks = c.ranks & ~call.mask;

    if (i < ll.topk)
        reinterpret_cast<int2 *>(image)[i] = make_int2(c.expert[i], c.before[i]);
    /* The copy engine reads what the threads have written. */
    bulk_fence_shared();
    __syncthreads();
    if (i < ll.waits.nranks && ranks >> i & 1) {
        bulk_store(slot_of(ll, i, me, t), image, (uint32_t)(ll.row_at + ll.hidden * (d.fp8 ? 1 : 2)));
        bulk_commit();
        bulk_wait_all();
    }
    if (i < ll.waits.nranks && !is_masked(call, i))
        store_release(slot_flag_of(ll, i, me, t), call.number << 1 | (ranks >> i & 1));
}

/* Slots of tokens that there are not. Nothing is to be seen before their flags. */
__device__ void send_nothing(const cuda_ll_dispatch &d, const ll_call &call, int t)
{
    int i = (int)threadIdx.x;

    if (i < d.ll.waits.nranks && !is_masked(call, i))
        *(volatile uint64_t *)slot_flag_of(d.ll, i, d.ll.waits.rank, t) = call.number << 1;
}

/* `image` is that of the block's first token. */
__device__ void send(const cuda_ll_dispatch &d, const ll_call &call, choices &c, const int32_t *bins,
                     unsigned char *image)
{
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks, counting = counting_blocks(d), turn = (int)(gridDim.x - 1 - blockIdx.x);

    for (int i = turn; turn < counting && i < n; i += counting)
        if (!is_masked(call, (ll.waits.rank + i) % n))
            send_counts(d, call, (ll.waits.rank + i) % n, bins);
    for (int t = (int)blockIdx.x; t < d.n_tokens; t += (int)gridDim.x) {
        if (t != (int)blockIdx.x) {
            __syncthreads();
            make_image(d, call, t, fetch_ahead(d, t), c, image);
        }
        send_token(d, call, t, c, image);
    }
    for (int t = d.n_tokens + (int)blockIdx.x; t < ll.max_tokens; t += (int)gridDim.x)
        send_nothing(d, call, t);
    ll_tell(ll, call, &cuda_ll_segment::sent);
}

/* --- receiving --------------------------------------------------------------------------------------------------- */

__device__ const int32_t *counts_of(const cuda_ll &ll, int source)
{
    return ll_at<int32_t>(ll, ll.waits.rank, ll.counts_at) + (int64_t)source * (ll.n_local + 1);
}

/* Do all want the same format? Slots are large enough for any, so that rows may be on their way meanwhile. */
__device__ void compare_formats(const cuda_ll_dispatch &d, const ll_call &call)
{
    const cuda_ll &ll = d.ll;
    int i = (int)threadIdx.x;

    if (i < ll.waits.nranks && !is_masked(call, i) && __ldcg(counts_of(ll, i) + ll.n_local) != d.format)
        give_up(ll.waits, CUDA_FAILED_MISMATCH, i, ll.waits.done_phase);
}

/* What the caller learns of the numbers of rows. By the threads of one block. */
__device__ void report_counts(const cuda_ll_dispatch &d, const ll_call &call)
{
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks;

    for (int expert = (int)threadIdx.x; expert < ll.n_local; expert += (int)blockDim.x) {
        int begin = 0;

        for (int source = 0; source < n; source++) {
            int count = is_masked(call, source) ? 0 : __ldcg(counts_of(ll, source) + expert);

            if (d.recv_range)
                d.recv_range[(int64_t)expert * n + source] = (int64_t)begin << 32 | (uint32_t)count;
            begin += count;
        }
        d.recv_count[expert] = begin;
    }
}

/* Vectors of the row in a slot, every WARP-th from `base` on. */
__device__ void load_row(const cuda_ll_dispatch &d, const unsigned char *slot, int base, int end, uint4 (&v)[AHEAD])
{
    const uint4 *from = reinterpret_cast<const uint4 *>(slot + d.ll.row_at);

#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        if (base + i * WARP < end)
            v[i] = load_far(from + base + i * WARP);
}

/*
 * Vectors begin .. end of the row to where each of the lanes in `votes` has its `row`. By all lanes; `v` holds the
 * first of them.
 */
__device__ void pack_row(const cuda_ll_dispatch &d, const unsigned char *slot, uint32_t votes, int64_t row, int begin,
                         int end, int lane, uint4 (&v)[AHEAD])
{
    int n = d.ll.hidden / (d.fp8 ? 16 : 8);

    for (int base = begin + lane; base - lane < end; base += AHEAD * WARP) {
        if (base != begin + lane)
            load_row(d, slot, base, end, v);
        for (uint32_t left = votes; left; left &= left - 1) {
            int64_t to = __shfl_sync(ALL_LANES, row, __ffs((int)left) - 1);
            uint4 *out = reinterpret_cast<uint4 *>(d.recv_x) + to * n;

#pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (base + i * WARP < end)
                    out[base + i * WARP] = v[i];
        }
    }
}

/* The scales of a row, loaded once however many places it has. By all lanes. */
__device__ void pack_scales(const cuda_ll_dispatch &d, const unsigned char *slot, uint32_t votes, int64_t row, int lane)
{
    const uint32_t *from = reinterpret_cast<const uint32_t *>(slot + d.ll.scales_at);
    int words = d.ll.hidden / (d.packed ? 512 : 128);

#pragma unroll 2
    for (int i = lane; i - lane < words; i += WARP) {
        uint32_t word = i < words ? __ldcg(from + i) : 0;

        for (uint32_t left = votes; left; left &= left - 1) {
            int64_t to = __shfl_sync(ALL_LANES, row, __ffs((int)left) - 1);

            if (i < words)
                d.recv_scales[to * words + i] = word;
        }
    }
}

/* Where the row of a slot's choice goes here. */
__device__ int64_t place_of(const cuda_ll_dispatch &d, const ll_call &call, int source, int2 choice)
{
    int64_t row = (int64_t)choice.x * d.ll.waits.nranks * d.ll.max_tokens + choice.y;

    for (int before = 0; before < source; before++)
        row += is_masked(call, before) ? 0 : __ldcg(counts_of(d.ll, before) + choice.x);
    return row;
}

/* Where choice k of the source's token t is here, for the combine; row -1: nowhere. */
__device__ void note_origin(const cuda_ll_dispatch &d, const ll_call &call, int source, int t, int k, int64_t row)
{
    if (k < d.ll.topk)
        origins_of(d.ll, call, source, t)[k] = (int32_t)row;
    if (row >= 0 && d.recv_source)
        d.recv_source[row] = t;
}

/* Waits for one slot and packs a part of what is in it. By all lanes; false: leave. */
__device__ bool receive_slot(const cuda_ll_dispatch &d, const ll_call &call, int source, int t, int part, int parts,
                             int lane)
{
    const cuda_ll &ll = d.ll;
    int me = ll.waits.rank, vectors = ll.hidden / (d.fp8 ? 16 : 8);
    int share = (vectors / parts + WARP - 1) / WARP * WARP; /* whole rounds of the warp */
    int begin = part * share, end = part == parts - 1 ? vectors : min(begin + share, vectors);
    const unsigned char *slot = slot_of(ll, me, source, t);
    const uint64_t *flag = slot_flag_of(ll, me, source, t);
    uint64_t value = load_acquire(flag); /* by all lanes, so that each may read behind it */
    int2 choice = make_int2(-1, 0);
    int64_t row = 0;
    uint32_t votes;
    uint4 v[AHEAD];

    if (!__all_sync(ALL_LANES, value >> 1 >= call.number)) {
        bool here = lane || wait_until(ll.waits, flag, call.number << 1, source, ll.waits.done_phase);

        if (!__all_sync(ALL_LANES, here))
            return false;
        value = load_acquire(flag);
    }
    if (!(value & 1)) {
        if (part == 0)
            note_origin(d, call, source, t, lane, -1);
        return true;
    }
    /* The row is on its way while it is found out where it goes. */
    load_row(d, slot, begin + lane, end, v);
    if (lane < ll.topk)
        choice = __ldcg(reinterpret_cast<const int2 *>(slot) + lane);
    /* Of the group: only those of this rank are packed here. */
    choice.x -= me * ll.n_local;
    choice.x = choice.x < ll.n_local ? choice.x : -1;
    votes = __ballot_sync(ALL_LANES, choice.x >= 0);
    if (choice.x >= 0)
        row = place_of(d, call, source, choice);
    if (part == 0)
        note_origin(d, call, source, t, lane, choice.x >= 0 ? row : -1);
    if (d.fp8 && part == parts - 1)
        pack_scales(d, slot, votes, row, lane);
    pack_row(d, slot, votes, row, begin, end, lane, v);
    return true;
}

__device__ void receive(const cuda_ll_dispatch &d, ll_call &call)
{
    const cuda_ll &ll = d.ll;
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    int n = ll.waits.nranks, lane = (int)threadIdx.x % WARP;
    /* The last block tells the caller how many rows there are, and of many it does nothing else. */
    bool tells = blockIdx.x == gridDim.x - 1, many = gridDim.x > FEW_BLOCKS;
    int blocks = (int)gridDim.x - many, warps = blocks * (int)(blockDim.x / WARP);
    /* Where slots are few, several warps share one, so that all multiprocessors have something to do. */
    int parts = max(1, min(CUDA_LL_MOST_PARTS, warps / (n * ll.max_tokens)));
    /* Neighbouring slots to different multiprocessors. */
    int first = (int)(threadIdx.x / WARP) * blocks + (int)blockIdx.x;

    if (!ll_meet(ll, call, ll.masking ? mine->sent : mine->ahead, call.number, CUDA_LL_TO_RECEIVE, ll.waits.done_phase))
        return;
    if (tells) {
        report_counts(d, call);
        compare_formats(d, call);
    }
    for (int64_t i = first; !(tells && many) && i < (int64_t)n * ll.max_tokens * parts; i += warps) {
        int64_t slot = i / parts;
        int source = (int)(slot % n);

        if (!is_masked(call, source) && !receive_slot(d, call, source, (int)(slot / n), (int)(i % parts), parts, lane))
            break;
    }
}

__global__ void __launch_bounds__(CUDA_LL_THREADS, 1) ll_dispatch_kernel(const __grid_constant__ cuda_ll_dispatch d)
{
    extern __shared__ __align__(128) unsigned char image[]; /* of a slot */
    __shared__ int32_t bins[EP_MAX_EXPERTS];
    __shared__ choices c;
    const cuda_ll &ll = d.ll;
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    ll_call call = {mine->call + 1, mine->dispatches + 1, mine->mask};

    if (d.phases & CUDA_LL_SEND) {
        ahead a = fetch_ahead(d, (int)blockIdx.x);
        bool good;

        ll_begin(ll);
        for (int i = (int)threadIdx.x; i < EP_MAX_EXPERTS / 4; i += (int)blockDim.x)
            reinterpret_cast<uint32_t *>(c.choice_of)[i] = 0;
        __syncthreads();
        /* All that can be done before the ranks have met. */
        if ((int)gridDim.x - 1 - (int)blockIdx.x < counting_blocks(d))
            count_rows(d, bins);
        good = routing_is_valid(d);
        if ((int)blockIdx.x < d.n_tokens)
            make_image(d, call, (int)blockIdx.x, a, c, image);
        if (!__syncthreads_and(good)) {
            ll_refuse(ll, d.queued, ll.waits.ready_phase);
            return;
        }
        if (!ll_meet(ll, call, mine->completed, mine->last_dispatch, CUDA_LL_TO_SEND, ll.waits.ready_phase))
            return;
        send(d, call, c, bins, image);
    }
    if (!(d.phases & CUDA_LL_RECEIVE))
        return;
    receive(d, call);
    ll_end(ll, call, false);
}

} /* namespace */

cudaError_t cuda_launch_ll_dispatch(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream)
{
    size_t image = (size_t)dispatch->ll.row_at + (size_t)dispatch->ll.hidden * (dispatch->fp8 ? 1 : 2);

    ll_dispatch_kernel<<<(unsigned)blocks, CUDA_LL_THREADS, image, stream>>>(*dispatch);
    return cudaGetLastError();
}

cudaError_t cuda_ll_dispatch_load(int shared_bytes)
{
    /* Of which the kernel declares a part itself. */
    return cudaFuncSetAttribute(ll_dispatch_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                shared_bytes - (int)(sizeof(choices) + EP_MAX_EXPERTS * sizeof(int32_t)) - 256);
}
