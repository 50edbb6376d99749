/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"
#include "core/routing.h"

#include <stdlib.h>

#define KNOWN_FLAGS (EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING)

/* The arrays of a routing: choices, or a mask and its counts. A rank without tokens may pass NULL. */
static ep_status check_arrays(const char *call, bool from_mask, int n_tokens, int idx_type, const void *topk_idx,
                              const uint8_t *token_in_rank, const int32_t *tokens_per_expert)
{
    if (!from_mask) {
        if (token_in_rank)
            return ep_fail(EP_E_ARG, "%s: token_in_rank without tokens_per_expert", call);
        return ep_check_buffer(call, "topk_idx", topk_idx, n_tokens == 0, ep_dtype_bytes((ep_dtype)idx_type));
    }
    if (topk_idx)
        return ep_fail(EP_E_ARG, "%s: both topk_idx and tokens_per_expert", call);
    EP_TRY(ep_check_buffer(call, "token_in_rank", token_in_rank, n_tokens == 0, 1));
    return ep_check_buffer(call, "tokens_per_expert", tokens_per_expert, false, sizeof(int32_t));
}

/* A mask has no choices: internally it is a routing with one choice for each rank. */
static ep_status check_mask(const char *call, const ep_comm *comm, ep_plan_args *args)
{
    if (args->topk)
        return ep_fail(EP_E_ARG, "%s: topk is %d with token_in_rank", call, args->topk);
    if (args->idx_type)
        return ep_fail(EP_E_ARG, "%s: idx_type is %d with token_in_rank", call, args->idx_type);
    if (args->flags & EP_PLAN_EXPANDED)
        return ep_fail(EP_E_ARG, "%s: EP_PLAN_EXPANDED with token_in_rank, which names no experts", call);
    if (comm->nranks > EP_MAX_TOPK)
        return ep_fail(EP_E_UNSUPPORTED, "%s: token_in_rank is for groups of up to %d ranks", call, EP_MAX_TOPK);
    args->topk = comm->nranks;
    args->idx_type = EP_I32;
    return EP_OK;
}

/* The arguments of a routing with or without a plan. */
static ep_status check_routing_args(const char *call, const ep_comm *comm, const ep_plan_args *args)
{
    EP_TRY(ep_check_idx_type(call, args->idx_type));
    EP_TRY(ep_check_range(call, "n_tokens", args->n_tokens, 0, INT32_MAX));
    EP_TRY(ep_check_range(call, "topk", args->topk, 1, EP_MAX_TOPK));
    EP_TRY(ep_check_experts(call, comm, args->n_experts));
    return check_arrays(call, args->tokens_per_expert, args->n_tokens, args->idx_type, args->topk_idx,
                        args->token_in_rank, args->tokens_per_expert);
}

static ep_status check_plan_args(const char *call, const ep_comm *comm, ep_plan_args *args)
{
    int64_t most;
    int choices = ep_routing_most_choices(comm, args->tokens_per_expert, args->topk);
    int n_most = args->max_tokens > args->n_tokens ? args->max_tokens : args->n_tokens;

    if (args->tokens_per_expert)
        EP_TRY(check_mask(call, comm, args));
    EP_TRY(check_routing_args(call, comm, args));
    EP_TRY(ep_check_reserved(call, (uint32_t)args->reserved));
    if (args->max_tokens)
        EP_TRY(ep_check_range(call, "max_tokens", args->max_tokens, args->n_tokens, INT32_MAX));
    EP_TRY(ep_check_flags(call, args->flags, KNOWN_FLAGS));
    if ((args->flags & EP_PLAN_ZERO_PADDING) && !(args->flags & EP_PLAN_EXPANDED))
        return ep_fail(EP_E_ARG, "%s: EP_PLAN_ZERO_PADDING without EP_PLAN_EXPANDED: there is no padding", call);
    EP_TRY(ep_check_range(call, "expert_alignment", args->expert_alignment, 0, EP_MAX_ALIGNMENT));
    if (!args->expert_alignment)
        args->expert_alignment = 1;
    EP_TRY(ep_check_range(call, "max_recv_tokens", args->max_recv_tokens, 0, INT64_MAX));
    /* Counts of top-k entries are int32. */
    if ((int64_t)n_most * args->topk > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d tokens of %d experts each do not fit an int32 count", call, n_most,
                       args->topk);
    /* All ranks may choose the same expert, and its count is an int32 even when rounded up. */
    EP_TRY(ep_check_product(call, "n_tokens * ranks", n_most, comm->nranks, choices, &most));
    if (most + args->expert_alignment > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW,
                       "%s: %d tokens with %d choices on each of %d ranks, rounded up to %d, do not fit an int32 count",
                       call, n_most, choices, comm->nranks, args->expert_alignment);
    return EP_OK;
}

/* Expanded layout: the maximum number of choices on one rank, with the rows of each expert rounded up. */
static int64_t max_rows(const ep_comm *comm, const ep_plan_args *args)
{
    int64_t tokens = (int64_t)comm->nranks * (args->max_tokens > args->n_tokens ? args->max_tokens : args->n_tokens);
    int64_t local = args->n_experts / comm->nranks, align = args->expert_alignment, local_choices, rows;

    if (!(args->flags & EP_PLAN_EXPANDED))
        return tokens;
    local_choices = local * ep_routing_most_choices(comm, false, args->topk);
    rows = tokens * (args->topk < local_choices ? args->topk : local_choices);
    rows += (align - 1) * (rows < local ? rows : local);
    return rows / align * align;
}

ep_status ep_plan_get_max_rows(const ep_comm *comm, const ep_plan_args *args, int64_t *ret_rows)
{
    ep_plan_args mine;

    EP_CHECK_COMM(comm, comm);
    EP_CHECK_HANDLE(ret_rows);
    EP_TRY(EP_CHECK_LOAD("ep_plan_get_max_rows", &mine, args, ep_plan_args));
    /* No routing is needed yet. */
    if (mine.max_tokens < mine.n_tokens)
        mine.max_tokens = mine.n_tokens;
    mine.n_tokens = 0;
    if (!mine.tokens_per_expert && !mine.idx_type)
        mine.idx_type = EP_I32;
    EP_TRY(check_plan_args(__func__, comm, &mine));
    *ret_rows = max_rows(comm, &mine);
    return EP_OK;
}

ep_status ep_plan_new(ep_comm *comm, const ep_plan_args *args, ep_plan **ret_plan)
{
    ep_plan_args mine;
    ep_plan *plan;
    ep_status status;

    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_plan));
    EP_TRY_ON(comm, EP_CHECK_LOAD("ep_plan_new", &mine, args, ep_plan_args));
    EP_TRY_ON(comm, check_plan_args(__func__, comm, &mine));
    plan = calloc(1, sizeof(*plan));
    if (!plan)
        return ep_comm_record(comm, ep_fail(EP_E_MEMORY, "%s: no memory", __func__));
    *plan = (ep_plan){.comm = comm, .generation = comm->generation, .args = mine, .from_mask = mine.tokens_per_expert};
    plan->args.topk_idx = NULL;
    plan->args.token_in_rank = NULL;
    plan->args.tokens_per_expert = NULL;
    status = EP_BACKEND_CALL(comm, plan_open, plan, &mine);
    if (status != EP_OK) {
        free(plan);
        return ep_comm_record(comm, status);
    }
    comm->live++;
    *ret_plan = plan;
    return EP_OK;
}

void ep_plan_free(ep_plan *plan)
{
    if (!plan || !ep_comm_may_free(plan->comm))
        return;
    if (plan->comm->ops->plan_close)
        plan->comm->ops->plan_close(plan);
    plan->comm->live--;
    free(plan);
}

ep_status ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info)
{
    ep_plan_info info;

    EP_CHECK_COMM(plan, plan->comm);
    info = *ep_plan_info_now(plan);
    if (plan->updated) {
        info.n_tokens = plan->args.n_tokens;
        info.n_send = info.n_wire = info.n_net = info.n_dropped = info.most_recv = -1;
    }
    return EP_CHECK_STORE("ep_plan_get_info", ret_info, &info, ep_plan_info);
}

static ep_status wait_for_counts(ep_plan *plan)
{
    if (plan->comm->ops->plan_wait && plan->comm->nnodes == 1)
        return ep_comm_record(plan->comm, EP_BACKEND_CALL(plan->comm, plan_wait, plan));
    /* Also where the counts are known: what is queued still fills outputs of the capacity. */
    EP_TRY(ep_stream_sync(plan->comm, NULL));
    if (ep_plan_info_now(plan) == &plan->full)
        return EP_OK;
    return ep_comm_record(plan->comm,
                          ep_fail(EP_E_STATE, "ep_plan_settle: the counts of this plan are not known %s",
                                  plan->updated ? "here since it was updated: ep_plan_get_metadata() writes them"
                                                : "before its first operation"));
}

ep_status ep_plan_settle(ep_plan *plan)
{
    EP_CHECK_CURRENT(plan);
    if (plan->args.max_recv_tokens <= 0 || plan->settled)
        return EP_OK;
    EP_TRY(wait_for_counts(plan));
    plan->settled = true; /* staging keeps the capacity, which the peers expect */
    plan->full.out_rows = plan->full.n_recv;
    return EP_OK;
}

static ep_status check_update(const ep_plan *plan, const ep_plan_update_args *args)
{
    static const char call[] = "ep_plan_update";

    if (plan->args.max_recv_tokens <= 0 || plan->settled)
        return ep_fail(EP_E_STATE,
                       "%s: the plan was created without max_recv_tokens, or settled: its capacity is not fixed", call);
    EP_TRY(ep_check_reserved(call, (uint32_t)args->reserved));
    EP_TRY(ep_check_range(call, "n_tokens", args->n_tokens, 0, ep_plan_most_tokens(plan)));
    if (plan->from_mask && !args->tokens_per_expert)
        return ep_fail(EP_E_ARG, "%s: tokens_per_expert is NULL, but the plan was created with token_in_rank", call);
    if (!plan->from_mask && args->tokens_per_expert)
        return ep_fail(EP_E_ARG, "%s: tokens_per_expert, but the plan was created with topk_idx", call);
    return check_arrays(call, plan->from_mask, args->n_tokens, plan->args.idx_type, args->topk_idx, args->token_in_rank,
                        args->tokens_per_expert);
}

/* What runs at each launch of a graph does not change the calls outside of graphs. */
static void set_tokens(ep_plan *plan, int32_t n_tokens, ep_stream stream)
{
    plan->captured = ep_is_capturing(plan->comm, stream);
    if (plan->captured)
        plan->captured_tokens = n_tokens;
    else
        plan->args.n_tokens = n_tokens;
}

ep_status ep_plan_update(ep_plan *plan, const ep_plan_update_args *args, ep_stream stream)
{
    ep_plan_update_args mine;

    EP_CHECK_USABLE(plan, plan->comm);
    if (plan->generation != plan->comm->generation && ep_is_capturing(plan->comm, stream))
        EP_CHECK_GENERATION(plan);
    EP_TRY_ON(plan->comm, EP_CHECK_LOAD("ep_plan_update", &mine, args, ep_plan_update_args));
    EP_TRY_ON(plan->comm, check_update(plan, &mine));
    EP_TRY_ON(plan->comm, EP_BACKEND_CALL(plan->comm, plan_update, plan, &mine, stream));
    set_tokens(plan, mine.n_tokens, stream);
    plan->updated = true;
    plan->generation = plan->comm->generation;
    return EP_OK;
}

ep_status ep_plan_get_tokens(const ep_plan *plan, ep_stream stream, int32_t *ret_tokens)
{
    EP_CHECK_COMM(plan, plan->comm);
    EP_TRY(EP_CHECK_PTR(__func__, ret_tokens));
    *ret_tokens = ep_plan_tokens_in(plan, stream);
    return EP_OK;
}

ep_status ep_plan_check_stride(const char *call, const ep_plan *plan, int n_tokens, int32_t *stride)
{
    int nranks = plan->comm->nranks;

    if (!*stride)
        *stride = plan->args.max_tokens;
    if (!*stride)
        return ep_fail(EP_E_ARG, "%s: source_stride is 0, and the plan was created without max_tokens", call);
    EP_TRY(ep_check_range(call, "source_stride", *stride, n_tokens, INT32_MAX));
    if ((int64_t)*stride * nranks > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d ranks of source_stride %d tokens do not fit an int32", call, nranks,
                       *stride);
    return EP_OK;
}

static ep_status check_metadata(const ep_plan *plan, ep_plan_metadata *dst, ep_stream stream)
{
    static const char call[] = "ep_plan_get_metadata";
    const int64_t each = (int64_t)sizeof(int32_t), ranks = plan->comm->nranks;
    int64_t rows = ep_plan_info_now(plan)->out_rows, sources = 0, slots = 0, local = plan->args.n_experts / ranks;

    EP_TRY(ep_check_reserved(call, (uint32_t)dst->reserved));
    if (dst->recv_slot && !(plan->args.flags & EP_PLAN_EXPANDED))
        return ep_fail(EP_E_ARG, "%s: recv_slot must be NULL in the rank layout, where token i is row i", call);
    if (dst->recv_source || dst->recv_slot)
        EP_TRY(ep_plan_check_stride(call, plan, ep_plan_tokens_in(plan, stream), &dst->source_stride));
    if (dst->recv_source)
        EP_TRY(ep_check_product(call, "recv_source", rows, each, 1, &sources));
    if (dst->recv_slot)
        EP_TRY(ep_check_product(call, "recv_slot", rows, plan->args.topk, each, &slots));
    const struct ep_buffer buffers[] = {
        {"recv_source", dst->recv_source, sources, sizeof(int32_t), false},
        {"recv_slot", dst->recv_slot, slots, sizeof(int32_t), false},
        {"n_recv_tokens", dst->n_recv_tokens, each, sizeof(int32_t), false},
        {"psum_rank", dst->psum_rank, ranks * each, sizeof(int32_t), false},
        {"psum_expert", dst->psum_expert, local * each, sizeof(int32_t), false},
        {"count_exact", dst->count_exact, local * each, sizeof(int32_t), false},
        {"rank_prefix", dst->rank_prefix, ranks * ranks * each, sizeof(int32_t), false},
    };
    return ep_check_buffers(call, buffers, 7, 7);
}

ep_status ep_plan_get_metadata(ep_plan *plan, const ep_plan_metadata *dst, ep_stream stream)
{
    ep_plan_metadata mine;

    EP_CHECK_CURRENT(plan);
    EP_TRY_ON(plan->comm, EP_CHECK_LOAD("ep_plan_get_metadata", &mine, dst, ep_plan_metadata));
    EP_TRY_ON(plan->comm, check_metadata(plan, &mine, stream));
    return ep_comm_record(plan->comm, EP_BACKEND_CALL(plan->comm, plan_metadata, plan, &mine, stream));
}

static ep_status check_sources(const ep_plan *plan, const int32_t *ret_rank, const int32_t *ret_token)
{
    int64_t bytes = ep_plan_info_now(plan)->n_recv * (int64_t)sizeof(int32_t);
    const struct ep_buffer buffers[] = {{"ret_rank", ret_rank, bytes, sizeof(int32_t), false},
                                        {"ret_token", ret_token, bytes, sizeof(int32_t), false}};

    return ep_check_buffers("ep_plan_get_sources", buffers, 2, 2);
}

ep_status ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    EP_CHECK_CURRENT(plan);
    if (ep_plan_info_now(plan)->n_recv < 0)
        return ep_comm_record(plan->comm,
                              ep_fail(EP_E_STATE, "%s: the counts of this plan are not known %s", __func__,
                                      plan->updated ? "here since it was updated: ep_plan_get_metadata() writes them"
                                                    : "before its first dispatch"));
    EP_TRY_ON(plan->comm, check_sources(plan, ret_rank, ret_token));
    return ep_comm_record(plan->comm, EP_BACKEND_CALL(plan->comm, plan_sources, plan, ret_rank, ret_token));
}

static ep_status check_layout(const ep_comm *comm, const ep_plan_args *args, const ep_layout *layout)
{
    const int64_t each = (int64_t)sizeof(int32_t);
    const struct ep_buffer buffers[] = {
        {"tokens_per_rank", layout->tokens_per_rank, comm->nranks * each, sizeof(int32_t), false},
        {"tokens_per_node", layout->tokens_per_node, comm->nnodes * each, sizeof(int32_t), false},
        {"tokens_per_expert", layout->tokens_per_expert, args->n_experts * each, sizeof(int32_t), false},
        {"token_in_rank", layout->token_in_rank, (int64_t)args->n_tokens * comm->nranks, 0, false},
        {"topk_idx", args->topk_idx,
         (int64_t)args->n_tokens * args->topk * (int64_t)ep_dtype_bytes((ep_dtype)args->idx_type), 0, false},
    };

    return ep_check_buffers("ep_plan_layout", buffers, 4, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    ep_plan_args mine;
    ep_layout outputs;

    EP_CHECK_COMM(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_LOAD("ep_plan_layout", &mine, args, ep_plan_args));
    EP_TRY_ON(comm, EP_CHECK_LOAD("ep_plan_layout", &outputs, layout, ep_layout));
    if (mine.tokens_per_expert)
        return ep_comm_record(comm,
                              ep_fail(EP_E_ARG, "%s: tokens_per_expert: the layout is that of choices", __func__));
    EP_TRY_ON(comm, check_plan_args(__func__, comm, &mine));
    EP_TRY_ON(comm, check_layout(comm, &mine, &outputs));
    return ep_comm_record(comm, EP_BACKEND_CALL(comm, plan_layout, comm, &mine, &outputs));
}
