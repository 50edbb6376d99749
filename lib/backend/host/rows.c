/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c - selects the variant of the inner loops, and the size from which streaming is faster. */
#include "backend/host/rows.h"
#include "base/fd.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define CACHE_DIRECTORY "/sys/devices/system/cpu/cpu0/cache"

/*
 * For machines whose sysfs has no cache sizes (containers without /sys, some virtual machines): a small server's share.
 */
#define CACHE_BYTES_UNKNOWN ((size_t)8 << 20)
/*
 * What a rank can use of a cache that it shares with other ranks and programs. A virtual machine reports the cache of
 * the whole socket (480 MiB with 2 processors), in which plain stores of 15 MB and more took 1.5 to 1.8 times as long.
 */
#define CACHE_BYTES_MAX ((size_t)16 << 20)

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

/* First line of a file of the cache number `index`. */
static bool read_line(const char *directory, int index, const char *file, char *ret_line, size_t bytes)
{
    char path[512];

    if ((size_t)snprintf(path, sizeof(path), "%s/index%d/%s", directory, index, file) >= sizeof(path) ||
        !ep_fd_read_text(path, ret_line, bytes))
        return false;
    ret_line[strcspn(ret_line, "\n")] = '\0';
    return true;
}

/* "32768K", as sysfs writes it; 0 for anything else. */
static size_t parse_size(const char *text)
{
    static const char units[] = "KMG";
    unsigned long long number;
    const char *unit;
    char *end;

    if (*text < '0' || *text > '9')
        return 0;
    number = strtoull(text, &end, 10);
    if (!*end)
        return (size_t)number;
    unit = strchr(units, *end);
    if (!unit || end[1] || number >= 1ull << 32)
        return 0;
    return (size_t)number << (10 * (unit - units + 1));
}

size_t ep_rows_last_level_cache(const char *directory)
{
    char text[32], type[32], size[32];
    size_t bytes, found = 0;
    long level, highest = 0;
    int index;

    for (index = 0; read_line(directory, index, "level", text, sizeof(text)); index++) {
        if (!read_line(directory, index, "type", type, sizeof(type)) || !strcmp(type, "Instruction"))
            continue;
        if (!read_line(directory, index, "size", size, sizeof(size)))
            continue;
        bytes = parse_size(size);
        level = strtol(text, NULL, 10);
        if (bytes && level > highest) {
            highest = level;
            found = bytes;
        }
    }
    return found;
}

size_t ep_rows_stream_threshold(void)
{
    static _Atomic size_t known;
    size_t bytes = atomic_load_explicit(&known, memory_order_relaxed);

    if (bytes)
        return bytes;
    /* Not sysconf(_SC_LEVEL3_CACHE_SIZE): glibc computes it from CPUID and is off by a factor of 12 on some guests. */
    bytes = ep_rows_last_level_cache(CACHE_DIRECTORY);
    if (!bytes)
        bytes = CACHE_BYTES_UNKNOWN;
    if (bytes > CACHE_BYTES_MAX)
        bytes = CACHE_BYTES_MAX;
    atomic_store_explicit(&known, bytes, memory_order_relaxed);
    return bytes;
}
