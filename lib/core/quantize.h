/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.h - the forms of ep_quantize_row(), one for each width of vector: for the tests, which compare them. */
#ifndef EP_CORE_QUANTIZE_H
#define EP_CORE_QUANTIZE_H

#include <stdint.h>

typedef void (*ep_quantize_fn)(const uint16_t *x, int hidden, int round_scale, uint8_t *ret_x, float *ret_scales);

/* "portable", "avx2" or "avx512"; NULL if this machine cannot run it. */
ep_quantize_fn ep_quantize_find(const char *isa);

#endif
