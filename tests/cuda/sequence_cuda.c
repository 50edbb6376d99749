/* SPDX-License-Identifier: Apache-2.0 */
/*
 * sequence_cuda [--ranks N] [--nodes N [--network NAME]] [--rounds N] [--seed N]: random sequences of calls, the same
 * on all ranks. Several plans at once (both layouts, exact counts and fixed capacity, updates, metadata), two ep_ll,
 * three streams, a captured graph that is launched among calls, barriers; plans are freed and made while work is
 * queued. The host backend makes the same calls one by one. From time to time all buffers are compared, bit for bit,
 * and get new data. Exit 77 when there is no GPU.
 */
#include "case.h"
#include "ll_case.h"
#include "mirror.h"

#include <epkit/cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4, ROUTINGS = 3, STREAMS = 3, LLS = 2, STEPS = 60, GRAPH_CALLS = 6, LAUNCHES = 3 };
enum { TIMEOUT_MS = 20000, SOURCE_STRIDE = 4096 };

enum buffer {
    X,
    SCALES,
    WEIGHTS,
    IDX, /* of the first routing */
    RECV_X = IDX + ROUTINGS,
    RECV_SCALES,
    RECV_IDX,
    RECV_WEIGHTS,
    ANSWER,
    ANSWER_WEIGHTS,
    OUT,
    OUT_WEIGHTS,
    SOURCE, /* metadata */
    SLOT,
    N_TOKENS,
    PSUM_RANK,
    PSUM_EXPERT,
    COUNT,
    PREFIX,
    BUFFERS
};

static const char *const names[BUFFERS] = {
    "x",           "scales",           "topk_weights",  "topk_idx",          "topk_idx 1",    "topk_idx 2",
    "recv_x",      "recv_scales",      "recv_topk_idx", "recv_topk_weights", "combine x",     "combine topk_weights",
    "out",         "out_topk_weights", "recv_source",   "recv_slot",         "n_recv_tokens", "psum_rank",
    "psum_expert", "count_exact",      "rank_prefix"};

/* A plan on both backends, with all buffers that its calls use. */
struct slot {
    bool used, fixed, expanded, choice, by_choice;
    int dtype, scale_type, idx_type, hidden, topk, n_experts, max_tokens;
    int n_tokens[ROUTINGS]; /* of this rank */
    int called, latest;     /* routing of the last update outside of graphs; of the last one that has run */
    int64_t out_rows;
    ep_plan *host, *cuda;
    struct mirror b[BUFFERS];
};

enum call { DISPATCH, COMBINE, UPDATE, METADATA, EXCHANGE, BARRIER, CALLS };

struct step {
    enum call call;
    int slot;    /* EXCHANGE: an ep_ll */
    int routing; /* that an update gives, or that the call is made for */
};

struct state {
    struct group group;
    uint64_t shared, own; /* random numbers: the same on all ranks; of this rank */
    struct slot slot[SLOTS];
    struct ll_pair ll[LLS];
    struct exchange *exchange[LLS];
    bool exchanged[LLS]; /* since it was loaded */
    cudaStream_t streams[STREAMS];
    cudaGraphExec_t graph;
    struct step captured[GRAPH_CALLS];
    int n_captured;
};

static int draw(struct state *s, int below)
{
    return (int)(next_random(&s->shared) % (uint64_t)below);
}

/* --- plans ------------------------------------------------------------------------------------------------------- */

static int new_buffer(struct state *s, struct slot *slot, enum buffer which, size_t rows, size_t row_bytes)
{
    bool received = which >= RECV_X && which <= ANSWER_WEIGHTS, symmetric = received && draw(s, 3) == 0;
    enum memory memory = !symmetric ? ORDINARY : next_random(&s->own) % 4 ? SYMMETRIC : ORDINARY_AMONG;

    TRY(mirror_new(&s->group, names[which], rows * row_bytes, memory, &slot->b[which]));
    slot->b[which].row_bytes = row_bytes;
    return 0;
}

static int make_inputs(struct state *s, struct slot *slot)
{
    size_t n = (size_t)slot->max_tokens, hidden = (size_t)slot->hidden, topk = (size_t)slot->topk;
    size_t blocks = hidden / EP_SCALE_BLOCK;

    TRY(new_buffer(s, slot, X, n, hidden * ep_dtype_bytes((ep_dtype)slot->dtype)));
    TRY(new_buffer(s, slot, SCALES, n, !slot->scale_type ? 0 : slot->scale_type == EP_F32 ? blocks * 4 : blocks));
    TRY(new_buffer(s, slot, WEIGHTS, n, topk * 4));
    for (int i = 0; i < ROUTINGS; i++)
        TRY(new_buffer(s, slot, (enum buffer)(IDX + i), n, topk * ep_dtype_bytes((ep_dtype)slot->idx_type)));
    return 0;
}

static int make_outputs(struct state *s, struct slot *slot)
{
    size_t rows = (size_t)slot->out_rows, n = (size_t)slot->max_tokens, hidden = (size_t)slot->hidden;
    size_t topk = (size_t)slot->topk, ranks = (size_t)s->group.nranks, local = (size_t)slot->n_experts / ranks;

    TRY(new_buffer(s, slot, RECV_X, rows, hidden * ep_dtype_bytes((ep_dtype)slot->dtype)));
    TRY(new_buffer(s, slot, RECV_SCALES, rows, slot->b[SCALES].row_bytes));
    TRY(new_buffer(s, slot, RECV_IDX, rows, topk * ep_dtype_bytes((ep_dtype)slot->idx_type)));
    TRY(new_buffer(s, slot, RECV_WEIGHTS, rows, slot->expanded ? 4 : topk * 4));
    TRY(new_buffer(s, slot, ANSWER, rows, hidden * 2));
    TRY(new_buffer(s, slot, ANSWER_WEIGHTS, rows, slot->expanded ? 4 : topk * 4));
    TRY(new_buffer(s, slot, OUT, n, hidden * 2));
    TRY(new_buffer(s, slot, OUT_WEIGHTS, n, topk * 4));
    TRY(new_buffer(s, slot, SOURCE, rows, 4));
    TRY(new_buffer(s, slot, SLOT, rows, slot->expanded ? topk * 4 : 0));
    TRY(new_buffer(s, slot, N_TOKENS, 1, 4));
    TRY(new_buffer(s, slot, PSUM_RANK, ranks, 4));
    TRY(new_buffer(s, slot, PSUM_EXPERT, local, 4));
    TRY(new_buffer(s, slot, COUNT, local, 4));
    return new_buffer(s, slot, PREFIX, ranks, ranks * 4);
}

static void fill(struct state *s, struct slot *slot, enum buffer which)
{
    struct mirror *mirror = &slot->b[which];
    struct routing routing = {.topk = slot->topk,
                              .n_experts = slot->n_experts,
                              .nranks = s->group.nranks,
                              .idx_type = slot->idx_type,
                              .skewed = next_random(&s->own) % 5 == 0,
                              .holes = next_random(&s->own) % 3 == 0};

    if (which >= IDX && which < IDX + ROUTINGS) {
        routing.n_tokens = slot->n_tokens[which - IDX];
        fill_routing(&routing, &s->own, mirror->host);
    } else if (which == WEIGHTS || which == ANSWER_WEIGHTS) {
        for (size_t i = 0; i < mirror->bytes / 4; i++)
            ((float *)(void *)mirror->host)[i] = (float)(next_random(&s->own) % 1000) / 999.0f;
    } else if (which == SCALES || (which == X && slot->dtype != EP_BF16)) {
        for (size_t i = 0; i < mirror->bytes; i++)
            mirror->host[i] = (unsigned char)next_random(&s->own);
    } else {
        fill_bf16((uint16_t *)(void *)mirror->host, mirror->bytes / 2, &s->own);
    }
}

static bool is_input(enum buffer which)
{
    return which < RECV_X || which == ANSWER || which == ANSWER_WEIGHTS;
}

/* New data and poisoned outputs. The routing stays: a plan with exact counts has no other. */
static int load(struct state *s, struct slot *slot)
{
    for (int i = 0; i < BUFFERS; i++) {
        if (i >= IDX && i < IDX + ROUTINGS)
            continue;
        if (is_input((enum buffer)i)) {
            fill(s, slot, (enum buffer)i);
            TRY(mirror_push(&s->group, &slot->b[i]));
        } else {
            TRY(mirror_poison(&s->group, &slot->b[i]));
        }
    }
    CUDA(cudaStreamSynchronize(s->group.stream));
    return 0;
}

static void choose_shape(struct state *s, struct slot *slot)
{
    static const int hidden[] = {512, 1024, 2560, 7168}, tokens[] = {1, 33, 200, 600};
    int format = draw(s, 4);

    *slot =
        (struct slot){.fixed = draw(s, 2),
                      .expanded = draw(s, 2),
                      .choice = draw(s, 2),
                      .by_choice = draw(s, 3) == 0 && group_division.nodes<2, .dtype = format> 1 ? EP_F8E4M3 : EP_BF16,
                      .scale_type = format == 2   ? EP_F32
                                    : format == 3 ? EP_UE8M0
                                                  : 0,
                      .idx_type = draw(s, 2) ? EP_I32 : EP_I64,
                      .hidden = hidden[draw(s, 4)],
                      .topk = 1 + draw(s, 8),
                      .max_tokens = tokens[draw(s, 4)]};
    slot->n_experts = s->group.nranks * (8 + draw(s, 12));
    for (int i = 0; i < ROUTINGS; i++)
        slot->n_tokens[i] =
            next_random(&s->own) % 8 ? (int)(next_random(&s->own) % (uint64_t)(slot->max_tokens + 1)) : 0;
}

static int make_plans(struct state *s, struct slot *slot)
{
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan_info info = EP_PLAN_INFO_INIT;

    args.idx_type = slot->idx_type;
    args.n_tokens = slot->n_tokens[0];
    args.max_tokens = slot->max_tokens;
    args.topk = slot->topk;
    args.n_experts = slot->n_experts;
    args.flags = (slot->expanded ? EP_PLAN_EXPANDED : 0) | (slot->expanded && draw(s, 2) ? EP_PLAN_ZERO_PADDING : 0);
    args.expert_alignment = draw(s, 2) ? 0 : 1 + draw(s, 16);
    if (slot->fixed)
        CALL(ep_plan_get_max_rows(s->group.host, &args, &args.max_recv_tokens));
    args.topk_idx = slot->b[IDX].host;
    CALL(ep_plan_new(s->group.host, &args, &slot->host));
    args.topk_idx = slot->b[IDX].device;
    args.stream = s->group.stream;
    CALL(ep_plan_new(s->group.cuda, &args, &slot->cuda));
    CALL(ep_plan_get_info(slot->host, &info));
    slot->out_rows = info.out_rows;
    CALL(ep_plan_get_info(slot->cuda, &info));
    EXPECT(info.out_rows == slot->out_rows, "a plan of %lld rows, not %lld", (long long)info.out_rows,
           (long long)slot->out_rows);
    return 0;
}

static int make_slot(struct state *s, int number)
{
    struct slot *slot = &s->slot[number];

    choose_shape(s, slot);
    TRY(make_inputs(s, slot));
    for (int i = 0; i < ROUTINGS; i++) {
        fill(s, slot, (enum buffer)(IDX + i));
        TRY(mirror_push(&s->group, &slot->b[IDX + i]));
    }
    TRY(make_plans(s, slot));
    TRY(make_outputs(s, slot));
    slot->used = true;
    return load(s, slot);
}

static int free_slot(struct state *s, int number, int code)
{
    struct slot *slot = &s->slot[number];

    ep_plan_free(slot->host);
    ep_plan_free(slot->cuda);
    for (int i = 0; i < BUFFERS; i++)
        code |= mirror_free(&s->group, code & FAILED, &slot->b[i]);
    *slot = (struct slot){.used = false};
    return code;
}

/* --- low latency ------------------------------------------------------------------------------------------------- */

static int open_ll(struct state *s, int number)
{
    ep_ll_config config = EP_LL_CONFIG_INIT;
    struct ll_round round = {.format = (enum ll_format)draw(s, LL_FORMATS),
                             .idx_type = draw(s, 2) ? EP_I32 : EP_I64,
                             .sources = draw(s, 2),
                             .symmetric = draw(s, 2),
                             .dispatch_flags = TEST_ASYNC | (draw(s, 2) ? EP_LL_RECV_HOOK : 0),
                             .combine_flags = TEST_ASYNC | (draw(s, 2) ? EP_LL_RECV_HOOK : 0),
                             .seed = next_random(&s->own)};

    config.max_tokens = 1 + draw(s, 64);
    config.hidden = 512 * (1 + draw(s, 14));
    config.n_experts = s->group.nranks * (4 + draw(s, 12));
    config.topk = 1 + draw(s, 8 < config.n_experts ? 8 : config.n_experts);
    config.flags = draw(s, 3) ? 0 : EP_LL_NO_PARTIAL_REDUCE;
    round.n_tokens = (int)(next_random(&s->own) % (uint64_t)(config.max_tokens + 1));
    TRY(ll_pair_open(&s->group, &config, &s->ll[number]));
    return exchange_new(&s->ll[number], &round, &s->exchange[number]);
}

static int close_ll(struct state *s, int number, int code)
{
    if (!(code & FAILED))
        code |= group_barrier(&s->group);
    code |= exchange_free(s->exchange[number], code & FAILED);
    ll_pair_close(&s->ll[number]);
    s->exchange[number] = NULL;
    s->exchanged[number] = false;
    return code;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static unsigned char *at(const struct slot *slot, enum buffer which, bool device)
{
    return device ? slot->b[which].device : slot->b[which].host;
}

static ep_status call_dispatch(const struct slot *slot, bool device, ep_stream stream)
{
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;

    args.x = at(slot, X, device);
    args.dtype = slot->dtype;
    args.hidden = slot->hidden;
    if (slot->scale_type) {
        args.scales = at(slot, SCALES, device);
        args.scale_type = slot->scale_type;
        args.recv_scales = at(slot, RECV_SCALES, device);
    }
    args.recv_x = at(slot, RECV_X, device);
    if (slot->choice) {
        args.topk_weights = (const float *)(const void *)at(slot, WEIGHTS, device);
        args.recv_topk_weights = (float *)(void *)at(slot, RECV_WEIGHTS, device);
        args.recv_topk_idx = slot->expanded ? NULL : at(slot, RECV_IDX, device);
    }
    args.out_rows = slot->out_rows;
    return ep_dispatch(device ? slot->cuda : slot->host, &args, stream);
}

static ep_status call_combine(const struct slot *slot, bool device, ep_stream stream)
{
    bool echo = slot->dtype == EP_BF16;
    ep_combine_args args = EP_COMBINE_ARGS_INIT;

    args.x = at(slot, echo ? RECV_X : ANSWER, device);
    args.dtype = EP_BF16;
    args.hidden = slot->hidden;
    args.out = at(slot, OUT, device);
    args.flags = slot->by_choice ? EP_COMBINE_BY_CHOICE : 0;
    if (slot->choice) {
        args.topk_weights = (const float *)(const void *)at(slot, ANSWER_WEIGHTS, device);
        args.out_topk_weights = (float *)(void *)at(slot, OUT_WEIGHTS, device);
    }
    return ep_combine(device ? slot->cuda : slot->host, &args, stream);
}

static ep_status call_update(const struct slot *slot, int routing, bool device, ep_stream stream)
{
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    args.topk_idx = at(slot, (enum buffer)(IDX + routing), device);
    args.n_tokens = slot->n_tokens[routing];
    return ep_plan_update(device ? slot->cuda : slot->host, &args, stream);
}

static ep_status call_metadata(const struct slot *slot, bool device, ep_stream stream)
{
    ep_plan_metadata dst = EP_PLAN_METADATA_INIT;

    dst.recv_source = (int32_t *)(void *)at(slot, SOURCE, device);
    dst.recv_slot = slot->expanded ? (int32_t *)(void *)at(slot, SLOT, device) : NULL;
    dst.n_recv_tokens = (int32_t *)(void *)at(slot, N_TOKENS, device);
    dst.psum_rank = (int32_t *)(void *)at(slot, PSUM_RANK, device);
    dst.psum_expert = (int32_t *)(void *)at(slot, PSUM_EXPERT, device);
    dst.count_exact = (int32_t *)(void *)at(slot, COUNT, device);
    dst.rank_prefix = (int32_t *)(void *)at(slot, PREFIX, device);
    dst.source_stride = SOURCE_STRIDE;
    return ep_plan_get_metadata(device ? slot->cuda : slot->host, &dst, stream);
}

static int call_host(struct state *s, const struct step *step)
{
    struct slot *slot = &s->slot[step->slot];

    /* The host backend has made the calls of an exchange when it was loaded. */
    if (step->call == EXCHANGE)
        s->exchanged[step->slot] = true;
    if (step->call == DISPATCH)
        CALL(call_dispatch(slot, false, NULL));
    if (step->call == COMBINE)
        CALL(call_combine(slot, false, NULL));
    if (step->call == UPDATE) {
        CALL(call_update(slot, step->routing, false, NULL));
        slot->latest = step->routing;
    }
    if (step->call == METADATA)
        CALL(call_metadata(slot, false, NULL));
    CALL(ep_stream_sync(s->group.host, NULL));
    return 0;
}

static int call_cuda(struct state *s, const struct step *step, cudaStream_t stream)
{
    const struct slot *slot = &s->slot[step->slot];

    switch (step->call) {
    case DISPATCH:
        CALL(call_dispatch(slot, true, stream));
        return 0;
    case COMBINE:
        CALL(call_combine(slot, true, stream));
        return 0;
    case UPDATE:
        CALL(call_update(slot, step->routing, true, stream));
        return 0;
    case METADATA:
        CALL(call_metadata(slot, true, stream));
        return 0;
    case EXCHANGE:
        return exchange_call_all(&s->exchange[step->slot], 1, false);
    default:
        CALL(ep_barrier_on(s->group.cuda, stream));
        return 0;
    }
}

/* A call that is valid now; `captured`: also in a graph. Metadata are not, and other calls may follow its updates. */
static struct step choose_step(struct state *s, bool captured)
{
    for (;;) {
        struct step step = {.call = (enum call)draw(s, CALLS)};
        const struct slot *slot;

        step.slot = draw(s, SLOTS);
        step.routing = draw(s, ROUTINGS);
        slot = &s->slot[step.slot];
        if (step.call == EXCHANGE)
            step.slot %= LLS;
        if (step.call == EXCHANGE || step.call == BARRIER)
            return step;
        if (!slot->used || (step.call == UPDATE && !slot->fixed) || (step.call == METADATA && captured))
            continue;
        if (step.call == UPDATE)
            return step;
        /* A call outside of graphs is for the last update there: a graph may have given the plan other routing. */
        step.routing = slot->called;
        if (captured || slot->called == slot->latest)
            return step;
    }
}

static int update(struct state *s, const struct step *step, cudaStream_t stream)
{
    TRY(call_cuda(s, step, stream));
    s->slot[step->slot].called = step->routing;
    return call_host(s, step);
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

static int sync_streams(struct state *s)
{
    for (int i = 0; i < STREAMS; i++)
        CALL(ep_stream_sync(s->group.cuda, s->streams[i]));
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
        called[i] = s->slot[i].called;
    TRY(free_graph(s));
    TRY(sync_streams(s));
    TRY(capture_begin(&s->group));
    s->n_captured = 1 + draw(s, GRAPH_CALLS);
    for (int i = 0; i < s->n_captured; i++) {
        struct step *step = &s->captured[i];

        *step = choose_step(s, true);
        if (step->call == UPDATE)
            called[step->slot] = step->routing;
        else if (step->call == DISPATCH || step->call == COMBINE)
            step->routing = called[step->slot];
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
    int launches = 1 + draw(s, LAUNCHES);

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

    TRY(sync_streams(s));
    for (int i = 0; i < SLOTS; i++)
        for (int b = RECV_X; b < BUFFERS && s->slot[i].used; b++) {
            char phase[64];

            snprintf(phase, sizeof(phase), "step %d, plan %d%s%s", step, i, s->slot[i].fixed ? ", fixed capacity" : "",
                     s->slot[i].expanded ? ", expanded" : "");
            code |= mirror_compare(&s->group, &s->slot[i].b[b], phase);
        }
    for (int i = 0; i < LLS; i++)
        if (s->exchanged[i])
            code |= exchange_compare(s->exchange[i], i ? "second ep_ll" : "first ep_ll");
    return code;
}

/* Compares everything, and loads new data. */
static int check(struct state *s, int step)
{
    int code = compare(s, step);

    if (code & FAILED)
        return code;
    for (int i = 0; i < SLOTS; i++)
        if (s->slot[i].used)
            TRY(load(s, &s->slot[i]));
    for (int i = 0; i < LLS; i++) {
        TRY(exchange_load(s->exchange[i], next_random(&s->own)));
        s->exchanged[i] = false;
    }
    return code;
}

/* Sometimes the plan's work is still queued, and its memory is freed as soon as the plan is. */
static int replace_slot(struct state *s)
{
    int number = draw(s, SLOTS);

    TRY(free_graph(s));
    if (draw(s, 2))
        TRY(sync_streams(s));
    TRY(free_slot(s, number, PASSED));
    return make_slot(s, number);
}

static int replace_ll(struct state *s)
{
    int number = draw(s, LLS);

    TRY(free_graph(s));
    TRY(sync_streams(s));
    TRY(close_ll(s, number, PASSED));
    return open_ll(s, number);
}

static int run_step(struct state *s, int number)
{
    struct step step;
    int action = draw(s, 20);

    if (action == 0)
        return draw(s, 3) ? replace_slot(s) : replace_ll(s);
    if (action == 1)
        return capture(s);
    if (action <= 4 && s->graph)
        return launch(s);
    if (action == 5)
        return check(s, number);
    step = choose_step(s, false);
    if (step.call == UPDATE)
        return update(s, &step, s->streams[draw(s, STREAMS)]);
    /* An exchange uses the group's stream. */
    TRY(call_cuda(s, &step, s->streams[step.call == EXCHANGE ? 0 : draw(s, STREAMS)]));
    return call_host(s, &step);
}

static int run_sequence(struct state *s, int number)
{
    int code = PASSED;

    for (int i = 0; i < SLOTS; i++)
        TRY(make_slot(s, i));
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
        code |= free_slot(s, i, code);
    return code;
}

static int run_rank(const struct scenario_run *run, const struct group *group)
{
    struct state s = {.group = *group};
    int code = PASSED, all = PASSED;

    s.streams[0] = group->stream;
    for (int i = 1; i < STREAMS; i++)
        CUDA(cudaStreamCreateWithFlags(&s.streams[i], cudaStreamNonBlocking));
    for (int i = 0; i < run->rounds && !all; i++) {
        s.shared = (run->seed * 1000 + (uint64_t)i) * 0x10001;
        s.own = s.shared * 64 + (uint64_t)group->rank + 1;
        code = close_sequence(&s, run_sequence(&s, i));
        if (code & FAILED)
            return code;
        TRY(group_merge_codes(group, code, &all));
    }
    for (int i = 1; i < STREAMS; i++)
        cudaStreamDestroy(s.streams[i]);
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
