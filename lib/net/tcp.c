/* SPDX-License-Identifier: Apache-2.0 */
#include "net/tcp_internal.h"

#include "base/array.h"
#include "base/clock.h"
#include "base/fd.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>

/* Queued bytes that are sent without waiting for progress(): enough for full packets. */
#define EAGER_BYTES (256u << 10)
/* Buffer for the bytes that follow payload in one read: record heads and small messages, which are copied from here. */
#define STASH_BYTES 4096
/* Bytes read from one connection in one progress(), so that no connection starves the others. */
#define READ_BUDGET_BYTES (1u << 20)
#define EVENTS 64
/* Grace period after a connection ended without BYE: the control link reports the death of a process earlier. */
#define CUT_MS 1000

static struct tcp_conn *conn_of(struct tcp_net *t, int peer, int channel)
{
    return &t->conns[ep_net_index(&t->net, peer, channel)];
}

static ep_status break_net(struct tcp_net *t, const struct tcp_conn *conn, ep_status status, const char *what)
{
    int peer = ep_net_index_peer(&t->net, conn->index);
    char address[TCP_ADDRESS_TEXT];

    tcp_address_print(&conn->remote, address);
    return ep_net_break(&t->net,
                        ep_fail(status, "network tcp: rank %d (%s), channel %d: %s", ep_net_rail(&t->net, peer),
                                address, conn->index % t->net.channels, what),
                        peer);
}

/* --- sending --- */

void tcp_conn_discard_output(struct tcp_conn *conn)
{
    conn->discards = true;
    conn->count = conn->n_held = 0;
    conn->open = NULL;
    conn->sent = conn->waiting = 0;
}

static bool is_lost(int error)
{
    return error == EPIPE || error == ECONNRESET || error == ECONNABORTED || error == ETIMEDOUT ||
           error == EHOSTUNREACH || error == ENETUNREACH || error == ENETDOWN || error == EHOSTDOWN ||
           error == ENOTCONN;
}

static size_t head_bytes(const struct record *record)
{
    return record->joined ? 0 : sizeof(record->head);
}

/* The pieces of memory to send next. */
static int gather(const struct tcp_conn *conn, struct iovec *ret_pieces)
{
    size_t skip = conn->sent;
    int n = 0;

    for (int i = 0; i < conn->count; i++) {
        const struct record *record = &conn->records[(conn->first + i) % RECORDS];
        size_t head = head_bytes(record);

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

static void count_sent(struct tcp_conn *conn, size_t n)
{
    conn->sent += n;
    conn->waiting -= n;
    while (conn->count) {
        const struct record *record = &conn->records[conn->first];
        size_t bytes = head_bytes(record) + record->bytes;

        if (conn->sent < bytes)
            break;
        if (conn->open == record)
            conn->open = NULL;
        conn->sent -= bytes;
        conn->first = (conn->first + 1) % RECORDS;
        conn->count--;
    }
}

/* For these two there is room. */
static struct record *next_record(struct tcp_conn *conn)
{
    return &conn->records[(conn->first + conn->count++) % RECORDS];
}

static struct record *append(struct tcp_conn *conn, uint32_t kind, uint64_t target, uint64_t amount)
{
    struct record *record = next_record(conn);

    *record = (struct record){.head = {.kind = kind, .number = conn->number++, .target = target, .amount = amount}};
    conn->waiting += sizeof(record->head);
    conn->open = NULL;
    return record;
}

/* Makes records of the held signals, as far as there is room. */
static void release_held(struct tcp_conn *conn)
{
    int n = 0;

    while (n < conn->n_held && conn->count < RECORDS) {
        append(conn, TCP_WIRE_SIGNAL, conn->held[n].index, conn->held[n].add);
        n++;
    }
    conn->n_held -= n;
    memmove(conn->held, conn->held + n, (size_t)conn->n_held * sizeof(conn->held[0]));
}

bool tcp_conn_push(struct tcp_conn *conn)
{
    struct iovec pieces[2 * RECORDS];
    struct msghdr message = {.msg_iov = pieces};
    bool moved = false;

    while (tcp_conn_has_output(conn) && conn->writable && !conn->discards) {
        ssize_t n;

        release_held(conn);
        message.msg_iovlen = (size_t)gather(conn, pieces);
        n = sendmsg(conn->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) {
            conn->writable = errno == ENOBUFS;
            break;
        }
        if (n < 0) {
            conn->send_error = is_lost(errno) ? 0 : errno;
            tcp_conn_discard_output(conn);
            break;
        }
        count_sent(conn, (size_t)n);
        moved = true;
    }
    return moved;
}

/* Is there room for another record? Otherwise it is made by sending, if the socket accepts anything. */
static bool make_room(struct tcp_conn *conn)
{
    return conn->discards || conn->count < RECORDS || (tcp_conn_push(conn) && conn->count < RECORDS);
}

void tcp_conn_queue_bye(struct tcp_conn *conn)
{
    if (conn->bye_queued || conn->discards)
        return;
    release_held(conn);
    if (conn->n_held || !make_room(conn) || conn->discards)
        return;
    append(conn, TCP_WIRE_BYE, 0, 0);
    conn->bye_queued = true;
}

/*
 * A put that continues where the last one ends, as those of the pieces of a message and of successive messages do,
 * becomes part of its record, so that the receiver reads them with one system call. Not once the head has been sent.
 */
static bool joins(const struct tcp_conn *conn, uint64_t offset)
{
    const struct record *open = conn->open;

    return open && open->head.target + open->head.amount == offset &&
           !(open == &conn->records[conn->first] && conn->sent > 0);
}

static bool tcp_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct tcp_conn *conn = conn_of(tcp_of(net), peer, channel);
    struct record *record;

    if (!make_room(conn))
        return false;
    if (conn->discards)
        return true; /* the peer has left or died, which the waits for it report */
    if (joins(conn, offset)) {
        record = next_record(conn);
        *record = (struct record){.joined = true};
        conn->open->head.amount += bytes;
    } else {
        record = conn->open = append(conn, TCP_WIRE_PUT, offset, bytes);
    }
    record->data = src;
    record->bytes = bytes;
    conn->waiting += bytes;
    if (conn->waiting >= EAGER_BYTES)
        tcp_conn_push(conn);
    return true;
}

/*
 * Holds the signal until the next send: later puts may join the record before it, and the next signal is added to it if
 * it is the same. Signals stay in order.
 */
static bool hold(struct tcp_conn *conn, uint32_t index, uint64_t add)
{
    if (conn->n_held && conn->held[conn->n_held - 1].index == index) {
        conn->held[conn->n_held - 1].add += add;
        return true;
    }
    if (conn->n_held == HELD)
        release_held(conn);
    if (conn->n_held == HELD)
        return false;
    conn->held[conn->n_held].index = index;
    conn->held[conn->n_held++].add = add;
    return true;
}

static bool tcp_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct tcp_conn *conn = conn_of(tcp_of(net), peer, channel);

    if (conn->discards)
        return true;
    if (!hold(conn, index, add) && !(tcp_conn_push(conn) && hold(conn, index, add)))
        return false;
    if (!net->batch_signals || (conn->count == 0 && conn->n_held == 1) || conn->waiting >= EAGER_BYTES)
        tcp_conn_push(conn);
    return true;
}

static bool tcp_flush_test(struct ep_net *net, int peer, int channel)
{
    struct tcp_conn *conn = conn_of(tcp_of(net), peer, channel);

    if (tcp_conn_has_output(conn))
        tcp_conn_push(conn);
    return !tcp_conn_has_output(conn);
}

/* --- receiving --- */

void tcp_conn_end(struct tcp_conn *conn, int error)
{
    conn->ended = true;
    conn->readable = false;
    conn->error = error;
    conn->ended_ns = ep_now_ns();
    tcp_conn_discard_output(conn);
}

/* One read: payload into the region, what follows into the stash. *ret_bytes 0: no data, or the end. */
static ep_status read_once(struct tcp_net *t, struct tcp_conn *conn, size_t *ret_bytes)
{
    unsigned char stash[STASH_BYTES];
    struct iovec pieces[2];
    size_t room = 0, direct;
    unsigned char *into = tcp_wire_get_buffer(&conn->in, &room);
    struct msghdr message = {.msg_iov = pieces};
    const char *wrong;
    ssize_t n;

    *ret_bytes = 0;
    if (into)
        pieces[message.msg_iovlen++] = (struct iovec){into, room};
    pieces[message.msg_iovlen++] = (struct iovec){stash, sizeof(stash)};
    /* Not readv(): if the program has just closed the socket, the number may be that of its pipe, which can block. */
    do
        n = recvmsg(conn->fd, &message, MSG_DONTWAIT);
    while (n < 0 && errno == EINTR);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
        conn->readable = false;
        return EP_OK;
    }
    if (n <= 0) {
        tcp_conn_end(conn, n < 0 ? errno : 0);
        return EP_OK;
    }
    direct = (size_t)n < room ? (size_t)n : room;
    tcp_wire_advance(&conn->in, direct);
    wrong = tcp_wire_consume(&conn->in, stash, (size_t)n - direct);
    *ret_bytes = (size_t)n;
    return wrong ? break_net(t, conn, EP_E_MISMATCH, wrong) : EP_OK;
}

static ep_status receive(struct tcp_net *t, struct tcp_conn *conn, bool *ret_moved)
{
    size_t bytes, received = 0;

    while (conn->readable && received < READ_BUDGET_BYTES) {
        EP_TRY(read_once(t, conn, &bytes));
        received += bytes;
    }
    /* After its BYE a peer reads no more, and sources of earlier puts may be freed. */
    if (conn->in.bye && !conn->discards)
        tcp_conn_discard_output(conn);
    *ret_moved |= received > 0;
    return EP_OK;
}

/* Edge-triggered, so that a busy socket costs no extra system call. */
static void poll_sockets(struct tcp_net *t)
{
    struct epoll_event events[EVENTS];
    int n = epoll_wait(t->epoll, events, EVENTS, 0);

    for (int i = 0; i < n; i++) {
        struct tcp_conn *conn = &t->conns[events[i].data.u32];

        conn->readable |= !conn->ended && (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR | EPOLLRDHUP));
        conn->writable |= (events[i].events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0;
    }
}

/* Cut by the network: a peer that left would have sent BYE, and the death of one would be known by now. */
static bool is_cut(const struct tcp_conn *conn)
{
    return conn->fd >= 0 && conn->ended && !conn->in.bye && ep_now_ns() - conn->ended_ns >= CUT_MS * UINT64_C(1000000);
}

static ep_status check_cut(struct tcp_net *t, const struct tcp_conn *conn)
{
    char what[128];

    if (t->net.tolerant || !is_cut(conn))
        return EP_OK;
    snprintf(what, sizeof(what), "the connection was cut: %s",
             conn->error ? strerror(conn->error) : "it ended without a BYE record");
    return break_net(t, conn, EP_E_PEER_DEAD, what);
}

static ep_status tcp_progress(struct ep_net *net, bool *ret_moved)
{
    struct tcp_net *t = tcp_of(net);
    bool moved = false;

    EP_TRY(ep_net_check(net));
    poll_sockets(t);
    FOR_EACH (conn, t->conns, t->n) {
        if (conn->readable)
            EP_TRY(receive(t, conn, &moved));
        if (tcp_conn_has_output(conn))
            moved |= tcp_conn_push(conn);
        if (conn->send_error)
            return break_net(t, conn, EP_E_SYSTEM, strerror(conn->send_error));
        if (conn->ended)
            EP_TRY(check_cut(t, conn));
    }
    *ret_moved = moved;
    return EP_OK;
}

static bool tcp_ended(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        const struct tcp_conn *conn = conn_of(t, peer, channel);

        if (!conn->ended && !conn->in.bye)
            return false;
    }
    return true;
}

static bool tcp_lost(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);

    return ANY_OF(channel, net->channels, is_cut(conn_of(t, peer, channel)));
}

/* Closing drops received data that was not read; shutdown() does so where a forked process holds the socket too. */
static ep_status tcp_revoke(struct ep_net *net, int peer)
{
    for (int channel = 0; channel < net->channels; channel++) {
        struct tcp_conn *conn = conn_of(tcp_of(net), peer, channel);

        tcp_conn_end(conn, 0);
        conn->send_error = 0;
        if (conn->fd < 0)
            continue;
        shutdown(conn->fd, SHUT_RDWR);
        ep_fd_close(conn->fd);
        conn->fd = -1;
    }
    return EP_OK;
}

const struct ep_net_tcp_context *ep_net_tcp_get_context(struct ep_net *net)
{
    return &tcp_of(net)->context;
}

int ep_net_tcp_detach_link(struct ep_net *net, int peer)
{
    struct tcp_net *t = tcp_of(net);
    int slot = ep_net_peer_index(net->node, peer), fd = t->links[slot];

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
    .lost = tcp_lost,
    .revoke = tcp_revoke,
};
