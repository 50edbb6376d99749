/* SPDX-License-Identifier: Apache-2.0 */
/* numbers.h - random bits, and the bits of a float. */
#ifndef EP_TESTS_UNIT_NUMBERS_H
#define EP_TESTS_UNIT_NUMBERS_H

#include <stdint.h>
#include <string.h>

static uint64_t random_state = 88172645463325252u;

static inline uint64_t random_next(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

static inline float float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

#endif
