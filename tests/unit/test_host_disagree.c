/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two ranks that pass different arguments to a collective call, or are in different calls: both get EP_E_MISMATCH with
 * the field by its public name, both ranks and both values, on one node and on two. Ranks are threads.
 */
#include "ranks.h"

#include "core/core.h"
#include "group/failure.h"
#include "group/group.h"

#include <epkit/epkit.h>

enum { NRANKS = 2, HIDDEN = 512 };

/* Changes the arguments of the second rank. */
enum deviation {
    PLAN_EXPERTS,
    PLAN_TOPK,
    PLAN_TYPE,
    PLAN_FLAGS,
    PLAN_ALIGNMENT,
    PLAN_MASK,
    PLAN_MASK_OF_ONE, /* and a topk that is not the number of ranks */
    DISPATCH_HIDDEN,
    DISPATCH_TYPE,
    DISPATCH_OUTPUTS,
    COMBINE_OUTPUTS,
    DISPATCH_WORDS,
    DISPATCH_SCALES,
    DISPATCH_FP4,
    DISPATCH_PLAN,
    DISPATCH_COMBINE,
    GATHER_BYTES,
    GATHER_BARRIER,
    LL_TOKENS,
    LL_TOPK,
    LL_HIDDEN,
    LL_FLAGS,
    LL_TYPE,
    LL_SCALES,
    LL_ROUNDING,
    LL_CALL_TOKENS,
    LL_CALL,
    LL_SUM
};

static const struct scenario {
    enum deviation deviation;
    const char *field;
    const char *value[NRANKS]; /* as the text shows it; of outputs: the rank without it and the one with it */
} scenarios[] = {
    {PLAN_EXPERTS, "n_experts", {"4", "6"}},
    {PLAN_TOPK, "topk", {"2", "1"}},
    {PLAN_TYPE, "idx_type", {"4 (i32)", "5 (i64)"}},
    {PLAN_FLAGS, "flags", {"0", "EP_PLAN_EXPANDED"}},
    {PLAN_ALIGNMENT, "expert_alignment", {"1", "8"}},
    {PLAN_MASK, "token_in_rank in place of topk_idx", {"0", "1"}},
    {PLAN_MASK_OF_ONE, "token_in_rank in place of topk_idx", {"0", "1"}},
    {DISPATCH_HIDDEN, "hidden", {"512", "256"}},
    {DISPATCH_TYPE, "dtype", {"1 (bf16)", "2 (fp8)"}},
    {DISPATCH_OUTPUTS, "recv_topk_idx", {"0", "1"}},
    {COMBINE_OUTPUTS, "out_topk_weights", {"1", "0"}},
    {DISPATCH_WORDS, "scale_words", {"2", "3"}},
    {DISPATCH_SCALES, "scale_type", {"6 (ue8m0)", "8 (ue8m0 of 32)"}},
    {DISPATCH_FP4, "dtype", {"2 (fp8)", "7 (fp4)"}},
    {DISPATCH_PLAN, "the plan (in order of creation)", {"1", "2"}},
    {DISPATCH_COMBINE, NULL, {NULL, NULL}},
    {GATHER_BYTES, "bytes", {"16", "8"}},
    {GATHER_BARRIER, NULL, {NULL, NULL}},
    {LL_TOKENS, "max_tokens", {"2", "3"}},
    {LL_TOPK, "topk", {"1", "2"}},
    {LL_HIDDEN, "hidden", {"128", "256"}},
    {LL_FLAGS, "flags", {"0", "EP_LL_MASK_DEAD"}},
    {LL_TYPE, "out_dtype", {"1 (bf16)", "2 (fp8)"}},
    {LL_SCALES, "scale_type", {"3 (f32)", "6 (ue8m0)"}},
    {LL_ROUNDING, "rounding of scales", {"0", "1"}},
    {LL_CALL_TOKENS, "max_tokens", {"2", "1"}},
    {LL_CALL, "call", {"2", "1"}},
    {LL_SUM, "EP_LL_NO_PARTIAL_REDUCE", {"0", "1"}},
};

static ep_status new_plan(ep_comm *comm, enum deviation deviation, int rank, ep_plan **ret_plan)
{
    static const int32_t experts[4] = {0, 2, 1, 3}, counts[4] = {1, 0, 0, 0};
    static const uint8_t mask[NRANKS] = {1, 0};
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    bool other = rank == 1;

    args.topk_idx = experts;
    args.idx_type = other && deviation == PLAN_TYPE ? EP_I64 : EP_I32;
    args.n_tokens = other && deviation == PLAN_TYPE ? 0 : 1;
    args.topk = deviation == PLAN_MASK_OF_ONE || (other && deviation == PLAN_TOPK) ? 1 : 2;
    args.n_experts = other && deviation == PLAN_EXPERTS ? 6 : 4;
    args.flags = other && deviation == PLAN_FLAGS ? EP_PLAN_EXPANDED : 0;
    args.expert_alignment = other && deviation == PLAN_ALIGNMENT ? 8 : 1;
    if (other && (deviation == PLAN_MASK || deviation == PLAN_MASK_OF_ONE)) {
        args.topk_idx = NULL;
        args.topk = 0;
        args.idx_type = 0;
        args.token_in_rank = mask;
        args.tokens_per_expert = counts;
    }
    return ep_plan_new(comm, &args, ret_plan);
}

static ep_status use_plan(ep_plan *plan, enum deviation deviation, int rank)
{
    _Alignas(16) static unsigned char x[NRANKS][HIDDEN * 2], out[NRANKS][8 * HIDDEN * 2];
    _Alignas(16) static int32_t words[NRANKS][8], out_words[NRANKS][64], index[NRANKS][16];
    _Alignas(16) static float weights[NRANKS][16], out_weights[NRANKS][16];
    ep_dispatch_args dispatch;
    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    bool other = rank == 1;

    if (deviation == COMBINE_OUTPUTS || (other && deviation == DISPATCH_COMBINE)) {
        combine.x = out[rank];
        combine.dtype = EP_BF16;
        combine.hidden = HIDDEN;
        combine.out = x[rank];
        if (!other && deviation == COMBINE_OUTPUTS) {
            combine.topk_weights = weights[rank];
            combine.out_topk_weights = out_weights[rank];
        }
        return ep_combine_sync(plan, &combine);
    }
    dispatch = args_dispatch(other && deviation == DISPATCH_TYPE ? EP_F8E4M3 : EP_BF16,
                             other && deviation == DISPATCH_HIDDEN ? HIDDEN / 2 : HIDDEN, x[rank], out[rank], 8);
    if (deviation == DISPATCH_WORDS) {
        dispatch.scales = words[rank];
        dispatch.scale_type = EP_I32;
        dispatch.scale_words = other ? 3 : 2;
        dispatch.recv_scales = out_words[rank];
    }
    if (deviation == DISPATCH_SCALES || deviation == DISPATCH_FP4) {
        dispatch.dtype = other && deviation == DISPATCH_FP4 ? EP_F4E2M1 : EP_F8E4M3;
        dispatch.scales = words[rank];
        dispatch.scale_type = dispatch.dtype == EP_F4E2M1 ? EP_F8E4M3 : other ? EP_UE8M0_32 : EP_UE8M0;
        dispatch.recv_scales = out_words[rank];
    }
    if (other && deviation == DISPATCH_OUTPUTS)
        dispatch.recv_topk_idx = index[rank];
    return ep_dispatch_sync(plan, &dispatch);
}

static ep_status gather(ep_comm *comm, enum deviation deviation, int rank)
{
    char mine[16] = {0}, all[NRANKS * 16];

    if (rank == 1 && deviation == GATHER_BARRIER)
        return ep_comm_barrier(comm);
    return ep_comm_allgather(comm, mine, rank == 1 ? 8 : 16, all);
}

static ep_status use_ll(ep_ll *ll, enum deviation deviation, int rank)
{
    _Alignas(16) static unsigned char x[NRANKS][2 * HIDDEN], out[NRANKS][2 * 4 * 2 * HIDDEN];
    _Alignas(16) static float scales[NRANKS][2 * 4 * 4];
    static const int32_t expert[1] = {3};
    static const float weight[1] = {1};
    static int32_t count[NRANKS][2];
    ep_ll_combine_args combine;
    bool other = rank == 1, split = deviation == LL_SCALES, packed = deviation == LL_CALL;
    bool quantised = split || packed || deviation == LL_ROUNDING || (other && deviation == LL_TYPE);
    ep_ll_dispatch_args dispatch = args_ll_dispatch(x[rank], expert, EP_I32, 1);

    dispatch.out_dtype = quantised ? EP_F8E4M3 : EP_BF16;
    dispatch.scale_type = !quantised ? 0 : packed || (other && split) ? EP_UE8M0 : EP_F32;
    dispatch.recv_x = out[rank];
    dispatch.recv_scales = quantised ? scales[rank] : NULL;
    dispatch.recv_count = count[rank];
    dispatch.max_tokens = other && deviation == LL_CALL_TOKENS ? 1 : 2;
    /* Scales that are packed are rounded with and without the flag. */
    dispatch.flags = split ? EP_LL_RECV_HOOK : other && (packed || deviation == LL_ROUNDING) ? EP_LL_ROUND_SCALE : 0;
    EP_TRY(ep_ll_dispatch_sync(ll, &dispatch));
    if (split)
        return ep_ll_finish_sync(ll, 0);
    if (deviation == LL_CALL)
        EP_TRY(ep_ll_dispatch_sync(ll, &dispatch));
    combine = args_ll_combine(out[rank], expert, EP_I32, 1, weight, x[rank]);
    combine.flags = other && deviation == LL_SUM ? EP_LL_NO_PARTIAL_REDUCE : 0;
    combine.call = other && deviation == LL_CALL ? 1 : 0;
    return ep_ll_combine_sync(ll, &combine);
}

static ep_status new_ll(ep_comm *comm, enum deviation deviation, int rank, ep_ll **ret_ll)
{
    bool other = rank == 1;
    ep_ll_config config = args_ll(other && deviation == LL_TOKENS ? 3 : 2,
                                  deviation == LL_SCALES || deviation == LL_CALL ? HIDDEN
                                  : other && deviation == LL_HIDDEN              ? 256
                                                                                 : 128,
                                  4, other && deviation == LL_TOPK ? 2 : 1);

    config.flags = other && deviation == LL_FLAGS ? EP_LL_MASK_DEAD : 0;
    return ep_ll_new(comm, &config, ret_ll);
}

static ep_status call_ll(ep_comm *comm, enum deviation deviation, int rank)
{
    ep_ll *ll = NULL;
    ep_status status = new_ll(comm, deviation, rank, &ll);

    if (status == EP_OK)
        status = use_ll(ll, deviation, rank);
    ep_ll_free(ll);
    return status;
}

/* What the call of a rank returns. */
static ep_status call(ep_comm *comm, enum deviation deviation, int rank, ep_plan *plans[2])
{
    ep_status status = EP_OK;

    for (int i = 0; i < 2 && status == EP_OK; i++)
        status = new_plan(comm, deviation, rank, &plans[i]);
    if (status != EP_OK)
        return status;
    if (deviation >= LL_TOKENS)
        return call_ll(comm, deviation, rank);
    if (deviation >= GATHER_BYTES)
        return gather(comm, deviation, rank);
    return use_plan(plans[rank == 1 && deviation == DISPATCH_PLAN], deviation, rank);
}

static int deviate(const ep_boot *boot, const struct scenario *scenario, int ranks_per_node)
{
    const char *const *value = scenario->value;
    ep_comm *comm = NULL;
    ep_plan *plans[2] = {NULL};
    ep_status status;
    char forth[100], back[100];

    if (unit_comm_new(boot, NULL, ranks_per_node, 60000, &comm) != EP_OK)
        return 1;
    status = call(comm, scenario->deviation, boot->rank, plans);
    snprintf(forth, sizeof(forth), "ranks are in different calls: rank ");
    snprintf(back, sizeof(back), "%s", forth);
    if (scenario->deviation == DISPATCH_OUTPUTS || scenario->deviation == COMBINE_OUTPUTS) {
        snprintf(forth, sizeof(forth), "ranks disagree: %s is given on rank %s and NULL on rank %s", scenario->field,
                 value[1], value[0]);
        snprintf(back, sizeof(back), "%s", forth);
    } else if (scenario->field) {
        snprintf(forth, sizeof(forth), "ranks disagree: %s is %s on rank 0 and %s on rank 1", scenario->field, value[0],
                 value[1]);
        snprintf(back, sizeof(back), "ranks disagree: %s is %s on rank 1 and %s on rank 0", scenario->field, value[1],
                 value[0]);
    }
    if (status != EP_E_MISMATCH || (!strstr(ep_last_error(), forth) && !strstr(ep_last_error(), back))) {
        fprintf(stderr, "rank %d: %s: \"%s\", expected \"...%s...\"\n", boot->rank, ep_status_name(status),
                ep_last_error(), forth);
        return 2;
    }
    ep_plan_free(plans[0]);
    ep_plan_free(plans[1]);
    ep_comm_free(comm);
    return 0;
}

static int deviate_on_one_node(const ep_boot *boot, void *argument)
{
    return deviate(boot, argument, NRANKS);
}

/* Each rank on a node of its own: exchanges and rows tell the ranks what the other has called. */
static int deviate_on_two_nodes(const ep_boot *boot, void *argument)
{
    return deviate(boot, argument, 1);
}

static void run_scenarios(ep_rank_fn run)
{
    for (size_t i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++) {
        print_message("scenario %zu\n", i);
        unit_run_threads(NRANKS, run, (void *)&scenarios[i]);
    }
}

/* A dispatch on a plan and one with low latency share no memory that would show it before the deadline. */
static int call_apart(const ep_boot *boot, void *argument)
{
    ep_comm *comm = NULL;
    ep_plan *plan = NULL;
    ep_ll *ll = NULL;
    ep_status status;
    bool explained;

    if (unit_comm_new(boot, NULL, 0, *(const int *)argument, &comm) != EP_OK || new_ll(comm, LL_SUM, 0, &ll) != EP_OK)
        return 1;
    status = boot->rank == 0 ? new_plan(comm, LL_SUM, 0, &plan) : use_ll(ll, LL_SUM, 1);
    explained = strstr(ep_last_error(), "in \"plan: exchange of counts\"") &&
                strstr(ep_last_error(), "in \"low-latency dispatch: rows\"") &&
                strstr(ep_last_error(), ": it waits for rank ");
    if (status != EP_E_TIMEOUT || !explained)
        fprintf(stderr, "rank %d: %s: %s\n", boot->rank, ep_status_name(status), ep_last_error());
    ep_ll_free(ll);
    ep_comm_free(comm);
    return status != EP_E_TIMEOUT ? 2 : explained ? 0 : 3;
}

TEST(a_late_rank_is_named_with_what_it_waits_for)
{
    /* On a loaded machine a rank may not run for half a deadline, and counts as stopped then. */
    static const int timeouts[] = {400, 4000, 40000};
    bool explained = false;

    for (size_t i = 0; i < sizeof(timeouts) / sizeof(timeouts[0]) && !explained; i++) {
        ep_launch_args launch = {
            .mode = EP_LAUNCH_THREADS, .nranks = NRANKS, .run = call_apart, .argument = (void *)&timeouts[i]};
        ep_rank_exit exits[NRANKS];

        assert_int_equal(ep_launch(&launch, exits), EP_OK);
        explained = exits[0].code == 0 && exits[1].code == 0;
    }
    assert_true(explained);
}

TEST_CALL(both_ranks_get_the_field_and_the_values, run_scenarios(deviate_on_one_node))
TEST_CALL(ranks_of_two_nodes_get_them_as_well, run_scenarios(deviate_on_two_nodes))

/* By name, if all of them have one: the text shows two ranks that differ in an unnamed one, as another version may. */
TEST(flags_are_shown_completely)
{
    static const struct {
        int64_t flags;
        const char *text;
    } cases[] = {{0, " is 0 on"},
                 {EP_PLAN_EXPANDED, " is EP_PLAN_EXPANDED on"},
                 {EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING, " is EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING on"},
                 {EP_LL_MASK_DEAD | 1 << 20, " is 1048832 on"},
                 {1 << 20, " is 1048576 on"}};

    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_fails(ep_group_fail_disagree("", "flags", cases[i].flags, 0, 0, 1), EP_E_MISMATCH, cases[i].text);
    }
}
