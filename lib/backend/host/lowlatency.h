/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.h - what the files of low latency share: the segments that ranks write into, and how ranks wait. */
#ifndef EP_HOST_LOWLATENCY_H
#define EP_HOST_LOWLATENCY_H

#include "backend/host/host.h"

/* Where the rows of one source lie in the packed rows of one expert. */
struct ll_range {
    int32_t begin, count;
};

/* The input of a combine, and what all ranks must say alike of it. */
struct ll_offer {
    struct host_where where;
    uint64_t call;
    uint32_t no_partial_reduce, unused;
};

/* Head of a rank's shared segment. Then: ranges [2][L*R], then blocks [2][R]. */
struct ll_shared {
    alignas(HOST_CACHE_LINE) _Atomic uint64_t sent; /* dispatches whose rows this rank has sent */
    _Atomic uint64_t offered;                       /* combines whose input this rank has offered */
    _Atomic uint64_t taken[2];                      /* last dispatch n at n % 2 that this rank has packed ... */
    _Atomic uint64_t pulled[2];                     /* ... and combine that it has read from all: halves of calls may be
                                                       finished out of order */
    _Atomic uint64_t barriers;
    struct ll_offer offer[2];
    alignas(HOST_CACHE_LINE) _Atomic uint64_t masks[EP_MAX_RANKS / 64]; /* ranks that this rank has masked */
};

/* Slots of one source in a receiver's segment: count, then max_tokens slots. The receiver owns the memory: a sender
 * only writes to it, a receiver copies the heads before it looks at them. */
struct ll_block {
    int32_t count;
    int32_t format; /* format_of() the sender's arguments */
    int32_t max_tokens;
    int32_t unused[13];
};

struct ll_slot {
    int32_t token;
    int32_t n_experts;
    int32_t expert[]; /* local numbers, topk of them at most; then scales, then the row, each aligned to 16 */
};

/* A dispatch until its rows are packed, a combine until its rows are read. */
struct ll_dispatch {
    uint64_t number;
    ep_ll_dispatch_args args;
};

struct ll_combine {
    uint64_t number, call;
    int32_t max_tokens;
    bool in_place;  /* reads the caller's memory, which it gets back only when all have read it */
    int32_t *given; /* [M,K] that it comes with */
    ep_ll_combine_args args;
};

struct host_ll {
    struct host_comm *host;
    unsigned char **peer; /* [R] segments */
    struct ep_shm *shm;   /* [R] our mappings of the peers': as long as we are there, whenever they free theirs */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16, made on first use; its pages when rows come that need them */
    int32_t *reserved[2];    /* [L] rows of each expert that have their pages ... */
    int32_t reserved_for[2]; /* ... where each has room for this many tokens of a rank */
    uint64_t handed_out;     /* combine that ep_ll_get_combine_buffer has last given a buffer for */
    uint64_t barriers;
    size_t scales_at, row_at, slot_bytes, block_bytes, ranges_at, blocks_at;
    int32_t *masked;            /* [R] */
    int32_t *index[2];          /* [M,K] of dispatch n at n % 2 */
    int32_t *n_slots;           /* [R] written for each rank, or received from each */
    int32_t *heads;             /* [R*M] copies of the heads of the slots received: struct ll_slot and K experts each */
    struct ll_range *ranges[2]; /* [L*R] of dispatch n at n % 2: what the segment holds for the peers */
    int32_t *seen;              /* [E] tokens of this rank so far, per expert */
    uint8_t *row;               /* one quantised row */
    float *scales;
    int32_t *packed_scales;
    struct ll_dispatch dispatch[2]; /* number n at n % 2 */
    struct ll_combine combine[2];
};

static inline struct ll_shared *ll_shared_of(const struct host_ll *inner, int rank)
{
    return (struct ll_shared *)(void *)inner->peer[rank];
}

static inline struct ll_range *ll_ranges_of(const ep_ll *ll, int rank, uint64_t number)
{
    const struct host_ll *inner = ll->impl;
    size_t n = (size_t)ll->n_local * (size_t)ll->comm->nranks;

    return (struct ll_range *)(void *)(inner->peer[rank] + inner->ranges_at) + (number & 1) * n;
}

static inline struct ll_block *ll_block_of(const ep_ll *ll, int receiver, uint64_t number, int source)
{
    const struct host_ll *inner = ll->impl;
    size_t block = (size_t)(number & 1) * (size_t)ll->comm->nranks + (size_t)source;

    return (struct ll_block *)(void *)(inner->peer[receiver] + inner->blocks_at + block * inner->block_bytes);
}

/* Slots are numbered from the first of each source. */
static inline struct ll_slot *ll_head_of(const ep_ll *ll, int source, int i)
{
    const struct host_ll *inner = ll->impl;
    size_t words = sizeof(struct ll_slot) / sizeof(int32_t) + (size_t)ll->config.topk;

    return (struct ll_slot *)(void *)(inner->heads +
                                      ((size_t)source * (size_t)ll->config.max_tokens + (size_t)i) * words);
}

static inline struct ll_slot *ll_slot_of(const struct host_ll *inner, struct ll_block *block, int i)
{
    return (struct ll_slot *)(void *)((unsigned char *)(block + 1) + (size_t)i * inner->slot_bytes);
}

/* lowlatency_wait.c. A masked rank is waited for no more, and finds out from what this one has published. */
void ll_mask_rank(ep_ll *ll, int rank);
/* To be called when what other ranks have has been read: has one of them masked this rank meanwhile? */
ep_status ll_check_masks(const ep_ll *ll, enum host_phase phase);
/* A value that no rank writes: failure of the group, unless its owner has masked this rank. */
ep_status ll_damaged(ep_ll *ll, int rank, enum host_phase phase, const char *what, int64_t value);
_Atomic uint64_t *ll_counter_of(const ep_ll *ll, int rank, size_t word);
/* Words of the calls of a parity. */
size_t ll_taken_word(uint64_t number);
size_t ll_pulled_word(uint64_t number);
/*
 * Waits until the counter at `word` of all ranks that are not masked has reached `value`. `add` [R]: NULL, or
 * nanoseconds until each of them came are added to it.
 */
ep_status ll_wait_timed(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase, int64_t *add);
ep_status ll_wait_all(ep_ll *ll, size_t word, uint64_t value, enum host_phase phase);
void ll_publish(ep_ll *ll, _Atomic uint64_t *counter, uint64_t value);
ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int32_t *ret_index);

/* lowlatency_combine.c */
ep_status ll_start_combine(ep_ll *ll, const struct ll_combine *wanted);
ep_status ll_pull(ep_ll *ll, const struct ll_combine *combine);
/* Until what combine number n uses is no longer read by the one before it there. */
ep_status ll_wait_unused(ep_ll *ll, uint64_t number);
ep_status ll_take_combine_buffer(ep_ll *ll, uint64_t number, void **ret_buffer);
ep_status ll_reserve_rows(ep_ll *ll, uint64_t number, int max_tokens, int expert, int32_t n_rows);

#endif
