/* SPDX-License-Identifier: Apache-2.0 */
/* plan.h - the device part of plans. */
#ifndef EP_CUDA_PLAN_H
#define EP_CUDA_PLAN_H

#include "backend/cuda/proxy.h"
#include "group/plan.h"

struct cuda_plan {
    struct cuda_block block;           /* entries, counts, indices */
    struct cuda_block ordered;         /* expanded: entries in the order of EP_COMBINE_BY_CHOICE; made on first use */
    uint32_t order;                    /* of the present routing, in `ordered`: flags of the combine; 0: none */
    bool ordered_in_graph;             /* then the host does not know which order is there */
    struct cuda_block metadata_counts; /* between nodes: counts for metadata of a plan of exact counts; made on first
                                          use */
    struct cuda_block sources;         /* rows of metadata in flight; made on first use */
    struct cuda_block slots;           /* [received tokens, K] their rows, [received tokens] sources; on first use */
    bool has_slots;                    /* they are those of the present routing */
    bool updated_in_graph;             /* then the host does not know whether they are */
    struct cuda_block routing;         /* a copy of the routing of a new plan that was in host memory */
    const int64_t *exact_counts;       /* these counts, in `metadata_counts`; NULL: not there yet */
    struct cuda_route route;           /* without n_tokens: cuda_plan_ready() */
    bool uploaded;                     /* the route is complete */
    struct cuda_lists *lists;          /* between nodes; NULL on one */
    /* Device memory, expanded layout. [L+1] first rows of this rank's experts; [L] numbers of rows without padding. */
    int32_t *expert_start, *expert_exact;

    bool on_device; /* the devices have made it (update.c), or update it */
    int max_tokens;
    bool captured; /* made in a capture: the graph uses its memory, and the host gets no counts */
    struct cuda_update update;
    ep_plan *plan;
    struct cuda_host_block *info; /* struct cuda_plan_info */
    uint64_t expected;            /* number of the update whose counts the host waits for */
    struct cuda_plan *next_pending;
};

static inline struct cuda_plan *cuda_plan_of(const ep_plan *plan)
{
    return ep_group_plan_of(plan)->device;
}

/* CUDA_DESC_PLAN of its operations; 0: kernels read it. */
static inline uint32_t cuda_plan_word(const ep_plan *plan)
{
    return plan->comm->nnodes > 1 && cuda_plan_of(plan)->captured ? (uint32_t)ep_group_plan_of(plan)->number : 0;
}

/* Of memory of the plan that only its operations use. */
static inline enum cuda_block_use cuda_plan_block_use(const ep_plan *plan)
{
    return cuda_plan_of(plan)->captured ? CUDA_BLOCK_OF_GRAPHS : CUDA_BLOCK_OF_OPERATIONS;
}

/* The routing in the arguments of a new plan. */
static inline ep_plan_update_args cuda_routing_of(const ep_plan_args *args)
{
    return (ep_plan_update_args){.size = sizeof(ep_plan_update_args),
                                 .topk_idx = args->topk_idx,
                                 .token_in_rank = args->token_in_rank,
                                 .tokens_per_expert = args->tokens_per_expert,
                                 .n_tokens = args->n_tokens};
}

/* Do only the devices know the rows of each rank? Then buffers have the capacity. */
static inline bool cuda_has_capacity(const ep_plan *plan)
{
    return cuda_plan_of(plan)->on_device && plan->args.max_recv_tokens > 0;
}

/* Rows in this rank's receive buffers: the number that it receives, or may receive. */
static inline int64_t cuda_plan_rows(const ep_plan *plan)
{
    return cuda_has_capacity(plan) ? plan->args.max_recv_tokens : plan->full.n_recv;
}

/* Rows that the caller's buffers have at least: fewer than the capacity once the host knows the counts. */
static inline int64_t cuda_plan_known_rows(const ep_plan *plan)
{
    int64_t n_recv = ep_plan_info_now(plan)->n_recv;

    return n_recv >= 0 ? n_recv : cuda_plan_rows(plan);
}

/* update.c */
/* Within a node. The host waits for the counts of a plan without max_recv_tokens. */
ep_status cuda_plan_open_on_device(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args);
/* Waits for the counts of a plan of fixed capacity. */
ep_status cuda_plan_wait(ep_plan *plan);
/* Gives a plan its device part, which is empty. */
ep_status cuda_plan_new_device(ep_plan *plan);
/* Frees the device part of a plan of either kind; NULL: it has none. */
void cuda_plan_free_device(struct cuda_comm *cuda, struct cuda_plan *device);
ep_status cuda_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);
/* The op descriptor of an update, for a plan of that number; 0: the kernel reads it. */
struct cuda_op_desc cuda_update_desc(const ep_plan *plan, int number);
/* After a wait: completes the pending plans whose counts have arrived. */
void cuda_plans_poll(struct cuda_comm *cuda);
/* EP_E_CAPACITY, once, if an operation was refused because a rank would have received too many rows. */
ep_status cuda_check_refused(struct cuda_comm *cuda);
/* cuda_find_refused() returns EP_E_CAPACITY until cuda_check_refused() has reported it. Any thread may call it. */
ep_status cuda_find_refused(const struct cuda_comm *cuda);

/* metadata.c */
/* The counts of a plan that metadata reads: their size in bytes, and the counts in host memory. */
size_t cuda_metadata_counts_bytes(const ep_plan *plan);
void cuda_metadata_counts_write(const ep_plan *plan, int64_t *ret_counts);
ep_status cuda_plan_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);
/*
 * Fills in the received tokens, all but .from and .to: slots and sources as in the metadata. Expanded layout on one
 * node. An operation where the plan has none of its present routing: the same on all ranks.
 */
ep_status cuda_plan_slots(struct cuda_call *call, ep_plan *plan, struct cuda_reduce *reduce);
ep_status cuda_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

/* plan.c */
/* Between nodes: the host makes the plan; `renews`: again, of one that has its device part, for other members. */
ep_status cuda_plan_make_on_host(const struct cuda_call *call, ep_plan *plan, const ep_plan_update_args *routing,
                                 bool renews);
ep_status cuda_plan_open(ep_plan *plan, const ep_plan_args *args);
/* The fields of a route that follow from the plan's arguments, without its memory. */
struct cuda_route cuda_route_shape(const ep_plan *plan);
/* Sets the device's route, and lays out the memory that plans of both kinds have, from *at on, the counts first. */
void cuda_plan_lay_out(const ep_plan *plan, int max_tokens, char *memory, size_t *at, struct cuda_plan *device);
/* The fields of a count that follow from the plan and the memory of its route. */
struct cuda_count cuda_count_of(const ep_plan *plan, const struct cuda_plan *device);
/* Writes what the host knows of a plan that it has made to an image of the plan's memory. */
void cuda_plan_fill(const struct cuda_comm *cuda, const ep_plan *plan, const struct cuda_plan *image);
/* Converts the entries of a token; returns their number. */
int32_t cuda_copy_entries(const struct ep_group_route *route, int token, struct cuda_entry *ret_entries);
/*
 * For the kernels that count a new plan: copies choices that are in host memory to the device, and names the copy in
 * `routing`. Otherwise checks as below.
 */
ep_status cuda_routing_to_device(const struct cuda_call *call, const ep_plan *plan, struct cuda_block *ret_copy,
                                 ep_plan_update_args *routing);
/* Checks that the arrays of a routing are in memory that the kernels can use. */
ep_status cuda_check_routing(struct cuda_comm *cuda, const char *call, const ep_plan_update_args *routing);
/* Copies `bytes` of routing to host memory, ordered by `stream`; the caller frees the copy. */
ep_status cuda_fetch_routing(const void *topk_idx, size_t bytes, cudaStream_t stream, void **ret_copy);
/*
 * The host's error text for a routing that the device has found invalid. `drop`: choices of absent ranks are no error.
 * `otherwise`: if the host finds nothing.
 */
ep_status cuda_explain_routing(const ep_comm *comm, const struct ep_routing_shape *shape, bool drop,
                               const void *topk_idx, int idx_type, cudaStream_t stream, const char *otherwise);
void cuda_plan_close(ep_plan *plan);
ep_status cuda_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
/* Completes the plan with the peers, if not yet done, and its route; *ret_route: for the tokens of the call. */
ep_status cuda_plan_ready(const struct cuda_call *call, ep_plan *plan, struct cuda_route *ret_route);
/*
 * Adds an operation to the statistics: rows of this rank's tokens in its own memory and in that of the others.
 * `reduced`: one for each (token, rank), of a plan whose slots are known.
 */
void cuda_plan_count(const ep_plan *plan, uint64_t row_bytes, bool reduced);

/*
 * The lists of a plan between nodes: the tokens of this rank for each other node, and the rows on this node
 * of its rail peers' tokens. Made on the host (nodes.c) or, after an update of a plan of fixed capacity, by the devices
 * (nodes_update.c).
 */
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
 * Gives a plan with max_recv_tokens lists that the devices write. `keep_routing`: filled with its present routing,
 * which is complete: before a graph captures its operations.
 */
ep_status cuda_nodes_plan_make_lists(struct cuda_comm *cuda, ep_plan *plan, bool keep_routing);
/*
 * Makes a plan of fixed capacity in a capture. Waits for the hosts of all ranks, which must make it in a capture too.
 * On failure nothing of the plan remains.
 */
ep_status cuda_nodes_plan_capture(struct cuda_call *call, ep_plan *plan, const ep_plan_args *args);
/* rank_prefix of an updated plan. No single node has it, so this is an operation between nodes. */
ep_status cuda_nodes_plan_prefix(const struct cuda_call *call, const ep_plan *plan, int32_t *prefix);

#endif
