/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The network between "nodes" that are ranks (processes or threads) of one host. It injects delays, reordering, split
 * writes and small buffers, so that code that runs correctly on it does not depend on the ordering of shared
 * memory.
 *
 * Each endpoint owns a segment with one wire per (rail peer, channel). Peers append records to their wires; the owner's
 * progress() applies them to its region and signals, which no peer can access.
 *
 * A wire is a single-producer, single-consumer ring. Head and tail count bytes and never wrap. The writer appends
 * records and then publishes its tail once for all of them; the reader processes records and then publishes its head.
 * Records are padded to 16 bytes and may wrap around the end of the ring at any byte, so that even the smallest ring
 * can be filled completely.
 */
#include "base/clock.h"
#include "base/shm.h"
#include "net/net.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* With reorder: most records read from a wire at a time, so that other wires interleave. */
#define REORDER_RECORDS 4

/* --- wires --- */

enum wire_kind {
    WIRE_PUT = 0x70757400, /* magic numbers: unlikely in stale data */
    WIRE_SIGNAL = 0x7369676e
};

struct wire_record {
    uint32_t kind;
    uint32_t bytes;  /* put: payload that follows; signal: 0 */
    uint64_t target; /* put: offset in the region; signal: its index */
    uint64_t add;    /* signal */
    uint64_t due_ns; /* earliest time of its effect; 0: now */
};

/* In the reader's segment. Each side writes to a cache line of its own. */
struct wire {
    _Alignas(64) _Atomic uint64_t tail; /* published by the writer */
    _Atomic uint32_t writer_waits;      /* set by a writer without room; the reader clears it and wakes the writer */
    _Atomic uint32_t closed;            /* the writer has freed its endpoint: it sends and reads nothing more */
    _Alignas(64) _Atomic uint64_t head; /* published by the reader */
    _Alignas(64) unsigned char ring[];
};

static size_t wire_padded(size_t bytes)
{
    return (bytes + 15) & ~(size_t)15;
}

static void wire_write(struct wire *wire, size_t capacity, uint64_t at, const void *src, size_t bytes)
{
    size_t begin = (size_t)(at % capacity), first = capacity - begin < bytes ? capacity - begin : bytes;

    if (!src || !bytes)
        return; /* a signal has no payload, and src is NULL then */
    memcpy(wire->ring + begin, src, first);
    memcpy(wire->ring, (const unsigned char *)src + first, bytes - first);
}

static void wire_read(const struct wire *wire, size_t capacity, uint64_t at, void *ret_data, size_t bytes)
{
    size_t begin = (size_t)(at % capacity), first = capacity - begin < bytes ? capacity - begin : bytes;

    memcpy(ret_data, wire->ring + begin, first);
    memcpy((unsigned char *)ret_data + first, wire->ring, bytes - first);
}

/*
 * The writer sets writer_waits and reads head again; the reader publishes head and then reads writer_waits. All four
 * accesses are sequentially consistent, so at least one side sees the other's store: no wake-up is lost.
 */
static uint64_t wire_wait_for_room(struct wire *wire)
{
    atomic_store(&wire->writer_waits, 1);
    return atomic_load(&wire->head);
}

/* true: the writer must be woken. */
static bool wire_make_room(struct wire *wire, uint64_t head)
{
    atomic_store(&wire->head, head);
    return atomic_load(&wire->writer_waits) && atomic_exchange(&wire->writer_waits, 0);
}

/* --- endpoints --- */

struct outgoing {
    struct wire *wire; /* in the peer's segment */
    size_t capacity;
    uint64_t tail;
    uint64_t random;
    /* The rest of a put that is larger than the wire. */
    const unsigned char *rest;
    size_t rest_bytes;
    uint64_t rest_offset, rest_due_ns;
    bool revoked; /* puts and signals are discarded */
};

struct incoming {
    struct wire *wire; /* in our segment */
    uint64_t head;
    uint32_t applied; /* bytes of the record at head that are in the region already */
    uint32_t writer;  /* rank */
    bool revoked;     /* what arrives is discarded */
};

struct emulated {
    struct ep_net net;
    int npeers;
    ep_net_emulation emulation;
    size_t capacity; /* of our incoming wires */
    void (*wake)(void *context, int rank);
    void *wake_context;
    struct ep_shm shm;
    struct ep_shm *peers;      /* [npeers] */
    struct outgoing *outgoing; /* [npeers][channels] */
    struct incoming *incoming; /* [npeers][channels] */
    int *order;                /* in which the incoming wires are processed */
    uint64_t random;
    uint32_t large_puts; /* applied, of EP_NET_FLIP_BYTES or more; pieces count */
};

struct hello {
    struct ep_net_hello common;
    uint64_t capacity;
    struct ep_shm_name name;
};

static struct emulated *emulated_of(struct ep_net *net)
{
    return (struct emulated *)net;
}

/* SplitMix64: any state is valid. */
static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static uint64_t seed_random(uint64_t seed, int rank, int peer, int channel)
{
    uint64_t state = seed ^ ((uint64_t)rank << 40 | (uint64_t)peer << 16 | (uint64_t)channel);

    return next_random(&state);
}

static struct outgoing *outgoing_of(struct emulated *e, int peer, int channel)
{
    return &e->outgoing[ep_net_index(&e->net, peer, channel)];
}

/* Nobody reads what is sent there: the peer is revoked, or has freed its endpoint. */
static bool discards(const struct emulated *e, int index)
{
    return e->outgoing[index].revoked || atomic_load(&e->incoming[index].wire->closed);
}

static void wake_rank(struct emulated *e, int rank)
{
    if (e->wake)
        e->wake(e->wake_context, rank);
}

/* --- sending --- */

/* A put is split into records of at most this size, so that reader and writer of a wire can work concurrently. */
static size_t max_record(size_t capacity)
{
    return capacity / 4 - sizeof(struct wire_record);
}

/* Bytes on the wire of a put; full-size records are multiples of 16 because the capacity is a multiple of 64. */
static size_t put_wire_bytes(size_t capacity, size_t bytes)
{
    size_t most = max_record(capacity), rest = bytes % most;

    return bytes / most * (capacity / 4) + (rest ? sizeof(struct wire_record) + wire_padded(rest) : 0);
}

/* Free bytes of the wire; if fewer than `need`, the reader will wake this rank when it has freed some. */
static size_t room(struct outgoing *out, size_t need)
{
    uint64_t used = out->tail - atomic_load_explicit(&out->wire->head, memory_order_acquire);

    if (used > out->capacity || out->capacity - used < need)
        used = out->tail - wire_wait_for_room(out->wire);
    /* The reader has corrupted a head that is ahead of the tail: report no room; the caller's deadline ends the wait.
     */
    return used > out->capacity ? 0 : (size_t)(out->capacity - used);
}

static void append(struct outgoing *out, const struct wire_record *record, const void *payload)
{
    wire_write(out->wire, out->capacity, out->tail, record, sizeof(*record));
    wire_write(out->wire, out->capacity, out->tail + sizeof(*record), payload, record->bytes);
    out->tail += sizeof(*record) + wire_padded(record->bytes);
}

static void publish(struct emulated *e, struct outgoing *out, int peer)
{
    atomic_store(&out->wire->tail, out->tail);
    wake_rank(e, ep_net_rail(&e->net, peer));
}

static uint64_t pick_due(struct emulated *e, struct outgoing *out)
{
    if (!e->emulation.delay_us)
        return 0;
    return ep_now_ns() + next_random(&out->random) % ((uint64_t)e->emulation.delay_us * 1000u + 1);
}

/* Appends as much of the current put as there is room for. */
static bool push_rest(struct emulated *e, struct outgoing *out, int peer)
{
    size_t most = max_record(out->capacity);
    bool moved = false;

    while (out->rest_bytes) {
        size_t bytes = out->rest_bytes < most ? out->rest_bytes : most;
        struct wire_record record = {
            .kind = WIRE_PUT, .bytes = (uint32_t)bytes, .target = out->rest_offset, .due_ns = out->rest_due_ns};
        size_t need = sizeof(record) + wire_padded(bytes);

        if (room(out, need) < need)
            break;
        append(out, &record, out->rest);
        out->rest += bytes;
        out->rest_offset += bytes;
        out->rest_bytes -= bytes;
        moved = true;
    }
    if (moved)
        publish(e, out, peer);
    return moved;
}

static bool emulated_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct emulated *e = emulated_of(net);
    struct outgoing *out = outgoing_of(e, peer, channel);
    size_t need = put_wire_bytes(out->capacity, bytes);

    if (discards(e, ep_net_index(net, peer, channel)))
        return true;
    if (out->rest_bytes)
        return false;
    if (need <= out->capacity && room(out, need) < need)
        return false;
    out->rest = src;
    out->rest_bytes = bytes;
    out->rest_offset = offset;
    out->rest_due_ns = pick_due(e, out);
    push_rest(e, out, peer);
    return true;
}

static bool emulated_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    struct emulated *e = emulated_of(net);
    struct outgoing *out = outgoing_of(e, peer, channel);
    struct wire_record record = {.kind = WIRE_SIGNAL, .target = index, .add = add};

    if (discards(e, ep_net_index(net, peer, channel)))
        return true;
    if (out->rest_bytes || room(out, sizeof(record)) < sizeof(record))
        return false;
    record.due_ns = pick_due(e, out);
    append(out, &record, NULL);
    publish(e, out, peer);
    return true;
}

static bool emulated_flush_test(struct ep_net *net, int peer, int channel)
{
    struct emulated *e = emulated_of(net);

    return outgoing_of(e, peer, channel)->rest_bytes == 0 || discards(e, ep_net_index(net, peer, channel));
}

/* --- receiving --- */

static ep_status broken(struct emulated *e, const struct incoming *in, int wire, const char *what)
{
    return ep_net_break(&e->net,
                        ep_fail(EP_E_MISMATCH, "network emulated: rank %u, channel %d, byte %llu of the wire: %s",
                                in->writer, wire % e->net.channels, (unsigned long long)in->head, what),
                        (int)in->writer / e->net.ranks_per_node);
}

/* NULL, or the error in the record at head; `there`: bytes on the wire. */
static const char *check_record(const struct emulated *e, const struct incoming *in, const struct wire_record *record,
                                uint64_t there)
{
    const struct ep_net *net = &e->net;

    if (record->kind != WIRE_PUT && record->kind != WIRE_SIGNAL)
        return "a record of unknown kind";
    if (sizeof(*record) + wire_padded(record->bytes) > there)
        return "a record that is longer than what was sent";
    if (record->bytes < in->applied)
        return "a record that shrank while it was applied";
    if (record->kind == WIRE_SIGNAL && (record->target >= net->n_signals || record->bytes))
        return "a signal that does not exist";
    if (record->kind == WIRE_PUT &&
        (record->target > net->region_bytes || record->bytes > net->region_bytes - record->target))
        return "a put beyond the end of the region";
    return NULL;
}

/*
 * Flips the most significant bit of the exponent of a number in the middle, whatever its type: the last byte of four.
 * Another bit may vanish when a partial sum is rounded.
 */
static void flip_bit(struct emulated *e, uint64_t at, uint32_t bytes)
{
    if (e->emulation.flip_put && bytes >= EP_NET_FLIP_BYTES && ++e->large_puts == e->emulation.flip_put)
        e->net.region[(at + bytes / 2) | 3] ^= 0x40;
}

/* Applies the record at head, or a piece of it. true: the whole record has taken effect. */
static bool apply(struct emulated *e, struct incoming *in, const struct wire_record *record)
{
    uint32_t left = record->bytes - in->applied, split = e->emulation.split_bytes;
    uint32_t piece = split && split < left ? split : left;

    if (record->kind == WIRE_SIGNAL) {
        e->net.signals[record->target] += record->add;
        return true;
    }
    wire_read(in->wire, e->capacity, in->head + sizeof(*record) + in->applied,
              e->net.region + record->target + in->applied, piece);
    flip_bit(e, record->target + in->applied, piece);
    in->applied += piece;
    return piece == left;
}

/* Processes the records of one wire. *ret_waiting: some remain for a later call. */
static ep_status apply_wire(struct emulated *e, int index, int most_records, uint64_t now, bool *ret_moved,
                            bool *ret_waiting)
{
    struct incoming *in = &e->incoming[index];
    uint64_t begin = in->head, tail = atomic_load_explicit(&in->wire->tail, memory_order_acquire);
    bool moved = false, piecemeal = false;

    if (in->revoked) {
        in->head = tail;
        if (wire_make_room(in->wire, in->head))
            wake_rank(e, (int)in->writer);
        return EP_OK;
    }
    if (tail - in->head > e->capacity)
        return broken(e, in, index, "more bytes than the wire holds");
    while (in->head != tail && !piecemeal && most_records-- > 0) {
        struct wire_record record;
        const char *wrong;

        if (tail - in->head < sizeof(record))
            return broken(e, in, index, "half a record");
        wire_read(in->wire, e->capacity, in->head, &record, sizeof(record));
        wrong = check_record(e, in, &record, tail - in->head);
        if (wrong)
            return broken(e, in, index, wrong);
        if (record.due_ns > now)
            break;
        /* One piece a call, so that the owner sees a partial put. */
        piecemeal = e->emulation.split_bytes && record.kind == WIRE_PUT;
        if (apply(e, in, &record)) {
            in->head += sizeof(record) + wire_padded(record.bytes);
            in->applied = 0;
        }
        moved = true;
    }
    if (in->head != begin && wire_make_room(in->wire, in->head))
        wake_rank(e, (int)in->writer);
    *ret_moved |= moved;
    *ret_waiting |= in->head != tail;
    return EP_OK;
}

static void shuffle(struct emulated *e, int n)
{
    for (int i = n - 1; i > 0; i--) {
        int j = (int)(next_random(&e->random) % (uint64_t)(i + 1)), swapped = e->order[i];

        e->order[i] = e->order[j];
        e->order[j] = swapped;
    }
}

static ep_status apply_all(struct emulated *e, bool *ret_moved)
{
    int n = e->npeers * e->net.channels, most = INT32_MAX;
    uint64_t now = ep_now_ns();
    bool waiting = false;

    if (e->emulation.reorder)
        shuffle(e, n);
    for (int i = 0; i < n; i++) {
        if (e->emulation.reorder)
            most = (int)(next_random(&e->random) % (REORDER_RECORDS + 1));
        EP_TRY(apply_wire(e, e->order[i], most, now, ret_moved, &waiting));
    }
    e->net.can_sleep = !waiting;
    return EP_OK;
}

static ep_status emulated_progress(struct ep_net *net, bool *ret_moved)
{
    struct emulated *e = emulated_of(net);
    bool moved = false;

    EP_TRY(ep_net_check(net));
    for (int i = 0; i < e->npeers * net->channels; i++)
        if (e->outgoing[i].rest_bytes && !discards(e, i))
            moved |= push_rest(e, &e->outgoing[i], ep_net_index_peer(net, i));
    EP_TRY(apply_all(e, &moved));
    *ret_moved = moved;
    return EP_OK;
}

static bool emulated_ended(struct ep_net *net, int peer)
{
    struct emulated *e = emulated_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        const struct incoming *in = &e->incoming[ep_net_index(net, peer, channel)];

        if (!in->revoked && (!atomic_load(&in->wire->closed) || in->head != atomic_load(&in->wire->tail)))
            return false;
    }
    return true;
}

static ep_status emulated_revoke(struct ep_net *net, int peer)
{
    struct emulated *e = emulated_of(net);

    for (int channel = 0; channel < net->channels; channel++) {
        int index = ep_net_index(net, peer, channel);

        e->outgoing[index].revoked = e->incoming[index].revoked = true;
        e->outgoing[index].rest_bytes = 0;
    }
    return EP_OK;
}

/* --- opening --- */

static void emulated_free(struct ep_net *net)
{
    struct emulated *e = emulated_of(net);

    for (int i = 0; e->outgoing && i < e->npeers * net->channels; i++) {
        if (!e->outgoing[i].wire)
            continue;
        atomic_store(&e->outgoing[i].wire->closed, 1);
        wake_rank(e, ep_net_rail(net, ep_net_index_peer(net, i)));
    }
    for (int i = 0; e->peers && i < e->npeers; i++)
        ep_shm_done(&e->peers[i]);
    ep_shm_done(&e->shm);
    free(e->peers);
    free(e->outgoing);
    free(e->incoming);
    free(e->order);
    ep_net_free(net);
}

static const struct ep_net_ops emulated_ops = {
    .name = "emulated",
    .put = emulated_put,
    .signal = emulated_signal,
    .flush_test = emulated_flush_test,
    .progress = emulated_progress,
    .free = emulated_free,
    .ended = emulated_ended,
    .revoke = emulated_revoke,
};

static size_t wire_stride(size_t capacity)
{
    return sizeof(struct wire) + capacity;
}

/* All steps that need no peer. */
static ep_status prepare(struct emulated *e)
{
    struct ep_net *net = &e->net;
    size_t n = (size_t)e->npeers * (size_t)net->channels;

    e->peers = calloc((size_t)e->npeers, sizeof(*e->peers));
    e->outgoing = calloc(n, sizeof(*e->outgoing));
    e->incoming = calloc(n, sizeof(*e->incoming));
    e->order = calloc(n, sizeof(*e->order));
    if (!e->peers || !e->outgoing || !e->incoming || !e->order)
        return ep_fail(EP_E_MEMORY, "network emulated: no memory for %zu wires", n);
    for (int i = 0; i < e->npeers; i++)
        e->peers[i].fd = -1;
    EP_TRY(ep_net_memory_new(net));
    net->wire_bytes = n * wire_stride(e->capacity);
    EP_TRY(ep_shm_new(net->wire_bytes, &e->shm));
    for (int i = 0; i < (int)n; i++) {
        int peer = ep_net_index_peer(net, i);

        e->order[i] = i;
        e->incoming[i].wire = (struct wire *)((char *)e->shm.base + (size_t)i * wire_stride(e->capacity));
        e->incoming[i].writer = (uint32_t)ep_net_rail(net, peer);
        e->outgoing[i].random = seed_random(e->emulation.seed, net->rank, peer, i % net->channels);
    }
    return EP_OK;
}

static ep_status attach_peer(struct emulated *e, const struct ep_net_params *params, int slot, const struct hello *all)
{
    int channels = e->net.channels, peer = ep_net_peer(e->net.node, slot);
    int rank = ep_net_rail(&e->net, peer);
    const struct hello *theirs = &all[rank];
    size_t stride = wire_stride(theirs->capacity);
    size_t first = (size_t)ep_net_peer_index(peer, e->net.node) * (size_t)channels;

    if (theirs->capacity < EP_NET_WIRE_MIN_BYTES || theirs->capacity % 64 ||
        theirs->capacity > (uint64_t)UINT32_MAX + 64 ||
        theirs->name.bytes != (uint64_t)e->npeers * (uint64_t)channels * stride)
        return ep_fail(EP_E_MISMATCH, "network emulated: what rank %d has published is damaged: a wire of %llu bytes",
                       rank, (unsigned long long)theirs->capacity);
    EP_TRY(params->attach ? params->attach(params->wake_context, rank, &theirs->name, &e->peers[slot])
                          : ep_shm_attach(&theirs->name, theirs->name.pid, &e->peers[slot]));
    for (int channel = 0; channel < channels; channel++) {
        struct outgoing *out = &e->outgoing[slot * channels + channel];

        out->wire = (struct wire *)((char *)e->peers[slot].base + (first + (size_t)channel) * stride);
        out->capacity = theirs->capacity;
    }
    return EP_OK;
}

/* Two exchanges: after the second one all peers have mapped the segments, and a rank may free its own. */
static ep_status exchange_hello(struct emulated *e, const struct ep_net_params *params, ep_status status)
{
    const char *name = e->net.ops->name;
    struct hello mine = {.capacity = e->capacity}, *all = calloc((size_t)params->nranks, sizeof(*all));

    if (!all)
        return ep_fail(EP_E_MEMORY, "network emulated: no memory for %d ranks", params->nranks);
    if (status == EP_OK)
        status = ep_shm_get_name(&e->shm, &mine.name);
    status = ep_net_exchange_hello(name, params, status, &mine, sizeof(mine), all);
    if (status == EP_OK) {
        for (int slot = 0; slot < e->npeers && status == EP_OK; slot++)
            if (ep_net_is_present(params, ep_net_rail(&e->net, ep_net_peer(e->net.node, slot))))
                status = attach_peer(e, params, slot, all);
            else
                (void)emulated_revoke(&e->net, ep_net_peer(e->net.node, slot));
        status = ep_net_exchange_hello(name, params, status, &mine, sizeof(mine), all);
    }
    free(all);
    return status;
}

static ep_status emulated_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                               struct ep_net **ret_net)
{
    struct emulated *e;
    size_t ring = params->emulation.ring_bytes ? params->emulation.ring_bytes : EP_NET_WIRE_BYTES;

    (void)provider;
    if (ring < EP_NET_WIRE_MIN_BYTES)
        return ep_fail(EP_E_ARG, "network emulated: emulation.ring_bytes = %zu, at least %u", ring,
                       EP_NET_WIRE_MIN_BYTES);
    EP_TRY(ep_net_new(&emulated_ops, sizeof(*e), params, ret_net));
    e = emulated_of(*ret_net);
    e->net.can_sleep = true;
    e->npeers = e->net.nnodes - 1;
    e->emulation = params->emulation;
    e->capacity = (ring + 63) & ~(size_t)63;
    e->wake = params->wake;
    e->wake_context = params->wake_context;
    e->shm.fd = -1;
    e->random = seed_random(params->emulation.seed, params->rank, params->rank, EP_NET_MAX_CHANNELS);
    return ep_net_opened(exchange_hello(e, params, prepare(e)), ret_net);
}

const struct ep_net_provider ep_net_emulated = {.abi = EP_NET_ABI, .name = "emulated", .open = emulated_open};
