/* SPDX-License-Identifier: Apache-2.0 */
#include "backend/cuda/hop.h"

#include <stdlib.h>
#include <string.h>

#define MORE_SLOTS 64
#define SLOT_GRAIN 64 /* bytes: slots are multiples */

void cuda_hop_measure(const struct cuda_proxy *p, const struct cuda_hop_side *from, struct hop_side *side)
{
    side->n_chunks = 0;
    side->rows = side->all_bytes = 0;
    for (int node = 0; node < p->nnodes; node++) {
        const struct cuda_rail *rail = &from->rail[node];

        side->chunks[node] = cuda_hop_chunks(from, node);
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
            side->all_bytes += sizeof(struct hop_head) + bytes;
        }
    }
}

size_t cuda_proxy_most(const struct cuda_comm *cuda)
{
    return ep_streams_max_message(cuda->proxy->streams) - sizeof(struct hop_head);
}

/* Slots of all chunks: the last list's end counts, whichever node has it. */
static int slots_of(const struct cuda_proxy *p, const struct cuda_hop_side *side)
{
    const struct cuda_rail *last = &side->rail[p->nnodes - 1];

    return CUDA_CHUNK_SLOT(side->room ? side->room : last->first + last->n, side->tokens, p->nnodes, 1);
}

static ep_status grow_words(struct cuda_proxy *p, struct hop_half *half, int slots)
{
    int wanted = slots + slots / 2 + MORE_SLOTS;
    struct cuda_pinned words;
    void *taken;

    if (half->slots >= slots)
        return EP_OK;
    EP_TRY(cuda_keep_pinned(&p->kept, (size_t)wanted * (2 * sizeof(uint64_t) + sizeof(struct cuda_landed)), &words));
    EP_TRY(cuda_keep_device(&p->kept, (size_t)wanted * sizeof(uint32_t), &taken));
    CUDA_TRY(cudaMemsetAsync(taken, 0, (size_t)wanted * sizeof(uint32_t), p->cuda->own));
    CUDA_TRY(cudaStreamSynchronize(p->cuda->own));
    half->slots = wanted;
    half->words = words.memory;
    half->words_device = words.device;
    half->taken = taken;
    return EP_OK;
}

static void use_arenas(struct cuda_proxy *p)
{
    for (int i = 0; i < 2; i++) {
        p->half[i].arena = p->arenas.of[i].memory;
        p->half[i].arena_device = p->arenas.of[i].device;
    }
}

/* Of the arena. Where the lists stay as they are it is known how large the largest chunk is. */
static size_t slot_bytes_of(const struct cuda_hop *hop, const struct cuda_hop_args *args, int slots)
{
    uint32_t most = 0;

    if (args->out.room)
        return args->slot_bytes;
    for (int i = 0; i < slots; i++)
        most = most < hop->out.bytes[i] ? hop->out.bytes[i] : most;
    return ((size_t)most + SLOT_GRAIN - 1) / SLOT_GRAIN * SLOT_GRAIN;
}

/* Memory for it. Which of the two it gets the device knows. */
static ep_status place_hop(struct cuda_proxy *p, const struct cuda_hop_args *args, struct cuda_hop *hop, int slots_out,
                           int slots_in)
{
    ep_status status;

    for (int i = 0; i < 2; i++)
        EP_TRY(grow_words(p, &p->half[i], slots_out > slots_in ? slots_out : slots_in));
    hop->slot_bytes = slot_bytes_of(hop, args, slots_out);
    status = cuda_arenas_grow(&p->arenas, args->call, (size_t)slots_out * hop->slot_bytes);
    use_arenas(p);
    memcpy(hop->half, p->half, sizeof(hop->half));
    return status;
}

static void *place_at(struct cuda_hop *hop, size_t offset)
{
    return hop ? (char *)hop + offset : NULL;
}

/* NULL: how large it is. */
static size_t lay_out(const struct cuda_proxy *p, struct cuda_hop *hop, int slots_out, int slots_in)
{
    struct cuda_hop unused, *to = hop ? hop : &unused;
    size_t nodes = (size_t)p->nnodes * sizeof(int32_t), pairs = nodes * (size_t)p->channels, at = 0;
    struct hop_side *sides[] = {&to->out, &to->in};

    cuda_carve(&at, sizeof(*hop));
    for (int i = 0; i < 2; i++) {
        sides[i]->chunks = place_at(hop, cuda_carve(&at, nodes));
        sides[i]->first = place_at(hop, cuda_carve(&at, nodes));
        sides[i]->next = place_at(hop, cuda_carve(&at, pairs));
        sides[i]->bytes = place_at(hop, cuda_carve(&at, (size_t)(i ? slots_in : slots_out) * sizeof(uint32_t)));
    }
    to->shown = place_at(hop, cuda_carve(&at, (size_t)(p->nnodes * p->channels)));
    return at;
}

static struct cuda_chunks describe(const struct cuda_proxy *p, const struct cuda_hop_args *args,
                                   const struct cuda_hop_side *side)
{
    struct cuda_chunks chunks = {.rail = side->device,
                                 .nnodes = p->nnodes,
                                 .node = p->node,
                                 .tokens = side->tokens,
                                 .phase = (int32_t)args->phase};

    if (side->room)
        chunks.most = (side->most + side->tokens - 1) / side->tokens;
    for (int node = 0; !side->room && node < p->nnodes; node++)
        if (cuda_hop_chunks(side, node) > chunks.most)
            chunks.most = cuda_hop_chunks(side, node);
    return chunks;
}

static struct cuda_half half_on_device(const struct hop_half *half)
{
    return (struct cuda_half){.arena = half->arena_device,
                              .ready = half->words_device,
                              .used = half->words_device + half->slots,
                              .landed =
                                  (const struct cuda_landed *)(const void *)(half->words_device + 2 * half->slots),
                              .taken = half->taken};
}

static struct cuda_hop *new_hop(const struct cuda_proxy *p, const struct cuda_hop_args *args, int slots_out,
                                int slots_in)
{
    struct cuda_hop *hop = calloc(1, lay_out(p, NULL, slots_out, slots_in));

    if (!hop)
        return NULL;
    lay_out(p, hop, slots_out, slots_in);
    hop->base.captured = args->captured;
    hop->phase = args->phase;
    memcpy(hop->tell, args->tell, sizeof(hop->tell));
    if (args->out.room)
        hop->changing[0] = args->out;
    else
        cuda_hop_measure(p, &args->out, &hop->out);
    if (args->in.room)
        hop->changing[1] = args->in;
    else
        cuda_hop_measure(p, &args->in, &hop->in);
    return hop;
}

ep_status cuda_hop_prepare(struct cuda_comm *cuda, const struct cuda_hop_args *args, struct cuda_net_op *ret_op,
                           struct cuda_chunks *ret_out, struct cuda_chunks *ret_in, struct cuda_hop **ret_hop)
{
    struct cuda_proxy *p = cuda->proxy;
    int slots_out = slots_of(p, &args->out), slots_in = slots_of(p, &args->in);
    struct cuda_hop *hop;
    ep_status status;

    hop = new_hop(p, args, slots_out, slots_in);
    if (!hop)
        return ep_fail(EP_E_MEMORY, "%s: no memory for %d chunks", args->call, slots_out + slots_in);
    status = place_hop(p, args, hop, slots_out, slots_in);
    if (status == EP_OK)
        status = cuda_op_ring_add(&p->ring, &hop->base);
    if (status != EP_OK) {
        free(hop);
        return status;
    }
    cuda->net_rows = hop->out.rows;
    cuda->net_bytes = hop->out.all_bytes;
    *ret_op = (struct cuda_net_op){.half = {half_on_device(&p->half[0]), half_on_device(&p->half[1])},
                                   .posts = p->ring.posts_device,
                                   .op = hop->base.id,
                                   .slot_bytes = hop->slot_bytes,
                                   .words = p->words_device,
                                   .moved = (const uint64_t *)(const void *)(p->words_device + 1)};
    *ret_out = describe(p, args, &args->out);
    *ret_in = describe(p, args, &args->in);
    *ret_hop = hop;
    return EP_OK;
}

void cuda_hop_discard(struct cuda_comm *cuda, struct cuda_hop *hop)
{
    cuda_op_ring_remove(&cuda->proxy->ring, &hop->base);
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
    use_arenas(p);
    return status;
}

void cuda_proxy_get_memory(const struct cuda_comm *cuda, size_t *ret_held, size_t *ret_needed)
{
    const struct cuda_proxy *p = cuda->proxy;

    *ret_held = p ? p->arenas.held : 0;
    *ret_needed = p ? p->arenas.needed : 0;
}
