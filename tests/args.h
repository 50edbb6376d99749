/* SPDX-License-Identifier: Apache-2.0 */
/* args.h - the arguments that nearly all calls of tests have; a caller sets those of its own. */
#ifndef EP_TESTS_ARGS_H
#define EP_TESTS_ARGS_H

#include <epkit/epkit.h>

static inline ep_plan_args args_plan(const void *topk_idx, int idx_type, int n_tokens, int topk, int n_experts)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    args.topk_idx = topk_idx;
    args.idx_type = idx_type;
    args.n_tokens = n_tokens;
    args.topk = topk;
    args.n_experts = n_experts;
    return args;
}

static inline ep_dispatch_args args_dispatch(int dtype, int hidden, const void *x, void *recv_x, int64_t out_rows)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;

    args.dtype = dtype;
    args.hidden = hidden;
    args.x = x;
    args.recv_x = recv_x;
    args.out_rows = out_rows;
    return args;
}

static inline ep_combine_args args_combine(int hidden, const void *x, void *out)
{
    ep_combine_args args = EP_COMBINE_ARGS_INIT;

    args.dtype = EP_BF16;
    args.hidden = hidden;
    args.x = x;
    args.out = out;
    return args;
}

static inline ep_ll_config args_ll(int max_tokens, int hidden, int n_experts, int topk)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;

    config.max_tokens = max_tokens;
    config.hidden = hidden;
    config.n_experts = n_experts;
    config.topk = topk;
    return config;
}

static inline ep_ll_dispatch_args args_ll_dispatch(const void *x, const void *topk_idx, int idx_type, int n_tokens)
{
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;

    args.x = x;
    args.topk_idx = topk_idx;
    args.idx_type = idx_type;
    args.n_tokens = n_tokens;
    return args;
}

static inline ep_ll_combine_args args_ll_combine(const void *x, const void *topk_idx, int idx_type, int n_tokens,
                                                 const void *topk_weights, void *out)
{
    ep_ll_combine_args args = EP_LL_COMBINE_ARGS_INIT;

    args.x = x;
    args.topk_idx = topk_idx;
    args.idx_type = idx_type;
    args.n_tokens = n_tokens;
    args.topk_weights = topk_weights;
    args.out = out;
    return args;
}

#endif
