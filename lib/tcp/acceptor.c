/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/acceptor.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>

/* For the two round trips of a handshake. */
#define HANDSHAKE_MS 5000
/* Of the descriptors that this process may have, strangers take at most this fraction. */
#define DESCRIPTOR_PARTS 4
/* In one step, so that the caller can do its other work between two. */
#define ACCEPTS 256

/* Who decides about authenticated connections. */
struct judge {
    tcp_acceptor_check_fn check;
    tcp_acceptor_accept_fn accept;
    void *context;
};

void tcp_acceptor_open(struct tcp_acceptor *acceptor, int fd, const struct tcp_key *key)
{
    struct rlimit files;
    rlim_t most = getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur / DESCRIPTOR_PARTS : TCP_ACCEPTOR_STRANGERS;

    *acceptor = (struct tcp_acceptor){.fd = fd, .key = *key, .most_strangers = TCP_ACCEPTOR_STRANGERS};
    if (most < TCP_ACCEPTOR_STRANGERS)
        acceptor->most_strangers = most ? (int)most : 1;
}

int tcp_acceptor_get_polls(const struct tcp_acceptor *acceptor, struct pollfd *ret_polls)
{
    int n = 0;

    if (acceptor->fd < 0)
        return 0;
    /* Connections in the kernel's queue that cannot be accepted now would wake the caller in vain. */
    ret_polls[n++] = (struct pollfd){.fd = acceptor->error || acceptor->n == TCP_ACCEPTOR_PENDING ? -1 : acceptor->fd,
                                     .events = POLLIN};
    for (int i = 0; i < acceptor->n; i++)
        ret_polls[n++] =
            (struct pollfd){.fd = acceptor->pending[i].fd, .events = tcp_handshake_events(&acceptor->pending[i])};
    return n;
}

static void record_drop(struct tcp_acceptor *acceptor, const struct tcp_handshake *hs)
{
    char from[TCP_ADDRESS_TEXT];

    tcp_address_print(&hs->from, from);
    acceptor->dropped++;
    snprintf(acceptor->last_drop, sizeof(acceptor->last_drop), "%s: %s", from, hs->why);
}

static void remove_pending(struct tcp_acceptor *acceptor, int i)
{
    acceptor->pending[i] = acceptor->pending[--acceptor->n];
}

/* A rank that waits for the reply has given up: it sends nothing before it. */
static bool has_given_up(const struct tcp_handshake *hs)
{
    char byte;

    return recv(hs->fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0 || (errno != EAGAIN && errno != EINTR);
}

/* Continues the handshake of pending[i]. false: it is no longer pending, and the last one is in its place. */
static bool advance(struct tcp_acceptor *acceptor, int i, const struct judge *judge)
{
    struct tcp_handshake *hs = &acceptor->pending[i];
    enum tcp_handshake_result result = tcp_handshake_step(hs);

    if (result == TCP_HANDSHAKE_AUTHENTICATED && has_given_up(hs)) {
        tcp_handshake_drop(hs);
        remove_pending(acceptor, i);
        return false;
    }
    if (result == TCP_HANDSHAKE_AUTHENTICATED) {
        char reason[TCP_REASON_BYTES] = "";
        ep_status status = judge->check(judge->context, hs, reason, sizeof(reason));

        tcp_handshake_reply(hs, status, reason);
        hs->deadline_ns = ep_deadline_ns(HANDSHAKE_MS);
        result = tcp_handshake_step(hs);
    }
    if (result == TCP_HANDSHAKE_PENDING)
        return true;
    if (result == TCP_HANDSHAKE_DONE && judge->accept) {
        judge->accept(judge->context, hs, hs->fd);
    } else {
        record_drop(acceptor, hs);
        tcp_handshake_drop(hs);
    }
    remove_pending(acceptor, i);
    return false;
}

/* The oldest stranger, -1: none; and their number. */
static int find_oldest(const struct tcp_acceptor *acceptor, int *ret_strangers)
{
    int oldest = -1;

    *ret_strangers = 0;
    for (int i = 0; i < acceptor->n; i++) {
        if (acceptor->pending[i].announced)
            continue;
        if (oldest < 0 || acceptor->pending[i].begin_ns < acceptor->pending[oldest].begin_ns)
            oldest = i;
        ++*ret_strangers;
    }
    return oldest;
}

/* Drops the oldest connection that is still one of a stranger. false: there is none. */
static bool drop_stranger(struct tcp_acceptor *acceptor, const struct judge *judge)
{
    int n, oldest;

    while ((oldest = find_oldest(acceptor, &n)) >= 0) {
        struct tcp_handshake *hs = &acceptor->pending[oldest];

        /* What it has sent by now may be its HELLO. */
        if (!advance(acceptor, oldest, judge))
            return true;
        if (hs->announced)
            continue;
        snprintf(hs->why, TCP_WHY_BYTES, "had not authenticated itself while others waited");
        record_drop(acceptor, hs);
        tcp_handshake_drop(hs);
        remove_pending(acceptor, oldest);
        return true;
    }
    return false;
}

static bool make_room(struct tcp_acceptor *acceptor, const struct judge *judge)
{
    int strangers;

    while (find_oldest(acceptor, &strangers) >= 0 && strangers >= acceptor->most_strangers)
        (void)drop_stranger(acceptor, judge);
    return acceptor->n < TCP_ACCEPTOR_PENDING;
}

static void accept_all(struct tcp_acceptor *acceptor, const struct judge *judge)
{
    if (!acceptor->pending)
        acceptor->pending = malloc(TCP_ACCEPTOR_PENDING * sizeof(*acceptor->pending));
    if (!acceptor->pending)
        acceptor->error = ENOMEM;
    for (int i = 0; acceptor->pending && i < ACCEPTS && make_room(acceptor, judge); i++) {
        struct tcp_address from;
        int fd = tcp_accept(acceptor->fd, &from);

        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        acceptor->error = fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK ? errno : 0;
        if (acceptor->error && drop_stranger(acceptor, judge))
            continue; /* a rank may be behind it in the kernel's queue, where the others stay */
        if (fd < 0)
            return;
        tcp_set_options(fd, 0);
        tcp_handshake_accept(&acceptor->pending[acceptor->n++], fd, &acceptor->key, &from,
                             ep_deadline_ns(HANDSHAKE_MS));
        (void)advance(acceptor, acceptor->n - 1, judge);
    }
}

void tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn accept,
                       void *context)
{
    const struct judge judge = {check, accept, context};

    if (acceptor->fd >= 0 && !ep_fd_is_ours(acceptor->fd))
        tcp_acceptor_close(acceptor);
    if (acceptor->fd < 0)
        return;
    accept_all(acceptor, &judge);
    for (int i = 0; i < acceptor->n;)
        i += advance(acceptor, i, &judge);
}

void tcp_acceptor_close(struct tcp_acceptor *acceptor)
{
    if (acceptor->fd < 0)
        return;
    FOR_EACH (hs, acceptor->pending, acceptor->n) {
        snprintf(hs->why, TCP_WHY_BYTES, "had not authenticated itself when the listener was closed");
        if (*acceptor->last_drop)
            acceptor->dropped++; /* the earlier reason says more */
        else
            record_drop(acceptor, hs);
        tcp_handshake_drop(hs);
    }
    free(acceptor->pending);
    acceptor->pending = NULL;
    acceptor->n = acceptor->error = 0;
    ep_fd_close(acceptor->fd);
    acceptor->fd = -1;
}
