/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes_update.h - new routing for a plan of fixed capacity between nodes, counted, exchanged and placed by the
 * devices.
 *
 * A slice holds the counts of one rank for one node: its tokens for the node, then for each rank and each expert of it.
 * A rank sends each rail peer the slice for that peer's node. The ranks of a node exchange the slices that they have
 * received, so that each knows where the rows of all sources begin on its node. The nodes exchange summaries of the
 * result. Then each rail peer receives the experts of the tokens that it will place.
 */
#ifndef EP_CUDA_NODES_UPDATE_H
#define EP_CUDA_NODES_UPDATE_H

#include "backend/cuda/nodes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the ranks of a node publish to each other, in cuda_signals.counts. */
#define CUDA_SLICE_CAPACITY 0 /* rows that the rank can receive */
#define CUDA_SLICE_WORDS 1    /* first word of its slices, each without its word 0 */

/*
 * The summary that a node sends to a remote rank: words of 32 bits. They are followed, for each rank of the node, by
 * the tokens for it of all ranks before the receiver.
 */
enum {
    CUDA_SUMMARY_REFUSED,  /* 1 + a rank that would receive more rows than its capacity; 0: none */
    CUDA_SUMMARY_CAPACITY, /* its capacity */
    CUDA_SUMMARY_ROWS,     /* the rows that it would receive: 64 bits, low half first */
    CUDA_SUMMARY_STARTS = CUDA_SUMMARY_ROWS + 2
};

struct cuda_nodes_update {
    struct cuda_waits waits;
    struct cuda_op_desc desc;                  /* for the ranks of the node */
    struct cuda_net_op_args slices, summaries; /* operations with one chunk per node */
    struct cuda_net_op_args prefixes;          /* as above, for cuda_launch_prefix() */
    struct cuda_net_op_args lists;             /* sends the experts of tokens */
    struct cuda_chunks words, in;              /* words: of exchanges, both directions; in: of `lists`, received */
    const void *topk_idx;                      /* NULL: the routing is a mask */
    const uint8_t *mask;                       /* [N,R] */
    const int32_t *mask_experts;               /* [E] */
    int32_t idx64, expanded, bf16_sums;        /* idx64: type of topk_idx */
    int32_t n_tokens, topk, n_experts, n_local_experts;
    int32_t width, remote_width, alignment, capacity;
    int32_t rail_capacity, rail_node_capacity; /* tokens of all rail peers, and of one */
    /* In device memory, unless named pinned. n_targets: the ranks of the node; in the expanded layout its experts. */
    int32_t *totals;     /* zeroed: whether the routing is not valid; then tokens for each of [nnodes], [R], [E] */
    int32_t *slice;      /* [nnodes, slice words] for this node, from the rank of each node on this rail */
    int32_t *summary;    /* [nnodes, summary words] */
    int32_t *base;       /* [nnodes, n_targets] first rows of that node's rank on this rail */
    int64_t *first;      /* [R+1] tokens for this rank of all ranks before each */
    int32_t *start;      /* [R] tokens for each rank of all ranks before this one */
    int32_t *rail_start; /* [nnodes, ranks of the node] the same for the rank of each node on this rail */
    int32_t *prefix;     /* [R, ranks of the node] (i, j): tokens of ranks 0..i for rank j of this node */
    int32_t *all_prefix; /* the caller's, [R,R] */
    struct cuda_counts *counts;
    int32_t *expert_start, *expert_exact; /* [L+1], [L] of this rank */
    int32_t *index, *count;               /* [N,K], [N] this rank's tokens; entries on this node */
    struct cuda_entry *entry;             /* [N, width] */
    struct cuda_list_memory list;
    struct cuda_list_memory pinned; /* of `list`, what the proxy reads: net, rail and their units */
};

static inline size_t cuda_update_totals(int nnodes, int nranks, int n_experts)
{
    return 1 + (size_t)nnodes + (size_t)nranks + (size_t)n_experts;
}

/* Launch the kernels of an update: exchange of counts, then the lists; `pack`: sends those. */
cudaError_t cuda_launch_slices(const struct cuda_nodes_update *update, cudaStream_t stream);
cudaError_t cuda_launch_lists(const struct cuda_nodes_update *update, const struct cuda_pack *pack,
                              cudaStream_t stream);
/* After an update: exchanges `prefix` of all nodes. */
cudaError_t cuda_launch_prefix(const struct cuda_nodes_update *update, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
