/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

#include <stdlib.h>

/* L*R*M of a call. Its product with the bytes of a row fits int64, see check_config(). */
static int64_t result_rows(const ep_ll *ll, int max_tokens)
{
    return (int64_t)ll->n_local * ll->comm->nranks * max_tokens;
}

static ep_status check_config(const char *call, const ep_comm *comm, const ep_ll_config *config)
{
    int64_t rows, bytes;

    EP_TRY(ep_check_range(call, "max_tokens", config->max_tokens, 1, INT32_MAX));
    EP_TRY(ep_check_range(call, "hidden", config->hidden, 1, EP_MAX_HIDDEN));
    if (config->hidden % EP_SCALE_BLOCK)
        return ep_fail(EP_E_ARG, "%s: hidden %d is not a multiple of %d", call, config->hidden, EP_SCALE_BLOCK);
    EP_TRY(ep_check_experts(call, comm, config->n_experts));
    EP_TRY(ep_check_range(call, "topk", config->topk, 1, EP_MAX_TOPK));
    EP_TRY(ep_check_flags(call, config->flags, EP_LL_MASK_DEAD));
    EP_TRY(ep_check_reserved(call, config->reserved));
    /* recv_range has 32-bit row numbers and counts within one expert. */
    rows = (int64_t)comm->nranks * config->max_tokens;
    if (rows > INT32_MAX)
        return ep_fail(EP_E_OVERFLOW, "%s: %d ranks * %d max_tokens rows an expert do not fit an int32", call,
                       comm->nranks, config->max_tokens);
    return ep_check_product(call, "a result", rows, config->n_experts / comm->nranks, (int64_t)config->hidden * 2,
                            &bytes);
}

ep_status ep_ll_get_sizes(const ep_comm *comm, const ep_ll_config *config, ep_ll_sizes *ret_sizes)
{
    ep_ll_sizes sizes = {.size = sizeof(sizes), .library_bytes = -1, .combine_bytes = -1};
    ep_ll_config mine;

    EP_CHECK_COMM(comm, comm);
    EP_TRY(EP_CHECK_LOAD("ep_ll_get_sizes", &mine, config, ep_ll_config));
    EP_TRY(check_config("ep_ll_get_sizes", comm, &mine));
    sizes.rows = (int64_t)mine.n_experts * mine.max_tokens;
    if (comm->ops->ll_bytes)
        sizes.library_bytes = comm->ops->ll_bytes(comm, &mine, &sizes.combine_bytes);
    if (comm->ops->ll_bytes && sizes.library_bytes < 0)
        return EP_E_UNSUPPORTED;
    return EP_CHECK_STORE("ep_ll_get_sizes", ret_sizes, &sizes, ep_ll_sizes);
}

ep_status ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll)
{
    ep_ll_config mine;
    ep_status status;
    ep_ll *ll;

    EP_CHECK_USABLE(comm, comm);
    EP_TRY_ON(comm, EP_CHECK_PTR(__func__, ret_ll));
    EP_TRY_ON(comm, EP_CHECK_LOAD("ep_ll_new", &mine, config, ep_ll_config));
    EP_TRY_ON(comm, check_config(__func__, comm, &mine));
    ll = calloc(1, sizeof(*ll));
    if (!ll)
        return ep_comm_record(comm, ep_fail(EP_E_MEMORY, "%s: no memory", __func__));
    *ll =
        (ep_ll){.comm = comm, .generation = comm->generation, .config = mine, .n_local = mine.n_experts / comm->nranks};
    status = EP_BACKEND_CALL(comm, ll_open, ll);
    if (status != EP_OK) {
        free(ll);
        return ep_comm_record(comm, status);
    }
    comm->live++;
    *ret_ll = ll;
    return EP_OK;
}

ep_status ep_ll_renew(ep_ll *ll)
{
    EP_CHECK_USABLE(ll, ll->comm);
    if (ll->generation == ll->comm->generation)
        return EP_OK;
    *ll = (ep_ll){.comm = ll->comm, .impl = ll->impl, .config = ll->config, .n_local = ll->n_local};
    EP_TRY_ON(ll->comm, EP_BACKEND_CALL(ll->comm, ll_renew, ll));
    ll->generation = ll->comm->generation;
    return EP_OK;
}

void ep_ll_free(ep_ll *ll)
{
    if (!ll || !ep_comm_may_free(ll->comm))
        return;
    ll->comm->ops->ll_close(ll);
    ll->comm->live--;
    free(ll);
}

/* The call must be finished before. */
static ep_status fail_open(const char *call, const struct ep_ll_call *open)
{
    return ep_fail(EP_E_STATE, "%s: the %s of call %llu was made with EP_LL_RECV_HOOK: call ep_ll_finish() first", call,
                   open->open == EP_LL_OPEN_DISPATCH ? "dispatch" : "combine", (unsigned long long)open->number);
}

static ep_status check_plain(const ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";

    if (args->scale_type)
        return ep_fail(EP_E_ARG, "%s: scale_type is %d with bf16", call, args->scale_type);
    if (args->recv_scales)
        return ep_fail(EP_E_ARG, "%s: recv_scales with bf16", call);
    if (args->flags & (EP_LL_ROUND_SCALE | EP_LL_SWIZZLED_SCALES))
        return ep_fail(EP_E_ARG, "%s: %s with bf16", call,
                       args->flags & EP_LL_ROUND_SCALE ? "EP_LL_ROUND_SCALE" : "EP_LL_SWIZZLED_SCALES");
    return EP_OK;
}

static ep_status check_format(const ep_ll *ll, const ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";
    bool fp4 = args->out_dtype == EP_F4E2M1, blocks = fp4 || args->scale_type == EP_UE8M0_32;

    if (args->global_scale && !fp4)
        return ep_fail(EP_E_ARG, "%s: global_scale with rows of %s", call, ep_dtype_name((ep_dtype)args->out_dtype));
    if (args->out_dtype == EP_BF16)
        return check_plain(args);
    if (args->out_dtype != EP_F8E4M3 && !fp4)
        return ep_fail(EP_E_ARG, "%s: out_dtype is %d (%s), none of EP_BF16, EP_F8E4M3 and EP_F4E2M1", call,
                       args->out_dtype, ep_dtype_name((ep_dtype)args->out_dtype));
    if (fp4 && args->scale_type != EP_F8E4M3)
        return ep_fail(EP_E_ARG, "%s: scale_type is %d (%s), must be EP_F8E4M3 with EP_F4E2M1", call, args->scale_type,
                       ep_dtype_name((ep_dtype)args->scale_type));
    if (!fp4 && args->scale_type != EP_F32 && args->scale_type != EP_UE8M0 && args->scale_type != EP_UE8M0_32)
        return ep_fail(EP_E_ARG, "%s: scale_type is %d (%s), none of EP_F32, EP_UE8M0 and EP_UE8M0_32", call,
                       args->scale_type, ep_dtype_name((ep_dtype)args->scale_type));
    if (fp4 && (args->flags & EP_LL_ROUND_SCALE))
        return ep_fail(EP_E_ARG, "%s: EP_LL_ROUND_SCALE with EP_F4E2M1", call);
    if (!blocks && (args->flags & EP_LL_SWIZZLED_SCALES))
        return ep_fail(EP_E_ARG, "%s: EP_LL_SWIZZLED_SCALES is for EP_F4E2M1 and EP_UE8M0_32", call);
    if (args->scale_type == EP_UE8M0 && ll->config.hidden % (4 * EP_SCALE_BLOCK))
        return ep_fail(EP_E_ARG, "%s: hidden %d with EP_UE8M0 scales is not a multiple of %d", call, ll->config.hidden,
                       4 * EP_SCALE_BLOCK);
    return EP_OK;
}

/* The strided scales of an expert must lie within its part of recv_scales. */
static ep_status check_scale_strides(const ep_ll *ll, const ep_ll_dispatch_args *args, int64_t rows, int64_t words)
{
    static const char call[] = "ep_ll_dispatch";
    int64_t token = args->recv_scale_stride_token, block = args->recv_scale_stride_block;
    int64_t in_expert = rows / ll->n_local;

    if (!token && !block)
        return EP_OK;
    if (args->out_dtype == EP_BF16 || (args->flags & EP_LL_SWIZZLED_SCALES))
        return ep_fail(EP_E_ARG, "%s: strides of recv_scales with %s", call,
                       args->out_dtype == EP_BF16 ? "bf16" : "EP_LL_SWIZZLED_SCALES");
    return ep_check_out_strides(call, token, block, in_expert, words, in_expert * words);
}

static ep_status check_dispatch(const ep_ll *ll, ep_ll_dispatch_args *args)
{
    static const char call[] = "ep_ll_dispatch";
    const struct ep_ll_call *before = &ll->call[(ll->dispatches + 1) & 1];
    const int64_t each = (int64_t)sizeof(int32_t), index = (int64_t)ep_dtype_bytes((ep_dtype)args->idx_type);
    int64_t rows, scale_words;

    if (before->open)
        return fail_open(call, before);
    EP_TRY(ep_check_flags(call, args->flags, EP_LL_RECV_HOOK | EP_LL_ROUND_SCALE | EP_LL_SWIZZLED_SCALES));
    EP_TRY(ep_check_range(call, "max_tokens", args->max_tokens, 0, ll->config.max_tokens));
    if (!args->max_tokens)
        args->max_tokens = ll->config.max_tokens;
    EP_TRY(ep_check_range(call, "topk", args->topk, 0, ll->config.topk));
    if (!args->topk)
        args->topk = ll->config.topk;
    EP_TRY(ep_check_reserved(call, args->reserved));
    rows = result_rows(ll, args->max_tokens);
    EP_TRY(ep_check_range(call, "n_tokens", args->n_tokens, 0, args->max_tokens));
    EP_TRY(ep_check_idx_type(call, args->idx_type));
    EP_TRY(check_format(ll, args));
    scale_words = ep_ll_scale_words(ll, args);
    EP_TRY(check_scale_strides(ll, args, rows, scale_words));
    EP_TRY(ep_check_buffer(call, "ret_call", args->ret_call, true, sizeof(uint64_t)));
    const struct ep_buffer buffers[] = {
        {"recv_x", args->recv_x, rows * ep_ll_row_bytes(ll, args), EP_ROW_ALIGN, true},
        {"recv_scales", args->recv_scales, ll->n_local * ep_ll_scale_rows(ll, args) * scale_words * 4, EP_ROW_ALIGN,
         args->out_dtype != EP_BF16},
        {"recv_count", args->recv_count, ll->n_local * each, sizeof(int32_t), true},
        {"recv_source", args->recv_source, rows * each, sizeof(int32_t), false},
        {"recv_range", args->recv_range, 2 * each * ll->n_local * ll->comm->nranks, sizeof(int64_t), false},
        {"recv_stats_add", args->recv_stats_add, ll->n_local * each, sizeof(int32_t), false},
        {"wait_cost_add", args->wait_cost_add, 2 * each * ll->comm->nranks, sizeof(int64_t), false},
        {"x", args->x, (int64_t)args->n_tokens * ll->config.hidden * 2, EP_ROW_ALIGN, args->n_tokens > 0},
        {"topk_idx", args->topk_idx, (int64_t)args->n_tokens * args->topk * index, (size_t)index, args->n_tokens > 0},
        {"global_scale", args->global_scale, sizeof(float), sizeof(float), false},
    };
    return ep_check_buffers(call, buffers, 7, sizeof(buffers) / sizeof(buffers[0]));
}

static void record_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, uint64_t number)
{
    bool open = args->flags & EP_LL_RECV_HOOK;

    ll->dispatches = number;
    ll->call[number & 1] = (struct ep_ll_call){.number = number,
                                               .n_tokens = args->n_tokens,
                                               .max_tokens = args->max_tokens,
                                               .topk = args->topk,
                                               .open = open ? EP_LL_OPEN_DISPATCH : EP_LL_CLOSED};
    if (open)
        ll->last_open = number;
    if (args->ret_call)
        *args->ret_call = number;
}

ep_status ep_ll_dispatch(ep_ll *ll, const ep_ll_dispatch_args *args, ep_stream stream)
{
    ep_ll_dispatch_args mine;
    uint64_t number;

    EP_CHECK_CURRENT(ll);
    number = ll->dispatches + 1;
    EP_TRY_ON(ll->comm, EP_CHECK_LOAD("ep_ll_dispatch", &mine, args, ep_ll_dispatch_args));
    EP_TRY_ON(ll->comm, check_dispatch(ll, &mine));
    EP_TRY_ON(ll->comm, EP_BACKEND_CALL(ll->comm, ll_dispatch, ll, &mine, number, stream));
    record_dispatch(ll, &mine, number);
    return EP_OK;
}

ep_status ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args)
{
    EP_CHECK_COMM(ll, ll->comm);
    EP_SYNC(ll->comm, ep_ll_dispatch(ll, args, NULL));
}

/* The dispatch that a combine names. */
static ep_status find_call(const ep_ll *ll, uint64_t number, const struct ep_ll_call **ret_call)
{
    static const char call[] = "ep_ll_combine";
    const struct ep_ll_call *found;

    if (!number)
        number = ll->dispatches;
    found = &ll->call[number & 1];
    if (!number)
        return ep_fail(EP_E_STATE, "%s: there was no dispatch before it", call);
    if (number > ll->dispatches)
        return ep_fail(EP_E_STATE, "%s: call is %llu, but there were %llu dispatches", call, (unsigned long long)number,
                       (unsigned long long)ll->dispatches);
    if (found->number != number)
        return ep_fail(EP_E_STATE,
                       "%s: dispatch %llu has no buffers any more: there were %llu, and the last two have them", call,
                       (unsigned long long)number, (unsigned long long)ll->dispatches);
    if (found->open)
        return fail_open(call, found);
    *ret_call = found;
    return EP_OK;
}

/* *ret_bytes: of all counters. */
static ep_status check_signals(const ep_ll *ll, const ep_ll_combine_args *args, int max_tokens, int64_t *ret_bytes)
{
    static const char call[] = "ep_ll_combine";

    *ret_bytes = 0;
    EP_TRY(ep_check_reserved(call, args->reserved));
    if (!args->signals && (args->signal_rows || args->signal_value || args->max_sms))
        return ep_fail(EP_E_ARG, "%s: signal_rows is %d, signal_value %u and max_sms %d without signals", call,
                       args->signal_rows, args->signal_value, args->max_sms);
    if (!args->signals)
        return EP_OK;
    EP_TRY(ep_check_range(call, "signal_rows", args->signal_rows, 1, INT32_MAX));
    EP_TRY(ep_check_range(call, "max_sms", args->max_sms, 0, INT32_MAX));
    *ret_bytes = ep_ll_signal_blocks(ll, args, max_tokens) * ll->n_local * (int64_t)sizeof(*args->signals);
    return EP_OK;
}

static ep_status check_combine(const ep_ll *ll, ep_ll_combine_args *args)
{
    static const char call[] = "ep_ll_combine";
    const struct ep_ll_call *dispatch = NULL, *other;
    int64_t index = (int64_t)ep_dtype_bytes((ep_dtype)args->idx_type), signal_bytes;
    bool some = args->n_tokens > 0;

    EP_TRY(ep_check_flags(call, args->flags, EP_LL_RECV_HOOK | EP_LL_ZERO_COPY | EP_LL_NO_PARTIAL_REDUCE));
    EP_TRY(find_call(ll, args->call, &dispatch));
    args->call = dispatch->number;
    other = &ll->call[(dispatch->number + 1) & 1];
    if (other->open == EP_LL_OPEN_COMBINE && other->combine + 2 <= ll->combines + 1)
        return fail_open(call, other);
    EP_TRY(ep_check_range(call, "n_tokens", args->n_tokens, 0, dispatch->max_tokens));
    EP_TRY(ep_check_idx_type(call, args->idx_type));
    if (args->n_tokens != dispatch->n_tokens)
        return ep_fail(EP_E_ARG, "%s: n_tokens is %d, but its dispatch had %d", call, args->n_tokens,
                       dispatch->n_tokens);
    if (args->topk && args->topk != dispatch->topk)
        return ep_fail(EP_E_ARG, "%s: topk is %d, but its dispatch had %d", call, args->topk, dispatch->topk);
    args->topk = dispatch->topk;
    EP_TRY(check_signals(ll, args, dispatch->max_tokens, &signal_bytes));
    /* A buffer may be the same for a later combine, but only ep_ll_get_combine_buffer() waits for its readers. */
    if ((args->flags & EP_LL_ZERO_COPY) && (ll->buffer_for != ll->combines + 1 || args->x != ll->buffer))
        return ep_fail(EP_E_ARG,
                       "%s: with EP_LL_ZERO_COPY x must be the buffer that ep_ll_get_combine_buffer returned "
                       "for this combine",
                       call);
    const struct ep_buffer buffers[] = {
        {"out", args->out, (int64_t)args->n_tokens * ll->config.hidden * 2, EP_ROW_ALIGN, some},
        {"wait_cost_add", args->wait_cost_add, (int64_t)ll->comm->nranks * 8, sizeof(int64_t), false},
        {"x", args->x, result_rows(ll, dispatch->max_tokens) * ll->config.hidden * 2, EP_ROW_ALIGN, true},
        {"topk_idx", args->topk_idx, (int64_t)args->n_tokens * args->topk * index, (size_t)index, some},
        {"topk_weights", args->topk_weights, (int64_t)args->n_tokens * args->topk * 4, sizeof(float), some},
        {"signals", args->signals, signal_bytes, sizeof(uint32_t), false},
    };
    return ep_check_buffers(call, buffers, 2, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_ll_combine(ep_ll *ll, const ep_ll_combine_args *args, ep_stream stream)
{
    ep_ll_combine_args mine;
    struct ep_ll_call *call;

    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, EP_CHECK_LOAD("ep_ll_combine", &mine, args, ep_ll_combine_args));
    EP_TRY_ON(ll->comm, check_combine(ll, &mine));
    EP_TRY_ON(ll->comm, EP_BACKEND_CALL(ll->comm, ll_combine, ll, &mine, stream));
    call = &ll->call[mine.call & 1];
    call->combine = ++ll->combines;
    if (mine.flags & EP_LL_RECV_HOOK) {
        call->open = EP_LL_OPEN_COMBINE;
        ll->last_open = mine.call;
    }
    return EP_OK;
}

ep_status ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args)
{
    EP_CHECK_COMM(ll, ll->comm);
    EP_SYNC(ll->comm, ep_ll_combine(ll, args, NULL));
}

/* Finds the open call; with number 0 the last one that was opened. */
static ep_status find_open(const ep_ll *ll, uint64_t number, uint64_t *ret_number)
{
    const struct ep_ll_call *call = &ll->call[(number ? number : ll->last_open) & 1];

    if (!number && !call->open)
        call = &ll->call[(call->number + 1) & 1];
    if (!number && !call->open)
        return ep_fail(EP_E_STATE, "ep_ll_finish: no call with EP_LL_RECV_HOOK is open");
    if (!call->open || (number && call->number != number))
        return ep_fail(EP_E_STATE, "ep_ll_finish: no call with EP_LL_RECV_HOOK is open for dispatch %llu",
                       (unsigned long long)number);
    *ret_number = call->number;
    return EP_OK;
}

ep_status ep_ll_finish(ep_ll *ll, uint64_t call, ep_stream stream)
{
    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, find_open(ll, call, &call));
    EP_TRY_ON(ll->comm, EP_BACKEND_CALL(ll->comm, ll_finish, ll, call, stream));
    ll->call[call & 1].open = EP_LL_CLOSED;
    return EP_OK;
}

ep_status ep_ll_finish_sync(ep_ll *ll, uint64_t call)
{
    EP_CHECK_COMM(ll, ll->comm);
    EP_SYNC(ll->comm, ep_ll_finish(ll, call, NULL));
}

ep_status ep_ll_get_combine_buffer(ep_ll *ll, void **ret_buffer)
{
    EP_CHECK_COMM(ll, ll->comm);
    EP_CHECK_GENERATION(ll);
    EP_TRY_ON(ll->comm, EP_CHECK_PTR(__func__, ret_buffer));
    EP_TRY_ON(ll->comm, EP_BACKEND_CALL(ll->comm, ll_combine_buffer, ll, ret_buffer));
    ll->buffer = *ret_buffer;
    ll->buffer_for = ll->combines + 1;
    return EP_OK;
}

ep_status ep_ll_get_mask(const ep_ll *ll, int32_t *ret_masked)
{
    EP_CHECK_COMM(ll, ll->comm);
    EP_CHECK_GENERATION(ll);
    EP_TRY_ON(ll->comm, EP_CHECK_PTR(__func__, ret_masked));
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_get_mask, ll, ret_masked));
}

static ep_status check_masking(const ep_ll *ll, const char *call)
{
    return ll->config.flags & EP_LL_MASK_DEAD
               ? EP_OK
               : ep_fail(EP_E_STATE, "%s: the ep_ll was created without EP_LL_MASK_DEAD: no rank is masked", call);
}

ep_status ep_ll_set_mask(ep_ll *ll, int rank, int on, ep_stream stream)
{
    const struct ep_ll_control control = {.kind = on ? EP_LL_CONTROL_MASK : EP_LL_CONTROL_UNMASK, .rank = rank};

    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, check_masking(ll, __func__));
    EP_TRY_ON(ll->comm, ep_check_range(__func__, "rank", rank, 0, ll->comm->nranks - 1));
    if (rank == ll->comm->rank)
        return ep_comm_record(ll->comm, ep_fail(EP_E_ARG, "%s: rank %d is this one", __func__, rank));
    if (!ep_comm_has(ll->comm, rank))
        return ep_comm_record(ll->comm, ep_fail(EP_E_ARG, "%s: rank %d is absent", __func__, rank));
    EP_TRY_ON(ll->comm, ep_check_range(__func__, "on", on, 0, 1));
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_control, ll, &control, stream));
}

ep_status ep_ll_clear_mask(ep_ll *ll, ep_stream stream)
{
    const struct ep_ll_control control = {.kind = EP_LL_CONTROL_UNMASK, .rank = -1};

    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, check_masking(ll, __func__));
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_control, ll, &control, stream));
}

ep_status ep_ll_query_mask(ep_ll *ll, int32_t *out, ep_stream stream)
{
    const struct ep_ll_control control = {.kind = EP_LL_CONTROL_QUERY, .out = out};

    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, EP_CHECK_PTR(__func__, out));
    EP_TRY_ON(ll->comm, ep_check_buffer(__func__, "out", out, false, sizeof(int32_t)));
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_control, ll, &control, stream));
}

ep_status ep_ll_merge_mask(ep_ll *ll, const ep_ll *from, ep_stream stream)
{
    const struct ep_ll_control control = {.kind = EP_LL_CONTROL_MERGE, .rank = -1, .from = from};

    EP_CHECK_CURRENT(ll);
    EP_TRY_ON(ll->comm, EP_CHECK_PTR(__func__, from));
    if (from == ll || from->comm != ll->comm)
        return ep_comm_record(ll->comm, ep_fail(EP_E_ARG, "%s: from is %s", __func__,
                                                from == ll ? "ll itself" : "of another communicator"));
    EP_CHECK_GENERATION(from);
    EP_TRY_ON(ll->comm, check_masking(ll, __func__));
    EP_TRY_ON(ll->comm, check_masking(from, __func__));
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_control, ll, &control, stream));
}

ep_status ep_ll_barrier(ep_ll *ll, ep_stream stream)
{
    const struct ep_ll_control control = {.kind = EP_LL_CONTROL_BARRIER};

    EP_CHECK_CURRENT(ll);
    return ep_comm_record(ll->comm, EP_BACKEND_CALL(ll->comm, ll_control, ll, &control, stream));
}
