/* SPDX-License-Identifier: Apache-2.0 */
#include "check/run.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* So many rounding errors are close to their mean: it has exceeded a limit with 16 elements, but not with 32. */
#define DISTANCE_ELEMENTS 64

void check_mismatch(struct check_run *run, const char *format, ...)
{
    struct check_verdict *verdict = &run->verdict;
    va_list args;
    int n;

    if (verdict->failed)
        return;
    verdict->failed = 1;
    n = snprintf(verdict->text, sizeof(verdict->text), "%s: ", run->phase);
    va_start(args, format);
    vsnprintf(verdict->text + n, sizeof(verdict->text) - (size_t)n, format, args);
    va_end(args);
}

/* One element as a number, whatever its size. */
static uint64_t read_item(const void *items, size_t item_bytes, size_t i)
{
    const unsigned char *item = (const unsigned char *)items + i * item_bytes;
    uint64_t value = 0;

    for (size_t byte = item_bytes; byte-- > 0;)
        value = value << 8 | item[byte];
    return value;
}

void check_row(struct check_run *run, const char *what, int64_t row, const struct reference_row *source,
               size_t item_bytes, size_t bytes, const void *expected, const void *got)
{
    char from[64] = "";
    int digits = (int)item_bytes * 2;
    size_t i = 0;

    if (!memcmp(expected, got, bytes) || run->verdict.failed)
        return;
    while (!memcmp((const char *)expected + i * item_bytes, (const char *)got + i * item_bytes, item_bytes))
        i++;
    if (source && source->rank < 0)
        snprintf(from, sizeof(from), " (padding)");
    else if (source)
        snprintf(from, sizeof(from), " (rank %d token %d)", source->rank, source->token);
    check_mismatch(run, "%s row %" PRId64 "%s element %zu: expected 0x%0*" PRIx64 ", got 0x%0*" PRIx64, what, row, from,
                   i, digits, read_item(expected, item_bytes, i), digits, read_item(got, item_bytes, i));
}

void check_equal(struct check_run *run, const char *what, int64_t expected, int64_t got)
{
    if (expected != got)
        check_mismatch(run, "%s: expected %" PRId64 ", got %" PRId64, what, expected, got);
}

void check_equal_i32(struct check_run *run, const char *what, int64_t n, const int32_t *expected, const int32_t *got)
{
    if (!got) {
        check_mismatch(run, "%s is NULL", what);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        if (expected[i] != got[i]) {
            check_mismatch(run, "%s[%" PRId64 "]: expected %d, got %d", what, i, expected[i], got[i]);
            return;
        }
}

void check_equal_i64(struct check_run *run, const char *what, int64_t n, const int64_t *expected, const int64_t *got)
{
    if (!got) {
        check_mismatch(run, "%s is NULL", what);
        return;
    }
    for (int64_t i = 0; i < n; i++)
        if (expected[i] != got[i]) {
            check_mismatch(run, "%s[%" PRId64 "]: expected %" PRId64 ", got %" PRId64, what, i, expected[i], got[i]);
            return;
        }
}

void check_distance_below(struct check_run *run, const struct check_distance *distance, double limit)
{
    double value = distance->aa_bb == 0 ? 0 : 1 - 2 * distance->ab / distance->aa_bb;

    if (distance->n < DISTANCE_ELEMENTS)
        return;
    if (!(value < limit)) /* also if it is NaN */
        check_mismatch(run, "error %.3g against the input, limit %.3g", value, limit);
}

/* The memory passed to the library: of ep_alloc(), or the mirror of ordinary memory. */
static ep_status alloc_address(struct check_run *run, size_t bytes, bool symmetric, unsigned char **ret_address)
{
    void *address;

    if (symmetric)
        CHECK_CALL(run, ep_alloc, run->ctx->comm, bytes, &address);
    else
        CHECK_CALL(run, run->ctx->memory->alloc, run->ctx, bytes, &address);
    *ret_address = address;
    return EP_OK;
}

ep_status check_buffer_new(struct check_run *run, int64_t n_items, size_t item_bytes, bool symmetric,
                           struct check_buffer *ret_buffer)
{
    struct check_buffer buffer = {.symmetric = symmetric};
    bool has_mirror = run->ctx->memory;
    ep_status status = EP_OK;
    size_t all;

    run->call = "sizing a buffer";
    if (n_items < 0 || __builtin_mul_overflow((size_t)n_items, item_bytes, &buffer.bytes) ||
        __builtin_add_overflow(buffer.bytes, (size_t)CHECK_GUARD_BYTES + 4095, &all))
        return EP_E_OVERFLOW;
    all = all / 4096 * 4096;
    if (!symmetric || has_mirror) {
        run->call = "aligned_alloc";
        buffer.memory = aligned_alloc(4096, all);
        if (!buffer.memory)
            return EP_E_MEMORY;
    }
    buffer.address = buffer.memory;
    if (symmetric || has_mirror)
        status = alloc_address(run, all, symmetric, &buffer.address);
    if (status != EP_OK) {
        free(buffer.memory);
        return status;
    }
    if (!buffer.memory)
        buffer.memory = buffer.address;
    *ret_buffer = buffer;
    return EP_OK;
}

static ep_status free_buffer(struct check_run *run, struct check_buffer *buffer)
{
    struct check_buffer old = *buffer;

    *buffer = (struct check_buffer){0};
    if (!old.memory)
        return EP_OK;
    if (old.address != old.memory || !old.symmetric)
        free(old.memory);
    if (old.symmetric)
        CHECK_CALL(run, ep_free, run->ctx->comm, old.address);
    else if (old.address != old.memory)
        run->ctx->memory->free(run->ctx, old.address);
    return EP_OK;
}

ep_status check_buffers_free(struct check_run *run, struct check_buffer *const *buffers, size_t n, bool healthy)
{
    ep_status status = EP_OK;

    for (size_t i = 0; i < n; i++)
        if ((healthy && status == EP_OK) || !buffers[i]->symmetric) {
            ep_status result = free_buffer(run, buffers[i]);

            status = status == EP_OK ? result : status;
        }
    return status;
}

ep_status check_buffer_poison_part(struct check_run *run, struct check_buffer *buffer, size_t from, size_t to)
{
    memset(buffer->memory + from, CHECK_POISON, to - from);
    if (buffer->address != buffer->memory)
        CHECK_CALL(run, run->ctx->memory->fill, run->ctx, buffer->address + from, CHECK_POISON, to - from);
    return EP_OK;
}

ep_status check_buffer_poison(struct check_run *run, struct check_buffer *buffer, size_t used)
{
    return check_buffer_poison_part(run, buffer, 0, used + CHECK_GUARD_BYTES);
}

ep_status check_buffer_push(struct check_run *run, const struct check_buffer *buffer, size_t from, size_t to)
{
    if (buffer->address != buffer->memory)
        CHECK_CALL(run, run->ctx->memory->copy, run->ctx, buffer->address + from, buffer->memory + from, to - from);
    return EP_OK;
}

ep_status check_buffer_load_choices(struct check_run *run, int idx_type, struct check_buffer *buffer)
{
    const struct reference_group *group = &run->group;
    const int32_t *experts = group->experts[run->ctx->rank];
    size_t n = (size_t)group->n_tokens[run->ctx->rank] * (size_t)group->topk;
    bool is_64 = idx_type == EP_I64;

    for (size_t i = 0; i < n; i++) {
        if (is_64)
            ((int64_t *)(void *)buffer->memory)[i] = experts[i];
        else
            ((int32_t *)(void *)buffer->memory)[i] = experts[i];
    }
    return check_buffer_push(run, buffer, 0, n * (is_64 ? 8 : 4));
}

ep_status check_buffer_pull(struct check_run *run, struct check_buffer *buffer, size_t from, size_t to)
{
    if (buffer->address != buffer->memory)
        CHECK_CALL(run, run->ctx->memory->copy, run->ctx, buffer->memory + from, buffer->address + from, to - from);
    return EP_OK;
}

ep_status check_buffer_pull_guarded(struct check_run *run, struct check_buffer *buffer, size_t used)
{
    return check_buffer_pull(run, buffer, 0, used + CHECK_GUARD_BYTES);
}

void check_buffer_untouched(struct check_run *run, const char *what, const struct check_buffer *buffer, size_t from,
                            size_t to)
{
    for (size_t i = from; i < to; i++)
        if (buffer->memory[i] != CHECK_POISON) {
            check_mismatch(run, "%s: byte %zu after the %zu that may be written is 0x%02x", what, i - from, from,
                           buffer->memory[i]);
            return;
        }
}

void check_buffer_guard(struct check_run *run, const char *what, const struct check_buffer *buffer, size_t used)
{
    check_buffer_untouched(run, what, buffer, used, used + CHECK_GUARD_BYTES);
}

bool check_is_symmetric(const struct check_run *run, int index)
{
    if (run->parameters.memory != CHECK_ALTERNATE)
        return run->parameters.memory == CHECK_SYMMETRIC;
    /* The parity of the bits depends on every dimension of a matrix, so that it is not correlated with one of them. */
    return __builtin_parity((unsigned)index);
}
