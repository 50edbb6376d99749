/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Low latency between nodes: each ep_ll has an endpoint of its own on the communicator's network, opened as if every
 * rank were a node. So each rank sends directly to each rank of another node, without forwarding: a rank that dies
 * takes no other rank with it, which masks promise, and no rank depends on the calls of another one. The order of sums
 * in a combine requires a row for each (token, rank) on the network in any case.
 *
 * Calls write to outgoing segments, and the wire (net/ll_wire.h) sends them into the segments of the peers. What a call
 * has written stays there until it has left, so the caller's memory is free when its call returns. A thread sends the
 * rest.
 *
 * A lock serialises that thread and the caller's; it protects the streams and the state of the wire.
 */
#include "backend/host/lowlatency.h"

#include "base/array.h"
#include "base/backoff.h"
#include "base/reserve.h"
#include "base/thread.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

/* Size of the streams' rings: several of the largest rows. */
#define RING_BYTES ((size_t)1 << 20)
/* Of the thread, while data is to be sent; and between polls when there is none: a peer may have to send. */
#define BACKOFF_MIN_NS UINT64_C(20000)
#define BACKOFF_MAX_NS UINT64_C(1000000)
#define IDLE_NS UINT64_C(20000000)

/* A rank of another node. */
struct ll_remote {
    struct ll_sender sender;
    bool ended;
    uint64_t given_up_ns; /* masked: from then on no data is sent for it alone; 0: not masked */
};

struct ll_net {
    struct ll_wire send;       /* outgoing segments have one source, this rank */
    struct ll_remote *remotes; /* [R] */
    unsigned char *memory;     /* the outgoing segments */
    size_t bytes, out_bytes;
    uint64_t finished;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    bool started, stops;
    bool busy; /* a job runs, which progresses the network itself */
};

static struct ll_net *net_of(const ep_ll *ll)
{
    return ((struct host_ll *)ll->impl)->net;
}

/* Sets the layout, and returns the bytes of all outgoing segments. */
static size_t lay_out(const ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    size_t n_remote = (size_t)(ll->comm->nranks - ll->comm->ranks_per_node);

    n->send = inner->layout;
    n->send.nranks = 1;
    n->out_bytes = ep_net_whole_pages(ll_wire_lay_out(&n->send, sizeof(struct ll_wire_segment), 1));
    return n_remote * n->out_bytes;
}

int64_t ll_net_bytes(const ep_ll *ll)
{
    struct ll_net n = {.bytes = 0};
    size_t nranks = (size_t)ll->comm->nranks;

    return (int64_t)(lay_out(ll, &n) + (nranks - 1) * RING_BYTES + nranks * sizeof(struct ll_remote));
}

struct ll_view ll_net_to(const ep_ll *ll, int rank)
{
    const struct ll_net *n = net_of(ll);
    int nlocal = ll->comm->ranks_per_node, index = rank < ll->comm->node * nlocal ? rank : rank - nlocal;

    return (struct ll_view){n->memory + (size_t)index * n->out_bytes, &n->send, 0};
}

/* --- sending, under the lock --- */

/* True if all data for `rank` has left, or its connection has ended. */
static bool is_flushed(struct ll_net *n, int rank)
{
    struct ll_remote *remote = &n->remotes[rank];

    if (remote->ended)
        return true;
    ll_wire_send(&n->send, &remote->sender);
    return !ll_wire_is_pending(&n->send, &remote->sender) && ep_streams_flushed_to(n->send.streams, rank);
}

/* A rank that was masked a deadline ago accepts nothing, or has learned the mask by now. */
static bool is_given_up(const struct ll_remote *remote)
{
    return remote->given_up_ns && ep_now_ns() >= remote->given_up_ns;
}

static bool has_failed(const ep_ll *ll)
{
    /* The second one is set before any call of this rank has reported it. */
    return atomic_load(&ll->comm->failed) != EP_OK || atomic_load(&ep_group_of(ll->comm)->control->failure);
}

/* True if data for a rank that counts has not left yet. */
static bool is_outstanding(const ep_ll *ll)
{
    const struct host_ll *inner = ll->impl;

    if (has_failed(ll))
        return false;
    return ANY_OF(rank, ll->comm->nranks,
                  ll_is_remote(ll, rank) && ep_comm_has(ll->comm, rank) && !is_given_up(&inner->net->remotes[rank]) &&
                      !is_flushed(inner->net, rank));
}

/* --- both directions, under the lock --- */

static ep_status receive(const ep_ll *ll, struct ll_net *n, int rank, bool *ret_moved)
{
    const struct host_ll *inner = ll->impl;
    struct ll_received received;
    uint64_t finished = __atomic_load_n(&n->finished, __ATOMIC_ACQUIRE);

    if (!ll_wire_receive(&inner->layout, rank, finished, &received))
        return ep_net_break(ep_streams_get_net(n->send.streams),
                            ep_fail(EP_E_MISMATCH,
                                    "what rank %d has published is damaged: the length of a low-latency message is %zu",
                                    rank, received.damaged_bytes),
                            rank);
    *ret_moved |= received.n > 0;
    return EP_OK;
}

/* One pass over all peers. */
static ep_status step(const ep_ll *ll, struct ll_net *n, bool *ret_moved)
{
    EP_TRY(ep_streams_progress(n->send.streams, ret_moved));
    for (int rank = 0; rank < ll->comm->nranks; rank++) {
        struct ll_remote *remote = &n->remotes[rank];

        if (!ll_is_remote(ll, rank) || !ep_comm_has(ll->comm, rank))
            continue;
        EP_TRY(receive(ll, n, rank, ret_moved));
        ep_group_net_note_lost(ep_group_of(ll->comm), ep_streams_get_net(n->send.streams), rank);
        remote->ended = ep_streams_ended(n->send.streams, rank);
        if (!remote->ended)
            *ret_moved |= ll_wire_send(&n->send, &remote->sender);
    }
    return EP_OK;
}

/* step_or_fail() makes one pass over all peers; a broken network fails the group. */
static ep_status step_or_fail(const ep_ll *ll, struct ll_net *n, enum ep_group_phase phase, bool *ret_moved)
{
    return ep_group_net_fail(ep_group_of(ll->comm), n->send.streams, step(ll, n, ret_moved), phase);
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
        const struct ep_net *net = ep_streams_get_net(n->send.streams);
        bool open = net->ops->ended ? !n->remotes[rank].ended : !net->can_sleep;

        wait->polls = !net->can_sleep;
        wait->in_flight = ll_is_remote(ll, rank) && open ? EP_GROUP_IN_FLIGHT : EP_GROUP_NOT_IN_FLIGHT;
    }
    pthread_mutex_unlock(&n->lock);
    return status;
}

void ll_net_send(ep_ll *ll, int rank)
{
    struct ll_net *n = net_of(ll);

    pthread_mutex_lock(&n->lock);
    if (!n->remotes[rank].ended)
        ll_wire_send(&n->send, &n->remotes[rank].sender);
    pthread_mutex_unlock(&n->lock);
}

void ll_net_set_finished(ep_ll *ll, uint64_t serial)
{
    if (net_of(ll))
        __atomic_store_n(&net_of(ll)->finished, serial, __ATOMIC_RELEASE);
}

void ll_net_note_mask(ep_ll *ll, int rank, bool on)
{
    struct ll_net *n = net_of(ll);

    if (!n || !ll_is_remote(ll, rank))
        return;
    pthread_mutex_lock(&n->lock);
    n->remotes[rank].given_up_ns = on ? ep_deadline_ns(ll->comm->config.timeout_ms) : 0;
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
            if (ll_is_remote(ll, rank) && ep_comm_has(ll->comm, rank) && !(closes && inner->masked[rank]) &&
                !ep_group_peer_dead(inner->group, rank))
                all &= is_flushed(n, rank);
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

/* Sends what has not left when a call returns, and receives. Its failures are found by the next call. */
static void *run_thread(void *context)
{
    const ep_ll *ll = context;
    struct ll_net *n = net_of(ll);
    uint64_t backoff_ns = BACKOFF_MIN_NS, limit_ns;
    bool moved = false, broken = false;
    struct timespec until;

    pthread_mutex_lock(&n->lock);
    while (!n->stops) {
        if (!n->busy && !broken && !has_failed(ll))
            broken = step(ll, n, &moved) != EP_OK;
        limit_ns = !n->busy && !broken && is_outstanding(ll) ? BACKOFF_MAX_NS : IDLE_NS;
        backoff_ns = moved ? BACKOFF_MIN_NS : 2 * backoff_ns < limit_ns ? 2 * backoff_ns : limit_ns;
        moved = false;
        until = ep_timespec(ep_now_ns() + backoff_ns);
        if (pthread_cond_timedwait(&n->changed, &n->lock, &until) == 0)
            backoff_ns = BACKOFF_MIN_NS;
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

/* Memory that is used only as far as calls and peers write to it. */
static ep_status map_segments(const ep_ll *ll, struct ll_net *n)
{
    size_t bytes = lay_out(ll, n);
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    if (memory == MAP_FAILED)
        return ep_reserve_fail_map(errno, bytes);
    n->memory = memory;
    n->bytes = bytes;
    for (int rank = 0; rank < ll->comm->nranks; rank++)
        if (ll_is_remote(ll, rank))
            n->remotes[rank].sender = (struct ll_sender){.rank = rank, .segment = ll_net_to(ll, rank).segment};
    return EP_OK;
}

ep_status ll_net_prepare(ep_ll *ll)
{
    size_t nranks = (size_t)ll->comm->nranks;
    struct ll_net *n = calloc(1, sizeof(*n));

    if (!n)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    pthread_mutex_init(&n->lock, NULL);
    ep_cond_init(&n->changed);
    ((struct host_ll *)ll->impl)->net = n;
    n->remotes = calloc(nranks, sizeof(*n->remotes));
    return n->remotes ? map_segments(ll, n) : ep_fail(EP_E_MEMORY, "ep_ll_new: no memory for %zu ranks", nranks);
}

ep_status ll_net_open(ep_ll *ll)
{
    struct host_ll *inner = ll->impl, **lls = &((struct host_comm *)inner->group)->lls;
    ep_boot boot = ep_group_boot(ll->comm);
    struct ep_net_provider provider;
    struct ep_net_params params;
    struct ll_net *n = inner->net;

    ep_group_net_describe_ranks(inner->group, &boot, &provider, &params);
    EP_TRY(ep_streams_open(&provider, &params, RING_BYTES, &n->send.streams));
    inner->layout.streams = n->send.streams;
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
    if (n->send.streams) {
        if (atomic_load(&ll->comm->failed) != EP_OK || ll->generation != ll->comm->generation)
            ep_streams_abandon(n->send.streams);
        ep_streams_free(n->send.streams);
    }
    if (n->memory)
        munmap(n->memory, n->bytes);
    free(n->remotes);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    free(n);
    inner->net = NULL;
}
