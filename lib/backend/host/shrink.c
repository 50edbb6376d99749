/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The survivors agree on who is left.
 *
 * Each rank publishes its view: whom it wants left out. The dead and those that have left are out at once, who does not
 * come within the deadline only if those that came are more than half of the ranks known to live. A rank takes over
 * what the others leave out, until all that remain have the same view, and then votes. A vote is one word that is
 * decided once, by compare-exchange from OPEN:
 *
 *   LOCKED    by its owner: its view is final, and all who remain in it had the same one
 *   VETO      by its owner, whose view has changed, or for an owner that is in a later attempt: the attempt fails
 *   BANNED    by a peer, because the owner died or stalled before it voted: the attempt fails, the next is without it
 *   GIVEN_UP  by its owner: this call of ep_comm_shrink fails for all, with the status and the rank in the word
 *
 * An attempt passes when all who remain have locked the same view. All of them read the same words, so all see the same
 * result. Nobody locks a view in which no more than half of the ranks that it knows to live remain: of two groups that
 * might form beside each other one would be too small. Without that many ranks the call waits on, for one more
 * deadline, and is then given up, for all: who comes later finds the word and fails alike. The next call begins a new
 * attempt.
 *
 * A rank that others leave out has no vote. It waits for the result of their attempt: excluded if it passes, in the
 * next one with them if it fails.
 *
 * ep_comm_abort() counts in the control block of its rank. Who sees a count change while it shrinks gives up, and
 * decides the open votes of the others like that.
 *
 * Words of the peers are copied before they are used. One that nobody writes gives the attempt up with EP_E_MISMATCH.
 */
#include "backend/host/shrink.h"

/* How long a rank that is left out waits for what comes of it. */
#define LEFT_OUT_DEADLINES 10

#define VIEW_WORDS (EP_MAX_RANKS / 64)

static uint32_t kind_of(uint32_t vote)
{
    return vote & 0xff;
}

/* Bits of ranks that there are. */
static uint64_t view_word(const struct shrink *s, int rank, int word)
{
    int bits = s->host->comm->nranks - word * 64;
    uint64_t mask = bits >= 64 ? UINT64_MAX : bits > 0 ? (UINT64_C(1) << bits) - 1 : 0;

    return atomic_load(&shrink_state_of(s, rank)->out[s->attempt - 1][word]) & mask;
}

/* Does `of` leave out `rank`? */
static bool leaves_out(const struct shrink *s, int of, int rank)
{
    return view_word(s, of, rank / 64) >> (rank % 64) & 1;
}

bool shrink_is_out(const struct shrink *s, int rank)
{
    return leaves_out(s, s->host->comm->rank, rank);
}

static void leave_out(const struct shrink *s, int rank)
{
    atomic_fetch_or(&s->mine->out[s->attempt - 1][rank / 64], UINT64_C(1) << (rank % 64));
}

/* Adds to our view what a peer that has come leaves out. */
static void take_over(const struct shrink *s, int rank)
{
    for (int word = 0; word * 64 < s->host->comm->nranks; word++)
        atomic_fetch_or(&s->mine->out[s->attempt - 1][word], view_word(s, rank, word));
}

static bool same_view(const struct shrink *s, int a, int b)
{
    for (int word = 0; word * 64 < s->host->comm->nranks; word++)
        if (view_word(s, a, word) != view_word(s, b, word))
            return false;
    return true;
}

static bool is_gone(const struct shrink *s, int rank)
{
    return rank != s->host->comm->rank &&
           (host_peer_dead(s->host, rank) || atomic_load(&s->host->peers[rank].control->left));
}

/* The vote for a rank that is gone. */
static uint32_t gone_vote(const struct shrink *s, int rank)
{
    bool left = atomic_load(&s->host->peers[rank].control->left);

    return shrink_pack_vote(HOST_VOTE_BANNED, left ? EP_E_PEER_LEFT : EP_E_PEER_DEAD, rank);
}

static uint32_t attempt_of(const struct shrink *s, int rank)
{
    return atomic_load(&shrink_state_of(s, rank)->attempt);
}

/* The word of `rank` in one of the two votes of this attempt. */
static _Atomic uint32_t *vote_of(const struct shrink *s, int rank, bool on_opened)
{
    struct host_shrink *state = shrink_state_of(s, rank);

    return on_opened ? &state->opened[s->attempt - 1] : &state->vote[s->attempt - 1];
}

/* The word that decides the vote: ours, or the one that was there before. */
static uint32_t decide(const struct shrink *s, int rank, bool on_opened, uint32_t vote)
{
    uint32_t word = HOST_VOTE_OPEN;

    if (!atomic_compare_exchange_strong(vote_of(s, rank, on_opened), &word, vote))
        return word;
    host_ring_all(s->host);
    return vote;
}

static ep_status excluded(const struct shrink *s)
{
    return ep_fail(EP_E_EXCLUDED, "ep_comm_shrink: the other ranks went on without rank %d", s->host->comm->rank);
}

ep_status shrink_fail_with_vote(const struct shrink *s, int owner, uint32_t vote)
{
    ep_status status = (ep_status)(vote >> 8 & 0xfff);
    int culprit = (int)(vote >> 20);

    if (culprit >= s->host->comm->nranks || !ep_status_is_failure(status))
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the vote of rank %d is damaged: 0x%08x", owner, vote);
    switch (status) {
    case EP_E_ABORTED:
        return ep_fail(status, "ep_comm_shrink: rank %d called ep_comm_abort", culprit);
    case EP_E_TIMEOUT:
        return ep_fail(status,
                       "ep_comm_shrink: rank %d did not answer within %d ms, and a group needs more than half of the "
                       "ranks that are known to live and all that have come; call it again%s",
                       culprit, s->timeout_ms, host_blindness(s->host, culprit));
    case EP_E_PEER_DEAD:
        return ep_fail(status, "ep_comm_shrink: rank %d of the old group died; call it again", culprit);
    case EP_E_MISMATCH:
        return ep_fail(status, "ep_comm_shrink: by a vote of the group, rank %d published what the others cannot use",
                       culprit);
    case EP_E_PEER_LEFT:
        return ep_fail(status, "ep_comm_shrink: rank %d left the old group; call it again", culprit);
    default:
        return ep_fail(status, "ep_comm_shrink: rank %d failed with %s", culprit, ep_status_name(status));
    }
}

/*
 * Ends this call for everybody, before this rank has voted. *ret_spoilt with EP_OK: a peer has voted for it meanwhile,
 * so the attempt fails, but not the call.
 */
static ep_status give_up(const struct shrink *s, ep_status status, int culprit, bool *ret_spoilt)
{
    int me = s->host->comm->rank;
    uint32_t mine = shrink_pack_vote(HOST_VOTE_GIVEN_UP, status, culprit), vote = decide(s, me, false, mine);

    *ret_spoilt = true;
    if (kind_of(vote) == HOST_VOTE_GIVEN_UP)
        return shrink_fail_with_vote(s, me, vote);
    return status == EP_E_ABORTED ? shrink_fail_with_vote(s, me, mine) : EP_OK;
}

int shrink_aborted_by(const struct shrink *s)
{
    for (int rank = 0; rank < s->host->comm->nranks; rank++)
        if ((int32_t)(atomic_load(&s->host->peers[rank].control->aborts) - s->aborts[rank]) > 0)
            return rank;
    return -1;
}

/* What has come of the attempt of `of`, which leaves this rank out. */
enum outcome { UNDECIDED, PASSED, FAILED, GIVEN_UP };

/* Of one of its two votes. *ret_vote: a word against it, as shrink_vote_with_all() chooses it; *ret_owner: whose it is.
 */
static enum outcome outcome_of(const struct shrink *s, int of, bool on_opened, int *ret_owner, uint32_t *ret_vote)
{
    bool open = false;

    *ret_vote = 0;
    for (int rank = 0; rank < s->host->comm->nranks; rank++) {
        uint32_t vote;

        if (leaves_out(s, of, rank))
            continue;
        vote = atomic_load(vote_of(s, rank, on_opened));
        if (vote == HOST_VOTE_OPEN && is_gone(s, rank))
            vote = decide(s, rank, on_opened, gone_vote(s, rank));
        open |= vote == HOST_VOTE_OPEN;
        if (vote == HOST_VOTE_LOCKED && !same_view(s, of, rank))
            vote = shrink_pack_vote(HOST_VOTE_VETO, EP_E_MISMATCH, rank);
        if (vote == HOST_VOTE_OPEN || vote == HOST_VOTE_LOCKED)
            continue;
        if (!*ret_vote || (kind_of(vote) == HOST_VOTE_GIVEN_UP && kind_of(*ret_vote) != HOST_VOTE_GIVEN_UP)) {
            *ret_vote = vote;
            *ret_owner = rank;
        }
    }
    if (kind_of(*ret_vote) == HOST_VOTE_GIVEN_UP && !on_opened)
        return GIVEN_UP;
    if (open)
        return !on_opened && *ret_vote ? FAILED : UNDECIDED;
    return *ret_vote ? FAILED : PASSED;
}

/* Of both: where the new group could not be made, this rank fails with those that wanted it. */
static enum outcome outcome_for(const struct shrink *s, int of, int *ret_owner, uint32_t *ret_vote)
{
    enum outcome outcome = outcome_of(s, of, false, ret_owner, ret_vote);

    if (outcome != PASSED)
        return outcome;
    outcome = outcome_of(s, of, true, ret_owner, ret_vote);
    return outcome == FAILED ? GIVEN_UP : outcome;
}

/*
 * For a rank that others leave out: waits for what comes of it. EP_OK: their attempt has failed, and this one can only
 * fail as well. *ret_out: whether anybody leaves this rank out.
 */
static ep_status wait_left_out(struct shrink *s, bool *ret_out)
{
    int nranks = s->host->comm->nranks, me = s->host->comm->rank;
    /* The others have deadlines of their own, so this is not reached while one of them works. */
    uint64_t limit = ep_now_ns() + LEFT_OUT_DEADLINES * (uint64_t)s->timeout_ms * 1000000u;

    for (;;) {
        uint32_t seen = host_doorbell(s->host);
        int abort = shrink_aborted_by(s);
        bool undecided = false;

        *ret_out = false;
        for (int rank = 0; rank < nranks; rank++) {
            uint32_t vote = 0;
            int owner = rank;

            if (rank == me || attempt_of(s, rank) < s->attempt || !leaves_out(s, rank, me))
                continue;
            *ret_out = true;
            /* Who counts on our vote need not wait for it. */
            decide(s, me, false, HOST_VOTE_VETO);
            switch (outcome_for(s, rank, &owner, &vote)) {
            case PASSED:
                return excluded(s);
            case GIVEN_UP:
                return shrink_fail_with_vote(s, owner, vote);
            case UNDECIDED:
                undecided = true;
                break;
            case FAILED:
                break;
            }
        }
        if (!undecided)
            return EP_OK;
        if (abort >= 0)
            return shrink_fail_with_vote(s, me, shrink_pack_vote(HOST_VOTE_GIVEN_UP, EP_E_ABORTED, abort));
        if (ep_now_ns() >= limit)
            return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: rank %d was left out, and the others reached no result", me);
        host_nap(s->host, seen);
    }
}

/* How many ranks live, have come to this attempt, remain in our view. */
struct count {
    int live, came, remain;
    int missing; /* first that lives but has not come or does not remain, -1: none */
};

static struct count count_ranks(const struct shrink *s)
{
    struct count count = {.missing = -1};

    for (int rank = 0; rank < s->host->comm->nranks; rank++) {
        bool came = attempt_of(s, rank) >= s->attempt, out = shrink_is_out(s, rank);

        count.remain += !out;
        if (is_gone(s, rank))
            continue;
        count.live++;
        count.came += came && !out;
        if ((!came || out) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

/* Where the search for one view stands after a look at all ranks. */
struct views {
    bool agreed, spoilt;
    int given_up; /* rank that has given up, -1: none */
    int damaged;  /* rank in an attempt that there is not, -1: none */
};

static struct views compare_views(const struct shrink *s, bool late, bool stale)
{
    struct views views = {.agreed = true, .given_up = -1, .damaged = -1};
    int me = s->host->comm->rank;

    for (int rank = 0; rank < s->host->comm->nranks; rank++) {
        uint32_t attempt, vote;

        if (rank == me || shrink_is_out(s, rank))
            continue;
        attempt = attempt_of(s, rank);
        vote = atomic_load(vote_of(s, rank, false));
        if (attempt > HOST_ATTEMPTS)
            views.damaged = rank;
        if (kind_of(vote) == HOST_VOTE_GIVEN_UP)
            views.given_up = rank;
        if (attempt >= s->attempt)
            take_over(s, rank);
        if (is_gone(s, rank) || (late && attempt < s->attempt)) {
            leave_out(s, rank);
            host_ring_all(s->host);
        }
        views.agreed = views.agreed && !shrink_is_out(s, rank) && attempt >= s->attempt && same_view(s, me, rank);
        if (shrink_is_out(s, rank) || same_view(s, me, rank))
            continue;
        if (stale && attempt >= s->attempt)
            decide(s, rank, false, shrink_pack_vote(HOST_VOTE_BANNED, EP_E_TIMEOUT, rank));
        views.spoilt |= attempt > s->attempt || vote != HOST_VOTE_OPEN || (stale && attempt >= s->attempt);
    }
    return views;
}

/* Gives up like a peer that has. */
static ep_status join_failure(const struct shrink *s, int rank, bool *ret_spoilt)
{
    uint32_t vote = atomic_load(vote_of(s, rank, false));
    ep_status status = (ep_status)(vote >> 8 & 0xfff);
    int culprit = (int)(vote >> 20);

    if (culprit >= s->host->comm->nranks || !ep_status_is_failure(status))
        return give_up(s, EP_E_MISMATCH, rank, ret_spoilt);
    return give_up(s, status, culprit, ret_spoilt);
}

/*
 * Everybody who remains has come and says the same; or *ret_spoilt: a peer has voted with another view than ours, or is
 * in a later attempt already, so this attempt can only fail. A rank that has come but then stands still with another
 * view is banned after one more deadline.
 */
static ep_status reach_one_view(struct shrink *s, bool *ret_spoilt)
{
    for (;;) {
        uint32_t seen = host_doorbell(s->host);
        uint64_t now = ep_now_ns();
        bool late = now >= s->deadline_ns, out;
        bool stale = now >= s->deadline_ns + (uint64_t)s->timeout_ms * 1000000u;
        int abort = shrink_aborted_by(s);
        int me = s->host->comm->rank;
        bool enough;
        struct count count;
        struct views views;

        EP_TRY(wait_left_out(s, &out));
        *ret_spoilt = out;
        if (out)
            return EP_OK;
        count = count_ranks(s);
        enough = 2 * count.came > count.live;
        if (late && !enough && !s->extended) {
            s->extended = true;
            s->deadline_ns = ep_deadline_ns(s->timeout_ms);
            continue;
        }
        views = compare_views(s, late && enough, stale);
        if (views.given_up >= 0)
            return join_failure(s, views.given_up, ret_spoilt);
        if (abort >= 0)
            return give_up(s, EP_E_ABORTED, abort, ret_spoilt);
        if (views.damaged >= 0)
            return give_up(s, EP_E_MISMATCH, views.damaged, ret_spoilt);
        *ret_spoilt = views.spoilt;
        if (views.spoilt)
            return EP_OK;
        count = count_ranks(s);
        if (views.agreed && !shrink_is_out(s, me) && 2 * count.remain > count.live)
            return EP_OK;
        if ((views.agreed && !shrink_is_out(s, me)) || stale || (late && !enough))
            return give_up(s, EP_E_TIMEOUT, count.missing < 0 ? me : count.missing, ret_spoilt);
        host_nap(s->host, seen);
    }
}

void shrink_vote_with_all(struct shrink *s, bool on_opened, uint32_t vote, uint32_t *ret_against, int *ret_owner)
{
    uint64_t deadline = ep_deadline_ns(s->timeout_ms);
    int me = s->host->comm->rank;

    decide(s, me, on_opened, vote);
    for (;;) {
        uint32_t seen = host_doorbell(s->host);
        bool late = ep_now_ns() >= deadline;
        int abort = shrink_aborted_by(s), n_open = 0;

        *ret_against = 0;
        for (int rank = 0; rank < s->host->comm->nranks; rank++) {
            uint32_t word = atomic_load(vote_of(s, rank, on_opened));

            /* Our own veto counts, also where a peer has left us out: else a view of nobody would pass. */
            if (rank != me && shrink_is_out(s, rank))
                continue;
            if (word == HOST_VOTE_OPEN && abort >= 0)
                word = decide(s, rank, on_opened, shrink_pack_vote(HOST_VOTE_GIVEN_UP, EP_E_ABORTED, abort));
            if (word == HOST_VOTE_OPEN && is_gone(s, rank))
                word = decide(s, rank, on_opened, gone_vote(s, rank));
            if (word == HOST_VOTE_OPEN && attempt_of(s, rank) > s->attempt)
                word = decide(s, rank, on_opened, shrink_pack_vote(HOST_VOTE_VETO, EP_E_TIMEOUT, rank));
            /* It has not come, so nobody has locked a view with it, and it need not be waited for. */
            if (word == HOST_VOTE_OPEN && attempt_of(s, rank) < s->attempt)
                word = HOST_VOTE_VETO;
            if (word == HOST_VOTE_OPEN && late)
                word = decide(s, rank, on_opened, shrink_pack_vote(HOST_VOTE_BANNED, EP_E_TIMEOUT, rank));
            n_open += word == HOST_VOTE_OPEN;
            if (word == HOST_VOTE_OPEN || (word == HOST_VOTE_LOCKED && same_view(s, me, rank)))
                continue;
            /* Who gives up ends the call for all; else the lowest rank counts. */
            if (!*ret_against || (kind_of(word) == HOST_VOTE_GIVEN_UP && kind_of(*ret_against) != HOST_VOTE_GIVEN_UP)) {
                *ret_against = word == HOST_VOTE_LOCKED ? shrink_pack_vote(HOST_VOTE_VETO, EP_E_MISMATCH, rank) : word;
                *ret_owner = rank;
            }
        }
        if (n_open == 0)
            return;
        host_nap(s->host, seen);
    }
}

static bool is_banned(const struct shrink *s, int rank)
{
    return kind_of(atomic_load(vote_of(s, rank, false))) == HOST_VOTE_BANNED ||
           kind_of(atomic_load(vote_of(s, rank, true))) == HOST_VOTE_BANNED;
}

/*
 * Begins attempt number `attempt` with what is certain: who is gone stays out, who is banned if enough remain. Who was
 * only late may have come meanwhile; whether a ban of this rank holds the others say.
 */
static ep_status begin_attempt(struct shrink *s, uint32_t attempt)
{
    int nranks = s->host->comm->nranks, me = s->host->comm->rank, n_banned = 0, n_remain = 0;
    uint64_t out[VIEW_WORDS] = {0};

    if (attempt > HOST_ATTEMPTS)
        return ep_fail(EP_E_TIMEOUT, "ep_comm_shrink: no agreement after %d attempts: ranks keep dying", HOST_ATTEMPTS);
    for (int rank = 0; rank < nranks; rank++) {
        bool gone = is_gone(s, rank);

        n_banned += !gone && s->attempt && is_banned(s, rank);
        n_remain += !gone && !(s->attempt && is_banned(s, rank));
    }
    for (int rank = 0; rank < nranks; rank++)
        if (rank != me && (is_gone(s, rank) || (s->attempt && n_remain > n_banned && is_banned(s, rank))))
            out[rank / 64] |= UINT64_C(1) << (rank % 64);
    s->attempt = attempt;
    for (int word = 0; word < VIEW_WORDS; word++)
        if (out[word])
            atomic_fetch_or(&s->mine->out[attempt - 1][word], out[word]);
    s->deadline_ns = ep_deadline_ns(s->timeout_ms);
    s->extended = false;
    atomic_store(&s->mine->attempt, attempt);
    host_ring_all(s->host);
    return EP_OK;
}

/* Where this call begins: behind the last attempt of this rank, and with the peers that are ahead of it. */
static uint32_t first_attempt(const struct shrink *s)
{
    uint32_t first = s->attempt + 1;

    for (int rank = 0; rank < s->host->comm->nranks; rank++) {
        uint32_t theirs = attempt_of(s, rank);

        if (theirs > first && theirs <= HOST_ATTEMPTS)
            first = theirs;
    }
    return first;
}

ep_status shrink_agree(struct shrink *s)
{
    int nranks = s->host->comm->nranks, me = s->host->comm->rank;

    EP_TRY(begin_attempt(s, first_attempt(s)));
    for (;;) {
        uint32_t vote = HOST_VOTE_LOCKED, against;
        bool spoilt;
        int owner = me;

        EP_TRY(reach_one_view(s, &spoilt));
        if (spoilt)
            vote = HOST_VOTE_VETO;
        /* Somebody may have changed its view since: then this attempt cannot pass, and all must learn it. */
        for (int rank = 0; rank < nranks; rank++)
            if (rank != me && !shrink_is_out(s, rank) && !same_view(s, me, rank))
                vote = HOST_VOTE_VETO;
        shrink_vote_with_all(s, false, vote, &against, &owner);
        if (!against)
            return EP_OK;
        if (kind_of(against) == HOST_VOTE_GIVEN_UP)
            return shrink_fail_with_vote(s, owner, against);
        EP_TRY(begin_attempt(s, s->attempt + 1));
    }
}
