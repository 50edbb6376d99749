/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the interface between host code (C) and kernels (.cu): arguments and launch functions.
 */
#ifndef EP_CUDA_KERNELS_H
#define EP_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks of one node. Sets of them are words, and no NVLink domain of one host is larger. */
#define CUDA_MAX_RANKS 32

/* Tokens whose rows before them are stored as one sum; in the expanded layout also the threads of a counting block. */
#define CUDA_COUNT_TOKENS 256

/*
 * A progress word: of the rows that one rank has on another, the first `rows`, in the order of the tokens, are there in
 * operation `number`, as the hosts count. Where a rank adds up its rows first (struct cuda_reduce), `rows` are tokens
 * of the reader instead: the sums of those before it are there. Words only grow.
 */
#define CUDA_ROWS_BITS 24
#define CUDA_ALL_ROWS ((1u << CUDA_ROWS_BITS) - 1)
#define CUDA_PROGRESS(number, rows) ((uint64_t)(number) << CUDA_ROWS_BITS | (uint64_t)(rows))

/*
 * Parts of an operation; a progress word is sent after each. A part costs every warp that moves rows 1.7 us, measured
 * on two H200: the warp has to wait for its stores and to count.
 */
#define CUDA_MAX_PARTS 8

/*
 * The op descriptor, which each kernel publishes to the peers at the beginning of an operation; the hosts do not
 * synchronise. Each word has 32 bits and is stored below the low half of the operation's number, so no flag is needed.
 */
enum {
    CUDA_DESC_PHASE,
    CUDA_DESC_PLAN, /* in arguments of operations within a node 0: see cuda_counts.number */
    CUDA_DESC_DTYPE,
    CUDA_DESC_HIDDEN,
    CUDA_DESC_SCALE_TYPE,
    CUDA_DESC_SCALE_WORDS,
    CUDA_DESC_OUTPUTS,
    CUDA_DESC_COMPARED,                    /* the words before this one must be the same on all ranks */
    CUDA_DESC_COPIES = CUDA_DESC_COMPARED, /* its kernel copies between ordinary memory and staging */
    CUDA_DESC_BUFFERS /* two words for each buffer: CUDA_DESC_SLOT(), then its offset / CUDA_DESC_GRAIN */
};
/* The compared words of a plan, whose phase is that of its counts. */
enum {
    CUDA_DESC_PLAN_INDEX = CUDA_DESC_PLAN + 1, /* idx_type; 0: a mask */
    CUDA_DESC_PLAN_EXPERTS,
    CUDA_DESC_PLAN_TOPK,
    CUDA_DESC_PLAN_FLAGS, /* and CUDA_DESC_PLAN_FIXED: of fixed capacity */
    CUDA_DESC_PLAN_ALIGNMENT
};
#define CUDA_DESC_PLAN_FIXED (1u << 31)
#define CUDA_BUFFERS 5 /* EP_GROUP_AT_X ... of each rank */
#define CUDA_DESC_WORDS (CUDA_DESC_BUFFERS + 2 * CUDA_BUFFERS)
#define CUDA_DESC_GRAIN 16
#define CUDA_GENERATION_BITS 23
#define CUDA_GENERATION_MASK ((1u << CUDA_GENERATION_BITS) - 1)
#define CUDA_DESC_SLOT(slot, generation) ((uint32_t)(slot) << CUDA_GENERATION_BITS | (generation)) /* 0: no buffer */

#define CUDA_SLOTS 512
/* Allocations consist of whole 2 MiB pages, because exporting one shares its pages with every process that maps it. */
#define CUDA_GRANULE ((size_t)2 << 20)

/*
 * An allocation of a peer as it is mapped here, for the kernels. Read and written as a whole; all zero while nothing is
 * mapped.
 */
struct cuda_map_entry {
    unsigned char *base;
    uint32_t granules; /* bytes / CUDA_GRANULE */
    uint32_t generation;
};

/* Counts that a rank publishes when plans are updated, as words like those of the descriptor. */
#define CUDA_MAX_EXPERTS 4096
#define CUDA_MAX_GROUP 1024 /* ranks of all nodes */
enum {
    CUDA_COUNT_RANKS = 0,                                                     /* [R] tokens for each rank */
    CUDA_COUNT_CAPACITY = CUDA_MAX_RANKS,                                     /* rows that it can receive */
    CUDA_COUNT_EXPERTS,                                                       /* [E] tokens for each expert */
    CUDA_COUNT_WORDS = CUDA_COUNT_EXPERTS + CUDA_MAX_GROUP + CUDA_MAX_EXPERTS /* between nodes: nodes.h */
};

/* Addresses in the buffers of a rank where this rank's rows begin. */
struct cuda_target {
    unsigned char *at[CUDA_BUFFERS];
};

/* The buffers that a rank's op descriptor names, and where they are mapped here. */
struct cuda_found {
    uint32_t words[2 * CUDA_BUFFERS]; /* of the descriptor, from CUDA_DESC_BUFFERS on */
    unsigned char *at[CUDA_BUFFERS];
    int64_t bytes[CUDA_BUFFERS]; /* from there to the end of the allocation */
};

enum { CUDA_DISPATCH, CUDA_COMBINE, CUDA_KINDS };

/*
 * In device memory of each rank. Peers write, the owner polls: most words hold the number of an operation. The device
 * counts the operations, because a captured CUDA graph repeats an operation that the host has called once.
 */
struct cuda_signals {
    uint64_t desc[CUDA_MAX_RANKS][CUDA_DESC_WORDS];      /* [source] CUDA_DESC_...: its op descriptor */
    struct cuda_found found[CUDA_KINDS][CUDA_MAX_RANKS]; /* for the last complete operation; the owner's own */
    struct cuda_found next[CUDA_MAX_RANKS];              /* for the running one, where that differs; as above */
    uint64_t counts[CUDA_MAX_RANKS][CUDA_COUNT_WORDS];   /* [source] of an update */
    uint64_t done[CUDA_MAX_RANKS];                       /* [source] it has finished its part of the operation */
    uint64_t operation;                                  /* the last complete one; the owner's own */
    uint64_t net_operation;                              /* the same, of those between nodes */
    uint64_t net_events;                                 /* of the proxy, as far as published; the owner's own */
    uint32_t net_watched;                                /* a thread watches them; 0 between kernels; as above */
    uint32_t blocks;                                     /* of the running kernel that have finished; the owner's own */
    uint32_t next_tile; /* of the running kernel: the next one to claim; 0 between kernels; the owner's own */
    uint64_t progress[CUDA_MAX_RANKS]; /* [rank] CUDA_PROGRESS() of its rows, for the owner; stage.cuh */
    uint32_t part[CUDA_MAX_PARTS];     /* warps that have finished the part; 0 between kernels; the owner's own */
    uint32_t roles, ended_roles;       /* blocks that have begun, roles that have ended; as above. A kernel that fails
                                          resets none of these: kernels after it fail, too */
    /*
     * Not 0: the communicator has failed. CUDA_STOPPED: a kernel of the owner reached a deadline or was stopped.
     * Otherwise as cuda_report.failure, written by the peer that it names.
     */
    uint32_t failure;
    /* Copies of host words, made by the thread that holds the lease (device.cuh); the owner's own. */
    uint32_t lost;                          /* cuda_report.lost */
    uint32_t watched_until;                 /* end of that lease */
    uint32_t moves_until;                   /* end of the lease for the words that follow */
    uint64_t net_moved[CUDA_MAX_GROUP + 1]; /* chunks that came from each node, and those that have left: nodes.h */
    /*
     * [rank] its signals, as mapped here; NULL: the rank is absent. Written by the host while no kernel runs; but the
     * host of a rank that is left out (cuda_let_go) replaces all by its own at any time. Here and not in the arguments
     * of kernels, which a captured graph keeps when the members change.
     */
    struct cuda_signals *peer[CUDA_MAX_RANKS];
    uint32_t absent[CUDA_MAX_GROUP / 32]; /* ranks of the group, rank r: bit r % 32 of word r / 32; as above */
    uint32_t generation;                  /* of the members, as this rank counts; as above */
};

/* Why a kernel ended without a result. */
enum {
    CUDA_FAILED_LATE = 1,
    CUDA_FAILED_MISMATCH,
    CUDA_FAILED_EXCLUDED,
    CUDA_FAILED_LOST, /* the rank has died or left */
    CUDA_FAILED_ROUTING,
    CUDA_FAILED_OWN_ROUTING, /* the group continues without this rank */
    CUDA_FAILED_DISAGREE,    /* ranks are in different calls, or gave different arguments: cuda_report.detail */
    CUDA_FAILED_DAMAGE,      /* an address or index that the rank has published is not valid */
    CUDA_FAILED_UNMAPPED,    /* memory of the rank was not mapped here within the deadline */
    CUDA_FAILED_STRIDE,      /* metadata: the rank has more tokens than source_stride */
    CUDA_FAILED_TOKENS,      /* an operation for another number of tokens than its plan has: cuda_report.detail */
    CUDA_FAILED_SIGNAL,      /* rows of a combine were not signalled within the deadline: cuda_report.detail */
    CUDA_FAILED_FORMER       /* in a graph: a call on an ep_ll or a plan of former members */
};
#define CUDA_STOPPED 1u /* contains no CUDA_FAILED_... */
#define CUDA_FAILURE(kind, rank, phase) ((uint32_t)(kind) << 24 | (uint32_t)(rank) << 8 | (uint32_t)(phase))

/*
 * Two ranks have published different words: CUDA_DESC_..., the other rank (of the group), and both words.
 * CUDA_FAILED_TOKENS: MINE are the tokens of the operation, THEIRS those of the plan.
 * CUDA_FAILED_SIGNAL: RANK is the local expert, WORD the block of its rows, MINE the value waited for, THEIRS that of
 * the counter.
 */
enum { CUDA_DETAIL_WORD, CUDA_DETAIL_RANK, CUDA_DETAIL_MINE, CUDA_DETAIL_THEIRS };

/* In mapped host memory: what kernels report, and how the host stops them. */
struct cuda_report {
    uint32_t abort;     /* the host writes 1: kernels end soon, without a result */
    uint32_t failure;   /* 0, or CUDA_FAILURE(CUDA_FAILED_..., failed rank of the group, phase) */
    uint32_t lost;      /* the host writes: ranks that have died or left. All that they have sent is here */
    uint32_t point;     /* of a build for tests: where a kernel stops, CUDA_POINT() */
    uint32_t detail[4]; /* [CUDA_DETAIL_...] of CUDA_FAILED_DISAGREE, _TOKENS and _SIGNAL */
    int64_t refused[3]; /* 1 + a rank that would receive too many rows, how many, and its capacity */
    uint32_t waits_for; /* (rank of this node that is waited for + 1) << 8 | phase. The host clears it */
};

/*
 * In a build with EPKIT_POINTS, for tests, a test may stop the first thread of a rank that comes to a point of a
 * kernel, which is named by its ready_phase: the host writes the word, the thread adds CUDA_POINT_REACHED and goes on
 * when it has another value. Other builds contain nothing of this (HOLD() of device.cuh).
 */
enum {
    CUDA_POINT_PUBLISHED = 1, /* what this rank is about to do is known to some of the others */
    CUDA_POINT_BEGUN,         /* this thread has waited for the others to begin */
    CUDA_POINT_ROW,           /* a row or a count is on its way, and not signalled */
    CUDA_POINT_MOVED,         /* the rows of a block are, and the end is not signalled */
    CUDA_POINT_SIGNALLED,     /* the end is signalled to one of the others */
    CUDA_POINT_COMPLETE       /* the others have ended, and this rank has not counted the operation */
};
#define CUDA_POINT(point, phase) ((uint32_t)(point) << 8 | (uint32_t)(phase))
#define CUDA_POINT_REACHED (1u << 31)

/* What every kernel needs to synchronise. Ranks are counted within the node, here and unless stated otherwise. */
struct cuda_waits {
    struct cuda_signals *mine;
    struct cuda_report *report;                    /* its address on the device */
    const struct cuda_map_entry *map_entries;      /* [R, CUDA_SLOTS] memory of the peers */
    const struct cuda_map_entry *host_map_entries; /* the same in host memory, which is written first */
    uint64_t deadline_ns;
    int32_t rank, nranks;
    int32_t first; /* the group rank of this node's first rank */
    int32_t ready_phase, done_phase;
    int32_t no_sync; /* neither waits nor signals: moves the rows alone, as a baseline */
};

/* The op descriptor that a kernel publishes, and what it needs to resolve those of the peers. */
struct cuda_op_desc {
    int32_t kind;
    uint32_t words[CUDA_DESC_WORDS];
    struct cuda_target own;          /* this rank's buffers for its own rows, which bypass staging */
    int64_t row_bytes[CUDA_BUFFERS]; /* 0: the operation has no such buffer */
};

/*
 * A row of a token: its index on rank `local` is base[local] + row. k as in struct ep_group_entry; rank layout within a
 * node: the token's last choice on that rank.
 */
struct cuda_entry {
    int32_t row;
    uint16_t local, k;
};

/* Counts of a plan, in device memory. */
struct cuda_counts {
    int64_t base[CUDA_MAX_RANKS];      /* where this rank's rows begin on each rank; 0 in the expanded layout */
    int64_t rows_on[CUDA_MAX_RANKS];   /* rows that each rank receives */
    int64_t refused[3];                /* as in struct cuda_report; if set, nothing moves */
    int64_t first[CUDA_MAX_RANKS + 1]; /* [source] its first row on this rank; rank layout */
    int64_t n_tokens;                  /* of this rank */
    /*
     * Number of the plan among those of the members, and their generation when it was made or renewed. Here, because
     * captured operations on a plan go on with other members, where it may have another number.
     */
    uint32_t number, generation;
};

/* Where the rows of a rank's tokens go, in device memory. */
struct cuda_route {
    const struct cuda_entry
        *entry;                /* [N, width] the first count[token] of each token are used, in the order of the sum */
    const int32_t *count;      /* [N] */
    const int32_t *index;      /* [N,K] expert or -1 */
    const int32_t *block_rows; /* rank layout: [N / CUDA_COUNT_TOKENS, R] rows before those tokens */
    int32_t width, n_tokens, topk, n_local_experts;
    int32_t expanded, idx64; /* indices are int64 */
    const struct cuda_counts *counts;
};

/* Rows to be copied within this rank's memory. */
struct cuda_copy {
    const unsigned char *from; /* struct cuda_rows: NULL if they are already there */
    unsigned char *to;
    int64_t row_bytes; /* 0: nothing to copy */
};

/*
 * Peers cannot access ordinary memory: its rows go through staging memory, and some blocks of the kernel copy between
 * the two while the others move rows. Rows of this rank's own tokens bypass staging.
 */
struct cuda_stage {
    int32_t move_blocks, copy_blocks; /* blocks that move rows; blocks that copy, 0: no copies */
    int32_t parts;                    /* of this rank's tokens, combine: of its rows; progress words follow each */
    int32_t part_tokens;              /* dispatch: a multiple of CUDA_COUNT_TOKENS */
    int32_t slot_bytes;               /* of a stage of a copying warp */
    struct cuda_copy x, metadata[CUDA_BUFFERS - 1]; /* rows, and what goes with them */
};

/* Rows of a dispatch from the last one to `capacity`: filled with -1, 0 and 0; NULL: not wanted. */
struct cuda_fill {
    unsigned char *index, *weights, *source;
    int64_t index_bytes, weight_bytes, capacity;
};

struct cuda_dispatch {
    struct cuda_waits waits;
    struct cuda_op_desc desc;
    struct cuda_route route;
    const unsigned char *x;
    const uint32_t *scales;
    const float *weights;
    int64_t scale_stride_token, scale_stride_block;
    int64_t row_bytes;
    int32_t scale_words; /* of one row */
    int32_t chunk_bytes, n_chunks;
    int32_t has_metadata; /* scales, indices, weights or sources go with the rows */
    int32_t first_source; /* of this rank's token 0 */
    struct cuda_fill fill;
    struct cuda_stage stage;
};

/*
 * Sums of a rank's own rows of the expanded layout, which the copying blocks of a combine make instead of copies: those
 * of each token in the order of its choices, rounded to bf16 and written to the row of its last choice here, in staging
 * memory.
 */
struct cuda_reduce {
    const unsigned char *from; /* NULL: this rank has no rows */
    unsigned char *to;
    const int32_t *slots;  /* [n, topk] rows of the received tokens; -1: on another rank */
    const int32_t *source; /* [n] their rank * stride + token */
    const int64_t *first;  /* [R+1] the first token of each rank; the last word is n */
    int32_t stride;
};

#define CUDA_SOURCE_STRIDE(nranks) (INT32_MAX / (nranks)) /* the stride of all of them: graphs write there, too */

#define CUDA_REDUCE_BYTES 2048 /* of a sum that a warp makes at once */

struct cuda_combine {
    struct cuda_waits waits;
    struct cuda_op_desc desc;
    struct cuda_route route;
    const unsigned char *bias[2];
    const struct cuda_entry *by_rank; /* entries in the order in which weights are added up */
    unsigned char *out;
    float *out_weights; /* NULL: none */
    int64_t row_bytes;
    int32_t by_choice, rounds_partial; /* EP_COMBINE_BY_CHOICE; _ROUND_PARTIAL, of the expanded layout */
    int32_t slot_bytes;                /* of a stage: a piece of each row of a token */
    /* The last tokens are divided into several tiles, so that all warps end at about the same time. */
    int32_t whole_tokens; /* the first tokens, one tile each */
    int32_t parts;        /* tiles of each other token */
    int32_t part_bytes;
    uint32_t tiles;
    int32_t reduces; /* all ranks add up their own rows first */
    struct cuda_reduce reduce;
    struct cuda_stage stage;
};

/*
 * Launch shape of the kernels that move rows. Each warp owns a ring of `stages` slots with a barrier each. Shared
 * memory holds the barriers of all warps, then the slots, from a multiple of 128 bytes on.
 */
struct cuda_shape {
    int32_t blocks, warps, stages;
    size_t shared_bytes;
};

#define CUDA_BARRIERS_BYTES(warps, stages) ((size_t)(8 * ((warps) * (stages)) + 127) / 128 * 128)
#define CUDA_BARRIERS_MAX 1024 /* bytes reserved for them when a shape is chosen */

static inline size_t cuda_shared_bytes(const struct cuda_shape *shape, size_t slot_bytes)
{
    size_t slots = (size_t)shape->warps * (size_t)shape->stages;

    return CUDA_BARRIERS_BYTES(shape->warps, shape->stages) + slots * slot_bytes;
}

/*
 * What a count has found: 1 if an entry is out of range, of an absent rank that is not dropped or, with `distinct`,
 * twice in a token; and the number of choices that were dropped.
 */
enum { CUDA_FOUND_BAD, CUDA_FOUND_DROPPED, CUDA_FOUND_WORDS };

/*
 * Words of a communicator's scratch memory, zeros between operations: counts per expert, rank and node, and blocks_done
 * and found of struct cuda_count.
 */
enum {
    CUDA_SCRATCH_EXPERTS = 0,
    CUDA_SCRATCH_RANKS = CUDA_MAX_EXPERTS,
    CUDA_SCRATCH_NODES = CUDA_SCRATCH_RANKS + CUDA_MAX_GROUP,
    CUDA_SCRATCH_BLOCKS_DONE = CUDA_SCRATCH_NODES + CUDA_MAX_GROUP,
    CUDA_SCRATCH_FOUND,
    CUDA_SCRATCH_WORDS = CUDA_SCRATCH_FOUND + CUDA_FOUND_WORDS
};

struct cuda_count {
    const void *topk_idx;        /* device memory; NULL: a mask */
    const uint8_t *mask;         /* [N,R] */
    const int32_t *mask_experts; /* [E] tokens for each expert; the mask does not give them */
    int32_t *index;              /* [N,K] copy */
    struct cuda_entry *entry;
    int32_t *count;
    int32_t *block_rows; /* [N / CUDA_COUNT_TOKENS, R] rows of those tokens, then the rows before them */
    uint32_t *blocks_done;
    int32_t *per_expert; /* [E], expanded: [R] per rank; zeroed, and zeros again afterwards, as the next two */
    uint32_t *found;     /* [CUDA_FOUND_WORDS] */
    int32_t *totals;     /* [R] per rank, [E] per expert */
    uint32_t *ret_found; /* [CUDA_FOUND_WORDS] */
    int32_t idx64, n_tokens, topk, n_experts, nranks, width;
    int32_t distinct;
    int32_t drops;          /* choices of absent ranks count as -1 */
    const uint32_t *absent; /* cuda_signals.absent */
};

/* Counts of an update for the host, in host memory: those of this rank. */
struct cuda_plan_info {
    uint64_t number;    /* of the update; written last */
    uint32_t bad;       /* the routing is not valid: there are no counts; of exact counts */
    int64_t refused[3]; /* as in struct cuda_report; if set, there are no counts */
    int64_t n_send, n_wire, n_dropped;
    int64_t rows_on[CUDA_MAX_RANKS], first[CUDA_MAX_RANKS + 1];
    int32_t sent[CUDA_MAX_RANKS]; /* tokens for each rank */
    int32_t exact[];              /* [L] */
};

/* Routing of a plan, new or updated, counted and exchanged on the device. */
struct cuda_update {
    struct cuda_waits waits;
    struct cuda_op_desc desc;
    struct cuda_count count;
    struct cuda_counts *counts;
    struct cuda_plan_info *info;          /* NULL: the host does not need it */
    uint64_t number;                      /* for `info` */
    int32_t *block_experts;               /* expanded: [blocks,E] rows of each block, then where its rows begin */
    int32_t *expert_base;                 /* expanded: [E] where this rank's rows of each expert begin */
    int32_t *expert_start, *expert_exact; /* [L+1], [L] of this rank */
    int32_t *prefix;                      /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t expanded, alignment, capacity;
    int32_t blocks; /* of CUDA_COUNT_TOKENS tokens, at least one */
    int32_t exact;  /* of exact counts: invalid routing concerns this rank alone, and its host reports it */
};

/* Scatters the words of rows by strides. */
struct cuda_scatter {
    const uint32_t *from; /* contiguous rows of `words` words; NULL: nothing to scatter */
    uint32_t *to;
    int64_t words, stride_row, stride_word;
};

/* Works on this rank's rows after a dispatch or before a combine; the counts of the plan say how many there are. */
struct cuda_rows {
    const struct cuda_counts *counts;
    const int32_t *expert_start, *expert_exact; /* NULL: rows are contiguous */
    struct cuda_copy copy[CUDA_BUFFERS];
    int32_t rank, n_local, zero; /* zero: clear the rows between experts */
    int32_t skips_own;           /* rank layout: this rank's own rows are not copied */
    struct cuda_scatter scatter;
    struct cuda_fill fill;
};

/* Quantises the rows of a dispatch by the rule of ep_ll_dispatch(). */
struct cuda_quantize {
    const unsigned char *x; /* [N,H] bf16 */
    unsigned char *rows, *scales;
    int64_t row_bytes, scale_bytes;
    const float *global_scale; /* NULL: 1 */
    int32_t n_tokens, hidden, block, packed;
};

/* Loads all kernels now, since a first launch could load them while a peer's kernel waits, and raises their limits. */
cudaError_t cuda_kernels_load(int shared_bytes);
/* The part of each file. */
typedef cudaError_t cuda_load_fn(int shared_bytes);
cuda_load_fn cuda_barrier_load, cuda_update_load, cuda_nodes_load, cuda_nodes_combine_load, cuda_slices_load,
    cuda_lists_load, cuda_metadata_load, cuda_dispatch_load, cuda_combine_load, cuda_quantize_load;
cudaError_t cuda_launch_dispatch(const struct cuda_dispatch *dispatch, const struct cuda_shape *shape,
                                 cudaStream_t stream);
cudaError_t cuda_launch_combine(const struct cuda_combine *combine, const struct cuda_shape *shape,
                                cudaStream_t stream);
/* A barrier of all ranks of the node; desc: the op descriptor of this rank. */
cudaError_t cuda_launch_barrier(const struct cuda_waits *waits, const struct cuda_op_desc *desc, cudaStream_t stream);
/* Waits until the word is not 0. */
cudaError_t cuda_launch_wait(const struct cuda_waits *waits, const uint32_t *word, cudaStream_t stream);
/*
 * Entries of a route of the expanded layout in the order of EP_COMBINE_BY_CHOICE; `ret_entry` has room for as many. In
 * the rank layout the combine orders the few of each token itself.
 */
struct cuda_order {
    struct cuda_route route;
    struct cuda_entry *ret_entry;
    int32_t by_rank;    /* keep the rows of a rank together */
    int32_t *ret_count; /* by_rank: keep the last row of each rank only, and write their numbers here; NULL: keep all */
};

/*
 * Metadata of a plan for the caller (ep_plan_metadata; NULL: not wanted). The token of each row is found by a dispatch
 * of rows that hold their own source: rank + 1 and token + 1, then in the expanded layout the token's number among
 * those that each rank receives.
 */
struct cuda_metadata {
    struct cuda_waits waits;
    struct cuda_route route;
    int32_t rank, nranks;          /* of the group, here and below */
    const int64_t *first;          /* [R+1] tokens for this rank of the ranks before each */
    const int32_t *exact, *prefix; /* [L], [R,R] */
    const int32_t *start;          /* [R] tokens for each rank of the ranks before this one; NULL: none */
    int32_t *rows;                 /* [N, row_words] sources of this rank's tokens; NULL: not wanted */
    int32_t *recv_rows;            /* [received rows, row_words] */
    float *choices, *recv_choices; /* [N,K], [received rows] expanded: the choice; NULL: not wanted */
    int32_t row_words, alignment, stride, unused;
    int64_t max_rows; /* that this rank can receive */
    int64_t out_rows; /* of the caller's arrays: more between nodes, where the host knows what it receives */
    int32_t *recv_source, *recv_slot, *n_recv_tokens, *psum_rank, *psum_expert, *count_exact, *rank_prefix;
    int32_t *later_prefix;          /* rank_prefix that cuda_nodes_plan_prefix() writes; NULL: none */
    int32_t *own_slot, *own_source; /* the plan's, for struct cuda_reduce; NULL: not wanted */
};

/* The layout of a routing; outputs as those of ep_layout. */
struct cuda_layout {
    struct cuda_waits waits; /* to report invalid routing */
    const void *topk_idx;
    int32_t *scratch; /* CUDA_SCRATCH_WORDS zeros, and zeros again afterwards */
    int32_t *per_rank, *per_node, *per_expert;
    uint8_t *in_rank;
    int32_t idx64, n_tokens, topk, n_experts;
    int32_t nranks, ranks_per_node; /* of the group; CUDA_MAX_RANKS at most */
    int32_t distinct;
    int32_t drops; /* as in struct cuda_count */
};

cudaError_t cuda_launch_layout(const struct cuda_layout *layout, cudaStream_t stream);

/* Writes the counts and the rows to be dispatched; after their dispatch, what depends on them. */
cudaError_t cuda_launch_metadata_counts(const struct cuda_metadata *metadata, cudaStream_t stream);
cudaError_t cuda_launch_sources(const struct cuda_metadata *metadata, cudaStream_t stream);

cudaError_t cuda_launch_order(const struct cuda_order *order, cudaStream_t stream);
/* The kernels of an update, one after the other. */
cudaError_t cuda_launch_update(const struct cuda_update *update, cudaStream_t stream);
cudaError_t cuda_launch_rows(const struct cuda_rows *rows, int sms, cudaStream_t stream);
cudaError_t cuda_launch_quantize(const struct cuda_quantize *quantize, int sms, cudaStream_t stream);
/* Those of the rank layout. */
cudaError_t cuda_launch_count(const struct cuda_update *update, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
