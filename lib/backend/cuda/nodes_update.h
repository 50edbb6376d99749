/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes_update.h - new routing for a plan of fixed capacity between nodes, counted, exchanged and placed by the
 * devices.
 *
 * A slice is what a rank has for one node: its tokens that go there, then how many of them go to each rank and each
 * expert of the node. A rank sends each rail peer the slice of that node; the ranks of a node tell each other the
 * slices that they have got, so that each knows where the rows of all sources begin on its node. Then a rail peer gets
 * the experts of the tokens that it will place.
 */
#ifndef EP_CUDA_NODES_UPDATE_H
#define EP_CUDA_NODES_UPDATE_H

#include "backend/cuda/nodes.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What the ranks of a node tell each other, as words of cuda_signals.counts. */
#define CUDA_SLICE_CAPACITY 0 /* rows that the rank can receive */
#define CUDA_SLICE_WORDS 1    /* its slices from here on, less their first words */

/*
 * What a node says of the rows of its ranks, to a rank of another one: words of 32 bits. Behind them, for each of its
 * ranks, the tokens for it of the ranks before the one that is told.
 */
enum {
    CUDA_SUMMARY_REFUSED,  /* 1 + a rank that would receive more rows than it can; 0: none would */
    CUDA_SUMMARY_CAPACITY, /* how many it can */
    CUDA_SUMMARY_ROWS,     /* how many it would: 64 bits, the low half first */
    CUDA_SUMMARY_STARTS = CUDA_SUMMARY_ROWS + 2
};

struct cuda_nodes_update {
    struct cuda_waits waits;
    struct cuda_op_desc desc;                  /* of the ranks of the node */
    struct cuda_net_op_args slices, summaries; /* operations of one chunk for each node */
    struct cuda_net_op_args prefixes;          /* the same, of cuda_launch_prefix() */
    struct cuda_net_op_args lists;             /* the experts of tokens */
    struct cuda_chunks words, in;              /* of the first two, both ways; of the third, those that come */
    const void *topk_idx;                      /* NULL: a mask */
    const uint8_t *mask;                       /* [N,R] */
    const int32_t *mask_experts;               /* [E] */
    int32_t idx64, expanded, bf16_sums;        /* idx64: of topk_idx */
    int32_t n_tokens, topk, n_experts, n_local_experts;
    int32_t width, remote_width, alignment, capacity;
    int32_t rail_capacity, rail_node_capacity; /* tokens of the rail peers: in all, and of one */
    /* All in device memory, but for those named pinned. n_targets: ranks of the node, or expanded its experts. */
    int32_t *totals;     /* zeroed: whether routing is not valid; [nnodes], [R], [E] tokens for each */
    int32_t *slice;      /* [nnodes, slice words] for this node, of the rank of each node on this rail */
    int32_t *summary;    /* [nnodes, verdict words] */
    int32_t *base;       /* [nnodes, n_targets] where rows of that rank's tokens begin */
    int64_t *first;      /* [R+1] tokens for this rank of the ranks before each */
    int32_t *start;      /* [R] tokens for each rank of the ranks before this one */
    int32_t *rail_start; /* [nnodes, ranks of the node] the same for the rank of each node on this rail */
    int32_t *prefix;     /* [R, ranks of the node] (i, j): tokens of the ranks 0..i for rank j of this node */
    int32_t *all_prefix; /* of the caller, [R,R] */
    struct cuda_counts *counts;
    int32_t *expert_start, *expert_exact;     /* [L+1], [L] of this rank */
    int32_t *index, *count;                   /* [N,K], [N] this rank's tokens, on this node */
    struct cuda_entry *entry;                 /* [N, width] */
    struct cuda_node_range *net, *net_pinned; /* [nnodes] */
    int32_t *token, *net_units, *net_units_pinned;
    int32_t *remote_count;
    struct cuda_remote_term *remote;
    struct cuda_node_range *rail, *rail_pinned; /* [nnodes] */
    int32_t *rail_index, *rail_count, *rail_units, *rail_units_pinned;
    struct cuda_entry *rail_entry;
};

static inline size_t cuda_update_totals(int nnodes, int nranks, int n_experts)
{
    return 1 + (size_t)nnodes + (size_t)nranks + (size_t)n_experts;
}

/* The kernels of an update: what goes where, then the lists; `pack`: of those that go out. */
cudaError_t cuda_launch_slices(const struct cuda_nodes_update *update, cudaStream_t stream);
cudaError_t cuda_launch_lists(const struct cuda_nodes_update *update, const struct cuda_pack *pack,
                              cudaStream_t stream);
/* Behind an update: what this node knows of the tokens for its ranks, and what the others know of theirs. */
cudaError_t cuda_launch_prefix(const struct cuda_nodes_update *update, cudaStream_t stream);
cudaError_t cuda_slices_load(void);
cudaError_t cuda_lists_load(void);

#ifdef __cplusplus
}
#endif

#endif
