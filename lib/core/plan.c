/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include <stdlib.h>

#define KNOWN_FLAGS (EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING)

/* The arguments that a routing has with or without a plan. */
static ep_status check_routing_args(const char *call, const ep_comm *comm, const ep_plan_args *args)
{
    EP_TRY(ep_check_idx_type(call, args->idx_type));
    EP_TRY(ep_check_range(call, "n_tokens", args->n_tokens, 0, INT32_MAX));
    EP_TRY(ep_check_range(call, "topk", args->topk, 1, EP_MAX_TOPK));
    EP_TRY(ep_check_experts(call, comm, args->n_experts));
    return ep_check_buffer(call, "topk_idx", args->topk_idx, args->n_tokens == 0,
                           ep_dtype_bytes((ep_dtype)args->idx_type));
}

static ep_status check_plan_args(const char *call, const ep_comm *comm, ep_plan_args *args)
{
    int64_t most;

    EP_TRY(check_routing_args(call, comm, args));
    EP_TRY(ep_check_flags(call, args->flags, KNOWN_FLAGS));
    if ((args->flags & EP_PLAN_ZERO_PADDING) && !(args->flags & EP_PLAN_EXPANDED))
        return ep_fail(EP_E_ARG, "%s: EP_PLAN_ZERO_PADDING without EP_PLAN_EXPANDED: there is no padding", call);
    EP_TRY(ep_check_range(call, "expert_alignment", args->expert_alignment, 0, INT32_MAX));
    if (!args->expert_alignment)
        args->expert_alignment = 1;
    EP_TRY(ep_check_range(call, "max_recv_tokens", args->max_recv_tokens, 0, INT64_MAX));
    /* Entries of a routing are counted in int32. */
    if ((int64_t)args->n_tokens * args->topk > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d tokens of %d experts each do not fit an int32 count", call,
                       args->n_tokens, args->topk);
    /* All ranks may choose the same expert, and its count is an int32 even when rounded up. */
    EP_TRY(ep_check_product(call, "n_tokens * ranks", args->n_tokens, comm->nranks, 1, &most));
    if (most + args->expert_alignment > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d tokens on each of %d ranks, rounded up to %d, do not fit an int32 count",
                       call, args->n_tokens, comm->nranks, args->expert_alignment);
    return EP_OK;
}

static ep_status open_plan(ep_comm *comm, const ep_plan_args *args, ep_plan **ret_plan)
{
    ep_plan *plan = calloc(1, sizeof(*plan));
    ep_status status;

    if (!plan)
        return ep_fail(EP_E_MEMORY, "ep_plan_new: no memory");
    plan->comm = comm;
    plan->args = *args;
    plan->args.topk_idx = NULL;
    status = comm->ops->plan_open(plan, args);
    if (status != EP_OK) {
        free(plan);
        return status;
    }
    comm->live++;
    *ret_plan = plan;
    return EP_OK;
}

ep_status ep_plan_new(ep_comm *comm, const ep_plan_args *args, ep_plan **ret_plan)
{
    ep_plan_args mine;
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    status = ep_comm_usable(comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_PTR(__func__, ret_plan);
    if (status == EP_OK)
        status = EP_CHECK_LOAD("ep_plan_new", &mine, args, ep_plan_args);
    if (status == EP_OK)
        status = check_plan_args(__func__, comm, &mine);
    if (status == EP_OK && !comm->ops->plan_open)
        status = ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, comm->ops->name);
    if (status == EP_OK)
        status = open_plan(comm, &mine, ret_plan);
    return ep_comm_record(comm, status);
}

void ep_plan_free(ep_plan *plan)
{
    if (!plan || !ep_comm_is_own(plan->comm))
        return;
    if (plan->comm->ops->plan_close)
        plan->comm->ops->plan_close(plan);
    plan->comm->live--;
    free(plan);
}

ep_status ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info)
{
    EP_CHECK_COMM(plan, plan->comm);
    return EP_CHECK_STORE("ep_plan_get_info", ret_info, ep_plan_info_now(plan), ep_plan_info);
}

static ep_status check_sources(const ep_plan *plan, const int32_t *ret_rank, const int32_t *ret_token)
{
    static const char call[] = "ep_plan_get_sources";
    int64_t bytes = ep_plan_info_now(plan)->n_recv * (int64_t)sizeof(int32_t);
    const struct ep_buffer buffers[] = {{"ret_rank", ret_rank, bytes}, {"ret_token", ret_token, bytes}};

    EP_TRY(ep_check_buffer(call, "ret_rank", ret_rank, true, sizeof(int32_t)));
    EP_TRY(ep_check_buffer(call, "ret_token", ret_token, true, sizeof(int32_t)));
    return ep_check_apart(call, buffers, 2, 2);
}

ep_status ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    ep_status status;

    EP_CHECK_COMM(plan, plan->comm);
    status = ep_comm_usable(plan->comm, __func__);
    if (status == EP_OK && ep_plan_info_now(plan)->n_recv < 0)
        status = ep_fail(EP_E_STATE, "%s: the counts of this plan are not known before its first dispatch", __func__);
    if (status == EP_OK)
        status = check_sources(plan, ret_rank, ret_token);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(plan->comm, plan_sources, plan, ret_rank, ret_token);
    return ep_comm_record(plan->comm, status);
}

static ep_status check_layout(const ep_comm *comm, const ep_plan_args *args, const ep_layout *layout)
{
    static const char call[] = "ep_plan_layout";
    const int64_t each = (int64_t)sizeof(int32_t);
    const struct ep_buffer buffers[] = {
        {"tokens_per_rank", layout->tokens_per_rank, comm->nranks * each},
        {"tokens_per_node", layout->tokens_per_node, comm->nnodes * each},
        {"tokens_per_expert", layout->tokens_per_expert, args->n_experts * each},
        {"token_in_rank", layout->token_in_rank, (int64_t)args->n_tokens * comm->nranks},
        {"topk_idx", args->topk_idx,
         (int64_t)args->n_tokens * args->topk * (int64_t)ep_dtype_bytes((ep_dtype)args->idx_type)},
    };

    for (int i = 0; i < 3; i++)
        EP_TRY(ep_check_buffer(call, buffers[i].name, buffers[i].at, true, sizeof(int32_t)));
    return ep_check_apart(call, buffers, 4, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    ep_plan_args mine;
    ep_layout outputs;
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    status = EP_CHECK_LOAD("ep_plan_layout", &mine, args, ep_plan_args);
    if (status == EP_OK)
        status = EP_CHECK_LOAD("ep_plan_layout", &outputs, layout, ep_layout);
    if (status == EP_OK)
        status = check_plan_args(__func__, comm, &mine);
    if (status == EP_OK)
        status = check_layout(comm, &mine, &outputs);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(comm, plan_layout, comm, &mine, &outputs);
    return ep_comm_record(comm, status);
}
