/* SPDX-License-Identifier: Apache-2.0 */
#include "number_formats.h"

uint8_t format_to_e4m3(float value)
{
    uint32_t bits = format_bits(value);
    uint8_t sign = (uint8_t)(bits >> 24 & 0x80);
    float magnitude = format_float(bits & 0x7fffffff);
    int exponent = (int)(bits >> 23 & 255) - 127;
    int steps;

    if (value != value)
        return 0x7f;
    if (magnitude >= 448)
        return sign | 0x7e;
    /* Below 2^-6: subnormals, with the step of the smallest normals. */
    if (exponent < -6)
        exponent = -6;
    /* Codes of one exponent are 2^(exponent-3) apart; the scaling by a power of two is exact, lrintf ties to even. */
    steps = (int)lrintf(magnitude * format_float((uint32_t)(127 + 3 - exponent) << 23));
    /* 8..15: within the exponent; 16: first code of the next one; 0..7: subnormal. Codes are consecutive. */
    return sign | (uint8_t)(steps + (exponent + 6) * 8);
}

uint8_t format_to_e2m1(float magnitude)
{
    static const float values[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
    uint8_t code = 7;

    while (code && magnitude < values[code]) {
        float below = magnitude - values[code - 1], above = values[code] - magnitude;

        if (above < below || (above == below && code % 2 == 0))
            break;
        code--;
    }
    return code;
}
