/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The survivors agree on who is left.
 *
 * Each rank publishes whom it wants left out (the dead, and who does not come within the deadline) and takes over what
 * the others publish, until all that remain say the same. Then it locks its vote. A vote is one word that is decided
 * once, by compare-exchange: its owner locks it, or vetoes the attempt because its view has changed meanwhile, or a
 * peer bans it because its owner died or stalled before voting. All ranks read the same votes, so they all see the
 * attempt succeed (everybody who remains has locked) or fail; after a failure the next attempt starts without the
 * banned.
 */
#include "backend/host/host.h"
#include "core/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct shrink {
    struct host_comm *host;
    struct host_shrink *mine;
    uint32_t attempt; /* from 1; index into vote and out is attempt - 1 */
    uint64_t deadline_ns;
    int timeout_ms;
};

static struct host_shrink *state_of(const struct shrink *s, int rank)
{
    return &s->host->peers[rank].control->shrink;
}

static bool is_out(const struct shrink *s, int rank)
{
    return atomic_load(&s->mine->out[s->attempt - 1][rank / 64]) >> (rank % 64) & 1;
}

static void leave_out(const struct shrink *s, int rank)
{
    atomic_fetch_or(&s->mine->out[s->attempt - 1][rank / 64], UINT64_C(1) << (rank % 64));
}

/* Adds to our list what a peer that has come wants left out. False if it wants us out. */
static bool take_over(const struct shrink *s, int rank)
{
    const struct host_shrink *theirs = state_of(s, rank);
    int words = (s->host->comm->nranks + 63) / 64;
    int me = s->host->comm->rank;

    for (int word = 0; word < words; word++)
        atomic_fetch_or(&s->mine->out[s->attempt - 1][word],
                        atomic_load(&((struct host_shrink *)(uintptr_t)theirs)->out[s->attempt - 1][word]));
    return !is_out(s, me);
}

static bool same_view(const struct shrink *s, int rank)
{
    int words = (s->host->comm->nranks + 63) / 64;

    for (int word = 0; word < words; word++)
        if (atomic_load(&s->mine->out[s->attempt - 1][word]) !=
            atomic_load(&state_of(s, rank)->out[s->attempt - 1][word]))
            return false;
    return true;
}

static bool has_voted(const struct shrink *s, int rank)
{
    return atomic_load(&state_of(s, rank)->vote[s->attempt - 1]) != HOST_VOTE_OPEN;
}

static ep_status excluded(const struct shrink *s)
{
    return ep_fail(EP_E_EXCLUDED, "ep_comm_shrink: the other ranks went on without rank %d", s->host->comm->rank);
}

/* The word of `rank` in one of the two votes of this attempt. */
static _Atomic uint32_t *vote_of(const struct shrink *s, int rank, bool on_opened)
{
    struct host_shrink *state = state_of(s, rank);

    return on_opened ? &state->opened[s->attempt - 1] : &state->vote[s->attempt - 1];
}

/* Decides the vote of a rank that does not vote by itself; it finds out when it looks. */
static void ban(const struct shrink *s, int rank, bool on_opened)
{
    uint32_t open = HOST_VOTE_OPEN;

    atomic_compare_exchange_strong(vote_of(s, rank, on_opened), &open, HOST_VOTE_BANNED);
    host_ring_all(s->host);
}

/*
 * Everybody who remains has come and says the same; or *ret_spoilt: a peer has voted with another view than ours, or is
 * in a later attempt already, so this attempt can only fail. A rank that does not come in time is left out; one that
 * has come but then stands still with another view is banned after one more deadline.
 */
static ep_status reach_one_view(struct shrink *s, bool *ret_spoilt)
{
    int nranks = s->host->comm->nranks, me = s->host->comm->rank;

    *ret_spoilt = false;
    for (;;) {
        uint32_t seen = host_doorbell(s->host);
        uint64_t now = ep_now_ns();
        bool agreed = true, late = now >= s->deadline_ns;
        bool stale = now >= s->deadline_ns + (uint64_t)s->timeout_ms * 1000000u;

        for (int rank = 0; rank < nranks; rank++) {
            uint32_t attempt;

            if (rank == me || is_out(s, rank))
                continue;
            attempt = atomic_load(&state_of(s, rank)->attempt);
            if (attempt >= s->attempt && !take_over(s, rank))
                return excluded(s);
            if (host_peer_dead(s->host, rank) || atomic_load(&s->host->peers[rank].control->left) ||
                (late && attempt < s->attempt)) {
                leave_out(s, rank);
                host_ring_all(s->host);
            }
            agreed = agreed && !is_out(s, rank) && attempt >= s->attempt && same_view(s, rank);
            if (is_out(s, rank) || same_view(s, rank))
                continue;
            if (stale)
                ban(s, rank, false);
            if (attempt > s->attempt || has_voted(s, rank))
                *ret_spoilt = true;
        }
        if (agreed || *ret_spoilt)
            return EP_OK;
        host_nap(s->host, seen);
    }
}

/*
 * Casts this rank's vote and waits until the result is known. *ret_passed: all who remain have locked. The vote on who
 * is left waits for every vote, because who was banned is left out next; that on the new group ends with the first
 * that is against it.
 */
static void vote_with_all(struct shrink *s, bool on_opened, uint32_t vote, bool *ret_passed)
{
    uint64_t deadline = ep_deadline_ns(s->timeout_ms);
    uint32_t open = HOST_VOTE_OPEN;

    atomic_compare_exchange_strong(vote_of(s, s->host->comm->rank, on_opened), &open, vote);
    host_ring_all(s->host);
    for (;;) {
        uint32_t seen = host_doorbell(s->host);
        int n_open = 0, n_against = 0;

        for (int rank = 0; rank < s->host->comm->nranks; rank++) {
            uint32_t word = atomic_load(vote_of(s, rank, on_opened));

            if (is_out(s, rank))
                continue;
            if (word == HOST_VOTE_OPEN && (host_peer_dead(s->host, rank) || ep_now_ns() >= deadline)) {
                ban(s, rank, on_opened);
                word = atomic_load(vote_of(s, rank, on_opened));
            }
            n_open += word == HOST_VOTE_OPEN;
            n_against += word == HOST_VOTE_VETO || word == HOST_VOTE_BANNED;
        }
        *ret_passed = n_against == 0;
        if (n_open == 0 || (on_opened && n_against > 0))
            return;
        host_nap(s->host, seen);
    }
}

/* Carries what is known into the next attempt. */
static ep_status next_attempt(struct shrink *s)
{
    int nranks = s->host->comm->nranks;
    uint32_t index = s->attempt - 1;

    if (s->attempt == HOST_ATTEMPTS)
        return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: no agreement after %d attempts: ranks keep dying", HOST_ATTEMPTS);
    for (int rank = 0; rank < nranks; rank++) {
        bool banned = atomic_load(vote_of(s, rank, false)) == HOST_VOTE_BANNED ||
                      atomic_load(vote_of(s, rank, true)) == HOST_VOTE_BANNED;

        if (banned && rank == s->host->comm->rank)
            return excluded(s);
        if (is_out(s, rank) || banned)
            atomic_fetch_or(&s->mine->out[index + 1][rank / 64], UINT64_C(1) << (rank % 64));
    }
    s->attempt++;
    s->deadline_ns = ep_deadline_ns(s->timeout_ms);
    atomic_store(&s->mine->attempt, s->attempt);
    host_ring_all(s->host);
    return EP_OK;
}

static ep_status agree_on_survivors(struct shrink *s)
{
    int nranks = s->host->comm->nranks, me = s->host->comm->rank;

    for (;;) {
        uint32_t vote = HOST_VOTE_LOCKED;
        bool passed, spoilt;

        EP_TRY(reach_one_view(s, &spoilt));
        if (spoilt)
            vote = HOST_VOTE_VETO;
        /* Somebody may have changed its view since: then this attempt cannot pass, and all must learn it. */
        for (int rank = 0; rank < nranks; rank++)
            if (rank != me && !is_out(s, rank) && !same_view(s, rank))
                vote = HOST_VOTE_VETO;
        vote_with_all(s, false, vote, &passed);
        if (passed)
            return EP_OK;
        EP_TRY(next_attempt(s));
    }
}

/* --- all-gather among the survivors, over their old control blocks ------------------------------------------------ */

struct gather {
    bool broken; /* an all-gather failed, and has said so with old ranks */
    struct shrink *s;
    int *ranks; /* old rank of each survivor */
    int n;
    uint32_t calls;
    ep_status (*open)(ep_comm *comm, const ep_boot *boot);
};

static ep_status gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct gather *g = context;
    struct shrink *s = g->s;
    /* Numbered within the attempt, so that ranks whose last attempt failed at different places start alike. */
    uint64_t number = (uint64_t)s->attempt << 32 | ++g->calls, deadline = ep_deadline_ns(timeout_ms);

    if (bytes > HOST_GATHER_BYTES)
        return ep_fail(EP_E_ARG, "ep_comm_shrink: all-gather of %zu bytes", bytes);
    memcpy(s->mine->block[number & 1], mine, bytes);
    atomic_store_explicit(&s->mine->gathered, number, memory_order_release);
    host_ring_all(s->host);
    for (int i = 0; i < g->n; i++) {
        struct host_shrink *theirs = state_of(s, g->ranks[i]);

        for (;;) {
            uint32_t seen = host_doorbell(s->host);

            if (atomic_load_explicit(&theirs->gathered, memory_order_acquire) >= number)
                break;
            /* Looked at again, because it may have come between the two looks: all must see the same. */
            if (host_peer_dead(s->host, g->ranks[i]) &&
                atomic_load_explicit(&theirs->gathered, memory_order_acquire) < number)
                return ep_fail(EP_E_PEER_DEAD, "ep_comm_shrink: rank %d of the old group died; call it again",
                               g->ranks[i]);
            if (ep_now_ns() >= deadline)
                return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: rank %d of the old group did not answer within %d ms",
                               g->ranks[i], timeout_ms);
            host_nap(s->host, seen);
        }
        memcpy((char *)ret_all + (size_t)i * bytes, theirs->block[number & 1], bytes);
    }
    return EP_OK;
}

/* Ranks per node of the new group: kept only if every node that is left has the same number of survivors. */
static int nodes_of_survivors(const struct gather *g, int old_per_node)
{
    int first = 0, per_node = 0;

    while (first < g->n) {
        int n = 0;

        while (first + n < g->n && g->ranks[first + n] / old_per_node == g->ranks[first] / old_per_node)
            n++;
        if (per_node && n != per_node)
            return g->n;
        per_node = n;
        first += n;
    }
    return per_node;
}

static ep_status gather_and_note(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    struct gather *g = context;
    ep_status status = gather(g, mine, bytes, timeout_ms, ret_all);

    g->broken = g->broken || status != EP_OK;
    return status;
}

/*
 * What fails while the new group is made names its ranks by the numbers that they would have had there; the caller
 * knows the old ones.
 */
static ep_status name_by_old_ranks(const struct gather *g, ep_status status)
{
    static const char word[] = "rank ", old[] = " of the old group";
    char text[EP_ERROR_TEXT_BYTES], renamed[EP_ERROR_TEXT_BYTES];
    size_t used = 0;

    if (status == EP_OK || g->broken)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    for (const char *at = text; *at && used + 1 < sizeof(renamed);) {
        char *end = NULL;
        long rank = strncmp(at, word, sizeof(word) - 1) == 0 ? strtol(at + sizeof(word) - 1, &end, 10) : -1;

        if (end && end > at + sizeof(word) - 1 && rank >= 0 && rank < g->n && strncmp(end, old, sizeof(old) - 1) != 0) {
            used += (size_t)snprintf(renamed + used, sizeof(renamed) - used, "%s%d", word, g->ranks[rank]);
            at = end;
        } else {
            renamed[used++] = *at++;
        }
    }
    renamed[used < sizeof(renamed) ? used : sizeof(renamed) - 1] = '\0';
    return ep_fail(status, "%s", renamed);
}

static ep_status open_next(struct gather *g, ep_comm *comm, ep_comm *next)
{
    ep_boot boot = {.size = sizeof(boot), .rank = -1, .nranks = g->n, .allgather = gather_and_note, .context = g};
    ep_status status = EP_OK;

    for (int i = 0; i < g->n; i++)
        if (g->ranks[i] == comm->rank)
            boot.rank = i;
    next->rank = boot.rank;
    next->nranks = g->n;
    if (next->config.ranks_per_node == 0)
        next->ranks_per_node = g->n;
    else if (next->config.ranks_per_node == comm->ranks_per_node)
        next->ranks_per_node = nodes_of_survivors(g, comm->ranks_per_node);
    else
        next->ranks_per_node = next->config.ranks_per_node;
    next->config.ranks_per_node = next->ranks_per_node;
    if (g->n % next->ranks_per_node != 0)
        status = ep_fail(EP_E_ARG, "ep_comm_shrink: ranks_per_node %d does not divide the %d survivors",
                         next->ranks_per_node, g->n);
    status = ep_config_agree(&boot, next, status, "ep_comm_shrink");
    if (status != EP_OK)
        return name_by_old_ranks(g, status);
    next->node = next->rank / next->ranks_per_node;
    next->nnodes = g->n / next->ranks_per_node;
    return name_by_old_ranks(g, g->open(next, &boot));
}

/*
 * The new group exists for all or for none: a rank that was stopped while it was made may find, when it goes on, all
 * that it waited for, although the others have given it up.
 */
static ep_status confirm(struct shrink *s, ep_comm *next, ep_status opened)
{
    char reason[EP_ERROR_TEXT_BYTES];
    bool passed;

    snprintf(reason, sizeof(reason), "%s", ep_last_error());
    vote_with_all(s, true, opened == EP_OK ? HOST_VOTE_LOCKED : HOST_VOTE_VETO, &passed);
    if (passed)
        return EP_OK;
    if (opened != EP_OK)
        return ep_fail(opened, "%s", reason);
    next->ops->comm_close(next);
    if (atomic_load(vote_of(s, s->host->comm->rank, true)) == HOST_VOTE_BANNED)
        return excluded(s);
    return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: not all survivors could make the new group; call it again");
}

ep_status host_shrink_into(ep_comm *comm, ep_comm *next, ep_status (*open)(ep_comm *comm, const ep_boot *boot))
{
    struct host_comm *host = host_of(comm);
    struct shrink s = {
        .host = host, .mine = &host->control->shrink, .attempt = 1, .timeout_ms = comm->config.timeout_ms};
    struct gather g = {.s = &s, .open = open};
    ep_status status;

    if (!host->one_host)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_shrink: the ranks are on several hosts");
    host_drain(host);
    s.deadline_ns = ep_deadline_ns(s.timeout_ms);
    if (atomic_load(&s.mine->attempt)) {
        /* Again, because somebody died while the new group was being made. */
        s.attempt = atomic_load(&s.mine->attempt);
        EP_TRY(next_attempt(&s));
    } else {
        atomic_store(&s.mine->attempt, s.attempt);
        host_ring_all(host);
    }
    EP_TRY(agree_on_survivors(&s));
    g.ranks = malloc((size_t)comm->nranks * sizeof(*g.ranks));
    if (!g.ranks)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory");
    for (int rank = 0; rank < comm->nranks; rank++)
        if (!is_out(&s, rank))
            g.ranks[g.n++] = rank;
    status = open_next(&g, comm, next);
    free(g.ranks);
    return confirm(&s, next, status);
}

ep_status host_shrink(ep_comm *comm, ep_comm *next)
{
    return host_shrink_into(comm, next, host_comm_open);
}
