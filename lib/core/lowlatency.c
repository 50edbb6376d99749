/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include <stdlib.h>

#define LIVE_RESULTS 2

/* Rows of [L, R*M, H]; times a row in bytes it still fits, see ep_ll_new(). */
static int64_t result_rows(const ep_ll *ll)
{
    return (int64_t)ll->n_local * ll->comm->nranks * ll->config.max_tokens;
}

static ep_status check_config(const ep_comm *comm, const ep_ll_config *config)
{
    static const char call[] = "ep_ll_new";
    int64_t rows, bytes;

    EP_TRY(ep_check_range(call, "max_tokens", config->max_tokens, 1, INT32_MAX));
    EP_TRY(ep_check_range(call, "hidden", config->hidden, 1, EP_MAX_HIDDEN));
    if (config->hidden % EP_SCALE_BLOCK)
        return ep_fail(EP_E_ARG, "%s: hidden %d is not a multiple of %d", call, config->hidden, EP_SCALE_BLOCK);
    EP_TRY(ep_check_experts(call, comm, config->n_experts));
    EP_TRY(ep_check_range(call, "topk", config->topk, 1, EP_MAX_TOPK));
    EP_TRY(ep_check_flags(call, config->flags, EP_LL_MASK_DEAD | EP_LL_SUM_ONCE));
    EP_TRY(ep_check_reserved(call, config->reserved));
    /* Ranges and counts are 32-bit row numbers within one expert. */
    rows = (int64_t)comm->nranks * config->max_tokens;
    if (rows > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d ranks * %d max_tokens rows an expert do not fit an int32", call,
                       comm->nranks, config->max_tokens);
    return ep_check_product(call, "a result", rows, config->n_experts / comm->nranks, (int64_t)config->hidden * 2,
                            &bytes);
}

static ep_status open_ll(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll)
{
    ep_ll *ll = calloc(1, sizeof(*ll));
    ep_status status;

    if (!ll)
        return ep_fail(EP_E_MEMORY, "ep_ll_new: no memory");
    ll->comm = comm;
    ll->config = *config;
    ll->n_local = config->n_experts / comm->nranks;
    status = comm->ops->ll_open(ll);
    if (status != EP_OK) {
        free(ll);
        return status;
    }
    comm->live++;
    *ret_ll = ll;
    return EP_OK;
}

ep_status ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll)
{
    ep_ll_config mine;
    ep_status status;

    EP_CHECK_COMM(comm, comm);
    status = ep_comm_usable(comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_PTR(__func__, ret_ll);
    if (status == EP_OK)
        status = EP_CHECK_LOAD("ep_ll_new", &mine, config, ep_ll_config);
    if (status == EP_OK)
        status = check_config(comm, &mine);
    if (status == EP_OK && !comm->ops->ll_open)
        status = ep_fail(EP_E_UNSUPPORTED, "%s: backend %s does not provide it", __func__, comm->ops->name);
    if (status == EP_OK)
        status = open_ll(comm, &mine, ret_ll);
    return ep_comm_record(comm, status);
}

void ep_ll_free(ep_ll *ll)
{
    if (!ll || !ep_comm_is_own(ll->comm))
        return;
    if (ll->comm->ops->ll_close)
        ll->comm->ops->ll_close(ll);
    ll->comm->live--;
    free(ll);
}

static ep_status check_no_hook(const ep_ll *ll, const char *call)
{
    if (ll->open_hook)
        return ep_fail(EP_E_STATE, "%s: the last call was made with EP_LL_RECV_HOOK: call ep_ll_finish() first", call);
    return EP_OK;
}

/* What both operations say about this rank's tokens. */
static ep_status check_tokens(const ep_ll *ll, const char *call, int n_tokens, const void *topk_idx, int idx_type)
{
    EP_TRY(ep_check_range(call, "n_tokens", n_tokens, 0, ll->config.max_tokens));
    EP_TRY(ep_check_idx_type(call, idx_type));
    return ep_check_buffer(call, "topk_idx", topk_idx, n_tokens == 0, ep_dtype_bytes((ep_dtype)idx_type));
}

/* Of `topk_idx`. */
static int64_t index_bytes(const ep_ll *ll, int n_tokens, int idx_type)
{
    return (int64_t)n_tokens * ll->config.topk * (int64_t)ep_dtype_bytes((ep_dtype)idx_type);
}

static ep_status check_format(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";

    if (args->out_dtype == EP_BF16) {
        if (args->scale_type)
            return ep_fail(EP_E_ARG, "%s: scale_type is %d with bf16", call, args->scale_type);
        if (args->recv_scales)
            return ep_fail(EP_E_ARG, "%s: recv_scales with bf16", call);
        if (args->flags & EP_LL_ROUND_SCALE)
            return ep_fail(EP_E_ARG, "%s: EP_LL_ROUND_SCALE with bf16", call);
        return EP_OK;
    }
    if (args->out_dtype != EP_F8E4M3)
        return ep_fail(EP_E_ARG, "%s: out_dtype is %d (%s), neither EP_BF16 nor EP_F8E4M3", call, args->out_dtype,
                       ep_dtype_name((ep_dtype)args->out_dtype));
    if (args->scale_type != EP_F32 && args->scale_type != EP_UE8M0)
        return ep_fail(EP_E_ARG, "%s: scale_type is %d (%s), neither EP_F32 nor EP_UE8M0", call, args->scale_type,
                       ep_dtype_name((ep_dtype)args->scale_type));
    if (args->scale_type == EP_UE8M0 && ll->config.hidden % (4 * EP_SCALE_BLOCK))
        return ep_fail(EP_E_ARG, "%s: hidden %d with EP_UE8M0 scales is not a multiple of %d", call, ll->config.hidden,
                       4 * EP_SCALE_BLOCK);
    return ep_check_buffer(call, "recv_scales", args->recv_scales, false, EP_ROW_ALIGN);
}

static ep_status check_dispatch(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";
    int64_t out_row = (int64_t)ll->config.hidden * (args->out_dtype == EP_BF16 ? 2 : 1), rows = result_rows(ll);
    int64_t scale_row = (int64_t)ll->config.hidden / EP_SCALE_BLOCK * (args->scale_type == EP_UE8M0 ? 1 : 4);

    EP_TRY(check_no_hook(ll, call));
    if (ll->unanswered >= LIVE_RESULTS)
        return ep_fail(EP_E_STATE, "%s: two dispatches are not combined yet: call ep_ll_combine() first", call);
    EP_TRY(ep_check_flags(call, args->flags, EP_LL_RECV_HOOK | EP_LL_ROUND_SCALE | EP_LL_ASYNC));
    EP_TRY(ep_check_reserved(call, args->reserved));
    EP_TRY(check_tokens(ll, call, args->n_tokens, args->topk_idx, args->idx_type));
    EP_TRY(check_format(ll, args));
    EP_TRY(ep_check_buffer(call, "x", args->x, args->n_tokens == 0, EP_ROW_ALIGN));
    EP_TRY(ep_check_buffer(call, "recv_x", args->recv_x, false, EP_ROW_ALIGN));
    EP_TRY(ep_check_buffer(call, "recv_count", args->recv_count, false, sizeof(int32_t)));
    EP_TRY(ep_check_buffer(call, "recv_source", args->recv_source, true, sizeof(int32_t)));
    EP_TRY(ep_check_buffer(call, "recv_range", args->recv_range, true, sizeof(int64_t)));
    const struct ep_buffer buffers[] = {
        {"recv_x", args->recv_x, rows * out_row},
        {"recv_scales", args->recv_scales, rows * scale_row},
        {"recv_count", args->recv_count, (int64_t)ll->n_local * (int64_t)sizeof(int32_t)},
        {"recv_source", args->recv_source, rows * (int64_t)sizeof(int32_t)},
        {"recv_range", args->recv_range, (int64_t)ll->n_local * ll->comm->nranks * (int64_t)sizeof(int64_t)},
        {"x", args->x, (int64_t)args->n_tokens * ll->config.hidden * 2},
        {"topk_idx", args->topk_idx, index_bytes(ll, args->n_tokens, args->idx_type)},
    };
    return ep_check_apart(call, buffers, 5, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args)
{
    ep_ll_dispatch_args mine;
    ep_status status;

    EP_CHECK_COMM(ll, ll->comm);
    status = ep_comm_usable(ll->comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_LOAD("ep_ll_dispatch", &mine, args, ep_ll_dispatch_args);
    if (status == EP_OK)
        status = check_dispatch(ll, &mine);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(ll->comm, ll_dispatch, ll, &mine);
    if (status == EP_OK) {
        ll->n_tokens[ll->unanswered++] = mine.n_tokens;
        ll->open_hook = mine.flags & EP_LL_RECV_HOOK;
    }
    return ep_comm_record(ll->comm, status);
}

static ep_status check_combine(const ep_ll *ll, const ep_ll_combine_args *args)
{
    static const char call[] = "ep_ll_combine";

    EP_TRY(check_no_hook(ll, call));
    if (!ll->unanswered)
        return ep_fail(EP_E_STATE, "%s: no dispatch waits for its combine", call);
    EP_TRY(ep_check_flags(call, args->flags, EP_LL_RECV_HOOK | EP_LL_ZERO_COPY | EP_LL_ASYNC));
    EP_TRY(ep_check_reserved(call, args->reserved));
    EP_TRY(check_tokens(ll, call, args->n_tokens, args->topk_idx, args->idx_type));
    if (args->n_tokens != ll->n_tokens[0])
        return ep_fail(EP_E_ARG, "%s: n_tokens is %d, but the dispatch that it answers had %d", call, args->n_tokens,
                       ll->n_tokens[0]);
    EP_TRY(ep_check_buffer(call, "x", args->x, false, EP_ROW_ALIGN));
    EP_TRY(ep_check_buffer(call, "topk_weights", args->topk_weights, args->n_tokens == 0, sizeof(float)));
    EP_TRY(ep_check_buffer(call, "out", args->out, args->n_tokens == 0, EP_ROW_ALIGN));
    const struct ep_buffer buffers[] = {
        {"out", args->out, (int64_t)args->n_tokens * ll->config.hidden * 2},
        {"x", args->x, result_rows(ll) * ll->config.hidden * 2},
        {"topk_idx", args->topk_idx, index_bytes(ll, args->n_tokens, args->idx_type)},
        {"topk_weights", args->topk_weights, (int64_t)args->n_tokens * ll->config.topk * (int64_t)sizeof(float)},
    };
    return ep_check_apart(call, buffers, 1, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_ll_combine(ep_ll *ll, const ep_ll_combine_args *args)
{
    ep_ll_combine_args mine;
    ep_status status;

    EP_CHECK_COMM(ll, ll->comm);
    status = ep_comm_usable(ll->comm, __func__);
    if (status == EP_OK)
        status = EP_CHECK_LOAD("ep_ll_combine", &mine, args, ep_ll_combine_args);
    if (status == EP_OK)
        status = check_combine(ll, &mine);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(ll->comm, ll_combine, ll, &mine);
    if (status == EP_OK) {
        ll->unanswered--;
        ll->n_tokens[0] = ll->n_tokens[1];
        ll->open_hook = mine.flags & EP_LL_RECV_HOOK;
    }
    return ep_comm_record(ll->comm, status);
}

ep_status ep_ll_finish(ep_ll *ll)
{
    ep_status status;

    EP_CHECK_COMM(ll, ll->comm);
    status = ep_comm_usable(ll->comm, __func__);
    if (status == EP_OK && !ll->open_hook)
        status = ep_fail(EP_E_STATE, "%s: no call with EP_LL_RECV_HOOK is open", __func__);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(ll->comm, ll_finish, ll);
    if (status == EP_OK)
        ll->open_hook = false;
    return ep_comm_record(ll->comm, status);
}

ep_status ep_ll_get_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    ep_status status;

    EP_CHECK_COMM(ll, ll->comm);
    status = EP_CHECK_PTR(__func__, ret_buffer);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(ll->comm, ll_combine_buffer, ll, ret_buffer);
    return ep_comm_record(ll->comm, status);
}

ep_status ep_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    ep_status status;

    EP_CHECK_COMM(ll, ll->comm);
    status = EP_CHECK_PTR(__func__, ret_masked);
    if (status == EP_OK)
        status = EP_BACKEND_CALL(ll->comm, ll_get_mask, ll, ret_masked);
    return ep_comm_record(ll->comm, status);
}
