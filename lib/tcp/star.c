/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/star_internal.h"

#include "base/clock.h"

#include <errno.h>
#include <limits.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31465045u                   /* "EPF1" */
#define TELL_NS 200000000u                  /* between two lists of who is missing */
#define SILENCE_NS (10 * (uint64_t)TELL_NS) /* a rank 0 that has told nothing for so long does not run any more */

static int n_conns(const struct tcp_star *star)
{
    return star->rank == 0 ? star->nranks : 1;
}

static int rank_of(const struct tcp_star *star, const struct conn *conn)
{
    return star->rank == 0 ? (int)(conn - star->conns) : 0;
}

/* --- sending --- */

static size_t write_frame(const struct tcp_star *star, enum frame_kind kind, const void *small, size_t small_bytes,
                          size_t big_bytes, unsigned char *ret_bytes)
{
    struct frame frame = {
        .magic = MAGIC, .kind = kind, .number = star->number, .bytes = (uint64_t)small_bytes + big_bytes};

    memcpy(ret_bytes, &frame, sizeof(frame));
    if (small_bytes)
        memcpy(ret_bytes + sizeof(frame), small, small_bytes);
    return sizeof(frame) + small_bytes;
}

static void queue_frame(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *small,
                        size_t small_bytes, const void *big, size_t big_bytes)
{
    conn->out_used = write_frame(star, kind, small, small_bytes, big_bytes, conn->out);
    conn->out_at = 0;
    conn->big = big;
    conn->big_bytes = big_bytes;
}

/* Behind what is under way, which stays whole: the far end would take this for a part of it. */
static void queue_last(struct tcp_star *star, struct conn *conn, enum frame_kind kind, const void *small,
                       size_t small_bytes)
{
    conn->last_used = write_frame(star, kind, small, small_bytes, 0, conn->last);
    conn->last_at = 0;
}

static bool is_idle(const struct conn *conn)
{
    return conn->out_at == conn->out_used && conn->big_bytes == 0 && conn->last_at == conn->last_used;
}

/* EP_OK also when only a part has left; otherwise the connection is lost (errno). */
ep_status tcp_star_push(struct conn *conn)
{
    while (!is_idle(conn)) {
        bool first = conn->out_at < conn->out_used, big = !first && conn->big_bytes > 0;
        const unsigned char *at = first ? conn->out + conn->out_at : big ? conn->big : conn->last + conn->last_at;
        size_t bytes = first ? conn->out_used - conn->out_at : big ? conn->big_bytes : conn->last_used - conn->last_at;
        ssize_t n = send(conn->fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? EP_OK : EP_E_SYSTEM;
        if (first) {
            conn->out_at += (size_t)n;
        } else if (big) {
            conn->big += n;
            conn->big_bytes -= (size_t)n;
        } else {
            conn->last_at += (size_t)n;
        }
    }
    return EP_OK;
}

void tcp_star_close_conn(struct conn *conn)
{
    if (conn->fd >= 0)
        close(conn->fd);
    conn->fd = -1;
    conn->out_at = conn->out_used = conn->big_bytes = conn->last_at = conn->last_used = 0;
}

static void print_conn(const struct tcp_star *star, const struct conn *conn, char *ret_text, size_t bytes)
{
    char address[TCP_ADDRESS_TEXT];

    tcp_address_print(&conn->far, address);
    snprintf(ret_text, bytes, "rank %d (%s)", rank_of(star, conn), address);
}

/* Has the kernel of the other side all of it? */
static bool is_delivered(const struct conn *conn)
{
    int waiting = 0;

    return is_idle(conn) && ioctl(conn->fd, SIOCOUTQ, &waiting) == 0 && waiting == 0;
}

/*
 * Sends what is small, for a moment; then the connection closes anyway. What comes meanwhile is thrown away: a socket
 * that is closed with something unread is reset, and what it has sent may be lost.
 */
static void drain(struct tcp_star *star)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    struct timespec backoff = {.tv_nsec = 1000000};
    unsigned char bytes[4096];
    bool open = true;

    while (open && ep_now_ns() < deadline_ns) {
        open = false;
        for (int i = 0; i < n_conns(star); i++) {
            struct conn *conn = &star->conns[i];

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

ep_status tcp_star_fail(struct tcp_star *star, ep_status status, int culprit)
{
    struct failure failure = {.status = (int32_t)status, .rank = culprit};

    if (star->failed != EP_OK)
        return ep_fail(star->failed, "%s", star->text);
    star->failed = status;
    star->culprit = culprit;
    snprintf(star->text, sizeof(star->text), "%.*s", TEXT_BYTES - 1, ep_last_error());
    memcpy(failure.text, star->text, sizeof(failure.text));
    for (int i = 0; i < n_conns(star); i++)
        if (star->conns[i].fd >= 0)
            queue_last(star, &star->conns[i], FRAME_FAILURE, &failure, sizeof(failure));
    drain(star);
    for (int i = 0; i < n_conns(star); i++)
        tcp_star_close_conn(&star->conns[i]);
    return ep_fail(status, "%s", star->text);
}

static ep_status fail_lost(struct tcp_star *star, struct conn *conn, int error)
{
    char who[TCP_ADDRESS_TEXT + 24];

    print_conn(star, conn, who, sizeof(who));
    ep_fail(EP_E_PEER_DEAD, "%s: the connection to %s ended before it came: %s", star->name, who,
            error ? strerror(error) : "it died, or was cut off");
    return tcp_star_fail(star, EP_E_PEER_DEAD, rank_of(star, conn));
}

static ep_status fail_damaged(struct tcp_star *star, struct conn *conn, const char *what)
{
    char who[TCP_ADDRESS_TEXT + 24];

    print_conn(star, conn, who, sizeof(who));
    ep_fail(EP_E_MISMATCH, "%s: what %s has sent is damaged: %s", star->name, who, what);
    return tcp_star_fail(star, EP_E_MISMATCH, rank_of(star, conn));
}

/* Of unknown kind: false. Otherwise its text can be printed. */
static bool check_failure(const struct tcp_star *star, struct failure *failure)
{
    failure->text[sizeof(failure->text) - 1] = '\0';
    for (char *at = failure->text; *at; at++)
        *at = *at < ' ' || *at > '~' ? '?' : *at;
    return ep_status_is_failure(failure->status) && failure->rank >= -1 && failure->rank < star->nranks;
}

/* What rank 0, or a rank that gave up, says. */
static ep_status take_failure(struct tcp_star *star, struct conn *conn)
{
    struct failure failure = conn->small.failure;

    if (!check_failure(star, &failure))
        return fail_damaged(star, conn, "a failure of unknown kind");
    ep_fail((ep_status)failure.status, "%s", failure.text);
    if (star->rank == 0 && failure.rank == 0 && failure.status == EP_E_TIMEOUT) {
        char who[TCP_ADDRESS_TEXT + 24];

        /* This rank runs, and hears the other one. */
        print_conn(star, conn, who, sizeof(who));
        ep_fail(EP_E_TIMEOUT, "%s: %s hears nothing of rank 0, which hears it: look at the network to its host",
                star->name, who);
        failure.rank = rank_of(star, conn);
    }
    return tcp_star_fail(star, (ep_status)failure.status, failure.rank);
}

bool tcp_star_read_last_failure(struct tcp_star *star, struct conn *conn, struct failure *ret_failure)
{
    enum { LAST = sizeof(struct frame) + sizeof(struct failure) };
    unsigned char bytes[16 * LAST];
    struct frame frame;
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
    memcpy(&frame, bytes, sizeof(frame));
    memcpy(ret_failure, bytes + sizeof(frame), sizeof(*ret_failure));
    return frame.magic == MAGIC && frame.kind == FRAME_FAILURE && frame.bytes == sizeof(*ret_failure) &&
           check_failure(star, ret_failure);
}

void tcp_star_send_failure(int fd, ep_status status, const char *text)
{
    struct failure_message message;

    memset(&message, 0, sizeof(message));
    message.frame = (struct frame){.magic = MAGIC, .kind = FRAME_FAILURE, .bytes = sizeof(message.failure)};
    message.failure.status = (int32_t)status;
    message.failure.rank = -1;
    snprintf(message.failure.text, sizeof(message.failure.text), "%.*s", TEXT_BYTES - 1, text);
    (void)!send(fd, &message, sizeof(message), MSG_NOSIGNAL | MSG_DONTWAIT);
}

ep_status tcp_star_peek_failure(int fd)
{
    struct failure_message message;

    if (recv(fd, &message, sizeof(message), MSG_PEEK | MSG_DONTWAIT) != sizeof(message) ||
        message.frame.magic != MAGIC || message.frame.kind != FRAME_FAILURE ||
        !ep_status_is_failure(message.failure.status))
        return EP_OK;
    return (ep_status)message.failure.status;
}

/* --- who is missing --- */

static bool is_missing(const struct tcp_star *star, int rank, bool rendezvous)
{
    return rank > 0 && (rendezvous ? star->conns[rank].fd < 0 : !star->conns[rank].came);
}

void tcp_star_list_missing(const struct tcp_star *star, bool rendezvous, struct missing *ret_missing)
{
    struct missing missing = {.first = -1};
    size_t used = 0;
    int shown = 0;

    for (int rank = 1; rank < star->nranks; rank++) {
        char address[TCP_ADDRESS_TEXT] = "";

        if (!is_missing(star, rank, rendezvous))
            continue;
        if (missing.n++ == 0)
            missing.first = rank;
        if (star->conns[rank].far.family)
            tcp_address_print(&star->conns[rank].far, address);
        if (used + 24 + strlen(address) >= sizeof(missing.list))
            continue;
        used += (size_t)snprintf(missing.list + used, sizeof(missing.list) - used, "%s%d%s%s%s", shown ? ", " : "",
                                 rank, *address ? " (" : "", address, *address ? ")" : "");
        shown++;
    }
    if (missing.n > shown)
        snprintf(missing.list + used, sizeof(missing.list) - used, " and %d more", missing.n - shown);
    *ret_missing = missing;
}

ep_status tcp_star_fail_late(struct tcp_star *star, const struct missing *missing, int timeout_ms)
{
    uint64_t dropped = star->acceptor ? star->acceptor->dropped : star->dropped;
    const char *last = star->acceptor ? star->acceptor->last_drop : star->last_drop;

    /* Those that are missing may stand at the door: then it is this rank that lacks something. */
    if (star->acceptor && star->acceptor->error) {
        ep_fail(EP_E_SYSTEM,
                "%s: rank %d cannot take connections: %s (limit of open files: ulimit -n); %d of %d ranks were not "
                "taken within %d ms: rank%s %s",
                star->name, star->rank, strerror(star->acceptor->error), missing->n, star->nranks, timeout_ms,
                missing->n == 1 ? "" : "s", missing->list);
        return tcp_star_fail(star, EP_E_SYSTEM, star->rank);
    }
    ep_fail(EP_E_TIMEOUT, "%s: %d of %d ranks did not come within %d ms: rank%s %s%s%s%s%s", star->name, missing->n,
            star->nranks, timeout_ms, missing->n == 1 ? "" : "s", missing->list,
            dropped ? "; the last connection that was not taken: " : "", dropped ? last : "",
            *star->gave_up ? "; " : "", star->gave_up);
    return tcp_star_fail(star, EP_E_TIMEOUT, missing->first);
}

/* Rank 0 to those that wait. */
void tcp_star_tell_missing(struct tcp_star *star, bool rendezvous)
{
    uint64_t now = ep_now_ns();
    struct missing missing;

    if (now < star->told_ns + TELL_NS)
        return;
    star->told_ns = now;
    tcp_star_list_missing(star, rendezvous, &missing);
    for (int rank = 1; rank < star->nranks; rank++) {
        struct conn *conn = &star->conns[rank];

        if (conn->fd >= 0 && !is_missing(star, rank, rendezvous) && is_idle(conn))
            queue_frame(star, conn, FRAME_MISSING, &missing, sizeof(missing), NULL, 0);
    }
}

/* --- receiving --- */

/* Where the payload of the frame that has begun goes; NULL with a text: it is none that can come now. */
static const char *check_frame(struct tcp_star *star, struct conn *conn, size_t bytes, unsigned char *ret_all)
{
    const struct frame *frame = &conn->frame;
    bool root = star->rank == 0;

    if (frame->magic != MAGIC)
        return "no frame where one begins";
    if (frame->kind == FRAME_FAILURE && frame->bytes == sizeof(conn->small.failure)) {
        conn->into = (unsigned char *)&conn->small.failure;
        return NULL;
    }
    if (frame->kind == FRAME_BYE && frame->bytes == 0)
        return NULL;
    if (frame->kind == FRAME_MISSING && !root && frame->bytes == sizeof(conn->small.missing)) {
        conn->into = (unsigned char *)&conn->small.missing;
        return NULL;
    }
    if (frame->kind == (root ? FRAME_BLOCK : FRAME_RESULT) && !conn->came && ret_all) {
        if (frame->number != star->number)
            return "a block of another all-gather";
        if (frame->bytes != (root ? bytes : bytes * (size_t)star->nranks))
            return root ? "size" : "a result of another size";
        conn->into = root ? ret_all + (size_t)rank_of(star, conn) * bytes : ret_all;
        return NULL;
    }
    return "a frame of unknown kind or size";
}

static ep_status take_frame(struct tcp_star *star, struct conn *conn)
{
    char who[TCP_ADDRESS_TEXT + 24];

    conn->frame_used = conn->used = 0;
    switch (conn->frame.kind) {
    case FRAME_FAILURE:
        return take_failure(star, conn);
    case FRAME_BYE:
        print_conn(star, conn, who, sizeof(who));
        ep_fail(EP_E_PEER_LEFT, "%s: %s has freed its bootstrap and will not come", star->name, who);
        return tcp_star_fail(star, EP_E_PEER_LEFT, rank_of(star, conn));
    case FRAME_MISSING:
        conn->small.missing.list[LIST_BYTES - 1] = '\0';
        for (char *at = conn->small.missing.list; *at; at++)
            *at = *at < ' ' || *at > '~' ? '?' : *at;
        star->missing = conn->small.missing;
        star->heard_ns = ep_now_ns();
        if (star->missing.first < 0 || star->missing.first >= star->nranks)
            star->missing.first = 0;
        return EP_OK;
    default:
        conn->came = true;
        return EP_OK;
    }
}

/* Reads `conn` while there is something; `ret_all` NULL: no all-gather is under way. */
static ep_status pull(struct tcp_star *star, struct conn *conn, size_t bytes, unsigned char *ret_all)
{
    const char *wrong;

    while (conn->fd >= 0) {
        bool head = conn->frame_used < sizeof(conn->frame);
        unsigned char *into = head ? (unsigned char *)&conn->frame + conn->frame_used : conn->into + conn->used;
        size_t room = head ? sizeof(conn->frame) - conn->frame_used : (size_t)conn->frame.bytes - conn->used;
        ssize_t n = recv(conn->fd, into, room, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return EP_OK;
        if (n <= 0)
            return fail_lost(star, conn, n < 0 ? errno : 0);
        if (!head) {
            conn->used += (size_t)n;
        } else {
            conn->frame_used += (size_t)n;
            if (conn->frame_used < sizeof(conn->frame))
                continue;
            wrong = check_frame(star, conn, bytes, ret_all);
            if (wrong && strcmp(wrong, "size") == 0) {
                ep_fail(EP_E_MISMATCH, "%s: ranks disagree: rank 0 gathers %zu bytes and rank %d gathers %llu",
                        star->name, bytes, rank_of(star, conn), (unsigned long long)conn->frame.bytes);
                return tcp_star_fail(star, EP_E_MISMATCH, rank_of(star, conn));
            }
            if (wrong)
                return fail_damaged(star, conn, wrong);
        }
        if (conn->used == conn->frame.bytes) {
            EP_TRY(take_frame(star, conn));
            /* The next all-gather may have begun over there: its frames are for the next call. */
            if (conn->came)
                return EP_OK;
        }
    }
    return EP_OK;
}

/* One turn over all connections. */
static ep_status step(struct tcp_star *star, size_t bytes, unsigned char *ret_all, uint64_t deadline_ns)
{
    uint64_t now = ep_now_ns(), left_ms = deadline_ns > now ? (deadline_ns - now) / 1000000u + 1 : 0;
    int n = 0, ready, lost, culprit = star->rank;

    if (star->poll) {
        ep_status status = star->poll(star->poll_context, &culprit);

        if (status != EP_OK)
            return tcp_star_fail(star, status, culprit);
    }
    for (int i = 0; i < n_conns(star); i++) {
        struct conn *conn = &star->conns[i];
        /* A rank whose block is there may already be in the next all-gather: no reading ahead. But it may die. */
        short events = (short)((conn->came ? POLLRDHUP : POLLIN) | (is_idle(conn) ? 0 : POLLOUT));
        bool done = star->delivering && is_idle(conn);

        star->polls[n++] = (struct pollfd){.fd = done ? -1 : conn->fd, .events = events};
    }
    ready = poll(star->polls, (nfds_t)n, left_ms > POLL_MOST_MS ? POLL_MOST_MS : (int)left_ms);
    if (ready < 0 && errno != EINTR) {
        struct timespec backoff = {.tv_nsec = 1000000};

        nanosleep(&backoff, NULL); /* more descriptors than RLIMIT_NOFILE allows now: all are tried */
    }
    for (int i = 0; i < n; i++) {
        struct conn *conn = &star->conns[i];
        short events = ready < 0 ? POLLIN | POLLOUT : star->polls[i].revents;

        /* Who has its result may leave while others still take theirs. */
        if (conn->fd < 0 || !events || (star->delivering && is_idle(conn)))
            continue;
        /* Where sending fails, the other side may have said why before it closed. */
        lost = !is_idle(conn) && tcp_star_push(conn) != EP_OK ? errno : 0;
        if (lost)
            EP_TRY(pull(star, conn, bytes, ret_all));
        if (lost)
            return fail_lost(star, conn, lost);
        if (!conn->came || (events & (POLLRDHUP | POLLHUP | POLLERR)))
            EP_TRY(pull(star, conn, bytes, ret_all));
    }
    return EP_OK;
}

/* --- the all-gather --- */

static bool all_came(const struct tcp_star *star)
{
    for (int i = star->rank == 0 ? 1 : 0; i < n_conns(star); i++)
        if (!star->conns[i].came)
            return false;
    return true;
}

static bool all_idle(const struct tcp_star *star)
{
    for (int i = 0; i < n_conns(star); i++)
        if (star->conns[i].fd >= 0 && !is_idle(&star->conns[i]))
            return false;
    return true;
}

static ep_status fail_late_root(struct tcp_star *star, int timeout_ms)
{
    struct missing missing;

    tcp_star_list_missing(star, false, &missing);
    for (int rank = 1; rank < star->nranks && missing.n == 0; rank++)
        if (!is_idle(&star->conns[rank])) {
            ep_fail(EP_E_TIMEOUT, "%s: rank %d did not take the result within %d ms", star->name, rank, timeout_ms);
            return tcp_star_fail(star, EP_E_TIMEOUT, rank);
        }
    return tcp_star_fail_late(star, &missing, timeout_ms);
}

static ep_status fail_late_leaf(struct tcp_star *star, int timeout_ms)
{
    uint64_t silence_ns = ep_now_ns() - star->heard_ns;
    char who[TCP_ADDRESS_TEXT + 24];

    print_conn(star, &star->conns[0], who, sizeof(who));
    /* Whom rank 0 missed when it was heard last says nothing about who is missing now. */
    if (star->missing.n > 0 && silence_ns > SILENCE_NS) {
        ep_fail(EP_E_TIMEOUT, "%s: %s has said nothing for %llu of %d ms; until then it waited for rank%s %s",
                star->name, who, (unsigned long long)(silence_ns / 1000000u), timeout_ms,
                star->missing.n == 1 ? "" : "s", star->missing.list);
        return tcp_star_fail(star, EP_E_TIMEOUT, 0);
    }
    if (star->missing.n > 0)
        return tcp_star_fail_late(star, &star->missing, timeout_ms);
    ep_fail(EP_E_TIMEOUT, "%s: %s did not answer within %d ms", star->name, who, timeout_ms);
    return tcp_star_fail(star, EP_E_TIMEOUT, 0);
}

static ep_status gather_root(struct tcp_star *star, size_t bytes, int timeout_ms, uint64_t deadline_ns,
                             unsigned char *ret_all)
{
    star->told_ns = ep_now_ns();
    while (!all_came(star)) {
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        tcp_star_tell_missing(star, false);
        if (!all_came(star) && ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    while (!all_idle(star)) { /* lists of who is missing */
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        if (ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    star->delivering = true;
    for (int rank = 1; rank < star->nranks; rank++)
        queue_frame(star, &star->conns[rank], FRAME_RESULT, NULL, 0, ret_all, bytes * (size_t)star->nranks);
    while (!all_idle(star)) {
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        if (!all_idle(star) && ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    return EP_OK;
}

ep_status tcp_star_allgather(struct tcp_star *star, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms < 0 ? 0 : timeout_ms);
    unsigned char nothing[1], *all = ret_all ? ret_all : nothing;

    if ((!mine || !ret_all) && bytes)
        return ep_fail(EP_E_ARG, "%s: all-gather of %zu bytes from or to NULL", star->name, bytes);
    if (timeout_ms < 0 || bytes > INT32_MAX)
        return ep_fail(EP_E_ARG, "%s: all-gather of %zu bytes with timeout_ms = %d", star->name, bytes, timeout_ms);
    if (star->failed != EP_OK)
        return ep_fail(star->failed, "%s", star->text);
    star->number++;
    star->missing.n = 0;
    star->delivering = false;
    for (int i = 0; i < n_conns(star); i++)
        star->conns[i].came = false;
    if (star->rank == 0) {
        star->conns[0].came = true;
        if (bytes)
            memcpy(all, mine, bytes);
        return gather_root(star, bytes, timeout_ms, deadline_ns, all);
    }
    queue_frame(star, &star->conns[0], FRAME_BLOCK, NULL, 0, mine, bytes);
    while (!star->conns[0].came) {
        EP_TRY(step(star, bytes, all, deadline_ns));
        if (!star->conns[0].came && ep_now_ns() >= deadline_ns)
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
        star->culprit = -1;
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

ep_status tcp_star_adopt(const char *name, int rank, int nranks, const int *fds, struct tcp_star **ret_star)
{
    EP_TRY(tcp_star_new(name, rank, nranks, ret_star));
    for (int i = rank == 0 ? 1 : 0; i < n_conns(*ret_star); i++)
        (*ret_star)->conns[i].fd = fds[i];
    return EP_OK;
}

void tcp_star_set_poll(struct tcp_star *star, tcp_star_poll_fn poll, void *context)
{
    star->poll = poll;
    star->poll_context = context;
}

int tcp_star_culprit(const struct tcp_star *star)
{
    return star->culprit;
}

struct tcp_address tcp_star_local_address(const struct tcp_star *star)
{
    struct tcp_address none = {0};

    for (int i = 0; i < n_conns(star); i++)
        if (star->conns[i].fd >= 0)
            return tcp_local_address(star->conns[i].fd);
    return none;
}

uint64_t tcp_star_dropped(const struct tcp_star *star, const char **ret_last)
{
    if (ret_last)
        *ret_last = star->last_drop;
    return star->dropped;
}

void tcp_star_free(struct tcp_star *star)
{
    if (!star)
        return;
    for (int i = 0; i < n_conns(star); i++)
        if (star->conns[i].fd >= 0 && is_idle(&star->conns[i]))
            queue_last(star, &star->conns[i], FRAME_BYE, NULL, 0);
    drain(star);
    for (int i = 0; i < n_conns(star); i++)
        tcp_star_close_conn(&star->conns[i]);
    if (star->acceptor)
        tcp_acceptor_close(star->acceptor);
    free(star->acceptor);
    free(star->conns);
    free(star->polls);
    free(star);
}
