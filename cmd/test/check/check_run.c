/* SPDX-License-Identifier: Apache-2.0 */
#include "check_run.h"

#include "common/memory.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

void check_mismatch(struct check_run *run, const char *format, ...)
{
    struct check_verdict *verdict = &run->verdict;
    int n;

    if (verdict->failed)
        return;
    verdict->failed = 1;
    n = snprintf(verdict->text, sizeof(verdict->text), "%s: ", run->phase);
    WITH_ARGS(args, format, vsnprintf(verdict->text + n, sizeof(verdict->text) - (size_t)n, format, args));
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

void check_equal_array(struct check_run *run, const char *what, int64_t n, size_t item_bytes, const void *expected,
                       const void *got)
{
    char name[64];

    if (!got)
        check_mismatch(run, "%s is NULL", what);
    for (int64_t i = 0; got && i < n; i++) {
        uint64_t want = read_item(expected, item_bytes, (size_t)i), have = read_item(got, item_bytes, (size_t)i);

        if (want == have)
            continue;
        snprintf(name, sizeof(name), "%s[%" PRId64 "]", what, i);
        if (item_bytes == 4)
            check_equal(run, name, (int32_t)want, (int32_t)have);
        else
            check_equal(run, name, (int64_t)want, (int64_t)have);
        return;
    }
}

void *check_alloc(struct check_run *run, int64_t n_items, size_t item_bytes, bool symmetric)
{
    size_t bytes;

    if (n_items < 0 || __builtin_mul_overflow((size_t)n_items, item_bytes, &bytes) || bytes > SIZE_MAX / 2) {
        mirrors_fail(&run->mirrors, EP_E_OVERFLOW, "sizing a buffer");
        return NULL;
    }
    return mirrors_alloc(&run->mirrors, bytes + CHECK_GUARD_BYTES,
                         MIRRORS_UNTOUCHED | (symmetric ? MIRRORS_SYMMETRIC : 0));
}

ep_status check_buffers(struct check_run *run)
{
    if (run->mirrors.status != EP_OK)
        run->call = run->mirrors.call;
    return run->mirrors.status;
}

void check_poison(struct check_run *run, void *buffer, size_t used)
{
    mirrors_poison(&run->mirrors, buffer, used + CHECK_GUARD_BYTES);
}

void check_pull(struct check_run *run, void *buffer, size_t used)
{
    mirrors_pull(&run->mirrors, buffer, used + CHECK_GUARD_BYTES);
}

void check_load_choices(struct check_run *run, int idx_type, void *buffer)
{
    const struct reference_group *group = &run->group;
    const int32_t *experts = group->experts[run->ctx->rank];
    size_t n = (size_t)group->n_tokens[run->ctx->rank] * (size_t)group->topk;
    bool is_64 = idx_type == EP_I64;

    for (size_t i = 0; i < n; i++) {
        if (is_64)
            ((int64_t *)buffer)[i] = experts[i];
        else
            ((int32_t *)buffer)[i] = experts[i];
    }
    mirrors_push(&run->mirrors, buffer, n * (is_64 ? 8 : 4));
}

void check_untouched(struct check_run *run, const char *what, const void *buffer, size_t from, size_t to)
{
    const unsigned char *bytes = buffer;

    for (size_t i = from; i < to; i++)
        if (bytes[i] != CHECK_POISON) {
            check_mismatch(run, "%s: byte %zu after the %zu that may be written is 0x%02x", what, i - from, from,
                           bytes[i]);
            return;
        }
}

void check_guard(struct check_run *run, const char *what, const void *buffer, size_t used)
{
    check_untouched(run, what, buffer, used, used + CHECK_GUARD_BYTES);
}

bool check_is_symmetric(const struct check_run *run, int index)
{
    if (run->parameters.memory != CHECK_ALTERNATE)
        return run->parameters.memory == CHECK_SYMMETRIC;
    /* The parity of the bits depends on every dimension of a matrix, so that it is not correlated with one of them. */
    return __builtin_parity((unsigned)index);
}
