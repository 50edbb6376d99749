/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_segment.h - the header of a low-latency segment, for kernels and for the proxy that sends it to other nodes.
 * Includes no CUDA header.
 */
#ifndef EP_CUDA_LL_SEGMENT_H
#define EP_CUDA_LL_SEGMENT_H

#include "net/ll_words.h"

#include <stdbool.h>
#include <stdint.h>

/*
 * Ranks of a group of several nodes: in the kernels for these each rank is waited for by one thread of a block. On one
 * node a mask is one word and fits in a register.
 */
#define CUDA_LL_MAX_RANKS 512
#define CUDA_LL_MASK_WORDS (CUDA_LL_MAX_RANKS / 32) /* rank r: bit r % 32 of word r / 32 */

/* Points where the ranks of a call synchronise. Each has a decision of its own on who takes part. */
enum { CUDA_LL_SYNC_SEND, CUDA_LL_SYNC_RECEIVE, CUDA_LL_SYNCS };

/* Head of a segment. */
struct cuda_ll_segment {
    struct ll_wire_segment words; /* written by the peers */

    /* Written by the owner. */
    uint64_t call;                         /* the last complete one */
    uint64_t dispatches, combines;         /* number of complete ones */
    uint64_t last_dispatch, last_combine;  /* the last complete call of each kind */
    uint64_t barrier;                      /* the last complete one */
    uint64_t polls_requested;              /* as in struct cuda_ll_report */
    uint64_t decision[CUDA_LL_SYNCS];      /* call << 32 | mask[0] at each sync point; with masking, or between nodes */
    uint32_t mask[CUDA_LL_MASK_WORDS];     /* ranks that are masked or absent; with the own one: of former members */
    uint32_t unmasked[CUDA_LL_MASK_WORDS]; /* ranks that this one has unmasked, and that may still mask it */
    uint32_t remote_lost[CUDA_LL_MASK_WORDS]; /* as in struct cuda_ll_report, as last seen by a kernel */
    uint32_t events_lease; /* end of the lease of the thread that polls `events` of the landing segment */
    uint32_t blocks[3];    /* of the running kernel: those that have sent rows, ended, sent weights */

    uint32_t decision_mask[CUDA_LL_SYNCS][CUDA_LL_MASK_WORDS]; /* between nodes: full masks; before `decision` */
    /*
     * [rank] where this rank writes for that one: the segment of a rank of this node, the outgoing segment of a remote
     * rank; NULL: it is absent. Written as cuda_signals.peer, and here for its reason.
     */
    struct cuda_ll_segment *peer_table[CUDA_LL_MAX_RANKS];
};

/*
 * For the host: sets of ranks shared with kernels. Bits are changed by atomic operations, so that concurrent changes of
 * other bits are not lost.
 */
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
