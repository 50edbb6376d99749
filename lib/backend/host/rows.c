/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c - selects the variant of the inner loops. */
#include "backend/host/rows.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

/*
 * Bytes written to one destination before the next one. To 2, 4 and 8 destinations 4 KiB at a time wrote 1.64, 1.79 and
 * 2.03 times the rate of memcpy of 300 MB; a whole row of 14 KiB 1.50, 1.66 and 1.82, 256 bytes 1.65, 1.75 and 1.82. A
 * page at a time also needs one translation at a time.
 */
#define CHUNK_BYTES 4096
#define LINE 64 /* bytes of a cache line */

/* Best first. */
static const struct ep_rows_ops *const variants[] = {
#if defined(__x86_64__)
    &ep_rows_avx512, &ep_rows_avx2,
#endif
    &ep_rows_portable};

#define N_VARIANTS (sizeof(variants) / sizeof(variants[0]))

static bool runs_here(const struct ep_rows_ops *ops)
{
#if defined(__x86_64__)
    bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");

    if (ops == &ep_rows_avx512)
        return has_avx2 && __builtin_cpu_supports("avx512f");
    if (ops == &ep_rows_avx2)
        return has_avx2;
#endif
    return ops == &ep_rows_portable;
}

const struct ep_rows_ops *ep_rows_find(const char *name)
{
    for (size_t i = 0; i < N_VARIANTS; i++)
        if (!strcmp(variants[i]->name, name) && runs_here(variants[i]))
            return variants[i];
    return NULL;
}

const struct ep_rows_ops *ep_rows_get(void)
{
    /* Concurrent threads select the same variant. */
    static _Atomic(const struct ep_rows_ops *) chosen;
    const struct ep_rows_ops *ops = atomic_load_explicit(&chosen, memory_order_relaxed);
    const char *wanted;

    if (ops)
        return ops;
    wanted = getenv("EPKIT_HOST_ISA");
    if (wanted)
        ops = ep_rows_find(wanted);
    for (size_t i = 0; i < N_VARIANTS && !ops; i++)
        if (runs_here(variants[i]))
            ops = variants[i];
    atomic_store_explicit(&chosen, ops, memory_order_relaxed);
    return ops;
}

void ep_rows_copy(void *const *dst, int n, const void *src, size_t bytes)
{
    for (int i = 0; i < n; i++)
        memcpy(dst[i], src, bytes);
}

/*
 * End of the chunk that ends near `at`, aligned to a line of this destination: otherwise the halves of a line would be
 * written separately.
 */
static size_t chunk_end(const unsigned char *to, size_t at, size_t bytes)
{
    size_t end = at + (0 - (uintptr_t)to) % LINE;

    return end < bytes ? end : bytes;
}

void ep_rows_copy_stream(void *const *dst, int n, const void *src, size_t bytes)
{
    void (*stream_range)(void *to, const void *from, size_t bytes) = ep_rows_get()->stream_range;

    for (size_t chunk = 0; chunk < bytes; chunk += CHUNK_BYTES) {
        for (int i = 0; i < n; i++) {
            unsigned char *to = dst[i];
            size_t start = chunk ? chunk_end(to, chunk, bytes) : 0;
            size_t end = chunk_end(to, chunk + CHUNK_BYTES, bytes);

            stream_range(to + start, (const unsigned char *)src + start, end - start);
        }
    }
}

void ep_rows_stream_end(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#else
    atomic_thread_fence(memory_order_release);
#endif
}
