/* SPDX-License-Identifier: Apache-2.0 */
#include "stats.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

double bench_quantile(const double *sorted, size_t n, double q)
{
    double position = q * (double)(n - 1);
    size_t below = (size_t)position;
    double part = position - (double)below;

    if (below + 1 >= n)
        return sorted[n - 1];
    return sorted[below] + part * (sorted[below + 1] - sorted[below]);
}

static int compare_doubles(const void *left, const void *right)
{
    double a = *(const double *)left;
    double b = *(const double *)right;

    return (a > b) - (a < b);
}

void bench_summarise(double *values, size_t n, struct bench_summary *ret_summary)
{
    memset(ret_summary, 0, sizeof(*ret_summary));
    if (n == 0)
        return;
    qsort(values, n, sizeof(*values), compare_doubles);
    ret_summary->n = n;
    ret_summary->median = bench_quantile(values, n, 0.5);
    ret_summary->p10 = bench_quantile(values, n, 0.1);
    ret_summary->p90 = bench_quantile(values, n, 0.9);
    ret_summary->min = values[0];
    ret_summary->max = values[n - 1];
}

double bench_median_ratio(const double *numerators, const double *denominators, size_t n, double *scratch)
{
    if (n == 0)
        return 0;
    for (size_t i = 0; i < n; i++)
        scratch[i] = numerators[i] / denominators[i];
    qsort(scratch, n, sizeof(*scratch), compare_doubles);
    return bench_quantile(scratch, n, 0.5);
}

double bench_window(const struct bench_span *spans, int n_ranks, int one_clock)
{
    uint64_t begin = UINT64_MAX;
    uint64_t end = 0;
    uint64_t longest = 0;

    for (int r = 0; r < n_ranks; r++) {
        uint64_t span = spans[r].end_ns - spans[r].begin_ns;

        begin = spans[r].begin_ns < begin ? spans[r].begin_ns : begin;
        end = spans[r].end_ns > end ? spans[r].end_ns : end;
        longest = span > longest ? span : longest;
    }
    return (double)(one_clock ? end - begin : longest) * 1e-9;
}

int bench_rounds_for(double seconds, double fill_seconds, int least, int most)
{
    double rounds = seconds > 0 ? ceil(fill_seconds / seconds) : most;

    if (rounds < least)
        return least;
    return rounds > most ? most : (int)rounds;
}
