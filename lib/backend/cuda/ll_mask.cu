/* SPDX-License-Identifier: Apache-2.0 */
/* Masks of low latency by the caller, in the order of the stream; and the barrier of the ranks that are not masked. */
#include "backend/cuda/lowlatency.cuh"

namespace
{

/* A rank that is waited for again may go on. */
__device__ void unmask_rank(const cuda_ll &ll, int rank)
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];

    if (!(*(volatile uint32_t *)&mine->mask >> rank & 1))
        return;
    *(volatile uint32_t *)&ll.peer[rank]->masked_by[ll.waits.rank] = 0;
    atomicAnd(&mine->mask, ~(1u << rank));
}

/* One warp, with a thread for each rank. */
__global__ void __launch_bounds__(CUDA_MAX_RANKS) mask_kernel(const __grid_constant__ cuda_ll_mask m)
{
    const cuda_ll &ll = m.ll;
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    int rank = (int)threadIdx.x;
    bool active = rank < ll.waits.nranks && rank != ll.waits.rank;
    uint32_t mask;

    if (active && m.set >> rank & 1)
        mask_rank(ll, rank);
    if (active && m.clear >> rank & 1)
        unmask_rank(ll, rank);
    __syncwarp();
    mask = *(volatile uint32_t *)&mine->mask;
    if (rank < ll.waits.nranks && m.out)
        m.out[rank] = (int32_t)(mask >> rank & 1);
    if (rank == 0)
        *(volatile uint32_t *)&ll.report->mask = mask;
    __threadfence_system();
}

__global__ void __launch_bounds__(2 * WARP) ll_barrier_kernel(const __grid_constant__ cuda_ll ll)
{
    cuda_ll_segment *mine = ll.peer[ll.waits.rank];
    int i = (int)threadIdx.x, n = ll.waits.nranks, phase = ll.waits.done_phase;
    uint64_t number = mine->barrier + 1, turn = i < WARP ? ll_ask(ll, i == 0) : 0;
    bool sound = true;

    if (i < n)
        store_release(&ll.peer[i]->barriers[ll.waits.rank], number);
    if (i < n)
        sound = ll.masking ? wait_or_mask(ll, ll_from(ll, i)->barriers + i, number, i, phase, turn)
                           : ll_wait_until(ll, ll_from(ll, i)->barriers + i, number, i, phase);
    else if (i == n)
        sound = may_begin(ll.waits, phase);
    if (__syncthreads_and(sound) && i == 0)
        mine->barrier = number;
}

} /* namespace */

cudaError_t cuda_launch_ll_mask(const struct cuda_ll_mask *mask, cudaStream_t stream)
{
    mask_kernel<<<1, CUDA_MAX_RANKS, 0, stream>>>(*mask);
    return cudaGetLastError();
}

cudaError_t cuda_launch_ll_barrier(const struct cuda_ll *ll, cudaStream_t stream)
{
    ll_barrier_kernel<<<1, 2 * WARP, 0, stream>>>(*ll);
    return cudaGetLastError();
}

cudaError_t cuda_ll_mask_load(void)
{
    cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, mask_kernel);

    return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, ll_barrier_kernel) : error;
}
