/* SPDX-License-Identifier: Apache-2.0 */
/* The connections of a star: sending frames, failures, and the list of missing ranks. */
#include "tcp/star_internal.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"

#include <linux/sockios.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#define PUBLISH_NS 200000000u /* between two lists of missing ranks */

int tcp_star_n_conns(const struct tcp_star *star)
{
    return star->rank == 0 ? star->nranks : 1;
}

int tcp_star_rank_of(const struct tcp_star *star, const struct conn *conn)
{
    return star->rank == 0 ? (int)(conn - star->conns) : 0;
}

int tcp_star_poll_ms(uint64_t deadline_ns)
{
    uint64_t now = ep_now_ns(), left_ms = deadline_ns > now ? (deadline_ns - now) / 1000000u + 1 : 0;

    return left_ms > POLL_MOST_MS ? POLL_MOST_MS : (int)left_ms;
}

bool tcp_star_all_arrived(const struct tcp_star *star)
{
    for (int i = star->rank == 0 ? 1 : 0; i < tcp_star_n_conns(star); i++)
        if (!star->conns[i].arrived)
            return false;
    return true;
}

/* --- sending --- */

/* The message to send; `bytes`: of its payload, which is in it already unless it is `big`. */
static struct iovec seal(const struct tcp_star *star, struct message *message, enum frame_kind kind, size_t bytes,
                         size_t big)
{
    message->frame =
        (struct frame){.magic = STAR_MAGIC, .kind = kind, .number = star->number, .bytes = (uint64_t)bytes + big};
    return (struct iovec){message, sizeof(message->frame) + bytes};
}

void tcp_star_queue_big(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *big, size_t bytes)
{
    conn->out[OUT_MESSAGE] = seal(star, &conn->message, kind, 0, bytes);
    conn->out[OUT_BIG] = (struct iovec){(void *)big, bytes};
}

void tcp_star_queue_last(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const struct failure *failure)
{
    if (failure)
        conn->last.payload.failure = *failure;
    conn->out[OUT_LAST] = seal(star, &conn->last, kind, failure ? sizeof(*failure) : 0, 0);
}

bool tcp_star_is_idle(const struct conn *conn)
{
    return conn->out[OUT_MESSAGE].iov_len + conn->out[OUT_BIG].iov_len + conn->out[OUT_LAST].iov_len == 0;
}

/* EP_OK also if only a part was sent; otherwise the connection is lost (errno). */
ep_status tcp_star_push(struct conn *conn)
{
    return tcp_send(conn->fd, conn->out, OUTS) < 0 ? EP_E_SYSTEM : EP_OK;
}

void tcp_star_close_conn(struct conn *conn)
{
    if (conn->fd >= 0)
        ep_fd_close(conn->fd);
    conn->fd = -1;
    conn->arrived = false;
    memset(conn->out, 0, sizeof(conn->out));
}

const char *tcp_star_print_conn(const struct tcp_star *star, const struct conn *conn, char text[CONN_TEXT])
{
    char address[TCP_ADDRESS_TEXT];

    tcp_address_print(&conn->remote, address);
    snprintf(text, CONN_TEXT, "rank %d (%s)", tcp_star_rank_of(star, conn), address);
    return text;
}

/* Has the kernel of the other side acknowledged everything? */
static bool is_delivered(const struct conn *conn)
{
    int waiting = 0;

    return tcp_star_is_idle(conn) && ioctl(conn->fd, SIOCOUTQ, &waiting) == 0 && waiting == 0;
}

void tcp_star_drain(struct tcp_star *star)
{
    uint64_t deadline_ns = ep_deadline_ns(DRAIN_MS);
    struct timespec backoff = {.tv_nsec = 1000000};
    unsigned char bytes[4096];
    bool open = true;

    while (open && ep_now_ns() < deadline_ns) {
        open = false;
        FOR_EACH (conn, star->conns, tcp_star_n_conns(star)) {
            if (conn->fd < 0)
                continue;
            if (tcp_star_push(conn) != EP_OK) {
                tcp_star_close_conn(conn);
                continue;
            }
            while (recv(conn->fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
                ;
            open |= !is_delivered(conn);
        }
        if (open)
            nanosleep(&backoff, NULL);
    }
}

/* --- failing --- */

ep_status tcp_star_fail_again(const struct tcp_star *star)
{
    return ep_fail((ep_status)star->failure.status, "%s", star->failure.text);
}

ep_status tcp_star_fail(struct tcp_star *star, ep_status status, int failed_rank)
{
    if (star->failure.status != EP_OK)
        return tcp_star_fail_again(star);
    star->failure.status = (int32_t)status;
    star->failure.rank = failed_rank;
    snprintf(star->failure.text, TEXT_BYTES, "%.*s", TEXT_BYTES - 1, ep_last_error());
    for (int i = 0; i < tcp_star_n_conns(star); i++)
        if (star->conns[i].fd >= 0)
            tcp_star_queue_last(star, &star->conns[i], FRAME_FAILURE, &star->failure);
    tcp_star_drain(star);
    for (int i = 0; i < tcp_star_n_conns(star); i++)
        tcp_star_close_conn(&star->conns[i]);
    return tcp_star_fail_again(star);
}

ep_status tcp_star_fail_lost(struct tcp_star *star, struct conn *conn, int error)
{
    char peer[CONN_TEXT];

    return tcp_star_fail(star,
                         ep_fail(EP_E_PEER_DEAD, "%s: the connection to %s ended before it arrived: %s", star->name,
                                 tcp_star_print_conn(star, conn, peer),
                                 error ? strerror(error) : "it died, or was cut off"),
                         tcp_star_rank_of(star, conn));
}

ep_status tcp_star_fail_damaged(struct tcp_star *star, struct conn *conn, const char *what)
{
    char peer[CONN_TEXT];

    return tcp_star_fail(star,
                         ep_fail(EP_E_MISMATCH, "%s: what %s has sent is damaged: %s", star->name,
                                 tcp_star_print_conn(star, conn, peer), what),
                         tcp_star_rank_of(star, conn));
}

/* false: of unknown kind. Otherwise its text is printable. */
static bool check_failure(const struct tcp_star *star, struct failure *failure)
{
    tcp_make_printable(failure->text, sizeof(failure->text));
    return ep_status_is_failure(failure->status) && failure->rank >= -1 && failure->rank < star->nranks;
}

ep_status tcp_star_handle_failure(struct tcp_star *star, struct conn *conn)
{
    struct failure failure = conn->in.payload.failure;
    char peer[CONN_TEXT];

    if (!check_failure(star, &failure))
        return tcp_star_fail_damaged(star, conn, "a failure of unknown kind");
    ep_fail((ep_status)failure.status, "%s", failure.text);
    if (star->rank == 0 && failure.rank == 0 && failure.status == EP_E_TIMEOUT) {
        /* This rank is running, and receives from the other one. */
        ep_fail(EP_E_TIMEOUT,
                "%s: %s receives nothing from rank 0, which receives from it: check the network to its host",
                star->name, tcp_star_print_conn(star, conn, peer));
        failure.rank = tcp_star_rank_of(star, conn);
    }
    return tcp_star_fail(star, (ep_status)failure.status, failure.rank);
}

bool tcp_star_read_last_failure(struct tcp_star *star, struct conn *conn, struct failure *ret_failure)
{
    enum { LAST = sizeof(struct message) };
    unsigned char bytes[16 * LAST];
    struct message last;
    size_t used = 0;
    ssize_t n;

    while ((n = recv(conn->fd, bytes + used, sizeof(bytes) - used, MSG_DONTWAIT)) > 0) {
        used += (size_t)n;
        if (used > LAST) {
            memmove(bytes, bytes + used - LAST, LAST);
            used = LAST;
        }
    }
    if (used != LAST)
        return false;
    memcpy(&last, bytes, LAST);
    *ret_failure = last.payload.failure;
    return last.frame.magic == STAR_MAGIC && last.frame.kind == FRAME_FAILURE &&
           last.frame.bytes == sizeof(*ret_failure) && check_failure(star, ret_failure);
}

/* --- missing ranks --- */

void tcp_star_list_missing(const struct tcp_star *star, struct missing *ret_missing)
{
    struct missing missing = {.first = -1};
    size_t used = 0;
    int shown = 0;

    for (int rank = 1; rank < star->nranks; rank++) {
        char address[TCP_ADDRESS_TEXT] = "";

        if (star->conns[rank].arrived)
            continue;
        if (missing.n++ == 0)
            missing.first = rank;
        if (star->conns[rank].remote.family)
            tcp_address_print(&star->conns[rank].remote, address);
        if (used + 24 + strlen(address) >= sizeof(missing.list))
            continue;
        used += (size_t)snprintf(missing.list + used, sizeof(missing.list) - used, "%s%d%s%s%s", shown++ ? ", " : "",
                                 rank, *address ? " (" : "", address, *address ? ")" : "");
    }
    if (missing.n > shown)
        snprintf(missing.list + used, sizeof(missing.list) - used, " and %d more", missing.n - shown);
    *ret_missing = missing;
}

ep_status tcp_star_fail_late(struct tcp_star *star, const struct missing *missing, int timeout_ms)
{
    const struct tcp_acceptor *acceptor = &star->acceptor;

    /* The missing ranks may be in the listener's queue: then this rank is the cause. */
    if (acceptor->error) {
        ep_fail(EP_E_SYSTEM,
                "%s: rank %d cannot accept connections: %s (limit of open files: ulimit -n); %d of %d ranks were not "
                "accepted within %d ms: rank%s %s",
                star->name, star->rank, strerror(acceptor->error), missing->n, star->nranks, timeout_ms,
                missing->n == 1 ? "" : "s", missing->list);
        return tcp_star_fail(star, EP_E_SYSTEM, star->rank);
    }
    ep_fail(EP_E_TIMEOUT, "%s: %d of %d ranks did not arrive within %d ms: rank%s %s%s%s%s%s", star->name, missing->n,
            star->nranks, timeout_ms, missing->n == 1 ? "" : "s", missing->list,
            acceptor->dropped ? "; the last connection that was not accepted: " : "", acceptor->last_drop,
            *star->last_failure ? "; " : "", star->last_failure);
    return tcp_star_fail(star, EP_E_TIMEOUT, missing->first);
}

void tcp_star_publish_missing(struct tcp_star *star)
{
    uint64_t now = ep_now_ns();
    struct missing missing;

    if (now < star->published_ns + PUBLISH_NS)
        return;
    star->published_ns = now;
    tcp_star_list_missing(star, &missing);
    for (int rank = 1; rank < star->nranks; rank++) {
        struct conn *conn = &star->conns[rank];

        if (conn->fd < 0 || !conn->arrived || !tcp_star_is_idle(conn))
            continue;
        conn->message.payload.missing = missing;
        conn->out[OUT_MESSAGE] = seal(star, &conn->message, FRAME_MISSING, sizeof(missing), 0);
    }
}
