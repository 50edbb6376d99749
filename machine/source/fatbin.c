/* SPDX-License-Identifier: Apache-2.0 */
/*
 * fatbin.c - the architectures of the GPU code in a section of fat binaries.
 *
 * NVIDIA documents no layout. This one is what nvcc 13.5 writes (compiled for sm_90, 90a, 100, 100a, 100f with PTX, and
 * read back), and agrees with what the Cricket project and others have published for CUDA 9 to 13. A section holds
 * consecutive containers, padded with zeros:
 *
 *     container  u32 magic 0xBA55ED50, u16 version 1, u16 bytes of this header (16), u64 bytes of the entries
 *     entry      u16 kind, u16 version, u32 bytes of this header (64, 80, 112, 120: by generation),
 *                u64 bytes of the payload after it, u32 ..., u32 ..., u16 minor, u16 major,
 *                u32 architecture (90), u32 ..., u32 ..., u64 flags, ...
 *
 * Only headers are read; payloads are skipped.
 */
#include "elf.h"
#include "source.h"

#include <unistd.h>

#define CONTAINER_MAGIC 0xba55ed50u
#define ENTRY_HEADER_MAX 4096 /* 120 so far */

enum { KIND_PTX = 1, KIND_CUBIN = 2, KIND_MERCURY = 16 };

/* Found by comparing the headers of sm_90 with sm_90a, and of sm_100 with sm_100a and sm_100f. */
#define FLAG_EXACT (UINT64_C(1) << 20)
#define FLAG_FAMILY (UINT64_C(1) << 21)

struct window {
    int fd;
    int64_t at, end;
};

/* As in a file; like all of ELF here, little-endian. */
struct container {
    uint32_t magic;
    uint16_t version, header;
    uint64_t entries;
};

struct entry {
    uint16_t kind, version;
    uint32_t header;
    uint64_t payload;
    uint32_t unknown[2];
    uint16_t minor, major;
    uint32_t arch, others[2];
    uint64_t flags, more[2];
};

static void add_arch(struct fatbin *fatbin, int arch)
{
    for (int i = 0; i < fatbin->n; i++)
        if (fatbin->archs[i] == arch)
            return;
    if (fatbin->n == ELF_MAX_ARCHS)
        fatbin->known = false;
    else
        fatbin->archs[fatbin->n++] = arch;
}

/* Reads a header at the beginning of the window. False: it does not fit, or no more headers may be read. */
static bool read_header(const struct window *window, struct fatbin *fatbin, void *ret_header, int64_t bytes)
{
    return window->end - window->at >= bytes && fatbin->budget-- > 0 &&
           pread(window->fd, ret_header, (size_t)bytes, window->at) == bytes;
}

static void note_entry(struct fatbin *fatbin, const struct entry *entry)
{
    int arch = (int)entry->arch;

    if (entry->kind != KIND_PTX && entry->kind != KIND_CUBIN && entry->kind != KIND_MERCURY)
        return; /* an intermediate form for linking, which no GPU runs */
    if (entry->arch == 0 || entry->arch >= ELF_ARCH_EXACT) {
        fatbin->known = false;
        return;
    }
    if (entry->flags & FLAG_EXACT)
        arch += ELF_ARCH_EXACT;
    else if (entry->flags & FLAG_FAMILY)
        arch += ELF_ARCH_FAMILY;
    add_arch(fatbin, entry->kind == KIND_PTX ? -arch : arch);
}

static bool read_container(struct window window, struct fatbin *fatbin)
{
    struct entry entry;

    while (window.at < window.end) {
        uint64_t left = (uint64_t)(window.end - window.at);

        if (!read_header(&window, fatbin, &entry, sizeof(entry)) || entry.header < sizeof(entry) ||
            entry.header > ENTRY_HEADER_MAX || entry.header > left || entry.payload > left - entry.header)
            return false;
        note_entry(fatbin, &entry);
        window.at += (int64_t)(entry.header + entry.payload);
    }
    return true;
}

void fatbin_read(int fd, int64_t offset, int64_t size, struct fatbin *fatbin)
{
    struct window window = {.fd = fd, .at = offset, .end = offset + size};
    struct container container;

    /* A rest shorter than a header is padding after the last container. */
    while (window.end - window.at >= (int64_t)sizeof(container)) {
        uint64_t left = (uint64_t)(window.end - window.at);
        bool is_read = read_header(&window, fatbin, &container, sizeof(container));

        if (is_read && container.magic == 0) {
            window.at += 8; /* containers are aligned to 8 bytes */
            continue;
        }
        if (!is_read || container.magic != CONTAINER_MAGIC || container.header < sizeof(container) ||
            container.header > left || container.entries > left - container.header ||
            !read_container((struct window){fd, window.at + container.header,
                                            window.at + container.header + (int64_t)container.entries},
                            fatbin)) {
            fatbin->known = false;
            return;
        }
        window.at += container.header + (int64_t)container.entries;
        window.at += -(window.at - offset) & 7;
    }
}
