/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: each ep_ll has an endpoint of its own on the communicator's network, opened as if every
 * rank were a node. So a rank puts straight into the memory of each rank of another node, and nobody forwards anything:
 * a rank that dies takes nobody else along, which is what masks promise, and no rank depends on when another one calls.
 * The order of sums in a combine makes a row for each (token, rank) travel anyway.
 *
 * Region of an endpoint, for calls of both parities, from each rank of another node: a block of slots, a request, an
 * answer and its rows. Only what comes takes pages of it. Counters are signals. What a rank puts lies in memory of the
 * ep_ll until it has left, so the caller's memory is free when its call returns. A thread sends what has not left by
 * then.
 *
 * A lock keeps that thread and the caller's apart; it protects the endpoint and all of struct ll_net.
 */
#include "backend/host/lowlatency.h"

#include "base/thread.h"

#include <stdlib.h>

/* A put of that size fills a packet train; larger ones go in pieces, between which others get their turn. */
#define PUT_BYTES (256u << 10)
/* Two calls of each kind are under way at most; a rank that is no longer masked may find some more. */
#define PUTS 16
#define BACKOFF_LEAST_NS 20000u
#define BACKOFF_MOST_NS 1000000u

struct put {
    uint64_t offset;
    const unsigned char *src;
    size_t bytes;
};

/* Memory for what goes to one rank. */
struct parcel {
    unsigned char *memory;
    size_t bytes;
    uint64_t sent; /* struct peer: sent, when it was last queued */
};

/* Memory that was still on its way when it was wanted again. */
struct retired {
    struct retired *next;
    void *memory;
};

/* A rank of another node. */
struct peer {
    struct put puts[PUTS]; /* a ring: the first `first`, `n` of them */
    int first, n;
    uint64_t sent, left; /* puts queued so far, and when everything had left */
    uint64_t due[LL_SIGNALS], signalled[LL_SIGNALS];
    struct parcel parcels[2][LL_PARCELS];
    struct retired *retired;
    bool ended;
    uint64_t given_up_ns; /* masked: from then on nobody goes on sending for it alone; 0: not masked */
};

struct ll_net {
    struct ep_net *net;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops;
    int busy;           /* jobs that move things themselves */
    struct peer *peers; /* [R]; those of this node are not used */
    int nlocal, first, nremote;
    size_t at[LL_PARCELS], bytes[LL_PARCELS]; /* in the region: where, and of one of them */
};

/* The words that signals stand for. LL_SIGNAL_MASKED is a bit. */
static const size_t words[LL_SIGNALS] = {
    [LL_SIGNAL_SENT] = offsetof(struct ll_shared, sent),
    [LL_SIGNAL_ASKED] = offsetof(struct ll_shared, asked),
    [LL_SIGNAL_OFFERED] = offsetof(struct ll_shared, offered),
    [LL_SIGNAL_TAKEN_0] = offsetof(struct ll_shared, taken[0]),
    [LL_SIGNAL_TAKEN_1] = offsetof(struct ll_shared, taken[1]),
    [LL_SIGNAL_PULLED_0] = offsetof(struct ll_shared, pulled[0]),
    [LL_SIGNAL_PULLED_1] = offsetof(struct ll_shared, pulled[1]),
    [LL_SIGNAL_BARRIERS] = offsetof(struct ll_shared, barriers),
};

static struct ll_net *net_of(const ep_ll *ll)
{
    return ((struct host_ll *)ll->impl)->net;
}

/* Place of `rank` among the ranks of other nodes, as a rank whose node begins at `first` counts them. */
static size_t place_of(const struct ll_net *n, int rank, int first)
{
    return (size_t)(rank < first ? rank : rank - n->nlocal);
}

static size_t offset_of(const struct ll_net *n, int from, int to, uint64_t number, enum ll_parcel what)
{
    size_t parity = number & 1;
    int first = to - to % n->nlocal;

    return n->at[what] + (parity * (size_t)n->nremote + place_of(n, from, first)) * n->bytes[what];
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

/* Signals follow the puts that were queued before them, and may follow later ones as well. false: no room. */
static bool push_peer(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (!push_signal(n, me, rank, LL_SIGNAL_MASKED))
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

static void free_retired(struct peer *peer)
{
    while (peer->retired) {
        struct retired *next = peer->retired->next;

        free(peer->retired->memory);
        free(peer->retired);
        peer->retired = next;
    }
}

/* Everything for `rank` has left, or nobody takes it. */
static bool flushed(struct ll_net *n, int me, int rank)
{
    struct peer *peer = &n->peers[rank];

    if (peer->ended)
        peer->n = 0;
    else if (!push_peer(n, me, rank) || !n->net->ops->flush_test(n->net, rank, 0))
        return false;
    peer->left = peer->sent;
    free_retired(peer);
    return true;
}

static bool is_remote(const struct ll_net *n, int rank)
{
    return rank < n->first || rank >= n->first + n->nlocal;
}

/* One that was masked long ago takes nothing, or has what it needs to know by now. */
static bool is_given_up(const struct peer *peer)
{
    return peer->given_up_ns && ep_now_ns() >= peer->given_up_ns;
}

/* Something for a rank that is waited for has not left yet. */
static bool is_outstanding(const ep_ll *ll)
{
    const struct host_ll *inner = ll->impl;

    /* The second one before any call of this rank has signalled it. */
    if (atomic_load(&ll->comm->failed) != EP_OK || atomic_load(&inner->group->control->failure))
        return false;
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        if (is_remote(inner->net, rank) && !is_given_up(&inner->net->peers[rank]) &&
            !flushed(inner->net, ll->comm->rank, rank))
            return true;
    return false;
}

/* --- receiving, under the lock --- */

static void take_signals(const ep_ll *ll, struct ll_net *n, int rank)
{
    const uint64_t *signals = n->net->signals + (size_t)rank * LL_SIGNALS;
    struct ll_shared *copy = ll_shared_of(ll->impl, rank);
    int me = ll->comm->rank;
    uint64_t bit = UINT64_C(1) << me % 64;

    if (signals[LL_SIGNAL_MASKED] & 1)
        atomic_fetch_or(&copy->masks[me / 64], bit);
    else
        atomic_fetch_and(&copy->masks[me / 64], ~bit);
    for (int which = LL_SIGNAL_SENT; which < LL_SIGNALS; which++)
        atomic_store_explicit(ll_counter_of(ll, rank, words[which]), signals[which], memory_order_release);
}

static ep_status progress(const ep_ll *ll, struct ll_net *n, bool *ret_moved)
{
    struct ep_group *group = ep_group_of(ll->comm);
    const struct ep_net_ops *ops = n->net->ops;
    int me = ll->comm->rank;

    EP_TRY(ops->progress(n->net, ret_moved));
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct peer *peer = &n->peers[rank];

        if (!is_remote(n, rank))
            continue;
        if (*ret_moved)
            take_signals(ll, n, rank);
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
    status = progress(ll, n, ret_moved);
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
        polls = !n->net->sleeps;
        pthread_mutex_unlock(&n->lock);
    }
    return polls;
}

bool ll_net_holds_back(const ep_ll *ll, int rank)
{
    struct ll_net *n = net_of(ll);
    bool holds;

    if (!n || !ll_is_remote(ll, rank))
        return false;
    pthread_mutex_lock(&n->lock);
    holds = n->net->ops->ended ? !n->peers[rank].ended : !n->net->sleeps;
    pthread_mutex_unlock(&n->lock);
    return holds;
}

/* --- what the calls say --- */

void ll_net_signal(ep_ll *ll, int rank, enum ll_signal which, uint64_t value)
{
    struct ll_net *n = net_of(ll);

    pthread_mutex_lock(&n->lock);
    n->peers[rank].due[which] = value;
    push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

void ll_net_publish(ep_ll *ll, size_t word, uint64_t value)
{
    const struct ll_net *n = net_of(ll);
    int which = LL_SIGNAL_SENT;

    if (!n)
        return;
    while (which < LL_SIGNALS && words[which] != word)
        which++;
    /* Requests and answers go to each rank by itself. */
    if (which == LL_SIGNALS || which == LL_SIGNAL_ASKED || which == LL_SIGNAL_OFFERED)
        return;
    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (is_remote(n, rank))
            ll_net_signal(ll, rank, (enum ll_signal)which, value);
    }
}

void ll_net_publish_mask(ep_ll *ll, int rank, bool on)
{
    struct ll_net *n = net_of(ll);
    uint64_t *due;

    if (!n || !is_remote(n, rank))
        return;
    pthread_mutex_lock(&n->lock);
    due = &n->peers[rank].due[LL_SIGNAL_MASKED];
    if ((*due & 1) != on)
        ++*due;
    n->peers[rank].given_up_ns = on ? ep_deadline_ns(ll->comm->config.timeout_ms) : 0;
    push_peer(n, ll->comm->rank, rank);
    pthread_mutex_unlock(&n->lock);
}

static bool all_flushed(struct ll_net *n, const ep_comm *comm)
{
    for (int rank = 0; rank < comm->nranks; rank++)
        if (is_remote(n, rank) && !ep_group_peer_dead(ep_group_of(comm), rank) && !flushed(n, comm->rank, rank))
            return false;
    return true;
}

ep_status ll_net_tell_masks(ep_ll *ll)
{
    struct timespec backoff = {.tv_nsec = BACKOFF_LEAST_NS};
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

/* Keeps what is on its way until it has left. */
static ep_status retire(struct peer *peer, struct parcel *parcel)
{
    struct retired *retired = malloc(sizeof(*retired));

    if (!retired)
        return ep_fail(EP_E_MEMORY, "low latency: no memory");
    *retired = (struct retired){.next = peer->retired, .memory = parcel->memory};
    peer->retired = retired;
    *parcel = (struct parcel){.memory = NULL};
    return EP_OK;
}

static ep_status get_parcel(struct peer *peer, struct parcel *parcel, size_t bytes, int rank)
{
    if (parcel->memory && parcel->sent > peer->left)
        EP_TRY(retire(peer, parcel));
    if (parcel->bytes >= bytes)
        return EP_OK;
    free(parcel->memory);
    *parcel = (struct parcel){.memory = NULL};
    /* Zeroed, because gaps between rows go over the network too. */
    parcel->memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!parcel->memory)
        return ep_fail(EP_E_MEMORY, "low latency: no memory for %zu bytes for rank %d", bytes, rank);
    memset(parcel->memory, 0, bytes);
    parcel->bytes = bytes;
    return EP_OK;
}

ep_status ll_net_get_parcel(ep_ll *ll, int rank, uint64_t number, enum ll_parcel what, size_t bytes, void **ret_memory)
{
    struct ll_net *n = net_of(ll);
    struct parcel *parcel = &n->peers[rank].parcels[number & 1][what];
    ep_status status;

    pthread_mutex_lock(&n->lock);
    flushed(n, ll->comm->rank, rank);
    status = get_parcel(&n->peers[rank], parcel, bytes, rank);
    *ret_memory = parcel->memory;
    pthread_mutex_unlock(&n->lock);
    return status;
}

/* false: the rank has been sent all that may be under way, and takes nothing. */
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

bool ll_net_try_send(ep_ll *ll, int rank, uint64_t number, enum ll_parcel what, size_t bytes)
{
    struct ll_net *n = net_of(ll);
    int me = ll->comm->rank;
    struct parcel *parcel = &n->peers[rank].parcels[number & 1][what];
    struct put put = {.bytes = bytes, .offset = offset_of(n, me, rank, number, what)};
    bool added;

    pthread_mutex_lock(&n->lock);
    put.src = parcel->memory;
    added = add_put(n, me, rank, &put);
    if (added)
        parcel->sent = ++n->peers[rank].sent;
    pthread_mutex_unlock(&n->lock);
    return added;
}

void *ll_net_get_received(const ep_ll *ll, int rank, uint64_t number, enum ll_parcel what)
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

/* Sends what has not left when a call returns. What is wrong then, the next call finds. */
static void *run(void *context)
{
    const ep_ll *ll = context;
    struct ll_net *n = net_of(ll);
    struct timespec backoff = {.tv_nsec = BACKOFF_LEAST_NS};

    pthread_mutex_lock(&n->lock);
    while (!n->stops) {
        bool moved = false;

        if (n->busy || !is_outstanding(ll)) {
            pthread_cond_wait(&n->changed, &n->lock);
            continue;
        }
        if (progress(ll, n, &moved) != EP_OK) {
            pthread_cond_wait(&n->changed, &n->lock);
            continue;
        }
        pthread_mutex_unlock(&n->lock);
        backoff.tv_nsec = moved                                   ? BACKOFF_LEAST_NS
                          : backoff.tv_nsec < BACKOFF_MOST_NS / 2 ? 2 * backoff.tv_nsec
                                                                  : BACKOFF_MOST_NS;
        nanosleep(&backoff, NULL);
        pthread_mutex_lock(&n->lock);
    }
    pthread_mutex_unlock(&n->lock);
    return NULL;
}

static ep_status start_thread(ep_ll *ll, struct ll_net *n)
{
    int error = ep_thread_start(&n->thread, NULL, run, ll);

    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "ep_ll_new: the thread of the network");
    n->started = true;
    return EP_OK;
}

/* --- opening and closing --- */

static size_t lay_out(const ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    size_t entries = (size_t)ll->config.max_tokens * (size_t)ll->config.topk, at = 0;

    n->bytes[LL_PARCEL_BLOCK] = inner->block_bytes;
    n->bytes[LL_PARCEL_REQUEST] = sizeof(struct ll_request) + entries * sizeof(struct ll_choice);
    n->bytes[LL_PARCEL_ANSWER] = sizeof(struct ll_offer);
    n->bytes[LL_PARCEL_ROWS] = (size_t)ll_most_rows(ll, ll->config.max_tokens) * (size_t)ll->config.hidden * 2;
    for (int what = 0; what < LL_PARCELS; what++) {
        n->bytes[what] = (n->bytes[what] + 63) & ~(size_t)63;
        n->at[what] = at;
        at += 2 * (size_t)n->nremote * n->bytes[what];
    }
    return at;
}

int64_t ll_net_bytes(const ep_ll *ll)
{
    struct ll_net n = {.nremote = ll->comm->nranks - ll->comm->ranks_per_node};

    return (int64_t)lay_out(ll, &n);
}

static struct host_ll **lls_of(struct ep_group *group)
{
    return &((struct cpu_comm *)group)->lls;
}

ep_status ll_net_open(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ep_group *group = inner->group;
    ep_boot boot = ep_group_boot(ll->comm);
    struct ep_net_provider provider;
    struct ep_net_params params;
    struct ll_net *n;

    ep_group_net_describe_ranks(group, &boot, &provider, &params);
    n = inner->net;
    params.region_bytes = lay_out(ll, n);
    params.n_signals = (uint32_t)ll->comm->nranks * LL_SIGNALS;
    EP_TRY(provider.open(&provider, &params, &n->net));
    EP_TRY(start_thread(ll, n));
    inner->next = *lls_of(group);
    *lls_of(group) = inner;
    return EP_OK;
}

ep_status ll_net_prepare(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    const struct ep_group *group = inner->group;
    struct ll_net *n = calloc(1, sizeof(*n));

    if (!n)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    n->nlocal = group->nlocal;
    n->first = group->first;
    n->nremote = ll->comm->nranks - group->nlocal;
    pthread_mutex_init(&n->lock, NULL);
    pthread_cond_init(&n->changed, NULL);
    inner->net = n;
    n->peers = calloc((size_t)ll->comm->nranks, sizeof(*n->peers));
    return n->peers ? EP_OK : ep_fail(EP_E_MEMORY, "ep_ll_new: no memory for %d ranks", ll->comm->nranks);
}

/* What the last calls have sent. Nobody waits for a rank that is masked or gone. */
static void flush(ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    uint64_t deadline_ns = ep_deadline_ns(ll->comm->config.timeout_ms);
    struct timespec backoff = {.tv_nsec = BACKOFF_LEAST_NS};

    while (ep_group_check(inner->group) == EP_OK && ep_now_ns() < deadline_ns) {
        bool all = true, moved;

        if (progress(ll, n, &moved) != EP_OK)
            return;
        for (int rank = 0; rank < ll->comm->nranks; rank++)
            if (is_remote(n, rank) && !inner->masked[rank] && !ep_group_peer_dead(inner->group, rank))
                all &= flushed(n, ll->comm->rank, rank);
        if (all)
            return;
        nanosleep(&backoff, NULL);
    }
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
    for (struct host_ll *inner = *lls_of(group); inner; inner = inner->next)
        stop_thread(inner->net);
}

static void unlink_from_host(struct host_ll *inner)
{
    struct host_ll **at = lls_of(inner->group);

    while (*at && *at != inner)
        at = &(*at)->next;
    if (*at)
        *at = inner->next;
}

/* `keeps`: the network may still read what has not left, which is left to it. */
static void free_memory(struct peer *peer, bool keeps)
{
    if (keeps && peer->left < peer->sent)
        return;
    free_retired(peer);
    for (int i = 0; i < 2 * LL_PARCELS; i++)
        free(peer->parcels[i / LL_PARCELS][i % LL_PARCELS].memory);
}

void ll_net_close(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ll_net *n = inner->net;
    bool keeps = false;

    if (!n)
        return;
    unlink_from_host(inner);
    if (n->started) {
        stop_thread(n);
        flush(ll, n);
    }
    if (n->net) {
        n->net->hurries = atomic_load(&ll->comm->failed) != EP_OK;
        keeps = n->net->ops->keeps_sources;
        n->net->ops->free(n->net);
    }
    for (int rank = 0; n->peers && rank < ll->comm->nranks; rank++)
        free_memory(&n->peers[rank], keeps);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    free(n->peers);
    free(n);
    inner->net = NULL;
}
