/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.h - what low-latency kernels are told, and the segment of each rank that its peers write into.
 *
 * Everything is pushed: a rank writes into the segments of its peers, and reads its own alone. So no address has to be
 * exchanged per call, inputs and outputs may lie in any device memory, and a transfer takes one way over the link. What
 * a rank has written it flags row by row, and the receiver takes each row as it comes. Counts and weights go ahead, in
 * words that hold the number of the call, too: they need no flag.
 *
 * Calls of an ep_ll are numbered, dispatches and combines together, by counters in device memory: so a captured CUDA
 * graph can be launched again. A flag holds the number of the call that it belongs to.
 *
 * Slots and rows exist once. A rank that is ahead waits until the receiver has completed the call that used them
 * before, which each rank tells when it begins its next call: at no cost, where dispatches and combines alternate.
 */
#ifndef EP_CUDA_LOWLATENCY_H
#define EP_CUDA_LOWLATENCY_H

#include "backend/cuda/kernels.h"
#include "backend/cuda/ll_segment.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_LL_MAX_TOPK 32 /* a lane for each */
#define CUDA_LL_THREADS 512
#if CUDA_LL_FEW_RANKS != CUDA_MAX_RANKS || CUDA_LL_MAX_RANKS > CUDA_LL_THREADS
#error "the arguments name so many ranks, and a thread waits for each"
#endif

/* In host memory that the device sees, one for each ep_ll. */
struct cuda_ll_report {
    uint32_t mask[CUDA_LL_MASK_WORDS]; /* device: as in the segment */
    uint32_t bad; /* device: the routing is not valid, or not that of the dispatch; nothing was sent. Only where the
                     host waits for the call */
    /* Between nodes. */
    uint32_t remote_lost[CUDA_LL_MASK_WORDS]; /* host: ranks of other nodes that have died or left. What they had sent
                                              is here */
    uint32_t mask_sent[CUDA_LL_MASK_WORDS];   /* host: ranks of other nodes that have been sent that they are masked */
    uint64_t finished;                        /* device: calls that are complete */
    uint64_t polls_requested;                 /* device: turns of the proxy that kernels have asked for ... */
    uint64_t polls_done; /* host: ... and so many were made: what had come before is in the landing segment */
};

/* What is the same for each call of an ep_ll. */
struct cuda_ll {
    struct cuda_waits waits; /* operation and peers in it are not used */
    /*
     * [rank] where this rank writes for that one: its segment, or, for one of another node, what stands for it here.
     * Not of many ranks (`many`), for which kernels of their own find it in own->reach.
     */
    struct cuda_ll_segment *peer[CUDA_LL_FEW_RANKS];
    const struct cuda_ll_segment *landing; /* what ranks of other nodes have written for this one; NULL: one node */
    struct cuda_ll_report *report;
    int32_t node_first,
        n_node_ranks;       /* ranks of this node. All ranks here are numbered in the group, those of `waits` too */
    int32_t segment_tokens; /* M of ep_ll_new() */
    int32_t max_tokens;     /* M of the call */
    int32_t hidden, topk, n_local;
    int32_t masking, no_partial_reduce;
    int32_t parts; /* of a row that a combine returns: a warp, and a flag, for each */
    /* Offsets in every segment, and sizes. */
    int64_t counts_at; /* uint64 [2][R][L + 1]: call << 32 | rows for each expert of the owner, | format; by the parity
                          of the dispatch, since they may come before the owner has completed the one before */
    int64_t row_flag_at;  /* uint64 [M,K,parts]: call, where a row of the combine begins: its first choice */
    int64_t slot_flag_at; /* uint64 [R][M]: call * 2, + 1 if there is a row in the slot. All M of the call are told */
    int64_t weight_at;    /* uint64 [R][M,K]: call << 32 | bits of the weight: what a rank needs to add up its rows */
    int64_t index_at;     /* int32 [2][M,K]: the owner's routing, by the parity of the dispatch */
    int64_t origin_at;    /* int32 [2][R][M,K]: row of [L,R*M] that the owner received for a choice; -1: none */
    int64_t slots_at;     /* [R][M] slots: K times {expert of the group or -1, place among the source's rows for it};
                             scales; row */
    int64_t rows_at;      /* bf16 [M,K,H]: what ranks return, each row in the place of its first choice */
    int64_t slot_bytes, scales_at, row_at;
    struct cuda_ll_segment *own; /* this rank's */
    int32_t many, unused;
};

enum { CUDA_LL_SEND = 1, CUDA_LL_RECEIVE = 2 };

struct cuda_ll_dispatch {
    struct cuda_ll ll;
    const void *x, *topk_idx;
    int32_t idx64, n_tokens, phases;
    int32_t queued;              /* no host waits for this call */
    int32_t fp8, rounds, packed; /* packed: ue8m0 */
    int32_t format;              /* what all ranks must want alike */
    unsigned char *recv_x;
    uint32_t *recv_scales;
    int64_t scale_stride_token, scale_stride_block; /* of recv_scales within an expert */
    int32_t *recv_count, *recv_source;
    int64_t *recv_range;
    int32_t *stats_add;  /* [L] NULL: not wanted */
    int64_t *wait_added; /* [R] NULL: not wanted */
};

struct cuda_ll_combine {
    struct cuda_ll ll;
    const void *x, *topk_idx;
    const float *weights;
    unsigned char *out;
    int32_t idx64, n_tokens, phases;
    int32_t queued;      /* no host waits for this call */
    int32_t age;         /* it answers the last dispatch but so many */
    int64_t *wait_added; /* [R] NULL: not wanted */
};

enum { CUDA_LL_MASK_KEEP, CUDA_LL_MASK_SET, CUDA_LL_MASK_CLEAR };

/* Masks in the order of the stream: of a rank, -1: all, changed; then written for the caller, if `out` [R] is. */
struct cuda_ll_mask {
    struct cuda_ll ll;
    int32_t rank, change; /* CUDA_LL_MASK_... */
    int32_t *out;
};

cudaError_t cuda_ll_dispatch_load(int shared_bytes);
cudaError_t cuda_ll_combine_load(void);
cudaError_t cuda_launch_ll_mask(const struct cuda_ll_mask *mask, cudaStream_t stream);
/* All ranks that are not masked meet. */
cudaError_t cuda_launch_ll_barrier(const struct cuda_ll *ll, cudaStream_t stream);
cudaError_t cuda_ll_mask_load(void);
cudaError_t cuda_launch_ll_dispatch(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream);
cudaError_t cuda_launch_ll_combine(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream);

/* The same for `many` ranks. */
cudaError_t cuda_ll_dispatch_load_many(int shared_bytes);
cudaError_t cuda_ll_combine_load_many(void);
cudaError_t cuda_launch_ll_mask_many(const struct cuda_ll_mask *mask, cudaStream_t stream);
cudaError_t cuda_launch_ll_barrier_many(const struct cuda_ll *ll, cudaStream_t stream);
cudaError_t cuda_ll_mask_load_many(void);
cudaError_t cuda_launch_ll_dispatch_many(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream);
cudaError_t cuda_launch_ll_combine_many(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
