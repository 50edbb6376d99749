/* SPDX-License-Identifier: Apache-2.0 */
/*
 * number_formats.h - conversions of the small number formats, independent of the library's (epkit/numeric.h), so that
 * the checks do not share its errors.
 */
#ifndef EP_TEST_CHECK_NUMBER_FORMATS_H
#define EP_TEST_CHECK_NUMBER_FORMATS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t format_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float format_float(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* bf16: the upper half of an IEEE single. */
static inline float format_from_bf16(uint16_t bits)
{
    return format_float((uint32_t)bits << 16);
}

/* Nearest, ties to even. A carry out of the mantissa increments the exponent, from the largest value to infinity. */
static inline uint16_t format_to_bf16(float value)
{
    uint32_t bits = format_bits(value);
    uint32_t upper = bits >> 16, lower = bits & 0xffff;

    if (value != value)
        return (uint16_t)(upper | 0x40);
    if (lower > 0x8000 || (lower == 0x8000 && upper % 2 == 1))
        upper++;
    return (uint16_t)upper;
}

/* fp8 e4m3fn: sign, 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal; s1111111 is NaN. */
static inline float format_from_e4m3(uint8_t bits)
{
    int exponent = bits >> 3 & 15, mantissa = bits & 7;
    float value;

    if ((bits & 0x7f) == 0x7f)
        return NAN;
    value = exponent ? ldexpf((float)(8 + mantissa), exponent - 7 - 3) : ldexpf((float)mantissa, 1 - 7 - 3);
    return bits & 0x80 ? -value : value;
}

/* Nearest, ties to even, saturating at 448; NaN is 0x7f. */
uint8_t format_to_e4m3(float value);

/* fp4 e2m1, of a magnitude: nearest, ties to even, at most 6, which a NaN becomes, too. */
uint8_t format_to_e2m1(float magnitude);

/* ue8m0: a biased exponent byte. */
static inline float format_from_ue8m0(uint8_t bits)
{
    return bits == 255 ? NAN : ldexpf(1.0f, bits - 127);
}

/* The smallest power of two not below `value`, which is positive and finite. */
static inline float format_power_of_two(float value)
{
    int exponent;
    float fraction = frexpf(value, &exponent);

    return ldexpf(1.0f, fraction == 0.5f ? exponent - 1 : exponent);
}

#endif
