/* SPDX-License-Identifier: Apache-2.0 */
/* reduce.h - sum of rows for the naive baseline. Shares no code with the library. */
#ifndef EP_BENCH_REDUCE_H
#define EP_BENCH_REDUCE_H

#include <stdint.h>

/* out = rows[0] + rows[1] + ...: bf16 rows of `count` elements, fp32 in that order, rounded to nearest even once. */
typedef void (*bench_reduce_fn)(uint16_t *out, const uint16_t *const *rows, int n_rows, int count);

/* The variant for the widest vectors of this CPU. */
bench_reduce_fn bench_reduce_get(void);

#endif
