/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs_net.h"

#include "base/array.h"
#include "base/backoff.h"

#include <stdlib.h>
#include <string.h>

/* Completions polled at once. */
#define BATCH 32
/* Batches of one progress(): bounded, so that a flood of messages cannot starve the caller. */
#define BATCHES 16
/* Grace period after a queue pair failed without BYE: the control link reports the death of a process earlier. */
#define CUT_MS 1000
/* Most time that freeing an endpoint waits for the peers' NICs to receive data in flight. */
#define FREE_MS 2000
/* Interval of the checks of the local port; it is reported when two of them find it down. */
#define PORT_CHECK_MS 1000
/*
 * Most time between a failure that this rank reports as its own and the state of its port, if that is the cause: Linux
 * announces the loss of a carrier up to a second later. It is below the time after which a peer reports this rank.
 */
#define PORT_WAIT_MS 1000
/* progress() of the tcp endpoint costs a system call, so that only every 64th call makes it. */
#define TCP_POLL_INTERVAL 64

static struct verbs_net *verbs_of(struct ep_net *net)
{
    return (struct verbs_net *)net;
}

static struct verbs_conn *conn_of(struct verbs_net *v, int peer, int channel)
{
    return &v->conns[ep_net_index(&v->net, peer, channel)];
}

/* The endpoint breaks, by a failure of this rank or of the peer of `conn`; `what` and `why` are the text. */
static ep_status break_by(struct verbs_net *v, const struct verbs_conn *conn, bool by_own, ep_status status,
                          const char *what, const char *why)
{
    int peer = ep_net_index_peer(&v->net, conn->index);

    ep_fail(status, "network verbs: rank %d, channel %d, over %s: %s%s", ep_net_rail(&v->net, peer),
            conn->index % v->net.channels, v->device.name, what, why);
    return ep_net_break(&v->net, status, by_own ? -1 : peer);
}

static ep_status break_net(struct verbs_net *v, const struct verbs_conn *conn, ep_status status, const char *what)
{
    return break_by(v, conn, false, status, what, "");
}

/* Errors that the death or departure of a peer can cause. */
static bool is_peer_failure(enum ibv_wc_status why)
{
    return why == IBV_WC_RETRY_EXC_ERR || why == IBV_WC_RNR_RETRY_EXC_ERR || why == IBV_WC_WR_FLUSH_ERR ||
           why == IBV_WC_REM_ABORT_ERR;
}

/* The NIC of this rank could not read or write its memory. */
static bool is_own_failure(enum ibv_wc_status why)
{
    return why == IBV_WC_LOC_LEN_ERR || why == IBV_WC_LOC_QP_OP_ERR || why == IBV_WC_LOC_PROT_ERR ||
           why == IBV_WC_LOC_ACCESS_ERR;
}

/*
 * The queue pair has failed, the end of the peer cannot be the cause, and report_failures() has yet to report it. Until
 * then operations on it are neither accepted nor complete, and it is not taken for the end of the peer.
 */
static bool is_failing(const struct verbs_conn *conn)
{
    return conn->qp && conn->failed_ns && !is_peer_failure(conn->why);
}

/* --- sending --- */

/* Posts one operation. `src` is in a source, in the ring, or short enough to be sent inline. */
static bool post(struct verbs_net *v, struct verbs_conn *conn, enum ibv_wr_opcode opcode, const void *src, size_t bytes,
                 uint64_t offset, const struct verbs_source *source)
{
    struct ibv_mr *mr = source ? source->mr : v->copies_mr;
    bool is_inline = !source && bytes <= conn->inline_bytes;
    bool is_payload = offset >= v->net.payload_base;
    struct ibv_sge piece = {.addr = (uintptr_t)src, .length = (uint32_t)bytes, .lkey = mr->lkey};
    struct ibv_send_wr request = {.wr_id = (uint64_t)conn->index,
                                  .sg_list = &piece,
                                  .num_sge = 1,
                                  .opcode = opcode,
                                  .send_flags = IBV_SEND_SIGNALED | (is_inline ? IBV_SEND_INLINE : 0u)};
    struct ibv_send_wr *bad = NULL;
    int error;

    if (opcode == IBV_WR_RDMA_WRITE && is_payload) {
        request.wr.rdma.remote_addr = conn->remote_payload + (offset - v->net.payload_base);
        request.wr.rdma.rkey = conn->remote_payload_key;
    } else if (opcode == IBV_WR_RDMA_WRITE) {
        request.wr.rdma.remote_addr = conn->remote_region + offset;
        request.wr.rdma.rkey = conn->remote_key;
    }
    error = ibv_post_send(conn->qp, &request, &bad);
    if (error) {
        break_by(v, conn, false, EP_E_SYSTEM, "ibv_post_send: ", strerror(error));
        return false;
    }
    conn->ends[(conn->first + conn->count++) % VERBS_SENDS] = conn->tail;
    conn->posted++;
    if (source)
        conn->last_attached = conn->posted;
    return true;
}

/*
 * Posts as much as fits into one operation, which reads it from the source; without one, copies it into the ring first,
 * as far as its end, unless it is sent inline. Returns its bytes.
 */
static size_t post_piece(struct verbs_net *v, struct verbs_conn *conn, enum ibv_wr_opcode opcode,
                         const unsigned char *src, size_t bytes, uint64_t offset, const struct verbs_source *source)
{
    size_t at = conn->tail % v->ring_bytes, piece = bytes < v->device.max_message ? bytes : v->device.max_message;

    if (!source && bytes > conn->inline_bytes) {
        if (piece > v->ring_bytes - at)
            piece = v->ring_bytes - at;
        src = memcpy(conn->ring + at, src, piece);
        conn->tail += piece;
    }
    return post(v, conn, opcode, src, piece, offset, source) ? piece : 0;
}

/* Upper bound of the operations for so many bytes: pieces end at max_message and at the end of the ring. */
static size_t operations_of(const struct verbs_net *v, size_t bytes)
{
    return bytes / v->device.max_message + 3;
}

/* Whether the send queue has room for so many bytes now, and the ring for those of them that are to be copied. */
static bool has_room(const struct verbs_net *v, const struct verbs_conn *conn, size_t bytes, size_t copied)
{
    return copied <= v->ring_bytes - (size_t)(conn->tail - conn->head) &&
           conn->count + operations_of(v, bytes) <= VERBS_SENDS;
}

/* Padding at the end of the ring is reclaimed with the operation after it, or here if nothing is outstanding. */
static void reclaim_padding(struct verbs_conn *conn)
{
    if (conn->count == 0)
        conn->head = conn->tail;
}

static bool verbs_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct verbs_net *v = verbs_of(net);
    struct verbs_conn *conn = conn_of(v, peer, channel);
    const struct verbs_source *source = verbs_find_source(v, src, bytes);
    uint64_t at = offset < net->payload_base ? offset : offset - net->payload_base;
    const unsigned char *from = src;

    if (v->net.broken != EP_OK || is_failing(conn))
        return false;
    if (conn->discards)
        return true; /* the peer has left or died, which the waits for it report */
    reclaim_padding(conn);
    if (source && !source->device && bytes <= conn->inline_bytes)
        source = NULL;
    if (at > net->region_bytes || bytes > net->region_bytes - at || bytes > v->ring_bytes ||
        operations_of(v, bytes) > VERBS_SENDS) {
        break_net(v, conn, EP_E_OVERFLOW, "a put larger than the region or the ring");
        return false;
    }
    if (!has_room(v, conn, bytes, source ? 0 : bytes))
        return false;
    while (bytes > 0) {
        size_t done = post_piece(v, conn, IBV_WR_RDMA_WRITE, from, bytes, offset, source);

        if (!done)
            return false;
        from += done;
        offset += done;
        bytes -= done;
    }
    return true;
}

static bool send_record(struct verbs_net *v, struct verbs_conn *conn, enum verbs_kind kind, uint32_t index,
                        uint64_t add)
{
    struct verbs_record record = {.kind = kind, .index = index, .add = add};
    size_t left = v->ring_bytes - conn->tail % v->ring_bytes, padding = 0;

    if (v->net.broken != EP_OK || is_failing(conn))
        return false;
    if (conn->discards)
        return true;
    reclaim_padding(conn);
    /* A record must not wrap around the end of the ring. */
    if (left < sizeof(record) && conn->inline_bytes < sizeof(record))
        padding = left;
    if (!has_room(v, conn, padding + sizeof(record), padding + sizeof(record)))
        return false;
    conn->tail += padding;
    return post_piece(v, conn, IBV_WR_SEND, (const unsigned char *)&record, sizeof(record), 0, NULL) != 0;
}

static bool verbs_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct verbs_net *v = verbs_of(net);

    return send_record(v, conn_of(v, peer, channel), VERBS_SIGNAL, index, add);
}

/* What was copied into the ring is sent without further calls; sources are in use until their operation is complete. */
static bool verbs_flush_test(struct ep_net *net, int peer, int channel)
{
    const struct verbs_conn *conn = conn_of(verbs_of(net), peer, channel);

    return !is_failing(conn) && (conn->discards || conn->posted - conn->count >= conn->last_attached);
}

/* --- completions --- */

static void fail_conn(struct verbs_conn *conn, enum ibv_wc_status why)
{
    /* Operations after the first error fail with WR_FLUSH_ERR, which does not tell the cause. */
    if (!conn->failed_ns || (conn->why == IBV_WC_WR_FLUSH_ERR && why != IBV_WC_WR_FLUSH_ERR))
        conn->why = why;
    if (!conn->failed_ns)
        conn->failed_ns = ep_now_ns();
    conn->discards = true;
}

static ep_status fail_port(struct verbs_net *v, const struct verbs_conn *conn, const char *why)
{
    return break_by(v, conn, true, EP_E_SYSTEM, "the port of this rank is down: ", why);
}

/* A queue pair error does not tell which end of the link is down; the state of the local port does. */
static ep_status check_port(struct verbs_net *v, const struct verbs_conn *conn)
{
    return verbs_device_is_down(&v->device) ? fail_port(v, conn, v->device.library->wc_status_str(conn->why)) : EP_OK;
}

/* A rank that only receives has no operation that could fail: it would wait for its deadline, and name its peer. */
static ep_status watch_port(struct verbs_net *v)
{
    uint64_t now = ep_now_ns();

    if (now < v->port_check_ns)
        return EP_OK;
    v->port_check_ns = now + PORT_CHECK_MS * UINT64_C(1000000);
    v->port_downs = verbs_device_is_down(&v->device) ? v->port_downs + 1 : 0;
    return v->port_downs < 2 ? EP_OK : fail_port(v, &v->conns[0], "it has no link");
}

/*
 * Reports queue pairs that failed for another reason than the end of the peer. The port is checked for a while first,
 * since operations may fail before its state tells that it is down; not longer than a part of the deadline, at whose
 * end another rank would be named.
 */
static ep_status report_failures(struct verbs_net *v)
{
    int wait_ms = v->net.timeout_ms / 4 < PORT_WAIT_MS ? v->net.timeout_ms / 4 : PORT_WAIT_MS;

    FOR_EACH (conn, v->conns, v->n) {
        if (!is_failing(conn))
            continue;
        EP_TRY(check_port(v, conn));
        if (ep_now_ns() - conn->failed_ns < (uint64_t)wait_ms * 1000000u)
            continue;
        return break_by(v, conn, is_own_failure(conn->why), EP_E_SYSTEM,
                        "an operation failed: ", v->device.library->wc_status_str(conn->why));
    }
    return EP_OK;
}

static void complete_send(struct verbs_net *v, const struct ibv_wc *done)
{
    struct verbs_conn *conn = &v->conns[done->wr_id];

    if (!conn->qp)
        return; /* revoked */
    if (done->status != IBV_WC_SUCCESS)
        fail_conn(conn, done->status);
    if (!conn->count)
        return;
    conn->head = conn->ends[conn->first];
    conn->first = (conn->first + 1) % VERBS_SENDS;
    conn->count--;
}

int verbs_post_receive(struct verbs_net *v, struct verbs_conn *conn, unsigned slot)
{
    struct ibv_sge piece = {
        .addr = (uintptr_t)&conn->received[slot], .length = sizeof(conn->received[slot]), .lkey = v->copies_mr->lkey};
    struct ibv_recv_wr request = {.wr_id = (uint64_t)conn->index << 32 | slot, .sg_list = &piece, .num_sge = 1};
    struct ibv_recv_wr *bad = NULL;

    return ibv_post_recv(conn->qp, &request, &bad);
}

static ep_status complete_receive(struct verbs_net *v, const struct ibv_wc *done)
{
    struct verbs_conn *conn = &v->conns[done->wr_id >> 32];
    unsigned slot = (unsigned)(done->wr_id & UINT32_MAX);
    const struct verbs_record *record = &conn->received[slot];
    int error;

    if (!conn->qp)
        return EP_OK; /* revoked */
    if (done->status != IBV_WC_SUCCESS) {
        fail_conn(conn, done->status);
        return EP_OK;
    }
    if (done->byte_len != sizeof(*record))
        return break_net(v, conn, EP_E_MISMATCH, "a message of a wrong size");
    if (record->kind == VERBS_BYE)
        conn->bye_received = conn->discards = true;
    else if (record->kind == VERBS_HELLO)
        conn->hello_received = true;
    else if (record->kind != VERBS_SIGNAL)
        return break_net(v, conn, EP_E_MISMATCH, "a record of unknown kind");
    else if (record->index >= v->net.n_signals)
        return break_net(v, conn, EP_E_MISMATCH, "a signal that does not exist");
    else
        v->net.signals[record->index] += record->add;
    error = verbs_post_receive(v, conn, slot);
    return error ? break_by(v, conn, false, EP_E_SYSTEM, "ibv_post_recv: ", strerror(error)) : EP_OK;
}

/* Sets *ret_moved if there were completions, else leaves it unchanged. */
static ep_status poll_all(struct verbs_net *v, bool *ret_moved)
{
    struct ibv_wc done[BATCH];
    int n = BATCH;

    for (int batch = 0; batch < BATCHES && n == BATCH; batch++) {
        n = ibv_poll_cq(v->receives, BATCH, done);
        for (int i = 0; i < n; i++)
            EP_TRY(complete_receive(v, &done[i]));
        *ret_moved |= n > 0;
    }
    n = n < 0 ? n : BATCH;
    for (int batch = 0; batch < BATCHES && n == BATCH; batch++) {
        n = ibv_poll_cq(v->sends, BATCH, done);
        for (int i = 0; i < n; i++)
            complete_send(v, &done[i]);
        *ret_moved |= n > 0;
    }
    return n < 0 ? break_net(v, &v->conns[0], EP_E_SYSTEM, "ibv_poll_cq failed") : EP_OK;
}

/* The queue pair failed, and neither BYE nor the end of the tcp connection followed within CUT_MS. */
static bool is_cut(const struct verbs_conn *conn)
{
    return conn->failed_ns && !is_failing(conn) && !conn->bye_received && !conn->peer_closed_ns &&
           ep_now_ns() - conn->failed_ns >= CUT_MS * UINT64_C(1000000);
}

static ep_status fail_cut(struct verbs_net *v, const struct verbs_conn *conn)
{
    EP_TRY(check_port(v, conn));
    return break_by(v, conn, false, EP_E_PEER_DEAD,
                    "the queue pair failed: ", v->device.library->wc_status_str(conn->why));
}

/*
 * Peers whose tcp connection has ended: their last puts arrive within CUT_MS, and puts to them are discarded, because
 * their queue pairs no longer exist.
 */
static void note_closed_peers(struct verbs_net *v)
{
    FOR_EACH (conn, v->conns, v->n) {
        if (conn->qp && !conn->peer_closed_ns &&
            v->net.tcp->ops->ended(v->net.tcp, ep_net_index_peer(&v->net, conn->index))) {
            conn->peer_closed_ns = ep_now_ns();
            conn->discards = true;
        }
    }
}

/* Handles failed queue pairs and the tcp endpoint. */
static ep_status check_ends(struct verbs_net *v)
{
    bool moved, any = false;
    ep_status status;

    for (int i = 0; i < v->n; i++)
        any |= (v->conns[i].failed_ns && !v->conns[i].bye_received) || is_failing(&v->conns[i]);
    if (!any && v->tcp_polls++ % TCP_POLL_INTERVAL)
        return EP_OK;
    EP_TRY(watch_port(v));
    EP_TRY(report_failures(v));
    status = v->net.tcp->ops->progress(v->net.tcp, &moved);
    if (status != EP_OK)
        return ep_net_break(&v->net, status, v->net.tcp->broken_by - 1);
    note_closed_peers(v);
    for (int i = 0; any && !v->net.tolerant && i < v->n; i++)
        if (is_cut(&v->conns[i]))
            return fail_cut(v, &v->conns[i]);
    return EP_OK;
}

static ep_status verbs_progress(struct ep_net *net, bool *ret_moved)
{
    struct verbs_net *v = verbs_of(net);
    bool moved = false;

    EP_TRY(ep_net_check(net));
    EP_TRY(poll_all(v, &moved));
    EP_TRY(check_ends(v));
    *ret_moved = moved;
    return EP_OK;
}

/* --- ended and lost peers --- */

static bool verbs_ended(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        const struct verbs_conn *conn = conn_of(v, peer, channel);

        if (is_failing(conn) ||
            (!conn->failed_ns && !conn->bye_received &&
             (!conn->peer_closed_ns || ep_now_ns() - conn->peer_closed_ns < CUT_MS * UINT64_C(1000000))))
            return false;
    }
    return true;
}

static bool verbs_lost(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++)
        if (is_cut(conn_of(v, peer, channel)))
            return true;
    return v->net.tcp->ops->lost(v->net.tcp, peer);
}

/*
 * A destroyed queue pair cannot be written through; the region stays registered for the other peers. Completions of the
 * destroyed queue pair may still be in the completion queues.
 */
static ep_status verbs_revoke(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        struct verbs_conn *conn = conn_of(v, peer, channel);
        int error = conn->qp ? v->device.library->destroy_qp(conn->qp) : 0;

        if (error)
            return ep_fail_errno(EP_E_SYSTEM, error, "network verbs: ending a queue pair of %s", v->device.name);
        conn->qp = NULL;
        conn->bye_received = conn->bye_sent = conn->discards = true;
        conn->head = conn->tail;
        conn->count = 0;
    }
    return v->net.tcp->ops->revoke(v->net.tcp, peer);
}

/* --- opening --- */

/* A connection without a message in each direction: the first one that failed, else the first that is pending. */
static const struct verbs_conn *find_unverified(const struct verbs_net *v)
{
    const struct verbs_conn *unverified = NULL;

    FOR_EACH (conn, v->conns, v->n) {
        if (conn->failed_ns)
            return conn;
        if (!unverified && conn->qp && (!conn->hello_received || conn->count > 0))
            unverified = conn;
    }
    return unverified;
}

ep_status verbs_exchange_hello(struct verbs_net *v, uint64_t deadline_ns, struct ep_net_tcp_watch *watch,
                               const struct verbs_conn **ret_unverified)
{
    const struct verbs_conn *unverified;
    bool moved;

    for (int i = 0; i < v->n; i++)
        if (v->conns[i].qp && !send_record(v, &v->conns[i], VERBS_HELLO, 0, 0))
            return ep_net_check(&v->net);
    do {
        moved = false;
        EP_TRY(poll_all(v, &moved));
        EP_TRY(report_failures(v));
        EP_TRY(ep_net_tcp_check_ranks(watch));
        unverified = find_unverified(v);
        if (unverified && !moved)
            ep_backoff_sleep();
    } while (unverified && (!unverified->failed_ns || is_failing(unverified)) && ep_now_ns() < deadline_ns);
    *ret_unverified = unverified;
    return EP_OK;
}

/* --- closing --- */

/* Polls until the peers have received everything, or the timeout; posting receives lets the peers finish as well. */
static void send_bye(struct verbs_net *v)
{
    uint64_t deadline_ns = ep_deadline_ns(v->net.timeout_ms < FREE_MS ? v->net.timeout_ms : FREE_MS);
    bool waits = true, moved;

    while (waits && ep_now_ns() < deadline_ns) {
        moved = waits = false;
        if (poll_all(v, &moved) != EP_OK)
            return;
        FOR_EACH (conn, v->conns, v->n) {
            if (!conn->bye_sent)
                conn->bye_sent = is_failing(conn) || send_record(v, conn, VERBS_BYE, 0, 0);
            /* A peer that has sent BYE may close its queue pair without acknowledging ours. */
            waits |= !conn->bye_sent || (conn->count > 0 && !conn->failed_ns && !conn->bye_received);
        }
        if (waits && !moved)
            ep_backoff_sleep();
    }
}

/* After the end of the queue pairs no peer can write to the memory that is freed here. */
static void verbs_free(struct ep_net *net)
{
    struct verbs_net *v = verbs_of(net);
    const struct verbs_library *library = v->device.library;

    if (net->broken == EP_OK && !net->abandoned)
        send_bye(v);
    if (net->tcp) {
        net->tcp->abandoned = net->abandoned || net->broken != EP_OK;
        net->tcp->ops->free(net->tcp);
    }
    for (int i = 0; v->conns && i < v->n; i++)
        if (v->conns[i].qp)
            library->destroy_qp(v->conns[i].qp);
    if (v->sends)
        library->destroy_cq(v->sends);
    if (v->receives)
        library->destroy_cq(v->receives);
    verbs_memory_close(v);
    if (v->pd)
        library->dealloc_pd(v->pd);
    verbs_device_close(&v->device);
    free(v->conns);
    ep_net_free(net);
}

const struct ep_net_ops verbs_ops = {
    .name = "verbs",
    .put = verbs_put,
    .signal = verbs_signal,
    .flush_test = verbs_flush_test,
    .progress = verbs_progress,
    .free = verbs_free,
    .ended = verbs_ended,
    .lost = verbs_lost,
    .revoke = verbs_revoke,
    .attach = verbs_attach,
};
