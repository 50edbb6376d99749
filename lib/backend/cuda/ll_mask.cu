/* SPDX-License-Identifier: Apache-2.0 */
/* Low-latency masks set or queried by the caller in stream order, and the barrier of the ranks that are not masked. */
#include "backend/cuda/ll_mask.cuh"

namespace
{

/* Clears the mask of a rank on both sides. */
__device__ void unmask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll_mine(ll), *peer = ll_load_peer(ll, rank);

    if (!peer)
        return; /* absent: it stays masked */
    atomicOr(ll_word(mine->unmasked, rank), 1u << ll_shift(rank));
    if (!ll_has(mine->mask, rank))
        return;
    *(volatile uint32_t *)&peer->words.masked_by[ll.waits.rank] = 0;
    atomicAnd(ll_word(mine->mask, rank), ~(1u << ll_shift(rank)));
    /* Before the wait: the proxy does not stay awake to send to a masked rank. */
    atomicAnd_system(ll_word(ll.report->mask, rank), ~(1u << ll_shift(rank)));
    __threadfence_system();
    ll_await_mask_sent(ll, rank, false);
}

/* Masks the rank if the other ep_ll does. What that one no longer waits for, this one does not wait for either. */
__device__ void merge_rank(const cuda_ll &ll, const cuda_ll_segment *from, int rank)
{
    cuda_ll_segment *mine = ll_mine(ll);

    if (ll_has(from->mask, rank) && !ll_has(mine->mask, rank))
        mask_rank(ll, rank);
    if (!ll_has(from->unmasked, rank))
        atomicAnd(ll_word(mine->unmasked, rank), ~(1u << ll_shift(rank)));
}

/* One block, one thread per rank. */
__global__ void __launch_bounds__(LL_RANKS) mask_kernel(const __grid_constant__ cuda_ll_mask m)
{
    await_stream();
    const cuda_ll &ll = m.ll;
    cuda_ll_segment *mine = ll_mine(ll);
    int rank = (int)threadIdx.x;
    bool active = rank < ll.waits.nranks && rank != ll.waits.rank && (m.rank < 0 || m.rank == rank);

    if (active && m.change == CUDA_LL_MASK_SET)
        mask_rank(ll, rank);
    if (active && m.change == CUDA_LL_MASK_CLEAR)
        unmask_rank(ll, rank);
    /* One that was not renewed after a regroup masks all, its own rank, too. */
    if (active && m.change == CUDA_LL_MASK_MERGE && !ll_has(m.from->mask, ll.waits.rank))
        merge_rank(ll, m.from, rank);
    __syncthreads();
    if (rank < ll.waits.nranks && m.out)
        m.out[rank] = ll_has(mine->mask, rank);
    if (rank < LL_RANKS / 32)
        *(volatile uint32_t *)&ll.report->mask[rank] = *(volatile uint32_t *)&mine->mask[rank];
    __threadfence_system();
}

#define BARRIER_THREADS (LL_NODES ? CUDA_LL_MAX_RANKS : 2 * WARP)

__global__ void __launch_bounds__(BARRIER_THREADS) ll_barrier_kernel(const __grid_constant__ cuda_ll ll)
{
    await_stream();
    cuda_ll_segment *mine = ll_mine(ll);
    int i = (int)threadIdx.x, n = ll.waits.nranks, phase = ll.waits.done_phase;
    uint64_t number = mine->barrier + 1, poll = ll_request_poll_for_block(ll, i);
    cuda_ll_segment *peer = i < n ? ll_load_peer(ll, i) : nullptr;
    bool ok = true;

    if (ll_has(mine->mask, ll.waits.rank)) {
        ll_refuse(ll, true, phase);
        return;
    }
    if (peer)
        store_release(&peer->words.barriers[ll.waits.rank], number);
    if (peer)
        ok = ll.masking ? wait_or_mask(ll, ll_from(ll, i)->words.barriers + i, number, i, phase, poll)
                        : ll_wait_until(ll, ll_from(ll, i)->words.barriers + i, number, i, phase);
    else if (i == n)
        ok = may_begin(ll.waits, phase);
    /* With as many ranks as threads, no thread is left for this check alone. */
    if (LL_NODES && i == 0 && n == BARRIER_THREADS)
        ok = may_begin(ll.waits, phase) && ok;
    if (__syncthreads_and(ok) && i == 0)
        mine->barrier = number;
}

} /* namespace */

cudaError_t LL_NAME(cuda_launch_ll_mask)(const struct cuda_ll_mask *mask, cudaStream_t stream)
{
    return launch(mask_kernel, 1, LL_RANKS, 0, stream, *mask);
}

cudaError_t LL_NAME(cuda_launch_ll_barrier)(const struct cuda_ll *ll, cudaStream_t stream)
{
    return launch(ll_barrier_kernel, 1, BARRIER_THREADS, 0, stream, *ll);
}

cudaError_t LL_NAME(cuda_ll_mask_load)(int)
{
    return load_kernels(mask_kernel, ll_barrier_kernel);
}
