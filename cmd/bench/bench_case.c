/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "base/error.h"

#include <stdlib.h>
#include <string.h>

int bench_case_route(const struct bench_case *bench, int variant, bool expanded, struct bench_route *ret_route)
{
    const struct bench_request *request = bench->request;
    struct ranks_ctx *ctx = bench->ctx;
    const struct routing_spec spec = {
        .kind = request->routing,
        .seed = request->seed + (uint64_t)variant,
        .n_ranks = ctx->nranks,
        .n_tokens = bench->tokens,
        .topk = request->topk,
        .n_experts = request->experts,
    };
    struct check_error error;
    struct routing *routing;
    bool ok;

    if (!routing_new(&spec, &routing, &error))
        return ranks_emit_error(ctx, ep_fail(EP_E_ARG, "%s", error.text), "generating a routing");
    ok = bench_route_init(ret_route, routing, ctx->rank, ctx->nnodes > 1 ? ctx->nnodes : 1, expanded);
    routing_free(routing);
    if (ok)
        return 0;
    return ranks_emit_error(ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for the rows of %d tokens", bench->tokens),
                            "preparing the benchmark");
}

static void *alloc_rows(struct bench_case *bench, int64_t rows, size_t row_bytes)
{
    return mirrors_alloc(&bench->mirrors, (size_t)rows * row_bytes, 0);
}

static void *alloc_symmetric(struct bench_case *bench, size_t row_bytes)
{
    size_t bytes = (size_t)bench->capacity_rows * row_bytes;

    bench->symmetric_bytes += (int64_t)bytes;
    return mirrors_alloc(&bench->mirrors, bytes, MIRRORS_SYMMETRIC);
}

ep_status bench_mirrors_status(const struct mirrors *mirrors)
{
    if (mirrors->missing)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for a buffer of %zu bytes", mirrors->missing);
    if (mirrors->status == EP_E_STATE && mirrors->n == MIRRORS_MAX)
        return ep_fail(EP_E_STATE, "benchmark: more than %d buffers", MIRRORS_MAX);
    return mirrors->status;
}

void bench_mirror_route(struct mirrors *mirrors, const struct bench_route *route)
{
    size_t choices = (size_t)route->n_tokens * (size_t)route->group.topk;

    if (!choices)
        return;
    mirrors_add(mirrors, route->experts, choices * sizeof(int32_t));
    mirrors_add(mirrors, route->weights, choices * sizeof(float));
}

static ep_status alloc_buffers(struct bench_case *bench)
{
    size_t hidden = (size_t)bench->request->hidden;
    size_t topk = (size_t)bench->request->topk;
    size_t scales = hidden / EP_SCALE_BLOCK * sizeof(float);
    int64_t n_tokens = bench->tokens; /* other variants of the routing may have more on this rank than this one */

    bench->recv_x = alloc_symmetric(bench, 2 * hidden);
    bench->recv_scales = alloc_symmetric(bench, scales);
    bench->recv_experts = alloc_symmetric(bench, topk * sizeof(int32_t));
    bench->recv_weights = alloc_symmetric(bench, topk * sizeof(float));
    /* Private memory, as from malloc() in an engine. */
    bench->x = alloc_rows(bench, n_tokens, 2 * hidden);
    bench->x_scales = alloc_rows(bench, n_tokens, scales);
    bench->out = alloc_rows(bench, n_tokens, 2 * hidden);
    bench_mirror_route(&bench->mirrors, &bench->route);
    for (int v = 0; v < BENCH_VARIANTS; v++)
        bench_mirror_route(&bench->mirrors, &bench->new_routes[v]);
    if (bench_has_baselines(bench)) {
        bench->copy_to = alloc_symmetric(bench, 2 * hidden);
        /* Source of all rows that this rank receives, or sends to one other rank: either may be more. */
        bench->copy_from =
            alloc_rows(bench, bench->capacity_rows > n_tokens ? bench->capacity_rows : n_tokens, 2 * hidden);
        bench->out_naive = alloc_rows(bench, n_tokens, 2 * hidden);
    }
    if (bench_has_mpi(bench))
        naive_init(&bench->naive, bench->mpi, &bench->mirrors, &bench->route, (int)hidden);
    return bench_mirrors_status(&bench->mirrors);
}

int bench_case_init(struct bench_case *bench, const struct bench_case *common, int tokens)
{
    int n_new = common->request->ops & BENCH_PLAN ? BENCH_VARIANTS : 0;
    ep_status status;

    *bench = *common;
    bench->tokens = tokens;
    for (int v = 0; v <= n_new; v++) {
        struct bench_route *route = v ? &bench->new_routes[v - 1] : &bench->route;
        int code = bench_case_route(bench, v, false, route);

        if (code != 0)
            return code;
        if (route->counts.recv > bench->capacity_rows)
            bench->capacity_rows = route->counts.recv;
    }
    status = alloc_buffers(bench);
    return status == EP_OK ? 0 : ranks_emit_error(bench->ctx, status, "preparing the benchmark");
}

void bench_case_done(struct bench_case *bench)
{
    ep_plan_free(bench->plan);
    if (!bench->naive.busy)
        mirrors_free(&bench->mirrors);
    bench_route_done(&bench->route);
    for (int v = 0; v < BENCH_VARIANTS; v++)
        bench_route_done(&bench->new_routes[v]);
    memset(bench, 0, sizeof(*bench));
}

ep_status bench_plan_new(struct bench_case *bench, const struct bench_route *route, ep_plan **ret_plan)
{
    const ep_plan_args args = {
        .size = sizeof(args),
        .topk_idx = route->n_tokens ? mirrors_address(&bench->mirrors, route->experts) : NULL,
        .idx_type = EP_I32,
        .n_tokens = route->n_tokens,
        .topk = route->group.topk,
        .n_experts = route->group.n_experts,
    };

    return ep_plan_new(bench->ctx->comm, &args, ret_plan);
}

ep_status bench_sum(struct ranks_ctx *ctx, void *values, size_t bytes)
{
    size_t n = bytes / sizeof(int64_t);
    int64_t *sums = values, *all = malloc((size_t)ctx->nranks * bytes);
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for the values of %d ranks", ctx->nranks);
    status = ep_comm_allgather(ctx->comm, values, bytes, all);
    for (size_t i = 0; status == EP_OK && i < n; i++) {
        sums[i] = 0;
        for (size_t r = 0; r < (size_t)ctx->nranks; r++)
            sums[i] += all[r * n + i];
    }
    free(all);
    return status;
}

void bench_dispatch_args(const struct bench_case *bench, bool is_fp8, ep_dispatch_args *ret_args)
{
    *ret_args = (ep_dispatch_args){
        .size = sizeof(*ret_args),
        .x = mirrors_address(&bench->mirrors, bench->x),
        .dtype = is_fp8 ? EP_F8E4M3 : EP_BF16,
        .hidden = bench->request->hidden,
        .scales = is_fp8 ? mirrors_address(&bench->mirrors, bench->x_scales) : NULL,
        .scale_type = is_fp8 ? EP_F32 : 0,
        .topk_weights = mirrors_address(&bench->mirrors, bench->route.weights),
        .recv_x = mirrors_address(&bench->mirrors, bench->recv_x),
        .recv_scales = is_fp8 ? mirrors_address(&bench->mirrors, bench->recv_scales) : NULL,
        .recv_topk_idx = mirrors_address(&bench->mirrors, bench->recv_experts),
        .recv_topk_weights = mirrors_address(&bench->mirrors, bench->recv_weights),
        .out_rows = bench->capacity_rows,
    };
}

void bench_combine_args(const struct bench_case *bench, ep_combine_args *ret_args)
{
    *ret_args = (ep_combine_args){
        .size = sizeof(*ret_args),
        .x = mirrors_address(&bench->mirrors, bench->recv_x),
        .dtype = EP_BF16,
        .hidden = bench->request->hidden,
        .out = mirrors_address(&bench->mirrors, bench->out),
    };
}
