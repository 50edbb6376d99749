/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "common/memory.h"

#include <epkit/numeric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong)
{
    int64_t n_wrong = *wrong != '\0';

    BENCH_TRY(ctx, bench_sum(ctx, &n_wrong, sizeof(n_wrong)), "exchange of verification results");
    if (*wrong)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:s, s:s, s:s}", "event", "error", "rank", ctx->rank, "what", what,
                                  "text", wrong, "hint",
                                  "wrong results are not measured; use 'epkit test' to locate the "
                                  "error"));
    return n_wrong > 0;
}

struct data verify_data(const struct bench_request *request, bool is_fp8)
{
    return (struct data){.kind = is_fp8 ? DATA_FP8_RANDOM : DATA_BF16_RANDOM,
                         .seed = request->seed,
                         .hidden = request->hidden,
                         .scale_type = is_fp8 ? EP_F32 : 0};
}

void verify_fill_x(struct bench_case *bench, bool is_fp8)
{
    const struct data data = verify_data(bench->request, is_fp8);
    size_t row_bytes = data_row_bytes(&data), scales = (size_t)data_scale_items(&data);

    for (int token = 0; token < bench->tokens; token++) {
        data_row(&data, bench->ctx->rank, token, (unsigned char *)bench->x + (size_t)token * row_bytes);
        data_scales(&data, bench->ctx->rank, token, bench->x_scales + (size_t)token * scales);
    }
    mirrors_push(&bench->mirrors, bench->x, (size_t)bench->tokens * row_bytes);
    mirrors_push(&bench->mirrors, bench->x_scales, (size_t)bench->tokens * data_scale_bytes(&data));
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
    const struct data data = verify_data(bench->request, is_fp8);
    size_t row_bytes = data_row_bytes(&data), scale_bytes = data_scale_bytes(&data);
    size_t topk = (size_t)route->group.topk;
    uint16_t expected[EP_MAX_HIDDEN];
    int32_t experts[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK];

    data_row(&data, row->rank, row->token, expected);
    if (memcmp((const unsigned char *)bench->recv_x + at * row_bytes, expected, row_bytes) != 0)
        return "contents";
    data_scales(&data, row->rank, row->token, expected);
    if (memcmp((const unsigned char *)bench->recv_scales + at * scale_bytes, expected, scale_bytes) != 0)
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
    const struct data data = verify_data(bench->request, false);
    const struct bench_route *route = &bench->route;
    size_t row_bytes = data_row_bytes(&data);

    for (int64_t i = 0; i < route->counts.recv; i++) {
        const struct reference_row *row = &route->received.rows[i];

        data_reply(&data, route->rank, row->rank, row->token,
                   (uint16_t *)bench->recv_x + (size_t)i * (size_t)data.hidden);
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

/* The row returned by a rank, or for a selection in the low-latency layout. */
static void make_returned(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct sums *sums = context;
    const struct data data = verify_data(sums->bench->request, false);

    data_reply(&data, sums->low_latency ? k : rank, source, token, ret_row);
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
    struct sums *sums = memory_new(1, sizeof(*sums));
    char wrong[160] = "";

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
