/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.cuh - what the low-latency kernels share: addresses in segments, waits, masks, the begin and the end of a
 * call.
 *
 * The kernels are compiled twice, by ll_*.cu for groups on one node and by ll_*_nodes.cu, which defines LL_NODES as
 * true, for groups of several nodes. The former have up to CUDA_MAX_RANKS ranks, read the segment addresses from their
 * arguments and keep the mask of a call in a register. Without the code for remote ranks they are a quarter shorter,
 * and a dispatch takes 1 us less (bench/README.md). The latter have up to CUDA_LL_MAX_RANKS ranks, read the addresses
 * from a table in device memory and keep the mask in shared memory. Only their block 0 waits for the ranks, because the
 * words of most of them are in host memory.
 */
#ifndef EP_CUDA_LOWLATENCY_CUH
#define EP_CUDA_LOWLATENCY_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/lowlatency.h"

#define LL_BACKOFF_NS 500
#define MASK_SENT_NS 20000000 /* the proxy sends a word within this time, unless the network accepts nothing */

/* Launchers are called from C. */
#ifdef LL_NODES
#define LL_NAME(name) name##_nodes
#define LL_RANKS CUDA_LL_MAX_RANKS
typedef uint32_t *ll_mask; /* words in shared memory, as in the segment */
#else
#define LL_NODES false
#define LL_NAME(name) name
#define LL_RANKS CUDA_MAX_RANKS
typedef uint32_t ll_mask; /* one bit per rank */
#endif

/* The current call, as seen by one thread. */
struct ll_call {
    uint64_t number;
    uint64_t dispatch; /* number of the dispatch: this call's own, or the one that it answers */
    ll_mask mask;      /* ranks that do not take part */
};

/* The segment of this rank. */
__device__ __forceinline__ cuda_ll_segment *ll_mine(const cuda_ll &ll)
{
    return LL_NODES ? ll.own : ll.peer[ll.waits.rank];
}

/* The segment into which this rank writes for `rank`. */
__device__ __forceinline__ cuda_ll_segment *ll_peer(const cuda_ll &ll, int rank)
{
    if (LL_NODES)
        return reinterpret_cast<cuda_ll_segment *>(
            __ldg(reinterpret_cast<const unsigned long long *>(ll.own->peer_table + rank)));
    return ll.peer[rank];
}

/* The word of a mask that holds the rank's bit, and the position of the bit in it. */
template <typename Word> __device__ __forceinline__ Word *ll_word(Word *words, int rank)
{
    return words + (LL_NODES ? rank / 32 : 0);
}

__device__ __forceinline__ int ll_shift(int rank)
{
    return LL_NODES ? rank % 32 : rank;
}

__device__ __forceinline__ bool ll_has(uint32_t mask, int rank)
{
    return mask >> rank & 1;
}

__device__ __forceinline__ bool ll_has(const uint32_t *words, int rank)
{
    return *(const volatile uint32_t *)ll_word(words, rank) >> ll_shift(rank) & 1;
}

__device__ __forceinline__ bool ll_is_remote(const cuda_ll &ll, int rank)
{
    return LL_NODES && (uint32_t)(rank - ll.node_first) >= (uint32_t)ll.n_node_ranks;
}

/* The segment into which `source` writes for `rank`. One of the two is this rank. */
__device__ __forceinline__ const cuda_ll_segment *ll_segment(const cuda_ll &ll, int rank, int source)
{
    return ll_is_remote(ll, source) ? ll.landing : ll_peer(ll, rank);
}

/* The segment into which `source` writes for this rank. */
__device__ __forceinline__ const cuda_ll_segment *ll_from(const cuda_ll &ll, int source)
{
    return ll_segment(ll, ll.waits.rank, source);
}

template <typename T> __device__ __forceinline__ T *ll_at(const cuda_ll &ll, int rank, int source, int64_t offset)
{
    const unsigned char *segment = reinterpret_cast<const unsigned char *>(ll_segment(ll, rank, source));

    return reinterpret_cast<T *>(const_cast<unsigned char *>(segment) + offset);
}

/* In the segment of this rank. */
template <typename T> __device__ __forceinline__ T *ll_own(const cuda_ll &ll, int64_t offset)
{
    return ll_at<T>(ll, ll.waits.rank, ll.waits.rank, offset);
}

/* For words in host memory that only a few threads of one block poll. */
template <typename Condition> struct with_backoff {
    Condition condition;

    __device__ __forceinline__ bool operator()() const
    {
        if (condition())
            return true;
        __nanosleep(LL_BACKOFF_NS);
        return false;
    }
};

__device__ __forceinline__ uint32_t ll_events(const cuda_ll_segment *segment)
{
    uint32_t events;

    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(events) : "l"(&segment->words.events) : "memory");
    return events;
}

/*
 * Copies the proxy's event count to the own segment, if it is no longer `published`, and releases the lease: this
 * thread may not poll again, and the next one must not wait until the lease expires.
 */
__device__ __forceinline__ void ll_watch_events(const cuda_ll &ll, uint32_t published, uint32_t &lease)
{
    cuda_ll_segment *mine = ll_mine(ll);
    uint32_t events = ll_events(ll.landing);

    if (events == published)
        return;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(&mine->words.events), "r"(events) : "memory");
    if (events & LL_WIRE_EVENT_LOST) {
        /* After the count: a waiter that finds a rank lost checks once more what had arrived. */
        __threadfence();
        for (int word = 0; word < LL_RANKS / 32; word++)
            atomicOr(&mine->remote_lost[word], *(const volatile uint32_t *)&ll.report->remote_lost[word]);
    }
    atomicCAS(&mine->events_lease, lease, 0u);
    lease = 0;
}

/*
 * Polls a word in host memory for the condition `condition`. One of all waiting threads of this rank polls the proxy's
 * event count in host memory and copies it to device memory. The others poll that copy, and evaluate `condition` when
 * it has changed. If every warp read host memory, the driver would be slowed down for other processes on the same GPU
 * (bench/README.md). The polling thread holds a lease, which expires if it stops without a release.
 */
template <typename Condition> struct after_event {
    Condition condition;
    const cuda_ll &ll;
    uint32_t seen_events; /* value of the event count when `condition` was last evaluated */
    uint32_t lease;

    __device__ __forceinline__ bool operator()()
    {
        cuda_ll_segment *mine = ll_mine(ll);
        uint32_t published = ll_events(mine);

        if (published != seen_events) {
            seen_events = published;
            if (condition())
                return true;
        }
        if (acquire_lease(&mine->events_lease, lease, global_ns()))
            ll_watch_events(ll, published, lease);
        else
            __nanosleep(LL_BACKOFF_NS);
        return false;
    }
};

/* Passes a condition to wait_for() by reference, so that its state is available after the wait. */
template <typename Condition> struct by_reference {
    Condition &condition;

    __device__ __forceinline__ bool operator()() const
    {
        return condition();
    }
};

/*
 * Have messages arrived from the rank since the last call? Checked only when the event count has changed. Always false
 * with masking: an extended deadline here would let other ranks, which wait for this one, mask it.
 */
struct ll_progress {
    const cuda_ll &ll;
    int rank;
    uint32_t seen_events, before;

    __device__ __forceinline__ bool operator()()
    {
        uint32_t published = *(const volatile uint32_t *)&ll_mine(ll)->words.events, now;
        bool moved;

        if (published == seen_events || ll.masking)
            return false;
        seen_events = published;
        now = *(const volatile uint32_t *)&ll.landing->words.received[rank]; /* low half */
        moved = now != before;
        before = now;
        return moved;
    }
};

/* wait_for() for any rank of the group. For a remote rank the deadline restarts while messages arrive from it. */
template <typename Condition>
__device__ inline wait_end ll_wait_for(const cuda_ll &ll, Condition condition, int rank, int deadlines = 1)
{
    if (!ll_is_remote(ll, rank))
        return wait_for(ll.waits, condition, &ll.waits.mine->lost, rank - ll.node_first, deadlines);

    const uint32_t *lost = ll_word(ll_mine(ll)->remote_lost, rank);
    uint32_t before = ll_events(ll_mine(ll)) - 1; /* so that `condition` is evaluated at least once */
    after_event<Condition> watcher = {condition, ll, before, 0};
    wait_end end = wait_for(ll.waits, by_reference<after_event<Condition>>{watcher}, lost, ll_shift(rank), deadlines,
                            ll_progress{ll, rank, before, 0});

    /* The wait has ended without an event: the next thread must not wait until the lease expires. */
    if (watcher.lease)
        atomicCAS(&ll_mine(ll)->events_lease, watcher.lease, 0u);
    return end;
}

/*
 * Waits for `condition`, a condition that `rank` fulfils. Returns false after the deadline, with that rank reported, or
 * when stopped.
 */
template <typename Condition>
__device__ inline bool ll_wait_or_fail(const cuda_ll &ll, Condition condition, int rank, int phase, int deadlines = 1)
{
    return end_wait(ll.waits, ll_wait_for(ll, condition, rank, deadlines), rank, phase);
}

/* The same for a word that `rank` writes. */
__device__ inline bool ll_wait_until(const cuda_ll &ll, const uint64_t *word, uint64_t value, int rank, int phase,
                                     int deadlines = 1)
{
    return ll_wait_or_fail(ll, has_reached{word, value}, rank, phase, deadlines);
}

__device__ __forceinline__ bool is_masked(const ll_call &call, int rank)
{
    return ll_has(call.mask, rank);
}

/* Removes the masked ranks from a set. Between nodes `ranks` is a count, and stays as it is. */
__device__ __forceinline__ uint32_t ll_unmasked(uint32_t ranks, uint32_t mask)
{
    return ranks & ~mask;
}

__device__ __forceinline__ uint32_t ll_unmasked(uint32_t ranks, const uint32_t *)
{
    return ranks;
}

/* Loads the mask with which a call begins. Called by all threads of a block at the beginning of the kernel. */
__device__ __forceinline__ void ll_load_mask(const cuda_ll_segment *mine, uint32_t &mask)
{
    mask = mine->mask[0];
}

__device__ __forceinline__ void ll_load_mask(const cuda_ll_segment *mine, uint32_t *&mask)
{
    __shared__ uint32_t words[CUDA_LL_MASK_WORDS];

    if (threadIdx.x < CUDA_LL_MASK_WORDS)
        words[threadIdx.x] = *(const volatile uint32_t *)&mine->mask[threadIdx.x];
    __syncthreads();
    mask = words;
}

__device__ __forceinline__ int64_t read_choice(const void *topk_idx, int idx64, int64_t at)
{
    return idx64 ? __ldg(static_cast<const long long *>(topk_idx) + at)
                 : __ldg(static_cast<const int *>(topk_idx) + at);
}

/*
 * Does a word carry the number of this call? Its low half is enough, because each call rewrites the words that it
 * reads.
 */
struct has_call_number {
    const uint64_t *word;
    uint32_t call;

    __device__ __forceinline__ bool operator()() const
    {
        return (uint32_t)(*(const volatile uint64_t *)word >> 32) == call;
    }
};

/*
 * Waits for such a word of `rank`. Returns false if the kernel must exit. With masking the ranks have synchronised
 * after the words were written, so there is no wait for a single rank.
 */
__device__ inline bool await_word(const cuda_ll &ll, const ll_call &call, const uint64_t *word, int rank, int phase)
{
    return ll.masking || ll_wait_or_fail(ll, has_call_number{word, (uint32_t)call.number}, rank, phase);
}

/* The receive rows on this rank of the segment_topk choices of a source's token. */
__device__ __forceinline__ int32_t *origins_of(const cuda_ll &ll, const ll_call &call, int source, int t)
{
    int64_t slot =
        (call.dispatch & 1) * (int64_t)ll.waits.nranks * ll.segment_tokens + (int64_t)source * ll.max_tokens + t;

    return ll_own<int32_t>(ll, ll.origin_at) + slot * ll.segment_topk;
}

__device__ __forceinline__ uint4 load_peer(const void *from)
{
    return __ldcg(static_cast<const uint4 *>(from)); /* bypasses L1: a peer has written it */
}

/* Publishes that the calls before this one are complete, so that peers may overwrite their slots and rows. */
__device__ inline void ll_begin(const cuda_ll &ll)
{
    const cuda_ll_segment *mine = ll_mine(ll);

    if (blockIdx.x == 0 && (int)threadIdx.x < ll.waits.nranks)
        store_release(&ll_peer(ll, (int)threadIdx.x)->words.completed[ll.waits.rank], mine->call);
}

/*
 * Rejects the call: the routing is not valid, and nothing was sent. Called by all threads of every block before the
 * ranks synchronise. If the host waits for the call, it reports the error, and the caller may correct the routing and
 * call again. If not (`queued`), the ranks could no longer agree on a call: the communicator fails, on the peers too.
 * With masking the peers continue and mask this rank.
 */
__device__ inline void ll_refuse(const cuda_ll &ll, bool queued, int phase)
{
    int i = (int)threadIdx.x, me = ll.waits.rank;

    if (blockIdx.x || !__syncthreads_and(i || may_begin(ll.waits, phase)) || i >= ll.waits.nranks)
        return;
    /* The hosts notify remote ranks. */
    if (i == me && queued)
        set_failure(ll.waits, ll.masking ? CUDA_FAILED_OWN_ROUTING : CUDA_FAILED_ROUTING, me, phase);
    else if (i == me)
        *(volatile uint32_t *)&ll.report->bad = 1;
    else if (queued && !ll.masking && !ll_is_remote(ll, i))
        *(volatile uint32_t *)&ll.waits.peer[i - ll.node_first]->failure =
            CUDA_FAILURE(CUDA_FAILED_ROUTING, ll.waits.first + me, phase);
}

/* --- masks: block 0 decides for all blocks which ranks have no part in this call ---------------------------------- */

/*
 * Waits until the proxy has sent the new mask to a remote rank, so that the rank knows it before the caller continues.
 * Gives up after MASK_SENT_NS if the network accepts nothing.
 */
__device__ inline void ll_await_mask_sent(const cuda_ll &ll, int rank, bool masked)
{
    for (uint64_t begin = global_ns();
         ll_is_remote(ll, rank) && global_ns() - begin < MASK_SENT_NS && !is_stopped(ll.waits); __nanosleep(1000))
        if (ll_has(ll.report->mask_sent, rank) == masked)
            return;
}

__device__ inline void mask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll_mine(ll);

    atomicOr(ll_word(mine->mask, rank), 1u << ll_shift(rank));
    /* If the rank was merely delayed, it learns from this word that it is masked. */
    *(volatile uint32_t *)&ll_peer(ll, rank)->words.masked_by[ll.waits.rank] = 1;
    atomicOr_system(ll_word(ll.report->mask, rank), 1u << ll_shift(rank));
    __threadfence_system();
    ll_await_mask_sent(ll, rank, true);
}

/*
 * With masking, between nodes: requests a poll of the network that begins after this call, and returns its number.
 * Called by a warp; one lane `requests`. Counted on the device, because no host is involved when a graph is launched.
 */
__device__ inline uint64_t ll_request_poll(const cuda_ll &ll, bool requests)
{
    cuda_ll_segment *mine = ll_mine(ll);
    uint32_t votes = __ballot_sync(ALL_LANES, requests);
    uint64_t poll = 0;

    if (!ll.masking || !LL_NODES)
        return 0;
    if (requests) {
        poll = ++mine->polls_requested;
        store_release(&ll.report->polls_requested, poll);
    }
    return __shfl_sync(ALL_LANES, poll, __ffs((int)votes) - 1);
}

/*
 * Has `rank` masked this rank? For a remote rank the state as of `poll`, which this kernel requested, counts: a rank
 * that was delayed sees what it has missed. A rank that this one has just unmasked has one more deadline to unmask this
 * one.
 */
__device__ inline bool is_masked_by(const cuda_ll &ll, int rank, uint64_t poll)
{
    const volatile uint32_t *masked = &ll_from(ll, rank)->words.masked_by[rank];
    uint32_t *unmasked = ll_mine(ll)->unmasked;
    uint64_t limit_ns = ll_is_remote(ll, rank) ? MASK_SENT_NS : 0; /* the message that clears the mask is in flight */

    if (ll_is_remote(ll, rank))
        wait_for(ll.waits, with_backoff<has_reached>{{&ll.report->polls_done, poll}},
                 ll_word(ll.report->remote_lost, rank), ll_shift(rank));
    if (ll_has(unmasked, rank)) {
        limit_ns = ll.waits.deadline_ns;
        atomicAnd(ll_word(unmasked, rank), ~(1u << ll_shift(rank)));
    }
    for (uint64_t begin = global_ns(); *masked && global_ns() - begin < limit_ns && !is_stopped(ll.waits);)
        __nanosleep(1000);
    return *masked;
}

/*
 * A thread of block 0 waits for one rank and masks it at the deadline. Returns false if this rank must exit. A rank
 * that the caller has masked here may have masked this one, too. `poll`: from ll_request_poll().
 */
__device__ inline bool wait_or_mask(const cuda_ll &ll, const uint64_t *word, uint64_t value, int rank, int phase,
                                    uint64_t poll)
{
    const cuda_ll_segment *mine = ll_mine(ll);
    bool masked = ll_has(mine->mask, rank);
    wait_end end = WAIT_OK;

    if (!masked)
        end = ll_wait_for(ll, has_reached{word, value}, rank);
    if (end == WAIT_STOPPED) {
        set_failure(ll.waits, 0, rank, phase);
        return false;
    }
    /* A rank that this one has unmasked, and that has ended, cannot unmask this one: it is masked like any that ends.
     */
    if (!masked && !(end == WAIT_LOST && ll_has(mine->unmasked, rank)) && is_masked_by(ll, rank, poll)) {
        set_failure(ll.waits, CUDA_FAILED_EXCLUDED, rank, phase);
        return false;
    }
    /* It may have arrived after the deadline, while this thread waited for the proxy. */
    if (end != WAIT_OK && !has_reached{word, value}())
        mask_rank(ll, rank);
    return true;
}

/* ll_request_poll() for a block in which thread `i` waits for rank i. Called by all threads. */
__device__ inline uint64_t ll_request_poll_for_block(const cuda_ll &ll, int i)
{
    uint64_t poll = i < WARP ? ll_request_poll(ll, i == 0) : 0;

    if (LL_NODES) {
        __shared__ uint64_t shared_poll;

        if (i == 0)
            shared_poll = poll;
        __syncthreads();
        poll = shared_poll;
    }
    return poll;
}

/*
 * Writes all words of the mask of a decision; its own word follows. Called by all threads of block 0 after a barrier.
 */
__device__ inline void ll_write_decision(cuda_ll_segment *mine, int which)
{
    int word = (int)threadIdx.x;

    if (word < CUDA_LL_MASK_WORDS)
        *(volatile uint32_t *)&mine->decision_mask[which][word] = *(const volatile uint32_t *)&mine->mask[word];
    __threadfence();
    __syncthreads();
}

/*
 * Reads the mask of a decision. Called by all threads of every block after a barrier; one of them has seen the word of
 * the decision.
 */
__device__ inline void ll_read_decision(const cuda_ll_segment *mine, int which, bool, uint32_t &mask)
{
    mask = (uint32_t)load_acquire(&mine->decision[which]);
}

__device__ inline void ll_read_decision(const cuda_ll_segment *mine, int which, bool ok, uint32_t *mask)
{
    int word = (int)threadIdx.x;

    if (ok && word < CUDA_LL_MASK_WORDS)
        mask[word] = *(const volatile uint32_t *)&mine->decision_mask[which][word];
    __syncthreads();
}

/* One of the arrays of a segment with a word per source. */
typedef uint64_t (ll_wire_segment::*ll_word_array)[EP_MAX_RANKS];

/*
 * Waits until `words` of all ranks have reached `value`; with masking, masks those that do not. Called by all threads
 * of every block; counted from the last thread, thread i waits for rank i. `which`: CUDA_LL_SYNC_.... `added`: NULL, or
 * [R]: with masking, the time until each rank was here is added. Returns false if the kernel must exit.
 */
__device__ inline bool ll_sync(const cuda_ll &ll, ll_call &call, ll_word_array words, uint64_t value, int which,
                               int phase, int64_t *added = nullptr)
{
    cuda_ll_segment *mine = ll_mine(ll);
    /* From the end: the first warp may still be sending. */
    int i = (int)(blockDim.x - 1 - threadIdx.x), n = ll.waits.nranks;
    const uint64_t *word = i < n ? (ll_from(ll, i)->words.*words) + i : nullptr;
    bool ok = true;

    if (!LL_NODES && !ll.masking)
        return __syncthreads_and(i < n    ? ll_wait_until(ll, word, value, i, phase)
                                 : i == n ? may_begin(ll.waits, phase)
                                          : true);
    if (blockIdx.x == 0) {
        uint64_t begin = added ? global_ns() : 0, poll = ll_request_poll_for_block(ll, i);
        bool arrived = i >= n || (LL_NODES && !ll.masking ? ll_wait_until(ll, word, value, i, phase)
                                                          : wait_or_mask(ll, word, value, i, phase, poll));

        if (i < n && arrived && added && i != ll.waits.rank && !ll_has(mine->mask, i))
            added[i] += (int64_t)(global_ns() - begin);
        /* With as many ranks as threads, no thread is left for this check alone. */
        if (LL_NODES)
            ok = __syncthreads_and(arrived && (i || may_begin(ll.waits, phase)));
        else
            ok = __syncthreads_and(i < n ? arrived : i == n ? may_begin(ll.waits, phase) : true);
        if (LL_NODES && ok)
            ll_write_decision(mine, which);
        if (i == 0 && ok)
            store_release(&mine->decision[which], call.number << 32 | *(volatile uint32_t *)&mine->mask[0]);
    } else if (i == 0) {
        /*
         * Block 0 applies the deadline; this thread only checks for a stop. The low half of the number is enough,
         * because each call writes its decisions. The stop is checked first: a kernel that failed has left a decision
         * with the number of this call.
         */
        ok = !*(volatile uint32_t *)&ll.waits.mine->failure;
        while ((uint32_t)(load_acquire(&mine->decision[which]) >> 32) != (uint32_t)call.number && ok) {
            __nanosleep(100);
            ok = !*(volatile uint32_t *)&ll.waits.mine->failure;
        }
    }
    ok = __syncthreads_and(ok);
    ll_read_decision(mine, which, ok, call.mask);
    return ok;
}

/*
 * With masking, and between nodes: the last block to arrive publishes, in `words` of each rank, that everything which
 * this rank has stored in this kernel is visible. Called by all threads. `image_bytes`: of a dispatch.
 */
__device__ inline void ll_notify_peers(const cuda_ll &ll, const ll_call &call, ll_word_array words, bool combine,
                                       int image_bytes = 0)
{
    cuda_ll_segment *mine = ll_mine(ll);
    bool weights = words == &ll_wire_segment::weights_ready;
    __shared__ bool last;
    int i = (int)threadIdx.x;

    if (!ll.masking && !LL_NODES)
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
    if (ll_is_remote(ll, i)) {
        /* After a failure the data is incomplete. */
        if (*(volatile uint32_t *)&ll.waits.mine->failure)
            return;
        ll_peer(ll, i)->words.desc[weights ? (int)LL_WIRE_DESC_WEIGHTS : (int)(call.number & 1)] = {
            call.number, combine, ll.max_tokens, ll.parts, image_bytes, (int32_t)(call.dispatch & 1), 0};
    }
    store_release(&(ll_peer(ll, i)->words.*words)[ll.waits.rank], call.number);
}

/* The last block advances the counters of the segment, which no other block reads any more. */
__device__ inline void ll_end(const cuda_ll &ll, const ll_call &call, bool combine)
{
    cuda_ll_segment *mine = ll_mine(ll);

    __syncthreads();
    if (threadIdx.x || atomicInc(&mine->blocks[1], gridDim.x - 1) != gridDim.x - 1)
        return;
    /* After a failure the counters stay: the group cannot be used any more. */
    if (*(volatile uint32_t *)&ll.waits.mine->failure)
        return;
    mine->call = call.number;
    if (combine) {
        mine->combines++;
        mine->last_combine = call.number;
    } else {
        mine->dispatches++;
        mine->last_dispatch = call.number;
    }
    if (LL_NODES)
        store_release(&ll.report->finished, call.number);
}

#endif
