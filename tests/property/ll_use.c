/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Rounds of the low-latency layout: one or two dispatches, then their combines. The routing is that of the plan that
 * the operation names, for as many tokens as it has.
 */
#include "property.h"

#include <stdlib.h>
#include <string.h>

/* All ranks draw the same shape. */
struct ll_shape {
    int max_tokens, hidden;
    int spare_topk; /* the maximum K of the ep_ll is larger by this */
    int out_dtype, scale_type;
    bool round_scale, no_partial_reduce;
    int live; /* dispatches before the first combine */
};

struct result {
    uint64_t use;  /* key of its rows */
    uint64_t call; /* number of its dispatch */
    struct buffer x, recv, scales, index, out, replies;
    int32_t *count, *source;
    int64_t *range;
    float *weights;
};

struct lowlatency {
    struct run *run;
    struct ll_shape shape;
    struct reference_group group;
    struct reference_layout layout;
    ep_ll *ll;
    struct result results[2];
};

static struct ll_shape draw_ll(const struct run *run)
{
    struct random random = stream_of(run->shape, STREAM_SHAPE, 77, (uint64_t)run->op);
    struct ll_shape shape = {.live = 1 + (int)random_below(&random, 2)};
    uint32_t format = random_below(&random, 4);

    shape.max_tokens = 1 + (int)random_below(&random, 24);
    shape.out_dtype = format == 0 ? EP_BF16 : EP_F8E4M3;
    shape.scale_type = format == 0 ? 0 : format == 3 ? EP_UE8M0 : EP_F32;
    shape.round_scale = format == 2;
    shape.no_partial_reduce = random_below(&random, 2);
    shape.hidden = format == 3 ? 512 : 128 * (1 + (int)random_below(&random, 4));
    shape.spare_topk = (int)random_below(&random, 4);
    if (shape.spare_topk > EP_MAX_TOPK - run->shape->topk)
        shape.spare_topk = 0;
    return shape;
}

static size_t n_rows(const struct lowlatency *low)
{
    return (size_t)low->group.n_local * (size_t)low->group.n_ranks * (size_t)low->shape.max_tokens;
}

static size_t out_row(const struct lowlatency *low)
{
    return (size_t)low->shape.hidden * (low->shape.out_dtype == EP_BF16 ? 2 : 1);
}

static size_t scale_row(const struct lowlatency *low)
{
    size_t blocks = (size_t)low->shape.hidden / 128;

    return low->shape.scale_type == EP_F32 ? blocks * 4 : low->shape.scale_type ? blocks : 0;
}

/* Position of row i of the reference layout in the packed one, and its expert. */
static size_t packed_row(const struct lowlatency *low, int64_t i, int *ret_local)
{
    int local = 0;

    while (low->layout.expert_start[local + 1] <= i)
        local++;
    *ret_local = local;
    return (size_t)local * (size_t)low->group.n_ranks * (size_t)low->shape.max_tokens +
           (size_t)(i - low->layout.expert_start[local]);
}

static void reply(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct lowlatency *low = context;
    uint64_t from = low->results[0].use << 24 | (uint64_t)(rank + 1) << 16 | (uint64_t)(k + 1);

    fill_row(low->run->shape, STREAM_REPLY, from, row_key(source, token), true, ret_row, (size_t)low->shape.hidden * 2);
}

static bool take_result(struct lowlatency *low, struct result *result)
{
    struct run *run = low->run;
    int n = low->group.n_tokens[run->rank], topk = low->group.topk;
    size_t wide = (size_t)low->shape.hidden * 2;

    result->count = calloc((size_t)low->group.n_local, sizeof(*result->count));
    result->source = calloc(n_rows(low), sizeof(*result->source));
    result->range = calloc((size_t)low->group.n_local * (size_t)low->group.n_ranks, sizeof(*result->range));
    result->weights = calloc((size_t)n * (size_t)topk + 1, sizeof(*result->weights));
    if (!result->count || !result->source || !result->range || !result->weights ||
        !buffer_new(run, (size_t)n * wide, &result->x) || !buffer_new(run, n_rows(low) * out_row(low), &result->recv) ||
        !buffer_new(run, n_rows(low) * scale_row(low), &result->scales) ||
        !buffer_new(run, (size_t)n * (size_t)topk * 4, &result->index) ||
        !buffer_new(run, (size_t)n * wide, &result->out) || !buffer_new(run, n_rows(low) * wide, &result->replies)) {
        fail_check(run, "no memory");
        return false;
    }
    for (int t = 0; t < n; t++)
        fill_row(run->shape, STREAM_ROW, result->use, row_key(run->rank, t), true, result->x.at + (size_t)t * wide,
                 wide);
    if (n)
        memcpy(result->index.at, low->group.experts[run->rank], (size_t)n * (size_t)topk * 4);
    memcpy(result->weights, low->group.weights[run->rank], (size_t)n * (size_t)topk * sizeof(float));
    return true;
}

static void free_result(struct lowlatency *low, struct result *result)
{
    struct buffer *buffers[] = {&result->x,     &result->recv, &result->scales,
                                &result->index, &result->out,  &result->replies};

    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++)
        if (!buffer_free(buffers[i]))
            fail_check(low->run, "low latency: memory around buffer %zu was written", i);
    free(result->count);
    free(result->source);
    free(result->range);
    free(result->weights);
    *result = (struct result){0};
}

/* --- dispatch --------------------------------------------------------------------------------------------------- */

static bool finish(struct lowlatency *low, ep_status status, bool hook, const char *what)
{
    if (!passed(low->run, status, what))
        return false;
    return !hook || passed(low->run, ep_ll_finish_sync(low->ll, 0), "ep_ll_finish");
}

static bool dispatch(struct lowlatency *low, struct result *result)
{
    ep_ll_dispatch_args args =
        args_ll_dispatch(result->x.at, result->index.at, EP_I32, low->group.n_tokens[low->run->rank]);
    bool hook = random_below(&low->run->local, 2);

    args.topk = low->shape.spare_topk ? low->group.topk : 0;
    args.out_dtype = low->shape.out_dtype;
    args.scale_type = low->shape.scale_type;
    args.recv_x = result->recv.at;
    args.recv_scales = low->shape.scale_type ? result->scales.at : NULL;
    args.recv_count = result->count;
    args.recv_source = random_below(&low->run->local, 4) ? result->source : NULL;
    args.ret_call = &result->call;
    args.recv_range = random_below(&low->run->local, 4) ? result->range : NULL;
    args.flags = (hook ? EP_LL_RECV_HOOK : 0u) | (low->shape.round_scale ? EP_LL_ROUND_SCALE : 0u);
    if (!args.recv_source) {
        free(result->source);
        result->source = NULL;
    }
    if (!args.recv_range) {
        free(result->range);
        result->range = NULL;
    }
    return finish(low, ep_ll_dispatch_sync(low->ll, &args), hook, "ep_ll_dispatch");
}

static void check_row(struct lowlatency *low, const struct result *result, int64_t i)
{
    const struct reference_row *row = &low->layout.rows[i];
    uint16_t wide[MAX_HIDDEN];
    uint8_t narrow[MAX_HIDDEN];
    float factors[MAX_HIDDEN / 128];
    int32_t packed[MAX_HIDDEN / 512];
    int local;
    size_t at = packed_row(low, i, &local);
    const void *expected = low->shape.out_dtype == EP_BF16 ? (const void *)wide : (const void *)narrow;
    const void *scales = low->shape.scale_type == EP_UE8M0 ? (const void *)packed : (const void *)factors;

    fill_row(low->run->shape, STREAM_ROW, result->use, row_key(row->rank, row->token), true, wide,
             (size_t)low->shape.hidden * 2);
    if (low->shape.out_dtype == EP_F8E4M3)
        reference_quantize(wide, low->shape.hidden, low->shape.round_scale || low->shape.scale_type == EP_UE8M0, narrow,
                           factors);
    if (low->shape.scale_type == EP_UE8M0)
        reference_pack_ue8m0(factors, low->shape.hidden / 128, packed);
    if (memcmp(expected, result->recv.at + at * out_row(low), out_row(low)) != 0)
        fail_check(low->run, "low latency: row %lld of expert %d is not token %d of rank %d",
                   (long long)(i - low->layout.expert_start[local]), local, row->token, row->rank);
    if (memcmp(scales, result->scales.at + at * scale_row(low), scale_row(low)) != 0)
        fail_check(low->run, "low latency: scales of row %zu", at);
    if (result->source && result->source[at] != row->token)
        fail_check(low->run, "low latency: source of row %zu is %d, should be %d", at, result->source[at], row->token);
}

static void check_dispatch(struct lowlatency *low, const struct result *result)
{
    int nranks = low->group.n_ranks;

    for (int64_t i = 0; i < low->layout.n_rows; i++)
        check_row(low, result, i);
    for (int local = 0; local < low->group.n_local; local++) {
        int64_t begin = low->layout.expert_start[local], end = low->layout.expert_start[local + 1], at = begin;

        if (result->count[local] != end - begin)
            fail_check(low->run, "low latency: recv_count[%d] is %d, should be %lld", local, result->count[local],
                       (long long)(end - begin));
        for (int rank = 0; result->range && rank < nranks; rank++) {
            int64_t first = at - begin, n = 0, got = result->range[local * nranks + rank];

            for (; at < end && low->layout.rows[at].rank == rank; at++)
                n++;
            if ((got & 0xffffffff) != n || (n && got >> 32 != first))
                fail_check(low->run, "low latency: recv_range[%d][%d] is %llx", local, rank, (unsigned long long)got);
        }
    }
}

/* --- combine ---------------------------------------------------------------------------------------------------- */

static bool combine(struct lowlatency *low, struct result *result)
{
    struct run *run = low->run;
    size_t wide = (size_t)low->shape.hidden * 2;
    bool hook = random_below(&run->local, 2), zero_copy = random_below(&run->local, 3) == 0;
    ep_ll_combine_args args;
    void *x = result->replies.at;

    if (zero_copy && !passed(run, ep_ll_get_combine_buffer(low->ll, &x), "ep_ll_get_combine_buffer"))
        return false;
    for (int64_t i = 0; i < low->layout.n_rows; i++) {
        int local;
        size_t at = packed_row(low, i, &local);

        reply(low, run->rank, low->layout.rows[i].k, low->layout.rows[i].rank, low->layout.rows[i].token,
              (uint16_t *)(void *)((unsigned char *)x + at * wide));
    }
    args =
        args_ll_combine(x, result->index.at, EP_I32, low->group.n_tokens[run->rank], result->weights, result->out.at);
    args.topk = random_below(&run->local, 2) ? low->group.topk : 0;
    args.flags = (hook ? EP_LL_RECV_HOOK : 0u) | (zero_copy ? EP_LL_ZERO_COPY : 0u) |
                 (low->shape.no_partial_reduce ? EP_LL_NO_PARTIAL_REDUCE : 0u);
    args.call = result->call;
    return finish(low, ep_ll_combine_sync(low->ll, &args), hook, "ep_ll_combine");
}

static void check_combine(struct lowlatency *low, const struct result *result)
{
    struct reference_combine how = {.hidden = low->shape.hidden,
                                    .expanded = true,
                                    .no_partial_reduce = low->shape.no_partial_reduce,
                                    .reply = reply,
                                    .context = low};
    static _Thread_local struct reference_scratch scratch;
    uint16_t expected[MAX_HIDDEN];
    size_t wide = (size_t)low->shape.hidden * 2;

    for (int t = 0; t < low->group.n_tokens[low->run->rank]; t++) {
        reference_ll_combine_row(&low->group, &how, low->run->rank, t, &scratch, expected);
        if (memcmp(expected, result->out.at + (size_t)t * wide, wide) != 0)
            fail_check(low->run, "low latency: combined row of token %d", t);
    }
}

/* --- rounds ----------------------------------------------------------------------------------------------------- */

/* The room of an expert for a rank's rows, which are more than its tokens where these choose an expert repeatedly. */
static int most_rows(const struct reference_group *group, int most)
{
    for (int rank = 0; rank < group->n_ranks; rank++) {
        int rows[EP_MAX_EXPERTS] = {0};

        for (int i = 0; i < group->n_tokens[rank] * group->topk; i++)
            if (group->experts[rank][i] >= 0 && ++rows[group->experts[rank][i]] > most)
                most++;
    }
    return most;
}

static bool open_group(struct lowlatency *low, int plan)
{
    struct run *run = low->run;
    ep_ll_config config;

    if (!draw_routing(run->shape, plan, 0, &low->group)) {
        fail_check(run, "no memory");
        return false;
    }
    for (int rank = 0; rank < low->group.n_ranks; rank++)
        if (low->group.n_tokens[rank] > low->shape.max_tokens)
            low->group.n_tokens[rank] = low->shape.max_tokens;
    if (!reference_layout_init(&low->group, run->rank, true, 1, &low->layout, NULL)) {
        fail_check(run, "no memory");
        return false;
    }
    low->shape.max_tokens = most_rows(&low->group, low->shape.max_tokens);
    config = args_ll(low->shape.max_tokens, low->shape.hidden, run->shape->n_experts,
                     run->shape->topk + low->shape.spare_topk);
    return passed(run, ep_ll_new(run->comm, &config, &low->ll), "ep_ll_new");
}

void use_lowlatency(struct run *run, const struct op *op)
{
    struct lowlatency low = {.run = run, .shape = draw_ll(run)};
    bool going = open_group(&low, op->plan);
    int started = 0, answered = 0;

    while (going && answered < op->rounds) {
        int live = started - answered;

        if (live < low.shape.live && started < op->rounds) {
            struct result *result = &low.results[live];

            result->use = (uint64_t)(run->op * 8 + started++ + 5000);
            going = take_result(&low, result) && dispatch(&low, result);
            if (going)
                check_dispatch(&low, result);
        } else {
            going = combine(&low, &low.results[0]);
            if (going)
                check_combine(&low, &low.results[0]);
            free_result(&low, &low.results[0]);
            low.results[0] = low.results[1];
            low.results[1] = (struct result){0};
            answered++;
        }
    }
    free_result(&low, &low.results[0]);
    free_result(&low, &low.results[1]);
    ep_ll_free(low.ll);
    reference_layout_done(&low.layout);
    reference_group_done(&low.group);
}
