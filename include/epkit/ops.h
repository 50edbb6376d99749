/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/ops.h - dispatch and combine on a plan.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend, aligned to 16 bytes; rows are
 * contiguous and a multiple of 16 bytes. Memory from ep_alloc() is used in place, other memory costs one local copy.
 * Buffers must stay valid and unchanged until the call returns, with EP_ASYNC until its event completes.
 *
 * Nothing works in place: an output that has a byte in common with an input or with another output is EP_E_ARG naming
 * both fields. What counts is what each field holds by its shape (outputs of a dispatch: out_rows rows; strided scales:
 * the scales, not the gaps between them). Inputs may overlap each other.
 */
#ifndef EPKIT_OPS_H
#define EPKIT_OPS_H

#include <epkit/event.h>
#include <epkit/memory.h>
#include <epkit/plan.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    EP_ASYNC = 1u << 0 /* return at once; *ret_event completes with the operation */
};

typedef struct ep_dispatch_args {
    size_t size;   /* EP_DISPATCH_ARGS_INIT sets it */
    const void *x; /* [N,H] */
    int32_t
        dtype; /* EP_BF16 or EP_F8E4M3; the same on all ranks, as are hidden, scale_type and which outputs are given */
    int32_t hidden;     /* H */
    const void *scales; /* fp8 only: EP_F32 [N,H/128] or EP_UE8M0 packed int32 [N,H/512]; NULL: rows without scales */
    int32_t scale_type; /* EP_F32 or EP_UE8M0; 0 without scales */
    uint32_t flags;     /* EP_ASYNC */
    int64_t scale_stride_token; /* strides of `scales` in elements (f32 or int32); both 0: contiguous rows */
    int64_t scale_stride_block;
    const float *topk_weights; /* [N,K] or NULL */

    void *recv_x;        /* [out_rows,H] */
    void *recv_scales;   /* as scales, contiguous rows; NULL without scales */
    void *recv_topk_idx; /* rank layout: [out_rows,K] of the plan's idx_type: local expert number, -1 for experts of
                            other ranks. NULL: not wanted. Expanded layout: must be NULL */
    float *recv_topk_weights; /* rank layout: [out_rows,K], 0 where the index is -1; expanded: [out_rows]. NULL: not
                                 wanted */
    int64_t out_rows;         /* rows that the outputs hold: at least info.out_rows */

    ep_event *after; /* start when this event is complete; NULL: at once. Borrowed until then */
} ep_dispatch_args;

#define EP_DISPATCH_ARGS_INIT EP_INIT(ep_dispatch_args)

/*
 * Sends each token's row to the ranks of its plan. Collective. ret_event: NULL without EP_ASYNC, required with it.
 * Errors: 1xx before anything is sent; EP_E_MISMATCH when ranks give different dtype, hidden, scale_type or outputs.
 * A rank that receives no row still says by a pointer that is not NULL which outputs it wants.
 */
EP_API ep_status ep_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_event **ret_event);

typedef struct ep_combine_args {
    size_t size;               /* EP_COMBINE_ARGS_INIT sets it */
    const void *x;             /* [n_recv,H] bf16: one row for each received row; padding rows are not read */
    int32_t dtype;             /* EP_BF16 */
    int32_t hidden;            /* H */
    const float *topk_weights; /* rank layout [n_recv,K], expanded [n_recv]; NULL: none */
    const void *bias[2];       /* [N,H] bf16 each, or NULL; added first, bias[0] before bias[1] */

    void *out;               /* [N,H] bf16; may overlap no input, no bias either */
    float *out_topk_weights; /* [N,K]: per token and k the sum over its rows; NULL exactly if topk_weights is NULL */

    ep_event *after;
    uint32_t flags;    /* EP_ASYNC */
    uint32_t reserved; /* 0 */
} ep_combine_args;

#define EP_COMBINE_ARGS_INIT EP_INIT(ep_combine_args)

/*
 * For each of this rank's tokens: the sum of its rows, unweighted, in fp32, rounded once to bf16 (nearest even).
 * Order of addition, part of the contract: bias[0], bias[1], then per node in ascending order: the rows of this rank's
 * own node one by one in rank order (expanded: in expert order), each other node as one partial sum, itself added up
 * in that order (rounded to bf16 when the communicator's partial_type says so). The first term of either sum is taken
 * as it is (no addition to zero). A token without any row and bias gives zeros.
 */
EP_API ep_status ep_combine(ep_plan *plan, const ep_combine_args *args, ep_event **ret_event);

#ifdef __cplusplus
}
#endif

#endif
