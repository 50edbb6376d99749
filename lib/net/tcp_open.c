/* SPDX-License-Identifier: Apache-2.0 */
/* Opens and closes endpoints of the network over TCP. */
#include "net/tcp_internal.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/*
 * Freeing an endpoint waits so long for the kernel of a peer that acknowledges nothing. While a peer only reads late,
 * its data is waited for until the deadline: it is lost if the socket is closed before, because the peer's next credit
 * is answered with a reset.
 */
#define FREE_MS 2000
#define DRAIN_MOST_NS 5000000 /* between two checks; doubles from DRAIN_FIRST_NS */
#define DRAIN_FIRST_NS 200000

/* --- closing --- */

static bool is_delivered(const struct tcp_conn *conn)
{
    int waiting = 0;

    if (conn->discards || conn->ended)
        return true;
    return conn->bye_queued && !tcp_conn_has_output(conn) && ioctl(conn->fd, SIOCOUTQ, &waiting) == 0 && waiting == 0;
}

/* True if bytes are in flight, and the kernel of the peer has acknowledged none for FREE_MS. */
static bool is_silent(struct tcp_conn *conn)
{
    int waiting = 0, unsent = 0;
    uint64_t now = ep_now_ns();

    if (ioctl(conn->fd, SIOCOUTQ, &waiting) != 0 || ioctl(conn->fd, SIOCOUTQNSD, &unsent) != 0)
        return true;
    /* With nothing in flight the peer has closed the window: its process has not read for a while. */
    if (!conn->acknowledged_ns || waiting != conn->unacknowledged || waiting == unsent) {
        conn->unacknowledged = waiting;
        conn->acknowledged_ns = now;
    }
    return now - conn->acknowledged_ns >= FREE_MS * UINT64_C(1000000);
}

static void drain_input(struct tcp_conn *conn)
{
    unsigned char bytes[16384];
    ssize_t n;

    while ((n = recv(conn->fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
        ;
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        tcp_conn_end(conn, 0);
}

/*
 * Closing a socket with unread data resets the connection, and data in flight to the peer is lost. So input is drained
 * until the peer's kernel has acknowledged all output, or the timeout has passed.
 */
static void send_bye(struct tcp_net *t, int timeout_ms)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    struct timespec backoff = {.tv_nsec = DRAIN_FIRST_NS};

    for (;;) {
        bool all = true;

        FOR_EACH (conn, t->conns, t->n) {
            if (conn->fd < 0 || is_delivered(conn))
                continue;
            conn->writable = true;
            tcp_conn_queue_bye(conn);
            tcp_conn_push(conn);
            drain_input(conn);
            all &= is_delivered(conn) || is_silent(conn);
        }
        if (all || ep_now_ns() >= deadline_ns)
            return;
        nanosleep(&backoff, NULL);
        backoff.tv_nsec = backoff.tv_nsec < DRAIN_MOST_NS / 2 ? 2 * backoff.tv_nsec : DRAIN_MOST_NS;
    }
}

/* Low latency gives up ranks that it masks, which may be stopped. */
static int drain_ms(const struct tcp_net *t)
{
    if (t->net.abandoned)
        return 0;
    return t->net.tolerant && t->net.timeout_ms > FREE_MS ? FREE_MS : t->net.timeout_ms;
}

void ep_net_tcp_free(struct ep_net *net)
{
    struct tcp_net *t = tcp_of(net);

    /*
     * An abandoned or broken endpoint sends BYE too, so that its peers do not report this rank as dead: damage in what
     * one peer has sent breaks it as well. But its queued puts are discarded: their sources may have been freed.
     */
    net->abandoned |= net->broken != EP_OK;
    for (int i = 0; t->conns && i < t->n; i++)
        if (t->conns[i].fd >= 0 && !ep_fd_is_ours(t->conns[i].fd))
            t->conns[i].fd = -1;
    for (int i = 0; net->abandoned && t->conns && i < t->n; i++)
        if (tcp_conn_has_output(&t->conns[i]))
            tcp_conn_discard_output(&t->conns[i]);
    if (t->conns)
        send_bye(t, drain_ms(t));
    for (int i = 0; t->conns && i < t->n; i++)
        if (t->conns[i].fd >= 0)
            ep_fd_close(t->conns[i].fd);
    for (int i = 0; t->links && i < net->nnodes - 1; i++)
        if (t->links[i] >= 0)
            ep_fd_close(t->links[i]);
    if (t->epoll >= 0)
        ep_fd_close(t->epoll);
    explicit_bzero(&t->context.key, sizeof(t->context.key));
    free(t->conns);
    free(t->links);
    ep_net_free(net);
}

/* --- opening --- */

/* All steps that need no peer. */
static ep_status prepare(struct tcp_net *t)
{
    struct ep_net *net = &t->net;
    size_t n = (size_t)t->n, npeers = (size_t)net->nnodes - 1;

    t->links = malloc(npeers * sizeof(*t->links));
    t->conns = calloc(n, sizeof(*t->conns));
    for (size_t i = 0; t->links && i < npeers; i++)
        t->links[i] = -1;
    for (int i = 0; t->conns && i < t->n; i++)
        t->conns[i] = (struct tcp_conn){.fd = -1, .index = i, .readable = true, .writable = true};
    if (!t->links || !t->conns)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory for %zu connections", n);
    EP_TRY(ep_net_memory_new(net));
    net->wire_bytes = n * sizeof(*t->conns);
    t->epoll = ep_fd_above_stdio(epoll_create1(EPOLL_CLOEXEC));
    if (t->epoll < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network tcp: epoll_create1");
    return EP_OK;
}

/* After the last agreement of the ranks: a failure here is of this rank alone. */
static ep_status start(struct tcp_net *t)
{
    for (int i = 0; i < t->n; i++) {
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u32 = (uint32_t)i};
        struct tcp_conn *conn = &t->conns[i];

        conn->in = (struct tcp_wire){.region = t->net.region,
                                     .region_bytes = t->net.region_bytes,
                                     .signals = t->net.signals,
                                     .n_signals = t->net.n_signals};
        if (conn->fd < 0)
            tcp_conn_end(conn, 0); /* no communication with that rank (block_ranks) */
        else if (epoll_ctl(t->epoll, EPOLL_CTL_ADD, conn->fd, &event) != 0)
            return ep_fail_errno(EP_E_SYSTEM, errno, "network tcp: epoll_ctl");
    }
    return EP_OK;
}

/* For a boot without a context: from the environment. */
static void make_context(struct ep_net_tcp_context *ret_context)
{
    const char *secret = getenv("EPKIT_SECRET"), *interface = getenv("EPKIT_TCP_INTERFACE");

    memset(ret_context, 0, sizeof(*ret_context));
    tcp_key_make(secret ? secret : "", "network", NULL, 0, &ret_context->key);
    snprintf(ret_context->interface, sizeof(ret_context->interface), "%s", interface ? interface : "");
}

static ep_status tcp_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net)
{
    const struct ep_net_tcp_context *context = provider->context;
    struct ep_net_tcp_context own;
    struct tcp_net *t;
    ep_status status;

    /* can_sleep stays false: no doorbell when a socket has input. */
    EP_TRY(ep_net_new(&ep_net_tcp_ops, sizeof(*t), params, ret_net));
    if (!context) {
        make_context(&own);
        context = &own;
    }
    t = tcp_of(*ret_net);
    t->net.tcp = &t->net;
    t->epoll = -1;
    t->context = *context;
    t->context.check = NULL; /* belongs to this creation */
    t->n = (t->net.nnodes - 1) * params->channels;
    status = ep_net_tcp_connect(t, params, context, prepare(t));
    if (status == EP_OK)
        status = start(t);
    return ep_net_opened(status, ret_net);
}

const struct ep_net_provider ep_net_tcp = {.abi = EP_NET_ABI, .name = "tcp", .open = tcp_open};
