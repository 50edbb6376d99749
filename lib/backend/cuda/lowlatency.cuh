/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.cuh - what the two low-latency kernels share: places in segments, the start, masks and the end of a call.
 *
 * The kernels are compiled twice, by ll_*.cu and by ll_*_many.cu, which defines LL_MANY as true. Those of up to
 * CUDA_LL_NARROW ranks find segments in their arguments and keep the mask of a call in a register. The others, of up to
 * CUDA_LL_MAX_RANKS, find segments by a table in device memory and keep the mask in shared memory; and of their blocks
 * the first one alone waits for the ranks to come, since the words of most of them are in host memory.
 */
#ifndef EP_CUDA_LOWLATENCY_CUH
#define EP_CUDA_LOWLATENCY_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/lowlatency.h"

#define LL_PAUSE_NS 500
#define MASK_TOLD_NS 20000000 /* in which the proxy sends a word, unless the network takes nothing */

/* The functions that start the kernels are called from C. */
#ifdef LL_MANY
#define LL_NAME(name) name##_many
#else
#define LL_MANY false
#define LL_NAME(name) name
#endif
#define LL_RANKS (LL_MANY ? CUDA_LL_MAX_RANKS : CUDA_LL_NARROW)

template <bool many> struct ll_mask_of {
    typedef uint32_t type; /* a bit for each rank */
};

template <> struct ll_mask_of<true> {
    typedef uint32_t *type; /* words in shared memory, as in the segment */
};

/* A call under way, as one thread sees it. */
template <bool many> struct ll_call_of {
    uint64_t number;
    uint64_t dispatch;                    /* number of the dispatch that it is, or answers */
    typename ll_mask_of<many>::type mask; /* ranks that have no part in it */
};

typedef ll_call_of<LL_MANY> ll_call;

/* This rank's segment. */
__device__ __forceinline__ cuda_ll_segment *ll_mine(const cuda_ll &ll)
{
    return LL_MANY ? ll.own : ll.peer[ll.waits.rank];
}

/* Where this rank writes for `rank`. */
__device__ __forceinline__ cuda_ll_segment *ll_peer(const cuda_ll &ll, int rank)
{
    if (LL_MANY)
        return reinterpret_cast<cuda_ll_segment *>(
            __ldg(reinterpret_cast<const unsigned long long *>(ll.own->reach + rank)));
    return ll.peer[rank];
}

/* The word of an array of masks that has the rank's bit, and the number of the bit in it. */
template <typename Word> __device__ __forceinline__ Word *ll_word(Word *words, int rank)
{
    return words + (LL_MANY ? rank / 32 : 0);
}

__device__ __forceinline__ int ll_shift(int rank)
{
    return LL_MANY ? rank % 32 : rank;
}

__device__ __forceinline__ bool ll_has(uint32_t mask, int rank)
{
    return mask >> rank & 1;
}

__device__ __forceinline__ bool ll_has(const uint32_t *words, int rank)
{
    return *(const volatile uint32_t *)ll_word(words, rank) >> ll_shift(rank) & 1;
}

__device__ __forceinline__ bool ll_is_far(const cuda_ll &ll, int rank)
{
    return (uint32_t)(rank - ll.first) >= (uint32_t)ll.n_near;
}

/* Where `source` writes for `rank`; one of the two is this rank. */
__device__ __forceinline__ const cuda_ll_segment *ll_segment(const cuda_ll &ll, int rank, int source)
{
    return ll_is_far(ll, source) ? ll.landing : ll_peer(ll, rank);
}

/* What `source` has written for this rank. */
__device__ __forceinline__ const cuda_ll_segment *ll_from(const cuda_ll &ll, int source)
{
    return ll_segment(ll, ll.waits.rank, source);
}

template <typename T> __device__ __forceinline__ T *ll_at(const cuda_ll &ll, int rank, int source, int64_t offset)
{
    const unsigned char *segment = reinterpret_cast<const unsigned char *>(ll_segment(ll, rank, source));

    return reinterpret_cast<T *>(const_cast<unsigned char *>(segment) + offset);
}

/* This rank's own. */
template <typename T> __device__ __forceinline__ T *ll_own(const cuda_ll &ll, int64_t offset)
{
    return ll_at<T>(ll, ll.waits.rank, ll.waits.rank, offset);
}

/* For words in host memory that a few threads wait for, of one block. */
template <typename Met> struct with_backoff {
    Met met;

    __device__ __forceinline__ bool operator()() const
    {
        if (met())
            return true;
        __nanosleep(LL_PAUSE_NS);
        return false;
    }
};

__device__ __forceinline__ uint32_t ll_events(const cuda_ll_segment *segment)
{
    uint32_t events;

    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(events) : "l"(&segment->events) : "memory");
    return events;
}

/*
 * Tells the threads of this rank that wait what the proxy has counted, if that is more than `told`. Then it gives the
 * lease back: its thread may wait no more, and the next one that does is not to wait for the end of the lease.
 */
__device__ __forceinline__ void ll_watch_events(const cuda_ll &ll, uint32_t told, uint32_t &lease)
{
    cuda_ll_segment *mine = ll_mine(ll);
    uint32_t events = ll_events(ll.landing);

    if (events == told)
        return;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&mine->events), "r"(events) : "memory");
    if (events & CUDA_LL_LOST) {
        /* Behind the count: who finds a rank lost looks once more at what had come. */
        __threadfence();
        for (int word = 0; word < LL_RANKS / 32; word++)
            atomicOr(&mine->far_lost[word], *(const volatile uint32_t *)&ll.report->far_lost[word]);
    }
    atomicCAS(&mine->events_until, lease, 0u);
    lease = 0;
}

/*
 * Has a word in host memory changed as `met()` asks? Of all threads of this rank that wait one watches the proxy's
 * count of events in host memory and tells it in device memory, where the others wait; they look for themselves when it
 * has changed. Where every warp reads host memory, the driver is held up that works for another process on this GPU
 * (bench/NOTES.md). Who watches has a lease; should it wait no more without giving that back, it expires.
 */
template <typename Met> struct when_told {
    Met met;
    const cuda_ll &ll;
    uint32_t seen; /* events that were told when this thread last looked */
    uint32_t lease;

    __device__ __forceinline__ bool operator()()
    {
        cuda_ll_segment *mine = ll_mine(ll);
        uint32_t told = ll_events(mine);

        if (told != seen) {
            seen = told;
            if (met())
                return true;
        }
        if (take_lease(&mine->events_until, lease, global_ns()))
            ll_watch_events(ll, told, lease);
        else
            __nanosleep(LL_PAUSE_NS);
        return false;
    }
};

/* For wait_for(), where something of the condition is needed behind it. */
template <typename Met> struct by_reference {
    Met &met;

    __device__ __forceinline__ bool operator()() const
    {
        return met();
    }
};

/*
 * Have messages come from the rank since the last question? Looked at when something has come from any. No with
 * masking, where others wait for this rank meanwhile, who would mask it.
 */
struct ll_moves {
    const cuda_ll &ll;
    int rank;
    uint32_t seen, before;

    __device__ __forceinline__ bool operator()()
    {
        uint32_t told = *(const volatile uint32_t *)&ll_mine(ll)->events, now;
        bool moved;

        if (told == seen || ll.masking)
            return false;
        seen = told;
        now = *(const volatile uint32_t *)&ll.landing->moved[rank]; /* the low half */
        moved = now != before;
        before = now;
        return moved;
    }
};

/*
 * wait_for() of any rank of the group. Of one of another node the deadline begins anew while messages come from it.
 */
template <typename Met> __device__ inline wait_end ll_wait_for(const cuda_ll &ll, Met met, int rank, int deadlines = 1)
{
    if (!ll_is_far(ll, rank))
        return wait_for(ll.waits, met, &ll.waits.mine->lost, rank - ll.first, deadlines);

    const uint32_t *lost = ll_word(ll_mine(ll)->far_lost, rank);
    uint32_t before = ll_events(ll_mine(ll)) - 1; /* so that the first look is taken */
    when_told<Met> told = {met, ll, before, 0};
    wait_end end = wait_for(ll.waits, by_reference<when_told<Met>>{told}, lost, ll_shift(rank), deadlines,
                            ll_moves{ll, rank, before, 0});

    /* Who leaves without an event, late or of a lost rank: the next one is not to wait for the end of the lease. */
    if (told.lease)
        atomicCAS(&ll_mine(ll)->events_until, told.lease, 0u);
    return end;
}

/* Waits for what `rank` does; false after the deadline, with that rank reported, or when aborted. */
template <typename Met>
__device__ inline bool ll_wait_until_met(const cuda_ll &ll, Met met, int rank, int phase, int deadlines = 1)
{
    wait_end end = ll_wait_for(ll, met, rank, deadlines);

    if (end != WAIT_MET)
        give_up(ll.waits, end == WAIT_LATE ? CUDA_FAILED_LATE : end == WAIT_LOST ? CUDA_FAILED_LOST : 0, rank, phase);
    return end == WAIT_MET;
}

/* The same for a word of its. */
__device__ inline bool ll_wait_until(const cuda_ll &ll, const uint64_t *word, uint64_t value, int rank, int phase,
                                     int deadlines = 1)
{
    return ll_wait_until_met(ll, has_reached{word, value}, rank, phase, deadlines);
}

__device__ __forceinline__ bool is_masked(const ll_call &call, int rank)
{
    return ll_has(call.mask, rank);
}

/* Those of up to CUDA_LL_NARROW ranks that are not masked; of many ranks, which no word can hold, `ranks`. */
__device__ __forceinline__ uint32_t ll_unmasked(uint32_t ranks, uint32_t mask)
{
    return ranks & ~mask;
}

__device__ __forceinline__ uint32_t ll_unmasked(uint32_t ranks, const uint32_t *)
{
    return ranks;
}

/* The mask that a call begins with. By all threads of a block, at the beginning of the kernel. */
__device__ __forceinline__ void ll_first_mask(const cuda_ll_segment *mine, uint32_t &mask)
{
    mask = mine->mask[0];
}

__device__ __forceinline__ void ll_first_mask(const cuda_ll_segment *mine, uint32_t *&mask)
{
    __shared__ uint32_t words[CUDA_LL_MASK_WORDS];

    if (threadIdx.x < CUDA_LL_MASK_WORDS)
        words[threadIdx.x] = *(const volatile uint32_t *)&mine->mask[threadIdx.x];
    __syncthreads();
    mask = words;
}

__device__ __forceinline__ int64_t read_choice(const void *topk_idx, int wide, int64_t at)
{
    return wide ? __ldg(static_cast<const long long *>(topk_idx) + at) : __ldg(static_cast<const int *>(topk_idx) + at);
}

/* Has a word come with this call? Half of the number is enough, since each call writes the words that it reads. */
struct is_of_call {
    const uint64_t *word;
    uint32_t call;

    __device__ __forceinline__ bool operator()() const
    {
        return (uint32_t)(*(const volatile uint64_t *)word >> 32) == call;
    }
};

/*
 * Waits for such a word of `rank`'s. False: leave. With masking the ranks have met behind it: nobody waits for one of
 * them alone.
 */
__device__ inline bool await_word(const cuda_ll &ll, const ll_call &call, const uint64_t *word, int rank, int phase)
{
    return ll.masking || ll_wait_until_met(ll, is_of_call{word, (uint32_t)call.number}, rank, phase);
}

/* Of the K choices of a source's token, where their rows are on this rank. */
__device__ __forceinline__ int32_t *origins_of(const cuda_ll &ll, const ll_call &call, int source, int t)
{
    int64_t slot =
        (call.dispatch & 1) * (int64_t)ll.waits.nranks * ll.most_tokens + (int64_t)source * ll.max_tokens + t;

    return ll_own<int32_t>(ll, ll.origin_at) + slot * ll.topk;
}

__device__ __forceinline__ uint4 load_far(const void *from)
{
    return __ldcg(static_cast<const uint4 *>(from)); /* written by a peer: not from the first-level cache */
}

/* Another call has begun, and the ones before it are complete: their slots and rows may be written again. */
__device__ inline void ll_begin(const cuda_ll &ll)
{
    const cuda_ll_segment *mine = ll_mine(ll);

    if (blockIdx.x == 0 && (int)threadIdx.x < ll.waits.nranks)
        store_release(&ll_peer(ll, (int)threadIdx.x)->completed[ll.waits.rank], mine->call);
}

/*
 * The routing is not valid, and nothing was sent. By all threads of every block, before the ranks meet: they may come
 * to this call only when the caller has corrected it. Where nobody waits for the call, the ranks could not come
 * together again: the communicator has failed, on the peers too; but with masking they go on, and mask this one.
 */
__device__ inline void ll_refuse(const cuda_ll &ll, bool queued, int phase)
{
    int i = (int)threadIdx.x, me = ll.waits.rank;

    if (blockIdx.x || !__syncthreads_and(i || may_begin(ll.waits, phase)) || i >= ll.waits.nranks)
        return;
    /* Ranks of other nodes hear of it from the hosts. */
    if (i == me && queued)
        give_up(ll.waits, ll.masking ? CUDA_FAILED_OWN_ROUTING : CUDA_FAILED_ROUTING, me, phase);
    else if (i == me)
        *(volatile uint32_t *)&ll.report->bad = 1;
    else if (queued && !ll.masking && !ll_is_far(ll, i))
        *(volatile uint32_t *)&ll.waits.peer[i - ll.first]->gave_up =
            CUDA_FAILURE(CUDA_FAILED_ROUTING, ll.waits.first + me, phase);
}

/* --- masks: block 0 decides for all blocks which ranks have no part in this call ---------------------------------- */

/* So that a rank of another node is told before the caller goes on; but one that takes nothing is not waited for. */
__device__ inline void ll_await_told(const cuda_ll &ll, int rank, bool masked)
{
    for (uint64_t begin = global_ns();
         ll_is_far(ll, rank) && global_ns() - begin < MASK_TOLD_NS && !is_stopped(ll.waits); __nanosleep(1000))
        if (ll_has(ll.report->mask_told, rank) == masked)
            return;
}

__device__ inline void mask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll_mine(ll);

    atomicOr(ll_word(mine->mask, rank), 1u << ll_shift(rank));
    /* It may merely have overslept: then it finds out by this. */
    *(volatile uint32_t *)&ll_peer(ll, rank)->masked_by[ll.waits.rank] = 1;
    atomicOr_system(ll_word(ll.report->mask, rank), 1u << ll_shift(rank));
    __threadfence_system();
    ll_await_told(ll, rank, true);
}

/*
 * With masking, between nodes: asks the proxy for a turn that begins after this. By a warp, of which one lane `asks`.
 * Returns the number of the turn. Counted on the device, because nobody is there when a graph is launched.
 */
__device__ inline uint64_t ll_ask(const cuda_ll &ll, bool asks)
{
    cuda_ll_segment *mine = ll_mine(ll);
    uint32_t votes = __ballot_sync(ALL_LANES, asks);
    uint64_t turn = 0;

    if (!ll.masking || !ll.landing)
        return 0;
    if (asks) {
        turn = ++mine->asked;
        store_release(&ll.report->asked, turn);
    }
    return __shfl_sync(ALL_LANES, turn, __ffs((int)votes) - 1);
}

/*
 * Has the rank masked this one? Of a rank of another node what counts is what had come when this kernel asked for
 * `turn`: one that was away sees what it has missed. Where this rank has taken its own mask back the other one may be
 * about to: it has until the deadline.
 */
__device__ inline bool has_masked_this(const cuda_ll &ll, int rank, uint64_t turn)
{
    const volatile uint32_t *masked = &ll_from(ll, rank)->masked_by[rank];
    uint32_t *rejoins = ll_mine(ll)->rejoins;
    uint64_t patience = ll_is_far(ll, rank) ? MASK_TOLD_NS : 0;

    if (ll_is_far(ll, rank))
        wait_for(ll.waits, with_backoff<has_reached>{{&ll.report->looked, turn}}, ll_word(ll.report->far_lost, rank),
                 ll_shift(rank));
    if (ll_has(rejoins, rank)) {
        patience = ll.waits.deadline_ns;
        atomicAnd(ll_word(rejoins, rank), ~(1u << ll_shift(rank)));
    }
    /* That it has taken that back may be on its way for a while. */
    for (uint64_t begin = global_ns(); *masked && global_ns() - begin < patience && !is_stopped(ll.waits);)
        __nanosleep(1000);
    return *masked;
}

/*
 * A thread of block 0 waits for one rank, which it masks when it does not come. False: this rank is to leave. A rank
 * that the caller has masked here may have masked this one in turn. `turn`: of ll_ask().
 */
__device__ inline bool wait_or_mask(const cuda_ll &ll, const uint64_t *word, uint64_t value, int rank, int phase,
                                    uint64_t turn)
{
    const cuda_ll_segment *mine = ll_mine(ll);
    bool masked = ll_has(mine->mask, rank);
    wait_end end = WAIT_MET;

    if (!masked)
        end = ll_wait_for(ll, has_reached{word, value}, rank);
    if (end == WAIT_STOPPED) {
        give_up(ll.waits, 0, rank, phase);
        return false;
    }
    if (!masked && has_masked_this(ll, rank, turn)) {
        give_up(ll.waits, CUDA_FAILED_EXCLUDED, rank, phase);
        return false;
    }
    /* It may have come since the deadline, while this thread waited for the host's look at the network. */
    if (end != WAIT_MET && !has_reached{word, value}())
        mask_rank(ll, rank);
    return true;
}

/* With masking: the time until the rank's rows were here. `added` [R], NULL: nobody wants to know. */
__device__ inline void note_wait(const cuda_ll &ll, int64_t *added, int rank, uint64_t begin)
{
    if (added && rank != ll.waits.rank && !ll_has(ll_mine(ll)->mask, rank))
        added[rank] += (int64_t)(global_ns() - begin);
}

/* ll_ask() for all ranks, each of which thread `i` of the block waits for. By all threads. */
__device__ inline uint64_t ll_ask_for_all(const cuda_ll &ll, int i)
{
    uint64_t turn = i < WARP ? ll_ask(ll, i == 0) : 0;

    if (LL_MANY) {
        __shared__ uint64_t asked;

        if (i == 0)
            asked = turn;
        __syncthreads();
        turn = asked;
    }
    return turn;
}

/* The masks of a verdict, there before its word. By all threads of block 0, behind a barrier. */
__device__ inline void ll_write_verdict(cuda_ll_segment *mine, int which)
{
    int word = (int)threadIdx.x;

    if (word < CUDA_LL_MASK_WORDS)
        *(volatile uint32_t *)&mine->verdict_mask[which][word] = *(const volatile uint32_t *)&mine->mask[word];
    __threadfence();
    __syncthreads();
}

/* The masks of a verdict. By all threads of every block, behind a barrier: one of them has seen its word. */
__device__ inline void ll_read_verdict(const cuda_ll_segment *mine, int which, bool, uint32_t &mask)
{
    mask = (uint32_t)load_acquire(&mine->verdict[which]);
}

__device__ inline void ll_read_verdict(const cuda_ll_segment *mine, int which, bool sound, uint32_t *mask)
{
    int word = (int)threadIdx.x;

    if (sound && word < CUDA_LL_MASK_WORDS)
        mask[word] = *(const volatile uint32_t *)&mine->verdict_mask[which][word];
    __syncthreads();
}

/* One of the arrays of words that each source has one of. */
typedef uint64_t (cuda_ll_segment::*ll_words)[CUDA_LL_MAX_RANKS];

/*
 * Waits until `words` of all ranks have reached `value`; with masking, of all that come. By all threads of every block,
 * each for the rank of its number counted from the last thread. `which`: CUDA_LL_TO_.... `added` as for note_wait().
 * False: leave without a result.
 */
__device__ inline bool ll_meet(const cuda_ll &ll, ll_call &call, ll_words words, uint64_t value, int which, int phase,
                               int64_t *added = nullptr)
{
    cuda_ll_segment *mine = ll_mine(ll);
    int i = (int)(blockDim.x - 1 - threadIdx.x), n = ll.waits.nranks; /* the first warp may still be sending */
    const uint64_t *word = i < n ? (ll_from(ll, i)->*words) + i : nullptr;
    bool sound = true;

    if (!LL_MANY && !ll.masking)
        return __syncthreads_and(i < n    ? ll_wait_until(ll, word, value, i, phase)
                                 : i == n ? may_begin(ll.waits, phase)
                                          : true);
    if (blockIdx.x == 0) {
        uint64_t begin = added ? global_ns() : 0, turn = ll_ask_for_all(ll, i);
        bool came = i >= n || (LL_MANY && !ll.masking ? ll_wait_until(ll, word, value, i, phase)
                                                      : wait_or_mask(ll, word, value, i, phase, turn));

        if (i < n && came)
            note_wait(ll, added, i, begin);
        /* Of so many ranks as threads none is left for it alone. */
        if (LL_MANY)
            sound = __syncthreads_and(came && (i || may_begin(ll.waits, phase)));
        else
            sound = __syncthreads_and(i < n ? came : i == n ? may_begin(ll.waits, phase) : true);
        if (LL_MANY && sound)
            ll_write_verdict(mine, which);
        if (i == 0 && sound)
            store_release(&mine->verdict[which], call.number << 32 | *(volatile uint32_t *)&mine->mask[0]);
    } else if (i == 0) {
        /*
         * Block 0 has a deadline; this thread looks only whether it was told to stop. Half of the number is there, and
         * enough: each call writes its verdicts. One that gave up has left one with the number of this call.
         */
        sound = !*(volatile uint32_t *)&ll.waits.mine->gave_up;
        while ((uint32_t)(load_acquire(&mine->verdict[which]) >> 32) != (uint32_t)call.number && sound) {
            __nanosleep(100);
            sound = !*(volatile uint32_t *)&ll.waits.mine->gave_up;
        }
    }
    sound = __syncthreads_and(sound);
    ll_read_verdict(mine, which, sound, call.mask);
    return sound;
}

/*
 * With masking, and between nodes: tells each rank, in that one of its words, that all that this rank has stored in
 * this kernel is there. The last of the blocks that come to it does; by all threads. `image_bytes`: of a dispatch.
 */
__device__ inline void ll_tell(const cuda_ll &ll, const ll_call &call, ll_words words, bool combine,
                               int image_bytes = 0)
{
    cuda_ll_segment *mine = ll_mine(ll);
    bool weights = words == &cuda_ll_segment::ahead;
    __shared__ bool last;
    int i = (int)threadIdx.x;

    if (!ll.masking && !ll.landing)
        return;
    __syncthreads();
    if (i == 0) {
        __threadfence_system();
        last = atomicInc(&mine->blocks[weights ? 2 : 0], gridDim.x - 1) == gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    if (!last || i >= ll.waits.nranks || is_masked(call, i))
        return;
    if (ll_is_far(ll, i)) {
        /* After a failure not all is there. */
        if (*(volatile uint32_t *)&ll.waits.mine->gave_up)
            return;
        ll_peer(ll, i)->told[weights ? (int)CUDA_LL_TOLD_WEIGHTS : (int)(call.number & 1)] = {
            call.number, combine, ll.max_tokens, ll.parts, image_bytes, (int32_t)(call.dispatch & 1), 0};
    }
    store_release(&(ll_peer(ll, i)->*words)[ll.waits.rank], call.number);
}

/* The last block counts the call, when no other one needs the counters any more. `combine`: of which kind it is. */
__device__ inline void ll_end(const cuda_ll &ll, const ll_call &call, bool combine)
{
    cuda_ll_segment *mine = ll_mine(ll);

    __syncthreads();
    if (threadIdx.x || atomicInc(&mine->blocks[1], gridDim.x - 1) != gridDim.x - 1)
        return;
    /* After a failure the numbers stay: the group is of no use any more. */
    if (*(volatile uint32_t *)&ll.waits.mine->gave_up)
        return;
    mine->call = call.number;
    if (combine) {
        mine->combines++;
        mine->last_combine = call.number;
    } else {
        mine->dispatches++;
        mine->last_dispatch = call.number;
    }
    if (ll.landing)
        store_release(&ll.report->finished, call.number);
}

#endif
