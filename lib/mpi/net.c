/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network over MPI point-to-point messages. An operation is a message that begins with a header. The payload of a
 * small put follows the header in the same message; that of a larger one is a second message, sent directly from the
 * caller's memory and received directly into the region. Both have the tag of their channel, and MPI keeps the order of
 * messages with the same sender and tag. So exactly one receive is posted per (peer, channel) at any time, and it is
 * known which message it receives.
 *
 * Posted receives instead of MPI_Probe: one MPI_Testsome polls all peers and channels.
 */
#include "mpi/boot.h"

#include "base/backoff.h"
#include "base/clock.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Below the eager limits of the usual transports (4 KiB and up): such a message is sent without waiting for the peer.
 */
#define SLOT_BYTES 2048
#define INLINE_BYTES (SLOT_BYTES - sizeof(struct header))
/* Operations in flight per (peer, channel); when all are used, put and signal return false. */
#define SLOTS 16
/* Polls in one progress(): bounded, so that many messages cannot keep the caller from its own work. */
#define MAX_POLLS 64
#define FREE_MS 2000

enum header_kind {
    KIND_PUT = 0x70757400,    /* the payload is the next message */
    KIND_INLINE = 0x74696e79, /* put with the payload after the header */
    KIND_SIGNAL = 0x7369676e
};

struct header {
    uint32_t kind, reserved;
    uint64_t target; /* put: offset in the region; signal: its index */
    uint64_t bytes;  /* put */
    uint64_t add;    /* signal */
};

/* One channel to a peer. */
struct conn {
    int rank, tag;
    bool revoked;                       /* nothing is sent any more, and what is received is dropped */
    unsigned first, count;              /* sends in flight */
    MPI_Request sends[SLOTS][2];        /* header, payload */
    uint64_t payload;                   /* bytes of the put that the posted receive is for; 0: it is for a header */
    unsigned char (*slots)[SLOT_BYTES]; /* [SLOTS + 1]; the last one is for what is received */
};

struct mpi_net {
    struct ep_net net;
    ep_boot_mpi *boot;
    int n; /* (peer, channel) pairs */
    struct conn *conns;
    unsigned char (*slots)[SLOT_BYTES]; /* of all connections */
    MPI_Request *receives;              /* [n] */
    int *ready;                         /* [n] of MPI_Testsome */
    MPI_Status *infos;
    bool started; /* the requests are valid */
};

static struct mpi_net *mpi_net_of(struct ep_net *net)
{
    return (struct mpi_net *)net;
}

/* --- sending --- */

/* Frees the slots whose sends have completed, oldest first. */
static ep_status reap(struct mpi_net *m, struct conn *conn, bool *ret_progressed)
{
    while (conn->count) {
        int done = 0;
        ep_status status = EP_MPI(MPI_Testall, (2, conn->sends[conn->first], &done, MPI_STATUSES_IGNORE));

        if (status != EP_OK)
            return ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: to rank %d: ", conn->rank), -1);
        if (!done)
            break;
        conn->first = (conn->first + 1) % SLOTS;
        conn->count--;
        *ret_progressed = true;
    }
    return EP_OK;
}

/* Sends one operation; `data` follows the header of KIND_INLINE, and is a message of its own for KIND_PUT. */
static bool post(struct mpi_net *m, int peer, int channel, const struct header *header, const void *data)
{
    struct conn *conn = &m->conns[ep_net_index(&m->net, peer, channel)];
    size_t behind = header->kind == KIND_INLINE ? header->bytes : 0;
    unsigned at = (conn->first + conn->count) % SLOTS;
    unsigned char *slot = conn->slots[at];
    MPI_Request *requests = conn->sends[at];
    bool progressed = false;
    ep_status status;

    if (conn->revoked)
        return true;
    if (m->net.broken != EP_OK || (conn->count == SLOTS && reap(m, conn, &progressed) != EP_OK) || conn->count == SLOTS)
        return false;
    memcpy(slot, header, sizeof(*header));
    if (data && behind)
        memcpy(slot + sizeof(*header), data, behind);
    conn->count++;
    status = EP_MPI(MPI_Isend, (slot, (int)(sizeof(*header) + behind), MPI_BYTE, conn->rank, conn->tag, m->boot->comm,
                                &requests[0]));
    if (status == EP_OK && header->kind == KIND_PUT)
        status =
            EP_MPI(MPI_Isend, (data, (int)header->bytes, MPI_BYTE, conn->rank, conn->tag, m->boot->comm, &requests[1]));
    if (status != EP_OK)
        ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: to rank %d: ", conn->rank), -1);
    return status == EP_OK;
}

static bool mpi_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct mpi_net *m = mpi_net_of(net);
    struct header header = {.kind = bytes > INLINE_BYTES ? KIND_PUT : KIND_INLINE, .target = offset, .bytes = bytes};

    if (bytes > INT_MAX) {
        ep_net_break(&m->net, ep_fail(EP_E_OVERFLOW, "network mpi: a put of %zu bytes, at most %d", bytes, INT_MAX),
                     -1);
        return false;
    }
    return bytes == 0 || post(m, peer, channel, &header, src);
}

static bool mpi_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct header header = {.kind = KIND_SIGNAL, .target = index, .add = add};

    return post(mpi_net_of(net), peer, channel, &header, NULL);
}

static bool mpi_flush_test(struct ep_net *net, int peer, int channel)
{
    struct mpi_net *m = mpi_net_of(net);
    struct conn *conn = &m->conns[ep_net_index(net, peer, channel)];
    bool progressed = false;

    return reap(m, conn, &progressed) == EP_OK && conn->count == 0;
}

/* --- receiving --- */

static ep_status post_receive(struct mpi_net *m, int index, void *memory, size_t bytes)
{
    const struct conn *conn = &m->conns[index];
    ep_status status =
        EP_MPI(MPI_Irecv, (memory, (int)bytes, MPI_BYTE, conn->rank, conn->tag, m->boot->comm, &m->receives[index]));

    if (status != EP_OK)
        return ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: from rank %d: ", conn->rank), -1);
    return EP_OK;
}

static ep_status post_header_receive(struct mpi_net *m, int index)
{
    return post_receive(m, index, m->conns[index].slots[SLOTS], SLOT_BYTES);
}

static ep_status fail_damaged(struct mpi_net *m, int index, const char *what)
{
    return ep_net_break(&m->net,
                        ep_fail(EP_E_MISMATCH, "network mpi: rank %d, channel %d: %s", m->conns[index].rank,
                                index % m->net.channels, what),
                        ep_net_index_peer(&m->net, index));
}

/* A message of `bytes` that begins with a header; posts the receive of the message after it. */
static ep_status handle_header(struct mpi_net *m, int index, size_t bytes)
{
    struct conn *conn = &m->conns[index];
    const unsigned char *slot = conn->slots[SLOTS];
    struct ep_net *net = &m->net;
    struct header header;

    if (bytes < sizeof(header))
        return fail_damaged(m, index, "a message shorter than its header");
    memcpy(&header, slot, sizeof(header));
    if (header.kind == KIND_SIGNAL) {
        if (header.target >= net->n_signals)
            return fail_damaged(m, index, "a signal that does not exist");
        net->signals[header.target] += header.add;
        return post_header_receive(m, index);
    }
    if (header.kind != KIND_PUT && header.kind != KIND_INLINE)
        return fail_damaged(m, index, "a header of unknown kind");
    if (header.target > net->region_bytes || header.bytes > net->region_bytes - header.target || header.bytes > INT_MAX)
        return fail_damaged(m, index, "a put beyond the end of the region");
    if (header.kind == KIND_PUT && header.bytes) {
        conn->payload = header.bytes;
        return post_receive(m, index, net->region + header.target, header.bytes);
    }
    if (header.bytes != bytes - sizeof(header))
        return fail_damaged(m, index, "a put of another size than its message");
    memcpy(net->region + header.target, slot + sizeof(header), header.bytes);
    return post_header_receive(m, index);
}

static ep_status handle_message(struct mpi_net *m, int index, MPI_Status *info)
{
    struct conn *conn = &m->conns[index];
    int bytes = 0;

    if (EP_MPI(MPI_Get_count, (info, MPI_BYTE, &bytes)) != EP_OK)
        return ep_net_break(&m->net, EP_E_SYSTEM, -1);
    if (conn->revoked)
        return EP_OK; /* no further receive is posted */
    if (!conn->payload)
        return handle_header(m, index, (size_t)bytes);
    if ((uint64_t)bytes != conn->payload)
        return fail_damaged(m, index, "a payload of another size than in its header");
    conn->payload = 0;
    return post_header_receive(m, index);
}

static ep_status receive(struct mpi_net *m, bool *ret_progressed)
{
    for (int n_polls = 0; n_polls < MAX_POLLS; n_polls++) {
        int n_ready = 0;
        ep_status status = EP_MPI(MPI_Testsome, (m->n, m->receives, &n_ready, m->ready, m->infos));

        if (status != EP_OK)
            return ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: receiving: "), -1);
        if (n_ready == MPI_UNDEFINED || n_ready == 0)
            break;
        for (int i = 0; i < n_ready; i++)
            EP_TRY(handle_message(m, m->ready[i], &m->infos[i]));
        *ret_progressed = true;
    }
    return EP_OK;
}

static ep_status mpi_progress(struct ep_net *net, bool *ret_progressed)
{
    struct mpi_net *m = mpi_net_of(net);
    bool progressed = false;

    EP_TRY(ep_net_check(net));
    EP_TRY(receive(m, &progressed));
    for (int i = 0; i < m->n; i++)
        EP_TRY(reap(m, &m->conns[i], &progressed));
    *ret_progressed = progressed;
    return EP_OK;
}

/*
 * Ends n receives. One without a message can be cancelled. One whose message has begun to arrive completes by itself;
 * until then MPI may write to its memory.
 */
static ep_status end_receives(struct mpi_net *m, int begin, int n)
{
    uint64_t deadline_ns = ep_deadline_ns(FREE_MS);
    unsigned tries = 0;

    for (int i = begin; i < begin + n; i++) {
        if (!m->conns[i].revoked && m->receives[i] != MPI_REQUEST_NULL)
            EP_TRY(EP_MPI(MPI_Cancel, (&m->receives[i])));
        m->conns[i].revoked = true;
    }
    for (int i = begin; i < begin + n; i++) {
        int done = m->receives[i] == MPI_REQUEST_NULL;

        while (!done && ep_now_ns() < deadline_ns) {
            EP_TRY(EP_MPI(MPI_Test, (&m->receives[i], &done, MPI_STATUS_IGNORE)));
            if (!done)
                ep_backoff(&tries);
        }
        if (!done)
            return ep_fail(EP_E_TIMEOUT, "network mpi: a message of rank %d that has begun did not end within %d ms",
                           m->conns[i].rank, FREE_MS);
    }
    return EP_OK;
}

static ep_status mpi_revoke(struct ep_net *net, int peer)
{
    return end_receives(mpi_net_of(net), ep_net_index(net, peer, 0), net->channels);
}

/* --- closing --- */

/* Cancels and releases a request that has not completed; MPI may still use its memory. true: there was one. */
static bool give_up(MPI_Request *request)
{
    if (*request == MPI_REQUEST_NULL)
        return false;
    (void)EP_MPI(MPI_Cancel, (request));
    (void)EP_MPI(MPI_Request_free, (request));
    return true;
}

/* true: no send is left in MPI. */
static bool drain_sends(struct mpi_net *m)
{
    uint64_t deadline_ns = ep_deadline_ns(m->net.timeout_ms < FREE_MS ? m->net.timeout_ms : FREE_MS);
    bool left = false, progressed = false;
    unsigned tries = 0;

    for (int i = 0; i < m->n; i++)
        while (reap(m, &m->conns[i], &progressed) == EP_OK && m->conns[i].count && ep_now_ns() < deadline_ns)
            ep_backoff(&tries);
    /* A peer that has not received them by now has exited. In practice large sends cannot be cancelled; MPI_Finalize
     * drops them. */
    for (int i = 0; i < m->n; i++)
        for (int at = 0; at < 2 * SLOTS; at++)
            left |= give_up(&m->conns[i].sends[at / 2][at % 2]);
    return !left;
}

static void mpi_free(struct ep_net *net)
{
    struct mpi_net *m = mpi_net_of(net);
    bool sent = true, received = true;

    if (m->started && ep_mpi_is_up()) {
        sent = drain_sends(m);
        (void)end_receives(m, 0, m->n);
        for (int i = 0; i < m->n; i++)
            received &= !give_up(&m->receives[i]);
    }
    /* Memory that MPI may still read or write is leaked. */
    if (sent && received)
        free(m->slots);
    if (!received)
        net->region = NULL;
    free(m->conns);
    free(m->receives);
    free(m->ready);
    free(m->infos);
    ep_net_free(net);
}

/* --- opening --- */

static const struct ep_net_ops mpi_ops = {
    .name = "mpi",
    .put = mpi_put,
    .signal = mpi_signal,
    .flush_test = mpi_flush_test,
    .progress = mpi_progress,
    .free = mpi_free,
    .revoke = mpi_revoke,
    .retains_sources = true,
};

static ep_status allocate(struct mpi_net *m)
{
    struct ep_net *net = &m->net;
    size_t n = (size_t)m->n, slot_bytes = n * (SLOTS + 1) * SLOT_BYTES;

    m->conns = calloc(n, sizeof(*m->conns));
    m->receives = malloc(n * sizeof(*m->receives));
    m->ready = calloc(n, sizeof(*m->ready));
    m->infos = calloc(n, sizeof(*m->infos));
    m->slots = aligned_alloc(64, slot_bytes);
    if (!m->conns || !m->receives || !m->ready || !m->infos || !m->slots)
        return ep_fail(EP_E_MEMORY, "network mpi: no memory for %zu bytes of messages", slot_bytes);
    EP_TRY(ep_net_memory_new(net));
    net->wire_bytes = slot_bytes + n * sizeof(*m->conns);
    for (size_t i = 0; i < n; i++) {
        m->receives[i] = MPI_REQUEST_NULL;
        for (size_t slot = 0; slot < SLOTS; slot++)
            m->conns[i].sends[slot][0] = m->conns[i].sends[slot][1] = MPI_REQUEST_NULL;
    }
    return EP_OK;
}

/* With the number of endpoints, so that the ranks agree on a number that none of them has used. */
struct introduction {
    struct ep_net_introduction common;
    uint64_t endpoints;
};

static ep_status agree(struct mpi_net *m, const struct ep_net_params *params, ep_status status)
{
    struct introduction mine = {.endpoints = m->boot->endpoints}, *all = calloc((size_t)params->nranks, sizeof(*all));

    if (!all)
        return ep_fail(EP_E_MEMORY, "network mpi: no memory for %d ranks", params->nranks);
    status = ep_net_introduce(mpi_ops.name, params, status, &mine, sizeof(mine), all);
    for (int rank = 0; rank < params->nranks; rank++)
        if (all[rank].endpoints > m->boot->endpoints)
            m->boot->endpoints = (uint32_t)all[rank].endpoints;
    m->boot->endpoints++;
    free(all);
    return status;
}

static ep_status start(struct mpi_net *m)
{
    int block = (int)(m->boot->endpoints % m->boot->tag_blocks), channels = m->net.channels;

    m->started = true;
    for (int i = 0; i < m->n; i++) {
        m->conns[i].rank = ep_net_rail(&m->net, ep_net_index_peer(&m->net, i));
        m->conns[i].tag = m->boot->first_tag + block * EP_NET_MAX_CHANNELS + i % channels;
        m->conns[i].slots = m->slots + (size_t)i * (SLOTS + 1);
        EP_TRY(post_header_receive(m, i));
    }
    return EP_OK;
}

ep_status ep_net_mpi_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net)
{
    ep_boot_mpi *boot = provider->context;
    struct mpi_net *m;
    ep_status status;

    if (params->rank != boot->boot.rank || params->nranks != boot->boot.nranks)
        return ep_fail(EP_E_ARG, "network mpi: rank %d of %d, but the communicator says %d of %d", params->rank,
                       params->nranks, boot->boot.rank, boot->boot.nranks);
    EP_TRY(ep_net_new(&mpi_ops, sizeof(*m), params, ret_net)); /* nothing in MPI wakes a sleeper */
    m = mpi_net_of(*ret_net);
    m->boot = boot;
    m->n = (m->net.nnodes - 1) * params->channels;
    status = agree(m, params, allocate(m));
    if (status == EP_OK)
        status = start(m);
    return ep_net_opened(status, ret_net);
}
