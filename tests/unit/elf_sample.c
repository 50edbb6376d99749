/* SPDX-License-Identifier: Apache-2.0 */
/* elf_sample.c - a library for test_elf.c: SAMPLE says which. Nothing in it runs. */

#if defined(SAMPLE_VERSIONS)

int sample_one(void);
int sample_two(void);

int sample_one(void)
{
    return 1;
}

int sample_two(void)
{
    return 2;
}

#elif defined(SAMPLE_USER)

int sample_two(void);
int sample_user(void);

int sample_user(void)
{
    return sample_two();
}

#elif defined(SAMPLE_GPU)

#include <stdint.h>

/* Headers as nvcc 13 writes them; the payloads are made up. */
struct sample_entry {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t payload_bytes;
    uint32_t compressed, options;
    uint16_t minor, major;
    uint32_t arch, name, name_bytes;
    uint64_t flags, zero, decompressed;
};

struct sample_container {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

#define CONTAINER(size)                                                                                                \
    {                                                                                                                  \
        0xba55ed50u, 1, 16, (size)                                                                                     \
    }
#define ENTRY(kind, arch, flags)                                                                                       \
    {                                                                                                                  \
        (kind), 0x101, sizeof(struct sample_entry), 16, 0, 0, 0, 1, (arch), 0, 0, (flags), 0, 0                        \
    }

/* Two containers, of which the second follows padding: sm_90a with PTX for 90; sm_100f with an entry of a new kind. */
const struct {
    struct sample_container first;
    struct sample_entry cubin;
    uint64_t cubin_bytes[2];
    struct sample_entry ptx;
    uint64_t ptx_bytes[2];
    uint64_t padding;
    struct sample_container second;
    struct sample_entry family;
    uint64_t family_bytes[2];
    struct sample_entry other;
    uint64_t other_bytes[2];
} sample_gpu __attribute__((section(".nv_fatbin"), used)) = {
    .first = CONTAINER(2 * (sizeof(struct sample_entry) + 16)),
    .cubin = ENTRY(2, 90, 0x100011),
    .ptx = ENTRY(1, 90, 0x8011),
    .second = CONTAINER(2 * (sizeof(struct sample_entry) + 16)),
    .family = ENTRY(2, 100, 0x1200011),
    .other = ENTRY(8, 75, 0x11),
};

#else

int sample_plain(void);

int sample_plain(void)
{
    return 0;
}

#endif
