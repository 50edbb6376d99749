/* SPDX-License-Identifier: Apache-2.0 */
#include "tcp/acceptor.h"

#include "base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* For the two round trips of a handshake. */
#define HANDSHAKE_MS 5000
/* When the table is full, a connection that is older than this is dropped: a rank needs two round trips. */
#define MIN_PENDING_MS 250

void tcp_acceptor_open(struct tcp_acceptor *acceptor, int fd, const struct tcp_key *key)
{
    *acceptor = (struct tcp_acceptor){.fd = fd, .key = *key};
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

/* Drops the oldest connection, if it is old enough. */
static bool make_room(struct tcp_acceptor *acceptor)
{
    int oldest = 0;

    if (acceptor->n < TCP_ACCEPTOR_PENDING)
        return true;
    for (int i = 1; i < acceptor->n; i++)
        if (acceptor->pending[i].begin_ns < acceptor->pending[oldest].begin_ns)
            oldest = i;
    if (ep_now_ns() - acceptor->pending[oldest].begin_ns < MIN_PENDING_MS * UINT64_C(1000000))
        return false;
    snprintf(acceptor->pending[oldest].why, TCP_WHY_BYTES, "sent nothing while others waited");
    record_drop(acceptor, &acceptor->pending[oldest]);
    tcp_handshake_drop(&acceptor->pending[oldest]);
    remove_pending(acceptor, oldest);
    return true;
}

static void accept_all(struct tcp_acceptor *acceptor)
{
    if (!acceptor->pending)
        acceptor->pending = malloc(TCP_ACCEPTOR_PENDING * sizeof(*acceptor->pending));
    if (!acceptor->pending)
        acceptor->error = ENOMEM;
    while (acceptor->pending && make_room(acceptor)) {
        struct tcp_address from;
        struct tcp_handshake *hs = &acceptor->pending[acceptor->n];
        int fd = tcp_accept(acceptor->fd, &from);

        if (fd < 0 && (errno == EINTR || errno == ECONNABORTED))
            continue;
        acceptor->error = fd < 0 && errno != EAGAIN && errno != EWOULDBLOCK ? errno : 0;
        if (fd < 0)
            return; /* without descriptors the connection stays in the kernel's queue */
        tcp_set_options(fd, 0);
        tcp_handshake_accept(hs, fd, &acceptor->key, &from, ep_deadline_ns(HANDSHAKE_MS));
        acceptor->n++;
    }
}

void tcp_acceptor_step(struct tcp_acceptor *acceptor, tcp_acceptor_check_fn check, tcp_acceptor_accept_fn accept,
                       void *context)
{
    if (acceptor->fd < 0)
        return;
    accept_all(acceptor);
    for (int i = 0; i < acceptor->n;) {
        struct tcp_handshake *hs = &acceptor->pending[i];
        enum tcp_handshake_result result = tcp_handshake_step(hs);

        if (result == TCP_HANDSHAKE_AUTHENTICATED) {
            char reason[TCP_REASON_BYTES] = "";
            ep_status status = check(context, hs, reason, sizeof(reason));

            tcp_handshake_reply(hs, status, reason);
            result = tcp_handshake_step(hs);
        }
        if (result == TCP_HANDSHAKE_PENDING) {
            i++;
            continue;
        }
        if (result == TCP_HANDSHAKE_DONE)
            accept(context, hs, hs->fd);
        else
            record_drop(acceptor, hs);
        remove_pending(acceptor, i);
    }
}

void tcp_acceptor_close(struct tcp_acceptor *acceptor)
{
    if (acceptor->fd < 0)
        return;
    for (int i = 0; i < acceptor->n; i++) {
        struct tcp_handshake *hs = &acceptor->pending[i];

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
    close(acceptor->fd);
    acceptor->fd = -1;
}
