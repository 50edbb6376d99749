/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine. Sending: a warp takes a row that an expert here has made, and the copy engine brings it through
 * shared memory to where its token's owner adds up, in the place of that choice. Receiving: a block takes a token,
 * waits for its rows, and adds them up in the order of the choices.
 */
#include "backend/cuda/lowlatency.cuh"
#include "backend/cuda/sums.cuh"

#define TERMS 8 /* rows that a thread loads at once */
#define SENDERS                                                                                                        \
    12 /* warps of a block that send, each with room for a chunk: half more than 128 tokens and top-8 need */
#define CHUNK 14336 /* bytes of a row at once: a row of 7168 */

namespace
{

/*
 * Is this thread's part of the routing that of the dispatch? All threads of each block together look at everything, so
 * that all blocks come to the same answer.
 */
__device__ bool answers_dispatch(const cuda_ll_combine &c, const ll_call &call)
{
    const cuda_ll &ll = c.ll;
    const int32_t *index =
        ll_at<int32_t>(ll, ll.waits.rank, ll.index_at) + (call.dispatch & 1) * ((int64_t)ll.max_tokens * ll.topk);
    bool same = true;

#pragma unroll 2
    for (int64_t i = threadIdx.x; i < (int64_t)c.n_tokens * ll.topk; i += blockDim.x)
        same &= read_choice(c.topk_idx, c.wide, i) == index[i];
    return same;
}

__device__ void load_totals(const cuda_ll &ll, const ll_call &call, int32_t *start)
{
    const int32_t *totals = ll_at<int32_t>(ll, ll.waits.rank, ll.total_at) + (call.dispatch & 1) * ll.n_local;

    for (int i = (int)threadIdx.x; i < ll.n_local; i += (int)blockDim.x)
        start[i] = totals[i];
}

/* In place of the totals: start[e], the rows of the experts before e; start[L] all. By all threads. */
__device__ void add_up_totals(const cuda_ll &ll, int32_t *start)
{
    int lane = (int)threadIdx.x, sum = 0;

    __syncthreads();
    if (lane < WARP) {
        for (int first = 0; first < ll.n_local; first += WARP) {
            int mine = first + lane < ll.n_local ? start[first + lane] : 0, upto = mine;

            for (int distance = 1; distance < WARP; distance *= 2) {
                int other = __shfl_up_sync(ALL_LANES, upto, distance);

                upto += lane >= distance ? other : 0;
            }
            if (first + lane < ll.n_local)
                start[first + lane] = sum + upto - mine;
            sum += __shfl_sync(ALL_LANES, upto, WARP - 1);
        }
        if (lane == 0)
            start[ll.n_local] = sum;
    }
    __syncthreads();
}

/* The expert of row i: the last one that begins at or before it. */
__device__ int expert_of(const int32_t *start, int n, int i)
{
    int low = 0, high = n;

    while (high - low > 1) {
        int middle = (low + high) / 2;

        if (start[middle] <= i)
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* A warp's way through shared memory. */
struct passage {
    unsigned char *chunk;
    uint64_t *full;
    uint32_t parity;
};

/*
 * A rank that slept in the middle of a call may find that `owner` has gone on without it, and that the row's place is
 * another rank's by now. Looked at right before each store, so that at most what is on its way then goes astray.
 */
__device__ bool has_masked_us(const cuda_ll &ll, int owner)
{
    return ll.masking && *(const volatile uint32_t *)&ll.peer[ll.waits.rank]->masked_by[owner];
}

/* The row is there. */
__device__ void flag_row(const cuda_ll &ll, const ll_call &call, int owner, uint64_t *flag)
{
    if (!is_masked(call, owner) && !has_masked_us(ll, owner))
        store_release(flag, call.number);
}

/* Row i of those received goes back. By one lane. */
__device__ void return_row(const cuda_ll_combine &c, const ll_call &call, const int32_t *start, int i, passage &through)
{
    const cuda_ll &ll = c.ll;
    int expert = expert_of(start, ll.n_local, i), owner = 0;
    int64_t rows = (int64_t)ll.waits.nranks * ll.max_tokens, row = expert * rows + (i - start[expert]), place = 0;
    int64_t bytes = (int64_t)ll.hidden * 2;
    const unsigned char *from = static_cast<const unsigned char *>(c.x) + row * bytes;
    uint64_t origin = ll_at<uint64_t>(ll, ll.waits.rank, ll.origin_at)[(call.dispatch & 1) * (rows * ll.n_local) + row];

    for (int64_t at = 0; at < bytes; at += CHUNK) {
        uint32_t length = (uint32_t)(bytes - at < CHUNK ? bytes - at : CHUNK);

        /* On its way before it is known where to. */
        barrier_expect(through.full, length);
        bulk_load(through.chunk, from + at, length, through.full);
        owner = (int)(origin >> 48);
        place = (int64_t)(uint32_t)origin * ll.topk + (int64_t)(origin >> 32 & 0xffff);
        barrier_wait(through.full, through.parity);
        through.parity ^= 1;
        if (is_masked(call, owner) || has_masked_us(ll, owner))
            continue;
        bulk_store(ll_at<unsigned char>(ll, owner, ll.rows_at) + place * bytes + at, through.chunk, length);
        bulk_commit();
        bulk_wait_all();
    }
    flag_row(ll, call, owner, ll_at<uint64_t>(ll, owner, ll.row_flag_at) + place);
}

__device__ void send(const cuda_ll_combine &c, const ll_call &call, int32_t *start, unsigned char *chunks,
                     uint64_t *barriers)
{
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    passage through = {chunks + (size_t)warp * CHUNK, barriers + warp, 0};

    if (warp < SENDERS && lane == 0) {
        barrier_init(through.full);
        barriers_publish();
        /* What the experts' kernels have written may be read by the copy engine now. */
        asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    add_up_totals(c.ll, start);
    /* Neighbouring rows to different multiprocessors. */
    if (warp < SENDERS && lane == 0)
        for (int i = warp * (int)gridDim.x + (int)blockIdx.x; i < start[c.ll.n_local]; i += (int)gridDim.x * SENDERS)
            return_row(c, call, start, i, through);
    __syncwarp();
    ll_sent(c.ll, call);
}

/* --- receiving --------------------------------------------------------------------------------------------------- */

struct terms {
    const uint4 *row[CUDA_LL_MAX_TOPK]; /* those that a token has */
    float weight[CUDA_LL_MAX_TOPK];
    int n;
};

/* Waits for the rows of token t, and lists them in the order of the choices. By all threads; false: leave. */
__device__ bool gather_terms(const cuda_ll_combine &c, const ll_call &call, int t, terms &terms)
{
    const cuda_ll &ll = c.ll;
    int k = (int)threadIdx.x, me = ll.waits.rank;
    int64_t place = (int64_t)t * ll.topk + k;
    bool sound = true;

    if (k < WARP) {
        int expert = k < ll.topk ? (int)read_choice(c.topk_idx, c.wide, place) : -1;
        bool there = expert >= 0 && !is_masked(call, expert / ll.n_local);
        uint32_t votes = __ballot_sync(ALL_LANES, there);

        if (there) {
            int at = __popc(votes & ((1u << k) - 1));

            terms.row[at] = ll_at<uint4>(ll, me, ll.rows_at) + place * (ll.hidden / 8);
            terms.weight[at] = __ldg(c.weights + place);
            sound = wait_until(ll.waits, ll_at<uint64_t>(ll, me, ll.row_flag_at) + place, call.number,
                               expert / ll.n_local, ll.waits.done_phase);
        }
        if (k == 0)
            terms.n = __popc(votes);
    }
    return __syncthreads_and(sound);
}

__device__ void add_weighted(float (&sum)[8], uint4 v, float weight)
{
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};

#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum[2 * i] = __fmaf_rn(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
        sum[2 * i + 1] = __fmaf_rn(weight, __uint_as_float(words[i] & 0xffff0000u), sum[2 * i + 1]);
    }
}

__device__ uint4 sum_vector(const terms &terms, int i)
{
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};

    for (int first = 0; first < terms.n; first += TERMS) {
        uint4 v[TERMS];

#pragma unroll
        for (int j = 0; j < TERMS; j++)
            if (first + j < terms.n)
                v[j] = load_far(terms.row[first + j] + i);
#pragma unroll
        for (int j = 0; j < TERMS; j++)
            if (first + j < terms.n)
                add_weighted(sum, v[j], terms.weight[first + j]);
    }
    return round_vector(sum);
}

__device__ void receive(const cuda_ll_combine &c, ll_call &call, terms &terms)
{
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    int vectors = ll.hidden / 8;

    if (ll.masking && !ll_meet(ll, call, mine->sent, call.number, 1, ll.waits.done_phase))
        return;
    for (int t = (int)blockIdx.x; t < c.n_tokens; t += (int)gridDim.x) {
        uint4 *out = reinterpret_cast<uint4 *>(c.out) + (int64_t)t * vectors;

        if (!gather_terms(c, call, t, terms))
            return;
        for (int i = (int)threadIdx.x; i < vectors; i += (int)blockDim.x)
            out[i] = sum_vector(terms, i);
        __syncthreads();
    }
}

__global__ void __launch_bounds__(CUDA_LL_THREADS, 1) ll_combine_kernel(const __grid_constant__ cuda_ll_combine c)
{
    extern __shared__ __align__(128) unsigned char chunks[];
    __shared__ int32_t start[EP_MAX_EXPERTS + 1];
    __shared__ uint64_t barriers[SENDERS];
    __shared__ terms terms;
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    ll_call call = {mine->call + 1, mine->combines + 1, mine->mask};

    if (c.phases & CUDA_LL_SEND) {
        bool good;

        ll_begin(ll);
        load_totals(ll, call, start);
        good = answers_dispatch(c, call);
        if (!ll_meet(ll, call, mine->completed, mine->last_combine, 0, ll.waits.ready_phase))
            return;
        if (!__syncthreads_and(good)) {
            ll_refuse(ll, c.queued, ll.waits.ready_phase);
            return;
        }
        send(c, call, start, chunks, barriers);
    }
    if (!(c.phases & CUDA_LL_RECEIVE))
        return;
    receive(c, call, terms);
    ll_end(ll, call, true);
}

} /* namespace */

cudaError_t cuda_launch_ll_combine(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream)
{
    ll_combine_kernel<<<(unsigned)blocks, CUDA_LL_THREADS, SENDERS * CHUNK, stream>>>(*combine);
    return cudaGetLastError();
}

cudaError_t cuda_ll_combine_load(int shared_bytes)
{
    (void)shared_bytes;
    return cudaFuncSetAttribute(ll_combine_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SENDERS * CHUNK);
}
