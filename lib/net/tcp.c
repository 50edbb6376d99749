/* SPDX-License-Identifier: Apache-2.0 */
#include "net/tcp_internal.h"

#include "base/clock.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

/* Sent before progress() is called: so much fills a packet train anyway. */
#define EAGER_BYTES (256u << 10)
/* What follows payload in one read: heads of records, and the rest of small messages, which are copied from here. */
#define STASH_BYTES 4096
/* Read from one connection before the others have their turn. */
#define TURN_BYTES (1u << 20)
#define EVENTS 64
/* A connection that ended without a farewell: the control link reports a death sooner. */
#define CUT_MS 1000

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
void tcp_stream_discard_output(struct stream *stream)
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

bool tcp_stream_push(struct stream *stream)
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
            tcp_stream_discard_output(stream);
            break;
        }
        count_sent(stream, (size_t)n);
        moved = true;
    }
    return moved;
}

/* false: no room. */
bool tcp_stream_add_record(struct stream *stream, uint32_t kind, uint64_t place, uint64_t amount, const void *data,
                           size_t bytes)
{
    struct record *record;

    if (stream->count == RECORDS && !(tcp_stream_push(stream) && stream->count < RECORDS) && !stream->discards)
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

    if (!tcp_stream_add_record(stream, TCP_WIRE_PUT, offset, bytes, src, bytes))
        return false;
    if (stream->waiting >= EAGER_BYTES)
        tcp_stream_push(stream);
    return true;
}

static bool tcp_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct stream *stream = stream_of(tcp_of(net), peer, channel);

    if (!tcp_stream_add_record(stream, TCP_WIRE_SIGNAL, index, add, NULL, 0))
        return false;
    if (!net->gathers || stream->count == 1 || stream->waiting >= EAGER_BYTES)
        tcp_stream_push(stream);
    return true;
}

static bool tcp_flush_test(struct ep_net *net, int peer, int channel)
{
    struct stream *stream = stream_of(tcp_of(net), peer, channel);

    if (stream->count)
        tcp_stream_push(stream);
    return stream->count == 0;
}

/* --- receiving --- */

void tcp_stream_end(struct stream *stream, int error)
{
    stream->ended = true;
    stream->readable = false;
    stream->error = error;
    stream->ended_ns = ep_now_ns();
    tcp_stream_discard_output(stream);
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
        tcp_stream_end(stream, n < 0 ? errno : 0);
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
        tcp_stream_discard_output(stream);
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
            moved |= tcp_stream_push(stream);
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

        tcp_stream_end(stream, 0);
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

const struct ep_net_ops ep_net_tcp_ops = {
    .name = "tcp",
    .put = tcp_put,
    .signal = tcp_signal,
    .flush_test = tcp_flush_test,
    .progress = tcp_progress,
    .free = ep_net_tcp_free,
    .ended = tcp_ended,
    .take_link = tcp_take_link,
    .lost = tcp_lost,
    .revoke = tcp_revoke,
};
