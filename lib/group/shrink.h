/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink.h - a call of ep_comm_shrink: shrink.c lets the survivors agree on who is left, shrink_vote.c counts their
 * votes, shrink_group.c makes the new group of them, over control links shrink_linked.c does all of that, with
 * shrink_aborts.c.
 */
#ifndef EP_GROUP_SHRINK_H
#define EP_GROUP_SHRINK_H

#include "group/group.h"

/* The new group in the making. */
struct shrink_group {
    struct shrink *s; /* NULL over control links */
    ep_allgather_fn allgather;
    void *context;
    const void *network; /* as in ep_boot */
    int *ranks;          /* old rank of each survivor */
    int n;
    uint32_t calls;
    int failed_rank;                /* whom a failure of the all-gather names, -1: none has failed */
    char text[EP_ERROR_TEXT_BYTES]; /* of that failure, if it has the old numbers */
};

/* shrink_open.c: creates `next` for the survivors. Fails with texts that have the old numbers of ranks. */
ep_status shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next);
/*
 * The old number of the rank that has failed, so that all votes name the same one: as the all-gather says, else the
 * first that the text names. One that names none is this rank's own.
 */
int shrink_find_failed_rank(const struct shrink_group *g, const ep_comm *comm);

/* shrink_linked.c: all of a shrink whose ranks are on several hosts. */
ep_status shrink_linked(struct ep_group *group, ep_comm *next);

/* --- shrink_aborts.c: which aborts end a shrink over control links --- */

struct shrink_aborts {
    struct ep_group *group;
    int most_ms;
    uint32_t *at_begin; /* [R] calls of ep_comm_abort that were known of when this call began */
    uint32_t *before;   /* [R] those that do not end this call */
    uint64_t *heard_ns; /* [R] when another one was heard of; 0: none */
};

/* When the call begins, which it tells the others. done() is fine after a failure. */
ep_status shrink_aborts_init(struct shrink_aborts *aborts, struct ep_group *group, int timeout_ms);
void shrink_aborts_done(struct shrink_aborts *aborts);
/* The rank whose abort ends this call, or -1. */
int shrink_aborts_find(struct shrink_aborts *aborts);
/* `rank` says that the last of so many ended a call of its own: is that one news to this call? */
bool shrink_aborts_is_news(const struct shrink_aborts *aborts, int rank, uint64_t count);

struct shrink {
    struct ep_group *group;
    struct ep_group_shrink *mine;
    uint32_t attempt; /* from 1; index into vote and out is attempt - 1 */
    uint64_t deadline_ns;
    bool extended; /* the deadline has passed once, without enough ranks */
    int timeout_ms;
    uint32_t *aborts; /* [R] as they were when this call began */
};

/* A vote: its kind, and for those that fail the attempt the status and the rank to name. */
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

/* What each call says from then on. */
ep_status shrink_fail_excluded(int rank);

/* Begins a new attempt, and further ones, until all who remain have the same view of who is left. */
ep_status shrink_agree(struct shrink *s);

/* --- shrink_view.c --- */

/* Does `of` leave out `rank` in this attempt? */
bool shrink_leaves_out(const struct shrink *s, int of, int rank);

/* Does this rank leave out `rank`? */
bool shrink_is_out(const struct shrink *s, int rank);

bool shrink_same_view(const struct shrink *s, int a, int b);

/* Adds to the view of this rank: `rank`; what a peer that has come leaves out. */
void shrink_leave_out(const struct shrink *s, int rank);
void shrink_take_over(const struct shrink *s, int rank);

/* --- shrink_vote.c --- */

struct shrink_outcome {
    enum { SHRINK_PASSED, SHRINK_FAILED, SHRINK_ENDED } result;
    int member;    /* passed: a rank whose view has passed */
    int owner;     /* else: the rank whose word says why, */
    uint32_t word; /* and that word */
};

/*
 * Votes with `vote`, unless the word of this rank is decided already, and waits until all words are: the dead and who
 * does not vote within the deadline are banned, and when one rank aborts or fails, so do all. on_opened: of the
 * group of `member`; a rank that is not in it votes OPEN, which is no vote.
 */
struct shrink_outcome shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote);

/* Of the vote on who is left. The second returns the word that was there, or `word` where that was OPEN. */
uint32_t shrink_get_vote(const struct shrink *s, int rank);
uint32_t shrink_decide(const struct shrink *s, int rank, uint32_t word);

/* Can no group pass that leaves out the owner of this word? */
bool shrink_objects(uint32_t word);

/* A word with which others give up as `owner` has: its own, if that is not damaged. */
uint32_t shrink_copy_given_up(const struct shrink *s, int owner, uint32_t word);

/* What a word against the group says, as a status of this call. `owner`: whose word it is. */
ep_status shrink_fail_with_vote(const struct shrink *s, int owner, uint32_t word);

/* The rank that has called ep_comm_abort() since this call began, or -1. */
int shrink_aborted_by(const struct shrink *s);

/* It has died, or left by ep_comm_free(). */
bool shrink_is_gone(const struct shrink *s, int rank);

uint32_t shrink_attempt_of(const struct shrink *s, int rank);

#endif
