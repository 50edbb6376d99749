/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Barrier and all-gather of a communicator; and steps of creation, which succeed on all ranks or on none: each ends in
 * an all-gather, in which a failed rank sends its reason, so that no rank waits for it, and each can name it.
 */
#include "group/collective.h"
#include "base/array.h"

#include "group/exchange.h"
#include "group/failure.h"
#include "group/peers.h"
#include "group/plan.h"
#include "group/queue.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- barrier and all-gather: after the exchanges of the pending plans --- */

static ep_status exchange_now(struct ep_group *group, enum ep_group_phase phase, const void *row, size_t bytes,
                              uint64_t *ret_number)
{
    EP_TRY(ep_group_plan_complete(group, NULL));
    EP_TRY(ep_group_exchange_start(group, phase, row, bytes, ret_number));
    return ep_group_exchange_complete(group, *ret_number, phase, NULL);
}

static ep_status run_barrier(void *arguments)
{
    struct ep_group *group = *(struct ep_group **)arguments;
    uint64_t number;

    EP_TRY(exchange_now(group, EP_GROUP_BARRIER, NULL, 0, &number));
    ep_group_exchange_release(group, number);
    return EP_OK;
}

ep_status ep_group_barrier(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);

    return ep_group_run(group, run_barrier, &group);
}

ep_status ep_group_barrier_on(ep_comm *comm, ep_stream stream)
{
    struct ep_group *group = ep_group_of(comm);

    return ep_group_submit(group, stream, run_barrier, &group, sizeof(group));
}

ep_status ep_group_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all)
{
    struct ep_group *group = ep_group_of(comm);
    uint64_t number;

    EP_TRY(ep_group_drain(group));
    EP_TRY(exchange_now(group, EP_GROUP_GATHER, mine, bytes, &number));
    for (int rank = 0; bytes && rank < comm->nranks; rank++)
        ep_group_exchange_read(group, number, rank, (char *)ret_all + (size_t)rank * bytes, bytes);
    ep_group_exchange_release(group, number);
    return EP_OK;
}

static ep_status allgather(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    (void)timeout_ms;
    return ep_group_allgather(context, mine, bytes, ret_all);
}

ep_boot ep_group_boot(ep_comm *comm)
{
    return (ep_boot){
        .size = sizeof(ep_boot), .rank = comm->rank, .nranks = comm->nranks, .allgather = allgather, .context = comm};
}

/* --- agreement --- */

void ep_group_result_init(struct ep_group_result *result, const char *call, ep_status status, int rank)
{
    const char *text = ep_last_error();
    size_t length = strlen(call);

    memset(result, 0, sizeof(*result));
    result->status = (int32_t)status;
    result->rank = rank;
    if (status != EP_OK)
        /* The reader prepends the name of the call again. */
        snprintf(result->reason, sizeof(result->reason), "%.*s", EP_GROUP_REASON_BYTES - 1,
                 strncmp(text, call, length) == 0 && strncmp(text + length, ": ", 2) == 0 ? text + length + 2 : text);
}

static const struct ep_group_result *find(const void *all, size_t stride, int rank)
{
    return (const struct ep_group_result *)(const void *)((const char *)all + (size_t)rank * stride);
}

ep_status ep_group_result_reduce(const char *call, const struct ep_group_result *mine, int nranks, const void *all,
                                 size_t stride)
{
    char reason[EP_GROUP_REASON_BYTES];
    int failed = -1;

    if (mine->status != EP_OK)
        return ep_fail((ep_status)mine->status, "%s: %s", call, mine->reason);
    /* A rank that failed by itself explains those that failed because of it. */
    for (int rank = 0; rank < nranks; rank++) {
        const struct ep_group_result *theirs = find(all, stride, rank);

        if (theirs->status == EP_OK)
            continue;
        if (!ep_status_is_failure(theirs->status) || theirs->rank < 0 || theirs->rank >= nranks)
            return ep_fail(EP_E_MISMATCH, "%s: what rank %d has published is damaged: status %d of rank %d", call, rank,
                           theirs->status, theirs->rank);
        if (failed < 0 || (theirs->rank == rank && find(all, stride, failed)->rank != failed))
            failed = rank;
    }
    if (failed < 0)
        return EP_OK;
    mine = find(all, stride, failed);
    ep_group_read_reason(reason, mine->reason);
    if (mine->rank == failed)
        return ep_fail((ep_status)mine->status, "%s: rank %d failed: %s", call, failed, reason);
    /* The reason begins with the rank that failed. */
    return ep_fail((ep_status)mine->status, "%s: %s (seen by rank %d)", call, reason, failed);
}

/* True if a rank has failed because of another one that did not report a failure itself. */
static bool names_peer(const struct ep_group_result *all, int nranks)
{
    return ANY_OF(rank, nranks,
                  all[rank].status != EP_OK && all[rank].status != EP_E_PEER_DEAD && all[rank].rank != rank);
}

ep_status ep_group_agree_about(const ep_boot *boot, int timeout_ms, ep_status mine, int rank, bool *flag)
{
    struct ep_group_result own, *all = calloc((size_t)boot->nranks, sizeof(*all));
    char lives = 1, all_live[EP_MAX_RANKS];
    ep_status status;

    ep_group_result_init(&own, "ep_comm_new", mine, rank);
    own.flag = flag && *flag;
    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", boot->nranks);
    status = boot->allgather(boot->context, &own, sizeof(own), timeout_ms, all);
    /*
     * A rank may have died after sending its own result: a dead rank does not join a second all-gather. All ranks see
     * the same results, so all take this branch.
     */
    if (status == EP_OK && names_peer(all, boot->nranks))
        status = boot->allgather(boot->context, &lives, sizeof(lives), timeout_ms, all_live);
    if (status == EP_OK) {
        status = ep_group_result_reduce("ep_comm_new", &own, boot->nranks, all, sizeof(*all));
        for (int i = 0; flag && i < boot->nranks; i++)
            *flag |= all[i].flag != 0;
    } else if (mine != EP_OK && (rank == boot->rank || (mine == EP_E_PEER_DEAD && status == EP_E_TIMEOUT))) {
        /* The bootstrap may know more about a peer: that it has died, and is not just unreachable. */
        status = ep_fail(mine, "ep_comm_new: %s", own.reason);
    }
    free(all);
    return status;
}

ep_status ep_group_agree_within(ep_comm *comm, const char *call, ep_status mine)
{
    int nranks = comm->nranks;
    struct ep_group_result own, *all = calloc((size_t)nranks, sizeof(*all));
    ep_status status;

    ep_group_result_init(&own, call, mine, comm->rank);
    if (!all)
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d ranks", call, nranks);
    status = ep_group_allgather(comm, &own, sizeof(own), all);
    if (status == EP_OK)
        status = ep_group_result_reduce(call, &own, nranks, all, sizeof(*all));
    free(all);
    return status;
}

ep_status ep_group_agree(const ep_boot *boot, int timeout_ms, ep_status mine)
{
    return ep_group_agree_about(boot, timeout_ms, mine, boot->rank, NULL);
}

/* --- ep_ll_new ------------------------------------------------------------------------------------------------- */

/* What must agree, and the address of the segment. */
struct ll_identity {
    struct ep_group_result result;
    ep_ll_config config;
    struct ep_group_address address;
};

static ep_status compare_configs(const ep_ll *ll, const struct ll_identity *all)
{
    static const struct ep_group_field fields[] = {
        {"max_tokens", offsetof(ep_ll_config, max_tokens)}, {"hidden", offsetof(ep_ll_config, hidden)},
        {"n_experts", offsetof(ep_ll_config, n_experts)},   {"topk", offsetof(ep_ll_config, topk)},
        {"flags", offsetof(ep_ll_config, flags)},
    };

    int first = ep_comm_first(ll->comm);

    for (int rank = first + 1; rank < ll->comm->nranks; rank++)
        if (ep_comm_has(ll->comm, rank))
            EP_TRY(ep_group_compare(ep_ll_open_call(ll), fields, sizeof(fields) / sizeof(fields[0]), &all[first].config,
                                    first, &all[rank].config, rank));
    return EP_OK;
}

ep_status ep_group_ll_exchange(ep_ll *ll, ep_status mine, const struct ep_group_address *address,
                               struct ep_group_address *ret_all)
{
    struct ll_identity own = {.config = ll->config, .address = *address};
    int nranks = ll->comm->nranks;
    struct ll_identity *all = calloc((size_t)nranks, sizeof(*all));
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d ranks", ep_ll_open_call(ll), nranks);
    ep_group_result_init(&own.result, ep_ll_open_call(ll), mine, ll->comm->rank);
    status = ep_group_allgather(ll->comm, &own, sizeof(own), all);
    if (status == EP_OK)
        status = ep_group_result_reduce(ep_ll_open_call(ll), &own.result, nranks, all, sizeof(*all));
    if (status == EP_OK)
        status = compare_configs(ll, all);
    for (int rank = 0; status == EP_OK && rank < nranks; rank++)
        ret_all[rank] = all[rank].address;
    free(all);
    return status;
}
