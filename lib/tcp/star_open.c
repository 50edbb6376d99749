/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a star: rank 0 listens until all ranks have connected, the others try to reach it. */
#include "tcp/star_internal.h"

#include "base/clock.h"
#include "base/fd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define RETRY_FIRST_NS 20000000u /* between two attempts to connect; doubles */
#define RETRY_MOST_NS 500000000u
#define TRY_FIRST_NS 1000000000u /* for one address to answer; doubles */
#define ARRIVAL_MS 3000          /* how long ranks that connect later are notified of a mismatch */
#define TRY_MOST_NS 8000000000u
#define RESOLVE_MS 1000         /* for the name server, behind the deadline */
#define WRONG_PROTOCOL_TRIES 10 /* about three seconds */
/* Descriptors of rank 0 in addition to one per rank: the listener, and a connection that is about to be dropped. */
#define ROOT_DESCRIPTORS 2

/* Has the remote end closed? Also if earlier data is unread: a rank sends its first block at once. */
static bool is_closed(int fd)
{
    struct pollfd ready = {.fd = fd, .events = POLLRDHUP};

    return poll(&ready, 1, 0) == 1;
}

static ep_status check_rank(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    struct tcp_star *star = context;
    const struct tcp_hello *hello = &hs->hello;
    char address[TCP_ADDRESS_TEXT], first[TCP_ADDRESS_TEXT];
    int rank = hello->rank;
    bool valid = rank > 0 && rank < star->nranks;

    if (hello->kind != TCP_BOOTSTRAP || hello->detail < 1 || hello->detail > EP_MAX_RANKS) {
        snprintf(ret_reason, bytes, "this job has %d ranks, and that is rank %d of %u", star->nranks, rank,
                 hello->detail);
        return EP_E_MISMATCH;
    }
    tcp_address_print(&hs->from, address);
    if (hello->detail != (uint32_t)star->nranks) {
        snprintf(ret_reason, bytes, "ranks disagree: nranks is %d on rank 0 and %u on rank %d (%s)", star->nranks,
                 hello->detail, rank, address);
    } else if (rank == 0) { /* it connects only to report it: fail_listen() */
        snprintf(ret_reason, bytes, "two processes are rank 0: this one and one at %s", address);
    } else if (!valid) {
        snprintf(ret_reason, bytes, "the process at %s is rank %d of %d, not in 0..%d", address, rank, star->nranks,
                 star->nranks - 1);
    } else if (star->conns[rank].fd >= 0 && !is_closed(star->conns[rank].fd)) {
        tcp_address_print(&star->conns[rank].remote, first);
        snprintf(ret_reason, bytes, "two processes are rank %d: %s and %s", rank, first, address);
    } else {
        return EP_OK;
    }
    /* The process has the secret, so waiting does not resolve it. */
    if (!*star->mismatch) {
        snprintf(star->mismatch, sizeof(star->mismatch), "%.*s", (int)sizeof(star->mismatch) - 1, ret_reason);
        star->mismatch_rank = valid ? rank : -1;
        star->peer_nranks = (int)hello->detail;
    }
    return EP_E_MISMATCH;
}

static void accept_rank(void *context, const struct tcp_handshake *hs, int fd)
{
    struct tcp_star *star = context;
    struct conn *conn = &star->conns[hs->hello.rank];

    tcp_star_close_conn(conn);
    memset(conn, 0, sizeof(*conn));
    conn->fd = fd;
    conn->remote = hs->from;
    conn->arrived = true;
}

/* The reason that a connected rank sent before it closed. */
static void record_failure(struct tcp_star *star, int rank)
{
    struct conn *conn = &star->conns[rank];
    char address[TCP_ADDRESS_TEXT];
    struct failure failure;

    if (!tcp_star_read_last_failure(star, conn, &failure))
        return;
    tcp_address_print(&conn->remote, address);
    snprintf(star->last_failure, sizeof(star->last_failure), "rank %d (%s) gave up: %.160s", rank, address,
             failure.text);
}

/* Nobody has arrived, perhaps because the others look for rank 0 on another host. */
static void note_other_host(struct tcp_star *star, const struct missing *missing, const struct tcp_star_args *args)
{
    struct tcp_address found[TCP_ADDRESSES];
    int n;

    if (*star->last_failure || missing->n < star->nranks - 1 ||
        tcp_resolve(args->host, args->port, ep_deadline_ns(RESOLVE_MS), found, &n) != EP_OK)
        return;
    for (int i = 0; i < n; i++)
        if (!tcp_is_of_other_host(&found[i]))
            return;
    snprintf(
        star->last_failure, sizeof(star->last_failure),
        "\"%.100s\", where the others look for rank 0, is not an address of this host: check %s, or start rank 0 there",
        args->host, args->host_from);
}

static ep_status await_ranks(struct tcp_star *star, const struct tcp_star_args *args, uint64_t deadline_ns)
{
    int timeout_ms = args->timeout_ms;
    struct missing missing;

    star->published_ns = ep_now_ns();
    while (!tcp_star_all_arrived(star)) {
        int n = tcp_acceptor_get_polls(&star->acceptor, star->polls);

        if (ep_now_ns() >= deadline_ns) {
            tcp_star_list_missing(star, &missing);
            note_other_host(star, &missing, args);
            return tcp_star_fail_late(star, &missing, timeout_ms);
        }
        (void)poll(star->polls, (nfds_t)n, tcp_star_poll_ms(deadline_ns));
        tcp_acceptor_step(&star->acceptor, check_rank, accept_rank, star);
        if (*star->mismatch) {
            tcp_star_list_missing(star, &missing);
            star->n_notified = star->nranks - missing.n;
            ep_fail(EP_E_MISMATCH, "%s: %s", star->name, star->mismatch);
            return tcp_star_fail(star, EP_E_MISMATCH, star->mismatch_rank);
        }
        tcp_star_publish_missing(star);
        /* The deadlines of the others follow this one closely: a rank that closes then was not missing. */
        for (int rank = 1; rank < star->nranks && ep_now_ns() < deadline_ns; rank++) {
            struct conn *conn = &star->conns[rank];

            /* A rank that has connected and died is missing again: it may be restarted. */
            if (conn->fd >= 0 && (tcp_star_push(conn) != EP_OK || is_closed(conn->fd))) {
                record_failure(star, rank);
                tcp_star_close_conn(conn);
            }
        }
    }
    return EP_OK;
}

static ep_status refuse_rank(void *context, const struct tcp_handshake *hs, char *ret_reason, size_t bytes)
{
    struct tcp_star *star = context;

    (void)hs;
    star->n_notified++;
    snprintf(ret_reason, bytes, "%.*s", (int)bytes - 1, star->failure.text);
    return (ep_status)star->failure.status;
}

static void close_accepted(void *context, const struct tcp_handshake *hs, int fd)
{
    (void)context;
    (void)hs;
    close(fd);
}

/*
 * This rank has given up during the handshakes of others: every rank that authenticates itself gets the reason.
 * Otherwise it would see only a closed connection, and retry until its own deadline.
 */
static void refuse_all(struct tcp_star *star, uint64_t deadline_ns)
{
    uint64_t drain_ns = ep_deadline_ns(DRAIN_MS), arrival_ns = ep_deadline_ns(ARRIVAL_MS);
    /* Which of the two numbers is right is not known. */
    int expected = star->peer_nranks > star->nranks ? star->peer_nranks : star->nranks;

    /* If this rank fails without waiting, ranks that start at about the same time are notified, too. */
    arrival_ns = !*star->mismatch && !star->lacks_fds ? 0 : arrival_ns < deadline_ns ? arrival_ns : deadline_ns;
    for (;;) {
        uint64_t now = ep_now_ns();
        bool arriving = now < arrival_ns && star->n_notified < expected - 1;

        tcp_acceptor_step(&star->acceptor, refuse_rank, close_accepted, star);
        if (!arriving && (star->acceptor.n == 0 || now >= drain_ns))
            return;
        (void)poll(star->polls, (nfds_t)tcp_acceptor_get_polls(&star->acceptor, star->polls),
                   arriving ? POLL_MOST_MS : 1);
    }
}

/* The local address of a connection to `to`; family 0: any. */
static ep_status find_local(const struct tcp_star_args *args, const struct tcp_address *to,
                            struct tcp_address *ret_from)
{
    struct tcp_address route, found[TCP_ADDRESSES];
    int n;

    *ret_from = (struct tcp_address){0};
    if (!args->interface)
        return EP_OK;
    EP_TRY(tcp_find_interfaces(args->interface, tcp_find_route(to, &route) ? &route : NULL, found, &n));
    *ret_from = found[0];
    return EP_OK;
}

/* One attempt at one address, with `try_ns` for the first answer and the time until the deadline for the rest. */
static ep_status try_address(struct tcp_star *star, const struct tcp_star_args *args, const struct tcp_address *to,
                             uint64_t try_ns, uint64_t deadline_ns, struct tcp_handshake *hs)
{
    const struct tcp_hello hello = {
        .kind = TCP_BOOTSTRAP, .rank = args->rank, .detail = (uint32_t)args->nranks, .session = 0};
    enum tcp_handshake_result result = TCP_HANDSHAKE_PENDING;
    struct tcp_address from;
    int fd;

    *hs = (struct tcp_handshake){.fd = -1};
    EP_TRY(find_local(args, to, &from));
    EP_TRY(tcp_connect(to, &from, &fd));
    tcp_set_options(fd, args->timeout_ms);
    tcp_handshake_connect(hs, fd, &args->key, &hello, to, ep_now_ns() + try_ns);
    while (result == TCP_HANDSHAKE_PENDING) {
        struct pollfd ready = {.fd = hs->fd, .events = tcp_handshake_events(hs)};

        (void)poll(&ready, 1, 20);
        result = tcp_handshake_step(hs);
        if (result == TCP_HANDSHAKE_PENDING && tcp_handshake_is_answered(hs))
            hs->deadline_ns = deadline_ns;
    }
    if (result != TCP_HANDSHAKE_DONE)
        return ep_fail(hs->status, "%s", hs->why);
    star->conns[0].fd = hs->fd;
    star->conns[0].remote = *to;
    return EP_OK;
}

/*
 * Rank 0 may not be started yet; its name may not resolve yet, or resolve to a host that no longer exists or to another
 * program that sends nothing. So everything is retried until the deadline, beginning with the name. `hs` is that of the
 * last attempt.
 */
static ep_status open_leaf(struct tcp_star *star, const struct tcp_star_args *args, uint64_t deadline_ns,
                           struct tcp_handshake *hs)
{
    uint64_t wait_ns = RETRY_FIRST_NS, try_ns = TRY_FIRST_NS;
    char why[TCP_WHY_BYTES] = "", at[TCP_ADDRESS_TEXT] = "";
    int wrong_protocol = 0; /* consecutive attempts */

    *hs = (struct tcp_handshake){.fd = -1};
    while (ep_now_ns() < deadline_ns) {
        struct tcp_address addresses[TCP_ADDRESSES];
        uint64_t began_ns = ep_now_ns(), now;
        int n = 0, n_wrong_protocol = 0;
        struct timespec pause;
        ep_status status;

        status = tcp_resolve(args->host, args->port, deadline_ns, addresses, &n);
        /* A last query that the deadline has cut off does not replace a known reason. */
        if (status != EP_OK && (status != EP_E_TIMEOUT || !*why)) {
            snprintf(why, sizeof(why), "%.*s", TCP_WHY_BYTES - 1, ep_last_error());
            at[0] = '\0'; /* an earlier address is not the cause of this failure */
        }
        for (int i = 0; i < n; i++) {
            uint64_t share;

            now = ep_now_ns();
            share = deadline_ns > now ? (deadline_ns - now) / (uint64_t)(n - i) : 0;
            if (try_address(star, args, &addresses[i], share < try_ns ? share : try_ns, now + share, hs) == EP_OK)
                return EP_OK;
            snprintf(why, sizeof(why), "%.*s", TCP_WHY_BYTES - 1, ep_last_error());
            tcp_address_print(&addresses[i], at);
            if (hs->refused)
                return ep_fail(hs->status, "%s: rank 0 at %s rejects rank %d: %s", args->name, at, args->rank, hs->why);
            n_wrong_protocol += hs->wrong_protocol;
        }
        /* A proxy may answer like this until rank 0 is started; another program always does. */
        wrong_protocol = n && n_wrong_protocol == n ? wrong_protocol + 1 : 0;
        if (wrong_protocol == WRONG_PROTOCOL_TRIES)
            return ep_fail(
                EP_E_MISMATCH,
                "%s: rank %d tried to reach rank 0 at %s %d times: %s; another program uses that port: give the "
                "job a free one (MASTER_PORT, or in %s)",
                args->name, args->rank, at, wrong_protocol, why, args->host_from);
        now = ep_now_ns();
        pause = ep_timespec(now >= deadline_ns ? 0 : wait_ns < deadline_ns - now ? wait_ns : deadline_ns - now);
        nanosleep(&pause, NULL);
        wait_ns = wait_ns * 2 < RETRY_MOST_NS ? wait_ns * 2 : RETRY_MOST_NS;
        if (*at && ep_now_ns() - began_ns >= try_ns)
            try_ns = try_ns * 2 < TRY_MOST_NS ? try_ns * 2 : TRY_MOST_NS;
    }
    ep_fail(EP_E_TIMEOUT, "%s: rank %d could not reach rank 0 at %s port %u within %d ms: %s%s%s%s", args->name,
            args->rank, args->host, args->port, args->timeout_ms, at, *at ? ": " : "", why,
            *at && hs->error == ECONNREFUSED
                ? "; rank 0 was not started, has ended, or was started as a job of one rank (WORLD_SIZE)"
                : "");
    if (!*at && *why)
        ep_fail(EP_E_TIMEOUT, "%s; %s must be a name of the host of rank 0 that this host can resolve, or its address",
                ep_last_error(), args->host_from);
    return EP_E_TIMEOUT;
}

/* The listener may be another rank 0 of this job: report this one to it, which fails the job for all ranks. */
static ep_status fail_listen(const struct tcp_star_args *args, ep_status status)
{
    struct tcp_star_args claim = *args;
    char text[EP_ERROR_TEXT_BYTES];
    struct tcp_handshake hs = {.fd = -1};
    struct tcp_star *star;

    snprintf(text, sizeof(text), "%s: %s", args->name, ep_last_error());
    claim.timeout_ms = args->timeout_ms < DRAIN_MS ? args->timeout_ms : DRAIN_MS;
    if (tcp_star_new(args->name, 1, args->nranks, &star) == EP_OK) {
        /* EP_OK: a library without support for such reports. */
        if (open_leaf(star, &claim, ep_deadline_ns(claim.timeout_ms), &hs) == EP_OK)
            tcp_star_close_conn(&star->conns[0]);
        tcp_star_free(star);
    }
    if (hs.refused)
        return ep_fail(status, "%s; the listener there replies: %s", text, hs.why);
    return ep_fail(status, "%s", text);
}

/* All ranks must connect before the job starts, so waiting for ranks without a descriptor would be in vain. */
static ep_status check_descriptors(struct tcp_star *star)
{
    char what[64];
    ep_status status;

    snprintf(what, sizeof(what), "rank 0 of %d", star->nranks);
    status = ep_fd_reserve(what, star->nranks - 1 + ROOT_DESCRIPTORS);
    if (status == EP_OK)
        return EP_OK;
    star->lacks_fds = true;
    ep_fail_prefix(status, "%s: ", star->name);
    return tcp_star_fail(star, status, 0);
}

static ep_status open_root(struct tcp_star *star, const struct tcp_star_args *args, uint64_t deadline_ns)
{
    ep_status status, listens;
    uint16_t port;
    int fd;

    if (args->nranks == 1)
        return EP_OK;
    status = check_descriptors(star);
    listens = tcp_listen(NULL, args->port, &fd, &port);
    if (listens != EP_OK)
        return star->lacks_fds ? tcp_star_fail_again(star) : fail_listen(args, listens);
    tcp_acceptor_open(&star->acceptor, fd, &args->key);
    if (status == EP_OK)
        status = await_ranks(star, args, deadline_ns);
    if (status != EP_OK) {
        refuse_all(star, deadline_ns);
        status = tcp_star_fail_again(star);
    }
    /* No other connection is expected: later ones are refused by the kernel. */
    tcp_acceptor_close(&star->acceptor);
    return status;
}

ep_status tcp_star_open(const struct tcp_star_args *args, struct tcp_star **ret_star)
{
    uint64_t deadline_ns = ep_deadline_ns(args->timeout_ms);
    struct tcp_handshake hs;
    struct tcp_star *star;
    ep_status status;

    EP_TRY(tcp_star_new(args->name, args->rank, args->nranks, &star));
    status = args->rank == 0 ? open_root(star, args, deadline_ns) : open_leaf(star, args, deadline_ns, &hs);
    if (status != EP_OK) {
        tcp_star_free(star);
        return status;
    }
    *ret_star = star;
    return EP_OK;
}
