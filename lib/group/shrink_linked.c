/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A shrink across hosts, over the networks "tcp" and "verbs".
 *
 * Survivors connect to the lowest rank that is not known to have died, at the listener that its endpoint has kept; who
 * finds no one below itself leads. Each says whom it knows to have died or left. The leader waits for all others until
 * its deadline, and then goes on without those that have not come if those that have are more than half of the ranks
 * that are known to live; otherwise it waits for one more deadline, and gives up, for all that have come. The list of
 * survivors goes to all of them over the same connections, which then carry the all-gathers that create the new group.
 * The last all-gather confirms it.
 *
 * A leader says to those that have come that it still waits. One that says nothing for a deadline is passed over,
 * before and after the handshake, so that a stopped one holds nobody up for longer. There are never two groups: each
 * needs more than half of those that live. A process counts as dead when its control link has ended, or a rank of its
 * own host says so, or its host refuses the connection; one that is only silent counts as living. So does one whose
 * host was silent until then: behind a network that failed and came back the others may have formed their group, and
 * have freed the old one, which looks from here as if they had died.
 *
 * Who is left out learns it from the ranks of its own node, by their control blocks, and from its rail peers.
 *
 * Who aborts while it shrinks tells its leader, which ends the shrink for all; other aborts are shrink_aborts.c's.
 */
#include "group/shrink.h"
#include "net/tcp.h"
#include "tcp/star.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define WORDS (EP_MAX_RANKS / 64)
#define POLL_MS 20
/* A leader that runs waits for two deadlines, and has begun at most one later. */
#define LEAF_DEADLINES 4
/* In a deadline a leader says so often that it still waits. */
#define BEATS 8
/* For the rest of a handshake with a leader that runs, so that it can be told of an abort. */
#define FAREWELL_MS 200

/* What a survivor says to the leader. */
struct join {
    uint64_t dead[WORDS];
};

/* What the leader says to all that have come. */
struct decision {
    int32_t waits; /* 1: it has not decided yet, and nothing else is set */
    int32_t status, failed_rank;
    uint64_t survivors[WORDS];
    char text[EP_GROUP_REASON_BYTES];
};

struct linked {
    struct ep_group *group;
    const struct ep_net_tcp_rendezvous *rendezvous;
    struct tcp_acceptor *acceptor;
    int nranks, me, timeout_ms;
    uint64_t deadline_ns;
    uint64_t beat_ns;            /* leader: when it last said that it waits */
    uint64_t dead[WORDS];        /* as far as this rank knows, and on the leader as far as any does */
    uint64_t passed_over[WORDS]; /* leaders that did not answer */
    int *fds;                    /* [R] leader: connections of those that have come */
    size_t *used;                /* [R] bytes of the join that are there */
    struct join *joins;          /* [R] */
    struct shrink_aborts aborts;
    int aborted_by; /* leader: who has come, and aborted; -1: nobody */
    struct decision decision;
};

static bool has(const uint64_t *bits, int rank)
{
    return bits[rank / 64] >> (rank % 64) & 1;
}

static void add(uint64_t *bits, int rank)
{
    bits[rank / 64] |= UINT64_C(1) << (rank % 64);
}

/* --- what this rank knows --- */

static bool is_silent(const struct ep_group *group, int rank)
{
    return !group->peers[rank].control && group->remote && atomic_load(&group->remote[rank].silent);
}

static void look_for_dead(struct linked *l)
{
    for (int rank = 0; rank < l->nranks; rank++)
        if (rank != l->me &&
            ((ep_group_peer_dead(l->group, rank) && !is_silent(l->group, rank)) || ep_group_has_left(l->group, rank)))
            add(l->dead, rank);
}

/* Have others gone on without this rank? */
static bool is_excluded(const struct linked *l)
{
    const struct ep_group *group = l->group;

    for (int rank = 0; rank < l->nranks; rank++) {
        const struct ep_group_control *control = group->peers[rank].control;

        if (rank == l->me)
            continue;
        if (!control && atomic_load(&group->remote[rank].excludes))
            return true;
        if (control && atomic_load(&control->shrink.passed) &&
            atomic_load(&control->shrink.passed_out[l->me / 64]) >> (l->me % 64) & 1)
            return true;
    }
    return false;
}

/* EP_OK, or why this call ends now. */
static ep_status check(struct linked *l, int *ret_failed_rank)
{
    int abort = l->aborted_by >= 0 ? l->aborted_by : shrink_aborts_find(&l->aborts);

    *ret_failed_rank = l->me;
    if (is_excluded(l))
        return ep_fail(EP_E_EXCLUDED, "ep_comm_shrink: the other ranks went on without rank %d", l->me);
    if (abort < 0)
        return EP_OK;
    *ret_failed_rank = abort;
    return ep_fail(EP_E_ABORTED, "ep_comm_shrink: rank %d called ep_comm_abort", abort);
}

/* --- whole messages over a connection that does not block --- */

/* 1: all of it, 0: not yet, -1: the connection has ended. */
static int receive(int fd, void *message, size_t bytes, size_t *used)
{
    while (*used < bytes) {
        ssize_t n = recv(fd, (char *)message + *used, bytes - *used, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (n <= 0)
            return -1;
        *used += (size_t)n;
    }
    return 1;
}

/* Into an empty socket, whose buffer is larger than any of them. */
static bool send_whole(int fd, const void *message, size_t bytes)
{
    return send(fd, message, bytes, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes;
}

/* --- the leader --- */

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

static void take_join(void *context, const struct tcp_handshake *hs, int fd)
{
    struct linked *l = context;

    drop(l, hs->hello.rank);
    l->fds[hs->hello.rank] = fd;
}

static bool has_come(const struct linked *l, int rank)
{
    return rank == l->me || (l->fds[rank] >= 0 && l->used[rank] == sizeof(struct join));
}

static void read_joins(struct linked *l)
{
    for (int rank = 0; rank < l->nranks; rank++) {
        char byte;

        if (l->fds[rank] < 0)
            continue;
        if (!has_come(l, rank) && receive(l->fds[rank], &l->joins[rank], sizeof(struct join), &l->used[rank]) < 0)
            drop(l, rank);
        if (l->fds[rank] >= 0 && has_come(l, rank)) {
            ssize_t n = recv(l->fds[rank], &byte, 1, MSG_PEEK | MSG_DONTWAIT);

            if (n > 0 && l->aborted_by < 0 && tcp_star_peek_failure(l->fds[rank]) == EP_E_ABORTED)
                l->aborted_by = rank;
            if (n == 0)
                drop(l, rank); /* it has given up, or died */
        }
        for (int word = 0; word < WORDS && has_come(l, rank); word++)
            l->dead[word] |= l->joins[rank].dead[word];
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
        count.live += came || !has(l->dead, rank);
        if (!came && !has(l->dead, rank) && count.missing < 0)
            count.missing = rank;
    }
    return count;
}

static void wait_at_listener(struct linked *l)
{
    struct pollfd polls[TCP_ACCEPTOR_POLLS];
    int n = tcp_acceptor_get_polls(l->acceptor, polls);

    (void)poll(polls, (nfds_t)n, POLL_MS);
    tcp_acceptor_step(l->acceptor, check_join, take_join, l);
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
        if (l->fds[rank] >= 0 && has_come(l, rank) && !send_whole(l->fds[rank], &decision, sizeof(decision)))
            drop(l, rank);
}

/* EP_OK: enough have come. *ret_failed_rank: of a failure. */
static ep_status await_joins(struct linked *l, int *ret_failed_rank)
{
    bool extended = false;

    for (;;) {
        struct count count;

        EP_TRY(check(l, ret_failed_rank));
        look_for_dead(l);
        wait_at_listener(l);
        read_joins(l);
        beat(l);
        count = count_ranks(l);
        if (count.missing < 0)
            return EP_OK;
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

/* After the status of this rank's wait: what goes to all that have come, a failure also to those that are coming. */
static void decide(struct linked *l, ep_status status, int failed_rank)
{
    l->decision = (struct decision){.status = (int32_t)status, .failed_rank = failed_rank};
    if (status != EP_OK)
        snprintf(l->decision.text, sizeof(l->decision.text), "%.*s", EP_GROUP_REASON_BYTES - 1, ep_last_error());
    for (int rank = 0; rank < l->nranks; rank++)
        if (has_come(l, rank))
            add(l->decision.survivors, rank);
    for (int rank = 0; rank < l->nranks; rank++)
        if (l->fds[rank] >= 0 &&
            ((status == EP_OK && !has_come(l, rank)) || !send_whole(l->fds[rank], &l->decision, sizeof(l->decision))))
            drop(l, rank); /* found missing in the first all-gather, which fails for all then */
}

static ep_status lead(struct linked *l)
{
    int failed_rank = l->me, fd = fcntl(l->rendezvous->listener, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    ep_status status;

    if (fd < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "ep_comm_shrink: a descriptor for the listener");
    tcp_acceptor_open(l->acceptor, fd, &l->rendezvous->key);
    status = await_joins(l, &failed_rank);
    tcp_acceptor_close(l->acceptor);
    decide(l, status, failed_rank);
    return status;
}

/* --- the others --- */

enum outcome { JOINED, ENDED, SILENT, DEAD };

static bool send_join(const struct linked *l, int fd)
{
    struct join join;

    memcpy(join.dead, l->dead, sizeof(join.dead));
    return send_whole(fd, &join, sizeof(join));
}

/*
 * This rank ends its call, with ep_last_error(), amid a handshake. Of its own abort the leader is told, as far as it
 * answers: by heartbeats alone nobody could tell it from an abort that was the reason to shrink.
 */
static void end_handshake(const struct linked *l, struct tcp_handshake *hs, enum tcp_handshake_result result,
                          ep_status status, int failed_rank)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    bool aborted = status == EP_E_ABORTED && failed_rank == l->me;
    char text[EP_ERROR_TEXT_BYTES];

    snprintf(text, sizeof(text), "%s", ep_last_error());
    while (aborted && result == TCP_HANDSHAKE_PENDING && ep_now_ns() < deadline_ns) {
        struct pollfd look = {.fd = hs->fd, .events = tcp_handshake_events(hs)};

        (void)poll(&look, 1, POLL_MS);
        result = tcp_handshake_step(hs);
    }
    if (aborted && result == TCP_HANDSHAKE_DONE && send_join(l, hs->fd))
        tcp_star_send_failure(hs->fd, status, text);
    tcp_handshake_drop(hs);
    ep_fail(status, "%s", text); /* the handshake may have had a failure of its own */
}

/* To the end of the handshake. */
static enum outcome connect_to(struct linked *l, int leader, const struct tcp_address *to, ep_status *ret_status,
                               int *ret_fd)
{
    const struct tcp_hello hello = {.kind = TCP_SHRINK, .rank = l->me, .to = leader, .session = l->rendezvous->session};
    const struct tcp_address *from = l->rendezvous->from.family ? &l->rendezvous->from : NULL;
    struct tcp_handshake hs;
    enum tcp_handshake_result result = TCP_HANDSHAKE_PENDING;
    uint64_t begin_ns = ep_now_ns();
    int fd, failed_rank;

    if (tcp_connect(to, from, &fd) != EP_OK)
        return SILENT;
    tcp_set_options(fd, l->timeout_ms);
    if (tcp_handshake_connect(&hs, fd, &l->rendezvous->key, &hello, to, l->deadline_ns) != EP_OK)
        result = TCP_HANDSHAKE_FAILED;
    while (result == TCP_HANDSHAKE_PENDING) {
        struct pollfd look = {.fd = hs.fd, .events = tcp_handshake_events(&hs)};

        (void)poll(&look, 1, POLL_MS);
        result = tcp_handshake_step(&hs);
        *ret_status = check(l, &failed_rank);
        if (*ret_status != EP_OK) {
            end_handshake(l, &hs, result, *ret_status, failed_rank);
            return ENDED;
        }
        look_for_dead(l);
        if (result == TCP_HANDSHAKE_PENDING && has(l->dead, leader))
            result = TCP_HANDSHAKE_FAILED;
    }
    if (result == TCP_HANDSHAKE_DONE) {
        *ret_fd = hs.fd;
        return JOINED;
    }
    tcp_handshake_drop(&hs);
    l->group->shrink_deadlines += begin_ns < l->deadline_ns && ep_now_ns() >= l->deadline_ns;
    return hs.status == EP_E_SYSTEM && hs.error == ECONNREFUSED ? DEAD : SILENT;
}

/* What the leader decides. SILENT: it did not, and is passed over. */
static enum outcome await_decision(struct linked *l, int leader, int fd, ep_status *ret_status)
{
    uint64_t limit_ns = ep_now_ns() + LEAF_DEADLINES * (uint64_t)l->timeout_ms * 1000000u;
    uint64_t silent_ns = ep_deadline_ns(l->timeout_ms), now;
    size_t used = 0;
    int failed_rank;

    if (!send_join(l, fd))
        return SILENT;
    for (;;) {
        struct pollfd look = {.fd = fd, .events = POLLIN};
        int got;

        (void)poll(&look, 1, POLL_MS);
        got = receive(fd, &l->decision, sizeof(l->decision), &used);
        if (got > 0 && !l->decision.waits)
            return JOINED;
        if (got > 0) {
            used = 0;
            silent_ns = ep_deadline_ns(l->timeout_ms);
        }
        *ret_status = check(l, &failed_rank);
        if (*ret_status != EP_OK) {
            /* As in the star that the leader may be making of this connection by now. */
            if (*ret_status == EP_E_ABORTED && failed_rank == l->me)
                tcp_star_send_failure(fd, *ret_status, ep_last_error());
            return ENDED;
        }
        look_for_dead(l);
        now = ep_now_ns();
        l->group->shrink_deadlines += now >= limit_ns ? LEAF_DEADLINES : now >= silent_ns;
        if (got < 0 || has(l->dead, leader) || now >= silent_ns || now >= limit_ns)
            return SILENT;
    }
}

/* EP_OK with *ret_fd: this rank has a decision of its leader. *ret_fd -1: that one is passed over. */
static ep_status follow(struct linked *l, int leader, int *ret_fd)
{
    int n = l->rendezvous->ranks[leader].n, refused = 0;
    ep_status status = EP_OK;

    *ret_fd = -1;
    for (int i = 0; i < n; i++) {
        enum outcome outcome = connect_to(l, leader, &l->rendezvous->ranks[leader].addresses[i], &status, ret_fd);

        if (outcome == JOINED)
            outcome = await_decision(l, leader, *ret_fd, &status);
        else
            refused += outcome == DEAD;
        if (outcome == JOINED)
            return EP_OK;
        if (*ret_fd >= 0)
            close(*ret_fd);
        *ret_fd = -1;
        if (outcome == ENDED)
            return status;
    }
    /* Nothing listens at any of its addresses. */
    if (n && refused == n && !is_silent(l->group, ep_group_rail(l->group, leader / l->group->comm->ranks_per_node)))
        add(l->dead, leader);
    add(l->passed_over, leader);
    return EP_OK;
}

/* --- both --- */

static ep_status check_decision(const struct linked *l, int leader)
{
    const struct decision *decision = &l->decision;
    char text[EP_GROUP_REASON_BYTES];

    if (decision->status != EP_OK && ep_status_is_failure(decision->status)) {
        ep_group_read_reason(text, decision->text);
        return ep_fail((ep_status)decision->status, "%s", text);
    }
    if (decision->status != EP_OK || !has(decision->survivors, l->me) || !has(decision->survivors, leader))
        return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: what rank %d has decided is damaged", leader);
    for (int rank = l->nranks; rank < EP_MAX_RANKS; rank++)
        if (has(decision->survivors, rank))
            return ep_fail(EP_E_MISMATCH, "ep_comm_shrink: what rank %d has decided is damaged", leader);
    return EP_OK;
}

/* Who leads, and with it the connections of this rank: to the leader, or of all others. */
static ep_status find_group(struct linked *l, int *ret_leader, int *ret_fd)
{
    for (;;) {
        int leader = 0;

        look_for_dead(l);
        while (leader < l->me && (has(l->dead, leader) || has(l->passed_over, leader)))
            leader++;
        *ret_leader = leader;
        *ret_fd = -1;
        if (leader == l->me)
            return lead(l);
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
        EP_TRY(follow(l, leader, ret_fd));
        if (*ret_fd >= 0)
            return check_decision(l, leader);
        l->deadline_ns = ep_deadline_ns(l->timeout_ms);
    }
}

/* Makes the star of the survivors' connections, which it takes: the leader is its rank 0, as it is the lowest. */
static ep_status make_star(struct linked *l, struct shrink_group *g, int leader, int fd, struct tcp_star **ret_star)
{
    int *fds = malloc((size_t)l->nranks * sizeof(*fds)), mine = 0;
    ep_status status = EP_E_MEMORY;

    g->ranks = malloc((size_t)l->nranks * sizeof(*g->ranks));
    if (g->ranks && fds) {
        for (int rank = 0; rank < l->nranks; rank++)
            if (has(l->decision.survivors, rank))
                g->ranks[g->n++] = rank;
        for (int i = 0; i < g->n; i++) {
            mine = g->ranks[i] == l->me ? i : mine;
            fds[i] = leader == l->me ? l->fds[g->ranks[i]] : -1;
        }
        if (leader != l->me)
            fds[0] = fd;
        status = g->ranks[0] == leader ? tcp_star_adopt("ep_comm_shrink", mine, g->n, fds, ret_star)
                                       : ep_fail(EP_E_MISMATCH, "ep_comm_shrink: the leader is not the lowest rank");
    } else {
        status = ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", l->nranks);
    }
    for (int i = 0; status == EP_OK && i < g->n; i++)
        l->fds[g->ranks[i]] = -1; /* the star's from now on */
    free(fds);
    return status;
}

static ep_status gather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    return tcp_star_allgather(context, mine, bytes, timeout_ms, ret_all);
}

static ep_status poll_call(void *context, int *ret_failed_rank)
{
    ep_status status = check(context, ret_failed_rank);

    *ret_failed_rank = -1; /* a number of the old group, which the text names */
    return status;
}

/* The new group exists for all or for none: all know that all have it. */
static ep_status confirm(struct tcp_star *star, const struct linked *l, ep_comm *next, int n, ep_status opened)
{
    struct ep_group_verdict mine, *all = calloc((size_t)n, sizeof(*all));
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %d ranks", n);
    ep_group_verdict_make(&mine, "ep_comm_shrink", opened, l->me);
    status = tcp_star_allgather(star, &mine, sizeof(mine), l->timeout_ms, all);
    if (opened != EP_OK)
        status = ep_fail(opened, "ep_comm_shrink: %s", mine.reason);
    for (int i = 0; status == EP_OK && i < n; i++) {
        char reason[EP_GROUP_REASON_BYTES];

        if (all[i].status == EP_OK)
            continue;
        ep_group_read_reason(reason, all[i].reason);
        status = ep_fail(ep_status_is_failure(all[i].status) ? (ep_status)all[i].status : EP_E_MISMATCH,
                         "ep_comm_shrink: rank %d failed: %s", all[i].rank, reason);
    }
    free(all);
    if (status == EP_OK || opened != EP_OK)
        return status;
    snprintf(text, sizeof(text), "%s", ep_last_error());
    next->ops->comm_close(next);
    return ep_fail(status, "%s", text);
}

/* For those that are left out. */
static void publish(struct linked *l)
{
    struct ep_group_shrink *state = &l->group->control->shrink;

    for (int rank = 0; rank < l->nranks; rank++)
        if (!has(l->decision.survivors, rank))
            atomic_fetch_or(&state->passed_out[rank / 64], UINT64_C(1) << (rank % 64));
    atomic_store(&state->passed, 1);
    ep_group_ring_all(l->group);
    ep_group_link_wake(l->group);
}

static ep_status form_group(struct linked *l, ep_comm *next)
{
    struct ep_net_tcp_context context = l->rendezvous->context;
    struct ep_net_provider provider = *ep_net_find(l->group->comm->config.network);
    struct shrink_group g = {.allgather = gather, .network = &provider, .failed_rank = -1};
    struct tcp_star *star = NULL;
    int leader, fd = -1;
    ep_status status = find_group(l, &leader, &fd);

    provider.context = &context;
    if (status == EP_OK)
        status = make_star(l, &g, leader, fd, &star);
    if (!star && fd >= 0)
        close(fd);
    if (status == EP_OK) {
        g.context = star;
        tcp_star_set_poll(star, poll_call, l);
        status = shrink_open_next(&g, l->group->comm, next);
        status = confirm(star, l, next, g.n, status);
    }
    if (status == EP_OK)
        publish(l);
    tcp_star_free(star);
    free(g.ranks);
    return status;
}

static ep_status prepare(struct linked *l)
{
    size_t n = (size_t)l->nranks;
    l->acceptor = calloc(1, sizeof(*l->acceptor));
    l->fds = malloc(n * sizeof(*l->fds));
    l->used = calloc(n, sizeof(*l->used));
    l->joins = calloc(n, sizeof(*l->joins));
    l->aborted_by = -1;
    for (size_t i = 0; l->fds && i < n; i++)
        l->fds[i] = -1;
    if (!l->acceptor || !l->fds || !l->used || !l->joins)
        return ep_fail(EP_E_MEMORY, "ep_comm_shrink: no memory for %zu ranks", n);
    l->acceptor->fd = -1;
    return shrink_aborts_init(&l->aborts, l->group, l->timeout_ms);
}

ep_status shrink_linked(struct ep_group *group, ep_comm *next)
{
    struct ep_net *net = ep_streams_get_net(group->streams);
    struct linked l = {.group = group,
                       .rendezvous = ep_net_tcp_get_rendezvous(ep_net_get_tcp(net)),
                       .nranks = group->comm->nranks,
                       .me = group->comm->rank,
                       .timeout_ms = group->comm->config.timeout_ms,
                       .deadline_ns = ep_deadline_ns(group->comm->config.timeout_ms)};
    ep_status status = prepare(&l);

    if (status == EP_OK)
        status = form_group(&l, next);
    for (int rank = 0; l.fds && rank < l.nranks; rank++)
        if (l.fds[rank] >= 0)
            close(l.fds[rank]);
    free(l.acceptor);
    free(l.fds);
    free(l.used);
    free(l.joins);
    shrink_aborts_done(&l.aborts);
    return status;
}
