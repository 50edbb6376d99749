/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of an endpoint of the verbs network: region, payload region, copies, and what the caller attaches.
 *
 * GPU memory is registered by its dma-buf (kernel 5.12, rdma-core 34), or by its address where a peer-memory module
 * such as nvidia_peermem is loaded.
 */
#include "base/log.h"
#include "net/verbs_near.h"
#include "net/verbs_net.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static ep_status register_host(struct verbs_net *v, void *memory, size_t bytes, int access, struct ibv_mr **ret_mr)
{
    struct rlimit limit = {0};
    int error;

    *ret_mr = v->device.library->reg_mr(v->pd, memory, bytes, access);
    if (*ret_mr)
        return EP_OK;
    error = errno;
    getrlimit(RLIMIT_MEMLOCK, &limit);
    if (error == ENOMEM && limit.rlim_cur != RLIM_INFINITY)
        return ep_fail(EP_E_MEMORY,
                       "network verbs: registering %zu bytes: the limit of locked memory is %llu bytes (ulimit -l, "
                       "RLIMIT_MEMLOCK): raise it",
                       bytes, (unsigned long long)limit.rlim_cur);
    return ep_fail_errno(EP_E_SYSTEM, error, "network verbs: registering %zu bytes with %s", bytes, v->device.name);
}

static ep_status register_buffer(struct verbs_net *v, const struct ep_net_buffer *buffer, size_t bytes, int access,
                                 struct ibv_mr **ret_mr)
{
    const struct verbs_library *library = v->device.library;
    uintptr_t address = (uintptr_t)buffer->memory;
    const char *no_dmabuf = "it has no dma-buf";
    int error;

    if (!buffer->device)
        return register_host(v, buffer->memory, bytes, access, ret_mr);
    *ret_mr = NULL;
    if (!v->device.gpu_memory)
        return ep_fail(EP_E_UNSUPPORTED, "network verbs: GPU memory is not used (EPKIT_VERBS_GPU_MEMORY=0)");
    if (v->device.gpu_memory < 0 && v->device.nearness >= 0 && v->device.nearness < VERBS_NEAR_BRIDGE)
        return ep_fail(EP_E_UNSUPPORTED,
                       "network verbs: %s is not below the same PCI bridge as the GPU: GPU memory is not used, unless "
                       "EPKIT_VERBS_GPU_MEMORY=1",
                       v->device.name);
    if (buffer->dmabuf_fd >= 0 && !library->reg_dmabuf_mr)
        no_dmabuf = "libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34)";
    else if (buffer->dmabuf_fd >= 0) {
        *ret_mr = library->reg_dmabuf_mr(v->pd, 0, bytes, address, buffer->dmabuf_fd, access);
        no_dmabuf = *ret_mr ? "" : strerror(errno);
    }
    if (!*ret_mr)
        *ret_mr = library->reg_mr(v->pd, buffer->memory, bytes, access);
    if (*ret_mr)
        return EP_OK;
    error = errno;
    return ep_fail(EP_E_UNSUPPORTED,
                   "network verbs: %s cannot access %zu bytes of GPU memory: by dma-buf: %s; by address: %s (module "
                   "nvidia_peermem)",
                   v->device.name, bytes, no_dmabuf, strerror(error));
}

/* --- region, payload and copies --- */

static ep_status make_copies(struct verbs_net *v)
{
    struct ep_net *net = &v->net;
    size_t received = VERBS_RECEIVES * sizeof(struct verbs_record), stride;

    v->ring_bytes = net->region_bytes < EP_NET_MAX_PUT ? net->region_bytes : EP_NET_MAX_PUT;
    v->ring_bytes = ep_net_whole_pages(v->ring_bytes);
    stride = v->ring_bytes + received;
    v->copies_bytes = ep_net_whole_pages(stride * (size_t)v->n);
    v->copies = aligned_alloc((size_t)sysconf(_SC_PAGESIZE), v->copies_bytes);
    if (!v->copies)
        return ep_fail(EP_E_MEMORY, "network verbs: no memory for copies of %zu bytes", v->copies_bytes);
    for (int i = 0; i < v->n; i++) {
        v->conns[i].ring = v->copies + stride * (size_t)i;
        v->conns[i].received = (struct verbs_record *)(v->conns[i].ring + v->ring_bytes);
    }
    net->wire_bytes = v->copies_bytes;
    return register_host(v, v->copies, v->copies_bytes, IBV_ACCESS_LOCAL_WRITE, &v->copies_mr);
}

ep_status verbs_memory_open(struct verbs_net *v, const struct ep_net_buffer *payload)
{
    const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    struct ep_net *net = &v->net;
    char before[EP_ERROR_TEXT_BYTES];

    EP_TRY(ep_net_memory_new(net));
    EP_TRY(make_copies(v));
    EP_TRY(register_host(v, net->region, net->region_bytes, access, &v->region_mr));
    net->payload_base = VERBS_PAYLOAD_BASE;
    net->copies = true;
    if (!payload)
        return EP_OK;
    if (payload->bytes < net->region_bytes)
        return ep_fail(EP_E_ARG, "network verbs: a payload region of %zu bytes, %zu are needed", payload->bytes,
                       net->region_bytes);
    snprintf(before, sizeof(before), "%s", ep_last_error());
    if (register_buffer(v, payload, net->region_bytes, access, &v->payload_mr) == EP_OK)
        net->payload = payload->memory;
    else
        ep_log(EP_LOG_WARNING, "%s; what peers send is received in host memory", ep_last_error());
    ep_set_last_error(before);
    return EP_OK;
}

void verbs_memory_close(struct verbs_net *v)
{
    struct ibv_mr *own[] = {v->payload_mr, v->region_mr, v->copies_mr};
    unsigned n = atomic_load(&v->n_sources);

    for (unsigned i = 0; i < n; i++)
        v->device.library->dereg_mr(v->sources[i].mr);
    for (size_t i = 0; i < sizeof(own) / sizeof(own[0]); i++)
        if (own[i])
            v->device.library->dereg_mr(own[i]);
    free(v->copies);
}

/* --- sources --- */

ep_status verbs_attach(struct ep_net *net, const struct ep_net_buffer *buffer)
{
    struct verbs_net *v = (struct verbs_net *)net;
    unsigned n = atomic_load(&v->n_sources);
    struct verbs_source *source = &v->sources[n];

    if (n == VERBS_SOURCES)
        return ep_fail(EP_E_UNSUPPORTED, "network verbs: %d buffers are registered already", VERBS_SOURCES);
    *source = (struct verbs_source){.begin = buffer->memory, .bytes = buffer->bytes, .device = buffer->device};
    if (register_buffer(v, buffer, buffer->bytes, IBV_ACCESS_LOCAL_WRITE, &source->mr) != EP_OK)
        return EP_E_UNSUPPORTED;
    atomic_store_explicit(&v->n_sources, n + 1, memory_order_release);
    return EP_OK;
}

/* The newest first: the caller's buffers grow, and the old ones are no longer put. */
const struct verbs_source *verbs_find_source(const struct verbs_net *v, const unsigned char *src, size_t bytes)
{
    for (unsigned i = atomic_load_explicit(&v->n_sources, memory_order_acquire); i > 0; i--) {
        const struct verbs_source *source = &v->sources[i - 1];
        size_t at = (size_t)((uintptr_t)src - (uintptr_t)source->begin);

        if (at < source->bytes && bytes <= source->bytes - at)
            return source;
    }
    return NULL;
}
