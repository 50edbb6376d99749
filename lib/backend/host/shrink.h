/* SPDX-License-Identifier: Apache-2.0 */
/*
 * shrink.h - a call of ep_comm_shrink: shrink.c lets the survivors agree on who is left and vote; shrink_group.c makes
 * the new group of them.
 */
#ifndef EP_HOST_SHRINK_H
#define EP_HOST_SHRINK_H

#include "backend/host/host.h"

/* The new group in the making. */
struct shrink_group {
    struct shrink *s; /* NULL over control links */
    ep_allgather_fn allgather;
    void *context;
    const void *network; /* as in ep_boot */
    int *ranks;          /* old rank of each survivor */
    int n;
    uint32_t calls;
    int culprit;                    /* whom a failure of the all-gather names, -1: none has failed */
    char text[EP_ERROR_TEXT_BYTES]; /* of that failure, if it has the old numbers */
    ep_status (*open)(ep_comm *comm, const ep_boot *boot);
};

/* shrink_group.c: creates `next` for the survivors. Fails with texts that have the old numbers of ranks. */
ep_status shrink_open_next(struct shrink_group *g, ep_comm *comm, ep_comm *next);

/* shrink_linked.c: all of a shrink whose ranks are on several hosts. */
ep_status shrink_linked(struct host_comm *host, ep_comm *next, ep_status (*open)(ep_comm *comm, const ep_boot *boot));

struct shrink {
    struct host_comm *host;
    struct host_shrink *mine;
    uint32_t attempt; /* from 1; index into vote and out is attempt - 1 */
    uint64_t deadline_ns;
    bool extended; /* the deadline has passed once, without enough ranks */
    int timeout_ms;
    uint32_t *aborts; /* [R] as they were when this call began */
};

/* A vote: its kind, and for those that fail the attempt the status and the rank to name. */
static inline uint32_t shrink_pack_vote(uint32_t kind, ep_status status, int culprit)
{
    return kind | (uint32_t)status << 8 | (uint32_t)culprit << 20;
}

static inline struct host_shrink *shrink_state_of(const struct shrink *s, int rank)
{
    return &s->host->peers[rank].control->shrink;
}

/* Does this rank leave out `rank`? */
bool shrink_is_out(const struct shrink *s, int rank);

/* The rank that has called ep_comm_abort() since this call began, or -1. */
int shrink_aborted_by(const struct shrink *s);

/* Begins a new attempt, and further ones, until all who remain have the same view of who is left. */
ep_status shrink_agree(struct shrink *s);

/*
 * Casts this rank's vote and waits until all who remain have voted, or somebody has voted for them: the dead and who
 * does not vote within the deadline are banned, and when somebody aborts, so are all. *ret_against: the word of the
 * first rank that is against it, 0 if it has passed; *ret_owner: that rank.
 */
void shrink_vote_with_all(struct shrink *s, bool on_opened, uint32_t vote, uint32_t *ret_against, int *ret_owner);

/* What a word against the group says, as a status of this call. `owner`: whose word it is. */
ep_status shrink_fail_with_vote(const struct shrink *s, int owner, uint32_t vote);

#endif
