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

struct outgoing {
    int rank, tag;
    unsigned first, count;      /* slots in use */
    bool revoked;               /* nothing is sent any more */
    MPI_Request (*requests)[2]; /* [SLOTS] header, payload */
    unsigned char *slots;       /* [SLOTS][SLOT_BYTES] */
};

struct incoming {
    int rank, tag;
    uint64_t payload; /* bytes of the put that the posted receive is for; 0: it is for a header */
    unsigned char *slot;
    bool revoked; /* received messages are dropped */
};

struct mpi_net {
    struct ep_net net;
    ep_boot_mpi *boot;
    int n; /* (peer, channel) pairs */
    struct outgoing *outgoing;
    struct incoming *incoming;
    unsigned char *slots;      /* of all outgoing and incoming */
    MPI_Request (*sending)[2]; /* [n * SLOTS] */
    MPI_Request *receiving;    /* [n] */
    int *ready;                /* [n] of MPI_Testsome */
    MPI_Status *infos;
    bool started; /* the requests are valid */
};

static struct mpi_net *mpi_net_of(struct ep_net *net)
{
    return (struct mpi_net *)net;
}

/* --- sending --- */

/* Frees the slots whose sends have completed, oldest first. */
static ep_status reap(struct mpi_net *m, struct outgoing *out, bool *ret_progressed)
{
    while (out->count) {
        int done = 0;
        ep_status status = EP_MPI(MPI_Testall, (2, out->requests[out->first], &done, MPI_STATUSES_IGNORE));

        if (status != EP_OK)
            return ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: to rank %d: ", out->rank), -1);
        if (!done)
            break;
        out->first = (out->first + 1) % SLOTS;
        out->count--;
        *ret_progressed = true;
    }
    return EP_OK;
}

/* Sends one operation; `data` follows the header of KIND_INLINE, and is a message of its own for KIND_PUT. */
static bool post(struct mpi_net *m, int peer, int channel, const struct header *header, const void *data)
{
    struct outgoing *out = &m->outgoing[ep_net_peer_index(m->net.node, peer) * m->net.channels + channel];
    size_t behind = header->kind == KIND_INLINE ? header->bytes : 0;
    unsigned char *slot;
    MPI_Request *requests;
    ep_status status;
    unsigned at;
    bool progressed = false;

    if (out->revoked)
        return true;
    if (m->net.broken != EP_OK || (out->count == SLOTS && reap(m, out, &progressed) != EP_OK) || out->count == SLOTS)
        return false;
    at = (out->first + out->count) % SLOTS;
    slot = out->slots + (size_t)at * SLOT_BYTES;
    requests = out->requests[at];
    memcpy(slot, header, sizeof(*header));
    if (data && behind)
        memcpy(slot + sizeof(*header), data, behind);
    out->count++;
    status = EP_MPI(
        MPI_Isend, (slot, (int)(sizeof(*header) + behind), MPI_BYTE, out->rank, out->tag, m->boot->comm, &requests[0]));
    if (status == EP_OK && header->kind == KIND_PUT)
        status =
            EP_MPI(MPI_Isend, (data, (int)header->bytes, MPI_BYTE, out->rank, out->tag, m->boot->comm, &requests[1]));
    if (status != EP_OK) {
        ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: to rank %d: ", out->rank), -1);
        return false;
    }
    return true;
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
    struct outgoing *out = &m->outgoing[ep_net_peer_index(net->node, peer) * net->channels + channel];
    bool progressed = false;

    return reap(m, out, &progressed) == EP_OK && out->count == 0;
}

/* --- receiving --- */

static ep_status post_receive(struct mpi_net *m, int index, void *memory, size_t bytes)
{
    const struct incoming *in = &m->incoming[index];
    ep_status status =
        EP_MPI(MPI_Irecv, (memory, (int)bytes, MPI_BYTE, in->rank, in->tag, m->boot->comm, &m->receiving[index]));

    return status == EP_OK ? EP_OK
                           : ep_net_break(&m->net, ep_fail_prefix(status, "network mpi: from rank %d: ", in->rank), -1);
}

static ep_status fail_damaged(struct mpi_net *m, int index, const char *what)
{
    return ep_net_break(&m->net,
                        ep_fail(EP_E_MISMATCH, "network mpi: rank %d, channel %d: %s", m->incoming[index].rank,
                                index % m->net.channels, what),
                        ep_net_peer(m->net.node, index / m->net.channels));
}

/* A message of `bytes` that begins with a header; posts the receive of the message after it. */
static ep_status handle_header(struct mpi_net *m, int index, size_t bytes)
{
    struct incoming *in = &m->incoming[index];
    struct ep_net *net = &m->net;
    struct header header;

    if (bytes < sizeof(header))
        return fail_damaged(m, index, "a message shorter than its header");
    memcpy(&header, in->slot, sizeof(header));
    if (header.kind == KIND_SIGNAL) {
        if (header.target >= net->n_signals)
            return fail_damaged(m, index, "a signal that does not exist");
        net->signals[header.target] += header.add;
        return post_receive(m, index, in->slot, SLOT_BYTES);
    }
    if (header.kind != KIND_PUT && header.kind != KIND_INLINE)
        return fail_damaged(m, index, "a header of unknown kind");
    if (header.target > net->region_bytes || header.bytes > net->region_bytes - header.target || header.bytes > INT_MAX)
        return fail_damaged(m, index, "a put beyond the end of the region");
    if (header.kind == KIND_PUT && header.bytes) {
        in->payload = header.bytes;
        return post_receive(m, index, net->region + header.target, header.bytes);
    }
    if (header.bytes != bytes - sizeof(header))
        return fail_damaged(m, index, "a put of another size than its message");
    memcpy(net->region + header.target, in->slot + sizeof(header), header.bytes);
    return post_receive(m, index, in->slot, SLOT_BYTES);
}

static ep_status handle_message(struct mpi_net *m, int index, MPI_Status *info)
{
    struct incoming *in = &m->incoming[index];
    int bytes = 0;

    if (EP_MPI(MPI_Get_count, (info, MPI_BYTE, &bytes)) != EP_OK)
        return ep_net_break(&m->net, EP_E_SYSTEM, -1);
    if (in->revoked)
        return EP_OK; /* no further receive is posted */
    if (!in->payload)
        return handle_header(m, index, (size_t)bytes);
    if ((uint64_t)bytes != in->payload)
        return fail_damaged(m, index, "a payload of another size than in its header");
    in->payload = 0;
    return post_receive(m, index, in->slot, SLOT_BYTES);
}

static ep_status receive(struct mpi_net *m, bool *ret_progressed)
{
    for (int n_polls = 0; n_polls < MAX_POLLS; n_polls++) {
        int n_ready = 0;
        ep_status status = EP_MPI(MPI_Testsome, (m->n, m->receiving, &n_ready, m->ready, m->infos));

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
        EP_TRY(reap(m, &m->outgoing[i], &progressed));
    *ret_progressed = progressed;
    return EP_OK;
}

/*
 * A receive without a message can be cancelled. One whose message has begun to arrive completes by itself; until then
 * MPI may write to its memory.
 */
static ep_status mpi_revoke(struct ep_net *net, int peer)
{
    struct mpi_net *m = mpi_net_of(net);
    uint64_t deadline_ns = ep_deadline_ns(FREE_MS);
    unsigned tries = 0;

    for (int channel = 0; channel < net->channels; channel++) {
        int i = ep_net_peer_index(net->node, peer) * net->channels + channel;

        m->outgoing[i].revoked = true;
        if (!m->incoming[i].revoked && m->receiving[i] != MPI_REQUEST_NULL)
            EP_TRY(EP_MPI(MPI_Cancel, (&m->receiving[i])));
        m->incoming[i].revoked = true;
    }
    for (int channel = 0; channel < net->channels; channel++) {
        int i = ep_net_peer_index(net->node, peer) * net->channels + channel,
            done = m->receiving[i] == MPI_REQUEST_NULL;

        while (!done && ep_now_ns() < deadline_ns) {
            EP_TRY(EP_MPI(MPI_Test, (&m->receiving[i], &done, MPI_STATUS_IGNORE)));
            if (!done)
                ep_backoff(&tries);
        }
        if (!done)
            return ep_fail(EP_E_TIMEOUT, "network mpi: a message of rank %d that has begun did not end within %d ms",
                           m->incoming[i].rank, FREE_MS);
    }
    return EP_OK;
}

/* --- closing --- */

/* true: no send is left in MPI. */
static bool drain_sends(struct mpi_net *m)
{
    uint64_t deadline_ns = ep_deadline_ns(m->net.timeout_ms < FREE_MS ? m->net.timeout_ms : FREE_MS);
    bool clean = true, progressed = false;
    unsigned tries = 0;

    for (int i = 0; i < m->n; i++) {
        struct outgoing *out = &m->outgoing[i];

        while (reap(m, out, &progressed) == EP_OK && out->count && ep_now_ns() < deadline_ns)
            ep_backoff(&tries);
    }
    /* A peer that has not received them by now has exited. In practice large sends cannot be cancelled; MPI_Finalize
     * drops them. */
    for (int i = 0; i < m->n * SLOTS * 2; i++) {
        MPI_Request *request = &m->sending[0][0] + i;

        if (*request == MPI_REQUEST_NULL)
            continue;
        (void)EP_MPI(MPI_Cancel, (request));
        (void)EP_MPI(MPI_Request_free, (request));
        clean = false;
    }
    return clean;
}

static bool cancel_receives(struct mpi_net *m)
{
    uint64_t deadline_ns = ep_deadline_ns(FREE_MS);
    bool clean = true;
    unsigned tries = 0;

    for (int i = 0; i < m->n; i++)
        if (m->receiving[i] != MPI_REQUEST_NULL)
            (void)EP_MPI(MPI_Cancel, (&m->receiving[i]));
    for (int i = 0; i < m->n; i++) {
        int done = m->receiving[i] == MPI_REQUEST_NULL;

        while (!done && EP_MPI(MPI_Test, (&m->receiving[i], &done, MPI_STATUS_IGNORE)) == EP_OK && !done &&
               ep_now_ns() < deadline_ns)
            ep_backoff(&tries);
        if (m->receiving[i] != MPI_REQUEST_NULL) {
            (void)EP_MPI(MPI_Request_free, (&m->receiving[i]));
            clean = false;
        }
    }
    return clean;
}

static void mpi_free(struct ep_net *net)
{
    struct mpi_net *m = mpi_net_of(net);
    bool sent = true, received = true;

    if (!m)
        return;
    if (m->started && ep_mpi_is_up()) {
        sent = drain_sends(m);
        received = cancel_receives(m);
    }
    /* Memory that MPI may still read or write is leaked. */
    if (sent && received)
        free(m->slots);
    if (!received)
        net->region = NULL;
    ep_net_memory_free(net);
    free(m->outgoing);
    free(m->incoming);
    free(m->sending);
    free(m->receiving);
    free(m->ready);
    free(m->infos);
    free(m);
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

static ep_status check_params(const struct ep_net_params *params, const ep_boot_mpi *boot)
{
    if (params->rank != boot->boot.rank || params->nranks != boot->boot.nranks)
        return ep_fail(EP_E_ARG, "network mpi: rank %d of %d, but the communicator says %d of %d", params->rank,
                       params->nranks, boot->boot.rank, boot->boot.nranks);
    return ep_net_check_params(mpi_ops.name, params);
}

static ep_status allocate(struct mpi_net *m)
{
    struct ep_net *net = &m->net;
    size_t n = (size_t)m->n, slot_bytes = n * (SLOTS + 1) * SLOT_BYTES;

    m->outgoing = calloc(n, sizeof(*m->outgoing));
    m->incoming = calloc(n, sizeof(*m->incoming));
    m->sending = malloc(n * SLOTS * sizeof(*m->sending));
    m->receiving = malloc(n * sizeof(*m->receiving));
    m->ready = calloc(n, sizeof(*m->ready));
    m->infos = calloc(n, sizeof(*m->infos));
    m->slots = aligned_alloc(64, slot_bytes);
    if (!m->outgoing || !m->incoming || !m->sending || !m->receiving || !m->ready || !m->infos || !m->slots)
        return ep_fail(EP_E_MEMORY, "network mpi: no memory for %zu bytes of messages", slot_bytes);
    EP_TRY(ep_net_memory_new(net));
    net->wire_bytes = slot_bytes + n * (sizeof(*m->outgoing) + sizeof(*m->incoming) + SLOTS * sizeof(*m->sending));
    for (size_t i = 0; i < n; i++) {
        m->receiving[i] = MPI_REQUEST_NULL;
        for (size_t slot = 0; slot < SLOTS; slot++)
            m->sending[i * SLOTS + slot][0] = m->sending[i * SLOTS + slot][1] = MPI_REQUEST_NULL;
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
        int rank = ep_net_rail(&m->net, ep_net_peer(m->net.node, i / channels));
        int tag = m->boot->first_tag + block * EP_NET_MAX_CHANNELS + i % channels;

        m->outgoing[i] = (struct outgoing){.rank = rank,
                                           .tag = tag,
                                           .requests = m->sending + (size_t)i * SLOTS,
                                           .slots = m->slots + (size_t)i * SLOTS * SLOT_BYTES};
        m->incoming[i] = (struct incoming){
            .rank = rank, .tag = tag, .slot = m->slots + ((size_t)m->n * SLOTS + (size_t)i) * SLOT_BYTES};
        EP_TRY(post_receive(m, i, m->incoming[i].slot, SLOT_BYTES));
    }
    return EP_OK;
}

ep_status ep_net_mpi_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net)
{
    ep_boot_mpi *boot = provider->context;
    struct mpi_net *m;
    ep_status status;

    EP_TRY(check_params(params, boot));
    m = calloc(1, sizeof(*m));
    if (!m)
        return ep_fail(EP_E_MEMORY, "network mpi: no memory");
    m->net = ep_net_init(&mpi_ops, params); /* nothing in MPI wakes a sleeper */
    m->boot = boot;
    m->n = (m->net.nnodes - 1) * params->channels;
    status = agree(m, params, allocate(m));
    if (status == EP_OK)
        status = start(m);
    if (status != EP_OK) {
        mpi_free(&m->net);
        return status;
    }
    *ret_net = &m->net;
    return EP_OK;
}
