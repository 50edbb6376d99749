/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes.h - dispatch, combine and barrier between nodes: what the host tells the kernels of nodes.cu.
 *
 * Two hops, as on the host (hop.c): a token goes once to the rail peer on each other node, which places its rows there,
 * and adds them up on the way back. Rows travel in chunks: a kernel packs them into pinned memory and raises a word, a
 * thread of the rank, the proxy (proxy.c), sends them; what lands is read by the moving kernel from the memory that the
 * network has put it into, and given back by a word.
 */
#ifndef EP_CUDA_NODES_H
#define EP_CUDA_NODES_H

#include "backend/cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

#define CUDA_CHUNK_TOKENS 32     /* most in a chunk */
#define CUDA_MAX_REMOTE_NODES 32 /* other nodes on which one token can have experts: a lane for each */
#define CUDA_NODES_WARPS 8       /* of a block; also tokens of a unit of this rank's own */

/* Tokens of a list that one other node has: those from `first` on. */
struct cuda_node_range {
    int32_t first, n;
};

/* A chunk that has landed. In host memory; `number` is written last. */
struct cuda_landed {
    uint64_t address; /* on the device, behind the head of the message */
    uint64_t number;  /* of the operation that it belongs to */
};

/*
 * The chunks of one direction of an operation. Chunk i of a node has its tokens [i * chunk_tokens, ...), and its words
 * and its place are those of slot rail.first / chunk_tokens + node + i: as many as the chunks of all nodes, and one for
 * each node.
 */
struct cuda_chunks {
    const struct cuda_node_range *rail; /* device memory, [nnodes]; n of this node is 0 */
    int32_t nnodes, node;
    int32_t max_per_node; /* chunks that one node has, at most */
    int32_t tokens;
    int32_t phase; /* of the waits for them */
    int32_t unused;
};

/* Memory for the chunks of an operation, by slot. */
struct cuda_net_buffers {
    /* Out: where chunks are packed, slot_bytes each, and words in host memory that say that they are. */
    unsigned char *arena;
    uint64_t *ready;
    /* In: host memory but for `taken`, which counts tokens and is 0 between kernels. */
    const struct cuda_landed *landed;
    uint64_t *consumed;
    uint32_t *n_read;
};

/*
 * An operation that a kernel hands to the proxy. In host memory; `number` is written last. The device counts the
 * operations between nodes, because a captured graph runs one again that the host has called once.
 */
struct cuda_op_post {
    uint64_t op; /* op_ring.h */
    uint64_t number;
};

/* An operation waits for the arena of the one before the last: so many posts are never open at a time. */
#define CUDA_OP_POSTS 8

#define CUDA_CHUNK_SLOT(first, tokens, node, chunk) ((first) / (tokens) + (node) + (chunk))

/* What the proxy tells the kernels, in host memory. */
struct cuda_proxy_words {
    uint64_t sent;   /* operations whose chunks have all left */
    uint64_t events; /* counts changes of `sent` and of all `landed`, behind each */
    int32_t blocked; /* rank of the group to which something has still to go; -1: none */
    int32_t unused;
};

/* What the kernels of an operation need of the proxy. */
struct cuda_net_op_args {
    struct cuda_net_buffers buffers[2]; /* for even and odd numbers */
    struct cuda_op_post *posts;         /* host memory, [CUDA_OP_POSTS] */
    uint64_t op;
    size_t slot_bytes;
    const struct cuda_proxy_words *words;
    const uint64_t
        *moved; /* host memory, [nnodes + 1]: counts chunks that come from each node, and those that go out */
};

/* What is behind the rows of a chunk, for each token: scales, and the weights of its choices. */
struct cuda_row_meta {
    int32_t scale_words, weight_words;
};

/* Gathers the rows that go to other nodes. */
struct cuda_pack {
    struct cuda_waits waits;
    struct cuda_net_op_args op;
    struct cuda_chunks out;
    const int32_t *token; /* [all of the lists] */
    const unsigned char *x;
    const uint32_t *scales;
    const float *weights;
    int64_t scale_stride_token, scale_stride_block, row_bytes;
    struct cuda_row_meta meta;
    int32_t blocks;
};

/* Tokens of the rail peers: their rows on this node. */
struct cuda_rail_route {
    const struct cuda_entry *entry; /* [tokens, width], of each the first count[t], in the order of the sum */
    const int32_t *count, *index;   /* [tokens], [tokens,K] */
    int32_t width, unused;
};

struct cuda_nodes_dispatch {
    struct cuda_dispatch own; /* of this rank's tokens; its shape and stage are not used */
    struct cuda_net_op_args op;
    struct cuda_chunks in;
    struct cuda_rail_route rail;
    struct cuda_row_meta meta;
    int32_t blocks;
};

/* One term of a token from another node: token `at` of the lists. */
struct cuda_remote_term {
    int32_t node, at;
};

struct cuda_nodes_combine {
    struct cuda_combine own;
    struct cuda_net_op_args op;
    struct cuda_chunks out, in;
    struct cuda_rail_route rail;
    /*
     * Rows of bf16 that the sums of the list of `node` before token `at` of all lists take, at [at + node]; one of fp32
     * takes two. Behind the last token of each list, too: so many words as there are tokens and nodes.
     */
    const int32_t *rail_units, *net_units;
    const int32_t *remote_count;           /* [N] */
    const struct cuda_remote_term *remote; /* [N, far_width], of each the first far_count[t], ascending */
    int32_t weight_words, remote_width, blocks, unused;
};

/* A message to each other node, and one from it. */
struct cuda_nodes_barrier {
    struct cuda_waits waits;
    struct cuda_net_op_args op;
    struct cuda_chunks chunks; /* both ways; one empty chunk a node */
};

cudaError_t cuda_launch_pack(const struct cuda_pack *pack, cudaStream_t stream);
cudaError_t cuda_launch_nodes_dispatch(const struct cuda_nodes_dispatch *dispatch, cudaStream_t stream);
cudaError_t cuda_launch_nodes_combine(const struct cuda_nodes_combine *combine, cudaStream_t stream);
cudaError_t cuda_launch_nodes_barrier(const struct cuda_nodes_barrier *barrier, cudaStream_t stream);
cudaError_t cuda_nodes_load(void);

#ifdef __cplusplus
}
#endif

#endif
