/* SPDX-License-Identifier: Apache-2.0 */
/* Endpoints of low latency between nodes: opening, and the flush before they close. */
#include "backend/host/lowlatency_net.h"

#include "base/thread.h"

#include <stdlib.h>

static size_t lay_out(const ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    size_t entries = (size_t)ll->config.max_tokens * (size_t)ll->config.topk, at = 0;

    n->bytes[LL_PAYLOAD_BLOCK] = inner->block_bytes;
    n->bytes[LL_PAYLOAD_REQUEST] = sizeof(struct ll_request) + entries * sizeof(struct ll_choice);
    n->bytes[LL_PAYLOAD_DESC] = sizeof(struct ll_combine_desc);
    n->bytes[LL_PAYLOAD_ROWS] = (size_t)ll_max_reply_rows(ll, ll->config.max_tokens) * (size_t)ll->config.hidden * 2;
    for (int what = 0; what < LL_PAYLOADS; what++) {
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
    return &((struct host_comm *)group)->lls;
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
    EP_TRY(ep_thread_begin(&n->thread, &n->started, ll_net_run, ll, "ep_ll_new: the thread of the network"));
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

/* Flushes data of the last calls. Masked and dead ranks are not waited for. */
static void flush(ep_ll *ll, struct ll_net *n)
{
    const struct host_ll *inner = ll->impl;
    uint64_t deadline_ns = ep_deadline_ns(ll->comm->config.timeout_ms);
    struct timespec backoff = {.tv_nsec = BACKOFF_MIN_NS};

    while (ep_group_check(inner->group) == EP_OK && ep_now_ns() < deadline_ns) {
        bool all = true, moved;

        if (ll_net_step(ll, n, &moved) != EP_OK)
            return;
        for (int rank = 0; rank < ll->comm->nranks; rank++)
            if (ll_net_is_remote(n, rank) && !inner->masked[rank] && !ep_group_peer_dead(inner->group, rank))
                all &= ll_net_flushed(n, ll->comm->rank, rank);
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

static void unlink_from_comm(struct host_ll *inner)
{
    struct host_ll **at = lls_of(inner->group);

    while (*at && *at != inner)
        at = &(*at)->next;
    if (*at)
        *at = inner->next;
}

/* `retains`: the network may still read data that has not left, whose memory is then not freed. */
static void free_memory(struct peer *peer, bool retains)
{
    if (retains && peer->left < peer->sent)
        return;
    ll_net_free_retired(peer);
    for (int i = 0; i < 2 * LL_PAYLOADS; i++)
        free(peer->buffers[i / LL_PAYLOADS][i % LL_PAYLOADS].memory);
}

void ll_net_close(ep_ll *ll)
{
    struct host_ll *inner = ll->impl;
    struct ll_net *n = inner->net;
    bool retains = false;

    if (!n)
        return;
    unlink_from_comm(inner);
    if (n->started) {
        stop_thread(n);
        flush(ll, n);
    }
    if (n->net) {
        n->net->abandoned = atomic_load(&ll->comm->failed) != EP_OK;
        retains = n->net->ops->retains_sources;
        n->net->ops->free(n->net);
    }
    for (int rank = 0; n->peers && rank < ll->comm->nranks; rank++)
        free_memory(&n->peers[rank], retains);
    pthread_cond_destroy(&n->changed);
    pthread_mutex_destroy(&n->lock);
    free(n->peers);
    free(n);
    inner->net = NULL;
}
