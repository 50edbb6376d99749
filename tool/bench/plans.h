/* SPDX-License-Identifier: Apache-2.0 */
/* plans.h - room for the routings that bench_run_plans() makes up. */
#ifndef EP_BENCH_PLANS_H
#define EP_BENCH_PLANS_H

#include "bench/bench.h"

/* Routings that take turns. */
#define BENCH_VARIANTS 4

/* The most rows that this rank receives with any of them. 0, or an exit code. */
int bench_plans_rows(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int64_t *ret_rows);

#endif
