/* SPDX-License-Identifier: Apache-2.0 */
#include "net/tcp.h"

#include "base/clock.h"
#include "base/fd.h"
#include "net/tcp_mesh.h"
#include "net/tcp_wire.h"

#include <errno.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* Records that may wait for room in a socket; more are "again" for the caller. */
#define RECORDS 64
/* Sent before progress() is called: so much fills a packet train anyway. */
#define EAGER_BYTES (256u << 10)
/* What follows payload in one read: heads of records, and the rest of small messages, which are copied from here. */
#define STASH_BYTES 4096
/* Read from one connection before the others have their turn. */
#define TURN_BYTES (1u << 20)
#define EVENTS 64
/* A connection that ended without a farewell: the control link reports a death sooner. */
#define CUT_MS 1000
/* The peer's kernel takes what is on its way when this endpoint is freed. */
#define FREE_MS 2000

struct record {
    struct tcp_wire_record head;
    const unsigned char *data;
    size_t bytes;
};

/* A connection: a channel to a rail peer, both ways. */
struct stream {
    int fd; /* -1: closed */
    int index;
    struct tcp_address far;
    struct record records[RECORDS]; /* a ring: the first `first`, `count` of them */
    int first, count;
    size_t sent;    /* of the first one, head and data */
    size_t waiting; /* bytes of all of them, less `sent` */
    uint32_t number;
    bool readable, writable; /* as far as is known: until the kernel says EAGAIN */
    bool discards;           /* the peer takes nothing any more: what is sent is thrown away */
    bool ended;              /* nothing comes any more */
    uint64_t ended_ns;
    int error;      /* errno with which it ended, 0: the peer closed it */
    int send_error; /* errno of a send that no connection is to blame for: memory that cannot be read */
    struct tcp_wire in;
};

struct tcp_net {
    struct ep_net net;
    int rank, ranks_per_node, n; /* streams */
    int timeout_ms;
    bool tolerant;
    int epoll;
    struct stream *streams; /* [npeers][channels] */
    int *links;             /* [npeers] control links that nobody has taken yet */
    struct ep_net_tcp_rendezvous rendezvous;
    ep_status broken;
    char reason[256];
};

static struct tcp_net *tcp_of(struct ep_net *net)
{
    return (struct tcp_net *)net;
}

static int peer_of(const struct tcp_net *t, const struct stream *stream)
{
    return ep_net_peer(t->net.node, stream->index / t->net.channels);
}

static int rank_of(const struct tcp_net *t, const struct stream *stream)
{
    return ep_net_rail_rank(t->rank, t->ranks_per_node, peer_of(t, stream));
}

static struct stream *stream_of(struct tcp_net *t, int peer, int channel)
{
    return &t->streams[ep_net_slot(t->net.node, peer) * t->net.channels + channel];
}

static ep_status break_net(struct tcp_net *t, const struct stream *stream, ep_status status, const char *what)
{
    char address[TCP_ADDRESS_TEXT];

    tcp_address_print(&stream->far, address);
    snprintf(t->reason, sizeof(t->reason), "network tcp: rank %d (%s), channel %d: %s", rank_of(t, stream), address,
             stream->index % t->net.channels, what);
    t->broken = status;
    t->net.broken_by = 1 + peer_of(t, stream);
    return ep_fail(status, "%s", t->reason);
}

/* --- sending --- */

/* Nobody over there reads any more. What still comes from there is read all the same. */
static void discard_output(struct stream *stream)
{
    stream->discards = true;
    stream->count = 0;
    stream->sent = stream->waiting = 0;
}

static bool is_lost(int error)
{
    return error == EPIPE || error == ECONNRESET || error == ECONNABORTED || error == ETIMEDOUT ||
           error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN || error == EHOSTDOWN ||
           error == ENOTCONN;
}

/* The pieces of memory that are next on the wire. */
static int gather(const struct stream *stream, struct iovec *ret_pieces)
{
    size_t skip = stream->sent;
    int n = 0;

    for (int i = 0; i < stream->count; i++) {
        const struct record *record = &stream->records[(stream->first + i) % RECORDS];
        size_t head = sizeof(record->head);

        if (skip < head) {
            ret_pieces[n++] = (struct iovec){(char *)&record->head + skip, head - skip};
            skip = head;
        }
        if (record->bytes > skip - head)
            ret_pieces[n++] = (struct iovec){(void *)(record->data + (skip - head)), record->bytes - (skip - head)};
        skip = 0;
    }
    return n;
}

static void count_sent(struct stream *stream, size_t n)
{
    stream->sent += n;
    stream->waiting -= n;
    while (stream->count) {
        const struct record *record = &stream->records[stream->first];
        size_t bytes = sizeof(record->head) + record->bytes;

        if (stream->sent < bytes)
            break;
        stream->sent -= bytes;
        stream->first = (stream->first + 1) % RECORDS;
        stream->count--;
    }
}

static bool push(struct stream *stream)
{
    struct iovec pieces[2 * RECORDS];
    struct msghdr message = {.msg_iov = pieces};
    bool moved = false;

    while (stream->count && stream->writable && !stream->discards) {
        ssize_t n;

        message.msg_iovlen = (size_t)gather(stream, pieces);
        n = sendmsg(stream->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
            stream->writable = errno == ENOBUFS;
            break;
        }
        if (n < 0) {
            stream->send_error = is_lost(errno) ? 0 : errno;
            discard_output(stream);
            break;
        }
        count_sent(stream, (size_t)n);
        moved = true;
    }
    return moved;
}

/* false: no room. */
static bool add_record(struct stream *stream, uint32_t kind, uint64_t place, uint64_t amount, const void *data,
                       size_t bytes)
{
    struct record *record;

    if (stream->count == RECORDS && !(push(stream) && stream->count < RECORDS) && !stream->discards)
        return false;
    if (stream->discards)
        return true; /* it has left or died: who waits for it gets that failure */
    record = &stream->records[(stream->first + stream->count++) % RECORDS];
    *record = (struct record){.head = {.kind = kind, .number = stream->number++, .place = place, .amount = amount},
                              .data = data,
                              .bytes = bytes};
    stream->waiting += sizeof(record->head) + bytes;
    return true;
}

static bool tcp_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct stream *stream = stream_of(tcp_of(net), peer, channel);

    if (!add_record(stream, TCP_WIRE_PUT, offset, bytes, src, bytes))
        return false;
    if (stream->waiting >= EAGER_BYTES)
        push(stream);
    return true;
}

static bool tcp_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct stream *stream = stream_of(tcp_of(net), peer, channel);

    if (!add_record(stream, TCP_WIRE_SIGNAL, index, add, NULL, 0))
        return false;
    if (!net->gathers || stream->count == 1 || stream->waiting >= EAGER_BYTES)
        push(stream);
    return true;
}

static bool tcp_flush_test(struct ep_net *net, int peer, int channel)
{
    struct stream *stream = stream_of(tcp_of(net), peer, channel);

    if (stream->count)
        push(stream);
    return stream->count == 0;
}

/* --- receiving --- */

static void end_stream(struct stream *stream, int error)
{
    stream->ended = true;
    stream->readable = false;
    stream->error = error;
    stream->ended_ns = ep_now_ns();
    discard_output(stream);
}

/* One read: payload into the region, what follows into the stash. *ret_bytes 0: nothing there, or the end. */
static ep_status read_once(struct tcp_net *t, struct stream *stream, size_t *ret_bytes)
{
    unsigned char stash[STASH_BYTES];
    struct iovec pieces[2];
    size_t room = 0, direct;
    unsigned char *into = tcp_wire_room(&stream->in, &room);
    const char *wrong;
    int n_pieces = 0;
    ssize_t n;

    *ret_bytes = 0;
    if (into)
        pieces[n_pieces++] = (struct iovec){into, room};
    pieces[n_pieces++] = (struct iovec){stash, sizeof(stash)};
    do
        n = readv(stream->fd, pieces, n_pieces);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        stream->readable = false;
        return EP_OK;
    }
    if (n <= 0) {
        end_stream(stream, n < 0 ? errno : 0);
        return EP_OK;
    }
    direct = (size_t)n < room ? (size_t)n : room;
    tcp_wire_fill(&stream->in, direct);
    wrong = tcp_wire_take(&stream->in, stash, (size_t)n - direct);
    *ret_bytes = (size_t)n;
    return wrong ? break_net(t, stream, EP_E_MISMATCH, wrong) : EP_OK;
}

static ep_status receive(struct tcp_net *t, struct stream *stream, bool *ret_moved)
{
    size_t bytes, turn = 0;

    while (stream->readable && turn < TURN_BYTES) {
        EP_TRY(read_once(t, stream, &bytes));
        turn += bytes;
    }
    /* Who has said farewell takes nothing any more, and what was put may be freed. */
    if (stream->in.bye && !stream->discards)
        discard_output(stream);
    *ret_moved |= turn > 0;
    return EP_OK;
}

/* What the kernel knows of our sockets: edges only, so that a busy one costs no system call more. */
static void look(struct tcp_net *t)
{
    struct epoll_event events[EVENTS];
    int n = epoll_wait(t->epoll, events, EVENTS, 0);

    for (int i = 0; i < n; i++) {
        struct stream *stream = &t->streams[events[i].data.u32];

        stream->readable |= !stream->ended && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP));
        stream->writable |= (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    }
}

/* Cut off by something in between: its process would have said farewell, or its death be known by now. */
static bool is_cut(const struct stream *stream)
{
    return stream->fd >= 0 && stream->ended && !stream->in.bye &&
           ep_now_ns() - stream->ended_ns >= CUT_MS * UINT64_C(1000000);
}

static ep_status check_cut(struct tcp_net *t, const struct stream *stream)
{
    char what[128];

    if (t->tolerant || !is_cut(stream))
        return EP_OK;
    snprintf(what, sizeof(what), "the connection was cut: %s",
             stream->error ? strerror(stream->error) : "it ended without a farewell");
    return break_net(t, stream, EP_E_PEER_DEAD, what);
}

static ep_status tcp_progress(struct ep_net *net, bool *ret_moved)
{
    struct tcp_net *t = tcp_of(net);
    bool moved = false;

    if (t->broken != EP_OK)
        return ep_fail(t->broken, "%s", t->reason);
    look(t);
    for (int i = 0; i < t->n; i++) {
        struct stream *stream = &t->streams[i];

        if (stream->readable)
            EP_TRY(receive(t, stream, &moved));
        if (stream->count)
            moved |= push(stream);
        if (stream->send_error)
            return break_net(t, stream, EP_E_SYSTEM, strerror(stream->send_error));
        if (stream->ended)
            EP_TRY(check_cut(t, stream));
    }
    *ret_moved = moved;
    return EP_OK;
}

static bool tcp_ended(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        const struct stream *stream = stream_of(t, peer, channel);

        if (!stream->ended && !stream->in.bye)
            return false;
    }
    return true;
}

static bool tcp_lost(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);

    for (int channel = 0; channel < net->channels; channel++)
        if (is_cut(stream_of(t, peer, channel)))
            return true;
    return false;
}

/* What the kernel has received and nobody has read goes with the socket, also where a forked process holds it too. */
static ep_status tcp_revoke(struct ep_net *net, int peer)
{
    for (int channel = 0; channel < net->channels; channel++) {
        struct stream *stream = stream_of(tcp_of(net), peer, channel);

        end_stream(stream, 0);
        stream->send_error = 0;
        if (stream->fd < 0)
            continue;
        shutdown(stream->fd, SHUT_RDWR);
        close(stream->fd);
        stream->fd = -1;
    }
    return EP_OK;
}

const struct ep_net_tcp_rendezvous *ep_net_tcp_get_rendezvous(struct ep_net *net)
{
    return &tcp_of(net)->rendezvous;
}

static int tcp_take_link(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);
    int slot = ep_net_slot(net->node, peer), fd = t->links[slot];

    t->links[slot] = -1;
    return fd;
}

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
        end_stream(stream, 0);
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
            add_record(&t->streams[i], TCP_WIRE_BYE, 0, 0, NULL, 0);
    for (;;) {
        all = true;
        for (int i = 0; i < t->n; i++) {
            struct stream *stream = &t->streams[i];

            if (stream->fd < 0 || is_taken(stream))
                continue;
            stream->writable = true;
            push(stream);
            throw_away_input(stream);
            all &= is_taken(stream);
        }
        if (all || ep_now_ns() >= deadline_ns)
            return;
        nanosleep(&nap, NULL);
    }
}

static void tcp_free(struct ep_net *net)
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
            discard_output(&t->streams[i]);
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

static const struct ep_net_ops tcp_ops = {
    .name = "tcp",
    .put = tcp_put,
    .signal = tcp_signal,
    .flush_test = tcp_flush_test,
    .progress = tcp_progress,
    .free = tcp_free,
    .ended = tcp_ended,
    .take_link = tcp_take_link,
    .lost = tcp_lost,
    .revoke = tcp_revoke,
};

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
            end_stream(stream, 0); /* a rank that this one does not talk to here */
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
    t->net = (struct ep_net){.ops = &tcp_ops,
                             .node = params->rank / params->ranks_per_node,
                             .nnodes = params->nranks / params->ranks_per_node,
                             .channels = params->channels,
                             .region_bytes = params->region_bytes,
                             .n_signals = params->n_signals,
                             .sleeps = false}; /* nothing rings when a socket has something */
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
        tcp_free(&t->net);
        return status;
    }
    *ret_net = &t->net;
    return EP_OK;
}

const struct ep_net_provider ep_net_tcp = {.abi = EP_NET_ABI, .name = "tcp", .open = tcp_open};
