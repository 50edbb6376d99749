/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stage_cuda [--ranks N] [--seed N] [--only SCENARIO]: dispatch and combine of ordinary memory, whose rows are copied
 * while they move, among other work. The results are those of the host backend.
 *
 *   async   200 pairs without a wait, alternately of ordinary and symmetric memory; their plans grow, so staging memory
 *           is replaced meanwhile
 *   graph   a graph on symmetric memory, launched between ordinary operations
 *   sms     numbers of multiprocessors: one, the largest that leaves some to copy, one more, the default
 *
 * Exit 77 when there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HIDDEN = 512, TOPK = 4, ROW = HIDDEN * 2, CHOICE = TOPK * 4, TIMEOUT_MS = 20000 };

/* The async scenario. */
enum { PAIRS = 200, PLANS = 20, LEAST_TOKENS = 200, MORE_TOKENS = 100, SHIFTS = 512, HELD_MS = 100 };

/* The graph scenario. */
enum { LAUNCHES = 8, GRAPH_TOKENS = 1500 };

/* The sms scenario: on the first rank and on the others. */
enum sms { USUAL, ONE, MOST, ONE_MORE };
static const enum sms sms_steps[][2] = {{ONE, ONE},        {MOST, MOST},    {ONE_MORE, ONE_MORE}, {USUAL, USUAL},
                                        {ONE_MORE, USUAL}, {ONE, ONE_MORE}, {USUAL, USUAL}};
enum { SMS_STEPS = sizeof(sms_steps) / sizeof(sms_steps[0]) };

/* Multiprocessors that copy in addition to those of ep_cuda_set_sms(): epkit/cuda.h. */
enum { COPYING_SMS = 24 };

enum { HOST, DEVICE };

/* The outputs of many pairs are in one buffer, with gaps that must not be written. */
enum { BY_STAGING, IN_PLACE, N_ARENAS };

enum { RECV_X, RECV_INDEX, RECV_WEIGHTS, OUT, OUT_WEIGHTS, N_OUTPUTS };

static const struct {
    const char *name;
    size_t row_bytes;
    bool received;
} outputs[N_OUTPUTS] = {{"recv_x", ROW, true},
                        {"recv_topk_idx", CHOICE, true},
                        {"recv_topk_weights", CHOICE, true},
                        {"out", ROW, false},
                        {"out_topk_weights", CHOICE, false}};

struct work {
    ep_plan *plan[2]; /* on HOST and on DEVICE */
    int n_tokens;
    int64_t n_recv;
};

struct pair {
    const struct work *work;
    const struct mirror *arena;
    size_t x;             /* where its input begins, */
    size_t at[N_OUTPUTS]; /* and its outputs in the arena */
};

struct state {
    struct group group;
    uint64_t seed;
    int experts;
    struct mirror x, weights, arena[N_ARENAS];
    size_t used[N_ARENAS];
    bool capturing; /* calls go into a graph: no waits */
};

/* --- pairs ------------------------------------------------------------------------------------------------------- */

static int new_work(struct state *s, int n_tokens, uint64_t seed, struct work *ret_work)
{
    struct routing routing = {
        .n_tokens = n_tokens, .topk = TOPK, .n_experts = s->experts, .nranks = s->group.nranks, .idx_type = EP_I32};
    uint64_t random = seed * 4096 + (uint64_t)s->group.rank;
    ep_plan_args args;
    ep_plan_info info = {.size = sizeof(info)};
    int32_t *index = malloc((size_t)n_tokens * CHOICE);

    EXPECT(index, "no memory for the routing of %d tokens", n_tokens);
    fill_routing(&routing, &random, index);
    args = args_plan(index, EP_I32, n_tokens, TOPK, s->experts);
    CALL(ep_plan_new(s->group.host, &args, &ret_work->plan[HOST]));
    CALL(ep_plan_new(s->group.cuda, &args, &ret_work->plan[DEVICE]));
    free(index);
    CALL(ep_plan_get_info(ret_work->plan[HOST], &info));
    ret_work->n_tokens = n_tokens;
    ret_work->n_recv = info.n_recv;
    return 0;
}

static void free_work(struct work *work)
{
    ep_plan_free(work->plan[HOST]);
    ep_plan_free(work->plan[DEVICE]);
}

static size_t bytes_of(const struct work *work, int output)
{
    return (outputs[output].received ? (size_t)work->n_recv : (size_t)work->n_tokens) * outputs[output].row_bytes;
}

/* Called before the arena is made, which gets as many bytes as its pairs use. */
static void lay_pair(struct state *s, const struct work *work, int arena, size_t x, struct pair *ret_pair)
{
    *ret_pair = (struct pair){.work = work, .arena = &s->arena[arena], .x = x};
    for (int i = 0; i < N_OUTPUTS; i++) {
        ret_pair->at[i] = s->used[arena];
        s->used[arena] += bytes_of(work, i) + GUARD;
    }
}

static int new_arenas(struct state *s)
{
    TRY(mirror_new(&s->group, "ordinary memory", s->used[BY_STAGING], ORDINARY, &s->arena[BY_STAGING]));
    return mirror_new(&s->group, "symmetric memory", s->used[IN_PLACE], SYMMETRIC, &s->arena[IN_PLACE]);
}

static int new_inputs(struct state *s, size_t tokens)
{
    uint64_t random = s->seed * 977 + (uint64_t)s->group.rank;

    TRY(mirror_new(&s->group, "x", tokens * ROW, ORDINARY, &s->x));
    TRY(mirror_new(&s->group, "topk_weights", tokens * CHOICE, ORDINARY, &s->weights));
    for (size_t i = 0; i < s->weights.bytes / 4; i++)
        ((float *)(void *)s->weights.host)[i] = (float)(next_random(&random) % 1000) / 999.0f;
    return mirror_push(&s->group, &s->weights);
}

static int fill_x(struct state *s, uint64_t seed)
{
    uint64_t random = seed * 64 + (uint64_t)s->group.rank;

    fill_bf16((uint16_t *)(void *)s->x.host, s->x.bytes / 2, &random);
    return mirror_push(&s->group, &s->x);
}

static unsigned char *memory_on(const struct mirror *mirror, int side)
{
    return side == DEVICE ? mirror->device : mirror->host;
}

/* ret_event NULL: waits for the call, unless it is captured. */
static int finish_call(struct state *s, int side, ep_event **ret_event)
{
    ep_comm *comm = side == DEVICE ? s->group.cuda : s->group.host;
    ep_stream stream = side == DEVICE ? s->group.stream : NULL;

    if (ret_event)
        CALL(ep_event_record(comm, stream, ret_event));
    else if (!s->capturing)
        CALL(ep_stream_sync(comm, stream));
    return 0;
}

static int call_dispatch(struct state *s, const struct pair *p, int side, ep_event **ret_event)
{
    ep_stream stream = side == DEVICE ? s->group.stream : NULL;
    unsigned char *arena = memory_on(p->arena, side);
    ep_dispatch_args args =
        args_dispatch(EP_BF16, HIDDEN, memory_on(&s->x, side) + p->x, arena + p->at[RECV_X], p->work->n_recv);

    args.topk_weights = (const float *)(const void *)memory_on(&s->weights, side);
    args.recv_topk_idx = arena + p->at[RECV_INDEX];
    args.recv_topk_weights = (float *)(void *)(arena + p->at[RECV_WEIGHTS]);
    CALL(ep_dispatch(p->work->plan[side], &args, stream));
    return finish_call(s, side, ret_event);
}

static int call_combine(struct state *s, const struct pair *p, int side, ep_event **ret_event)
{
    ep_stream stream = side == DEVICE ? s->group.stream : NULL;
    unsigned char *arena = memory_on(p->arena, side);
    ep_combine_args args = args_combine(HIDDEN, arena + p->at[RECV_X], arena + p->at[OUT]);

    args.topk_weights = (const float *)(const void *)(arena + p->at[RECV_WEIGHTS]);
    args.out_topk_weights = (float *)(void *)(arena + p->at[OUT_WEIGHTS]);
    CALL(ep_combine(p->work->plan[side], &args, stream));
    return finish_call(s, side, ret_event);
}

static int wait_and_free(ep_event *event, int number)
{
    ep_status status = ep_event_wait(event, -1);

    EXPECT(status == EP_OK, "operation %d: %s: %s", number, ep_status_name(status), ep_last_error());
    ep_event_free(event);
    return 0;
}

/* Compares every output and the gap after it, up to the first pair that differs. */
static int compare_pairs(struct state *s, const struct pair *pairs, int n)
{
    int code = PASSED;

    for (int i = 0; i < n && !code; i++)
        for (int k = 0; k < N_OUTPUTS; k++) {
            const struct pair *p = &pairs[i];
            struct mirror part = {.name = outputs[k].name,
                                  .host = p->arena->host + p->at[k],
                                  .device = p->arena->device + p->at[k],
                                  .bytes = bytes_of(p->work, k),
                                  .row_bytes = outputs[k].row_bytes};
            char phase[80];

            snprintf(phase, sizeof(phase), "pair %d of %d tokens, %s", i, p->work->n_tokens, p->arena->name);
            code |= mirror_compare(&s->group, &part, phase);
        }
    return code;
}

static int free_buffers(struct state *s, int code)
{
    code |= mirror_free(&s->group, code & FAILED, &s->x);
    code |= mirror_free(&s->group, code & FAILED, &s->weights);
    for (int i = 0; i < N_ARENAS; i++)
        code |= mirror_free(&s->group, code & FAILED, &s->arena[i]);
    return code;
}

/* --- scenarios ------------------------------------------------------------------------------------------------------
 */

static int queue_pairs(struct state *s, const struct pair *pairs, ep_event **ret_events)
{
    static struct hold hold; /* static: outlives a failure */

    /* Fills the queue: no rank's kernels end before this one's begin. */
    hold = (struct hold){.ms = HELD_MS};
    if (s->group.rank == s->group.nranks - 1)
        TRY(hold_stream(s->group.stream, &hold));
    for (int i = 0; i < PAIRS; i++) {
        TRY(call_dispatch(s, &pairs[i], DEVICE, &ret_events[2 * i]));
        TRY(call_combine(s, &pairs[i], DEVICE, &ret_events[2 * i + 1]));
    }
    for (int i = 0; i < 2 * PAIRS; i++)
        TRY(wait_and_free(ret_events[i], i));
    return 0;
}

static int run_async(struct state *s)
{
    static struct pair pairs[PAIRS];
    ep_event *events[2 * PAIRS];
    struct work work[PLANS];
    int code;

    for (int i = 0; i < PLANS; i++)
        TRY(new_work(s, LEAST_TOKENS + i * MORE_TOKENS + s->group.rank * 7, s->seed + (uint64_t)i, &work[i]));
    for (int i = 0; i < PAIRS; i++)
        lay_pair(s, &work[i * PLANS / PAIRS], i % 2 ? IN_PLACE : BY_STAGING, (size_t)(i * 37 % SHIFTS) * ROW,
                 &pairs[i]);
    TRY(new_inputs(s, (size_t)work[PLANS - 1].n_tokens + SHIFTS));
    TRY(fill_x(s, s->seed));
    TRY(new_arenas(s));
    CUDA(cudaStreamSynchronize(s->group.stream));
    TRY(group_barrier(&s->group));
    TRY(queue_pairs(s, pairs, events));
    for (int i = 0; i < PAIRS; i++) {
        TRY(call_dispatch(s, &pairs[i], HOST, NULL));
        TRY(call_combine(s, &pairs[i], HOST, NULL));
    }
    code = compare_pairs(s, pairs, PAIRS);
    for (int i = 0; i < PLANS; i++)
        free_work(&work[i]);
    return free_buffers(s, code);
}

/* Ordinary, graph, ordinary, graph, ordinary; in every second round without waits in between. */
static int run_round(struct state *s, const struct pair *ordinary, cudaGraphExec_t exec, int round)
{
    ep_event *events[4], **at[4] = {NULL};

    for (int i = 0; i < 4 && round % 2; i++)
        at[i] = &events[i];
    TRY(call_dispatch(s, &ordinary[0], DEVICE, at[0]));
    CUDA(cudaGraphLaunch(exec, s->group.stream));
    TRY(call_combine(s, &ordinary[0], DEVICE, at[1]));
    for (int i = 0; i < round % 3; i++)
        CUDA(cudaGraphLaunch(exec, s->group.stream));
    TRY(call_dispatch(s, &ordinary[1], DEVICE, at[2]));
    TRY(call_combine(s, &ordinary[1], DEVICE, at[3]));
    for (int i = 0; i < 4 && round % 2; i++)
        TRY(wait_and_free(events[i], i));
    CUDA(cudaStreamSynchronize(s->group.stream));
    CALL(ep_comm_async_error(s->group.cuda));
    return 0;
}

static int run_graph(struct state *s)
{
    struct pair pairs[3]; /* two ordinary ones, and the graph's */
    struct work work;
    cudaGraphExec_t exec;
    int differs, code = PASSED;

    TRY(new_work(s, GRAPH_TOKENS - s->group.rank * 100 % GRAPH_TOKENS, s->seed, &work));
    for (int i = 0; i < 3; i++)
        lay_pair(s, &work, i == 2 ? IN_PLACE : BY_STAGING, (size_t)i * ROW, &pairs[i]);
    TRY(new_inputs(s, (size_t)work.n_tokens + 3));
    TRY(new_arenas(s));
    TRY(capture_begin(&s->group));
    s->capturing = true;
    TRY(call_dispatch(s, &pairs[2], DEVICE, NULL));
    TRY(call_combine(s, &pairs[2], DEVICE, NULL));
    s->capturing = false;
    TRY(capture_end(&s->group, &exec));
    for (int round = 0; round < LAUNCHES; round++) {
        TRY(fill_x(s, s->seed + (uint64_t)round));
        for (int i = 0; i < N_ARENAS; i++)
            TRY(mirror_poison(&s->group, &s->arena[i]));
        TRY(run_round(s, pairs, exec, round));
        for (int i = 0; i < 3; i++) {
            TRY(call_dispatch(s, &pairs[i], HOST, NULL));
            TRY(call_combine(s, &pairs[i], HOST, NULL));
        }
        differs = compare_pairs(s, pairs, 3);
        if (differs)
            test_report("that was round %d", round);
        code |= differs;
    }
    CUDA(cudaGraphExecDestroy(exec));
    free_work(&work);
    return free_buffers(s, code);
}

/* The largest ep_cuda_set_sms() with which rows are still copied while others move; 0: too many ranks share a GPU. */
static int find_max_sms(struct state *s, int *ret_max)
{
    char mine[32] = "", all[MAX_RANKS][32];
    int sms, sharing = 0;

    CUDA(cudaDeviceGetPCIBusId(mine, sizeof(mine), s->group.device));
    CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, s->group.device));
    CALL(ep_comm_allgather(s->group.host, mine, sizeof(mine), all));
    for (int rank = 0; rank < s->group.nranks; rank++)
        sharing += strcmp(all[rank], mine) == 0;
    *ret_max = sms / sharing > COPYING_SMS ? sms / sharing - COPYING_SMS : 0;
    return 0;
}

static int run_with(struct state *s, int sms, int expected, uint64_t seed)
{
    struct shape shape = {.n_tokens = 1500 + s->group.rank,
                          .hidden = 2048,
                          .topk = 6,
                          .n_experts = s->experts,
                          .dtype = EP_BF16,
                          .idx_type = EP_I64,
                          .n_bias = 1,
                          .choice = true,
                          .seed = s->seed * 4096 + seed * 64 + (uint64_t)s->group.rank};
    int now, code;

    CALL(ep_cuda_set_sms(s->group.cuda, sms));
    CALL(ep_cuda_get_device(s->group.cuda, NULL, &now));
    EXPECT(now == expected, "%d multiprocessors, not %d", now, expected);
    code = case_run(&s->group, &shape);
    if (code)
        test_report("with %d multiprocessors", now);
    return code;
}

static int run_sms(struct state *s)
{
    int usual, most, code = PASSED;

    CALL(ep_cuda_get_device(s->group.cuda, NULL, &usual));
    TRY(find_max_sms(s, &most));
    for (int step = 0; step < SMS_STEPS && !(code & FAILED); step++) {
        enum sms wanted = sms_steps[step][s->group.rank == 0 ? 0 : 1];
        int sms = wanted == ONE ? 1 : wanted == MOST ? most : wanted == ONE_MORE ? most + 1 : 0;

        code |= run_with(s, sms, sms ? sms : usual, (uint64_t)step);
    }
    return code;
}

/* --- program ----------------------------------------------------------------------------------------------------- */

static const struct scenario {
    const char *name;
    int (*run)(struct state *s);
} scenarios[] = {{"async", run_async}, {"graph", run_graph}, {"sms", run_sms}};

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {.group = *group, .seed = run->seed, .experts = group->nranks * 12};

    return scenario->run(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .seed = 1};
    struct scenario_run run = {.program = "stage_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 120, .run = run_rank};

    return run_group_program(argc, argv, 1, &options, run, scenarios, sizeof(scenarios) / sizeof(scenarios[0]),
                             sizeof(scenarios[0]));
}
