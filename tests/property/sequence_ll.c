/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two dispatches of an ep_ll and their combines, in any valid order. With EP_LL_RECV_HOOK halves of two calls are open;
 * the calls on the other communicator are never split.
 */
#include "sequence.h"

#include <stdlib.h>
#include <string.h>

static const char *const names[LL_BUFFERS] = {
    "low latency x",      "low latency topk_idx",   "low latency topk_weights", "low latency recv_x",
    "low latency scales", "low latency recv_count", "low latency recv_source",  "low latency recv_range",
    "low latency stats",  "low latency answers",    "low latency out"};

static void *at(const struct exchange *exchange, int buffer, int which)
{
    return exchange->b[buffer].block[which].at;
}

static void choose_format(struct rank_state *state, const struct ll *ll, struct exchange *exchange)
{
    struct dice *dice = &state->dice;
    int format = draw(dice, 4);

    exchange->out_dtype = format ? EP_F8E4M3 : EP_BF16;
    exchange->scale_type = !format ? 0 : format == 3 && ll->config.hidden % 512 == 0 ? EP_UE8M0 : EP_F32;
    exchange->dispatch_flags = format == 2 ? EP_LL_ROUND_SCALE : 0;
    exchange->combine_flags = draw(dice, 2) ? EP_LL_NO_PARTIAL_REDUCE : 0;
    exchange->idx_type = draw(dice, 2) ? EP_I32 : EP_I64;
    exchange->max_tokens = draw(dice, 2) ? ll->config.max_tokens : 1 + draw(dice, ll->config.max_tokens);
    exchange->topk = draw_own(dice, 2) ? ll->config.topk : 1 + draw_own(dice, ll->config.topk);
}

static bool make_buffers(struct rank_state *state, ep_comm *const comms[BOTH], const struct ll *ll,
                         struct exchange *exchange)
{
    static const enum memory kinds[] = {ORDINARY, POOL, SYMMETRIC, LOCAL};
    size_t n = (size_t)exchange->max_tokens, hidden = (size_t)ll->config.hidden, topk = (size_t)exchange->topk;
    size_t ranks = (size_t)state->nranks, local = (size_t)ll->config.n_experts / ranks, rows = local * ranks * n;
    const struct {
        size_t n, bytes;
    } sizes[LL_BUFFERS] = {
        {n, hidden * 2},
        {n, topk * ep_dtype_bytes((ep_dtype)exchange->idx_type)},
        {n, topk * 4},
        {rows, hidden * ep_dtype_bytes((ep_dtype)exchange->out_dtype)},
        {rows, exchange->scale_type == EP_F32 ? hidden / 128 * 4
               : exchange->scale_type         ? hidden / 128
                                              : 0},
        {local, 4},
        {rows, 4},
        {local * ranks, 8},
        {local, 4},
        {rows, hidden * 2},
        {n, hidden * 2},
    };

    for (int i = 0; i < LL_BUFFERS; i++)
        TRY(mirror_new(state, comms, names[i], sizes[i].n, sizes[i].bytes, kinds[draw(&state->dice, 4)],
                       &exchange->b[i]));
    return true;
}

static void fill_index(struct rank_state *state, const struct ll *ll, struct exchange *exchange)
{
    int topk = exchange->topk, n = exchange->max_tokens * topk;
    bool holes = !draw_own(&state->dice, 3);
    int32_t *chosen = calloc((size_t)topk, sizeof(*chosen));
    void *index = at(exchange, LL_IDX, TESTED);

    for (int i = 0; chosen && i < n; i++) {
        int k = i % topk;
        int32_t expert = draw_own(&state->dice, ll->config.n_experts);

        for (int c = 0; c < k; c++)
            if (chosen[c] == expert) {
                expert = (expert + 1) % ll->config.n_experts;
                c = -1;
            }
        chosen[k] = expert;
        if (holes && !draw_own(&state->dice, 3))
            expert = -1;
        if (exchange->idx_type == EP_I32)
            ((int32_t *)index)[i] = expert;
        else
            ((int64_t *)index)[i] = expert;
    }
    free(chosen);
}

static void load_exchange(struct rank_state *state, const struct ll *ll, struct exchange *exchange)
{
    exchange->n_tokens = draw_own(&state->dice, exchange->max_tokens + 1);
    exchange->dispatched = false;
    fill_index(state, ll, exchange);
    for (int i = 0; i < LL_BUFFERS; i++) {
        unsigned char *memory = at(exchange, i, TESTED);

        if (i == LL_X || i == LL_ANSWER)
            fill_bf16(&state->dice, memory, exchange->b[i].bytes);
        else if (i == LL_WEIGHTS)
            for (size_t k = 0; k < exchange->b[i].bytes / 4; k++)
                ((float *)(void *)memory)[k] =
                    draw_own(&state->dice, 8) ? (float)draw_own(&state->dice, 1000) / 999.0f : 0;
        else if (i != LL_IDX)
            mirror_poison(&exchange->b[i]);
        mirror_copy(&exchange->b[i]);
    }
}

void ll_load(struct rank_state *state, struct ll *ll)
{
    for (int i = 0; i < EXCHANGES; i++)
        load_exchange(state, ll, &ll->exchange[i]);
}

bool ll_new(struct rank_state *state, ep_comm *const comms[BOTH], struct ll *ret_ll)
{
    struct dice *dice = &state->dice;
    struct ll *ll = ret_ll;

    *ll = (struct ll){.config = EP_LL_CONFIG_INIT};
    ll->config.max_tokens = 1 + draw(dice, 24);
    ll->config.hidden = 128 * (1 + draw(dice, 8));
    ll->config.n_experts = state->nranks * (1 + draw(dice, 4));
    ll->config.topk = 1 + draw(dice, 8 < ll->config.n_experts ? 8 : ll->config.n_experts);
    ll->config.flags = draw(dice, 2) ? EP_LL_MASK_DEAD : 0;
    for (int i = 0; i < BOTH; i++)
        CALL(state, ep_ll_new(comms[i], &ll->config, &ll->ll[i]));
    for (int i = 0; i < EXCHANGES; i++) {
        choose_format(state, ll, &ll->exchange[i]);
        TRY(make_buffers(state, comms, ll, &ll->exchange[i]));
        load_exchange(state, ll, &ll->exchange[i]);
    }
    return true;
}

bool ll_free(struct rank_state *state, ep_comm *const comms[BOTH], struct ll *ll)
{
    for (int i = 0; i < BOTH; i++)
        ep_ll_free(ll->ll[i]);
    for (int i = 0; i < EXCHANGES; i++)
        for (int k = 0; k < LL_BUFFERS; k++)
            TRY(mirror_free(state, comms, &ll->exchange[i].b[k]));
    *ll = (struct ll){.n_open = 0};
    return true;
}

bool ll_compare(struct rank_state *state, const struct ll *ll, const char *what)
{
    for (int i = 0; ll->ll[TESTED] && i < EXCHANGES; i++)
        for (int k = 0; k < LL_BUFFERS; k++)
            TRY(mirror_compare(state, &ll->exchange[i].b[k], what));
    return true;
}

/* --- calls ------------------------------------------------------------------------------------------------------- */

static ep_ll_dispatch_args dispatch_args(const struct exchange *exchange, int which, uint64_t *ret_call)
{
    ep_ll_dispatch_args args = args_ll_dispatch(at(exchange, LL_X, which), at(exchange, LL_IDX, which),
                                                exchange->idx_type, exchange->n_tokens);

    args.out_dtype = exchange->out_dtype;
    args.scale_type = exchange->scale_type;
    args.recv_x = at(exchange, LL_RECV, which);
    args.recv_scales = exchange->scale_type ? at(exchange, LL_SCALES, which) : NULL;
    args.recv_count = (int32_t *)at(exchange, LL_COUNT, which);
    args.recv_source = (int32_t *)at(exchange, LL_SOURCE, which);
    args.recv_range = (int64_t *)at(exchange, LL_RANGE, which);
    args.recv_stats_add = (int32_t *)at(exchange, LL_STATS, which);
    args.flags = exchange->dispatch_flags;
    args.max_tokens = exchange->max_tokens;
    args.topk = exchange->topk;
    args.ret_call = ret_call;
    return args;
}

static ep_ll_combine_args combine_args(const struct exchange *exchange, int which)
{
    ep_ll_combine_args args =
        args_ll_combine(at(exchange, LL_ANSWER, which), at(exchange, LL_IDX, which), exchange->idx_type,
                        exchange->n_tokens, at(exchange, LL_WEIGHTS, which), at(exchange, LL_OUT, which));

    args.flags = exchange->combine_flags;
    args.topk = exchange->topk;
    args.call = exchange->call;
    return args;
}

static void open_call(struct ll *ll, int exchange, bool combine)
{
    ll->open[ll->n_open++] = (struct open_call){.exchange = exchange, .combine = combine, .number = ll->n_combines};
}

bool ll_dispatch(struct rank_state *state, struct ll *ll, bool hook, ep_stream stream)
{
    int number = (int)(ll->n_dispatches++ % EXCHANGES);
    struct exchange *exchange = &ll->exchange[number];
    uint64_t call = 0;
    ep_ll_dispatch_args tested = dispatch_args(exchange, TESTED, &exchange->call);
    ep_ll_dispatch_args base = dispatch_args(exchange, BASE, &call);

    tested.flags |= hook ? EP_LL_RECV_HOOK : 0;
    CALL(state, ep_ll_dispatch(ll->ll[TESTED], &tested, stream));
    CALL(state, ep_ll_dispatch_sync(ll->ll[BASE], &base));
    if (call != exchange->call || call != ll->n_dispatches)
        return fail(state, "dispatch %llu has the numbers %llu and %llu", (unsigned long long)ll->n_dispatches,
                    (unsigned long long)exchange->call, (unsigned long long)call);
    exchange->dispatched = true;
    if (hook)
        open_call(ll, number, false);
    return true;
}

bool ll_combine(struct rank_state *state, struct ll *ll, int number, bool hook, ep_stream stream)
{
    struct exchange *exchange = &ll->exchange[number];
    ep_ll_combine_args tested = combine_args(exchange, TESTED), base = combine_args(exchange, BASE);

    tested.flags |= hook ? EP_LL_RECV_HOOK : 0;
    if (exchange->call == ll->n_dispatches && draw_own(&state->dice, 2))
        tested.call = 0;
    if (!draw_own(&state->dice, 3)) {
        void *buffer;

        CALL(state, ep_ll_get_combine_buffer(ll->ll[TESTED], &buffer));
        memcpy(buffer, tested.x, exchange->b[LL_ANSWER].bytes);
        tested.x = buffer;
        tested.flags |= EP_LL_ZERO_COPY;
    }
    CALL(state, ep_ll_combine(ll->ll[TESTED], &tested, stream));
    CALL(state, ep_ll_combine_sync(ll->ll[BASE], &base));
    ll->n_combines++;
    if (hook)
        open_call(ll, number, true);
    return true;
}

static bool finish(struct rank_state *state, struct ll *ll, int which, ep_stream stream)
{
    uint64_t call = ll->exchange[ll->open[which].exchange].call;

    if (which == ll->n_open - 1 && draw_own(&state->dice, 2))
        call = 0;
    CALL(state, ep_ll_finish(ll->ll[TESTED], call, stream));
    if (which == 0)
        ll->open[0] = ll->open[1];
    ll->n_open--;
    return true;
}

bool ll_finish_all(struct rank_state *state, struct ll *ll, ep_stream stream)
{
    while (ll->n_open)
        TRY(finish(state, ll, draw(&state->dice, ll->n_open), stream));
    return true;
}

static bool is_open(const struct ll *ll, int exchange)
{
    for (int i = 0; i < ll->n_open; i++)
        if (ll->open[i].exchange == exchange)
            return true;
    return false;
}

static bool may_combine(const struct ll *ll, int exchange)
{
    if (ll->n_open == 2 || !ll->exchange[exchange].dispatched || is_open(ll, exchange))
        return false;
    for (int i = 0; i < ll->n_open; i++)
        if (ll->open[i].combine && ll->open[i].number < ll->n_combines)
            return false;
    return true;
}

bool ll_step(struct rank_state *state, ep_comm *comm, struct ll *ll, ep_stream stream)
{
    int next = (int)(ll->n_dispatches % EXCHANGES), lot = draw(&state->dice, 8), which = draw(&state->dice, EXCHANGES);
    bool hook = draw(&state->dice, 2);
    int32_t masked[MAX_RANKS];

    if (lot < 3 && ll->n_open < 2 && !is_open(ll, next))
        return ll_dispatch(state, ll, hook, stream);
    if (lot < 6 && may_combine(ll, which))
        return ll_combine(state, ll, which, hook, stream);
    if (lot < 6 && ll->n_open)
        return finish(state, ll, draw(&state->dice, ll->n_open), stream);
    if (lot == 6 && !is_open(ll, which) && ll->exchange[which].out_dtype == EP_BF16)
        /* The received rows become the inputs of a combine. */
        return mirror_queue_copy(state, comm, &ll->exchange[which].b[LL_ANSWER], &ll->exchange[which].b[LL_RECV],
                                 stream);
    CALL(state, ep_ll_get_mask(ll->ll[TESTED], masked));
    for (int i = 0; i < state->nranks; i++)
        if (masked[i])
            return fail(state, "rank %d is masked", i);
    CALL(state, ep_ll_barrier(ll->ll[TESTED], stream));
    return true;
}
