/* SPDX-License-Identifier: Apache-2.0 */
/* The argument checks of ep_dispatch and ep_combine, with a mock that must not be called with bad input. */
#include "bad_args.h"

#include <limits.h>

/* --- dispatch --- */

static ep_status run_dispatch(const void *args)
{
    return ep_dispatch(plan, args, NULL);
}

#define D(field, value) SET(ep_dispatch_args, field, value)

TEST_WITH(dispatch_refuses_bad_arguments, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{D(size, 40)}, EP_E_ABI, "size is 40"},
        {{D(x, 0)}, EP_E_ARG, "x is NULL"},
        {{D(x, 0x100008)}, EP_E_ALIGN, "x is 0x100008, not aligned to 16"},
        {{D(dtype, 0)}, EP_E_ARG, "dtype is 0"},
        {{D(dtype, EP_F32)}, EP_E_ARG, "dtype is 3 (f32), none of EP_BF16, EP_F8E4M3 and EP_F4E2M1"},
        {{D(dtype, -1)}, EP_E_ARG, "dtype is -1"},
        {{D(hidden, 0)}, EP_E_ARG, "hidden is 0"},
        {{D(hidden, -128)}, EP_E_ARG, "hidden is -128"},
        {{D(hidden, EP_MAX_HIDDEN + 128)}, EP_E_ARG, "hidden is 65664"},
        {{D(hidden, 1040)}, EP_E_ARG, "hidden 1040 of fp8 rows is not a multiple of 128"},
        {{D(scales, 0)}, EP_E_ARG, "scale_type is 3 with no scales given"},
        {{D(scales, 0), D(scale_type, 0)}, EP_E_ARG, "recv_scales with no scales given"},
        {{D(scales, 0x200004)}, EP_E_ALIGN, "scales"},
        {{D(scale_type, 0)}, EP_E_ARG, "scale_type is 0"},
        {{D(scale_type, EP_BF16)}, EP_E_ARG, "scale_type is 1 (bf16), none of EP_F32, EP_UE8M0"},
        {{D(scale_type, EP_F8E4M3)}, EP_E_ARG, "scale_type is 2 (fp8), none of"},
        {{D(dtype, EP_F4E2M1)}, EP_E_ARG, "scale_type is 3 (f32), neither EP_F8E4M3 nor EP_I32 with EP_F4E2M1"},
        {{D(dtype, EP_F4E2M1), D(scale_type, EP_F8E4M3), D(hidden, 1056)},
         EP_E_ARG,
         "hidden 1056 of fp4 rows is not a multiple of 64"},
        {{D(dtype, EP_F4E2M1), D(scale_type, EP_F8E4M3), D(scale_words, 8)}, EP_E_ARG, "not EP_I32"},
        {{D(scale_type, EP_UE8M0), D(hidden, 1152)},
         EP_E_ARG,
         "hidden 1152 with EP_UE8M0 scales is not a multiple of 512"},
        {{D(scale_words, 8)}, EP_E_ARG, "scale_words is 8 with scale_type 3, not EP_I32"},
        {{D(flags, EP_DISPATCH_QUANTIZE)}, EP_E_ARG, "scales with EP_DISPATCH_QUANTIZE"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(scale_stride_token, 8)}, EP_E_ARG, "which makes them"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(scale_type, 0)},
         EP_E_ARG,
         "scale_type 0: rows of fp8 or fp4"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(scale_type, EP_I32), D(scale_words, 8)},
         EP_E_ARG,
         "scale_type 4: rows"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(dtype, EP_BF16)}, EP_E_ARG, "with dtype 1 (bf16)"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(recv_scales, 0)}, EP_E_ARG, "recv_scales is NULL"},
        {{D(flags, EP_DISPATCH_QUANTIZE), D(scales, 0), D(global_scale, 0x900000)}, EP_E_ARG, "is for EP_F4E2M1"},
        {{D(global_scale, 0x900000)}, EP_E_ARG, "global_scale without EP_DISPATCH_QUANTIZE"},
        {{D(scale_type, EP_I32)}, EP_E_ARG, "scale_words is 0"},
        {{D(scale_type, EP_I32), D(scale_words, EP_MAX_SCALE_WORDS + 1)}, EP_E_ARG, "scale_words is 16385"},
        {{D(recv_scale_stride_token, 8)}, EP_E_ARG, "strides 8 (token) and 0 (block) of recv_scales"},
        {{D(recv_scale_stride_token, 7), D(recv_scale_stride_block, 1)}, EP_E_ARG, "the same address"},
        {{D(recv_scale_stride_token, 1), D(recv_scale_stride_block, INT64_MAX / 8)}, EP_E_OVERFLOW, "of recv_scales"},
        {{D(scale_stride_token, INT64_MAX)}, EP_E_OVERFLOW, "scale strides"},
        {{D(scale_stride_token, INT64_MIN)}, EP_E_OVERFLOW, "scale strides"},
        {{D(scale_stride_block, INT64_MAX / 2)}, EP_E_OVERFLOW, "scale strides"},
        {{D(scale_stride_block, INT64_MAX / 8)}, EP_E_OVERFLOW, "scale strides"},
        /* The sum of both offsets is small, but each of them overflows. */
        {{D(scale_stride_token, INT64_MAX / 36 + 100), D(scale_stride_block, -1000)}, EP_E_OVERFLOW, "strides"},
        {{D(scale_stride_block, INT64_MAX / 28 + 100), D(scale_stride_token, -1000)}, EP_E_OVERFLOW, "strides"},
        {{D(topk_weights, 0)}, EP_E_ARG, "recv_topk_weights without topk_weights"},
        {{D(topk_weights, 0x300004)}, EP_E_ALIGN, "topk_weights"},
        {{D(recv_x, 0)}, EP_E_ARG, "recv_x is NULL"},
        {{D(recv_x, 0x400001)}, EP_E_ALIGN, "recv_x"},
        {{D(recv_x, 0x100000)}, EP_E_ARG, "recv_x overlaps x"},
        {{D(recv_x, 0x1027f0)}, EP_E_ARG, "recv_x overlaps x"},
        {{D(recv_x, 0x100000 - 0x4ff0)}, EP_E_ARG, "recv_x overlaps x"},
        {{D(recv_scales, 0)}, EP_E_ARG, "recv_scales is NULL"},
        {{D(recv_scales, 0x500004)}, EP_E_ALIGN, "recv_scales"},
        {{D(recv_topk_idx, 0x600008)}, EP_E_ALIGN, "recv_topk_idx"},
        {{D(recv_topk_weights, 0x700004)}, EP_E_ALIGN, "recv_topk_weights"},
        {{D(out_rows, -1)}, EP_E_ARG, "out_rows is -1"},
        {{D(out_rows, 19)}, EP_E_CAPACITY, "out_rows is 19, but the plan has 20"},
        {{D(out_rows, 0)}, EP_E_CAPACITY, "out_rows is 0, but the plan has 20"},
        {{D(out_rows, INT64_MAX)}, EP_E_OVERFLOW, "recv_x"},
        {{D(out_rows, INT64_MAX / 1024 + 1)}, EP_E_OVERFLOW, "recv_x"},
        {{D(flags, 2)}, EP_E_ARG, "flags has unknown bits 0x2"},
        {{D(source_stride, 10)}, EP_E_ARG, "source_stride is 10 without recv_source"},
        {{D(recv_source, 0x900000)}, EP_E_ARG, "source_stride is 0, and the plan was created without max_tokens"},
        {{D(recv_source, 0x900000), D(source_stride, 9)}, EP_E_ARG, "source_stride is 9"},
        {{D(recv_source, 0x900000), D(source_stride, INT32_MAX)}, EP_E_OVERFLOW, "of source_stride 2147483647 tokens"},
        {{D(recv_source, 0x900002), D(source_stride, 10)}, EP_E_ALIGN, "recv_source"},
        {{D(recv_source, 0x100000), D(source_stride, 10)}, EP_E_ARG, "recv_source overlaps x"},
    };
    ep_dispatch_args good = good_dispatch();

    open_plan(0, 10, 20, 20);
    RUN_CASES("ep_dispatch", run_dispatch, &good, cases);
    /* fp8 without any scales. */
    good.scales = NULL;
    good.recv_scales = NULL;
    good.scale_type = 0;
    assert_int_equal(run_dispatch(&good), EP_OK);
}

TEST_WITH(bf16_dispatch_takes_no_scales, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{D(scales, 0x200000)}, EP_E_ARG, "scales with rows that are not fp8"},
        {{D(scale_type, EP_F32)}, EP_E_ARG, "scale_type is 3 with rows"},
        {{D(recv_scales, 0x500000)}, EP_E_ARG, "recv_scales with rows"},
        {{D(scale_stride_token, 1)}, EP_E_ARG, "scale strides with rows"},
        {{D(scale_stride_block, 1)}, EP_E_ARG, "scale strides with rows"},
        {{D(hidden, 1023)}, EP_E_ALIGN, "rows of hidden 1023 have 2046 bytes"},
        {{D(hidden, 1020)}, EP_E_ALIGN, "rows of hidden 1020 have 2040 bytes"},
        /* Rows are twice as long as those of fp8. */
        {{D(recv_x, 0x104ff0)}, EP_E_ARG, "recv_x overlaps x"},
    };
    ep_dispatch_args good = good_dispatch();

    open_plan(0, 10, 20, 20);
    good.dtype = EP_BF16;
    good.scales = NULL;
    good.recv_scales = NULL;
    good.scale_type = 0;
    RUN_CASES("ep_dispatch", run_dispatch, &good, cases);
    good.hidden = 8;
    assert_int_equal(run_dispatch(&good), EP_OK);
    good.hidden = 1024;
    good.recv_x = (void *)AT(0x105000);
    assert_int_equal(run_dispatch(&good), EP_OK);
}

TEST_WITH(expanded_dispatch_has_no_index, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{D(recv_topk_idx, 0x600000)}, EP_E_ARG, "recv_topk_idx must be NULL in the expanded layout"},
        {{D(recv_source, 0x900000), D(source_stride, 10)}, EP_E_ARG, "recv_source must be NULL in the expanded layout"},
    };
    ep_dispatch_args good = good_dispatch();

    open_plan(EP_PLAN_EXPANDED, 10, 20, 20);
    good.recv_topk_idx = NULL;
    RUN_CASES("ep_dispatch", run_dispatch, &good, cases);
}

/* A rank without tokens or rows needs no buffers, but its scale_type says that the others have scales. */
TEST_WITH(nothing_needs_no_buffers, open_comm, close_comm)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;

    open_plan(0, 0, 0, 0);
    args.dtype = EP_F8E4M3;
    args.hidden = 512;
    args.scale_type = EP_UE8M0;
    args.recv_topk_weights = (float *)AT(0x700000);
    assert_int_equal(run_dispatch(&args), EP_OK);
    combine.dtype = EP_BF16;
    combine.hidden = 512;
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_OK);
    open_plan(0, 1, 1, 1);
    assert_int_equal(run_dispatch(&args), EP_E_CAPACITY);
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_E_ARG);
}

/* Strides may have any value within 64 bits: broadcast, column-major, backwards. */
TEST_WITH(odd_scale_strides_are_fine, open_comm, close_comm)
{
    static const int64_t strides[][2] = {{0, 1}, {1, 10}, {8, 0}, {-8, 1}, {100, -1}};
    ep_dispatch_args args = good_dispatch();

    open_plan(0, 10, 20, 20);
    for (size_t i = 0; i < sizeof(strides) / sizeof(strides[0]); i++) {
        args.scale_stride_token = strides[i][0];
        args.scale_stride_block = strides[i][1];
        assert_int_equal(run_dispatch(&args), EP_OK);
        assert_true(mock.dispatch.scale_stride_token == strides[i][0]);
    }
}

/* As in a column-major, padded array of few rows: with one row or none, strides need not separate rows. */
TEST_WITH(few_rows_have_any_strides, open_comm, close_comm)
{
    static const struct {
        int64_t rows, token, block;
        ep_status status;
    } cases[] = {{0, 1, 0, EP_OK},    {0, 1, 1, EP_OK},    {0, 9, 1, EP_OK},    {1, 1, 1, EP_OK}, {1, 1, 4, EP_OK},
                 {1, 1, 0, EP_E_ARG}, {1, 0, 1, EP_E_ARG}, {2, 1, 1, EP_E_ARG}, {2, 1, 2, EP_OK}};
    ep_dispatch_args args = good_dispatch();

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        open_plan(0, 10, cases[i].rows, cases[i].rows);
        args.out_rows = cases[i].rows;
        args.recv_scale_stride_token = cases[i].token;
        args.recv_scale_stride_block = cases[i].block;
        assert_int_equal(run_dispatch(&args), cases[i].status);
    }
}

/* --- combine --- */

static ep_status run_combine(const void *args)
{
    return ep_combine(plan, args, NULL);
}

#define C(field, value) SET(ep_combine_args, field, value)

TEST_WITH(combine_refuses_bad_arguments, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{C(size, 0)}, EP_E_ABI, "size is 0"},
        {{C(reserved, 1)}, EP_E_ARG, "reserved is 1"},
        {{C(x, 0)}, EP_E_ARG, "x is NULL"},
        {{C(x, 0x100004)}, EP_E_ALIGN, "x is 0x100004"},
        {{C(dtype, EP_F8E4M3)}, EP_E_ARG, "dtype is 2 (fp8), not EP_BF16"},
        {{C(dtype, 0)}, EP_E_ARG, "dtype is 0"},
        {{C(hidden, 0)}, EP_E_ARG, "hidden is 0"},
        {{C(hidden, EP_MAX_HIDDEN + 8)}, EP_E_ARG, "hidden is 65544"},
        {{C(hidden, 12)}, EP_E_ALIGN, "rows of hidden 12"},
        {{C(topk_weights, 0)}, EP_E_ARG, "out_topk_weights without topk_weights"},
        {{C(out_topk_weights, 0)}, EP_E_ARG, "topk_weights without out_topk_weights"},
        {{C(topk_weights, 0x200004)}, EP_E_ALIGN, "topk_weights"},
        {{C(out_topk_weights, 0x500004)}, EP_E_ALIGN, "out_topk_weights"},
        {{C(bias[0], 0x300002)}, EP_E_ALIGN, "bias[0]"},
        {{C(bias[1], 0x310002)}, EP_E_ALIGN, "bias[1]"},
        {{C(out, 0)}, EP_E_ARG, "out is NULL"},
        {{C(out, 0x400002)}, EP_E_ALIGN, "out is"},
        {{C(out, 0x100000)}, EP_E_ARG, "out overlaps x"},
        {{C(out, 0x109ff0)}, EP_E_ARG, "out overlaps x"},
        {{C(out, 0x100000 - 0x4ff0)}, EP_E_ARG, "out overlaps x"},
        {{C(flags, 2)}, EP_E_ARG, "flags has unknown bits 0x2"},
        {{C(flags, EP_COMBINE_ROUND_PARTIAL)}, EP_E_ARG, "EP_COMBINE_ROUND_PARTIAL without EP_COMBINE_BY_CHOICE"},
    };
    ep_combine_args good = good_combine();

    open_plan(0, 10, 20, 20);
    RUN_CASES("ep_combine", run_combine, &good, cases);
    /* Adjacent buffers do not overlap; weights and biases are optional. */
    good.out = (void *)AT(0x10a000);
    assert_int_equal(run_combine(&good), EP_OK);
    good.out = (void *)AT(0x100000 - 0x5000);
    good.topk_weights = NULL;
    good.out_topk_weights = NULL;
    good.bias[0] = NULL;
    assert_int_equal(run_combine(&good), EP_OK);
    /* Rows beyond the address space. */
    open_plan(0, 10, INT64_MAX / 2048 + 1, INT64_MAX);
    assert_int_equal(run_combine(&good), EP_E_OVERFLOW);
}

/* --- events --- */

TEST_WITH(events_belong_to_their_communicator, open_comm, close_comm)
{
    ep_dispatch_args dispatch = good_dispatch();
    ep_comm other_comm = {.nranks = 1};
    ep_event other_event = {.comm = &other_comm}, *event = NULL, *own = NULL;
    int done = 0;

    open_plan(0, 10, 20, 20);
    mock.calls = 0;
    assert_fails(ep_stream_wait(comm, NULL, &other_event), EP_E_ARG,
                 "ep_stream_wait: event is of another communicator");
    assert_int_equal(ep_stream_wait(comm, NULL, NULL), EP_E_ARG);
    assert_int_equal(ep_stream_call(comm, NULL, NULL, NULL), EP_E_ARG);
    assert_int_equal(mock.calls, 0);

    assert_int_equal(ep_event_new(comm, &own), EP_OK);
    assert_int_equal(ep_stream_wait(comm, &mock, own), EP_OK);
    assert_ptr_equal(mock.stream, &mock);
    assert_int_equal(ep_dispatch(plan, &dispatch, own), EP_OK);
    assert_ptr_equal(mock.stream, own);
    assert_int_equal(ep_event_record(comm, comm, &event), EP_OK);
    assert_ptr_equal(mock.stream, comm);
    assert_int_equal(comm->live, 3);
    assert_int_equal(ep_event_query(event, NULL), EP_E_ARG);
    assert_int_equal(ep_event_query(event, &done), EP_OK);
    assert_int_equal(done, 1);
    assert_int_equal(ep_event_wait(event, -1), EP_OK);
    assert_int_equal(mock.event_timeout_ms, -1);
    assert_int_equal(ep_event_wait(event, 0), EP_OK);
    assert_int_equal(mock.event_timeout_ms, 0);
    ep_event_free(event);
    ep_event_free(own);
    assert_int_equal(comm->live, 1);
}

/* A _sync form is the call in the stream NULL and a wait; the backend knows that nothing is called between them. */
TEST_WITH(blocking_forms_wait, open_comm, close_comm)
{
    ep_dispatch_args dispatch = good_dispatch();
    ep_combine_args combine = good_combine();

    open_plan(0, 10, 20, 20);
    mock.calls = 0;
    assert_int_equal(ep_dispatch_sync(plan, &dispatch), EP_OK);
    assert_int_equal(mock.calls, 2);
    assert_true(mock.was_blocking);
    assert_false(comm->blocking);
    assert_int_equal(ep_combine(plan, &combine, NULL), EP_OK);
    assert_int_equal(mock.calls, 3);
    assert_false(mock.was_blocking);
    assert_int_equal(ep_combine_sync(plan, &combine), EP_OK);
    assert_int_equal(mock.calls, 5);
    /* If the call fails, there is no wait. */
    mock.answer = EP_E_MEMORY;
    assert_int_equal(ep_combine_sync(plan, &combine), EP_E_MEMORY);
    assert_int_equal(mock.calls, 6);
    assert_false(comm->blocking);
    mock.answer = EP_OK;
}
