/* SPDX-License-Identifier: Apache-2.0 */
#include <stdbool.h>

#include "call.h"
#include "case.h"

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define POISON 0xa5
#define GUARD 4096

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;

    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

enum {
    X,
    SCALES,
    WEIGHTS,
    IDX,
    BIAS0,
    BIAS1,
    RECV_X,
    RECV_SCALES,
    RECV_IDX,
    RECV_WEIGHTS,
    OUT,
    OUT_WEIGHTS,
    N_BUFFERS
};

static const char *const names[N_BUFFERS] = {
    "x",      "scales",      "topk_weights",  "topk_idx",          "bias0", "bias1",
    "recv_x", "recv_scales", "recv_topk_idx", "recv_topk_weights", "out",   "out_topk_weights"};

/* A buffer on the host, its twin on the device, and whether the latter is symmetric. */
struct buffer {
    unsigned char *host, *device;
    size_t bytes;
    bool symmetric;
};

struct state {
    ep_comm *host, *cuda;
    const struct shape *shape;
    int rank, nranks;
    cudaStream_t stream;
    struct buffer b[N_BUFFERS];
    ep_plan *host_plan, *cuda_plan;
    ep_plan_info info;
};

static int new_buffer(struct state *s, int which, size_t bytes, bool symmetric)
{
    struct buffer *b = &s->b[which];

    b->bytes = bytes;
    b->symmetric = symmetric;
    b->host = malloc(bytes + GUARD);
    if (!b->host)
        return 1;
    memset(b->host, POISON, bytes + GUARD);
    if (symmetric)
        CALL(ep_alloc(s->cuda, bytes + GUARD, (void **)&b->device));
    else
        CUDA(cudaMalloc((void **)&b->device, bytes + GUARD));
    return 0;
}

static int push(struct state *s, int which)
{
    CUDA(
        cudaMemcpyAsync(s->b[which].device, s->b[which].host, s->b[which].bytes + GUARD, cudaMemcpyDefault, s->stream));
    CUDA(cudaStreamSynchronize(s->stream));
    return 0;
}

/* The device's bytes and the guard behind them against the host's. */
static int compare(struct state *s, int which, const char *phase)
{
    struct buffer *b = &s->b[which];
    unsigned char *copy = malloc(b->bytes + GUARD);
    int differs = 0;

    if (!copy)
        return 1;
    CUDA(cudaMemcpyAsync(copy, b->device, b->bytes + GUARD, cudaMemcpyDefault, s->stream));
    CUDA(cudaStreamSynchronize(s->stream));
    for (size_t i = 0; i < b->bytes + GUARD && !differs; i++)
        if (copy[i] != b->host[i]) {
            fprintf(stderr, "rank %d: %s: %s: byte %zu of %zu is 0x%02x, not 0x%02x\n", s->rank, phase, names[which], i,
                    b->bytes, copy[i], b->host[i]);
            differs = 1;
        }
    free(copy);
    return differs;
}

static size_t scale_bytes(const struct shape *shape)
{
    size_t blocks = (size_t)shape->hidden / EP_SCALE_BLOCK;

    return shape->scale_type == EP_F32 ? blocks * 4 : shape->scale_type == EP_UE8M0 ? blocks : 0;
}

static void fill_bf16(uint16_t *values, size_t n, uint64_t *random)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t r = next_random(random);
        /* Mostly ordinary numbers; signed zeros, infinities, not-a-numbers and tiny ones among them. */
        float value = ((float)(r & 0xffff) - 32768.0f) / 4096.0f;

        values[i] = r >> 48 < 64 ? (uint16_t)(r >> 16) : ep_bf16_from_f32(value);
        if (r >> 48 > 65500)
            values[i] = (uint16_t)(r >> 16 & 1 ? 0x8000 : 0);
    }
}

static void fill_routing(struct state *s, uint64_t *random)
{
    const struct shape *shape = s->shape;

    for (int t = 0; t < shape->n_tokens; t++) {
        int64_t chosen[EP_MAX_TOPK];

        for (int k = 0; k < shape->topk; k++) {
            bool again = true;

            while (again) {
                uint64_t r = next_random(random);
                uint64_t range = (uint64_t)shape->n_experts;

                /* Skewed: almost all to the experts of rank 0, so that other ranks receive few rows or none. */
                if (shape->skewed && shape->n_experts / s->nranks >= shape->topk)
                    range /= (uint64_t)s->nranks;
                chosen[k] = (int64_t)(r % range);
                again = false;
                for (int j = 0; j < k; j++)
                    again |= chosen[j] == chosen[k];
                if (shape->holes && r >> 60 < 6) {
                    chosen[k] = -1;
                    again = false;
                }
            }
            if (shape->idx_type == EP_I64)
                ((int64_t *)(void *)s->b[IDX].host)[t * shape->topk + k] = chosen[k];
            else
                ((int32_t *)(void *)s->b[IDX].host)[t * shape->topk + k] = (int32_t)chosen[k];
        }
    }
}

static int make_inputs(struct state *s)
{
    const struct shape *shape = s->shape;
    size_t n = (size_t)shape->n_tokens, hidden = (size_t)shape->hidden, topk = (size_t)shape->topk;
    size_t row = hidden * ep_dtype_bytes((ep_dtype)shape->dtype);
    uint64_t random = shape->seed;

    if (new_buffer(s, X, n * row, false) || new_buffer(s, SCALES, n * scale_bytes(shape), false) ||
        new_buffer(s, WEIGHTS, n * topk * 4, false) ||
        new_buffer(s, IDX, n * topk * ep_dtype_bytes((ep_dtype)shape->idx_type), false) ||
        new_buffer(s, BIAS0, n * hidden * 2, false) || new_buffer(s, BIAS1, n * hidden * 2, false))
        return 1;
    if (shape->dtype == EP_BF16)
        fill_bf16((uint16_t *)(void *)s->b[X].host, n * hidden, &random);
    else
        for (size_t i = 0; i < n * row; i++)
            s->b[X].host[i] = (unsigned char)next_random(&random);
    for (size_t i = 0; i < n * scale_bytes(shape); i++)
        s->b[SCALES].host[i] = (unsigned char)next_random(&random);
    for (size_t i = 0; i < n * topk; i++)
        ((float *)(void *)s->b[WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    fill_bf16((uint16_t *)(void *)s->b[BIAS0].host, n * hidden, &random);
    fill_bf16((uint16_t *)(void *)s->b[BIAS1].host, n * hidden, &random);
    fill_routing(s, &random);
    return push(s, X) || push(s, SCALES) || push(s, WEIGHTS) || push(s, IDX) || push(s, BIAS0) || push(s, BIAS1);
}

static int compare_info(struct state *s, const char *phase)
{
    ep_plan_info host = {.size = sizeof(host)}, cuda = {.size = sizeof(cuda)};
    int bad;

    CALL(ep_plan_get_info(s->host_plan, &host));
    CALL(ep_plan_get_info(s->cuda_plan, &cuda));
    s->info = cuda;
    bad = host.n_recv != cuda.n_recv || host.out_rows != cuda.out_rows || host.n_send != cuda.n_send ||
          host.n_wire != cuda.n_wire || host.n_net != cuda.n_net || !host.recv_per_expert != !cuda.recv_per_expert ||
          !host.recv_from_rank != !cuda.recv_from_rank || !host.expert_start != !cuda.expert_start;
    for (int i = 0; !bad && host.recv_per_expert && i < host.n_local_experts; i++)
        bad = host.recv_per_expert[i] != cuda.recv_per_expert[i];
    for (int i = 0; !bad && host.recv_from_rank && i <= s->nranks; i++)
        bad = host.recv_from_rank[i] != cuda.recv_from_rank[i];
    for (int i = 0; !bad && host.expert_start && i <= host.n_local_experts; i++)
        bad = host.expert_start[i] != cuda.expert_start[i];
    if (bad)
        fprintf(stderr, "rank %d: %s: ep_plan_get_info differs: n_recv %lld, not %lld\n", s->rank, phase,
                (long long)cuda.n_recv, (long long)host.n_recv);
    return bad;
}

static int make_plans(struct state *s)
{
    const struct shape *shape = s->shape;
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    args.topk_idx = s->b[IDX].host;
    args.idx_type = shape->idx_type;
    args.n_tokens = shape->n_tokens;
    args.topk = shape->topk;
    args.n_experts = shape->n_experts;
    args.flags = (shape->expanded ? EP_PLAN_EXPANDED : 0) | (shape->zero_padding ? EP_PLAN_ZERO_PADDING : 0);
    args.expert_alignment = shape->alignment;
    CALL(ep_plan_new(s->host, &args, &s->host_plan));
    s->info = (ep_plan_info){.size = sizeof(s->info)};
    CALL(ep_plan_get_info(s->host_plan, &s->info));
    if (shape->worst) {
        args.worst_rows = s->info.n_recv + shape->spare_rows + 1; /* above 0 on all ranks or on none */
        ep_plan_free(s->host_plan);
        s->host_plan = NULL;
        CALL(ep_plan_new(s->host, &args, &s->host_plan));
    }
    args.topk_idx = s->b[IDX].device;
    CALL(ep_plan_new(s->cuda, &args, &s->cuda_plan));
    return compare_info(s, "plan");
}

static int compare_sources(struct state *s)
{
    size_t n = (size_t)s->info.n_recv + 1;
    int32_t *all = malloc(4 * n * sizeof(*all));
    int bad;

    if (!all)
        return 1;
    CALL(ep_plan_get_sources(s->host_plan, all, all + n));
    CALL(ep_plan_get_sources(s->cuda_plan, all + 2 * n, all + 3 * n));
    bad = memcmp(all, all + 2 * n, (n - 1) * 4) || memcmp(all + n, all + 3 * n, (n - 1) * 4);
    if (bad)
        fprintf(stderr, "rank %d: ep_plan_get_sources differs\n", s->rank);
    free(all);
    return bad;
}

/* The event to wait for is completed only after the call. */
static int finish(ep_status status, ep_event *after, ep_event *event)
{
    int done = 0;

    if (status == EP_OK && after) {
        CALL(ep_event_query(event, &done));
        if (done)
            return fprintf(stderr, "complete before the event that it is to wait for\n"), 1;
        status = ep_event_signal(after);
    }
    if (status == EP_OK && event)
        status = ep_event_wait(event, -1);
    ep_event_free(event);
    ep_event_free(after);
    CALL(status);
    return 0;
}

static int dispatch(struct state *s, bool device)
{
    const struct shape *shape = s->shape;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    unsigned char *at[N_BUFFERS];
    ep_event *event = NULL, *after = NULL;
    ep_status status;

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? s->b[i].device : s->b[i].host;
    args.x = at[X];
    args.dtype = shape->dtype;
    args.hidden = shape->hidden;
    if (shape->scale_type) {
        args.scales = at[SCALES];
        args.scale_type = shape->scale_type;
        args.recv_scales = at[RECV_SCALES];
        if (shape->strided) {
            args.scale_stride_token = 1;
            args.scale_stride_block = shape->n_tokens;
        }
    }
    args.recv_x = at[RECV_X];
    if (shape->choice) {
        args.topk_weights = (const float *)(const void *)at[WEIGHTS];
        args.recv_topk_idx = shape->expanded ? NULL : at[RECV_IDX];
        args.recv_topk_weights = (float *)(void *)at[RECV_WEIGHTS];
    }
    args.out_rows = s->info.out_rows;
    args.flags = shape->async ? EP_ASYNC : 0;
    if (shape->async && shape->after)
        CALL(ep_event_new(device ? s->cuda : s->host, &after));
    args.after = after;
    status = ep_dispatch(device ? s->cuda_plan : s->host_plan, &args, shape->async ? &event : NULL);
    return finish(status, after, event);
}

static int combine(struct state *s, bool device)
{
    const struct shape *shape = s->shape;
    ep_combine_args args = EP_COMBINE_ARGS_INIT;
    unsigned char *at[N_BUFFERS];
    ep_event *event = NULL, *after = NULL;
    ep_status status;

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? s->b[i].device : s->b[i].host;
    args.x = at[RECV_X];
    args.dtype = EP_BF16;
    args.hidden = shape->hidden;
    for (int i = 0; i < shape->n_bias; i++)
        args.bias[i] = at[BIAS0 + i];
    args.out = at[OUT];
    if (shape->choice) {
        args.topk_weights = (const float *)(const void *)at[RECV_WEIGHTS];
        args.out_topk_weights = (float *)(void *)at[OUT_WEIGHTS];
    }
    args.flags = shape->async ? EP_ASYNC : 0;
    if (shape->async && shape->after)
        CALL(ep_event_new(device ? s->cuda : s->host, &after));
    args.after = after;
    status = ep_combine(device ? s->cuda_plan : s->host_plan, &args, shape->async ? &event : NULL);
    return finish(status, after, event);
}

static int make_outputs(struct state *s)
{
    const struct shape *shape = s->shape;
    size_t rows = (size_t)s->info.out_rows, n = (size_t)shape->n_tokens, hidden = (size_t)shape->hidden;
    size_t topk = (size_t)shape->topk;

    return new_buffer(s, RECV_X, rows * hidden * 2, shape->symmetric) ||
           new_buffer(s, RECV_SCALES, rows * scale_bytes(shape), shape->symmetric) ||
           new_buffer(s, RECV_IDX, rows * topk * ep_dtype_bytes((ep_dtype)shape->idx_type), shape->symmetric) ||
           new_buffer(s, RECV_WEIGHTS, rows * (shape->expanded ? 1 : topk) * 4, shape->symmetric) ||
           new_buffer(s, OUT, n * hidden * 2, false) || new_buffer(s, OUT_WEIGHTS, n * topk * 4, false) ||
           push(s, RECV_X) || push(s, RECV_SCALES) || push(s, RECV_IDX) || push(s, RECV_WEIGHTS) || push(s, OUT) ||
           push(s, OUT_WEIGHTS);
}

static int run_all(struct state *s)
{
    const struct shape *shape = s->shape;
    int bad;

    if (make_inputs(s) || make_plans(s) || make_outputs(s))
        return 1;
    if (dispatch(s, false) || dispatch(s, true))
        return 1;
    bad = compare(s, RECV_X, "dispatch") | compare(s, RECV_SCALES, "dispatch") | compare(s, RECV_IDX, "dispatch") |
          compare(s, RECV_WEIGHTS, "dispatch") | compare_info(s, "dispatch") | compare_sources(s);
    /* What the experts answer: other rows, in padding and behind the last one something that is not a number. */
    uint64_t random = shape->seed ^ 0x5555;
    fill_bf16((uint16_t *)(void *)s->b[RECV_X].host, (size_t)s->info.out_rows * (size_t)shape->hidden, &random);
    for (size_t i = 0; i < s->b[RECV_WEIGHTS].bytes / 4; i++)
        ((float *)(void *)s->b[RECV_WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    if (push(s, RECV_X) || push(s, RECV_WEIGHTS) || combine(s, false) || combine(s, true))
        return 1;
    return bad | compare(s, OUT, "combine") | compare(s, OUT_WEIGHTS, "combine");
}

int case_run(ep_comm *host, ep_comm *cuda, const struct shape *shape)
{
    ep_comm_info info = {.size = sizeof(info)};
    struct state s = {.host = host, .cuda = cuda, .shape = shape};
    int bad;

    CALL(ep_comm_get_info(cuda, &info));
    s.rank = info.rank;
    s.nranks = info.nranks;
    CUDA(cudaStreamCreateWithFlags(&s.stream, cudaStreamNonBlocking));
    bad = run_all(&s);
    ep_plan_free(s.host_plan);
    ep_plan_free(s.cuda_plan);
    /* A rank that found a difference goes on with the others, so the collective frees match. */
    for (int i = 0; i < N_BUFFERS; i++) {
        free(s.b[i].host);
        if (!s.b[i].symmetric)
            cudaFree(s.b[i].device);
        else if (s.b[i].device)
            CALL(ep_free(cuda, s.b[i].device));
    }
    CUDA(cudaStreamDestroy(s.stream));
    return bad;
}
