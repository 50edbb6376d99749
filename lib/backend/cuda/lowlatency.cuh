/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.cuh - what the two low-latency kernels share: places in segments, the start, masks and the end of a call.
 */
#ifndef EP_CUDA_LOWLATENCY_CUH
#define EP_CUDA_LOWLATENCY_CUH

#include "backend/cuda/device.cuh"
#include "backend/cuda/lowlatency.h"

/* A call under way, as one thread sees it. */
struct ll_call {
    uint64_t number;
    uint64_t dispatch; /* number of the dispatch that it is, or answers */
    uint32_t mask;     /* ranks that have no part in it */
};

template <typename T> __device__ __forceinline__ T *ll_at(const cuda_ll &ll, int rank, int64_t offset)
{
    return reinterpret_cast<T *>(reinterpret_cast<unsigned char *>(ll.peer[rank]) + offset);
}

__device__ __forceinline__ bool is_masked(const ll_call &call, int rank)
{
    return call.mask >> rank & 1;
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
    return ll.masking || wait_until_met(ll.waits, is_of_call{word, (uint32_t)call.number}, rank, phase);
}

/* Of the K choices of a source's token, where their rows are on this rank. */
__device__ __forceinline__ int32_t *origins_of(const cuda_ll &ll, const ll_call &call, int source, int t)
{
    int64_t slot =
        (call.dispatch & 1) * (int64_t)ll.waits.nranks * ll.most_tokens + (int64_t)source * ll.max_tokens + t;

    return ll_at<int32_t>(ll, ll.waits.rank, ll.origin_at) + slot * ll.topk;
}

__device__ __forceinline__ uint4 load_far(const void *from)
{
    return __ldcg(static_cast<const uint4 *>(from)); /* written by a peer: not from the first-level cache */
}

/* Another call has begun, and the ones before it are complete: their slots and rows may be written again. */
__device__ inline void ll_begin(const cuda_ll &ll)
{
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];

    if (blockIdx.x == 0 && (int)threadIdx.x < ll.waits.nranks)
        store_release(&ll.peer[threadIdx.x]->completed[ll.waits.rank], mine->call);
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
    if (i == me && queued)
        give_up(ll.waits, ll.masking ? CUDA_FAILED_OWN_ROUTING : CUDA_FAILED_ROUTING, me, phase);
    else if (i == me)
        *(volatile uint32_t *)&ll.report->bad = 1;
    else if (queued && !ll.masking)
        *(volatile uint32_t *)&ll.waits.peer[i]->gave_up =
            CUDA_FAILURE(CUDA_FAILED_ROUTING, ll.waits.first + me, phase);
}

/* --- masks: block 0 decides for all blocks which ranks have no part in this call ---------------------------------- */

__device__ inline void mask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];

    atomicOr(&mine->mask, 1u << rank);
    /* It may merely have overslept: then it finds out by this. */
    *(volatile uint32_t *)&ll.peer[rank]->masked_by[ll.waits.rank] = 1;
    atomicOr_system(&ll.report->mask, 1u << rank);
    __threadfence_system();
}

/*
 * A thread of block 0 waits for one rank, which it masks when it does not come. False: this rank is to leave. A rank
 * that the caller has masked here may have masked this one in turn.
 */
__device__ inline bool wait_or_mask(const cuda_ll &ll, const uint64_t *word, uint64_t value, int rank, int phase)
{
    const cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    bool masked = *(const volatile uint32_t *)&mine->mask >> rank & 1;
    wait_end end = WAIT_MET;

    if (!masked)
        end = wait_for(ll.waits, has_reached{word, value}, &ll.waits.report->lost, rank);
    if (end == WAIT_STOPPED) {
        give_up(ll.waits, 0, rank, phase);
        return false;
    }
    if (!masked && *(const volatile uint32_t *)&mine->masked_by[rank]) {
        give_up(ll.waits, CUDA_FAILED_EXCLUDED, rank, phase);
        return false;
    }
    if (end != WAIT_MET)
        mask_rank(ll, rank);
    return true;
}

/* With masking: the time until the rank's rows were here. `added` [R], NULL: nobody wants to know. */
__device__ inline void note_wait(const cuda_ll &ll, int64_t *added, int rank, uint64_t begin)
{
    if (added && rank != ll.waits.rank && !(*(const volatile uint32_t *)&ll.peer[ll.waits.rank]->mask >> rank & 1))
        added[rank] += (int64_t)(global_ns() - begin);
}

/*
 * Waits until `words` of all ranks have reached `value`; with masking, of all that come. By all threads of every block.
 * `which`: CUDA_LL_TO_.... `added` as for note_wait(). False: leave without a result.
 */
__device__ inline bool ll_meet(const cuda_ll &ll, ll_call &call, const uint64_t *words, uint64_t value, int which,
                               int phase, int64_t *added = nullptr)
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    int i = (int)(blockDim.x - 1 - threadIdx.x), n = ll.waits.nranks; /* the first warp may still be sending */
    bool sound = true;

    if (!ll.masking)
        return __syncthreads_and(i < n    ? wait_until(ll.waits, words + i, value, i, phase)
                                 : i == n ? may_begin(ll.waits, phase)
                                          : true);
    if (blockIdx.x == 0) {
        uint64_t begin = added ? global_ns() : 0;
        bool came = i >= n || wait_or_mask(ll, words + i, value, i, phase);

        if (i < n && came)
            note_wait(ll, added, i, begin);
        sound = __syncthreads_and(i < n ? came : i == n ? may_begin(ll.waits, phase) : true);
        if (i == 0 && sound)
            store_release(&mine->verdict[which], call.number << 32 | *(volatile uint32_t *)&mine->mask);
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
    call.mask = (uint32_t)load_acquire(&mine->verdict[which]);
    return sound;
}

/*
 * With masking: tells each rank, in that one of its words, that all that this rank has stored in this kernel is there.
 * The last of the blocks that come to it does; by all threads. A kernel's next one must be behind a meeting.
 */
__device__ inline void ll_tell(const cuda_ll &ll, const ll_call &call,
                               uint64_t (cuda_ll_segment::*words)[CUDA_MAX_RANKS])
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    __shared__ bool last;
    int i = (int)threadIdx.x;

    if (!ll.masking)
        return;
    __syncthreads();
    if (i == 0) {
        __threadfence_system();
        last = atomicInc(&mine->blocks[0], gridDim.x - 1) == gridDim.x - 1;
        __threadfence_system();
    }
    __syncthreads();
    if (last && i < ll.waits.nranks && !is_masked(call, i))
        store_release(&(ll.peer[i]->*words)[ll.waits.rank], call.number);
}

/* The last block counts the call, when no other one needs the counters any more. `combine`: of which kind it is. */
__device__ inline void ll_end(const cuda_ll &ll, const ll_call &call, bool combine)
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];

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
}

#endif
