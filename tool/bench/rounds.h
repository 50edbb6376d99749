/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rounds.h - contestants take turns, in rounds, on all ranks at the same time. On GPUs the time of a turn is that
 * between two marks in the stream, around everything that it queues there, and the slowest rank's counts.
 */
#ifndef EP_BENCH_ROUNDS_H
#define EP_BENCH_ROUNDS_H

#include "bench/stats.h"
#include "ranks/ranks.h"

#include <stdbool.h>

#define BENCH_WARM_UP 2
#define BENCH_MAX_TURNS 6

struct bench_turn {
    const char *what; /* for error texts: "dispatch" */
    /* Before the barrier, not timed; may be NULL. `round` is -2 and -1 in the warm-up. */
    ep_status (*prepare)(void *context, int round);
    ep_status (*run)(void *context);              /* timed */
    ep_status (*finish)(void *context);           /* waits for what run started; on GPUs not timed; may be NULL */
    ep_status (*after)(void *context, int round); /* not timed; may be NULL */
    void *context;
    int repeats; /* operations that run() makes, one behind the other; the time is that of one; 0: one */
    bool queued; /* on GPUs: behind other work, which empties the cache and hides the launch; else on an idle device */

    struct bench_summary summary; /* seconds of the group */
    double ratio;                 /* median over the rounds of seconds of this turn / seconds of turns[0] */
};

/*
 * Makes the rounds: turns[0] is what is measured, the others are baselines. Collective. `iters` 0: as many rounds as
 * give turns[0] 0.3 s, 5 at least. The result is 0, or an exit code after a failure that has been emitted.
 */
int bench_rounds(struct ranks_ctx *ctx, struct bench_turn *turns, int n_turns, int iters, bool one_clock);

/* Do all ranks run on one host, and so read one clock? Collective. */
ep_status bench_one_clock(struct ranks_ctx *ctx, bool *ret_one);

#endif
