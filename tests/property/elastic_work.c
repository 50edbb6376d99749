/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One round: a plan of its own, an update of the plan of fixed capacity, a dispatch and a combine with each, and a pair
 * in low latency. Rows are small integers, so every sum is exact in bf16.
 */
#include "elastic.h"

#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- the routing and the rows of all ranks ------------------------------------------------------------------------ */

static uint64_t number_of(const struct work *work, int rank, int token, int what)
{
    uint64_t stream = work->table->seed + (uint64_t)(work->group * 64 + work->round) * 1000003u;

    return random_at(random_key(stream, (uint64_t)rank, (uint64_t)token, (uint64_t)what), 0);
}

static int tokens_of(const struct work *work, int rank)
{
    return work->members >> rank & 1 ? (int)(number_of(work, rank, 0, 15) % (TOKENS + 1)) : 0;
}

/* As the rank passes it, distinct: also experts of absent ranks. */
static int choice_of(const struct work *work, int rank, int token, int k)
{
    uint64_t first = number_of(work, rank, token, 13), n = (uint64_t)(work->table->slots * LOCAL_EXPERTS);

    return number_of(work, rank, token, k) % 8 ? (int)((first + (uint64_t)k * (first / n % 2 ? 1 : n - 1)) % n) : -1;
}

static bool is_chosen(const struct work *work, int expert)
{
    return expert >= 0 && work->members >> (expert / LOCAL_EXPERTS) & 1;
}

static int value_of(const struct work *work, int rank, int token, int at)
{
    return (int)(number_of(work, rank, token, 14) % 29) + (at + token + rank) % 7;
}

static bool goes_to(const struct work *work, int rank, int token, int to)
{
    for (int k = 0; k < TOPK; k++)
        if (choice_of(work, rank, token, k) >= 0 && choice_of(work, rank, token, k) / LOCAL_EXPERTS == to)
            return work->members >> to & 1;
    return false;
}

/* --- checks ------------------------------------------------------------------------------------------------------- */

static void complain(struct work *work, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void complain(struct work *work, const char *format, ...)
{
    char what[TEXT_BYTES / 2];
    va_list list;

    va_start(list, format);
    vsnprintf(what, sizeof(what), format, list);
    va_end(list);
    if (!work->report->wrong[0])
        snprintf(work->report->wrong, TEXT_BYTES, "rank %d, group %d of %#x, round %d: %s", work->rank, work->group,
                 work->members, work->round, what);
}

static void check_row(struct work *work, const char *what, const uint16_t *row, int rank, int token, int times)
{
    for (int at = 0; at < HIDDEN; at++)
        if (ep_bf16_to_f32(row[at]) != (float)(times * value_of(work, rank, token, at))) {
            complain(work, "%s: token %d of rank %d, element %d: %g instead of %d", what, token, rank, at,
                     (double)ep_bf16_to_f32(row[at]), times * value_of(work, rank, token, at));
            return;
        }
}

static void fill(struct work *work, int32_t *index)
{
    for (int token = 0; token < tokens_of(work, work->rank); token++) {
        for (int at = 0; at < HIDDEN; at++)
            work->x[token * HIDDEN + at] = ep_bf16_from_f32((float)value_of(work, work->rank, token, at));
        for (int k = 0; k < TOPK; k++)
            index[token * TOPK + k] = choice_of(work, work->rank, token, k);
    }
}

/* Poison: what is not written by this round is wrong. */
static void spoil(uint16_t *rows, int n)
{
    memset(rows, 0xee, (size_t)n * HIDDEN * sizeof(*rows));
}

static ep_status round_trip(struct work *work, ep_plan *plan, int rows)
{
    ep_dispatch_args dispatch = args_dispatch(EP_BF16, HIDDEN, work->x, work->recv, rows);
    ep_combine_args combine = args_combine(HIDDEN, work->recv, work->out);
    int n = 0;

    spoil(work->recv, work->table->slots * TOKENS);
    spoil(work->out, TOKENS);
    EP_TRY(ep_dispatch_sync(plan, &dispatch));
    for (int rank = 0; rank < work->table->slots; rank++)
        for (int token = 0; token < tokens_of(work, rank); token++)
            if (goes_to(work, rank, token, work->rank))
                check_row(work, "dispatch", work->recv + (size_t)n++ * HIDDEN, rank, token, 1);
    EP_TRY(ep_combine_sync(plan, &combine));
    for (int token = 0; token < tokens_of(work, work->rank); token++) {
        int times = 0;

        for (int to = 0; to < work->table->slots; to++)
            times += goes_to(work, work->rank, token, to);
        check_row(work, "combine", work->out + (size_t)token * HIDDEN, work->rank, token, times);
    }
    return EP_OK;
}

static int64_t dropped(const struct work *work)
{
    int64_t n = 0;

    for (int token = 0; token < tokens_of(work, work->rank); token++)
        for (int k = 0; k < TOPK; k++) {
            int expert = choice_of(work, work->rank, token, k);

            n += expert >= 0 && !is_chosen(work, expert);
        }
    return n;
}

static ep_status use_plan(struct work *work, const int32_t *index)
{
    ep_plan_args args = args_plan(index, EP_I32, tokens_of(work, work->rank), TOPK, work->table->slots * LOCAL_EXPERTS);
    ep_plan_info info = EP_PLAN_INFO_INIT;
    ep_plan *plan;
    ep_status status = ep_plan_new(work->comm, &args, &plan);

    if (status != EP_OK)
        return status;
    ep_plan_get_info(plan, &info);
    if (info.n_dropped != dropped(work))
        complain(work, "%lld choices dropped instead of %lld", (long long)info.n_dropped, (long long)dropped(work));
    status = round_trip(work, plan, (int)info.out_rows);
    ep_plan_free(plan);
    return status;
}

static ep_status use_fixed(struct work *work, const int32_t *index)
{
    ep_plan_update_args update = EP_PLAN_UPDATE_ARGS_INIT;

    update.topk_idx = index;
    update.n_tokens = tokens_of(work, work->rank);
    EP_TRY(ep_plan_update(work->plan, &update, NULL));
    return round_trip(work, work->plan, work->table->slots * TOKENS);
}

static void check_received(struct work *work, const int32_t *count)
{
    for (int local = 0; local < LOCAL_EXPERTS; local++) {
        const uint16_t *rows = work->ll_recv + (size_t)local * (size_t)(work->table->slots * TOKENS) * HIDDEN;
        int n = 0;

        for (int rank = 0; rank < work->table->slots; rank++)
            for (int token = 0; token < tokens_of(work, rank); token++)
                for (int k = 0; k < TOPK; k++)
                    if (choice_of(work, rank, token, k) == work->rank * LOCAL_EXPERTS + local)
                        check_row(work, "low-latency dispatch", rows + (size_t)n++ * HIDDEN, rank, token, 1);
        if (count[local] != n)
            complain(work, "low latency: %d rows of expert %d instead of %d", count[local], local, n);
    }
}

static ep_status use_lowlatency(struct work *work, const int32_t *index)
{
    int n_tokens = tokens_of(work, work->rank);
    float weights[TOKENS * TOPK];
    int32_t count[LOCAL_EXPERTS];
    ep_ll_dispatch_args dispatch = args_ll_dispatch(work->x, index, EP_I32, n_tokens);
    ep_ll_combine_args combine = args_ll_combine(work->ll_recv, index, EP_I32, n_tokens, weights, work->out);

    for (int i = 0; i < TOKENS * TOPK; i++)
        weights[i] = 1;
    spoil(work->ll_recv, LOCAL_EXPERTS * work->table->slots * TOKENS);
    spoil(work->out, TOKENS);
    dispatch.out_dtype = EP_BF16;
    dispatch.recv_x = work->ll_recv;
    dispatch.recv_count = count;
    EP_TRY(ep_ll_dispatch_sync(work->ll, &dispatch));
    check_received(work, count);
    EP_TRY(ep_ll_combine_sync(work->ll, &combine));
    for (int token = 0; token < n_tokens; token++) {
        int times = 0;

        for (int k = 0; k < TOPK; k++)
            times += is_chosen(work, choice_of(work, work->rank, token, k));
        check_row(work, "low-latency combine", work->out + (size_t)token * HIDDEN, work->rank, token, times);
    }
    return EP_OK;
}

ep_status work_round(struct work *work)
{
    int32_t index[TOKENS * TOPK] = {0};

    fill(work, index);
    EP_TRY(use_plan(work, index));
    EP_TRY(use_fixed(work, index));
    EP_TRY(use_lowlatency(work, index));
    atomic_fetch_add(&work->report->rounds, 1);
    return ep_comm_barrier(work->comm);
}

/* --- what a rank has ---------------------------------------------------------------------------------------------- */

static ep_status alloc_all(struct work *work)
{
    size_t row = HIDDEN * sizeof(uint16_t), rows = (size_t)(work->table->slots * TOKENS);
    void *memory[4];

    EP_TRY(ep_alloc_local(work->comm, TOKENS * row, &memory[0]));
    EP_TRY(ep_alloc_local(work->comm, rows * row, &memory[1]));
    EP_TRY(ep_alloc_local(work->comm, TOKENS * row, &memory[2]));
    EP_TRY(ep_alloc_local(work->comm, LOCAL_EXPERTS * rows * row, &memory[3]));
    work->x = memory[0];
    work->recv = memory[1];
    work->out = memory[2];
    work->ll_recv = memory[3];
    return EP_OK;
}

ep_status work_open(struct work *work, bool fresh)
{
    ep_ll_config config = args_ll(TOKENS, HIDDEN, work->table->slots * LOCAL_EXPERTS, TOPK);
    ep_plan_args args = args_plan(NULL, EP_I32, 0, TOPK, work->table->slots * LOCAL_EXPERTS);

    args.max_recv_tokens = work->table->slots * TOKENS;
    args.max_tokens = TOKENS;
    if (fresh)
        EP_TRY(alloc_all(work));
    ep_plan_free(work->plan);
    work->plan = NULL;
    EP_TRY(work->ll ? ep_ll_renew(work->ll) : ep_ll_new(work->comm, &config, &work->ll));
    return ep_plan_new(work->comm, &args, &work->plan);
}

void work_close(struct work *work)
{
    ep_ll_free(work->ll);
    ep_plan_free(work->plan);
    ep_comm_free(work->comm);
    *work = (struct work){.table = work->table, .report = work->report};
}
