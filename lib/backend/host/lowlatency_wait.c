/* SPDX-License-Identifier: Apache-2.0 */
/* Low latency: how ranks wait for each other, with or without masks. */
#include "backend/host/lowlatency.h"

#include "base/log.h"
#include "core/routing.h"

#include <stddef.h>

/* Calls by which a counter may be ahead of the rank that waits for it: fewer would do, more is damage. */
#define MAX_AHEAD 8

/*
 * A masked rank may only have been late. It gets no more rows, and buffers are reused without waiting for it, but the
 * counters continue; so the mask is published before any of that, and a rank that finds itself masked stops.
 */
void ll_mask_rank(ep_ll *ll, int rank)
{
    struct host_ll *inner = ll->impl;

    if (!inner->masked[rank])
        ep_log(EP_LOG_WARNING, "rank %d of %d: low latency continues without rank %d", ll->comm->rank, ll->comm->nranks,
               rank);
    inner->masked[rank] = 1;
    atomic_fetch_or_explicit(&ll_shared_of(inner, ll->comm->rank)->masks[rank / 64], UINT64_C(1) << rank % 64,
                             memory_order_acq_rel);
    ll_net_publish_mask(ll, rank, true);
}

static ep_status fail_excluded(int rank, enum ep_group_phase phase)
{
    return ep_fail(EP_E_EXCLUDED, "rank %d has masked this rank in \"%s\"", rank, ep_group_phase_name(phase));
}

static bool is_masked_by(const ep_ll *ll, int rank)
{
    const _Atomic uint64_t *masks = ll_shared_of(ll->impl, rank)->masks;

    return atomic_load_explicit(&masks[ll->comm->rank / 64], memory_order_acquire) >> ll->comm->rank % 64 & 1;
}

/*
 * True if the rank has masked this one and does not clear the mask. Signals of a rank of another node arrive one after
 * the other, and take some time. A rank that this one has just unmasked has until the deadline to unmask this one.
 * Ranks that wait for this one meanwhile must not mask it instead of that rank, so the wait is published like others.
 */
static ep_status recheck_mask(ep_ll *ll, int rank, enum ep_group_phase phase, bool *ret_masked)
{
    struct host_ll *inner = ll->impl;
    uint64_t limit_ns = ep_now_ns() + (inner->unmasked[rank]    ? (uint64_t)ll->comm->config.timeout_ms * 1000000u
                                       : ll_is_remote(ll, rank) ? LL_UNMASK_WAIT_NS
                                                                : 0);
    ep_status status = EP_OK;

    while (status == EP_OK && is_masked_by(ll, rank) && ep_now_ns() < limit_ns &&
           !ep_group_dead_or_left(inner->group, rank)) {
        bool moved = false;

        (void)ep_group_publish_wait(inner->group, rank, phase);
        status = ll_net_progress(ll, phase, &moved);
        if (status == EP_OK)
            status = ep_group_check_abort(inner->group);
        if (status == EP_OK && !moved)
            nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
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
    int me = ll->comm->rank;

    for (int rank = 0; (ll->config.flags & EP_LL_MASK_DEAD) && rank < ll->comm->nranks; rank++) {
        _Atomic uint64_t *masks = ll_shared_of(inner, rank)->masks;
        bool masked = false;

        /* Written back unchanged, because only a write can order our reads before what the peer does after it masks. */
        if (!inner->masked[rank] && atomic_fetch_or_explicit(&masks[me / 64], 0, memory_order_acq_rel) >> me % 64 & 1)
            EP_TRY(recheck_mask(ll, rank, phase, &masked));
        if (masked)
            return fail_excluded(rank, phase);
    }
    return EP_OK;
}

/* When each rank reached the counter waited for. */
struct ll_cost {
    uint64_t begin_ns;
    int64_t *add; /* [R] NULL: not wanted */
    bool arrived[EP_MAX_RANKS];
};

static void note_arrivals(const ep_ll *ll, size_t word, uint64_t value, struct ll_cost *cost)
{
    const struct host_ll *inner = ll->impl;

    for (int rank = 0; cost && rank < ll->comm->nranks; rank++) {
        if (cost->arrived[rank] || inner->masked[rank] || rank == ll->comm->rank ||
            atomic_load_explicit(ll_counter_of(ll, rank, word), memory_order_acquire) < value)
            continue;
        cost->arrived[rank] = true;
        cost->add[rank] += (int64_t)(ep_now_ns() - cost->begin_ns);
    }
}

ep_status ll_wait_step(ep_ll *ll, struct ep_group_wait *wait, uint32_t seen, int rank)
{
    struct host_ll *inner = ll->impl;
    bool moved = false;

    EP_TRY(ll_net_progress(ll, wait->phase, &moved));
    if (moved) {
        /* With masking only the rank waited for counts: other ranks wait for this one meanwhile, and would mask it. */
        if (!wait->tolerant)
            ep_group_wait_reset(wait);
        return wait->tolerant ? ep_group_check_abort(inner->group) : ep_group_check(inner->group);
    }
    wait->polls = ll_net_polls(ll);
    wait->in_flight = inner->net ? ll_net_in_flight(ll, rank) ? EP_GROUP_IN_FLIGHT : EP_GROUP_NOT_IN_FLIGHT
                                 : EP_GROUP_IN_FLIGHT_UNKNOWN;
    return ep_group_wait(wait, seen, rank);
}

bool ll_may_mask(const ep_ll *ll, ep_status status)
{
    /* A failure of the group, which has any of these statuses, is no reason either. */
    return (status == EP_E_TIMEOUT || status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT) &&
           atomic_load(&ll->comm->failed) == EP_OK;
}

/* Waits until the counter at `word` of a rank has reached `value`; masks the rank at the deadline, if allowed. */
static ep_status wait_one(ep_ll *ll, int rank, size_t word, uint64_t value, enum ep_group_phase phase,
                          struct ll_cost *cost, const struct ll_wait_work *work)
{
    struct host_ll *inner = ll->impl;
    _Atomic uint64_t *counter = ll_counter_of(ll, rank, word);
    bool mask = ll->config.flags & EP_LL_MASK_DEAD, masked = false, unmasked = inner->unmasked[rank];
    struct ep_group_wait wait;
    uint64_t at = 0;
    ep_status status = EP_OK, failed = EP_OK;

    ep_group_wait_begin(&wait, inner->group, phase);
    wait.tolerant = mask;
    while (status == EP_OK && failed == EP_OK) {
        uint32_t seen = ep_group_doorbell(inner->group);

        at = atomic_load_explicit(counter, memory_order_acquire);
        note_arrivals(ll, word, value, cost);
        /* A rank of another node that has masked this one does not reply. */
        if (mask && is_masked_by(ll, rank)) {
            failed = recheck_mask(ll, rank, phase, &masked);
            ep_group_wait_reset(&wait); /* a rank that has just unmasked this one is not late yet */
        }
        if (at >= value || masked || failed != EP_OK)
            break;
        if (work)
            failed = work->run(work->context);
        if (failed == EP_OK)
            status = ll_wait_step(ll, &wait, seen, rank);
    }
    ep_group_wait_end(&wait);
    if (failed != EP_OK)
        return failed;
    if (status != EP_OK && (!mask || !ll_may_mask(ll, status)))
        return status;
    /* Two results at a time: without masking no rank is further ahead. */
    if (!mask && at - value > MAX_AHEAD)
        return ep_group_fail_damaged(inner->group, rank, phase, "a counter of its calls", (int64_t)at);
    if (mask && is_masked_by(ll, rank))
        EP_TRY(recheck_mask(ll, rank, phase, &masked));
    /* A rank that this one has unmasked, and that has ended, cannot unmask this one: it is masked like any that ends.
     */
    if (masked && !(unmasked && ep_group_dead_or_left(inner->group, rank)))
        return fail_excluded(rank, phase);
    inner->unmasked[rank] = false;
    /* A counter published since the last check, while this rank was not scheduled or checked masks, counts. */
    if ((status != EP_OK || masked) && atomic_load_explicit(counter, memory_order_acquire) < value)
        ll_mask_rank(ll, rank);
    return EP_OK;
}

ep_status ll_wait_timed(ep_ll *ll, size_t word, uint64_t value, enum ep_group_phase phase, int64_t *add)
{
    const struct host_ll *inner = ll->impl;
    struct ll_cost cost = {.add = add};

    if (add)
        cost.begin_ns = ep_now_ns();

    for (int i = 1; i < ll->comm->nranks; i++) {
        int rank = (ll->comm->rank + i) % ll->comm->nranks;

        if (!inner->masked[rank])
            EP_TRY(wait_one(ll, rank, word, value, phase, add ? &cost : NULL, NULL));
    }
    return EP_OK;
}

ep_status ll_wait_all(ep_ll *ll, size_t word, uint64_t value, enum ep_group_phase phase)
{
    return ll_wait_timed(ll, word, value, phase, NULL);
}

ep_status ll_wait_rank(ep_ll *ll, int rank, size_t word, uint64_t value, enum ep_group_phase phase,
                       const struct ll_wait_work *work)
{
    return wait_one(ll, rank, word, value, phase, NULL, work);
}

size_t ll_packed_word(uint64_t number)
{
    return offsetof(struct ll_shared, packed) + (number & 1) * sizeof(_Atomic uint64_t);
}

size_t ll_pulled_word(uint64_t number)
{
    return offsetof(struct ll_shared, pulled) + (number & 1) * sizeof(_Atomic uint64_t);
}

void ll_publish(ep_ll *ll, _Atomic uint64_t *counter, uint64_t value)
{
    ep_rows_stream_end();
    atomic_store_explicit(counter, value, memory_order_release);
    ep_group_ring_node(((struct host_ll *)ll->impl)->group);
    ll_net_publish(ll, (size_t)((char *)counter - (char *)ll_shared_of(ll->impl, ll->comm->rank)), value);
}

ep_status ll_load_index(const ep_ll *ll, const void *topk_idx, int idx_type, int n_tokens, int topk, int32_t *ret_index)
{
    struct ep_routing_shape shape = {.n_tokens = n_tokens,
                                     .topk = topk,
                                     .n_experts = ll->config.n_experts,
                                     .nranks = ll->comm->nranks,
                                     .ranks_per_node = ll->comm->ranks_per_node};

    return ep_routing_check(&shape, topk_idx, idx_type, ret_index);
}

/* A rank that has masked this one writes to its memory without waiting for it: no failure of the group. */
ep_status ll_fail_damaged(ep_ll *ll, int rank, enum ep_group_phase phase, const char *what, int64_t value)
{
    EP_TRY(ll_check_masks(ll, phase));
    return ep_group_fail_damaged(((struct host_ll *)ll->impl)->group, rank, phase, what, value);
}

ep_status ll_check_combine_desc(ep_ll *ll, const struct ll_combine *combine, int rank,
                                const struct ll_combine_desc *theirs)
{
    struct ep_group *group = ((struct host_ll *)ll->impl)->group;
    bool no_reduce = combine->args.flags & EP_LL_NO_PARTIAL_REDUCE;

    if (theirs->call == combine->call && theirs->no_partial_reduce == (no_reduce ? 1 : 0))
        return EP_OK;
    EP_TRY(ll_check_masks(ll, EP_GROUP_LL_COMBINE));
    if (theirs->call != combine->call)
        return ep_group_set_own_failure(group,
                                        ep_group_fail_disagree("ep_ll_combine: ", "call", (int64_t)combine->call,
                                                               ll->comm->rank, (int64_t)theirs->call, rank),
                                        rank, EP_GROUP_LL_COMBINE);
    return ep_group_set_own_failure(group,
                                    ep_group_fail_disagree("ep_ll_combine: ", "EP_LL_NO_PARTIAL_REDUCE", no_reduce,
                                                           ll->comm->rank, theirs->no_partial_reduce, rank),
                                    rank, EP_GROUP_LL_COMBINE);
}

ep_status ll_fail_row_count(ep_ll *ll, int owner, int rank, int32_t count, int expert, int token, int32_t i)
{
    struct ep_group *group = ((struct host_ll *)ll->impl)->group;

    EP_TRY(ll_check_masks(ll, EP_GROUP_LL_COMBINE));
    return ep_group_set_own_failure(
        group,
        ep_fail(EP_E_MISMATCH, "ep_ll_combine: rank %d has %d rows of rank %d for expert %d, but token %d is number %d",
                rank, count, owner, expert, token, i + 1),
        rank == ll->comm->rank ? owner : rank, EP_GROUP_LL_COMBINE);
}

ep_status ll_send(ep_ll *ll, int rank, uint64_t number, enum ll_payload what, size_t bytes)
{
    struct ep_group *group = ep_group_of(ll->comm);
    struct ep_group_wait wait;
    ep_status status = EP_OK;

    ep_group_wait_begin(&wait, group, EP_GROUP_LL_SEND);
    wait.tolerant = ll->config.flags & EP_LL_MASK_DEAD;
    while (status == EP_OK && bytes) {
        uint32_t seen = ep_group_doorbell(group);

        if (ll_net_try_send(ll, rank, number, what, bytes))
            break;
        status = ll_wait_step(ll, &wait, seen, rank);
    }
    ep_group_wait_end(&wait);
    if (status == EP_OK || !wait.tolerant || !ll_may_mask(ll, status))
        return status;
    ll_mask_rank(ll, rank);
    return EP_OK;
}
