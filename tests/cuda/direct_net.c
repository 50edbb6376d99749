/* SPDX-License-Identifier: Apache-2.0 */
#include "direct_net.h"

#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* What each rank tells the others about its endpoint. Region and counters are one file: counters, then the region. */
struct introduction {
    int ok, pid, fd, has_payload;
    size_t counter_bytes;
    void *payload;
    cudaIpcMemHandle_t handle;
};

struct peer {
    unsigned char *shared; /* its counters and region, mapped here */
    size_t shared_bytes;
    _Atomic uint64_t *counters;
    unsigned char *region, *payload; /* payload: device memory, or the region */
    bool mapped;                     /* payload was opened by its handle */
};

struct direct_net {
    struct ep_net net;
    struct peer mine, *peers; /* [nnodes] */
    int fd, device, nnodes;
    cudaStream_t stream;
};

static struct direct_net *direct_of(struct ep_net *net)
{
    return (struct direct_net *)net;
}

/* By the copy engine, which reads and writes device and host memory. */
static bool copy(struct direct_net *d, void *to, const void *from, size_t bytes)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaSetDevice(d->device);

    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error == cudaSuccess)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, d->stream);
    if (error == cudaSuccess)
        error = cudaStreamSynchronize(d->stream);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess)
        fprintf(stderr, "direct_net: a copy of %zu bytes: %s\n", bytes, cudaGetErrorString(error));
    return error == cudaSuccess;
}

static bool direct_put(struct ep_net *net, int peer, int channel, uint64_t offset, const void *src, size_t bytes)
{
    struct direct_net *d = direct_of(net);
    struct peer *to = &d->peers[peer];
    uint64_t at = offset < net->payload_base ? offset : offset - net->payload_base;

    (void)channel;
    if (at > net->region_bytes || bytes > net->region_bytes - at)
        return false;
    if (offset >= net->payload_base)
        return copy(d, to->payload + at, src, bytes);
    memcpy(to->region + at, src, bytes);
    return true;
}

static bool direct_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    (void)channel;
    atomic_fetch_add(&direct_of(net)->peers[peer].counters[index], add);
    return true;
}

static bool direct_flush_test(struct ep_net *net, int peer, int channel)
{
    (void)net;
    (void)peer;
    (void)channel;
    return true; /* put() waits for its copy */
}

static ep_status direct_progress(struct ep_net *net, bool *ret_moved)
{
    struct direct_net *d = direct_of(net);

    *ret_moved = false;
    for (uint32_t i = 0; i < net->n_signals; i++) {
        uint64_t now = atomic_load(&d->mine.counters[i]);

        *ret_moved |= now != net->signals[i];
        net->signals[i] = now;
    }
    return EP_OK;
}

static ep_status direct_revoke(struct ep_net *net, int peer)
{
    (void)net;
    return ep_fail(EP_E_UNSUPPORTED, "network direct: node %d cannot be revoked", peer);
}

/* Copies need no registration. */
static ep_status direct_attach(struct ep_net *net, const struct ep_net_buffer *buffer)
{
    (void)net;
    (void)buffer;
    return EP_OK;
}

static void direct_free(struct ep_net *net)
{
    struct direct_net *d = direct_of(net);

    for (int node = 0; d->peers && node < d->nnodes; node++) {
        if (d->peers[node].mapped)
            cudaIpcCloseMemHandle(d->peers[node].payload);
        if (d->peers[node].shared)
            munmap(d->peers[node].shared, d->peers[node].shared_bytes);
    }
    if (d->mine.shared)
        munmap(d->mine.shared, d->mine.shared_bytes);
    if (d->stream)
        cudaStreamDestroy(d->stream);
    if (d->fd >= 0)
        close(d->fd);
    free(net->signals);
    free(d->peers);
    free(d);
}

static const struct ep_net_ops direct_ops = {.name = "direct",
                                             .put = direct_put,
                                             .signal = direct_signal,
                                             .flush_test = direct_flush_test,
                                             .progress = direct_progress,
                                             .free = direct_free,
                                             .revoke = direct_revoke,
                                             .attach = direct_attach};

/* Maps the file of a rank: its own, or a peer's. */
static bool map_shared(int fd, size_t counter_bytes, size_t region_bytes, struct peer *peer)
{
    peer->shared_bytes = counter_bytes + region_bytes;
    peer->shared = mmap(NULL, peer->shared_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (peer->shared == MAP_FAILED) {
        peer->shared = NULL;
        return false;
    }
    peer->counters = (_Atomic uint64_t *)(void *)peer->shared;
    peer->region = peer->payload = peer->shared + counter_bytes;
    return true;
}

static bool make_memory(struct direct_net *d, const struct ep_net_params *params, struct introduction *mine)
{
    struct ep_net *net = &d->net;
    size_t region = ep_net_whole_pages(net->region_bytes);

    mine->counter_bytes = ep_net_whole_pages(net->n_signals * sizeof(*net->signals));
    d->fd = memfd_create("direct_net", MFD_CLOEXEC);
    net->signals = calloc(net->n_signals, sizeof(*net->signals));
    if (d->fd < 0 || !net->signals || ftruncate(d->fd, (off_t)(mine->counter_bytes + region)) != 0 ||
        !map_shared(d->fd, mine->counter_bytes, region, &d->mine))
        return false;
    net->region = net->payload = d->mine.region;
    net->wire_bytes = 1;
    mine->pid = getpid();
    mine->fd = d->fd;
    if (!params->payload)
        return true;
    net->payload = params->payload->memory;
    mine->payload = params->payload->memory;
    mine->has_payload = 1;
    return cudaIpcGetMemHandle(&mine->handle, mine->payload) == cudaSuccess;
}

static bool open_peer(struct direct_net *d, const struct introduction *theirs, struct peer *peer)
{
    char path[64];
    bool ok;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/fd/%d", theirs->pid, theirs->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    ok = fd >= 0 && map_shared(fd, theirs->counter_bytes, ep_net_whole_pages(d->net.region_bytes), peer);
    if (fd >= 0)
        close(fd);
    if (!ok || !theirs->has_payload)
        return ok;
    peer->payload = theirs->payload;
    if (theirs->pid == getpid())
        return true;
    peer->mapped =
        cudaIpcOpenMemHandle((void **)&peer->payload, theirs->handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    return peer->mapped;
}

static ep_status connect_peers(struct direct_net *d, const struct ep_net_params *params, struct introduction *mine)
{
    struct introduction *all = calloc((size_t)params->nranks, sizeof(*all));
    ep_status status =
        all ? params->boot->allgather(params->boot->context, mine, sizeof(*mine), params->timeout_ms, all)
            : EP_E_MEMORY;

    for (int rank = 0; status == EP_OK && rank < params->nranks; rank++)
        if (!all[rank].ok)
            status = ep_fail(EP_E_SYSTEM, "network direct: rank %d could not make its memory", rank);
    for (int node = 0; status == EP_OK && node < d->nnodes; node++)
        if (node != d->net.node &&
            !open_peer(d, &all[ep_net_rail_rank(params->rank, params->ranks_per_node, node)], &d->peers[node]))
            status = ep_fail(EP_E_SYSTEM, "network direct: the memory of node %d cannot be mapped", node);
    free(all);
    return status;
}

static ep_status open_direct(const struct ep_net_params *params, struct ep_net **ret_net)
{
    struct introduction mine = {.ok = 0};
    struct direct_net *d = calloc(1, sizeof(*d));
    ep_status status;

    if (!d)
        return ep_fail(EP_E_MEMORY, "network direct: no memory");
    d->net = ep_net_init(&direct_ops, params);
    d->net.payload_base = params->region_bytes;
    d->nnodes = d->net.nnodes;
    d->fd = -1;
    d->peers = calloc((size_t)d->nnodes, sizeof(*d->peers));
    mine.ok = d->peers && cudaGetDevice(&d->device) == cudaSuccess &&
              cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking) == cudaSuccess &&
              make_memory(d, params, &mine);
    status = connect_peers(d, params, &mine);
    if (status == EP_OK)
        *ret_net = &d->net;
    else
        direct_free(&d->net);
    return status;
}

/* The endpoint of the proxy: that of the group has a wake callback, and that of low latency has blocks. */
static ep_status check_payload(const struct ep_net_params *params)
{
    if (!params->wake && !params->block_ranks && !params->payload)
        return ep_fail(EP_E_UNSUPPORTED, "network direct: this GPU has no GPUDirect RDMA");
    return EP_OK;
}

static ep_status open_all(const struct ep_net_provider *provider, const struct ep_net_params *params,
                          struct ep_net **ret_net)
{
    (void)provider;
    EP_TRY(check_payload(params));
    return open_direct(params, ret_net);
}

static ep_status open_mixed(const struct ep_net_provider *provider, const struct ep_net_params *params,
                            struct ep_net **ret_net)
{
    struct ep_net_params mixed = *params;

    (void)provider;
    EP_TRY(check_payload(params));
    if (params->rank / params->ranks_per_node % 2)
        mixed.payload = NULL;
    return open_direct(&mixed, ret_net);
}

const struct ep_net_provider *direct_net_find(const char *name)
{
    static const struct ep_net_provider providers[] = {
        {.abi = EP_NET_ABI, .name = "direct", .open = open_all, .device_memory = true},
        {.abi = EP_NET_ABI, .name = "direct-mixed", .open = open_mixed, .device_memory = true},
    };

    for (size_t i = 0; i < sizeof(providers) / sizeof(providers[0]); i++)
        if (strcmp(name, providers[i].name) == 0)
            return &providers[i];
    return NULL;
}
