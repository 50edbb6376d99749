/* SPDX-License-Identifier: Apache-2.0 */
/* Masks of low latency by the caller, in the order of the stream; and the barrier of the ranks that are not masked. */
#include "backend/cuda/lowlatency.cuh"

namespace
{

/* A rank that is waited for again may go on. */
__device__ void unmask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll_mine(ll);

    atomicOr(ll_word(mine->rejoins, rank), 1u << ll_shift(rank));
    if (!ll_has(mine->mask, rank))
        return;
    *(volatile uint32_t *)&ll_peer(ll, rank)->masked_by[ll.waits.rank] = 0;
    atomicAnd(ll_word(mine->mask, rank), ~(1u << ll_shift(rank)));
    /* Before the wait: what a masked rank is sent the proxy does not stay awake for. */
    atomicAnd_system(ll_word(ll.report->mask, rank), ~(1u << ll_shift(rank)));
    __threadfence_system();
    ll_await_told(ll, rank, false);
}

/* One block, with a thread for each rank. */
__global__ void __launch_bounds__(LL_RANKS) mask_kernel(const __grid_constant__ cuda_ll_mask m)
{
    const cuda_ll &ll = m.ll;
    cuda_ll_segment *mine = ll_mine(ll);
    int rank = (int)threadIdx.x;
    bool active = rank < ll.waits.nranks && rank != ll.waits.rank && (m.rank < 0 || m.rank == rank);

    if (active && m.change == CUDA_LL_MASK_SET)
        mask_rank(ll, rank);
    if (active && m.change == CUDA_LL_MASK_CLEAR)
        unmask_rank(ll, rank);
    __syncthreads();
    if (rank < ll.waits.nranks && m.out)
        m.out[rank] = ll_has(mine->mask, rank);
    if (rank < LL_RANKS / 32)
        *(volatile uint32_t *)&ll.report->mask[rank] = *(volatile uint32_t *)&mine->mask[rank];
    __threadfence_system();
}

#define BARRIER_THREADS (LL_MANY ? CUDA_LL_MAX_RANKS : 2 * WARP)

__global__ void __launch_bounds__(BARRIER_THREADS) ll_barrier_kernel(const __grid_constant__ cuda_ll ll)
{
    cuda_ll_segment *mine = ll_mine(ll);
    int i = (int)threadIdx.x, n = ll.waits.nranks, phase = ll.waits.done_phase;
    uint64_t number = mine->barrier + 1, turn = ll_ask_for_all(ll, i);
    bool sound = true;

    if (i < n)
        store_release(&ll_peer(ll, i)->barriers[ll.waits.rank], number);
    if (i < n)
        sound = ll.masking ? wait_or_mask(ll, ll_from(ll, i)->barriers + i, number, i, phase, turn)
                           : ll_wait_until(ll, ll_from(ll, i)->barriers + i, number, i, phase);
    else if (i == n)
        sound = may_begin(ll.waits, phase);
    /* Of so many ranks as threads none is left for it alone. */
    if (LL_MANY && i == 0 && n == BARRIER_THREADS)
        sound = may_begin(ll.waits, phase) && sound;
    if (__syncthreads_and(sound) && i == 0)
        mine->barrier = number;
}

} /* namespace */

cudaError_t LL_NAME(cuda_launch_ll_mask)(const struct cuda_ll_mask *mask, cudaStream_t stream)
{
    mask_kernel<<<1, LL_RANKS, 0, stream>>>(*mask);
    return cudaGetLastError();
}

cudaError_t LL_NAME(cuda_launch_ll_barrier)(const struct cuda_ll *ll, cudaStream_t stream)
{
    ll_barrier_kernel<<<1, BARRIER_THREADS, 0, stream>>>(*ll);
    return cudaGetLastError();
}

cudaError_t LL_NAME(cuda_ll_mask_load)(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, mask_kernel);

    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, ll_barrier_kernel) : error;
}
