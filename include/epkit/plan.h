/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/plan.h - a plan says where the tokens of one routing go.
 *
 * It depends on the top-k choice alone, not on the data: dispatch and combine may use it any number of times, in both
 * directions (the backward pass of a dispatch is a combine on the same plan, that of a combine is a dispatch), with
 * different hidden sizes and element types.
 *
 * Expert e lives on rank e / L, L = E / R. A token goes once to every rank that owns at least one of its experts.
 *
 * Two layouts of the received rows:
 *   rank layout      one row per (token, rank), ordered by (source rank, token index). The default.
 *   expanded layout  one row per (token, local expert), grouped by local expert, within one by (source rank, token
 *                    index). Each expert's first row is a multiple of expert_alignment: the layout of grouped GEMMs.
 * Both are the same bits in every run and on every backend.
 *
 * A plan of fixed capacity (max_recv_tokens > 0) can be given new routing in stream order by ep_plan_update(): nothing
 * waits for the host, and its counts stay where the data is.
 */
#ifndef EPKIT_PLAN_H
#define EPKIT_PLAN_H

#include <epkit/stream.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ep_plan ep_plan;

enum {
    EP_PLAN_EXPANDED = 1u << 1,    /* expanded layout */
    EP_PLAN_ZERO_PADDING = 1u << 2 /* expanded layout: dispatch writes zeros into the rows between experts */
};

typedef struct ep_plan_args {
    size_t size;          /* EP_PLAN_ARGS_INIT sets it */
    const void *topk_idx; /* [N,K] contiguous, host memory on the host backend; -1: no expert. Copied. NULL if N = 0 */
    int32_t idx_type;     /* EP_I32 or EP_I64; the same on all ranks */
    int32_t n_tokens;     /* N, 0 allowed, may differ between ranks */
    int32_t topk;         /* K, 1..EP_MAX_TOPK; the same on all ranks */
    int32_t n_experts;    /* E, a multiple of R; the same on all ranks */
    uint32_t flags;       /* EP_PLAN_*; the same on all ranks */
    int32_t expert_alignment; /* counts per local expert (and starts, when expanded) are rounded up to a multiple of it;
                                 at most EP_MAX_ALIGNMENT; 0: 1 */
    int64_t max_recv_tokens; /* > 0: do not wait for the counts of the peers; outputs have this many rows (see below) */

    /* In place of topk_idx (NULL, topk 0): which ranks each token goes to. Rank layout only, R <= EP_MAX_TOPK. */
    const uint8_t *token_in_rank;     /* [N,R], 0 or 1; NULL if N = 0 */
    const int32_t *tokens_per_expert; /* [E] of this rank's tokens; counts alone follow from it */

    int32_t max_tokens; /* most tokens of a later ep_plan_update(); 0: n_tokens */
    int32_t reserved;   /* 0 */
    ep_stream stream;   /* where the arrays above are written: they are read behind what is queued in it */
} ep_plan_args;

#define EP_PLAN_ARGS_INIT EP_INIT(ep_plan_args)

/*
 * Creates a plan from this rank's routing. Collective. Bad routing (expert out of range, the same expert twice in a
 * token) is EP_E_ROUTING with token and position in the error text, before anything is sent.
 *
 * max_recv_tokens > 0 (fixed capacity): returns without waiting for any peer but what `stream` waits for, as long as no
 * more than four such plans await their first use; the counts of ep_plan_get_info() stay -1 until the first dispatch
 * has completed; dispatch marks rows beyond the received ones with recv_topk_idx = -1 and weight 0 and leaves their
 * data untouched. When some rank would receive more rows than its max_recv_tokens (in the expanded layout rows with
 * padding), the first operation returns EP_E_CAPACITY naming it on every rank; nothing is sent, the plan cannot be used
 * until its next update, and the communicator stays usable. May differ between ranks, but must be > 0 on all or on
 * none.
 *
 * A mask whose tokens_per_expert cannot belong to it (a count below 0 or above the tokens of the rank that owns the
 * expert, fewer choices for a rank than tokens) is EP_E_ROUTING, too.
 */
EP_API ep_status ep_plan_new(ep_comm *comm, const ep_plan_args *args, ep_plan **ret_plan);

/*
 * Not collective. Waits for the work that uses the plan; on the host backend for all that is queued on the
 * communicator, so signal first what that waits for (ep_stream_wait). In a forked child it does nothing. NULL is fine.
 */
EP_API void ep_plan_free(ep_plan *plan);

/*
 * Rows that suffice for every routing: what to take for max_recv_tokens, and to allocate. `args` as for ep_plan_new(),
 * of which topk, n_experts, flags, expert_alignment and max_tokens (0: n_tokens) count; max_tokens must be the most of
 * any rank, and tokens_per_expert, if given, means a plan from a mask. A plan's capacity and max_tokens are fixed: to
 * update it with more tokens later, pass the larger max_tokens here and to ep_plan_new(). Not collective.
 */
EP_API ep_status ep_plan_get_max_rows(const ep_comm *comm, const ep_plan_args *args, int64_t *ret_rows);

typedef struct ep_plan_info {
    size_t size;      /* EP_PLAN_INFO_INIT sets it */
    int64_t n_recv;   /* rows this rank receives (expanded: including padding rows); -1: not yet known */
    int64_t out_rows; /* rows the outputs must have: max_recv_tokens if given, else n_recv */
    int64_t n_send;   /* rows that this rank's tokens become, over all ranks, own included */
    int64_t n_wire;   /* of n_send: rows for other ranks */
    int64_t n_net;    /* (token, other node) pairs: network transfers of one dispatch */
    int32_t n_tokens, topk, n_experts, n_local_experts; /* topk: R for a plan from a mask */
    uint32_t flags;
    const int32_t
        *recv_per_expert; /* [L] received tokens per local expert, rounded up to expert_alignment; NULL: not yet */
    const int64_t *recv_from_rank; /* [R+1] rank layout: rows of source r are recv_from_rank[r] .. [r+1]; NULL: not yet,
                                      or expanded */
    const int64_t *expert_start;   /* [L+1] expanded layout: first row of each local expert; NULL otherwise */
} ep_plan_info;

#define EP_PLAN_INFO_INIT EP_INIT(ep_plan_info)

/*
 * Never blocks. The arrays belong to the plan. Of a plan that was updated n_tokens is that of the update; n_recv,
 * n_send, n_wire and n_net are -1 and the arrays NULL from then on: ep_plan_get_metadata() has the counts.
 */
EP_API ep_status ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info);

/* New routing for a plan. Fields as in ep_plan_args; what the plan was made from (choices or mask) stays. */
typedef struct ep_plan_update_args {
    size_t size;                      /* EP_PLAN_UPDATE_ARGS_INIT sets it */
    const void *topk_idx;             /* [N,K] of the plan's idx_type */
    const uint8_t *token_in_rank;     /* [N,R] */
    const int32_t *tokens_per_expert; /* [E] */
    int32_t n_tokens;                 /* N <= max_tokens of ep_plan_new() */
    int32_t reserved;                 /* 0 */
} ep_plan_update_args;

#define EP_PLAN_UPDATE_ARGS_INIT EP_INIT(ep_plan_update_args)

/*
 * Gives a plan of fixed capacity (else EP_E_STATE) new routing, for the operations that are called afterwards.
 * Collective. The arrays are read in the order of the stream and must stay valid until then. Routing that is not valid
 * fails the communicator: EP_E_ROUTING, with this rank named on its peers. Rows beyond a capacity: as for
 * ep_plan_new().
 */
EP_API ep_status ep_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);

/*
 * Where the facts of a plan go, in memory of the caller: host memory on the host backend, device memory on the CUDA
 * backend. Any may be NULL: not wanted. None may overlap another one (EP_E_ARG).
 *
 * n is the number of tokens that this rank receives; a token counts once in both layouts. They are ordered by (source
 * rank, token index): in the rank layout token i is row i. Arrays of n must have room for all that may come: out_rows.
 */
typedef struct ep_plan_metadata {
    size_t size;            /* EP_PLAN_METADATA_INIT sets it */
    int32_t *recv_source;   /* [n] source rank * source_stride + token index there */
    int32_t *recv_slot;     /* [n,K] expanded layout: the row of the token's k-th choice, -1 where that is of another
                               rank. Rank layout: must be NULL */
    int32_t *n_recv_tokens; /* [1] n */
    int32_t *psum_rank;     /* [R] received tokens of this source and the ones before it */
    int32_t *psum_expert;   /* [L] rank layout: aligned counts of this expert and the ones before it, added up;
                               expanded: the row behind the expert's last one, padding not counted */
    int32_t *count_exact;   /* [L] received tokens of each expert, not rounded up */
    int32_t *rank_prefix;   /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t source_stride;  /* at least the most tokens of any rank, the same on all; 0: max_tokens of ep_plan_args,
                               which must then not be 0 and be the same on all */
    int32_t reserved;       /* 0 */
} ep_plan_metadata;

#define EP_PLAN_METADATA_INIT EP_INIT(ep_plan_metadata)

/* Copies the facts as they are in the order of the stream. Collective: all ranks ask for the same set of arrays. */
EP_API ep_status ep_plan_get_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);

/*
 * Which token each received row is: source rank and token index there, -1 / -1 for padding rows. Arrays of
 * info.n_recv entries, host memory, which may not overlap (EP_E_ARG); either may be NULL. EP_E_STATE while the counts
 * are not known: of a plan of fixed capacity each rank waits for the first dispatch before (ep_stream_sync), so that
 * all know them; after an update ep_plan_get_metadata() has them alone.
 * Collective: the ranks exchange it on demand, because most callers do not need it.
 */
EP_API ep_status ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);

/*
 * The layout of a routing alone: what DeepEP calls get_dispatch_layout. Any output may be NULL; none may overlap
 * another one or topk_idx (EP_E_ARG).
 */
typedef struct ep_layout {
    size_t size;                /* EP_LAYOUT_INIT sets it */
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nodes] */
    int32_t *tokens_per_expert; /* [E] */
    uint8_t *token_in_rank;     /* [N,R], 0 or 1 */
} ep_layout;

#define EP_LAYOUT_INIT EP_INIT(ep_layout)

/*
 * Not collective, needs no peer. Same checks as ep_plan_new. Uses topk_idx, idx_type, n_tokens, topk, n_experts,
 * stream. Outputs are host memory. On the CUDA backend all of them, and topk_idx, may be device memory: then they are
 * written in the order of the stream, also in a capture, and routing that is not valid fails the communicator as for
 * ep_plan_update().
 */
EP_API ep_status ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

#ifdef __cplusplus
}
#endif

#endif
