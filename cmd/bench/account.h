/* SPDX-License-Identifier: Apache-2.0 */
/*
 * account.h - accounting of rows and bytes. Pure functions.
 *
 * All rates are GB/s (10^9 bytes) of one rank: the mean over the ranks.
 *   logical   rows received, including the rank's own, times the bytes of a row with its scales: as printed by DeepEP
 *   wire      rows sent to other ranks only. In a low-latency combine the host backend reads all rows at the token's
 *             rank and sums there; it is counted as if partial sums were sent, for comparison with GPU backends
 *   printed   between nodes, as printed by DeepEP: each token once per distinct destination node, including its own
 *   net       between nodes: bytes actually put on the network; low latency: of rows alone
 */
#ifndef EP_BENCH_ACCOUNT_H
#define EP_BENCH_ACCOUNT_H

#include <stddef.h>
#include <stdint.h>

/* Rows of one rank, or summed over ranks. */
struct bench_counts {
    int64_t recv; /* rows received, own included; low latency: one per (token, expert) */
    int64_t
        wire;    /* rows sent to other ranks: one per (token, rank); EP_LL_NO_PARTIAL_REDUCE: one per (token, expert) */
    int64_t net; /* (token, other node) pairs */
    int64_t own_node;  /* tokens that go to their own node */
    int64_t net_bytes; /* put on the network */
};

struct bench_rates {
    double logical, wire, printed, net;
};

/* Bytes of a row with its f32 scales. */
int64_t bench_row_bytes(int is_fp8, int hidden);

void bench_counts_add(struct bench_counts *sum, const struct bench_counts *rank);

/* `sum` over n_ranks ranks; all rates are 0 if `seconds` is. */
struct bench_rates bench_rates_of(const struct bench_counts *sum, int n_ranks, int64_t row_bytes, double seconds);

#endif
