/* SPDX-License-Identifier: Apache-2.0 */
#include "base/backoff.h"
#include "base/log.h"
#include "base/thread.h"
#include "core/check.h"
#include "core/config.h"
#include "net/net.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ALLGATHER_MOST_BYTES 4096

static ep_comm *new_comm(void)
{
    static _Atomic uint64_t made;
    ep_comm *comm = calloc(1, sizeof(*comm));

    if (!comm)
        return NULL;
    comm->process = ep_process_generation();
    comm->generation = 1;
    /* Of no other communicator on this host: the key of the process differs in all of its bits. */
    comm->id = comm->process ^ (atomic_fetch_add(&made, 1) + 1);
    pthread_mutex_init(&comm->error_lock, NULL);
    return comm;
}

static void free_comm(ep_comm *comm)
{
    if (!comm)
        return;
    pthread_mutex_destroy(&comm->error_lock);
    free(comm);
}

static ep_status load_boot(const char *call, const ep_boot *boot, ep_boot *ret_boot)
{
    ep_status status = ep_args_load(ret_boot, sizeof(*ret_boot), EP_ARGS_FIRST_BYTES(ep_boot), boot, "boot");

    if (status != EP_OK)
        return ep_fail_prefix(status, "%s: ", call);
    if (!ret_boot->allgather)
        return ep_fail(EP_E_ARG, "%s: boot.allgather is NULL", call);
    EP_TRY(ep_check_range(call, "boot.nranks", ret_boot->nranks, 1, EP_MAX_RANKS));
    EP_TRY(ep_check_range(call, "boot.rank", ret_boot->rank, 0, ret_boot->nranks - 1));
    EP_TRY(ep_check_range(call, "boot.ranks_per_node", ret_boot->ranks_per_node, 0, ret_boot->nranks));
    if (ret_boot->ranks_per_node && ret_boot->nranks % ret_boot->ranks_per_node)
        return ep_fail(EP_E_ARG, "%s: boot.ranks_per_node %d does not divide the %d ranks", call,
                       ret_boot->ranks_per_node, ret_boot->nranks);
    return ep_check_reserved(call, (uint32_t)ret_boot->reserved);
}

/* Coroutines have stacks of their own, which the thread does not know. */
static ep_status check_stack(void)
{
    const char *here = __builtin_frame_address(0);
    pthread_attr_t attributes;
    void *stack = NULL;
    size_t bytes = 0;

    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return EP_OK;
    if (pthread_attr_getstack(&attributes, &stack, &bytes) != 0)
        bytes = 0;
    pthread_attr_destroy(&attributes);
    if (here < (char *)stack || here >= (char *)stack + bytes || (size_t)(here - (char *)stack) >= EP_STACK_LEAST)
        return EP_OK;
    return ep_fail(EP_E_SYSTEM, "ep_comm_new: the stack of this thread has %zu KiB left, and calls need %zu KiB",
                   (size_t)(here - (char *)stack) >> 10, EP_STACK_LEAST >> 10);
}

static ep_status resolve_new(ep_comm *comm, const ep_boot *boot, const ep_comm_config *config)
{
    if (!comm)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");
    comm->nranks = boot->nranks;
    EP_TRY(check_stack());
    EP_TRY(ep_config_resolve(comm, config, boot->network, "ep_comm_new"));
    /* The hosts of absent ranks are not those of the bootstrap. */
    if (!comm->config.ranks_per_node && !comm->config.slots && boot->ranks_per_node) {
        comm->config.ranks_per_node = boot->ranks_per_node;
        comm->boot_has_nodes = true;
    }
    if (!comm->ops->comm_open)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: backend %s cannot open a communicator", comm->ops->name);
    return EP_OK;
}

struct given_boot {
    ep_boot boot;
    const char *call; /* for which it is */
};

/* The caller's all-gather. It may fail without setting a reason: the last text would then be that of an older error. */
static ep_status gather_with_reason(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct given_boot *given = context;
    const ep_boot *boot = &given->boot;
    char before[EP_ERROR_TEXT_BYTES];
    ep_status status;

    snprintf(before, sizeof(before), "%s", ep_last_error());
    ep_set_last_error("");
    status = boot->allgather(boot->context, mine, bytes, timeout_ms, ret_all);
    if (status == EP_OK) {
        ep_set_last_error(before);
        return EP_OK;
    }
    if (!ep_status_is_failure((int64_t)status)) {
        int number = (int)status;

        return ep_fail(EP_E_SYSTEM, "%s: bootstrap: the all-gather returned %d, which is no ep_status%s%s", given->call,
                       number, ep_last_error()[0] ? ": " : "", ep_last_error());
    }
    if (!ep_last_error()[0])
        return ep_fail(status, "%s: bootstrap: the all-gather failed with %s", given->call, ep_status_name(status));
    return ep_fail_prefix(status, "%s: %s", given->call,
                          strncmp(ep_last_error(), "bootstrap: ", 11) == 0 ? "" : "bootstrap: ");
}

/* A bootstrap of the members, as one of all slots: the blocks of absent ranks are zero. */
struct slots {
    const ep_boot *boot;
    const ep_comm *comm;
};

static ep_status gather_slots(void *context, const void *mine, size_t bytes, int timeout_ms, void *ret_all)
{
    const struct slots *slots = context;
    const ep_boot *boot = slots->boot;
    char *blocks = malloc((size_t)boot->nranks * bytes + 1);
    ep_status status;

    if (!blocks)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", boot->nranks);
    memset(ret_all, 0, (size_t)slots->comm->nranks * bytes);
    status = boot->allgather(boot->context, mine, bytes, timeout_ms, blocks);
    for (int i = 0; status == EP_OK && i < boot->nranks; i++)
        memcpy((char *)ret_all + (size_t)slots->comm->slot_of[i] * bytes, blocks + (size_t)i * bytes, bytes);
    free(blocks);
    return status;
}

static ep_boot boot_of_slots(struct slots *slots)
{
    ep_boot boot = *slots->boot;

    boot.rank = slots->comm->rank;
    boot.nranks = slots->comm->nranks;
    boot.allgather = gather_slots;
    boot.context = slots;
    return boot;
}

ep_status ep_comm_new(const ep_boot *boot, const ep_comm_config *config, ep_comm **ret_comm)
{
    struct given_boot given = {.call = "ep_comm_new"};
    ep_boot mine, all;
    ep_comm *comm;
    ep_status status;

    EP_TRY(load_boot(given.call, boot, &given.boot));
    mine = given.boot;
    mine.allgather = gather_with_reason;
    mine.context = &given;
    /* From here on, failures of this rank are reported to the others, so that they do not wait until their deadline. */
    comm = new_comm();
    status = resolve_new(comm, &mine, config);
    if (status == EP_OK)
        status = EP_CHECK_PTR("ep_comm_new", ret_comm);
    status = ep_config_agree(&mine, comm, status, "ep_comm_new");
    if (status == EP_OK && comm) { /* without one it is a failure, which clang-tidy does not see */
        all = boot_of_slots(&(struct slots){&mine, comm});
        status = comm->ops->comm_open(comm, &all);
    }
    if (status != EP_OK) {
        free_comm(comm);
        return status;
    }
    *ret_comm = comm;
    ep_log(EP_LOG_INFO, "rank %d of %d: communicator on backend %s, node %d of %d, network %s", comm->rank,
           comm->nranks, comm->ops->name, comm->node, comm->nnodes, ep_config_network(comm));
    return EP_OK;
}

void ep_comm_free(ep_comm *comm)
{
    if (!comm || !ep_comm_may_free(comm))
        return;
    if (atomic_load(&comm->live))
        ep_log(
            EP_LOG_WARNING,
            "rank %d of %d: ep_comm_free: %d plans, events, queues or low-latency objects were not freed before, and "
            "must not be used any more",
            comm->rank, comm->nranks, atomic_load(&comm->live));
    ep_pool_detach(comm);
    if (comm->ops->comm_close)
        comm->ops->comm_close(comm);
    free_comm(comm);
}

ep_status ep_comm_get_info(const ep_comm *comm, ep_comm_info *ret_info)
{
    ep_comm_info info = {.size = sizeof(info)};

    EP_CHECK_COMM(comm, comm);
    info.rank = comm->rank;
    info.nranks = comm->nranks;
    info.node = comm->node;
    info.nnodes = comm->nnodes;
    info.ranks_per_node = comm->ranks_per_node;
    info.timeout_ms = comm->config.timeout_ms;
    info.backend = comm->ops->name;
    info.network = ep_config_network(comm);
    info.n_members = comm->n_members;
    info.library_bytes = comm->ops->comm_bytes ? comm->ops->comm_bytes(comm) : 0;
    return EP_CHECK_STORE("ep_comm_get_info", ret_info, &info, ep_comm_info);
}

ep_status ep_comm_get_stats(const ep_comm *comm, ep_stats *ret_stats)
{
    ep_comm *own = (ep_comm *)comm;
    ep_stats stats;

    EP_CHECK_COMM(comm, comm);
    pthread_mutex_lock(&own->error_lock);
    stats = comm->stats;
    pthread_mutex_unlock(&own->error_lock);
    return EP_CHECK_STORE("ep_comm_get_stats", ret_stats, &stats, ep_stats);
}

ep_status ep_comm_barrier(ep_comm *comm)
{
    EP_CHECK_USABLE(comm, comm);
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, barrier, comm));
}

static ep_status check_allgather(const ep_comm *comm, const void *mine, size_t bytes, const void *ret_all)
{
    const struct ep_buffer buffers[] = {{"ret_all", ret_all, (int64_t)bytes * comm->nranks, 1, true},
                                        {"mine", mine, (int64_t)bytes, 1, true}};

    if (bytes > ALLGATHER_MOST_BYTES)
        return ep_fail(EP_E_ARG, "ep_comm_allgather: bytes is %zu, more than %d", bytes, ALLGATHER_MOST_BYTES);
    if (!bytes)
        return EP_OK;
    return ep_check_buffers("ep_comm_allgather", buffers, 1, 2);
}

ep_status ep_comm_allgather(ep_comm *comm, const void *mine, size_t bytes, void *ret_all)
{
    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, check_allgather(comm, mine, bytes, ret_all));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, allgather, comm, mine, bytes, ret_all));
}

bool ep_comm_enter(ep_comm *comm)
{
    atomic_fetch_add(&comm->visitors, 1);
    if (!atomic_load(&comm->changes))
        return true;
    atomic_fetch_sub(&comm->visitors, 1);
    return false;
}

void ep_comm_exit(ep_comm *comm)
{
    atomic_fetch_sub(&comm->visitors, 1);
}

ep_status ep_comm_poll(ep_comm *comm)
{
    ep_status status = EP_OK;

    if (comm->ops->poll && ep_comm_enter(comm)) {
        status = comm->ops->poll(comm);
        ep_comm_exit(comm);
    }
    return status;
}

void ep_comm_abort(ep_comm *comm)
{
    if (!comm || !ep_comm_is_own(comm) || !comm->ops->abort)
        return;
    /* First, for a regroup that is about to end and would not see it otherwise. */
    atomic_store(&comm->abort_due, 1);
    if (ep_comm_enter(comm)) {
        comm->ops->abort(comm);
        ep_comm_exit(comm);
    }
    if (!atomic_load(&comm->regroups))
        atomic_store(&comm->abort_due, 0);
}

ep_status ep_comm_get_failed(const ep_comm *comm, int32_t *ret_failed)
{
    ep_comm *own = (ep_comm *)comm; /* its state does not change */

    EP_CHECK_COMM(comm, comm);
    EP_TRY(EP_CHECK_PTR(__func__, ret_failed));
    if (!comm->ops->get_failed)
        return ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, comm->ops->name);
    if (!ep_comm_enter(own))
        return ep_fail(EP_E_STATE, "%s: another thread is in ep_comm_regroup()", __func__);
    comm->ops->get_failed(comm, ret_failed);
    for (int rank = 0; rank < comm->nranks; rank++)
        if (!ep_comm_has(comm, rank))
            ret_failed[rank] = EP_E_EXCLUDED;
    ep_comm_exit(own);
    return EP_OK;
}

/* --- regroup ----------------------------------------------------------------------------------------------------- */

/* What a rank would pass to ep_comm_new() to be a member again. */
static ep_comm *next_comm(const ep_comm *comm)
{
    ep_comm *next = new_comm();

    if (!next)
        return NULL;
    next->ops = comm->ops;
    next->config = comm->config;
    next->emulation = comm->emulation;
    next->nranks = comm->nranks;
    next->id = comm->id;
    next->is_next = true;
    return next;
}

static void take_members(ep_comm *comm, const ep_comm *next)
{
    comm->n_members = next->n_members;
    memcpy(comm->members, next->members, sizeof(comm->members));
    memcpy(comm->slot_of, next->slot_of, sizeof(comm->slot_of));
    memcpy(comm->id_of, next->id_of, sizeof(comm->id_of));
    comm->generation++;
}

/* Forgets the failure of the members of before. */
static void forget_failure(ep_comm *comm)
{
    pthread_mutex_lock(&comm->error_lock);
    comm->reason[0] = '\0';
    comm->logged = false;
    atomic_store(&comm->failed, EP_OK);
    pthread_mutex_unlock(&comm->error_lock);
}

/* The members have agreed. Whatever fails from here on fails on all of them, and leaves a failed communicator. */
static ep_status change_members(ep_comm *comm, const ep_boot *boot, const ep_comm *next)
{
    ep_boot all;
    ep_status status;
    int none = EP_OK;

    atomic_store(&comm->changes, 1);
    while (atomic_load(&comm->visitors))
        ep_backoff_sleep();
    status = comm->ops->regroup_leave(comm, next);
    forget_failure(comm);
    take_members(comm, next);
    all = boot_of_slots(&(struct slots){boot, comm});
    status = comm->ops->regroup_join(comm, &all, status);
    if (status != EP_OK)
        atomic_compare_exchange_strong(&comm->failed, &none, (int)status);
    status = ep_comm_record(comm, status);
    atomic_store(&comm->changes, 0);
    return status;
}

ep_status ep_comm_regroup(ep_comm *comm, const ep_boot *boot)
{
    struct given_boot given = {.call = __func__};
    ep_boot mine;
    ep_comm *next;
    ep_status status = EP_OK;

    EP_CHECK_COMM(comm, comm);
    EP_TRY(load_boot(given.call, boot, &given.boot));
    mine = given.boot;
    mine.allgather = gather_with_reason;
    mine.context = &given;
    atomic_store(&comm->regroups, 1);
    next = next_comm(comm);
    if (!next)
        status = ep_fail(EP_E_MEMORY, "%s: no memory", __func__);
    else
        status = EP_BACKEND_CALL(comm, regroup_drain, comm); /* before the others wait for this rank */
    status = ep_config_agree(&mine, next, status, __func__);
    if (status == EP_OK)
        status = change_members(comm, &mine, next);
    free_comm(next);
    atomic_store(&comm->regroups, 0);
    if (atomic_exchange(&comm->abort_due, 0))
        comm->ops->abort(comm);
    if (status == EP_OK)
        ep_log(EP_LOG_INFO, "rank %d of %d: the group has %d members", comm->rank, comm->nranks, comm->n_members);
    return status;
}
