/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ll_segment.h - the words at the beginning of a segment of low latency: for kernels, and for what sends them to other
 * nodes. No header of CUDA.
 */
#ifndef EP_CUDA_LL_SEGMENT_H
#define EP_CUDA_LL_SEGMENT_H

#include <stdint.h>

/*
 * Of the group. With up to CUDA_LL_NARROW of them a mask is one word, and kernels are compiled for that; for more there
 * are kernels of their own, in which a thread of a block waits for each rank: hence the limit.
 */
#define CUDA_LL_MAX_RANKS 512
#define CUDA_LL_NARROW 32
#define CUDA_LL_MASK_WORDS (CUDA_LL_MAX_RANKS / 32) /* rank r: bit r % 32 of word r / 32 */
#define CUDA_LL_MOST_PARTS 8                        /* of a row, each with a warp of its own, where rows are few */

/* Between nodes: what a call has for a rank of another node, in the segment that stands for that rank here. */
struct cuda_ll_told {
    uint64_t number; /* of the call; written before the word that says that all is there */
    int32_t combine; /* its kind */
    int32_t max_tokens, parts;
    int32_t image_bytes; /* of a slot: without what a row of this format leaves of it */
    int32_t parity;      /* of the dispatch */
    int32_t unused;
};

enum { CUDA_LL_TOLD_WEIGHTS = 2, CUDA_LL_TOLD = 3 }; /* 0 and 1: rows of a call, by the parity of its number */

/* Where the ranks of a call meet. Each has a verdict of its own. */
enum { CUDA_LL_TO_SEND, CUDA_LL_TO_RECEIVE, CUDA_LL_MEETINGS };

#define CUDA_LL_LOST 1u  /* of `events`: a rank of another node is lost */
#define CUDA_LL_EVENT 2u /* what is added, behind what has changed */

/* Beginning of a segment. [source]: that rank writes it. */
struct cuda_ll_segment {
    uint64_t completed[CUDA_LL_MAX_RANKS]; /* [source] calls that it has completed */
    uint64_t ahead[CUDA_LL_MAX_RANKS]; /* [source] the weights of its tokens are here; with masking, or between nodes */
    uint64_t sent[CUDA_LL_MAX_RANKS];  /* [source] all of its rows of this call are here; as above */
    uint32_t masked_by[CUDA_LL_MAX_RANKS]; /* [source] it has masked this rank */
    uint64_t barriers[CUDA_LL_MAX_RANKS];  /* [source] barriers that it has come to */
    uint64_t moved[CUDA_LL_MAX_RANKS];     /* [source] messages that have come from it; only in the landing segment */
    uint32_t events; /* CUDA_LL_EVENT for each message that has come, | CUDA_LL_LOST; in the landing
                        segment. The owner's own: the same, as far as a kernel has seen it */
    uint32_t unused;
    struct cuda_ll_told told[CUDA_LL_TOLD]; /* only in segments that stand for ranks of other nodes */

    /* The owner's own. */
    uint64_t call;                         /* the last that is complete */
    uint64_t dispatches, combines;         /* that are complete */
    uint64_t last_dispatch, last_combine;  /* their calls */
    uint64_t barrier;                      /* the last that is complete */
    uint64_t asked;                        /* as in struct cuda_ll_report */
    uint64_t verdict[CUDA_LL_MEETINGS];    /* call << 32 | mask[0], of each meeting; with masking, or many ranks */
    uint32_t mask[CUDA_LL_MASK_WORDS];     /* ranks that are masked */
    uint32_t rejoins[CUDA_LL_MASK_WORDS];  /* ranks that this one waits for again: may they still mask it? */
    uint32_t far_lost[CUDA_LL_MASK_WORDS]; /* as in struct cuda_ll_report, as far as a kernel has seen it */
    uint32_t events_until;                 /* of the lease of the thread that watches `events` of the landing segment */
    uint32_t blocks[3];                    /* of the running kernel that have sent rows, ended, sent weights */

    /* The owner's own; of more than CUDA_LL_NARROW ranks alone. */
    uint32_t verdict_mask[CUDA_LL_MEETINGS][CUDA_LL_MASK_WORDS]; /* ... of verdict, written before it */
    struct cuda_ll_segment *reach[CUDA_LL_MAX_RANKS]; /* [rank] as cuda_ll.peer; written before the first kernel */
};

#endif
