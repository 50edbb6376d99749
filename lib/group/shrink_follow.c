/* SPDX-License-Identifier: Apache-2.0 */
/* The other survivors of a shrink across hosts: each connects to its leader and waits for the decision. */
#include "group/shrink_linked.h"

#include "tcp/socket.h"
#include "tcp/star.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A running leader waits for two deadlines, and has begun at most one later. */
#define LEAF_DEADLINES 4
/* For the rest of a handshake with a running leader, to send it an abort. */
#define FAREWELL_MS 200

enum outcome { JOINED, ENDED, RETRY, SILENT, DEAD };

static bool send_join(const struct linked *l, int fd)
{
    struct join join = {.unreported_aborts = l->group->unreported_aborts};

    memcpy(join.dead, l->dead, sizeof(join.dead));
    memcpy(join.cut, l->cut, sizeof(join.cut));
    return shrink_send(fd, &join, sizeof(join));
}

/*
 * This rank ends its call, with ep_last_error(), during a handshake. It sends its own abort to the leader, if that
 * answers: from heartbeats alone nobody could distinguish it from an abort that was the reason to shrink.
 */
static void end_handshake(const struct linked *l, struct tcp_handshake *hs, enum tcp_handshake_result result,
                          ep_status status)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    bool aborted = status == EP_E_ABORTED && l->failed_rank == l->me, sent = false;
    char text[EP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof(text), "%s", ep_last_error());
    while (aborted && result == TCP_HANDSHAKE_PENDING && ep_now_ns() < deadline_ns) {
        struct pollfd poll_fd = {.fd = hs->fd, .events = tcp_handshake_events(hs)};

        (void)poll(&poll_fd, 1, SHRINK_POLL_MS);
        result = tcp_handshake_step(hs);
    }
    if (aborted && result == TCP_HANDSHAKE_DONE && send_join(l, hs->fd))
        sent = tcp_star_send_failure(hs->fd, status, text);
    if (aborted)
        l->group->unreported_aborts = sent ? 0 : atomic_load(&l->group->control->state.aborts);
    tcp_handshake_drop(hs);
    ep_fail(status, "%s", text); /* the handshake may have set another error */
}

/* True if the peer has closed the connection, as a leader does whose call ends: it may call again, so connect again. */
static bool is_ended_call(const struct tcp_handshake *hs)
{
    return hs->status == EP_E_PEER_LEFT ||
           (hs->status == EP_E_SYSTEM && (hs->error == ECONNRESET || hs->error == EPIPE));
}

/*
 * A rank that lacks descriptors or memory says so, instead of skipping each leader as if it were silent: threads of
 * this process may release some until the deadline.
 */
static enum outcome await_resources(struct linked *l, int leader, int error, ep_status *ret_status)
{
    *ret_status = shrink_check(l);
    if (*ret_status != EP_OK)
        return ENDED;
    shrink_update_dead(l);
    if (shrink_has(l->dead, leader))
        return SILENT;
    if (ep_now_ns() < l->deadline_ns)
        return RETRY;
    *ret_status = ep_fail_errno(EP_E_SYSTEM, error, "ep_comm_shrink: rank %d cannot connect to rank %d", l->me, leader);
    return ENDED;
}

static enum outcome connect_to(struct linked *l, int leader, const struct tcp_address *to, ep_status *ret_status)
{
    struct tcp_handshake hs;
    enum tcp_handshake_result result = TCP_HANDSHAKE_PENDING;
    uint64_t begin_ns = ep_now_ns();

    if (!shrink_connect(l, &hs, TCP_SHRINK, leader, to, l->deadline_ns))
        return tcp_is_exhausted(errno) ? await_resources(l, leader, errno, ret_status) : SILENT;
    while (result == TCP_HANDSHAKE_PENDING) {
        struct pollfd poll_fd = {.fd = hs.fd, .events = tcp_handshake_events(&hs)};

        (void)poll(&poll_fd, 1, SHRINK_POLL_MS);
        result = tcp_handshake_step(&hs);
        *ret_status = shrink_check(l);
        if (*ret_status != EP_OK) {
            end_handshake(l, &hs, result, *ret_status);
            return ENDED;
        }
        shrink_update_dead(l);
        if (result == TCP_HANDSHAKE_PENDING && shrink_has(l->dead, leader))
            result = TCP_HANDSHAKE_FAILED;
    }
    if (result == TCP_HANDSHAKE_DONE) {
        l->members[leader].fd = hs.fd;
        return JOINED;
    }
    tcp_handshake_drop(&hs);
    if (is_ended_call(&hs) && ep_now_ns() < l->deadline_ns && !shrink_has(l->dead, leader))
        return RETRY;
    l->group->shrink_deadlines += begin_ns < l->deadline_ns && ep_now_ns() >= l->deadline_ns;
    return hs.status == EP_E_SYSTEM && hs.error == ECONNREFUSED ? DEAD : SILENT;
}

/*
 * The others begin their next call, which an abort that this rank has reported made necessary: before this leader they
 * wait again for each rank that this one has skipped.
 */
static void await_next_call(struct linked *l)
{
    int skipped = 0;

    if (l->ended_others || !l->group->unreported_aborts)
        return;
    l->ended_others = true;
    for (int rank = 0; rank < l->nranks; rank++)
        skipped += shrink_has(l->skipped, rank) && !shrink_has(l->dead, rank);
    l->deadline_ns = ep_deadline_ns((1 + skipped) * l->timeout_ms);
}

/* Waits for the decision of the leader. SILENT: there was none, and the leader is skipped. */
static enum outcome await_decision(struct linked *l, int leader, ep_status *ret_status)
{
    struct member *member = &l->members[leader];
    uint64_t limit_ns = ep_now_ns() + LEAF_DEADLINES * (uint64_t)l->timeout_ms * 1000000u;
    uint64_t silent_ns = ep_deadline_ns(l->timeout_ms), now;

    if (!send_join(l, member->fd))
        return SILENT;
    for (;;) {
        struct pollfd poll_fd = {.fd = member->fd, .events = POLLIN};
        int got;

        (void)poll(&poll_fd, 1, SHRINK_POLL_MS);
        got = tcp_receive(member->fd, &l->decision, sizeof(l->decision), &member->used);
        if (got > 0)
            l->group->unreported_aborts = 0; /* the leader has received them; it ignores those that it knows */
        if (got > 0 && !l->decision.pending)
            return JOINED;
        if (got > 0) {
            member->used = 0;
            silent_ns = ep_deadline_ns(l->timeout_ms);
        }
        *ret_status = shrink_check(l);
        if (*ret_status != EP_OK) {
            /* As in the star that the leader may be making of this connection already. */
            if (*ret_status == EP_E_ABORTED && l->failed_rank == l->me)
                tcp_star_send_failure(member->fd, *ret_status, ep_last_error());
            return ENDED;
        }
        shrink_update_dead(l);
        now = ep_now_ns();
        l->group->shrink_deadlines += now >= limit_ns ? LEAF_DEADLINES : now >= silent_ns;
        /* The leader is alive, and its call has ended by an abort of this rank before this call: it will call again. */
        if (got < 0 && !shrink_has(l->dead, leader) && now < l->deadline_ns) {
            await_next_call(l);
            return RETRY;
        }
        if (got < 0 || shrink_has(l->dead, leader) || now >= silent_ns || now >= limit_ns)
            return SILENT;
    }
}

ep_status shrink_follow(struct linked *l, int leader)
{
    int n = l->rendezvous->ranks[leader].n, refused = 0;
    ep_status status = EP_OK;

    for (int i = 0; i < n;) {
        enum outcome outcome = connect_to(l, leader, &l->rendezvous->ranks[leader].addresses[i], &status);

        if (outcome == JOINED)
            outcome = await_decision(l, leader, &status);
        refused += outcome == DEAD;
        if (outcome == JOINED)
            return EP_OK;
        shrink_drop(l, leader);
        if (outcome == ENDED)
            return status;
        if (outcome == RETRY)
            (void)poll(NULL, 0, SHRINK_POLL_MS);
        else
            i++;
    }
    if (n && refused == n)
        shrink_note_refused(l, leader);
    shrink_add(l->skipped, leader);
    return EP_OK;
}
