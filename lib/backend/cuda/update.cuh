/* SPDX-License-Identifier: Apache-2.0 */
/* update.cuh - shared by updates of plans within a node and between nodes. */
#ifndef EP_CUDA_UPDATE_CUH
#define EP_CUDA_UPDATE_CUH

#include "backend/cuda/nodes.h"
#include "backend/cuda/sync.cuh"

#include <epkit/types.h>

#define CUDA_MASK_WORDS (CUDA_COUNT_TOKENS / WARP) /* one bit for each token of a block that numbers rows */

__device__ __forceinline__ int experts_of_node(const cuda_nodes_update &u)
{
    return u.n_local_experts * u.waits.nranks;
}

/* Is the rank of a group of one node in the set? */
__device__ __forceinline__ bool is_absent(uint32_t absent, int rank)
{
    return absent >> rank & 1;
}

#define CUDA_CHOICES 8 /* whose loads are in flight together */

/* Calls `use(k, expert)` for each of a token's choices, in their order; the first of them is at `start`. */
template <typename Arguments, typename Use>
__device__ inline void for_choices(const Arguments &c, size_t start, Use use)
{
    for (int first = 0; first < c.topk; first += CUDA_CHOICES) {
        int64_t expert[CUDA_CHOICES];

#pragma unroll
        for (int i = 0; i < CUDA_CHOICES; i++)
            expert[i] = first + i < c.topk ? expert_at(c, start + first + i) : -1;
#pragma unroll
        for (int i = 0; i < CUDA_CHOICES; i++)
            if (first + i < c.topk)
                use(first + i, expert[i]);
    }
}

/* The number of bits set before that of this thread. */
__device__ inline int rows_before(const uint32_t *mask)
{
    int word = (int)threadIdx.x / WARP, n = __popc(mask[word] & ((1u << threadIdx.x % WARP) - 1));

    for (int i = 0; i < word; i++)
        n += __popc(mask[i]);
    return n;
}

/*
 * Are these counts of a rank's experts possible for `tokens` tokens that go to the rank? As many choices of an expert
 * as a token can have, unless they are `distinct`.
 */
__device__ inline bool counts_are_possible(const int32_t *counts, int n_experts, int tokens, bool distinct)
{
    int64_t sum = 0, most = distinct ? 1 : EP_MAX_TOPK;

    for (int i = 0; i < n_experts; i++) {
        if (counts[i] < 0 || counts[i] > (int64_t)tokens * most)
            return false;
        sum += counts[i];
    }
    return sum >= tokens;
}

/*
 * The rows of an expert that a mask of tokens does not count: those of the tokens below `end` of this block that name
 * it more than once. `repeats`: a bit for each token that names an expert twice; `index`: choices of the block's first
 * token.
 */
__device__ inline int repeats_before(const int32_t *index, int topk, const uint32_t *repeats, int expert, int end)
{
    int n = 0;

    for (int word = 0; word * WARP < end; word++)
        for (uint32_t left = repeats[word]; left; left &= left - 1) {
            int token = word * WARP + __ffs((int)left) - 1, same = 0;

            for (int k = 0; k < topk && token < end; k++)
                same += index[(size_t)token * topk + k] == expert;
            n += same > 1 ? same - 1 : 0;
        }
    return n;
}

/* By the thread of a token. */
__device__ __forceinline__ void note_found(const cuda_count &c, bool bad, uint32_t dropped)
{
    if (bad)
        atomicOr(c.found + CUDA_FOUND_BAD, 1u);
    if (dropped)
        atomicAdd(c.found + CUDA_FOUND_DROPPED, dropped);
}

/* Invalid routing fails the group: the ranks could not synchronise again. By all threads. */
__device__ inline void refuse_routing(const cuda_waits &waits)
{
    int i = (int)threadIdx.x, me = waits.rank, phase = waits.ready_phase;

    if (i == me)
        set_failure(waits, CUDA_FAILED_ROUTING, me, phase);
    else if (i < waits.nranks)
        fail_peer(waits, i, CUDA_FAILED_ROUTING, phase);
}

/*
 * Waits for a word of cuda_signals.counts that the rank publishes in that operation; an absent one has no tokens.
 * False: end the kernel.
 */
__device__ inline bool receive_count(const cuda_waits &waits, uint64_t number, int source, int at, int32_t &ret_count)
{
    const volatile uint64_t *word = &waits.mine->counts[source][at];

    ret_count = 0;
    if (!signals_of(waits, source))
        return true;
    if (!wait_or_fail(
            waits, [=] { return (uint32_t)(*word >> 32) == (uint32_t)number; }, source, waits.ready_phase))
        return false;
    ret_count = (int32_t)(uint32_t)*word;
    return true;
}

#endif
