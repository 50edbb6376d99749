/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "base/error.h"
#include "cmd/test/check/random.h"
#include "cmd/test/check/reference.h"

#include <epkit/numeric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong)
{
    int64_t n_wrong = *wrong != '\0';
    ep_status status = bench_sum(ctx, &n_wrong, sizeof(n_wrong));

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "exchange of verification results");
    if (*wrong)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:s, s:s, s:s}", "event", "error", "rank", ctx->rank, "what", what,
                                  "text", wrong, "hint",
                                  "wrong results are not measured; use 'epkit test' to locate the "
                                  "error"));
    return n_wrong > 0;
}

void verify_fill_x(struct bench_case *bench, bool is_fp8)
{
    size_t hidden = (size_t)bench->request->hidden;
    size_t row_bytes = is_fp8 ? hidden : 2 * hidden;
    size_t scales = hidden / EP_SCALE_BLOCK;

    for (int token = 0; token < bench->tokens; token++) {
        uint64_t key = pattern_key(bench->request->seed, PATTERN_X, 0, bench->ctx->rank, token);
        uint64_t scale_key = pattern_key(bench->request->seed, PATTERN_X_SCALES, 0, bench->ctx->rank, token);

        pattern_fill((unsigned char *)bench->x + (size_t)token * row_bytes, row_bytes,
                     is_fp8 ? PATTERN_FP8 : PATTERN_BF16, key);
        if (is_fp8)
            pattern_fill(bench->x_scales + (size_t)token * scales, scales * sizeof(float), PATTERN_SCALES, scale_key);
    }
    mirrors_push(&bench->mirrors, bench->x, (size_t)bench->tokens * row_bytes);
    mirrors_push(&bench->mirrors, bench->x_scales, is_fp8 ? (size_t)bench->tokens * scales * sizeof(float) : 0);
}

static void each_received(struct bench_case *bench, size_t rows,
                          void (*act)(struct mirrors *mirrors, void *host, size_t bytes))
{
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;

    act(&bench->mirrors, bench->recv_x, rows * 2 * hidden);
    act(&bench->mirrors, bench->recv_scales, rows * (hidden / EP_SCALE_BLOCK) * sizeof(float));
    act(&bench->mirrors, bench->recv_experts, rows * topk * sizeof(int32_t));
    act(&bench->mirrors, bench->recv_weights, rows * topk * sizeof(float));
}

void verify_poison_received(struct bench_case *bench, const struct bench_route *route)
{
    each_received(bench, (size_t)route->counts.recv, mirrors_poison);
}

/* Verifies received row number `at`, and its metadata. NULL, or what differs. */
static const char *check_row(const struct bench_case *bench, const struct bench_route *route, size_t at, bool is_fp8)
{
    const struct reference_row *row = &route->received.rows[at];
    uint64_t seed = bench->request->seed;
    size_t hidden = (size_t)bench->request->hidden;
    size_t row_bytes = is_fp8 ? hidden : 2 * hidden;
    size_t scales = hidden / EP_SCALE_BLOCK;
    size_t topk = (size_t)route->group.topk;
    int32_t experts[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];

    if (!pattern_holds((const unsigned char *)bench->recv_x + at * row_bytes, row_bytes,
                       is_fp8 ? PATTERN_FP8 : PATTERN_BF16, pattern_key(seed, PATTERN_X, 0, row->rank, row->token)))
        return "contents";
    if (is_fp8 && !pattern_holds(bench->recv_scales + at * scales, scales * sizeof(float), PATTERN_SCALES,
                                 pattern_key(seed, PATTERN_X_SCALES, 0, row->rank, row->token)))
        return "scales";
    reference_row_selections(&route->group, route->rank, row, experts, weights);
    if (memcmp(bench->recv_experts + at * topk, experts, topk * sizeof(*experts)) != 0)
        return "expert numbers";
    if (memcmp(bench->recv_weights + at * topk, weights, topk * sizeof(*weights)) != 0)
        return "weights";
    return NULL;
}

int verify_dispatch(struct bench_case *bench, const struct bench_route *route, bool is_fp8)
{
    char wrong[160] = "";

    each_received(bench, (size_t)route->counts.recv, mirrors_pull);
    for (int64_t i = 0; i < route->counts.recv && !*wrong; i++) {
        const struct reference_row *row = &route->received.rows[i];
        const char *what = check_row(bench, route, (size_t)i, is_fp8);

        if (what)
            snprintf(wrong, sizeof(wrong), "row %d, token %d of rank %d: %s differ from what was sent", (int)i,
                     row->token, row->rank, what);
    }
    return verify_agree(bench->ctx, is_fp8 ? "verifying dispatch (fp8)" : "verifying dispatch (bf16)", wrong);
}

void verify_fill_returned(struct bench_case *bench)
{
    const struct bench_route *route = &bench->route;
    size_t row_bytes = 2 * (size_t)bench->request->hidden;

    for (int64_t i = 0; i < route->counts.recv; i++) {
        const struct reference_row *row = &route->received.rows[i];

        pattern_fill((unsigned char *)bench->recv_x + (size_t)i * row_bytes, row_bytes, PATTERN_BF16,
                     pattern_key(bench->request->seed, PATTERN_RETURN, route->rank, row->rank, row->token));
    }
    mirrors_push(&bench->mirrors, bench->recv_x, (size_t)route->counts.recv * row_bytes);
}

struct sums {
    const struct bench_case *bench;
    struct reference_combine combine;
    bool low_latency;
    struct reference_scratch scratch;
    uint16_t row[EP_MAX_HIDDEN];
};

/* The row returned by a rank, or by an expert in the low-latency layout. */
static void make_returned(void *context, int rank, int expert, int source, int token, uint16_t *ret_row)
{
    const struct sums *sums = context;
    uint64_t key = pattern_key(sums->bench->request->seed, sums->low_latency ? PATTERN_LL_RETURN : PATTERN_RETURN,
                               sums->low_latency ? expert : rank, source, token);

    pattern_fill(ret_row, 2 * (size_t)sums->combine.hidden, PATTERN_BF16, key);
}

/* Compares the sums of this rank's tokens with the reference. Reports the first difference. */
static void check_sums(struct sums *sums, const uint16_t *out, bool one_node, char *ret_wrong, size_t bytes)
{
    static const uint16_t *const no_bias[2];
    const struct bench_route *route = &sums->bench->route;
    struct reference_group group = route->group;
    int hidden = sums->combine.hidden, rank = route->rank;
    uint16_t *row = sums->row;

    if (one_node) {
        group.n_nodes = 1;
        group.ranks_per_node = group.n_ranks;
    }
    for (int token = 0; token < route->n_tokens && !*ret_wrong; token++, out += hidden) {
        if (sums->low_latency)
            reference_ll_combine_row(&group, &sums->combine, rank, token, &sums->scratch, row);
        else
            reference_combine_row(&group, &sums->combine, rank, token, no_bias, &sums->scratch, row);
        for (int i = 0; i < hidden && !*ret_wrong; i++)
            if (out[i] != row[i])
                snprintf(ret_wrong, bytes, "token %d, element %d: %g instead of %g", token, i,
                         (double)ep_bf16_to_f32(out[i]), (double)ep_bf16_to_f32(row[i]));
    }
}

int verify_combine(struct bench_case *bench, const uint16_t *out, bool one_node, bool low_latency, const char *what)
{
    struct sums *sums = malloc(sizeof(*sums));
    char wrong[160] = "";

    if (!sums)
        return ranks_emit_error(bench->ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for the oracle"), what);
    sums->bench = bench;
    sums->low_latency = low_latency;
    sums->combine = (struct reference_combine){.hidden = bench->request->hidden,
                                               .bf16_partials = bench->ctx->spec->partial_type == EP_BF16,
                                               .no_partial_reduce = bench->request->no_partial_reduce,
                                               .reply = make_returned,
                                               .context = sums};
    check_sums(sums, out, one_node, wrong, sizeof(wrong));
    free(sums);
    return verify_agree(bench->ctx, what, wrong);
}

int verify_naive_dispatch(struct bench_case *bench, bool is_fp8)
{
    const struct naive *naive = &bench->naive;
    size_t rows = (size_t)bench->route.counts.recv;
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;
    const char *wrong = "";

    if (memcmp(naive->recv_rows, bench->recv_x, rows * hidden * (is_fp8 ? 1 : 2)) != 0)
        wrong = "rows differ from those of ep_dispatch()";
    else if (is_fp8 &&
             memcmp(naive->recv_scales, bench->recv_scales, rows * (hidden / EP_SCALE_BLOCK) * sizeof(float)) != 0)
        wrong = "scales differ from those of ep_dispatch()";
    else if (memcmp(naive->recv_experts, bench->recv_experts, rows * topk * sizeof(int32_t)) != 0 ||
             memcmp(naive->recv_weights, bench->recv_weights, rows * topk * sizeof(float)) != 0)
        wrong = "experts or weights differ from those of ep_dispatch()";
    return verify_agree(bench->ctx, "verifying MPI_Alltoallv", wrong);
}

/* --- contents --- */

/* Masks of the random bits of each element, and bits that are set, for eight bytes. */
static const struct {
    uint64_t keep, add;
} masks[] = {
    [PATTERN_BF16] = {UINT64_C(0x81ff81ff81ff81ff), UINT64_C(0x3e003e003e003e00)},
    [PATTERN_FP8] = {UINT64_C(0xf7f7f7f7f7f7f7f7), 0},
    [PATTERN_SCALES] = {UINT64_C(0x007fffff007fffff), UINT64_C(0x3f8000003f800000)},
};

uint64_t pattern_key(uint64_t seed, enum pattern_stream stream, int holder, int source, int token)
{
    return random_key(seed, (uint64_t)stream, (uint64_t)holder, (uint64_t)source << 32 | (uint32_t)token);
}

static uint64_t word_at(enum pattern_kind kind, uint64_t key, size_t i)
{
    return (random_at(key, i) & masks[kind].keep) | masks[kind].add;
}

void pattern_fill(void *row, size_t bytes, enum pattern_kind kind, uint64_t key)
{
    unsigned char *at = row;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word = word_at(kind, key, i);

        memcpy(at + 8 * i, &word, 8);
    }
    if (bytes % 8) {
        uint64_t word = word_at(kind, key, bytes / 8);

        memcpy(at + bytes / 8 * 8, &word, bytes % 8);
    }
}

bool pattern_holds(const void *row, size_t bytes, enum pattern_kind kind, uint64_t key)
{
    const unsigned char *at = row;
    uint64_t different = 0;

    for (size_t i = 0; i < bytes / 8; i++) {
        uint64_t word;

        memcpy(&word, at + 8 * i, 8);
        different |= word ^ word_at(kind, key, i);
    }
    if (bytes % 8) {
        uint64_t word = word_at(kind, key, bytes / 8);

        different |= memcmp(at + bytes / 8 * 8, &word, bytes % 8) != 0;
    }
    return different == 0;
}
