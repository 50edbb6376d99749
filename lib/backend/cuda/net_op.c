/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/net_op.h"

#include <stdlib.h>
#include <string.h>

#define MORE_SLOTS 64
#define SLOT_ALIGN 64 /* bytes; slots are multiples */

void cuda_net_direction_measure(const struct cuda_proxy *p, const struct cuda_net_direction *from,
                                struct net_direction_state *side)
{
    side->n_chunks = 0;
    side->rows = side->all_bytes = 0;
    for (int node = 0; node < p->nnodes; node++) {
        const struct cuda_node_range *rail = &from->rail[node];

        side->chunks[node] = cuda_net_direction_chunks(from, node);
        side->first[node] = CUDA_CHUNK_SLOT(rail->first, from->tokens, node, 0);
        side->n_chunks += side->chunks[node];
        side->rows += (uint64_t)rail->n;
        for (int i = 0; i < side->chunks[node]; i++) {
            int first = rail->first + i * from->tokens, end = first + from->tokens, all = rail->first + rail->n;
            size_t bytes;

            end = end < all ? end : all;
            bytes = (size_t)(end - first) * from->token_bytes;
            if (from->units)
                bytes += (size_t)(from->units[end + node] - from->units[first + node]) * from->unit_bytes;
            side->bytes[side->first[node] + i] = (uint32_t)bytes;
            side->all_bytes += sizeof(struct net_chunk_header) + bytes;
        }
    }
}

size_t cuda_proxy_max_chunk_bytes(const struct cuda_comm *cuda)
{
    return ep_streams_max_message(cuda->proxy->streams) - sizeof(struct net_chunk_header);
}

/* Number of slots for all chunks: given by the end of the last list, whichever node that is. */
static int count_slots(const struct cuda_proxy *p, const struct cuda_net_direction *side)
{
    const struct cuda_node_range *last = &side->rail[p->nnodes - 1];

    return CUDA_CHUNK_SLOT(side->capacity ? side->capacity : last->first + last->n, side->tokens, p->nnodes, 1);
}

static ep_status grow_words(struct cuda_proxy *p, struct net_op_buffers *buffers, int slots)
{
    int wanted = slots + slots / 2 + MORE_SLOTS;
    struct cuda_pinned words;
    void *n_read;

    if (buffers->slots >= slots)
        return EP_OK;
    EP_TRY(cuda_net_alloc_pinned(&p->memory, (size_t)wanted * (2 * sizeof(uint64_t) + sizeof(struct cuda_landed)),
                                 &words));
    EP_TRY(cuda_net_alloc_device(&p->memory, (size_t)wanted * sizeof(uint32_t), &n_read));
    CUDA_TRY(cudaMemsetAsync(n_read, 0, (size_t)wanted * sizeof(uint32_t), p->cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(p->cuda->internal_stream));
    buffers->slots = wanted;
    buffers->words = words.memory;
    buffers->words_device = words.device;
    buffers->n_read = n_read;
    return EP_OK;
}

static void set_arenas(struct cuda_proxy *p)
{
    for (int i = 0; i < 2; i++) {
        p->buffers[i].arena = p->arenas.of[i].memory;
        p->buffers[i].arena_device = p->arenas.of[i].device;
    }
}

/* In the arena. If the lists do not change, the size of the largest chunk is known. */
static size_t slot_bytes_of(const struct cuda_net_op *op, const struct cuda_net_op_params *params, int slots)
{
    uint32_t most = 0;

    if (params->out.capacity)
        return params->slot_bytes;
    for (int i = 0; i < slots; i++)
        most = most < op->out.bytes[i] ? op->out.bytes[i] : most;
    return ((size_t)most + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
}

/* Both sets of buffers must be large enough: the device decides which one the operation uses. */
static ep_status alloc_op(struct cuda_proxy *p, const struct cuda_net_op_params *params, struct cuda_net_op *op,
                          int slots_out, int slots_in)
{
    ep_status status;

    for (int i = 0; i < 2; i++)
        EP_TRY(grow_words(p, &p->buffers[i], slots_out > slots_in ? slots_out : slots_in));
    op->slot_bytes = slot_bytes_of(op, params, slots_out);
    status = cuda_arenas_grow(&p->arenas, params->call, (size_t)slots_out * op->slot_bytes);
    set_arenas(p);
    memcpy(op->buffers, p->buffers, sizeof(op->buffers));
    return status;
}

static void *at_offset(struct cuda_net_op *op, size_t offset)
{
    return op ? (char *)op + offset : NULL;
}

/* Returns the size in bytes; sets no pointers if `op` is NULL. */
static size_t lay_out(const struct cuda_proxy *p, struct cuda_net_op *op, int slots_out, int slots_in)
{
    struct cuda_net_op unused, *to = op ? op : &unused;
    size_t nodes = (size_t)p->nnodes * sizeof(int32_t), pairs = nodes * (size_t)p->channels, at = 0;
    struct net_direction_state *sides[] = {&to->out, &to->in};

    cuda_carve(&at, sizeof(*op));
    for (int i = 0; i < 2; i++) {
        sides[i]->chunks = at_offset(op, cuda_carve(&at, nodes));
        sides[i]->first = at_offset(op, cuda_carve(&at, nodes));
        sides[i]->next = at_offset(op, cuda_carve(&at, pairs));
        sides[i]->bytes = at_offset(op, cuda_carve(&at, (size_t)(i ? slots_in : slots_out) * sizeof(uint32_t)));
    }
    to->published = at_offset(op, cuda_carve(&at, (size_t)p->nnodes * (size_t)p->channels));
    return at;
}

static struct cuda_chunks describe_chunks(const struct cuda_proxy *p, const struct cuda_net_op_params *params,
                                          const struct cuda_net_direction *side)
{
    struct cuda_chunks chunks = {.rail = side->device,
                                 .nnodes = p->nnodes,
                                 .node = p->node,
                                 .tokens = side->tokens,
                                 .phase = (int32_t)params->phase};

    if (side->capacity)
        chunks.max_per_node = (side->node_capacity + side->tokens - 1) / side->tokens;
    for (int node = 0; !side->capacity && node < p->nnodes; node++)
        if (cuda_net_direction_chunks(side, node) > chunks.max_per_node)
            chunks.max_per_node = cuda_net_direction_chunks(side, node);
    return chunks;
}

static struct cuda_net_buffers device_buffers(const struct net_op_buffers *buffers)
{
    return (struct cuda_net_buffers){
        .arena = buffers->arena_device,
        .ready = buffers->words_device,
        .consumed = buffers->words_device + buffers->slots,
        .landed = (const struct cuda_landed *)(const void *)(buffers->words_device + 2 * buffers->slots),
        .n_read = buffers->n_read};
}

static struct cuda_net_op *new_op(const struct cuda_proxy *p, const struct cuda_net_op_params *params, int slots_out,
                                  int slots_in)
{
    struct cuda_net_op *op = calloc(1, lay_out(p, NULL, slots_out, slots_in));

    if (!op)
        return NULL;
    lay_out(p, op, slots_out, slots_in);
    op->base.captured = params->captured;
    op->phase = params->phase;
    memcpy(op->desc, params->desc, sizeof(op->desc));
    if (params->out.capacity)
        op->changing[0] = params->out;
    else
        cuda_net_direction_measure(p, &params->out, &op->out);
    if (params->in.capacity)
        op->changing[1] = params->in;
    else
        cuda_net_direction_measure(p, &params->in, &op->in);
    return op;
}

ep_status cuda_net_op_prepare(struct cuda_comm *cuda, const struct cuda_net_op_params *params,
                              struct cuda_net_op_args *ret_args, struct cuda_chunks *ret_out,
                              struct cuda_chunks *ret_in, struct cuda_net_op **ret_op)
{
    struct cuda_proxy *p = cuda->proxy;
    int slots_out = count_slots(p, &params->out), slots_in = count_slots(p, &params->in);
    struct cuda_net_op *op;
    ep_status status;

    op = new_op(p, params, slots_out, slots_in);
    if (!op)
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d chunks", params->call, slots_out + slots_in);
    status = alloc_op(p, params, op, slots_out, slots_in);
    if (status == EP_OK)
        status = cuda_op_ring_add(&p->ring, &op->base);
    if (status != EP_OK) {
        free(op);
        return status;
    }
    cuda->net_rows = op->out.rows;
    cuda->net_bytes = op->out.all_bytes;
    *ret_args = (struct cuda_net_op_args){.buffers = {device_buffers(&p->buffers[0]), device_buffers(&p->buffers[1])},
                                          .posts = p->ring.posts_device,
                                          .op = op->base.id,
                                          .slot_bytes = op->slot_bytes,
                                          .words = p->words_device,
                                          .moved = (const uint64_t *)(const void *)(p->words_device + 1)};
    *ret_out = describe_chunks(p, params, &params->out);
    *ret_in = describe_chunks(p, params, &params->in);
    *ret_op = op;
    return EP_OK;
}

void cuda_net_op_discard(struct cuda_comm *cuda, struct cuda_net_op *op)
{
    cuda_op_ring_remove(&cuda->proxy->ring, &op->base);
}

ep_status cuda_net_op_end_launch(struct cuda_comm *cuda, struct cuda_net_op *op, ep_status status)
{
    if (status != EP_OK)
        cuda_net_op_discard(cuda, op);
    return status;
}

ep_status cuda_proxy_set_memory(struct cuda_comm *cuda, size_t reserve, size_t limit)
{
    struct cuda_proxy *p = cuda->proxy;
    ep_status status = EP_OK;
    size_t before;

    if (!p)
        return EP_OK;
    before = p->arenas.limit;
    p->arenas.limit = limit;
    if (reserve)
        status = cuda_arenas_reserve(&p->arenas, "ep_cuda_set_net_memory", reserve / 2);
    if (status != EP_OK)
        p->arenas.limit = before;
    set_arenas(p);
    return status;
}

void cuda_proxy_get_memory(const struct cuda_comm *cuda, size_t *ret_held, size_t *ret_needed)
{
    const struct cuda_proxy *p = cuda->proxy;

    *ret_held = p ? p->arenas.held : 0;
    *ret_needed = p ? p->arenas.needed : 0;
}
