/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency: the words that ranks publish, and how they wait for each other, with or without masks. */
#include "backend/host/lowlatency.h"

#include "base/backoff.h"
#include "base/log.h"

/* Calls by which a counter may be ahead of those of the rank that reads it: fewer would do, more is damage. */
#define MAX_AHEAD 8
/* Time for an unmask to arrive from another node, after a synchronisation of the ranks by other means. */
#define UNMASK_WAIT_NS UINT64_C(100000000)

uint64_t ll_load(const ep_ll *ll, int rank, size_t word)
{
    const struct ll_view from = ll_from(ll, rank);

    return ll_wire_load(from.segment, (int64_t)word + from.source * 8);
}

/* Makes what is written for the rank visible to it. */
static void announce(ep_ll *ll, int rank)
{
    if (ll_is_remote(ll, rank))
        ll_net_send(ll, rank);
    else
        ep_group_ring_rank(ep_group_of(ll->comm), rank);
}

void ll_publish_to(ep_ll *ll, int rank, size_t word, uint64_t value)
{
    struct ll_view to;

    if (!ep_comm_has(ll->comm, rank))
        return;
    to = ll_to(ll, rank);
    ep_rows_stream_end();
    ll_wire_store(to.segment, (int64_t)word + to.source * 8, value);
    announce(ll, rank);
}

void ll_publish(ep_ll *ll, size_t word, uint64_t value)
{
    for (int i = 1; i < ll->comm->nranks; i++)
        ll_publish_to(ll, (ll->comm->rank + i) % ll->comm->nranks, word, value);
}

void ll_publish_completed(ep_ll *ll, uint64_t serial)
{
    ll_net_set_finished(ll, serial);
    ll_publish(ll, LL_WORD(completed), serial);
}

/*
 * A masked rank may only have been late. It gets no more rows, and slots are reused without waiting for it, but the
 * words continue; so the mask is published before any of that, and a rank that finds itself masked stops.
 */
void ll_set_mask(ep_ll *ll, int rank, bool on)
{
    const struct ll_view to = ll_to(ll, rank);
    struct host_ll *inner = ll->impl;

    if (on && !inner->masked[rank])
        ep_log(EP_LOG_WARNING, "rank %d of %d: low latency continues without rank %d", ll->comm->rank, ll->comm->nranks,
               rank);
    inner->masked[rank] = on;
    if (!on)
        inner->unmasked[rank] = rank != ll->comm->rank;
    __atomic_exchange_n(&ll_words_of(&to)->masked_by[to.source], on, __ATOMIC_ACQ_REL);
    ll_net_note_mask(ll, rank, on);
    announce(ll, rank);
}

static ep_status fail_excluded(int rank, enum ep_group_phase phase)
{
    return ep_fail(EP_E_EXCLUDED, "rank %d has masked this rank in \"%s\"", rank, ep_group_phase_name(phase));
}

static uint32_t *masked_by(const ep_ll *ll, int rank)
{
    const struct ll_view from = ll_from(ll, rank);

    return &ll_words_of(&from)->masked_by[from.source];
}

static bool is_masked_by(const ep_ll *ll, int rank)
{
    return __atomic_load_n(masked_by(ll, rank), __ATOMIC_ACQUIRE);
}

/*
 * True if the rank has masked this one and does not clear the mask. What a rank of another node publishes takes some
 * time to arrive. A rank that this one has just unmasked has until the deadline to unmask this one.
 * Ranks that wait for this one meanwhile must not mask it instead of that rank, so the wait is published like others.
 */
static ep_status recheck_mask(ep_ll *ll, int rank, enum ep_group_phase phase, bool *ret_masked)
{
    struct host_ll *inner = ll->impl;
    uint64_t limit_ns = ep_now_ns() + (inner->unmasked[rank]    ? (uint64_t)ll->comm->config.timeout_ms * 1000000u
                                       : ll_is_remote(ll, rank) ? UNMASK_WAIT_NS
                                                                : 0);
    ep_status status = EP_OK;

    while (status == EP_OK && is_masked_by(ll, rank) && ep_now_ns() < limit_ns &&
           !ep_group_dead_or_left(inner->group, rank)) {
        bool moved = false;

        (void)ep_group_publish_wait(inner->group, rank, phase);
        status = ll_net_progress(ll, phase, rank, NULL, &moved);
        if (status == EP_OK)
            status = ep_group_check_abort(inner->group);
        if (status == EP_OK && !moved)
            ep_backoff_sleep();
    }
    ep_group_publish_wait_end(inner->group);
    EP_TRY(status);
    *ret_masked = is_masked_by(ll, rank);
    inner->unmasked[rank] = false;
    return EP_OK;
}

ep_status ll_check_masks(ep_ll *ll, enum ep_group_phase phase)
{
    struct host_ll *inner = ll->impl;

    for (int rank = 0; (ll->config.flags & EP_LL_MASK_DEAD) && rank < ll->comm->nranks; rank++) {
        bool masked = false;

        /* Written back unchanged, because only a write can order our reads before what the peer does after it masks. */
        if (!inner->masked[rank] && __atomic_fetch_or(masked_by(ll, rank), 0, __ATOMIC_ACQ_REL))
            EP_TRY(recheck_mask(ll, rank, phase, &masked));
        if (masked)
            return fail_excluded(rank, phase);
    }
    return EP_OK;
}

/* When each rank reached the value waited for. */
struct arrivals {
    uint64_t begin_ns;
    bool noted[EP_MAX_RANKS];
};

static void note_arrivals(const ep_ll *ll, const struct ll_wait *wanted, struct arrivals *arrivals)
{
    const struct host_ll *inner = ll->impl;

    for (int rank = 0; wanted->add && rank < ll->comm->nranks; rank++) {
        if (arrivals->noted[rank] || inner->masked[rank] || rank == ll->comm->rank ||
            ll_load(ll, rank, wanted->word) < wanted->value)
            continue;
        arrivals->noted[rank] = true;
        wanted->add[rank] += (int64_t)(ep_now_ns() - arrivals->begin_ns);
    }
}

ep_status ll_wait_step(ep_ll *ll, struct ep_group_wait *wait, uint32_t seen, int rank)
{
    struct host_ll *inner = ll->impl;
    bool moved = false;

    EP_TRY(ll_net_progress(ll, wait->phase, rank, wait, &moved));
    if (moved) {
        /* With masking only the rank waited for counts: other ranks wait for this one meanwhile, and would mask it. */
        if (!wait->tolerant)
            ep_group_wait_reset(wait);
        return wait->tolerant ? ep_group_check_abort(inner->group) : ep_group_check(inner->group);
    }
    return ep_group_wait(wait, seen, rank);
}

/* True if `status` is a reason to mask the rank that was waited for; a failure of this rank itself is none. */
static bool may_mask(const ep_ll *ll, ep_status status)
{
    /* A failure of the group, which has any of these statuses, is no reason either. */
    return (status == EP_E_TIMEOUT || status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT) &&
           atomic_load(&ll->comm->failed) == EP_OK;
}

/* Waits for one rank, and masks it at the deadline, if allowed. */
static ep_status wait_one(ep_ll *ll, int rank, const struct ll_wait *wanted, struct arrivals *arrivals)
{
    struct host_ll *inner = ll->impl;
    enum ep_group_phase phase = wanted->phase;
    bool mask = ll->config.flags & EP_LL_MASK_DEAD, masked = false, unmasked = inner->unmasked[rank];
    struct ep_group_wait wait;
    uint64_t at = 0;
    ep_status status = EP_OK, failed = EP_OK;

    ep_group_wait_begin(&wait, inner->group, phase);
    wait.tolerant = mask;
    while (status == EP_OK && failed == EP_OK) {
        uint32_t seen = ep_group_doorbell(inner->group);

        at = ll_load(ll, rank, wanted->word);
        note_arrivals(ll, wanted, arrivals);
        /* A rank of another node that has masked this one does not reply. */
        if (mask && is_masked_by(ll, rank)) {
            failed = recheck_mask(ll, rank, phase, &masked);
            ep_group_wait_reset(&wait); /* a rank that has just unmasked this one is not late yet */
        }
        if (at >= wanted->value || masked || failed != EP_OK)
            break;
        if (wanted->work)
            failed = wanted->work(wanted->context);
        if (failed == EP_OK)
            status = ll_wait_step(ll, &wait, seen, rank);
    }
    ep_group_wait_end(&wait);
    if (failed != EP_OK)
        return failed;
    if (status != EP_OK && (!mask || !may_mask(ll, status)))
        return status;
    /* Two results at a time: without masking no rank is further ahead. What is waited for may be a call of long ago. */
    if (!mask && at > inner->serial + MAX_AHEAD)
        return ep_group_fail_damaged(inner->group, rank, phase, "a counter of its calls", (int64_t)at);
    if (mask && is_masked_by(ll, rank))
        EP_TRY(recheck_mask(ll, rank, phase, &masked));
    /* A rank that this one has unmasked, and that has ended, cannot unmask this one: it is masked like any that ends.
     */
    if (masked && !(unmasked && ep_group_dead_or_left(inner->group, rank)))
        return fail_excluded(rank, phase);
    inner->unmasked[rank] = false;
    /* A counter published since the last check, while this rank was not scheduled or checked masks, counts. */
    if ((status != EP_OK || masked) && ll_load(ll, rank, wanted->word) < wanted->value)
        ll_set_mask(ll, rank, true);
    return EP_OK;
}

ep_status ll_wait(ep_ll *ll, const struct ll_wait *wanted)
{
    const struct host_ll *inner = ll->impl;
    struct arrivals arrivals = {.begin_ns = wanted->add ? ep_now_ns() : 0};

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!inner->masked[rank] && wanted->ranks != (ll_is_remote(ll, rank) ? LL_THIS_NODE : LL_OTHER_NODES))
            EP_TRY(wait_one(ll, rank, wanted, &arrivals));
    }
    return EP_OK;
}

/* A rank that has masked this one writes to its memory without waiting for it: no failure of the group. */
ep_status ll_fail_damaged(ep_ll *ll, int rank, enum ep_group_phase phase, const char *what, int64_t value)
{
    EP_TRY(ll_check_masks(ll, phase));
    return ep_group_fail_damaged(ep_group_of(ll->comm), rank, phase, what, value);
}

ep_status ll_fail_disagree(ep_ll *ll, enum ep_group_phase phase, const char *field, int64_t mine, int64_t theirs,
                           int rank)
{
    const char *call = phase == EP_GROUP_LL_RECV ? "ep_ll_dispatch" : "ep_ll_combine";

    return ep_group_set_own_failure(
        ep_group_of(ll->comm), ep_group_fail_disagree(call, field, mine, ll->comm->rank, theirs, rank), rank, phase);
}

ep_status ll_check_combine_desc(ep_ll *ll, const struct ll_combine *combine, int rank,
                                const struct ll_combine_desc *theirs)
{
    uint32_t no_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE ? 1 : 0;

    if (theirs->call == combine->call && theirs->no_partial_reduce == no_reduce)
        return EP_OK;
    EP_TRY(ll_check_masks(ll, EP_GROUP_LL_COMBINE));
    return theirs->call != combine->call
               ? ll_fail_disagree(ll, EP_GROUP_LL_COMBINE, "call", (int64_t)combine->call, (int64_t)theirs->call, rank)
               : ll_fail_disagree(ll, EP_GROUP_LL_COMBINE, "EP_LL_NO_PARTIAL_REDUCE", no_reduce,
                                  theirs->no_partial_reduce, rank);
}
