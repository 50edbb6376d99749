/* SPDX-License-Identifier: Apache-2.0 */
#include "account.h"

#include <epkit/types.h>

int64_t bench_row_bytes(int is_fp8, int hidden)
{
    if (is_fp8)
        return hidden + (int64_t)sizeof(float) * (hidden / EP_SCALE_BLOCK);
    return INT64_C(2) * hidden;
}

void bench_counts_add(struct bench_counts *sum, const struct bench_counts *rank)
{
    sum->recv += rank->recv;
    sum->wire += rank->wire;
    sum->net += rank->net;
    sum->own_node += rank->own_node;
    sum->net_bytes += rank->net_bytes;
}

struct bench_rates bench_rates_of(const struct bench_counts *sum, int n_ranks, int64_t row_bytes, double seconds)
{
    struct bench_rates rates = {0};
    double scale;

    if (seconds <= 0)
        return rates;
    scale = 1e-9 / (seconds * n_ranks);
    rates.logical = (double)sum->recv * (double)row_bytes * scale;
    rates.wire = (double)sum->wire * (double)row_bytes * scale;
    rates.printed = (double)(sum->net + sum->own_node) * (double)row_bytes * scale;
    rates.net = (double)sum->net_bytes * scale;
    return rates;
}
