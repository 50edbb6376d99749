/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/ops.h - dispatch and combine on a plan.
 *
 * Calls queue their work in their stream and return (epkit/stream.h). The _sync forms queue in the stream NULL and wait
 * for it.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend, aligned to 16 bytes; rows are
 * contiguous and a multiple of 16 bytes. Memory from ep_alloc() is used in place; other memory costs one local copy.
 * Buffers must stay valid, and inputs unchanged, until the operation is complete.
 *
 * No call works in place: an output that overlaps an input or another output is EP_E_ARG, and the text names both
 * fields. The extent of a field follows from its shape. Outputs of a dispatch have out_rows rows, as do inputs of a
 * combine while n_recv is unknown. Strided scales are the scales without the gaps between them; strided recv_scales are
 * all bytes from the first to the last. Inputs may overlap each other.
 */
#ifndef EPKIT_OPS_H
#define EPKIT_OPS_H

#include <epkit/memory.h>
#include <epkit/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    /*
     * x is bf16, and the rows that are sent are made of it: of `dtype` with scales of `scale_type`, by the scale rule
     * of ep_ll_dispatch() without EP_LL_ROUND_SCALE. The rows of a token are quantised once. May differ between ranks.
     * On CUDA by a kernel before that of the dispatch, on all SMs (with EP_COMM_STRICT_SMS on those of
     * ep_cuda_set_sms()), into memory of the communicator.
     */
    EP_DISPATCH_QUANTIZE = 1u << 14
};

typedef struct ep_dispatch_args {
    size_t size;        /* EP_DISPATCH_ARGS_INIT sets it */
    const void *x;      /* [N,H] */
    int32_t dtype;      /* EP_BF16, EP_F8E4M3 or EP_F4E2M1 (H a multiple of 64); the same on all ranks, as are hidden,
                           scale_type and which outputs are given */
    int32_t hidden;     /* H */
    const void *scales; /* [N,W] words of 4 bytes, sent unchanged. fp8: EP_F32, W = H/128; four scales in a word:
                           EP_UE8M0, W = H/512, and EP_UE8M0_32 (mxfp8), W = H/128; fp4: EP_F8E4M3 (nvfp4), W = H/64.
                           Rows of any type: EP_I32, W = scale_words, opaque. NULL: rows without scales */
    int32_t scale_type; /* one of these; 0 without scales */
    uint32_t flags;     /* EP_DISPATCH_QUANTIZE: then `scales` is NULL, and scale_type not EP_I32 */
    int64_t scale_stride_token; /* strides of `scales` in elements of 4 bytes; both 0: contiguous rows */
    int64_t scale_stride_block;
    const float *topk_weights; /* [N,K] or NULL */

    void *recv_x;        /* [out_rows,H] */
    void *recv_scales;   /* as scales, [out_rows, ...]; NULL without scales */
    void *recv_topk_idx; /* rank layout: [out_rows,K] of the plan's idx_type: local expert number, -1 for experts of
                            other ranks. NULL: not wanted. Expanded layout: must be NULL */
    float *recv_topk_weights; /* rank layout: [out_rows,K], 0 where the index is -1; expanded: [out_rows]. NULL: not
                                 wanted */
    int64_t out_rows; /* rows that the outputs hold: at least info.out_rows; once info.n_recv is known, that, but
                         not in a capture, nor with recv_source between nodes or on the host backend */

    int64_t recv_scale_stride_token; /* strides of `recv_scales` in elements of 4 bytes, > 0, so that no two elements
                                        coincide (any without rows); both 0: contiguous rows. May differ between
                                        ranks */
    int64_t recv_scale_stride_block;
    int32_t scale_words; /* with EP_I32: words of each row, 1..EP_MAX_SCALE_WORDS, the same on all ranks; otherwise 0 */
    int32_t source_stride;     /* of recv_source: as in ep_plan_metadata; 0 without it */
    int32_t *recv_source;      /* rank layout: [out_rows] as recv_source of ep_plan_metadata, with the rows. NULL: not
                                  wanted. Expanded layout: must be NULL */
    const float *global_scale; /* EP_DISPATCH_QUANTIZE with EP_F4E2M1: [1], as in ep_ll_dispatch_args; NULL: 1 */
} ep_dispatch_args;

#define EP_DISPATCH_ARGS_INIT EP_INIT(ep_dispatch_args)

/*
 * Sends each token's row to the ranks of its plan. Collective. Errors: 1xx before anything is sent; EP_E_MISMATCH if
 * ranks pass different plans, dtype, hidden, scale_type, scale_words or sets of outputs; ranks of different nodes are
 * compared when rows move between them. A rank that receives no rows must still pass non-NULL pointers for the outputs
 * that the others request. With a plan from a mask, recv_topk_idx and both weights must be NULL.
 */
EP_API ep_status ep_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
EP_API ep_status ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args);

enum {
    /* Add in the order of a token's choices instead of the order of ranks: see ep_combine(). Between nodes only with
     * EP_COMBINE_ROUND_PARTIAL (EP_E_UNSUPPORTED). */
    EP_COMBINE_BY_CHOICE = 1u << 3,

    /*
     * With EP_COMBINE_BY_CHOICE: the rows of each rank (expanded layout), and between nodes those of each node, are
     * first added and rounded to bf16. All ranks or none (EP_E_MISMATCH).
     *
     * On CUDA within a node, in the expanded layout with up to 32 choices and without topk_weights, each rank adds up
     * its own rows, on all SMs (with EP_COMM_STRICT_SMS on those of ep_cuda_set_sms()), into staging memory of out_rows
     * rows, so that one row for each (token, rank) crosses the links. Such a combine includes ep_plan_get_metadata():
     * the first one after new routing, unless recv_slot was requested of it, or after a capture, each one in a capture,
     * and each one of a plan that was updated in a capture.
     */
    EP_COMBINE_ROUND_PARTIAL = 1u << 4
};

typedef struct ep_combine_args {
    size_t size;               /* EP_COMBINE_ARGS_INIT sets it */
    const void *x;             /* [n_recv,H] bf16: one row for each received row; padding rows are not read. With a plan
                                  of fixed capacity, x and topk_weights have room for info.out_rows rows; once
                                  info.n_recv is known, for that, but not in a capture */
    int32_t dtype;             /* EP_BF16 */
    int32_t hidden;            /* H */
    const float *topk_weights; /* rank layout [n_recv,K], expanded [n_recv]; NULL: none */
    const void *bias[2];       /* [N,H] bf16 each, or NULL; added first, bias[0] before bias[1] */

    void *out;               /* [N,H] bf16; must not overlap any input or bias */
    float *out_topk_weights; /* [N,K]: per token and k the sum over its rows; NULL exactly if topk_weights is NULL */

    uint32_t flags; /* EP_COMBINE_*; on one node EP_COMBINE_BY_CHOICE may differ between ranks: each rank adds the rows
                       of its tokens */
    uint32_t reserved; /* 0 */
} ep_combine_args;

#define EP_COMBINE_ARGS_INIT EP_INIT(ep_combine_args)

/*
 * For each token of this rank: the unweighted sum of its rows in fp32, rounded once to bf16 (nearest even). A token
 * without rows and bias gives zeros.
 *
 * The order of addition is part of the contract: bias[0], bias[1], then the nodes in ascending order. Of this rank's
 * own node the rows are added one by one in rank order (expanded: in the order of expert, then k). Each other node is
 * one partial sum, which is added in the same order (and rounded to bf16 if partial_type of the communicator is
 * EP_BF16). The first term of each sum is used unchanged (it is not added to zero).
 *
 * With EP_COMBINE_BY_CHOICE (the order of DeepEP's ElasticBuffer): s = bias[0] + bias[1], or the one that is not NULL,
 * or 0; then the terms are added to s one by one, in fp32; s is rounded once to bf16.
 *   rank layout      a term for each rank that the token went to, its row there, in ascending order of the last k
 *                    whose expert is on that rank. A plan from a mask: in rank order.
 *   expanded         a term for each choice, its row, in ascending order of k.
 *   expanded, with EP_COMBINE_ROUND_PARTIAL
 *                    a term for each rank: 0 plus its rows in ascending order of k, in fp32, rounded to bf16; the terms
 *                    in ascending order of each rank's last k.
 *   several nodes    a term for each node: 0 plus the terms above of its ranks, in fp32, rounded to bf16; in ascending
 *                    order of each node's last k. From a mask: of its last rank.
 * Sums of weights are the same in all of them.
 */
EP_API ep_status ep_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);
EP_API ep_status ep_combine_sync(ep_plan *plan, const ep_combine_args *args);

#ifdef __cplusplus
}
#endif

#endif
