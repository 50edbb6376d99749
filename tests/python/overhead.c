/* SPDX-License-Identifier: Apache-2.0 */
/*
 * overhead.c - what a dispatch of one rank costs in C: nanoseconds of processor time of the quickest of some batches,
 * for overhead.py to compare with the same call from Python. Seven tensors: fp8 rows, scales, weights, and the four
 * outputs.
 */
#include <epkit/epkit.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { TOKENS = 1, HIDDEN = 128, TOPK = 1, BATCH = 2000, BATCHES = 50 };

static double now(void)
{
    struct timespec time;

    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (double)time.tv_sec * 1e9 + (double)time.tv_nsec;
}

static int fail(const char *what)
{
    fprintf(stderr, "overhead: %s: %s\n", what, ep_last_error());
    return 1;
}

int main(void)
{
    static _Alignas(16) unsigned char x[TOKENS * HIDDEN], recv_x[TOKENS * HIDDEN];
    static _Alignas(16) float scales[TOKENS], recv_scales[TOKENS], weights[TOKENS], recv_weights[TOKENS];
    static _Alignas(16) int64_t topk_idx[TOKENS], recv_idx[TOKENS];
    ep_comm_config config = EP_COMM_CONFIG_INIT;
    ep_plan_args plan_args = EP_PLAN_ARGS_INIT;
    ep_dispatch_args args = EP_DISPATCH_ARGS_INIT;
    ep_boot_shm *place = NULL;
    ep_comm *comm = NULL;
    ep_plan *plan = NULL;
    double best = 1e18;
    ep_boot boot;

    config.backend = "host";
    if (ep_boot_shm_new(1, &place) || ep_boot_shm_join(place, 0, &boot) || ep_comm_new(&boot, &config, &comm))
        return fail("communicator");
    plan_args.topk_idx = topk_idx;
    plan_args.idx_type = EP_I64;
    plan_args.n_tokens = TOKENS;
    plan_args.topk = TOPK;
    plan_args.n_experts = 1;
    if (ep_plan_new(comm, &plan_args, &plan))
        return fail("plan");
    args.x = x;
    args.dtype = EP_F8E4M3;
    args.hidden = HIDDEN;
    args.scales = scales;
    args.scale_type = EP_F32;
    args.topk_weights = weights;
    args.recv_x = recv_x;
    args.recv_scales = recv_scales;
    args.recv_topk_idx = recv_idx;
    args.recv_topk_weights = recv_weights;
    args.out_rows = TOKENS;
    for (int batch = 0; batch < BATCHES; batch++) {
        double begin = now(), each;

        for (int i = 0; i < BATCH; i++)
            if (ep_dispatch_sync(plan, &args))
                return fail("dispatch");
        each = (now() - begin) / BATCH;
        best = each < best ? each : best;
    }
    printf("%.0f\n", best);
    ep_plan_free(plan);
    ep_comm_free(comm);
    ep_boot_shm_free(place);
    return 0;
}
