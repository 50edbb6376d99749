/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_arrival.cuh - the receiving half of a low-latency dispatch: warps wait for the row counts, then pack the slots as
 * they arrive. Also what the sending half shares with it: teams of threads, and the addresses of counts and slots.
 */
#ifndef EP_CUDA_LL_ARRIVAL_CUH
#define EP_CUDA_LL_ARRIVAL_CUH

#include "backend/cuda/ll_mask.cuh"

#include <epkit/types.h>

#define FEW_BLOCKS 8
#define VECTORS_IN_FLIGHT 8 /* loads in flight per lane */

/* Whole warps of a block that work together, with a named barrier of their own. */
struct team {
    int thread, threads;
    int barrier; /* TEAM_... */
};

enum { TEAM_ALL /* the barrier of __syncthreads() */, TEAM_SENDS, TEAM_RECEIVES, TEAM_JOINS };

__device__ __forceinline__ team whole_block()
{
    return {(int)threadIdx.x, (int)blockDim.x, TEAM_ALL};
}

/* Called by whole warps, whose lanes converge before each of these. */
__device__ __forceinline__ void team_sync(const team &t)
{
    __syncwarp();
    asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(t.barrier), "r"(t.threads) : "memory");
}

/* Arrives at the barrier of a team without waiting. */
__device__ __forceinline__ void team_arrive(const team &t)
{
    __syncwarp();
    asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(t.barrier), "r"(t.threads) : "memory");
}

__device__ __forceinline__ bool team_and(const team &t, bool value)
{
    uint32_t all;

    __syncwarp();
    asm volatile("{\n\t.reg .pred p, q;\n\t"
                 "setp.ne.u32 p, %1, 0;\n\t"
                 "barrier.cta.red.and.aligned.pred q, %2, %3, p;\n\t"
                 "selp.u32 %0, 1, 0, q;\n\t}"
                 : "=r"(all)
                 : "r"((uint32_t)value), "r"(t.barrier), "r"(t.threads)
                 : "memory");
    return all;
}

/* The row counts of the source for each expert of `rank`, then its format; each word carries the number of the call. */
__device__ inline uint64_t *counts_of(const cuda_ll &ll, const ll_call &call, int rank, int source)
{
    int64_t at = (call.dispatch & 1) * (int64_t)ll.waits.nranks + source;

    return ll_at<uint64_t>(ll, rank, source, ll.counts_at) + at * (ll.n_local + 1);
}

__device__ inline unsigned char *slot_of(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<unsigned char>(ll, rank, source, ll.slots_at) +
           ((int64_t)source * ll.segment_tokens + t) * ll.slot_bytes;
}

__device__ inline uint64_t *slot_flag_of(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<uint64_t>(ll, rank, source, ll.slot_flag_at) + (int64_t)source * ll.segment_tokens + t;
}

/* Shared by the receiving warps of a block. */
struct receive_state {
    int32_t before[EP_MAX_EXPERTS]; /* [source][local expert] rows of the lower sources */
    int next;                       /* the next part of a slot that no warp of the block has claimed */
    bool active;                    /* false: there is nothing to receive here */
};

/*
 * Waits for the row count of the source for local expert i; i = n_local: for its format. Returns false if the kernel
 * must exit.
 */
__device__ inline bool receive_count(const cuda_ll &ll, const ll_call &call, int source, int i, int32_t &count)
{
    const uint64_t *word = counts_of(ll, call, ll.waits.rank, source) + i;
    uint64_t value;

    if (!await_word(ll, call, word, source, ll.waits.done_phase))
        return false;
    value = *(const volatile uint64_t *)word;
    count = (int32_t)(uint32_t)value;
    return true;
}

/* Do all ranks use the same format? Slots are large enough for any format, so rows may already be in flight. */
__device__ inline bool compare_formats(const cuda_ll_dispatch &d, const ll_call &call, int source)
{
    int32_t format;

    if (source >= d.ll.waits.nranks || is_masked(call, source))
        return true;
    if (!receive_count(d.ll, call, source, d.ll.n_local, format))
        return false;
    if (format != d.format)
        set_failure(d.ll.waits, CUDA_FAILED_MISMATCH, source, d.ll.waits.done_phase);
    return format == d.format;
}

/*
 * Computes the prefix sums of the row counts over the sources; the block that `reports` writes the caller's outputs.
 * Returns false if the kernel must exit.
 */
__device__ inline bool sum_counts(const cuda_ll_dispatch &d, const ll_call &call, int32_t *before, bool reports,
                                  const team &by)
{
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks;
    bool ok;

    /* With as many ranks as threads, no thread is left for this check alone. */
    if (LL_NODES)
        ok = (by.thread || may_begin(ll.waits, ll.waits.done_phase)) &&
             (!reports || compare_formats(d, call, by.thread));
    else
        ok = by.thread == by.threads - 1 ? may_begin(ll.waits, ll.waits.done_phase)
                                         : !reports || compare_formats(d, call, by.thread);

    for (int i = by.thread; i < n * ll.n_local && ok; i += by.threads) {
        before[i] = 0;
        if (!is_masked(call, i / ll.n_local))
            ok = receive_count(ll, call, i / ll.n_local, i % ll.n_local, before[i]);
        /* The count is used as an offset of rows: a source has at most one row per token. */
        if (ok && (uint32_t)before[i] > (uint32_t)ll.max_tokens) {
            set_failure(ll.waits, CUDA_FAILED_MISMATCH, i / ll.n_local, ll.waits.done_phase);
            ok = false;
        }
    }
    if (!team_and(by, ok))
        return false;
    for (int expert = by.thread; expert < ll.n_local; expert += by.threads) {
        int sum = 0;

        for (int source = 0; source < n; source++) {
            int count = before[source * ll.n_local + expert];

            before[source * ll.n_local + expert] = sum;
            if (reports && d.recv_range)
                d.recv_range[(int64_t)expert * n + source] = (int64_t)sum << 32 | (uint32_t)count;
            sum += count;
        }
        if (reports)
            d.recv_count[expert] = sum;
        if (reports && d.stats_add)
            d.stats_add[expert] += sum;
    }
    return true;
}

/* Loads vectors of the row in a slot, every WARP-th one from `base` on. */
__device__ inline void load_row(const cuda_ll_dispatch &d, const unsigned char *slot, int base, int end,
                                uint4 (&v)[VECTORS_IN_FLIGHT])
{
    const uint4 *from = reinterpret_cast<const uint4 *>(slot + d.ll.row_at);

#pragma unroll
    for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
        if (base + i * WARP < end)
            v[i] = load_peer(from + base + i * WARP);
}

/*
 * Stores vectors begin .. end of the row to the `row` of each lane in `votes`. Called by all lanes; `v` holds the first
 * vectors.
 */
__device__ inline void pack_row(const cuda_ll_dispatch &d, const unsigned char *slot, uint32_t votes, int64_t row,
                                int begin, int end, int lane, uint4 (&v)[VECTORS_IN_FLIGHT])
{
    int n = d.row_vectors;

    for (int base = begin + lane; base - lane < end; base += VECTORS_IN_FLIGHT * WARP) {
        if (base != begin + lane)
            load_row(d, slot, base, end, v);
        for (uint32_t left = votes; left; left &= left - 1) {
            int64_t to = __shfl_sync(ALL_LANES, row, __ffs((int)left) - 1);
            uint4 *out = reinterpret_cast<uint4 *>(d.recv_x) + to * n;

#pragma unroll
            for (int i = 0; i < VECTORS_IN_FLIGHT; i++)
                if (base + i * WARP < end)
                    out[base + i * WARP] = v[i];
        }
    }
}

/* Offset of the scales of a row of an expert. */
__device__ __forceinline__ int64_t scales_of(const cuda_ll_dispatch &d, int expert, int64_t row)
{
    int64_t rows = (int64_t)d.ll.waits.nranks * d.ll.max_tokens, at = row - expert * rows;

    if (d.swizzled)
        return (expert * ((rows + 127) / 128) + at / 128) * d.scale_words * 128 + at % 32 * 4 + at % 128 / 32;
    return expert * rows * d.scale_words + at * d.scale_stride_token;
}

/*
 * Stores the scales of a row to each lane in `votes`; they are loaded once. `at`: scales_of() for this lane. Called by
 * all lanes.
 */
__device__ inline void pack_scales(const cuda_ll_dispatch &d, const unsigned char *slot, uint32_t votes, int64_t at,
                                   int lane)
{
    const uint32_t *from = reinterpret_cast<const uint32_t *>(slot + d.ll.scales_at);
    int words = d.scale_words;

#pragma unroll 2
    for (int i = lane; i - lane < words; i += WARP) {
        uint32_t word = i < words ? __ldcg(from + i) : 0;

        for (uint32_t left = votes; left; left &= left - 1) {
            int64_t to = __shfl_sync(ALL_LANES, at, __ffs((int)left) - 1);

            if (i < words)
                d.recv_scales[to + i * d.scale_stride_block] = word;
        }
    }
}

/* The receive row of a slot's choice. */
__device__ inline int64_t row_of(const cuda_ll_dispatch &d, const int32_t *before, int source, int2 choice)
{
    return (int64_t)choice.x * d.ll.waits.nranks * d.ll.max_tokens + before[source * d.ll.n_local + choice.x] +
           choice.y;
}

/* Records the receive row of choice k of the source's token t for the combine; -1: none. */
__device__ inline void set_origin(const cuda_ll_dispatch &d, const ll_call &call, int source, int t, int k, int64_t row)
{
    if (k < d.ll.segment_topk)
        origins_of(d.ll, call, source, t)[k] = (int32_t)row;
    if (row >= 0 && d.recv_source)
        d.recv_source[row] = t;
}

/* Waits for a slot and packs a part of it. Called by all lanes. Returns false if the kernel must exit. */
__device__ inline bool receive_slot(const cuda_ll_dispatch &d, const ll_call &call, const int32_t *before, int source,
                                    int t, int part, int parts, int lane)
{
    const cuda_ll &ll = d.ll;
    int me = ll.waits.rank, vectors = d.row_vectors;
    int share = (vectors / parts + WARP - 1) / WARP * WARP; /* a multiple of the warp size */
    int begin = part * share, end = part == parts - 1 ? vectors : min(begin + share, vectors);
    const unsigned char *slot = slot_of(ll, me, source, t);
    const uint64_t *flag = slot_flag_of(ll, me, source, t);
    uint64_t value = load_acquire(flag); /* by all lanes, so that each may read what the flag covers */
    int2 choice = make_int2(-1, 0);
    int64_t row = 0;
    uint32_t votes;
    uint4 v[VECTORS_IN_FLIGHT];

    if (!__all_sync(ALL_LANES, value >> 1 >= call.number)) {
        bool here = lane || ll_wait_until(ll, flag, call.number << 1, source, ll.waits.done_phase);

        if (!__all_sync(ALL_LANES, here))
            return false;
        value = load_acquire(flag);
    }
    if (!(value & 1)) {
        if (part == 0)
            set_origin(d, call, source, t, lane, -1);
        return true;
    }
    /* Load the row while its destinations are computed. */
    load_row(d, slot, begin + lane, end, v);
    if (lane < ll.segment_topk)
        choice = __ldcg(reinterpret_cast<const int2 *>(slot) + lane);
    /* Experts of the group to those of this rank; the others are packed elsewhere. */
    choice.x -= me * ll.n_local;
    choice.x = choice.x < ll.n_local ? choice.x : -1;
    if (choice.x >= 0 && (uint32_t)choice.y >= (uint32_t)ll.max_tokens) {
        set_failure(ll.waits, CUDA_FAILED_MISMATCH, source, ll.waits.done_phase);
        choice.x = -1;
    }
    votes = __ballot_sync(ALL_LANES, choice.x >= 0);
    if (choice.x >= 0)
        row = row_of(d, before, source, choice);
    if (part == 0)
        set_origin(d, call, source, t, lane, choice.x >= 0 ? row : -1);
    if (d.block && part == parts - 1)
        pack_scales(d, slot, votes, choice.x >= 0 ? scales_of(d, choice.x, row) : 0, lane);
    pack_row(d, slot, votes, row, begin, end, lane, v);
    return true;
}

/* With many blocks the last one only reports the row counts to the caller. */
__device__ __forceinline__ bool has_report_block()
{
    return gridDim.x > FEW_BLOCKS;
}

/*
 * Without masking: adds the time until all slots of each rank were here. If a slot is here when it is first checked,
 * its time is not known, but then it was not the last. Called by a team. Returns false if the kernel must exit.
 */
__device__ inline bool time_slots(const cuda_ll_dispatch &d, const ll_call &call, uint64_t begin, const team &by)
{
    __shared__ unsigned long long longest[LL_RANKS];
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks, source = by.thread % n;
    bool ok = true;

    if (by.thread < n)
        longest[by.thread] = 0;
    team_sync(by);
    for (int t = by.thread / n; t < ll.max_tokens && by.thread < by.threads / n * n && ok; t += by.threads / n) {
        const uint64_t *flag = slot_flag_of(ll, ll.waits.rank, source, t);

        if (is_masked(call, source) || load_acquire(flag) >> 1 >= call.number)
            continue;
        ok = ll_wait_until(ll, flag, call.number << 1, source, ll.waits.done_phase);
        atomicMax(&longest[source], (unsigned long long)(global_ns() - begin));
    }
    ok = team_and(by, ok);
    if (by.thread < n && by.thread != ll.waits.rank && ok)
        d.wait_added[by.thread] += (int64_t)longest[by.thread];
    return ok;
}

/* Waits for the row counts. With masking, called by all threads, and waits for the rows of all ranks first. */
__device__ inline void await_counts(const cuda_ll_dispatch &d, ll_call &call, receive_state &state, const team &by)
{
    const cuda_ll &ll = d.ll;
    bool reports = blockIdx.x == gridDim.x - 1;
    uint64_t begin = d.wait_added ? global_ns() : 0;
    bool ok = !ll.masking || ll_sync(ll, call, &ll_wire_segment::rows_ready, call.number, CUDA_LL_SYNC_RECEIVE,
                                     ll.waits.done_phase, d.wait_added);

    /* Before the counts, which arrive with the rows: afterwards there would be nothing to wait for. */
    if (ok && reports && d.wait_added && !ll.masking)
        ok = time_slots(d, call, begin, by);
    ok = ok && sum_counts(d, call, state.before, reports, by);
    if (by.thread == 0) {
        state.next = 0;
        state.active = ok && !(reports && has_report_block());
    }
    team_sync(by);
}

/* Claims and packs slots until none is left. Called by a warp. */
__device__ inline void receive(const cuda_ll_dispatch &d, const ll_call &call, receive_state &state)
{
    const cuda_ll &ll = d.ll;
    int n = ll.waits.nranks, lane = (int)threadIdx.x % WARP;
    int blocks = (int)gridDim.x - has_report_block(), warps = blocks * (int)(blockDim.x / WARP);
    /* Where slots are few, several warps share one, so that all SMs have work. */
    int parts = max(1, min(LL_WIRE_MAX_PARTS, warps / (n * ll.max_tokens)));

    for (;;) {
        int claim = lane ? 0 : atomicAdd(&state.next, 1);
        /* Neighbouring slots go to different SMs. */
        int64_t i = (int64_t)__shfl_sync(ALL_LANES, claim, 0) * blocks + blockIdx.x, slot = i / parts;
        int source = (int)(slot % n);

        if (i >= (int64_t)n * ll.max_tokens * parts)
            break;
        if (!is_masked(call, source) &&
            !receive_slot(d, call, state.before, source, (int)(slot / n), (int)(i % parts), parts, lane))
            break;
    }
}

#endif
