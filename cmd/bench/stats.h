/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stats.h - statistics of a series of measurements. Pure functions.
 */
#ifndef EP_BENCH_STATS_H
#define EP_BENCH_STATS_H

#include <stddef.h>
#include <stdint.h>

struct bench_summary {
    size_t n;
    double median, p10, p90, min, max;
};

/*
 * Quantile q (0..1) of n >= 1 ascending values, linear between the two nearest ones (definition 7 of Hyndman and Fan,
 * the default of numpy and R).
 */
double bench_quantile(const double *sorted, size_t n, double q);

/* Sorts `values`. With n 0 all results are 0. */
void bench_summarise(double *values, size_t n, struct bench_summary *ret_summary);

/* Median over i of numerators[i] / denominators[i]; 0 for n 0. `scratch` [n]. */
double bench_median_ratio(const double *numerators, const double *denominators, size_t n, double *scratch);

/* A sample of one rank. */
struct bench_span {
    uint64_t begin_ns, end_ns;
};

/*
 * Seconds of a sample of the group. With one clock: from the first rank's begin to the last rank's end, so that ranks
 * that share a CPU are not timed as if each had its own. Without: the longest span.
 */
double bench_window(const struct bench_span *spans, int n_ranks, int one_clock);

/*
 * Number of rounds of `seconds` each that take `fill_seconds`, limited to least..most.
 */
int bench_rounds_for(double seconds, double fill_seconds, int least, int most);

#endif
