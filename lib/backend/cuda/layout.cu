/* SPDX-License-Identifier: Apache-2.0 */
/* The layout of a routing: a thread counts one token; a block adds up its counts before it adds them to the outputs. */
#include "backend/cuda/device.cuh"

#include <epkit/types.h>

namespace
{

struct sums {
    int32_t per_rank[EP_MAX_RANKS], per_expert[EP_MAX_EXPERTS];
    int32_t per_node[EP_MAX_RANKS]; /* tokens with an expert there */
    int32_t bad;
};

__device__ __forceinline__ bool is_within(int64_t expert, int first, int n)
{
    return expert >= first && expert < first + n;
}

/* Counts a token's experts, and each of its ranks and nodes once. */
__device__ void count_token(const cuda_layout &l, int token, sums &sum)
{
    size_t start = (size_t)token * l.topk;
    int n_local = l.n_experts / l.nranks, on_node = n_local * l.ranks_per_node;
    uint8_t *in_rank = l.in_rank ? l.in_rank + (size_t)token * l.nranks : nullptr;

    for (int rank = 0; rank < l.nranks && in_rank; rank++)
        in_rank[rank] = 0;
    for (int k = 0; k < l.topk; k++) {
        int64_t expert = expert_at(l, start + k);
        bool bad = expert < -1 || expert >= l.n_experts, new_rank = true, new_node = true;
        int rank = bad || expert < 0 ? 0 : (int)expert / n_local, node = rank / l.ranks_per_node;

        for (int j = 0; j < k && expert >= 0; j++) {
            int64_t other = expert_at(l, start + j);

            bad |= other == expert;
            new_rank &= !is_within(other, rank * n_local, n_local);
            new_node &= !is_within(other, node * on_node, on_node);
        }
        if (bad)
            sum.bad = 1;
        if (bad || expert < 0)
            continue;
        atomicAdd(&sum.per_expert[expert], 1);
        if (new_rank)
            atomicAdd(&sum.per_rank[rank], 1);
        if (new_node)
            atomicAdd(&sum.per_node[node], 1);
        if (in_rank)
            in_rank[rank] = 1;
    }
}

/* Invalid routing fails the group, as in an update. By all threads of the block that found it. */
__device__ void report_bad(const cuda_layout &l)
{
    int i = (int)threadIdx.x, me = l.waits.rank, phase = l.waits.ready_phase;

    if (i == me)
        set_failure(l.waits, CUDA_FAILED_ROUTING, me, phase);
    else if (i < l.waits.nranks)
        *(volatile uint32_t *)&l.waits.peer[i]->failure = CUDA_FAILURE(CUDA_FAILED_ROUTING, l.waits.first + me, phase);
}

__global__ void __launch_bounds__(CUDA_COUNT_TOKENS) layout_kernel(const __grid_constant__ cuda_layout l)
{
    await_stream();
    __shared__ sums sum;
    int i = (int)threadIdx.x, token = (int)(blockIdx.x * CUDA_COUNT_TOKENS + threadIdx.x);

    for (int expert = i; expert < l.n_experts; expert += CUDA_COUNT_TOKENS)
        sum.per_expert[expert] = 0;
    for (int rank = i; rank < l.nranks; rank += CUDA_COUNT_TOKENS)
        sum.per_rank[rank] = sum.per_node[rank] = 0;
    if (i == 0)
        sum.bad = 0;
    __syncthreads();
    if (token < l.n_tokens)
        count_token(l, token, sum);
    __syncthreads();
    for (int expert = i; expert < l.n_experts && l.per_expert; expert += CUDA_COUNT_TOKENS)
        if (sum.per_expert[expert])
            atomicAdd(&l.per_expert[expert], sum.per_expert[expert]);
    for (int rank = i; rank < l.nranks && l.per_rank; rank += CUDA_COUNT_TOKENS)
        if (sum.per_rank[rank])
            atomicAdd(&l.per_rank[rank], sum.per_rank[rank]);
    for (int node = i; node * l.ranks_per_node < l.nranks && l.per_node; node += CUDA_COUNT_TOKENS)
        if (sum.per_node[node])
            atomicAdd(&l.per_node[node], sum.per_node[node]);
    if (sum.bad)
        report_bad(l);
}

} /* namespace */

cudaError_t cuda_launch_layout(const struct cuda_layout *layout, cudaStream_t stream)
{
    unsigned blocks = (unsigned)(layout->n_tokens + CUDA_COUNT_TOKENS - 1) / CUDA_COUNT_TOKENS;

    return blocks ? launch(layout_kernel, blocks, CUDA_COUNT_TOKENS, 0, stream, *layout) : cudaSuccess;
}

cudaError_t cuda_layout_load(int)
{
    return load_kernels(layout_kernel);
}
