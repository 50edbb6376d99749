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

#include <endian.h>
#include <string.h>
#include <unistd.h>

#define CONTAINER_MAGIC 0xba55ed50u
#define CONTAINER_BYTES 16
#define ENTRY_BYTES 64
#define ENTRY_HEADER_MAX 4096 /* 120 so far */

enum { KIND_PTX = 1, KIND_CUBIN = 2, KIND_MERCURY = 16 };

/* Found by comparing the headers of sm_90 with sm_90a, and of sm_100 with sm_100a and sm_100f. */
#define FLAG_EXACT (UINT64_C(1) << 20)
#define FLAG_FAMILY (UINT64_C(1) << 21)

struct window {
    int fd;
    int64_t at, end;
};

static uint16_t u16(const unsigned char *at)
{
    uint16_t value;

    memcpy(&value, at, sizeof(value));
    return le16toh(value);
}

static uint32_t u32(const unsigned char *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

static uint64_t u64(const unsigned char *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

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
static bool read_header(const struct window *window, struct fatbin *fatbin, unsigned char *ret_header, int64_t bytes)
{
    if (window->end - window->at < bytes || fatbin->budget == 0)
        return false;
    fatbin->budget--;
    return pread(window->fd, ret_header, (size_t)bytes, window->at) == bytes;
}

static void note_entry(struct fatbin *fatbin, const unsigned char *entry)
{
    uint16_t kind = u16(entry);
    uint32_t number = u32(entry + 28);
    uint64_t flags = u64(entry + 40);
    int arch;

    if (kind != KIND_PTX && kind != KIND_CUBIN && kind != KIND_MERCURY)
        return; /* an intermediate form for linking, which no GPU runs */
    if (number == 0 || number >= ELF_ARCH_EXACT) {
        fatbin->known = false;
        return;
    }
    arch = (int)number;
    if (flags & FLAG_EXACT)
        arch += ELF_ARCH_EXACT;
    else if (flags & FLAG_FAMILY)
        arch += ELF_ARCH_FAMILY;
    add_arch(fatbin, kind == KIND_PTX ? -arch : arch);
}

static bool read_container(struct window window, struct fatbin *fatbin)
{
    unsigned char entry[ENTRY_BYTES];

    while (window.at < window.end) {
        uint64_t header, payload, left = (uint64_t)(window.end - window.at);

        if (!read_header(&window, fatbin, entry, ENTRY_BYTES))
            return false;
        header = u32(entry + 4);
        payload = u64(entry + 8);
        if (header < ENTRY_BYTES || header > ENTRY_HEADER_MAX || header > left || payload > left - header)
            return false;
        note_entry(fatbin, entry);
        window.at += (int64_t)(header + payload);
    }
    return true;
}

void fatbin_read(int fd, int64_t offset, int64_t size, struct fatbin *fatbin)
{
    struct window window = {.fd = fd, .at = offset, .end = offset + size};
    unsigned char header[CONTAINER_BYTES];

    /* A rest shorter than a header is padding after the last container. */
    while (window.end - window.at >= CONTAINER_BYTES) {
        uint64_t entries, left = (uint64_t)(window.end - window.at);

        if (!read_header(&window, fatbin, header, CONTAINER_BYTES)) {
            fatbin->known = false;
            return;
        }
        if (u32(header) == 0) {
            window.at += 8; /* containers are aligned to 8 bytes */
            continue;
        }
        entries = u64(header + 8);
        if (u32(header) != CONTAINER_MAGIC || u16(header + 6) < CONTAINER_BYTES || u16(header + 6) > left ||
            entries > left - u16(header + 6)) {
            fatbin->known = false;
            return;
        }
        window.at += u16(header + 6);
        if (!read_container((struct window){fd, window.at, window.at + (int64_t)entries}, fatbin)) {
            fatbin->known = false;
            return;
        }
        window.at += (int64_t)entries;
        window.at += -(window.at - offset) & 7;
    }
}
