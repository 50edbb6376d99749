/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ep_comm_shrink on one host: the survivors agree on the members of the new group, and then create it over their old
 * control blocks.
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
 * Words of the peers are copied before they are used. A value that no rank writes fails the attempt with EP_E_MISMATCH.
 */
#include "group/shrink_linked.h"

#include "group/peers.h"
#include "group/queue.h"
#include "group/wait.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

ep_status shrink_fail_excluded(int rank)
{
    return ep_fail(EP_E_EXCLUDED, "ep_comm_shrink: the other ranks continued without rank %d", rank);
}

static uint32_t get_vote(const struct shrink *s, int rank)
{
    return atomic_load(&shrink_state_of(s, rank)->vote[s->attempt - 1]);
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
        if (ep_group_dead_or_left(s->group, rank))
            continue;
        count.live++;
        count.joined += joined && !out;
        if ((!joined || out) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

static uint32_t give_up(ep_status status, int rank)
{
    return shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, status, rank);
}

/*
 * Merges the view of a rank into ours. Returns the word that this rank has to vote with because of the other one, OPEN:
 * none. VETO: that one has voted with another view than ours, or is in a later attempt already, so this attempt can
 * only fail.
 */
static uint32_t compare_with(const struct shrink *s, int rank, bool late, bool stale)
{
    uint32_t attempt = shrink_attempt_of(s, rank), vote = get_vote(s, rank);
    int me = s->group->comm->rank;
    uint32_t veto = shrink_pack_vote(EP_GROUP_VOTE_VETO, EP_E_TIMEOUT, me);

    /* Also of a rank that is left out: it was late in an attempt before, and alone in this one. */
    if (shrink_kind(vote) == EP_GROUP_VOTE_GIVEN_UP)
        return shrink_copy_given_up(s, rank, vote);
    if (shrink_is_out(s, rank))
        return shrink_objects(vote) ? veto : EP_GROUP_VOTE_OPEN;
    if (attempt > EP_GROUP_ATTEMPTS)
        return give_up(EP_E_MISMATCH, rank);
    if (attempt >= s->attempt)
        shrink_merge_view(s, rank);
    if (ep_group_dead_or_left(s->group, rank) || (late && attempt < s->attempt)) {
        shrink_leave_out(s, rank);
        ep_group_ring_all(s->group);
    }
    if (shrink_is_out(s, rank) || shrink_same_view(s, me, rank))
        return EP_GROUP_VOTE_OPEN;
    if (stale && attempt >= s->attempt) {
        shrink_decide(s, rank, false, shrink_pack_vote(EP_GROUP_VOTE_BANNED, EP_E_TIMEOUT, rank));
        return veto;
    }
    return attempt > s->attempt || vote != EP_GROUP_VOTE_OPEN ? veto : EP_GROUP_VOTE_OPEN;
}

/* compare_views() calls compare_with() for all other ranks. */
static uint32_t compare_views(const struct shrink *s, bool late, bool stale)
{
    uint32_t found = EP_GROUP_VOTE_OPEN;

    for (int rank = 0; rank < s->group->comm->nranks; rank++) {
        uint32_t word = rank == s->group->comm->rank ? EP_GROUP_VOTE_OPEN : compare_with(s, rank, late, stale);

        if (shrink_kind(word) == EP_GROUP_VOTE_GIVEN_UP)
            return word;
        if (word != EP_GROUP_VOTE_OPEN)
            found = word;
    }
    return found;
}

/*
 * True if all ranks that remain in our view have joined with the same view. Read after all views were merged: ours may
 * have grown after the comparison with a rank that has not seen this yet. While our word is open this needs another
 * reading, not another attempt, which would cost a deadline. The rank that adds to its view last sees that all agree;
 * its vote rings the others.
 */
static bool all_agree(const struct shrink *s)
{
    int me = s->group->comm->rank;

    for (int rank = 0; rank < s->group->comm->nranks; rank++)
        if (rank != me && !shrink_is_out(s, rank) &&
            (shrink_attempt_of(s, rank) < s->attempt || !shrink_same_view(s, me, rank)))
            return false;
    return !shrink_is_out(s, me);
}

/*
 * Waits until all remaining ranks have joined with the same view, and returns the word that this rank votes with. A
 * rank that has joined but then stalls with another view is banned after one more deadline.
 */
static uint32_t find_vote(struct shrink *s)
{
    int me = s->group->comm->rank, waited = 0;
    uint64_t deadline_ns = ep_deadline_ns(s->timeout_ms);
    bool extended = false; /* the deadline has expired once, without enough ranks */

    for (;;) {
        uint32_t seen = ep_group_doorbell(s->group), vote = get_vote(s, me), word;
        uint64_t now = ep_now_ns();
        bool late = now >= deadline_ns, stale = now >= deadline_ns + (uint64_t)s->timeout_ms * 1000000u;
        int aborted_by = shrink_aborts_find(&s->aborts);
        struct count count;
        bool enough, agreed;

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
        if (late && !enough && !extended) {
            extended = true;
            deadline_ns = ep_deadline_ns(s->timeout_ms);
            waited = 0;
            continue;
        }
        word = compare_views(s, late && enough, stale);
        if (aborted_by >= 0 && shrink_kind(word) != EP_GROUP_VOTE_GIVEN_UP)
            return give_up(EP_E_ABORTED, aborted_by);
        if (word != EP_GROUP_VOTE_OPEN)
            return word;
        count = count_ranks(s);
        agreed = all_agree(s);
        if (agreed && 2 * count.remain > count.live)
            return EP_GROUP_VOTE_LOCKED;
        if (agreed || stale || (late && !enough))
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
        bool absent = ep_group_dead_or_left(s->group, rank), banned = was_banned(s, rank);

        n_banned += !absent && banned;
        n_remain += !absent && !banned;
    }
    for (int rank = 0; rank < nranks; rank++)
        if (rank != me && (ep_group_dead_or_left(s->group, rank) || (n_remain > n_banned && was_banned(s, rank))))
            shrink_leave_out(s, rank);
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

/* Begins a new attempt, and further ones, until all remaining ranks have the same view. */
static ep_status agree(struct shrink *s)
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

/* --- the new group --- */

static ep_status gather_all(struct shrink *s, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct shrink_group *g = &s->next;
    /* Numbered within the attempt, so that ranks whose last attempt failed at different points start alike. */
    uint64_t number = (uint64_t)s->attempt << 32 | ++g->calls, deadline = ep_deadline_ns(timeout_ms);

    if (bytes > EP_GROUP_GATHER_BYTES)
        return ep_fail(EP_E_ARG, "ep_comm_shrink: all-gather of %zu bytes", bytes);
    memcpy(s->mine->block[number & 1], mine, bytes);
    atomic_store_explicit(&s->mine->gathered, number, memory_order_release);
    ep_group_ring_all(s->group);
    for (int i = 0; i < g->n; i++) {
        struct ep_group_shrink *theirs = shrink_state_of(s, g->ranks[i]);

        for (;;) {
            uint32_t seen = ep_group_doorbell(s->group), word = atomic_load(&theirs->opened[s->attempt - 1]);
            int abort = shrink_aborts_find(&s->aborts);

            if (atomic_load_explicit(&theirs->gathered, memory_order_acquire) >= number)
                break;
            g->failed_rank = abort >= 0 ? abort : g->ranks[i];
            if (abort >= 0)
                return shrink_fail_with_vote(s, s->group->comm->rank,
                                             shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, EP_E_ABORTED, abort));
            /*
             * It has failed, or was given up, so it joins no more. Read before the count, so that a rank cannot join
             * and fail in between.
             */
            if (word != EP_GROUP_VOTE_OPEN && shrink_kind(word) != EP_GROUP_VOTE_LOCKED) {
                if ((int)(word >> 20) < s->group->comm->nranks)
                    g->failed_rank = (int)(word >> 20);
                return shrink_fail_with_vote(s, g->ranks[i], word);
            }
            /* Read again, because it may have changed between the two reads: all must see the same. */
            if (ep_group_peer_dead(s->group, g->ranks[i]) &&
                atomic_load_explicit(&theirs->gathered, memory_order_acquire) < number)
                return ep_fail(EP_E_PEER_DEAD, "ep_comm_shrink: rank %d of the old group died; call it again",
                               g->ranks[i]);
            if (ep_now_ns() >= deadline)
                return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: rank %d of the old group did not answer within %d ms%s",
                               g->ranks[i], timeout_ms, ep_group_describe_unreadable(s->group, g->ranks[i]));
            ep_group_wait_doorbell(s->group, seen);
        }
        g->failed_rank = -1;
        memcpy((char *)ret_all + (size_t)i * bytes, theirs->block[number & 1], bytes);
    }
    return EP_OK;
}

/* After a failure this rank takes no part in later ones: it may be in another step of the creation than the others. */
static ep_status gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct shrink *s = context;
    struct shrink_group *g = &s->next;

    if (g->failed != EP_OK)
        return ep_fail(g->failed, "%s", g->text);
    g->failed = gather_all(s, mine, bytes, timeout_ms, ret_all);
    if (g->failed != EP_OK)
        snprintf(g->text, sizeof(g->text), "%s", ep_last_error());
    return g->failed;
}

/*
 * The new group exists for all or for none: a rank that was stopped while it was created may find, when it resumes, all
 * its data, although the others have given it up. If it fails, all get the status of the lowest rank that is against
 * it.
 */
static ep_status confirm(struct shrink *s, ep_comm *next, ep_status opened, int failed_rank)
{
    char reason[EP_ERROR_TEXT_BYTES];
    int me = s->group->comm->rank;
    struct shrink_outcome outcome;

    snprintf(reason, sizeof(reason), "%s", ep_last_error());
    outcome =
        shrink_vote(s, true, me,
                    opened == EP_OK ? EP_GROUP_VOTE_LOCKED : shrink_pack_vote(EP_GROUP_VOTE_VETO, opened, failed_rank));
    /* The vote of a rank without a group passes only if its word in shared memory is damaged. */
    if (outcome.result == SHRINK_PASSED)
        return opened == EP_OK ? EP_OK : ep_fail(opened, "%s", reason);
    if (opened == EP_OK)
        next->ops->comm_close(next);
    /* Our own text is more precise than the word, unless it names another rank. */
    if (opened != EP_OK && shrink_pack_vote(0, opened, failed_rank) == (outcome.word & ~0xffu))
        return ep_fail(opened, "%s", reason);
    return shrink_fail_with_vote(s, outcome.owner, outcome.word);
}

static ep_status form_group(struct shrink *s, ep_comm *next)
{
    struct shrink_group *g = &s->next;
    ep_comm *comm = s->group->comm;
    int failed_rank;
    ep_status status;
    bool self = false;

    EP_TRY(agree(s));
    for (int rank = 0; rank < comm->nranks; rank++)
        if (!shrink_is_out(s, rank)) {
            g->ranks[g->n++] = rank;
            self |= rank == comm->rank;
        }
    /* No rank passes a view that leaves itself out, but the view is in shared memory. */
    status = self ? shrink_open_next(g, comm, next)
                  : ep_fail(EP_E_MISMATCH,
                            "ep_comm_shrink: the view of rank %d is damaged: it excludes the rank itself", comm->rank);
    failed_rank = self && status != EP_OK ? shrink_find_failed_rank(g, comm) : comm->rank;
    return confirm(s, next, status, failed_rank);
}

static ep_status shrink_on_host(struct ep_group *group, ep_comm *next)
{
    const ep_comm *comm = group->comm;
    struct shrink s = {.group = group,
                       .mine = &group->control->shrink,
                       .timeout_ms = comm->config.timeout_ms,
                       .next = {.allgather = gather, .context = &s, .failed_rank = -1}};
    ep_status status;

    s.attempt = atomic_load(&s.mine->attempt); /* 0, or of an earlier call that failed */
    /* It is in shared memory, and used as an index. */
    if (s.attempt > EP_GROUP_ATTEMPTS)
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the control block of rank %d is damaged: attempt %u of %d",
                       comm->rank, s.attempt, EP_GROUP_ATTEMPTS);
    EP_TRY(shrink_aborts_init(&s.aborts, group));
    status = form_group(&s, next);
    free(s.aborts.ranks);
    if (status == EP_OK)
        shrink_refuse_begin(NULL, group, ep_group_of(next));
    return status;
}

ep_status ep_group_shrink(ep_comm *comm, ep_comm *next)
{
    struct ep_group *group = ep_group_of(comm);
    ep_status status;

    if (group->excluded)
        return shrink_fail_excluded(comm->rank);
    if (!group->remote && !group->one_host)
        return ep_fail(EP_E_UNSUPPORTED,
                       "ep_comm_shrink: the ranks are on several hosts; that needs the network \"tcp\" or \"verbs\"");
    ep_group_drain(group);
    status = group->remote ? shrink_linked(group, next) : shrink_on_host(group, next);
    group->excluded = status == EP_E_EXCLUDED;
    return status;
}
