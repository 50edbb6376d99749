/* SPDX-License-Identifier: Apache-2.0 */
#include "sequence.h"

#include <stdlib.h>
#include <string.h>

enum { EDGE = 64, SHIFTS = 8 };

/* The device stands for the rank, because ranks may be threads. */
static void *pool_alloc(struct rank_state *state, ep_comm *comm, size_t bytes)
{
    if (!passed(state, ep_pool_attach(comm, state->first_rank), "ep_pool_attach"))
        return NULL;
    return ep_pool_alloc((ptrdiff_t)bytes, state->first_rank, NULL);
}

static bool block_new(struct rank_state *state, ep_comm *comm, size_t bytes, enum memory kind, struct block *ret_block)
{
    struct block block = {.kind = kind, .total = bytes + 2 * EDGE + SHIFTS * 16};
    void *memory = NULL;

    if (kind == SYMMETRIC)
        CALL(state, ep_alloc(comm, block.total, &memory));
    else if (kind == LOCAL)
        CALL(state, ep_alloc_local(comm, block.total, &memory));
    else if (kind == POOL)
        memory = pool_alloc(state, comm, block.total);
    else
        memory = aligned_alloc(64, (block.total + 63) / 64 * 64);
    block.base = memory;
    if (kind == SYMMETRIC && !draw_own(&state->dice, 4))
        block.beside = aligned_alloc(64, (block.total + 63) / 64 * 64);
    if (!block.base)
        return fail(state, "no memory for %zu bytes", block.total);
    block.at = (block.beside ? block.beside : block.base) + EDGE + 16 * draw_own(&state->dice, SHIFTS);
    memset(block.beside ? block.beside : block.base, GUARD, block.total);
    memset(block.at, UNTOUCHED, bytes);
    *ret_block = block;
    return true;
}

static bool block_free(struct rank_state *state, ep_comm *comm, struct block *block)
{
    if (!block->base)
        return true;
    if (block->kind == SYMMETRIC && state->broken)
        (void)ep_free(comm, block->base);
    else if (block->kind == SYMMETRIC)
        CALL(state, ep_free(comm, block->base));
    else if (block->kind == POOL)
        ep_pool_free(block->base, (ptrdiff_t)block->total, state->first_rank, NULL);
    else if (block->kind == LOCAL)
        CALL(state, ep_free_local(comm, block->base));
    else
        free(block->base);
    free(block->beside); /* ep_free() has waited for the work that uses it */
    *block = (struct block){.kind = ORDINARY};
    return true;
}

bool mirror_new(struct rank_state *state, ep_comm *const comms[BOTH], const char *name, size_t rows, size_t row_bytes,
                enum memory kind, struct mirror *ret_mirror)
{
    struct mirror mirror = {.name = name, .bytes = rows * row_bytes, .row_bytes = row_bytes};

    TRY(block_new(state, comms[TESTED], mirror.bytes, kind, &mirror.block[TESTED]));
    TRY(block_new(state, comms[BASE], mirror.bytes, kind == SYMMETRIC && draw(&state->dice, 2) ? SYMMETRIC : ORDINARY,
                  &mirror.block[BASE]));
    *ret_mirror = mirror;
    return true;
}

static bool is_guard(const unsigned char *begin, const unsigned char *end)
{
    return begin == end || (*begin == GUARD && memcmp(begin, begin + 1, (size_t)(end - begin) - 1) == 0);
}

static bool has_guards(const struct block *block, size_t bytes)
{
    const unsigned char *begin = block->beside ? block->beside : block->base;

    return is_guard(begin, block->at) && is_guard(block->at + bytes, begin + block->total);
}

bool mirror_free(struct rank_state *state, ep_comm *const comms[BOTH], struct mirror *mirror)
{
    for (int i = 0; i < BOTH; i++) {
        if (mirror->block[i].base && !has_guards(&mirror->block[i], mirror->bytes))
            return fail(state, "%s: a guard of communicator %d was written", mirror->name, i);
        TRY(block_free(state, comms[i], &mirror->block[i]));
    }
    return true;
}

void mirror_copy(struct mirror *mirror)
{
    memcpy(mirror->block[BASE].at, mirror->block[TESTED].at, mirror->bytes);
}

void mirror_poison(struct mirror *mirror)
{
    for (int i = 0; i < BOTH; i++)
        memset(mirror->block[i].at, UNTOUCHED, mirror->bytes);
}

bool mirror_compare(struct rank_state *state, const struct mirror *mirror, const char *what)
{
    const unsigned char *tested = mirror->block[TESTED].at, *base = mirror->block[BASE].at;
    size_t row = mirror->row_bytes ? mirror->row_bytes : 1;

    for (int i = 0; i < BOTH; i++)
        if (!has_guards(&mirror->block[i], mirror->bytes))
            return fail(state, "%s: %s: a guard of communicator %d was written", what, mirror->name, i);
    if (memcmp(tested, base, mirror->bytes) == 0)
        return true;
    for (size_t i = 0; i < mirror->bytes; i++)
        if (tested[i] != base[i])
            return fail(state, "%s: %s (memory %d) differs in byte %zu of row %zu of %zu: %02x, not %02x", what,
                        mirror->name, mirror->block[TESTED].kind, i % row, i / row, mirror->bytes / row, tested[i],
                        base[i]);
    return true;
}

struct copy {
    struct copy *next;
    void *to;
    const void *from;
    size_t bytes;
};

static void run_copy(void *context)
{
    const struct copy *copy = context;

    memcpy(copy->to, copy->from, copy->bytes);
}

bool mirror_queue_copy(struct rank_state *state, ep_comm *comm, const struct mirror *to, const struct mirror *from,
                       ep_stream stream)
{
    struct copy *copy = malloc(sizeof(*copy));

    if (!copy)
        return fail(state, "no memory");
    *copy = (struct copy){state->copies, to->block[TESTED].at, from->block[TESTED].at, to->bytes};
    state->copies = copy;
    CALL(state, ep_stream_call(comm, stream, run_copy, copy));
    memcpy(to->block[BASE].at, from->block[BASE].at, to->bytes);
    return true;
}

void copies_free(struct rank_state *state)
{
    while (state->copies) {
        struct copy *copy = state->copies;

        state->copies = copy->next;
        free(copy);
    }
}
