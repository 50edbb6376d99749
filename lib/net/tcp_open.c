/* SPDX-License-Identifier: Apache-2.0 */
/* Endpoints of the network over TCP: how they are opened, and what leaves before they close. */
#include "net/tcp_internal.h"

#include "base/clock.h"
#include "base/fd.h"
#include "net/tcp_mesh.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* The peer's kernel takes what is on its way when this endpoint is freed. */
#define FREE_MS 2000

/* --- closing --- */

static bool is_taken(const struct stream *stream)
{
    int waiting = 0;

    if (stream->discards || stream->ended)
        return true;
    return stream->count == 0 && ioctl(stream->fd, SIOCOUTQ, &waiting) == 0 && waiting == 0;
}

static void throw_away_input(struct stream *stream)
{
    unsigned char bytes[16384];
    ssize_t n;

    while ((n = recv(stream->fd, bytes, sizeof(bytes), MSG_DONTWAIT)) > 0)
        ;
    if (n == 0 || (errno != EAGAIN && errno != EINTR))
        tcp_stream_end(stream, 0);
}

/*
 * A socket that is closed with something unread resets the connection, and what is still on its way to the peer is
 * lost. So what comes is read, until the peer's kernel has all of ours, or a while has passed.
 */
static void say_farewell(struct tcp_net *t, int timeout_ms)
{
    uint64_t deadline_ns = ep_deadline_ns(timeout_ms);
    struct timespec nap = {.tv_nsec = 200000};
    bool all;

    for (int i = 0; i < t->n; i++)
        if (t->streams[i].fd >= 0)
            tcp_stream_add_record(&t->streams[i], TCP_WIRE_BYE, 0, 0, NULL, 0);
    for (;;) {
        all = true;
        for (int i = 0; i < t->n; i++) {
            struct stream *stream = &t->streams[i];

            if (stream->fd < 0 || is_taken(stream))
                continue;
            stream->writable = true;
            tcp_stream_push(stream);
            throw_away_input(stream);
            all &= is_taken(stream);
        }
        if (all || ep_now_ns() >= deadline_ns)
            return;
        nanosleep(&nap, NULL);
    }
}

void ep_net_tcp_free(struct ep_net *net)
{
    struct tcp_net *t = tcp_of(net);

    if (!t)
        return;
    /*
     * In a hurry it is said all the same: a rank that only closes this endpoint shall not be taken for dead. But what
     * is queued may be memory that nobody keeps any more.
     */
    for (int i = 0; net->hurries && t->streams && i < t->n; i++)
        if (t->streams[i].count)
            tcp_stream_discard_output(&t->streams[i]);
    if (t->streams && t->broken == EP_OK)
        say_farewell(t, net->hurries ? 0 : t->timeout_ms < FREE_MS ? t->timeout_ms : FREE_MS);
    for (int i = 0; t->streams && i < t->n; i++)
        if (t->streams[i].fd >= 0)
            close(t->streams[i].fd);
    for (int i = 0; t->links && i < net->nnodes - 1; i++)
        if (t->links[i] >= 0)
            close(t->links[i]);
    if (t->epoll >= 0)
        close(t->epoll);
    if (t->rendezvous.listener >= 0)
        close(t->rendezvous.listener);
    memset(&t->rendezvous.key, 0, sizeof(t->rendezvous.key));
    free(t->rendezvous.ranks);
    free(t->streams);
    free(t->links);
    ep_net_memory_free(net);
    free(t);
}

/* --- opening --- */

/* Everything that needs no peer. */
static ep_status prepare(struct tcp_net *t)
{
    struct ep_net *net = &t->net;
    size_t n = (size_t)t->n, npeers = (size_t)net->nnodes - 1;

    t->links = malloc(npeers * sizeof(*t->links));
    for (size_t i = 0; t->links && i < npeers; i++)
        t->links[i] = -1;
    t->streams = calloc(n, sizeof(*t->streams));
    for (size_t i = 0; t->streams && i < n; i++)
        t->streams[i].fd = -1;
    if (!t->links || !t->streams)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory for %zu connections", n);
    EP_TRY(ep_net_memory_new(net));
    net->wire_bytes = n * sizeof(*t->streams);
    t->epoll = ep_fd_keep(epoll_create1(EPOLL_CLOEXEC));
    if (t->epoll < 0)
        return ep_fail_errno(EP_E_SYSTEM, errno, "network tcp: epoll_create1");
    return EP_OK;
}

/* After the connections have come about: only what cannot fail on one rank alone, or is this rank's failure later. */
static ep_status start(struct tcp_net *t, const struct ep_net_params *params, const struct tcp_mesh_line *lines)
{
    int channels = t->net.channels, per_peer = tcp_mesh_per_peer(params);
    ep_status status = EP_OK;

    for (int i = 0; i < t->n; i++) {
        const struct tcp_mesh_line *line = &lines[i / channels * per_peer + i % channels];
        struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET, .data.u32 = (uint32_t)i};
        struct stream *stream = &t->streams[i];

        stream->fd = line->fd;
        stream->far = line->far;
        stream->index = i;
        stream->readable = stream->writable = true;
        stream->in = (struct tcp_wire){.region = t->net.region,
                                       .region_bytes = t->net.region_bytes,
                                       .signals = t->net.signals,
                                       .n_signals = t->net.n_signals};
        if (stream->fd < 0)
            tcp_stream_end(stream, 0); /* a rank that this one does not talk to here */
        else if (status == EP_OK && epoll_ctl(t->epoll, EPOLL_CTL_ADD, stream->fd, &event) != 0)
            status = ep_fail_errno(EP_E_SYSTEM, errno, "network tcp: epoll_ctl");
    }
    for (int peer = 0; per_peer > channels && peer < t->net.nnodes - 1; peer++)
        t->links[peer] = lines[peer * per_peer + channels].fd;
    return status;
}

/* Without a boot that knows more: what the environment says. */
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
    struct tcp_mesh_line *lines;
    struct tcp_net *t;
    ep_status status;

    EP_TRY(ep_net_check_params(provider->name, params));
    if (!context) {
        make_context(&own);
        context = &own;
    }
    t = calloc(1, sizeof(*t));
    if (!t)
        return ep_fail(EP_E_MEMORY, "network tcp: no memory");
    t->net = ep_net_init(&ep_net_tcp_ops, params); /* nothing rings when a socket has something */
    t->rank = params->rank;
    t->ranks_per_node = params->ranks_per_node;
    t->timeout_ms = params->timeout_ms;
    t->tolerant = params->tolerant;
    t->epoll = t->rendezvous.listener = -1;
    t->n = (t->net.nnodes - 1) * params->channels;
    lines = calloc((size_t)(t->net.nnodes - 1) * (size_t)tcp_mesh_per_peer(params), sizeof(*lines));
    status = lines ? prepare(t) : ep_fail(EP_E_MEMORY, "network tcp: no memory");
    status = tcp_mesh_open(params, context, status, lines, &t->rendezvous);
    if (status == EP_OK && lines)
        status = start(t, params, lines);
    free(lines);
    if (status != EP_OK) {
        ep_net_tcp_free(&t->net);
        return status;
    }
    *ret_net = &t->net;
    return EP_OK;
}

const struct ep_net_provider ep_net_tcp = {.abi = EP_NET_ABI, .name = "tcp", .open = tcp_open};
