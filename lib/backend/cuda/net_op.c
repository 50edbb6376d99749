/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/net_op.h"

#include <stdlib.h>
#include <string.h>

#define MORE_SLOTS 64
#define SLOT_ALIGN 64 /* bytes; slots are multiples */

/* Number of chunks of a node's list. */
static int count_chunks(const struct cuda_list_side *lists, int node, int32_t tokens)
{
    return (lists->rail[node].n + tokens - 1) / tokens;
}

void cuda_net_op_measure(const struct cuda_proxy *p, const struct cuda_net_op *op, const struct cuda_list_side *lists,
                         struct net_direction_state *side)
{
    side->n_chunks = 0;
    side->rows = side->all_bytes = 0;
    for (int node = 0; node < p->nnodes; node++) {
        const struct cuda_node_range *rail = &lists->rail[node];

        side->chunks[node] = count_chunks(lists, node, op->tokens);
        side->first[node] = CUDA_CHUNK_SLOT(rail->first, op->tokens, node, 0);
        side->n_chunks += side->chunks[node];
        side->rows += (uint64_t)rail->n;
        for (int i = 0; i < side->chunks[node]; i++) {
            int first = rail->first + i * op->tokens, end = first + op->tokens, all = rail->first + rail->n;
            size_t bytes;

            end = end < all ? end : all;
            bytes = (size_t)(end - first) * op->token_bytes;
            if (op->unit_bytes)
                bytes += (size_t)(lists->units[end + node] - lists->units[first + node]) * op->unit_bytes;
            side->bytes[side->first[node] + i] = (uint32_t)bytes;
            side->all_bytes += sizeof(struct net_chunk_header) + bytes;
        }
    }
}

int32_t cuda_net_chunk_tokens(const struct cuda_comm *cuda, size_t token_bytes)
{
    size_t most = (ep_streams_max_message(cuda->proxy->streams) - sizeof(struct net_chunk_header)) / token_bytes;

    return (int32_t)(most > CUDA_CHUNK_TOKENS ? CUDA_CHUNK_TOKENS : most);
}

/* Number of slots for all chunks: given by the end of the last list, whichever node that is. */
static int count_slots(const struct cuda_proxy *p, const struct cuda_list_side *lists, int32_t tokens)
{
    const struct cuda_node_range *last = &lists->rail[p->nnodes - 1];

    return CUDA_CHUNK_SLOT(lists->capacity ? lists->capacity : last->first + last->n, tokens, p->nnodes, 1);
}

/* Words of each slot: ready, consumed, arrived. */
static struct cuda_net_buffers words_at(uint64_t *words, int slots)
{
    return (struct cuda_net_buffers){
        .ready = words, .consumed = words + slots, .arrived = (struct cuda_landed *)(void *)(words + 2 * slots)};
}

static ep_status grow_words(struct cuda_proxy *p, struct net_op_buffers *buffers, int slots)
{
    int wanted = slots + slots / 2 + MORE_SLOTS;
    struct cuda_pinned words;
    void *n_read;

    if (buffers->slots >= slots)
        return EP_OK;
    EP_TRY(cuda_keep_pinned(&p->memory, (size_t)wanted * (2 * sizeof(uint64_t) + sizeof(struct cuda_landed)), &words));
    EP_TRY(cuda_keep_device(&p->memory, (size_t)wanted * sizeof(uint32_t), &n_read));
    CUDA_TRY(cudaMemsetAsync(n_read, 0, (size_t)wanted * sizeof(uint32_t), p->cuda->internal_stream));
    CUDA_TRY(cudaStreamSynchronize(p->cuda->internal_stream));
    buffers->slots = wanted;
    buffers->host = words_at(words.memory, wanted);
    buffers->device = words_at(words.device, wanted);
    buffers->device.n_read = n_read;
    return EP_OK;
}

/* In the arena. If the lists do not change, the size of the largest chunk is known. */
static size_t slot_bytes_of(const struct cuda_net_op *op, const struct cuda_net_op_params *params)
{
    size_t most = 0;

    if (op->out.changing.capacity)
        most = (size_t)op->tokens * (op->token_bytes + params->max_units * op->unit_bytes);
    else
        for (int i = 0; i < op->out.slots; i++)
            most = most < op->out.bytes[i] ? op->out.bytes[i] : most;
    return (most + SLOT_ALIGN - 1) / SLOT_ALIGN * SLOT_ALIGN;
}

/* Both sets of buffers must be large enough: the device decides which one the operation uses. */
static ep_status alloc_op(struct cuda_proxy *p, const struct cuda_net_op_params *params, struct cuda_net_op *op)
{
    int slots = op->out.slots > op->in.slots ? op->out.slots : op->in.slots;

    op->slot_bytes = slot_bytes_of(op, params);
    EP_TRY(cuda_arenas_grow(&p->arenas, params->name, (size_t)op->out.slots * op->slot_bytes));
    for (int i = 0; i < 2; i++) {
        EP_TRY(grow_words(p, &p->buffers[i], slots));
        op->buffers[i] = p->buffers[i];
        op->buffers[i].host.arena = p->arenas.of[i].memory;
        op->buffers[i].device.arena = p->arenas.of[i].device;
    }
    return EP_OK;
}

static void lay_out_side(const struct cuda_proxy *p, void *memory, size_t *at, struct net_direction_state *side)
{
    size_t nodes = (size_t)p->nnodes;

    side->chunks = cuda_carve(memory, at, nodes, sizeof(*side->chunks));
    side->first = cuda_carve(memory, at, nodes, sizeof(*side->first));
    side->next = cuda_carve(memory, at, nodes * (size_t)p->channels, sizeof(*side->next));
    side->bytes = cuda_carve(memory, at, (size_t)side->slots, sizeof(*side->bytes));
}

/* Returns the size in bytes. */
static size_t lay_out(const struct cuda_proxy *p, void *memory, struct cuda_net_op *op)
{
    size_t at = 0;

    cuda_carve(memory, &at, 1, sizeof(*op));
    lay_out_side(p, memory, &at, &op->out);
    lay_out_side(p, memory, &at, &op->in);
    op->published = cuda_carve(memory, &at, (size_t)p->nnodes * (size_t)p->channels, sizeof(*op->published));
    return at;
}

static struct cuda_chunks describe_chunks(const struct cuda_proxy *p, const struct cuda_net_op_params *params,
                                          const struct cuda_list_side *lists)
{
    struct cuda_chunks chunks = {.rail = lists->rail_device,
                                 .nnodes = p->nnodes,
                                 .node = p->node,
                                 .tokens = params->tokens,
                                 .phase = (int32_t)params->phase};

    if (lists->capacity)
        chunks.max_per_node = (lists->node_capacity + params->tokens - 1) / params->tokens;
    for (int node = 0; !lists->capacity && node < p->nnodes; node++)
        if (count_chunks(lists, node, params->tokens) > chunks.max_per_node)
            chunks.max_per_node = count_chunks(lists, node, params->tokens);
    return chunks;
}

static void set_lists(const struct cuda_proxy *p, const struct cuda_net_op *op, const struct cuda_list_side *lists,
                      struct net_direction_state *side)
{
    if (lists->capacity)
        side->changing = *lists;
    else
        cuda_net_op_measure(p, op, lists, side);
}

static struct cuda_net_op *new_op(const struct cuda_proxy *p, const struct cuda_net_op_params *params, bool captured)
{
    struct cuda_net_op first = {.base = {.captured = captured},
                                .phase = params->phase,
                                .tokens = params->tokens,
                                .token_bytes = params->token_bytes,
                                .unit_bytes = params->unit_bytes,
                                .out = {.slots = count_slots(p, params->out, params->tokens)},
                                .in = {.slots = count_slots(p, params->in, params->tokens)}};
    struct cuda_net_op *op = calloc(1, lay_out(p, NULL, &first));

    if (!op) {
        ep_fail(EP_E_MEMORY, "%s: no memory for %d chunks", params->name, first.out.slots + first.in.slots);
        return NULL;
    }
    *op = first;
    lay_out(p, op, op);
    memcpy(op->desc, params->desc, sizeof(op->desc));
    /* In a graph it changes with the members, but not of a plan of exact counts, which those of now have not. */
    if ((!captured || !params->out->capacity) && !op->desc[CUDA_DESC_PLAN])
        op->desc[CUDA_DESC_PLAN] = (uint32_t)params->plan;
    set_lists(p, op, params->out, &op->out);
    set_lists(p, op, params->in, &op->in);
    return op;
}

ep_status cuda_net_op_prepare(const struct cuda_call *call, const struct cuda_net_op_params *params,
                              struct cuda_net_op_args *ret_args, struct cuda_chunks *ret_out,
                              struct cuda_chunks *ret_in, struct cuda_net_op **ret_op)
{
    struct cuda_comm *cuda = call->cuda;
    struct cuda_proxy *p = cuda->proxy;
    /* They change with the members. */
    const struct cuda_list_side one_each = {.rail = p->one_each, .capacity = p->nnodes, .node_capacity = 1};
    struct cuda_net_op_params all = *params;
    struct cuda_net_op *op;
    ep_status status;

    if (!params->out)
        all.out = all.in = &one_each;
    op = new_op(p, &all, call->capture != 0);
    if (!op)
        return EP_E_MEMORY;
    status = alloc_op(p, &all, op);
    if (status == EP_OK)
        status = cuda_op_ring_add(&p->ring, &op->base);
    if (status != EP_OK) {
        free(op);
        return status;
    }
    cuda->net_rows = op->out.rows;
    cuda->net_bytes = op->out.all_bytes;
    *ret_args = (struct cuda_net_op_args){.buffers = {op->buffers[0].device, op->buffers[1].device},
                                          .posts = p->ring.posts_device,
                                          .op = op->base.id,
                                          .slot_bytes = op->slot_bytes,
                                          .words = p->words_device,
                                          .moved = (const uint64_t *)(const void *)(p->words_device + 1)};
    *ret_out = describe_chunks(p, &all, all.out);
    *ret_in = describe_chunks(p, &all, all.in);
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
    return status;
}

void cuda_proxy_get_memory(const struct cuda_comm *cuda, size_t *ret_held, size_t *ret_needed)
{
    const struct cuda_proxy *p = cuda->proxy;

    if (ret_held)
        *ret_held = p ? p->arenas.held : 0;
    if (ret_needed)
        *ret_needed = p ? p->arenas.needed : 0;
}
