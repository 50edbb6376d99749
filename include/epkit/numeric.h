/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/numeric.h - the small formats that travel: bf16, fp8 e4m3, ue8m0. Host functions, pure, any thread.
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
 * Smallest power of two not below `value` (which must be positive and finite), as a biased exponent byte. What is above
 * 2^127 gets 2^127, what is below 2^-127 gets 2^-127; NaN and infinity give 255.
 */
EP_API uint8_t ep_ue8m0_from_f32(float value);
EP_API float ep_ue8m0_to_f32(uint8_t bits); /* 2^(bits-127); 255 is NaN */

/*
 * Quantise a row of `hidden` (a multiple of 128) bf16 elements to e4m3 with one factor per 128 elements; the rule is
 * that of ep_ll_dispatch(), each division an IEEE one in single precision. ret_scales: hidden/128 floats. Returns
 * nothing, so it checks nothing: none of the three may overlap another. An element that is NaN gives NaN and does not
 * count for the factor; an infinite one makes its block NaN, because the factor is infinite (with rounding: NaN) then.
 */
EP_API void ep_quantize_row(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* Pack n (a multiple of 4) power-of-two scales as ue8m0 bytes, four in each int32, lowest byte first. The two may not
 * overlap. */
EP_API void ep_pack_ue8m0(const float *scales, int n, int32_t *ret_packed);

#ifdef __cplusplus
}
#endif

#endif
