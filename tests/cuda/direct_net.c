/* SPDX-License-Identifier: Apache-2.0 */
#include "direct_net.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_ATTACHED = 64, POISON = 0xa5 };

/* What each rank tells the others about its endpoint. Region and counters are one file: counters, then the region. */
struct hello {
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
    bool registered;                 /* `shared` is registered with CUDA */
};

struct attached {
    const unsigned char *memory;
    size_t bytes;
};

struct direct_net {
    struct ep_net net;
    struct peer mine, *peers; /* [nnodes] */
    int fd, device, nnodes;
    cudaStream_t stream;
    cudaEvent_t copied; /* the last put */
    bool lossy, busy;   /* busy: `copied` may be open */
    int most_devices;   /* buffers of GPU memory that may be attached */
    struct attached attached[MAX_ATTACHED];
    _Atomic int n_attached;
};

static struct direct_net *direct_of(struct ep_net *net)
{
    return (struct direct_net *)net;
}

static bool is_attached(const struct direct_net *d, const unsigned char *from, size_t bytes)
{
    for (int i = 0; i < atomic_load(&d->n_attached); i++)
        if (from >= d->attached[i].memory && from + bytes <= d->attached[i].memory + d->attached[i].bytes)
            return true;
    return false;
}

static bool is_device(const void *memory)
{
    struct cudaPointerAttributes attributes;

    return cudaPointerGetAttributes(&attributes, memory) == cudaSuccess && attributes.type == cudaMemoryTypeDevice;
}

/*
 * By the copy engine, which reads and writes device and host memory. Host memory that is not attached is read at once.
 * From host to host memory the processor copies: the copy engine refuses what lies in two registered ranges, as a slot
 * of low latency may.
 */
static bool copy(struct direct_net *d, void *to, const void *from, size_t bytes)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaError_t error = cudaSetDevice(d->device);
    bool attached = is_attached(d, from, bytes);

    cudaThreadExchangeStreamCaptureMode(&mode);
    if (!is_device(to) && !is_device(from)) {
        cudaThreadExchangeStreamCaptureMode(&mode);
        memcpy(to, from, bytes);
        return true;
    }
    if (!attached && is_device(from)) {
        fprintf(stderr, "direct_net: a put of %zu bytes from GPU memory that was not attached\n", bytes);
        error = cudaErrorInvalidValue;
    }
    if (error == cudaSuccess && d->lossy && is_device(to))
        error = cudaMemsetAsync(to, POISON, bytes, d->stream);
    else if (error == cudaSuccess)
        error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, d->stream);
    if (error == cudaSuccess)
        error = attached ? cudaEventRecord(d->copied, d->stream) : cudaStreamSynchronize(d->stream);
    d->busy = attached;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (error != cudaSuccess)
        fprintf(stderr, "direct_net: a copy of %zu bytes: %s\n", bytes, cudaGetErrorString(error));
    return error == cudaSuccess;
}

static bool is_idle(struct direct_net *d)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;

    cudaThreadExchangeStreamCaptureMode(&mode);
    if (d->busy && cudaEventQuery(d->copied) == cudaSuccess)
        d->busy = false;
    cudaThreadExchangeStreamCaptureMode(&mode);
    return !d->busy;
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

/* After all puts. */
static bool direct_signal(struct ep_net *net, int peer, int channel, uint32_t index, uint64_t add)
{
    (void)channel;
    if (!is_idle(direct_of(net)))
        return false;
    atomic_fetch_add(&direct_of(net)->peers[peer].counters[index], add);
    return true;
}

static bool direct_flush_test(struct ep_net *net, int peer, int channel)
{
    (void)peer;
    (void)channel;
    return is_idle(direct_of(net));
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

static bool exports_dmabuf(int device)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*get_attribute)(int *value, int attribute, int device) = NULL;
    int value = 0;

    if (driver)
        *(void **)&get_attribute = dlsym(driver, "cuDeviceGetAttribute");
    /* CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED */
    return get_attribute && get_attribute(&value, 124, device) == 0 && value;
}

static ep_status direct_attach(struct ep_net *net, const struct ep_net_buffer *buffer)
{
    struct direct_net *d = direct_of(net);
    int n = atomic_load(&d->n_attached), device = 0;

    if (buffer->device && d->most_devices-- == 0)
        return ep_fail(EP_E_UNSUPPORTED, "network direct: no more GPU memory can be attached");
    if (n == MAX_ATTACHED || buffer->device != is_device(buffer->memory))
        return ep_fail(EP_E_SYSTEM, "network direct: buffer %d of %zu bytes is wrong", n, buffer->bytes);
    cudaGetDevice(&device);
    if (buffer->device && exports_dmabuf(device) && buffer->dmabuf_fd < 0)
        return ep_fail(EP_E_SYSTEM, "network direct: GPU memory without its dma-buf");
    d->attached[n] = (struct attached){buffer->memory, buffer->bytes};
    atomic_store(&d->n_attached, n + 1);
    return EP_OK;
}

static void direct_free(struct ep_net *net)
{
    struct direct_net *d = direct_of(net);

    for (int node = 0; d->peers && node < d->nnodes; node++) {
        if (d->peers[node].mapped)
            cudaIpcCloseMemHandle(d->peers[node].payload);
        if (d->peers[node].registered)
            cudaHostUnregister(d->peers[node].shared);
        if (d->peers[node].shared)
            munmap(d->peers[node].shared, d->peers[node].shared_bytes);
    }
    if (d->mine.shared)
        munmap(d->mine.shared, d->mine.shared_bytes);
    if (d->stream) {
        cudaStreamSynchronize(d->stream);
        cudaStreamDestroy(d->stream);
    }
    if (d->copied)
        cudaEventDestroy(d->copied);
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

static bool make_memory(struct direct_net *d, const struct ep_net_params *params, struct hello *mine)
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

static bool open_peer(struct direct_net *d, const struct hello *theirs, struct peer *peer)
{
    char path[64];
    bool ok;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/fd/%d", theirs->pid, theirs->fd);
    fd = open(path, O_RDWR | O_CLOEXEC);
    ok = fd >= 0 && map_shared(fd, theirs->counter_bytes, ep_net_whole_pages(d->net.region_bytes), peer);
    if (fd >= 0)
        close(fd);
    if (!ok)
        return false;
    if (!theirs->has_payload) {
        /* CUDA's copy from a GPU to memory that is not registered waits for the kernels of a graph. */
        peer->registered = cudaHostRegister(peer->shared, peer->shared_bytes, cudaHostRegisterPortable) == cudaSuccess;
        return peer->registered;
    }
    peer->payload = theirs->payload;
    if (theirs->pid == getpid())
        return true;
    peer->mapped =
        cudaIpcOpenMemHandle((void **)&peer->payload, theirs->handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
    return peer->mapped;
}

static ep_status connect_peers(struct direct_net *d, const struct ep_net_params *params, struct hello *mine)
{
    struct hello *all = calloc((size_t)params->nranks, sizeof(*all));
    ep_status status =
        all ? params->boot->allgather(params->boot->context, mine, sizeof(*mine), params->timeout_ms, all)
            : EP_E_MEMORY;

    for (int rank = 0; status == EP_OK && rank < params->nranks; rank++)
        if (ep_net_is_present(params, rank) && !all[rank].ok)
            status = ep_fail(EP_E_SYSTEM, "network direct: rank %d could not make its memory", rank);
    for (int node = 0; status == EP_OK && node < d->nnodes; node++) {
        int rank = ep_net_rail_rank(params->rank, params->ranks_per_node, node);

        if (node != d->net.node && ep_net_is_present(params, rank) && !open_peer(d, &all[rank], &d->peers[node]))
            status = ep_fail(EP_E_SYSTEM, "network direct: the memory of node %d cannot be mapped", node);
    }
    free(all);
    return status;
}

/* A variant of the network. `most_devices` is huge if there is no limit. */
struct variant {
    bool mixed, lossy;
    int most_devices;
};

/* The endpoint of the proxy: that of the group has a wake callback, and that of low latency has blocks. */
static bool is_of_proxy(const struct ep_net_params *params)
{
    return !params->wake && !params->block_ranks;
}

/* Only what the GPU cannot do is a reason to skip. */
static ep_status check_payload(const struct ep_net_params *params)
{
    int device = 0, supported = 0, ordering = 0;

    if (!is_of_proxy(params) || params->payload)
        return EP_OK;
    if (cudaGetDevice(&device) != cudaSuccess ||
        cudaDeviceGetAttribute(&supported, cudaDevAttrGPUDirectRDMASupported, device) != cudaSuccess ||
        cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device) != cudaSuccess)
        return ep_fail(EP_E_SYSTEM, "network direct: the attributes of GPU %d", device);
    if (supported && ordering >= cudaGPUDirectRDMAWritesOrderingOwner)
        return ep_fail(EP_E_SYSTEM, "network direct: GPU %d has GPUDirect RDMA, which is not used", device);
    return ep_fail(EP_E_UNSUPPORTED, "network direct: GPU %d has no GPUDirect RDMA", device);
}

static ep_status direct_open(const struct ep_net_provider *provider, const struct ep_net_params *params,
                             struct ep_net **ret_net)
{
    const struct variant *variant = provider->context;
    struct hello mine = {.ok = 0};
    struct ep_net_params own = *params;
    struct direct_net *d;

    /* The lossy one is opened again without payload. */
    if (!variant->lossy)
        EP_TRY(check_payload(params));
    if (variant->mixed && params->rank / params->ranks_per_node % 2)
        own.payload = NULL;
    EP_TRY(ep_net_new(&direct_ops, sizeof(*d), params, ret_net));
    d = (struct direct_net *)*ret_net;
    d->net.payload_base = UINT64_C(1) << 62;
    d->net.copies = true;
    d->nnodes = d->net.nnodes;
    d->fd = -1;
    d->lossy = variant->lossy;
    d->most_devices = variant->most_devices;
    d->peers = calloc((size_t)d->nnodes, sizeof(*d->peers));
    mine.ok = d->peers && cudaGetDevice(&d->device) == cudaSuccess &&
              cudaStreamCreateWithFlags(&d->stream, cudaStreamNonBlocking) == cudaSuccess &&
              cudaEventCreateWithFlags(&d->copied, cudaEventDisableTiming) == cudaSuccess &&
              make_memory(d, &own, &mine);
    return ep_net_opened(connect_peers(d, params, &mine), ret_net);
}

static bool uses_device_memory(void)
{
    return true;
}

const struct ep_net_provider *direct_net_find(const char *name)
{
    static const struct variant all = {.most_devices = MAX_ATTACHED},
                                mixed = {.mixed = true, .most_devices = MAX_ATTACHED},
                                lossy = {.lossy = true, .most_devices = MAX_ATTACHED}, limited = {.most_devices = 1};
    static const struct ep_net_provider providers[] = {
        {EP_NET_ABI, "direct", direct_open, (void *)&all, uses_device_memory},
        {EP_NET_ABI, "direct-mixed", direct_open, (void *)&mixed, uses_device_memory},
        {EP_NET_ABI, "direct-lossy", direct_open, (void *)&lossy, uses_device_memory},
        {EP_NET_ABI, "direct-limited", direct_open, (void *)&limited, uses_device_memory},
    };

    for (size_t i = 0; i < sizeof(providers) / sizeof(providers[0]); i++)
        if (strcmp(name, providers[i].name) == 0)
            return &providers[i];
    return NULL;
}
