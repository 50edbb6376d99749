/* SPDX-License-Identifier: Apache-2.0 */
/* sequence_slot.h - for sequence_cuda: a plan on both backends, with the buffers of all calls on it. */
#ifndef EP_TESTS_CUDA_SEQUENCE_SLOT_H
#define EP_TESTS_CUDA_SEQUENCE_SLOT_H

#include "mirror.h"

enum { ROUTINGS = 3 };

enum buffer {
    X,
    SCALES,
    WEIGHTS,
    IDX,                      /* [ROUTINGS] choices, or masks */
    EXPERTS = IDX + ROUTINGS, /* [ROUTINGS] of masks */
    RECV_X = EXPERTS + ROUTINGS,
    RECV_SCALES,
    RECV_IDX,
    RECV_WEIGHTS,
    ANSWER,
    ANSWER_WEIGHTS,
    OUT,
    OUT_WEIGHTS,
    SOURCE, /* metadata */
    SLOT,
    N_TOKENS,
    PSUM_RANK,
    PSUM_EXPERT,
    COUNT,
    PREFIX,
    BUFFERS
};

struct slot {
    bool used, fixed, expanded, mask, choice, by_choice, updated, quantized;
    int dtype, scale_type, scale_words, idx_type, hidden, topk, n_experts, max_tokens, alignment;
    uint32_t flags;
    int n_tokens[ROUTINGS]; /* of this rank */
    int called, recorded;   /* routing of the last update that was called outside of captures; of the last one */
    int latest;             /* of the last one that has run */
    int64_t out_rows;
    ep_plan *plan[2]; /* of the host, of the device */
    struct mirror b[BUFFERS];
};

/* Random numbers: the same on all ranks; of this rank. */
struct dice {
    uint64_t shared, own;
};

static inline int draw(struct dice *dice, int below)
{
    return (int)(next_random(&dice->shared) % (uint64_t)below);
}

static inline int draw_own(struct dice *dice, int below)
{
    return (int)(next_random(&dice->own) % (uint64_t)below);
}

enum call { DISPATCH, COMBINE, UPDATE, METADATA, MADE, EXCHANGE, BARRIER, CALLS };

/* Collective. The slot is to be freed in each case. */
int slot_new(const struct group *group, struct dice *dice, struct slot *ret_slot);
/* New data and poisoned outputs. Collective calls must have ended. */
int slot_load(const struct group *group, struct dice *dice, struct slot *slot);
int slot_free(const struct group *group, int code, struct slot *slot);

/*
 * DISPATCH, COMBINE, UPDATE, METADATA, on one of the backends. MADE: a plan of its own with that routing is made, used
 * for a dispatch and a combine with the slot's buffers, and freed; for fixed capacity only.
 */
int slot_call(const struct group *group, const struct slot *slot, enum call call, int routing, bool device,
              cudaStream_t stream);

/* ep_plan_get_sources() of both backends; not after an update. Collective. */
int slot_compare_sources(const struct slot *slot);
/* Waits for the group's stream. */
int slot_compare(const struct group *group, const struct slot *slot, const char *phase);

#endif
