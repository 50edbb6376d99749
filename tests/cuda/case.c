/* SPDX-License-Identifier: Apache-2.0 */
#include "case.h"

#include "backend/cuda/plan.h"
#include "group/plan.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdlib.h>
#include <string.h>

enum {
    X,
    SCALES,
    WEIGHTS,
    IDX,
    GLOBAL_SCALE,
    BIAS0,
    BIAS1,
    RECV_X,
    RECV_SCALES,
    RECV_IDX,
    RECV_WEIGHTS,
    RECV_SOURCE,
    OUT,
    OUT_WEIGHTS,
    N_BUFFERS
};

static const char *const names[N_BUFFERS] = {
    "x",      "scales",      "topk_weights",  "topk_idx",          "global_scale", "bias0", "bias1",
    "recv_x", "recv_scales", "recv_topk_idx", "recv_topk_weights", "recv_source",  "out",   "out_topk_weights"};

enum { SOURCE_STRIDE = 70000 }; /* more than the tokens of any rank */

struct state {
    uint32_t combine_flags; /* EP_COMBINE_... */
    const struct group *group;
    const struct shape *shape;
    struct mirror b[N_BUFFERS];
    ep_plan *ep_group_plan, *cuda_plan;
    ep_plan_info info;
};

static int new_buffer(struct state *s, int which, size_t rows, size_t row_bytes, enum memory memory)
{
    TRY(mirror_new(s->group, names[which], rows * row_bytes, memory, &s->b[which]));
    s->b[which].row_bytes = row_bytes;
    return 0;
}

static int push(struct state *s, int which)
{
    return mirror_push(s->group, &s->b[which]);
}

static int compare(struct state *s, int which, const char *phase)
{
    return mirror_compare(s->group, &s->b[which], phase);
}

static size_t row_bytes(const struct shape *shape)
{
    return (size_t)ep_row_bytes(shape->dtype, shape->hidden);
}

static size_t scale_bytes(const struct shape *shape)
{
    return 4 * (size_t)ep_words_of_scales(shape->dtype, shape->scale_type, shape->hidden);
}

/* Is x of that type, or of bytes? */
static bool is_bf16(const struct shape *shape)
{
    return shape->dtype == EP_BF16 || shape->quantized;
}

/* Four values from one random number: signs, exponents near that of 1, all mantissas. One number of 256 is special. */
void fill_bf16(uint16_t *values, size_t n, uint64_t *random)
{
    for (size_t i = 0; i < n; i += 4) {
        uint64_t r = next_random(random);
        uint64_t four = (r & 0x8000800080008000u) | ((r & 0x03ff03ff03ff03ffu) + 0x3d803d803d803d80u);

        if ((r >> 32 & 0x7fff) < 128) {
            uint64_t special = next_random(random);
            uint64_t value = special & 1 ? special >> 16 & 0xffff : special >> 1 & 1 ? 0x8000 : 0;
            int at = (int)(special >> 2 & 3) * 16;

            four = (four & ~((uint64_t)0xffff << at)) | value << at;
        }
        memcpy(values + i, &four, (n - i < 4 ? n - i : 4) * sizeof(*values));
    }
}

static int64_t choose_expert(const struct routing *routing, const int64_t *chosen, int k, uint64_t *random)
{
    /* Enough experts for all choices must remain. */
    bool skewed = routing->skewed && routing->n_experts / routing->nranks >= routing->topk;
    uint64_t range = (uint64_t)routing->n_experts / (skewed ? (uint64_t)routing->nranks : 1);

    for (;;) {
        uint64_t r = next_random(random);
        bool again = false;

        if (routing->holes && r >> 60 < 6)
            return -1;
        for (int j = 0; j < k && !routing->repeated; j++)
            again |= chosen[j] == (int64_t)(r % range);
        if (!again)
            return (int64_t)(r % range);
    }
}

void fill_routing(const struct routing *routing, uint64_t *random, void *ret_index)
{
    int64_t chosen[EP_MAX_TOPK];

    for (int t = 0; t < routing->n_tokens; t++)
        for (int k = 0; k < routing->topk; k++) {
            size_t at = (size_t)t * (size_t)routing->topk + (size_t)k;

            chosen[k] = choose_expert(routing, chosen, k, random);
            if (routing->idx_type == EP_I64)
                ((int64_t *)ret_index)[at] = chosen[k];
            else
                ((int32_t *)ret_index)[at] = (int32_t)chosen[k];
        }
}

static void fill_inputs(struct state *s)
{
    const struct shape *shape = s->shape;
    size_t hidden = (size_t)shape->hidden, n = (size_t)shape->n_tokens;
    uint64_t random = shape->seed, *words = (uint64_t *)(void *)s->b[X].host;
    struct routing routing = {.n_tokens = shape->n_tokens,
                              .topk = shape->topk,
                              .n_experts = shape->n_experts,
                              .nranks = s->group->nranks,
                              .idx_type = shape->idx_type,
                              .skewed = shape->skewed,
                              .repeated = shape->repeated,
                              .holes = shape->holes};

    if (is_bf16(shape))
        fill_bf16((uint16_t *)(void *)s->b[X].host, n * hidden, &random);
    for (size_t i = 0; !is_bf16(shape) && i < s->b[X].bytes / 8; i++)
        words[i] = next_random(&random);
    for (size_t i = 0; i < s->b[SCALES].bytes; i++)
        s->b[SCALES].host[i] = (unsigned char)next_random(&random);
    for (size_t i = 0; i < s->b[WEIGHTS].bytes / 4; i++)
        ((float *)(void *)s->b[WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    for (int i = 0; i < shape->n_bias; i++)
        fill_bf16((uint16_t *)(void *)s->b[BIAS0 + i].host, n * hidden, &random);
    fill_routing(&routing, &random, s->b[IDX].host);
}

static int make_inputs(struct state *s)
{
    const struct shape *shape = s->shape;
    size_t n = (size_t)shape->n_tokens, hidden = (size_t)shape->hidden, topk = (size_t)shape->topk;

    TRY(new_buffer(s, X, n, is_bf16(shape) ? hidden * 2 : row_bytes(shape), ORDINARY));
    TRY(new_buffer(s, SCALES, shape->quantized ? 0 : n, scale_bytes(shape), ORDINARY));
    TRY(new_buffer(s, WEIGHTS, n, topk * 4, ORDINARY));
    TRY(new_buffer(s, IDX, n, topk * ep_dtype_bytes((ep_dtype)shape->idx_type), ORDINARY));
    TRY(new_buffer(s, GLOBAL_SCALE, 1, 4, ORDINARY));
    for (int i = 0; i < shape->n_bias; i++)
        TRY(new_buffer(s, BIAS0 + i, n, hidden * 2, ORDINARY));
    fill_inputs(s);
    *(float *)(void *)s->b[GLOBAL_SCALE].host = 448 * 6 / 5.0f;
    for (int i = X; i < BIAS0 + shape->n_bias; i++)
        TRY(push(s, i));
    return 0;
}

static int compare_info(struct state *s, const char *phase)
{
    ep_plan_info host = {.size = sizeof(host)}, cuda = {.size = sizeof(cuda)};
    bool bad;

    CALL(ep_plan_get_info(s->ep_group_plan, &host));
    CALL(ep_plan_get_info(s->cuda_plan, &cuda));
    s->info = cuda;
    bad = host.n_recv != cuda.n_recv || host.out_rows != cuda.out_rows || host.n_net != cuda.n_net ||
          /* With a fixed capacity only the device knows them at first. */
          (host.n_recv >= 0 && (host.n_send != cuda.n_send || host.n_wire != cuda.n_wire)) ||
          !host.recv_per_expert != !cuda.recv_per_expert || !host.recv_from_rank != !cuda.recv_from_rank ||
          !host.expert_start != !cuda.expert_start;
    for (int i = 0; !bad && host.recv_per_expert && i < host.n_local_experts; i++)
        bad = host.recv_per_expert[i] != cuda.recv_per_expert[i];
    for (int i = 0; !bad && host.recv_from_rank && i <= s->group->nranks; i++)
        bad = host.recv_from_rank[i] != cuda.recv_from_rank[i];
    for (int i = 0; !bad && host.expert_start && i <= host.n_local_experts; i++)
        bad = host.expert_start[i] != cuda.expert_start[i];
    if (bad)
        test_report("%s: ep_plan_get_info differs: n_recv %lld, not %lld; out_rows %lld, not %lld; or counts", phase,
                    (long long)cuda.n_recv, (long long)host.n_recv, (long long)cuda.out_rows, (long long)host.out_rows);
    return bad ? DIFFERS : PASSED;
}

static int make_plans(struct state *s)
{
    const struct shape *shape = s->shape;
    ep_plan_args args = args_plan(s->b[IDX].host, shape->idx_type, shape->n_tokens, shape->topk, shape->n_experts);

    args.flags = (shape->expanded ? EP_PLAN_EXPANDED : 0) | (shape->zero_padding ? EP_PLAN_ZERO_PADDING : 0);
    args.expert_alignment = shape->alignment;
    CALL(ep_plan_new(s->group->host, &args, &s->ep_group_plan));
    s->info = (ep_plan_info){.size = sizeof(s->info)};
    CALL(ep_plan_get_info(s->ep_group_plan, &s->info));
    if (shape->fixed_capacity) {
        args.max_recv_tokens = s->info.n_recv + shape->spare_rows + 1; /* above 0 on all ranks or on none */
        ep_plan_free(s->ep_group_plan);
        s->ep_group_plan = NULL;
        CALL(ep_plan_new(s->group->host, &args, &s->ep_group_plan));
    }
    args.topk_idx = s->b[IDX].device;
    CALL(ep_plan_new(s->group->cuda, &args, &s->cuda_plan));
    return compare_info(s, "plan");
}

static int compare_sources(struct state *s)
{
    size_t n = (size_t)s->info.n_recv + 1, at = 0;
    int32_t *all = malloc(4 * n * sizeof(*all));

    EXPECT(all, "no memory for %zu sources", n);
    CALL(ep_plan_get_sources(s->ep_group_plan, all, all + n));
    CALL(ep_plan_get_sources(s->cuda_plan, all + 2 * n, all + 3 * n));
    while (at < n - 1 && all[at] == all[2 * n + at] && all[n + at] == all[3 * n + at])
        at++;
    if (at < n - 1)
        test_report("ep_plan_get_sources: row %zu is token %d of rank %d, not token %d of rank %d", at, all[3 * n + at],
                    all[2 * n + at], all[n + at], all[at]);
    free(all);
    return at < n - 1 ? DIFFERS : PASSED;
}

static ep_stream stream_of(const struct state *s, bool device)
{
    return device && !s->shape->own_stream ? s->group->stream : NULL;
}

/* Makes the stream wait for an event before the call, if the shape has one. */
static int wait_first(struct state *s, bool device, ep_event **ret_after)
{
    ep_comm *comm = device ? s->group->cuda : s->group->host;

    if (!s->shape->async || !s->shape->after)
        return 0;
    CALL(ep_event_new(comm, ret_after));
    CALL(ep_stream_wait(comm, stream_of(s, device), *ret_after));
    return 0;
}

/* Signals that event, only after the call. */
static int finish(struct state *s, bool device, const char *call, ep_status status, ep_event *after)
{
    ep_comm *comm = device ? s->group->cuda : s->group->host;
    ep_event *event = NULL;
    int done = 0;

    if (status == EP_OK && s->shape->async)
        status = ep_event_record(comm, stream_of(s, device), &event);
    if (status == EP_OK && after) {
        CALL(ep_event_query(event, &done));
        EXPECT(!done, "%s was complete before the event that it is to wait for", call);
        status = ep_event_signal(after);
    }
    if (status == EP_OK && event)
        status = ep_event_wait(event, -1);
    ep_event_free(event);
    if (status == EP_OK)
        status = ep_stream_sync(comm, stream_of(s, device));
    ep_event_free(after);
    if (status != EP_OK)
        test_report("%s: %s: %s", call, ep_status_name(status), ep_last_error());
    return status == EP_OK ? PASSED : FAILED;
}

static int dispatch(struct state *s, bool device)
{
    const struct shape *shape = s->shape;
    ep_dispatch_args args;
    unsigned char *at[N_BUFFERS];
    ep_event *after = NULL;
    ep_status status;

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? s->b[i].device : s->b[i].host;
    args = args_dispatch(shape->dtype, shape->hidden, at[X], at[RECV_X], s->info.out_rows);
    if (shape->scale_type) {
        args.scales = shape->quantized ? NULL : at[SCALES];
        args.flags = shape->quantized ? EP_DISPATCH_QUANTIZE : 0;
        if (shape->quantized && shape->dtype == EP_F4E2M1 && !shape->strided)
            args.global_scale = (const float *)(const void *)at[GLOBAL_SCALE];
        args.scale_type = shape->scale_type;
        args.recv_scales = at[RECV_SCALES];
        if (shape->strided) {
            args.scale_stride_token = shape->quantized ? 0 : 1;
            args.scale_stride_block = shape->quantized ? 0 : shape->n_tokens;
            args.recv_scale_stride_token = s->info.out_rows ? 1 : 0;
            args.recv_scale_stride_block = s->info.out_rows;
        }
    }
    if (shape->choice) {
        args.topk_weights = (const float *)(const void *)at[WEIGHTS];
        args.recv_topk_idx = shape->expanded ? NULL : at[RECV_IDX];
        args.recv_topk_weights = (float *)(void *)at[RECV_WEIGHTS];
    }
    if (!shape->expanded) {
        args.recv_source = (int32_t *)(void *)at[RECV_SOURCE];
        args.source_stride = SOURCE_STRIDE;
    }
    TRY(wait_first(s, device, &after));
    status = ep_dispatch(device ? s->cuda_plan : s->ep_group_plan, &args, stream_of(s, device));
    /* The counts of a fixed capacity are there while rows still move, unless the dispatch waits for an event. */
    if (device && status == EP_OK && !after) {
        CALL(ep_plan_settle(s->cuda_plan));
        CALL(ep_plan_settle(s->ep_group_plan));
        TRY(compare_info(s, "ep_plan_settle"));
    }
    return finish(s, device, device ? "ep_dispatch" : "ep_dispatch of the host backend", status, after);
}

static int combine(struct state *s, bool device)
{
    const struct shape *shape = s->shape;
    ep_combine_args args;
    unsigned char *at[N_BUFFERS];
    ep_event *after = NULL;
    ep_status status;

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? s->b[i].device : s->b[i].host;
    args = args_combine(shape->hidden, at[RECV_X], at[OUT]);
    for (int i = 0; i < shape->n_bias; i++)
        args.bias[i] = at[BIAS0 + i];
    if (shape->choice) {
        args.topk_weights = (const float *)(const void *)at[RECV_WEIGHTS];
        args.out_topk_weights = (float *)(void *)at[OUT_WEIGHTS];
    }
    args.flags = s->combine_flags;
    TRY(wait_first(s, device, &after));
    status = ep_combine(device ? s->cuda_plan : s->ep_group_plan, &args, stream_of(s, device));
    return finish(s, device, device ? "ep_combine" : "ep_combine of the host backend", status, after);
}

/* The memory of a received buffer. */
static enum memory memory_of(const struct state *s, unsigned at)
{
    int rank = s->group->rank, nranks = s->group->nranks;
    const bool ordinary[N_ORDINARY_ON] = {
        [FIRST_RANK] = rank == 0, [LAST_RANK] = rank == nranks - 1, [ALL_BUT_ONE] = rank != nranks / 2};

    if (!(s->shape->symmetric & at))
        return ORDINARY;
    return ordinary[s->shape->ordinary_on] ? ORDINARY_AMONG : SYMMETRIC;
}

static int make_outputs(struct state *s)
{
    const struct shape *shape = s->shape;
    size_t rows = (size_t)s->info.out_rows, n = (size_t)shape->n_tokens, hidden = (size_t)shape->hidden;
    size_t topk = (size_t)shape->topk;

    TRY(new_buffer(s, RECV_X, rows, hidden * 2, memory_of(s, AT_X)));
    /* A row of an fp8 dispatch takes half of the bytes that the combine needs for it. */
    s->b[RECV_X].row_bytes = row_bytes(shape);
    TRY(new_buffer(s, RECV_SCALES, rows, scale_bytes(shape), memory_of(s, AT_SCALES)));
    TRY(new_buffer(s, RECV_IDX, rows, topk * ep_dtype_bytes((ep_dtype)shape->idx_type), memory_of(s, AT_INDEX)));
    TRY(new_buffer(s, RECV_WEIGHTS, rows, (shape->expanded ? 1 : topk) * 4, memory_of(s, AT_WEIGHTS)));
    TRY(new_buffer(s, RECV_SOURCE, shape->expanded ? 0 : rows, 4, memory_of(s, AT_INDEX)));
    TRY(new_buffer(s, OUT, n, hidden * 2, ORDINARY));
    TRY(new_buffer(s, OUT_WEIGHTS, n, topk * 4, ORDINARY));
    CUDA(cudaStreamSynchronize(s->group->stream));
    return 0;
}

/* The experts' results: new rows, also in the padding and after the last one. */
static int answer(struct state *s)
{
    const struct shape *shape = s->shape;
    uint64_t random = shape->seed ^ 0x5555;

    fill_bf16((uint16_t *)(void *)s->b[RECV_X].host, (size_t)s->info.out_rows * (size_t)shape->hidden, &random);
    for (size_t i = 0; i < s->b[RECV_WEIGHTS].bytes / 4; i++)
        ((float *)(void *)s->b[RECV_WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    TRY(push(s, RECV_X));
    return push(s, RECV_WEIGHTS);
}

enum { RANK_ORDER, CHOICE_ORDER, MIXED_ORDERS, N_ORDERS };
static const char *const order_names[] = {"combine", "combine by choice", "combine in an order of each rank"};

/*
 * On one node ranks may use different orders of the sum, each for its own tokens; but all of them round partial sums,
 * or none. Between nodes they are rounded where the order is that of the choices.
 */
static uint32_t flags_of_order(const struct state *s, int order)
{
    static const uint32_t of_rank[] = {EP_COMBINE_BY_CHOICE, 0, EP_COMBINE_BY_CHOICE};
    bool rounds = s->shape->topk % 2 || group_division.nodes > 1;

    if (order == MIXED_ORDERS)
        return of_rank[s->group->rank % 3];
    return order == RANK_ORDER ? 0 : EP_COMBINE_BY_CHOICE | (rounds ? EP_COMBINE_ROUND_PARTIAL : 0);
}

static int run_all(struct state *s)
{
    int code;

    TRY(make_inputs(s));
    code = make_plans(s);
    if (code & FAILED)
        return code;
    TRY(make_outputs(s));
    TRY(dispatch(s, false));
    TRY(dispatch(s, true));
    for (int i = RECV_X; i <= RECV_SOURCE; i++)
        code |= compare(s, i, "dispatch");
    code |= compare_info(s, "dispatch") | compare_sources(s);
    if (code & FAILED)
        return code;
    TRY(answer(s));
    for (int order = 0; order < (group_division.nodes > 1 ? MIXED_ORDERS : N_ORDERS) && !(code & FAILED); order++) {
        s->combine_flags = flags_of_order(s, order);
        TRY(mirror_poison(s->group, &s->b[OUT]));
        TRY(mirror_poison(s->group, &s->b[OUT_WEIGHTS]));
        CUDA(cudaStreamSynchronize(s->group->stream));
        TRY(combine(s, false));
        TRY(combine(s, true));
        code |= compare(s, OUT, order_names[order]);
        code |= compare(s, OUT_WEIGHTS, order_names[order]);
    }
    return code;
}

int case_run(const struct group *group, const struct shape *shape)
{
    struct state s = {.group = group, .shape = shape};
    int code = run_all(&s);

    ep_plan_free(s.ep_group_plan);
    ep_plan_free(s.cuda_plan);
    /* A rank that has found a difference continues with the others, so that the collective frees match. */
    for (int i = 0; i < N_BUFFERS; i++)
        code |= mirror_free(group, code & FAILED, &s.b[i]);
    return code;
}
