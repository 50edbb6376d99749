/* SPDX-License-Identifier: Apache-2.0 */
#include "core/check.h"

/* For both operations: hidden in range, and rows of a size that the copy loops support. */
static ep_status check_rows(const char *call, int dtype, int hidden, int64_t *ret_row_bytes)
{
    int multiple = dtype == EP_F4E2M1 ? 4 * ep_scale_block(dtype, 0) : EP_SCALE_BLOCK; /* whole words of scales */
    int64_t bytes;

    EP_TRY(ep_check_range(call, "hidden", hidden, 1, EP_MAX_HIDDEN));
    bytes = ep_row_bytes(dtype, hidden);
    if (dtype != EP_BF16 && hidden % multiple)
        return ep_fail(EP_E_ARG, "%s: hidden %d of %s rows is not a multiple of %d", call, hidden,
                       ep_dtype_name((ep_dtype)dtype), multiple);
    if (bytes % EP_ROW_ALIGN)
        return ep_fail(EP_E_ALIGN, "%s: rows of hidden %d have %lld bytes, not a multiple of %d", call, hidden,
                       (long long)bytes, EP_ROW_ALIGN);
    *ret_row_bytes = bytes;
    return EP_OK;
}

/*
 * --- dispatch ---
 */

#define DISPATCH "ep_dispatch"

static ep_status check_no_scales(const ep_dispatch_args *args, const char *why)
{
    if (args->scales)
        return ep_fail(EP_E_ARG, DISPATCH ": scales with %s", why);
    if (args->scale_type)
        return ep_fail(EP_E_ARG, DISPATCH ": scale_type is %d with %s", args->scale_type, why);
    if (args->recv_scales)
        return ep_fail(EP_E_ARG, DISPATCH ": recv_scales with %s", why);
    if (args->scale_stride_token || args->scale_stride_block || args->recv_scale_stride_token ||
        args->recv_scale_stride_block)
        return ep_fail(EP_E_ARG, DISPATCH ": scale strides with %s", why);
    return EP_OK;
}

/*
 * The extent of the scales from the lowest to the highest address, including gaps. Strides may be negative: then scales
 * are before the pointer; one of them may be 0.
 */
static ep_status check_scale_extent(const ep_dispatch_args *args, int n_tokens, int64_t scales_per_row,
                                    struct ep_buffer *ret_scales)
{
    int64_t over_tokens, over_blocks, bytes, before = 0, behind = 4;

    if (n_tokens == 0)
        return EP_OK;
    if (args->scale_stride_token == 0 && args->scale_stride_block == 0) {
        *ret_scales = (struct ep_buffer){.name = "scales", .at = args->scales, .bytes = n_tokens * scales_per_row * 4};
        return EP_OK;
    }
    if (__builtin_mul_overflow(args->scale_stride_token, (int64_t)n_tokens - 1, &over_tokens) ||
        __builtin_mul_overflow(args->scale_stride_block, scales_per_row - 1, &over_blocks) ||
        __builtin_add_overflow(over_tokens, over_blocks, &bytes) || !ep_mul(bytes, 4, &bytes) ||
        !ep_mul(over_tokens, 4, &bytes) || !ep_mul(over_blocks, 4, &bytes))
        return ep_fail(EP_E_OVERFLOW, DISPATCH ": scale strides %lld and %lld over %d tokens",
                       (long long)args->scale_stride_token, (long long)args->scale_stride_block, n_tokens);
    before += over_tokens < 0 ? over_tokens * 4 : 0;
    before += over_blocks < 0 ? over_blocks * 4 : 0;
    behind += over_tokens > 0 ? over_tokens * 4 : 0;
    behind += over_blocks > 0 ? over_blocks * 4 : 0;
    if (__builtin_sub_overflow(behind, before, &bytes))
        bytes = INT64_MAX;
    *ret_scales = (struct ep_buffer){
        .name = "scales", .at = (const void *)((uintptr_t)args->scales + (uintptr_t)before), .bytes = bytes};
    return EP_OK;
}

/* Outputs and inputs of a dispatch, in the order of its fields. */
enum {
    RECV_X,
    RECV_SCALES,
    RECV_INDEX,
    RECV_WEIGHTS,
    RECV_SOURCE,
    DISPATCH_OUTPUTS,
    X = DISPATCH_OUTPUTS,
    SCALES,
    WEIGHTS,
    GLOBAL_SCALE,
    BUFFERS
};

/* *ret_bytes: from the first to the last one, including gaps. */
static ep_status check_recv_scales(const ep_dispatch_args *args, int64_t *ret_bytes)
{
    int64_t token = args->recv_scale_stride_token, block = args->recv_scale_stride_block, words = ep_scale_words(args);

    if (!token && !block)
        return ep_check_product(DISPATCH, "recv_scales", args->out_rows, words, 4, ret_bytes);
    EP_TRY(ep_check_out_strides(DISPATCH, token, block, args->out_rows, words, 0));
    *ret_bytes = args->out_rows ? ((args->out_rows - 1) * token + (words - 1) * block + 1) * 4 : 0;
    return EP_OK;
}

static bool takes_scales(int dtype, int type)
{
    return type == EP_I32 ||
           (dtype == EP_F4E2M1 ? type == EP_F8E4M3 : type == EP_F32 || type == EP_UE8M0 || type == EP_UE8M0_32);
}

/* What is quantised has no scales yet. */
static ep_status check_quantize(const ep_dispatch_args *args)
{
    bool quantizes = args->flags & EP_DISPATCH_QUANTIZE;

    if (args->global_scale && (!quantizes || args->dtype != EP_F4E2M1))
        return ep_fail(EP_E_ARG, DISPATCH ": global_scale %s",
                       quantizes ? "is for EP_F4E2M1" : "without EP_DISPATCH_QUANTIZE");
    if (quantizes && (args->dtype == EP_BF16 || !args->scale_type || args->scale_type == EP_I32))
        return ep_fail(EP_E_ARG,
                       DISPATCH ": EP_DISPATCH_QUANTIZE with dtype %d (%s) and scale_type %d: rows of fp8 or "
                                "fp4 are made, with scales of a known type",
                       args->dtype, ep_dtype_name((ep_dtype)args->dtype), args->scale_type);
    if (quantizes && (args->scales || args->scale_stride_token || args->scale_stride_block))
        return ep_fail(EP_E_ARG, DISPATCH ": scales with EP_DISPATCH_QUANTIZE, which makes them");
    return EP_OK;
}

/* `scale_type` decides whether there are scales: a rank without tokens may have no pointer. */
static ep_status check_scales(const ep_dispatch_args *args, int n_tokens, struct ep_buffer *buffers)
{
    int64_t bytes = 0;

    EP_TRY(check_quantize(args));
    if (args->flags & EP_DISPATCH_QUANTIZE)
        n_tokens = 0; /* no scales are read */
    if (args->scale_type != EP_I32 && args->scale_words)
        return ep_fail(EP_E_ARG, DISPATCH ": scale_words is %d with scale_type %d, not EP_I32", args->scale_words,
                       args->scale_type);
    if (args->dtype == EP_BF16 && args->scale_type != EP_I32)
        return check_no_scales(args, "rows that are not fp8");
    if (!args->scales && (!args->scale_type || n_tokens))
        return check_no_scales(args, "no scales given");
    if (!takes_scales(args->dtype, args->scale_type))
        return ep_fail(EP_E_ARG, DISPATCH ": scale_type is %d (%s), %s", args->scale_type,
                       ep_dtype_name((ep_dtype)args->scale_type),
                       args->dtype == EP_F4E2M1 ? "neither EP_F8E4M3 nor EP_I32 with EP_F4E2M1"
                                                : "none of EP_F32, EP_UE8M0, EP_UE8M0_32 and EP_I32");
    if (args->scale_type == EP_UE8M0 && args->hidden % (4 * EP_SCALE_BLOCK))
        return ep_fail(EP_E_ARG, DISPATCH ": hidden %d with EP_UE8M0 scales is not a multiple of %d", args->hidden,
                       4 * EP_SCALE_BLOCK);
    if (args->scale_type == EP_I32)
        EP_TRY(ep_check_range(DISPATCH, "scale_words", args->scale_words, 1, EP_MAX_SCALE_WORDS));
    EP_TRY(ep_check_buffer(DISPATCH, "scales", args->scales, n_tokens == 0, EP_ROW_ALIGN));
    EP_TRY(check_recv_scales(args, &bytes));
    buffers[RECV_SCALES] =
        (struct ep_buffer){"recv_scales", args->recv_scales, bytes, EP_ROW_ALIGN, args->out_rows > 0};
    return check_scale_extent(args, n_tokens, ep_scale_words(args), &buffers[SCALES]);
}

/*
 * Strided scales may have gaps, and an output may lie in one: only if an output overlaps their extent, each scale is
 * compared.
 */
static ep_status check_strided_scales(const ep_dispatch_args *args, int n_tokens, const struct ep_buffer *buffers)
{
    int64_t per_row = ep_scale_words(args);

    for (int output = 0; output < DISPATCH_OUTPUTS; output++) {
        struct ep_buffer both[] = {buffers[output], buffers[SCALES]};

        if (ep_check_no_overlap(DISPATCH, both, 1, 2) == EP_OK)
            continue;
        both[1].bytes = sizeof(uint32_t);
        for (int64_t t = 0; t < n_tokens; t++)
            for (int64_t b = 0; b < per_row; b++) {
                int64_t at = (t * args->scale_stride_token + b * args->scale_stride_block) * 4;

                both[1].at = (const void *)((uintptr_t)args->scales + (uintptr_t)at);
                EP_TRY(ep_check_no_overlap(DISPATCH, both, 1, 2));
            }
    }
    return EP_OK;
}

static ep_status check_topk(const ep_plan *plan, const ep_dispatch_args *args, int n_tokens, struct ep_buffer *buffers)
{
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    int64_t index_bytes = (int64_t)ep_dtype_bytes((ep_dtype)plan->args.idx_type), bytes = 0;

    if (plan->from_mask && (args->recv_topk_idx || args->topk_weights || args->recv_topk_weights))
        return ep_fail(EP_E_ARG, DISPATCH ": %s, but a plan from a mask has no choices",
                       args->recv_topk_idx  ? "recv_topk_idx"
                       : args->topk_weights ? "topk_weights"
                                            : "recv_topk_weights");
    if (args->recv_topk_idx && expanded)
        return ep_fail(EP_E_ARG, DISPATCH ": recv_topk_idx must be NULL in the expanded layout");
    if (args->recv_topk_weights && !args->topk_weights && n_tokens)
        return ep_fail(EP_E_ARG, DISPATCH ": recv_topk_weights without topk_weights");
    if (args->recv_topk_idx)
        EP_TRY(ep_check_product(DISPATCH, "recv_topk_idx", args->out_rows, plan->args.topk, index_bytes, &bytes));
    buffers[RECV_INDEX] = (struct ep_buffer){"recv_topk_idx", args->recv_topk_idx, bytes, EP_ROW_ALIGN, false};
    if (args->recv_topk_weights)
        EP_TRY(
            ep_check_product(DISPATCH, "recv_topk_weights", args->out_rows, expanded ? 1 : plan->args.topk, 4, &bytes));
    buffers[RECV_WEIGHTS] =
        (struct ep_buffer){"recv_topk_weights", args->recv_topk_weights, bytes, EP_ROW_ALIGN, false};
    buffers[WEIGHTS] = (struct ep_buffer){"topk_weights", args->topk_weights, (int64_t)n_tokens * plan->args.topk * 4,
                                          EP_ROW_ALIGN, false};
    return EP_OK;
}

/* Where rows do not carry their sources, metadata writes recv_source, all of it. */
static bool carries_sources(const ep_plan *plan)
{
    return plan->comm->ops->rows_carry_sources && plan->comm->nnodes == 1;
}

static ep_status check_source(const ep_plan *plan, ep_dispatch_args *args, int n_tokens, struct ep_buffer *ret_source)
{
    int64_t bytes = 0, rows = ep_plan_info_now(plan)->out_rows;

    if (!args->recv_source && args->source_stride)
        return ep_fail(EP_E_ARG, DISPATCH ": source_stride is %d without recv_source", args->source_stride);
    if (args->recv_source && plan->args.flags & EP_PLAN_EXPANDED)
        return ep_fail(EP_E_ARG, DISPATCH ": recv_source must be NULL in the expanded layout, where "
                                          "ep_plan_get_metadata() writes it");
    if (args->recv_source && args->out_rows < rows && !carries_sources(plan))
        return ep_fail(EP_E_CAPACITY, DISPATCH ": out_rows is %lld, but recv_source has %lld elements",
                       (long long)args->out_rows, (long long)rows);
    if (args->recv_source) {
        EP_TRY(ep_plan_check_stride(DISPATCH, plan, n_tokens, &args->source_stride));
        EP_TRY(ep_check_product(DISPATCH, "recv_source", args->out_rows, sizeof(int32_t), 1, &bytes));
    }
    *ret_source = (struct ep_buffer){"recv_source", args->recv_source, bytes, sizeof(int32_t), false};
    return EP_OK;
}

static ep_status check_dispatch(const ep_plan *plan, ep_dispatch_args *args, ep_stream stream)
{
    const ep_plan_info *info = ep_plan_info_now(plan);
    int64_t row_bytes = 0, out_bytes = 0, rows = info->n_recv >= 0 ? info->n_recv : info->out_rows;
    int n_tokens = ep_plan_tokens_in(plan, stream);
    struct ep_buffer buffers[BUFFERS] = {{.name = NULL}};

    EP_TRY(ep_check_flags(DISPATCH, args->flags, EP_DISPATCH_QUANTIZE));
    if (args->dtype != EP_BF16 && args->dtype != EP_F8E4M3 && args->dtype != EP_F4E2M1)
        return ep_fail(EP_E_ARG, DISPATCH ": dtype is %d (%s), none of EP_BF16, EP_F8E4M3 and EP_F4E2M1", args->dtype,
                       ep_dtype_name((ep_dtype)args->dtype));
    EP_TRY(check_rows(DISPATCH, args->dtype, args->hidden, &row_bytes));
    if (args->out_rows < 0)
        return ep_fail(EP_E_ARG, DISPATCH ": out_rows is %lld", (long long)args->out_rows);
    /* A captured operation uses the counts of later updates. */
    if (args->out_rows < info->out_rows && ep_is_capturing(plan->comm, stream))
        rows = info->out_rows;
    if (args->out_rows < rows)
        return ep_fail(EP_E_CAPACITY, DISPATCH ": out_rows is %lld, but the plan has %lld rows for this rank",
                       (long long)args->out_rows, (long long)rows);
    EP_TRY(ep_check_product(DISPATCH, "recv_x", args->out_rows, row_bytes, 1, &out_bytes));
    buffers[RECV_X] = (struct ep_buffer){"recv_x", args->recv_x, out_bytes, EP_ROW_ALIGN, args->out_rows > 0};
    if (args->flags & EP_DISPATCH_QUANTIZE)
        row_bytes = ep_row_bytes(EP_BF16, args->hidden);
    buffers[X] = (struct ep_buffer){"x", args->x, n_tokens * row_bytes, EP_ROW_ALIGN, n_tokens > 0};
    buffers[GLOBAL_SCALE] = (struct ep_buffer){"global_scale", args->global_scale, sizeof(float), sizeof(float), false};
    EP_TRY(check_scales(args, n_tokens, buffers));
    EP_TRY(check_topk(plan, args, n_tokens, buffers));
    EP_TRY(check_source(plan, args, n_tokens, &buffers[RECV_SOURCE]));
    if (args->scale_stride_token || args->scale_stride_block) {
        EP_TRY(check_strided_scales(args, n_tokens, buffers));
        buffers[SCALES].bytes = 0;
    }
    return ep_check_buffers(DISPATCH, buffers, DISPATCH_OUTPUTS, BUFFERS);
}

/* The ranks exchange the sources after the dispatch. */
static ep_status dispatch_then_sources(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream)
{
    ep_plan_metadata sources = EP_PLAN_METADATA_INIT;
    bool blocking = plan->comm->blocking;
    ep_dispatch_args rows = *args;
    ep_status status;

    sources.recv_source = args->recv_source;
    sources.source_stride = args->source_stride;
    rows.recv_source = NULL;
    rows.source_stride = 0;
    EP_TRY(EP_BACKEND_CALL(plan->comm, dispatch, plan, &rows, stream));
    /* Queued also in a _sync call: rows have moved, so that a failure, such as a stride that is too small, is the
     * group's. */
    plan->comm->blocking = false;
    status = EP_BACKEND_CALL(plan->comm, plan_metadata, plan, &sources, stream);
    plan->comm->blocking = blocking;
    return status;
}

ep_status ep_dispatch(ep_plan *plan, const ep_dispatch_args *args, ep_stream stream)
{
    ep_dispatch_args mine;
    ep_status status;

    EP_CHECK_CURRENT(plan);
    EP_TRY_ON(plan->comm, EP_CHECK_LOAD(DISPATCH, &mine, args, ep_dispatch_args));
    EP_TRY_ON(plan->comm, check_dispatch(plan, &mine, stream));
    if (mine.recv_source && !carries_sources(plan))
        status = dispatch_then_sources(plan, &mine, stream);
    else
        status = EP_BACKEND_CALL(plan->comm, dispatch, plan, &mine, stream);
    return ep_comm_record(plan->comm, status);
}

ep_status ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args)
{
    EP_CHECK_COMM(plan, plan->comm);
    EP_SYNC(plan->comm, ep_dispatch(plan, args, NULL));
}

/*
 * --- combine ---
 */

#define COMBINE "ep_combine"

static ep_status check_combine_weights(const ep_plan *plan, const ep_combine_args *args, int n_tokens, int64_t rows,
                                       struct ep_buffer *ret_in, struct ep_buffer *ret_out)
{
    bool expanded = plan->args.flags & EP_PLAN_EXPANDED;
    int64_t bytes = 0;

    if (plan->from_mask && (args->topk_weights || args->out_topk_weights))
        return ep_fail(EP_E_ARG, COMBINE ": %s, but a plan from a mask has no choices",
                       args->topk_weights ? "topk_weights" : "out_topk_weights");
    if (!args->topk_weights != !args->out_topk_weights)
        return ep_fail(EP_E_ARG, COMBINE ": %s",
                       args->topk_weights ? "topk_weights without out_topk_weights"
                                          : "out_topk_weights without topk_weights");
    if (args->topk_weights)
        EP_TRY(ep_check_product(COMBINE, "topk_weights", rows, expanded ? 1 : plan->args.topk, 4, &bytes));
    *ret_in = (struct ep_buffer){"topk_weights", args->topk_weights, bytes, EP_ROW_ALIGN, false};
    *ret_out = (struct ep_buffer){"out_topk_weights", args->out_topk_weights, (int64_t)n_tokens * plan->args.topk * 4,
                                  EP_ROW_ALIGN, false};
    return EP_OK;
}

static ep_status check_combine(const ep_plan *plan, const ep_combine_args *args, int n_tokens)
{
    int64_t rows =
        ep_plan_info_now(plan)->n_recv >= 0 ? ep_plan_info_now(plan)->n_recv : ep_plan_info_now(plan)->out_rows;
    int64_t row_bytes = 0, x_bytes = 0;
    struct ep_buffer weights, out_weights;

    EP_TRY(ep_check_flags(COMBINE, args->flags, EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL));
    if ((args->flags & EP_COMBINE_ROUND_PARTIAL) && !(args->flags & EP_COMBINE_BY_CHOICE))
        return ep_fail(EP_E_ARG, COMBINE ": EP_COMBINE_ROUND_PARTIAL without EP_COMBINE_BY_CHOICE");
    if (args->flags == EP_COMBINE_BY_CHOICE && plan->comm->nnodes > 1)
        return ep_fail(EP_E_UNSUPPORTED,
                       COMBINE
                       ": EP_COMBINE_BY_CHOICE without EP_COMBINE_ROUND_PARTIAL on %d nodes, which send sums of "
                       "their rows",
                       plan->comm->nnodes);
    EP_TRY(ep_check_reserved(COMBINE, args->reserved));
    if (args->dtype != EP_BF16)
        return ep_fail(EP_E_ARG, COMBINE ": dtype is %d (%s), not EP_BF16", args->dtype,
                       ep_dtype_name((ep_dtype)args->dtype));
    EP_TRY(check_rows(COMBINE, args->dtype, args->hidden, &row_bytes));
    EP_TRY(ep_check_product(COMBINE, "x", rows, row_bytes, 1, &x_bytes));
    EP_TRY(check_combine_weights(plan, args, n_tokens, rows, &weights, &out_weights));
    const int64_t out_bytes = n_tokens * row_bytes;
    const struct ep_buffer buffers[] = {{"out", args->out, out_bytes, EP_ROW_ALIGN, n_tokens > 0},
                                        out_weights,
                                        {"x", args->x, x_bytes, EP_ROW_ALIGN, rows > 0},
                                        weights,
                                        {"bias[0]", args->bias[0], out_bytes, EP_ROW_ALIGN, false},
                                        {"bias[1]", args->bias[1], out_bytes, EP_ROW_ALIGN, false}};
    return ep_check_buffers(COMBINE, buffers, 2, sizeof(buffers) / sizeof(buffers[0]));
}

ep_status ep_combine(ep_plan *plan, const ep_combine_args *args, ep_stream stream)
{
    ep_combine_args mine;

    EP_CHECK_CURRENT(plan);
    EP_TRY_ON(plan->comm, EP_CHECK_LOAD(COMBINE, &mine, args, ep_combine_args));
    EP_TRY_ON(plan->comm, check_combine(plan, &mine, ep_plan_tokens_in(plan, stream)));
    return ep_comm_record(plan->comm, EP_BACKEND_CALL(plan->comm, combine, plan, &mine, stream));
}

ep_status ep_combine_sync(ep_plan *plan, const ep_combine_args *args)
{
    EP_CHECK_COMM(plan, plan->comm);
    EP_SYNC(plan->comm, ep_combine(plan, args, NULL));
}
