/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "base/error.h"

#include <epkit/types.h>
#include <string.h>

static size_t meta_bytes(int hidden, int topk)
{
    return (size_t)(hidden / EP_SCALE_BLOCK) * sizeof(float) + (size_t)topk * (sizeof(int32_t) + sizeof(float));
}

uint64_t naive_bytes(int64_t n_send, int64_t n_recv, int hidden, int topk)
{
    uint64_t row = 2 * (uint64_t)hidden + meta_bytes(hidden, topk);

    return (uint64_t)n_send * row + (uint64_t)n_recv * (row + meta_bytes(hidden, topk));
}

static void fill_counts(struct naive *naive)
{
    const struct bench_route *route = naive->route;
    const int64_t *recv_start = route->received.recv_from_rank;
    int n_sent = 0;

    for (int r = 0; r < route->group.n_ranks; r++) {
        bool other = r != route->rank;

        naive->send_offsets[r] = n_sent;
        naive->send_counts[r] = other ? route->sent.tokens_per_rank[r] : 0;
        naive->recv_offsets[r] = (int)recv_start[r];
        naive->recv_counts[r] = other ? (int)(recv_start[r + 1] - recv_start[r]) : 0;
        n_sent += route->sent.tokens_per_rank[r];
    }
}

void naive_init(struct naive *naive, const struct bench_mpi_module *mpi, struct mirrors *mirrors,
                const struct bench_route *route, int hidden)
{
    const struct ranks_ctx *ctx = mirrors->ctx;
    size_t n_send = (size_t)route->received.n_send;
    size_t n_recv = (size_t)route->received.n_rows;
    size_t topk = (size_t)route->group.topk;

    *naive = (struct naive){.mpi = mpi, .route = route, .hidden = hidden, .timeout_ms = ctx->spec->timeout_ms};
    naive->packed = mirrors_alloc(mirrors, n_send * 2 * (size_t)hidden, 0);
    naive->packed_meta = mirrors_alloc(mirrors, n_send * meta_bytes(hidden, route->group.topk), 0);
    naive->recv_meta = mirrors_alloc(mirrors, n_recv * meta_bytes(hidden, route->group.topk), 0);
    naive->recv_rows = mirrors_alloc(mirrors, n_recv * 2 * (size_t)hidden, 0);
    naive->recv_scales = mirrors_alloc(mirrors, n_recv * (size_t)(hidden / EP_SCALE_BLOCK) * sizeof(float), 0);
    naive->recv_experts = mirrors_alloc(mirrors, n_recv * topk * sizeof(int32_t), 0);
    naive->recv_weights = mirrors_alloc(mirrors, n_recv * topk * sizeof(float), 0);
    fill_counts(naive);
}

static bool goes_to(const struct bench_route *route, int token, int holder)
{
    return route->sent.token_in_rank[(size_t)token * (size_t)route->group.n_ranks + (size_t)holder];
}

/* A record is sent with each row: its scales, and the top-k relative to the destination. */
static void pack_meta(const struct naive *naive, unsigned char *record, int token, int holder, const float *scales)
{
    const struct bench_route *route = naive->route;
    const struct reference_row row = {.rank = route->rank, .token = token};
    size_t n_scales = naive->scale_bytes / sizeof(float);
    int32_t *experts = (int32_t *)(void *)(record + naive->scale_bytes);
    float *weights = (float *)(void *)(experts + route->group.topk);

    if (n_scales)
        memcpy(record, scales + (size_t)token * n_scales, naive->scale_bytes);
    reference_row_selections(&route->group, holder, &row, experts, weights);
}

static void unpack_meta(struct naive *naive, size_t record_bytes)
{
    const struct bench_route *route = naive->route;
    size_t topk = (size_t)route->group.topk;

    for (size_t row = 0; row < (size_t)route->received.n_rows; row++) {
        const unsigned char *record = naive->recv_meta + row * record_bytes;

        if (naive->scale_bytes)
            memcpy((unsigned char *)naive->recv_scales + row * naive->scale_bytes, record, naive->scale_bytes);
        record += naive->scale_bytes;
        memcpy(naive->recv_experts + row * topk, record, topk * sizeof(int32_t));
        memcpy(naive->recv_weights + row * topk, record + topk * sizeof(int32_t), topk * sizeof(float));
    }
}

/* `back`: from the receivers to the senders. */
static ep_status exchange(struct naive *naive, bool back, const void *send, void *recv, size_t unit_bytes)
{
    const int *send_counts = back ? naive->recv_counts : naive->send_counts;
    const int *send_offsets = back ? naive->recv_offsets : naive->send_offsets;
    const int *recv_counts = back ? naive->send_counts : naive->recv_counts;
    const int *recv_offsets = back ? naive->send_offsets : naive->recv_offsets;
    ep_status status = naive->mpi->alltoallv(send, send_counts, send_offsets, recv, recv_counts, recv_offsets,
                                             unit_bytes, naive->timeout_ms);

    naive->busy |= status != EP_OK;
    return status;
}

ep_status naive_dispatch(struct naive *naive, const void *x, const float *scales, bool is_fp8)
{
    const struct bench_route *route = naive->route;
    size_t row_bytes = (size_t)naive->hidden * (is_fp8 ? 1 : 2);
    size_t record_bytes;
    const unsigned char *from = x;

    naive->scale_bytes = is_fp8 ? (size_t)(naive->hidden / EP_SCALE_BLOCK) * sizeof(float) : 0;
    record_bytes = naive->scale_bytes + (size_t)route->group.topk * (sizeof(int32_t) + sizeof(float));
    for (int holder = 0; holder < route->group.n_ranks; holder++) {
        bool own = holder == route->rank;
        size_t to = (size_t)(own ? naive->recv_offsets : naive->send_offsets)[holder];
        unsigned char *rows = own ? naive->recv_rows : naive->packed;
        unsigned char *records = own ? naive->recv_meta : naive->packed_meta;

        for (int token = 0; token < route->n_tokens; token++) {
            if (!goes_to(route, token, holder))
                continue;
            memcpy(rows + to * row_bytes, from + (size_t)token * row_bytes, row_bytes);
            pack_meta(naive, records + to++ * record_bytes, token, holder, scales);
        }
    }
    EP_TRY(exchange(naive, false, naive->packed, naive->recv_rows, row_bytes));
    EP_TRY(exchange(naive, false, naive->packed_meta, naive->recv_meta, record_bytes));
    unpack_meta(naive, record_bytes);
    return EP_OK;
}

ep_status naive_combine(struct naive *naive, const uint16_t *x, uint16_t *out)
{
    const struct bench_route *route = naive->route;
    size_t hidden = (size_t)naive->hidden;
    const uint16_t *back = (const uint16_t *)(const void *)naive->packed;
    const uint16_t *rows[EP_MAX_TOPK];
    int next[EP_MAX_RANKS]; /* row of each holder: they are in the order of the tokens */

    /* Received rows are ordered by source: they are returned as they are, into the send buffer of the dispatch. */
    EP_TRY(exchange(naive, true, x, naive->packed, hidden * sizeof(*x)));
    memcpy(next, naive->send_offsets, (size_t)route->group.n_ranks * sizeof(*next));
    next[route->rank] = naive->recv_offsets[route->rank];
    for (int token = 0; token < route->n_tokens; token++) {
        int n_rows = 0;

        for (int holder = 0; holder < route->group.n_ranks; holder++)
            if (goes_to(route, token, holder))
                rows[n_rows++] = (holder == route->rank ? x : back) + (size_t)next[holder]++ * hidden;
        naive_sum(out + (size_t)token * hidden, rows, n_rows, naive->hidden);
    }
    return EP_OK;
}

/*
 * --- sum of rows ---
 *
 * Compiled with -O3 (see CMakeLists.txt). Uses vector types of GCC and Clang, because GCC 12 does not keep the sums of
 * a plain loop in registers: 15 instead of 50 GB/s from the L2 cache.
 */

#define LANES 8   /* divide every number of elements of a row */
#define VECTORS 8 /* sums kept in registers at a time, for 64 elements */

typedef uint16_t half_vector __attribute__((vector_size(2 * LANES)));
typedef uint32_t bits_vector __attribute__((vector_size(4 * LANES)));
typedef float float_vector __attribute__((vector_size(4 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* Vectors are passed by pointer: by value the ABI would differ between the functions below. */
INLINE void widen(const uint16_t *values, float_vector *ret_wide)
{
    half_vector half;

    memcpy(&half, values, sizeof(half));
    *ret_wide = (float_vector)(__builtin_convertvector(half, bits_vector) << 16);
}

INLINE void narrow(uint16_t *out, const float_vector *values)
{
    bits_vector bits = (bits_vector)*values;
    half_vector half = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, half_vector);

    memcpy(out, &half, sizeof(half));
}

INLINE void reduce_vectors(uint16_t *out, const uint16_t *const *rows, int n_rows, int first, int n_vectors)
{
    float_vector sums[VECTORS];

    for (int v = 0; v < n_vectors; v++)
        widen(rows[0] + first + v * LANES, &sums[v]);
    for (int r = 1; r < n_rows; r++) {
        for (int v = 0; v < n_vectors; v++) {
            float_vector wide;

            widen(rows[r] + first + v * LANES, &wide);
            sums[v] += wide;
        }
    }
    for (int v = 0; v < n_vectors; v++)
        narrow(out + first + v * LANES, &sums[v]);
}

INLINE void reduce_body(uint16_t *out, const uint16_t *const *rows, int n_rows, int count)
{
    int first = 0;

    if (n_rows == 0) {
        memset(out, 0, (size_t)count * sizeof(*out));
        return;
    }
    for (; first + VECTORS * LANES <= count; first += VECTORS * LANES)
        reduce_vectors(out, rows, n_rows, first, VECTORS);
    for (; first < count; first += LANES)
        reduce_vectors(out, rows, n_rows, first, 1);
}

#if defined(__x86_64__)
static __attribute__((target("avx2"))) void reduce_avx2(uint16_t *out, const uint16_t *const *rows, int n_rows,
                                                        int count)
{
    reduce_body(out, rows, n_rows, count);
}
#endif

void naive_sum(uint16_t *out, const uint16_t *const *rows, int n_rows, int count)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) {
        reduce_avx2(out, rows, n_rows, count);
        return;
    }
#endif
    reduce_body(out, rows, n_rows, count);
}
