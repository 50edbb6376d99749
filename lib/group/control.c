/* SPDX-License-Identifier: Apache-2.0 */
#include "group/group.h"

#include "base/array.h"
#include "base/thread.h"
#include "group/collective.h"
#include "group/failure.h"
#include "group/memory.h"
#include "group/peers.h"
#include "group/plan.h"
#include "group/queue.h"
#include "net/tcp.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* With one rank per node the emulated network holds a wire for each pair of ranks. */
#define EMULATED_RING_BYTES (64u << 10)

/* What ranks exchange in the rendezvous. */
struct identity {
    struct ep_group_result result; /* of the local steps of the rank */
    struct ep_shm_name control;
    struct ep_process_id process;
};

/* The largest row is that of a plan: counts per rank, node and expert after two small headers. */
static size_t exchange_row_bytes(int nranks, int nnodes)
{
    size_t bytes = sizeof(int32_t) * ((size_t)nranks + (size_t)nnodes + EP_MAX_EXPERTS) + 64;

    return (bytes + EP_GROUP_CACHE_LINE - 1) / EP_GROUP_CACHE_LINE * EP_GROUP_CACHE_LINE;
}

/* A step of creation with the peers. */
struct attach_step {
    struct ep_group *group;
    const struct identity *mine;
    int failed_rank; /* of a failure */
};

static bool same_node(const struct ep_group *group, int rank)
{
    return rank / group->comm->ranks_per_node == group->comm->node;
}

/* With control links each node is a host of its own, even if two of them are on one machine: one set of rules. */
static bool is_other_host(const struct ep_group *group, int rank)
{
    return !same_node(group, rank) && ep_net_is_linked(group->comm->config.network);
}

/* A host that is unknown, because a rank has no /proc, is tried as the same one. */
static bool may_share_host(const struct identity *a, const struct identity *b)
{
    return !a->process.host[0] || !b->process.host[0] ||
           memcmp(a->process.host, b->process.host, sizeof(a->process.host)) == 0;
}

/* Unreachable: treated as another host from now on, unless it must be on this node. */
static ep_status set_other_host(struct attach_step *step, int rank, const char *why)
{
    step->group->one_host = false;
    if (!same_node(step->group, rank))
        return EP_OK;
    return ep_fail(EP_E_ARG,
                   "ep_comm_new: rank %d and rank %d belong to one node (ranks_per_node is %d) but %s; run them as one "
                   "user in one PID namespace, or set ranks_per_node to 1 and network to \"tcp\"",
                   step->group->comm->rank, rank, step->group->comm->ranks_per_node, why);
}

static ep_status attach_peer(struct attach_step *step, int rank, const struct identity *theirs)
{
    struct ep_group_peer *peer = &step->group->peers[rank];
    ep_status status;

    if (rank == step->group->comm->rank)
        return EP_OK;
    if (is_other_host(step->group, rank) || !may_share_host(step->mine, theirs))
        return set_other_host(step, rank, "are on different hosts");
    if (theirs->control.bytes != step->group->shm.bytes || theirs->control.process != theirs->process.key)
        return ep_fail(EP_E_MISMATCH,
                       "ep_comm_new: what rank %d has published is damaged: a control block of %llu bytes", rank,
                       (unsigned long long)theirs->control.bytes);
    peer->key = theirs->process.key;
    peer->same_process = theirs->process.key == step->mine->process.key;
    status = peer->same_process ? EP_OK : ep_process_open(&theirs->process, &peer->process);
    if (status != EP_OK)
        return ep_fail_prefix(status,
                              "ep_comm_new: rank %d needs one file descriptor per rank, and has none for rank %d: ",
                              step->group->comm->rank, rank);
    status = ep_group_attach(step->group, rank, &theirs->control, &peer->shm);
    if (status == EP_OK) {
        peer->control = peer->shm.base;
        return EP_OK;
    }
    if (status == EP_E_UNSUPPORTED)
        return set_other_host(step, rank, ep_last_error());
    if (ep_status_is_fatal(status)) {
        step->failed_rank = rank;
        return ep_fail_prefix(status, "ep_comm_new: ");
    }
    return ep_fail_prefix(
        status, "ep_comm_new: rank %d cannot map the control block of rank %d: ", step->group->comm->rank, rank);
}

/* Fails as soon as any rank is known to have died, or has failed. For steps of the creation that wait for one rank. */
static ep_status check_ranks(void *context)
{
    struct ep_group *group = context;

    EP_TRY(ep_group_check(group));
    for (int rank = 0; rank < group->comm->nranks; rank++)
        if (ep_group_dead_or_left(group, rank))
            return ep_fail(ep_group_has_left(group, rank) ? EP_E_PEER_LEFT : EP_E_PEER_DEAD,
                           "rank %d died or left while others connected to it", rank);
    return EP_OK;
}

/* `group` NULL: this rank has failed with `mine_status` already, and takes part to report it. */
static ep_status rendezvous(struct ep_group *group, const ep_boot *boot, int timeout_ms, ep_status mine_status)
{
    struct identity mine, *all = calloc((size_t)boot->nranks, sizeof(*all));
    char before[EP_ERROR_TEXT_BYTES];
    struct attach_step step = {.group = group, .mine = &mine, .failed_rank = boot->rank};
    ep_status status = mine_status;

    memset(&mine, 0, sizeof(mine));
    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", boot->nranks);
    if (status == EP_OK)
        status = ep_shm_get_name(&group->shm, &mine.control);
    ep_group_result_init(&mine.result, "ep_comm_new", status, boot->rank);
    ep_process_get_self(&mine.process);
    status = boot->allgather(boot->context, &mine, sizeof(mine), timeout_ms, all);
    if (status == EP_OK)
        status = ep_group_result_reduce("ep_comm_new", &mine.result, boot->nranks, all, sizeof(*all));
    else if (mine.result.status != EP_OK)
        status = ep_fail((ep_status)mine.result.status, "ep_comm_new: %s", mine.result.reason);
    if (status != EP_OK || !group)
        goto free_all;
    group->one_host = true;
    snprintf(before, sizeof(before), "%s", ep_last_error());
    for (int rank = 0; status == EP_OK && rank < boot->nranks; rank++)
        status = ep_comm_has(group->comm, rank) ? attach_peer(&step, rank, &all[rank]) : EP_OK;
    status = ep_group_agree_about(boot, timeout_ms, status, step.failed_rank, NULL);
    /* A rank that cannot be reached is no error where it may be on another host: restore the text. */
    if (status == EP_OK)
        ep_fail(EP_OK, "%s", before);
free_all:
    free(all);
    return status;
}

static ep_status attach_segment(void *context, int rank, const struct ep_shm_name *name, struct ep_shm *ret_shm)
{
    return ep_group_attach(context, rank, name, ret_shm);
}

static void wake_rank(void *context, int rank)
{
    ep_group_ring_rank(context, rank);
}

static ep_status find_network(struct ep_group *group, const ep_boot *boot, struct ep_net_provider *ret_provider)
{
    const struct ep_net_provider *brought = boot->network, *own;
    const char *name = group->comm->config.network;
    bool has_brought = brought && brought->abi == EP_NET_ABI;

    if (!name)
        name = brought ? brought->name : ep_net_emulated.name;
    own = ep_net_find(name);
    if (has_brought && strcmp(name, brought->name) == 0) {
        *ret_provider = *brought;
        return EP_OK;
    }
    if (!own)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: network \"%s\" is not available: use \"%s\", \"%s\", \"%s\"%s%s",
                       name, ep_net_emulated.name, ep_net_tcp.name, ep_net_verbs.name,
                       brought ? " or, from the bootstrap, " : "", brought ? brought->name : "");
    if (own == &ep_net_emulated && !group->one_host)
        return ep_fail(EP_E_UNSUPPORTED,
                       "ep_comm_new: the emulated network needs all ranks on one host: use the network \"tcp\"");
    *ret_provider = *own;
    /* Both networks that connect by it use the secret of a bootstrap over TCP. */
    if (has_brought && ep_net_is_linked(brought->name) && ep_net_is_linked(name))
        ret_provider->context = brought->context;
    return EP_OK;
}

static void make_params(struct ep_group *group, struct ep_net_params *ret_params)
{
    const ep_comm *comm = group->comm;

    *ret_params = (struct ep_net_params){
        .rank = comm->rank,
        .nranks = comm->nranks,
        .members = comm->members,
        .ranks_per_node = comm->ranks_per_node,
        .channels = comm->config.channels,
        .timeout_ms = comm->config.timeout_ms,
        .gpu = group->gpu,
        .emulation = comm->emulation,
        .wake = wake_rank,
        .wake_context = group,
        .attach = attach_segment,
    };
}

void ep_group_net_describe(struct ep_group *group, struct ep_net_provider *ret_provider,
                           struct ep_net_params *ret_params)
{
    *ret_provider = group->provider;
    /* The bootstrap may have been freed: the endpoint has kept what is needed. */
    if (ep_net_is_linked(group->provider.name))
        ret_provider->context = (void *)ep_net_tcp_get_context(ep_streams_get_net(group->streams)->tcp);
    make_params(group, ret_params);
}

void ep_group_net_describe_ranks(struct ep_group *group, const ep_boot *boot, struct ep_net_provider *ret_provider,
                                 struct ep_net_params *ret_params)
{
    ep_group_net_describe(group, ret_provider, ret_params);
    ret_params->boot = boot;
    ret_params->ranks_per_node = ret_params->channels = 1;
    ret_params->block_ranks = group->nlocal;
    ret_params->tolerant = true;
    ret_params->check = check_ranks;
    if (!ret_params->emulation.ring_bytes)
        ret_params->emulation.ring_bytes = EMULATED_RING_BYTES;
}

void ep_group_net_note_lost(struct ep_group *group, struct ep_net *net, int rank)
{
    if (!net->ops->lost || !group->remote || !net->ops->lost(net, rank) || atomic_load(&group->remote[rank].lost))
        return;
    /* No rank has reported its death. */
    atomic_store(&group->remote[rank].cut, 1);
    atomic_store(&group->remote[rank].lost, 1);
}

static ep_status open_network(struct ep_group *group, const ep_boot *boot)
{
    ep_comm *comm = group->comm;
    struct ep_net_params params;
    ep_status status = find_network(group, boot, &group->provider);

    if (group->backend->find_gpu)
        group->gpu = group->backend->find_gpu(group);
    make_params(group, &params);
    params.boot = boot;
    status = ep_group_agree(boot, comm->config.timeout_ms, status);
    if (status == EP_OK)
        status = ep_streams_open(&group->provider, &params, EP_GROUP_RING_BYTES, &group->streams);
    if (status == EP_OK && ep_net_is_linked(group->provider.name))
        status = ep_group_link_open(group);
    return ep_group_agree(boot, comm->config.timeout_ms, status);
}

/* Spinning pays only while every rank of this host has a processor of its own. */
static bool may_spin(const struct ep_group *group)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 &&
           COUNT_OF(rank, group->comm->nranks, group->peers[rank].control) <= CPU_COUNT(&set);
}

size_t ep_group_control_bytes(const struct ep_group *group)
{
    return sizeof(*group->control) +
           (size_t)EP_GROUP_EXCHANGES * (size_t)group->comm->nnodes * group->exchange_row_bytes;
}

/* Of a group that is attached to no peer. */
void ep_group_set_alone(struct ep_group *group)
{
    for (int rank = 0; rank < group->comm->nranks; rank++)
        group->peers[rank] = (struct ep_group_peer){.process.pidfd = -1};
    group->arbiter = group->comm->rank;
    group->peers[group->comm->rank].control = group->control;
    group->peers[group->comm->rank].same_process = true;
}

/* All steps that need no peer. */
static ep_status prepare(struct ep_group *group, ep_comm *comm)
{
    group->comm = comm;
    group->queue.base.comm = comm;
    comm->impl = group;
    group->first = comm->node * comm->ranks_per_node;
    group->nlocal = comm->ranks_per_node;
    group->local = comm->rank - group->first;
    group->shm.fd = -1;
    group->link_event = -1;
    group->exchange_row_bytes = exchange_row_bytes(comm->nranks, comm->nnodes);
    pthread_mutex_init(&group->memory_lock, NULL);
    pthread_mutex_init(&group->queue_lock, NULL);
    ep_cond_init(&group->queue_changed);
    group->descriptors = calloc((size_t)group->nlocal, sizeof(*group->descriptors));
    group->peers = calloc((size_t)comm->nranks, sizeof(*group->peers));
    if (!group->peers || !group->descriptors)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", comm->nranks);
    for (int rank = 0; rank < comm->nranks; rank++)
        group->peers[rank].process.pidfd = -1;
    EP_TRY(ep_shm_new(ep_group_control_bytes(group), &group->shm));
    group->control = group->shm.base;
    ep_group_set_alone(group);
    return EP_OK;
}

/* All steps with the peers. `mine`: of the steps before; a failure is reported to them. */
ep_status ep_group_join(struct ep_group *group, const ep_boot *boot, ep_status mine)
{
    ep_status status = rendezvous(group, boot, group->comm->config.timeout_ms, mine);

    if (status != EP_OK)
        return status;
    for (group->arbiter = 0; !group->peers[group->arbiter].control;)
        group->arbiter++;
    group->spin = may_spin(group);
    return group->comm->nnodes > 1 ? open_network(group, boot) : EP_OK;
}

ep_status ep_group_open(ep_comm *comm, const ep_boot *boot, const struct ep_group_backend *backend)
{
    struct ep_group *group = calloc(1, backend->comm_bytes);
    ep_status status;

    if (!group)
        return rendezvous(NULL, boot, comm->config.timeout_ms, ep_fail(EP_E_MEMORY, "ep_comm_new: no memory"));
    group->backend = backend;
    status = ep_group_join(group, boot, prepare(group, comm));
    if (status != EP_OK)
        ep_group_close(comm);
    return status;
}

void ep_group_leave(struct ep_group *group)
{
    if (!group->control)
        return;
    atomic_store(&group->control->state.left, 1);
    if (group->peers)
        ep_group_ring_all(group);
}

/* Ends all communication with the peers, who learn that this rank leaves. Their processes and control blocks stay. */
void ep_group_disconnect(struct ep_group *group)
{
    ep_group_plan_drop_pending(group);
    ep_group_leave(group);
    if (group->backend->stop)
        group->backend->stop(group);
    ep_group_link_close(group);
    ep_streams_free(group->streams);
    group->streams = NULL;
    ep_group_unmap_peers(group);
    free(group->remote);
    group->remote = NULL;
}

void ep_group_forget_peers(struct ep_group *group)
{
    for (int rank = 0; group->peers && rank < group->comm->nranks; rank++) {
        ep_shm_done(&group->peers[rank].shm);
        ep_process_close(&group->peers[rank].process);
    }
}

void ep_group_forget_former(struct ep_group_former **at)
{
    struct ep_group_former *former = *at;

    *at = former->next;
    ep_shm_done(&former->shm);
    ep_process_close(&former->process);
    free(former);
}

void ep_group_close(ep_comm *comm)
{
    struct ep_group *group = ep_group_of(comm);

    if (!group)
        return;
    ep_group_queue_close(group);
    if (atomic_load(&comm->failed) != EP_OK)
        ep_streams_abandon(group->streams);
    ep_group_disconnect(group);
    ep_group_forget_peers(group);
    while (group->former)
        ep_group_forget_former(&group->former);
    ep_group_memory_close(group);
    free(group->peers);
    free(group->descriptors);
    ep_shm_done(&group->shm);
    pthread_cond_destroy(&group->queue_changed);
    pthread_mutex_destroy(&group->queue_lock);
    pthread_mutex_destroy(&group->memory_lock);
    free(group);
    comm->impl = NULL;
}
