/* SPDX-License-Identifier: Apache-2.0 */
/*
 * host.h - internals of the host backend: the data path of a group (group/group.h) whose rows are moved by processors.
 *
 *   dispatch.c, combine.c   within a node;  internode.c  between nodes
 *   plan_metadata.c         metadata of a plan that is exchanged as rows
 *   lowlatency*.c           low latency; lowlatency_net.c  between nodes
 *   rows*.c                 the inner loops
 */
#ifndef EP_HOST_HOST_H
#define EP_HOST_HOST_H

#include "backend/host/rows.h"
#include "group/group.h"
#include "group/plan.h"

#include <math.h>

/* A communicator of this backend. */
struct host_comm {
    struct ep_group group; /* first: comm->impl points to both */
    struct host_ll *lls;   /* low-latency objects with a network that are not freed */
};

/* host.c */
ep_status host_comm_open(ep_comm *comm, const ep_boot *boot);

/* plan_metadata.c */
ep_status host_plan_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);
ep_status host_plan_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);

/* dispatch.c, combine.c */
ep_status host_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
ep_status host_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);
/* For rows of the library itself, on the thread that runs jobs: does not change the statistics. */
ep_status host_dispatch_internal(ep_plan *plan, const ep_dispatch_args *args);

/* Parameters of placing rows into the final outputs of this node. */
struct host_move {
    struct ep_group *group;
    const ep_plan *plan;
    const ep_dispatch_args *args;
    uint32_t outputs;                         /* EP_GROUP_RECV_* */
    size_t row_bytes, scale_bytes;            /* of one row */
    const unsigned char *scales;              /* [N] contiguous rows */
    unsigned char *(*out)[EP_GROUP_AT_COUNT]; /* [nlocal] outputs of the ranks of this node */
    void (*copy)(void *const *dst, int n, const void *src, size_t bytes);
    ep_stats *stats;
};

/* Places token t of a route: the row and its metadata. Returns the number of rows. */
int host_place(const struct host_move *move, const struct ep_group_route *route, int t, const void *row,
               const void *scales, const float *weights);

/* Places this rank's tokens [begin, end) on this node. */
void host_place_own(const struct host_move *move, int begin, int end);

/* internode.c: a whole dispatch between nodes, including own tokens on this node. */
ep_status host_internode_dispatch(const struct host_move *move);

/* Parameters of a combine: combine.c, and internode.c between nodes. */
struct host_sum {
    struct ep_group *group;
    const ep_plan *plan;
    const ep_combine_args *args;
    size_t row_bytes;
    unsigned char *(*in)[EP_GROUP_AT_COUNT]; /* [nlocal] inputs of the ranks of this node */
    ep_stats *stats;
    void (*sum_bf16)(uint16_t *out, const struct ep_row_term *terms, int n, int count);
    uint16_t *scratch; /* with EP_COMBINE_BY_CHOICE: a row of zeros, then K rows, then one */
};

/* The terms of token t: its biases, and its rows on this node in the order of ranks. Return their number. */
int host_bias_terms(const struct host_sum *sum, int t, struct ep_row_term *ret_terms);
int host_row_terms(const struct host_sum *sum, const struct ep_group_route *route, int t,
                   struct ep_row_term *ret_terms);

/* EP_COMBINE_BY_CHOICE: the terms of the ranks of this node. They may be in the K rows of sum->scratch. */
int host_choice_terms(const struct host_sum *sum, const struct ep_group_route *route, int t,
                      struct ep_row_term *ret_terms);

/* Writes the sum of n terms, zeros if there are none, to the output of token t. */
void host_sum_terms(const struct host_sum *sum, int t, const struct ep_row_term *terms, int n);
/* Adds the weights of token t of a route to sum[K]. */
void host_sum_weights(const struct host_sum *sum, const struct ep_group_route *route, int t, float *ret_sum);
ep_status host_internode_combine(const struct host_sum *sum);

/* For EP_COMM_CHECK_VALUES. */
static inline bool host_has_nan(const float *values, size_t n)
{
    bool found = false;

    for (size_t i = 0; i < n; i++)
        found |= isnan(values[i]) != 0;
    return found;
}

/*
 * Where peers access `bytes` of *buffer: in place if `in_place` and it is symmetric memory; otherwise in staging, which
 * *buffer is then. Nowhere if it is NULL or has no bytes.
 */
ep_status host_publish(struct ep_group *group, const char *call, int which, bool in_place, size_t bytes, void **buffer,
                       struct ep_group_address *ret_address);
/*
 * Publishes the op descriptor of the next operation on `plan`, waits for those of the node and compares them. They are
 * copied to group->descriptors: read them there, not in the control blocks.
 */
ep_status host_op_begin(struct ep_group *group, const ep_plan *plan, const struct ep_group_descriptor *descriptor);
/* Maps the buffers of the ranks of the node, by the sizes of their rows; of 0 bytes: NULL. */
ep_status host_op_map(struct ep_group *group, enum ep_group_phase phase, const size_t row_bytes[EP_GROUP_AT_COUNT],
                      unsigned char *(*ret_at)[EP_GROUP_AT_COUNT]);
/* Publishes that this rank has moved its part and waits for the others of the node. */
ep_status host_op_end(struct ep_group *group, enum ep_group_phase phase);
/* Adds the rows of this rank's tokens on this node to the statistics of the operation, and publishes them. */
void host_op_set_stats(const ep_plan *plan, uint64_t row_bytes, ep_stats *stats);

/* Stops the threads of low-latency objects with a network: lowlatency_net.c. */
void host_ll_stop_threads(struct ep_group *group);

/* lowlatency.c */
ep_status host_ll_open(ep_ll *ll);
int64_t host_ll_bytes(const ep_comm *comm, const ep_ll_config *config, int64_t *ret_combine_bytes);
void host_ll_close(ep_ll *ll);
ep_status host_ll_renew(ep_ll *ll);
ep_status host_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number, ep_stream stream);
ep_status host_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
ep_status host_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
ep_status host_ll_control(ep_ll *ll, const struct ep_ll_control *control, ep_stream stream);
ep_status host_ll_combine_buffer(ep_ll *ll, void **ret_buffer);
ep_status host_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

#endif
