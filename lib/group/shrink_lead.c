/* SPDX-License-Identifier: Apache-2.0 */
/* The leader of a shrink across hosts: it gathers the survivors and decides who is left. */
#include "group/shrink_linked.h"

#include "tcp/star.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

/* In a deadline a leader says so often that it still waits. */
#define BEATS 8
/* The others are asked whether they went on without it after this part of a deadline, as most ranks come before: */
#define FIRST_PARTS 8
/* each answers within this part, if it does: */
#define QUESTION_PARTS 8
/* and no more than so many are asked in a deadline. */
#define QUESTIONS 64
/* For the rest of handshakes with ranks that are told why the call ends. */
#define FAREWELL_MS 200

static ep_status check_join(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    const struct linked *l = context;

    snprintf(ret_reason, bytes, "rank %d expects no such connection of rank %d", l->me, hs->hello.rank);
    return hs->hello.kind == TCP_SHRINK && hs->hello.session == l->rendezvous->session && hs->hello.to == l->me &&
                   hs->hello.rank >= 0 && hs->hello.rank < l->nranks && hs->hello.rank != l->me
               ? EP_OK
               : EP_E_MISMATCH;
}

static void drop(struct linked *l, int rank)
{
    if (l->fds[rank] >= 0)
        close(l->fds[rank]);
    l->fds[rank] = -1;
    l->used[rank] = 0;
}

static bool has_come(const struct linked *l, int rank)
{
    return rank == l->me || (l->fds[rank] >= 0 && l->used[rank] == sizeof(struct join));
}

/* It has aborted a call for which this one waits, and comes to the next. */
static bool comes_again(const struct linked *l, int rank)
{
    return rank != l->me && has_come(l, rank) && shrink_aborts_is_news(&l->aborts, rank, l->joins[rank].untold_aborts);
}

static void read_join(struct linked *l, int rank)
{
    char byte;

    if (l->fds[rank] < 0)
        return;
    if (!has_come(l, rank) && shrink_receive(l->fds[rank], &l->joins[rank], sizeof(struct join), &l->used[rank]) < 0)
        drop(l, rank);
    if (l->fds[rank] >= 0 && has_come(l, rank)) {
        ssize_t n = recv(l->fds[rank], &byte, 1, MSG_PEEK | MSG_DONTWAIT);

        if (n > 0 && l->aborted_by < 0 && tcp_star_peek_failure(l->fds[rank]) == EP_E_ABORTED)
            l->aborted_by = rank;
        if (n == 0)
            drop(l, rank); /* it has given up, or died */
    }
    if (l->aborted_by < 0 && comes_again(l, rank))
        l->aborted_by = rank;
}

static void take_join(void *context, const struct tcp_handshake *hs, int fd)
{
    struct linked *l = context;

    read_join(l, hs->hello.rank); /* it may have aborted a call before */
    drop(l, hs->hello.rank);
    l->fds[hs->hello.rank] = fd;
}

static void read_joins(struct linked *l)
{
    for (int rank = 0; rank < l->nranks; rank++) {
        read_join(l, rank);
        for (int word = 0; word < SHRINK_WORDS && l->fds[rank] >= 0 && has_come(l, rank); word++) {
            l->dead[word] |= l->joins[rank].dead[word];
            l->cut[word] |= l->joins[rank].cut[word];
        }
    }
}

struct count {
    int live, came;
    int missing; /* first that lives and has not come, -1: none */
};

/* Who has come lives, whatever others think. */
static struct count count_ranks(const struct linked *l)
{
    struct count count = {.missing = -1};

    for (int rank = 0; rank < l->nranks; rank++) {
        bool came = has_come(l, rank);

        count.came += came;
        count.live += came || !shrink_has(l->dead, rank);
        if (!came && !shrink_has(l->dead, rank) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

/* To all that have come: they pass over a leader that says nothing. */
static void beat(struct linked *l)
{
    const struct decision decision = {.waits = 1};
    uint64_t now = ep_now_ns();

    if (now < l->beat_ns + (uint64_t)l->timeout_ms * 1000000u / BEATS)
        return;
    l->beat_ns = now;
    for (int rank = 0; rank < l->nranks; rank++)
        if (l->fds[rank] >= 0 && has_come(l, rank) && !shrink_send(l->fds[rank], &decision, sizeof(decision)))
            drop(l, rank);
}

/* --- whether the others went on without this rank --- */

/* One connection at a time, by which this rank asks another. */
struct question {
    struct tcp_handshake hs;
    bool under_way;               /* hs is */
    int fd;                       /* else of an answer that is to come, or -1 */
    int rank, address;            /* that was asked last */
    int refused;                  /* addresses of that rank where nothing listens */
    uint64_t first[SHRINK_WORDS]; /* ranks whose links were cut, which have had their turn before others */
    uint64_t due_ns;              /* the next one, while there is none */
    uint64_t limit_ns;            /* of this one */
    size_t used;
    struct decision answer;
};

static uint64_t share_ns(const struct linked *l, uint64_t parts)
{
    return (uint64_t)l->timeout_ms * 1000000u / parts;
}

/* Before others those of which only a new connection can tell whether they live, each once. */
static int next_cut(const struct linked *l, const struct question *q)
{
    for (int rank = 0; rank < l->nranks; rank++)
        if (shrink_has(l->cut, rank) && !shrink_has(l->dead, rank) && !has_come(l, rank) && !shrink_has(q->first, rank))
            return rank;
    return -1;
}

/* The next address of a rank of another host that has not come. */
static const struct tcp_address *choose(const struct linked *l, struct question *q)
{
    q->address++;
    for (int tries = 0; tries <= l->nranks; tries++) {
        int cut;

        if (!l->group->peers[q->rank].control && !has_come(l, q->rank) && q->address < l->rendezvous->ranks[q->rank].n)
            return &l->rendezvous->ranks[q->rank].addresses[q->address];
        cut = next_cut(l, q);
        q->rank = cut >= 0 ? cut : (q->rank + 1) % l->nranks;
        if (cut >= 0)
            shrink_add(q->first, cut);
        q->address = q->refused = 0;
    }
    return NULL;
}

/* Its host answers at all addresses that nothing listens there any more. */
static void note_refused(struct linked *l, struct question *q)
{
    int rail = ep_group_rail(l->group, q->rank / l->group->comm->ranks_per_node);

    if (++q->refused == l->rendezvous->ranks[q->rank].n && !shrink_is_silent(l->group, rail))
        shrink_add(l->dead, q->rank);
}

static void begin(const struct linked *l, struct question *q, uint64_t now)
{
    const struct tcp_address *from = l->rendezvous->from.family ? &l->rendezvous->from : NULL, *to = choose(l, q);
    const struct tcp_hello hello = {
        .kind = TCP_SHRUNK, .rank = l->me, .to = q->rank, .session = l->rendezvous->session};
    int fd;

    q->due_ns = now + share_ns(l, QUESTIONS);
    q->limit_ns = now + share_ns(l, QUESTION_PARTS);
    if (!to || tcp_connect(to, from, &fd) != EP_OK)
        return;
    tcp_set_options(fd, l->timeout_ms);
    q->under_way = tcp_handshake_connect(&q->hs, fd, &l->rendezvous->key, &hello, to, q->limit_ns) == EP_OK;
    if (!q->under_way)
        tcp_handshake_drop(&q->hs);
}

static void end(struct question *q)
{
    if (q->under_way)
        tcp_handshake_drop(&q->hs);
    if (q->fd >= 0)
        close(q->fd);
    q->under_way = false;
    q->fd = -1;
}

/* Whether a rank lives that others wait to know of: the next question is due now. */
static bool is_urgent(const struct linked *l, const struct question *q)
{
    return next_cut(l, q) >= 0 || (q->refused > 0 && q->refused < l->rendezvous->ranks[q->rank].n);
}

/* Goes on with it, and never blocks. True: they did. */
static bool ask(struct linked *l, struct question *q)
{
    uint64_t now = ep_now_ns();
    int got = 0;

    if (!q->under_way && q->fd < 0) {
        if (now >= q->due_ns || is_urgent(l, q))
            begin(l, q, now);
        return false;
    }
    if (q->under_way) {
        enum tcp_handshake_result result = tcp_handshake_step(&q->hs);

        q->under_way = result == TCP_HANDSHAKE_PENDING;
        q->fd = result == TCP_HANDSHAKE_DONE ? q->hs.fd : -1;
        q->used = 0;
        if (result == TCP_HANDSHAKE_FAILED && q->hs.status == EP_E_SYSTEM && q->hs.error == ECONNREFUSED)
            note_refused(l, q);
    }
    if (q->fd >= 0)
        got = shrink_receive(q->fd, &q->answer, sizeof(q->answer), &q->used);
    if (got == 0 && now < q->limit_ns && (q->under_way || q->fd >= 0))
        return false;
    end(q);
    if (is_urgent(l, q))
        begin(l, q, now);
    return got > 0 && q->answer.status == EP_E_EXCLUDED;
}

/* --- until enough have come --- */

static void wait_at_listener(struct linked *l, const struct question *q)
{
    struct pollfd polls[TCP_ACCEPTOR_POLLS + 1];
    int n = tcp_acceptor_get_polls(l->acceptor, polls);

    if (q->under_way)
        polls[n++] = (struct pollfd){.fd = q->hs.fd, .events = tcp_handshake_events(&q->hs)};
    (void)poll(polls, (nfds_t)n, SHRINK_POLL_MS);
    tcp_acceptor_step(l->acceptor, check_join, take_join, l);
}

/* EP_OK: enough have come. *ret_failed_rank: of a failure. */
static ep_status await_joins(struct linked *l, struct question *question, int *ret_failed_rank)
{
    bool extended = false;

    for (;;) {
        struct count count;

        EP_TRY(shrink_check(l, ret_failed_rank));
        shrink_look_for_dead(l);
        wait_at_listener(l, question);
        read_joins(l);
        if (l->aborted_by >= 0)
            continue;
        beat(l);
        count = count_ranks(l);
        if (count.missing < 0)
            return EP_OK;
        if (ask(l, question)) {
            *ret_failed_rank = l->me;
            return shrink_fail_excluded(l->me);
        }
        if (ep_now_ns() < l->deadline_ns)
            continue;
        l->group->shrink_deadlines++;
        if (2 * count.came > count.live)
            return EP_OK;
        if (extended) {
            *ret_failed_rank = count.missing;
            return ep_fail(EP_E_TIMEOUT,
                           "ep_comm_shrink: rank %d did not answer within %d ms, and a group needs more than half of "
                           "the ranks that are known to live and all that have come; call it again",
                           count.missing, l->timeout_ms);
        }
        extended = true;
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
    }
}

/* The call fails: those whose handshakes are under way are told as well, as far as they go on with them. */
static void await_handshakes(struct linked *l, const struct question *question, ep_status status)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    char text[EP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof(text), "%s", ep_last_error());
    while (l->acceptor->n > 0 && ep_now_ns() < deadline_ns)
        wait_at_listener(l, question);
    ep_fail(status, "%s", text);
}

/* After the status of this rank's wait: what goes to all that have come, a failure also to those that are coming. */
static void decide(struct linked *l, ep_status status, int failed_rank)
{
    l->decision = (struct decision){.status = (int32_t)status, .failed_rank = failed_rank};
    if (status != EP_OK)
        snprintf(l->decision.text, sizeof(l->decision.text), "%.*s", EP_GROUP_REASON_BYTES - 1, ep_last_error());
    for (int rank = 0; rank < l->nranks; rank++)
        if (has_come(l, rank))
            shrink_add(l->decision.survivors, rank);
    for (int rank = 0; rank < l->nranks; rank++) {
        bool aborted = status == EP_E_ABORTED && (rank == failed_rank || comes_again(l, rank));

        if (l->fds[rank] < 0)
            continue;
        /* Without one: who aborted comes again; another one is found missing, as this one has no connection to it. */
        if (aborted || (status == EP_OK && !has_come(l, rank)))
            drop(l, rank);
        else
            (void)shrink_send(l->fds[rank], &l->decision,
                              sizeof(l->decision)); /* the first all-gather finds failures */
    }
}

ep_status shrink_lead(struct linked *l)
{
    struct question question = {.fd = -1, .address = -1, .due_ns = ep_now_ns() + share_ns(l, FIRST_PARTS)};
    int failed_rank = l->me, fd = fcntl(l->rendezvous->listener, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    ep_status status;

    if (fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_comm_shrink: a descriptor for the listener");
    tcp_acceptor_open(l->acceptor, fd, &l->rendezvous->key);
    status = await_joins(l, &question, &failed_rank);
    end(&question);
    if (status != EP_OK)
        await_handshakes(l, &question, status);
    tcp_acceptor_close(l->acceptor);
    decide(l, status, failed_rank);
    return status;
}
