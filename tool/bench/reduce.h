/* SPDX-License-Identifier: Apache-2.0 */
/* reduce.h - the sum of rows, as an engineer with MPI alone would write it. Shares nothing with the library. */
#ifndef EP_BENCH_REDUCE_H
#define EP_BENCH_REDUCE_H

#include <stdint.h>

/* out = rows[0] + rows[1] + ...: bf16 rows of `count` elements, fp32 in that order, rounded to nearest even once. */
typedef void (*bench_reduce_fn)(uint16_t *out, const uint16_t *const *rows, int n_rows, int count);

/* Compiled for the widest vectors of this processor that the compiler knows. */
bench_reduce_fn bench_reduce_get(void);

#endif
