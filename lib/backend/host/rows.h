/* SPDX-License-Identifier: Apache-2.0 */
/*
 * rows.h - the inner loops of the host backend: copy rows, add rows. Pure functions over memory, thread-safe.
 *
 * The sums have a portable variant and faster ones for AVX2 and AVX-512, selected once at start; all give the same bits
 * (the tests compare every variant that the machine supports with a reference). $EPKIT_HOST_ISA = portable, avx2 or
 * avx512 overrides the selection; ep_comm_new() refuses a name that cannot run here. The floating-point modes of the
 * caller must be the default ones (nearest even, denormals kept).
 */
#ifndef EP_HOST_ROWS_H
#define EP_HOST_ROWS_H

#include <stddef.h>
#include <stdint.h>

struct ep_row_term {
    const void *row;
    int is_f32; /* fp32 elements instead of bf16: first the elements 0, 2, 4, .., then the elements 1, 3, 5, .. */
};

/* Rows have `count` elements, a multiple of 8, and are aligned to 16. Every NaN gives 0x7fc0 (fp32: 0x7fc00000). */
struct ep_rows_ops {
    const char *name;

    /*
     * Sum of n >= 1 terms: fp32, terms[0] first, one after the other, rounded once to nearest even. The stream variant
     * bypasses the caches, as ep_rows_copy_stream() does.
     */
    void (*sum_bf16)(uint16_t *out, const struct ep_row_term *terms, int n, int count);
    void (*sum_bf16_stream)(uint16_t *out, const struct ep_row_term *terms, int n, int count);

    /* sum_f32() leaves the sum in fp32, in the order of ep_row_term: a partial sum for the network. */
    void (*sum_f32)(float *out, const struct ep_row_term *terms, int n, int count);

    /*
     * out = sum over i of weight[i] * rows[i]: acc = 0; acc = fma(weight, row, acc) in the order given; rounded once. n
     * may be 0 (zeros).
     */
    void (*weighted_sum_bf16)(uint16_t *out, const uint16_t *const *rows, const float *weights, int n, int count);

    /* A part of ep_rows_copy_stream(). */
    void (*stream_range)(void *to, const void *from, size_t bytes);
};

extern const struct ep_rows_ops ep_rows_portable;
#if defined(__x86_64__)
extern const struct ep_rows_ops ep_rows_avx2, ep_rows_avx512; /* only where the processor has the instructions */
#endif

/* The best variant for this machine. Never NULL. */
const struct ep_rows_ops *ep_rows_get(void);

/* The variant of that name if it was built and this machine can run it, else NULL: for tests. */
const struct ep_rows_ops *ep_rows_find(const char *name);

/*
 * Copies `bytes` (a multiple of 16; src and every dst aligned to 16) from src to each of dst[0..n). The stream variant
 * bypasses the caches: faster when the destinations together do not fit in them, because a plain store first reads the
 * line that it overwrites. Call ep_rows_stream_end() before the peers are signalled that the data is ready.
 */
void ep_rows_copy(void *const *dst, int n, const void *src, size_t bytes);
void ep_rows_copy_stream(void *const *dst, int n, const void *src, size_t bytes);

/* Makes streamed stores of this thread visible before what it stores next. */
void ep_rows_stream_end(void);

/*
 * Bytes of destinations above which the stream variants are faster: what a rank can use of a last-level cache that it
 * shares with other ranks and programs. A virtual machine reported the cache of the whole socket (480 MiB with 2
 * processors), in which plain stores of 15 MB and more took 1.5 to 1.8 times as long.
 */
#define EP_ROWS_STREAM_BYTES ((size_t)16 << 20)

#endif
