/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/case.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

#define PAGE 4096

int bench_routing_new(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int variant,
                      struct routing **ret_routing)
{
    const struct routing_spec spec = {
        .kind = request->routing,
        .seed = request->seed + (uint64_t)variant,
        .n_ranks = ctx->nranks,
        .n_tokens = tokens,
        .topk = request->topk,
        .n_experts = request->experts,
    };
    struct check_error error;

    if (routing_new(&spec, ret_routing, &error))
        return 0;
    return ranks_emit_error(ctx, ep_fail(EP_E_ARG, "%s", error.text), "making up a routing");
}

/* Private memory, as an engine would have it from malloc. Zeros: every page exists before anything is timed. */
static void *take(struct bench_case *bench, int64_t rows, size_t row_bytes)
{
    size_t bytes = ((size_t)rows * row_bytes / PAGE + 1) * PAGE;
    void *memory = aligned_alloc(PAGE, bytes);

    if (memory)
        memset(memory, 0, bytes);
    bench->private_bytes += (int64_t)bytes;
    return memory;
}

static ep_status take_symmetric(struct bench_case *bench, size_t row_bytes, void **ret_memory)
{
    size_t bytes = (size_t)bench->room_rows * row_bytes;

    EP_TRY(ep_alloc(bench->ctx->comm, bytes, ret_memory));
    memset(*ret_memory, 0, bytes);
    bench->symmetric_bytes += (int64_t)bytes;
    return EP_OK;
}

static ep_status take_buffers(struct bench_case *bench)
{
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;
    size_t scales = hidden / EP_SCALE_BLOCK * sizeof(float);
    int64_t n_tokens = bench->tokens; /* another variant of the routing may have more on this rank */
    void *memory;

    EP_TRY(take_symmetric(bench, 2 * hidden, &bench->recv_x));
    EP_TRY(take_symmetric(bench, scales, &memory));
    bench->recv_scales = memory;
    EP_TRY(take_symmetric(bench, topk * sizeof(int32_t), &memory));
    bench->recv_experts = memory;
    EP_TRY(take_symmetric(bench, topk * sizeof(float), &memory));
    bench->recv_weights = memory;
    bench->x = take(bench, n_tokens, 2 * hidden);
    bench->x_scales = take(bench, n_tokens, scales);
    bench->out = take(bench, n_tokens, 2 * hidden);
    if (!bench->x || !bench->x_scales || !bench->out)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for %d tokens", bench->tokens);
    if (!bench_has_yardsticks(bench))
        return EP_OK;
    EP_TRY(take_symmetric(bench, 2 * hidden, &bench->copy_to));
    bench->copy_from = take(bench, bench->room_rows, 2 * hidden);
    bench->out_byhand = take(bench, n_tokens, 2 * hidden);
    if (!bench->copy_from || !bench->out_byhand)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for %d tokens", bench->tokens);
    if (!bench_has_mpi(bench))
        return EP_OK;
    return byhand_init(&bench->hand, bench->ctx->mpi, bench->ctx->mpi_boot, &bench->route, (int)hidden);
}

int bench_case_init(struct bench_case *bench, struct ranks_ctx *ctx, const struct bench_request *request, int tokens,
                    int64_t least_rows)
{
    ep_status status;
    int code;

    memset(bench, 0, sizeof(*bench));
    bench->ctx = ctx;
    bench->request = request;
    bench->tokens = tokens;
    bench->ranks_per_node = ctx->nranks / (ctx->nnodes > 1 ? ctx->nnodes : 1);
    code = bench_routing_new(ctx, request, tokens, 0, &bench->routing);
    if (code != 0)
        return code;
    if (bench_route_init(&bench->route, bench->routing, ctx->rank, bench->ranks_per_node) != 0)
        return ranks_emit_error(ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for the rows of %d tokens", tokens),
                                "preparing the benchmark");
    bench->room_rows = bench->route.n_recv > least_rows ? bench->route.n_recv : least_rows;
    status = bench_one_clock(ctx, &bench->one_clock);
    if (status == EP_OK)
        status = take_buffers(bench);
    return status == EP_OK ? 0 : ranks_emit_error(ctx, status, "preparing the benchmark");
}

void bench_case_done(struct bench_case *bench)
{
    void *symmetric[] = {bench->recv_x, bench->recv_scales, bench->recv_experts, bench->recv_weights, bench->copy_to};

    ep_plan_free(bench->plan);
    byhand_done(&bench->hand);
    /* The first failure has been reported; a communicator that failed frees what is left when it is freed itself. */
    for (size_t i = 0; i < sizeof(symmetric) / sizeof(symmetric[0]); i++)
        if (symmetric[i] && ep_free(bench->ctx->comm, symmetric[i]) != EP_OK)
            break;
    free(bench->x);
    free(bench->x_scales);
    free(bench->out);
    free(bench->out_byhand);
    free(bench->copy_from);
    bench_route_done(&bench->route);
    routing_free(bench->routing);
    memset(bench, 0, sizeof(*bench));
}

ep_status bench_plan_new(struct bench_case *bench, const struct bench_route *route, ep_plan **ret_plan)
{
    const ep_plan_args args = {
        .size = sizeof(args),
        .topk_idx = route->n_tokens ? route->experts : NULL,
        .idx_type = EP_I32,
        .n_tokens = route->n_tokens,
        .topk = route->topk,
        .n_experts = route->n_experts,
    };

    return ep_plan_new(bench->ctx->comm, &args, ret_plan);
}

void bench_dispatch_args(const struct bench_case *bench, bool is_fp8, ep_dispatch_args *ret_args)
{
    *ret_args = (ep_dispatch_args){
        .size = sizeof(*ret_args),
        .x = bench->x,
        .dtype = is_fp8 ? EP_F8E4M3 : EP_BF16,
        .hidden = bench->request->hidden,
        .scales = is_fp8 ? bench->x_scales : NULL,
        .scale_type = is_fp8 ? EP_F32 : 0,
        .topk_weights = bench->route.weights,
        .recv_x = bench->recv_x,
        .recv_scales = is_fp8 ? bench->recv_scales : NULL,
        .recv_topk_idx = bench->recv_experts,
        .recv_topk_weights = bench->recv_weights,
        .out_rows = bench->room_rows,
    };
}
