/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The new group of ep_comm_shrink, after the survivors have agreed: they run its creation over their old control
 * blocks.
 */
#include "group/shrink_linked.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * The word of `rank` against the new group: it has failed, or was given up, so it will not join an all-gather any more.
 * OPEN: there is none.
 */
static uint32_t find_objection(const struct shrink *s, int rank)
{
    uint32_t word = atomic_load(&shrink_state_of(s, rank)->opened[s->attempt - 1]);

    return shrink_kind(word) == EP_GROUP_VOTE_LOCKED ? EP_GROUP_VOTE_OPEN : word;
}

static ep_status fail_with_objection(struct shrink_group *g, int owner, uint32_t word)
{
    int rank = (int)(word >> 20);

    g->failed_rank = rank < g->s->group->comm->nranks ? rank : owner;
    return shrink_fail_with_vote(g->s, owner, word);
}

static ep_status gather_all(struct shrink_group *g, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct shrink *s = g->s;
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
            uint32_t seen = ep_group_doorbell(s->group), objection = find_objection(s, g->ranks[i]);
            int abort = shrink_aborted_by(s);

            if (atomic_load_explicit(&theirs->gathered, memory_order_acquire) >= number)
                break;
            g->failed_rank = abort >= 0 ? abort : g->ranks[i];
            if (abort >= 0)
                return shrink_fail_with_vote(s, s->group->comm->rank,
                                             shrink_pack_vote(EP_GROUP_VOTE_GIVEN_UP, EP_E_ABORTED, abort));
            /* Read before the count, so that a rank cannot join and fail in between. */
            if (objection != EP_GROUP_VOTE_OPEN)
                return fail_with_objection(g, g->ranks[i], objection);
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
    struct shrink_group *g = context;

    if (g->failed != EP_OK)
        return ep_fail(g->failed, "%s", g->text);
    g->failed = gather_all(g, mine, bytes, timeout_ms, ret_all);
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

/* Records the counts of ep_comm_abort() that do not concern this call. */
static ep_status note_aborts(struct shrink *s)
{
    int nranks = s->group->comm->nranks, failed_rank;

    s->aborts = malloc((size_t)nranks * sizeof(*s->aborts));
    if (!s->aborts)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", nranks);
    for (int rank = 0; rank < nranks; rank++)
        s->aborts[rank] = atomic_load(&ep_group_state_of(s->group, rank)->aborts);
    /* The abort that failed this group does not end its shrink, even if its count has not arrived yet. */
    failed_rank = ep_group_aborted_by(s->group);
    if (failed_rank >= 0 && s->aborts[failed_rank] == 0)
        s->aborts[failed_rank] = 1;
    return EP_OK;
}

static ep_status form_group(struct shrink *s, struct shrink_group *g, ep_comm *next)
{
    ep_comm *comm = s->group->comm;
    int failed_rank;
    ep_status status;
    bool self = false;

    EP_TRY(shrink_agree(s));
    g->ranks = malloc((size_t)comm->nranks * sizeof(*g->ranks));
    if (!g->ranks)
        return confirm(s, next, ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", comm->nranks),
                       comm->rank);
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
    free(g->ranks);
    return confirm(s, next, status, failed_rank);
}

ep_status ep_group_shrink(ep_comm *comm, ep_comm *next)
{
    struct ep_group *group = ep_group_of(comm);
    struct shrink s = {.group = group, .mine = &group->control->shrink, .timeout_ms = comm->config.timeout_ms};
    struct shrink_group g = {.s = &s, .allgather = gather, .context = &g, .failed_rank = -1};
    ep_status status;

    if (group->excluded)
        return shrink_fail_excluded(comm->rank);
    if (group->remote) {
        ep_group_drain(group);
        status = shrink_linked(group, next);
        group->excluded = status == EP_E_EXCLUDED;
        return status;
    }
    if (!group->one_host)
        return ep_fail(EP_E_UNSUPPORTED,
                       "ep_comm_shrink: the ranks are on several hosts; that needs the network \"tcp\" or \"verbs\"");
    ep_group_drain(group);
    s.attempt = atomic_load(&s.mine->attempt); /* 0, or of an earlier call that failed */
    /* It is in shared memory, and used as an index. */
    if (s.attempt > EP_GROUP_ATTEMPTS)
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the control block of rank %d is damaged: attempt %u of %d",
                       comm->rank, s.attempt, EP_GROUP_ATTEMPTS);
    EP_TRY(note_aborts(&s));
    status = form_group(&s, &g, next);
    free(s.aborts);
    group->excluded = status == EP_E_EXCLUDED;
    if (status == EP_OK)
        shrink_refuse_begin(NULL, group, ep_group_of(next));
    return status;
}
