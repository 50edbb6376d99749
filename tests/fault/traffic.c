/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The steps, on data that every rank can compute: small integers, so that all sums are exact. Between two nodes all
 * tokens go to the other one: a rank places and adds up rows there for its rail peer.
 */
#include "traffic.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int traffic_experts(const struct traffic *traffic)
{
    return EXPERTS_PER_RANK * traffic->nranks;
}

int traffic_expert_of(const struct traffic *traffic, int rank, int token, int k)
{
    int half = traffic_experts(traffic) / 2;

    if (traffic->nnodes == 2) {
        if (k >= 2)
            return -1;
        return (rank < traffic->nranks / 2 ? half : 0) + (rank + token + k) % half;
    }
    if ((token % 7 == 3 && k == 1) || k >= traffic_experts(traffic))
        return -1;
    return (rank + 5 * token + k) % traffic_experts(traffic);
}

static float element(const struct traffic *traffic, int rank, int token, int i)
{
    return (float)((traffic->round * 7 + (uint32_t)(rank * 11 + token * 3 + i)) % 61);
}

static int rank_of(const struct traffic *traffic, int source, int token, int k)
{
    int expert = traffic_expert_of(traffic, source, token, k);

    return expert < 0 ? -1 : expert / EXPERTS_PER_RANK;
}

static bool goes_to(const struct traffic *traffic, int source, int token, int rank)
{
    for (int k = 0; k < TOPK; k++)
        if (rank_of(traffic, source, token, k) == rank)
            return true;
    return false;
}

static int fan_out(const struct traffic *traffic, int source, int token)
{
    int n = 0;

    for (int rank = 0; rank < traffic->nranks; rank++)
        n += goes_to(traffic, source, token, rank);
    return n;
}

void traffic_fill(struct traffic *traffic)
{
    uint16_t *x = traffic->buffer[BUFFER_X].memory;
    int64_t *topk = traffic->buffer[BUFFER_TOPK].memory;

    traffic->round++;
    for (int t = 0; t < TOKENS; t++) {
        for (int i = 0; i < HIDDEN; i++)
            x[t * HIDDEN + i] = ep_bf16_from_f32(element(traffic, traffic->rank, t, i));
        for (int k = 0; k < TOPK; k++)
            topk[t * TOPK + k] = traffic_expert_of(traffic, traffic->rank, t, k);
    }
    memset(traffic->buffer[BUFFER_OUT].memory, 0xee, traffic->buffer[BUFFER_OUT].bytes);
    memset(traffic->buffer[BUFFER_RECV].memory, 0xee, traffic->buffer[BUFFER_RECV].bytes);
    memset(traffic->buffer[BUFFER_LL_RECV].memory, 0xee, traffic->buffer[BUFFER_LL_RECV].bytes);
}

bool traffic_check_row(struct traffic *traffic, const char *what, const uint16_t *row, int rank, int token, int times)
{
    for (int i = 0; i < HIDDEN; i++) {
        float expected = element(traffic, rank, token, i) * (float)times, got = ep_bf16_to_f32(row[i]);

        if (got == expected || traffic->wrong[0])
            continue;
        snprintf(traffic->wrong, sizeof(traffic->wrong), "%s: element %d of token %d of rank %d is %g and should be %g",
                 what, i, token, rank, (double)got, (double)expected);
        return false;
    }
    return true;
}

static void check_dispatch(struct traffic *traffic)
{
    const uint16_t *row = traffic->buffer[BUFFER_RECV].memory;

    for (int source = 0; source < traffic->nranks; source++)
        for (int t = 0; t < TOKENS; t++)
            if (goes_to(traffic, source, t, traffic->rank)) {
                if (!traffic_check_row(traffic, "dispatch", row, source, t, 1))
                    return;
                row += HIDDEN;
            }
}

static void check_combine(struct traffic *traffic)
{
    const uint16_t *row = traffic->buffer[BUFFER_OUT].memory;

    for (int t = 0; t < TOKENS; t++, row += HIDDEN)
        if (!traffic_check_row(traffic, "combine", row, traffic->rank, t, fan_out(traffic, traffic->rank, t)))
            return;
}

/* --- the steps -------------------------------------------------------------------------------------------------- */

static ep_status gather(struct traffic *traffic)
{
    int32_t mine = traffic->rank + 100, all[MAX_RANKS];
    ep_status status = ep_comm_allgather(traffic->comm, &mine, sizeof(mine), all);

    for (int rank = 0; status == EP_OK && rank < traffic->nranks; rank++)
        if (all[rank] != rank + 100)
            snprintf(traffic->wrong, sizeof(traffic->wrong), "all-gather: %d from rank %d", all[rank], rank);
    return status;
}

static ep_status make_plan(struct traffic *traffic)
{
    ep_plan_args args;

    ep_plan_free(traffic->plan);
    traffic->plan = NULL;
    args = args_plan(traffic->buffer[BUFFER_TOPK].memory, EP_I64, TOKENS, TOPK, traffic_experts(traffic));
    return ep_plan_new(traffic->comm, &args, &traffic->plan);
}

static ep_status dispatch(struct traffic *traffic, bool async)
{
    ep_dispatch_args args = args_dispatch(EP_BF16, HIDDEN, traffic->buffer[BUFFER_X].memory,
                                          traffic->buffer[BUFFER_RECV].memory, (int64_t)traffic->nranks * TOKENS);
    ep_status status;

    status = async ? ep_dispatch(traffic->plan, &args, NULL) : ep_dispatch_sync(traffic->plan, &args);
    if (async && status == EP_OK)
        status = ep_stream_sync(traffic->comm, NULL);
    if (status == EP_OK)
        check_dispatch(traffic);
    return status;
}

static ep_status combine(struct traffic *traffic, bool async)
{
    ep_combine_args args =
        args_combine(HIDDEN, traffic->buffer[BUFFER_RECV].memory, traffic->buffer[BUFFER_OUT].memory);
    ep_status status;

    status = async ? ep_combine(traffic->plan, &args, NULL) : ep_combine_sync(traffic->plan, &args);
    if (async && status == EP_OK)
        status = ep_stream_sync(traffic->comm, NULL);
    if (status == EP_OK)
        check_combine(traffic);
    return status;
}

ep_status traffic_step(struct traffic *traffic, enum step step)
{
    switch (step) {
    case STEP_BARRIER:
        return ep_comm_barrier(traffic->comm);
    case STEP_GATHER:
        return gather(traffic);
    case STEP_PLAN:
        return make_plan(traffic);
    case STEP_DISPATCH:
    case STEP_ASYNC_DISPATCH:
        return dispatch(traffic, step == STEP_ASYNC_DISPATCH);
    case STEP_COMBINE:
    case STEP_ASYNC_COMBINE:
        return combine(traffic, step == STEP_ASYNC_COMBINE);
    case STEP_LL_NEW:
        return traffic_ll_new(traffic);
    case STEP_LL_SEND:
        return traffic_ll_send(traffic);
    case STEP_LL_FINISH:
        return traffic_ll_finish(traffic);
    case STEP_LL_COMBINE:
        return traffic_ll_combine(traffic);
    default:
        return EP_E_STATE;
    }
}

ep_status traffic_round_trip(struct traffic *traffic)
{
    static const enum step steps[] = {STEP_PLAN, STEP_DISPATCH, STEP_COMBINE};
    ep_status status = EP_OK;

    traffic_fill(traffic);
    for (size_t i = 0; status == EP_OK && i < sizeof(steps) / sizeof(steps[0]); i++)
        status = traffic_step(traffic, steps[i]);
    return status;
}

ep_status traffic_init(struct traffic *traffic, ep_comm *comm)
{
    ep_comm_info info = {.size = sizeof(info)};
    const size_t row = HIDDEN * sizeof(uint16_t);
    ep_status status = ep_comm_get_info(comm, &info);

    if (status != EP_OK)
        return status;
    *traffic = (struct traffic){.comm = comm,
                                .dead_rank = -1,
                                .rank = info.rank,
                                .nranks = info.nranks,
                                .node = info.node,
                                .nnodes = info.nnodes};
    traffic->buffer[BUFFER_X].bytes = TOKENS * row;
    traffic->buffer[BUFFER_TOPK].bytes = TOKENS * TOPK * sizeof(int64_t);
    traffic->buffer[BUFFER_OUT].bytes = TOKENS * row;
    traffic->buffer[BUFFER_LL_RECV].bytes = (size_t)EXPERTS_PER_RANK * (size_t)info.nranks * LL_TOKENS * row;
    for (int i = 0; i < BUFFERS; i++) {
        if (i == BUFFER_RECV)
            continue;
        traffic->buffer[i].memory =
            mmap(NULL, traffic->buffer[i].bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (traffic->buffer[i].memory == MAP_FAILED)
            return EP_E_MEMORY;
    }
    traffic->buffer[BUFFER_RECV].bytes = (size_t)info.nranks * TOKENS * row;
    status = ep_alloc(comm, traffic->buffer[BUFFER_RECV].bytes, &traffic->buffer[BUFFER_RECV].memory);
    if (status == EP_OK)
        traffic_fill(traffic);
    return status;
}

void traffic_done(struct traffic *traffic)
{
    ep_plan_free(traffic->plan);
    ep_ll_free(traffic->ll);
    for (int i = 0; i < BUFFERS; i++)
        if (i != BUFFER_RECV && traffic->buffer[i].memory)
            munmap(traffic->buffer[i].memory, traffic->buffer[i].bytes);
    *traffic = (struct traffic){0};
}
