/* SPDX-License-Identifier: Apache-2.0 */
/*
 * lists.h - the lists of a plan between nodes: which of this rank's tokens go to each other node, and where the tokens
 * of its rail peers go on this one. Made on the host (nodes.c), or by the devices, for a plan of fixed capacity that
 * was updated (nodes_update.c).
 */
#ifndef EP_CUDA_LISTS_H
#define EP_CUDA_LISTS_H

#include "backend/cuda/cuda.h"
#include "backend/cuda/nodes.h"
#include "backend/cuda/proxy.h"

/* Lists of one direction. The same in memory of the host, and in device memory. */
struct cuda_list_side {
    const struct cuda_node_range *rail, *rail_device; /* [nnodes] */
    const int32_t *units, *units_device;              /* as in struct cuda_nodes_combine */
    /* Not 0: the device writes them anew; then the host's are pinned, and there are so many tokens, at most. */
    int32_t capacity;      /* of all lists together */
    int32_t node_capacity; /* of one */
};

struct cuda_net_update;   /* nodes_update.c */
struct cuda_nodes_update; /* nodes_update.h */

struct cuda_lists {
    struct cuda_block block;
    struct cuda_list_side net, rails; /* of this rank's tokens; of the rail peers' */
    /* In device memory: as in nodes.h. */
    const int32_t *token;
    struct cuda_rail_route route;
    const int32_t *remote_count;
    const struct cuda_remote_term *remote;
    int32_t remote_width;
    uint64_t rows_self, rows_node, rows_forward; /* own tokens here and on the rest of the node; rail peers' */
    char *copy;                                  /* made on the host: of the block */
    struct cuda_net_update *update;              /* made by the devices */
};

/* Other nodes on which one token can have experts. */
static inline int32_t cuda_remote_width(const ep_plan *plan)
{
    int nodes = plan->comm->nnodes - 1;

    return plan->args.topk < nodes ? plan->args.topk : nodes;
}

/* nodes.c. Without sizes. */
struct cuda_net_direction cuda_net_direction_of(const struct cuda_list_side *lists);

/* nodes_copy.c. Fills new lists with those that the plan has; `u`: what an update of the new ones writes. */
ep_status cuda_net_copy_plan(struct cuda_comm *cuda, const ep_plan *plan, struct cuda_lists *to,
                             const struct cuda_nodes_update *u);

/* nodes_update.c */
ep_status cuda_nodes_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/*
 * Of a plan with max_recv_tokens that is complete, whose operations a graph is to name: lists that a later update
 * writes anew, with what is in those of the host.
 */
ep_status cuda_nodes_plan_make_updatable(struct cuda_comm *cuda, ep_plan *plan);
/*
 * A new plan of fixed capacity in a capture. Waits for the hosts of all ranks, which are to make it in theirs. On
 * failure nothing of the plan is left.
 */
ep_status cuda_nodes_plan_capture(const struct cuda_call *call, ep_plan *plan, const ep_plan_args *args,
                                  bool *ret_queued);
void cuda_net_update_free(struct cuda_net_update *update);
/* rank_prefix of an updated plan, which no node has alone: an operation between nodes. */
ep_status cuda_nodes_plan_prefix(const struct cuda_call *call, const ep_plan *plan, int32_t *prefix, bool *ret_queued);
/* Where the counts of an updated plan are, for its metadata. */
void cuda_net_update_fill_metadata(const struct cuda_net_update *update, struct cuda_metadata *m);
/* Pinned memory of all plans of the communicator. */
void cuda_net_plan_info_close(struct cuda_comm *cuda);

#endif
