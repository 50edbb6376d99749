/* SPDX-License-Identifier: Apache-2.0 */
/* rows_avx2.c - the sums in vectors of eight floats. Empty if the target is not x86-64. */
#if defined(__x86_64__)

#define ROWS_NAME "avx2"
#define ROWS_OPS ep_rows_avx2
#define ROWS_LANES 8
#define ROWS_TARGET __attribute__((target("avx2,fma")))

#include "backend/host/rows_loops.h"

#endif
