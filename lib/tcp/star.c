/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/star.h"

#include "base/clock.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define MAGIC 0x31465045u /* "EPF1" */
#define TEXT_BYTES 256
#define LIST_BYTES 160
#define RETRY_FIRST_NS 20000000u /* between two tries to connect; doubles */
#define RETRY_MOST_NS 500000000u
#define TELL_NS 200000000u  /* between two lists of who is missing */
#define POLL_MOST_MS 100    /* a deadline is never missed by more */
#define FAREWELL_MS 200     /* for a failure or a farewell to leave */

enum frame_kind { FRAME_BLOCK = 1, FRAME_RESULT, FRAME_FAILURE, FRAME_MISSING, FRAME_BYE };

struct frame {
    uint32_t magic, kind;
    uint64_t number; /* of the all-gather */
    uint64_t bytes;  /* that follow */
};

struct failure {
    int32_t status, rank;
    char text[TEXT_BYTES];
};

struct missing {
    int32_t n, first;
    char list[LIST_BYTES];
};

/* One connection: of rank 0 to another rank, or of that one to rank 0. */
struct spoke {
    int fd; /* -1: none */
    struct tcp_address far;
    struct frame frame; /* that is being read */
    size_t frame_used;
    union {
        struct failure failure;
        struct missing missing;
    } small;             /* its payload, unless it is a block or a result */
    unsigned char *into; /* where the payload goes */
    size_t used;
    bool came; /* rank 0: the block of this all-gather is there */
    unsigned char out[sizeof(struct frame) + sizeof(struct failure)];
    size_t out_used, out_at;
    const unsigned char *big; /* behind that */
    size_t big_bytes;
};

struct tcp_star {
    const char *name;
    int rank, nranks;
    struct spoke *spokes; /* [nranks] on rank 0, else [1] */
    struct tcp_door *door;
    struct pollfd *polls;
    uint64_t number;
    uint64_t told_ns;
    struct missing missing; /* as rank 0 said last */
    uint64_t dropped;
    char last_drop[TCP_WHY_BYTES + TCP_ADDRESS_TEXT];
    ep_status failed;
    int culprit;
    char text[TEXT_BYTES];
};

static int n_spokes(const struct tcp_star *star)
{
    return star->rank == 0 ? star->nranks : 1;
}

static int rank_of(const struct tcp_star *star, const struct spoke *spoke)
{
    return star->rank == 0 ? (int)(spoke - star->spokes) : 0;
}

/* --- sending --- */

static void queue_frame(struct tcp_star *star, struct spoke *spoke, enum frame_kind kind, const void *small,
                        size_t small_bytes, const void *big, size_t big_bytes)
{
    struct frame frame = {
        .magic = MAGIC, .kind = kind, .number = star->number, .bytes = (uint64_t)small_bytes + big_bytes};

    memcpy(spoke->out, &frame, sizeof(frame));
    if (small_bytes)
        memcpy(spoke->out + sizeof(frame), small, small_bytes);
    spoke->out_used = sizeof(frame) + small_bytes;
    spoke->out_at = 0;
    spoke->big = big;
    spoke->big_bytes = big_bytes;
}

static bool is_idle(const struct spoke *spoke)
{
    return spoke->out_at == spoke->out_used && spoke->big_bytes == 0;
}

/* EP_OK also when only a part has left; otherwise the connection is lost (errno). */
static ep_status push(struct spoke *spoke)
{
    while (!is_idle(spoke)) {
        bool first = spoke->out_at < spoke->out_used;
        const unsigned char *at = first ? spoke->out + spoke->out_at : spoke->big;
        size_t bytes = first ? spoke->out_used - spoke->out_at : spoke->big_bytes;
        ssize_t n = send(spoke->fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return errno == EAGAIN || errno == EWOULDBLOCK ? EP_OK : EP_E_SYSTEM;
        if (first) {
            spoke->out_at += (size_t)n;
        } else {
            spoke->big += n;
            spoke->big_bytes -= (size_t)n;
        }
    }
    return EP_OK;
}

static void close_spoke(struct spoke *spoke)
{
    if (spoke->fd >= 0)
        close(spoke->fd);
    spoke->fd = -1;
    spoke->out_at = spoke->out_used = spoke->big_bytes = 0;
}

static void print_spoke(const struct tcp_star *star, const struct spoke *spoke, char *ret_text, size_t bytes)
{
    char address[TCP_ADDRESS_TEXT];

    tcp_address_print(&spoke->far, address);
    snprintf(ret_text, bytes, "rank %d (%s)", rank_of(star, spoke), address);
}

/* Sends what is small, for a moment; then the connection closes anyway. */
static void drain(struct tcp_star *star)
{
    uint64_t deadline_ns = ep_deadline_ns(FAREWELL_MS);
    int open;

    do {
        int n = 0;

        open = 0;
        for (int i = 0; i < n_spokes(star); i++) {
            struct spoke *spoke = &star->spokes[i];

            if (spoke->fd < 0 || is_idle(spoke))
                continue;
            if (push(spoke) != EP_OK)
                close_spoke(spoke);
            else if (!is_idle(spoke))
                star->polls[n++] = (struct pollfd){.fd = spoke->fd, .events = POLLOUT};
        }
        open = n;
        if (open)
            (void)poll(star->polls, (nfds_t)n, 10);
    } while (open && ep_now_ns() < deadline_ns);
}

/* --- failing --- */

/* After ep_fail(): the star is void, and the others are told why. */
static ep_status fail_star(struct tcp_star *star, ep_status status, int culprit)
{
    struct failure failure = {.status = (int32_t)status, .rank = culprit};

    if (star->failed != EP_OK)
        return ep_fail(star->failed, "%s", star->text);
    star->failed = status;
    star->culprit = culprit;
    snprintf(star->text, sizeof(star->text), "%.*s", TEXT_BYTES - 1, ep_last_error());
    memcpy(failure.text, star->text, sizeof(failure.text));
    for (int i = 0; i < n_spokes(star); i++) {
        struct spoke *spoke = &star->spokes[i];

        /* In the middle of a result a frame would be taken for a part of it: then the end of the connection says it. */
        if (spoke->fd >= 0 && spoke->big_bytes)
            close_spoke(spoke);
        else if (spoke->fd >= 0 && is_idle(spoke))
            queue_frame(star, spoke, FRAME_FAILURE, &failure, sizeof(failure), NULL, 0);
    }
    drain(star);
    for (int i = 0; i < n_spokes(star); i++)
        close_spoke(&star->spokes[i]);
    return ep_fail(status, "%s", star->text);
}

static ep_status fail_lost(struct tcp_star *star, struct spoke *spoke, int error)
{
    char who[TCP_ADDRESS_TEXT + 24];

    print_spoke(star, spoke, who, sizeof(who));
    ep_fail(EP_E_PEER_DEAD, "%s: the connection to %s ended before it came: %s", star->name, who,
            error ? strerror(error) : "it died, or was cut off");
    return fail_star(star, EP_E_PEER_DEAD, rank_of(star, spoke));
}

static ep_status fail_damaged(struct tcp_star *star, struct spoke *spoke, const char *what)
{
    char who[TCP_ADDRESS_TEXT + 24];

    print_spoke(star, spoke, who, sizeof(who));
    ep_fail(EP_E_MISMATCH, "%s: what %s has sent is damaged: %s", star->name, who, what);
    return fail_star(star, EP_E_MISMATCH, rank_of(star, spoke));
}

/* What rank 0, or a rank that gave up, says. */
static ep_status take_failure(struct tcp_star *star, struct spoke *spoke)
{
    struct failure failure = spoke->small.failure;

    if (!ep_status_is_failure(failure.status) || failure.rank < -1 || failure.rank >= star->nranks)
        return fail_damaged(star, spoke, "a failure of unknown kind");
    failure.text[sizeof(failure.text) - 1] = '\0';
    for (char *at = failure.text; *at; at++)
        *at = *at < ' ' || *at > '~' ? '?' : *at;
    ep_fail((ep_status)failure.status, "%s", failure.text);
    return fail_star(star, (ep_status)failure.status, failure.rank);
}

/* --- who is missing --- */

static bool is_missing(const struct tcp_star *star, int rank, bool rendezvous)
{
    return rank > 0 && (rendezvous ? star->spokes[rank].fd < 0 : !star->spokes[rank].came);
}

static void list_missing(const struct tcp_star *star, bool rendezvous, struct missing *ret_missing)
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
        if (star->spokes[rank].far.family)
            tcp_address_print(&star->spokes[rank].far, address);
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

static ep_status fail_late(struct tcp_star *star, const struct missing *missing, int timeout_ms)
{
    uint64_t dropped = star->door ? star->door->dropped : star->dropped;
    const char *last = star->door ? star->door->last_drop : star->last_drop;

    ep_fail(EP_E_TIMEOUT, "%s: %d of %d ranks did not come within %d ms: rank%s %s%s%s", star->name, missing->n,
            star->nranks, timeout_ms, missing->n == 1 ? "" : "s", missing->list,
            dropped ? "; the last connection that was not taken: " : "", dropped ? last : "");
    return fail_star(star, EP_E_TIMEOUT, missing->first);
}

/* Rank 0 to those that wait. */
static void tell_missing(struct tcp_star *star, bool rendezvous)
{
    uint64_t now = ep_now_ns();
    struct missing missing;

    if (now < star->told_ns + TELL_NS)
        return;
    star->told_ns = now;
    list_missing(star, rendezvous, &missing);
    for (int rank = 1; rank < star->nranks; rank++) {
        struct spoke *spoke = &star->spokes[rank];

        if (spoke->fd >= 0 && !is_missing(star, rank, rendezvous) && is_idle(spoke))
            queue_frame(star, spoke, FRAME_MISSING, &missing, sizeof(missing), NULL, 0);
    }
}

/* --- receiving --- */

/* Where the payload of the frame that has begun goes; NULL with a text: it is none that can come now. */
static const char *check_frame(struct tcp_star *star, struct spoke *spoke, size_t bytes, unsigned char *ret_all)
{
    const struct frame *frame = &spoke->frame;
    bool root = star->rank == 0;

    if (frame->magic != MAGIC)
        return "no frame where one begins";
    if (frame->kind == FRAME_FAILURE && frame->bytes == sizeof(spoke->small.failure)) {
        spoke->into = (unsigned char *)&spoke->small.failure;
        return NULL;
    }
    if (frame->kind == FRAME_BYE && frame->bytes == 0)
        return NULL;
    if (frame->kind == FRAME_MISSING && !root && frame->bytes == sizeof(spoke->small.missing)) {
        spoke->into = (unsigned char *)&spoke->small.missing;
        return NULL;
    }
    if (frame->kind == (root ? FRAME_BLOCK : FRAME_RESULT) && !spoke->came && ret_all) {
        if (frame->number != star->number)
            return "a block of another all-gather";
        if (frame->bytes != (root ? bytes : bytes * (size_t)star->nranks))
            return root ? "size" : "a result of another size";
        spoke->into = root ? ret_all + (size_t)rank_of(star, spoke) * bytes : ret_all;
        return NULL;
    }
    return "a frame of unknown kind or size";
}

static ep_status take_frame(struct tcp_star *star, struct spoke *spoke)
{
    char who[TCP_ADDRESS_TEXT + 24];

    spoke->frame_used = spoke->used = 0;
    switch (spoke->frame.kind) {
    case FRAME_FAILURE:
        return take_failure(star, spoke);
    case FRAME_BYE:
        print_spoke(star, spoke, who, sizeof(who));
        ep_fail(EP_E_PEER_LEFT, "%s: %s has freed its bootstrap and will not come", star->name, who);
        return fail_star(star, EP_E_PEER_LEFT, rank_of(star, spoke));
    case FRAME_MISSING:
        spoke->small.missing.list[LIST_BYTES - 1] = '\0';
        for (char *at = spoke->small.missing.list; *at; at++)
            *at = *at < ' ' || *at > '~' ? '?' : *at;
        star->missing = spoke->small.missing;
        if (star->missing.first < 0 || star->missing.first >= star->nranks)
            star->missing.first = 0;
        return EP_OK;
    default:
        spoke->came = true;
        return EP_OK;
    }
}

/* Reads `spoke` while there is something; `ret_all` NULL: no all-gather is under way. */
static ep_status pull(struct tcp_star *star, struct spoke *spoke, size_t bytes, unsigned char *ret_all)
{
    const char *wrong;

    while (spoke->fd >= 0) {
        bool head = spoke->frame_used < sizeof(spoke->frame);
        unsigned char *into = head ? (unsigned char *)&spoke->frame + spoke->frame_used : spoke->into + spoke->used;
        size_t room = head ? sizeof(spoke->frame) - spoke->frame_used : (size_t)spoke->frame.bytes - spoke->used;
        ssize_t n = recv(spoke->fd, into, room, MSG_DONTWAIT);

        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return EP_OK;
        if (n <= 0)
            return fail_lost(star, spoke, n < 0 ? errno : 0);
        if (!head) {
            spoke->used += (size_t)n;
        } else {
            spoke->frame_used += (size_t)n;
            if (spoke->frame_used < sizeof(spoke->frame))
                continue;
            wrong = check_frame(star, spoke, bytes, ret_all);
            if (wrong && strcmp(wrong, "size") == 0) {
                ep_fail(EP_E_MISMATCH, "%s: ranks disagree: rank 0 gathers %zu bytes and rank %d gathers %llu",
                        star->name, bytes, rank_of(star, spoke), (unsigned long long)spoke->frame.bytes);
                return fail_star(star, EP_E_MISMATCH, rank_of(star, spoke));
            }
            if (wrong)
                return fail_damaged(star, spoke, wrong);
        }
        if (spoke->used == spoke->frame.bytes) {
            EP_TRY(take_frame(star, spoke));
            /* The next all-gather may have begun over there: its frames are for the next call. */
            if (spoke->came)
                return EP_OK;
        }
    }
    return EP_OK;
}

/* One turn over all connections. */
static ep_status step(struct tcp_star *star, size_t bytes, unsigned char *ret_all, uint64_t deadline_ns)
{
    uint64_t now = ep_now_ns(), left_ms = deadline_ns > now ? (deadline_ns - now) / 1000000u + 1 : 0;
    int n = 0, ready;

    for (int i = 0; i < n_spokes(star); i++) {
        struct spoke *spoke = &star->spokes[i];
        /* A rank whose block is there may already be in the next all-gather: no reading ahead. But it may die. */
        short events = (short)((spoke->came ? POLLRDHUP : POLLIN) | (is_idle(spoke) ? 0 : POLLOUT));

        star->polls[n++] = (struct pollfd){.fd = spoke->fd, .events = events};
    }
    ready = poll(star->polls, (nfds_t)n, left_ms > POLL_MOST_MS ? POLL_MOST_MS : (int)left_ms);
    if (ready < 0 && errno != EINTR) {
        struct timespec nap = {.tv_nsec = 1000000};

        nanosleep(&nap, NULL); /* more descriptors than RLIMIT_NOFILE allows now: all are tried */
    }
    for (int i = 0; i < n; i++) {
        struct spoke *spoke = &star->spokes[i];
        short events = ready < 0 ? POLLIN | POLLOUT : star->polls[i].revents;

        if (spoke->fd < 0 || !events)
            continue;
        if (!is_idle(spoke) && push(spoke) != EP_OK)
            return fail_lost(star, spoke, errno);
        if (!spoke->came || (events & (POLLRDHUP | POLLHUP | POLLERR)))
            EP_TRY(pull(star, spoke, bytes, ret_all));
    }
    return EP_OK;
}

/* --- the all-gather --- */

static bool all_came(const struct tcp_star *star)
{
    for (int i = star->rank == 0 ? 1 : 0; i < n_spokes(star); i++)
        if (!star->spokes[i].came)
            return false;
    return true;
}

static bool all_idle(const struct tcp_star *star)
{
    for (int i = 0; i < n_spokes(star); i++)
        if (star->spokes[i].fd >= 0 && !is_idle(&star->spokes[i]))
            return false;
    return true;
}

static ep_status fail_late_root(struct tcp_star *star, int timeout_ms)
{
    struct missing missing;

    list_missing(star, false, &missing);
    for (int rank = 1; rank < star->nranks && missing.n == 0; rank++)
        if (!is_idle(&star->spokes[rank])) {
            ep_fail(EP_E_TIMEOUT, "%s: rank %d did not take the result within %d ms", star->name, rank, timeout_ms);
            return fail_star(star, EP_E_TIMEOUT, rank);
        }
    return fail_late(star, &missing, timeout_ms);
}

static ep_status fail_late_leaf(struct tcp_star *star, int timeout_ms)
{
    char who[TCP_ADDRESS_TEXT + 24];

    if (star->missing.n > 0)
        return fail_late(star, &star->missing, timeout_ms);
    print_spoke(star, &star->spokes[0], who, sizeof(who));
    ep_fail(EP_E_TIMEOUT, "%s: %s did not answer within %d ms", star->name, who, timeout_ms);
    return fail_star(star, EP_E_TIMEOUT, 0);
}

static ep_status gather_root(struct tcp_star *star, size_t bytes, int timeout_ms, uint64_t deadline_ns,
                             unsigned char *ret_all)
{
    star->told_ns = ep_now_ns();
    while (!all_came(star)) {
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        tell_missing(star, false);
        if (!all_came(star) && ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    while (!all_idle(star)) { /* lists of who is missing */
        EP_TRY(step(star, bytes, ret_all, deadline_ns));
        if (ep_now_ns() >= deadline_ns)
            return fail_late_root(star, timeout_ms);
    }
    for (int rank = 1; rank < star->nranks; rank++)
        queue_frame(star, &star->spokes[rank], FRAME_RESULT, NULL, 0, ret_all, bytes * (size_t)star->nranks);
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
    for (int i = 0; i < n_spokes(star); i++)
        star->spokes[i].came = false;
    if (star->rank == 0) {
        star->spokes[0].came = true;
        if (bytes)
            memcpy(all, mine, bytes);
        return gather_root(star, bytes, timeout_ms, deadline_ns, all);
    }
    queue_frame(star, &star->spokes[0], FRAME_BLOCK, NULL, 0, mine, bytes);
    while (!star->spokes[0].came) {
        EP_TRY(step(star, bytes, all, deadline_ns));
        if (!star->spokes[0].came && ep_now_ns() >= deadline_ns)
            return fail_late_leaf(star, timeout_ms);
    }
    return EP_OK;
}

/* --- opening --- */

static ep_status star_new(const char *name, int rank, int nranks, struct tcp_star **ret_star)
{
    struct tcp_star *star = calloc(1, sizeof(*star));
    size_t n = rank == 0 ? (size_t)nranks : 1;

    if (star) {
        star->name = name;
        star->rank = rank;
        star->nranks = nranks;
        star->culprit = -1;
        star->spokes = calloc(n, sizeof(*star->spokes));
        star->polls = calloc(n + TCP_DOOR_POLLS, sizeof(*star->polls));
    }
    if (!star || !star->spokes || !star->polls) {
        if (star) {
            free(star->spokes);
            free(star->polls);
        }
        free(star);
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d ranks", name, nranks);
    }
    for (size_t i = 0; i < n; i++)
        star->spokes[i].fd = -1;
    *ret_star = star;
    return EP_OK;
}

/* Has the far end gone without a word? */
static bool is_closed(int fd)
{
    char byte;

    return recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) == 0;
}

static ep_status judge_rank(void *context, const struct tcp_shake *shake, char *ret_reason, size_t bytes)
{
    struct tcp_star *star = context;
    const struct tcp_hello *hello = &shake->hello;
    char address[TCP_ADDRESS_TEXT];

    if (hello->kind != TCP_BOOTSTRAP || hello->rank < 1 || hello->rank >= star->nranks ||
        hello->detail != (uint32_t)star->nranks) {
        snprintf(ret_reason, bytes, "this job has %d ranks, and that is rank %d of %u", star->nranks, hello->rank,
                 hello->detail);
        return EP_E_MISMATCH;
    }
    if (star->spokes[hello->rank].fd >= 0 && !is_closed(star->spokes[hello->rank].fd)) {
        tcp_address_print(&star->spokes[hello->rank].far, address);
        snprintf(ret_reason, bytes, "rank %d has come already, from %s", hello->rank, address);
        return EP_E_MISMATCH;
    }
    return EP_OK;
}

static void take_rank(void *context, const struct tcp_shake *shake, int fd)
{
    struct tcp_star *star = context;
    struct spoke *spoke = &star->spokes[shake->hello.rank];

    close_spoke(spoke);
    memset(spoke, 0, sizeof(*spoke));
    spoke->fd = fd;
    spoke->far = shake->from;
}

static int count_missing(const struct tcp_star *star)
{
    int n = 0;

    for (int rank = 1; rank < star->nranks; rank++)
        n += star->spokes[rank].fd < 0;
    return n;
}

static ep_status await_ranks(struct tcp_star *star, int timeout_ms, uint64_t deadline_ns)
{
    struct missing missing;

    star->told_ns = ep_now_ns();
    while (count_missing(star) > 0) {
        uint64_t now = ep_now_ns(), left_ms = deadline_ns > now ? (deadline_ns - now) / 1000000u + 1 : 0;
        int n = tcp_door_fill(star->door, star->polls);

        if (now >= deadline_ns) {
            list_missing(star, true, &missing);
            return fail_late(star, &missing, timeout_ms);
        }
        (void)poll(star->polls, (nfds_t)n, left_ms > POLL_MOST_MS ? POLL_MOST_MS : (int)left_ms);
        tcp_door_step(star->door, judge_rank, take_rank, star);
        tell_missing(star, true);
        for (int rank = 1; rank < star->nranks; rank++) {
            struct spoke *spoke = &star->spokes[rank];

            /* A rank that has come and died is missing again: it may be started once more. */
            if (spoke->fd >= 0 && (push(spoke) != EP_OK || is_closed(spoke->fd)))
                close_spoke(spoke);
        }
    }
    return EP_OK;
}

static ep_status open_root(struct tcp_star *star, const struct tcp_star_args *args, uint64_t deadline_ns)
{
    ep_status status;
    uint16_t port;
    int fd;

    if (args->nranks == 1)
        return EP_OK;
    star->door = calloc(1, sizeof(*star->door));
    if (!star->door)
        return ep_fail(EP_E_MEMORY, "%s: no memory", args->name);
    star->door->fd = -1;
    status = tcp_listen(args->from, args->port, &fd, &port);
    if (status != EP_OK)
        return ep_fail_prefix(status, "%s: ", args->name);
    tcp_door_open(star->door, fd, &args->key);
    status = await_ranks(star, args->timeout_ms, deadline_ns);
    /* Nobody else is expected: who knocks from now on hears that nothing listens here. */
    star->dropped = star->door->dropped;
    memcpy(star->last_drop, star->door->last_drop, sizeof(star->last_drop));
    tcp_door_close(star->door);
    free(star->door);
    star->door = NULL;
    return status;
}

static void nap_until(uint64_t ns, uint64_t deadline_ns)
{
    uint64_t now = ep_now_ns(), span = deadline_ns > now && deadline_ns - now < ns ? deadline_ns - now : ns;
    struct timespec nap = {.tv_sec = (time_t)(span / 1000000000u), .tv_nsec = (long)(span % 1000000000u)};

    nanosleep(&nap, NULL);
}

/* One try at one address. */
static ep_status knock(struct tcp_star *star, const struct tcp_star_args *args, const struct tcp_address *to,
                       uint64_t deadline_ns, struct tcp_shake *shake)
{
    const struct tcp_hello hello = {
        .kind = TCP_BOOTSTRAP, .rank = args->rank, .detail = (uint32_t)args->nranks, .session = 0};
    enum tcp_shake_result result = TCP_SHAKE_PENDING;
    int fd;

    *shake = (struct tcp_shake){.fd = -1};
    EP_TRY(tcp_connect(to, args->from, &fd));
    tcp_set_options(fd, args->timeout_ms);
    EP_TRY(tcp_shake_ask(shake, fd, &args->key, &hello, to, deadline_ns));
    while (result == TCP_SHAKE_PENDING) {
        struct pollfd look = {.fd = shake->fd, .events = tcp_shake_events(shake)};

        (void)poll(&look, 1, 20);
        result = tcp_shake_step(shake);
    }
    if (result != TCP_SHAKE_DONE)
        return ep_fail(shake->status, "%s", shake->why);
    star->spokes[0].fd = shake->fd;
    star->spokes[0].far = *to;
    return EP_OK;
}

/* Rank 0 may not have been started yet, or its name not be known yet: until the deadline everything is tried again. */
static ep_status open_leaf(struct tcp_star *star, const struct tcp_star_args *args, uint64_t deadline_ns)
{
    uint64_t wait_ns = RETRY_FIRST_NS;
    char why[TCP_WHY_BYTES] = "", at[TCP_ADDRESS_TEXT] = "";
    struct tcp_shake *shake = calloc(1, sizeof(*shake));
    ep_status status = EP_E_TIMEOUT;

    if (!shake)
        return ep_fail(EP_E_MEMORY, "%s: no memory", args->name);
    while (ep_now_ns() < deadline_ns) {
        struct tcp_address addresses[TCP_ADDRESSES];
        int n = 0;

        if (tcp_resolve(args->host, args->port, deadline_ns, addresses, &n) != EP_OK)
            snprintf(why, sizeof(why), "%.*s", TCP_WHY_BYTES - 1, ep_last_error());
        for (int i = 0; i < n; i++) {
            uint64_t now = ep_now_ns(), share = deadline_ns > now ? (deadline_ns - now) / (uint64_t)(n - i) : 0;

            status = knock(star, args, &addresses[i], now + share, shake);
            if (status == EP_OK)
                goto free;
            snprintf(why, sizeof(why), "%.*s", TCP_WHY_BYTES - 1, ep_last_error());
            tcp_address_print(&addresses[i], at);
            if (shake->refused) {
                star->culprit = 0;
                status = ep_fail(shake->status, "%s: rank 0 at %s does not take rank %d: %s", args->name, at,
                                 args->rank, shake->why);
                goto free;
            }
        }
        nap_until(wait_ns, deadline_ns);
        wait_ns = wait_ns * 2 < RETRY_MOST_NS ? wait_ns * 2 : RETRY_MOST_NS;
    }
    star->culprit = 0;
    status = ep_fail(EP_E_TIMEOUT, "%s: rank %d could not reach rank 0 at %s port %u within %d ms: %s%s%s", args->name,
                     args->rank, args->host, args->port, args->timeout_ms, at, *at ? ": " : "", why);
free:
    free(shake);
    return status;
}

ep_status tcp_star_open(const struct tcp_star_args *args, struct tcp_star **ret_star)
{
    uint64_t deadline_ns = ep_deadline_ns(args->timeout_ms);
    struct tcp_star *star;
    ep_status status;

    EP_TRY(star_new(args->name, args->rank, args->nranks, &star));
    status = args->rank == 0 ? open_root(star, args, deadline_ns) : open_leaf(star, args, deadline_ns);
    if (status != EP_OK) {
        tcp_star_free(star);
        return status;
    }
    *ret_star = star;
    return EP_OK;
}

ep_status tcp_star_adopt(const char *name, int rank, int nranks, const int *fds, struct tcp_star **ret_star)
{
    EP_TRY(star_new(name, rank, nranks, ret_star));
    for (int i = rank == 0 ? 1 : 0; i < n_spokes(*ret_star); i++)
        (*ret_star)->spokes[i].fd = fds[i];
    return EP_OK;
}

int tcp_star_culprit(const struct tcp_star *star)
{
    return star->culprit;
}

struct tcp_address tcp_star_local_address(const struct tcp_star *star)
{
    struct tcp_address none = {0};

    for (int i = 0; i < n_spokes(star); i++)
        if (star->spokes[i].fd >= 0)
            return tcp_local_address(star->spokes[i].fd);
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
    for (int i = 0; i < n_spokes(star); i++)
        if (star->spokes[i].fd >= 0 && is_idle(&star->spokes[i]))
            queue_frame(star, &star->spokes[i], FRAME_BYE, NULL, 0, NULL, 0);
    drain(star);
    for (int i = 0; i < n_spokes(star); i++)
        close_spoke(&star->spokes[i]);
    if (star->door)
        tcp_door_close(star->door);
    free(star->door);
    free(star->spokes);
    free(star->polls);
    free(star);
}
