/* SPDX-License-Identifier: Apache-2.0 */
#include "net/net.h"

#include "base/reserve.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static ep_status check_params(const char *name, const struct ep_net_params *params)
{
    if (params->ranks_per_node < 1 || params->nranks < 2 * params->ranks_per_node ||
        params->nranks % params->ranks_per_node || params->rank < 0 || params->rank >= params->nranks)
        return ep_fail(EP_E_ARG, "network %s: rank %d of %d with %d ranks per node", name, params->rank, params->nranks,
                       params->ranks_per_node);
    if (params->channels < 1 || params->channels > EP_NET_MAX_CHANNELS)
        return ep_fail(EP_E_ARG, "network %s: %d channels, of 1..%d", name, params->channels, EP_NET_MAX_CHANNELS);
    if (params->region_bytes == 0 || params->region_bytes > SIZE_MAX / 2 || params->n_signals == 0)
        return ep_fail(EP_E_ARG, "network %s: region of %zu bytes, %u signals", name, params->region_bytes,
                       params->n_signals);
    return EP_OK;
}

ep_status ep_net_new(const struct ep_net_ops *ops, size_t bytes, const struct ep_net_params *params,
                     struct ep_net **ret_net)
{
    struct ep_net *net;

    EP_TRY(check_params(ops->name, params));
    net = calloc(1, bytes);
    if (!net)
        return ep_fail(EP_E_MEMORY, "network %s: no memory", ops->name);
    *net = (struct ep_net){.ops = ops,
                           .node = params->rank / params->ranks_per_node,
                           .nnodes = params->nranks / params->ranks_per_node,
                           .channels = params->channels,
                           .rank = params->rank,
                           .ranks_per_node = params->ranks_per_node,
                           .timeout_ms = params->timeout_ms,
                           .tolerant = params->tolerant,
                           .region_bytes = params->region_bytes,
                           .n_signals = params->n_signals};
    *ret_net = net;
    return EP_OK;
}

ep_status ep_net_opened(ep_status status, struct ep_net **ret_net)
{
    char text[EP_ERROR_TEXT_BYTES];

    if (status == EP_OK)
        return EP_OK;
    /* What is freed may fail as a consequence, with a text of its own. */
    snprintf(text, sizeof(text), "%s", ep_last_error());
    (*ret_net)->abandoned = true;
    (*ret_net)->ops->free(*ret_net);
    *ret_net = NULL;
    return ep_fail(status, "%s", text);
}

/* --- hellos --- */

static ep_status compare(const char *name, int rank, const struct ep_net_hello *mine, int their_rank,
                         const struct ep_net_hello *theirs)
{
    const struct {
        const char *name;
        uint64_t mine, theirs;
    } fields[] = {
        {"the version of the network", mine->abi, theirs->abi},
        {"ranks_per_node", mine->ranks_per_node, theirs->ranks_per_node},
        {"channels", mine->channels, theirs->channels},
        {"region_bytes", mine->region_bytes, theirs->region_bytes},
        {"n_signals", mine->n_signals, theirs->n_signals},
    };
    int reason_bytes = (int)sizeof(theirs->reason);

    if (theirs->status != EP_OK && !ep_status_is_failure((int64_t)theirs->status))
        return ep_fail(EP_E_MISMATCH, "network %s: what rank %d has published is damaged: status %llu", name,
                       their_rank, (unsigned long long)theirs->status);
    /* The reason may name another rank as the one that failed: report that one. */
    if (theirs->status != EP_OK && strncmp(theirs->reason, "rank ", 5) == 0)
        return ep_fail((ep_status)theirs->status, "network %s: %.*s (seen by rank %d)", name, reason_bytes,
                       theirs->reason, their_rank);
    if (theirs->status != EP_OK)
        return ep_fail((ep_status)theirs->status, "network %s: rank %d could not open its endpoint: %.*s", name,
                       their_rank, reason_bytes, theirs->reason);
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++)
        if (fields[i].mine != fields[i].theirs)
            return ep_fail(EP_E_MISMATCH, "network %s: %s is %llu on rank %d and %llu on rank %d", name, fields[i].name,
                           (unsigned long long)fields[i].mine, rank, (unsigned long long)fields[i].theirs, their_rank);
    return EP_OK;
}

/* The ranks that reached a deadline, or all others. */
static ep_status compare_ranks(const char *name, const struct ep_net_params *params, const struct ep_net_hello *own,
                               bool late, const void *all, size_t bytes)
{
    for (int rank = 0; rank < params->nranks; rank++) {
        struct ep_net_hello theirs;

        if (!ep_net_is_present(params, rank))
            continue;
        memcpy(&theirs, (const char *)all + (size_t)rank * bytes, sizeof(theirs));
        if ((theirs.status == EP_E_TIMEOUT) == late)
            EP_TRY(compare(name, params->rank, own, rank, &theirs));
    }
    return EP_OK;
}

ep_status ep_net_exchange_hello(const char *name, const struct ep_net_params *params, ep_status status, void *mine,
                                size_t bytes, void *ret_all)
{
    struct ep_net_hello *own = mine;
    const ep_boot *boot = params->boot;
    char text[EP_ERROR_TEXT_BYTES];
    ep_status gathered;

    snprintf(text, sizeof(text), "%s", ep_last_error());
    *own = (struct ep_net_hello){.status = (uint64_t)status,
                                 .abi = EP_NET_ABI,
                                 .ranks_per_node = (uint64_t)params->ranks_per_node,
                                 .channels = (uint64_t)params->channels,
                                 .region_bytes = params->region_bytes,
                                 .n_signals = params->n_signals};
    if (status != EP_OK)
        snprintf(own->reason, sizeof(own->reason), "%.*s", (int)sizeof(own->reason) - 1, text);
    memset(ret_all, 0, (size_t)params->nranks * bytes);
    gathered = boot->allgather(boot->context, mine, bytes, params->timeout_ms, ret_all);
    /*
     * A failure of the bootstrap may be the reason why this rank could not reach a peer: the death of that peer, a rank
     * that does not answer, or a call that another rank ended, after which the peers close their connections.
     */
    if (gathered != EP_OK && (status == EP_OK || status == EP_E_TIMEOUT || gathered == EP_E_PEER_DEAD ||
                              ((status == EP_E_PEER_DEAD || status == EP_E_PEER_LEFT) &&
                               (gathered == EP_E_ABORTED || gathered == EP_E_EXCLUDED))))
        return gathered;
    if (status != EP_OK && status != EP_E_TIMEOUT)
        return ep_fail(status, "%s", text);
    /* The rank that a late one has waited for may know the reason: a resource that it lacks. */
    EP_TRY(compare_ranks(name, params, own, false, ret_all, bytes));
    if (status != EP_OK)
        return ep_fail(status, "%s", text);
    return compare_ranks(name, params, own, true, ret_all, bytes);
}

/* --- memory --- */

size_t ep_net_whole_pages(size_t bytes)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE), rest = bytes % page;

    return rest == 0 ? bytes : __builtin_add_overflow(bytes, page - rest, &bytes) ? SIZE_MAX : bytes;
}

#define HUGE_PAGE_BYTES ((size_t)2 << 20)
/* Bytes touched between two checks of the memory limits: small, so that concurrent ranks stay within the margin. */
#define PIECE_BYTES ((size_t)256 << 10)

/* Zeroed, with all pages faulted in: exceeding a memory limit is an error here, not a SIGBUS or SIGKILL later. */
static ep_status new_pages(size_t bytes, void **ret_memory)
{
    size_t whole = ep_net_whole_pages(bytes),
           alignment = whole < HUGE_PAGE_BYTES ? (size_t)sysconf(_SC_PAGESIZE) : HUGE_PAGE_BYTES;
    void *memory = NULL;
    ep_status status = EP_OK;

    if (whole == SIZE_MAX || posix_memalign(&memory, alignment, whole) != 0)
        status = ep_fail(EP_E_MEMORY, "no memory for %zu bytes", bytes);
    else
        (void)madvise(memory, whole, MADV_HUGEPAGE); /* a five hundredth of the faults, where the machine has them */
    for (size_t at = 0; status == EP_OK && at < whole; at += PIECE_BYTES) {
        size_t piece = whole - at < PIECE_BYTES ? whole - at : PIECE_BYTES;

        status = ep_reserve_check(piece);
        if (status == EP_OK)
            memset((char *)memory + at, 0, piece);
    }
    if (status == EP_OK)
        *ret_memory = memory;
    else
        free(memory);
    return status;
}

ep_status ep_net_break(struct ep_net *net, ep_status status, int node)
{
    if (net->broken == EP_OK) {
        net->broken = status;
        net->broken_by = 1 + node;
        snprintf(net->reason, sizeof(net->reason), "%s", ep_last_error());
    }
    return ep_net_check(net);
}

ep_status ep_net_memory_new(struct ep_net *net)
{
    size_t bytes = (size_t)net->n_signals * sizeof(*net->signals);
    void *signals = NULL, *region = NULL;
    ep_status status = new_pages(bytes, &signals);

    if (status == EP_OK)
        status = new_pages(net->region_bytes, &region);
    net->signals = signals;
    net->region = net->payload = region;
    return status == EP_OK
               ? EP_OK
               : ep_fail_prefix(status, "network %s: a region of %zu bytes and %u signals: ", net->ops->name,
                                net->region_bytes, net->n_signals);
}

void ep_net_free(struct ep_net *net)
{
    free(net->region);
    free(net->signals);
    free(net);
}

/* --- built-in engines --- */

const struct ep_net_provider *ep_net_find(const char *name)
{
    static const struct ep_net_provider *const providers[] = {&ep_net_emulated, &ep_net_tcp, &ep_net_verbs};

    for (size_t i = 0; i < sizeof(providers) / sizeof(providers[0]); i++)
        if (strcmp(name, providers[i]->name) == 0)
            return providers[i];
    return NULL;
}

bool ep_net_is_linked(const char *name)
{
    return strcmp(name, ep_net_tcp.name) == 0 || strcmp(name, ep_net_verbs.name) == 0;
}
