/* SPDX-License-Identifier: Apache-2.0 */
#include "property.h"

#include <stdlib.h>
#include <string.h>

struct random stream_of(const struct shape *shape, enum stream stream, uint64_t a, uint64_t b)
{
    return (struct random){.key = random_key(shape->seed, (uint64_t)stream, a, b)};
}

/* K experts of `n` from `first` on, distinct unless they may be `repeated`; -1 if there are not so many. */
static void draw_token(struct random *random, int topk, int first, int n, bool repeated, int32_t *ret_experts)
{
    for (int k = 0; k < topk; k++) {
        bool taken = true;

        for (int try = 0; taken && try < 20; try++) {
            ret_experts[k] = first + (int32_t)random_below(random, (uint32_t)n);
            taken = false;
            for (int other = 0; other < k && !repeated; other++)
                taken |= ret_experts[other] == ret_experts[k];
        }
        if (taken)
            ret_experts[k] = -1;
    }
}

static void draw_tokens(const struct shape *shape, int plan, int version, int rank, int32_t *experts, float *weights)
{
    const struct version_shape *drawn = &shape->plans[plan].versions[version];
    uint64_t which = (uint64_t)(plan + version * MAX_PLANS);
    struct random random = stream_of(shape, STREAM_ROUTING, which, (uint64_t)rank);
    struct random weight = stream_of(shape, STREAM_WEIGHTS, which, (uint64_t)rank);
    int n_local = shape->n_experts / shape->nranks, style = drawn->style;
    int hot = (int)(shape->seed % (uint64_t)shape->nranks) * n_local;
    bool hot_only = style == 2 || style == 6;

    for (int t = 0; t < drawn->n_tokens[rank]; t++) {
        int32_t *token = experts + (size_t)t * (size_t)shape->topk;

        /* 0, 1: anywhere; 2: one rank; 3: many holes; 4: nobody; 5: anywhere, repeated; 6: one rank, repeated */
        draw_token(&random, shape->topk, hot_only ? hot : 0, hot_only ? n_local : shape->n_experts, style >= 5, token);
        for (int k = 0; k < shape->topk; k++) {
            if (style == 4 || (style == 3 && random_below(&random, 2)) || random_below(&random, 16) == 0)
                token[k] = -1;
            weights[(size_t)t * (size_t)shape->topk + (size_t)k] = (float)(1 + random_below(&weight, 1024)) / 1024.0f;
        }
    }
}

bool draw_routing(const struct shape *shape, int plan, int version, struct reference_group *ret_group)
{
    const int *n_tokens = shape->plans[plan].versions[version].n_tokens;
    struct reference_group group = {.n_ranks = shape->nranks,
                                    .n_nodes = shape->nnodes,
                                    .ranks_per_node = shape->nranks / shape->nnodes,
                                    .topk = shape->topk,
                                    .n_experts = shape->n_experts,
                                    .n_local = shape->n_experts / shape->nranks};
    size_t nranks = (size_t)shape->nranks;

    group.n_tokens = calloc(nranks, sizeof(*group.n_tokens));
    group.experts = calloc(nranks, sizeof(*group.experts));
    group.weights = calloc(nranks, sizeof(*group.weights));
    if (!group.n_tokens || !group.experts || !group.weights)
        goto free_group;
    for (int rank = 0; rank < shape->nranks; rank++) {
        size_t n = (size_t)n_tokens[rank] * (size_t)shape->topk;

        group.n_tokens[rank] = n_tokens[rank];
        group.experts[rank] = calloc(n + 1, sizeof(int32_t));
        group.weights[rank] = calloc(n + 1, sizeof(float));
        if (!group.experts[rank] || !group.weights[rank])
            goto free_group;
        draw_tokens(shape, plan, version, rank, group.experts[rank], group.weights[rank]);
    }
    *ret_group = group;
    return true;
free_group:
    reference_group_done(&group);
    return false;
}

/*
 * Exponents of 2^-10 .. 2^9; one in 16 a zero or a denormal. A third of the terms is +-2^27: when two of those cancel
 * out, the values added between them have lost their last bits, which reveals the order.
 */
static uint16_t finite_bf16(uint64_t bits, bool term)
{
    uint16_t sign = (uint16_t)(bits & 0x8000), mantissa = (uint16_t)(bits & 0x7f);
    unsigned lot = (unsigned)(bits >> 7 & 0xff);

    if (lot < 8)
        return sign;
    if (lot < 16)
        return sign | mantissa;
    if (term && lot >= 176)
        return (uint16_t)(sign | 154 << 7);
    return (uint16_t)(sign | (uint16_t)((117 + lot % 20) << 7) | mantissa);
}

void fill_row(const struct shape *shape, enum stream stream, uint64_t use, uint64_t key, bool finite, void *ret_row,
              size_t bytes)
{
    struct random random = stream_of(shape, stream, use, key);
    unsigned char *row = ret_row;

    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t bits = random_next(&random);
        uint16_t numbers[4];

        if (finite) {
            for (int i = 0; i < 4; i++)
                numbers[i] = finite_bf16(bits >> 16 * i, stream == STREAM_REPLY || stream == STREAM_BIAS);
            memcpy(&bits, numbers, sizeof(bits));
        }
        memcpy(row + at, &bits, bytes - at < 8 ? bytes - at : 8);
    }
}

float reply_weight(const struct shape *shape, uint64_t use, uint64_t key, int rank, int k)
{
    return (float)(random_at(random_key(shape->seed, STREAM_REPLY + 1000, use, key), (uint64_t)(rank * 64 + k)) % 1000);
}

/* --- buffers ---------------------------------------------------------------------------------------------------- */

enum { GUARD_BYTES = 64 };

bool buffer_new(struct run *run, size_t bytes, struct buffer *ret_buffer)
{
    size_t shift = 16 * random_below(&run->local, 4), whole = 2 * GUARD_BYTES + shift + bytes;
    struct arena *arena = &run->arena[random_below(&run->local, N_ARENAS)];
    struct buffer buffer = {.bytes = bytes};

    whole = (whole + 63) / 64 * 64;
    if (random_below(&run->local, 2) && arena->bytes - arena->used >= whole) {
        buffer.begin = arena->memory + arena->used;
        buffer.symmetric = true;
        arena->used += whole;
    } else {
        buffer.begin = aligned_alloc(64, whole);
    }
    if (!buffer.begin)
        return false;
    buffer.at = buffer.begin + GUARD_BYTES + shift;
    memset(buffer.begin, GUARD, whole);
    memset(buffer.at, UNTOUCHED, bytes);
    *ret_buffer = buffer;
    return true;
}

bool all_bytes(const unsigned char *memory, size_t bytes, unsigned char value)
{
    for (size_t i = 0; i < bytes; i++)
        if (memory[i] != value)
            return false;
    return true;
}

bool buffer_free(struct buffer *buffer)
{
    bool whole;

    if (!buffer->begin)
        return true;
    whole = all_bytes(buffer->begin, (size_t)(buffer->at - buffer->begin), GUARD) &&
            all_bytes(buffer->at + buffer->bytes, GUARD_BYTES, GUARD);
    if (!buffer->symmetric)
        free(buffer->begin);
    *buffer = (struct buffer){0};
    return whole;
}
