/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/lowlatency.h - dispatch and combine for decoding: few tokens, fixed shapes, no plan, no exchange of counts
 * before the data.
 *
 * Layout. The output is packed per local expert, [L, R*M, H]: the rows of expert l are the first count[l] of its R*M
 * rows, ordered by (source rank, token index, k), with the same bits in every run. Each choice is a row, also where a
 * token names an expert more than once. An expert has room for M rows of each rank: EP_E_ROUTING, before anything is
 * sent, for a rank whose tokens choose it more often.
 *
 * Buffers. Pointers are host memory on the host backend and device memory on the CUDA backend. No call works in place:
 * an output that overlaps an input or another output of its call is EP_E_ARG, and the text names both fields. The
 * extent of a field is its full shape (recv_x: all of [L, R*M, H]). With EP_LL_RECV_HOOK this applies to both halves.
 *
 * Numbers. Dispatches are numbered from 1. A combine names its dispatch; a dispatch may have any number of combines, or
 * none. An ep_ll has buffers for two dispatches: after dispatch n+2, a combine of dispatch n is EP_E_STATE.
 *
 * Errors. Calls queue their work in their stream and return (epkit/stream.h). Errors that the kernels or the worker
 * detect later, such as invalid routing, fail the communicator: EP_E_ROUTING on this rank, and on its peers a status
 * that names this rank, whatever call they are in (with EP_LL_MASK_DEAD they mask it). The _sync forms queue in the
 * stream NULL and wait; on the host backend they detect invalid routing before anything is sent, and the communicator
 * does not change. Collective calls, threads and failure: as in comm.h.
 *
 * Deadlines. A late rank is named after the deadline. In a combine on the CUDA backend it is named after two deadlines
 * at most, because a rank whose row is missing may itself wait for the weights of another rank.
 *
 * Host backend. Buffers that peers write to get all their pages in ep_ll_new(). A combine's own buffer gets pages for
 * the rows that arrive; EP_E_MEMORY of ep_ll_combine() names the limit that they exceed. If the peers have ended or
 * left between the two halves of a combine, a rank reads the rows that they provided before; if these are in memory of
 * ep_alloc(), it gets EP_E_PEER_LEFT or EP_E_PEER_DEAD instead.
 *
 * Host backend between nodes. The same bits as on one node, over any network of the communicator. Each ep_ll has its
 * own endpoint, with a connection to each rank of the other nodes over the network "tcp", and a thread that sends the
 * data that is left when a call returns, and polls 50 times per second. A combine, or the sending half of one, lasts
 * until all ranks of other nodes that are not masked have begun theirs, because it needs their weights.
 *
 * CUDA backend. Up to 512 ranks, up to 32 on a node, and a topk of up to 32. Of two open calls with EP_LL_RECV_HOOK the
 * first is received when the second is sent, in its stream.
 *
 * CUDA backend between nodes. Each ep_ll has its own endpoint, with a connection to each rank of the other nodes over
 * the network "tcp" (RLIMIT_NOFILE), and a thread that sends and receives. Memory:
 *   - device memory: a segment with a row for each token of each rank, and max_tokens * topk more rows;
 *   - pinned host memory: for sending, max_tokens * (topk + 1) rows for each rank of another node; for receiving, the
 *     size of the segment; and rings of 1 MiB for each rank.
 * ep_ll_get_sizes() counts all of it: for 128 tokens of 7168 elements and 8 choices 1.2 GiB with 64 ranks (8 per node),
 * 6.3 GiB with 320 and 10.2 GiB with 512. After the first call the thread polls for kernels; when idle, once per
 * millisecond. ep_ll_free() sends the data that peers still wait for, until one deadline at most.
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
     * nothing, and the group continues. On the host backend a peer that is late because it waits for others also has
     * the deadlines of these waits. See ep_ll_get_mask(). A rank that was only late, but that others have masked, gets
     * EP_E_EXCLUDED from its next call. */
    EP_LL_MASK_DEAD = 1u << 8
};

typedef struct ep_ll_config {
    size_t size;        /* EP_LL_CONFIG_INIT sets it */
    int32_t max_tokens; /* M, the maximum of any call. All fields must be the same on all ranks */
    int32_t hidden;     /* H, a multiple of 128 (512 for EP_UE8M0) */
    int32_t n_experts;  /* E, a multiple of R */
    int32_t topk;       /* K, the maximum of any call */
    uint32_t flags;     /* EP_LL_* */
    uint32_t reserved;  /* 0 */
} ep_ll_config;

#define EP_LL_CONFIG_INIT EP_INIT(ep_ll_config)

/* Memory that an ep_ll with a given configuration would need. */
typedef struct ep_ll_sizes {
    size_t size;           /* EP_LL_SIZES_INIT sets it */
    int64_t rows;          /* L*R*M: rows of recv_x, recv_scales, recv_source and of a combine's x */
    int64_t library_bytes; /* that ep_ll_new() allocates on this rank; -1: unknown for this backend */
    int64_t combine_bytes; /* that combine buffers allocate later at most, as rows arrive */
} ep_ll_sizes;

#define EP_LL_SIZES_INIT EP_INIT(ep_ll_sizes)

/* Not collective. Same checks as ep_ll_new(), except those that compare ranks. */
EP_API ep_status ep_ll_get_sizes(const ep_comm *comm, const ep_ll_config *config, ep_ll_sizes *ret_sizes);

/* Collective. Succeeds on all ranks, or fails on all and names the same rank. Free it before ep_comm_free(). */
EP_API ep_status ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll);

/*
 * After a change of the members (ep_comm_regroup()) `ll` is of no use until this call, with which it is that of the
 * members of now. Collective: at this place in the order of calls a new member calls ep_ll_new() with the same
 * configuration. Numbers of dispatches begin again, no call is open, only absent ranks are masked. An ep_ll of the
 * present members stays as it is. On a failure `ll` can only be freed, or renewed again.
 *
 * CUDA backend: all that captured graphs refer to stays, so a graph with calls on `ll`, captured before the change or
 * after it, is valid from here on. A graph whose ep_ll was not renewed reaches no rank, and fails the communicator with
 * EP_E_STATE. A combine in a graph needs its dispatch in the same graph, or after this call.
 */
EP_API ep_status ep_ll_renew(ep_ll *ll);

/*
 * Not collective. Waits for queued work, and until the peers of this host have read the rows of its last combine, until
 * one deadline at most. Graph launches that contain its calls must have ended before; this call cannot detect them. In
 * a forked child it does nothing. NULL is allowed.
 */
EP_API void ep_ll_free(ep_ll *ll);

enum {
    /* Send only; ep_ll_finish() receives. On the CUDA backend the sending half of a combine without
     * EP_LL_NO_PARTIAL_REDUCE lasts until the ranks whose tokens are reduced here (with EP_LL_MASK_DEAD: all ranks)
     * have begun theirs, because it needs their weights. */
    EP_LL_RECV_HOOK = 1u << 9,

    /* Dispatch fp8: scales are powers of two (implied by EP_UE8M0). */
    EP_LL_ROUND_SCALE = 1u << 10,

    /* Combine: x is the buffer of ep_ll_get_combine_buffer(). */
    EP_LL_ZERO_COPY = 1u << 11,

    /* Combine: every row is sent separately, and the rank of a token adds its rows and rounds once. More exact, but
     * more bytes on the links. See ep_ll_combine_args. */
    EP_LL_NO_PARTIAL_REDUCE = 1u << 12,

    /* Dispatch nvfp4 and mxfp8: recv_scales in tiles of 128 rows, as block-scaled GEMMs read them: bytes
     * [L, ceil(R*M / 128), W, 32, 4, 4] with W words of four scales in a row; the scale b of word w of row r is at
     * [r / 128, w, r % 32, r % 128 / 32, b]. Bytes of rows that were not received are not written. */
    EP_LL_SWIZZLED_SCALES = 1u << 13
};

typedef struct ep_ll_dispatch_args {
    size_t size;
    const void *x;        /* [N,H] bf16 */
    const void *topk_idx; /* [N,K] EP_I32 or EP_I64, -1: none */
    int32_t idx_type;
    int32_t n_tokens;     /* N <= M, may differ between ranks */
    int32_t out_dtype;    /* EP_BF16: rows unchanged; EP_F8E4M3, EP_F4E2M1: quantised; the same on all ranks */
    int32_t scale_type;   /* fp8: EP_F32 or EP_UE8M0 of 128 elements, or EP_UE8M0_32 (mxfp8); fp4: EP_F8E4M3 of 16
                             elements (nvfp4); 0 for bf16; the same on all ranks */
    void *recv_x;         /* [L, R*M, H] of out_dtype */
    void *recv_scales;    /* [L, R*M, W] words of 4 bytes. EP_F32: dequantisation factors, W = H/128; four scales in a
                             word: EP_UE8M0, W = H/512; EP_UE8M0_32, W = H/128; EP_F8E4M3, W = H/64. bf16: NULL */
    int32_t *recv_count;  /* [L] */
    int32_t *recv_source; /* [L, R*M] token index on its source rank; NULL: not wanted */
    int64_t *recv_range;  /* [L,R] rows of each source: begin << 32 | count; NULL: not wanted */
    uint32_t flags;       /* EP_LL_RECV_HOOK, EP_LL_SWIZZLED_SCALES; EP_LL_ROUND_SCALE, the same on all ranks */
    int32_t max_tokens;   /* M of this call, at most that of ep_ll_new(), the same on all ranks: N <= M, and outputs are
                             [L, R*M, ...]. 0: that of ep_ll_new() */
    int64_t recv_scale_stride_token; /* strides of recv_scales within an expert, in elements of 4 bytes, > 0; experts
                                        are R*M * (elements of a row) apart. Both 0: contiguous rows. May differ between
                                        ranks */
    int64_t recv_scale_stride_block;
    int32_t *recv_stats_add; /* [L] the number of received rows is added to it; NULL: not wanted */
    int64_t *wait_cost_add;  /* [R] the nanoseconds of waiting for the rows of each rank are added to it; NULL: not
                                wanted */
    uint64_t *ret_call; /* host memory: the number of this dispatch, written before the call returns; may be NULL */
    int32_t topk; /* K of this call, at most that of ep_ll_new(): the columns of topk_idx. May differ between ranks.
                     0: that of ep_ll_new() */
    uint32_t reserved;         /* 0 */
    const float *global_scale; /* nvfp4: [1], > 0, by which the scales of blocks are multiplied; NULL: 1 */
} ep_ll_dispatch_args;

#define EP_LL_DISPATCH_ARGS_INIT EP_INIT(ep_ll_dispatch_args)

/*
 * Scale rule, per block of 128 elements of a row: amax = max(|x|, 1e-4); factor = amax / 448, with EP_LL_ROUND_SCALE
 * the smallest power of two not below it; stored value = x / factor, rounded to nearest even e4m3; recv_scales holds
 * factor.
 *
 * mxfp8, per block of 32 elements: factor = the smallest power of two not below max(|x|) / 448, at least 2^-127; stored
 * value as above.
 *
 * nvfp4, per block of 16 elements, with g = global_scale: scale = g * (max(|x|) / 6), rounded to nearest even e4m3, at
 * most 448; q = g / scale, or 0 where scale is 0; stored value = |x| * q, rounded to nearest even e2m1 (0, 0.5, 1, 1.5,
 * 2, 3, 4, 6), at most 6, with the sign of x; a NaN becomes 6. An element is its stored value * scale / g.
 *
 * All of them ignore NaN elements for max(|x|), and compute in fp32, rounded to nearest even.
 */
EP_API ep_status ep_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, ep_stream stream);
EP_API ep_status ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args);

/*
 * The rows of a token are reduced in two steps, so that each rank sends one row for it:
 *
 * - The choices k of the token (expert not -1, on a rank that is not masked) form one group per rank.
 * - A group of one choice sends its row unchanged. Its term is that row with the weight of the choice.
 * - A group of several choices sends their sum: s = 0; s = fma(weight[k], row[k], s) for its k in ascending order;
 *   rounded to bf16. Its term is that row with weight 1.
 * - out: s = 0; s = fma(weight, row, s) over the terms, in the order of the first k of each group; rounded to bf16.
 *
 * All arithmetic is fp32, rounded to nearest even. Rounding a partial sum adds an error of up to 2^-8 of it: half a
 * unit in the last place of a bf16. With EP_LL_NO_PARTIAL_REDUCE every choice is its own group, and only out is
 * rounded.
 *
 * With `signals` a combine overlaps with the kernels that write x: on the CUDA backend a rank sends the rows of a token
 * when the blocks that they are in are signalled, and those behind them in its order of tokens later; the host backend
 * waits for all blocks first. If a signal does not come until the deadline, the communicator fails with EP_E_TIMEOUT,
 * and the text names the expert and the block. Peers with EP_LL_MASK_DEAD mask a rank whose signals are late.
 */
typedef struct ep_ll_combine_args {
    size_t size;
    const void *x;        /* [L, R*M, H] bf16: the experts' outputs, rows as received */
    const void *topk_idx; /* as in the dispatch; -1 instead of an expert omits that row */
    int32_t idx_type;
    int32_t n_tokens;
    const float *topk_weights; /* [N,K]; NaN: EP_E_VALUE with EP_COMM_CHECK_VALUES */
    void *out;                 /* [N,H] bf16: the weighted sum of each token's rows, see above; 0 without rows */
    uint32_t flags;            /* EP_LL_RECV_HOOK, EP_LL_ZERO_COPY; EP_LL_NO_PARTIAL_REDUCE, the same on all ranks */
    int32_t topk;              /* 0, or K of its dispatch */
    uint64_t call;             /* number of its dispatch, the same on all ranks; 0: the last dispatch */
    int64_t *wait_cost_add;    /* [R] as in the dispatch */
    /*
     * x is still being written: [L, ceil(R*M / signal_rows)] counters, one for each expert and signal_rows of its rows.
     * A row is read when its counter has reached signal_value; whoever writes the rows adds to the counter afterwards
     * (release). Counters of blocks without rows are not read. Until the sending half ends they must not change
     * otherwise. NULL: x is complete.
     */
    const uint32_t *signals;
    int32_t signal_rows;   /* > 0; 0 without signals */
    uint32_t signal_value; /* 0 without signals */
    int32_t max_sms;   /* CUDA backend: with signals, the most SMs that the sending half occupies, because it waits for
                          kernels that need the others; 0: all */
    uint32_t reserved; /* 0 */
} ep_ll_combine_args;

#define EP_LL_COMBINE_ARGS_INIT EP_INIT(ep_ll_combine_args)

/* n_tokens, M and K must be those of its dispatch. */
EP_API ep_status ep_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream);
EP_API ep_status ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args);

/*
 * The second half of a call with EP_LL_RECV_HOOK: of dispatch number `call`, or of the combine that names it; 0: the
 * last call that is open. The outputs are valid after it, in stream order.
 *
 * A call with EP_LL_RECV_HOOK must be finished before the next call that names the same dispatch; in addition, dispatch
 * n and a combine of it before dispatch n+2, and a combine before the second combine after it. So two may be open, and
 * all ranks finish them in the same order. EP_E_STATE otherwise, or if none is open.
 *
 * The first of two open calls is received when the second is sent: work between the two sends overlaps with the first,
 * and work after both sends overlaps with the second only.
 */
EP_API ep_status ep_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream);
EP_API ep_status ep_ll_finish_sync(ep_ll *ll, uint64_t call);

/*
 * A buffer [L, R*M, H] bf16 for the experts' outputs, which the next combine reads without a copy; M is that of its
 * dispatch. Valid until that combine. Get it again before each combine, because peers may still read the rows of an
 * earlier one. The host backend waits for these reads and for queued work.
 */
EP_API ep_status ep_ll_get_combine_buffer(ep_ll *ll, void **ret_buffer);

/* ret_masked [R], host memory: 1 for masked ranks, else 0; the state when all queued work is complete. */
EP_API ep_status ep_ll_get_mask(const ep_ll *ll, int32_t *ret_masked);

/*
 * Change and read the mask in stream order. Not collective. set and clear need EP_LL_MASK_DEAD (else EP_E_STATE).
 * set: masks `rank` (on: 1), or unmasks it (on: 0); not this rank. A rank that is masked while it is working gets
 * EP_E_EXCLUDED, as a late rank does, also in a call that began before. An unmasked rank must be able to make the next
 * calls: if it has missed a call, it is masked again at the deadline. If it was masked for a single dispatch, it
 * received no rows of it, and that dispatch fails with EP_E_EXCLUDED on it.
 * clear: unmasks all ranks. Ranks may unmask each other at different times between the same two calls: the next call of
 * a rank that has unmasked another one waits until that one has unmasked it too; at the deadline it returns
 * EP_E_EXCLUDED.
 * query: sets `out` [R], in the same kind of memory as other outputs, to 1 for masked ranks and to 0 for others.
 */
EP_API ep_status ep_ll_set_mask(ep_ll *ll, int rank, int on, ep_stream stream);
EP_API ep_status ep_ll_clear_mask(ep_ll *ll, ep_stream stream);
EP_API ep_status ep_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream);

/*
 * For programs that treat several ep_ll of a communicator as one: they set and clear masks on all of them, and make
 * this call before a call on `ll` that follows one on `from`. Ranks that `from` masks are masked in `ll`, too. If a
 * call on `from` has found that a rank has unmasked this one, the next call on `ll` no longer waits for that. In stream
 * order, not collective; both need EP_LL_MASK_DEAD (else EP_E_STATE).
 */
EP_API ep_status ep_ll_merge_mask(ep_ll *ll, const ep_ll *from, ep_stream stream);

/* A barrier of the ranks that are not masked. With EP_LL_MASK_DEAD a rank that is late is masked. Collective. */
EP_API ep_status ep_ll_barrier(ep_ll *ll, ep_stream stream);

#ifdef __cplusplus
}
#endif

#endif
