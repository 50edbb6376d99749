/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.cuh - what the low-latency kernels share: addresses in segments, waits, the begin of a call. Its masks and
 * its end: ll_mask.cuh.
 *
 * The kernels are compiled twice, by ll_*.cu for groups on one node and by ll_*_nodes.cu, which defines LL_NODES as
 * true, for groups of several nodes. The former have up to CUDA_MAX_RANKS ranks, copy the table of segment addresses to
 * shared memory and keep the mask of a call in a register. Without the code for remote ranks they are a quarter
 * shorter, and a dispatch takes 1 us less (docs/decisions.md). The latter have up to CUDA_LL_MAX_RANKS ranks, read the
 * addresses from device memory and keep the mask in shared memory. Only their block 0 waits for the ranks, because the
 * words of most of them are in host memory.
 */
#ifndef EP_CUDA_LOWLATENCY_CUH
#define EP_CUDA_LOWLATENCY_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/lowlatency.h"

#define LL_BACKOFF_NS 500

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
    return ll.own;
}

/* The copy of the table of segments in shared memory; not between nodes. */
__device__ __forceinline__ cuda_ll_segment **ll_table()
{
    __shared__ cuda_ll_segment *table[CUDA_MAX_RANKS];

    return table;
}

/* The segment into which this rank writes for `rank`, from device memory; NULL: it is absent. */
__device__ __forceinline__ cuda_ll_segment *ll_load_peer(const cuda_ll &ll, int rank)
{
    return reinterpret_cast<cuda_ll_segment *>(
        __ldg(reinterpret_cast<const unsigned long long *>(ll.own->peer_table + rank)));
}

/*
 * The entry of a thread: that of rank threadIdx.x. Loaded at the beginning of a sending kernel, and copied to the table
 * when other loads have been waited for, which have taken as long; a block barrier follows.
 */
__device__ __forceinline__ cuda_ll_segment *ll_load_entry(const cuda_ll &ll)
{
    bool has = (!LL_NODES || blockIdx.x == 0) && (int)threadIdx.x < ll.waits.nranks;

    return has ? ll_load_peer(ll, (int)threadIdx.x) : nullptr;
}

__device__ __forceinline__ void ll_set_entry(const cuda_ll &ll, cuda_ll_segment *entry)
{
    if (!LL_NODES && (int)threadIdx.x < ll.waits.nranks)
        ll_table()[threadIdx.x] = entry;
}

/* The segment into which this rank writes for another one that is not absent. On one node: after that barrier. */
__device__ __forceinline__ cuda_ll_segment *ll_peer(const cuda_ll &ll, int rank)
{
    return LL_NODES ? ll_load_peer(ll, rank) : ll_table()[rank];
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
    if (ll_is_remote(ll, source))
        return ll.landing;
    return rank == ll.waits.rank ? ll.own : ll_peer(ll, rank);
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
 * (docs/decisions.md). The polling thread holds a lease, which expires if it stops without a release.
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

/* ll_wait_until() waits until `word`, which `rank` writes, has reached `value`; it fails like ll_wait_or_fail(). */
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

/* Has the mask with which a call begins no rank? Between nodes that takes longer to find out than it saves. */
__device__ __forceinline__ bool ll_is_empty(uint32_t mask)
{
    return !mask;
}

__device__ __forceinline__ bool ll_is_empty(const uint32_t *)
{
    return false;
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

/*
 * Publishes that the calls before this one are complete, so that peers may overwrite their slots and rows. `entry`: of
 * ll_load_entry().
 */
__device__ inline void ll_begin(const cuda_ll &ll, cuda_ll_segment *entry)
{
    const cuda_ll_segment *mine = ll_mine(ll);

    if (blockIdx.x == 0 && entry)
        store_release(&entry->words.completed[ll.waits.rank], mine->call);
}

/*
 * Rejects the call: the routing is not valid, and nothing was sent. Called by all threads of every block before the
 * ranks synchronise. If the host waits for the call, it reports the error, and the caller may correct the routing and
 * call again. If not (`queued`), the ranks could no longer agree on a call: the communicator fails, on the peers too.
 * With masking the peers continue and mask this rank. The same for a call of a graph on an ep_ll of former members.
 */
__device__ inline void ll_refuse(const cuda_ll &ll, bool queued, int phase)
{
    int i = (int)threadIdx.x, me = ll.waits.rank;
    bool former = ll_has(ll_mine(ll)->mask, me);

    if (blockIdx.x || !__syncthreads_and(i || may_begin(ll.waits, phase)) || i >= ll.waits.nranks)
        return;
    /* The hosts notify remote ranks. */
    if (i == me && queued)
        set_failure(ll.waits,
                    former       ? CUDA_FAILED_FORMER
                    : ll.masking ? CUDA_FAILED_OWN_ROUTING
                                 : CUDA_FAILED_ROUTING,
                    me, phase);
    else if (i == me)
        *(volatile uint32_t *)&ll.report->bad = 1;
    else if (queued && !ll.masking && !ll_is_remote(ll, i))
        fail_peer(ll.waits, i - ll.node_first, former ? CUDA_FAILED_FORMER : CUDA_FAILED_ROUTING, phase);
}

#endif
