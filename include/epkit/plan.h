/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/plan.h - a plan: the destinations of the tokens of one routing.
 *
 * A plan depends on the top-k choices only, not on the data. Dispatch and combine may use it any number of times, in
 * both directions (the backward pass of a dispatch is a combine on the same plan, that of a combine is a dispatch),
 * with different hidden sizes and element types.
 *
 * Expert e is on rank e / L, L = E / R. A token is sent once to every rank that has at least one of its experts.
 *
 * A token may name an expert more than once. Each choice counts: counts per expert are counts of choices, and the
 * expanded layout has a row for each. With EP_COMM_CHECK_DISTINCT such a token is invalid routing.
 *
 * Two layouts of the received rows:
 *   rank layout      one row per (token, rank), ordered by (source rank, token index). The default.
 *   expanded layout  one row per choice of a local expert, grouped by expert and ordered by (source rank, token index,
 *                    k) within each. Each expert's first row is a multiple of expert_alignment: the layout of
 *                    grouped GEMMs.
 * Both have the same bits in every run and on every backend.
 *
 * ep_plan_update() gives a plan of fixed capacity (max_recv_tokens > 0) new routing in stream order: nothing waits for
 * the host, and the counts stay in the memory of the backend.
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
    const void *topk_idx; /* [N,K] contiguous, host memory on the host backend; -1: no expert. Copied. May be NULL if
                             N = 0 */
    int32_t idx_type;     /* EP_I32 or EP_I64; the same on all ranks */
    int32_t n_tokens;     /* N, 0 allowed, may differ between ranks */
    int32_t topk;         /* K, 1..EP_MAX_TOPK; the same on all ranks */
    int32_t n_experts;    /* E, a multiple of R; the same on all ranks */
    uint32_t flags;       /* EP_PLAN_*; the same on all ranks */
    int32_t expert_alignment; /* counts per local expert (and starts, when expanded) are rounded up to a multiple of it;
                                 at most EP_MAX_ALIGNMENT; 0: 1 */
    int64_t max_recv_tokens; /* > 0: do not wait for the counts of the peers; outputs have this many rows (see below) */

    /* Instead of topk_idx (NULL; topk and idx_type 0): a mask of the ranks of each token. Rank layout only, R <=
     * EP_MAX_TOPK. */
    const uint8_t *token_in_rank;     /* [N,R], 0 or 1; may be NULL if N = 0 */
    const int32_t *tokens_per_expert; /* [E] choices of this rank's tokens; used for counts only */

    int32_t max_tokens; /* most tokens of a later ep_plan_update(); 0: n_tokens */
    int32_t reserved;   /* 0 */
    ep_stream stream;   /* the arrays above are read after the work that is queued in it */
} ep_plan_args;

#define EP_PLAN_ARGS_INIT EP_INIT(ep_plan_args)

/*
 * Creates a plan from this rank's routing. Collective. EP_E_ROUTING before anything is sent, with token and position in
 * the error text, for invalid routing: an expert out of range. Also EP_E_ROUTING for a mask with inconsistent
 * tokens_per_expert: a count below 0 or above EP_MAX_TOPK times the tokens of the expert's rank, or fewer choices for a
 * rank than tokens. The rank may call again with valid routing; the others wait for it until their deadline.
 *
 * Without max_recv_tokens the call returns when the counts of all ranks are known. With the CUDA backend within a node
 * the devices exchange them, in `stream`, as an operation, which runs after those that were called before.
 *
 * max_recv_tokens > 0 (fixed capacity). It may differ between ranks, but must be > 0 on all ranks or on none.
 *   - The call waits for no peer, as long as at most four such plans await their first use, except for what `stream`
 *     waits for.
 *   - The counts of ep_plan_get_info() are -1 until the first dispatch is complete, or until ep_plan_settle().
 *   - Dispatch sets recv_topk_idx to -1 and weights to 0 in the rows after the received ones, and does not write the
 *     data of these rows.
 *   - If a rank would receive more rows than its max_recv_tokens (expanded layout: including padding), the first
 *     operation returns EP_E_CAPACITY on every rank and names that rank. Nothing is sent, the plan cannot be used until
 *     its next update, and the communicator stays usable.
 */
EP_API ep_status ep_plan_new(ep_comm *comm, const ep_plan_args *args, ep_plan **ret_plan);

/*
 * Not collective. Waits for the work that uses the plan. The host backend waits for all work queued on the
 * communicator, so signal the events that this work waits for (ep_stream_wait) first. In a forked child it does
 * nothing. NULL is allowed.
 */
EP_API void ep_plan_free(ep_plan *plan);

/*
 * Number of rows that suffices for every routing, for max_recv_tokens and for the size of outputs. `args` as for
 * ep_plan_new(); topk, n_experts, flags, expert_alignment and max_tokens (0: n_tokens) are used. max_tokens must be the
 * maximum of all ranks; tokens_per_expert, if not NULL, means a plan from a mask. The capacity and max_tokens of a plan
 * are fixed: to update it with more tokens later, pass the larger max_tokens here and to ep_plan_new(). Not collective.
 */
EP_API ep_status ep_plan_get_max_rows(const ep_comm *comm, const ep_plan_args *args, int64_t *ret_rows);

typedef struct ep_plan_info {
    size_t size;      /* EP_PLAN_INFO_INIT sets it */
    int64_t n_recv;   /* rows this rank receives (expanded: including padding rows); -1: not yet known */
    int64_t out_rows; /* rows of outputs that suffice: max_recv_tokens if given, else, and once settled, n_recv */
    int64_t n_send;   /* rows of this rank's tokens on all ranks, including this one */
    int64_t n_wire;   /* of n_send: rows for other ranks */
    int64_t n_net;    /* (token, other node) pairs: network transfers of one dispatch */
    int32_t n_tokens, topk, n_experts, n_local_experts; /* topk: R for a plan from a mask */
    uint32_t flags;
    const int32_t
        *recv_per_expert; /* [L] received choices of each local expert, rounded up to expert_alignment; NULL: not yet */
    const int64_t *recv_from_rank; /* [R+1] rank layout: rows of source r are recv_from_rank[r] .. [r+1]; NULL: not yet,
                                      or expanded */
    const int64_t *expert_start;   /* [L+1] expanded layout: first row of each local expert; NULL otherwise */
    int64_t n_dropped; /* choices of this rank's tokens that count as -1, because their ranks are absent; -1 after an
                          update */
    int64_t most_recv; /* n_recv of the rank that receives most: the same on all ranks; -1: not yet known */
} ep_plan_info;

#define EP_PLAN_INFO_INIT EP_INIT(ep_plan_info)

/*
 * Never blocks. The plan owns the arrays. After an update of the plan, n_tokens is that of the update (in a capture: as
 * before); n_recv, most_recv, n_send, n_wire and n_net are -1, and the arrays are NULL: use ep_plan_get_metadata() for
 * the counts.
 */
EP_API ep_status ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info);

/*
 * Makes a plan of fixed capacity one of exact counts, for which it waits: out_rows is n_recv, graphs use these counts,
 * and ep_plan_update() is refused. With the CUDA backend within a node the counts are there as soon as the ranks have
 * exchanged them, while the rows of a dispatch that has been called still move. Elsewhere it follows the first
 * operation, and waits for all work that is queued. At once for other plans. Not collective; all ranks settle the plan,
 * or none.
 *
 * Errors: EP_E_CAPACITY, as for the operation; EP_E_STATE for a plan that was updated or made in a capture, and between
 * nodes and on the host backend before the first operation; those of a failed communicator. A capacity that is too
 * small is reported by the operation, too.
 */
EP_API ep_status ep_plan_settle(ep_plan *plan);

/* New routing for a plan. Fields as in ep_plan_args; the kind (choices or mask) must be that of ep_plan_new(). */
typedef struct ep_plan_update_args {
    size_t size;                      /* EP_PLAN_UPDATE_ARGS_INIT sets it */
    const void *topk_idx;             /* [N,K] of the plan's idx_type; may be NULL if N = 0 */
    const uint8_t *token_in_rank;     /* [N,R] */
    const int32_t *tokens_per_expert; /* [E] */
    int32_t n_tokens;                 /* N <= max_tokens of ep_plan_new() */
    int32_t reserved;                 /* 0 */
} ep_plan_update_args;

#define EP_PLAN_UPDATE_ARGS_INIT EP_INIT(ep_plan_update_args)

/*
 * Gives a plan of fixed capacity (else EP_E_STATE) new routing, for the operations that are called afterwards (in a
 * capture: in captures). Collective. The arrays are read in stream order and must stay valid until then. Invalid
 * routing fails the communicator with EP_E_ROUTING, and the peers' text names this rank. Too many rows for a capacity:
 * as for ep_plan_new().
 *
 * After ep_comm_regroup() the first update, outside of captures, makes the plan that of the members of now: in its
 * place a new member calls ep_plan_new(). All that captured graphs refer to stays. CUDA backend between nodes: it waits
 * until new members have captured an operation on the plan, or called one; they do so with all such plans before they
 * wait for one of the operations.
 */
EP_API ep_status ep_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream);

/*
 * The number of tokens of an operation that is called in `stream` now: n_tokens of ep_plan_new() or of the last update.
 * While a CUDA stream is being captured, it may differ from that outside of the capture (epkit/cuda.h, Graphs). Never
 * blocks.
 */
EP_API ep_status ep_plan_get_tokens(const ep_plan *plan, ep_stream stream, int32_t *ret_tokens);

/*
 * Output arrays for the metadata of a plan, in memory of the caller: host memory on the host backend, device memory on
 * the CUDA backend. Each may be NULL (not wanted). They must not overlap (EP_E_ARG).
 *
 * n is the number of tokens that this rank receives; a token counts once in both layouts. They are ordered by (source
 * rank, token index): in the rank layout token i is row i. Arrays of n elements must have room for out_rows elements;
 * those behind the n-th become 0. If the call is queued and the plan then refused (EP_E_CAPACITY), all of them become
 * 0, so that a kernel that takes them for sizes finds none.
 */
typedef struct ep_plan_metadata {
    size_t size;            /* EP_PLAN_METADATA_INIT sets it */
    int32_t *recv_source;   /* [n] source rank * source_stride + token index there */
    int32_t *recv_slot;     /* [n,K] expanded layout: the row of the token's k-th choice, -1 for an expert of another
                               rank. Rank layout: must be NULL */
    int32_t *n_recv_tokens; /* [1] n */
    int32_t *psum_rank;     /* [R] inclusive prefix sum: received tokens of source ranks 0..r */
    int32_t *psum_expert;   /* [L] rank layout: inclusive prefix sum of the aligned counts; expanded: end (exclusive)
                               of the expert's rows, without padding */
    int32_t *count_exact;   /* [L] received choices of each expert, not rounded up */
    int32_t *rank_prefix;   /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t source_stride;  /* at least the maximum number of tokens of any rank, the same on all ranks; 0: max_tokens
                               of ep_plan_args, which must then be > 0 and the same on all ranks */
    int32_t reserved;       /* 0 */
} ep_plan_metadata;

#define EP_PLAN_METADATA_INIT EP_INIT(ep_plan_metadata)

/*
 * Copies the metadata in stream order. Collective where recv_source or recv_slot is wanted, and for rank_prefix between
 * nodes: then all ranks request the same set of arrays.
 */
EP_API ep_status ep_plan_get_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream);

/*
 * The token of each received row: its source rank and its token index there; -1 / -1 for padding rows. Arrays of
 * info.n_recv entries in host memory, which must not overlap (EP_E_ARG); either may be NULL. Collective: the ranks
 * exchange the data on demand, because most callers do not need it.
 *
 * EP_E_STATE while the counts are unknown. For a plan of fixed capacity every rank must first wait for the first
 * dispatch (ep_stream_sync). After an update only ep_plan_get_metadata() provides the counts.
 */
EP_API ep_status ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);

/*
 * The layout of a routing without a plan, as DeepEP's get_dispatch_layout. Any output may be NULL; none may overlap
 * another output or topk_idx (EP_E_ARG).
 */
typedef struct ep_layout {
    size_t size;                /* EP_LAYOUT_INIT sets it */
    int32_t *tokens_per_rank;   /* [R] */
    int32_t *tokens_per_node;   /* [nodes] */
    int32_t *tokens_per_expert; /* [E] choices */
    uint8_t *token_in_rank;     /* [N,R], 0 or 1 */
} ep_layout;

#define EP_LAYOUT_INIT EP_INIT(ep_layout)

/*
 * Not collective; needs no peer. Same checks as ep_plan_new. Uses topk_idx, idx_type, n_tokens, topk, n_experts and
 * stream. Outputs are host memory. On the CUDA backend topk_idx and all outputs may be device memory: then they are
 * written in stream order, also in a capture, and invalid routing fails the communicator as for ep_plan_update().
 */
EP_API ep_status ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);

#ifdef __cplusplus
}
#endif

#endif
