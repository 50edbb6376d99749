/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence_cuda [--ranks N] [--nodes N [--network NAME]] [--rounds N] [--seed N]: random sequences of calls, the same
 * on all ranks. Several plans at once (both layouts, from choices and masks, exact counts and fixed capacity, updates,
 * metadata), two ep_ll, three streams, a captured graph that is launched among calls, barriers, events, streams that
 * are held for a while, other numbers of SMs; plans are freed and made while work is queued. The host backend makes the
 * same calls one by one. From time to time all buffers are compared, bit for bit, and get new data. Exit 77 when there
 * is no GPU.
 */
#include "ll_case.h"
#include "sequence_slot.h"

#include <epkit/cuda.h>
#include <stdio.h>

enum { SLOTS = 4, STREAMS = 3, LLS = 2, EXCHANGES = 2, STEPS = 60, GRAPH_CALLS = 6, LAUNCHES = 3, HOLDS = 8 };
enum { TIMEOUT_MS = 20000, HOLD_MS = 4 };

struct step {
    enum call call;
    int slot;    /* EXCHANGE: an ep_ll */
    int routing; /* that an update gives, or that the call is made for */
};

struct state {
    struct group group;
    struct dice dice;
    struct slot slot[SLOTS];
    struct ll_pair ll[LLS];
    struct exchange *exchange[LLS][EXCHANGES];
    bool exchanged[LLS]; /* since they were loaded */
    cudaStream_t streams[STREAMS];
    struct hold hold[HOLDS];
    cudaGraphExec_t graph;
    struct step captured[GRAPH_CALLS];
    int n_captured;
};

static int sync_streams(struct state *s)
{
    for (int i = 0; i < STREAMS; i++)
        CALL(ep_stream_sync(s->group.cuda, s->streams[i]));
    return 0;
}

/* --- low latency ------------------------------------------------------------------------------------------------- */

static int open_ll(struct state *s, int number)
{
    struct dice *dice = &s->dice;
    ep_ll_config config = EP_LL_CONFIG_INIT;

    config.max_tokens = 1 + draw(dice, 64);
    config.hidden = 512 * (1 + draw(dice, 14));
    config.n_experts = s->group.nranks * (4 + draw(dice, 12));
    config.topk = 1 + draw(dice, 8 < config.n_experts ? 8 : config.n_experts);
    config.flags = draw(dice, 3) ? 0 : EP_LL_NO_PARTIAL_REDUCE;
    TRY(ll_pair_open(&s->group, &config, &s->ll[number]));
    for (int i = 0; i < EXCHANGES; i++) {
        struct ll_round round = {.format = (enum ll_format)draw(dice, LL_FORMATS),
                                 .idx_type = draw(dice, 2) ? EP_I32 : EP_I64,
                                 .sources = draw(dice, 2),
                                 .symmetric = draw(dice, 2),
                                 .dispatch_flags = TEST_ASYNC | (draw(dice, 2) ? EP_LL_RECV_HOOK : 0),
                                 .combine_flags = TEST_ASYNC | (draw(dice, 2) ? EP_LL_RECV_HOOK : 0),
                                 .seed = next_random(&dice->own)};

        round.n_tokens = draw_own(dice, config.max_tokens + 1);
        TRY(exchange_new(&s->ll[number], &round, &s->exchange[number][i]));
    }
    return 0;
}

static int close_ll(struct state *s, int number, int code)
{
    if (!(code & FAILED))
        code |= group_barrier(&s->group);
    for (int i = 0; i < EXCHANGES; i++) {
        code |= exchange_free(s->exchange[number][i], code & FAILED);
        s->exchange[number][i] = NULL;
    }
    ll_pair_close(&s->ll[number]);
    s->exchanged[number] = false;
    return code;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

/* The host backend has made the calls of an exchange when it was loaded. */
static int call_host(struct state *s, const struct step *step)
{
    if (step->call == EXCHANGE)
        s->exchanged[step->slot] = true;
    if (step->call == EXCHANGE || step->call == BARRIER)
        return 0;
    TRY(slot_call(&s->group, &s->slot[step->slot], step->call, step->routing, false, NULL));
    CALL(ep_stream_sync(s->group.host, NULL));
    if (step->call == UPDATE)
        s->slot[step->slot].latest = step->routing;
    return 0;
}

static int call_cuda(struct state *s, const struct step *step, cudaStream_t stream)
{
    if (step->call == EXCHANGE)
        return exchange_call_all(s->exchange[step->slot], EXCHANGES, step->routing == 0);
    if (step->call != BARRIER)
        return slot_call(&s->group, &s->slot[step->slot], step->call, step->routing, true, stream);
    CALL(ep_barrier_on(s->group.cuda, stream));
    return 0;
}

/* An update outside of graphs. */
static int update(struct state *s, const struct step *step, cudaStream_t stream)
{
    struct slot *slot = &s->slot[step->slot];

    TRY(call_cuda(s, step, stream));
    slot->called = slot->recorded = step->routing;
    slot->updated = true;
    return call_host(s, step);
}

/* A call that is valid now; `captured`: in a graph. */
static struct step choose_step(struct state *s, bool captured)
{
    for (;;) {
        struct step step = {.call = (enum call)draw(&s->dice, CALLS)};
        const struct slot *slot;

        step.slot = draw(&s->dice, SLOTS);
        step.routing = draw(&s->dice, ROUTINGS);
        slot = &s->slot[step.slot];
        if (step.call == EXCHANGE)
            step.slot %= LLS;
        if (step.call == EXCHANGE || step.call == BARRIER)
            return step;
        if (!slot->used || ((step.call == UPDATE || step.call == MADE) && !slot->fixed))
            continue;
        /* Metadata is not captured. A plan that is made in a capture needs choices. */
        if (captured && (step.call == METADATA || (step.call == MADE && slot->mask)))
            continue;
        if (step.call == UPDATE || step.call == MADE)
            return step;
        /* A call outside of graphs is for the last update there: a graph may have given the plan other routing. */
        step.routing = slot->called;
        if (captured || slot->called == slot->latest)
            return step;
    }
}

/* --- graphs ------------------------------------------------------------------------------------------------------ */

/* Work of all streams before and after what follows in the group's stream. The caller orders launches and calls. */
static int join_streams(struct state *s, bool before)
{
    cudaEvent_t event;

    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    for (int i = 1; i < STREAMS; i++) {
        CUDA(cudaEventRecord(event, before ? s->streams[i] : s->streams[0]));
        CUDA(cudaStreamWaitEvent(before ? s->streams[0] : s->streams[i], event, 0));
    }
    CUDA(cudaEventDestroy(event));
    return 0;
}

static int free_graph(struct state *s)
{
    if (!s->graph)
        return 0;
    TRY(sync_streams(s));
    CUDA(cudaGraphExecDestroy(s->graph));
    s->graph = NULL;
    return 0;
}

static int capture(struct state *s)
{
    int called[SLOTS];

    for (int i = 0; i < SLOTS; i++)
        called[i] = s->slot[i].recorded;
    TRY(free_graph(s));
    TRY(sync_streams(s));
    TRY(capture_begin(&s->group));
    s->n_captured = 1 + draw(&s->dice, GRAPH_CALLS);
    for (int i = 0; i < s->n_captured; i++) {
        struct step *step = &s->captured[i];

        *step = choose_step(s, true);
        if (step->call == UPDATE) {
            called[step->slot] = s->slot[step->slot].recorded = step->routing;
            s->slot[step->slot].updated = true;
        } else if (step->call == DISPATCH || step->call == COMBINE) {
            step->routing = called[step->slot];
        }
        TRY(call_cuda(s, step, s->group.stream));
    }
    return capture_end(&s->group, &s->graph);
}

/* Updates the plans whose operations in the graph were captured for other routing than they have now. */
static int prepare_launch(struct state *s)
{
    bool updated[SLOTS] = {false};

    for (int i = 0; i < s->n_captured; i++) {
        const struct step *step = &s->captured[i];
        bool moves = step->call == DISPATCH || step->call == COMBINE;

        if (step->call == UPDATE)
            updated[step->slot] = true;
        if (moves && !updated[step->slot] && s->slot[step->slot].latest != step->routing)
            TRY(update(s, &(struct step){UPDATE, step->slot, step->routing}, s->group.stream));
    }
    return 0;
}

static int launch(struct state *s)
{
    int launches = 1 + draw(&s->dice, LAUNCHES);

    TRY(join_streams(s, true));
    for (int i = 0; i < launches; i++) {
        TRY(prepare_launch(s));
        CUDA(cudaGraphLaunch(s->graph, s->group.stream));
        for (int k = 0; k < s->n_captured; k++)
            TRY(call_host(s, &s->captured[k]));
    }
    return join_streams(s, false);
}

/* --- sequences --------------------------------------------------------------------------------------------------- */

static int compare(struct state *s, int step)
{
    int code = PASSED;
    char phase[80];

    TRY(sync_streams(s));
    for (int i = 0; i < SLOTS; i++) {
        const struct slot *slot = &s->slot[i];

        snprintf(phase, sizeof(phase), "step %d, plan %d%s%s%s", step, i, slot->fixed ? ", fixed capacity" : "",
                 slot->expanded ? ", expanded" : "", slot->mask ? ", mask" : "");
        code |= slot_compare(&s->group, slot, phase);
    }
    for (int i = 0; i < LLS * EXCHANGES; i++)
        if (s->exchanged[i / EXCHANGES])
            code |= exchange_compare(s->exchange[i / EXCHANGES][i % EXCHANGES],
                                     i < EXCHANGES ? "first ep_ll" : "second ep_ll");
    return code;
}

/* Compares everything, and loads new data. */
static int check(struct state *s, int step)
{
    int code = compare(s, step);

    if (code & FAILED)
        return code;
    for (int i = 0; i < SLOTS; i++)
        TRY(slot_load(&s->group, &s->dice, &s->slot[i]));
    for (int i = 0; i < LLS; i++) {
        for (int k = 0; k < EXCHANGES; k++)
            TRY(exchange_load(s->exchange[i][k], next_random(&s->dice.own)));
        s->exchanged[i] = false;
    }
    return code;
}

/* Sometimes the plan's work is still queued, and its memory is freed as soon as the plan is. */
static int replace_slot(struct state *s)
{
    struct slot *slot = &s->slot[draw(&s->dice, SLOTS)];

    TRY(free_graph(s));
    if (draw(&s->dice, 2))
        TRY(sync_streams(s));
    TRY(slot_free(&s->group, PASSED, slot));
    return slot_new(&s->group, &s->dice, slot);
}

static int replace_ll(struct state *s)
{
    int number = draw(&s->dice, LLS);

    TRY(free_graph(s));
    TRY(sync_streams(s));
    TRY(close_ll(s, number, PASSED));
    return open_ll(s, number);
}

static int compare_sources(struct state *s)
{
    const struct slot *slot = &s->slot[draw(&s->dice, SLOTS)];

    TRY(sync_streams(s));
    return slot->fixed || slot->updated ? 0 : slot_compare_sources(slot);
}

/* What changes no result: an event between streams, a stream that is held on one rank, another number of SMs. */
static int disturb(struct state *s)
{
    cudaStream_t from = s->streams[draw(&s->dice, STREAMS)], to = s->streams[draw(&s->dice, STREAMS)];
    struct hold *hold = &s->hold[draw_own(&s->dice, HOLDS)];
    ep_event *event;

    switch (draw(&s->dice, 3)) {
    case 0:
        CALL(ep_event_record(s->group.cuda, from, &event));
        CALL(ep_stream_wait(s->group.cuda, to, event));
        if (draw_own(&s->dice, 2))
            CALL(ep_event_wait(event, -1));
        ep_event_free(event);
        return 0;
    case 1:
        hold->ms = draw_own(&s->dice, HOLD_MS);
        return hold_stream(from, hold);
    default:
        CALL(ep_cuda_set_sms(s->group.cuda, draw_own(&s->dice, 3) ? 1 + draw_own(&s->dice, 40) : 0));
        return 0;
    }
}

static int run_step(struct state *s, int number)
{
    struct step step;
    int action = draw(&s->dice, 24);

    if (action == 0)
        return draw(&s->dice, 3) ? replace_slot(s) : replace_ll(s);
    if (action == 1)
        return capture(s);
    if (action <= 4 && s->graph)
        return launch(s);
    if (action == 5)
        return check(s, number);
    if (action == 6)
        return compare_sources(s);
    if (action <= 8)
        return disturb(s);
    step = choose_step(s, false);
    if (step.call == UPDATE)
        return update(s, &step, s->streams[draw(&s->dice, STREAMS)]);
    /* An exchange uses the group's stream. */
    TRY(call_cuda(s, &step, s->streams[step.call == EXCHANGE ? 0 : draw(&s->dice, STREAMS)]));
    return call_host(s, &step);
}

static int run_sequence(struct state *s, int number)
{
    int code = PASSED;

    for (int i = 0; i < SLOTS; i++)
        TRY(slot_new(&s->group, &s->dice, &s->slot[i]));
    for (int i = 0; i < LLS; i++)
        TRY(open_ll(s, i));
    for (int step = 0; step < STEPS && !(code & FAILED); step++) {
        test_set_context("rank %d of %d, sequence %d, step %d", s->group.rank, s->group.nranks, number, step);
        code |= run_step(s, step);
    }
    return code & FAILED ? code : code | check(s, STEPS);
}

static int close_sequence(struct state *s, int code)
{
    if (!(code & FAILED))
        code |= free_graph(s);
    for (int i = 0; i < LLS; i++)
        code |= close_ll(s, i, code);
    for (int i = 0; i < SLOTS; i++)
        code |= slot_free(&s->group, code, &s->slot[i]);
    return code;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    static struct state states[MAX_RANKS]; /* static: the holds in it outlive a failure */
    struct state *s = &states[group->rank];
    int code = PASSED, all = PASSED;

    s->group = *group;
    s->streams[0] = group->stream;
    for (int i = 1; i < STREAMS; i++)
        CUDA(cudaStreamCreateWithFlags(&s->streams[i], cudaStreamNonBlocking));
    for (int i = 0; i < run->rounds && !all; i++) {
        s->dice.shared = (run->seed * 1000 + (uint64_t)i) * 0x10001;
        s->dice.own = s->dice.shared * 64 + (uint64_t)group->rank + 1;
        code = close_sequence(s, run_sequence(s, i));
        if (code & FAILED)
            return code;
        TRY(group_merge_codes(group, code, &all));
    }
    for (int i = 1; i < STREAMS; i++)
        cudaStreamDestroy(s->streams[i]);
    return all;
}

int main(int argc, char **argv)
{
    static const char *const scenarios[] = {"sequences"};
    struct options options = {.ranks = 2, .rounds = 10, .seed = 1};

    if (!options_read(argc, argv, 1, &options))
        return 2;
    return run_group_scenarios(
        &options,
        (struct scenario_run){
            .program = "sequence_cuda", .timeout_ms = TIMEOUT_MS, .seconds = 20 + 10 * options.rounds, .run = run_rank},
        scenarios, 1, sizeof(scenarios[0]));
}
