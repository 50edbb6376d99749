/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine. Sending: a rank adds up the rows that its experts have made of a token, and one row travels to
 * the token's owner; a warp makes a part of it in shared memory, and the copy engine stores it. For that each rank
 * needs the weights of other ranks' tokens, which travel ahead. A row that is the only one of its token here goes as it
 * is. Receiving: a block takes a token, waits for its rows, and adds them up in the order of their first choices.
 */
#include "backend/cuda/lowlatency.cuh"
#include "backend/cuda/sums.cuh"

#define TERMS 8    /* rows that a thread of the receiver loads at once */
#define AT_ONCE 4  /* vectors of a row that a lane of the sender adds up at once */
#define PIECE 8192 /* bytes of a row in shared memory, for each warp */
#define SHARED_BYTES (CUDA_LL_THREADS / WARP * PIECE)

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

/* --- sending ----------------------------------------------------------------------------------------------------- */

__device__ const uint64_t *weight_words(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<uint64_t>(ll, rank, ll.weight_at) + ((int64_t)source * ll.max_tokens + t) * ll.topk;
}

/*
 * The weight of each choice to the rank that has the expert. Number of the call and weight are one word: so no flag has
 * to wait until they are there. Half of the number is enough, since each call writes the words that it reads.
 */
__device__ void send_weights(const cuda_ll_combine &c, const ll_call &call)
{
    const cuda_ll &ll = c.ll;
    int me = ll.waits.rank, all = c.n_tokens * ll.topk;

    for (int i = (int)(threadIdx.x * gridDim.x + blockIdx.x); i < all; i += (int)(gridDim.x * blockDim.x)) {
        int expert = (int)read_choice(c.topk_idx, c.wide, i), rank = expert < 0 ? -1 : expert / ll.n_local;

        if (expert >= 0 && !is_masked(call, rank))
            *const_cast<volatile uint64_t *>(weight_words(ll, rank, me, 0) + i) =
                call.number << 32 | __float_as_uint(__ldg(c.weights + i));
    }
}

struct has_weight {
    const uint64_t *word;
    uint32_t call;

    __device__ __forceinline__ bool operator()() const
    {
        return (uint32_t)(*(const volatile uint64_t *)word >> 32) == call;
    }
};

/*
 * Waits for the weight of a choice of `owner`'s. False: leave. With masking the owner may be masked afterwards, and
 * then there is no weight.
 */
__device__ bool await_weight(const cuda_ll &ll, const ll_call &call, const uint64_t *word, int owner)
{
    has_weight met = {word, (uint32_t)call.number};

    return ll.masking ? wait_or_mask(ll, met, owner, ll.waits.ready_phase)
                      : wait_until_met(ll.waits, met, owner, ll.waits.ready_phase);
}

/* What a warp has for what it sends. */
struct passage {
    unsigned char *piece;
    uint64_t *full;
    uint32_t parity;
    int lane;
};

/* Of one row that travels: the choices that it is the sum of, of which each has a lane. */
struct group {
    uint32_t votes;
    int32_t row;  /* this lane's */
    float weight; /* this lane's, where there are several */
};

/*
 * A rank that slept in the middle of a call may find that `owner` has gone on without it, and that the row's place is
 * another rank's by now. Looked at right before each store, so that at most what is on its way then goes astray.
 */
__device__ bool has_masked_us(const cuda_ll &ll, int owner)
{
    return ll.masking && *(const volatile uint32_t *)&ll.peer[ll.waits.rank]->masked_by[owner];
}

__device__ bool is_wanted(const cuda_ll &ll, int owner)
{
    return !ll.masking ||
           (!(*(const volatile uint32_t *)&ll.peer[ll.waits.rank]->mask >> owner & 1) && !has_masked_us(ll, owner));
}

/* A piece of the group's only row. By one lane. */
__device__ void fetch_piece(const cuda_ll_combine &c, int32_t row, int begin, int end, passage &through)
{
    uint32_t bytes = (uint32_t)(end - begin) * VECTOR;

    barrier_expect(through.full, bytes);
    bulk_load(through.piece,
              static_cast<const unsigned char *>(c.x) + (int64_t)row * c.ll.hidden * 2 + (int64_t)begin * VECTOR, bytes,
              through.full);
    barrier_wait(through.full, through.parity);
    through.parity ^= 1;
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

/* Vectors at, at + WARP ... of the row of choice k; those from `end` on are none. */
__device__ void load_term(const cuda_ll_combine &c, const group &g, int k, int at, int end, uint4 (&v)[AT_ONCE])
{
    const uint4 *from = static_cast<const uint4 *>(c.x) + (int64_t)__shfl_sync(ALL_LANES, g.row, k) * (c.ll.hidden / 8);

#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        if (at + i * WARP < end)
            v[i] = __ldg(from + at + i * WARP);
}

__device__ void add_term(float (&sum)[AT_ONCE][8], const uint4 (&v)[AT_ONCE], float weight)
{
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++)
        add_weighted(sum[i], v[i], weight);
}

/* The sums of a piece, of several rows. By all lanes. */
__device__ void add_up_piece(const cuda_ll_combine &c, const group &g, int begin, int end, const passage &through)
{
    uint4 *out = reinterpret_cast<uint4 *>(through.piece);

    for (int at = begin + through.lane; at - through.lane < end; at += AT_ONCE * WARP) {
        float sum[AT_ONCE][8] = {};

        for (uint32_t left = g.votes; left;) {
            int k = __ffs((int)left) - 1, next = __ffs((int)(left & (left - 1))) - 1;
            uint4 v[AT_ONCE] = {}, w[AT_ONCE] = {};

            left &= left - 1;
            left &= left - 1;
            load_term(c, g, k, at, end, v);
            if (next >= 0)
                load_term(c, g, next, at, end, w);
            add_term(sum, v, __shfl_sync(ALL_LANES, g.weight, k));
            if (next >= 0)
                add_term(sum, w, __shfl_sync(ALL_LANES, g.weight, next));
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++)
            if (at + i * WARP < end)
                out[at - begin + i * WARP] = round_vector(sum[i]);
    }
    /* The copy engine reads what the lanes have written. */
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
}

/*
 * What a warp sends next: a part of the row of a token. Neighbours go to different multiprocessors, and to different
 * ranks. Where every choice has a row of its own, it has a warp of its own, too.
 */
struct share {
    int64_t at;
    int source, token, choice, part; /* choice -1: all */
};

__device__ share share_at(const cuda_ll &ll, int64_t at)
{
    int64_t parts = at / ll.parts, slots = ll.sum_once ? parts / ll.topk : parts;

    return {at, (int)(slots % ll.waits.nranks), (int)(slots / ll.waits.nranks),
            ll.sum_once ? (int)(parts % ll.topk) : -1, (int)(at % ll.parts)};
}

/* This lane's choice of a token: where its row is. */
__device__ int32_t fetch_origin(const cuda_ll &ll, const ll_call &call, const share &s, int lane)
{
    if (lane >= ll.topk || s.token >= ll.max_tokens || (s.choice >= 0 && s.choice != lane))
        return -1;
    return __ldg(origins_of(ll, call, s.source, s.token) + lane);
}

/* The share of the row that the choices of `g` make, back to the token's owner. By all lanes; false: leave. */
__device__ bool return_row(const cuda_ll_combine &c, const ll_call &call, const share &s, group g, passage &through)
{
    const cuda_ll &ll = c.ll;
    int vectors = ll.hidden / 8, each = (vectors / ll.parts + WARP - 1) / WARP * WARP; /* whole rounds of the warp */
    int begin = min(s.part * each, vectors), end = s.part == ll.parts - 1 ? vectors : min(begin + each, vectors);
    int owner = s.source, first = __ffs((int)g.votes) - 1;
    int64_t place = (int64_t)s.token * ll.topk + first;
    unsigned char *to = ll_at<unsigned char>(ll, owner, ll.rows_at) + place * ll.hidden * 2;
    int32_t only = __shfl_sync(ALL_LANES, g.row, first);
    bool alone = !(g.votes & (g.votes - 1));

    if (!alone) {
        const uint64_t *word = weight_words(ll, ll.waits.rank, owner, s.token) + through.lane;
        bool ours = g.votes >> through.lane & 1;

        if (!__all_sync(ALL_LANES, !ours || await_weight(ll, call, word, owner)))
            return false;
        g.weight = ours ? __uint_as_float((uint32_t) * (const volatile uint64_t *)word) : 0;
    }
    for (int at = begin; at < end; at += PIECE / VECTOR) {
        int upto = min(at + PIECE / VECTOR, end);

        /* What was here before has been read. */
        if (through.lane == 0)
            bulk_wait_all_read();
        __syncwarp();
        if (!alone)
            add_up_piece(c, g, at, upto, through);
        if (through.lane == 0) {
            if (alone)
                fetch_piece(c, only, at, upto, through);
            if (is_wanted(ll, owner))
                bulk_store(to + (int64_t)at * VECTOR, through.piece, (uint32_t)(upto - at) * VECTOR);
            bulk_commit();
        }
    }
    if (through.lane == 0) {
        bulk_wait_all();
        if (is_wanted(ll, owner))
            store_release(ll_at<uint64_t>(ll, owner, ll.row_flag_at) + place * ll.parts + s.part, call.number);
    }
    return true;
}

/* `row`: fetch_origin() of the warp's first share. */
__device__ void send(const cuda_ll_combine &c, const ll_call &call, share s, int32_t row, unsigned char *pieces,
                     uint64_t *barriers)
{
    const cuda_ll &ll = c.ll;
    int warp = (int)threadIdx.x / WARP, lane = (int)threadIdx.x % WARP;
    passage through = {pieces + (size_t)warp * PIECE, barriers + warp, 0, lane};
    bool sound = true;

    if (lane == 0) {
        barrier_init(through.full);
        barriers_publish();
        /* What the experts' kernels have written may be read by the copy engine now. */
        asm volatile("fence.proxy.async.global;" ::: "memory");
    }
    while (sound && s.token < ll.max_tokens) {
        group g = {__ballot_sync(ALL_LANES, row >= 0), row, 0};

        if (g.votes && !is_masked(call, s.source))
            sound = return_row(c, call, s, g, through);
        s = share_at(ll, s.at + gridDim.x * blockDim.x / WARP);
        row = fetch_origin(ll, call, s, lane);
    }
    __syncwarp();
    ll_sent(ll, call);
}

/* --- receiving --------------------------------------------------------------------------------------------------- */

struct terms {
    const uint4 *row[CUDA_LL_MAX_TOPK]; /* those that a token has */
    float weight[CUDA_LL_MAX_TOPK];
    int n;
};

/* The choices of its token that are on the same rank as this lane's; 0 where it has none that counts. By all lanes. */
__device__ uint32_t same_rank(const cuda_ll &ll, int rank)
{
    uint32_t same = 0;

    for (int i = 0; i < ll.topk; i++)
        same |= (uint32_t)(__shfl_sync(ALL_LANES, rank, i) == rank) << i;
    return rank < 0 ? 0 : same;
}

/* Waits for the rows of token t, and lists them in the order of their first choices. By all threads; false: leave. */
__device__ bool gather_terms(const cuda_ll_combine &c, const ll_call &call, int t, terms &terms)
{
    const cuda_ll &ll = c.ll;
    int k = (int)threadIdx.x, me = ll.waits.rank;
    int64_t place = (int64_t)t * ll.topk + k;
    bool sound = true;

    if (k < WARP) {
        int expert = k < ll.topk ? (int)read_choice(c.topk_idx, c.wide, place) : -1;
        int rank = expert < 0 || is_masked(call, expert / ll.n_local) ? -1 : expert / ll.n_local;
        uint32_t group = ll.sum_once ? (uint32_t)(rank >= 0) << k : same_rank(ll, rank);
        bool first = group && __ffs((int)group) - 1 == k;
        uint32_t votes = __ballot_sync(ALL_LANES, first);

        if (first) {
            int at = __popc(votes & ((1u << k) - 1));

            terms.row[at] = ll_at<uint4>(ll, me, ll.rows_at) + place * (ll.hidden / 8);
            /* Where several rows are added up already, their weights are in. */
            terms.weight[at] = group & (group - 1) ? 1.0f : __ldg(c.weights + place);
            for (int part = 0; sound && part < ll.parts; part++)
                sound = wait_until(ll.waits, ll_at<uint64_t>(ll, me, ll.row_flag_at) + place * ll.parts + part,
                                   call.number, rank, ll.waits.done_phase);
        }
        if (k == 0)
            terms.n = __popc(votes);
    }
    return __syncthreads_and(sound);
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
    extern __shared__ __align__(128) unsigned char pieces[];
    __shared__ uint64_t barriers[CUDA_LL_THREADS / WARP];
    __shared__ terms terms;
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    ll_call call = {mine->call + 1, mine->combines + 1, mine->mask};

    if (c.phases & CUDA_LL_SEND) {
        share first = share_at(ll, threadIdx.x / WARP * gridDim.x + blockIdx.x);
        int32_t row = fetch_origin(ll, call, first, (int)threadIdx.x % WARP);
        bool good;

        ll_begin(ll);
        good = __syncthreads_and(answers_dispatch(c, call));
        /* Not before the routing is known to be right: a call that is refused may come again with other weights. */
        if (good && !ll.sum_once)
            send_weights(c, call);
        if (!ll_meet(ll, call, mine->completed, mine->last_combine, 0, ll.waits.ready_phase))
            return;
        if (!good) {
            ll_refuse(ll, c.queued, ll.waits.ready_phase);
            return;
        }
        send(c, call, first, row, pieces, barriers);
    }
    if (!(c.phases & CUDA_LL_RECEIVE))
        return;
    receive(c, call, terms);
    ll_end(ll, call, true);
}

} /* namespace */

cudaError_t cuda_launch_ll_combine(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream)
{
    ll_combine_kernel<<<(unsigned)blocks, CUDA_LL_THREADS, SHARED_BYTES, stream>>>(*combine);
    return cudaGetLastError();
}

cudaError_t cuda_ll_combine_load(int shared_bytes)
{
    (void)shared_bytes;
    return cudaFuncSetAttribute(ll_combine_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
}
