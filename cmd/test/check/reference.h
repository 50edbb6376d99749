/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reference.h - reference implementation of dispatch and combine, by epkit/plan.h, ops.h and lowlatency.h.
 *
 * A model of the whole group in one process: from the routing of all ranks it computes, for one rank, the position of
 * each row and the combined row of each token, bit by bit. Optimised for readability. Rows are identified by (source
 * rank, token) and computed one at a time; data.h generates their contents.
 */
#ifndef EP_TEST_CHECK_REFERENCE_H
#define EP_TEST_CHECK_REFERENCE_H

#include "routings.h"

#include <epkit/types.h>
#include <stdint.h>

/* The routing of all ranks. Tests may fill in the fields; reference_group_done() must not be called then. */
struct reference_group {
    int n_ranks, n_nodes, ranks_per_node;
    int topk, n_experts, n_local; /* K, E, L */
    int *n_tokens;                /* [R] */
    int32_t **experts;            /* [R] of [N,K] */
    float **weights;              /* [R] of [N,K] */
};

/* n_nodes must divide the ranks. */
bool reference_group_init(const struct routing *routing, int n_nodes, struct reference_group *ret_group,
                          struct check_error *error);
void reference_group_done(struct reference_group *group);

/* Counts of one rank's own tokens: ep_plan_layout(). */
struct reference_counts {
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nodes] */
    int32_t *tokens_per_expert; /* [E] */
    uint8_t *token_in_rank;     /* [N,R] */
};

void reference_counts_init(const struct reference_group *group, int rank, struct reference_counts *ret_counts);
void reference_counts_done(struct reference_counts *counts);

/* A received row. */
struct reference_row {
    int32_t rank, token; /* its source; -1, -1: padding */
    int32_t k;           /* expanded: the selection of the token; rank layout and padding: -1 */
};

/* The rows that one rank receives, and the expected contents of its ep_plan_info. */
struct reference_layout {
    int rank;
    bool expanded;
    int64_t n_rows; /* info.n_recv */
    struct reference_row *rows;
    int64_t n_send, n_wire, n_net;
    int32_t *recv_per_expert; /* [L], rounded up to the alignment */
    int64_t *recv_from_rank;  /* [R+1]; NULL when expanded */
    int64_t *expert_start;    /* [L+1]; NULL unless expanded */
};

/* alignment >= 1. */
void reference_layout_init(const struct reference_group *group, int rank, bool expanded, int alignment,
                           struct reference_layout *ret_layout);
void reference_layout_done(struct reference_layout *layout);

/*
 * recv_topk_idx and recv_topk_weights of a row that `rank` receives in rank layout: [K] each, local expert or -1,
 * weight or 0.
 */
void reference_row_selections(const struct reference_group *group, int rank, const struct reference_row *row,
                              int32_t *ret_experts, float *ret_weights);

/* recv_topk_weights of a received row in expanded layout; 0 for padding. */
float reference_row_weight(const struct reference_group *group, const struct reference_row *row);

/*
 * The bf16 input row of combine on `rank` for a token of `source`. `k`: the selection whose row it is, -1 in rank
 * layout.
 */
typedef void (*reference_reply_fn)(void *context, int rank, int k, int source, int token, uint16_t *ret_row);

/* Memory for the sums of one row: too much for a stack. */
struct reference_scratch {
    float total[EP_MAX_HIDDEN], partial[EP_MAX_HIDDEN];
    uint16_t row[EP_MAX_HIDDEN];
};

struct reference_combine {
    int hidden;
    bool expanded;
    bool bf16_partials;     /* the communicator's partial_type is EP_BF16 */
    bool no_partial_reduce; /* low latency: EP_LL_NO_PARTIAL_REDUCE */
    reference_reply_fn reply;
    void *context;
};

/* The combined row of one token. bias[i]: that token's row [H], or NULL. */
void reference_combine_row(const struct reference_group *group, const struct reference_combine *combine, int rank,
                           int token, const uint16_t *const bias[2], struct reference_scratch *scratch,
                           uint16_t *ret_row);

/* --- low latency --- */

/* Rows are packed as in the expanded layout without alignment; each expert's rows start at a multiple of R*M. */

/*
 * Quantises a row as specified for ep_ll_dispatch(): [H] bytes and [H/128] factors. Byte order of packed scales: see
 * reference_pack_ue8m0().
 */
void reference_quantize(const uint16_t *row, int hidden, bool round_scale, uint8_t *ret_row, float *ret_factors);

/*
 * The same for nvfp4 (`block` 16: [H/2] bytes of codes and [H/16] of scales) and mxfp8 (32: [H] and [H/32]), as
 * contiguous bytes.
 */
void reference_quantize_blocks(const uint16_t *row, int hidden, int block, float global_scale, uint8_t *ret_row,
                               uint8_t *ret_scales);

/* Packs H/128 factors, which are powers of two, into H/512 int32. */
void reference_pack_ue8m0(const float *factors, int n, int32_t *ret_packed);

/* The row as seen by an expert: bytes times factors, rounded once to bf16. */
void reference_dequantize(const uint8_t *row, const float *factors, int hidden, uint16_t *ret_row);

/* The combined row of one token, without masked ranks; calls `reply` for each selection. */
void reference_ll_combine_row(const struct reference_group *group, const struct reference_combine *combine, int rank,
                              int token, struct reference_scratch *scratch, uint16_t *ret_row);

#endif
