/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lowlatency.h - arguments of the low-latency kernels, and the segment of each rank that its peers write into.
 *
 * Everything is pushed: a rank writes into the segments of its peers and reads only its own. So calls exchange no
 * addresses, inputs and outputs may lie in any device memory, and each transfer crosses the link once. The sender sets
 * a flag per row, and the receiver processes each row as it arrives. Counts and weights are sent ahead of the rows.
 * Each shares its word with the number of the call, so they need no flag.
 *
 * The calls of an ep_ll, dispatches and combines together, are numbered by counters in device memory, so that a
 * captured CUDA graph can be launched again. A flag holds the number of its call.
 *
 * Slots and rows are not double-buffered. A sender waits until the receiver has completed the previous call that used
 * them. Each rank publishes which call it has completed when it begins its next one, which costs nothing where
 * dispatches and combines alternate.
 */
#ifndef EP_CUDA_LOWLATENCY_H
#define EP_CUDA_LOWLATENCY_H

#include "backend/cuda/kernels.h"
#include "backend/cuda/ll_segment.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_LL_MAX_TOPK 32 /* one lane per choice */
#define CUDA_LL_THREADS 512
#if CUDA_MAX_RANKS > 32 || CUDA_LL_MAX_RANKS > CUDA_LL_THREADS
#error "on one node a mask is one word, and each rank is waited for by a thread"
#endif

/* In mapped host memory, one per ep_ll. "device" and "host" name the writer. */
struct cuda_ll_report {
    uint32_t mask[CUDA_LL_MASK_WORDS]; /* device: as in the segment */
    uint32_t bad; /* device: the routing is not valid, or does not match that of the dispatch; nothing was sent. Set
                     only where the host waits for the call */
    /* Between nodes: */
    uint32_t remote_lost[CUDA_LL_MASK_WORDS]; /* host: remote ranks that have died or left, once all that they sent has
                                                 been delivered */
    uint32_t mask_sent[CUDA_LL_MASK_WORDS];   /* host: remote ranks that have been notified that they are masked */
    uint64_t finished;                        /* device: the last call that is complete */
    uint64_t polls_requested;                 /* device: proxy polls that kernels have requested ... */
    uint64_t polls_done; /* host: ... and those that are done: what had arrived before is in the landing segment */
};

/* The part of the arguments that all calls of an ep_ll share. */
struct cuda_ll {
    struct cuda_waits waits;               /* the operation counters in its signals are not used */
    const struct cuda_ll_segment *landing; /* what remote ranks have sent to this one; NULL on one node */
    struct cuda_ll_report *report;
    int32_t node_first, n_node_ranks; /* ranks of this node. Ranks here, those of `waits` too, are ranks of the group */
    int32_t segment_tokens;           /* max_tokens of ep_ll_new() */
    int32_t max_tokens;               /* max_tokens of the call */
    int32_t segment_topk;             /* topk of ep_ll_new(): in segments each token has this many choices */
    int32_t topk;                     /* topk of the call: of this rank's tokens only */
    int32_t hidden, n_local;
    int32_t masking, no_partial_reduce;
    int32_t drops; /* choices of absent ranks count as -1, otherwise the call is refused */
    int32_t parts; /* parts of a row that a combine returns, each with a warp and a flag of its own */
    /*
     * Offsets in every segment, and sizes. M: segment_tokens or max_tokens, K: segment_topk, L: n_local, H: hidden.
     */
    int64_t counts_at; /* uint64 [2][R][L + 1]: call << 32 | rows for each expert of the owner, then the format; [parity
                          of the dispatch], because they may arrive before the owner has completed the previous one */
    int64_t row_flag_at;  /* uint64 [M,K,parts]: call; a row of the combine uses the entry of its first choice */
    int64_t slot_flag_at; /* uint64 [R][M]: call * 2, + 1 if the slot holds a row. Set for all M tokens of the call */
    int64_t weight_at;    /* uint64 [R][M,K]: call << 32 | bits of the weight, with which a rank reduces its rows */
    int64_t index_at;     /* int32 [2][M,K]: the owner's routing; [parity of the dispatch] */
    int64_t origin_at; /* int32 [2][R][M,K]: the row of [L,R*M] where the owner put what it received for a choice; -1:
                          none */
    int64_t slots_at;  /* [R][M] slots: K times {expert of the group or -1, index among the source's rows for it};
                          scales; row */
    int64_t rows_at;   /* bf16 [M,K,H]: rows that the ranks return, each in the entry of its first choice */
    int64_t slot_bytes, scales_at, row_at;
    struct cuda_ll_segment *own; /* the segment of this rank */
};

enum { CUDA_LL_SEND = 1, CUDA_LL_RECEIVE = 2 };

struct cuda_ll_dispatch {
    struct cuda_ll ll;
    const void *x, *topk_idx;
    int32_t idx64, n_tokens, phases;
    int32_t queued;         /* no host waits for this call */
    int32_t distinct;       /* no token may name an expert twice */
    int32_t block;          /* elements that share a scale: 128 or 32 of e4m3, 16 of e2m1; 0: rows are not quantised */
    int32_t rounds, packed; /* of e4m3: scales are powers of two, ue8m0 */
    int32_t row_vectors, scale_words; /* 16 and 4 bytes, of a row */
    int32_t swizzled;                 /* recv_scales is in tiles */
    int32_t image_bytes;              /* bytes of a slot that rows of this format use */
    int32_t format;                   /* must be the same on all ranks */
    const float *global_scale;        /* of e2m1; NULL: 1 */
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
    int32_t queued;          /* no host waits for this call */
    int32_t age;             /* number of dispatches since the one that it answers */
    int64_t *wait_added;     /* [R] NULL: not wanted */
    const uint32_t *signals; /* [L, signal_blocks] of blocks of signal_rows rows of x; NULL: x is complete */
    int32_t signal_rows, signal_blocks, signal_phase;
    uint32_t signal_value;
};

enum { CUDA_LL_MASK_KEEP, CUDA_LL_MASK_SET, CUDA_LL_MASK_CLEAR, CUDA_LL_MASK_MERGE };

/* Changes the masks of a rank, or of all (-1), in stream order; then writes them to `out` [R], unless that is NULL. */
struct cuda_ll_mask {
    struct cuda_ll ll;
    int32_t rank, change; /* CUDA_LL_MASK_... */
    int32_t *out;
    const struct cuda_ll_segment *from; /* MERGE: this rank's segment of the other ep_ll */
};

cudaError_t cuda_ll_dispatch_load(int shared_bytes);
cudaError_t cuda_ll_combine_load(int shared_bytes);
cudaError_t cuda_launch_ll_mask(const struct cuda_ll_mask *mask, cudaStream_t stream);
/* A barrier of all ranks that are not masked. */
cudaError_t cuda_launch_ll_barrier(const struct cuda_ll *ll, cudaStream_t stream);
cudaError_t cuda_ll_mask_load(int shared_bytes);
cudaError_t cuda_launch_ll_dispatch(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream);
cudaError_t cuda_launch_ll_combine(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream);

/* The variants between nodes, of cuda_ll with a landing segment. */
cudaError_t cuda_ll_dispatch_load_nodes(int shared_bytes);
cudaError_t cuda_ll_combine_load_nodes(int shared_bytes);
cudaError_t cuda_launch_ll_mask_nodes(const struct cuda_ll_mask *mask, cudaStream_t stream);
cudaError_t cuda_launch_ll_barrier_nodes(const struct cuda_ll *ll, cudaStream_t stream);
cudaError_t cuda_ll_mask_load_nodes(int shared_bytes);
cudaError_t cuda_launch_ll_dispatch_nodes(const struct cuda_ll_dispatch *dispatch, int blocks, cudaStream_t stream);
cudaError_t cuda_launch_ll_combine_nodes(const struct cuda_ll_combine *combine, int blocks, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
