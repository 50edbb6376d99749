/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A checker that finds nothing wrong in a library with a fault is worth nothing: here the results of the library are
 * spoiled, one fault at a time, and the job must say what and where.
 *
 * The linker sends the calls of the checks through the wrappers below (--wrap).
 */
#include "group.h"
#include "unit.h"

#include "cmd/test/check/check_run.h"

enum fault {
    FAULT_NONE = 0,
    FAULT_LAYOUT_IN_RANK,
    FAULT_LAYOUT_EXPERT,
    FAULT_LAYOUT_NODE,
    FAULT_INFO_NET,
    FAULT_INFO_COUNT,
    FAULT_INFO_EARLY, /* counts of a worst-case plan known too soon */
    FAULT_SOURCE,
    FAULT_X_BIT, /* the last bit of the last row */
    FAULT_X_SWAP,
    FAULT_X_GUARD,
    FAULT_SCALE_BIT,
    FAULT_INDEX,
    FAULT_WEIGHT_BIT,
    FAULT_WEIGHT_GUARD,
    FAULT_WORST_ROW, /* a row behind the received ones is touched */
    FAULT_WORST_INDEX,
    FAULT_PADDING,
    FAULT_NO_WAIT, /* the event before is ignored */
    FAULT_EARLY,   /* complete too soon */
    FAULT_OUT_BIT,
    FAULT_OUT_GUARD,
    FAULT_OUT_WEIGHT_BIT,
    FAULT_BIAS,   /* the second bias is forgotten */
    FAULT_CALL,   /* a call fails on one rank */
    FAULT_LL_NEW, /* fails, before the first case */
    FAULT_LL_X_BIT,
    FAULT_LL_SCALE_BIT,
    FAULT_LL_COUNT,
    FAULT_LL_SOURCE,
    FAULT_LL_RANGE,
    FAULT_LL_GUARD,
    FAULT_LL_OUT_BIT
};

/* Inherited by the forked ranks. */
static enum fault fault;
static int faulty_rank = -1; /* -1: all */
static int my_rank;

/* --- wrappers --- */

/* clang-format off */
ep_status __real_ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);
ep_status __wrap_ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout);
ep_status __real_ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info);
ep_status __wrap_ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info);
ep_status __real_ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
ep_status __wrap_ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token);
ep_status __real_ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args);
ep_status __wrap_ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args);
ep_status __real_ep_combine_sync(ep_plan *plan, const ep_combine_args *args);
ep_status __wrap_ep_combine_sync(ep_plan *plan, const ep_combine_args *args);
ep_status __real_ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status __wrap_ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event);
ep_status __real_ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status __wrap_ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event);
ep_status __real_ep_event_query(const ep_event *event, int *ret_done);
ep_status __wrap_ep_event_query(const ep_event *event, int *ret_done);
ep_status __real_ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll);
ep_status __wrap_ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll);
ep_status __real_ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args);
ep_status __wrap_ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args);
ep_status __real_ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args);
ep_status __wrap_ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args);
/* clang-format on */

/* Is it this fault's turn, on this rank? */
static bool is_turn(enum fault which)
{
    return fault == which && (faulty_rank < 0 || faulty_rank == my_rank);
}

static void flip(void *memory, int64_t byte)
{
    ((unsigned char *)memory)[byte] ^= 1;
}

ep_status __wrap_ep_plan_layout(ep_comm *comm, const ep_plan_args *args, ep_layout *layout)
{
    ep_comm_info info = {.size = sizeof(info)};
    ep_status status = __real_ep_plan_layout(comm, args, layout);

    ep_comm_get_info(comm, &info);
    my_rank = info.rank;
    if (is_turn(FAULT_LAYOUT_IN_RANK))
        layout->token_in_rank[0] ^= 1;
    if (is_turn(FAULT_LAYOUT_EXPERT))
        layout->tokens_per_expert[args->n_experts - 1]++;
    if (is_turn(FAULT_LAYOUT_NODE))
        layout->tokens_per_node[0]--;
    return status;
}

ep_status __wrap_ep_plan_get_info(const ep_plan *plan, ep_plan_info *ret_info)
{
    static int32_t wrong[EP_MAX_EXPERTS];
    ep_status status = __real_ep_plan_get_info(plan, ret_info);

    if (is_turn(FAULT_INFO_NET))
        ret_info->n_net++;
    if (is_turn(FAULT_INFO_EARLY) && ret_info->n_recv < 0)
        ret_info->n_recv = 1;
    if (is_turn(FAULT_INFO_COUNT) && ret_info->recv_per_expert) {
        memcpy(wrong, ret_info->recv_per_expert, (size_t)ret_info->n_local_experts * sizeof(wrong[0]));
        wrong[ret_info->n_local_experts - 1]--;
        ret_info->recv_per_expert = wrong;
    }
    return status;
}

ep_status __wrap_ep_plan_get_sources(ep_plan *plan, int32_t *ret_rank, int32_t *ret_token)
{
    ep_status status = __real_ep_plan_get_sources(plan, ret_rank, ret_token);

    if (is_turn(FAULT_SOURCE))
        ret_token[0]++;
    return status;
}

/* Spoils what a dispatch has written. */
static void spoil_dispatch(const ep_plan *plan, const ep_dispatch_args *args)
{
    int64_t row_bytes = args->hidden * (int64_t)ep_dtype_bytes((ep_dtype)args->dtype);
    ep_plan_info info = {.size = sizeof(info)};
    unsigned char *x = args->recv_x, swap[4096];
    bool worst;

    __real_ep_plan_get_info(plan, &info);
    worst = args->out_rows > info.n_recv;
    if (is_turn(FAULT_X_BIT))
        flip(x, info.n_recv * row_bytes - 1);
    if (is_turn(FAULT_X_SWAP)) {
        memcpy(swap, x, (size_t)row_bytes);
        memcpy(x, x + row_bytes, (size_t)row_bytes);
        memcpy(x + row_bytes, swap, (size_t)row_bytes);
    }
    if (is_turn(FAULT_X_GUARD))
        flip(x, args->out_rows * row_bytes);
    if (is_turn(FAULT_SCALE_BIT) && args->recv_scales)
        flip(args->recv_scales, 0);
    if (is_turn(FAULT_INDEX) && args->recv_topk_idx)
        flip(args->recv_topk_idx, 0);
    if (is_turn(FAULT_WEIGHT_BIT) && args->recv_topk_weights)
        flip(args->recv_topk_weights, 0);
    if (is_turn(FAULT_WEIGHT_GUARD) && args->recv_topk_weights)
        flip(args->recv_topk_weights, args->out_rows * info.topk * 4);
    if (is_turn(FAULT_WORST_ROW) && worst)
        flip(x, info.n_recv * row_bytes);
    if (is_turn(FAULT_WORST_INDEX) && worst)
        ((int32_t *)args->recv_topk_idx)[info.n_recv * info.topk] = 0;
    if (is_turn(FAULT_PADDING) && (info.flags & EP_PLAN_ZERO_PADDING))
        flip(x, info.n_recv * row_bytes - 1);
}

ep_status __wrap_ep_dispatch_sync(ep_plan *plan, const ep_dispatch_args *args)
{
    ep_status status;

    if (is_turn(FAULT_CALL))
        return EP_E_ARG;
    status = __real_ep_dispatch_sync(plan, args);
    if (status == EP_OK)
        spoil_dispatch(plan, args);
    return status;
}

ep_status __wrap_ep_stream_wait(ep_comm *comm, ep_stream stream, ep_event *event)
{
    return is_turn(FAULT_NO_WAIT) ? EP_OK : __real_ep_stream_wait(comm, stream, event);
}

ep_status __wrap_ep_event_record(ep_comm *comm, ep_stream stream, ep_event **ret_event)
{
    ep_status status = __real_ep_event_record(comm, stream, ret_event);

    if (is_turn(FAULT_NO_WAIT) && status == EP_OK)
        ep_event_wait(*ret_event, -1);
    return status;
}

ep_status __wrap_ep_combine_sync(ep_plan *plan, const ep_combine_args *args)
{
    ep_combine_args changed = *args;
    ep_plan_info info = EP_PLAN_INFO_INIT;
    int64_t bytes = args->hidden * (int64_t)sizeof(uint16_t);
    ep_status status;

    if (is_turn(FAULT_BIAS))
        changed.bias[1] = NULL;
    status = __real_ep_combine_sync(plan, &changed);
    if (status != EP_OK)
        return status;
    __real_ep_plan_get_info(plan, &info);
    if (is_turn(FAULT_OUT_BIT))
        flip(args->out, info.n_tokens * bytes - 2);
    if (is_turn(FAULT_OUT_GUARD))
        flip(args->out, info.n_tokens * bytes);
    if (is_turn(FAULT_OUT_WEIGHT_BIT) && args->out_topk_weights)
        flip(args->out_topk_weights, 0);
    return status;
}

ep_status __wrap_ep_event_query(const ep_event *event, int *ret_done)
{
    ep_status status = __real_ep_event_query(event, ret_done);

    if (is_turn(FAULT_EARLY))
        *ret_done = 1;
    return status;
}

ep_status __wrap_ep_ll_new(ep_comm *comm, const ep_ll_config *config, ep_ll **ret_ll)
{
    if (is_turn(FAULT_LL_NEW))
        return EP_E_ARG;
    return __real_ep_ll_new(comm, config, ret_ll);
}

ep_status __wrap_ep_ll_dispatch_sync(ep_ll *ll, const ep_ll_dispatch_args *args)
{
    ep_status status = __real_ep_ll_dispatch_sync(ll, args);

    if (status != EP_OK || args->flags & EP_LL_RECV_HOOK)
        return status;
    if (is_turn(FAULT_LL_X_BIT))
        flip(args->recv_x, 0);
    if (is_turn(FAULT_LL_SCALE_BIT) && args->recv_scales)
        flip(args->recv_scales, 0);
    if (is_turn(FAULT_LL_COUNT))
        args->recv_count[1]++;
    if (is_turn(FAULT_LL_SOURCE) && args->recv_source)
        args->recv_source[0]++;
    if (is_turn(FAULT_LL_RANGE) && args->recv_range)
        args->recv_range[0]++;
    if (is_turn(FAULT_LL_GUARD))
        args->recv_count[24 / 3] = 0;
    return status;
}

ep_status __wrap_ep_ll_combine_sync(ep_ll *ll, const ep_ll_combine_args *args)
{
    ep_status status = __real_ep_ll_combine_sync(ll, args);

    if (status == EP_OK && is_turn(FAULT_LL_OUT_BIT))
        flip(args->out, 0);
    return status;
}

/* --- tests --- */

/* Three ranks of eight experts, on three nodes for internode. */
static void run_fault(enum fault which, int rank, const char *matrix, int only, struct group_report *ret_report)
{
    char parameters[160];

    snprintf(parameters, sizeof(parameters),
             "{\"matrix\": \"%s\", \"tokens\": 16, \"hidden\": 512, \"topk\": 4, \"only\": %d}", matrix, only);
    fault = which;
    faulty_rank = rank;
    group_run(
        &(struct group_spec){.n_ranks = 3, .n_nodes = strcmp(matrix, "internode") ? 1 : 3, .parameters = parameters},
        ret_report);
    fault = FAULT_NONE;
}

TEST(test_faults_are_found)
{
    static const struct {
        enum fault fault;
        int only; /* intranode 2: bf16, top-k, sync; 6: fp8; 20: bf16, top-k, async, event. lowlatency 3: fp8 */
        const char *matrix, *text;
    } cases[] = {
        {FAULT_LAYOUT_IN_RANK, 2, "intranode", "rank 0: layout: token_in_rank[0][0]"},
        {FAULT_LAYOUT_EXPERT, 2, "intranode", "rank 0: layout: tokens_per_expert[23]"},
        {FAULT_LAYOUT_NODE, 2, "internode", "rank 0: layout: tokens_per_node[0]"},
        {FAULT_INFO_NET, 2, "internode", "rank 0: plan: n_net: expected"},
        {FAULT_INFO_COUNT, 2, "intranode", "rank 0: plan: recv_per_expert[7]"},
        {FAULT_INFO_EARLY, 2, "intranode", "rank 0: worst-case plan: n_recv: expected -1, got 1"},
        {FAULT_SOURCE, 1, "intranode", "rank 0: plan: source of row 0: expected rank 0 token"},
        {FAULT_X_BIT, 2, "intranode", "rank 0: dispatch: recv_x row"},
        {FAULT_X_BIT, 6, "intranode", "element 511: expected 0x"},
        {FAULT_X_SWAP, 1, "intranode", "rank 0: dispatch: recv_x row 0 (rank 0 token"},
        {FAULT_X_GUARD, 1, "intranode", "rank 0: dispatch: recv_x: byte 0 after the"},
        {FAULT_SCALE_BIT, 6, "intranode", "rank 0: dispatch: recv_scales row 0 (rank 0 token"},
        {FAULT_INDEX, 2, "intranode", "rank 0: dispatch: recv_topk_idx row 0 (rank 0 token"},
        {FAULT_WEIGHT_BIT, 2, "intranode", "rank 0: dispatch: recv_topk_weights row 0 (rank 0 token"},
        {FAULT_WEIGHT_GUARD, 2, "intranode", "rank 0: dispatch: recv_topk_weights: byte 0 after the"},
        {FAULT_WORST_ROW, 2, "intranode", "rank 0: worst-case dispatch: recv_x: byte 0 after the"},
        {FAULT_WORST_INDEX, 2, "intranode", "rank 0: worst-case dispatch: recv_topk_idx row"},
        {FAULT_PADDING, 2, "intranode", "rank 0: expanded dispatch: recv_x row"},
        {FAULT_NO_WAIT, 20, "intranode", "rank 0: dispatch: complete before the event"},
        {FAULT_EARLY, 20, "intranode", "rank 0: dispatch: complete before the event"},
        {FAULT_OUT_BIT, 2, "intranode", "rank 0: combine of unchanged rows: out row 15 (rank 0 token 15) element 511"},
        {FAULT_OUT_GUARD, 1, "intranode", "rank 0: combine of unchanged rows: out: byte 0 after the"},
        {FAULT_OUT_WEIGHT_BIT, 2, "intranode", "rank 0: combine of unchanged rows: out_topk_weights row 0"},
        {FAULT_BIAS, 1, "internode", "rank 0: combine of unchanged rows: out row 0"},
        {FAULT_LL_X_BIT, 1, "lowlatency", "rank 0: dispatch: recv_x row 0"},
        {FAULT_LL_X_BIT, 3, "lowlatency", "rank 0: dispatch: recv_x row 0"},
        {FAULT_LL_SCALE_BIT, 3, "lowlatency", "rank 0: dispatch: recv_scales row 0"},
        {FAULT_LL_COUNT, 1, "lowlatency", "rank 0: dispatch: recv_count[1]"},
        {FAULT_LL_SOURCE, 1, "lowlatency", "rank 0: dispatch: recv_source of expert 0 row 0"},
        {FAULT_LL_RANGE, 1, "lowlatency", "rank 0: dispatch: recv_range of expert 0 from rank 0"},
        {FAULT_LL_GUARD, 1, "lowlatency", "rank 0: dispatch: recv_count: byte 0 after the 32"},
        {FAULT_LL_OUT_BIT, 1, "lowlatency", "rank 0: combine: out row 0 (rank 0 token 0) element 0"},
    };

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct group_report report;

        run_fault(cases[i].fault, -1, cases[i].matrix, cases[i].only, &report);
        if (report.failed != 1 || report.code != 1 || !strstr(report.detail, cases[i].text))
            fail_msg("fault %d in case %d of %s: %d failed, code %d, expected \"%s\", got \"%s\" %s", cases[i].fault,
                     cases[i].only, cases[i].matrix, report.failed, report.code, cases[i].text, report.detail,
                     report.error);
        if (!strstr(report.detail, "(and on 2 more)"))
            fail_msg("other ranks are not counted: %s", report.detail);
        /* Without the fault the same case passes. */
        run_fault(FAULT_NONE, -1, cases[i].matrix, cases[i].only, &report);
        if (report.failed || report.code)
            fail_msg("case %d of %s fails without a fault: %s %s", cases[i].only, cases[i].matrix, report.detail,
                     report.error);
    }
}

/* What only one rank sees is told by rank 0, and the case fails on all. */
TEST(test_other_rank_is_named)
{
    struct group_report report;

    run_fault(FAULT_X_BIT, 2, "intranode", 2, &report);
    assert_int_equal(report.failed, 1);
    assert_int_equal(report.code, 1);
    assert_non_null(strstr(report.detail, "bf16 random, top-k, sync: rank 2: dispatch: recv_x row"));
    assert_null(strstr(report.detail, "more"));
}

/* A call that fails on one rank ends the job on all of them, at once. */
TEST(test_failing_call)
{
    struct group_report report;

    run_fault(FAULT_CALL, 1, "intranode", 2, &report);
    assert_int_equal(report.code, 1);
    assert_int_equal(report.cases, 0);
    assert_int_equal(report.errors, 3);
    assert_non_null(strstr(report.error, "intranode test, bf16 random, top-k, sync: dispatch: ep_dispatch"));
}

/* Before the first case there is none to name. */
TEST(test_failed_preparation)
{
    struct group_report report;

    run_fault(FAULT_LL_NEW, -1, "lowlatency", 0, &report);
    assert_int_equal(report.code, 1);
    assert_int_equal(report.cases, 0);
    assert_int_equal(report.errors, 3);
    assert_non_null(strstr(report.error, "lowlatency test: preparation: ep_ll_new"));
}
