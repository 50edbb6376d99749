/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/ops.h - dispatch and combine on a plan.
 *
 * Calls queue in their stream and return (epkit/stream.h). The _sync forms queue in the stream NULL and wait for it.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend, aligned to 16 bytes; rows are
 * contiguous and a multiple of 16 bytes. Memory from ep_alloc() is used in place, other memory costs one local copy.
 * Buffers must stay valid, and inputs unchanged, until the operation is complete.
 *
 * No call works in place: an output that has a byte in common with an input or with another output is EP_E_ARG naming
 * both fields. What counts is what each field holds by its shape (outputs of a dispatch, and inputs of a combine while
 * n_recv is not known: out_rows rows; strided scales: the scales, not the gaps between them; strided recv_scales: all
 * from the first to the last). Inputs may overlap each other.
 */
#ifndef EPKIT_OPS_H
#define EPKIT_OPS_H

#include <epkit/memory.h>
#include <epkit/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_dispatch_args {
    size_t size;   /* EP_DISPATCH_ARGS_INIT sets it */
    const void *x; /* [N,H] */
    int32_t
        dtype; /* EP_BF16 or EP_F8E4M3; the same on all ranks, as are hidden, scale_type and which outputs are given */
    int32_t hidden;     /* H */
    const void *scales; /* fp8: EP_F32 [N,H/128] or EP_UE8M0 packed int32 [N,H/512]. Rows of any type: EP_I32, opaque
                           words [N,scale_words], which travel as they are. NULL: rows without scales */
    int32_t scale_type; /* EP_F32, EP_UE8M0 or EP_I32; 0 without scales */
    uint32_t flags;     /* 0 */
    int64_t scale_stride_token; /* strides of `scales` in elements of 4 bytes; both 0: contiguous rows */
    int64_t scale_stride_block;
    const float *topk_weights; /* [N,K] or NULL */

    void *recv_x;        /* [out_rows,H] */
    void *recv_scales;   /* as scales, [out_rows, ...]; NULL without scales */
    void *recv_topk_idx; /* rank layout: [out_rows,K] of the plan's idx_type: local expert number, -1 for experts of
                            other ranks. NULL: not wanted. Expanded layout: must be NULL */
    float *recv_topk_weights; /* rank layout: [out_rows,K], 0 where the index is -1; expanded: [out_rows]. NULL: not
                                 wanted */
    int64_t out_rows;         /* rows that the outputs hold: at least info.out_rows */

    int64_t recv_scale_stride_token; /* strides of `recv_scales` in elements of 4 bytes, > 0, so that no two elements
                                        coincide (any without rows); both 0: contiguous rows. May differ between
                                        ranks */
    int64_t recv_scale_stride_block;
    int32_t scale_words; /* with EP_I32: words of each row, 1..EP_MAX_SCALE_WORDS, the same on all ranks; otherwise 0 */
    uint32_t reserved;   /* 0 */
} ep_dispatch_args;

#define EP_DISPATCH_ARGS_INIT EP_INIT(ep_dispatch_args)

/*
 * Sends each token's row to the ranks of its plan. Collective. Errors: 1xx before anything is sent; EP_E_MISMATCH when
 * ranks give different dtype, hidden, scale_type, scale_words or outputs. A rank that receives no row still has
 * to pass pointers that are not NULL for the outputs that the others ask for. A plan from a mask has no recv_topk_idx
 * and no weights.
 */
EP_API ep_status ep_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream);
EP_API ep_status ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args);

enum {
    /* Add up in the order of a token's choices instead of that of the ranks: see ep_combine(). One node only. */
    EP_COMBINE_BY_CHOICE = 1u << 3,

    /* With EP_COMBINE_BY_CHOICE, expanded layout: the rows of each rank are added up and rounded to bf16 first. */
    EP_COMBINE_ROUND_PARTIAL = 1u << 4
};

typedef struct ep_combine_args {
    size_t size;               /* EP_COMBINE_ARGS_INIT sets it */
    const void *x;             /* [n_recv,H] bf16: one row for each received row; padding rows are not read. Has room
                                  for out_rows, where the plan has a fixed capacity, and so have its weights */
    int32_t dtype;             /* EP_BF16 */
    int32_t hidden;            /* H */
    const float *topk_weights; /* rank layout [n_recv,K], expanded [n_recv]; NULL: none */
    const void *bias[2];       /* [N,H] bf16 each, or NULL; added first, bias[0] before bias[1] */

    void *out;               /* [N,H] bf16; may overlap no input, no bias either */
    float *out_topk_weights; /* [N,K]: per token and k the sum over its rows; NULL exactly if topk_weights is NULL */

    uint32_t flags;    /* EP_COMBINE_*; may differ between ranks: each adds up its own tokens */
    uint32_t reserved; /* 0 */
} ep_combine_args;

#define EP_COMBINE_ARGS_INIT EP_INIT(ep_combine_args)

/*
 * For each of this rank's tokens: the sum of its rows, unweighted, in fp32, rounded once to bf16 (nearest even).
 * Order of addition, part of the contract: bias[0], bias[1], then per node in ascending order: the rows of this rank's
 * own node one by one in rank order (expanded: in expert order), each other node as one partial sum, itself added up
 * in that order (rounded to bf16 when the communicator's partial_type says so). The first term of either sum is taken
 * as it is (no addition to zero). A token without any row and bias gives zeros.
 *
 * With EP_COMBINE_BY_CHOICE (the order of DeepEP's ElasticBuffer): s = bias[0] + bias[1], or the one that is there, or
 * 0; then the terms are added to s one by one, in fp32; rounded once to bf16.
 *   rank layout      a term for each rank that the token went to, its row there, in ascending order of the last k
 *                    whose expert is on that rank. A plan from a mask: in rank order.
 *   expanded         a term for each choice, its row, in ascending order of k.
 *   expanded, with EP_COMBINE_ROUND_PARTIAL
 *                    a term for each rank: 0 plus its rows in ascending order of k, in fp32, rounded to bf16; the terms
 *                    in ascending order of each rank's last k.
 * Sums of weights are the same in all of them.
 */
EP_API ep_status ep_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream);
EP_API ep_status ep_combine_sync(ep_plan *plan, const ep_combine_args *args);

#ifdef __cplusplus
}
#endif

#endif
