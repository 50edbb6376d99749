/* SPDX-License-Identifier: Apache-2.0 */
#include "net/verbs.h"

#include "base/clock.h"
#include "net/verbs_net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Completions that are taken at once. */
#define BATCH 32
/* Batches of one progress(): bounded, so that a flood cannot keep the caller from its own work. */
#define BATCHES 16
/* A queue pair that failed without a farewell: the control link reports a death sooner. */
#define CUT_MS 1000
/* The peers' NICs take what is on its way when this endpoint is freed. */
#define FREE_MS 2000
/* The endpoint beside this one costs a system call. */
#define LOOK_EVERY 64

static struct verbs_net *verbs_of(struct ep_net *net)
{
    return (struct verbs_net *)net;
}

static struct verbs_line *line_of(struct verbs_net *v, int peer, int channel)
{
    return &v->lines[ep_net_slot(v->net.node, peer) * v->net.channels + channel];
}

static int peer_of(const struct verbs_net *v, const struct verbs_line *line)
{
    return ep_net_peer(v->net.node, line->index / v->net.channels);
}

static ep_status break_net(struct verbs_net *v, const struct verbs_line *line, ep_status status, const char *what)
{
    if (v->broken == EP_OK) {
        v->broken = status;
        v->net.broken_by = 1 + peer_of(v, line);
        snprintf(v->reason, sizeof(v->reason), "network verbs: rank %d, channel %d, over %s: %s",
                 ep_net_rail_rank(v->rank, v->ranks_per_node, peer_of(v, line)), line->index % v->net.channels,
                 v->device.name, what);
    }
    return ep_fail(v->broken, "%s", v->reason);
}

/* --- sending --- */

/* One operation; `src` inside of the ring, or short enough to be taken with the request. Its end in the ring is `end`.
 */
static bool post(struct verbs_net *v, struct verbs_line *line, enum ibv_wr_opcode opcode, const void *src, size_t bytes,
                 uint64_t offset, uint64_t end)
{
    struct ibv_sge piece = {.addr = (uintptr_t)src, .length = (uint32_t)bytes, .lkey = v->copies_mr->lkey};
    struct ibv_send_wr request = {.wr_id = (uint64_t)line->index,
                                  .sg_list = &piece,
                                  .num_sge = 1,
                                  .opcode = opcode,
                                  .send_flags =
                                      IBV_SEND_SIGNALED | (bytes <= line->inline_bytes ? IBV_SEND_INLINE : 0u)};
    struct ibv_send_wr *bad = NULL;
    char what[96];
    int error;

    if (opcode == IBV_WR_RDMA_WRITE) {
        request.wr.rdma.remote_addr = line->far_region + offset;
        request.wr.rdma.rkey = line->far_key;
    }
    error = ibv_post_send(line->qp, &request, &bad);
    if (error) {
        snprintf(what, sizeof(what), "ibv_post_send: %s", strerror(error));
        break_net(v, line, EP_E_SYSTEM, what);
        return false;
    }
    line->ends[(line->first + line->count++) % VERBS_SENDS] = end;
    return true;
}

/* Copies into the ring as far as its end is not reached, and no more than an operation takes; posts that. */
static size_t post_piece(struct verbs_net *v, struct verbs_line *line, enum ibv_wr_opcode opcode,
                         const unsigned char *src, size_t bytes, uint64_t offset)
{
    size_t at = line->tail % v->ring_bytes, piece = bytes;

    if (bytes <= line->inline_bytes)
        return post(v, line, opcode, src, bytes, offset, line->tail) ? bytes : 0;
    if (piece > v->ring_bytes - at)
        piece = v->ring_bytes - at;
    if (piece > v->device.max_message)
        piece = v->device.max_message;
    memcpy(line->ring + at, src, piece);
    line->tail += piece;
    return post(v, line, opcode, line->ring + at, piece, offset, line->tail) ? piece : 0;
}

/* The most that so many bytes take: the last piece, and one at the end of the ring. */
static size_t operations_of(const struct verbs_net *v, size_t bytes)
{
    return bytes / v->device.max_message + 3;
}

/* Whether there is room for so many bytes now, in as many operations as they may take. */
static bool has_room(const struct verbs_net *v, const struct verbs_line *line, size_t bytes)
{
    return bytes <= v->ring_bytes - (size_t)(line->tail - line->head) &&
           line->count + operations_of(v, bytes) <= VERBS_SENDS;
}

/* The end of the ring that a record did not fit into comes free with what is under way: here nothing is. */
static void forget_padding(struct verbs_line *line)
{
    if (line->count == 0)
        line->head = line->tail;
}

static bool verbs_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct verbs_net *v = verbs_of(net);
    struct verbs_line *line = line_of(v, peer, channel);
    const unsigned char *from = src;

    if (v->broken != EP_OK)
        return false;
    if (line->discards)
        return true; /* it has left or died: who waits for it gets that failure */
    forget_padding(line);
    if (offset > net->region_bytes || bytes > net->region_bytes - offset || bytes > v->ring_bytes ||
        operations_of(v, bytes) > VERBS_SENDS) {
        break_net(v, line, EP_E_OVERFLOW, "a put that no region and no ring has room for");
        return false;
    }
    if (!has_room(v, line, bytes))
        return false;
    while (bytes > 0) {
        size_t done = post_piece(v, line, IBV_WR_RDMA_WRITE, from, bytes, offset);

        if (!done)
            return false;
        from += done;
        offset += done;
        bytes -= done;
    }
    return true;
}

static bool send_record(struct verbs_net *v, struct verbs_line *line, enum verbs_kind kind, uint32_t index,
                        uint64_t add)
{
    struct verbs_record record = {.kind = kind, .index = index, .add = add};
    size_t left = v->ring_bytes - line->tail % v->ring_bytes, padding = 0;

    if (v->broken != EP_OK)
        return false;
    if (line->discards)
        return true;
    forget_padding(line);
    /* In one piece: not across the end of the ring. */
    if (left < sizeof(record) && line->inline_bytes < sizeof(record))
        padding = left;
    if (!has_room(v, line, padding + sizeof(record)))
        return false;
    line->tail += padding;
    return post_piece(v, line, IBV_WR_SEND, (const unsigned char *)&record, sizeof(record), 0) != 0;
}

static bool verbs_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct verbs_net *v = verbs_of(net);

    return send_record(v, line_of(v, peer, channel), VERBS_SIGNAL, index, add);
}

/* What was put is in the ring, and the NIC goes on by itself. */
static bool verbs_flush_test(struct ep_net *net, int peer, int channel)
{
    (void)net;
    (void)peer;
    (void)channel;
    return true;
}

/* --- completions --- */

static void fail_line(struct verbs_line *line, enum ibv_wc_status why)
{
    /* What follows the first error is flushed, and says less. */
    if (!line->failed_ns || (line->why == IBV_WC_WR_FLUSH_ERR && why != IBV_WC_WR_FLUSH_ERR))
        line->why = why;
    if (!line->failed_ns)
        line->failed_ns = ep_now_ns();
    line->discards = true;
}

/* What a peer that has died or left brings about; all else is a fault of this rank or of epkit. */
static bool is_of_peer(enum ibv_wc_status why)
{
    return why == IBV_WC_RETRY_EXC_ERR || why == IBV_WC_RNR_RETRY_EXC_ERR || why == IBV_WC_WR_FLUSH_ERR ||
           why == IBV_WC_REM_ABORT_ERR || why == IBV_WC_REM_OP_ERR;
}

/* A queue pair cannot distinguish the peer's end of the cable from this one, the port can. */
static ep_status check_port(struct verbs_net *v, const struct verbs_line *line, enum ibv_wc_status why)
{
    struct ibv_port_attr port;
    char what[160];

    memset(&port, 0, sizeof(port));
    if (v->device.library->query_port(v->device.context, v->device.port, &port) != 0 || port.state == IBV_PORT_ACTIVE)
        return EP_OK;
    snprintf(what, sizeof(what), "the port of this rank is down: %s", v->device.library->wc_status_str(why));
    return break_net(v, line, EP_E_SYSTEM, what);
}

static ep_status take_failure(struct verbs_net *v, struct verbs_line *line, enum ibv_wc_status why)
{
    char what[128];

    fail_line(line, why);
    if (is_of_peer(why))
        return EP_OK;
    EP_TRY(check_port(v, line, why));
    snprintf(what, sizeof(what), "an operation failed: %s", v->device.library->wc_status_str(why));
    return break_net(v, line, EP_E_SYSTEM, what);
}

static ep_status take_sent(struct verbs_net *v, const struct ibv_wc *done)
{
    struct verbs_line *line = &v->lines[done->wr_id];

    if (!line->qp)
        return EP_OK; /* revoked */
    if (done->status != IBV_WC_SUCCESS)
        EP_TRY(take_failure(v, line, done->status));
    if (!line->count)
        return EP_OK;
    line->head = line->ends[line->first];
    line->first = (line->first + 1) % VERBS_SENDS;
    line->count--;
    return EP_OK;
}

int verbs_post_receive(struct verbs_net *v, struct verbs_line *line, unsigned slot)
{
    struct ibv_sge piece = {
        .addr = (uintptr_t)&line->arrivals[slot], .length = sizeof(line->arrivals[slot]), .lkey = v->copies_mr->lkey};
    struct ibv_recv_wr request = {.wr_id = (uint64_t)line->index << 32 | slot, .sg_list = &piece, .num_sge = 1};
    struct ibv_recv_wr *bad = NULL;

    return ibv_post_recv(line->qp, &request, &bad);
}

static ep_status take_arrival(struct verbs_net *v, const struct ibv_wc *done)
{
    struct verbs_line *line = &v->lines[done->wr_id >> 32];
    unsigned slot = (unsigned)(done->wr_id & UINT32_MAX);
    const struct verbs_record *record = &line->arrivals[slot];
    char what[96];
    int error;

    if (!line->qp)
        return EP_OK; /* revoked */
    if (done->status != IBV_WC_SUCCESS)
        return take_failure(v, line, done->status);
    if (done->byte_len != sizeof(*record))
        return break_net(v, line, EP_E_MISMATCH, "a message that is no record");
    if (record->kind == VERBS_BYE)
        line->bye = line->discards = true;
    else if (record->kind == VERBS_HELLO)
        line->met = true;
    else if (record->kind != VERBS_SIGNAL)
        return break_net(v, line, EP_E_MISMATCH, "a record of unknown kind");
    else if (record->index >= v->net.n_signals)
        return break_net(v, line, EP_E_MISMATCH, "a signal that does not exist");
    else
        v->net.signals[record->index] += record->add;
    error = verbs_post_receive(v, line, slot);
    if (!error)
        return EP_OK;
    snprintf(what, sizeof(what), "ibv_post_recv: %s", strerror(error));
    return break_net(v, line, EP_E_SYSTEM, what);
}

/* *ret_moved is left alone where nothing has come. */
static ep_status poll_all(struct verbs_net *v, bool *ret_moved)
{
    struct ibv_wc done[BATCH];
    int n = BATCH;

    for (int batch = 0; batch < BATCHES && n == BATCH; batch++) {
        n = ibv_poll_cq(v->receives, BATCH, done);
        for (int i = 0; i < n; i++)
            EP_TRY(take_arrival(v, &done[i]));
        *ret_moved |= n > 0;
    }
    n = n < 0 ? n : BATCH;
    for (int batch = 0; batch < BATCHES && n == BATCH; batch++) {
        n = ibv_poll_cq(v->sends, BATCH, done);
        for (int i = 0; i < n; i++)
            EP_TRY(take_sent(v, &done[i]));
        *ret_moved |= n > 0;
    }
    return n < 0 ? break_net(v, &v->lines[0], EP_E_SYSTEM, "ibv_poll_cq failed") : EP_OK;
}

/* Failed, and neither a farewell nor the endpoint beside this one has explained it in time. */
static bool is_cut(const struct verbs_line *line)
{
    return line->failed_ns && !line->bye && !line->gone_ns &&
           ep_now_ns() - line->failed_ns >= CUT_MS * UINT64_C(1000000);
}

static ep_status fail_cut(struct verbs_net *v, const struct verbs_line *line)
{
    char what[160];

    EP_TRY(check_port(v, line, line->why));
    snprintf(what, sizeof(what), "the queue pair failed: %s", v->device.library->wc_status_str(line->why));
    return break_net(v, line, EP_E_PEER_DEAD, what);
}

/*
 * Peers whose connection beside the queue pairs has ended: what they had put is there a while later at most, and what
 * is put to them has no queue pair to arrive at.
 */
static void note_gone(struct verbs_net *v)
{
    for (int i = 0; i < v->n; i++) {
        struct verbs_line *line = &v->lines[i];

        if (line->qp && !line->gone_ns && v->tcp->ops->ended(v->tcp, peer_of(v, line))) {
            line->gone_ns = ep_now_ns();
            line->discards = true;
        }
    }
}

/* Queue pairs that failed, and the endpoint beside this one. */
static ep_status check_ends(struct verbs_net *v)
{
    bool moved, any = false;
    ep_status status;

    for (int i = 0; i < v->n; i++)
        any |= v->lines[i].failed_ns && !v->lines[i].bye;
    if (!any && v->looks++ % LOOK_EVERY)
        return EP_OK;
    status = v->tcp->ops->progress(v->tcp, &moved);
    if (status != EP_OK) {
        v->broken = status;
        v->net.broken_by = v->tcp->broken_by;
        snprintf(v->reason, sizeof(v->reason), "%s", ep_last_error());
        return status;
    }
    note_gone(v);
    for (int i = 0; any && !v->tolerant && i < v->n; i++)
        if (is_cut(&v->lines[i]))
            return fail_cut(v, &v->lines[i]);
    return EP_OK;
}

static ep_status verbs_progress(struct ep_net *net, bool *ret_moved)
{
    struct verbs_net *v = verbs_of(net);
    bool moved = false;

    if (v->broken != EP_OK)
        return ep_fail(v->broken, "%s", v->reason);
    EP_TRY(poll_all(v, &moved));
    EP_TRY(check_ends(v));
    *ret_moved = moved;
    return EP_OK;
}

/* --- beside it --- */

static bool verbs_ended(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        const struct verbs_line *line = line_of(v, peer, channel);

        if (!line->failed_ns && !line->bye &&
            (!line->gone_ns || ep_now_ns() - line->gone_ns < CUT_MS * UINT64_C(1000000)))
            return false;
    }
    return true;
}

static bool verbs_lost(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++)
        if (is_cut(line_of(v, peer, channel)))
            return true;
    return v->tcp->ops->lost(v->tcp, peer);
}

/*
 * A queue pair that is gone writes nothing: the region stays registered for the other peers, and no queue pair that
 * knows its key leads here from that one. What has come on it may still lie in the completion queues.
 */
static ep_status verbs_revoke(struct ep_net *net, int peer)
{
    struct verbs_net *v = verbs_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        struct verbs_line *line = line_of(v, peer, channel);
        int error = line->qp ? v->device.library->destroy_qp(line->qp) : 0;

        if (error)
            return ep_fail_errno(EP_E_SYSTEM, error, "network verbs: ending a queue pair of %s", v->device.name);
        line->qp = NULL;
        line->bye = line->said = line->discards = true;
        line->head = line->tail;
        line->count = 0;
    }
    return v->tcp->ops->revoke(v->tcp, peer);
}

static int verbs_take_link(struct ep_net *net, int peer)
{
    struct ep_net *tcp = verbs_of(net)->tcp;

    return tcp->ops->take_link(tcp, peer);
}

struct ep_net *ep_net_verbs_get_tcp(struct ep_net *net)
{
    return verbs_of(net)->tcp;
}

/* --- opening --- */

/* The first line that has not carried a message each way; one that failed before one that may still come. */
static const struct verbs_line *find_absent(const struct verbs_net *v)
{
    const struct verbs_line *absent = NULL;

    for (int i = 0; i < v->n; i++) {
        const struct verbs_line *line = &v->lines[i];

        if (line->failed_ns)
            return line;
        if (!absent && line->qp && (!line->met || line->count > 0))
            absent = line;
    }
    return absent;
}

ep_status verbs_meet(struct verbs_net *v, uint64_t deadline_ns, const struct verbs_line **ret_absent)
{
    const struct timespec backoff = {.tv_nsec = 50000};
    const struct verbs_line *absent;
    bool moved;

    for (int i = 0; i < v->n; i++)
        if (v->lines[i].qp && !send_record(v, &v->lines[i], VERBS_HELLO, 0, 0))
            return ep_fail(v->broken, "%s", v->reason);
    do {
        moved = false;
        EP_TRY(poll_all(v, &moved));
        absent = find_absent(v);
        if (absent && !moved)
            nanosleep(&backoff, NULL);
    } while (absent && !absent->failed_ns && ep_now_ns() < deadline_ns);
    *ret_absent = absent;
    return EP_OK;
}

/* --- closing --- */

/* Until the peers have all that was put, or a while has passed. What comes is taken, so that theirs goes on as well. */
static void say_farewell(struct verbs_net *v)
{
    uint64_t deadline_ns = ep_deadline_ns(v->timeout_ms < FREE_MS ? v->timeout_ms : FREE_MS);
    struct timespec backoff = {.tv_nsec = 50000};
    bool waits = true, moved;

    while (waits && ep_now_ns() < deadline_ns) {
        moved = waits = false;
        if (poll_all(v, &moved) != EP_OK)
            return;
        for (int i = 0; i < v->n; i++) {
            struct verbs_line *line = &v->lines[i];

            if (!line->said)
                line->said = send_record(v, line, VERBS_BYE, 0, 0);
            /* One that has said farewell itself may have closed its end before it acknowledged ours. */
            waits |= !line->said || (line->count > 0 && !line->failed_ns && !line->bye);
        }
        if (waits && !moved)
            nanosleep(&backoff, NULL);
    }
}

/* Queue pairs first: then nothing can be written any more into memory that is given back. */
void verbs_release(struct verbs_net *v)
{
    const struct verbs_library *library = v->device.library;

    for (int i = 0; v->lines && i < v->n; i++)
        if (v->lines[i].qp)
            library->destroy_qp(v->lines[i].qp);
    if (v->sends)
        library->destroy_cq(v->sends);
    if (v->receives)
        library->destroy_cq(v->receives);
    if (v->region_mr)
        library->dereg_mr(v->region_mr);
    if (v->copies_mr)
        library->dereg_mr(v->copies_mr);
    if (v->pd)
        library->dealloc_pd(v->pd);
    verbs_device_close(&v->device);
    free(v->copies);
    free(v->lines);
    ep_net_memory_free(&v->net);
    free(v);
}

static void verbs_free(struct ep_net *net)
{
    struct verbs_net *v = verbs_of(net);

    if (!v)
        return;
    if (v->broken == EP_OK && !net->hurries)
        say_farewell(v);
    v->tcp->hurries = net->hurries || v->broken != EP_OK;
    v->tcp->ops->free(v->tcp);
    verbs_release(v);
}

const struct ep_net_ops verbs_ops = {
    .name = "verbs",
    .put = verbs_put,
    .signal = verbs_signal,
    .flush_test = verbs_flush_test,
    .progress = verbs_progress,
    .free = verbs_free,
    .ended = verbs_ended,
    .take_link = verbs_take_link,
    .lost = verbs_lost,
    .revoke = verbs_revoke,
};
