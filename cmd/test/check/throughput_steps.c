/* SPDX-License-Identifier: Apache-2.0 */
/* throughput_steps.c - runs a dispatch or a combine and verifies all bits of its outputs. */
#include "throughput.h"

#include <string.h>

typedef void (*step_fn)(struct throughput_step *step);
typedef ep_status (*step_start_fn)(struct throughput_step *step, bool async);

static size_t row_at(int64_t row, size_t bytes)
{
    return (size_t)row * bytes;
}

/*
 * If an asynchronous operation has a previous event, the inputs are written after the call, as by a compute thread, so
 * that an operation that does not wait for the event sends the poison. Otherwise the event is recorded before the call.
 */
static ep_status start_and_wait(struct throughput_step *step, step_fn load, step_start_fn start)
{
    const struct throughput_case *c = &step->state->c;
    struct check_run *run = step->state->run;
    bool load_after = c->previous && c->async;
    int is_done = 0;
    ep_status status;

    if (load_after) {
        CHECK_CALL(run, ep_event_new, run->ctx->comm, &step->after);
    } else {
        load(step);
        if (c->previous)
            CHECK_CALL(run, ep_event_record, run->ctx->comm, NULL, &step->after);
    }
    if (step->after)
        CHECK_CALL(run, ep_stream_wait, run->ctx->comm, NULL, step->after);
    status = start(step, c->async);
    if (status != EP_OK || !c->async)
        return status;
    CHECK_CALL(run, ep_event_record, run->ctx->comm, NULL, &step->done);
    if (load_after) {
        CHECK_CALL(run, ep_event_query, step->done, &is_done);
        if (is_done)
            check_mismatch(run, "complete before the event that it has to wait for");
        load(step);
        CHECK_CALL(run, ep_event_signal, step->after);
    }
    CHECK_CALL(run, ep_event_wait, step->done, -1);
    CHECK_CALL(run, ep_event_query, step->done, &is_done);
    if (!is_done)
        check_mismatch(run, "not complete by ep_event_query after ep_event_wait");
    return EP_OK;
}

static ep_status run_step(struct throughput_step *step, step_fn load, step_start_fn start)
{
    ep_status status = start_and_wait(step, load, start);

    ep_event_free(step->done);
    ep_event_free(step->after);
    step->done = step->after = NULL;
    return status;
}

/* --- dispatch --- */

static void load_dispatch(struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    int rank = state->run->ctx->rank, n_items = data_scale_items(&c->data);
    size_t n_tokens = (size_t)state->n_tokens, row_bytes = data_row_bytes(&c->data);
    size_t weight_bytes = (size_t)state->run->group.topk * sizeof(float);
    int32_t scales[EP_MAX_HIDDEN / EP_SCALE_BLOCK];

    for (int token = 0; token < state->n_tokens; token++) {
        size_t t = (size_t)token;

        data_row(&c->data, rank, token, state->x + t * row_bytes);
        data_scales(&c->data, rank, token, scales);
        for (size_t i = 0; i < (size_t)n_items; i++)
            state->x_scales[c->strided_scales ? i * n_tokens + t : t * (size_t)n_items + i] = scales[i];
    }
    if (n_tokens)
        memcpy(state->x_weights, state->run->group.weights[rank], n_tokens * weight_bytes);
    mirrors_push(&state->run->mirrors, state->x, n_tokens * row_bytes);
    mirrors_push(&state->run->mirrors, state->x_scales, n_tokens * data_scale_bytes(&c->data));
    mirrors_push(&state->run->mirrors, state->x_weights, n_tokens * weight_bytes);
}

static size_t index_bytes(const struct throughput *state)
{
    return (size_t)state->run->group.topk * (state->c.idx_type == EP_I64 ? 8 : 4);
}

/* Bytes of the weights of one received row: [K], or one in the expanded layout. */
static size_t weight_bytes_of(const struct throughput_step *step)
{
    return sizeof(float) * (step->layout->expanded ? 1 : (size_t)step->state->run->group.topk);
}

static ep_status start_dispatch(struct throughput_step *step, bool async)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    bool fp8 = data_is_fp8(&c->data);

    args.x = check_address(state->run, state->x);
    args.dtype = fp8 ? EP_F8E4M3 : EP_BF16;
    args.hidden = c->data.hidden;
    args.recv_x = check_address(state->run, state->rows[c->symmetric]);
    if (fp8) {
        args.scales = check_address(state->run, state->x_scales);
        args.scale_type = c->data.scale_type;
        args.recv_scales = check_address(state->run, state->scales[c->symmetric]);
        if (c->strided_scales) {
            args.scale_stride_token = 1;
            args.scale_stride_block = state->n_tokens;
        }
    }
    if (c->topk) {
        args.topk_weights = check_address(state->run, state->x_weights);
        args.recv_topk_weights = check_address(state->run, state->weights[c->symmetric]);
        if (!step->layout->expanded)
            args.recv_topk_idx = check_address(state->run, state->indices[c->symmetric]);
    }
    args.out_rows = step->out_rows;
    if (async)
        CHECK_CALL(state->run, ep_dispatch, step->plan, &args, NULL);
    else
        CHECK_CALL(state->run, ep_dispatch_sync, step->plan, &args);
    return EP_OK;
}

/* Verifies top-k indices and weights of one received row; after the received rows of a worst-case plan: -1 and 0. */
static void verify_selections(const struct throughput_step *step, int64_t i)
{
    struct throughput *state = step->state;
    struct check_run *run = state->run;
    const struct reference_row *row = i < step->layout->n_rows ? &step->layout->rows[i] : NULL;
    bool symmetric = state->c.symmetric, idx64 = state->c.idx_type == EP_I64;
    size_t bytes = weight_bytes_of(step);
    const unsigned char *indices = state->indices[symmetric] + row_at(i, index_bytes(state));
    int32_t expert[EP_MAX_TOPK];
    int64_t expert64[EP_MAX_TOPK];
    float weight[EP_MAX_TOPK];

    for (int k = 0; k < run->group.topk; k++) {
        expert[k] = -1;
        weight[k] = 0;
    }
    if (row && step->layout->expanded)
        weight[0] = reference_row_weight(&run->group, row);
    else if (row)
        reference_row_selections(&run->group, run->ctx->rank, row, expert, weight);
    for (int k = 0; k < run->group.topk; k++)
        expert64[k] = expert[k];
    if (!step->layout->expanded)
        check_row(run, "recv_topk_idx", i, row, idx64 ? 8 : 4, index_bytes(state),
                  idx64 ? (void *)expert64 : (void *)expert, indices);
    check_row(run, "recv_topk_weights", i, row, 4, bytes, weight, state->weights[symmetric] + row_at(i, bytes));
}

static void verify_dispatch(const struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    struct check_run *run = state->run;
    const unsigned char *rows = state->rows[c->symmetric], *scales = state->scales[c->symmetric];
    size_t row_bytes = data_row_bytes(&c->data), scale_bytes = data_scale_bytes(&c->data);
    int64_t n_rows = step->layout->n_rows;

    for (int64_t i = 0; i < n_rows; i++) {
        const struct reference_row *row = &step->layout->rows[i];

        if (row->rank < 0 && !c->zero_padding) /* undefined contents */
            continue;
        memset(state->expected, 0, row_bytes);
        if (row->rank >= 0)
            data_row(&c->data, row->rank, row->token, state->expected);
        check_row(run, "recv_x", i, row, data_is_fp8(&c->data) ? 1 : 2, row_bytes, state->expected,
                  rows + row_at(i, row_bytes));
        memset(state->expected, 0, scale_bytes);
        if (row->rank >= 0)
            data_scales(&c->data, row->rank, row->token, state->expected);
        check_row(run, "recv_scales", i, row, 4, scale_bytes, state->expected, scales + row_at(i, scale_bytes));
    }
    check_untouched(run, "recv_x", rows, row_at(n_rows, row_bytes),
                    row_at(step->out_rows, row_bytes) + CHECK_GUARD_BYTES);
    check_untouched(run, "recv_scales", scales, row_at(n_rows, scale_bytes),
                    row_at(step->out_rows, scale_bytes) + CHECK_GUARD_BYTES);
    for (int64_t i = 0; c->topk && i < step->out_rows; i++)
        if (i >= n_rows || step->layout->rows[i].rank >= 0 || c->zero_padding)
            verify_selections(step, i);
    check_guard(run, "recv_topk_idx", state->indices[c->symmetric],
                c->topk && !step->layout->expanded ? row_at(step->out_rows, index_bytes(state)) : 0);
    check_guard(run, "recv_topk_weights", state->weights[c->symmetric],
                c->topk ? row_at(step->out_rows, weight_bytes_of(step)) : 0);
}

/* Calls `act` for all outputs, to poison or to pull them. */
static void each_output(const struct throughput_step *step,
                        void (*act)(struct check_run *run, void *buffer, size_t used))
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;

    act(state->run, state->rows[c->symmetric], row_at(step->out_rows, data_row_bytes(&c->data)));
    act(state->run, state->scales[c->symmetric], row_at(step->out_rows, data_scale_bytes(&c->data)));
    act(state->run, state->indices[c->symmetric], row_at(step->out_rows, index_bytes(state)));
    act(state->run, state->weights[c->symmetric], row_at(step->out_rows, weight_bytes_of(step)));
}

ep_status throughput_dispatch(struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    struct check_run *run = state->run;
    size_t n_tokens = (size_t)state->n_tokens;

    each_output(step, check_poison);
    check_poison(run, state->x, n_tokens * data_row_bytes(&c->data));
    check_poison(run, state->x_scales, n_tokens * data_scale_bytes(&c->data));
    check_poison(run, state->x_weights, n_tokens * (size_t)run->group.topk * sizeof(float));
    CHECK_TRY(run_step(step, load_dispatch, start_dispatch));
    each_output(step, check_pull);
    verify_dispatch(step);
    return check_buffers(run);
}

/* --- combine --- */

/* The input row of combine for a token of `source`: a reference_reply_fn for a step. */
static void reply_row(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct throughput_step *step = context;
    const struct throughput *state = step->state;

    if (step->identity)
        data_bf16_row(&state->c.data, source, token, ret_row);
    else
        data_reply(&state->c.data, k < 0 ? rank : state->run->group.n_ranks + k, source, token, ret_row);
}

/* Writes the weights of a row: those received, or new ones. */
static void load_weights(const struct throughput_step *step, int64_t i)
{
    const struct throughput *state = step->state;
    const struct check_run *run = state->run;
    const struct reference_row *row = &step->layout->rows[i];
    float *out = (float *)(state->weights[state->c.symmetric] + row_at(i, weight_bytes_of(step)));
    int32_t experts[EP_MAX_TOPK];
    float weight;

    if (step->layout->expanded) {
        weight = step->identity ? reference_row_weight(&run->group, row)
                                : data_reply_weight(&state->c.data, row->rank, row->token, row->k);
        memcpy(out, &weight, sizeof(weight));
        return;
    }
    reference_row_selections(&run->group, run->ctx->rank, row, experts, out);
    for (int k = 0; k < run->group.topk && !step->identity; k++)
        out[k] = experts[k] < 0 ? 0 : data_reply_weight(&state->c.data, row->rank, row->token, k);
}

static uint16_t *bias_row(const struct throughput *state, int which, int token)
{
    return state->bias[which] + (size_t)token * (size_t)state->c.data.hidden;
}

static void load_combine(struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    size_t row_bytes = (size_t)c->data.hidden * sizeof(uint16_t);
    const struct reference_layout *layout = step->layout;
    int rank = state->run->ctx->rank;

    for (int64_t i = 0; i < layout->n_rows; i++) {
        const struct reference_row *row = &layout->rows[i];
        uint16_t *out = (uint16_t *)(state->rows[c->symmetric] + row_at(i, row_bytes));

        if (row->rank < 0) {
            memset(out, 0xff, row_bytes); /* NaN, to detect padding in a sum */
            continue;
        }
        reply_row(step, rank, row->k, row->rank, row->token, out);
        if (c->topk)
            load_weights(step, i);
    }
    for (int which = 0; which < step->n_bias; which++) {
        for (int token = 0; token < state->n_tokens; token++)
            data_bias(&c->data, which, rank, token, bias_row(state, which, token));
        mirrors_push(&state->run->mirrors, state->bias[which], row_at(state->n_tokens, row_bytes));
    }
    mirrors_push(&state->run->mirrors, state->weights[c->symmetric], row_at(layout->n_rows, weight_bytes_of(step)));
    mirrors_push(&state->run->mirrors, state->rows[c->symmetric], row_at(layout->n_rows, row_bytes));
}

static ep_status start_combine(struct throughput_step *step, bool async)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    ep_combine_args args = EP_COMBINE_ARGS_INIT;

    args.x = check_address(state->run, state->rows[c->symmetric]);
    args.dtype = EP_BF16;
    args.hidden = c->data.hidden;
    for (int which = 0; which < step->n_bias; which++)
        args.bias[which] = check_address(state->run, state->bias[which]);
    args.out = check_address(state->run, state->out);
    if (c->topk) {
        args.topk_weights = check_address(state->run, state->weights[c->symmetric]);
        args.out_topk_weights = check_address(state->run, state->out_weights);
    }
    if (async)
        CHECK_CALL(state->run, ep_combine, step->plan, &args, NULL);
    else
        CHECK_CALL(state->run, ep_combine_sync, step->plan, &args);
    return EP_OK;
}

/* Each weight is returned by the one rank that has the expert: exact in any order of summation. */
static void verify_weights(const struct throughput_step *step, int token)
{
    const struct throughput *state = step->state;
    struct check_run *run = state->run;
    int rank = run->ctx->rank, topk = run->group.topk;
    size_t bytes = (size_t)topk * sizeof(float);
    const float *own = run->group.weights[rank] + (size_t)token * (size_t)topk;
    const int32_t *experts = run->group.experts[rank] + (size_t)token * (size_t)topk;
    const struct reference_row row = {.rank = rank, .token = token};
    float expected[EP_MAX_TOPK];

    for (int k = 0; k < topk; k++) {
        float weight = step->identity ? own[k] : data_reply_weight(&state->c.data, rank, token, k);

        expected[k] = experts[k] < 0 ? 0 : weight;
    }
    check_row(run, "out_topk_weights", token, &row, sizeof(float), bytes, expected,
              state->out_weights + (size_t)token * (size_t)topk);
}

static void verify_combine(struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    struct check_run *run = state->run;
    struct reference_combine combine = {
        .hidden = c->data.hidden,
        .expanded = step->layout->expanded,
        .bf16_partials = run->ctx->spec->partial_type == EP_BF16,
        .reply = reply_row,
        .context = step,
    };
    size_t row_bytes = (size_t)c->data.hidden * sizeof(uint16_t);

    for (int token = 0; token < state->n_tokens; token++) {
        const uint16_t *out = state->out + (size_t)token * (size_t)c->data.hidden;
        const struct reference_row row = {.rank = run->ctx->rank, .token = token};
        const uint16_t *bias[2] = {NULL, NULL};

        for (int which = 0; which < step->n_bias; which++)
            bias[which] = bias_row(state, which, token);
        reference_combine_row(&run->group, &combine, run->ctx->rank, token, bias, &state->scratch, state->expected);
        check_row(run, "out", token, &row, sizeof(uint16_t), row_bytes, state->expected, out);
        if (c->topk)
            verify_weights(step, token);
    }
    check_guard(run, "out", state->out, row_at(state->n_tokens, row_bytes));
    check_guard(run, "out_topk_weights", state->out_weights,
                c->topk ? row_at(state->n_tokens, (size_t)run->group.topk * sizeof(float)) : 0);
}

ep_status throughput_combine(struct throughput_step *step)
{
    struct throughput *state = step->state;
    const struct throughput_case *c = &state->c;
    size_t row_bytes = (size_t)c->data.hidden * sizeof(uint16_t);
    struct check_run *run = state->run;
    size_t weight_bytes = (size_t)run->group.topk * sizeof(float);

    check_poison(run, state->rows[c->symmetric], row_at(step->layout->n_rows, row_bytes));
    check_poison(run, state->weights[c->symmetric], row_at(step->layout->n_rows, weight_bytes_of(step)));
    for (int which = 0; which < step->n_bias; which++)
        check_poison(run, state->bias[which], row_at(state->n_tokens, row_bytes));
    check_poison(run, state->out, row_at(state->n_tokens, row_bytes));
    check_poison(run, state->out_weights, row_at(state->n_tokens, weight_bytes));
    CHECK_TRY(run_step(step, load_combine, start_combine));
    check_pull(run, state->out, row_at(state->n_tokens, row_bytes));
    check_pull(run, state->out_weights, row_at(state->n_tokens, weight_bytes));
    verify_combine(step);
    return check_buffers(run);
}
