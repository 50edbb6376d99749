/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rounds.h - measures several series in rounds, with one sample of each series per round, on all ranks. On GPUs the
 * time of a sample is between two events in the stream, around everything that it queues; the slowest rank counts.
 */
#ifndef EP_BENCH_ROUNDS_H
#define EP_BENCH_ROUNDS_H

#include "common/ranks/ranks.h"
#include "stats.h"

#include <stdbool.h>

#define BENCH_WARM_UP 2
#define BENCH_MAX_SERIES 6

struct bench_series {
    const char *what; /* for error texts: "dispatch" */
    const char *key;  /* of a baseline in the row of the measurement: "memcpy"; NULL: what is measured */
    /* Before the barrier, not timed; may be NULL. `round` is -2 and -1 in the warm-up. */
    ep_status (*prepare)(void *context, int round);
    ep_status (*run)(void *context);              /* timed */
    ep_status (*finish)(void *context);           /* waits for what run started; on GPUs not timed; may be NULL */
    ep_status (*after)(void *context, int round); /* not timed; may be NULL */
    void *context;
    int repeats; /* operations of one run(), back to back; the time is divided by it; 0: one */
    bool queued; /* on GPUs: after other work, which flushes the cache and hides the launch; else on an idle device */

    struct bench_summary summary; /* seconds of the group */
    double ratio;                 /* median over the rounds of seconds of this series / seconds of series[0] */
};

/*
 * Runs the rounds: series[0] is measured, the others are baselines. Collective. `iters` 0: as many rounds as take
 * series[0] 0.3 s, at least 5. Returns 0, or an exit code after emitting the error.
 */
int bench_rounds(struct ranks_ctx *ctx, struct bench_series *series, int n_series, int iters, bool one_clock);

/* Whether all ranks run on one host and share its clock. Collective. */
ep_status bench_one_clock(struct ranks_ctx *ctx, bool *ret_one);

#endif
