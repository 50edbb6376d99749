/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_mask.h - sets of ranks shared between host and kernels: rank r is bit r % 32 of word r / 32. Bits are changed by
 * atomic operations, so that concurrent changes of other bits are not lost. For the host only.
 */
#ifndef EP_CUDA_LL_MASK_H
#define EP_CUDA_LL_MASK_H

#include <stdbool.h>
#include <stdint.h>

static inline uint32_t ll_mask_bit(int rank)
{
    return UINT32_C(1) << rank % 32;
}

static inline bool ll_mask_has(const uint32_t *words, int rank)
{
    return __atomic_load_n(&words[rank / 32], __ATOMIC_ACQUIRE) & ll_mask_bit(rank);
}

static inline void ll_mask_add(uint32_t *words, int rank)
{
    __atomic_fetch_or(&words[rank / 32], ll_mask_bit(rank), __ATOMIC_RELEASE);
}

static inline void ll_mask_remove(uint32_t *words, int rank)
{
    __atomic_fetch_and(&words[rank / 32], ~ll_mask_bit(rank), __ATOMIC_RELEASE);
}

#endif
