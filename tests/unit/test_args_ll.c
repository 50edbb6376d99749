/* SPDX-License-Identifier: Apache-2.0 */
/* The argument and state checks of the low-latency calls, with a mock that must not be called with bad input. */
#include "bad_args.h"

#include <limits.h>

/* --- low latency --- */

static ep_status run_ll_new(const void *config)
{
    ep_ll *made = NULL;
    ep_status status = ep_ll_new(comm, config, &made);

    assert_int_equal(made != NULL, status == EP_OK);
    ep_ll_free(made);
    return status;
}

TEST_WITH(ll_refuses_bad_configurations, open_comm, close_comm)
{
#define L(field, value) SET(ep_ll_config, field, value)
    const struct bad cases[] = {
        {{L(size, 4)}, EP_E_ABI, "size is 4"},
        {{L(max_tokens, 0)}, EP_E_ARG, "max_tokens is 0"},
        {{L(max_tokens, -1)}, EP_E_ARG, "max_tokens is -1"},
        {{L(max_tokens, INT32_MAX)}, EP_E_OVERFLOW, "int32"},
        {{L(hidden, 0)}, EP_E_ARG, "hidden is 0"},
        {{L(hidden, 64)}, EP_E_ARG, "hidden 64 is not a multiple of 128"},
        {{L(hidden, EP_MAX_HIDDEN + 128)}, EP_E_ARG, "hidden is 65664"},
        {{L(n_experts, 15)}, EP_E_ARG, "n_experts 15 is not a multiple of the 4 ranks"},
        {{L(n_experts, 0)}, EP_E_ARG, "n_experts is 0"},
        {{L(n_experts, EP_MAX_EXPERTS * 2)}, EP_E_ARG, "n_experts is 8192"},
        {{L(topk, 0)}, EP_E_ARG, "topk is 0"},
        {{L(topk, 65)}, EP_E_ARG, "topk is 65"},
        {{L(reserved, 1)}, EP_E_ARG, "reserved is 1"},
        {{L(flags, EP_LL_MASK_DEAD | EP_LL_NO_PARTIAL_REDUCE)}, EP_E_ARG, "flags has unknown bits 0x1000"},
    };
    ep_ll_config good = good_ll();

    RUN_CASES("ep_ll_new", run_ll_new, &good, cases);
}

static ep_status run_ll_dispatch(const void *args)
{
    ep_status status = ep_ll_dispatch(ll, args, NULL);

    /* As if it had been combined, so that the next case starts from the same state. */
    ll->dispatches = 0;
    memset(ll->call, 0, sizeof(ll->call));
    return status;
}

#define LD(field, value) SET(ep_ll_dispatch_args, field, value)

TEST_WITH(ll_dispatch_refuses_bad_arguments, open_comm, close_comm)
{
    const struct bad cases[] = {
        {{LD(size, 0)}, EP_E_ABI, "size is 0"},
        {{LD(x, 0)}, EP_E_ARG, "x is NULL"},
        {{LD(x, 0x1000004)}, EP_E_ALIGN, "x is"},
        {{LD(topk_idx, 0)}, EP_E_ARG, "topk_idx is NULL"},
        {{LD(topk_idx, 0x2000004)}, EP_E_ALIGN, "topk_idx"},
        {{LD(idx_type, EP_BF16)}, EP_E_ARG, "idx_type is 1"},
        {{LD(n_tokens, -1)}, EP_E_ARG, "n_tokens is -1"},
        {{LD(n_tokens, 129)}, EP_E_ARG, "n_tokens is 129, not in 0..128"},
        {{LD(out_dtype, 0)}, EP_E_ARG, "out_dtype is 0"},
        {{LD(out_dtype, EP_I32)}, EP_E_ARG, "out_dtype is 4 (i32)"},
        {{LD(out_dtype, EP_BF16)}, EP_E_ARG, "scale_type is 3 with bf16"},
        {{LD(out_dtype, EP_BF16), LD(scale_type, 0)}, EP_E_ARG, "recv_scales with bf16"},
        {{LD(out_dtype, EP_BF16), LD(scale_type, 0), LD(flags, EP_LL_ROUND_SCALE)}, EP_E_ARG, "bf16"},
        {{LD(scale_type, 0)}, EP_E_ARG, "scale_type is 0"},
        {{LD(scale_type, EP_I32)}, EP_E_ARG, "scale_type is 4"},
        {{LD(scale_type, EP_UE8M0)}, EP_E_ARG, "hidden 640 with EP_UE8M0 scales is not a multiple of 512"},
        {{LD(scale_type, EP_F8E4M3)}, EP_E_ARG, "scale_type is 2 (fp8), none of EP_F32, EP_UE8M0 and EP_UE8M0_32"},
        {{LD(out_dtype, EP_F4E2M1)}, EP_E_ARG, "scale_type is 3 (f32), must be EP_F8E4M3 with EP_F4E2M1"},
        {{LD(out_dtype, EP_F4E2M1), LD(scale_type, EP_F8E4M3), LD(flags, EP_LL_ROUND_SCALE)},
         EP_E_ARG,
         "EP_LL_ROUND_SCALE with EP_F4E2M1"},
        {{LD(out_dtype, EP_F4E2M1), LD(scale_type, EP_F8E4M3), LD(global_scale, 0x9000002)},
         EP_E_ALIGN,
         "global_scale"},
        {{LD(global_scale, 0x9000000)}, EP_E_ARG, "global_scale with rows of fp8"},
        {{LD(flags, EP_LL_SWIZZLED_SCALES)}, EP_E_ARG, "EP_LL_SWIZZLED_SCALES is for EP_F4E2M1 and EP_UE8M0_32"},
        {{LD(scale_type, EP_UE8M0_32), LD(flags, EP_LL_SWIZZLED_SCALES), LD(recv_scale_stride_token, 1),
          LD(recv_scale_stride_block, 2048)},
         EP_E_ARG,
         "strides of recv_scales with EP_LL_SWIZZLED_SCALES"},
        {{LD(out_dtype, EP_BF16), LD(scale_type, 0), LD(recv_scales, 0), LD(flags, EP_LL_SWIZZLED_SCALES)},
         EP_E_ARG,
         "EP_LL_SWIZZLED_SCALES with bf16"},
        {{LD(recv_x, 0)}, EP_E_ARG, "recv_x is NULL"},
        {{LD(recv_x, 0x3000008)}, EP_E_ALIGN, "recv_x"},
        {{LD(recv_x, 0x1000000 - 0x13fff0)}, EP_E_ARG, "recv_x overlaps x"},
        {{LD(recv_scales, 0)}, EP_E_ARG, "recv_scales is NULL"},
        {{LD(recv_scales, 0x4000004)}, EP_E_ALIGN, "recv_scales"},
        {{LD(recv_count, 0)}, EP_E_ARG, "recv_count is NULL"},
        {{LD(recv_count, 0x5000002)}, EP_E_ALIGN, "recv_count"},
        {{LD(recv_source, 0x6000001)}, EP_E_ALIGN, "recv_source"},
        {{LD(recv_range, 0x7000004)}, EP_E_ALIGN, "recv_range"},
        {{LD(flags, EP_LL_ZERO_COPY)}, EP_E_ARG, "flags has unknown bits 0x800"},
        {{LD(max_tokens, -1)}, EP_E_ARG, "max_tokens is -1, not in 0..128"},
        {{LD(max_tokens, 129)}, EP_E_ARG, "max_tokens is 129, not in 0..128"},
        {{LD(max_tokens, 99)}, EP_E_ARG, "n_tokens is 100, not in 0..99"},
        {{LD(topk, -1)}, EP_E_ARG, "topk is -1, not in 0..4"},
        {{LD(topk, 5)}, EP_E_ARG, "topk is 5, not in 0..4"},
        {{LD(reserved, 1)}, EP_E_ARG, "reserved is 1"},
        {{LD(recv_stats_add, 0x8000002)}, EP_E_ALIGN, "recv_stats_add"},
        {{LD(wait_cost_add, 0x8000004)}, EP_E_ALIGN, "wait_cost_add"},
        {{LD(recv_stats_add, 0x5000000)}, EP_E_ARG, "recv_count overlaps recv_stats_add"},
        {{LD(recv_scale_stride_token, 1)}, EP_E_ARG, "strides 1 (token) and 0 (block)"},
        {{LD(recv_scale_stride_token, -1), LD(recv_scale_stride_block, 1)}, EP_E_ARG, "strides -1 (token)"},
        {{LD(recv_scale_stride_token, 4), LD(recv_scale_stride_block, 1)}, EP_E_ARG, "the same address"},
        {{LD(recv_scale_stride_token, 1), LD(recv_scale_stride_block, 511)}, EP_E_ARG, "the same address"},
        {{LD(recv_scale_stride_token, 6), LD(recv_scale_stride_block, 1)}, EP_E_ARG, "reach element"},
        {{LD(out_dtype, EP_BF16), LD(scale_type, 0), LD(recv_scales, 0), LD(recv_scale_stride_token, 1)},
         EP_E_ARG,
         "strides of recv_scales with bf16"},
    };
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args good = good_ll_dispatch();

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    RUN_CASES("ep_ll_dispatch", run_ll_dispatch, &good, cases);
    good.recv_source = NULL;
    good.recv_range = NULL;
    good.n_tokens = 0;
    good.x = good.topk_idx = NULL;
    assert_int_equal(run_ll_dispatch(&good), EP_OK);
}

static ep_status run_ll_combine(const void *args)
{
    ep_status status;

    ll->dispatches = 1;
    ll->combines = 0;
    ll->call[1] = (struct ep_ll_call){.number = 1, .n_tokens = 100, .max_tokens = 128, .topk = 3};
    status = ep_ll_combine(ll, args, NULL);
    assert_int_equal(ll->combines, status == EP_OK ? 1 : 0);
    return status;
}

TEST_WITH(ll_combine_refuses_bad_arguments, open_comm, close_comm)
{
#define LC(field, value) SET(ep_ll_combine_args, field, value)
    const struct bad cases[] = {
        {{LC(size, 0)}, EP_E_ABI, "size is 0"},
        {{LC(x, 0)}, EP_E_ARG, "x is NULL"},
        {{LC(x, 0x1000002)}, EP_E_ALIGN, "x is"},
        {{LC(topk_idx, 0)}, EP_E_ARG, "topk_idx is NULL"},
        {{LC(topk_idx, 0x2000002)}, EP_E_ALIGN, "topk_idx"},
        {{LC(idx_type, 0)}, EP_E_ARG, "idx_type is 0"},
        {{LC(n_tokens, 129)}, EP_E_ARG, "n_tokens is 129"},
        {{LC(n_tokens, 99)}, EP_E_ARG, "n_tokens is 99, but its dispatch had 100"},
        {{LC(topk_weights, 0)}, EP_E_ARG, "topk_weights is NULL"},
        {{LC(topk_weights, 0x3000002)}, EP_E_ALIGN, "topk_weights"},
        {{LC(out, 0)}, EP_E_ARG, "out is NULL"},
        {{LC(out, 0x4000008)}, EP_E_ALIGN, "out is"},
        {{LC(out, 0x127fff0)}, EP_E_ARG, "out overlaps x"},
        {{LC(topk, -1)}, EP_E_ARG, "topk is -1, but its dispatch had 3"},
        {{LC(topk, 4)}, EP_E_ARG, "topk is 4, but its dispatch had 3"},
        {{LC(flags, EP_LL_ROUND_SCALE)}, EP_E_ARG, "flags has unknown bits 0x400"},
        {{LC(call, 2)}, EP_E_STATE, "call is 2, but there were 1 dispatches"},
        {{LC(wait_cost_add, 0x8000004)}, EP_E_ALIGN, "wait_cost_add"},
        {{LC(reserved, 1)}, EP_E_ARG, "reserved"},
        {{LC(signal_rows, 64)}, EP_E_ARG, "signal_rows is 64, signal_value 0 and max_sms 0 without signals"},
        {{LC(signal_value, 3)}, EP_E_ARG, "signal_value 3 and max_sms 0 without signals"},
        {{LC(signals, 0x9000000)}, EP_E_ARG, "signal_rows is 0"},
        {{LC(signals, 0x9000002), LC(signal_rows, 64)}, EP_E_ALIGN, "signals"},
        {{LC(signals, 0x9000000), LC(signal_rows, 64), LC(max_sms, -1)}, EP_E_ARG, "max_sms is -1"},
        {{LC(signals, 0x3fffffc), LC(signal_rows, 64)}, EP_E_ARG, "out overlaps signals"},
    };
    ep_ll_config config = good_ll();
    ep_ll_combine_args good = good_ll_combine();

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    RUN_CASES("ep_ll_combine", run_ll_combine, &good, cases);
}

/* Combines name one of the last two dispatches, any number of times. */
TEST_WITH(ll_calls_are_named, open_comm, close_comm)
{
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args dispatch = good_ll_dispatch();
    ep_ll_combine_args combine = good_ll_combine();
    uint64_t call = 0;

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    assert_int_equal(ll->n_local, 4);
    mock.calls = 0;
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_finish(ll, 0, NULL), EP_E_STATE);
    assert_int_equal(mock.calls, 0);
    dispatch.ret_call = &call;
    for (int n = 1; n <= 3; n++) {
        dispatch.n_tokens = 10 * n;
        dispatch.topk = n == 3 ? 0 : n;
        assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_OK);
        assert_int_equal(mock.ll_topk, n == 3 ? config.topk : n);
        assert_int_equal(call, n);
        assert_int_equal(mock.ll_number, n);
    }
    for (int i = 0; i < 3; i++) {
        combine.call = i ? 2 : 0;
        combine.n_tokens = i ? 20 : 30;
        combine.topk = i == 1 ? 2 : 0;
        assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_OK);
        assert_int_equal(mock.ll_topk, i ? 2 : config.topk);
        assert_int_equal(mock.ll_number, i ? 2 : 3);
    }
    combine.n_tokens = 30;
    assert_fails(ep_ll_combine(ll, &combine, NULL), EP_E_ARG, "n_tokens is 30, but its dispatch had 20");
    combine.call = 1;
    combine.n_tokens = 10;
    assert_fails(ep_ll_combine(ll, &combine, NULL), EP_E_STATE, "dispatch 1 has no buffers any more: there were 3");
    /* A dispatch that fails has no number. */
    mock.answer = EP_E_MEMORY;
    call = 0;
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_E_MEMORY);
    assert_int_equal(call, 0);
    mock.answer = EP_OK;
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_OK);
    assert_int_equal(call, 4);
}

/* Two calls may be open; each is finished by its number, and before the call that would reuse its buffers. */
TEST_WITH(ll_hooks_are_finished_by_name, open_comm, close_comm)
{
    ep_ll_config config = good_ll();
    ep_ll_dispatch_args dispatch = good_ll_dispatch();
    ep_ll_combine_args combine = good_ll_combine();

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    dispatch.flags = EP_LL_RECV_HOOK;
    combine.n_tokens = dispatch.n_tokens;
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_OK);
    assert_fails(ep_ll_combine(ll, &combine, NULL), EP_E_STATE, "ep_ll_finish() first");
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_OK);
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_finish(ll, 3, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_finish(ll, 1, NULL), EP_OK);
    assert_int_equal(mock.ll_number, 1);
    assert_int_equal(ep_ll_finish(ll, 1, NULL), EP_E_STATE);
    /* A combine of the one while the other is open; then none of the two names is needed. */
    combine.call = 1;
    combine.flags = EP_LL_RECV_HOOK;
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_OK);
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_dispatch(ll, &dispatch, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_finish(ll, 0, NULL), EP_OK);
    assert_int_equal(mock.ll_number, 1);
    assert_int_equal(ep_ll_finish(ll, 0, NULL), EP_OK);
    assert_int_equal(mock.ll_number, 2);
    assert_int_equal(ep_ll_finish(ll, 0, NULL), EP_E_STATE);
    /* The buffers of a combine are those of the second next one. */
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_OK);
    combine.call = 2;
    combine.flags = 0;
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_OK);
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_finish(ll, 1, NULL), EP_OK);
    assert_int_equal(ep_ll_combine(ll, &combine, NULL), EP_OK);
}

TEST_WITH(ll_masks_have_arguments, open_comm, close_comm)
{
    ep_ll_config config = good_ll();
    int32_t mask[RANKS];
    ep_ll *other;
    void *buffer;

    assert_int_equal(ep_ll_new(comm, &config, &ll), EP_OK);
    assert_int_equal(ep_ll_new(comm, &config, &other), EP_OK);
    assert_int_equal(ep_ll_get_combine_buffer(ll, NULL), EP_E_ARG);
    assert_int_equal(ep_ll_get_combine_buffer(ll, &buffer), EP_OK);
    assert_int_equal(ep_ll_get_mask(ll, NULL), EP_E_ARG);
    assert_int_equal(ep_ll_get_mask(ll, mask), EP_OK);
    assert_int_equal(ep_ll_query_mask(ll, NULL, NULL), EP_E_ARG);
    ll->config.flags = 0;
    assert_int_equal(ep_ll_set_mask(ll, comm->rank ? 0 : 1, 1, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_clear_mask(ll, NULL), EP_E_STATE);
    ll->config.flags = EP_LL_MASK_DEAD;
    assert_int_equal(ep_ll_set_mask(ll, comm->rank, 1, NULL), EP_E_ARG);
    assert_int_equal(ep_ll_set_mask(ll, RANKS, 1, NULL), EP_E_ARG);
    assert_int_equal(ep_ll_set_mask(ll, -1, 1, NULL), EP_E_ARG);
    assert_fails(ep_ll_set_mask(ll, comm->rank ? 0 : 1, 2, NULL), EP_E_ARG, "on is 2");
    assert_int_equal(ep_ll_merge_mask(ll, NULL, NULL), EP_E_ARG);
    assert_fails(ep_ll_merge_mask(ll, ll, NULL), EP_E_ARG, "from is ll itself");
    other->config.flags = 0;
    assert_int_equal(ep_ll_merge_mask(ll, other, NULL), EP_E_STATE);
    assert_int_equal(ep_ll_merge_mask(other, ll, NULL), EP_E_STATE);
    other->config.flags = EP_LL_MASK_DEAD;
    /* Operations that this backend does not provide. */
    assert_int_equal(ep_ll_merge_mask(ll, other, NULL), EP_E_UNSUPPORTED);
    assert_int_equal(ep_ll_barrier(ll, NULL), EP_E_UNSUPPORTED);
    assert_int_equal(ep_ll_clear_mask(ll, NULL), EP_E_UNSUPPORTED);
    ep_ll_free(other);
}
