/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_mask.cuh - masks: block 0 of a low-latency call decides for all blocks which ranks have no part in it. And how a
 * call ends.
 */
#ifndef EP_CUDA_LL_MASK_CUH
#define EP_CUDA_LL_MASK_CUH

#include "backend/cuda/lowlatency.cuh"

#define MASK_SENT_NS 20000000 /* the proxy sends a word within this time, unless the network accepts nothing */

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
    cuda_ll_segment *mine = ll_mine(ll), *peer = ll_load_peer(ll, rank);

    if (!peer)
        return; /* absent: it is masked */
    atomicOr(ll_word(mine->mask, rank), 1u << ll_shift(rank));
    /* If the rank was merely delayed, it learns from this word that it is masked. */
    *(volatile uint32_t *)&peer->words.masked_by[ll.waits.rank] = 1;
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
        return __syncthreads_and(i < n    ? is_masked(call, i) || ll_wait_until(ll, word, value, i, phase)
                                 : i == n ? may_begin(ll.waits, phase)
                                          : true);
    if (blockIdx.x == 0) {
        uint64_t begin = added ? global_ns() : 0, poll = ll_request_poll_for_block(ll, i);
        bool arrived =
            i >= n || (LL_NODES && !ll.masking ? is_masked(call, i) || ll_wait_until(ll, word, value, i, phase)
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
    /* After a failure the data is incomplete. */
    if (*(volatile uint32_t *)&ll.waits.mine->failure)
        return;
    if (ll_is_remote(ll, i)) {
        ll_peer(ll, i)->words.desc[weights ? (int)LL_WIRE_DESC_WEIGHTS : (int)(call.number & 1)] = {
            call.number, combine, ll.max_tokens, ll.parts, image_bytes, (int32_t)(call.dispatch & 1), 0};
    }
    store_release(&(ll_peer(ll, i)->words.*words)[ll.waits.rank], call.number);
}

/* The last block advances the counters of the segment, which no other block reads any more. */
__device__ inline void ll_end(const cuda_ll &ll, const ll_call &call, bool combine)
{
    cuda_ll_segment *mine = ll_mine(ll);

    HOLD(ll.waits, CUDA_POINT_COMPLETE);
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
