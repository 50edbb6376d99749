/* SPDX-License-Identifier: Apache-2.0 */
/* rows_portable.c - the sums in vectors of four floats, which compilers translate for any processor. */
#define ROWS_NAME "portable"
#define ROWS_OPS ep_rows_portable
#define ROWS_LANES 4
#define ROWS_TARGET

#include "backend/host/rows_loops.h"
