/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink.h - ep_comm_shrink: in shrink.c the survivors on one host agree on the members, by the votes of shrink_vote.c,
 * and create the new group. Over control links shrink_linked.c does all of that. Both use shrink_open.c and
 * shrink_aborts.c.
 */
#ifndef EP_GROUP_SHRINK_H
#define EP_GROUP_SHRINK_H

#include "group/group.h"

/* The new group while it is created. */
struct shrink_group {
    ep_allgather_fn allgather;
    void *context;
    const void *network;     /* as in ep_boot */
    int ranks[EP_MAX_RANKS]; /* old rank of each survivor */
    int n;
    uint32_t calls;
    ep_status failed;               /* of the first all-gather that failed: later ones fail alike */
    int failed_rank;                /* rank named by that failure, -1: none has failed */
    char text[EP_ERROR_TEXT_BYTES]; /* of that failure: it has the old rank numbers, ... */
    char lost[EP_ERROR_TEXT_BYTES]; /* ... and so has that of a lost connection, found between two all-gathers */
};

/* shrink_open.c: creates `next` for the survivors. Error texts have the old rank numbers. */
ep_status shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next);
/*
 * The old number of the failed rank, so that all votes name the same one: from the all-gather, else the first rank in
 * the text, else this rank.
 */
int shrink_find_failed_rank(const struct shrink_group *g, const ep_comm *comm);

/* shrink_linked.c: the whole shrink of ranks on several hosts. */
ep_status shrink_linked(struct ep_group *group, ep_comm *next);

/* --- shrink_aborts.c: which aborts end a shrink --- */

struct shrink_aborts {
    struct ep_group *group;
    int grace_ms;
    struct shrink_abort {
        uint32_t at_begin; /* calls of ep_comm_abort that this rank knew when the call began */
        uint32_t before;   /* calls of ep_comm_abort that do not end this call */
        uint64_t seen_ns;  /* when another one was first seen; 0: none */
    } * ranks;             /* [R], freed by the caller, also after a failure */
};

/* At the beginning of the call, which it publishes. */
ep_status shrink_aborts_init(struct shrink_aborts *aborts, struct ep_group *group);
/* The rank whose abort ends this call, or -1. */
int shrink_aborts_find(struct shrink_aborts *aborts);
/* `rank` reports that the last of its `count` aborts ended its previous call: true if that one ends this call, too. */
bool shrink_aborts_is_new(const struct shrink_aborts *aborts, int rank, uint64_t count);

/* A shrink on one host. */
struct shrink {
    struct ep_group *group;
    struct ep_group_shrink *mine;
    uint32_t attempt; /* from 1; index into vote and out is attempt - 1 */
    int timeout_ms;
    struct shrink_aborts aborts;
    struct shrink_group next;
};

/* A vote: its kind, and for votes that fail the attempt the status and the rank to name. */
static inline uint32_t shrink_pack_vote(uint32_t kind, ep_status status, int rank)
{
    return kind | (uint32_t)status << 8 | (uint32_t)rank << 20;
}

static inline uint32_t shrink_kind(uint32_t vote)
{
    return vote & 0xff;
}

static inline struct ep_group_shrink *shrink_state_of(const struct shrink *s, int rank)
{
    return &s->group->peers[rank].control->shrink;
}

/* --- shrink.c --- */

/* The failure of this and every later call of an excluded rank. */
ep_status shrink_fail_excluded(int rank);

/* --- shrink_vote.c: views --- */

/* True if the view of `of` excludes `rank` in this attempt. */
bool shrink_leaves_out(const struct shrink *s, int of, int rank);

/* True if the view of this rank excludes `rank`. */
bool shrink_is_out(const struct shrink *s, int rank);

bool shrink_same_view(const struct shrink *s, int a, int b);

/* Adds to the view of this rank: `rank`; the view of a peer that has joined. */
void shrink_leave_out(const struct shrink *s, int rank);
void shrink_merge_view(const struct shrink *s, int rank);

/* --- shrink_vote.c: votes --- */

struct shrink_outcome {
    enum { SHRINK_PASSED, SHRINK_FAILED, SHRINK_ENDED } result;
    int member;    /* passed: a rank whose view has passed */
    int owner;     /* else: the rank whose word gives the reason, ... */
    uint32_t word; /* ... and that word */
};

/*
 * Votes with `vote`, unless the word of this rank is decided already, and waits until all words are: dead ranks, and
 * ranks that do not vote within the deadline, are banned, and when one rank aborts or fails, so do all. on_opened: of
 * the group of `member`; a rank that is not in it votes OPEN, which is no vote.
 */
struct shrink_outcome shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote);

/* Decides a word that is OPEN, unless `word` is OPEN. Returns the word after that. */
uint32_t shrink_decide(const struct shrink *s, int rank, bool on_opened, uint32_t word);

/* True if no group can pass that excludes the owner of this word. */
bool shrink_objects(uint32_t word);

/* A word to give up for the same reason as `owner`: its own, if that is valid. */
uint32_t shrink_copy_given_up(const struct shrink *s, int owner, uint32_t word);

/* Fails with the status in a word against the group. `owner`: the rank of the word. */
ep_status shrink_fail_with_vote(const struct shrink *s, int owner, uint32_t word);

uint32_t shrink_attempt_of(const struct shrink *s, int rank);

#endif
