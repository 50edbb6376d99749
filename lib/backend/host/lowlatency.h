/* SPDX-License-Identifier: Apache-2.0 */
/* lowlatency.h - what lowlatency.c and lowlatency_open.c share: the segments that ranks write into. */
#ifndef EP_HOST_LOWLATENCY_H
#define EP_HOST_LOWLATENCY_H

#include "backend/host/host.h"

/* Where the rows of one source lie in the packed rows of one expert. */
struct ll_range {
    int32_t begin, count;
};

/* Head of a rank's shared segment. Then: ranges [2][L*R], then blocks [2][R]. */
struct ll_shared {
    alignas(HOST_CACHE_LINE) _Atomic uint64_t sent; /* dispatches whose rows this rank has sent */
    _Atomic uint64_t taken;                         /* dispatches that this rank has packed: their buffer is free */
    _Atomic uint64_t offered;                       /* combines whose input this rank has offered */
    _Atomic uint64_t pulled;                        /* combines that this rank has read from all */
    struct host_where offer[2];
    alignas(HOST_CACHE_LINE) _Atomic uint64_t masks[EP_MAX_RANKS / 64]; /* ranks that this rank has masked */
};

/* Slots of one source in a receiver's segment: count, then max_tokens slots. The receiver owns the memory: a sender
 * only writes to it, a receiver copies the heads before it looks at them. */
struct ll_block {
    int32_t count;
    int32_t format; /* format_of() the sender's arguments */
    int32_t unused[14];
};

struct ll_slot {
    int32_t token;
    int32_t n_experts;
    int32_t expert[]; /* local numbers, topk of them at most; then scales, then the row, each aligned to 16 */
};

struct host_ll {
    struct host_comm *host;
    unsigned char **peer; /* [R] segments */
    struct ep_shm *shm;   /* [R] our mappings of the peers': as long as we are there, whenever they free theirs */
    void *segment;
    void *combine_buffer[2]; /* [L, R*M, H] bf16, made on first use; its pages when rows come that need them */
    int32_t *reserved[2];    /* [L] rows of each expert that have their pages */
    uint64_t dispatches, combines;
    uint64_t handed_out; /* combine that ep_ll_get_combine_buffer has last given a buffer for */
    size_t scales_at, row_at, slot_bytes, block_bytes, ranges_at, blocks_at;
    int32_t *masked;            /* [R] */
    int32_t *index[2];          /* [M,K] of dispatch n at n % 2, until its combine */
    int32_t *given;             /* [M,K] that a combine comes with */
    int32_t *n_slots;           /* [R] written for each rank by the open dispatch; then: received from each */
    int32_t *heads;             /* [R*M] copies of the heads of the slots received: struct ll_slot and K experts each */
    struct ll_range *ranges[2]; /* [L*R] of dispatch n at n % 2: what the segment holds for the peers */
    int32_t *seen;              /* [E] tokens of this rank so far, per expert */
    uint8_t *row;               /* one quantised row */
    float *scales;
    int32_t *packed_scales;
    bool in_dispatch;
    bool in_place; /* the open combine reads the caller's memory, which it gets back only when all have read it */
    ep_ll_dispatch_args dispatch;
    ep_ll_combine_args combine;
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

#endif
