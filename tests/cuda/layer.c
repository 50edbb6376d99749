/* SPDX-License-Identifier: Apache-2.0 */
#include "layer.h"

#include <epkit/cuda.h>
#include <stdlib.h>

enum { HIDDEN = 7168, TOPK = 8, EXPERTS = 256 };
#define ROW_BYTES ((size_t)HIDDEN * 2)

static int make_plan(struct layer *layer, const struct group *group, int n_tokens, uint64_t seed)
{
    struct routing routing = {.n_tokens = n_tokens,
                              .topk = TOPK,
                              .n_experts = EXPERTS / group->nranks * group->nranks,
                              .nranks = group->nranks,
                              .idx_type = EP_I64};
    uint64_t random = seed * 64 + (uint64_t)group->rank;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan_args args;
    int64_t *index = malloc((size_t)n_tokens * TOPK * sizeof(*index));

    EXPECT(index, "no memory for the routing");
    fill_routing(&routing, &random, index);
    args = args_plan(index, EP_I64, n_tokens, TOPK, routing.n_experts);
    CALL(ep_plan_new(group->cuda, &args, &layer->plan));
    free(index);
    CALL(ep_plan_get_info(layer->plan, &info));
    layer->n_recv = info.n_recv;
    return 0;
}

int layer_open(struct layer *layer, const struct group *group, int n_tokens, bool symmetric, uint64_t seed)
{
    size_t bytes = (size_t)n_tokens * ROW_BYTES;

    TRY(make_plan(layer, group, n_tokens, seed));
    layer->symmetric = symmetric;
    CUDA(cudaMalloc(&layer->x, bytes));
    CUDA(cudaMemset(layer->x, 0x3f, bytes));
    CUDA(cudaMalloc(&layer->out, bytes));
    bytes = ((size_t)layer->n_recv + 1) * ROW_BYTES;
    if (symmetric)
        CALL(ep_alloc(group->cuda, bytes, &layer->recv));
    else
        CUDA(cudaMalloc(&layer->recv, bytes));
    return 0;
}

int layer_close(const struct layer *layer, const struct group *group)
{
    ep_plan_free(layer->plan);
    CUDA(cudaFree(layer->x));
    CUDA(cudaFree(layer->out));
    if (layer->symmetric)
        CALL(ep_free(group->cuda, layer->recv));
    else
        CUDA(cudaFree(layer->recv));
    return 0;
}

int layer_dispatch(const struct layer *layer, const struct group *group)
{
    ep_dispatch_args args = args_dispatch(EP_BF16, HIDDEN, layer->x, layer->recv, layer->n_recv);

    CALL(ep_dispatch(layer->plan, &args, group->stream));
    return 0;
}

int layer_combine(const struct layer *layer, const struct group *group)
{
    ep_combine_args args = args_combine(HIDDEN, layer->recv, layer->out);

    CALL(ep_combine(layer->plan, &args, group->stream));
    return 0;
}
