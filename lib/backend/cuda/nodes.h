/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.h - dispatch, combine and barrier between nodes, and updates of plans: the arguments of the kernels of
 * nodes.cu, nodes_combine.cu, nodes_update.cu and nodes_lists.cu.
 *
 * A token crosses the network once per remote node, to the rail peer there, as on the host backend. The rail peer
 * places its rows on that node, and in a combine reduces them on the way back. Rows are sent in chunks. A kernel packs
 * a chunk into pinned memory and sets a word; a thread of the rank, the proxy (proxy.c), sends it. A received chunk is
 * read by the kernels in the memory where the network has put it, and released by another word.
 */
#ifndef EP_CUDA_NODES_H
#define EP_CUDA_NODES_H

#include "backend/cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_CHUNK_TOKENS 32     /* tokens of a chunk, at most */
#define CUDA_MAX_REMOTE_NODES 32 /* remote nodes on which one token can have experts: one lane each */
#define CUDA_NODES_WARPS 8       /* per block; also this rank's own tokens that a block claims at once */

/* The tokens of one remote node in a list: n tokens from `first` on. */
struct cuda_node_range {
    int32_t first, n;
};

/* A received chunk. In host memory; `number` is written last. */
struct cuda_landed {
    uint64_t address; /* device address of the payload, after the header */
    uint64_t number;  /* of the operation that it belongs to */
};

/*
 * The chunks of one direction of an operation. Chunk i of a node holds its tokens [i * tokens, ...). Its words and its
 * memory are those of slot rail.first / tokens + node + i. So there are as many slots as chunks and nodes together.
 */
struct cuda_chunks {
    const struct cuda_node_range *rail; /* device memory, [nnodes]; n is 0 for this node */
    int32_t nnodes, node;
    int32_t max_per_node; /* chunks of one node, at most */
    int32_t tokens;
    int32_t phase; /* of the waits for chunks */
    int32_t unused;
};

/* Memory of an operation's chunks, indexed by slot. */
struct cuda_net_buffers {
    /* Out: memory where chunks are packed, slot_bytes each, and words in host memory that are set when they are. */
    unsigned char *arena;
    uint64_t *ready;
    /* In: host memory, except for `n_read`, a count of tokens that is 0 between kernels. */
    struct cuda_landed *arrived;
    uint64_t *consumed;
    uint32_t *n_read;
};

/*
 * Posts an operation to the proxy. In host memory; `number` is written last. The device numbers the operations between
 * nodes, because each launch of a captured graph runs one again that the host has called once.
 */
struct cuda_op_post {
    uint64_t op; /* id in the op ring */
    uint64_t number;
};

/* An operation waits for the arena of the one before the previous one, so there are never this many open posts. */
#define CUDA_OP_POSTS 8

#define CUDA_CHUNK_SLOT(first, tokens, node, chunk) ((first) / (tokens) + (node) + (chunk))

/* Written by the proxy, in host memory. */
struct cuda_proxy_words {
    uint64_t sent;   /* the last operation of which all chunks have been sent */
    uint64_t events; /* incremented after each change of `sent` and of any `arrived` */
    int32_t blocked; /* rank of the group to which something must still be sent; -1: none */
    int32_t unused;
};

/* The part of the arguments that involves the proxy. */
struct cuda_net_op_args {
    struct cuda_net_buffers buffers[2]; /* for even and odd operation numbers */
    struct cuda_op_post *posts;         /* host memory, [CUDA_OP_POSTS] */
    uint64_t op;
    size_t slot_bytes;
    const struct cuda_proxy_words *words;
    const uint64_t *moved; /* host memory, [nnodes + 1]: chunks received from each node, then chunks sent */
};

/* What follows the rows of a chunk for each token: its scales, and the weights of its choices. */
struct cuda_row_meta {
    int32_t scale_words, weight_words;
};

/* Packs the rows for other nodes. */
struct cuda_pack {
    struct cuda_waits waits;
    struct cuda_net_op_args op;
    struct cuda_chunks out;
    const struct cuda_counts *counts; /* of the plan whose rows are sent; NULL: the rows are not those of tokens */
    const int32_t *token;             /* [tokens of all lists] */
    const unsigned char *x;
    const uint32_t *scales;
    const float *weights;
    int64_t scale_stride_token, scale_stride_block, row_bytes;
    struct cuda_row_meta meta;
    int32_t blocks, n_tokens;
};

/* The rows of the rail peers' tokens on this node. */
struct cuda_rail_route {
    const struct cuda_entry *entry; /* [tokens, width], the first count[t] of each; in the order of the sum */
    const int32_t *count, *index;   /* [tokens], [tokens,K] */
    int32_t width, unused;
};

struct cuda_nodes_dispatch {
    struct cuda_dispatch own; /* for this rank's tokens; shape and stage are not used */
    struct cuda_net_op_args op;
    struct cuda_chunks in;
    struct cuda_rail_route rail;
    struct cuda_row_meta meta;
    int32_t blocks;
};

/* A partial sum of a token from a remote node: token `at` of the lists. */
struct cuda_remote_term {
    int32_t node, at;
};

/* The lists of a plan, in device memory or in a copy on the host. */
struct cuda_list_memory {
    struct cuda_node_range *net, *rail; /* [nnodes] this rank's tokens for each node; the rail peers' tokens */
    int32_t *token;                     /* [own] */
    int32_t *net_units, *rail_units;    /* [own + nnodes], [rails + nnodes]: as in struct cuda_nodes_combine */
    int32_t *rail_count, *rail_index;   /* [rails], [rails,K] */
    struct cuda_entry *rail_entry;      /* [rails, width] */
    int32_t *remote_count;              /* [N] */
    struct cuda_remote_term *remote;    /* [N, remote_width] */
};

struct cuda_nodes_combine {
    struct cuda_combine own;
    struct cuda_net_op_args op;
    struct cuda_chunks out, in;
    struct cuda_rail_route rail;
    /*
     * Units, one row of bf16 each, that the sums of a node's list take before token `at` of all lists, at [at + node];
     * a sum in fp32 takes two. There is an entry after the last token of each list, so there are as many entries as
     * tokens and nodes. NULL: all sums are rounded (EP_COMBINE_BY_CHOICE).
     */
    const int32_t *rail_units, *net_units;
    const int32_t *remote_count;           /* [N] */
    const struct cuda_remote_term *remote; /* [N, remote_width], the first remote_count[t] of each; ascending nodes */
    int32_t weight_words, remote_width, blocks, unused;
};

/* Sends an empty chunk to each other node and receives one. */
struct cuda_nodes_barrier {
    struct cuda_waits waits;
    struct cuda_net_op_args op;
    struct cuda_chunks chunks; /* in both directions; one empty chunk per node */
};

cudaError_t cuda_launch_pack(const struct cuda_pack *pack, cudaStream_t stream);
cudaError_t cuda_launch_nodes_dispatch(const struct cuda_nodes_dispatch *dispatch, cudaStream_t stream);
cudaError_t cuda_launch_nodes_combine(const struct cuda_nodes_combine *combine, cudaStream_t stream);
cudaError_t cuda_launch_nodes_barrier(const struct cuda_nodes_barrier *barrier, cudaStream_t stream);

/* --- new routing for a plan of fixed capacity, counted, exchanged and placed by the devices ----------------------- */

/*
 * A slice holds the counts of one rank for one node: its tokens for the node, then for each rank and each expert of it.
 * A rank sends each rail peer the slice for that peer's node. The ranks of a node exchange the slices that they have
 * received, so that each knows where the rows of all sources begin on its node. The nodes exchange summaries of the
 * result. Then each rail peer receives the experts of the tokens that it will place.
 *
 * What the ranks of a node publish to each other, in cuda_signals.counts:
 */
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
    const void *topk_idx;                      /* NULL: a mask, or no tokens */
    const uint8_t *mask;                       /* [N,R] */
    const int32_t *mask_experts;               /* [E]; NULL: the routing is not a mask */
    int32_t idx64, expanded, bf16_sums;        /* idx64: type of topk_idx */
    int32_t distinct, drops;                   /* no token may name an expert twice; absent ranks count as -1 */
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
