/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nodes_graph_cuda [--ranks N] [--nodes N] [--network NAME] [--rounds N] [--seed N] [--only SCENARIO]: dispatch,
 * combine and barrier between nodes in CUDA graphs that are captured once and launched again with new rows and weights
 * each round, against the host backend; outputs are poisoned before each launch. Several graphs, several launches at a
 * time, and calls between them, some of which need more memory than existed when the graphs were captured. Exit 77 if
 * there is no GPU.
 */
#include "case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOPK = 4, TIMEOUT_MS = 10000, AHEAD = 3 };

enum { X, WEIGHTS, RECV, RECV_WEIGHTS, OUT, OUT_WEIGHTS, N_BUFFERS };

/* An operation pair: its plan, buffers and graph. */
static const struct form {
    const char *name;
    int tokens, hidden;
    bool expanded, symmetric, barrier;
} forms[] = {
    {"rank", 120, 256, false, false, false},
    {"expanded", 90, 512, true, true, true},
    {"large", 1500, 1024, false, true, false},
};

enum { RANK, EXPANDED, LARGE, N_FORMS };

static const struct scenario {
    const char *name;
    unsigned forms; /* a bit for each */
    int divisor;    /* of the number of rounds */
} scenarios[] = {
    {"rank", 1 << RANK, 1},
    {"expanded", 1 << EXPANDED, 1},
    {"mixed", 1 << RANK | 1 << EXPANDED | 1 << LARGE, 5},
};

struct job {
    const struct form *form;
    ep_plan *plan[2]; /* on the host, on the device */
    int64_t rows;
    struct mirror b[N_BUFFERS];
    cudaGraphExec_t exec;
};

struct state {
    const struct group *group;
    const struct scenario *scenario;
    uint64_t random, common; /* common: the same on all ranks */
    int rounds;
    struct job jobs[N_FORMS];
};

static int make_plans(struct state *s, struct job *job)
{
    struct routing routing = {.n_tokens = job->form->tokens,
                              .topk = TOPK,
                              .n_experts = 12 * s->group->nranks,
                              .nranks = s->group->nranks,
                              .idx_type = EP_I32,
                              .holes = true};
    int32_t *index = malloc((size_t)routing.n_tokens * TOPK * sizeof(*index));
    ep_plan_info info = {.size = sizeof(info)};

    EXPECT(index, "no memory for the routing");
    fill_routing(&routing, &s->random, index);
    for (int device = 0; device < 2; device++) {
        ep_plan_args args = args_plan(index, EP_I32, routing.n_tokens, TOPK, routing.n_experts);

        args.expert_alignment = job->form->expanded ? 8 : 1;
        args.flags = job->form->expanded ? EP_PLAN_EXPANDED | EP_PLAN_ZERO_PADDING : 0;
        CALL(ep_plan_new(device ? s->group->cuda : s->group->host, &args, &job->plan[device]));
        CALL(ep_plan_get_info(job->plan[device], &info));
        job->rows = info.out_rows;
    }
    free(index);
    return 0;
}

static int make_job(struct state *s, struct job *job)
{
    size_t n = (size_t)job->form->tokens, row = (size_t)job->form->hidden * 2, weights = TOPK * sizeof(float);
    size_t recv_weights = job->form->expanded ? sizeof(float) : weights;
    enum memory memory = job->form->symmetric ? SYMMETRIC : ORDINARY;

    TRY(make_plans(s, job));
    TRY(mirror_new(s->group, "x", n * row, ORDINARY, &job->b[X]));
    TRY(mirror_new(s->group, "topk_weights", n * weights, ORDINARY, &job->b[WEIGHTS]));
    TRY(mirror_new(s->group, "recv_x", (size_t)job->rows * row, memory, &job->b[RECV]));
    TRY(mirror_new(s->group, "recv_topk_weights", (size_t)job->rows * recv_weights, memory, &job->b[RECV_WEIGHTS]));
    TRY(mirror_new(s->group, "out", n * row, ORDINARY, &job->b[OUT]));
    return mirror_new(s->group, "out_topk_weights", n * weights, ORDINARY, &job->b[OUT_WEIGHTS]);
}

static int load(struct state *s, struct job *job)
{
    size_t n = (size_t)job->form->tokens;

    fill_bf16((uint16_t *)(void *)job->b[X].host, n * (size_t)job->form->hidden, &s->random);
    for (size_t i = 0; i < n * TOPK; i++)
        ((float *)(void *)job->b[WEIGHTS].host)[i] = (float)(next_random(&s->random) % 1000) / 999.0f;
    TRY(mirror_push(s->group, &job->b[X]));
    return mirror_push(s->group, &job->b[WEIGHTS]);
}

static int call_pair(const struct state *s, const struct job *job, int device)
{
    ep_stream stream = device ? (ep_stream)s->group->stream : NULL;
    ep_dispatch_args dispatch;
    ep_combine_args combine;
    unsigned char *at[N_BUFFERS];

    for (int i = 0; i < N_BUFFERS; i++)
        at[i] = device ? job->b[i].device : job->b[i].host;
    dispatch = args_dispatch(EP_BF16, job->form->hidden, at[X], at[RECV], job->rows);
    combine = args_combine(job->form->hidden, at[RECV], at[OUT]);
    dispatch.topk_weights = (const float *)(const void *)at[WEIGHTS];
    dispatch.recv_topk_weights = (float *)(void *)at[RECV_WEIGHTS];
    CALL(ep_dispatch(job->plan[device], &dispatch, stream));
    combine.topk_weights = (const float *)(const void *)at[RECV_WEIGHTS];
    combine.out_topk_weights = (float *)(void *)at[OUT_WEIGHTS];
    CALL(ep_combine(job->plan[device], &combine, stream));
    return 0;
}

/* The capture includes the poisoning, so each launch has to write all outputs again. */
static int queue_on_device(const struct state *s, const struct job *job)
{
    for (int i = RECV; i < N_BUFFERS; i++)
        TRY(mirror_poison_device(s->group, &job->b[i]));
    TRY(call_pair(s, job, 1));
    if (job->form->barrier)
        CALL(ep_barrier_on(s->group->cuda, s->group->stream));
    return 0;
}

static int capture(const struct state *s, struct job *job)
{
    /* First by calls, which complete the plan and map the peers' memory. */
    TRY(queue_on_device(s, job));
    CALL(ep_stream_sync(s->group->cuda, s->group->stream));
    TRY(capture_begin(s->group));
    TRY(queue_on_device(s, job));
    return capture_end(s->group, &job->exec);
}

/* With several forms, calls alternate with launches, and the large pair, which is in no graph, is called, too. */
static int run_on_device(struct state *s, const struct job *job, bool calls)
{
    int launches = 1 + (int)(next_random(&s->common) % AHEAD);

    for (int i = 0; i < launches; i++) {
        if (calls || !job->exec)
            TRY(queue_on_device(s, job));
        else
            CUDA(cudaGraphLaunch(job->exec, s->group->stream));
    }
    return 0;
}

static int run_round(struct state *s, int round)
{
    bool mixed = (s->scenario->forms & 1 << LARGE) != 0;
    struct job *job = NULL;
    int code = PASSED, form;
    char phase[60];

    do
        form = (int)(next_random(&s->common) % N_FORMS);
    while (!(s->scenario->forms & 1u << form) || (form == LARGE && round % 8));
    job = &s->jobs[form];
    TRY(load(s, job));
    for (int i = RECV; i < N_BUFFERS; i++)
        memset(job->b[i].host, POISON, job->b[i].bytes + GUARD);
    TRY(call_pair(s, job, 0));
    CALL(ep_stream_sync(s->group->host, NULL));
    TRY(run_on_device(s, job, mixed && round % 3 == 0));
    CUDA(cudaStreamSynchronize(s->group->stream));
    CALL(ep_comm_async_error(s->group->cuda));
    snprintf(phase, sizeof(phase), "%s, round %d", job->form->name, round);
    for (int i = RECV; i < N_BUFFERS; i++)
        code |= mirror_compare(s->group, &job->b[i], phase);
    TRY(group_merge_codes(s->group, code, &code));
    return code;
}

static int run_scenario_rounds(struct state *s)
{
    for (int form = 0; form < N_FORMS; form++) {
        struct job *job = &s->jobs[form];

        if (!(s->scenario->forms & 1u << form))
            continue;
        job->form = &forms[form];
        TRY(make_job(s, job));
        if (form != LARGE)
            TRY(capture(s, job));
    }
    for (int round = 0; round < s->rounds; round++)
        TRY(run_round(s, round));
    return 0;
}

static int free_jobs(struct state *s)
{
    for (int form = 0; form < N_FORMS; form++) {
        struct job *job = &s->jobs[form];

        if (job->exec)
            CUDA(cudaGraphExecDestroy(job->exec));
        for (int i = 0; i < N_BUFFERS && job->form; i++)
            TRY(mirror_free(s->group, false, &job->b[i]));
        ep_plan_free(job->plan[1]);
        ep_plan_free(job->plan[0]);
    }
    return 0;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    const struct scenario *scenario = run->scenario;
    struct state s = {.group = group,
                      .scenario = scenario,
                      .random = run->seed * 1000 + (uint64_t)group->rank,
                      .common = run->seed,
                      .rounds = (run->rounds + scenario->divisor - 1) / scenario->divisor};
    int code = run_scenario_rounds(&s);

    return code & FAILED ? code : code | free_jobs(&s);
}

int main(int argc, char **argv)
{
    struct options options = {.ranks = 2, .rounds = 1000, .seed = 1};

    if (!options_read(argc, argv, 2, &options))
        return 2;
    if (group_division.nodes < 2)
        group_division.nodes = 2;
    return run_group_scenarios(
        &options,
        (struct scenario_run){.program = "nodes_graph_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 200, .run = run_rank},
        scenarios, sizeof(scenarios) / sizeof(scenarios[0]), sizeof(scenarios[0]));
}
