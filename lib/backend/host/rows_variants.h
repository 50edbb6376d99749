/* SPDX-License-Identifier: Apache-2.0 */
/* rows_variants.h - the variants that rows.c selects from. Call one only where its instructions exist. */
#ifndef EP_HOST_ROWS_VARIANTS_H
#define EP_HOST_ROWS_VARIANTS_H

#include "backend/host/rows.h"

extern const struct ep_rows_ops ep_rows_portable;
/* `copy` of all variants. */
void ep_rows_copy(void *const *dst, int n, const void *src, size_t bytes);

#if defined(__x86_64__)
extern const struct ep_rows_ops ep_rows_avx2;
extern const struct ep_rows_ops ep_rows_avx512;
#endif

#endif
