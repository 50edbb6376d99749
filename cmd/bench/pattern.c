/* SPDX-License-Identifier: Apache-2.0 */
#include "pattern.h"

#include "cmd/test/check/random.h"

#include <string.h>

/* Masks of the random bits of each element, and bits that are set, for eight bytes. */
static const struct {
    uint64_t keep, add;
} masks[] = {
    [PATTERN_BF16] = {UINT64_C(0x81ff81ff81ff81ff), UINT64_C(0x3e003e003e003e00)},
    [PATTERN_FP8] = {UINT64_C(0xf7f7f7f7f7f7f7f7), 0},
    [PATTERN_SCALES] = {UINT64_C(0x007fffff007fffff), UINT64_C(0x3f8000003f800000)},
};

uint64_t pattern_key(uint64_t seed, enum pattern_stream stream, int holder, int source, int token)
{
    return random_key(seed, (uint64_t)stream, (uint64_t)holder, (uint64_t)source << 32 | (uint32_t)token);
}

static uint64_t word_at(enum pattern_kind kind, uint64_t key, size_t i)
{
    return (random_at(key, i) & masks[kind].keep) | masks[kind].add;
}

void pattern_fill(void *row, size_t bytes, enum pattern_kind kind, uint64_t key)
{
    unsigned char *at = row;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word = word_at(kind, key, i);

        memcpy(at + 8 * i, &word, 8);
    }
    if (bytes % 8) {
        uint64_t word = word_at(kind, key, bytes / 8);

        memcpy(at + bytes / 8 * 8, &word, bytes % 8);
    }
}

bool pattern_holds(const void *row, size_t bytes, enum pattern_kind kind, uint64_t key)
{
    const unsigned char *at = row;
    uint64_t different = 0;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word;

        memcpy(&word, at + 8 * i, 8);
        different |= word ^ word_at(kind, key, i);
    }
    if (bytes % 8) {
        uint64_t word = word_at(kind, key, bytes / 8);

        different |= memcmp(at + bytes / 8 * 8, &word, bytes % 8) != 0;
    }
    return different == 0;
}
