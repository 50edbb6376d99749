/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/numeric.h - conversions of the small number formats bf16, fp8 e4m3 and ue8m0. Pure host functions, any thread.
 */
#ifndef EPKIT_NUMERIC_H
#define EPKIT_NUMERIC_H

#include <epkit/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Round to nearest even. Every NaN becomes the quiet NaN 0x7fc0. */
EP_API uint16_t ep_bf16_from_f32(float value);
EP_API float ep_bf16_to_f32(uint16_t bits);

/* e4m3fn of the OCP 8-bit floating point specification 1.0: nearest even, saturates at +-448, NaN is 0x7f. */
EP_API uint8_t ep_e4m3_from_f32(float value);
EP_API float ep_e4m3_to_f32(uint8_t bits);

/*
 * Smallest power of two not below `value` (which must be positive and finite), as a biased exponent byte. Clamped to
 * 2^-127 .. 2^127. NaN and infinity give 255.
 */
EP_API uint8_t ep_ue8m0_from_f32(float value);
EP_API float ep_ue8m0_to_f32(uint8_t bits); /* 2^(bits-127); 255 is NaN */

#ifdef __cplusplus
}
#endif

#endif
