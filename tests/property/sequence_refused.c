/* SPDX-License-Identifier: Apache-2.0 */
/* Calls that are refused: they must change nothing, also while work is queued. */
#include "sequence.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool refused(struct rank_state *state, ep_comm *comm, ep_status status, const char *what)
{
    if (status == EP_OK)
        return fail(state, "%s: was not refused", what);
    if (status >= EP_E_TIMEOUT)
        return fail(state, "%s: %s: %s", what, ep_status_name(status), ep_comm_last_error(comm));
    CALL(state, ep_comm_async_error(comm));
    return true;
}

static bool refused_dispatch(struct rank_state *state, ep_comm *comm, const struct slot *slot, int which, ep_plan *plan)
{
    ep_dispatch_args args = slot_dispatch_args(slot, which);
    int field = draw_own(&state->dice, 8);
    char what[60];

    snprintf(what, sizeof(what), "ep_dispatch with error %d", field);
    switch (field) {
    case 0:
        args.hidden = 0;
        break;
    case 1:
        args.hidden++;
        break;
    case 2:
        args.recv_x = NULL;
        args.out_rows += !args.out_rows; /* without rows it may be NULL */
        break;
    case 3:
        args.dtype = 77;
        break;
    case 4:
        args.flags = 1;
        break;
    case 5:
        args.scale_type = EP_I64;
        break;
    case 6:
        args.source_stride = 1; /* without recv_source */
        break;
    default:
        args.out_rows = -1;
        break;
    }
    return refused(state, comm, ep_dispatch(plan, &args, NULL), what) &&
           refused(state, comm, ep_dispatch_sync(plan, &args), what);
}

static bool refused_combine(struct rank_state *state, ep_comm *comm, const struct slot *slot, int which, ep_plan *plan)
{
    ep_combine_args args = slot_combine_args(slot, which);

    switch (draw_own(&state->dice, 4)) {
    case 0:
        args.hidden += 4;
        break;
    case 1:
        args.dtype = EP_F8E4M3;
        break;
    case 2:
        args.topk_weights = slot->weights ? NULL : (const float *)(const void *)slot->b[ANSWER].block[which].at;
        break;
    default:
        args.flags = 1u << 30;
        break;
    }
    return refused(state, comm, ep_combine(plan, &args, NULL), "ep_combine") &&
           refused(state, comm, ep_combine_sync(plan, &args), "ep_combine_sync");
}

static bool refused_routing(struct rank_state *state, ep_comm *comm, const struct slot *slot)
{
    int32_t index[8] = {0};
    ep_plan_args args = EP_PLAN_ARGS_INIT;
    ep_plan *plan = NULL;
    ep_status status;

    args.topk_idx = index;
    args.idx_type = EP_I32;
    args.n_tokens = 2;
    args.topk = slot->n_experts < 4 ? 1 : 4;
    for (int i = 0; i < 8; i++)
        index[i] = i % args.topk;
    index[2 * args.topk - 1] =
        draw_own(&state->dice, 2) && args.topk > 1 && sequence_is_distinct(state->sequence) ? 0 : slot->n_experts;
    args.n_experts = slot->n_experts;
    args.max_recv_tokens = draw_own(&state->dice, 2) ? 0 : 100;
    status = ep_plan_new(comm, &args, &plan);
    if (plan)
        return fail(state, "a refused plan");
    return refused(state, comm, status, "ep_plan_new");
}

/* On some ranks; the others wait for them. */
static bool dispatch_nan(struct rank_state *state, ep_comm *comm, const struct slot *slot, int which, ep_plan *plan)
{
    ep_dispatch_args args = slot_dispatch_args(slot, which);
    size_t bytes = slot->b[WEIGHTS].bytes;
    float *weights;
    ep_status status;

    if (!(state->sequence->config.flags & EP_COMM_CHECK_VALUES) || !slot->weights || !slot->n_tokens[slot->routing])
        return true;
    weights = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!weights)
        return fail(state, "no memory");
    memcpy(weights, args.topk_weights, bytes);
    weights[0] = NAN;
    args.topk_weights = weights;
    status = ep_dispatch_sync(plan, &args);
    free(weights);
    return refused(state, comm, status, "ep_dispatch_sync with a NaN");
}

static bool refused_ll(struct rank_state *state, ep_comm *comm, struct ll *ll, int which)
{
    const struct exchange *exchange = &ll->exchange[0];
    ep_ll_dispatch_args args = EP_LL_DISPATCH_ARGS_INIT;
    ep_ll_combine_args combine;
    int32_t index[64];
    bool none_open = which == BASE || !ll->n_open;

    if (none_open)
        TRY(refused(state, comm, ep_ll_finish(ll->ll[which], 0, NULL), "ep_ll_finish"));
    args.x = exchange->b[LL_X].block[which].at;
    args.topk_idx = index;
    args.idx_type = EP_I32;
    args.out_dtype = EP_BF16;
    args.recv_x = exchange->b[LL_ANSWER].block[which].at;
    args.recv_count = (int32_t *)(void *)exchange->b[LL_COUNT].block[which].at;
    args.n_tokens = 1;
    args.max_tokens = exchange->max_tokens;
    for (int i = 0; i < 64; i++)
        index[i] = ll->config.n_experts;
    /* It receives an open call first, for which a peer may have to run work that it holds back until a later step. */
    if (none_open)
        TRY(refused(state, comm, ep_ll_dispatch_sync(ll->ll[which], &args), "ep_ll_dispatch_sync"));
    args.n_tokens = ll->config.max_tokens + 1;
    TRY(refused(state, comm, ep_ll_dispatch(ll->ll[which], &args, NULL), "ep_ll_dispatch"));
    combine = args_ll_combine(exchange->b[LL_ANSWER].block[which].at, exchange->b[LL_IDX].block[which].at,
                              exchange->idx_type, exchange->n_tokens, exchange->b[LL_WEIGHTS].block[which].at,
                              exchange->b[LL_OUT].block[which].at);
    combine.call = ll->n_dispatches + 1 + (uint64_t)draw_own(&state->dice, 3);
    return refused(state, comm, ep_ll_combine(ll->ll[which], &combine, NULL), "ep_ll_combine");
}

static bool refused_memory(struct rank_state *state, ep_comm *comm)
{
    _Alignas(4096) static unsigned char memory[8192];
    unsigned char all[8];
    ep_event *event;

    TRY(refused(state, comm, ep_free(comm, memory), "ep_free"));
    TRY(refused(state, comm, ep_free_local(comm, memory), "ep_free_local"));
    TRY(refused(state, comm, ep_register(comm, memory, sizeof(memory)), "ep_register"));
    TRY(refused(state, comm, ep_unregister(comm, memory), "ep_unregister"));
    TRY(refused(state, comm, ep_comm_allgather(comm, all, 4097, memory), "ep_comm_allgather"));
    CALL(state, ep_event_record(comm, NULL, &event));
    TRY(refused(state, comm, ep_event_signal(event), "ep_event_signal"));
    ep_event_free(event);
    return true;
}

bool refused_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, struct ll *ll)
{
    int which = draw_own(&state->dice, BOTH);
    ep_comm *comm = comms[which];
    ep_plan *plan = slot->plan[which];

    switch (draw_own(&state->dice, 5)) {
    case 0:
        return refused_dispatch(state, comm, slot, which, plan);
    case 1:
        return refused_combine(state, comm, slot, which, plan);
    case 2:
        return refused_routing(state, comm, slot);
    case 3:
        return refused_ll(state, comm, ll, which);
    default:
        return refused_memory(state, comm);
    }
}

bool values_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream)
{
    int which = draw(&state->dice, BOTH);

    /* A call that is corrected and repeated. */
    if (!draw_own(&state->dice, 2))
        TRY(dispatch_nan(state, comms[which], slot, which, slot->plan[which]));
    return slot_dispatch(state, slot, stream);
}

/* A status of a queue is returned once, for the first call that failed. */
static bool capacity_dispatch(struct rank_state *state, ep_comm *comm, const struct slot *slot, ep_plan *plans[BOTH],
                              ep_stream stream)
{
    ep_dispatch_args tested = slot_dispatch_args(slot, TESTED), base = slot_dispatch_args(slot, BASE);
    ep_status expected = ep_dispatch_sync(plans[BASE], &base), got;

    CALL(state, ep_stream_sync(comm, stream));
    got = ep_dispatch(plans[TESTED], &tested, stream);
    if (got == EP_OK)
        got = ep_stream_sync(comm, stream);
    if (got != expected || (got != EP_OK && got != EP_E_CAPACITY))
        return fail(state, "a dispatch over the capacity: %s, not %s: %s", ep_status_name(got),
                    ep_status_name(expected), ep_last_error());
    CALL(state, ep_stream_sync(comm, stream));
    return true;
}

bool capacity_call(struct rank_state *state, ep_comm *const comms[BOTH], struct slot *slot, ep_stream stream)
{
    struct slot once = *slot;
    int first = draw(&state->dice, ROUTINGS), second = draw(&state->dice, ROUTINGS);
    int64_t rows = draw_own(&state->dice, 3) ? slot->out_rows : 1 + draw_own(&state->dice, 20);

    if (!slot->fixed)
        return true;
    if (rows > slot->out_rows)
        rows = slot->out_rows;
    for (int i = 0; i < BOTH; i++)
        TRY(slot_make_plan(state, comms[i], slot, i, first, rows, i == TESTED ? stream : NULL, &once.plan[i]));
    TRY(capacity_dispatch(state, comms[TESTED], slot, once.plan, stream));
    TRY(slot_update(state, &once, second, stream));
    TRY(capacity_dispatch(state, comms[TESTED], slot, once.plan, stream));
    for (int i = 0; i < BOTH; i++)
        ep_plan_free(once.plan[i]);
    return true;
}
