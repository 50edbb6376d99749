/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low-latency combine. Sending: a rank adds up the rows that its experts have made of a token, and one row travels to
 * the token's owner. A warp makes a part of it: the copy engine brings the rows into shared memory, already before the
 * ranks have met, and stores the sum. The weights of other ranks' tokens travel ahead. A row that is the only one of
 * its token here goes as it is. Receiving: a block takes a token, waits for its rows, and adds them up in the order of
 * their first choices.
 */
#include "backend/cuda/ll_sum.cuh"

/* Bytes of each of a warp's two slots, for all rows of a piece together; of many ranks there are longer arrays beside.
 */
#define ROOM (LL_MANY ? 6656 : 7168)
#define GRAIN 8 /* vectors: pieces and parts of rows are multiples */
#define SHARED_BYTES (CUDA_LL_THREADS / WARP * 2 * ROOM)

namespace
{

/*
 * What a choice has in place of its weight where the combine leaves its row out. A row is sent, and waited for, all the
 * same: its place is another row's in a later call.
 */
#define LEFT_OUT 0xffffffffu

/*
 * Is this thread's part of the routing that of the dispatch, less what it leaves out? All threads of each block
 * together look at everything, so that all blocks come to the same answer.
 */
__device__ bool answers_dispatch(const cuda_ll_combine &c, const ll_call &call)
{
    const cuda_ll &ll = c.ll;
    const int32_t *index = index_of(ll, call);
    bool same = true;

#pragma unroll 2
    for (int64_t i = threadIdx.x; i < (int64_t)c.n_tokens * ll.topk; i += blockDim.x) {
        int64_t given = read_choice(c.topk_idx, c.wide, i);

        same &= given == index[i] || given == -1;
    }
    return same;
}

/* As it travels. Of the NaNs one has a meaning of its own. */
__device__ __forceinline__ uint32_t weight_bits(float weight)
{
    uint32_t bits = __float_as_uint(weight);

    return bits == LEFT_OUT ? LEFT_OUT >> 1 : bits;
}

/* --- sending ----------------------------------------------------------------------------------------------------- */

/* Of all threads of the kernel. */
__device__ __forceinline__ int own_thread()
{
    return (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

__device__ const uint64_t *weight_words(const cuda_ll &ll, int rank, int source, int t)
{
    return ll_at<uint64_t>(ll, rank, source, ll.weight_at) + ((int64_t)source * ll.most_tokens + t) * ll.topk;
}

/*
 * The weight of each choice to the rank that has the expert. Number of the call and weight are one word: so no flag has
 * to wait until they are there. By the first blocks, so that others that begin late hold nobody up. `first`: the weight
 * of this thread's first choice.
 */
__device__ void send_weights(const cuda_ll_combine &c, const ll_call &call, float first)
{
    const cuda_ll &ll = c.ll;
    int me = ll.waits.rank, all = c.n_tokens * ll.topk, begin = own_thread();
    const int32_t *index = index_of(ll, call);

    for (int i = begin; i < all; i += (int)(gridDim.x * blockDim.x)) {
        int given = (int)read_choice(c.topk_idx, c.wide, i), expert = given < 0 ? index[i] : given;
        int rank = expert < 0 ? -1 : expert / ll.n_local;
        float weight = i == begin ? first : __ldg(c.weights + i);

        if (expert >= 0 && !is_masked(call, rank))
            *const_cast<volatile uint64_t *>(weight_words(ll, rank, me, 0) + i) =
                call.number << 32 | (given < 0 ? LEFT_OUT : weight_bits(weight));
    }
}

/*
 * A rank that slept in the middle of a call may find that `owner` has gone on without it, and that the row's place is
 * another rank's by now. Looked at right before each store, so that at most what is on its way then goes astray.
 */
__device__ bool has_masked_us(const cuda_ll &ll, int owner)
{
    return ll.masking && *(const volatile uint32_t *)&ll_from(ll, owner)->masked_by[owner];
}

__device__ bool is_wanted(const cuda_ll &ll, int owner)
{
    return !ll.masking || (!ll_has(ll_mine(ll)->mask, owner) && !has_masked_us(ll, owner));
}

/*
 * What a warp sends: a part of the row of a token. Neighbours go to different multiprocessors, and to different ranks.
 * Where every choice has a row of its own, it has a warp of its own, too.
 */
struct share {
    uint32_t at;
    int source, token, choice, part; /* choice -1: all */
};

__device__ share share_at(const cuda_ll &ll, uint32_t at)
{
    uint32_t parts = (uint32_t)ll.parts, topk = (uint32_t)ll.topk, n = (uint32_t)ll.waits.nranks;
    uint32_t rows = at / parts, slots = ll.sum_once ? rows / topk : rows;

    return {at, (int)(slots % n), (int)(slots / n), ll.sum_once ? (int)(rows % topk) : -1, (int)(at % parts)};
}

/* A piece of a share: as much as a slot holds of all rows that are added up. */
struct piece {
    share of;
    uint32_t votes;      /* choices whose rows are added up; 0: there is nothing more to send */
    int32_t row;         /* of this lane's choice */
    int at, end, length; /* vectors of a row: where, where the share ends, how many */
    bool first;          /* of its share */
};

__device__ __forceinline__ bool is_alone(const piece &p)
{
    return !(p.votes & (p.votes - 1));
}

__device__ int length_of(const piece &p)
{
    int most = ROOM / VECTOR / __popc(p.votes) / GRAIN * GRAIN;

    return min(most, p.end - p.at);
}

/* Where the row of this lane's choice is, if the share has to do with it; -1: nowhere. */
__device__ int32_t origin_of(const cuda_ll &ll, const ll_call &call, const share &s, int lane)
{
    bool asked = lane < ll.topk && (s.choice < 0 || s.choice == lane) && s.token < ll.max_tokens;

    return asked && !is_masked(call, s.source) ? __ldg(origins_of(ll, call, s.source, s.token) + lane) : -1;
}

/* The first piece of the share, or of the next one with rows here. `row`: origin_of() the share. By all lanes. */
__device__ piece seek(const cuda_ll &ll, const ll_call &call, share s, int32_t row, int lane)
{
    int grains = ll.hidden / 8 / GRAIN;
    uint32_t votes;

    while (!(votes = __ballot_sync(ALL_LANES, row >= 0)) && s.token < ll.max_tokens) {
        s = share_at(ll, s.at + gridDim.x * blockDim.x / WARP);
        row = origin_of(ll, call, s, lane);
    }
    piece p = {s, votes, row, grains * s.part / ll.parts * GRAIN, grains * (s.part + 1) / ll.parts * GRAIN, 0, true};

    if (votes)
        p.length = length_of(p);
    return p;
}

__device__ piece behind(const cuda_ll &ll, const ll_call &call, const piece &p, int lane)
{
    piece next = p;

    next.at += p.length;
    if (next.at == p.end) {
        share s = share_at(ll, p.of.at + gridDim.x * blockDim.x / WARP);

        return seek(ll, call, s, origin_of(ll, call, s, lane), lane);
    }
    next.length = length_of(next);
    next.first = false;
    return next;
}

/* A warp's two slots, and what it knows of the share that it sends. */
struct passage {
    unsigned char *slots;
    uint64_t *full;
    uint32_t parity; /* a bit for each slot */
    int lane;
    float weight;   /* of this lane's choice */
    uint32_t kept;  /* choices whose rows are not left out, where a sum has several */
    uint64_t *flag; /* of a share that is on its way; NULL: none */
    int flag_of;    /* whose it is */
};

__device__ __forceinline__ unsigned char *room_of(const passage &through, int slot)
{
    return through.slots + slot * ROOM;
}

/* The rows of a piece, one behind the other. By all lanes; the slot is free. */
__device__ void fetch(const cuda_ll_combine &c, const piece &p, passage &through, int slot)
{
    uint32_t bytes = (uint32_t)p.length * VECTOR;
    int before = __popc(p.votes & ((1u << through.lane) - 1));

    if (through.lane == 0)
        barrier_expect(through.full + slot, bytes * __popc(p.votes));
    __syncwarp();
    if (p.votes >> through.lane & 1)
        bulk_load(room_of(through, slot) + before * bytes,
                  static_cast<const unsigned char *>(c.x) + (int64_t)p.row * c.ll.hidden * 2 + (int64_t)p.at * VECTOR,
                  bytes, through.full + slot);
}

__device__ void await_rows(passage &through, int slot)
{
    barrier_wait(through.full + slot, through.parity >> slot & 1);
    through.parity ^= 1u << slot;
}

/* A row that the combine has kept alone of its token goes as it is, in place of the first. By all lanes. */
__device__ void keep_alone(const piece &p, const passage &through, int slot)
{
    uint4 *rows = reinterpret_cast<uint4 *>(room_of(through, slot));
    int from = __popc(p.votes & ((through.kept & p.votes) - 1));

    for (int i = through.lane; i < p.length && from; i += WARP)
        rows[i] = rows[from * p.length + i];
    bulk_fence_shared();
    __syncwarp();
}

/* In place of the first row of a piece the sum of all that are kept. By all lanes. */
__device__ void add_up(const piece &p, const passage &through, int slot)
{
    uint4 *rows = reinterpret_cast<uint4 *>(room_of(through, slot));
    int n = __popc(p.votes);

    for (int i = through.lane; i - through.lane < p.length; i += WARP) {
        float sum[8] = {};
        uint32_t left = p.votes;

        for (int j = 0; j < n; j++, left &= left - 1) {
            int k = __ffs((int)left) - 1;
            float weight = __shfl_sync(ALL_LANES, through.weight, k);

            if (i < p.length && (through.kept >> k & 1))
                add_weighted(sum, rows[j * p.length + i], weight);
        }
        if (i < p.length)
            rows[i] = round_vector(sum);
    }
    /* The copy engine reads what the lanes have written, and writes where they have read. */
    bulk_fence_shared();
    __syncwarp();
}

/* The weights that a share's first piece needs. By all lanes; false: leave. */
__device__ bool take_weights(const cuda_ll &ll, const ll_call &call, const piece &p, passage &through)
{
    const uint64_t *word = weight_words(ll, ll.waits.rank, p.of.source, p.of.token) + through.lane;
    bool ours = p.votes >> through.lane & 1;

    if (!__all_sync(ALL_LANES, !ours || await_word(ll, call, word, p.of.source, ll.waits.ready_phase)))
        return false;
    uint32_t bits = ours ? (uint32_t) * (const volatile uint64_t *)word : 0;

    through.weight = __uint_as_float(bits);
    through.kept = __ballot_sync(ALL_LANES, ours && bits != LEFT_OUT);
    return true;
}

/* Tells the owner of the share before that it is there. By one lane. */
__device__ void flag_share(const cuda_ll &ll, const ll_call &call, passage &through)
{
    if (!through.flag)
        return;
    bulk_wait_all();
    if (is_wanted(ll, through.flag_of))
        store_release(through.flag, call.number);
    through.flag = nullptr;
}

/* A piece to where its token's owner adds up. By one lane. */
__device__ void store(const cuda_ll &ll, const ll_call &call, const piece &p, passage &through, int slot)
{
    int owner = p.of.source;
    int64_t place = (int64_t)p.of.token * ll.topk + __ffs((int)p.votes) - 1;
    unsigned char *to =
        ll_at<unsigned char>(ll, owner, ll.waits.rank, ll.rows_at) + place * ll.hidden * 2 + (int64_t)p.at * VECTOR;

    if (is_wanted(ll, owner))
        bulk_store(to, room_of(through, slot), (uint32_t)p.length * VECTOR);
    bulk_commit();
    if (p.at + p.length != p.end)
        return;
    through.flag = ll_at<uint64_t>(ll, owner, ll.waits.rank, ll.row_flag_at) + place * ll.parts + p.of.part;
    through.flag_of = owner;
}

__device__ passage passage_begin(unsigned char *slots, uint64_t *barriers)
{
    int warp = (int)threadIdx.x / WARP;
    passage through = {slots + warp * 2 * ROOM, barriers + warp * 2, 0, (int)threadIdx.x % WARP, 0, 0, nullptr, 0};

    if (through.lane == 0) {
        barrier_init(through.full);
        barrier_init(through.full + 1);
        barriers_publish();
    }
    __syncwarp();
    return through;
}

/* All that this warp has to send. `p`: the first piece, which is being fetched. */
__device__ void send(const cuda_ll_combine &c, const ll_call &call, piece p, passage &through)
{
    const cuda_ll &ll = c.ll;
    bool sound = true;

    for (int slot = 0; p.votes; slot ^= 1) {
        piece next = behind(ll, call, p, through.lane);

        if (sound && next.votes) {
            /* What was there before has been stored. */
            if (through.lane == 0)
                bulk_wait_all_read();
            __syncwarp();
            fetch(c, next, through, slot ^ 1);
        }
        await_rows(through, slot);
        if (!sound)
            break;
        /* Before this one may have to wait for another rank. */
        if (p.first && through.lane == 0)
            flag_share(ll, call, through);
        if (p.first && !is_alone(p))
            sound = take_weights(ll, call, p, through);
        if (sound && !is_alone(p)) {
            if (__popc(through.kept) == 1)
                keep_alone(p, through, slot);
            else
                add_up(p, through, slot);
        }
        if (sound && through.lane == 0)
            store(ll, call, p, through, slot);
        p = next;
    }
    if (through.lane == 0) {
        flag_share(ll, call, through);
        /* Not before the copy engine has done with the block's memory. */
        bulk_wait_all();
    }
    __syncwarp();
    /* With masking nothing above ends early; without it what ends early has given up. */
    ll_tell(ll, call, &cuda_ll_segment::sent, true);
}

/*
 * Without masking: adds the time until the weights of each rank were here, which its partial sums wait for. As
 * time_rows().
 */
__device__ bool time_weights(const cuda_ll_combine &c, const ll_call &call)
{
    __shared__ unsigned long long longest[LL_RANKS];
    const cuda_ll &ll = c.ll;
    uint64_t begin = global_ns();
    int me = ll.waits.rank, i = (int)threadIdx.x, of_rank = ll.max_tokens * ll.topk;
    bool sound = true;

    if (i < LL_RANKS)
        longest[i] = 0;
    __syncthreads();
    for (int at = i; at < ll.waits.nranks * of_rank && sound; at += (int)blockDim.x) {
        int source = at / of_rank, choice = at % of_rank;
        const uint64_t *word = weight_words(ll, me, source, 0) + choice;

        if (__ldg(origins_of(ll, call, source, 0) + choice) < 0 || is_of_call{word, (uint32_t)call.number}())
            continue;
        sound = ll_wait_until_met(ll, is_of_call{word, (uint32_t)call.number}, source, ll.waits.ready_phase);
        atomicMax(&longest[source], (unsigned long long)(global_ns() - begin));
    }
    sound = __syncthreads_and(sound);
    if (i < ll.waits.nranks && i != me && sound)
        c.wait_added[i] += (int64_t)longest[i];
    return sound;
}

/* With masking behind the weights, so that no rank masks another one for waiting. By all threads of every block. */
__device__ bool meet_to_send(const cuda_ll_combine &c, ll_call &call)
{
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    bool behind = ll.masking && !ll.sum_once;

    if (c.wait_added && !ll.masking && !ll.sum_once && blockIdx.x == 0 && !time_weights(c, call))
        return false;
    return ll_meet(ll, call, behind ? &cuda_ll_segment::ahead : &cuda_ll_segment::completed,
                   behind ? call.number : mine->last_combine, CUDA_LL_TO_SEND, ll.waits.ready_phase,
                   behind ? c.wait_added : nullptr);
}

} /* namespace */

/* Profilers show the name. */
namespace ep
{

__global__ void __launch_bounds__(CUDA_LL_THREADS, 1) LL_NAME(combine_ll)(const __grid_constant__ cuda_ll_combine c)
{
    extern __shared__ __align__(128) unsigned char slots[];
    __shared__ uint64_t barriers[CUDA_LL_THREADS / WARP * 2];
    __shared__ terms terms;
    const cuda_ll &ll = c.ll;
    const cuda_ll_segment *mine = ll_mine(ll);
    ll_call call = {mine->call + 1, mine->dispatches - (uint32_t)c.age, {}};

    ll_first_mask(mine, call.mask);
    if (c.phases & CUDA_LL_SEND) {
        int lane = (int)threadIdx.x % WARP;
        share own = share_at(ll, threadIdx.x / WARP * gridDim.x + blockIdx.x);
        passage through;
        piece first;
        int32_t row;
        float weight;

        ll_begin(ll);
        /* On their way together with the routing. */
        row = origin_of(ll, call, own, lane);
        weight = own_thread() < c.n_tokens * ll.topk ? __ldg(c.weights + own_thread()) : 0;
        if (!__syncthreads_and(answers_dispatch(c, call))) {
            ll_refuse(ll, c.queued, ll.waits.ready_phase);
            return;
        }
        /* Not before the routing is known to be right: a call that is refused may come again with other weights. */
        if (!ll.sum_once) {
            send_weights(c, call, weight);
            ll_tell(ll, call, &cuda_ll_segment::ahead, true);
        }
        through = passage_begin(slots, barriers);
        first = seek(ll, call, own, row, lane);
        /* Not before the routing has come, which would have to wait behind all the rows. */
        if (first.votes)
            fetch(c, first, through, 0);
        if (!meet_to_send(c, call)) {
            /* Not before the copy engine has done with the block's memory. */
            if (first.votes)
                await_rows(through, 0);
            return;
        }
        send(c, call, first, through);
    }
    if (!(c.phases & CUDA_LL_RECEIVE))
        return;
    receive(c, call, terms);
    ll_end(ll, call, true);
}

} /* namespace ep */

cudaError_t LL_NAME(cuda_launch_ll_combine)(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream)
{
    ep::LL_NAME(combine_ll)<<<(unsigned)blocks, CUDA_LL_THREADS, SHARED_BYTES, stream>>>(*combine);
    return cudaGetLastError();
}

cudaError_t LL_NAME(cuda_ll_combine_load)(void)
{
    return cudaFuncSetAttribute(ep::LL_NAME(combine_ll), cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);
}
