/* SPDX-License-Identifier: Apache-2.0 */
/* throughput.c - the intranode and internode matrices. */
#include "throughput.h"

#include "common/memory.h"
#include "random.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

/* Rows of a worst-case output in addition to those that are received. */
#define SPARE_ROWS 7

/* Alignments, used by the cases alternately: the first is "none", the last a multiple of all. */
static const int alignments[] = {0, 8, 64};

/* --- the cases --- */

static struct throughput_case make_case(const struct check_run *run, int index)
{
    bool internode = run->parameters.matrix == &check_matrix_internode;
    int n_kinds = internode ? DATA_FP8_CONSTANT + 1 : DATA_FP8_RANDOM + 1;
    int block_of_four = 4 * EP_SCALE_BLOCK, hidden = run->parameters.hidden;
    struct throughput_case c = {
        .topk = index % 2 == 1,
        .async = index / 2 / n_kinds % 2 == 1,
        .previous = index / 2 / n_kinds / 2 == 1,
        .data = {.kind = (enum data_kind)(index / 2 % n_kinds), .hidden = hidden},
        .n_bias = {internode ? 2 : 0, internode ? 2 : index % 3},
        .idx_type = index / 2 % 2 ? EP_I64 : EP_I32,
        .alignment = alignments[index % 3],
        .strided_scales = index / 4 % 2 == 1,
        .symmetric = check_is_symmetric(run, index),
    };

    c.data.seed = random_key(run->parameters.seed, (uint64_t)n_kinds, (uint64_t)index, 0);
    if (data_is_fp8(&c.data))
        c.data.scale_type = index / 3 % 2 && hidden % block_of_four == 0 ? EP_UE8M0 : EP_F32;
    /* Once for each kind of data: the layout does not depend on sync, async or a previous event. */
    c.expanded = c.topk && !c.async && !c.previous;
    c.zero_padding = index % 5 != 0;
    return c;
}

static bool describe(const struct check_run *run, int index, char ret_name[CHECK_NAME_BYTES])
{
    struct throughput_case c = make_case(run, index);
    bool fp8 = data_is_fp8(&c.data), internode = run->parameters.matrix == &check_matrix_internode;

    snprintf(ret_name, CHECK_NAME_BYTES, "%s, %s, %s%s", fp8 && !internode ? "fp8" : data_kind_name(c.data.kind),
             c.topk ? "top-k" : "no top-k", c.async ? "async" : "sync", c.previous ? ", previous event" : "");
    return fp8 ? run->parameters.fp8 : run->parameters.bf16;
}

static const char *validate(const struct check_run *run)
{
    if (run->parameters.hidden % 8)
        return "hidden must be a multiple of 8";
    if (run->parameters.fp8 && run->parameters.hidden % EP_SCALE_BLOCK)
        return "hidden must be a multiple of 128 for fp8 rows; choose dtype bf16 or another hidden size";
    return NULL;
}

/* --- state of the job --- */

static void new_outputs(struct throughput *state, int where, int64_t n_rows)
{
    struct check_run *run = state->run;
    size_t topk = (size_t)run->group.topk, hidden = (size_t)run->parameters.hidden;
    bool symmetric = where == CHECK_SYMMETRIC;

    state->rows[where] = check_alloc(run, n_rows, hidden * sizeof(uint16_t), symmetric);
    state->scales[where] = check_alloc(run, n_rows, hidden / EP_SCALE_BLOCK * 4, symmetric);
    state->indices[where] = check_alloc(run, n_rows, topk * sizeof(int64_t), symmetric);
    state->weights[where] = check_alloc(run, n_rows, topk * sizeof(float), symmetric);
}

static void new_inputs(struct throughput *state)
{
    struct check_run *run = state->run;
    size_t topk = (size_t)run->group.topk, hidden = (size_t)run->parameters.hidden;

    state->topk_idx = check_alloc(run, state->n_tokens, topk * sizeof(int64_t), false);
    state->x = check_alloc(run, state->n_tokens, hidden * sizeof(uint16_t), false);
    state->x_scales = check_alloc(run, state->n_tokens, hidden / EP_SCALE_BLOCK * 4, false);
    state->x_weights = check_alloc(run, state->n_tokens, topk * sizeof(float), false);
    state->bias[0] = check_alloc(run, state->n_tokens, hidden * sizeof(uint16_t), false);
    state->bias[1] = check_alloc(run, state->n_tokens, hidden * sizeof(uint16_t), false);
    state->out = check_alloc(run, state->n_tokens, hidden * sizeof(uint16_t), false);
    state->out_weights = check_alloc(run, state->n_tokens, topk * sizeof(float), false);
}

/* Most rows of any layout of any case. */
static int64_t most_rows(const struct throughput *state)
{
    const struct check_run *run = state->run;
    struct reference_layout layout;
    int64_t most = 0;

    for (int expanded = 0; expanded < 2; expanded++) {
        int alignment = expanded ? alignments[sizeof(alignments) / sizeof(alignments[0]) - 1] : 1;

        reference_layout_init(&run->group, run->ctx->rank, expanded, alignment, &layout);
        most = layout.n_rows > most ? layout.n_rows : most;
        reference_layout_done(&layout);
    }
    return most + SPARE_ROWS;
}

static ep_status begin(struct check_run *run, void **ret_state)
{
    struct throughput *state = memory_new(1, sizeof(*state));
    int rank = run->ctx->rank;
    int64_t n_rows;

    *ret_state = state;
    state->run = run;
    state->n_tokens = run->group.n_tokens[rank];
    reference_counts_init(&run->group, rank, &state->counts);
    n_rows = most_rows(state);
    for (int where = CHECK_ORDINARY; where <= CHECK_SYMMETRIC; where++)
        if (run->parameters.memory == CHECK_ALTERNATE || (int)run->parameters.memory == where)
            new_outputs(state, where, n_rows);
    new_inputs(state);
    return check_buffers(run);
}

static void end(void *opaque)
{
    struct throughput *state = opaque;

    reference_counts_done(&state->counts);
    free(state);
}

/* --- plans --- */

static ep_plan_args plan_args(const struct throughput *state, bool expanded, int64_t max_recv_tokens)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    args.topk_idx = check_address(state->run, state->topk_idx);
    args.idx_type = state->c.idx_type;
    args.n_tokens = state->n_tokens;
    args.topk = state->run->group.topk;
    args.n_experts = state->run->group.n_experts;
    if (expanded)
        args.flags = EP_PLAN_EXPANDED | (state->c.zero_padding ? EP_PLAN_ZERO_PADDING : 0);
    args.expert_alignment = state->c.alignment;
    args.max_recv_tokens = max_recv_tokens;
    return args;
}

/* The plan copies the routing: poison it after the call. */
static ep_status new_plan(struct throughput *state, bool expanded, int64_t max_recv_tokens, ep_plan **ret_plan)
{
    struct check_run *run = state->run;
    ep_plan_args args = plan_args(state, expanded, max_recv_tokens);

    check_load_choices(run, state->c.idx_type, state->topk_idx);
    CHECK_CALL(run, ep_plan_new, run->ctx->comm, &args, ret_plan);
    check_poison(run, state->topk_idx, (size_t)state->n_tokens * (size_t)run->group.topk * 8);
    return EP_OK;
}

/* Verifies ep_plan_info. `known`: the counts have been exchanged. */
static ep_status verify_info(struct throughput *state, const ep_plan *plan, const struct reference_layout *layout,
                             bool known, int64_t max_recv_tokens)
{
    struct check_run *run = state->run;
    const struct reference_group *group = &run->group;
    ep_plan_info info = {.size = sizeof(info)};

    CHECK_CALL(run, ep_plan_get_info, plan, &info);
    check_equal(run, "n_recv", known ? layout->n_rows : -1, info.n_recv);
    check_equal(run, "out_rows", max_recv_tokens ? max_recv_tokens : layout->n_rows, info.out_rows);
    /* The counts of a worst-case plan may exist on the GPU only, until a call waits for it. */
    if (known || !run->ctx->gpu || info.n_send >= 0) {
        check_equal(run, "n_send", layout->n_send, info.n_send);
        check_equal(run, "n_wire", layout->n_wire, info.n_wire);
    }
    check_equal(run, "n_net", layout->n_net, info.n_net);
    check_equal(run, "n_tokens", state->n_tokens, info.n_tokens);
    check_equal(run, "topk", group->topk, info.topk);
    check_equal(run, "n_experts", group->n_experts, info.n_experts);
    check_equal(run, "n_local_experts", group->n_local, info.n_local_experts);
    if (!known) {
        if (info.recv_per_expert || info.recv_from_rank || info.expert_start)
            check_mismatch(run, "counts before the first dispatch of a worst-case plan");
        return EP_OK;
    }
    check_equal_array(run, "recv_per_expert", group->n_local, 4, layout->recv_per_expert, info.recv_per_expert);
    if (layout->expanded)
        check_equal_array(run, "expert_start", group->n_local + 1, 8, layout->expert_start, info.expert_start);
    else
        check_equal_array(run, "recv_from_rank", group->n_ranks + 1, 8, layout->recv_from_rank, info.recv_from_rank);
    return EP_OK;
}

static ep_status verify_sources(struct throughput *state, ep_plan *plan, const struct reference_layout *layout)
{
    struct check_run *run = state->run;
    int32_t *rank = memory_new(2 * (size_t)layout->n_rows, sizeof(*rank)), *token = rank + layout->n_rows;
    ep_status status;

    run->call = "ep_plan_get_sources";
    status = ep_plan_get_sources(plan, rank, token);
    for (int64_t i = 0; i < layout->n_rows && status == EP_OK; i++)
        if (rank[i] != layout->rows[i].rank || token[i] != layout->rows[i].token) {
            check_mismatch(run, "source of row %" PRId64 ": expected rank %d token %d, got rank %d token %d", i,
                           layout->rows[i].rank, layout->rows[i].token, rank[i], token[i]);
            break;
        }
    free(rank);
    return status;
}

static ep_status verify_counts(struct throughput *state)
{
    struct check_run *run = state->run;
    const struct reference_group *group = &run->group;
    size_t n_ranks = (size_t)group->n_ranks, n_nodes = (size_t)group->n_nodes, n_experts = (size_t)group->n_experts;
    size_t n_pairs = (size_t)state->n_tokens * n_ranks;
    int32_t *counts = memory_new(n_ranks + n_nodes + n_experts, sizeof(*counts));
    uint8_t *token_in_rank = memory_new(n_pairs, 1);
    ep_plan_args args = plan_args(state, false, 0);
    ep_layout layout = EP_LAYOUT_INIT;
    ep_status status;

    layout.tokens_per_rank = counts;
    layout.tokens_per_node = counts + n_ranks;
    layout.tokens_per_expert = counts + n_ranks + n_nodes;
    layout.token_in_rank = token_in_rank;
    check_load_choices(run, state->c.idx_type, state->topk_idx);
    status = check_buffers(run);
    if (status != EP_OK)
        goto free_all;
    run->call = "ep_plan_layout";
    status = ep_plan_layout(run->ctx->comm, &args, &layout);
    if (status != EP_OK)
        goto free_all;
    check_equal_array(run, "tokens_per_rank", group->n_ranks, 4, state->counts.tokens_per_rank, layout.tokens_per_rank);
    check_equal_array(run, "tokens_per_node", group->n_nodes, 4, state->counts.tokens_per_node, layout.tokens_per_node);
    check_equal_array(run, "tokens_per_expert", group->n_experts, 4, state->counts.tokens_per_expert,
                      layout.tokens_per_expert);
    for (size_t i = 0; i < n_pairs; i++)
        if (token_in_rank[i] != state->counts.token_in_rank[i]) {
            check_mismatch(run, "token_in_rank[%zu][%zu]: expected %d, got %d", i / n_ranks, i % n_ranks,
                           state->counts.token_in_rank[i], token_in_rank[i]);
            break;
        }
free_all:
    free(counts);
    free(token_in_rank);
    return status;
}

/* --- one case --- */

/* The plans of a case, with the phases of their steps. */
struct plan_kind {
    const char *plan, *dispatch, *combine;
    bool expanded, worst_case;
};

static const struct plan_kind rank_plan = {"plan", "dispatch", "combine", false, false};
static const struct plan_kind worst_case_plan = {"worst-case plan", "worst-case dispatch", "worst-case combine", false,
                                                 true};
static const struct plan_kind expanded_plan = {"expanded plan", "expanded dispatch", "expanded combine", true, false};

/* With a rank layout two combines: of rows that are returned unchanged, and of rows that identify the replying rank. */
static ep_status run_steps(struct throughput_step *step, const struct plan_kind *kind, int64_t max_recv_tokens)
{
    struct throughput *state = step->state;
    struct check_run *run = state->run;

    CHECK_TRY(verify_info(state, step->plan, step->layout, !kind->worst_case, max_recv_tokens));
    if (!kind->worst_case)
        CHECK_TRY(verify_sources(state, step->plan, step->layout));
    run->phase = kind->dispatch;
    CHECK_TRY(throughput_dispatch(step));
    if (kind->worst_case)
        CHECK_TRY(verify_info(state, step->plan, step->layout, true, max_recv_tokens));
    if (kind == &rank_plan && !state->c.topk) {
        run->phase = "cached dispatch";
        CHECK_TRY(throughput_dispatch(step));
    }
    if (kind == &rank_plan) {
        run->phase = "combine of unchanged rows";
        step->identity = true;
        step->n_bias = state->c.n_bias[0];
        CHECK_TRY(throughput_combine(step));
    }
    run->phase = kind->combine;
    step->identity = false;
    step->n_bias = state->c.n_bias[1];
    return throughput_combine(step);
}

static ep_status run_plan(struct throughput *state, const struct plan_kind *kind)
{
    const struct reference_layout *layout = kind->expanded ? &state->expanded_layout : &state->rank_layout;
    int64_t max_recv_tokens = kind->worst_case ? layout->n_rows + SPARE_ROWS : 0;
    struct throughput_step step = {
        .state = state, .layout = layout, .out_rows = kind->worst_case ? max_recv_tokens : layout->n_rows};
    ep_status status;

    state->run->phase = kind->plan;
    CHECK_TRY(new_plan(state, kind->expanded, max_recv_tokens, &step.plan));
    status = run_steps(&step, kind, max_recv_tokens);
    ep_plan_free(step.plan);
    return status;
}

static ep_status run_plans(struct throughput *state)
{
    state->run->phase = "layout";
    CHECK_TRY(verify_counts(state));
    CHECK_TRY(run_plan(state, &rank_plan));
    if (state->c.topk)
        CHECK_TRY(run_plan(state, &worst_case_plan));
    return state->c.expanded ? run_plan(state, &expanded_plan) : EP_OK;
}

static ep_status run_case(struct check_run *run, void *opaque, int index)
{
    struct throughput *state = opaque;
    int rank = run->ctx->rank, alignment;
    ep_status status;

    state->c = make_case(run, index);
    alignment = state->c.alignment ? state->c.alignment : 1;
    reference_layout_init(&run->group, rank, false, alignment, &state->rank_layout);
    if (state->c.expanded)
        reference_layout_init(&run->group, rank, true, alignment, &state->expanded_layout);
    status = run_plans(state);
    reference_layout_done(&state->rank_layout);
    reference_layout_done(&state->expanded_layout);
    return status;
}

const struct check_matrix check_matrix_intranode = {
    .name = "intranode",
    .count = 24,
    .describe = describe,
    .validate = validate,
    .begin = begin,
    .run = run_case,
    .end = end,
};

const struct check_matrix check_matrix_internode = {
    .name = "internode",
    .count = 32,
    .describe = describe,
    .validate = validate,
    .begin = begin,
    .run = run_case,
    .end = end,
};
