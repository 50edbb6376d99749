/* SPDX-License-Identifier: Apache-2.0 */
/*
 * minimal.c - the smallest program: four ranks, one plan, a dispatch and a combine.
 *
 * Every rank sends each of its tokens to the ranks that own the experts it chose, and takes the rows back unchanged.
 * Combine adds up what comes back, so each token must return as itself times the number of ranks that it visited.
 */
#include "ranks.h"

#include <epkit/epkit.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 4, TOKENS = 6, HIDDEN = 64, TOPK = 2, EXPERTS = 8, LOCAL_EXPERTS = EXPERTS / RANKS };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        ep_status status_ = (call);                                                                                    \
        if (status_ != EP_OK) {                                                                                        \
            fprintf(stderr, "%s: %s: %s\n", #call, ep_status_text(status_), ep_last_error());                          \
            return EXIT_FAILURE;                                                                                       \
        }                                                                                                              \
    } while (0)

/* A rank's program. */
static int run_rank(const ep_boot *boot)
{
    alignas(16) uint16_t x[TOKENS][HIDDEN], out[TOKENS][HIDDEN];
    int32_t topk_idx[TOKENS][TOPK];
    ep_comm *comm;
    ep_plan *plan;
    void *received;
    int wrong = 0;

    for (int t = 0; t < TOKENS; t++) {
        /* Experts that differ from token to token; a real engine's gate chooses them. */
        topk_idx[t][0] = (boot->rank + t) % EXPERTS;
        topk_idx[t][1] = (boot->rank + t + 1) % EXPERTS;
        for (int h = 0; h < HIDDEN; h++)
            x[t][h] = ep_bf16_from_f32((float)(boot->rank + t - h)); /* small integers: exact in bf16 */
    }

    TRY(ep_comm_new(boot, NULL, &comm));

    ep_plan_args routing = EP_PLAN_ARGS_INIT;
    routing.topk_idx = topk_idx;
    routing.idx_type = EP_I32;
    routing.n_tokens = TOKENS;
    routing.topk = TOPK;
    routing.n_experts = EXPERTS;
    TRY(ep_plan_new(comm, &routing, &plan));

    ep_plan_info info = {.size = sizeof(info)};
    TRY(ep_plan_get_info(plan, &info));
    TRY(ep_alloc(comm, (size_t)info.out_rows * sizeof(x[0]), &received));

    ep_dispatch_args dispatch = EP_DISPATCH_ARGS_INIT;
    dispatch.x = x;
    dispatch.dtype = EP_BF16;
    dispatch.hidden = HIDDEN;
    dispatch.recv_x = received;
    dispatch.out_rows = info.out_rows;
    TRY(ep_dispatch_sync(plan, &dispatch));

    /* Here the experts of this rank would compute on `received`. */

    ep_combine_args combine = EP_COMBINE_ARGS_INIT;
    combine.x = received;
    combine.dtype = EP_BF16;
    combine.hidden = HIDDEN;
    combine.out = out;
    TRY(ep_combine_sync(plan, &combine));

    for (int t = 0; t < TOKENS; t++) {
        int visited = topk_idx[t][0] / LOCAL_EXPERTS == topk_idx[t][1] / LOCAL_EXPERTS ? 1 : 2;

        for (int h = 0; h < HIDDEN; h++)
            wrong += ep_bf16_to_f32(out[t][h]) != (float)visited * ep_bf16_to_f32(x[t][h]);
    }
    printf("rank %d: sent %lld rows, received %lld, %d of %d elements wrong\n", boot->rank, (long long)info.n_send,
           (long long)info.n_recv, wrong, TOKENS * HIDDEN);

    ep_plan_free(plan);
    ep_comm_free(comm);
    return wrong ? EXIT_FAILURE : EXIT_SUCCESS;
}

int main(void)
{
    return run_ranks(RANKS, run_rank);
}
