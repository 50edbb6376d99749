/* SPDX-License-Identifier: Apache-2.0 */
/*
 * pattern.h - random contents that any rank can compute, to verify results of the benchmark.
 *
 * The contents of a row are a pure function of a key (check/random.h), so that a receiver can verify every byte without
 * communication. Values are finite and of similar magnitude; none equals the poison.
 */
#ifndef EP_BENCH_PATTERN_H
#define EP_BENCH_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Outputs are filled with this byte before a verified operation: NaN in bf16, fp8 and f32, index -1. */
#define PATTERN_POISON 0xff

enum pattern_kind {
    PATTERN_BF16,  /* +-0.125 .. 2 */
    PATTERN_FP8,   /* e4m3 without NaN */
    PATTERN_SCALES /* f32, 1 .. 2 */
};

/* Streams below the seed of a run; the first number of a key. */
enum pattern_stream { PATTERN_X = 1, PATTERN_X_SCALES, PATTERN_RETURN, PATTERN_LL_RETURN };

/* Key of the row of `token` of rank `source`; `holder`: the rank or expert that returns it, 0 if there is none. */
uint64_t pattern_key(uint64_t seed, enum pattern_stream stream, int holder, int source, int token);

/* `bytes` is a multiple of 4. */
void pattern_fill(void *row, size_t bytes, enum pattern_kind kind, uint64_t key);
bool pattern_holds(const void *row, size_t bytes, enum pattern_kind kind, uint64_t key);

#endif
