/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inference_layer.c - steps of decoding as an engine queues them: gate, dispatch, experts, combine, all in one stream.
 * The host queues STEPS steps, and waits once, at the end.
 *
 * With the CUDA backend the stream is a cudaStream_t, what is given to ep_stream_call() here are kernels launched in
 * it, and decode_step() may be captured into a graph. Nothing else changes.
 *
 * Experts return what they get, or twice that, so that the result can be told: it is exact in bf16.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <stdalign.h>

enum { RANKS = 4, TOKENS = 8, HIDDEN = 128, TOPK = 2, EXPERTS = 8, LOCAL = EXPERTS / RANKS, ROWS = RANKS * TOKENS };
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
    ep_ll *ll;
    ep_queue *stream;
    alignas(16) uint16_t x[TOKENS][HIDDEN], recv[LOCAL][ROWS][HIDDEN];
    alignas(16) int32_t topk[TOKENS][TOPK], count[LOCAL];
    alignas(16) float weights[TOKENS][TOPK];
} layer;

/* Any choice of distinct experts; the same for all who ask. */
static int choice(int rank, int step, int token, int k)
{
    return (rank + step + token * 3 + k * (1 + token % 3)) % EXPERTS;
}

static float factor(int expert)
{
    return (float)(1 + expert % 2);
}

static void gate(void *context)
{
    struct layer *l = context;

    for (int t = 0; t < TOKENS; t++)
        for (int k = 0; k < TOPK; k++) {
            l->topk[t][k] = choice(l->rank, l->step, t, k);
            l->weights[t][k] = 0.5f;
        }
    l->step++;
}

static void run_experts(void *context)
{
    struct layer *l = context;

    for (int e = 0; e < LOCAL; e++)
        for (int row = 0; row < l->count[e]; row++)
            for (int h = 0; h < HIDDEN; h++)
                l->recv[e][row][h] = ep_bf16_from_f32(ep_bf16_to_f32(l->recv[e][row][h]) * factor(l->rank * LOCAL + e));
}

/* One step: its result is the input of the next one. Returns when it is queued. */
static int decode_step(struct layer *l)
{
    ep_ll_dispatch_args dispatch = EP_LL_DISPATCH_ARGS_INIT;
    ep_ll_combine_args combine = EP_LL_COMBINE_ARGS_INIT;

    TRY(ep_stream_call(l->comm, l->stream, gate, l));

    dispatch.x = l->x;
    dispatch.topk_idx = l->topk;
    dispatch.idx_type = EP_I32;
    dispatch.n_tokens = TOKENS;
    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = l->recv;
    dispatch.recv_count = l->count;
    dispatch.ret_call = &combine.call;
    TRY(ep_ll_dispatch(l->ll, &dispatch, l->stream));

    TRY(ep_stream_call(l->comm, l->stream, run_experts, l));

    combine.x = l->recv;
    combine.topk_idx = l->topk;
    combine.idx_type = EP_I32;
    combine.n_tokens = TOKENS;
    combine.topk_weights = l->weights[0];
    combine.out = l->x;
    TRY(ep_ll_combine(l->ll, &combine, l->stream));
    return EXIT_SUCCESS;
}

static int run_rank(const ep_boot *boot)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    int wrong = 0;

    layer.rank = boot->rank;
    for (int t = 0; t < TOKENS; t++)
        for (int h = 0; h < HIDDEN; h++)
            layer.x[t][h] = ep_bf16_from_f32(8.0f);
    config.max_tokens = TOKENS;
    config.hidden = HIDDEN;
    config.n_experts = EXPERTS;
    config.topk = TOPK;
    TRY(ep_comm_new(boot, NULL, &layer.comm));
    TRY(ep_ll_new(layer.comm, &config, &layer.ll));
    TRY(ep_queue_new(layer.comm, &layer.stream));

    for (int step = 0; step < STEPS; step++)
        if (decode_step(&layer) != EXIT_SUCCESS)
            return EXIT_FAILURE;
    TRY(ep_stream_sync(layer.comm, layer.stream));

    for (int t = 0; t < TOKENS; t++) {
        float expected = 8.0f;

        for (int step = 0; step < STEPS; step++)
            expected *= 0.5f * (factor(choice(layer.rank, step, t, 0)) + factor(choice(layer.rank, step, t, 1)));
        for (int h = 0; h < HIDDEN; h++)
            wrong += ep_bf16_to_f32(layer.x[t][h]) != expected;
    }
    printf("rank %d: %d steps, %d of %d elements wrong\n", layer.rank, STEPS, wrong, TOKENS * HIDDEN);
    ep_queue_free(layer.stream);
    ep_ll_free(layer.ll);
    ep_comm_free(layer.comm);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(void)
{
    return run_ranks(RANKS, run_rank);
}
