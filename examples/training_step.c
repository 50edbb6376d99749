/* SPDX-License-Identifier: Apache-2.0 */
/*
 * training_step.c - forward and backward pass of a mixture-of-experts layer, as an engine queues them in one stream:
 *
 *   forward    gate -> plan update -> dispatch x -> experts -> combine
 *   backward   dispatch the gradient of the output -> experts backward -> combine
 *
 * The plan has a fixed capacity and gets each step's routing where the gate has written it: the host never waits for
 * counts. Rows beyond the received ones have no expert (-1). With the CUDA backend the stream is a cudaStream_t and the
 * functions of ep_stream_call() are kernels; nothing else changes. moe_layer.c has real experts and checks gradients.
 *
 * Expert e multiplies by e + 1, so gradients are the same multiples: small integers, exact in bf16.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <stdalign.h>

enum { RANKS = 4, TOKENS = 8, HIDDEN = 64, TOPK = 2, EXPERTS = 8, LOCAL = EXPERTS / RANKS, CAPACITY = RANKS * TOKENS };
enum { STEPS = 3 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        if ((call) != EP_OK) {                                                                                         \
            fprintf(stderr, "%s: %s\n", #call, ep_last_error());                                                       \
            return EXIT_FAILURE;                                                                                       \
        }                                                                                                              \
    } while (0)

static struct layer {
    int rank, step;
    ep_comm *comm;
    ep_plan *plan;
    ep_queue *stream;
    uint16_t (*recv)[HIDDEN]; /* [CAPACITY], symmetric: rows come and go in place */
    alignas(16) int32_t topk[TOKENS][TOPK], recv_topk[CAPACITY][TOPK];
    alignas(16) uint16_t x[TOKENS][HIDDEN], out[TOKENS][HIDDEN], grad_out[TOKENS][HIDDEN], grad_x[TOKENS][HIDDEN];
} layer;

static int choice(int rank, int step, int token, int k)
{
    return (rank + step * 5 + token * 3 + k * (1 + token % 3)) % EXPERTS;
}

static void gate(void *context)
{
    struct layer *l = context;

    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < TOPK; k++)
            l->topk[t][k] = choice(l->rank, l->step, t, k);
}

/* Forward and backward alike: a row times the sum of the factors of its experts here. */
static void run_experts(void *context)
{
    struct layer *l = context;

    for (int row = 0; row < CAPACITY; row++) {
        int factor = 0;

        for (int k = 0; k < TOPK; k++)
            factor += l->recv_topk[row][k] < 0 ? 0 : l->rank * LOCAL + l->recv_topk[row][k] + 1;
        for (int h = 0; factor && h < HIDDEN; h++)
            l->recv[row][h] = ep_bf16_from_f32(ep_bf16_to_f32(l->recv[row][h]) * (float)factor);
    }
}

/* The gradient of the loss (x * out summed up would do): the output itself. */
static void loss(void *context)
{
    struct layer *l = context;

    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            l->grad_out[t][h] = ep_bf16_from_f32((float)(t + 1));
    l->step++;
}

/* What each pass does: rows there, experts, sums back. */
static int pass(struct layer *l, const void *in, void *out)
{
    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;

    dispatch.x = in;
    dispatch.dtype = EP_BF16;
    dispatch.hidden = HIDDEN;
    dispatch.recv_x = l->recv;
    dispatch.recv_topk_idx = l->recv_topk;
    dispatch.out_rows = CAPACITY;
    TRY(ep_dispatch(l->plan, &dispatch, l->stream));

    TRY(ep_stream_call(l->comm, l->stream, run_experts, l));

    combine.x = l->recv;
    combine.dtype = EP_BF16;
    combine.hidden = HIDDEN;
    combine.out = out;
    TRY(ep_combine(l->plan, &combine, l->stream));
    return EXIT_SUCCESS;
}

/* Returns when it is queued. */
static int training_step(struct layer *l)
{
    ep_plan_update_args routing = EP_PLAN_UPDATE_ARGS_INIT;

    TRY(ep_stream_call(l->comm, l->stream, gate, l));
    routing.topk_idx = l->topk;
    routing.n_tokens = TOKENS;
    TRY(ep_plan_update(l->plan, &routing, l->stream));
    if (pass(l, l->x, l->out) != EXIT_SUCCESS)
        return EXIT_FAILURE;
    TRY(ep_stream_call(l->comm, l->stream, loss, l));
    return pass(l, l->grad_out, l->grad_x);
}

static int count_wrong(const struct layer *l)
{
    int wrong = 0;

    for (int t = 0; t < TOKENS; t++) {
        int factor = choice(l->rank, l->step - 1, t, 0) + 1 + choice(l->rank, l->step - 1, t, 1) + 1;

        for (int h = 0; h < HIDDEN; h++)
            wrong += ep_bf16_to_f32(l->out[t][h]) != (float)(2 * factor) ||
                     ep_bf16_to_f32(l->grad_x[t][h]) != (float)((t + 1) * factor);
    }
    return wrong;
}

static int run_rank(const ep_boot *boot)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    void *recv;
    int wrong;

    layer.rank = boot->rank;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            layer.x[t][h] = ep_bf16_from_f32(2.0f);
    TRY(ep_comm_new(boot, NULL, &layer.comm));
    TRY(ep_queue_new(layer.comm, &layer.stream));
    TRY(ep_alloc(layer.comm, CAPACITY * sizeof(layer.recv[0]), &recv));
    layer.recv = recv;
    args.idx_type = EP_I32;
    args.topk = TOPK;
    args.n_experts = EXPERTS;
    args.max_recv_tokens = CAPACITY;
    args.max_tokens = TOKENS;
    TRY(ep_plan_new(layer.comm, &args, &layer.plan)); /* of no tokens yet */

    for (int step = 0; step < STEPS; step++)
        if (training_step(&layer) != EXIT_SUCCESS)
            return EXIT_FAILURE;
    TRY(ep_stream_sync(layer.comm, layer.stream));

    wrong = count_wrong(&layer);
    printf("rank %d: %d steps, %d of %d elements wrong\n", layer.rank, STEPS, wrong, TOKENS * HIDDEN);
    ep_plan_free(layer.plan);
    ep_queue_free(layer.stream);
    ep_comm_free(layer.comm);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(void)
{
    return run_ranks(RANKS, run_rank);
}
