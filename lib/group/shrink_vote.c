/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The views and votes of a shrink, and the one outcome that all ranks read from them.
 *
 * In each attempt each rank of the old group has one word. It is OPEN at first and is decided once, by
 * compare-exchange:
 *
 *   LOCKED    by its owner: its view is final, and all who remain in it had the same one
 *   VETO      by its owner, whose view has changed; or by a peer, for an owner that is in a later attempt already, or
 *             that has not joined an attempt which fails in any case
 *   BANNED    by a peer, because the owner died or left, or stalled before it voted: the next attempt is without it
 *   LEFT_OUT  by a peer that votes and whose view leaves the owner out, or by the owner when it sees that
 *   GIVEN_UP  by any rank: this call of ep_comm_shrink fails for all, with the status and the rank in the word
 *
 * A rank continues only when all words are decided, including those of dead, late and left-out ranks. Then no word
 * changes any more, and neither do the views of ranks that have locked. So the outcome is a function of constants, the
 * same on each rank, whenever it reads them:
 *
 *   ended   some word is GIVEN_UP. The word of the lowest rank has the status.
 *   passed  the ranks of one view have all locked it, and each rank that it leaves out is LEFT_OUT, or BANNED for its
 *           death. Two views cannot pass: a member of the first is LOCKED, but has to be LEFT_OUT for the second.
 *   failed  otherwise. All begin the next attempt.
 *
 * This determines which statuses can result from one attempt. Passed: the status of the new group on its members, which
 * vote once more on whether it was created; EP_E_EXCLUDED on the others, or the failure of that second vote on all.
 * Ended: one failure on all. No call fails while a group passes: for that its own word had to be OPEN, and the group
 * had to see it LEFT_OUT. No rank is in a later attempt while a group passes in this one: the first rank of the later
 * attempt has read that this one failed.
 *
 * A rank that is LEFT_OUT decides for no rank that may still vote, except for dead ones, until all others have had
 * time.
 */
#include "group/shrink.h"

#include "group/peers.h"
#include "group/wait.h"

/*
 * Deadlines that a left-out rank waits for the voters: in the vote on the members each of them has at most three
 * (shrink.c), in the vote on the new group as many as its creation has. If this rank is too early the attempt fails.
 */
#define LEFT_OUT_VOTE_DEADLINES 3
#define LEFT_OUT_OPENED_DEADLINES 10

/* --- views: a bitmap of the ranks to leave out in each control block; during a shrink bits are only added --- */

/* A word of the view of `rank`, without bits of ranks that do not exist. */
static uint64_t view_word(const struct shrink *s, int rank, int word)
{
    int bits = s->group->comm->nranks - word * 64;
    uint64_t mask = bits >= 64 ? UINT64_MAX : bits > 0 ? (UINT64_C(1) << bits) - 1 : 0;

    return atomic_load(&shrink_state_of(s, rank)->out[s->attempt - 1][word]) & mask;
}

bool shrink_leaves_out(const struct shrink *s, int of, int rank)
{
    return view_word(s, of, rank / 64) >> (rank % 64) & 1;
}

bool shrink_is_out(const struct shrink *s, int rank)
{
    return shrink_leaves_out(s, s->group->comm->rank, rank);
}

void shrink_leave_out(const struct shrink *s, int rank)
{
    atomic_fetch_or(&s->mine->out[s->attempt - 1][rank / 64], UINT64_C(1) << (rank % 64));
}

void shrink_merge_view(const struct shrink *s, int rank)
{
    for (int word = 0; word * 64 < s->group->comm->nranks; word++)
        atomic_fetch_or(&s->mine->out[s->attempt - 1][word], view_word(s, rank, word));
}

bool shrink_same_view(const struct shrink *s, int a, int b)
{
    for (int word = 0; word * 64 < s->group->comm->nranks; word++)
        if (view_word(s, a, word) != view_word(s, b, word))
            return false;
    return true;
}

/* --- votes --- */

static ep_status status_in(uint32_t word)
{
    return (ep_status)(word >> 8 & 0xfff);
}

uint32_t shrink_attempt_of(const struct shrink *s, int rank)
{
    return atomic_load(&shrink_state_of(s, rank)->attempt);
}

/* The word of `rank` in one of the two votes of this attempt. */
static _Atomic uint32_t *word_of(const struct shrink *s, int rank, bool on_opened)
{
    struct ep_group_shrink *state = shrink_state_of(s, rank);

    return on_opened ? &state->opened[s->attempt - 1] : &state->vote[s->attempt - 1];
}

uint32_t shrink_decide(const struct shrink *s, int rank, bool on_opened, uint32_t word)
{
    uint32_t before = EP_GROUP_VOTE_OPEN;

    if (word == EP_GROUP_VOTE_OPEN || !atomic_compare_exchange_strong(word_of(s, rank, on_opened), &before, word))
        return before;
    ep_group_ring_all(s->group);
    return word;
}

bool shrink_objects(uint32_t word)
{
    switch (shrink_kind(word)) {
    case EP_GROUP_VOTE_LOCKED:
    case EP_GROUP_VOTE_VETO:
    case EP_GROUP_VOTE_GIVEN_UP:
        return true;
    case EP_GROUP_VOTE_BANNED:
        return status_in(word) == EP_E_TIMEOUT;
    default:
        return false;
    }
}

uint32_t shrink_copy_given_up(const struct shrink *s, int owner, uint32_t word)
{
    if ((int)(word >> 20) < s->group->comm->nranks && ep_status_is_failure(status_in(word)))
        return word;
    return shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, EP_E_MISMATCH, owner);
}

ep_status shrink_fail_with_vote(const struct shrink *s, int owner, uint32_t word)
{
    ep_status status = status_in(word);
    int rank = (int)(word >> 20);

    if (rank >= s->group->comm->nranks || !ep_status_is_failure(status))
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the vote of rank %d is damaged: 0x%08x", owner, word);
    switch (status) {
    case EP_E_ABORTED:
        return ep_fail(status, "ep_comm_shrink: rank %d called ep_comm_abort", rank);
    case EP_E_TIMEOUT:
        return ep_fail(status,
                       "ep_comm_shrink: rank %d did not answer within %d ms, and a group needs more than half of the "
                       "live ranks and all that have joined; call it again%s",
                       rank, s->timeout_ms, ep_group_describe_unreadable(s->group, rank));
    case EP_E_PEER_DEAD:
        return ep_fail(status, "ep_comm_shrink: rank %d of the old group died; call it again", rank);
    case EP_E_MISMATCH:
        return ep_fail(
            status, "ep_comm_shrink: by a vote of the group, rank %d published data that the others cannot use", rank);
    case EP_E_PEER_LEFT:
        return ep_fail(status, "ep_comm_shrink: rank %d left the old group; call it again", rank);
    default:
        return ep_fail(status, "ep_comm_shrink: rank %d failed with %s", rank, ep_status_name(status));
    }
}

/* One reading of all words of a vote, and the state from which this rank decides for others. */
struct reading {
    bool on_opened;
    int member;         /* on_opened: a member of the new group */
    int aborted_by;     /* -1: none */
    bool late;          /* past the deadline of this vote */
    bool outsider;      /* left out of the view that others vote on */
    bool none_can_lock; /* no rank that has joined has locked a view, or still can */
    uint32_t given_up;  /* a word that ends the call, 0: none */
    uint32_t words[EP_MAX_RANKS];
};

static void read_words(const struct shrink *s, struct reading *r)
{
    r->given_up = 0;
    r->none_can_lock = true;
    for (int rank = 0; rank < s->group->comm->nranks; rank++) {
        /* Only members vote on whether the new group was created. */
        bool votes = !r->on_opened || !shrink_leaves_out(s, r->member, rank);
        uint32_t word = votes ? atomic_load(word_of(s, rank, r->on_opened)) : EP_GROUP_VOTE_LEFT_OUT;

        r->words[rank] = word;
        if (shrink_kind(word) == EP_GROUP_VOTE_GIVEN_UP && !r->given_up)
            r->given_up = shrink_copy_given_up(s, rank, word);
        if (shrink_attempt_of(s, rank) >= s->attempt && (word == EP_GROUP_VOTE_OPEN || word == EP_GROUP_VOTE_LOCKED))
            r->none_can_lock = false;
    }
}

/* The decision of this rank for a word that is open; OPEN: its owner may still decide. */
static uint32_t choose(const struct shrink *s, const struct reading *r, int rank)
{
    uint32_t attempt = shrink_attempt_of(s, rank);

    if (r->given_up)
        return r->given_up;
    if (r->aborted_by >= 0)
        return shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, EP_E_ABORTED, r->aborted_by);
    if (ep_group_dead_or_left(s->group, rank)) {
        bool left = ep_group_has_left(s->group, rank);

        return shrink_pack_vote(EP_GROUP_VOTE_BANNED, left ? EP_E_PEER_LEFT : EP_E_PEER_DEAD, rank);
    }
    if (!r->on_opened && !r->outsider && shrink_is_out(s, rank))
        return shrink_pack_vote(EP_GROUP_VOTE_LEFT_OUT, EP_E_EXCLUDED, rank);
    if (attempt > s->attempt)
        return shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, rank);
    /* No rank has locked a view with it, so this attempt fails, and need not wait for it. */
    if (attempt < s->attempt && (!r->outsider || r->none_can_lock))
        return shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, rank);
    return r->late ? shrink_pack_vote(EP_GROUP_VOTE_BANNED, EP_E_TIMEOUT, rank) : EP_GROUP_VOTE_OPEN;
}

/*
 * The outcome of words that are all decided: that of the first word against the group, but a word that ends the call
 * takes precedence.
 */
static struct shrink_outcome read_outcome(const struct shrink *s, const struct reading *r)
{
    int nranks = s->group->comm->nranks, member = r->on_opened ? r->member : -1;
    struct shrink_outcome outcome = {.result = SHRINK_PASSED};

    for (int rank = 0; member < 0 && rank < nranks; rank++)
        if (r->words[rank] == EP_GROUP_VOTE_LOCKED)
            member = rank;
    outcome.member = member;
    for (int rank = 0; rank < nranks; rank++) {
        uint32_t word = r->words[rank];
        bool ends = shrink_kind(word) == EP_GROUP_VOTE_GIVEN_UP, fits;

        if (member >= 0 && !shrink_leaves_out(s, member, rank))
            fits = word == EP_GROUP_VOTE_LOCKED && (r->on_opened || shrink_same_view(s, member, rank));
        else
            fits = member >= 0 && !shrink_objects(word);
        if (!fits && (outcome.result == SHRINK_PASSED || (ends && outcome.result == SHRINK_FAILED)))
            outcome = (struct shrink_outcome){ends ? SHRINK_ENDED : SHRINK_FAILED, -1, rank, word};
    }
    return outcome;
}

struct shrink_outcome shrink_vote(struct shrink *s, bool on_opened, int member, uint32_t vote)
{
    int nranks = s->group->comm->nranks, me = s->group->comm->rank;
    struct reading r = {.on_opened = on_opened, .member = member};
    uint64_t begin_ns = ep_now_ns(), timeout_ns = (uint64_t)s->timeout_ms * 1000000u, deadlines = 1;

    vote = shrink_decide(s, me, on_opened, vote);
    r.outsider = on_opened ? member != me : shrink_kind(vote) == EP_GROUP_VOTE_LEFT_OUT;
    if (r.outsider)
        deadlines = on_opened ? LEFT_OUT_OPENED_DEADLINES : LEFT_OUT_VOTE_DEADLINES;
    for (;;) {
        uint32_t seen = ep_group_doorbell(s->group);
        int n_open = 0;

        r.late = ep_now_ns() - begin_ns >= deadlines * timeout_ns;
        r.aborted_by = shrink_aborts_find(&s->aborts);
        read_words(s, &r);
        for (int rank = 0; rank < nranks; rank++) {
            if (r.words[rank] == EP_GROUP_VOTE_OPEN)
                r.words[rank] = shrink_decide(s, rank, on_opened, choose(s, &r, rank));
            n_open += r.words[rank] == EP_GROUP_VOTE_OPEN;
        }
        if (n_open == 0) {
            s->group->shrink_deadlines += r.late ? (int)deadlines : 0;
            return read_outcome(s, &r);
        }
        ep_group_wait_doorbell(s->group, seen);
    }
}
