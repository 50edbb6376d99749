/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tests whether NICs access the GPU memory that they have registered: registration succeeds although an IOMMU, access
 * control services of PCI bridges or a hypervisor block the transfers, and what is written is then lost without an
 * error. Each rank sends a pattern to its rail peers, from GPU memory and to GPU memory where it has some.
 */
#include "backend/cuda/direct.h"

#include "backend/cuda/device.h"
#include "base/backoff.h"
#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
    struct ep_net_buffer buffer;
    ep_status status;

    for (uint32_t i = 0; i < WORDS; i++)
        p->mine[i] = word_of(p->cuda->group.comm->rank, i);
    p->piece = (struct ep_piece){p->mine, sizeof(p->mine)};
    if (!direct)
        return EP_OK;
    EP_TRY(cuda_direct_alloc(memory, CUDA_DIRECT_GRANULE, &buffer));
    status = p->net->ops->attach(p->net, &buffer);
    cuda_direct_close(&buffer);
    EP_TRY(status);
    EP_TRY(cuda_transfer(p->cuda, &(struct cuda_transfer){buffer.memory, p->mine, sizeof(p->mine)}, 1));
    p->piece.data = buffer.memory;
    return EP_OK;
}

static ep_status check_arrived(struct probe *p, int rank, const unsigned char *head, size_t bytes)
{
    const unsigned char *payload = p->net->payload + (head + sizeof(uint64_t) * 2 - p->net->region);

    if (bytes != 2 * sizeof(uint64_t) + sizeof(p->received))
        return ep_fail(EP_E_MISMATCH, "rank %d sent a test message of %zu bytes", rank, bytes);
    EP_TRY(cuda_transfer(p->cuda, &(struct cuda_transfer){p->received, payload, sizeof(p->received)}, 1));
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

        if (node == p->net->node)
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
