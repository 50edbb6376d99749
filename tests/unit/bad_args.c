/* SPDX-License-Identifier: Apache-2.0 */
#include "bad_args.h"

#define MOST_ARGS_BYTES 256

ep_comm *comm;
ep_plan *plan;
ep_ll *ll;

int open_comm(void **state)
{
    ep_boot boot = mock_boot(1, RANKS);
    ep_comm_config config = EP_COMM_CONFIG_INIT;

    (void)state;
    memset((void *)&mock, 0, sizeof(mock));
    unsetenv("EPKIT_TIMEOUT_MS");
    config.backend = "host";
    return ep_comm_new(&boot, &config, &comm) != EP_OK;
}

int close_comm(void **state)
{
    (void)state;
    ep_ll_free(ll);
    ep_plan_free(plan);
    ll = NULL;
    plan = NULL;
    if (comm->live != 0)
        return 1;
    ep_comm_free(comm);
    return 0;
}

void run_cases(const char *call, ep_status (*run)(const void *args), const void *good, size_t bytes,
               const struct bad *cases, size_t n)
{
    unsigned char args[MOST_ARGS_BYTES];

    assert_true(bytes <= sizeof(args));
    mock.calls = 0;
    if (run(good) != EP_OK)
        fail_msg("%s refuses good arguments: %s", call, ep_last_error());
    assert_int_equal(mock.calls, 1);
    for (size_t i = 0; i < n; i++) {
        ep_status status;

        memcpy(args, good, bytes);
        for (size_t j = 0; j < sizeof(cases[i].sets) / sizeof(cases[i].sets[0]); j++)
            memcpy(args + cases[i].sets[j].offset, &cases[i].sets[j].value, cases[i].sets[j].bytes);
        mock.calls = 0;
        status = run(args);
        if (status != cases[i].status || !strstr(ep_last_error(), cases[i].text))
            fail_msg("%s case %zu: %s \"%s\", expected %s \"...%s...\"", call, i, ep_status_name(status),
                     ep_last_error(), ep_status_name(cases[i].status), cases[i].text);
        assert_int_equal(strncmp(ep_last_error(), call, strlen(call)), 0);
        assert_string_equal(ep_comm_last_error(comm), ep_last_error());
        assert_int_equal(mock.calls, 0);
    }
    /* None of it was fatal. */
    assert_int_equal(ep_comm_async_error(comm), EP_OK);
    assert_int_equal(run(good), EP_OK);
}

ep_plan_args good_plan(void)
{
    return args_plan((const void *)AT(0x10000), EP_I64, 10, 8, 256);
}

void open_plan(uint32_t flags, int n_tokens, int64_t n_recv, int64_t out_rows)
{
    ep_plan_args args = good_plan();

    args.flags = flags;
    args.n_tokens = n_tokens;
    mock.info = (ep_plan_info){.size = sizeof(ep_plan_info), .n_recv = n_recv, .out_rows = out_rows};
    ep_plan_free(plan);
    plan = NULL;
    assert_int_equal(ep_plan_new(comm, &args, &plan), EP_OK);
}

ep_dispatch_args good_dispatch(void)
{
    ep_dispatch_args args = args_dispatch(EP_F8E4M3, 1024, (const void *)AT(0x100000), (void *)AT(0x400000), 20);

    args.scales = (const void *)AT(0x200000);
    args.scale_type = EP_F32;
    args.topk_weights = (const float *)AT(0x300000);
    args.recv_scales = (void *)AT(0x500000);
    args.recv_topk_idx = (void *)AT(0x600000);
    args.recv_topk_weights = (float *)AT(0x700000);
    return args;
}

ep_combine_args good_combine(void)
{
    ep_combine_args args = args_combine(1024, (const void *)AT(0x100000), (void *)AT(0x400000));

    args.topk_weights = (const float *)AT(0x200000);
    args.bias[0] = (const void *)AT(0x300000);
    args.bias[1] = (const void *)AT(0x310000);
    args.out_topk_weights = (float *)AT(0x500000);
    return args;
}

ep_ll_config good_ll(void)
{
    ep_ll_config config = {.size = sizeof(config), .max_tokens = 128, .hidden = 640, .n_experts = 16, .topk = 4};

    return config;
}

ep_ll_dispatch_args good_ll_dispatch(void)
{
    ep_ll_dispatch_args args = args_ll_dispatch((const void *)AT(0x1000000), (const void *)AT(0x2000000), EP_I64, 100);

    args.out_dtype = EP_F8E4M3;
    args.scale_type = EP_F32;
    args.recv_x = (void *)AT(0x3000000);
    args.recv_scales = (void *)AT(0x4000000);
    args.recv_count = (int32_t *)AT(0x5000000);
    args.recv_source = (int32_t *)AT(0x6000000);
    args.recv_range = (int64_t *)AT(0x7000000);
    return args;
}

ep_ll_combine_args good_ll_combine(void)
{
    return args_ll_combine((const void *)AT(0x1000000), (const void *)AT(0x2000000), EP_I32, 100,
                           (const void *)AT(0x3000000), (void *)AT(0x4000000));
}
