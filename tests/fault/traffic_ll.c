/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The low-latency steps. With masking, a rank may be dead: from then on it counts as one without tokens, and its
 * experts contribute nothing. In the round in which it dies, its rows may or may not have arrived.
 */
#include "traffic.h"

#include <stdio.h>
#include <string.h>

static int expert_of_rank(int expert)
{
    return expert < 0 ? -1 : expert / EXPERTS_PER_RANK;
}

/* Checks the rows of one local expert; false if they do not match, with or without the tokens of the dead rank. */
static bool check_expert(struct traffic *traffic, int local, int count, bool with_gone)
{
    const uint16_t *row = traffic->buffer[BUFFER_LL_RECV].memory;
    int expert = traffic->rank * EXPERTS_PER_RANK + local, n = 0;

    row += (size_t)local * (size_t)traffic->nranks * LL_TOKENS * HIDDEN;
    for (int source = 0; source < traffic->nranks; source++)
        for (int t = 0; t < LL_TOKENS && (source != traffic->dead_rank || with_gone); t++)
            for (int k = 0; k < TOPK; k++) {
                if (traffic_expert_of(traffic, source, t, k) != expert)
                    continue;
                if (n < count && !traffic_check_row(traffic, "low-latency dispatch", row, source, t, 1))
                    return true; /* reported */
                row += HIDDEN;
                n++;
            }
    return n == count;
}

static void check_dispatch(struct traffic *traffic)
{
    char before[sizeof(traffic->wrong)];

    memcpy(before, traffic->wrong, sizeof(before));
    for (int local = 0; local < EXPERTS_PER_RANK; local++) {
        int count = traffic->ll_count[local];
        bool right = check_expert(traffic, local, count, false);

        if (traffic->dying && (!right || traffic->wrong[0])) {
            memcpy(traffic->wrong, before, sizeof(before));
            right = check_expert(traffic, local, count, true);
        }
        if (!right && !traffic->wrong[0])
            snprintf(traffic->wrong, sizeof(traffic->wrong), "low-latency dispatch: %d rows for local expert %d", count,
                     local);
    }
}

static void check_combine(struct traffic *traffic)
{
    const uint16_t *row = traffic->buffer[BUFFER_OUT].memory;
    char before[sizeof(traffic->wrong)];

    memcpy(before, traffic->wrong, sizeof(before));
    for (int t = 0; t < LL_TOKENS; t++, row += HIDDEN) {
        int staying = 0, all = 0;

        for (int k = 0; k < TOPK; k++) {
            int rank = expert_of_rank(traffic_expert_of(traffic, traffic->rank, t, k));

            all += rank >= 0;
            staying += rank >= 0 && rank != traffic->dead_rank;
        }
        if (!traffic_check_row(traffic, "low-latency combine", row, traffic->rank, t, staying) && traffic->dying) {
            memcpy(traffic->wrong, before, sizeof(before));
            traffic_check_row(traffic, "low-latency combine", row, traffic->rank, t, all);
        }
    }
}

ep_status traffic_ll_new(struct traffic *traffic)
{
    ep_ll_config config;

    ep_ll_free(traffic->ll);
    traffic->ll = NULL;
    config = args_ll(LL_TOKENS, HIDDEN, traffic_experts(traffic), TOPK);
    config.flags = traffic->masking ? EP_LL_MASK_DEAD : 0;
    return ep_ll_new(traffic->comm, &config, &traffic->ll);
}

ep_status traffic_ll_send(struct traffic *traffic)
{
    ep_ll_dispatch_args args =
        args_ll_dispatch(traffic->buffer[BUFFER_X].memory, traffic->buffer[BUFFER_TOPK].memory, EP_I64, LL_TOKENS);

    args.out_dtype = EP_BF16;
    args.recv_x = traffic->buffer[BUFFER_LL_RECV].memory;
    args.recv_count = traffic->ll_count;
    args.flags = EP_LL_RECV_HOOK;
    return ep_ll_dispatch_sync(traffic->ll, &args);
}

ep_status traffic_ll_finish(struct traffic *traffic)
{
    ep_status status = ep_ll_finish_sync(traffic->ll, 0);

    if (status == EP_OK)
        check_dispatch(traffic);
    return status;
}

ep_status traffic_ll_combine(struct traffic *traffic)
{
    float weights[LL_TOKENS * TOPK];
    ep_ll_combine_args args;
    ep_status status;

    for (int i = 0; i < LL_TOKENS * TOPK; i++)
        weights[i] = 1.0f;
    args = args_ll_combine(traffic->buffer[BUFFER_LL_RECV].memory, traffic->buffer[BUFFER_TOPK].memory, EP_I64,
                           LL_TOKENS, weights, traffic->buffer[BUFFER_OUT].memory);
    status = ep_ll_combine_sync(traffic->ll, &args);
    if (status == EP_OK)
        check_combine(traffic);
    return status;
}
