/* SPDX-License-Identifier: Apache-2.0 */
/* job.c - runs a request on every rank. */
#include "bench/case.h"

#include "backend/cuda/module.h"
#include "base/error.h"
#include "bench/request.h"

#include <stdio.h>
#include <string.h>

static void emit_step(struct ranks_ctx *ctx, int done, int total, const char *what, int tokens)
{
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:i, s:s, s:i}", "event", "step", "done", done, "total", total, "what",
                                  what, "tokens", tokens));
}

static int run_tokens(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int step, int n_steps)
{
    struct bench_case bench;
    int code;

    emit_step(ctx, step, n_steps, "buffers", tokens);
    code = bench_case_init(&bench, ctx, request, tokens);
    if (code == 0)
        code = bench_run_footprint(&bench);
    emit_step(ctx, step, n_steps, "dispatch and combine", tokens);
    if (code == 0)
        code = bench_run_ops(&bench);
    if (code == 0 && (request->ops & BENCH_PLAN)) {
        emit_step(ctx, step, n_steps, "plans", tokens);
        code = bench_run_plans(&bench);
    }
    bench_case_done(&bench);
    return code;
}

static int run_request(struct ranks_ctx *ctx, const struct bench_request *request)
{
    bool throughput = request->ops & ~(unsigned)BENCH_LL;
    bool low_latency = request->ops & BENCH_LL;
    int n_throughput = throughput ? request->n_token_counts : 0;
    int n_steps = n_throughput + (low_latency ? 1 : 0);
    bool one_clock;
    ep_status status;
    int code = 0;

    for (int i = 0; i < n_throughput && code == 0; i++)
        code = run_tokens(ctx, request, request->tokens[i], i, n_steps);
    if (code != 0 || !low_latency)
        return code;
    emit_step(ctx, n_steps - 1, n_steps, "low latency", request->ll_tokens);
    status = bench_one_clock(ctx, &one_clock);
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "exchange of hosts");
    return bench_run_lowlat(ctx, request, one_clock);
}

int bench_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    ep_comm_info info = {.size = sizeof(info)};
    struct bench_request request;
    char device[128];
    ep_status status;

    if (bench_request_from_json(parameters, &request) != 0)
        return ranks_emit_error(ctx, ep_fail(EP_E_FORMAT, "the parameters of the benchmark are malformed"),
                                "benchmark");
    status = ep_comm_get_info(ctx->comm, &info);
    if (status == EP_OK)
        snprintf(device, sizeof(device), "%s", info.backend);
    if (status == EP_OK && ctx->gpu)
        status = ctx->gpu->device_name(ctx->comm, device, sizeof(device));
    if (status == EP_OK && ctx->gpu)
        status = ctx->gpu->set_sms(ctx->comm, request.sms);
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "benchmark");
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:s, s:s, s:s?}", "event", "start", "device", device, "network", info.network,
                                  "mpi", ctx->mpi ? ctx->mpi->library_version() : NULL));
    return run_request(ctx, &request);
}
