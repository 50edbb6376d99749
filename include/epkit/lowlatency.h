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
 * back between the two halves of a combine, when its peers have ended or left, reads what they have offered; where that
 * is memory of ep_alloc() it gets EP_E_PEER_LEFT or EP_E_PEER_DEAD.
 *
 * A late rank is named after the deadline, in a combine on the CUDA backend after two at most: a rank whose row does
 * not come may itself be waiting for another one's weights.
 *
 * Pointers are host memory on the host backend and device memory on the CUDA backend. No call works in place: an output
 * that has a byte in common with an input or with another output of its call is EP_E_ARG naming both fields, where what
 * counts is the shape of each field (recv_x: all of [L, R*M, H]). With EP_LL_RECV_HOOK that holds for both halves.
 *
 * Dispatches are numbered from 1. Combines name the dispatch that they answer: any number of them may, or none. An
 * ep_ll owns the buffers for two dispatches: dispatch n+2 voids n, and a combine of n is EP_E_STATE from then on.
 *
 * Calls queue in their stream and return (epkit/stream.h). What the kernels or the worker find wrong later, such as
 * invalid routing, fails the communicator: EP_E_ROUTING here, and naming this rank on its peers, whatever call they are
 * in (with EP_LL_MASK_DEAD they mask it). The _sync forms queue in the stream NULL and wait; on the host backend they
 * find invalid routing before anything is sent, as a status that changes nothing.
 *
 * Collective rules, threads and failure as in comm.h.
 *
 * Host backend between nodes: the same bits as on one node, over whatever network the communicator has. Each ep_ll
 * opens an endpoint of its own there, with a connection to each rank of the other nodes over the network "tcp", and a
 * thread that sends what has not left when a call returns. A combine, and the sending half of one, lasts until all
 * ranks of other nodes that are not masked have begun theirs, because it takes their weights.
 *
 * The CUDA backend has it for up to 512 ranks, of nodes of up to 32, and a topk of up to 32. It has one call with
 * EP_LL_RECV_HOOK open at a time. Between nodes each ep_ll has an endpoint of its own there, too, a thread that sends
 * and receives, rings of 1 MiB for each rank, a connection to each rank of the other nodes over the network "tcp"
 * (RLIMIT_NOFILE), and pinned host memory for what travels: max_tokens * (topk + 1) rows for each rank of another node,
 * as much as its segment in device memory for what comes. The segment has a row for each token of each rank, and
 * max_tokens * topk more. ep_ll_get_sizes() counts all of it; of 128 tokens of 7168 elements and 8 choices it is
 * 1.2 GiB with 64 ranks, 8 on a node, 6.3 GiB with 320 and 10.2 GiB with 512. Once there was a call the thread wakes
 * up to look for kernels, every millisecond when nothing happens. ep_ll_free() sends what peers still wait for, for one
 * deadline at most.
 */
#ifndef EPKIT_LOWLATENCY_H
#define EPKIT_LOWLATENCY_H

#include <epkit/memory.h>
#include <epkit/stream.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_ll ep_ll;

enum {
    /* A peer that dies or misses its deadline is masked: it counts as a rank without tokens, its experts contribute
     * nothing, the group goes on. On the host backend one that is late because it waits for others has the deadlines
     * of these waits besides. See ep_ll_get_mask(). A rank that others have masked, but that was only late, gets
     * EP_E_EXCLUDED from its next call. */
    EP_LL_MASK_DEAD = 1u << 8
};

typedef struct ep_ll_config {
    size_t size;        /* EP_LL_CONFIG_INIT sets it */
    int32_t max_tokens; /* M, the most of any call; all fields the same on all ranks */
    int32_t hidden;     /* H, a multiple of 128 (512 for EP_UE8M0) */
    int32_t n_experts;  /* E, a multiple of R */
    int32_t topk;       /* K */
    uint32_t flags;     /* EP_LL_* */
    uint32_t reserved;  /* 0 */
} ep_ll_config;

#define EP_LL_CONFIG_INIT EP_INIT(ep_ll_config)

/* What an ep_ll would take, before there is one. */
typedef struct ep_ll_sizes {
    size_t size;           /* EP_LL_SIZES_INIT sets it */
    int64_t rows;          /* L*R*M: rows of recv_x, recv_scales, recv_source and of a combine's x */
    int64_t library_bytes; /* what ep_ll_new() takes of this rank's memory at once; -1: not known for this backend */
    int64_t combine_bytes; /* the most that combine buffers take besides, as rows come */
} ep_ll_sizes;

#define EP_LL_SIZES_INIT EP_INIT(ep_ll_sizes)

/* Not collective. The checks of ep_ll_new(), but for those that compare ranks. */
EP_API ep_status ep_ll_get_sizes(const ep_comm *comm, const ep_ll_config *config, ep_ll_sizes *ret_sizes);

/* Collective. Succeeds on all ranks, or fails on all, naming the same rank. Free it before ep_comm_free(). */
EP_API ep_status ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll);

/*
 * Not collective. Waits for what is queued, and until the peers of this host have read what its last combine offers
 * them, for one deadline at most. Launches of graphs that hold calls of it must have ended before: it does not know of
 * them. In a forked child it does nothing. NULL is fine.
 */
EP_API void ep_ll_free(ep_ll *ll);

enum {
    /* Only send; ep_ll_finish() receives. On the CUDA backend the sending half of a combine lasts until the ranks whose
     * tokens are added up here have begun theirs, with EP_LL_MASK_DEAD all ranks, because it takes their weights; not
     * with EP_LL_NO_PARTIAL_REDUCE. */
    EP_LL_RECV_HOOK = 1u << 9,

    /* Dispatch fp8: scales are powers of two (implied by EP_UE8M0). */
    EP_LL_ROUND_SCALE = 1u << 10,

    /* Combine: x is the buffer of ep_ll_get_combine_buffer(). */
    EP_LL_ZERO_COPY = 1u << 11,

    /* Combine: every row travels by itself, and a token's rows are added up at its rank and rounded once. More exact,
     * more bytes on the links. See ep_ll_combine_args. */
    EP_LL_NO_PARTIAL_REDUCE = 1u << 12
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
    uint32_t flags;       /* EP_LL_RECV_HOOK; EP_LL_ROUND_SCALE, the same on all ranks */
    int32_t max_tokens; /* M of this call, the same on all ranks: N is not more, and outputs are [L, R*M, ...] with it.
                           0: that of ep_ll_new(), which is the most */
    int64_t recv_scale_stride_token; /* strides of recv_scales within an expert, in elements of 4 bytes, > 0; experts
                                        are R*M * (elements of a row) apart. Both 0: contiguous rows. May differ between
                                        ranks */
    int64_t recv_scale_stride_block;
    int32_t *recv_stats_add; /* [L] rows received are added to it; NULL: not wanted */
    int64_t
        *wait_cost_add; /* [R] nanoseconds until the rows of each rank were here are added to it; NULL: not wanted */
    uint64_t *ret_call; /* host memory: the number of this dispatch, written before the call returns; may be NULL */
} ep_ll_dispatch_args;

#define EP_LL_DISPATCH_ARGS_INIT EP_INIT(ep_ll_dispatch_args)

/*
 * Scale rule, per block of 128 elements of a row: amax = max(|x|, 1e-4), factor = amax / 448, with rounding on the next
 * power of two not below it; stored value = x / factor rounded to nearest even e4m3; `recv_scales` holds factor.
 */
EP_API ep_status ep_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, ep_stream stream);
EP_API ep_status ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args);

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
 * unit in the last place of a bf16. With EP_LL_NO_PARTIAL_REDUCE every choice is a group of its own, and only out is
 * rounded.
 */
typedef struct ep_ll_combine_args {
    size_t size;
    const void *x;        /* [L, R*M, H] bf16: the experts' outputs, rows as received */
    const void *topk_idx; /* as in the dispatch that it answers, but -1 where that has an expert leaves its row out */
    int32_t idx_type;
    int32_t n_tokens;
    const float *topk_weights; /* [N,K]; NaN: EP_E_VALUE with EP_COMM_CHECK_VALUES */
    void *out;                 /* [N,H] bf16: the weighted sum of each token's rows, see above; 0 without any */
    uint32_t flags;            /* EP_LL_RECV_HOOK, EP_LL_ZERO_COPY; EP_LL_NO_PARTIAL_REDUCE, the same on all ranks */
    uint32_t reserved;         /* 0 */
    uint64_t call;             /* number of the dispatch that it answers, the same on all ranks; 0: the last one */
    int64_t
        *wait_cost_add; /* [R] nanoseconds until the rows of each rank were here are added to it; NULL: not wanted */
} ep_ll_combine_args;

#define EP_LL_COMBINE_ARGS_INIT EP_INIT(ep_ll_combine_args)

/* n_tokens and M are those of the dispatch that it answers. */
EP_API ep_status ep_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
EP_API ep_status ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args);

/*
 * The second half of a call with EP_LL_RECV_HOOK: of dispatch number `call`, or of the combine that answers it; 0: the
 * last that is open. Its outputs are valid after it, in the order of `stream`. A call with a hook is finished before
 * the next one that names the same dispatch, a dispatch before the second next dispatch, a combine before the second
 * next combine; so two may be open, and all ranks finish them in the same order. EP_E_STATE otherwise, or if none is
 * open. The CUDA backend receives the first of two when the second is sent: what runs between them overlaps, what runs
 * behind both with the second alone.
 */
EP_API ep_status ep_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
EP_API ep_status ep_ll_finish_sync(ep_ll *ll, uint64_t call);

/*
 * Buffer [L, R*M, H] bf16 that needs no copy to be read from, to write the experts' outputs into, for the next combine;
 * M is that of the dispatch that it answers. Valid until that combine: to be asked for before each, because peers may
 * still read the rows of an earlier one. The host backend waits until they have, and for what is queued.
 */
EP_API ep_status ep_ll_get_combine_buffer(ep_ll *ll, void **ret_buffer);

/* ret_masked [R], host memory: 1 for ranks that are masked, 0 otherwise, when what is queued is complete. */
EP_API ep_status ep_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

/*
 * Masks in the order of the stream. Not collective. set and clear need EP_LL_MASK_DEAD (else EP_E_STATE).
 * set: `rank`, another one than this, is masked (on: 1) or is waited for again (on: 0). A rank that is masked while it
 * works gets EP_E_EXCLUDED, as one that was late does, also in a call that began before. One that is waited for again
 * must be able to follow: if it has missed a call it is masked again at the deadline. If it was masked for a single
 * dispatch it got no rows of that one, which then fails with EP_E_EXCLUDED.
 * clear: all ranks are waited for again. Ranks may take their masks back at different times: a rank that has done so
 * waits in its next call for those that still mask it, until the deadline, and gets EP_E_EXCLUDED from then on. query:
 * `out` [R], in memory as other outputs, becomes 1 for ranks that are masked, 0 for others.
 */
EP_API ep_status ep_ll_set_mask(ep_ll *ll, int rank, int on, ep_stream stream);
EP_API ep_status ep_ll_clear_mask(ep_ll *ll, ep_stream stream);
EP_API ep_status ep_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream);

/* A barrier of the ranks that are not masked; with EP_LL_MASK_DEAD one that does not come is masked. Collective. */
EP_API ep_status ep_ll_barrier(ep_ll *ll, ep_stream stream);

#ifdef __cplusplus
}
#endif

#endif
