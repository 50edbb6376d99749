/* SPDX-License-Identifier: Apache-2.0 */
/* The leader of a shrink across hosts: it gathers the survivors and decides on the members. */
#include "group/shrink_linked.h"

#include "tcp/star.h"

#include <errno.h>
#include <stdio.h>
#include <unistd.h>

/* Heartbeats of a waiting leader per deadline. */
#define HEARTBEATS 8
/*
 * The leader asks other ranks whether they continued without it after this fraction of a deadline, because most ranks
 * join before:
 */
#define FIRST_QUERY_PARTS 8
/* each must answer within this fraction, */
#define QUERY_TIME_PARTS 8
/* and at most so many are asked per deadline. */
#define QUERIES_PER_DEADLINE 64
/* For the rest of the handshakes in progress when the call fails, to send the reason. */
#define FAREWELL_MS 200

static ep_status check_join(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    const struct linked *l = context;

    snprintf(ret_reason, bytes, "rank %d does not expect this connection from rank %d", l->me, hs->hello.rank);
    return hs->hello.kind == TCP_SHRINK && hs->hello.session == l->rendezvous->session && hs->hello.to == l->me &&
                   hs->hello.rank >= 0 && hs->hello.rank < l->nranks && hs->hello.rank != l->me
               ? EP_OK
               : EP_E_MISMATCH;
}

static bool has_joined(const struct linked *l, int rank)
{
    return rank == l->me || (l->members[rank].fd >= 0 && l->members[rank].used == sizeof(struct join));
}

/* True if the rank has aborted a call in which this rank still waits for it, and joins its next call. */
static bool has_rejoined(const struct linked *l, int rank)
{
    return rank != l->me && has_joined(l, rank) &&
           shrink_aborts_is_new(&l->aborts, rank, l->members[rank].join.unreported_aborts);
}

static void read_join(struct linked *l, int rank)
{
    struct member *member = &l->members[rank];
    char byte;

    if (member->fd < 0)
        return;
    if (!has_joined(l, rank) && tcp_receive(member->fd, &member->join, sizeof(member->join), &member->used) < 0)
        shrink_drop(l, rank);
    if (member->fd >= 0 && has_joined(l, rank)) {
        ssize_t n = recv(member->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT);

        if (n > 0 && l->aborted_by < 0 && tcp_star_peek_failure(member->fd) == EP_E_ABORTED)
            l->aborted_by = rank;
        if (n == 0)
            shrink_drop(l, rank); /* it has given up, or died */
    }
    if (l->aborted_by < 0 && has_rejoined(l, rank))
        l->aborted_by = rank;
}

static void accept_join(void *context, const struct tcp_handshake *hs, int fd)
{
    struct linked *l = context;

    read_join(l, hs->hello.rank); /* the old connection may carry an abort of its previous call */
    shrink_drop(l, hs->hello.rank);
    l->members[hs->hello.rank].fd = fd;
}

static void read_joins(struct linked *l)
{
    for (int rank = 0; rank < l->nranks; rank++) {
        const struct member *member = &l->members[rank];

        read_join(l, rank);
        for (int word = 0; word < SHRINK_WORDS && member->fd >= 0 && has_joined(l, rank); word++) {
            l->dead[word] |= member->join.dead[word];
            l->cut[word] |= member->join.cut[word];
        }
    }
}

struct count {
    int live, joined;
    int missing; /* first live rank that has not joined, -1: none */
};

/* A rank that has joined is alive, even if others consider it dead. */
static struct count count_ranks(const struct linked *l)
{
    struct count count = {.missing = -1};

    for (int rank = 0; rank < l->nranks; rank++) {
        bool joined = has_joined(l, rank);

        count.joined += joined;
        count.live += joined || !shrink_has(l->dead, rank);
        if (!joined && !shrink_has(l->dead, rank) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

/* Sends heartbeats to all that have joined: they skip a silent leader. */
static void send_heartbeats(struct linked *l)
{
    const struct decision decision = {.pending = 1};
    uint64_t now = ep_now_ns();

    if (now < l->heartbeat_ns + (uint64_t)l->timeout_ms * 1000000u / HEARTBEATS)
        return;
    l->heartbeat_ns = now;
    for (int rank = 0; rank < l->nranks; rank++)
        if (l->members[rank].fd >= 0 && has_joined(l, rank) &&
            !shrink_send(l->members[rank].fd, &decision, sizeof(decision)))
            shrink_drop(l, rank);
}

/* --- whether the others continued without this rank --- */

/* One query at a time, over a connection of its own. */
struct query {
    enum { IDLE, CONNECTING, CONNECTED } state;
    struct tcp_handshake hs;      /* its descriptor is the connection, its deadline that of the query */
    int rank, address;            /* that was queried last */
    int refused;                  /* addresses of that rank where no process listens */
    uint64_t first[SHRINK_WORDS]; /* ranks whose links were cut, and which were queried before others */
    uint64_t due_ns;              /* when the next query is due */
    size_t used;
    struct decision reply;
};

static uint64_t share_ns(const struct linked *l, uint64_t parts)
{
    return (uint64_t)l->timeout_ms * 1000000u / parts;
}

/* First the ranks of which only a new connection can tell whether they are alive, each once. */
static int next_cut(const struct linked *l, const struct query *q)
{
    for (int rank = 0; rank < l->nranks; rank++)
        if (shrink_has(l->cut, rank) && !shrink_has(l->dead, rank) && !has_joined(l, rank) &&
            !shrink_has(q->first, rank))
            return rank;
    return -1;
}

/* The next address of a rank of another host that has not joined. */
static const struct tcp_address *next_address(const struct linked *l, struct query *q)
{
    q->address++;
    for (int tries = 0; tries <= l->nranks; tries++) {
        int cut;

        if (!l->group->peers[q->rank].control && !has_joined(l, q->rank) &&
            q->address < l->rendezvous->ranks[q->rank].n)
            return &l->rendezvous->ranks[q->rank].addresses[q->address];
        cut = next_cut(l, q);
        q->rank = cut >= 0 ? cut : (q->rank + 1) % l->nranks;
        if (cut >= 0)
            shrink_add(q->first, cut);
        q->address = q->refused = 0;
    }
    return NULL;
}

static void query_begin(const struct linked *l, struct query *q, uint64_t now)
{
    const struct tcp_address *to = next_address(l, q);

    q->due_ns = now + share_ns(l, QUERIES_PER_DEADLINE);
    if (to && shrink_connect(l, &q->hs, TCP_SHRINK_QUERY, q->rank, to, now + share_ns(l, QUERY_TIME_PARTS)))
        q->state = CONNECTING;
}

static void query_end(struct query *q)
{
    if (q->state != IDLE)
        tcp_handshake_drop(&q->hs);
    q->state = IDLE;
}

/* True if others wait to know whether a rank is alive: the next query is due now. */
static bool is_urgent(const struct linked *l, const struct query *q)
{
    return next_cut(l, q) >= 0 || (q->refused > 0 && q->refused < l->rendezvous->ranks[q->rank].n);
}

/* Continues the query without blocking. True: the others continued without this rank. */
static bool query_step(struct linked *l, struct query *q)
{
    uint64_t now = ep_now_ns();
    int got = 0;

    if (q->state == IDLE) {
        if (now >= q->due_ns || is_urgent(l, q))
            query_begin(l, q, now);
        return false;
    }
    if (q->state == CONNECTING) {
        enum tcp_handshake_result result = tcp_handshake_step(&q->hs);

        q->state = result == TCP_HANDSHAKE_PENDING ? CONNECTING : result == TCP_HANDSHAKE_DONE ? CONNECTED : IDLE;
        q->used = 0;
        if (result == TCP_HANDSHAKE_FAILED && q->hs.status == EP_E_SYSTEM && q->hs.error == ECONNREFUSED &&
            ++q->refused == l->rendezvous->ranks[q->rank].n)
            shrink_note_refused(l, q->rank);
    }
    if (q->state == CONNECTED)
        got = tcp_receive(q->hs.fd, &q->reply, sizeof(q->reply), &q->used);
    if (got == 0 && now < q->hs.deadline_ns && q->state != IDLE)
        return false;
    query_end(q);
    if (is_urgent(l, q))
        query_begin(l, q, now);
    return got > 0 && q->reply.status == EP_E_EXCLUDED;
}

/* --- until enough have joined --- */

static void wait_at_listener(struct linked *l, const struct query *q)
{
    struct pollfd polls[TCP_ACCEPTOR_POLLS + 1];
    int n = tcp_acceptor_get_polls(l->acceptor, polls);

    if (q->state == CONNECTING)
        polls[n++] = (struct pollfd){.fd = q->hs.fd, .events = tcp_handshake_events(&q->hs)};
    (void)poll(polls, (nfds_t)n, SHRINK_POLL_MS);
    tcp_acceptor_step(l->acceptor, check_join, accept_join, l);
}

/* EP_OK: enough have joined. */
static ep_status await_joins(struct linked *l, struct query *query)
{
    bool extended = false;

    for (;;) {
        struct count count;

        EP_TRY(shrink_check(l));
        shrink_update_dead(l);
        wait_at_listener(l, query);
        read_joins(l);
        if (l->aborted_by >= 0)
            continue;
        send_heartbeats(l);
        count = count_ranks(l);
        if (count.missing < 0)
            return EP_OK;
        if (query_step(l, query))
            return shrink_fail_excluded(l->me);
        if (ep_now_ns() < l->deadline_ns)
            continue;
        l->group->shrink_deadlines++;
        /* The missing ranks may be waiting in the backlog. */
        if (l->acceptor->error)
            return ep_fail_errno(EP_E_SYSTEM, l->acceptor->error, "ep_comm_shrink: rank %d cannot accept connections",
                                 l->me);
        if (2 * count.joined > count.live)
            return EP_OK;
        if (extended) {
            l->failed_rank = count.missing;
            return ep_fail(EP_E_TIMEOUT,
                           "ep_comm_shrink: rank %d did not answer within %d ms, and a group needs more than half of "
                           "the live ranks and all that have joined; call it again",
                           count.missing, l->timeout_ms);
        }
        extended = true;
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
    }
}

/* The call fails: completes the handshakes in progress, as far as the peers do, so that they receive the reason. */
static void await_handshakes(struct linked *l, const struct query *query, ep_status status)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    char text[EP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof(text), "%s", ep_last_error());
    while (l->acceptor->n > 0 && ep_now_ns() < deadline_ns)
        wait_at_listener(l, query);
    ep_fail(status, "%s", text);
}

/* Sends the decision to all that have joined, a failure also to those that are joining. */
static void send_decision(struct linked *l, ep_status status)
{
    l->decision = (struct decision){.status = (int32_t)status, .failed_rank = l->failed_rank};
    if (status != EP_OK)
        snprintf(l->decision.text, sizeof(l->decision.text), "%.*s", EP_GROUP_REASON_BYTES - 1, ep_last_error());
    for (int rank = 0; rank < l->nranks; rank++)
        if (has_joined(l, rank))
            shrink_add(l->decision.survivors, rank);
    for (int rank = 0; rank < l->nranks; rank++) {
        bool aborted = status == EP_E_ABORTED && (rank == l->failed_rank || has_rejoined(l, rank));

        if (l->members[rank].fd < 0)
            continue;
        /*
         * No decision for a rank that has aborted: it joins again. A rank that has not joined in time has no connection
         * to this one, and so is missing in the first all-gather.
         */
        if (aborted || (status == EP_OK && !has_joined(l, rank)))
            shrink_drop(l, rank);
        else
            /* The first all-gather detects failures. */
            (void)shrink_send(l->members[rank].fd, &l->decision, sizeof(l->decision));
    }
}

ep_status shrink_lead(struct linked *l)
{
    struct query query = {.address = -1, .due_ns = ep_now_ns() + share_ns(l, FIRST_QUERY_PARTS)};
    struct ep_net *tcp = ep_streams_get_net(l->group->streams)->tcp;
    ep_status status;

    l->acceptor = ep_net_tcp_take_acceptor(tcp, true);
    status = await_joins(l, &query);
    query_end(&query);
    if (status != EP_OK)
        await_handshakes(l, &query, status);
    (void)ep_net_tcp_take_acceptor(tcp, false);
    send_decision(l, status);
    return status;
}
