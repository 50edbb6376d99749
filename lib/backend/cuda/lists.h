/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lists.h - the lists of a plan between nodes: the tokens of this rank for each other node, and the rows on this node
 * of its rail peers' tokens. Made on the host (nodes.c) or, after an update of a plan of fixed capacity, by the devices
 * (nodes_update.c).
 */
#ifndef EP_CUDA_LISTS_H
#define EP_CUDA_LISTS_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/proxy.h"

struct cuda_lists {
    struct cuda_block block;
    struct cuda_list_side net, rails; /* of this rank's tokens; of the rail peers' tokens */
    struct cuda_list_memory device;
    struct cuda_rail_route route;                /* in it */
    uint64_t rows_self, rows_node, rows_forward; /* own tokens: here, on the rest of the node; rail peers' tokens */
    void *copy;                                  /* lists made on the host: the host's copy of the block */
    struct cuda_nodes_update *update;            /* lists made by the devices: the arguments of their kernels */
    /*
     * Of these lists, what the proxy reads. Kernels write it after an exchange with all other nodes. The proxy takes
     * part in that exchange after every operation called before, so it never reads what belongs to a later plan.
     */
    struct cuda_host_block *info;
};

/* Remote nodes on which one token can have experts, at most. */
static inline int32_t cuda_remote_width(const ep_plan *plan)
{
    int nodes = plan->comm->nnodes - 1;

    return plan->args.topk < nodes ? plan->args.topk : nodes;
}

/*
 * nodes.c. Lays out lists of `own` tokens of this rank for other nodes and `rails` tokens of its rail peers, from *at
 * on; n: tokens of this rank.
 */
void cuda_lists_lay_out(const ep_plan *plan, size_t own, size_t rails, size_t n, void *memory, size_t *at,
                        struct cuda_list_memory *l);
/* Writes the lists that the host has made, and counts their rows. */
void cuda_lists_fill(const ep_plan *plan, const struct cuda_list_memory *l, struct cuda_lists *lists);
/* `host`: the copies that the host reads. */
void cuda_lists_point_to(const ep_plan *plan, const struct cuda_list_memory *host,
                         const struct cuda_list_memory *device, struct cuda_lists *lists);

/* nodes_update.c */
ep_status cuda_nodes_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/*
 * Gives a complete plan with max_recv_tokens, before a graph captures its operations, lists that later updates rewrite;
 * they are filled with the present ones.
 */
ep_status cuda_nodes_plan_make_updatable(struct cuda_comm *cuda, ep_plan *plan);
/*
 * Makes a plan of fixed capacity in a capture. Waits for the hosts of all ranks, which must make it in a capture too.
 * On failure nothing of the plan remains.
 */
ep_status cuda_nodes_plan_capture(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args);
/* rank_prefix of an updated plan. No single node has it, so this is an operation between nodes. */
ep_status cuda_nodes_plan_prefix(const struct cuda_call *call, const ep_plan *plan, int32_t *prefix);

#endif
