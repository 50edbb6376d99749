/* SPDX-License-Identifier: Apache-2.0 */
#include "property.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static size_t row_bytes(const struct op *op)
{
    return (size_t)op->hidden * ep_dtype_bytes((ep_dtype)op->dtype);
}

static size_t scale_words(const struct op *op)
{
    return op->scale_type == EP_F32 ? (size_t)op->hidden / 128 : op->scale_type ? (size_t)op->hidden / 512 : 0;
}

static bool is_expanded(const struct use *use)
{
    return use->run->shape->plans[use->op->plan].flags & EP_PLAN_EXPANDED;
}

static size_t index_bytes(const struct use *use)
{
    return use->run->shape->plans[use->op->plan].idx_type == EP_I64 ? 8 : 4;
}

static int own_tokens(const struct use *use)
{
    return use->version->group.n_tokens[use->run->rank];
}

/* --- inputs ----------------------------------------------------------------------------------------------------- */

/* Random scales without NaN. */
static void make_scales(const struct use *use, int rank, int token, uint32_t *ret_words)
{
    unsigned char *bytes = (unsigned char *)ret_words;
    size_t n = scale_words(use->op) * 4;

    fill_row(use->run->shape, STREAM_ROW, (uint64_t)use->number + 1000, row_key(rank, token), true, ret_words, n);
    for (size_t i = 0; use->op->scale_type == EP_UE8M0 && i < n; i++)
        bytes[i] = bytes[i] == 255 ? 254 : bytes[i];
}

static void fill_scales(struct use *use, int token)
{
    uint32_t words[MAX_HIDDEN / 128];
    uint32_t *out = (uint32_t *)(void *)use->buffer[SLOT_SCALES].at;
    size_t n = scale_words(use->op), block = use->stride_block ? (size_t)use->stride_block : 1;
    size_t stride = use->stride_token ? (size_t)use->stride_token : n;

    make_scales(use, use->run->rank, token, words);
    for (size_t b = 0; b < n; b++)
        out[(size_t)token * stride + b * block] = words[b];
}

static void fill_dispatch(struct use *use)
{
    const struct run *run = use->run;
    size_t bytes = row_bytes(use->op), topk = (size_t)run->shape->topk;

    for (int t = 0; t < own_tokens(use); t++) {
        fill_row(run->shape, STREAM_ROW, (uint64_t)use->number, row_key(run->rank, t), use->op->dtype == EP_BF16,
                 use->buffer[SLOT_X].at + (size_t)t * bytes, bytes);
        if (use->op->scale_type)
            fill_scales(use, t);
    }
    if (use->op->weights)
        memcpy(use->buffer[SLOT_WEIGHTS].at, use->version->group.weights[run->rank],
               (size_t)own_tokens(use) * topk * sizeof(float));
}

/* The row that `rank` returns; k: of this choice, -1 in rank layout. */
static void reply(void *context, int rank, int k, int source, int token, uint16_t *ret_row)
{
    const struct use *use = context;
    uint64_t from = (uint64_t)use->number << 24 | (uint64_t)(rank + 1) << 16 | (uint64_t)(k + 1);

    if (use->op->echo)
        fill_row(use->run->shape, STREAM_ROW, (uint64_t)use->number - 1, row_key(source, token), true, ret_row,
                 row_bytes(use->op));
    else
        fill_row(use->run->shape, STREAM_REPLY, from, row_key(source, token), true, ret_row, row_bytes(use->op));
}

/* Inputs of a combine: a row for each received row; padding is NaN, because it must not be read. */
static void fill_combine(struct use *use)
{
    const struct run *run = use->run;
    const struct reference_layout *layout = &use->version->layout;
    size_t bytes = row_bytes(use->op), topk = (size_t)run->shape->topk;
    float *weights = (float *)(void *)use->buffer[SLOT_WEIGHTS].at;

    for (int64_t i = 0; i < layout->n_rows; i++) {
        const struct reference_row *row = &layout->rows[i];
        unsigned char *x = use->buffer[SLOT_X].at + (size_t)i * bytes;

        if (!use->op->echo)
            memset(x, 0xff, bytes);
        if (row->rank < 0)
            continue;
        if (!use->op->echo)
            reply(use, run->rank, row->k, row->rank, row->token, (uint16_t *)(void *)x);
        if (use->op->weights && layout->expanded)
            weights[i] =
                reply_weight(run->shape, (uint64_t)use->number, row_key(row->rank, row->token), run->rank, row->k);
        for (size_t k = 0; use->op->weights && !layout->expanded && k < topk; k++)
            weights[(size_t)i * topk + k] =
                reply_weight(run->shape, (uint64_t)use->number, row_key(row->rank, row->token), run->rank, (int)k);
    }
    for (int b = 0; b < use->op->n_bias; b++)
        for (int t = 0; t < own_tokens(use); t++)
            fill_row(run->shape, STREAM_BIAS, (uint64_t)(use->number * 2 + b), row_key(run->rank, t), true,
                     use->buffer[SLOT_BIAS + b].at + (size_t)t * bytes, bytes);
}

static void fill(struct use *use)
{
    if (use->op->kind == OP_DISPATCH)
        fill_dispatch(use);
    else
        fill_combine(use);
}

/* The inputs are written late, by another thread; the operation must wait for its signal. */
static void *filler_main(void *argument)
{
    struct use *use = argument;

    usleep((useconds_t)(use->number * 397 % 1500));
    fill(use);
    ep_event_signal(use->signal);
    return NULL;
}

/*
 * Selects what the operation waits for: nothing, an earlier operation, or the filler. Starts the filler or fills at
 * once.
 */
static bool prepare(struct use *use, ep_event **ret_after)
{
    struct run *run = use->run;
    uint32_t lot = random_below(&run->local, 10);

    *ret_after = NULL;
    if (lot < 3) {
        if (!passed(run, ep_event_new(run->comm, &use->signal), "ep_event_new"))
            return false;
        use->filling = pthread_create(&use->filler, NULL, filler_main, use) == 0;
        if (!use->filling) {
            fail_check(run, "no thread");
            return false;
        }
        *ret_after = use->signal;
        return true;
    }
    fill(use);
    if (lot < 6 && run->n_uses > 0)
        *ret_after = run->uses[random_below(&run->local, (uint32_t)run->n_uses)].event;
    return true;
}

static ep_status start_wait(const struct use *use, ep_event *after)
{
    return after ? ep_stream_wait(use->run->comm, use->stream, after) : EP_OK;
}

/* --- the calls -------------------------------------------------------------------------------------------------- */

static bool alloc_buffer(struct use *use, enum slot slot, size_t bytes)
{
    if (buffer_new(use->run, bytes, &use->buffer[slot]))
        return true;
    fail_check(use->run, "no memory for %zu bytes", bytes);
    return false;
}

/* Scales with random strides. */
static size_t draw_strides(struct use *use)
{
    int64_t n = own_tokens(use), words = (int64_t)scale_words(use->op);

    switch (random_below(&use->run->local, 4)) {
    case 0:
        use->stride_token = words;
        use->stride_block = 1;
        break;
    case 1:
        use->stride_token = words + 3;
        use->stride_block = 1;
        break;
    case 2: /* blocks outermost, tokens innermost */
        use->stride_token = 1;
        use->stride_block = n + 1;
        return (size_t)((n + 1) * words) * 4;
    default:
        return (size_t)(n * words) * 4;
    }
    return (size_t)(n * use->stride_token) * 4;
}

static bool alloc_dispatch_buffers(struct use *use)
{
    const struct op *op = use->op;
    size_t topk = (size_t)use->run->shape->topk, rows = (size_t)use->out_rows, n = (size_t)own_tokens(use);

    return alloc_buffer(use, SLOT_X, n * row_bytes(op)) &&
           (!op->scale_type || alloc_buffer(use, SLOT_SCALES, draw_strides(use))) &&
           (!op->weights || alloc_buffer(use, SLOT_WEIGHTS, n * topk * sizeof(float))) &&
           alloc_buffer(use, SLOT_RECV, rows * row_bytes(op)) &&
           (!op->scale_type || alloc_buffer(use, SLOT_RECV_SCALES, rows * scale_words(op) * 4)) &&
           (!op->index || is_expanded(use) || alloc_buffer(use, SLOT_RECV_INDEX, rows * topk * index_bytes(use))) &&
           (!op->weights || alloc_buffer(use, SLOT_RECV_WEIGHTS, rows * (is_expanded(use) ? 1 : topk) * sizeof(float)));
}

bool use_dispatch(struct run *run, const struct op *op, struct use *use)
{
    struct plan_state *state = &run->plans[op->plan];
    ep_dispatch_args args;
    bool async = random_below(&run->local, 2);
    ep_event *after;

    *use = (struct use){
        .run = run, .op = op, .number = run->op, .state = state, .version = &state->versions[state->version]};
    if (async)
        use->stream = run->queues[random_below(&run->local, N_QUEUES)];
    use->out_rows =
        (state->max_recv_tokens ? state->max_recv_tokens : use->version->layout.n_rows) + random_below(&run->local, 3);
    if (!alloc_dispatch_buffers(use) || !prepare(use, &after))
        return false;
    args = args_dispatch(op->dtype, op->hidden, use->buffer[SLOT_X].at, use->buffer[SLOT_RECV].at, use->out_rows);
    args.scales = use->buffer[SLOT_SCALES].at;
    args.scale_type = op->scale_type;
    args.scale_stride_token = use->stride_token;
    args.scale_stride_block = use->stride_block;
    args.topk_weights = (const float *)(const void *)use->buffer[SLOT_WEIGHTS].at;
    args.recv_scales = use->buffer[SLOT_RECV_SCALES].at;
    args.recv_topk_idx = use->buffer[SLOT_RECV_INDEX].at;
    args.recv_topk_weights = (float *)(void *)use->buffer[SLOT_RECV_WEIGHTS].at;
    state->used = true;
    if (!passed(run, start_wait(use, after), "ep_stream_wait"))
        return false;
    if (!async)
        return passed(run, ep_dispatch_sync(state->plan, &args), "ep_dispatch_sync");
    return passed(run, ep_dispatch(state->plan, &args, use->stream), "ep_dispatch") &&
           passed(run, ep_event_record(run->comm, use->stream, &use->event), "ep_event_record");
}

static bool alloc_combine_buffers(struct use *use)
{
    const struct op *op = use->op;
    size_t topk = (size_t)use->run->shape->topk, rows = (size_t)use->out_rows, n = (size_t)own_tokens(use);
    bool taken = use->echo || alloc_buffer(use, SLOT_X, rows * row_bytes(op));

    if (taken && op->weights)
        taken = alloc_buffer(use, SLOT_WEIGHTS, rows * (is_expanded(use) ? 1 : topk) * sizeof(float)) &&
                alloc_buffer(use, SLOT_RECV_WEIGHTS, n * topk * sizeof(float));
    for (int b = 0; taken && b < op->n_bias; b++)
        taken = alloc_buffer(use, SLOT_BIAS + b, n * row_bytes(op));
    return taken && alloc_buffer(use, SLOT_RECV, n * row_bytes(op));
}

/* Each rank checks the sums of its own tokens, on one node in an order of its own. */
static uint32_t draw_order(struct run *run)
{
    struct random shared = stream_of(run->shape, STREAM_SHAPE, 78, (uint64_t)run->op);
    bool nodes = run->shape->nnodes > 1;
    uint32_t lot = random_below(nodes ? &shared : &run->local, 4);

    if (lot < 2)
        return 0;
    return lot == 2 && !nodes ? EP_COMBINE_BY_CHOICE : EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL;
}

bool use_combine(struct run *run, const struct op *op, struct use *use)
{
    struct plan_state *state = &run->plans[op->plan];
    ep_combine_args args;
    bool async = random_below(&run->local, 2);
    ep_event *after;

    *use = (struct use){
        .run = run, .op = op, .number = run->op, .state = state, .version = &state->versions[state->version]};
    if (async)
        use->stream = run->queues[random_below(&run->local, N_QUEUES)];
    use->out_rows = state->max_recv_tokens ? state->max_recv_tokens : use->version->layout.n_rows;
    use->flags = draw_order(run);
    use->echo = op->echo ? &run->uses[run->n_uses - 1] : NULL;
    if (!alloc_combine_buffers(use) || !prepare(use, &after))
        return false;
    args = args_combine(op->hidden, use->echo ? use->echo->buffer[SLOT_RECV].at : use->buffer[SLOT_X].at,
                        use->buffer[SLOT_RECV].at);
    args.topk_weights = (const float *)(const void *)use->buffer[SLOT_WEIGHTS].at;
    args.bias[0] = use->buffer[SLOT_BIAS].at;
    args.bias[1] = use->buffer[SLOT_BIAS2].at;
    /* A single bias may be the second one. */
    if (op->n_bias == 1 && random_below(&run->local, 2)) {
        args.bias[1] = args.bias[0];
        args.bias[0] = NULL;
    }
    args.out_topk_weights = (float *)(void *)use->buffer[SLOT_RECV_WEIGHTS].at;
    args.flags = use->flags;
    state->used = true;
    if (!passed(run, start_wait(use, after), "ep_stream_wait"))
        return false;
    if (!async)
        return passed(run, ep_combine_sync(state->plan, &args), "ep_combine_sync");
    return passed(run, ep_combine(state->plan, &args, use->stream), "ep_combine") &&
           passed(run, ep_event_record(run->comm, use->stream, &use->event), "ep_event_record");
}

/* --- the checks ------------------------------------------------------------------------------------------------- */

/* recv_topk_idx and recv_topk_weights of a received row in rank layout. */
static void check_selections(struct use *use, int64_t i, const struct reference_row *row)
{
    size_t topk = (size_t)use->run->shape->topk, at = (size_t)i * topk;
    int32_t experts[MAX_TOPK];
    float weights[MAX_TOPK];

    reference_row_selections(&use->version->group, use->version->layout.rank, row, experts, weights);
    for (size_t k = 0; k < topk; k++) {
        const unsigned char *index = use->buffer[SLOT_RECV_INDEX].at;
        const float *weight = (const float *)(const void *)use->buffer[SLOT_RECV_WEIGHTS].at;
        int64_t got = experts[k];

        if (index)
            got = index_bytes(use) == 8 ? ((const int64_t *)(const void *)index)[at + k]
                                        : ((const int32_t *)(const void *)index)[at + k];
        if (got != experts[k])
            fail_check(use->run, "recv_topk_idx[%lld][%zu] is %lld, should be %d", (long long)i, k, (long long)got,
                       experts[k]);
        if (weight && weight[at + k] != weights[k])
            fail_check(use->run, "recv_topk_weights[%lld][%zu] is %g, should be %g", (long long)i, k,
                       (double)weight[at + k], (double)weights[k]);
    }
}

static void check_received_row(struct use *use, int64_t i)
{
    const struct op *op = use->op;
    const struct reference_row *row = &use->version->layout.rows[i];
    unsigned char expected[2 * MAX_HIDDEN];
    const unsigned char *got = use->buffer[SLOT_RECV].at + (size_t)i * row_bytes(op);
    const float *weight = (const float *)(const void *)use->buffer[SLOT_RECV_WEIGHTS].at;
    bool zeros = use->run->shape->plans[op->plan].flags & EP_PLAN_ZERO_PADDING;

    if (row->rank < 0) {
        if (zeros && !(all_bytes(got, row_bytes(op), 0) && (!weight || weight[i] == 0)))
            fail_check(use->run, "padding row %lld is not zero", (long long)i);
        return;
    }
    fill_row(use->run->shape, STREAM_ROW, (uint64_t)use->number, row_key(row->rank, row->token), op->dtype == EP_BF16,
             expected, row_bytes(op));
    if (memcmp(expected, got, row_bytes(op)) != 0)
        fail_check(use->run, "received row %lld is not token %d of rank %d", (long long)i, row->token, row->rank);
    if (op->scale_type) {
        uint32_t words[MAX_HIDDEN / 128];
        size_t bytes = scale_words(op) * 4;

        make_scales(use, row->rank, row->token, words);
        if (memcmp(words, use->buffer[SLOT_RECV_SCALES].at + (size_t)i * bytes, bytes) != 0)
            fail_check(use->run, "scales of received row %lld", (long long)i);
    }
    if (!use->version->layout.expanded)
        check_selections(use, i, row);
    else if (weight && weight[i] != reference_row_weight(&use->version->group, row))
        fail_check(use->run, "weight of received row %lld is %g", (long long)i, (double)weight[i]);
}

/* After the last row: marks up to max_recv_tokens, nothing after them. */
static void check_rest(struct use *use)
{
    int64_t n = use->version->layout.n_rows, marked = use->state->max_recv_tokens ? use->state->max_recv_tokens : n;
    size_t topk = (size_t)use->run->shape->topk, index_row = topk * index_bytes(use);
    size_t weight_row = (is_expanded(use) ? 1 : topk) * sizeof(float), row = row_bytes(use->op);
    const unsigned char *index = use->buffer[SLOT_RECV_INDEX].at, *weights = use->buffer[SLOT_RECV_WEIGHTS].at;

    if (!all_bytes(use->buffer[SLOT_RECV].at + (size_t)n * row, (size_t)(use->out_rows - n) * row, UNTOUCHED))
        fail_check(use->run, "rows behind the last one were touched");
    if (index && !all_bytes(index + (size_t)n * index_row, (size_t)(marked - n) * index_row, 0xff))
        fail_check(use->run, "recv_topk_idx behind the last row is not -1");
    if (weights && !all_bytes(weights + (size_t)n * weight_row, (size_t)(marked - n) * weight_row, 0))
        fail_check(use->run, "recv_topk_weights behind the last row are not 0");
    if (index &&
        !all_bytes(index + (size_t)marked * index_row, (size_t)(use->out_rows - marked) * index_row, UNTOUCHED))
        fail_check(use->run, "recv_topk_idx behind max_recv_tokens was touched");
}

static float expected_weight(const struct use *use, int token, int k)
{
    const struct run *run = use->run;
    const struct reference_group *group = &use->version->group;
    const int32_t *experts = group->experts[run->rank] + (size_t)token * (size_t)group->topk;
    float sum = 0;

    for (int rank = 0; rank < group->n_ranks; rank++) {
        bool there = false;

        for (int i = 0; i < group->topk; i++)
            if (experts[i] >= 0 && experts[i] / group->n_local == rank)
                there |= !is_expanded(use) || i == k;
        if (there)
            sum += reply_weight(run->shape, (uint64_t)use->number, row_key(run->rank, token), rank, k);
    }
    return sum;
}

static void check_sums(struct use *use)
{
    struct run *run = use->run;
    static _Thread_local struct reference_scratch scratch;
    struct reference_combine combine = {.hidden = use->op->hidden,
                                        .expanded = is_expanded(use),
                                        .bf16_partials = run->shape->config.partial_type == EP_BF16,
                                        .reply = reply,
                                        .context = use};
    const float *weights = (const float *)(const void *)use->buffer[SLOT_RECV_WEIGHTS].at;
    uint16_t expected[MAX_HIDDEN];
    size_t bytes = row_bytes(use->op);

    for (int t = 0; t < own_tokens(use) && !run->wrong; t++) {
        const uint16_t *bias[2] = {NULL, NULL};

        for (int b = 0; b < use->op->n_bias; b++)
            bias[b] = (const uint16_t *)(const void *)(use->buffer[SLOT_BIAS + b].at + (size_t)t * bytes);
        if (use->flags)
            combine_by_choice(&use->version->group, &combine, use->flags, run->shape->plans[use->op->plan].mask,
                              run->rank, t, bias, &scratch, expected);
        else
            reference_combine_row(&use->version->group, &combine, run->rank, t, bias, &scratch, expected);
        if (memcmp(expected, use->buffer[SLOT_RECV].at + (size_t)t * bytes, bytes) != 0)
            fail_check(run, "combined row of token %d, flags %u", t, use->flags);
        for (int k = 0; weights && k < run->shape->topk; k++)
            if (weights[t * run->shape->topk + k] != expected_weight(use, t, k))
                fail_check(run, "out_topk_weights[%d][%d] is %g, should be %g", t, k,
                           (double)weights[t * run->shape->topk + k], (double)expected_weight(use, t, k));
    }
}

void use_finish(struct use *use)
{
    struct run *run = use->run;
    int done = 0;

    if (use->event) {
        passed(run, ep_event_wait(use->event, -1), "ep_event_wait");
        if (!passed(run, ep_event_query(use->event, &done), "ep_event_query") || !done)
            fail_check(run, "an event that was waited for is not complete");
    }
    if (use->filling)
        pthread_join(use->filler, NULL);
    run->op = use->number;
    for (int64_t i = 0; use->op->kind == OP_DISPATCH && !run->wrong && i < use->version->layout.n_rows; i++)
        check_received_row(use, i);
    if (use->op->kind == OP_DISPATCH && !run->wrong)
        check_rest(use);
    if (use->op->kind == OP_COMBINE && !run->wrong)
        check_sums(use);
}

void use_free(struct use *use)
{
    ep_event_free(use->event);
    ep_event_free(use->signal);
    for (int slot = 0; slot < SLOTS; slot++)
        if (!buffer_free(&use->buffer[slot]))
            fail_check(use->run, "memory around buffer %d was written", slot);
}
