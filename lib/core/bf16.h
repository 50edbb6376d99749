/* SPDX-License-Identifier: Apache-2.0 */
/*
 * bf16.h - bf16 and the bits of floats, inline: for loops that the compiler vectorises.
 */
#ifndef EP_CORE_BF16_H
#define EP_CORE_BF16_H

#include <stdint.h>
#include <string.h>

#define EP_BF16_NAN 0x7fc0u
#define EP_F32_NAN_BITS 0x7fc00000u
#define EP_F32_INF_BITS 0x7f800000u

static inline uint32_t ep_bits_of_f32(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float ep_f32_of_bits(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline float ep_bf16_widen(uint16_t bits)
{
    return ep_f32_of_bits((uint32_t)bits << 16);
}

/*
 * Nearest even. Every NaN becomes EP_BF16_NAN: the payload and sign of a NaN after an addition depend on the processor
 * and the order of operands, but results must have the same bits everywhere.
 */
static inline uint16_t ep_bf16_round(float value)
{
    uint32_t bits = ep_bits_of_f32(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;

    return (uint16_t)((bits & 0x7fffffffu) > EP_F32_INF_BITS ? EP_BF16_NAN : rounded);
}

#endif
