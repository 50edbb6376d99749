/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: each ep_ll has an endpoint of its own on the communicator's network, opened as if every
 * rank were a node. So a rank puts directly into the memory of each rank of another node, without forwarding: a rank
 * that dies takes no other rank with it, which masks promise, and no rank depends on the calls of another one. The
 * order of sums in a combine requires a row for each (token, rank) on the network in any case.
 *
 * The region of an endpoint has, for calls of both parities and each rank of another node, a block of slots, a request,
 * an op descriptor and reply rows. Only received data takes pages of it. Counters are signals. Data to be put stays in
 * memory of the ep_ll until it has left, so the caller's memory is free when its call returns. A thread sends the rest.
 *
 * A lock serialises that thread and the caller's; it protects the endpoint and all of struct ll_net.
 */
#include "backend/host/lowlatency_net.h"

#include <stdlib.h>

/* A put of this size fills a packet train; larger ones are split, and other peers are served between the pieces. */
#define PUT_BYTES (256u << 10)
#define BACKOFF_MAX_NS 1000000u

static struct ll_net *net_of(const ep_ll *ll)
{
    return ((struct host_ll *)ll->impl)->net;
}

/* Index of `rank` among the ranks of other nodes, as seen from a node that begins at rank `first`. */
static size_t remote_index(const struct ll_net *n, int rank, int first)
{
    return (size_t)(rank < first ? rank : rank - n->nlocal);
}

static size_t offset_of(const struct ll_net *n, int from, int to, uint64_t number, enum ll_payload what)
{
    size_t parity = number & 1;
    int first = to - to % n->nlocal;

    return n->at[what] + (parity * (size_t)n->nremote + remote_index(n, from, first)) * n->bytes[what];
}

/* --- sending, under the lock --- */

static bool push_signal(struct ll_net *n, int me, int rank, int which)
{
    struct peer *peer = &n->peers[rank];
    uint64_t add = peer->due[which] - peer->signalled[which];

    if (!add)
        return true;
    if (!n->net->ops->signal(n->net, rank, 0, (uint32_t)(me * LL_SIGNALS + which), add))
        return false;
    peer->signalled[which] += add;
    return true;
}

/*
 * Signals follow the puts that were queued before them, and may follow later ones as well; a mask is seen before data
 * that is sent after it. false: no room.
 */
static bool push_peer(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (!push_signal(n, me, rank, LL_MASKED))
        return false;
    while (peer->n) {
        struct put *put = &peer->puts[peer->first];
        size_t bytes = put->bytes < PUT_BYTES ? put->bytes : PUT_BYTES;

        if (!n->net->ops->put(n->net, rank, 0, put->offset, put->src, bytes))
            return false;
        put->offset += bytes;
        put->src += bytes;
        put->bytes -= bytes;
        if (put->bytes)
            continue;
        peer->first = (peer->first + 1) % PUTS;
        peer->n--;
    }
    for (int which = 0; which < LL_SIGNALS; which++)
        if (!push_signal(n, me, rank, which))
            return false;
    return true;
}

void ll_net_free_retired(struct peer *peer)
{
    while (peer->retired) {
        struct retired *next = peer->retired->next;

        free(peer->retired->memory);
        free(peer->retired);
        peer->retired = next;
    }
}

bool ll_net_flushed(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (peer->ended)
        peer->n = 0;
    else if (!push_peer(n, me, rank) || !n->net->ops->flush_test(n->net, rank, 0))
        return false;
    peer->left = peer->sent;
    ll_net_free_retired(peer);
    return true;
}

/* A rank that was masked a deadline ago accepts nothing, or has learned the mask by now. */
static bool is_given_up(const struct peer *peer)
{
    return peer->given_up_ns && ep_now_ns() >= peer->given_up_ns;
}

/* True if data for a rank that counts has not left yet. */
static bool is_outstanding(const ep_ll *ll)
{
    const struct host_ll *inner = ll->impl;

    /* The second one is set before any call of this rank has reported it. */
    if (atomic_load(&ll->comm->failed) != EP_OK || atomic_load(&inner->group->control->failure))
        return false;
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        if (ll_net_is_remote(inner->net, rank) && !is_given_up(&inner->net->peers[rank]) &&
            !ll_net_flushed(inner->net, ll->comm->rank, rank))
            return true;
    return false;
}

/* --- receiving, under the lock --- */

static void apply_signals(const ep_ll *ll, struct ll_net *n, int rank)
{
    const uint64_t *signals = n->net->signals + (size_t)rank * LL_SIGNALS;
    struct ll_shared *copy = ll_shared_of(ll->impl, rank);
    int me = ll->comm->rank;
    uint64_t bit = UINT64_C(1) << me % 64;

    if (signals[LL_MASKED] & 1)
        atomic_fetch_or(&copy->masks[me / 64], bit);
    else
        atomic_fetch_and(&copy->masks[me / 64], ~bit);
    for (int counter = 0; counter < LL_COUNTERS; counter++)
        atomic_store_explicit(&copy->counters[counter], signals[counter], memory_order_release);
}

ep_status ll_net_step(const ep_ll *ll, struct ll_net *n, bool *ret_moved)
{
    struct ep_group *group = ep_group_of(ll->comm);
    const struct ep_net_ops *ops = n->net->ops;
    int me = ll->comm->rank;

    EP_TRY(ops->progress(n->net, ret_moved));
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct peer *peer = &n->peers[rank];

        if (!ll_net_is_remote(n, rank))
            continue;
        if (*ret_moved)
            apply_signals(ll, n, rank);
        ep_group_net_note_lost(group, n->net, rank);
        peer->ended = ops->ended && ops->ended(n->net, rank);
        if (!peer->ended)
            push_peer(n, me, rank);
    }
    return EP_OK;
}

ep_status ll_net_progress(ep_ll *ll, enum ep_group_phase phase, bool *ret_moved)
{
    struct ll_net *n = net_of(ll);
    ep_status status;
    int broken_by;

    *ret_moved = false;
    if (!n)
        return EP_OK;
    pthread_mutex_lock(&n->lock);
    status = ll_net_step(ll, n, ret_moved);
    broken_by = n->net->broken_by;
    pthread_mutex_unlock(&n->lock);
    if (status == EP_OK)
        return EP_OK;
    return ep_group_set_own_failure(ep_group_of(ll->comm), status, broken_by ? broken_by - 1 : ll->comm->rank, phase);
}

bool ll_net_polls(const ep_ll *ll)
{
    struct ll_net *n = net_of(ll);
    bool polls = false;

    if (n) {
        pthread_mutex_lock(&n->lock);
        polls = !n->net->can_sleep;
        pthread_mutex_unlock(&n->lock);
    }
    return polls;
}

bool ll_net_in_flight(const ep_ll *ll, int rank)
{
    struct ll_net *n = net_of(ll);
    bool in_flight;

    if (!n || !ll_is_remote(ll, rank))
        return false;
    pthread_mutex_lock(&n->lock);
    in_flight = n->net->ops->ended ? !n->peers[rank].ended : !n->net->can_sleep;
    pthread_mutex_unlock(&n->lock);
    return in_flight;
}

/* --- sending data and signals --- */

void ll_net_signal(ep_ll *ll, int rank, int counter, uint64_t value)
{
    struct ll_net *n = net_of(ll);

    pthread_mutex_lock(&n->lock);
    n->peers[rank].due[counter] = value;
    push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

void ll_net_publish(ep_ll *ll, int counter, uint64_t value)
{
    const struct ll_net *n = net_of(ll);

    /* The input of a combine is a reply to each rank of another node. */
    if (!n || counter == LL_INPUT_READY)
        return;
    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (ll_net_is_remote(n, rank))
            ll_net_signal(ll, rank, counter, value);
    }
}

void ll_net_publish_mask(ep_ll *ll, int rank, bool on)
{
    struct ll_net *n = net_of(ll);
    uint64_t *due;

    if (!n || !ll_net_is_remote(n, rank))
        return;
    pthread_mutex_lock(&n->lock);
    due = &n->peers[rank].due[LL_MASKED];
    if ((*due & 1) != on)
        ++*due;
    n->peers[rank].given_up_ns = on ? ep_deadline_ns(ll->comm->config.timeout_ms) : 0;
    push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

static bool all_flushed(struct ll_net *n, const ep_comm *comm)
{
    for (int rank = 0; rank < comm->nranks; rank++)
        if (ll_net_is_remote(n, rank) && !ep_group_peer_dead(ep_group_of(comm), rank) &&
            !ll_net_flushed(n, comm->rank, rank))
            return false;
    return true;
}

ep_status ll_net_flush_masks(ep_ll *ll)
{
    struct timespec backoff = {.tv_nsec = BACKOFF_MIN_NS};
    uint64_t limit_ns = ep_deadline_ns(ll->comm->config.timeout_ms);
    struct ll_net *n = net_of(ll);
    bool done = !n;

    while (!done && ep_now_ns() < limit_ns) {
        bool moved;

        EP_TRY(ll_net_progress(ll, EP_GROUP_LL_BARRIER, &moved));
        pthread_mutex_lock(&n->lock);
        done = all_flushed(n, ll->comm);
        pthread_mutex_unlock(&n->lock);
        if (!done)
            nanosleep(&backoff, NULL);
    }
    return EP_OK;
}

/* Defers the free of a buffer that is in flight. */
static ep_status retire(struct peer *peer, struct send_buffer *buffer)
{
    struct retired *retired = malloc(sizeof(*retired));

    if (!retired)
        return ep_fail(EP_E_MEMORY, "low latency: no memory");
    *retired = (struct retired){.next = peer->retired, .memory = buffer->memory};
    peer->retired = retired;
    *buffer = (struct send_buffer){.memory = NULL};
    return EP_OK;
}

static ep_status get_send_buffer(struct peer *peer, struct send_buffer *buffer, size_t bytes, int rank)
{
    if (buffer->memory && buffer->sent > peer->left)
        EP_TRY(retire(peer, buffer));
    if (buffer->bytes >= bytes)
        return EP_OK;
    free(buffer->memory);
    *buffer = (struct send_buffer){.memory = NULL};
    /* Zeroed, because gaps between rows are sent too. */
    buffer->memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!buffer->memory)
        return ep_fail(EP_E_MEMORY, "low latency: no memory for %zu bytes for rank %d", bytes, rank);
    memset(buffer->memory, 0, bytes);
    buffer->bytes = bytes;
    return EP_OK;
}

ep_status ll_net_get_send_buffer(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes,
                                 void **ret_memory)
{
    struct ll_net *n = net_of(ll);
    struct send_buffer *buffer = &n->peers[rank].buffers[number & 1][what];
    ep_status status;

    pthread_mutex_lock(&n->lock);
    ll_net_flushed(n, ll->comm->rank, rank);
    status = get_send_buffer(&n->peers[rank], buffer, bytes, rank);
    *ret_memory = buffer->memory;
    pthread_mutex_unlock(&n->lock);
    return status;
}

/* false: the queue of the rank is full, because it accepts nothing. */
static bool add_put(struct ll_net *n, int me, int rank, const struct put *put)
{
    struct peer *peer = &n->peers[rank];
    bool room = peer->n < PUTS || peer->ended;

    if (room && !peer->ended) {
        peer->puts[(peer->first + peer->n++) % PUTS] = *put;
        push_peer(n, me, rank);
    }
    return room;
}

bool ll_net_try_send(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes)
{
    struct ll_net *n = net_of(ll);
    int me = ll->comm->rank;
    struct send_buffer *buffer = &n->peers[rank].buffers[number & 1][what];
    struct put put = {.bytes = bytes, .offset = offset_of(n, me, rank, number, what)};
    bool added;

    pthread_mutex_lock(&n->lock);
    put.src = buffer->memory;
    added = add_put(n, me, rank, &put);
    if (added)
        buffer->sent = ++n->peers[rank].sent;
    pthread_mutex_unlock(&n->lock);
    return added;
}

void *ll_net_get_received(const ep_ll *ll, int rank, uint64_t number, enum ll_payload what)
{
    const struct ll_net *n = net_of(ll);

    return n->net->region + offset_of(n, rank, ll->comm->rank, number, what);
}

/* --- the thread --- */

void ll_net_begin(ep_ll *ll)
{
    struct ll_net *n = net_of(ll);

    if (!n)
        return;
    pthread_mutex_lock(&n->lock);
    n->busy++;
    pthread_mutex_unlock(&n->lock);
}

void ll_net_end(ep_ll *ll)
{
    struct ll_net *n = net_of(ll);

    if (!n)
        return;
    pthread_mutex_lock(&n->lock);
    if (--n->busy == 0 && is_outstanding(ll))
        pthread_cond_signal(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

void *ll_net_run(void *context)
{
    const ep_ll *ll = context;
    struct ll_net *n = net_of(ll);
    struct timespec backoff = {.tv_nsec = BACKOFF_MIN_NS};

    pthread_mutex_lock(&n->lock);
    while (!n->stops) {
        bool moved = false;

        if (n->busy || !is_outstanding(ll)) {
            pthread_cond_wait(&n->changed, &n->lock);
            continue;
        }
        if (ll_net_step(ll, n, &moved) != EP_OK) {
            pthread_cond_wait(&n->changed, &n->lock);
            continue;
        }
        pthread_mutex_unlock(&n->lock);
        backoff.tv_nsec = moved                                  ? BACKOFF_MIN_NS
                          : backoff.tv_nsec < BACKOFF_MAX_NS / 2 ? 2 * backoff.tv_nsec
                                                                 : BACKOFF_MAX_NS;
        nanosleep(&backoff, NULL);
        pthread_mutex_lock(&n->lock);
    }
    pthread_mutex_unlock(&n->lock);
    return NULL;
}
