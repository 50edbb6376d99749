/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/star_internal.h"

#include "base/array.h"
#include "base/clock.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/*
 * A rank 0 that is silent for longer does not run: ten intervals between its lists of missing ranks. With a deadline
 * below twice that, half of the deadline, but more than an interval; with deadlines of 400 ms and less it is not found.
 */
#define SILENCE_NS UINT64_C(2000000000)
#define SILENCE_LEAST_NS UINT64_C(400000000)

/* --- receiving --- */

/* Sets conn->dest for the payload of the frame whose head was read; fails if the frame is invalid now. */
static ep_status check_frame(struct tcp_star *star, struct conn *conn, size_t bytes, unsigned char *ret_all)
{
    const struct frame *frame = &conn->in.frame;
    bool root = star->rank == 0;
    int rank = tcp_star_rank_of(star, conn);

    conn->dest = (unsigned char *)&conn->in.payload;
    if (frame->magic != STAR_MAGIC)
        return tcp_star_fail_damaged(star, conn, "a frame with a wrong magic number");
    if ((frame->kind == FRAME_FAILURE && frame->bytes == sizeof(struct failure)) ||
        (frame->kind == FRAME_BYE && frame->bytes == 0) ||
        (frame->kind == FRAME_MISSING && !root && frame->bytes == sizeof(struct missing)))
        return EP_OK;
    if (frame->kind != (root ? FRAME_BLOCK : FRAME_RESULT) || conn->arrived)
        return tcp_star_fail_damaged(star, conn, "a frame of unknown kind or size");
    if (frame->number != star->number)
        return tcp_star_fail_damaged(star, conn, "a block of another all-gather");
    if (!root && frame->bytes != bytes * (size_t)star->nranks)
        return tcp_star_fail_damaged(star, conn, "a result of another size");
    if (root && frame->bytes != bytes) {
        ep_fail(EP_E_MISMATCH, "%s: ranks disagree: rank 0 gathers %zu bytes and rank %d gathers %llu", star->name,
                bytes, rank, (unsigned long long)frame->bytes);
        return tcp_star_fail(star, EP_E_MISMATCH, rank);
    }
    conn->dest = root ? ret_all + (size_t)rank * bytes : ret_all;
    return EP_OK;
}

static ep_status handle_frame(struct tcp_star *star, struct conn *conn)
{
    char peer[CONN_TEXT];

    conn->frame_used = conn->used = 0;
    switch (conn->in.frame.kind) {
    case FRAME_FAILURE:
        return tcp_star_handle_failure(star, conn);
    case FRAME_BYE:
        return tcp_star_fail(star,
                             ep_fail(EP_E_PEER_LEFT, "%s: %s has freed its bootstrap before it arrived", star->name,
                                     tcp_star_print_conn(star, conn, peer)),
                             tcp_star_rank_of(star, conn));
    case FRAME_MISSING:
        tcp_make_printable(conn->in.payload.missing.list, LIST_BYTES);
        star->missing = conn->in.payload.missing;
        star->received_ns = ep_now_ns();
        if (star->missing.first < 0 || star->missing.first >= star->nranks)
            star->missing.first = 0;
        return EP_OK;
    default:
        conn->arrived = true;
        return EP_OK;
    }
}

/* Reads the available data of `conn`. */
static ep_status pull(struct tcp_star *star, struct conn *conn, size_t bytes, unsigned char *ret_all)
{
    while (conn->fd >= 0) {
        bool head = conn->frame_used < sizeof(conn->in.frame);
        int got = head ? tcp_receive(conn->fd, &conn->in.frame, sizeof(conn->in.frame), &conn->frame_used)
                       : tcp_receive(conn->fd, conn->dest, (size_t)conn->in.frame.bytes, &conn->used);

        if (got < 0)
            return tcp_star_fail_lost(star, conn, errno);
        if (got == 0)
            return EP_OK;
        if (head)
            EP_TRY(check_frame(star, conn, bytes, ret_all));
        if (conn->used == conn->in.frame.bytes) {
            EP_TRY(handle_frame(star, conn));
            /* The peer may have begun the next all-gather: its frames are for the next call. */
            if (conn->arrived)
                return EP_OK;
        }
    }
    return EP_OK;
}

/* One pass over all connections. */
static ep_status step(struct tcp_star *star, size_t bytes, unsigned char *ret_all, uint64_t deadline_ns)
{
    int n = tcp_star_n_conns(star), ready, lost;

    for (int i = 0; i < n; i++) {
        struct conn *conn = &star->conns[i];
        /* A rank whose block has arrived may be in the next all-gather: do not read ahead, but detect its death. */
        short events = (short)((conn->arrived ? POLLRDHUP : POLLIN) | (tcp_star_is_idle(conn) ? 0 : POLLOUT));
        bool done = star->delivering && tcp_star_is_idle(conn);

        star->polls[i] = (struct pollfd){.fd = done ? -1 : conn->fd, .events = events};
    }
    ready = poll(star->polls, (nfds_t)n, tcp_star_poll_ms(deadline_ns));
    if (ready < 0 && errno != EINTR) {
        struct timespec backoff = {.tv_nsec = 1000000};

        nanosleep(&backoff, NULL); /* more descriptors than RLIMIT_NOFILE allows now: try all of them */
    }
    for (int i = 0; i < n; i++) {
        struct conn *conn = &star->conns[i];
        short events = ready < 0 ? POLLIN | POLLOUT : star->polls[i].revents;

        /* A rank that has its result may leave while others still receive theirs. */
        if (conn->fd < 0 || !events || (star->delivering && tcp_star_is_idle(conn)))
            continue;
        /* If sending fails, the other side may have sent its reason before it closed. */
        lost = !tcp_star_is_idle(conn) && tcp_star_push(conn) != EP_OK ? errno : 0;
        if (lost)
            EP_TRY(pull(star, conn, bytes, ret_all));
        if (lost)
            return tcp_star_fail_lost(star, conn, lost);
        if (!conn->arrived || (events & (POLLRDHUP | POLLHUP | POLLERR)))
            EP_TRY(pull(star, conn, bytes, ret_all));
    }
    return EP_OK;
}

/* --- the all-gather --- */

static bool all_idle(const struct tcp_star *star)
{
    return !ANY_OF(i, tcp_star_n_conns(star), star->conns[i].fd >= 0 && !tcp_star_is_idle(&star->conns[i]));
}

static ep_status fail_late_root(struct tcp_star *star, int timeout_ms)
{
    struct missing missing;

    tcp_star_list_missing(star, &missing);
    for (int rank = 1; rank < star->nranks && missing.n == 0; rank++)
        if (!tcp_star_is_idle(&star->conns[rank])) {
            ep_fail(EP_E_TIMEOUT, "%s: rank %d did not receive the result within %d ms", star->name, rank, timeout_ms);
            return tcp_star_fail(star, EP_E_TIMEOUT, rank);
        }
    return tcp_star_fail_late(star, &missing, timeout_ms);
}

static uint64_t longest_silence_ns(int timeout_ms)
{
    uint64_t half_ns = (uint64_t)timeout_ms * 500000u;

    return half_ns > SILENCE_NS ? SILENCE_NS : half_ns < SILENCE_LEAST_NS ? SILENCE_LEAST_NS : half_ns;
}

static ep_status fail_late_leaf(struct tcp_star *star, int timeout_ms)
{
    uint64_t silence_ns = ep_now_ns() - star->received_ns;
    char peer[CONN_TEXT];

    tcp_star_print_conn(star, &star->conns[0], peer);
    /* An old list of rank 0 does not say which ranks are missing now. */
    if (star->missing.n > 0 && silence_ns > longest_silence_ns(timeout_ms)) {
        ep_fail(EP_E_TIMEOUT, "%s: %s has sent nothing for %llu of %d ms; before that it waited for rank%s %s",
                star->name, peer, (unsigned long long)(silence_ns / 1000000u), timeout_ms,
                star->missing.n == 1 ? "" : "s", star->missing.list);
        return tcp_star_fail(star, EP_E_TIMEOUT, 0);
    }
    if (star->missing.n > 0)
        return tcp_star_fail_late(star, &star->missing, timeout_ms);
    ep_fail(EP_E_TIMEOUT, "%s: %s did not answer within %d ms", star->name, peer, timeout_ms);
    return tcp_star_fail(star, EP_E_TIMEOUT, 0);
}

/* Until everything queued has been sent. */
static ep_status send_all(struct tcp_star *star, size_t bytes, int timeout_ms, uint64_t deadline_ns,
                          unsigned char *ret_all)
{
    while (!all_idle(star)) {
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        if (!all_idle(star) && ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    return EP_OK;
}

static ep_status gather_root(struct tcp_star *star, size_t bytes, int timeout_ms, uint64_t deadline_ns,
                             unsigned char *ret_all)
{
    star->published_ns = ep_now_ns();
    while (!tcp_star_all_arrived(star)) {
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        tcp_star_publish_missing(star);
        if (!tcp_star_all_arrived(star) && ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    EP_TRY(send_all(star, bytes, timeout_ms, deadline_ns, ret_all)); /* queued lists of missing ranks */
    /* A rank that has given up since sends its failure after its block, which this rank may read long after it came. */
    EP_TRY(step(star, bytes, ret_all, 0));
    star->delivering = true;
    for (int rank = 1; rank < star->nranks; rank++)
        tcp_star_queue_big(star, &star->conns[rank], FRAME_RESULT, ret_all, bytes * (size_t)star->nranks);
    return send_all(star, bytes, timeout_ms, deadline_ns, ret_all);
}

ep_status tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    unsigned char nothing[1], *all = ret_all ? ret_all : nothing;

    if ((!mine || !ret_all) && bytes)
        return ep_fail(EP_E_ARG, "%s: all-gather of %zu bytes from or to NULL", star->name, bytes);
    if (timeout_ms < 0 || bytes > INT32_MAX)
        return ep_fail(EP_E_ARG, "%s: all-gather of %zu bytes with timeout_ms = %d", star->name, bytes, timeout_ms);
    if (star->failure.status != EP_OK)
        return tcp_star_fail_again(star);
    star->number++;
    star->missing.n = 0;
    star->delivering = false;
    for (int i = 0; i < tcp_star_n_conns(star); i++)
        star->conns[i].arrived = false;
    if (star->rank == 0) {
        star->conns[0].arrived = true;
        if (bytes)
            memcpy(all, mine, bytes);
        return gather_root(star, bytes, timeout_ms, deadline_ns, all);
    }
    tcp_star_queue_big(star, &star->conns[0], FRAME_BLOCK, mine, bytes);
    while (!star->conns[0].arrived) {
        EP_TRY(step(star, bytes, all, deadline_ns));
        if (!star->conns[0].arrived && ep_now_ns() >= deadline_ns)
            return fail_late_leaf(star, timeout_ms);
    }
    return EP_OK;
}

/* --- opening and closing --- */

ep_status tcp_star_new(const char *name, int rank, int nranks, struct tcp_star **ret_star)
{
    struct tcp_star *star = calloc(1, sizeof(*star));
    size_t n = rank == 0 ? (size_t)nranks : 1;

    if (star) {
        star->name = name;
        star->rank = rank;
        star->nranks = nranks;
        star->failure.rank = star->acceptor.fd = -1;
        star->conns = calloc(n, sizeof(*star->conns));
        star->polls = calloc(n + TCP_ACCEPTOR_POLLS, sizeof(*star->polls));
    }
    if (!star || !star->conns || !star->polls) {
        if (star) {
            free(star->conns);
            free(star->polls);
        }
        free(star);
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d ranks", name, nranks);
    }
    for (size_t i = 0; i < n; i++)
        star->conns[i].fd = -1;
    *ret_star = star;
    return EP_OK;
}

ep_status tcp_star_check(void *context)
{
    struct tcp_star *star = context;
    int n = tcp_star_n_conns(star);

    if (star->failure.status != EP_OK)
        return tcp_star_fail_again(star);
    for (int i = 0; i < n; i++)
        star->polls[i] = (struct pollfd){.fd = star->conns[i].fd, .events = POLLRDHUP};
    if (poll(star->polls, (nfds_t)n, 0) <= 0)
        return EP_OK;
    for (int i = 0; i < n; i++)
        if (star->polls[i].revents)
            return ep_fail(EP_E_PEER_DEAD, "%s: the connection to rank %d has ended", star->name,
                           tcp_star_rank_of(star, &star->conns[i]));
    return EP_OK;
}

struct tcp_address tcp_star_local_address(const struct tcp_star *star)
{
    struct tcp_address none = {0};

    for (int i = 0; i < tcp_star_n_conns(star); i++)
        if (star->conns[i].fd >= 0)
            return tcp_local_address(star->conns[i].fd);
    return none;
}

uint64_t tcp_star_dropped(const struct tcp_star *star)
{
    return star->acceptor.dropped;
}

void tcp_star_free(struct tcp_star *star)
{
    if (!star)
        return;
    for (int i = 0; i < tcp_star_n_conns(star); i++)
        if (star->conns[i].fd >= 0 && tcp_star_is_idle(&star->conns[i]))
            tcp_star_queue_last(star, &star->conns[i], FRAME_BYE, NULL);
    tcp_star_drain(star);
    for (int i = 0; i < tcp_star_n_conns(star); i++)
        tcp_star_close_conn(&star->conns[i]);
    tcp_acceptor_close(&star->acceptor);
    free(star->conns);
    free(star->polls);
    free(star);
}
