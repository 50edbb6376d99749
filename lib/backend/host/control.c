/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/host/host.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What ranks tell each other when they meet. */
struct identity {
    struct ep_shm_name control;
    char host[40]; /* the kernel's boot id: the same for all processes of a host, containers included */
    uint64_t pid_namespace;
    int32_t pid;
};

/* The largest row is that of a plan: counts per rank, node and expert behind two small heads. */
static size_t board_row_bytes(int nranks, int nnodes)
{
    size_t bytes = sizeof(int32_t) * ((size_t)nranks + (size_t)nnodes + EP_MAX_EXPERTS) + 64;

    return (bytes + HOST_CACHE_LINE - 1) / HOST_CACHE_LINE * HOST_CACHE_LINE;
}

static size_t control_bytes(int nranks, int nnodes)
{
    return sizeof(struct host_control) + (size_t)HOST_BOARDS * (size_t)nnodes * board_row_bytes(nranks, nnodes);
}

static void read_host_identity(struct identity *identity)
{
    struct stat info;
    ssize_t got;
    int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);

    if (fd >= 0) {
        got = read(fd, identity->host, sizeof(identity->host) - 1);
        if (got < 0)
            identity->host[0] = '\0';
        close(fd);
    }
    if (stat("/proc/self/ns/pid", &info) == 0)
        identity->pid_namespace = (uint64_t)info.st_ino;
}

static ep_status attach_peer(struct host_comm *host, int rank, const struct identity *mine, const struct identity *peer)
{
    struct host_peer *entry = &host->peers[rank];
    bool same_host = memcmp(mine->host, peer->host, sizeof(mine->host)) == 0;
    bool same_node = rank / host->comm->ranks_per_node == host->comm->node;
    ep_status status;

    entry->pidfd = -1;
    if (rank == host->comm->rank) {
        entry->control = host->control;
        return EP_OK;
    }
    if (!same_host || mine->pid_namespace != peer->pid_namespace) {
        host->one_host = false;
        if (!same_node)
            return EP_OK;
        return ep_fail(EP_E_ARG,
                       "ep_comm_new: ranks %d and %d are of one node (ranks_per_node is %d) but live on different %s",
                       host->comm->rank, rank, host->comm->ranks_per_node, same_host ? "PID namespaces" : "hosts");
    }
    if (peer->control.bytes != host->shm.bytes || peer->control.pid != peer->pid)
        return ep_fail(EP_E_MISMATCH,
                       "ep_comm_new: what rank %d has published is damaged: a control block of %llu bytes", rank,
                       (unsigned long long)peer->control.bytes);
    status = ep_shm_attach(&peer->control, &entry->shm);
    if (status != EP_OK)
        return ep_fail_prefix(status, "ep_comm_new: control block of rank %d: ", rank);
    entry->control = entry->shm.base;
    if (peer->pid != mine->pid) {
        entry->pid = peer->pid;
        entry->pidfd = (int)syscall(SYS_pidfd_open, peer->pid, 0);
        /* Kernels before 5.3 and some container runtimes do not have the call: then kill(pid, 0) has to do. */
        if (entry->pidfd < 0 && errno != ENOSYS && errno != EPERM)
            return ep_fail_errno(
                errno == ESRCH ? EP_E_PEER_DEAD : EP_E_SYSTEM, errno,
                "ep_comm_new: pidfd_open of rank %d (process %d; each rank needs a descriptor for each "
                "other)",
                rank, peer->pid);
        if (entry->pidfd >= 0)
            fcntl(entry->pidfd, F_SETFD, FD_CLOEXEC);
    }
    return EP_OK;
}

/*
 * All ranks learn whether all have succeeded, so that creation fails everywhere or nowhere. A rank that fails on its
 * own keeps its reason, the others name it.
 */
ep_status host_agree(const ep_boot *boot, int timeout_ms, ep_status mine)
{
    int32_t verdict = (int32_t)mine;
    int32_t *all = calloc((size_t)boot->nranks, sizeof(*all));
    char text[EP_ERROR_TEXT_BYTES];
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");
    snprintf(text, sizeof(text), "%s", ep_last_error());
    status = boot->allgather(boot->context, &verdict, sizeof(verdict), timeout_ms, all);
    if (mine != EP_OK)
        status = ep_fail(mine, "%s", text);
    for (int rank = 0; status == EP_OK && rank < boot->nranks; rank++)
        if (all[rank] != EP_OK && !ep_status_is_failure(all[rank]))
            status = ep_fail(EP_E_MISMATCH, "ep_comm_new: what rank %d has published is damaged: status %d", rank,
                             all[rank]);
        else if (all[rank] != EP_OK)
            status = ep_fail((ep_status)all[rank], "ep_comm_new: rank %d failed with %s (%s)", rank,
                             ep_status_name((ep_status)all[rank]), ep_status_text((ep_status)all[rank]));
    free(all);
    return status;
}

static ep_status meet(struct host_comm *host, const ep_boot *boot)
{
    struct identity mine = {.pid = (int32_t)getpid()};
    struct identity *all = calloc((size_t)boot->nranks, sizeof(*all));
    int timeout_ms = host->comm->config.timeout_ms;
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");
    read_host_identity(&mine);
    host->one_host = true;
    status = ep_shm_get_name(&host->shm, &mine.control);
    if (status == EP_OK)
        status = boot->allgather(boot->context, &mine, sizeof(mine), timeout_ms, all);
    if (status != EP_OK)
        goto free_all;
    for (int rank = 0; status == EP_OK && rank < boot->nranks; rank++)
        status = attach_peer(host, rank, &mine, &all[rank]);
    status = host_agree(boot, timeout_ms, status);
free_all:
    free(all);
    return status;
}

static void wake_rank(void *context, int rank)
{
    host_ring_rank(context, rank);
}

/* Which network the configuration asks for, of those that are there. */
static ep_status find_network(struct host_comm *host, const ep_boot *boot, const struct ep_net_provider **ret_provider)
{
    const struct ep_net_provider *brought = boot->network;
    const char *name = host->comm->config.network;

    if (!name)
        name = brought ? brought->name : ep_net_emulated.name;
    if (brought && brought->abi == EP_NET_ABI && strcmp(name, brought->name) == 0) {
        *ret_provider = brought;
        return EP_OK;
    }
    if (strcmp(name, ep_net_emulated.name) != 0)
        return ep_fail(EP_E_UNSUPPORTED, "ep_comm_new: no network \"%s\" here: there is \"%s\"%s%s", name,
                       ep_net_emulated.name, brought ? " and, from the boot, " : "", brought ? brought->name : "");
    if (!host->one_host)
        return ep_fail(
            EP_E_UNSUPPORTED,
            "ep_comm_new: the emulated network needs all ranks on one host; start them with MPI (epkit/mpi.h)");
    *ret_provider = &ep_net_emulated;
    return EP_OK;
}

static ep_status open_network(struct host_comm *host, const ep_boot *boot)
{
    ep_comm *comm = host->comm;
    const struct ep_net_provider *provider = NULL;
    struct ep_net_params params = {
        .rank = comm->rank,
        .nranks = comm->nranks,
        .ranks_per_node = comm->ranks_per_node,
        .channels = comm->config.channels,
        .timeout_ms = comm->config.timeout_ms,
        .emulation = comm->config.emulation,
        .boot = boot,
        .wake = wake_rank,
        .wake_context = host,
    };
    ep_status status = find_network(host, boot, &provider);

    status = host_agree(boot, comm->config.timeout_ms, status);
    if (status == EP_OK)
        status = ep_streams_open(provider, &params, HOST_RING_BYTES, &host->streams);
    return host_agree(boot, comm->config.timeout_ms, status);
}

/* Spinning pays only while every rank of this host has a processor of its own. */
static bool may_spin(const struct host_comm *host)
{
    cpu_set_t set;
    int ranks = 0;

    for (int rank = 0; rank < host->comm->nranks; rank++)
        ranks += host->peers[rank].control != NULL;
    return sched_getaffinity(0, sizeof(set), &set) == 0 && ranks <= CPU_COUNT(&set);
}

ep_status host_comm_open_sized(ep_comm *comm, const ep_boot *boot, size_t bytes)
{
    struct host_comm *host = calloc(1, bytes);
    ep_status status;

    if (!host)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");
    host->comm = comm;
    comm->impl = host;
    host->first = comm->node * comm->ranks_per_node;
    host->nlocal = comm->ranks_per_node;
    host->local = comm->rank - host->first;
    host->rows = ep_rows_get();
    host->shm.fd = -1;
    host->board_row_bytes = board_row_bytes(comm->nranks, comm->nnodes);
    pthread_mutex_init(&host->memory_lock, NULL);
    pthread_mutex_init(&host->queue_lock, NULL);
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&host->queue_changed, &attributes);
    pthread_condattr_destroy(&attributes);

    host->records = calloc((size_t)host->nlocal, sizeof(*host->records));
    host->peers = calloc((size_t)comm->nranks, sizeof(*host->peers));
    if (!host->peers || !host->records) {
        status = ep_fail(EP_E_MEMORY, "ep_comm_new: no memory for %d ranks", comm->nranks);
        goto close;
    }
    for (int rank = 0; rank < comm->nranks; rank++)
        host->peers[rank].pidfd = -1;
    status = ep_shm_new(control_bytes(comm->nranks, comm->nnodes), &host->shm);
    if (status != EP_OK)
        goto close;
    host->control = host->shm.base;
    status = meet(host, boot);
    if (status != EP_OK)
        goto close;
    host->spin = may_spin(host);
    if (comm->nnodes > 1)
        status = open_network(host, boot);
    if (status == EP_OK)
        return EP_OK;
close:
    host_comm_close(comm);
    return status;
}

ep_status host_comm_open(ep_comm *comm, const ep_boot *boot)
{
    return host_comm_open_sized(comm, boot, sizeof(struct host_comm));
}

void host_leave_group(struct host_comm *host)
{
    if (!host->control)
        return;
    atomic_store(&host->control->left, 1);
    if (host->peers)
        host_ring_all(host);
}

void host_comm_close(ep_comm *comm)
{
    struct host_comm *host = host_of(comm);

    if (!host)
        return;
    host_queue_close(host);
    host_plan_drop_pending(host);
    host_leave_group(host);
    ep_streams_free(host->streams);
    host_memory_close(host);
    for (int rank = 0; host->peers && rank < comm->nranks; rank++) {
        ep_shm_done(&host->peers[rank].shm);
        if (host->peers[rank].pidfd >= 0)
            close(host->peers[rank].pidfd);
    }
    free(host->peers);
    free(host->records);
    ep_shm_done(&host->shm);
    pthread_cond_destroy(&host->queue_changed);
    pthread_mutex_destroy(&host->queue_lock);
    pthread_mutex_destroy(&host->memory_lock);
    free(host);
    comm->impl = NULL;
}
