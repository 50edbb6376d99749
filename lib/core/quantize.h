/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.h - quantising rows as low-latency calls do: for backends and for what checks them. And its forms, one for
 * each width of vector, which the tests compare.
 */
#ifndef EP_CORE_QUANTIZE_H
#define EP_CORE_QUANTIZE_H

#include "base/error.h"

#include <stdint.h>

/*
 * Quantise a row of `hidden` (a multiple of 128) bf16 elements to e4m3 with one factor per 128 elements; the rule is
 * that of ep_ll_dispatch(), each division an IEEE one in single precision. ret_scales: hidden/128 floats. Returns
 * nothing, so it checks nothing: none of the three may overlap another. An element that is NaN gives NaN and does not
 * count for the factor; an infinite one makes its block NaN, because the factor is infinite (with rounding: NaN) then.
 */
EP_PRIVATE_API void ep_quantize_row(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* Pack n (a multiple of 4) power-of-two scales as ue8m0 bytes, four in each int32, lowest byte first. The two may not
 * overlap. */
EP_PRIVATE_API void ep_pack_ue8m0(const float *scales, int n, int32_t *ret_packed);

typedef void (*ep_quantize_fn)(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* "portable", "avx2" or "avx512"; NULL if this machine cannot run it. */
ep_quantize_fn ep_quantize_find(const char *isa);

#endif
