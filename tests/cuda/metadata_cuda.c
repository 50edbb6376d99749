/* SPDX-License-Identifier: Apache-2.0 */
/*
 * metadata_cuda [--ranks N] [--nodes N] [--network NAME] [--rounds N] [--seed N] [--only SCENARIO]: metadata of
 * plans and layouts of routings in device memory, against the host backend: all arrays, and subsets of them. Plans of
 * exact counts and of fixed capacity, updated each round, in calls and in a captured graph, from choices and from a
 * mask; rank and expanded layout. A dispatch before and a combine after must not be disturbed. A source_stride that is
 * too small.
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 256, TOPK = 4, ROW = HIDDEN * 2, TOKENS = 1500, ALIGNMENT = 8, TIMEOUT_MS = 10000 };

enum {
    X,
    INDEX,
    MASK,
    EXPERTS,
    RECV,
    OUT,
    SOURCE,
    SLOT,
    N_RECV,
    PSUM_RANK,
    PSUM_EXPERT,
    COUNT_EXACT,
    PREFIX,
    PER_RANK,
    PER_NODE,
    PER_EXPERT,
    IN_RANK,
    N_BUFFERS
};

struct scenario {
    const char *name;
    bool expanded, fixed, graph, mask, refused, stride;
};

static const struct scenario scenarios[] = {
    {"rank", false, false, false, false, false, false},
    {"rank-mask", false, false, false, true, false, false},
    {"rank-fixed", false, true, false, false, false, false},
    {"rank-fixed-mask", false, true, false, true, false, false},
    {"rank-graph", false, true, true, false, false, false},
    {"expanded", true, false, false, false, false, false},
    {"expanded-fixed", true, true, false, false, false, false},
    {"expanded-graph", true, true, true, false, false, false},
    {"exact-graph", true, false, true, false, false, false},
    {"refused", true, true, false, false, true, false},
    {"stride", true, false, false, false, false, true},
};

struct state {
    struct group group;
    const struct scenario *scenario;
    uint64_t seed;
    int rounds, experts, n_tokens;
    int64_t capacity;
    ep_plan *plan[2]; /* on the host, on the device */
    struct mirror b[N_BUFFERS];
};

static int make_buffers(struct state *s)
{
    size_t rows = (size_t)s->capacity, ranks = (size_t)s->group.nranks, local = (size_t)s->experts / ranks;
    const struct {
        const char *name;
        size_t bytes;
    } of[N_BUFFERS] = {
        [X] = {"x", TOKENS * ROW},
        [INDEX] = {"topk_idx", TOKENS * TOPK * 4},
        [MASK] = {"token_in_rank", TOKENS * ranks},
        [EXPERTS] = {"tokens_per_expert", (size_t)s->experts * 4},
        [RECV] = {"recv_x", rows * ROW},
        [OUT] = {"out", TOKENS * ROW},
        [SOURCE] = {"recv_source", rows * 4},
        [SLOT] = {"recv_slot", rows * TOPK * 4},
        [N_RECV] = {"n_recv_tokens", 4},
        [PSUM_RANK] = {"psum_rank", ranks * 4},
        [PSUM_EXPERT] = {"psum_expert", local * 4},
        [COUNT_EXACT] = {"count_exact", local * 4},
        [PREFIX] = {"rank_prefix", ranks * ranks * 4},
        [PER_RANK] = {"tokens_per_rank", ranks * 4},
        [PER_NODE] = {"tokens_per_node", 4 * (size_t)(group_division.nodes > 1 ? group_division.nodes : 1)},
        [PER_EXPERT] = {"tokens_per_expert of the layout", (size_t)s->experts * 4},
        [IN_RANK] = {"token_in_rank of the layout", TOKENS * ranks}};

    for (int i = 0; i < N_BUFFERS; i++)
        TRY(mirror_new(&s->group, of[i].name, of[i].bytes, ORDINARY, &s->b[i]));
    return 0;
}

static int32_t *words(const struct state *s, int buffer, int device)
{
    return (int32_t *)(void *)mirror_at(&s->b[buffer], device);
}

/* The mask of the choices, and the number of tokens of each expert. */
static void fill_mask(struct state *s)
{
    const int32_t *index = words(s, INDEX, 0);
    int32_t *experts = words(s, EXPERTS, 0), ranks = s->group.nranks;
    unsigned char *mask = mirror_at(&s->b[MASK], 0);

    memset(mask, 0, (size_t)TOKENS * (size_t)ranks);
    memset(experts, 0, (size_t)s->experts * 4);
    for (int i = 0; i < s->n_tokens * TOPK; i++) {
        if (index[i] < 0)
            continue;
        mask[i / TOPK * ranks + index[i] / (s->experts / ranks)] = 1;
        experts[index[i]]++;
    }
}

static int load(struct state *s, int round)
{
    uint64_t random = (s->seed * 4096 + (uint64_t)round) * 64 + (uint64_t)s->group.rank;
    struct routing routing = {.n_tokens = TOKENS,
                              .topk = TOPK,
                              .n_experts = s->experts,
                              .nranks = s->group.nranks,
                              .idx_type = EP_I32,
                              .skewed = round % 3 == 1,
                              .repeated = round % 2 == 1,
                              .holes = round % 4 >= 2};

    s->n_tokens = s->scenario->graph || round % 3 == 0 ? TOKENS : (int)(next_random(&random) % (TOKENS + 1));
    fill_routing(&routing, &random, s->b[INDEX].host);
    fill_mask(s);
    fill_bf16((uint16_t *)(void *)s->b[X].host, (size_t)TOKENS * HIDDEN, &random);
    for (int i = X; i <= EXPERTS; i++)
        TRY(mirror_push(&s->group, &s->b[i]));
    for (int i = RECV; i < N_BUFFERS; i++)
        TRY(mirror_poison(&s->group, &s->b[i]));
    return 0;
}

static int make_plan(struct state *s, int device)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;

    if (s->scenario->mask) {
        args.token_in_rank = mirror_at(&s->b[MASK], device);
        args.tokens_per_expert = words(s, EXPERTS, device);
    } else {
        args.topk_idx = mirror_at(&s->b[INDEX], device);
        args.idx_type = EP_I32;
        args.topk = TOPK;
    }
    args.n_tokens = s->n_tokens;
    args.n_experts = s->experts;
    args.max_recv_tokens = s->scenario->fixed ? s->capacity : 0;
    args.max_tokens = TOKENS;
    args.expert_alignment = ALIGNMENT;
    args.flags = s->scenario->expanded ? EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING : 0;
    args.stream = group_stream(&s->group, device);
    CALL(ep_plan_new(group_comm(&s->group, device), &args, &s->plan[device]));
    return 0;
}

static int update(struct state *s, int device)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    if (s->scenario->mask) {
        args.token_in_rank = mirror_at(&s->b[MASK], device);
        args.tokens_per_expert = words(s, EXPERTS, device);
    } else {
        args.topk_idx = mirror_at(&s->b[INDEX], device);
    }
    args.n_tokens = s->n_tokens;
    CALL(ep_plan_update(s->plan[device], &args, group_stream(&s->group, device)));
    return 0;
}

/* Selects the arrays: all, or a subset that depends on the round. */
static ep_status get_metadata(struct state *s, int device, int round, int stride)
{
    ep_plan_metadata dst = EP_PLAN_METADATA_INIT;
    bool all = round % 4 == 0;

    dst.recv_source = all || round % 4 == 1 ? words(s, SOURCE, device) : NULL;
    dst.recv_slot = s->scenario->expanded && (all || round % 4 == 2) ? words(s, SLOT, device) : NULL;
    dst.n_recv_tokens = all || round % 4 == 3 ? words(s, N_RECV, device) : NULL;
    dst.psum_rank = all || round % 4 == 2 ? words(s, PSUM_RANK, device) : NULL;
    dst.psum_expert = all || round % 4 == 3 ? words(s, PSUM_EXPERT, device) : NULL;
    dst.count_exact = all || round % 4 == 2 ? words(s, COUNT_EXACT, device) : NULL;
    dst.rank_prefix = all || round % 4 == 3 ? words(s, PREFIX, device) : NULL;
    dst.source_stride = stride;
    return ep_plan_get_metadata(s->plan[device], &dst, group_stream(&s->group, device));
}

/* The layout of all choices, also if the plan is made from a mask. */
static int get_layout(struct state *s, int device)
{
    ep_plan_args args = args_plan(mirror_at(&s->b[INDEX], device), EP_I32, s->n_tokens, TOPK, s->experts);
    ep_layout layout = EP_LAYOUT_INIT;

    args.stream = group_stream(&s->group, device);
    layout.tokens_per_rank = words(s, PER_RANK, device);
    layout.tokens_per_node = words(s, PER_NODE, device);
    layout.tokens_per_expert = words(s, PER_EXPERT, device);
    layout.token_in_rank = mirror_at(&s->b[IN_RANK], device);
    CALL(ep_plan_layout(group_comm(&s->group, device), &args, &layout));
    return 0;
}

/* Between a dispatch and its combine: neither may be disturbed. */
static int call_all(struct state *s, int device, int round)
{
    ep_dispatch_args dispatch =
        args_dispatch(EP_BF16, HIDDEN, mirror_at(&s->b[X], device), mirror_at(&s->b[RECV], device), s->capacity);
    ep_combine_args combine = args_combine(HIDDEN, mirror_at(&s->b[RECV], device), mirror_at(&s->b[OUT], device));

    if (s->scenario->expanded) /* reads the slots */
        combine.flags = EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL;
    CALL(ep_dispatch(s->plan[device], &dispatch, group_stream(&s->group, device)));
    CALL(get_metadata(s, device, round, round % 2 ? TOKENS : 0));
    TRY(get_layout(s, device));
    CALL(ep_combine(s->plan[device], &combine, group_stream(&s->group, device)));
    return 0;
}

static int compare(struct state *s, int round)
{
    int code = PASSED;
    char phase[40];

    snprintf(phase, sizeof(phase), "round %d, %d tokens", round, s->n_tokens);
    for (int i = RECV; i < N_BUFFERS; i++)
        code |= mirror_compare(&s->group, &s->b[i], phase);
    return code;
}

static void free_plans(struct state *s)
{
    for (int device = 1; device >= 0; device--) {
        ep_plan_free(s->plan[device]);
        s->plan[device] = NULL;
    }
}

static int run_round(struct state *s, int round, int device)
{
    if (round && !s->scenario->fixed)
        TRY(make_plan(s, device));
    else if (round)
        TRY(update(s, device));
    TRY(call_all(s, device, round));
    return group_sync(&s->group, device);
}

static int run_rounds(struct state *s)
{
    int code = PASSED;

    for (int round = 0; round < s->rounds && !code; round++) {
        if (round && !s->scenario->fixed)
            free_plans(s);
        TRY(load(s, round));
        for (int device = 0; device < 2; device++) {
            if (!round)
                TRY(make_plan(s, device));
            TRY(run_round(s, round, device));
        }
        code = compare(s, round);
        TRY(group_merge_codes(&s->group, code, &code));
    }
    return code;
}

/* One capture; it includes the update if the plan can be updated. */
static int run_graph(struct state *s)
{
    cudaGraphExec_t exec;
    int code = PASSED;

    TRY(load(s, 0));
    for (int device = 0; device < 2; device++) {
        TRY(make_plan(s, device));
        TRY(call_all(s, device, 0));
        TRY(group_sync(&s->group, device));
    }
    TRY(capture_begin(&s->group));
    if (s->scenario->fixed)
        TRY(update(s, 1));
    TRY(call_all(s, 1, 0));
    TRY(capture_end(&s->group, &exec));
    for (int round = 0; round < s->rounds && !code; round++) {
        TRY(load(s, s->scenario->fixed ? round : 0));
        if (s->scenario->fixed)
            TRY(update(s, 0));
        TRY(call_all(s, 0, 0));
        TRY(group_sync(&s->group, 0));
        CUDA(cudaGraphLaunch(exec, s->group.stream));
        TRY(group_sync(&s->group, 1));
        code = compare(s, round);
        TRY(group_merge_codes(&s->group, code, &code));
    }
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

/* Rank 0 would receive too many rows: the metadata become 0, and the group continues with the next routing. */
static int run_refused(struct state *s)
{
    TRY(load(s, 0));
    for (int device = 0; device < 2; device++)
        TRY(make_plan(s, device));
    TRY(group_sync(&s->group, 1));
    for (int i = 0; i < TOKENS * TOPK; i++)
        words(s, INDEX, 0)[i] = i % TOPK;
    TRY(mirror_push(&s->group, &s->b[INDEX]));
    for (int device = 0; device < 2; device++) {
        TRY(update(s, device));
        CALL(get_metadata(s, device, 0, TOKENS));
        TRY(expect_status("ep_stream_sync",
                          ep_stream_sync(group_comm(&s->group, device), group_stream(&s->group, device)), EP_E_CAPACITY,
                          "rank 0"));
    }
    TRY(compare(s, 0));
    TRY(load(s, 4));
    for (int device = 0; device < 2; device++) {
        TRY(update(s, device));
        TRY(call_all(s, device, 0));
        TRY(group_sync(&s->group, device));
    }
    return compare(s, 4);
}

/* The last rank has more tokens than the others allow: its rows show that. Fails the communicator. */
static int run_stride(struct state *s)
{
    int last = s->group.nranks - 1, few = TOKENS / 2;
    bool has_many = s->group.rank == last;

    TRY(load(s, 0));
    s->n_tokens = has_many ? TOKENS : few;
    TRY(make_plan(s, 1));
    CALL(get_metadata(s, 1, 0, has_many ? TOKENS : few));
    if (has_many)
        ep_stream_sync(s->group.cuda, s->group.stream); /* may return the others' failure or not */
    else
        TRY(expect_failed_rank("ep_stream_sync", ep_stream_sync(s->group.cuda, s->group.stream), EP_E_ARG, last));
    return group_barrier(&s->group);
}

static int run_all(struct state *s)
{
    int code;

    s->capacity = (int64_t)s->group.nranks * TOKENS * (s->scenario->expanded ? TOPK : 1);
    if (s->scenario->expanded)
        s->capacity += (int64_t)s->experts * ALIGNMENT;
    if (s->scenario->refused)
        s->capacity -= s->capacity / 8;
    TRY(make_buffers(s));
    code = s->scenario->refused  ? run_refused(s)
           : s->scenario->stride ? run_stride(s)
           : s->scenario->graph  ? run_graph(s)
                                 : run_rounds(s);
    for (int i = 0; i < N_BUFFERS; i++)
        code |= mirror_free(&s->group, s->scenario->stride || code & FAILED, &s->b[i]);
    free_plans(s);
    return code;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {
        .group = *group, .scenario = scenario, .seed = run->seed, .rounds = run->rounds, .experts = group->nranks * 12};

    return run_all(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 12, .seed = 1};
    struct scenario_run run = {.program = "metadata_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
