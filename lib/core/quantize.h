/* SPDX-License-Identifier: Apache-2.0 */
/*
 * quantize.h - quantisation of rows as in low-latency calls, for backends and their tests; and its variants, one for
 * each vector width, which the tests compare.
 */
#ifndef EP_CORE_QUANTIZE_H
#define EP_CORE_QUANTIZE_H

#include "base/error.h"

#include <epkit/lowlatency.h>
#include <stdint.h>

/*
 * Quantise a row of `hidden` (a multiple of 128) bf16 elements to e4m3 with one factor per 128 elements; the rule is
 * that of ep_ll_dispatch(), with IEEE single-precision divisions. ret_scales: hidden/128 floats. Nothing is checked:
 * the three arrays must not overlap. A NaN element gives NaN and is ignored for the factor; an infinite element makes
 * its block NaN, because the factor is then infinite (with rounding: NaN).
 */
EP_PRIVATE_API void ep_quantize_row(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* Packs n (a multiple of 4) power-of-two scales as ue8m0 bytes, four in each int32, lowest byte first. The two arrays
 * must not overlap. */
EP_PRIVATE_API void ep_pack_ue8m0(const float *scales, int n, int32_t *ret_packed);

/*
 * Quantises a row to the format of ep_ll_dispatch_args: out_dtype, scale_type, flags and global_scale are used.
 * ret_scales: the words of the row's scales.
 */
EP_PRIVATE_API void ep_quantize(const uint16_t *x, int hidden, const ep_ll_dispatch_args *format, void *ret_x,
                                void *ret_scales);

typedef void (*ep_quantize_fn)(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* "portable", "avx2" or "avx512"; NULL if this machine cannot run it. */
ep_quantize_fn ep_quantize_find(const char *isa);

#endif
