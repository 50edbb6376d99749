/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/lowlatency.h - dispatch and combine for decoding: few tokens, fixed shapes, no plan, no exchange of counts
 * ahead of the data.
 *
 * Output is packed per local expert, [L, R*M, H]: expert l's rows are the first count[l] of its R*M, ordered by (source
 * rank, token index) - the same bits in every run.
 *
 * Host backend: buffers for what peers send take all their pages in ep_ll_new(); a combine's own buffer takes those of
 * the rows that come, and EP_E_MEMORY of ep_ll_combine() names the limit that they do not fit into. A rank that comes
 * back between the two halves of a call, when its peers have given it up and have freed what it still had to read, gets
 * EP_E_PEER_LEFT.
 *
 * A late rank is named after the deadline, in a combine on the CUDA backend after two at most: a rank whose row does
 * not come may itself be waiting for another one's weights.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend. Nothing works in place: an output
 * that has a byte in common with an input or with another output of its call is EP_E_ARG naming both fields, where what
 * counts is the shape of each field (recv_x: all of [L, R*M, H]). With EP_LL_RECV_HOOK that holds for both halves.
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
    /* A peer that dies or misses its deadline is masked: it counts as a rank without tokens, its experts contribute
     * nothing, the group goes on. See ep_ll_get_mask(). A rank that others have masked, but that was only late, gets
     * EP_E_EXCLUDED from its next call. */
    EP_LL_MASK_DEAD = 1u << 0,

    /* Combine: every row travels by itself, and a token's rows are added up at its rank and rounded once. More exact,
     * more bytes on the links. See ep_ll_combine_args. */
    EP_LL_SUM_ONCE = 1u << 1
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
    /* Only send; ep_ll_finish() receives. On the CUDA backend the sending half of a combine lasts until the ranks whose
     * tokens are added up here have begun theirs, with EP_LL_MASK_DEAD all ranks, because it takes their weights; not
     * with EP_LL_SUM_ONCE. */
    EP_LL_RECV_HOOK = 1u << 0,

    /* Dispatch fp8: scales are powers of two (implied by EP_UE8M0). */
    EP_LL_ROUND_SCALE = 1u << 1,

    /* Combine: x is the buffer of ep_ll_get_combine_buffer(). */
    EP_LL_ZERO_COPY = 1u << 2,

    /* CUDA backend: return when the call is queued in the communicator's stream, where its outputs are valid in order.
     * It counts for the ep_ll_finish() of the call, too. Every call is queued like that while the stream is being
     * captured into a CUDA graph. The host backend takes the flag without effect.
     *
     * What fails after the return is the status of a later call, or of ep_comm_async_error(). Routing that is not valid
     * then fails the communicator: EP_E_ROUTING here, and naming this rank on its peers, whatever call they are in
     * (with EP_LL_MASK_DEAD they mask it). */
    EP_LL_ASYNC = 1u << 3
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
    void *recv_scales; /* EP_F32: [L, R*M, H/128] dequantisation factors; EP_UE8M0: int32 [L, R*M, H/512]; bf16: NULL */
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

/*
 * A token's rows are added up in two steps, so that one row of it travels from each rank:
 *
 * - Its choices k (expert not -1, on a rank that is not masked) form one group for each rank.
 * - A group of one choice sends its row as it is. Its term is that row, with the choice's weight.
 * - A group of several sends their sum: s = 0; s = fma(weight[k], row[k], s) for its k in ascending order; rounded to
 *   bf16. Its term is that row, with weight 1.
 * - out: s = 0; s = fma(weight, row, s) over the terms, in the order of each group's first k; rounded to bf16.
 *
 * All of it in fp32, rounded to nearest even. The rounding of partial sums adds an error of up to 2^-8 of each: half a
 * unit in the last place of a bf16. With EP_LL_SUM_ONCE every choice is a group of its own, and only out is rounded.
 */
typedef struct ep_ll_combine_args {
    size_t size;
    const void *x;        /* [L, R*M, H] bf16: the experts' outputs, rows as received */
    const void *topk_idx; /* as in the dispatch that it answers */
    int32_t idx_type;
    int32_t n_tokens;
    const float *topk_weights; /* [N,K]; NaN: EP_E_VALUE with EP_COMM_CHECK_VALUES */
    void *out;                 /* [N,H] bf16: the weighted sum of each token's rows, see above; 0 without any */
    uint32_t flags;            /* EP_LL_RECV_HOOK, EP_LL_ZERO_COPY, EP_LL_ASYNC */
    uint32_t reserved;         /* 0 */
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
