/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/arenas.h"
#include "base/backoff.h"
#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static size_t round_up(const struct cuda_arenas *arenas, size_t bytes)
{
    return arenas->direct ? cuda_direct_round_up(bytes) : ep_net_whole_pages(bytes);
}

/* The new size of an arena. */
static size_t grown_size(const struct cuda_arenas *arenas, size_t now, size_t bytes)
{
    size_t more = bytes + bytes / 8, step = now + now / 2;

    return round_up(arenas, more > step ? more : step);
}

/* Sizes of new arenas so that both have at least `bytes`, 0: it has; returns their sum. */
static size_t size_new(const struct cuda_arenas *arenas, size_t bytes, bool ahead, size_t ret_sizes[2])
{
    for (int i = 0; i < 2; i++)
        ret_sizes[i] = arenas->of[i].bytes >= bytes ? 0
                       : ahead                      ? grown_size(arenas, arenas->of[i].bytes, bytes)
                                                    : round_up(arenas, bytes);
    return ret_sizes[0] + ret_sizes[1];
}

static bool exceeds(const struct cuda_arenas *arenas, size_t more)
{
    return more && arenas->limit && (arenas->held > arenas->limit || more > arenas->limit - arenas->held);
}

static ep_status fail_limit(const struct cuda_arenas *arenas, const char *call, size_t more)
{
    return ep_fail(
        EP_E_MEMORY,
        "%s: rows for other nodes need %zu bytes of memory more than the %zu allocated, and the limit is %zu: "
        "raise it, or reserve enough at the beginning (ep_cuda_set_net_memory)",
        call, more, arenas->held, arenas->limit);
}

/* CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD */
#define HANDLE_DMA_BUF 1

/* cuMemGetHandleForAddressRange() of the driver, returns 0 or an error code. */
typedef int get_handle_fn(void *ret_handle, unsigned long long address, size_t bytes, int type,
                          unsigned long long flags);

/* -1: the driver exports none. */
static int export_dmabuf(void *memory, size_t bytes)
{
    get_handle_fn *get_handle;
    int fd = -1;

    if (cuda_find_driver("cuMemGetHandleForAddressRange", (void **)&get_handle) != EP_OK ||
        get_handle(&fd, (uintptr_t)memory, bytes, HANDLE_DMA_BUF, 0) != 0)
        return -1;
    return fd;
}

/* Registers memory with the endpoint, if there is one. If that fails for host memory, the network copies. */
static ep_status attach(struct ep_net *net, void *memory, size_t bytes, bool device)
{
    struct ep_net_buffer buffer = {.memory = memory, .bytes = bytes, .device = device, .dmabuf_fd = -1};
    char before[EP_ERROR_TEXT_BYTES];
    ep_status status = EP_OK;

    snprintf(before, sizeof(before), "%s", ep_last_error());
    if (device)
        buffer.dmabuf_fd = export_dmabuf(memory, bytes);
    if (net && net->ops->attach)
        status = net->ops->attach(net, &buffer);
    cuda_direct_close(&buffer);
    if (status == EP_OK || device)
        return status;
    ep_log(EP_LOG_INFO, "%s; chunks are copied before they are sent", ep_last_error());
    ep_set_last_error(before);
    return EP_OK;
}

ep_status cuda_arenas_attach(const struct cuda_arenas *arenas)
{
    const struct kept_allocation *at = NULL;
    struct cuda_pinned kept;

    while (cuda_kept_next(arenas->memory, &at, &kept)) {
        if (!kept.memory && !arenas->direct)
            return ep_fail(EP_E_UNSUPPORTED,
                           "graphs may send rows from GPU memory, which the network does not access any more");
        EP_TRY(attach(arenas->net, kept.memory ? kept.memory : kept.device, kept.bytes, !kept.memory));
    }
    return EP_OK;
}

/* Memory that cannot be registered stays unused until the communicator closes, since freeing it would wait. */
static ep_status alloc_direct(struct cuda_arenas *arenas, size_t bytes, struct cuda_pinned *ret_made)
{
    ep_status status;
    void *memory;

    EP_TRY(cuda_keep_device(arenas->memory, bytes, &memory));
    status = attach(arenas->net, memory, bytes, true);
    if (status != EP_OK) {
        cuda_kept_retire(arenas->memory);
        arenas->held += bytes;
        return status;
    }
    *ret_made = (struct cuda_pinned){.memory = memory, .device = memory, .bytes = bytes};
    return EP_OK;
}

static ep_status alloc_arena(struct cuda_arenas *arenas, const char *call, size_t bytes, struct cuda_pinned *ret_made)
{
    char before[EP_ERROR_TEXT_BYTES];

    snprintf(before, sizeof(before), "%s", ep_last_error());
    if (arenas->direct) {
        ep_status status = alloc_direct(arenas, bytes, ret_made);

        if (status == EP_OK)
            return EP_OK;
        /* GPU memory may be free again later. */
        arenas->direct = status == EP_E_MEMORY;
        ep_log(EP_LOG_WARNING, "%s; chunks are sent from host memory", ep_last_error());
        if (exceeds(arenas, bytes))
            return fail_limit(arenas, call, bytes);
        ep_set_last_error(before);
    }
    EP_TRY(cuda_keep_pinned(arenas->memory, bytes, ret_made));
    return attach(arenas->net, ret_made->memory, ret_made->bytes, false);
}

static ep_status grow(struct cuda_arenas *arenas, const char *call, size_t bytes, bool ahead)
{
    size_t sizes[2], more = size_new(arenas, bytes, ahead, sizes);

    /* Near the limit, without headroom. */
    if (exceeds(arenas, more))
        more = size_new(arenas, bytes, false, sizes);
    if (exceeds(arenas, more))
        return fail_limit(arenas, call, more);
    for (int i = 0; i < 2; i++) {
        struct cuda_pinned made;

        if (!sizes[i])
            continue;
        EP_TRY(alloc_arena(arenas, call, sizes[i], &made));
        arenas->of[i] = made;
        arenas->held += made.bytes;
    }
    return EP_OK;
}

ep_status cuda_arenas_grow(struct cuda_arenas *arenas, const char *call, size_t bytes)
{
    if (arenas->needed < 2 * bytes)
        arenas->needed = 2 * bytes;
    return grow(arenas, call, bytes, true);
}

ep_status cuda_arenas_reserve(struct cuda_arenas *arenas, const char *call, size_t bytes)
{
    return grow(arenas, call, bytes, false);
}

/* --- GPU memory that NICs read and write -------------------------------------------------------------------------- */

/*
 * The proxy reads the completion of a put in host memory, and the kernels then read the data in GPU memory. Without a
 * flush this is right only if the GPU's own reads see the writes of other devices in their order (CUDA Driver API,
 * CUgpuDirectRDMAWritesOrdering): from Hopper on. On boards with a coherent link to the CPU (C2C) it is not:
 * completions take that link, and data may take PCIe. There the GPU uses the page tables of the host.
 */
ep_status cuda_direct_check(int device)
{
    int supported = 0, ordering = 0, coherent = 0;

    CUDA_TRY(cudaDeviceGetAttribute(&supported, cudaDevAttrGPUDirectRDMASupported, device));
    CUDA_TRY(cudaDeviceGetAttribute(&ordering, cudaDevAttrGPUDirectRDMAWritesOrdering, device));
    CUDA_TRY(cudaDeviceGetAttribute(&coherent, cudaDevAttrPageableMemoryAccessUsesHostPageTables, device));
    if (!supported)
        return ep_fail(EP_E_UNSUPPORTED, "GPU %d does not support GPUDirect RDMA", device);
    if (ordering < cudaGPUDirectRDMAWritesOrderingOwner || coherent)
        return ep_fail(EP_E_UNSUPPORTED, "GPU %d sees writes of NICs in no defined order (GPUDirect RDMA)", device);
    return EP_OK;
}

ep_status cuda_direct_alloc(struct cuda_kept *memory, size_t bytes, struct ep_net_buffer *ret_buffer)
{
    struct ep_net_buffer buffer = EP_NET_BUFFER_INIT;

    buffer.bytes = bytes;
    buffer.device = true;
    EP_TRY(cuda_keep_device(memory, bytes, &buffer.memory));
    buffer.dmabuf_fd = export_dmabuf(buffer.memory, bytes);
    *ret_buffer = buffer;
    return EP_OK;
}

void cuda_direct_close(struct ep_net_buffer *buffer)
{
    if (buffer->dmabuf_fd >= 0)
        close(buffer->dmabuf_fd);
    buffer->dmabuf_fd = -1;
}

/*
 * --- do NICs access the GPU memory that they have registered? ---
 *
 * Registration succeeds although an IOMMU, access control services of PCI bridges or a hypervisor block the transfers,
 * and what is written is then lost without an error. So each rank sends a pattern to its rail peers, from GPU memory
 * and to GPU memory where it has some.
 */

enum { WORDS = 1024 };

struct probe {
    struct cuda_comm *cuda;
    struct ep_streams *streams;
    struct ep_net *net;
    struct ep_piece piece;
    uint32_t mine[WORDS], received[WORDS];
    bool *sent, *arrived; /* [nnodes] */
    ep_status failed;     /* the first failure: this rank goes on, so that its peers need not wait for it */
    char reason[EP_ERROR_TEXT_BYTES];
};

static void note(struct probe *p, ep_status status)
{
    if (status == EP_OK || p->failed != EP_OK)
        return;
    p->failed = status;
    snprintf(p->reason, sizeof(p->reason), "%s", ep_last_error());
}

/* Never 0, which memory may hold before. */
static uint32_t word_of(int rank, uint32_t i)
{
    return ((uint32_t)rank + 1) * UINT32_C(0x9e3779b1) + i * UINT32_C(0x85ebca77) + 1;
}

static ep_status make_source(struct probe *p, struct cuda_kept *memory, bool direct)
{
    void *source;

    for (uint32_t i = 0; i < WORDS; i++)
        p->mine[i] = word_of(p->cuda->group.comm->rank, i);
    p->piece = (struct ep_piece){p->mine, sizeof(p->mine)};
    if (!direct)
        return EP_OK;
    EP_TRY(cuda_keep_device(memory, CUDA_DIRECT_GRANULE, &source));
    EP_TRY(attach(p->net, source, CUDA_DIRECT_GRANULE, true));
    EP_TRY(cuda_transfer(p->cuda, source, p->mine, sizeof(p->mine)));
    p->piece.data = source;
    return EP_OK;
}

static ep_status check_arrived(struct probe *p, int rank, const unsigned char *head, size_t bytes)
{
    const unsigned char *payload = p->net->payload + (head + sizeof(uint64_t) * 2 - p->net->region);

    if (bytes != 2 * sizeof(uint64_t) + sizeof(p->received))
        return ep_fail(EP_E_MISMATCH, "rank %d sent a test message of %zu bytes", rank, bytes);
    EP_TRY(cuda_transfer(p->cuda, p->received, payload, sizeof(p->received)));
    for (uint32_t i = 0; i < WORDS; i++)
        if (p->received[i] != word_of(rank, i))
            return ep_fail(EP_E_DEVICE,
                           "data of rank %d to GPU memory of rank %d was lost, although its NIC accepted it", rank,
                           p->cuda->group.comm->rank);
    return EP_OK;
}

/* Sends to and receives from all peers, as far as they let it. */
static ep_status advance(struct probe *p, bool *ret_open)
{
    const uint64_t head[2] = {0}; /* keeps the pattern aligned */
    bool moved;

    *ret_open = false;
    EP_TRY(ep_streams_progress(p->streams, &moved));
    for (int node = 0; node < p->net->nnodes; node++) {
        size_t bytes = 0;
        const void *message;

        if (node == p->net->node || !ep_group_has_node(&p->cuda->group, node))
            continue;
        if (!p->sent[node])
            p->sent[node] = ep_stream_send(p->streams, node, 0, head, sizeof(head), &p->piece, 1);
        message = p->arrived[node] ? NULL : ep_stream_peek(p->streams, node, 0, &bytes);
        if (message) {
            note(p, check_arrived(p, ep_group_rail(&p->cuda->group, node), message, bytes));
            ep_stream_pop(p->streams, node, 0);
            p->arrived[node] = true;
        }
        if (!p->arrived[node] && ep_streams_ended(p->streams, node))
            return ep_fail(EP_E_PEER_DEAD, "rank %d has ended in a test of the network",
                           ep_group_rail(&p->cuda->group, node));
        *ret_open |= !p->sent[node] || !p->arrived[node];
    }
    *ret_open |= !ep_streams_flushed(p->streams);
    return EP_OK;
}

ep_status cuda_direct_probe(struct cuda_comm *cuda, struct ep_streams *streams, struct cuda_kept *memory)
{
    struct ep_net *net = ep_streams_get_net(streams);
    struct probe *p = calloc(1, sizeof(*p) + 2 * (size_t)net->nnodes * sizeof(bool));
    uint64_t deadline_ns = ep_deadline_ns(cuda->group.comm->config.timeout_ms / 2);
    unsigned tries = 0;
    bool open = true;
    ep_status status = EP_OK;

    if (!p)
        return ep_fail(EP_E_MEMORY, "no memory for a test of the network");
    p->cuda = cuda;
    p->streams = streams;
    p->net = net;
    p->sent = (bool *)(p + 1);
    p->arrived = p->sent + net->nnodes;
    /* If it fails, the pattern is sent from host memory. */
    note(p, make_source(p, memory, net->payload != net->region));
    while (status == EP_OK && open) {
        if (ep_now_ns() >= deadline_ns)
            status = ep_fail(EP_E_TIMEOUT, "a test of the network did not end before half of the deadline");
        else
            status = advance(p, &open);
        if (status == EP_OK && open)
            ep_backoff(&tries);
    }
    note(p, status);
    status = p->failed == EP_OK ? EP_OK : ep_fail(p->failed, "%s", p->reason);
    free(p);
    return status;
}
