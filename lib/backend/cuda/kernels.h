/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kernels.h - the line between host logic (C) and kernels (.cu): what a kernel is told, and what starts it.
 */
#ifndef EP_CUDA_KERNELS_H
#define EP_CUDA_KERNELS_H

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Ranks of one node. More would not fit the kernels' arguments, and no NVLink domain of one host is larger. */
#define CUDA_MAX_RANKS 32

/* Tokens that one block of the counting kernel looks at; also its threads. */
#define CUDA_COUNT_TOKENS 256

/*
 * How far rows are that one rank has on another: in operation `number`, as the hosts count, the first `rows` of them,
 * in the order of the tokens. Later words are larger ones.
 */
#define CUDA_ROWS_BITS 24
#define CUDA_ALL_ROWS ((1u << CUDA_ROWS_BITS) - 1)
#define CUDA_PROGRESS(number, rows) ((uint64_t)(number) << CUDA_ROWS_BITS | (uint64_t)(rows))

/*
 * Parts of an operation after which such words are sent. Each costs every warp that moves rows 1.7 us, measured on two
 * H200: it has to see its stores through, and to count.
 */
#define CUDA_MAX_PARTS 8

/*
 * What a rank tells each peer at the beginning of an operation: which one it is, and where its buffers are. The hosts
 * do not meet. Words of 32 bits, each below the low half of the number of the operation, so that no flag is needed.
 */
enum {
    CUDA_DESC_PHASE,
    CUDA_DESC_PLAN,
    CUDA_DESC_DTYPE,
    CUDA_DESC_HIDDEN,
    CUDA_DESC_SCALE_TYPE,
    CUDA_DESC_SCALE_WORDS,
    CUDA_DESC_OUTPUTS,
    CUDA_DESC_COMPARED,                    /* the words before this one are the same on all ranks */
    CUDA_DESC_COPIES = CUDA_DESC_COMPARED, /* its kernel copies between ordinary memory and staging */
    CUDA_DESC_BUFFERS /* two words for each buffer: CUDA_DESC_SLOT(), then its offset / CUDA_DESC_GRAIN */
};
#define CUDA_BUFFERS 4 /* EP_GROUP_AT_X ... of each rank */
#define CUDA_DESC_WORDS (CUDA_DESC_BUFFERS + 2 * CUDA_BUFFERS)
#define CUDA_DESC_GRAIN 16
#define CUDA_GENERATION_BITS 23
#define CUDA_GENERATION_MASK ((1u << CUDA_GENERATION_BITS) - 1)
#define CUDA_DESC_SLOT(slot, generation) ((uint32_t)(slot) << CUDA_GENERATION_BITS | (generation)) /* 0: no buffer */

#define CUDA_SLOTS 512
/* Allocations are of whole 2 MiB pages of their own, because an exported one shares its pages with all who map it. */
#define CUDA_GRANULE ((size_t)2 << 20)

/*
 * An allocation of a peer as it is mapped here, in device memory: the kernels find the address of what the peer tells.
 * Read and written as a whole; all zero while nothing is mapped.
 */
struct cuda_map_entry {
    unsigned char *base;
    uint32_t granules; /* bytes / CUDA_GRANULE */
    uint32_t generation;
};

/* What a rank tells of its tokens when plans are updated: so many words, as those of CUDA_DESC_.... */
#define CUDA_MAX_EXPERTS 4096
#define CUDA_MAX_GROUP 1024 /* ranks of all nodes */
enum {
    CUDA_COUNT_RANKS = 0,                                                     /* [R] its tokens for each rank */
    CUDA_COUNT_CAPACITY = CUDA_MAX_RANKS,                                     /* rows that it can receive */
    CUDA_COUNT_EXPERTS,                                                       /* [E] its tokens for each expert */
    CUDA_COUNT_WORDS = CUDA_COUNT_EXPERTS + CUDA_MAX_GROUP + CUDA_MAX_EXPERTS /* between nodes: nodes_update.h */
};

/* Where the buffers of a rank begin for this rank's rows. */
struct cuda_target {
    unsigned char *at[CUDA_BUFFERS];
};

enum { CUDA_DISPATCH, CUDA_COMBINE, CUDA_KINDS };

/*
 * In device memory of each rank. Peers write, the owner polls: each word is set to the number of an operation. The
 * numbers are counted here, because a captured CUDA graph runs an operation again that the host has called once.
 */
struct cuda_signals {
    uint64_t desc[CUDA_MAX_RANKS][CUDA_DESC_WORDS];      /* [source] CUDA_DESC_...: it is ready for the operation */
    struct cuda_target last[CUDA_KINDS][CUDA_MAX_RANKS]; /* of the last operation; the owner's own */
    uint64_t counts[CUDA_MAX_RANKS][CUDA_COUNT_WORDS];   /* [source] of an update */
    uint64_t done[CUDA_MAX_RANKS];                       /* [source] it has moved all that it moves in it */
    uint64_t operation;                                  /* the last that is complete; the owner's own */
    uint64_t net_operation;                              /* the same of those between nodes alone */
    uint64_t net_events;                                 /* of the proxy, as far as told; the owner's own */
    uint32_t net_watched;                                /* a thread watches them; 0 between kernels; as above */
    uint32_t blocks;                                     /* of the running kernel that have finished; the owner's own */
    uint32_t next_tile; /* unit of the running kernel that no warp has taken; 0 between kernels; the owner's own */
    uint64_t progress[CUDA_MAX_RANKS]; /* [rank] CUDA_PROGRESS(): how far its rows are, for the owner; stage.cuh */
    uint32_t part[CUDA_MAX_PARTS];     /* warps that are through with the part; 0 between kernels; the owner's own */
    uint32_t roles, ended_roles;       /* blocks that have begun, shares that have ended; as above. None of these
                                      is put back by a kernel that gives up: what is behind it gives up, too */
    /*
     * Not 0: the communicator has failed. CUDA_STOPPED, a kernel of the owner met a deadline or was stopped; or as
     * cuda_report.failure, written by the peer that it names.
     */
    uint32_t failure;
    /* What the host says, as the thread that watches has seen it (device.cuh); the owner's own. */
    uint32_t lost;                          /* cuda_report.lost */
    uint32_t watched_until;                 /* of the lease of the thread that watches */
    uint32_t moves_until;                   /* the same, of the one that watches what follows */
    uint64_t net_moved[CUDA_MAX_GROUP + 1]; /* chunks that came from each node, and those that have left: nodes.h */
};

/* Why a kernel ended without a result. */
enum {
    CUDA_FAILED_LATE = 1,
    CUDA_FAILED_MISMATCH,
    CUDA_FAILED_EXCLUDED,
    CUDA_FAILED_LOST, /* the rank has died or left */
    CUDA_FAILED_ROUTING,
    CUDA_FAILED_OWN_ROUTING, /* the group goes on without this rank */
    CUDA_FAILED_DISAGREE,    /* ranks are in different calls, or gave different arguments: cuda_report.detail */
    CUDA_FAILED_DAMAGE,      /* a place that the rank has told is none */
    CUDA_FAILED_UNMAPPED,    /* memory of the rank was not mapped here within the deadline */
    CUDA_FAILED_STRIDE       /* metadata: the rank has more tokens than source_stride */
};
#define CUDA_STOPPED 1u /* no CUDA_FAILED_... in it */
#define CUDA_FAILURE(kind, rank, phase) ((uint32_t)(kind) << 24 | (uint32_t)(rank) << 8 | (uint32_t)(phase))

/* Of two ranks that told different words: CUDA_DESC_..., the other rank, of the group, and the words. */
enum { CUDA_DETAIL_WORD, CUDA_DETAIL_RANK, CUDA_DETAIL_MINE, CUDA_DETAIL_THEIRS };

/* In host memory that the device sees: what kernels report, and how they are stopped. */
struct cuda_report {
    uint32_t abort;   /* host writes 1: running kernels end soon, without result */
    uint32_t failure; /* 0, or CUDA_FAILURE(CUDA_FAILED_..., culprit, phase); this rank is of the group */
    uint32_t lost;    /* host: ranks that have died or left. What they had to send is here; no more comes */
    uint32_t unused;
    uint32_t detail[4]; /* [CUDA_DETAIL_...] of CUDA_FAILED_DISAGREE */
    int64_t refused[3]; /* 1 + a rank that would receive more rows than it can, how many, and how many it can */
    uint64_t counted;   /* number of the last routing counted */
    uint64_t bad;       /* not 0: it has entries that are not valid */
};

/* The waits of every kernel. Ranks are counted within the node, here and wherever nothing else is said. */
struct cuda_waits {
    struct cuda_signals *mine;
    struct cuda_signals *peer[CUDA_MAX_RANKS];     /* [rank], as mapped here */
    struct cuda_report *report;                    /* its address on the device */
    const struct cuda_map_entry *map_entries;      /* [R, CUDA_SLOTS] memory of the peers */
    const struct cuda_map_entry *host_map_entries; /* the same in host memory: there before it is in `places` */
    uint64_t deadline_ns;
    int32_t rank, nranks;
    int32_t first; /* rank of the group that is the first one of this node */
    int32_t ready_phase, done_phase;
    int32_t no_sync; /* neither waits nor signals: the bare mover, as a baseline */
};

/* What an operation tells, and what it takes to use what the peers tell. */
struct cuda_op_desc {
    int32_t kind;
    uint32_t words[CUDA_DESC_WORDS];
    struct cuda_target own;          /* this rank's buffers for its own rows, which take no detour */
    int64_t row_bytes[CUDA_BUFFERS]; /* 0: there is no such buffer in this operation */
};

/* A row that a token becomes: its place on `local` is base[local] + row. k as in struct ep_group_entry. */
struct cuda_entry {
    int32_t row;
    uint16_t local, k;
};

/* Counts of a plan, in device memory. */
struct cuda_counts {
    int64_t base[CUDA_MAX_RANKS];      /* where this rank's rows begin on each rank; 0 in the expanded layout */
    int64_t rows_on[CUDA_MAX_RANKS];   /* rows that each rank receives */
    int64_t refused[3];                /* as in struct cuda_report: then nothing moves */
    int64_t first[CUDA_MAX_RANKS + 1]; /* [source] its first row on this rank; rank layout */
};

/* Where the rows of a rank's tokens go, in device memory. */
struct cuda_route {
    const struct cuda_entry *entry; /* [N, width], of each token the first count[token], in the order of the sum */
    const int32_t *count;           /* [N] */
    const int32_t *index;           /* [N,K] expert or -1 */
    const int32_t *block_rows;      /* rank layout: [N / CUDA_COUNT_TOKENS, R] rows before those tokens */
    int32_t width, n_tokens, topk, n_local_experts;
    int32_t expanded, idx64; /* indices are int64 */
    const struct cuda_counts *counts;
};

/* Rows to be copied within this rank's memory. */
struct cuda_copy {
    const unsigned char *from;
    unsigned char *to;
    int64_t row_bytes; /* 0: nothing to copy */
};

/*
 * Ordinary memory, which peers cannot reach: its rows go through staging memory, and blocks of the moving kernel's own
 * copy between the two while the others move. Rows of this rank's own tokens take no detour.
 */
struct cuda_stage {
    int32_t move_blocks, copy_blocks; /* blocks that move rows; blocks that copy, 0: all is symmetric memory here */
    int32_t parts;                    /* each is followed by words: of this rank's tokens, combine: of its rows */
    int32_t part_tokens;              /* dispatch: whole blocks of the counting kernel */
    int32_t slot_bytes;               /* of a stage of a copying warp */
    struct cuda_copy x, metadata[3];  /* rows, and what belongs to them */
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
    int32_t has_metadata, unused; /* something travels with the rows */
    struct cuda_stage stage;
};

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
    int32_t slot_bytes;                /* of a stage: pieces of all rows of a token */
    /* Units: a token each at first; the last tokens are divided, so that all warps end at about the same time. */
    int32_t whole_tokens; /* tokens that are a unit each */
    int32_t parts;        /* units of each other token */
    int32_t part_bytes;
    uint32_t tiles;
    struct cuda_stage stage;
};

/*
 * Shape of a launch of the moving kernels. Each warp owns a ring of `stages` slots, with a barrier for each. In shared
 * memory the barriers of all warps come first, the slots then begin at a multiple of 128 bytes.
 */
struct cuda_shape {
    int32_t blocks, warps, stages;
    size_t shared_bytes;
};

#define CUDA_BARRIERS_BYTES(warps, stages) ((size_t)(8 * ((warps) * (stages)) + 127) / 128 * 128)
#define CUDA_BARRIERS_MAX 1024 /* bytes left for them where a shape is chosen */

static inline size_t cuda_shared_bytes(const struct cuda_shape *shape, size_t slot_bytes)
{
    size_t slots = (size_t)shape->warps * (size_t)shape->stages;

    return CUDA_BARRIERS_BYTES(shape->warps, shape->stages) + slots * slot_bytes;
}

struct cuda_count {
    const void *topk_idx;        /* device memory; NULL: a mask */
    const uint8_t *mask;         /* [N,R] */
    const int32_t *mask_experts; /* [E] tokens for each expert, which do not follow from the mask */
    int32_t *index;              /* [N,K] copy */
    struct cuda_entry *entry;
    int32_t *count;
    int32_t *block_rows; /* [blocks, R] rows of each block, then where its rows begin */
    uint32_t *blocks_done;
    int32_t *per_expert; /* [E], zeroed */
    int32_t *totals;     /* host memory that the device sees: [R] per rank, [E] per expert */
    struct cuda_report *report;
    uint32_t *bad;     /* zeroed; an entry was out of range or there twice */
    uint32_t *ret_bad; /* device memory that learns of it; NULL: the host does, by the report */
    uint64_t number;
    int32_t idx64, n_tokens, topk, n_experts, nranks, width;
};

/* What the host learns of an update, in its memory: as far as this rank is concerned. */
struct cuda_plan_info {
    uint64_t number; /* of the update; written last */
    int64_t n_send, n_wire;
    int64_t rows_on[CUDA_MAX_RANKS], first[CUDA_MAX_RANKS + 1];
    int32_t exact[]; /* [L] */
};

/* New routing for a plan of fixed capacity, counted and exchanged on the device. */
struct cuda_update {
    struct cuda_waits waits;
    struct cuda_op_desc desc;
    struct cuda_count count;
    struct cuda_counts *counts;
    struct cuda_plan_info *info;          /* NULL: the host does not ask */
    uint64_t number;                      /* for the facts */
    int32_t *block_experts;               /* expanded: [blocks,E] rows of each block, then where its rows begin */
    int32_t *expert_base;                 /* expanded: [E] where this rank's rows of each expert begin */
    int32_t *expert_start, *expert_exact; /* [L+1], [L] of this rank */
    int32_t *prefix;                      /* [R,R] (i, j): tokens of the ranks 0..i for rank j */
    int32_t expanded, alignment, capacity, blocks;
};

/* Words of rows to where strides say. */
struct cuda_scatter {
    const uint32_t *from; /* rows of so many words, one behind the other; NULL: there is nothing to scatter */
    uint32_t *to;
    int64_t words, stride_row, stride_word;
};

/* Rows of this rank by the counts of a plan, behind a dispatch or before a combine. */
struct cuda_rows {
    const struct cuda_counts *counts;
    const int32_t *expert_start, *expert_exact; /* NULL: rows are one behind the other */
    struct cuda_copy copy[CUDA_BUFFERS];
    int32_t rank, n_local, zero;         /* zero: rows between experts become 0 */
    unsigned char *zeroed[CUDA_BUFFERS]; /* the same outputs whether copied or not, for zeros */
    int64_t row_bytes[CUDA_BUFFERS];
    struct cuda_scatter scatter;
    unsigned char *index, *weights; /* behind the last row up to `capacity`: -1, and 0; NULL: not wanted */
    int64_t index_bytes, weight_bytes, capacity;
};

/* Loads all kernels now (a first launch later would load them while a peer's kernel waits) and lifts their limits. */
cudaError_t cuda_kernels_load(int shared_bytes);
cudaError_t cuda_dispatch_load(int shared_bytes);
cudaError_t cuda_combine_load(int shared_bytes);
cudaError_t cuda_launch_dispatch(const struct cuda_dispatch *dispatch, const struct cuda_shape *shape,
                                 cudaStream_t stream);
cudaError_t cuda_launch_combine(const struct cuda_combine *combine, const struct cuda_shape *shape,
                                cudaStream_t stream);
cudaError_t cuda_barrier_load(void);
/* All ranks synchronise; desc: what each of them tells. */
cudaError_t cuda_launch_barrier(const struct cuda_waits *waits, const struct cuda_op_desc *desc, cudaStream_t stream);
/* Until the word is not 0. */
cudaError_t cuda_launch_wait(const struct cuda_waits *waits, const uint32_t *word, cudaStream_t stream);
/* Entries of a route in the order of EP_COMBINE_BY_CHOICE; `ret_entry` has room for as many. */
struct cuda_order {
    struct cuda_route route;
    struct cuda_entry *ret_entry;
    int32_t from_mask; /* the order stays that of the ranks */
    int32_t by_rank;   /* rows of a rank follow each other; expanded layout */
};

/*
 * The facts of a plan to where the caller wants them (ep_plan_metadata; NULL: not wanted). Which token each row is the
 * ranks tell each other by rows that say who they are, sent like any others: rank and token, each + 1, then in the
 * expanded layout the token's number among those that each rank receives.
 */
struct cuda_metadata {
    struct cuda_waits waits;
    struct cuda_route route;
    int32_t rank, nranks;          /* of the group, here and below */
    const int64_t *first;          /* [R+1] tokens for this rank of the ranks before each */
    const int32_t *exact, *prefix; /* [L], [R,R] */
    const int32_t *start;          /* [R] tokens for each rank of the ranks before this one; NULL: there are none */
    int32_t *rows;                 /* [N, row_words] what this rank says of its tokens; NULL: not wanted */
    int32_t *recv_rows;            /* [received rows, row_words] */
    float *choices, *recv_choices; /* [N,K], [received rows] expanded: which choice; NULL: not wanted */
    int32_t row_words, alignment, stride, unused;
    int64_t max_rows; /* that this rank can receive */
    int32_t *recv_source, *recv_slot, *n_recv_tokens, *psum_rank, *psum_expert, *count_exact, *rank_prefix;
};

/* The layout of a routing; outputs as those of ep_layout, zeroed. */
struct cuda_layout {
    struct cuda_waits waits; /* for the report of routing that is not valid */
    const void *topk_idx;
    int32_t *per_rank, *per_node, *per_expert;
    uint8_t *in_rank;
    int32_t idx64, n_tokens, topk, n_experts;
    int32_t nranks, ranks_per_node; /* of the group, CUDA_MAX_RANKS at most */
};

cudaError_t cuda_launch_layout(const struct cuda_layout *layout, cudaStream_t stream);
cudaError_t cuda_layout_load(void);

/* The counts, and the rows to be dispatched; then, behind their dispatch, what depends on them. */
cudaError_t cuda_launch_metadata_counts(const struct cuda_metadata *metadata, cudaStream_t stream);
cudaError_t cuda_launch_sources(const struct cuda_metadata *metadata, cudaStream_t stream);
cudaError_t cuda_metadata_load(void);

cudaError_t cuda_launch_order(const struct cuda_order *order, cudaStream_t stream);
/* The kernels of an update, one behind the other. */
cudaError_t cuda_launch_update(const struct cuda_update *update, cudaStream_t stream);
cudaError_t cuda_launch_rows(const struct cuda_rows *rows, cudaStream_t stream);
cudaError_t cuda_update_load(void);
/* Counts and assigns rows; then, behind it, adds what the blocks before each block have. */
cudaError_t cuda_launch_count(const struct cuda_count *count, cudaStream_t stream);

#ifdef __cplusplus
}
#endif

#endif
