/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/case.h"

#include "base/error.h"
#include "bench/pattern.h"

#include <epkit/numeric.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int verify_agree(struct ranks_ctx *ctx, const char *what, const char *wrong)
{
    unsigned char mine = *wrong != '\0';
    unsigned char all[EP_MAX_RANKS];
    ep_status status = ep_comm_allgather(ctx->comm, &mine, 1, all);

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "exchange of verdicts");
    if (mine)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:s, s:s, s:s}", "event", "error", "rank", ctx->rank, "what", what,
                                  "text", wrong, "hint",
                                  "the figures would be those of a wrong result; 'epkit test' "
                                  "narrows it down"));
    for (int r = 0; r < ctx->nranks; r++)
        if (all[r])
            return 1;
    return 0;
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
    twins_push(&bench->twins, bench->x, (size_t)bench->tokens * row_bytes);
    twins_push(&bench->twins, bench->x_scales, is_fp8 ? (size_t)bench->tokens * scales * sizeof(float) : 0);
}

static void twins_push_to(struct bench_twins *twins, void *host, size_t bytes)
{
    twins_push(twins, host, bytes);
}

static void each_received(struct bench_case *bench, size_t rows,
                          void (*act)(struct bench_twins *twins, void *host, size_t bytes))
{
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;

    act(&bench->twins, bench->recv_x, rows * 2 * hidden);
    act(&bench->twins, bench->recv_scales, rows * (hidden / EP_SCALE_BLOCK) * sizeof(float));
    act(&bench->twins, bench->recv_experts, rows * topk * sizeof(int32_t));
    act(&bench->twins, bench->recv_weights, rows * topk * sizeof(float));
}

void verify_poison_received(struct bench_case *bench, const struct bench_route *route)
{
    size_t rows = (size_t)route->n_recv;
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;

    memset(bench->recv_x, PATTERN_POISON, rows * 2 * hidden);
    memset(bench->recv_scales, PATTERN_POISON, rows * (hidden / EP_SCALE_BLOCK) * sizeof(float));
    memset(bench->recv_experts, PATTERN_POISON, rows * topk * sizeof(int32_t));
    memset(bench->recv_weights, PATTERN_POISON, rows * topk * sizeof(float));
    each_received(bench, rows, twins_push_to);
}

/* Everything that came with received row `row`, which must be `token` of `source`. NULL, or what differs. */
static const char *check_row(const struct bench_case *bench, const struct routing *routing,
                             const struct bench_route *route, int source, int token, size_t row, bool is_fp8)
{
    uint64_t seed = bench->request->seed;
    size_t hidden = (size_t)bench->request->hidden;
    size_t row_bytes = is_fp8 ? hidden : 2 * hidden;
    size_t scales = hidden / EP_SCALE_BLOCK;
    size_t topk = (size_t)route->topk;
    int32_t experts[EP_MAX_TOPK], local[EP_MAX_TOPK];
    float weights[EP_MAX_TOPK], local_weights[EP_MAX_TOPK];

    if (!pattern_holds((const unsigned char *)bench->recv_x + row * row_bytes, row_bytes,
                       is_fp8 ? PATTERN_FP8 : PATTERN_BF16, pattern_key(seed, PATTERN_X, 0, source, token)))
        return "contents";
    if (is_fp8 && !pattern_holds(bench->recv_scales + row * scales, scales * sizeof(float), PATTERN_SCALES,
                                 pattern_key(seed, PATTERN_X_SCALES, 0, source, token)))
        return "scales";
    routing_token(routing, source, token, experts, weights);
    bench_route_meta(route, experts, weights, route->rank, local, local_weights);
    if (memcmp(bench->recv_experts + row * topk, local, topk * sizeof(*local)) != 0)
        return "expert numbers";
    if (memcmp(bench->recv_weights + row * topk, local_weights, topk * sizeof(*local_weights)) != 0)
        return "weights";
    return NULL;
}

int verify_dispatch(struct bench_case *bench, const struct routing *routing, const struct bench_route *route,
                    bool is_fp8)
{
    char wrong[160] = "";

    each_received(bench, (size_t)route->n_recv, twins_pull);
    for (int source = 0; source < route->n_ranks && !*wrong; source++) {
        for (int32_t row = route->recv_start[source]; row < route->recv_start[source + 1] && !*wrong; row++) {
            const char *what = check_row(bench, routing, route, source, route->recv_token[row], (size_t)row, is_fp8);

            if (what)
                snprintf(wrong, sizeof(wrong), "row %d, token %d of rank %d: %s differ from what was sent", (int)row,
                         (int)route->recv_token[row], source, what);
        }
    }
    return verify_agree(bench->ctx, is_fp8 ? "verifying dispatch (fp8)" : "verifying dispatch (bf16)", wrong);
}

void verify_fill_returned(struct bench_case *bench)
{
    const struct bench_route *route = &bench->route;
    size_t row_bytes = 2 * (size_t)bench->request->hidden;

    for (int source = 0; source < route->n_ranks; source++)
        for (int32_t row = route->recv_start[source]; row < route->recv_start[source + 1]; row++)
            pattern_fill(
                (unsigned char *)bench->recv_x + (size_t)row * row_bytes, row_bytes, PATTERN_BF16,
                pattern_key(bench->request->seed, PATTERN_RETURN, bench->ctx->rank, source, route->recv_token[row]));
    twins_push(&bench->twins, bench->recv_x, (size_t)route->n_recv * row_bytes);
}

struct combine_oracle {
    float *term, *partial, *sum;
    int hidden;
};

/* A partial sum as it arrives over the network. */
static void round_partial(const struct bench_case *bench, float *partial, int n)
{
    if (bench->ctx->spec->partial_type != EP_BF16)
        return;
    for (int i = 0; i < n; i++)
        partial[i] = ep_bf16_to_f32(ep_bf16_from_f32(partial[i]));
}

/* total += term, or total = term if it is the first. */
static void accumulate(float *total, const float *term, int n, bool first)
{
    if (first) {
        memcpy(total, term, (size_t)n * sizeof(*term));
        return;
    }
    for (int i = 0; i < n; i++)
        total[i] += term[i];
}

/* The order of ep_combine(): rows of the own node one by one, each other node as one partial sum; nodes ascending. */
static bool sum_token(const struct bench_case *bench, int token, int ranks_per_node, struct combine_oracle *oracle)
{
    const struct bench_route *route = &bench->route;
    int own = route->rank / ranks_per_node;
    bool any = false;
    int open = -1; /* node whose partial sum is being added up */
    int holder = 0;

    for (int32_t p = route->part_start[token]; p < route->part_start[token + 1]; p++) {
        int node;

        while (route->part[p] >= route->send_start[holder + 1])
            holder++;
        node = holder / ranks_per_node;
        if (open >= 0 && open != node) {
            round_partial(bench, oracle->partial, oracle->hidden);
            accumulate(oracle->sum, oracle->partial, oracle->hidden, !any);
            any = true;
            open = -1;
        }
        pattern_floats(oracle->term, oracle->hidden,
                       pattern_key(bench->request->seed, PATTERN_RETURN, holder, route->rank, token));
        if (node == own) {
            accumulate(oracle->sum, oracle->term, oracle->hidden, !any);
            any = true;
        } else {
            accumulate(oracle->partial, oracle->term, oracle->hidden, open != node);
            open = node;
        }
    }
    if (open >= 0) {
        round_partial(bench, oracle->partial, oracle->hidden);
        accumulate(oracle->sum, oracle->partial, oracle->hidden, !any);
        any = true;
    }
    return any;
}

static int first_difference(const uint16_t *out, const float *sum, int n, bool any)
{
    for (int i = 0; i < n; i++)
        if (out[i] != (any ? ep_bf16_from_f32(sum[i]) : 0))
            return i;
    return -1;
}

int verify_combine(struct bench_case *bench, const uint16_t *out, int ranks_per_node, const char *what)
{
    size_t hidden = (size_t)bench->request->hidden;
    struct combine_oracle oracle = {.hidden = (int)hidden};
    float *memory = malloc(3 * hidden * sizeof(*memory));
    char wrong[160] = "";

    if (!memory)
        return ranks_emit_error(bench->ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for the oracle"), what);
    oracle.term = memory;
    oracle.partial = memory + hidden;
    oracle.sum = memory + 2 * hidden;
    for (int token = 0; token < bench->route.n_tokens && !*wrong; token++) {
        bool any = sum_token(bench, token, ranks_per_node, &oracle);
        int at = first_difference(out + (size_t)token * hidden, oracle.sum, (int)hidden, any);

        if (at >= 0)
            snprintf(wrong, sizeof(wrong), "token %d, element %d: %g instead of %g", token, at,
                     (double)ep_bf16_to_f32(out[(size_t)token * hidden + (size_t)at]),
                     any ? (double)oracle.sum[at] : 0.0);
    }
    free(memory);
    return verify_agree(bench->ctx, what, wrong);
}

int verify_byhand_dispatch(struct bench_case *bench, bool is_fp8)
{
    const struct byhand *hand = &bench->hand;
    size_t rows = (size_t)bench->route.n_recv;
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;
    const char *wrong = "";

    if (memcmp(hand->recv_rows, bench->recv_x, rows * hidden * (is_fp8 ? 1 : 2)) != 0)
        wrong = "rows differ from those of ep_dispatch()";
    else if (is_fp8 &&
             memcmp(hand->recv_scales, bench->recv_scales, rows * (hidden / EP_SCALE_BLOCK) * sizeof(float)) != 0)
        wrong = "scales differ from those of ep_dispatch()";
    else if (memcmp(hand->recv_experts, bench->recv_experts, rows * topk * sizeof(int32_t)) != 0 ||
             memcmp(hand->recv_weights, bench->recv_weights, rows * topk * sizeof(float)) != 0)
        wrong = "experts or weights differ from those of ep_dispatch()";
    return verify_agree(bench->ctx, "verifying MPI_Alltoallv", wrong);
}
