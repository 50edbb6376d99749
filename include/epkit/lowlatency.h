/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/lowlatency.h - dispatch and combine for decoding: few tokens, fixed shapes, no plan, no exchange of counts
 * ahead of the data.
 *
 * Output is packed per local expert, [L, R*M, H]: expert l's rows are the first count[l] of its R*M, ordered by (source
 * rank, token index) - the same bits in every run.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend.
 *
 * An ep_ll owns the buffers for two results at a time: the outputs of a dispatch must have been consumed by its combine
 * before the second next dispatch. Collective rules, threads and failure as in comm.h. On communicators of several
 * nodes: EP_E_UNSUPPORTED on the host backend. The CUDA backend serves one node and a topk of up to 32.
 */
#ifndef EPKIT_LOWLATENCY_H
#define EPKIT_LOWLATENCY_H

#include <epkit/event.h>
#include <epkit/memory.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_ll ep_ll;

enum {
    EP_LL_MASK_DEAD = 1u << 0 /* a peer that dies or misses its deadline is masked: it counts as a rank without tokens,
                                 its experts contribute nothing, the group goes on. See ep_ll_get_mask(). A rank that
                                 others have masked, but that was only late, gets EP_E_EXCLUDED from its next call */
};

typedef struct ep_ll_config {
    size_t size;        /* EP_LL_CONFIG_INIT sets it */
    int32_t max_tokens; /* M; all fields the same on all ranks */
    int32_t hidden;     /* H, a multiple of 128 (512 for EP_UE8M0) */
    int32_t n_experts;  /* E, a multiple of R */
    int32_t topk;       /* K */
    uint32_t flags;     /* EP_LL_* */
    uint32_t reserved;  /* 0 */
} ep_ll_config;

#define EP_LL_CONFIG_INIT EP_INIT(ep_ll_config)

EP_API ep_status ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll);
EP_API void ep_ll_free(ep_ll *ll);

enum {
    EP_LL_RECV_HOOK = 1u << 0,   /* only send; ep_ll_finish() receives */
    EP_LL_ROUND_SCALE = 1u << 1, /* dispatch fp8: scales are powers of two (implied by EP_UE8M0) */
    EP_LL_ZERO_COPY = 1u << 2,   /* combine: x is the buffer of ep_ll_get_combine_buffer() */
    EP_LL_ASYNC =
        1u << 3 /* CUDA backend: return when the call is queued in the communicator's stream, where its
                   outputs are valid in order; the host backend takes it without effect. What fails
                   then is the status of a later call, or of ep_comm_async_error(). Routing that is not
                   valid then fails the communicator: EP_E_ROUTING here, and naming this rank on its
                   peers, whatever call they are in (with EP_LL_MASK_DEAD they mask it). So is every call while the
                   stream is being captured into a CUDA graph. Counts for the ep_ll_finish() of the call, too */
};

typedef struct ep_ll_dispatch_args {
    size_t size;
    const void *x;        /* [N,H] bf16 */
    const void *topk_idx; /* [N,K] EP_I32 or EP_I64, -1: none */
    int32_t idx_type;
    int32_t n_tokens;   /* N <= M, may differ between ranks */
    int32_t out_dtype;  /* EP_BF16: rows as they are; EP_F8E4M3: quantised per 128 elements on the way; the same on all
                           ranks */
    int32_t scale_type; /* fp8: EP_F32 or EP_UE8M0; 0 for bf16; the same on all ranks */
    void *recv_x;       /* [L, R*M, H] of out_dtype */
    void *recv_scales; /* EP_F32: [L, R*M, H/128] dequantisation factors; EP_UE8M0: int32 [L, R*M, H/512]; NULL for bf16
                        */
    int32_t *recv_count;  /* [L] */
    int32_t *recv_source; /* [L, R*M] token index on its source rank; NULL: not wanted */
    int64_t *recv_range;  /* [L,R] rows of each source: begin << 32 | count; NULL: not wanted */
    uint32_t flags;       /* EP_LL_RECV_HOOK, EP_LL_ASYNC; EP_LL_ROUND_SCALE, the same on all ranks */
    uint32_t reserved;    /* 0 */
} ep_ll_dispatch_args;

#define EP_LL_DISPATCH_ARGS_INIT EP_INIT(ep_ll_dispatch_args)

/*
 * Scale rule, per block of 128 elements of a row: amax = max(|x|, 1e-4), factor = amax / 448, with rounding on the next
 * power of two not below it; stored value = x / factor rounded to nearest even e4m3; `recv_scales` holds factor.
 */
EP_API ep_status ep_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args);

typedef struct ep_ll_combine_args {
    size_t size;
    const void *x;        /* [L, R*M, H] bf16: the experts' outputs, rows as received */
    const void *topk_idx; /* as in the dispatch that it answers */
    int32_t idx_type;
    int32_t n_tokens;
    const float *topk_weights; /* [N,K]; NaN: EP_E_VALUE with EP_COMM_CHECK_VALUES */
    void *out; /* [N,H] bf16: sum over k in ascending k of weight * row, fp32 with fused multiply-add, rounded once */
    uint32_t flags;    /* EP_LL_RECV_HOOK, EP_LL_ZERO_COPY, EP_LL_ASYNC */
    uint32_t reserved; /* 0 */
} ep_ll_combine_args;

#define EP_LL_COMBINE_ARGS_INIT EP_INIT(ep_ll_combine_args)

/* Answers the oldest dispatch that no combine has answered yet. */
EP_API ep_status ep_ll_combine(ep_ll *ll, const ep_ll_combine_args *args);

/* The second half of the last call made with EP_LL_RECV_HOOK; its outputs are valid after it. EP_E_STATE if none is
 * open. */
EP_API ep_status ep_ll_finish(ep_ll *ll);

/*
 * Buffer [L, R*M, H] bf16 that needs no copy to be read from, to write the experts' outputs into, for the next combine.
 * Valid until that combine: to be asked for before each, because peers may still read the rows of an earlier one.
 */
EP_API ep_status ep_ll_get_combine_buffer(ep_ll *ll, void **ret_buffer);

/* ret_masked [R]: 1 for ranks that are masked, 0 otherwise. */
EP_API ep_status ep_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

#ifdef __cplusplus
}
#endif

#endif
