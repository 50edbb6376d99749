/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The survivors agree on the members of the new group.
 *
 * Each rank publishes its view: the ranks to leave out. Dead and departed ranks are left out at once, a rank that does
 * not join within the deadline only if those that joined are more than half of the live ranks. A rank merges the views
 * of the others into its own, until all that remain have the same view, and then votes (shrink_vote.c). If the attempt
 * fails, all begin the next one.
 *
 * No rank locks a view in which no more than half of the known live ranks remain. Without that many ranks the call
 * waits for one more deadline, and then fails for all: a rank that joins later finds its own word decided and fails
 * alike. The next call begins a new attempt.
 *
 * A rank that others leave out has no vote. It waits for the outcome of the attempt: if it passes the rank is excluded,
 * if it fails the rank joins the next one.
 *
 * ep_comm_abort() is counted in the control block of its rank. A rank that sees a count change during the shrink fails
 * its call.
 *
 * Words of the peers are copied before they are used. A value that no rank writes fails the attempt with EP_E_MISMATCH.
 */
#include "group/shrink.h"

ep_status shrink_fail_excluded(int rank)
{
    return ep_fail(EP_E_EXCLUDED, "ep_comm_shrink: the other ranks continued without rank %d", rank);
}

/* True if a rank that has joined this attempt leaves this one out. */
static bool is_left_out(const struct shrink *s)
{
    int me = s->group->comm->rank;

    for (int rank = 0; rank < s->group->comm->nranks; rank++)
        if (rank != me && shrink_attempt_of(s, rank) >= s->attempt && shrink_leaves_out(s, rank, me))
            return true;
    return false;
}

/* Numbers of ranks that are alive, have joined this attempt, and remain in our view. */
struct count {
    int live, joined, remain;
    int missing; /* first live rank that has not joined or does not remain, -1: none */
};

static struct count count_ranks(const struct shrink *s)
{
    struct count count = {.missing = -1};

    for (int rank = 0; rank < s->group->comm->nranks; rank++) {
        bool joined = shrink_attempt_of(s, rank) >= s->attempt, out = shrink_is_out(s, rank);

        count.remain += !out;
        if (shrink_dead_or_left(s, rank))
            continue;
        count.live++;
        count.joined += joined && !out;
        if ((!joined || out) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

/* State of the search for one view after reading all ranks. */
struct views {
    bool agreed, invalid;
    uint32_t given_up; /* word of a rank that has failed, 0: none */
    int damaged;       /* rank with an invalid attempt number, -1: none */
};

static void compare_with(const struct shrink *s, int rank, bool late, bool stale, struct views *views)
{
    uint32_t attempt = shrink_attempt_of(s, rank), vote = shrink_get_vote(s, rank);
    int me = s->group->comm->rank;

    /* Also of a rank that is left out: it was late in an attempt before, and alone in this one. */
    if (shrink_kind(vote) == EP_GROUP_VOTE_GIVEN_UP)
        views->given_up = shrink_copy_given_up(s, rank, vote);
    views->invalid |= shrink_is_out(s, rank) && shrink_objects(vote);
    if (shrink_is_out(s, rank))
        return;
    if (attempt > EP_GROUP_ATTEMPTS)
        views->damaged = rank;
    if (attempt >= s->attempt)
        shrink_merge_view(s, rank);
    if (shrink_dead_or_left(s, rank) || (late && attempt < s->attempt)) {
        shrink_leave_out(s, rank);
        ep_group_ring_all(s->group);
    }
    views->agreed = views->agreed && !shrink_is_out(s, rank) && attempt >= s->attempt && shrink_same_view(s, me, rank);
    if (shrink_is_out(s, rank) || shrink_same_view(s, me, rank))
        return;
    if (stale && attempt >= s->attempt)
        shrink_decide(s, rank, shrink_pack_vote(EP_GROUP_VOTE_BANNED, EP_E_TIMEOUT, rank));
    views->invalid |= attempt > s->attempt || vote != EP_GROUP_VOTE_OPEN || (stale && attempt >= s->attempt);
}

static struct views compare_views(const struct shrink *s, bool late, bool stale)
{
    struct views views = {.agreed = true, .damaged = -1};

    for (int rank = 0; rank < s->group->comm->nranks; rank++)
        if (rank != s->group->comm->rank)
            compare_with(s, rank, late, stale, &views);
    return views;
}

/* True if all ranks that remain in our view have the same view. */
static bool all_agree(const struct shrink *s)
{
    int me = s->group->comm->rank;

    for (int rank = 0; rank < s->group->comm->nranks; rank++)
        if (rank != me && !shrink_is_out(s, rank) && !shrink_same_view(s, me, rank))
            return false;
    return true;
}

static uint32_t give_up(ep_status status, int rank)
{
    return shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, status, rank);
}

/*
 * Waits until all remaining ranks have joined with the same view, and returns the word that this rank votes with. VETO:
 * a peer has voted with another view than ours, or is in a later attempt already, so this attempt can only fail. A rank
 * that has joined but then stalls with another view is banned after one more deadline.
 */
static uint32_t find_vote(struct shrink *s)
{
    int me = s->group->comm->rank, waited = 0;

    for (;;) {
        uint32_t seen = ep_group_doorbell(s->group), vote = shrink_get_vote(s, me);
        uint64_t now = ep_now_ns();
        bool late = now >= s->deadline_ns, enough;
        bool stale = now >= s->deadline_ns + (uint64_t)s->timeout_ms * 1000000u;
        int aborted_by = shrink_aborted_by(s);
        struct count count;
        struct views views;

        if (late + stale > waited) {
            s->group->shrink_deadlines += late + stale - waited;
            waited = late + stale;
        }
        if (vote != EP_GROUP_VOTE_OPEN)
            return vote;
        if (is_left_out(s))
            return shrink_pack_vote(EP_GROUP_VOTE_LEFT_OUT, EP_E_EXCLUDED, me);
        count = count_ranks(s);
        enough = 2 * count.joined > count.live;
        if (late && !enough && !s->extended) {
            s->extended = true;
            s->deadline_ns = ep_deadline_ns(s->timeout_ms);
            waited = 0;
            continue;
        }
        views = compare_views(s, late && enough, stale);
        if (views.given_up)
            return views.given_up;
        if (aborted_by >= 0)
            return give_up(EP_E_ABORTED, aborted_by);
        if (views.damaged >= 0)
            return give_up(EP_E_MISMATCH, views.damaged);
        if (views.invalid)
            return shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, me);
        count = count_ranks(s);
        /*
         * Our view may have grown after the comparison with a rank that has not seen this yet: while our word is open
         * this needs another reading, not another attempt, which would cost a deadline. The rank that adds to its view
         * last sees that all agree; its vote rings the others.
         */
        views.agreed = views.agreed && all_agree(s);
        if (views.agreed && !shrink_is_out(s, me) && 2 * count.remain > count.live)
            return EP_GROUP_VOTE_LOCKED;
        if ((views.agreed && !shrink_is_out(s, me)) || stale || (late && !enough))
            return give_up(EP_E_TIMEOUT, count.missing < 0 ? me : count.missing);
        ep_group_wait_doorbell(s->group, seen);
    }
}

/* True if it was banned in the previous attempt, whether or not this rank took part in it. */
static bool was_banned(const struct shrink *s, int rank)
{
    const struct ep_group_shrink *state = shrink_state_of(s, rank);

    return s->attempt > 1 && (shrink_kind(atomic_load(&state->vote[s->attempt - 2])) == EP_GROUP_VOTE_BANNED ||
                              shrink_kind(atomic_load(&state->opened[s->attempt - 2])) == EP_GROUP_VOTE_BANNED);
}

/*
 * Begins attempt number `attempt` with a view of certain facts: dead and departed ranks stay out, banned ranks if
 * enough others remain. A rank that was only late may have arrived meanwhile; the others decide whether a ban of this
 * rank holds.
 */
static ep_status begin_attempt(struct shrink *s, uint32_t attempt)
{
    int nranks = s->group->comm->nranks, me = s->group->comm->rank, n_banned = 0, n_remain = 0;

    if (attempt > EP_GROUP_ATTEMPTS)
        return ep_fail(EP_E_TIMEOUT,
                       "ep_comm_shrink: no agreement after %d attempts, the limit of a communicator: free it, end the "
                       "ranks that do not answer, and create a new one of the others by ep_comm_new",
                       EP_GROUP_ATTEMPTS);
    s->attempt = attempt;
    for (int rank = 0; rank < nranks; rank++) {
        bool absent = shrink_dead_or_left(s, rank), banned = was_banned(s, rank);

        n_banned += !absent && banned;
        n_remain += !absent && !banned;
    }
    for (int rank = 0; rank < nranks; rank++)
        if (rank != me && (shrink_dead_or_left(s, rank) || (n_remain > n_banned && was_banned(s, rank))))
            shrink_leave_out(s, rank);
    s->deadline_ns = ep_deadline_ns(s->timeout_ms);
    s->extended = false;
    atomic_store(&s->mine->attempt, attempt);
    ep_group_ring_all(s->group);
    return EP_OK;
}

/* First attempt of this call: after the last attempt of this rank, or that of the peers that are ahead. */
static uint32_t first_attempt(const struct shrink *s)
{
    uint32_t first = s->attempt + 1;

    for (int rank = 0; rank < s->group->comm->nranks; rank++) {
        uint32_t theirs = shrink_attempt_of(s, rank);

        if (theirs > first && theirs <= EP_GROUP_ATTEMPTS)
            first = theirs;
    }
    return first;
}

ep_status shrink_agree(struct shrink *s)
{
    int me = s->group->comm->rank;

    EP_TRY(begin_attempt(s, first_attempt(s)));
    for (;;) {
        struct shrink_outcome outcome = shrink_vote(s, false, me, find_vote(s));

        if (outcome.result == SHRINK_PASSED && !shrink_leaves_out(s, outcome.member, me))
            return EP_OK;
        if (outcome.result == SHRINK_PASSED) {
            /* If the new group cannot be created, this rank fails with its members. */
            outcome = shrink_vote(s, true, outcome.member, EP_GROUP_VOTE_OPEN);
            return outcome.result == SHRINK_PASSED ? shrink_fail_excluded(me)
                                                   : shrink_fail_with_vote(s, outcome.owner, outcome.word);
        }
        if (outcome.result == SHRINK_ENDED)
            return shrink_fail_with_vote(s, outcome.owner, outcome.word);
        EP_TRY(begin_attempt(s, s->attempt + 1));
    }
}
