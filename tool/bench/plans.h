/* SPDX-License-Identifier: Apache-2.0 */
/* plans.h - capacity for the routings of bench_run_plans(). */
#ifndef EP_BENCH_PLANS_H
#define EP_BENCH_PLANS_H

#include "bench/bench.h"

/* Number of routings, used round-robin. */
#define BENCH_VARIANTS 4

/* Most rows that this rank receives with any of them. 0, or an exit code. */
int bench_plans_rows(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int64_t *ret_rows);

#endif
