/* SPDX-License-Identifier: Apache-2.0 */
/*
 * proxy.h - operations between nodes: a thread, the proxy, sends and receives chunks of rows between this rank and its
 * rail peers, while the kernels of nodes.cu pack and read them. It runs the operations in the order in which the device
 * posts them (op_ring.c), which is the same on all ranks.
 */
#ifndef EP_CUDA_PROXY_H
#define EP_CUDA_PROXY_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/nodes.h"

/* Lists of one direction, with the same contents in host and device memory. */
struct cuda_list_side {
    const struct cuda_node_range *rail, *rail_device; /* [nnodes] */
    const int32_t *units;                             /* as in struct cuda_nodes_combine */
    /*
     * Not 0: the device rewrites the lists before it posts an operation, the host's copies are pinned, and this is
     * their capacity in tokens.
     */
    int32_t capacity;      /* of all lists together */
    int32_t node_capacity; /* of the list of one node */
};

struct cuda_net_op_params {
    const char *name; /* of the call */
    enum ep_group_phase phase;
    const uint32_t *desc;                  /* [CUDA_DESC_COMPARED] must be the same on all ranks */
    int plan;                              /* its number, if `desc` has none; one in a graph is not compared */
    const struct cuda_list_side *out, *in; /* NULL: one token for each other node */
    int32_t tokens;                        /* of a chunk, at most */
    size_t token_bytes, unit_bytes;        /* a token takes token_bytes, and unit_bytes for each of its units */
    size_t max_units;                      /* of a token */
};

struct cuda_net_op;

/* Tokens of the largest chunk, if each takes that many bytes. */
int32_t cuda_net_chunk_tokens(const struct cuda_comm *cuda, size_t token_bytes);

/* Collective over the group; starts the proxy, also after cuda_proxy_leave(). Not called on one node. */
ep_status cuda_proxy_open(struct cuda_comm *cuda, const ep_boot *boot);
/* Ends the proxy at once, and its connections. What kernels and graphs use stays. */
void cuda_proxy_leave(struct cuda_comm *cuda);
/*
 * Stops the proxy after the last kernel. First sends what peers still wait for, until the deadline of the communicator;
 * not if the group has failed.
 */
void cuda_proxy_stop(struct cuda_comm *cuda);
/* Stops the proxy and frees everything. */
void cuda_proxy_close(struct cuda_comm *cuda);
size_t cuda_proxy_bytes(const struct cuda_comm *cuda);
/* Number of chunks received and sent since the communicator was made; 0 on one node. Called by any thread. */
uint64_t cuda_proxy_count_chunks(const struct cuda_comm *cuda);

/*
 * Makes an operation and allocates its memory. The proxy runs it when the first kernel posts it: once for a call, and
 * with each launch of a graph. *ret_op must be discarded if no kernel was launched.
 */
ep_status cuda_net_op_prepare(const struct cuda_call *call, const struct cuda_net_op_params *params,
                              struct cuda_net_op_args *ret_args, struct cuda_chunks *ret_out,
                              struct cuda_chunks *ret_in, struct cuda_net_op **ret_op);
void cuda_net_op_discard(struct cuda_comm *cuda, struct cuda_net_op *op);
/* Discards the operation if its first launch has failed. Returns `status`, that of the launch. */
ep_status cuda_net_op_end_launch(struct cuda_comm *cuda, struct cuda_net_op *op, ep_status status);
/* As ep_cuda_set_net_memory() and ep_cuda_get_net_memory(); no effect on one node. */
ep_status cuda_proxy_set_memory(struct cuda_comm *cuda, size_t reserve, size_t limit);
void cuda_proxy_get_memory(const struct cuda_comm *cuda, size_t *ret_held, size_t *ret_needed);

/* nodes.c. Makes the lists of a plan between nodes, in device memory. */
ep_status cuda_lists_make(struct cuda_comm *cuda, ep_plan *plan);
/* NULL: none. */
void cuda_lists_free(struct cuda_comm *cuda, struct cuda_lists *lists);
ep_status cuda_nodes_dispatch(struct cuda_call *call, ep_plan *plan, const struct cuda_dispatch *own, int weight_words);
ep_status cuda_nodes_combine(struct cuda_call *call, ep_plan *plan, const struct cuda_combine *own);
/* The part of a barrier between the two barriers of the node's ranks. */
ep_status cuda_nodes_barrier(const struct cuda_call *call);

#endif
