/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_sum.cuh - the receiving half of a low-latency combine: each block claims a token, waits for its rows and adds them
 * up. Also what the sending half shares with it.
 */
#ifndef EP_CUDA_LL_SUM_CUH
#define EP_CUDA_LL_SUM_CUH

#include "backend/cuda/ll_mask.cuh"
#include "backend/cuda/sums.cuh"

#define ROWS_IN_FLIGHT 4    /* rows loaded at once by a thread, */
#define VECTORS_IN_FLIGHT 2 /* and vectors of each */

/* The routing of the dispatch that the combine answers. */
__device__ __forceinline__ const int32_t *index_of(const cuda_ll &ll, const ll_call &call)
{
    return ll_own<int32_t>(ll, ll.index_at) + (call.dispatch & 1) * ((int64_t)ll.segment_tokens * ll.segment_topk);
}

/* The entry in a segment of choice i of this rank's tokens. */
__device__ __forceinline__ int entry_of(const cuda_ll &ll, int i)
{
    return ll.topk == ll.segment_topk ? i : i + i / ll.topk * (ll.segment_topk - ll.topk);
}

__device__ inline void add_weighted(float (&sum)[8], uint4 v, float weight)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}

struct terms {
    const uint4 *row[CUDA_LL_MAX_TOPK]; /* the rows of a token */
    float weight[CUDA_LL_MAX_TOPK];
    int n;
};

/*
 * The choices of the lane's token on the same rank as the lane's own choice; 0 where that is not valid. Called by all
 * lanes.
 */
__device__ inline uint32_t same_rank(const cuda_ll &ll, int rank)
{
    uint32_t same = 0;

    for (int i = 0; i < ll.topk; i++)
        same |= (uint32_t)(__shfl_sync(ALL_LANES, rank, i) == rank) << i;
    return rank < 0 ? 0 : same;
}

/*
 * Waits for the rows of token t, one warp per part, and lists them in the order of their first kept choices. Called by
 * all threads. Returns false if the kernel must exit. A partial sum gets two deadlines: its sender may itself be
 * waiting for the weights of another rank, and must report that rank first.
 */
__device__ inline bool gather_terms(const cuda_ll_combine &c, const ll_call &call, int t, terms &terms)
{
    const cuda_ll &ll = c.ll;
    int part = (int)threadIdx.x / WARP, k = (int)threadIdx.x % WARP, me = ll.waits.rank;
    int64_t given = (int64_t)t * ll.topk + k, entry = (int64_t)t * ll.segment_topk + k;
    bool ok = true;

    if (part < ll.parts) {
        int choice = k < ll.topk ? (int)read_choice(c.topk_idx, c.idx64, given) : -1;
        /*
         * That of the dispatch, which differs only where the combine omits it, or after a refused call or where the
         * caller overwrote it between the two halves: then it must not be an index of ranks.
         */
        bool valid = (uint32_t)choice < (uint32_t)(ll.n_local * ll.waits.nranks);
        int expert = !valid && k < ll.topk ? __ldg(index_of(ll, call) + entry) : choice;
        int rank = expert < 0 || is_masked(call, expert / ll.n_local) ? -1 : expert / ll.n_local;
        uint32_t group = ll.no_partial_reduce ? (uint32_t)(rank >= 0) << k : same_rank(ll, rank);
        uint32_t added = group & __ballot_sync(ALL_LANES, choice >= 0);
        uint32_t votes = __ballot_sync(ALL_LANES, added && __ffs((int)added) - 1 == k);

        if (votes >> k & 1 && part == 0) {
            int at = __popc(votes & ((1u << k) - 1)), sent_as = __ffs((int)group) - 1;

            terms.row[at] = ll_at<uint4>(ll, me, rank, ll.rows_at) + (entry - k + sent_as) * (ll.hidden / 8);
            /* A partial sum includes the weights already. */
            terms.weight[at] = added & (added - 1) ? 1.0f : __ldg(c.weights + given);
        }
        if (group && __ffs((int)group) - 1 == k)
            ok = ll_wait_until(ll, ll_at<uint64_t>(ll, me, rank, ll.row_flag_at) + entry * ll.parts + part, call.number,
                               rank, ll.waits.done_phase, ll.no_partial_reduce ? 1 : 2);
        if (threadIdx.x == 0)
            terms.n = __popc(votes);
    }
    return __syncthreads_and(ok);
}

/* Writes the sums of vectors i, i + blockDim.x ... */
__device__ inline void sum_vectors(const terms &terms, int i, int end, uint4 *out)
{
    float sum[VECTORS_IN_FLIGHT][8] = {};

    for (int first = 0; first < terms.n; first += ROWS_IN_FLIGHT) {
        uint4 v[ROWS_IN_FLIGHT][VECTORS_IN_FLIGHT];

#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++)
#pragma unroll
            for (int k = 0; k < VECTORS_IN_FLIGHT; k++)
                if (first + j < terms.n && i + k * (int)blockDim.x < end)
                    v[j][k] = load_peer(terms.row[first + j] + i + k * (int)blockDim.x);
#pragma unroll
        for (int j = 0; j < ROWS_IN_FLIGHT; j++)
#pragma unroll
            for (int k = 0; k < VECTORS_IN_FLIGHT; k++)
                if (first + j < terms.n)
                    add_weighted(sum[k], v[j][k], terms.weight[first + j]);
    }
#pragma unroll
    for (int k = 0; k < VECTORS_IN_FLIGHT; k++)
        if (i + k * (int)blockDim.x < end)
            out[i + k * (int)blockDim.x] = round_vector(sum[k]);
}

/* The rank whose row is stored at choice k of a token; -1: none. */
__device__ inline int rank_of_row(const cuda_ll &ll, const int32_t *index, int k)
{
    int rank = index[k] < 0 ? -1 : index[k] / ll.n_local;

    for (int i = 0; i < k && rank >= 0 && !ll.no_partial_reduce; i++)
        if (index[i] >= 0 && index[i] / ll.n_local == rank)
            return -1;
    return rank;
}

/*
 * Without masking: adds the time until all rows of each rank were here. If a row is here when it is first checked, its
 * time is not known, but then it was not the last. Called by all threads of a block. Returns false if the kernel must
 * exit.
 */
__device__ inline bool time_rows(const cuda_ll_combine &c, const ll_call &call)
{
    __shared__ unsigned long long longest[LL_RANKS];
    const cuda_ll &ll = c.ll;
    const int32_t *index = index_of(ll, call);
    uint64_t begin = global_ns();
    int me = ll.waits.rank, i = (int)threadIdx.x;
    bool ok = true;

    if (i < LL_RANKS)
        longest[i] = 0;
    __syncthreads();
    for (int at = i; at < c.n_tokens * ll.topk * ll.parts && ok; at += (int)blockDim.x) {
        int choice = at / ll.parts, k = choice % ll.topk, entry = entry_of(ll, choice);
        int rank = rank_of_row(ll, index + entry - k, k);
        const uint64_t *flag =
            ll_at<uint64_t>(ll, me, rank < 0 ? me : rank, ll.row_flag_at) + entry * ll.parts + at % ll.parts;

        if (rank < 0 || is_masked(call, rank) || load_acquire(flag) >= call.number)
            continue;
        ok = ll_wait_until(ll, flag, call.number, rank, ll.waits.done_phase, ll.no_partial_reduce ? 1 : 2);
        atomicMax(&longest[rank], (unsigned long long)(global_ns() - begin));
    }
    ok = __syncthreads_and(ok);
    if (i < ll.waits.nranks && i != me && ok)
        c.wait_added[i] += (int64_t)longest[i];
    return ok;
}

__device__ inline void receive(const cuda_ll_combine &c, ll_call &call, terms &terms)
{
    const cuda_ll &ll = c.ll;
    int vectors = ll.hidden / 8;

    if (ll.masking && !ll_sync(ll, call, &ll_wire_segment::rows_ready, call.number, CUDA_LL_SYNC_RECEIVE,
                               ll.waits.done_phase, c.wait_added))
        return;
    if (c.wait_added && !ll.masking && blockIdx.x == 0 && !time_rows(c, call))
        return;
    for (int t = (int)blockIdx.x; t < c.n_tokens; t += (int)gridDim.x) {
        uint4 *out = reinterpret_cast<uint4 *>(c.out) + (int64_t)t * vectors;

        if (!gather_terms(c, call, t, terms))
            return;
        for (int i = (int)threadIdx.x; i < vectors; i += VECTORS_IN_FLIGHT * (int)blockDim.x)
            sum_vectors(terms, i, vectors, out);
        __syncthreads();
    }
}

#endif
