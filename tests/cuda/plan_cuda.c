/* SPDX-License-Identifier: Apache-2.0 */
/*
 * plan_cuda [--ranks N] [--nodes N] [--network NAME] [--rounds N] [--seed N] [--only SCENARIO]: plans of fixed capacity
 * that are updated in stream order, with new routing each round, against the host backend. Rank and expanded layout, in
 * calls and in a graph that is captured once; ordinary and symmetric memory. Plans made in captures, before any call:
 * two alternating graphs, the second of which reuses the memory of the first one's freed plan. A graph captured before
 * the first update of its plan uses the updates. An update in a graph that is not launched changes nothing. Updates
 * that must fail: too many rows, invalid routing. A graph of operations for another number of tokens than its plan has
 * fails.
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { HIDDEN = 256, TOPK = 4, ROW = HIDDEN * 2, TOKENS = 600, ALIGNMENT = 8, TIMEOUT_MS = 10000 };

enum { X, WEIGHTS, INDEX, RECV, RECV_INDEX, RECV_WEIGHTS, OUT, OUT_WEIGHTS, N_BUFFERS };

struct scenario {
    const char *name;
    bool expanded, graph, made, followed, unlaunched, symmetric, refused, bad, tokens; /* made: in the capture */
    bool only_dispatch, only_combine;                                                  /* in the graph */
};

static const struct scenario scenarios[] = {
    {.name = "rank"},
    {.name = "rank-symmetric", .symmetric = true},
    {.name = "rank-graph", .graph = true},
    {.name = "rank-made", .graph = true, .made = true},
    {.name = "rank-followed", .graph = true, .followed = true},
    {.name = "expanded", .expanded = true},
    {.name = "expanded-symmetric", .expanded = true, .symmetric = true},
    {.name = "expanded-graph", .expanded = true, .graph = true, .symmetric = true},
    {.name = "expanded-made", .expanded = true, .graph = true, .made = true, .symmetric = true},
    {.name = "expanded-followed", .expanded = true, .graph = true, .followed = true},
    {.name = "rank-unlaunched", .graph = true, .unlaunched = true},
    {.name = "expanded-unlaunched", .expanded = true, .graph = true, .unlaunched = true},
    {.name = "refused", .refused = true},
    {.name = "refused-made", .graph = true, .made = true, .refused = true},
    {.name = "refused-expanded", .expanded = true, .symmetric = true, .refused = true},
    {.name = "bad", .expanded = true, .bad = true},
    {.name = "tokens", .graph = true, .bad = true, .tokens = true},
    {.name = "tokens-dispatch", .graph = true, .bad = true, .tokens = true, .only_dispatch = true},
    {.name = "tokens-combine", .graph = true, .bad = true, .tokens = true, .only_combine = true},
};

struct state {
    struct group group;
    const struct scenario *scenario;
    uint64_t seed;
    int rounds, experts, n_tokens;
    int64_t capacity;
    ep_plan *plan[2]; /* on the host, on the device */
    struct mirror b[N_BUFFERS];
    atomic_int delayed; /* the host function before a graph has ended */
};

static int make_buffers(struct state *s)
{
    bool expanded = s->scenario->expanded;
    enum memory memory = s->scenario->symmetric ? SYMMETRIC : ORDINARY;
    size_t rows = (size_t)s->capacity, choices = expanded ? 1 : TOPK;

    TRY(mirror_new(&s->group, "x", TOKENS * ROW, ORDINARY, &s->b[X]));
    TRY(mirror_new(&s->group, "topk_weights", TOKENS * TOPK * 4, ORDINARY, &s->b[WEIGHTS]));
    TRY(mirror_new(&s->group, "topk_idx", TOKENS * TOPK * 4, ORDINARY, &s->b[INDEX]));
    TRY(mirror_new(&s->group, "recv_x", rows * ROW, memory, &s->b[RECV]));
    TRY(mirror_new(&s->group, "recv_topk_idx", rows * TOPK * 4, memory, &s->b[RECV_INDEX]));
    TRY(mirror_new(&s->group, "recv_topk_weights", rows * choices * 4, memory, &s->b[RECV_WEIGHTS]));
    TRY(mirror_new(&s->group, "out", TOKENS * ROW, ORDINARY, &s->b[OUT]));
    TRY(mirror_new(&s->group, "out_topk_weights", TOKENS * TOPK * 4, ORDINARY, &s->b[OUT_WEIGHTS]));
    return 0;
}

/* New routing, with fewer tokens in most rounds, but the same number in a graph; new rows; poisoned outputs. */
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

    s->n_tokens = s->scenario->graph || round % 5 == 0 ? TOKENS : (int)(next_random(&random) % (TOKENS + 1));
    if (!s->scenario->graph && !s->scenario->bad && (round + s->group.rank) % 7 == 2)
        s->n_tokens = 0; /* such a rank gives no routing */
    fill_routing(&routing, &random, s->b[INDEX].host);
    /* Where a rank can receive less than all send, one rank alone must not send all by chance. */
    for (int i = TOKENS * 3 / 4 * TOPK; s->scenario->refused && i < TOKENS * TOPK; i++)
        ((int32_t *)(void *)s->b[INDEX].host)[i] = -1;
    fill_bf16((uint16_t *)(void *)s->b[X].host, (size_t)TOKENS * HIDDEN, &random);
    for (int i = 0; i < TOKENS * TOPK; i++)
        ((float *)(void *)s->b[WEIGHTS].host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    for (int i = X; i <= INDEX; i++)
        TRY(mirror_push(&s->group, &s->b[i]));
    for (int i = RECV; i < N_BUFFERS; i++)
        TRY(mirror_poison(&s->group, &s->b[i]));
    return 0;
}

static ep_status call_update(struct state *s, int device)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    args.topk_idx = s->n_tokens ? mirror_at(&s->b[INDEX], device) : NULL;
    args.n_tokens = s->n_tokens;
    return ep_plan_update(s->plan[device], &args, group_stream(&s->group, device));
}

static int call_dispatch(struct state *s, int device)
{
    ep_dispatch_args args =
        args_dispatch(EP_BF16, HIDDEN, mirror_at(&s->b[X], device), mirror_at(&s->b[RECV], device), s->capacity);

    args.topk_weights = (const float *)(const void *)mirror_at(&s->b[WEIGHTS], device);
    args.recv_topk_idx = s->scenario->expanded ? NULL : mirror_at(&s->b[RECV_INDEX], device);
    args.recv_topk_weights = (float *)(void *)mirror_at(&s->b[RECV_WEIGHTS], device);
    CALL(ep_dispatch(s->plan[device], &args, group_stream(&s->group, device)));
    return 0;
}

static int call_combine(struct state *s, int device)
{
    ep_combine_args args = args_combine(HIDDEN, mirror_at(&s->b[RECV], device), mirror_at(&s->b[OUT], device));

    args.topk_weights = (const float *)(const void *)mirror_at(&s->b[RECV_WEIGHTS], device);
    args.out_topk_weights = (float *)(void *)mirror_at(&s->b[OUT_WEIGHTS], device);
    CALL(ep_combine(s->plan[device], &args, group_stream(&s->group, device)));
    return 0;
}

static int call_pair(struct state *s, int device)
{
    TRY(call_dispatch(s, device));
    return call_combine(s, device);
}

static int make_plan(struct state *s, int device)
{
    ep_plan_args args =
        args_plan(s->n_tokens ? mirror_at(&s->b[INDEX], device) : NULL, EP_I32, s->n_tokens, TOPK, s->experts);

    args.max_recv_tokens = s->capacity;
    args.max_tokens = TOKENS;
    args.expert_alignment = s->scenario->expanded ? ALIGNMENT : 1;
    args.flags = s->scenario->expanded ? EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING : 0;
    args.stream = group_stream(&s->group, device);
    CALL(ep_plan_new(group_comm(&s->group, device), &args, &s->plan[device]));
    return 0;
}

static int make_plans(struct state *s)
{
    TRY(make_plan(s, 0));
    return make_plan(s, 1);
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

/* The plan belongs to the graph, and is freed before the graph is launched; the host gets no counts. */
static int capture_made(struct state *s, cudaGraphExec_t *ret_exec)
{
    ep_plan_info info = {.size = sizeof(info)};

    TRY(capture_begin(&s->group));
    TRY(make_plan(s, 1));
    TRY(call_pair(s, 1));
    TRY(capture_end(&s->group, ret_exec));
    CALL(ep_plan_get_info(s->plan[1], &info));
    EXPECT(info.n_recv == -1 && info.n_send == -1 && info.n_wire == -1 && info.out_rows == s->capacity &&
               info.n_tokens == TOKENS && !info.recv_per_expert,
           "%lld rows received, %lld sent, %lld of them to others; room for %lld; %d tokens", (long long)info.n_recv,
           (long long)info.n_send, (long long)info.n_wire, (long long)info.out_rows, info.n_tokens);
    ep_plan_free(s->plan[1]);
    s->plan[1] = NULL;
    return 0;
}

static int load_round(struct state *s, int round)
{
    if (!round)
        return 0;
    TRY(load(s, round));
    CALL(call_update(s, 0));
    return 0;
}

static void delay(void *context)
{
    struct timespec span = {.tv_nsec = 50000000};

    nanosleep(&span, NULL);
    atomic_store((atomic_int *)context, 1);
}

/* Also checks that the wait for the stream includes the graph. */
static int check_round(struct state *s, int round, cudaGraphExec_t exec)
{
    int code;

    TRY(call_pair(s, 0));
    TRY(group_sync(&s->group, 0));
    atomic_store(&s->delayed, round != 1);
    if (round == 1)
        CUDA(cudaLaunchHostFunc(s->group.stream, delay, &s->delayed));
    CUDA(cudaGraphLaunch(exec, s->group.stream));
    TRY(group_sync(&s->group, 1));
    EXPECT(atomic_load(&s->delayed), "ep_stream_sync has not waited for a graph");
    code = compare(s, round);
    TRY(group_merge_codes(&s->group, code, &code));
    return code;
}

static int run_made(struct state *s)
{
    cudaGraphExec_t exec[2];
    int code = PASSED;

    TRY(load(s, 0));
    TRY(make_plan(s, 0));
    for (int i = 0; i < 2; i++)
        TRY(capture_made(s, &exec[i]));
    for (int round = 0; round < s->rounds && !code; round++) {
        TRY(load_round(s, round));
        code = check_round(s, round, exec[round % 2]);
    }
    for (int i = 0; i < 2; i++)
        CUDA(cudaGraphExecDestroy(exec[i]));
    return code;
}

/* The first use of the plan is in the capture, its first update comes later: the graph must use the update. */
static int run_followed(struct state *s)
{
    cudaGraphExec_t exec;
    int code = PASSED;

    TRY(load(s, 0));
    TRY(make_plans(s));
    TRY(capture_begin(&s->group));
    TRY(call_pair(s, 1));
    TRY(capture_end(&s->group, &exec));
    for (int round = 0; round < s->rounds && !code; round++) {
        TRY(load_round(s, round));
        if (round)
            CALL(call_update(s, 1));
        code = check_round(s, round, exec);
    }
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

static int compare_calls(struct state *s, int round)
{
    int code;

    for (int device = 0; device < 2; device++) {
        TRY(call_pair(s, device));
        TRY(group_sync(&s->group, device));
    }
    code = compare(s, round);
    TRY(group_merge_codes(&s->group, code, &code));
    return code;
}

/* A graph whose update has fewer tokens. Until it is launched, calls use the plan as it was. */
static int run_unlaunched(struct state *s)
{
    cudaGraphExec_t exec;
    int code;

    TRY(load(s, 0));
    TRY(make_plans(s));
    code = compare_calls(s, 0);
    TRY(load(s, 1));
    s->n_tokens = TOKENS / 3;
    TRY(capture_begin(&s->group));
    CALL(call_update(s, 1));
    TRY(call_pair(s, 1));
    TRY(capture_end(&s->group, &exec));
    code |= compare_calls(s, 1);
    for (int i = RECV; i < N_BUFFERS; i++)
        TRY(mirror_poison(&s->group, &s->b[i]));
    CALL(call_update(s, 0));
    code |= check_round(s, 2, exec);
    TRY(load(s, 3));
    for (int device = 0; device < 2; device++)
        CALL(call_update(s, device));
    code |= compare_calls(s, 3);
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

/* All tokens go to the experts of rank 0, whose capacity is smaller. */
static int load_too_many(struct state *s)
{
    int32_t *index = (int32_t *)(void *)s->b[INDEX].host;

    TRY(load(s, 5));
    for (int i = 0; i < TOKENS * TOPK; i++)
        index[i] = i % TOPK;
    return mirror_push(&s->group, &s->b[INDEX]);
}

/* A launch that all ranks refuse, between two that succeed. */
static int run_refused_made(struct state *s)
{
    cudaGraphExec_t exec;
    int code;

    TRY(load(s, 0));
    TRY(make_plan(s, 0));
    TRY(capture_made(s, &exec));
    code = check_round(s, 0, exec);
    TRY(load_too_many(s));
    CUDA(cudaGraphLaunch(exec, s->group.stream));
    TRY(expect_status("ep_stream_sync", ep_stream_sync(s->group.cuda, s->group.stream), EP_E_CAPACITY, "rank 0"));
    CALL(ep_comm_async_error(s->group.cuda));
    TRY(load_round(s, 6));
    code |= check_round(s, 6, exec);
    CUDA(cudaGraphExecDestroy(exec));
    return code;
}

/* The plan is made and used; then it is updated each round. */
static int run_rounds(struct state *s)
{
    cudaGraphExec_t exec = NULL;
    int code = PASSED;

    TRY(load(s, 0));
    TRY(make_plans(s));
    if (s->scenario->graph) {
        /* Between nodes the hosts make a plan with its first operation. */
        if (group_division.nodes > 1) {
            TRY(call_pair(s, 1));
            TRY(group_sync(&s->group, 1));
        }
        TRY(capture_begin(&s->group));
        CALL(call_update(s, 1));
        TRY(call_pair(s, 1));
        TRY(capture_end(&s->group, &exec));
    }
    for (int round = 0; round < s->rounds && !code; round++) {
        if (round)
            TRY(load(s, round));
        if (round)
            CALL(call_update(s, 0));
        TRY(call_pair(s, 0));
        TRY(group_sync(&s->group, 0));
        if (exec) {
            CUDA(cudaGraphLaunch(exec, s->group.stream));
        } else {
            if (round)
                CALL(call_update(s, 1));
            TRY(call_pair(s, 1));
        }
        TRY(group_sync(&s->group, 1));
        code = compare(s, round);
        TRY(group_merge_codes(&s->group, code, &code));
    }
    if (exec)
        CUDA(cudaGraphExecDestroy(exec));
    return code;
}

/* The group continues with the next routing. */
static int run_refused(struct state *s)
{
    ep_status status;

    TRY(load(s, 0));
    TRY(make_plans(s));
    TRY(call_pair(s, 1));
    TRY(group_sync(&s->group, 1));
    TRY(load_too_many(s));
    CALL(call_update(s, 1));
    TRY(call_pair(s, 1));
    status = ep_stream_sync(s->group.cuda, s->group.stream);
    TRY(expect_status("ep_stream_sync", status, EP_E_CAPACITY, "rank 0"));
    CALL(ep_comm_async_error(s->group.cuda));
    TRY(load(s, 6));
    for (int device = 0; device < 2; device++) {
        CALL(call_update(s, device));
        TRY(call_pair(s, device));
        TRY(group_sync(&s->group, device));
    }
    return compare(s, 6);
}

/* Fails the communicator, which is not used afterwards. */
static int run_bad(struct state *s)
{
    int bad = s->group.nranks - 1;
    ep_status status;

    TRY(load(s, 0));
    TRY(make_plans(s));
    TRY(call_pair(s, 1));
    TRY(group_sync(&s->group, 1));
    TRY(group_barrier(&s->group));
    if (s->group.rank == bad)
        ((int32_t *)(void *)s->b[INDEX].host)[5] = s->experts;
    TRY(mirror_push(&s->group, &s->b[INDEX]));
    /* A rank that comes later gets the failure at once. */
    status = call_update(s, 1);
    if (status == EP_OK)
        status = ep_stream_sync(s->group.cuda, s->group.stream);
    TRY(expect_failed_rank("ep_plan_update", status, EP_E_ROUTING, bad));
    return group_barrier(&s->group);
}

/* The operations are captured for all tokens; the last rank then updates the plan with one token less. */
static int run_tokens(struct state *s)
{
    int bad = s->group.nranks - 1;
    cudaGraphExec_t exec;
    ep_status status;

    TRY(load(s, 0));
    TRY(make_plans(s));
    TRY(call_pair(s, 1));
    TRY(group_sync(&s->group, 1));
    TRY(capture_begin(&s->group));
    if (!s->scenario->only_combine)
        TRY(call_dispatch(s, 1));
    if (!s->scenario->only_dispatch)
        TRY(call_combine(s, 1));
    TRY(capture_end(&s->group, &exec));
    TRY(group_barrier(&s->group));
    if (s->group.rank == bad)
        s->n_tokens--;
    CALL(call_update(s, 1));
    CUDA(cudaGraphLaunch(exec, s->group.stream));
    status = ep_stream_sync(s->group.cuda, s->group.stream);
    TRY(expect_failed_rank("ep_stream_sync", status, EP_E_STATE, bad));
    if (s->group.rank == bad)
        TRY(expect_status("ep_stream_sync", status, EP_E_STATE, "599 tokens"));
    CUDA(cudaGraphExecDestroy(exec));
    return group_barrier(&s->group);
}

static int run_scenario(struct state *s)
{
    if (s->scenario->unlaunched)
        return run_unlaunched(s);
    if (s->scenario->tokens)
        return run_tokens(s);
    if (s->scenario->followed)
        return run_followed(s);
    if (s->scenario->made)
        return s->scenario->refused ? run_refused_made(s) : run_made(s);
    return s->scenario->refused ? run_refused(s) : s->scenario->bad ? run_bad(s) : run_rounds(s);
}

static int run_all(struct state *s)
{
    int code;

    s->capacity = (int64_t)s->group.nranks * TOKENS * (s->scenario->expanded ? TOPK : 1);
    if (s->scenario->expanded)
        s->capacity += (int64_t)s->experts * ALIGNMENT;
    if (s->scenario->refused)
        s->capacity -= s->scenario->expanded ? s->capacity / 8 : 1;
    TRY(make_buffers(s));
    code = run_scenario(s);
    for (int i = 0; i < N_BUFFERS; i++)
        code |= mirror_free(&s->group, s->scenario->bad || code & FAILED, &s->b[i]);
    ep_plan_free(s->plan[1]);
    ep_plan_free(s->plan[0]);
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
    struct options options = {.ranks = 2, .rounds = 30, .seed = 1};
    struct scenario_run run = {.program = "plan_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
