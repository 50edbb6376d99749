/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/hop.h"

#include "base/backoff.h"
#include "base/thread.h"

#include <stdlib.h>
#include <string.h>

/*
 * Rings of the streams: of few nodes large ones, so that a rank that is ahead need not stop; the largest row of all
 * fits into half of the smallest.
 */
#define RING_BYTES ((size_t)2 << 20)
#define RING_LEAST ((size_t)1 << 20)
#define CHANNELS 8
#define FEW_NODES 9 /* up to these, CHANNELS with RING_BYTES; beyond, one with RING_LEAST */

/* --- one hop, by the proxy ---------------------------------------------------------------------------------------- */

static const struct hop_half *half_of(const struct cuda_hop *hop)
{
    return &hop->half[hop->number % 2];
}

static uint64_t *ready_word(const struct cuda_hop *hop, int slot)
{
    return half_of(hop)->words + slot;
}

static uint64_t *used_word(const struct cuda_hop *hop, int slot)
{
    return half_of(hop)->words + half_of(hop)->slots + slot;
}

static struct cuda_landed *landed_at(const struct cuda_hop *hop, int slot)
{
    return (struct cuda_landed *)(void *)(half_of(hop)->words + 2 * half_of(hop)->slots) + slot;
}

static bool has_come(const uint64_t *word, uint64_t number)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE) >= number;
}

static int32_t *cursor(const struct cuda_proxy *p, const struct hop_side *side, int node, int channel)
{
    return &side->next[node * p->channels + channel];
}

/* As in struct cuda_chunks. */
static void note_moved(struct cuda_proxy *p, int which)
{
    __atomic_store_n(&p->moved[which], p->moved[which] + 1, __ATOMIC_RELAXED);
}

/* Behind what the kernels are to see. */
static void note_event(struct cuda_proxy *p)
{
    __atomic_store_n(&p->words->events, p->words->events + 1, __ATOMIC_RELEASE);
}

/* Sends what is packed, as far as the channel takes it. */
static bool send_chunks(struct cuda_proxy *p, struct cuda_hop *hop, int node, int channel)
{
    int32_t *next = cursor(p, &hop->out, node, channel);
    bool moved = false;

    while (*next < hop->out.chunks[node]) {
        int slot = hop->out.first[node] + *next;
        struct hop_head head = {.number = hop->number, .chunk = (uint32_t)*next, .bytes = hop->out.bytes[slot]};
        struct ep_piece piece = {half_of(hop)->arena + (size_t)slot * hop->slot_bytes, head.bytes};

        memcpy(head.tell, hop->tell, sizeof(hop->tell));
        if (!has_come(ready_word(hop, slot), hop->number) ||
            !ep_stream_send(p->streams, node, channel, &head, sizeof(head), &piece, head.bytes ? 1 : 0))
            break;
        *next += p->channels;
        hop->out.left--;
        moved = true;
        note_moved(p, p->nnodes);
    }
    return moved;
}

/* EP_OK, or what is wrong with a chunk that has come from `rank`: what it has told before anything else. */
static ep_status check_head(const struct cuda_proxy *p, const struct cuda_hop *hop, int rank,
                            const struct hop_head *theirs, size_t bytes, int32_t chunk, uint32_t expected)
{
    struct hop_head head = {.number = 0};

    if (bytes >= sizeof(head))
        memcpy(&head, theirs, sizeof(head));
    for (uint32_t word = 0; bytes >= sizeof(head) && word < CUDA_TELL_COMPARED; word++)
        if (head.tell[word] != hop->tell[word])
            return cuda_fail_disagree(p->cuda, word, rank, hop->tell[word], head.tell[word]);
    if (bytes == sizeof(head) + expected && head.bytes == expected && head.number == hop->number &&
        head.chunk == (uint32_t)chunk)
        return EP_OK;
    return ep_fail(
        EP_E_MISMATCH,
        "ranks disagree: rank %d sent %zu bytes, chunk %u of operation %llu between nodes, and rank %d waits "
        "for %zu bytes, chunk %d of operation %llu",
        rank, bytes, head.chunk, (unsigned long long)head.number, p->cuda->group.comm->rank, sizeof(head) + expected,
        chunk, (unsigned long long)hop->number);
}

/* Shows the kernels what has landed, and gives the network back what they have read. */
static ep_status take_chunks(struct cuda_proxy *p, struct cuda_hop *hop, int node, int channel, bool *ret_moved)
{
    int32_t *next = cursor(p, &hop->in, node, channel);
    bool *shown = &hop->shown[node * p->channels + channel];
    int rank = ep_group_rail(&p->cuda->group, node);

    while (*next < hop->in.chunks[node]) {
        int slot = hop->in.first[node] + *next;

        if (!*shown) {
            struct cuda_landed *landed = landed_at(hop, slot);
            const struct hop_head *head;
            size_t bytes;
            ep_status status;

            head = ep_stream_peek(p->streams, node, channel, &bytes);
            if (!head)
                break;
            status = check_head(p, hop, rank, head, bytes, *next, hop->in.bytes[slot]);
            if (status != EP_OK)
                return ep_group_set_own_failure(&p->cuda->group, status, rank, hop->phase);
            landed->address = (uint64_t)(uintptr_t)(p->region_device +
                                                    ((const unsigned char *)(head + 1) - (unsigned char *)p->region));
            __atomic_store_n(&landed->number, hop->number, __ATOMIC_RELEASE);
            note_event(p);
            *shown = *ret_moved = true;
            note_moved(p, node);
        }
        if (!has_come(used_word(hop, slot), hop->number))
            break;
        ep_stream_pop(p->streams, node, channel);
        *shown = false;
        *next += p->channels;
        hop->in.left--;
        *ret_moved = true;
    }
    return EP_OK;
}

/* Whom the network still has to bring something; -1: none. */
static int find_blocked(const struct cuda_proxy *p, const struct cuda_hop *hop)
{
    for (int node = 0; hop->out.left && node < p->nnodes; node++)
        for (int channel = 0; node != p->node && channel < p->channels; channel++)
            if (*cursor(p, &hop->out, node, channel) < hop->out.chunks[node])
                return node;
    return ep_streams_unflushed_peer(p->streams);
}

/*
 * A rail peer that has left or died has sent all that it had to send, and of what had come nothing is lost. EP_OK also
 * where the network cannot tell. Connections that end while the process lives on the network itself gives up later.
 */
static ep_status check_missing(const struct cuda_proxy *p, const struct cuda_hop *hop, int node)
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
        if (*cursor(p, &hop->in, node, channel) < hop->in.chunks[node] &&
            !ep_stream_peek(p->streams, node, channel, &bytes))
            return ep_group_set_failure(group, left ? EP_E_PEER_LEFT : EP_E_PEER_DEAD, rank, hop->phase);
    return EP_OK;
}

/* One turn of everything. */
static ep_status turn(struct cuda_proxy *p, struct cuda_hop *hop, bool *ret_moved)
{
    struct ep_group *group = &p->cuda->group;
    ep_status status = ep_streams_progress(p->streams, ret_moved);
    int broken = ep_streams_broken_peer(p->streams), blocked;

    if (status != EP_OK)
        return ep_group_set_own_failure(group, status, broken < 0 ? group->comm->rank : ep_group_rail(group, broken),
                                        hop->phase);
    for (int node = 0; node < p->nnodes; node++) {
        if (node == p->node)
            continue;
        for (int channel = 0; channel < p->channels; channel++) {
            *ret_moved |= send_chunks(p, hop, node, channel);
            EP_TRY(take_chunks(p, hop, node, channel, ret_moved));
        }
        if (hop->in.left)
            EP_TRY(check_missing(p, hop, node));
    }
    if (hop->sent)
        return EP_OK;
    blocked = find_blocked(p, hop);
    __atomic_store_n(&p->words->blocked, blocked < 0 ? -1 : ep_group_rail(group, blocked), __ATOMIC_RELAXED);
    if (blocked >= 0)
        return EP_OK;
    hop->sent = *ret_moved = true;
    __atomic_store_n(&p->words->sent, hop->number, __ATOMIC_RELEASE);
    note_event(p);
    return EP_OK;
}

/* Has the group failed, or closed? Then what is sent is not read, and the kernels end or have ended by themselves. */
static bool has_failed(const struct cuda_proxy *p)
{
    uint64_t limit_ns = atomic_load(&p->limit_ns);

    return p->broken || (limit_ns && ep_now_ns() >= limit_ns) ||
           __atomic_load_n(&p->cuda->report->abort, __ATOMIC_ACQUIRE);
}

/* What the device has written of lists that change. */
static ep_status check_lists(const struct cuda_proxy *p, const struct cuda_hop_side *from)
{
    int64_t end = 0;

    for (int node = 0; node < p->nnodes; node++) {
        const struct cuda_rail *rail = &from->rail[node];

        if (rail->first != end || rail->n < 0 || rail->n > from->most || end + rail->n > from->room)
            return ep_fail(EP_E_DEVICE, "operation %llu between nodes: its list for node %d has %d tokens from %d on",
                           (unsigned long long)p->ring.number, node, rail->n, rail->first);
        end += rail->n;
    }
    return EP_OK;
}

static ep_status measure_changing(const struct cuda_proxy *p, struct cuda_hop *hop)
{
    struct hop_side *sides[] = {&hop->out, &hop->in};

    for (int i = 0; i < 2; i++) {
        if (!hop->changing[i].room)
            continue;
        EP_TRY(check_lists(p, &hop->changing[i]));
        cuda_hop_measure(p, &hop->changing[i], sides[i]);
    }
    return EP_OK;
}

static void begin_side(const struct cuda_proxy *p, struct hop_side *side)
{
    side->left = side->n_chunks;
    for (int node = 0; node < p->nnodes; node++)
        for (int channel = 0; channel < p->channels; channel++)
            *cursor(p, side, node, channel) = channel;
}

static void run_hop(struct cuda_proxy *p, struct cuda_hop *hop)
{
    struct ep_group *group = &p->cuda->group;
    ep_status status = measure_changing(p, hop);
    unsigned tries = 0;

    if (status != EP_OK) {
        ep_group_set_own_failure(group, status, group->comm->rank, hop->phase);
        p->broken = true;
    }
    hop->number = p->ring.number;
    hop->sent = false;
    memset(hop->shown, 0, (size_t)p->nnodes * (size_t)p->channels);
    begin_side(p, &hop->out);
    begin_side(p, &hop->in);
    while (!has_failed(p) && !(hop->sent && !hop->in.left)) {
        bool moved = false;

        if (turn(p, hop, &moved) != EP_OK) {
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

/* What comes for an operation that this rank's device has not begun: peers need not wait for room. */
static bool progress_idle(struct cuda_proxy *p)
{
    struct ep_group *group = &p->cuda->group;
    bool moved = false;
    ep_status status = ep_streams_progress(p->streams, &moved);
    int broken = ep_streams_broken_peer(p->streams);

    if (status == EP_OK)
        return moved;
    ep_group_set_own_failure(group, status, broken < 0 ? group->comm->rank : ep_group_rail(group, broken),
                             EP_GROUP_IDLE);
    p->broken = true;
    return false;
}

/* The next operation that the device has posted; NULL: there will be none. */
static struct cuda_hop *await_hop(struct cuda_proxy *p)
{
    struct ep_group *group = &p->cuda->group;
    unsigned tries = 0;

    for (;;) {
        enum cuda_ring_state state = cuda_op_ring_state(&p->ring);
        struct cuda_ring_op *op;
        ep_status status = cuda_op_ring_take(&p->ring, &op);

        if (status != EP_OK) {
            ep_group_set_own_failure(group, status, group->comm->rank, EP_GROUP_IDLE);
            p->broken = true;
        }
        if (op || state == CUDA_RING_STOPPED)
            return (struct cuda_hop *)op;
        if (has_failed(p))
            cuda_op_ring_await_stop(&p->ring);
        else if (state == CUDA_RING_CALLED && progress_idle(p))
            tries = 0;
        else if (state == CUDA_RING_CALLED || tries < EP_BACKOFF_YIELDS)
            ep_backoff(&tries);
        else
            cuda_op_ring_sleep(&p->ring);
    }
}

static void *proxy_main(void *argument)
{
    struct cuda_proxy *p = argument;
    struct cuda_hop *hop;

    while ((hop = await_hop(p))) {
        run_hop(p, hop);
        if (!hop->base.captured)
            cuda_op_ring_remove(&p->ring, &hop->base);
    }
    return NULL;
}

/* --- opening and closing -------------------------------------------------------------------------------------------
 */

static ep_status open_words(struct cuda_proxy *p)
{
    size_t bytes = sizeof(*p->words) + ((size_t)p->nnodes + 1) * sizeof(*p->moved);
    struct cuda_pinned words;

    EP_TRY(cuda_keep_pinned(&p->kept, bytes, &words));
    p->words = words.memory;
    p->words_device = words.device;
    p->words->blocked = -1;
    p->moved = (uint64_t *)(void *)(p->words + 1);
    return EP_OK;
}

/* The network's memory, for the kernels to read. */
static ep_status open_region(struct cuda_proxy *p)
{
    struct ep_net *net = ep_streams_get_net(p->streams);

    CUDA_TRY(cudaHostRegister(net->region, net->region_bytes, cudaHostRegisterMapped | cudaHostRegisterPortable));
    p->region = net->region;
    CUDA_TRY(cudaHostGetDevicePointer((void **)&p->region_device, p->region, 0));
    return EP_OK;
}

static ep_status start_thread(struct cuda_proxy *p)
{
    int error = ep_thread_start(&p->thread, NULL, proxy_main, p);

    if (error)
        return ep_fail_errno(EP_E_SYSTEM, error, "ep_comm_new: pthread_create");
    p->started = true;
    return EP_OK;
}

ep_status cuda_proxy_open(struct cuda_comm *cuda, const ep_boot *boot)
{
    const ep_comm *comm = cuda->group.comm;
    bool few = comm->nnodes <= FEW_NODES;
    struct cuda_proxy *p = calloc(1, sizeof(*p));
    struct ep_net_provider provider;
    struct ep_net_params params;
    ep_status status = p ? EP_OK : ep_fail(EP_E_MEMORY, "ep_comm_new: no memory");

    /* What follows is collective: who cannot take part says so before. */
    status = ep_group_agree(boot, comm->config.timeout_ms, status);
    if (status != EP_OK || !p) {
        free(p);
        return status;
    }
    cuda->proxy = p;
    p->cuda = cuda;
    p->arenas.kept = &p->kept;
    p->nnodes = comm->nnodes;
    p->node = comm->node;
    p->channels = few ? CHANNELS : 1;
    cuda_op_ring_init(&p->ring);
    ep_group_net_describe(&cuda->group, &provider, &params);
    params.boot = boot;
    params.channels = p->channels;
    params.wake = NULL;
    EP_TRY(ep_streams_open(&provider, &params, few ? RING_BYTES : RING_LEAST, &p->streams));
    EP_TRY(open_words(p));
    EP_TRY(cuda_op_ring_open(&p->ring, &p->kept));
    EP_TRY(open_region(p));
    return start_thread(p);
}

void cuda_proxy_stop(struct cuda_comm *cuda)
{
    struct cuda_proxy *p = cuda->proxy;

    if (!p || !p->started)
        return;
    atomic_store(&p->limit_ns, ep_deadline_ns(cuda->group.comm->config.timeout_ms));
    cuda_op_ring_stop(&p->ring);
    pthread_join(p->thread, NULL);
    p->started = false;
}

void cuda_proxy_close(struct cuda_comm *cuda)
{
    struct cuda_proxy *p = cuda->proxy;

    if (!p)
        return;
    cuda_proxy_stop(cuda);
    if (p->region)
        cudaHostUnregister(p->region);
    if (p->streams && (atomic_load(&cuda->group.comm->failed) || ep_now_ns() >= atomic_load(&p->limit_ns)))
        ep_streams_abandon(p->streams);
    ep_streams_free(p->streams);
    cuda_kept_free(&p->kept);
    cuda_op_ring_close(&p->ring);
    free(p);
    cuda->proxy = NULL;
}

size_t cuda_proxy_bytes(const struct cuda_comm *cuda)
{
    const struct cuda_proxy *p = cuda->proxy;

    if (!p)
        return 0;
    return sizeof(*p) + ep_streams_bytes(p->streams) + p->kept.pinned_bytes;
}

uint64_t cuda_proxy_moved(const struct cuda_comm *cuda)
{
    const struct cuda_proxy *p = cuda->proxy;
    uint64_t moved = 0;

    /* Opening may have failed before the words were there. */
    for (int which = 0; p && p->moved && which <= p->nnodes; which++)
        moved += __atomic_load_n(&p->moved[which], __ATOMIC_RELAXED);
    return moved;
}
