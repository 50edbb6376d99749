/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: each ep_ll has an endpoint of its own on the communicator's network, opened as if every
 * rank were a node. So a rank puts directly into the memory of each rank of another node, without forwarding: a rank
 * that dies takes no other rank with it, which masks promise, and no rank depends on the calls of another one. The
 * order of sums in a combine requires a row for each (token, rank) on the network in any case.
 *
 * The region of an endpoint has, for calls of both parities and each rank of another node, a block of slots, a request
 * and the rows of a reply. Only received data takes pages of it. Counters are signals. Data to be put stays in memory
 * of the ep_ll until it has left, so the caller's memory is free when its call returns. A thread sends the rest.
 *
 * A lock serialises that thread and the caller's; it protects the endpoint and all of struct ll_net.
 */
#include "backend/host/lowlatency.h"

#include "base/backoff.h"
#include "base/thread.h"

#include <stdlib.h>

/* A put of this size fills a packet train; larger ones are split, and other peers are served between the pieces. */
#define PUT_BYTES (256u << 10)
#define BACKOFF_MIN_NS 20000u
#define BACKOFF_MAX_NS 1000000u

/* Data for one rank. */
struct parcel {
    struct parcel *next;  /* next in the queue */
    struct parcel **home; /* where it is kept when it is not queued */
    size_t room;          /* bytes of `data` */
    uint64_t offset;      /* in the region of the rank */
    size_t bytes, put;    /* to be sent, and those of them that have been put */
    alignas(64) unsigned char data[];
};

/*
 * A rank of another node. At most two calls of each kind are queued for it: the next one begins when the rank has read
 * the first, or it is masked and gets no more.
 */
struct peer {
    struct ll_shared copy;                  /* of its state */
    struct parcel *parcels[2][LL_PAYLOADS]; /* by parity of the call; NULL: queued, or never needed */
    struct parcel *queue;                   /* sent and not flushed, oldest first; the network may read them */
    uint64_t due[LL_SIGNALS], signalled[LL_SIGNALS];
    bool ended;
    uint64_t given_up_ns; /* masked: from then on no data is sent for it alone; 0: not masked */
};

struct ll_net {
    struct ep_net *net;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops;
    bool busy;                                  /* a job runs, which progresses the network itself */
    size_t at[LL_PAYLOADS], bytes[LL_PAYLOADS]; /* offset and size in the region */
    struct peer peers[];                        /* [R]; those of this node are unused */
};

static struct ll_net *net_of(const ep_ll *ll)
{
    return ((struct host_ll *)ll->impl)->net;
}

/* Sets the layout of the region, and returns its size. */
static size_t lay_out(const ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    size_t entries = (size_t)ll->config.max_tokens * (size_t)ll->config.topk, at = 0;

    n->bytes[LL_PAYLOAD_BLOCK] = inner->block_bytes;
    n->bytes[LL_PAYLOAD_REQUEST] = sizeof(struct ll_request) + entries * sizeof(struct ll_choice);
    n->bytes[LL_PAYLOAD_ROWS] = (size_t)ll_max_reply_rows(ll, ll->config.max_tokens) * (size_t)ll->config.hidden * 2;
    for (int what = 0; what < LL_PAYLOADS; what++) {
        n->bytes[what] = (n->bytes[what] + 63) & ~(size_t)63;
        n->at[what] = at;
        at += 2 * (size_t)(ll->comm->nranks - ll->comm->ranks_per_node) * n->bytes[what];
    }
    return at;
}

int64_t ll_net_bytes(const ep_ll *ll)
{
    struct ll_net n = {.net = NULL};

    return (int64_t)(lay_out(ll, &n) + (size_t)ll->comm->nranks * sizeof(struct peer));
}

struct ll_shared *ll_net_copy_of(const ep_ll *ll, int rank)
{
    return &net_of(ll)->peers[rank].copy;
}

/* Where data of `from` is in the region of `to`, which has a place for each rank of another node. */
static size_t offset_of(const ep_ll *ll, int from, int to, uint64_t number, enum ll_payload what)
{
    const struct ll_net *n = net_of(ll);
    int nlocal = ll->comm->ranks_per_node, first = to - to % nlocal;
    int index = (int)(number & 1) * (ll->comm->nranks - nlocal) + (from < first ? from : from - nlocal);

    return n->at[what] + (size_t)index * n->bytes[what];
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
 * Signals follow the parcels that were queued before them, and may follow later ones as well; a mask is seen before
 * data that is sent after it. false: no room.
 */
static bool push_peer(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (!push_signal(n, me, rank, LL_MASKED))
        return false;
    for (struct parcel *parcel = peer->queue; parcel; parcel = parcel->next)
        while (parcel->put < parcel->bytes) {
            size_t left = parcel->bytes - parcel->put, bytes = left < PUT_BYTES ? left : PUT_BYTES;

            if (!n->net->ops->put(n->net, rank, 0, parcel->offset + parcel->put, parcel->data + parcel->put, bytes))
                return false;
            parcel->put += bytes;
        }
    for (int which = 0; which < LL_SIGNALS; which++)
        if (!push_signal(n, me, rank, which))
            return false;
    return true;
}

/* True if all data for `rank` has left, or its connection has ended. Its parcels can be filled again. */
static bool is_flushed(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (!peer->ended && (!push_peer(n, me, rank) || !n->net->ops->flush_test(n->net, rank, 0)))
        return false;
    while (peer->queue) {
        struct parcel *parcel = peer->queue;

        peer->queue = parcel->next;
        if (*parcel->home)
            free(parcel);
        else
            *parcel->home = parcel;
    }
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
        if (ll_is_remote(ll, rank) && !is_given_up(&inner->net->peers[rank]) &&
            !is_flushed(inner->net, ll->comm->rank, rank))
            return true;
    return false;
}

/* --- both directions, under the lock --- */

static void apply_signals(const ep_ll *ll, struct ll_net *n, int rank)
{
    const uint64_t *signals = n->net->signals + (size_t)rank * LL_SIGNALS;
    struct ll_shared *copy = &n->peers[rank].copy;

    atomic_store(&copy->masked[ll->comm->rank], signals[LL_MASKED] & 1);
    for (int counter = 0; counter < LL_COUNTERS; counter++)
        atomic_store_explicit(&copy->counters[counter], signals[counter], memory_order_release);
}

/* One pass over all peers. */
static ep_status step(const ep_ll *ll, struct ll_net *n, bool *ret_moved)
{
    const struct ep_net_ops *ops = n->net->ops;

    EP_TRY(ops->progress(n->net, ret_moved));
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct peer *peer = &n->peers[rank];

        if (!ll_is_remote(ll, rank))
            continue;
        if (*ret_moved)
            apply_signals(ll, n, rank);
        ep_group_net_note_lost(ep_group_of(ll->comm), n->net, rank);
        peer->ended = ops->ended && ops->ended(n->net, rank);
        if (!peer->ended)
            push_peer(n, ll->comm->rank, rank);
    }
    return EP_OK;
}

/* The same; a broken network fails the group. */
static ep_status step_or_fail(const ep_ll *ll, struct ll_net *n, enum ep_group_phase phase, bool *ret_moved)
{
    ep_status status = step(ll, n, ret_moved);
    int broken_by = n->net->broken_by;

    if (status == EP_OK)
        return EP_OK;
    return ep_group_set_own_failure(ep_group_of(ll->comm), status, broken_by ? broken_by - 1 : ll->comm->rank, phase);
}

ep_status ll_net_progress(ep_ll *ll, enum ep_group_phase phase, int rank, struct ep_group_wait *wait, bool *ret_moved)
{
    struct ll_net *n = net_of(ll);
    ep_status status;

    *ret_moved = false;
    if (!n)
        return EP_OK;
    pthread_mutex_lock(&n->lock);
    status = step_or_fail(ll, n, phase, ret_moved);
    if (wait) {
        bool open = n->net->ops->ended ? !n->peers[rank].ended : !n->net->can_sleep;

        wait->polls = !n->net->can_sleep;
        wait->in_flight = ll_is_remote(ll, rank) && open ? EP_GROUP_IN_FLIGHT : EP_GROUP_NOT_IN_FLIGHT;
    }
    pthread_mutex_unlock(&n->lock);
    return status;
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
    /* The input of a combine is a reply to each rank of another node. */
    if (!net_of(ll) || counter == LL_INPUT_READY)
        return;
    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (ll_is_remote(ll, rank))
            ll_net_signal(ll, rank, counter, value);
    }
}

void ll_net_publish_mask(ep_ll *ll, int rank, bool on)
{
    struct ll_net *n = net_of(ll);
    uint64_t *due;

    if (!n || !ll_is_remote(ll, rank))
        return;
    pthread_mutex_lock(&n->lock);
    due = &n->peers[rank].due[LL_MASKED];
    if ((*due & 1) != on)
        ++*due;
    n->peers[rank].given_up_ns = on ? ep_deadline_ns(ll->comm->config.timeout_ms) : 0;
    push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

/*
 * Sends until all data has left, for one deadline at most. Dead ranks are not waited for. `closes`: neither are masked
 * ones, and a failure ends it; otherwise a broken network is a failure.
 */
static ep_status flush(ep_ll *ll, bool closes)
{
    const struct host_ll *inner = ll->impl;
    uint64_t deadline_ns = ep_deadline_ns(ll->comm->config.timeout_ms);
    struct ll_net *n = inner->net;
    ep_status status = EP_OK;
    bool all = false, moved;

    while (!all && ep_now_ns() < deadline_ns && !(closes && ep_group_check(inner->group) != EP_OK)) {
        pthread_mutex_lock(&n->lock);
        status = closes ? step(ll, n, &moved) : step_or_fail(ll, n, EP_GROUP_LL_BARRIER, &moved);
        all = true;
        for (int rank = 0; status == EP_OK && rank < ll->comm->nranks; rank++)
            if (ll_is_remote(ll, rank) && !(closes && inner->masked[rank]) && !ep_group_peer_dead(inner->group, rank))
                all &= is_flushed(n, ll->comm->rank, rank);
        pthread_mutex_unlock(&n->lock);
        if (!all)
            ep_backoff_sleep();
    }
    return status;
}

ep_status ll_net_flush_masks(ep_ll *ll)
{
    return net_of(ll) ? flush(ll, false) : EP_OK;
}

/* Finds or allocates the parcel. */
static struct parcel *get_parcel(struct parcel **home, size_t bytes)
{
    size_t room = (bytes + 63) & ~(size_t)63;

    if (*home && (*home)->room >= room)
        return *home;
    free(*home);
    *home = aligned_alloc(64, sizeof(**home) + room);
    if (!*home)
        return NULL;
    /* Gaps between rows are sent too. */
    memset(*home, 0, sizeof(**home) + room);
    (*home)->home = home;
    (*home)->room = room;
    return *home;
}

void *ll_net_get_send_buffer(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes)
{
    struct ll_net *n = net_of(ll);
    struct parcel *parcel;

    pthread_mutex_lock(&n->lock);
    is_flushed(n, ll->comm->rank, rank);
    parcel = get_parcel(&n->peers[rank].parcels[number & 1][what], bytes);
    pthread_mutex_unlock(&n->lock);
    if (parcel)
        return parcel->data;
    ep_fail(EP_E_MEMORY, "low latency: no memory for %zu bytes for rank %d", bytes, rank);
    return NULL;
}

void ll_net_send(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes)
{
    struct ll_net *n = net_of(ll);
    struct peer *peer = &n->peers[rank];
    struct parcel **home = &peer->parcels[number & 1][what], *parcel, **at;

    pthread_mutex_lock(&n->lock);
    parcel = *home;
    *home = NULL;
    parcel->offset = offset_of(ll, ll->comm->rank, rank, number, what);
    parcel->bytes = bytes;
    parcel->put = 0;
    parcel->next = NULL;
    for (at = &peer->queue; *at;)
        at = &(*at)->next;
    *at = parcel;
    if (!peer->ended)
        push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

void *ll_net_get_received(const ep_ll *ll, int rank, uint64_t number, enum ll_payload what)
{
    return net_of(ll)->net->region + offset_of(ll, rank, ll->comm->rank, number, what);
}

/* --- the thread --- */

void ll_net_set_busy(ep_ll *ll, bool busy)
{
    struct ll_net *n = net_of(ll);

    if (!n)
        return;
    pthread_mutex_lock(&n->lock);
    n->busy = busy;
    if (!busy && is_outstanding(ll))
        pthread_cond_signal(&n->changed);
    pthread_mutex_unlock(&n->lock);
}

/* Sends what has not left when a call returns. Its failures are found by the next call. */
static void *run_thread(void *context)
{
    const ep_ll *ll = context;
    struct ll_net *n = net_of(ll);
    struct timespec backoff = {.tv_nsec = BACKOFF_MIN_NS};

    pthread_mutex_lock(&n->lock);
    while (!n->stops) {
        bool moved = false;

        if (n->busy || !is_outstanding(ll) || step(ll, n, &moved) != EP_OK) {
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

static void stop_thread(struct ll_net *n)
{
    if (!n->started)
        return;
    pthread_mutex_lock(&n->lock);
    n->stops = true;
    pthread_cond_signal(&n->changed);
    pthread_mutex_unlock(&n->lock);
    pthread_join(n->thread, NULL);
    n->started = false;
}

void host_ll_stop_threads(struct ep_group *group)
{
    for (struct host_ll *inner = ((struct host_comm *)group)->lls; inner; inner = inner->next)
        stop_thread(inner->net);
}

/* --- opening and closing --- */

ep_status ll_net_prepare(ep_ll *ll)
{
    size_t nranks = (size_t)ll->comm->nranks, bytes = sizeof(struct ll_net) + nranks * sizeof(struct peer);
    struct ll_net *n = aligned_alloc(alignof(struct ll_net), bytes);

    if (!n)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory for %zu ranks", nranks);
    memset(n, 0, bytes);
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->changed, NULL);
    ((struct host_ll *)ll->impl)->net = n;
    return EP_OK;
}

ep_status ll_net_open(ep_ll *ll)
{
    struct host_ll *inner = ll->impl, **lls = &((struct host_comm *)inner->group)->lls;
    ep_boot boot = ep_group_boot(ll->comm);
    struct ep_net_provider provider;
    struct ep_net_params params;
    struct ll_net *n = inner->net;

    ep_group_net_describe_ranks(inner->group, &boot, &provider, &params);
    params.region_bytes = lay_out(ll, n);
    params.n_signals = (uint32_t)ll->comm->nranks * LL_SIGNALS;
    EP_TRY(provider.open(&provider, &params, &n->net));
    EP_TRY(ep_thread_begin(&n->thread, &n->started, run_thread, ll, "ep_ll_new: the thread of the network"));
    inner->next = *lls;
    *lls = inner;
    return EP_OK;
}

static void unlink_from_comm(struct host_ll *inner)
{
    struct host_ll **at = &((struct host_comm *)inner->group)->lls;

    while (*at && *at != inner)
        at = &(*at)->next;
    if (*at)
        *at = inner->next;
}

static void free_parcels(struct peer *peer)
{
    for (int i = 0; i < 2 * LL_PAYLOADS; i++)
        free(peer->parcels[i / LL_PAYLOADS][i % LL_PAYLOADS]);
    while (peer->queue) {
        struct parcel *next = peer->queue->next;

        free(peer->queue);
        peer->queue = next;
    }
}

void ll_net_close(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ll_net *n = inner->net;

    if (!n)
        return;
    unlink_from_comm(inner);
    if (n->started) {
        stop_thread(n);
        flush(ll, true);
    }
    if (n->net) {
        n->net->abandoned = atomic_load(&ll->comm->failed) != EP_OK;
        n->net->ops->free(n->net);
    }
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        free_parcels(&n->peers[rank]);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    free(n);
    inner->net = NULL;
}
