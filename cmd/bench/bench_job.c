/* SPDX-License-Identifier: Apache-2.0 */
/* bench_job.c - runs a request on every rank. */
#include "bench_case.h"
#include "mpirun.h"

#include "backend/cuda/module.h"
#include "base/error.h"
#include "pattern.h"

#include <stdio.h>

static void emit_step(struct ranks_ctx *ctx, int done, int total, const char *what, int tokens)
{
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:i, s:i, s:s, s:i}", "event", "step", "done", done, "total", total, "what",
                                  what, "tokens", tokens));
}

static int run_tokens(const struct bench_case *common, int tokens, int step, int n_steps)
{
    struct bench_case bench;
    int code;

    emit_step(common->ctx, step, n_steps, "buffers", tokens);
    code = bench_case_init(&bench, common, tokens);
    if (code == 0)
        code = bench_run_footprint(&bench);
    emit_step(common->ctx, step, n_steps, "dispatch and combine", tokens);
    if (code == 0)
        code = bench_run_ops(&bench);
    if (code == 0 && (common->request->ops & BENCH_PLAN)) {
        emit_step(common->ctx, step, n_steps, "plans", tokens);
        code = bench_run_plans(&bench);
    }
    bench_case_done(&bench);
    return code;
}

static int run_request(struct ranks_ctx *ctx, const struct bench_request *request, const struct bench_mpi_module *mpi)
{
    struct bench_case common = {
        .ctx = ctx, .request = request, .mpi = mpi, .mirrors = {.ctx = ctx, .poison = PATTERN_POISON}};
    bool low_latency = request->ops & BENCH_LL;
    int n_throughput = request->ops & ~(unsigned)BENCH_LL ? request->n_token_counts : 0;
    int n_steps = n_throughput + (low_latency ? 1 : 0);
    ep_status status = bench_one_clock(ctx, &common.one_clock);
    int code = status == EP_OK ? 0 : ranks_emit_error(ctx, status, "exchange of hosts");

    for (int i = 0; i < n_throughput && code == 0; i++)
        code = run_tokens(&common, request->tokens[i], i, n_steps);
    if (code != 0 || !low_latency)
        return code;
    emit_step(ctx, n_steps - 1, n_steps, "low latency", request->ll_tokens);
    return bench_run_lowlat(&common);
}

int bench_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    ep_comm_info info = {.size = sizeof(info)};
    const struct bench_mpi_module *mpi = NULL;
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
    if (status == EP_OK)
        status = bench_mpi_start(ctx, &request, &mpi);
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "benchmark");
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:s, s:s, s:s?}", "event", "start", "device", device, "network", info.network,
                                  "mpi", mpi ? mpi->library_version() : NULL));
    return run_request(ctx, &request, mpi);
}
