/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/net_op.h"
#include "base/backoff.h"
#include "base/log.h"
#include "base/thread.h"
#include "group/collective.h"
#include "group/failure.h"
#include "group/peers.h"
#include "group/wait.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/*
 * Sizes of the streams' rings: large with few nodes, so that a rank that is ahead need not wait. The largest possible
 * row fits into half of the smaller one.
 */
#define RING_BYTES ((size_t)2 << 20)
#define RING_BYTES_MANY ((size_t)1 << 20)
#define CHANNELS 8
#define FEW_NODES 9 /* up to this many nodes: CHANNELS, RING_BYTES each; beyond: one channel, RING_BYTES_MANY */

/* --- one operation, on the proxy ---------------------------------------------------------------------------------- */

static const struct cuda_net_buffers *buffers_of(const struct cuda_net_op *op)
{
    return &op->buffers[op->number % 2].host;
}

static bool has_number(const uint64_t *word, uint64_t number)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= number;
}

static int32_t *cursor(const struct cuda_proxy *p, const struct net_direction_state *side, int node, int channel)
{
    return &side->next[node * p->channels + channel];
}

/* As in struct cuda_net_op_args. */
static void count_chunk(struct cuda_proxy *p, int which)
{
    __atomic_store_n(&p->moved[which], p->moved[which] + 1, __ATOMIC_RELAXED);
}

/* After the change that the kernels must see. */
static void count_event(struct cuda_proxy *p)
{
    __atomic_store_n(&p->words->events, p->words->events + 1, __ATOMIC_RELEASE);
}

/* Sends packed chunks, as far as the channel accepts them. */
static bool send_chunks(struct cuda_proxy *p, struct cuda_net_op *op, int node, int channel)
{
    int32_t *next = cursor(p, &op->out, node, channel);
    bool moved = false;

    while (*next < op->out.chunks[node]) {
        int slot = op->out.first[node] + *next;
        struct net_chunk_header head = {.number = op->number, .chunk = (uint32_t)*next, .bytes = op->out.bytes[slot]};
        struct ep_piece piece = {buffers_of(op)->arena + (size_t)slot * op->slot_bytes, head.bytes};

        memcpy(head.desc, op->desc, sizeof(op->desc));
        if (!has_number(&buffers_of(op)->ready[slot], op->number) ||
            !ep_stream_send(p->streams, node, channel, &head, sizeof(head), &piece, head.bytes ? 1 : 0))
            break;
        *next += p->channels;
        op->out.remaining--;
        moved = true;
        count_chunk(p, p->nnodes);
    }
    return moved;
}

/* Checks the header of a chunk from `rank`, the op descriptor first. */
static ep_status check_head(const struct cuda_proxy *p, const struct cuda_net_op *op, int rank,
                            const struct net_chunk_header *theirs, size_t bytes, int32_t chunk, uint32_t expected)
{
    struct net_chunk_header head = {.number = 0};

    if (bytes >= sizeof(head))
        memcpy(&head, theirs, sizeof(head));
    for (uint32_t word = 0; bytes >= sizeof(head) && word < CUDA_DESC_COMPARED; word++)
        if (head.desc[word] != op->desc[word] &&
            (word != CUDA_DESC_PLAN || (head.desc[CUDA_DESC_PLAN] && op->desc[CUDA_DESC_PLAN])))
            return cuda_fail_disagree(p->cuda, (enum ep_group_phase)op->desc[CUDA_DESC_PHASE], word, rank,
                                      op->desc[word], head.desc[word]);
    if (bytes == sizeof(head) + expected && head.bytes == expected && head.number == op->number &&
        head.chunk == (uint32_t)chunk)
        return EP_OK;
    return ep_fail(
        EP_E_MISMATCH,
        "ranks disagree: rank %d sent %zu bytes, chunk %u of operation %llu between nodes, but rank %d expects "
        "%zu bytes, chunk %d of operation %llu",
        rank, bytes, head.chunk, (unsigned long long)head.number, p->cuda->group.comm->rank, sizeof(head) + expected,
        chunk, (unsigned long long)op->number);
}

/* Publishes received chunks to the kernels, and returns to the network those that they have consumed. */
static ep_status receive_chunks(struct cuda_proxy *p, struct cuda_net_op *op, int node, int channel, bool *ret_moved)
{
    int32_t *next = cursor(p, &op->in, node, channel);
    const struct ep_net *net = ep_streams_get_net(p->streams);
    bool *published = &op->published[node * p->channels + channel];
    int rank = ep_group_rail(&p->cuda->group, node);

    while (*next < op->in.chunks[node]) {
        int slot = op->in.first[node] + *next;

        if (!*published) {
            struct cuda_landed *arrived = &buffers_of(op)->arrived[slot];
            const struct net_chunk_header *head;
            size_t bytes;
            ep_status status;

            head = ep_stream_peek(p->streams, node, channel, &bytes);
            if (!head)
                break;
            status = check_head(p, op, rank, head, bytes, *next, op->in.bytes[slot]);
            if (status != EP_OK)
                return ep_group_set_own_failure(&p->cuda->group, status, rank, op->phase);
            arrived->address =
                (uint64_t)(uintptr_t)(p->payload_device + ((const unsigned char *)(head + 1) - net->region));
            __atomic_store_n(&arrived->number, op->number, __ATOMIC_RELEASE);
            count_event(p);
            *published = *ret_moved = true;
            count_chunk(p, node);
        }
        if (!has_number(&buffers_of(op)->consumed[slot], op->number))
            break;
        ep_stream_pop(p->streams, node, channel);
        *published = false;
        *next += p->channels;
        op->in.remaining--;
        *ret_moved = true;
    }
    return EP_OK;
}

/* A node to which something must still be sent; -1: none. */
static int find_blocked(const struct cuda_proxy *p, const struct cuda_net_op *op)
{
    for (int node = 0; op->out.remaining && node < p->nnodes; node++)
        for (int channel = 0; node != p->node && channel < p->channels; channel++)
            if (*cursor(p, &op->out, node, channel) < op->out.chunks[node])
                return node;
    return ep_streams_unflushed_peer(p->streams);
}

/*
 * Fails the group if a rail peer has left or died and chunks of it are missing: it had sent everything that it was
 * going to send, and nothing received is lost. Returns EP_OK if the network cannot tell. Connections that end while the
 * process lives are reported by the network later.
 */
static ep_status check_missing(const struct cuda_proxy *p, const struct cuda_net_op *op, int node)
{
    struct ep_group *group = &p->cuda->group;
    int rank = ep_group_rail(group, node);
    size_t bytes;
    bool left;

    if (!ep_streams_ended(p->streams, node))
        return EP_OK;
    left = ep_group_has_left(group, rank);
    if (!left && !ep_group_peer_dead(group, rank))
        return EP_OK;
    for (int channel = 0; channel < p->channels; channel++)
        if (*cursor(p, &op->in, node, channel) < op->in.chunks[node] &&
            !ep_stream_peek(p->streams, node, channel, &bytes))
            return ep_group_set_failure(group, left ? EP_E_PEER_LEFT : EP_E_PEER_DEAD, rank, op->phase);
    return EP_OK;
}

static ep_status progress_network(const struct cuda_proxy *p, enum ep_group_phase phase, bool *ret_moved)
{
    return ep_group_net_fail(&p->cuda->group, p->streams, ep_streams_progress(p->streams, ret_moved), phase);
}

/* Sends and receives once with every node. */
static ep_status make_progress(struct cuda_proxy *p, struct cuda_net_op *op, bool *ret_moved)
{
    int blocked;

    EP_TRY(progress_network(p, op->phase, ret_moved));
    for (int node = 0; node < p->nnodes; node++) {
        if (node == p->node)
            continue;
        for (int channel = 0; channel < p->channels; channel++) {
            *ret_moved |= send_chunks(p, op, node, channel);
            EP_TRY(receive_chunks(p, op, node, channel, ret_moved));
        }
        if (op->in.remaining)
            EP_TRY(check_missing(p, op, node));
    }
    if (op->sent)
        return EP_OK;
    blocked = find_blocked(p, op);
    __atomic_store_n(&p->words->blocked, blocked < 0 ? -1 : ep_group_rail(&p->cuda->group, blocked), __ATOMIC_RELAXED);
    if (blocked >= 0)
        return EP_OK;
    op->sent = *ret_moved = true;
    __atomic_store_n(&p->words->sent, op->number, __ATOMIC_RELEASE);
    count_event(p);
    return EP_OK;
}

/* Has the group failed, or been closed? Then nobody reads what is sent, and the kernels end by themselves. */
static bool has_failed(const struct cuda_proxy *p)
{
    uint64_t limit_ns = atomic_load(&p->limit_ns);

    return p->broken || (limit_ns && ep_now_ns() >= limit_ns) ||
           __atomic_load_n(&p->cuda->report->abort, __ATOMIC_ACQUIRE);
}

/* Validates the changing lists, which the device has written. */
static ep_status check_lists(const struct cuda_proxy *p, const struct cuda_list_side *lists)
{
    int64_t end = 0;

    for (int node = 0; node < p->nnodes; node++) {
        const struct cuda_node_range *rail = &lists->rail[node];

        if (rail->first < end || rail->n < 0 || rail->n > lists->node_capacity ||
            (int64_t)rail->first + rail->n > lists->capacity)
            return ep_fail(
                EP_E_DEVICE,
                "operation %llu between nodes: the device wrote an invalid list for node %d: %d tokens from %d on",
                (unsigned long long)p->ring.number, node, rail->n, rail->first);
        end = (int64_t)rail->first + rail->n;
    }
    return EP_OK;
}

static ep_status begin_side(const struct cuda_proxy *p, const struct cuda_net_op *op, struct net_direction_state *side)
{
    if (side->changing.capacity) {
        EP_TRY(check_lists(p, &side->changing));
        cuda_net_op_measure(p, op, &side->changing, side);
    }
    side->remaining = side->n_chunks;
    for (int node = 0; node < p->nnodes; node++)
        for (int channel = 0; channel < p->channels; channel++)
            *cursor(p, side, node, channel) = channel;
    return EP_OK;
}

static void run_op(struct cuda_proxy *p, struct cuda_net_op *op)
{
    struct ep_group *group = &p->cuda->group;
    ep_status status = begin_side(p, op, &op->out);
    unsigned tries = 0;

    if (status == EP_OK)
        status = begin_side(p, op, &op->in);
    if (status != EP_OK) {
        ep_group_set_own_failure(group, status, group->comm->rank, op->phase);
        p->broken = true;
    }
    op->number = p->ring.number;
    op->sent = false;
    memset(op->published, 0, (size_t)p->nnodes * (size_t)p->channels);
    while (!has_failed(p) && !(op->sent && !op->in.remaining)) {
        bool moved = false;

        if (make_progress(p, op, &moved) != EP_OK) {
            /* The monitor stops the kernels. */
            p->broken = true;
            return;
        }
        if (moved)
            tries = 0;
        else
            ep_backoff(&tries);
    }
}

/* Receives for operations that this rank's device has not begun, so that peers need not wait for space. */
static bool progress_idle(struct cuda_proxy *p)
{
    bool moved = false;

    p->broken |= progress_network(p, EP_GROUP_IDLE, &moved) != EP_OK;
    return moved && !p->broken;
}

/* Waits for the next operation that the device has posted; NULL: the proxy is stopped and none will follow. */
static struct cuda_net_op *await_op(struct cuda_proxy *p)
{
    struct ep_group *group = &p->cuda->group;
    unsigned tries = 0;

    for (;;) {
        enum cuda_ring_state state = cuda_op_ring_state(&p->ring);
        struct cuda_ring_op *next;
        ep_status status = cuda_op_ring_pop(&p->ring, &next);

        if (status != EP_OK) {
            ep_group_set_own_failure(group, status, group->comm->rank, EP_GROUP_IDLE);
            p->broken = true;
        }
        if (next || state == CUDA_RING_STOPPED)
            return (struct cuda_net_op *)next;
        if (has_failed(p))
            cuda_op_ring_await_stop(&p->ring);
        else if (state == CUDA_RING_PENDING && progress_idle(p))
            tries = 0;
        else if (state == CUDA_RING_PENDING || tries < EP_BACKOFF_YIELDS)
            ep_backoff(&tries);
        else
            cuda_op_ring_sleep(&p->ring);
    }
}

static void *proxy_main(void *argument)
{
    struct cuda_proxy *p = argument;
    struct cuda_net_op *op;

    while ((op = await_op(p))) {
        run_op(p, op);
        if (!op->base.captured)
            cuda_op_ring_remove(&p->ring, &op->base);
    }
    return NULL;
}

/* --- opening and closing ----------------------------------------------------------------------------------------- */

static ep_status open_words(struct cuda_proxy *p)
{
    size_t bytes = sizeof(*p->words) + ((size_t)p->nnodes + 1) * sizeof(*p->moved);
    struct cuda_pinned words;

    EP_TRY(cuda_keep_pinned(&p->memory, bytes, &words));
    p->words = words.memory;
    p->words_device = words.device;
    p->moved = (uint64_t *)(void *)(p->words + 1);
    return EP_OK;
}

/* Makes the memory that the kernels read accessible to them. */
static ep_status open_payload(struct cuda_proxy *p)
{
    struct ep_net *net = ep_streams_get_net(p->streams);

    if (net->payload != net->region) {
        p->payload_device = net->payload;
        return EP_OK;
    }
    CUDA_TRY(cudaHostRegister(net->region, net->region_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    p->region = net->region;
    CUDA_TRY(cudaHostGetDevicePointer((void **)&p->payload_device, p->region, 0));
    return EP_OK;
}

/* GPU memory for what peers send, if the network may be able to use it. */
static ep_status alloc_payload(struct cuda_proxy *p, const struct ep_net_params *params, size_t ring_bytes,
                               struct ep_net_buffer *ret_buffer)
{
    size_t bytes;

    EP_TRY(cuda_direct_check(p->cuda->device));
    EP_TRY(ep_streams_region_bytes(params, ring_bytes, &bytes));
    EP_TRY(cuda_direct_alloc(&p->net_memory, cuda_direct_round_up(bytes), ret_buffer));
    /* The pattern of an earlier communicator must not be taken for that of this one. */
    CUDA_TRY(cudaMemsetAsync(ret_buffer->memory, 0, ret_buffer->bytes, p->cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(p->cuda->internal_stream));
    return EP_OK;
}

/* `direct`: payload is to be received in GPU memory, if that is possible. */
static ep_status open_streams(struct cuda_proxy *p, const ep_boot *boot, bool direct)
{
    struct ep_net_buffer payload = EP_NET_BUFFER_INIT;
    size_t ring_bytes = p->channels > 1 ? RING_BYTES : RING_BYTES_MANY;
    struct ep_net_provider provider;
    struct ep_net_params params;
    char before[EP_ERROR_TEXT_BYTES];
    struct ep_net *net;
    ep_status status;

    ep_group_net_describe(&p->cuda->group, &provider, &params);
    params.boot = boot;
    params.channels = p->channels;
    params.wake = NULL;
    if (direct) {
        snprintf(before, sizeof(before), "%s", ep_last_error());
        if (alloc_payload(p, &params, ring_bytes, &payload) == EP_OK)
            params.payload = &payload;
        else
            ep_log(EP_LOG_WARNING, "%s; rows for other nodes pass through host memory", ep_last_error());
        ep_set_last_error(before);
    }
    status = ep_streams_open(&provider, &params, ring_bytes, &p->streams);
    cuda_direct_close(&payload);
    EP_TRY(status);
    net = ep_streams_get_net(p->streams);
    p->arenas.net = net;
    p->arenas.direct = net->payload != net->region;
    return EP_OK;
}

static void close_network(struct cuda_proxy *p, bool abandons)
{
    if (p->region)
        cudaHostUnregister(p->region);
    p->region = NULL;
    if (abandons)
        ep_streams_abandon(p->streams);
    ep_streams_free(p->streams);
    p->streams = NULL;
    p->arenas.net = NULL;
    p->arenas.direct = false;
}

/* All ranks get the same result. The log has the reason of a rank whose test failed. */
static ep_status probe_network(struct cuda_proxy *p, const ep_boot *boot, bool *ret_lost)
{
    const ep_comm *comm = p->cuda->group.comm;
    char before[EP_ERROR_TEXT_BYTES];
    bool any = p->arenas.direct;

    *ret_lost = false;
    EP_TRY(ep_group_agree_about(boot, comm->config.timeout_ms, EP_OK, comm->rank, &any));
    if (!any)
        return EP_OK;
    snprintf(before, sizeof(before), "%s", ep_last_error());
    if (cuda_direct_probe(p->cuda, p->streams, &p->net_memory) != EP_OK) {
        *ret_lost = true;
        ep_log(EP_LOG_WARNING,
               "%s; rows for other nodes pass through host memory (EPKIT_VERBS_GPU_MEMORY=0 on all ranks avoids this "
               "test)",
               ep_last_error());
        ep_set_last_error(before);
    }
    return ep_group_agree_about(boot, comm->config.timeout_ms, EP_OK, comm->rank, ret_lost);
}

/* GPU memory is used only if all ranks have seen that it works: a lost row would be a wrong result. */
static ep_status open_network(struct cuda_proxy *p, const ep_boot *boot)
{
    bool (*uses_device_memory)(void) = p->cuda->group.provider.uses_device_memory;
    bool lost;

    if (!uses_device_memory)
        return open_streams(p, boot, false);
    EP_TRY(open_streams(p, boot, uses_device_memory()));
    EP_TRY(probe_network(p, boot, &lost));
    if (!lost)
        return EP_OK;
    close_network(p, true);
    return open_streams(p, boot, false);
}

/* What this rank alone makes, once. */
static ep_status new_proxy(struct cuda_comm *cuda)
{
    const ep_comm *comm = cuda->group.comm;
    struct cuda_proxy *p = calloc(1, sizeof(*p));

    if (!p)
        return ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");
    cuda->proxy = p;
    p->cuda = cuda;
    p->arenas.memory = &p->arena_memory;
    p->nnodes = comm->nnodes;
    p->node = comm->node;
    p->channels = comm->nnodes <= FEW_NODES ? CHANNELS : 1;
    cuda_op_ring_init(&p->ring);
    EP_TRY(open_words(p));
    return cuda_op_ring_open(&p->ring, &p->memory);
}

ep_status cuda_proxy_open(struct cuda_comm *cuda, const ep_boot *boot)
{
    ep_status status = cuda->proxy ? cuda_kept_clear(&cuda->proxy->memory, cuda->internal_stream) : new_proxy(cuda);
    struct cuda_proxy *p;

    /* What follows is collective, so a rank that cannot take part must say so before. */
    status = ep_group_agree(boot, cuda->group.comm->config.timeout_ms, status);
    p = cuda->proxy;
    if (status != EP_OK || !p)
        return status;
    p->words->blocked = -1;
    for (int node = 0; node < p->nnodes; node++)
        p->one_each[node] =
            (struct cuda_node_range){.first = node, .n = node != p->node && ep_group_has_node(&cuda->group, node)};
    EP_TRY(open_network(p, boot));
    EP_TRY(cuda_arenas_attach(&p->arenas));
    EP_TRY(open_payload(p));
    return ep_thread_begin(&p->thread, &p->started, proxy_main, p, "ep_comm_new: pthread_create");
}

void cuda_proxy_stop(struct cuda_comm *cuda)
{
    struct cuda_proxy *p = cuda->proxy;

    if (!p || !p->started)
        return;
    atomic_store(&p->limit_ns,
                 atomic_load(&cuda->group.comm->changes) ? 1 : ep_deadline_ns(cuda->group.comm->config.timeout_ms));
    cuda_op_ring_stop(&p->ring);
    pthread_join(p->thread, NULL);
    p->started = false;
}

void cuda_proxy_leave(struct cuda_comm *cuda)
{
    struct cuda_proxy *p = cuda->proxy;

    if (!p)
        return;
    cuda_proxy_stop(cuda);
    close_network(p, true);
    cuda_kept_free(&p->net_memory);
    cuda_op_ring_reset(&p->ring);
    atomic_store(&p->limit_ns, 0);
    p->broken = false;
}

void cuda_proxy_close(struct cuda_comm *cuda)
{
    struct cuda_proxy *p = cuda->proxy;

    if (!p)
        return;
    cuda_proxy_stop(cuda);
    close_network(p, atomic_load(&cuda->group.comm->failed) || ep_now_ns() >= atomic_load(&p->limit_ns));
    cuda_kept_free(&p->net_memory);
    cuda_kept_free(&p->arena_memory);
    cuda_kept_free(&p->memory);
    cuda_op_ring_close(&p->ring);
    free(p);
    cuda->proxy = NULL;
}

size_t cuda_proxy_bytes(const struct cuda_comm *cuda)
{
    const struct cuda_proxy *p = cuda->proxy;

    if (!p)
        return 0;
    return sizeof(*p) + (p->streams ? ep_streams_bytes(p->streams) : 0) + p->memory.pinned_bytes +
           p->memory.device_bytes + p->arenas.held + p->net_memory.device_bytes;
}

uint64_t cuda_proxy_count_chunks(const struct cuda_comm *cuda)
{
    const struct cuda_proxy *p = cuda->proxy;
    uint64_t moved = 0;

    /* NULL if opening failed early. */
    for (int which = 0; p && p->moved && which <= p->nnodes; which++)
        moved += __atomic_load_n(&p->moved[which], __ATOMIC_RELAXED);
    return moved;
}
