/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows_avx512.c - the sums in vectors of sixteen floats. Empty if the target is not x86-64.
 *
 * Not VCVTNEPS2BF16 and VDPBF16PS: they treat denormals as zero, which the other variants and the contract do not.
 */
#if defined(__x86_64__)

#define ROWS_NAME "avx512"
#define ROWS_OPS ep_rows_avx512
#define ROWS_LANES 16
#define ROWS_TARGET __attribute__((target("avx512f,avx2,fma")))

#include "backend/host/rows_loops.h"

#endif
