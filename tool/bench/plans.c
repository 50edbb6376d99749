/* SPDX-License-Identifier: Apache-2.0 */
/* plans.c - cost of a new routing: its plan, and its first dispatch compared with that of an existing plan. */
#include "bench/plans.h"
#include "bench/case.h"

#include "base/error.h"

#include <string.h>

struct plans {
    struct bench_case *bench;
    struct routing *routing[BENCH_VARIANTS];
    struct bench_route route[BENCH_VARIANTS];
    struct bench_mirrors mirrors; /* of the routes */
    ep_dispatch_args dispatch;
    ep_plan *plan;
    int next;
};

int bench_plans_rows(struct ranks_ctx *ctx, const struct bench_request *request, int tokens, int64_t *ret_rows)
{
    int64_t most = 0;

    for (int v = 1; v <= BENCH_VARIANTS; v++) {
        struct bench_route route;
        struct routing *routing;
        int code = bench_routing_new(ctx, request, tokens, v, ctx->nranks, &routing, &route);

        if (code != 0)
            return code;
        most = route.n_recv > most ? route.n_recv : most;
        bench_route_done(&route);
        routing_free(routing);
    }
    *ret_rows = most;
    return 0;
}

/* Each sample has another routing than the one before. */
static ep_status prepare_new(void *context, int round)
{
    struct plans *plans = context;

    plans->next = (round + BENCH_WARM_UP) % BENCH_VARIANTS;
    plans->dispatch.topk_weights = mirrors_address(&plans->mirrors, plans->route[plans->next].weights);
    return EP_OK;
}

static ep_status run_plan(void *context)
{
    struct plans *plans = context;

    return bench_plan_new(plans->bench, &plans->mirrors, &plans->route[plans->next], &plans->plan);
}

static ep_status run_first(void *context)
{
    struct plans *plans = context;

    EP_TRY(bench_plan_new(plans->bench, &plans->mirrors, &plans->route[plans->next], &plans->plan));
    return ep_dispatch_sync(plans->plan, &plans->dispatch);
}

static ep_status after_new(void *context, int round)
{
    struct plans *plans = context;

    (void)round;
    ep_plan_free(plans->plan);
    plans->plan = NULL;
    return EP_OK;
}

static ep_status run_cached(void *context)
{
    struct plans *plans = context;
    ep_dispatch_args args = plans->dispatch;

    args.topk_weights = mirrors_address(&plans->bench->mirrors, plans->bench->route.weights);
    return ep_dispatch_sync(plans->bench->plan, &args);
}

static int check_first(struct plans *plans, int variant)
{
    struct bench_case *bench = plans->bench;
    const struct bench_route *route = &plans->route[variant];
    ep_status status;

    plans->next = variant;
    plans->dispatch.topk_weights = mirrors_address(&plans->mirrors, route->weights);
    verify_poison_received(bench, route);
    status = run_first(plans);
    if (status != EP_OK)
        return ranks_emit_error(bench->ctx, status, "first dispatch");
    after_new(plans, 0);
    return verify_dispatch(bench, plans->routing[variant], route, false);
}

/* The mean of the routings, which are used equally often. */
static struct bench_counts mean_counts(const struct plans *plans)
{
    struct bench_counts mean = {0};

    for (int v = 0; v < BENCH_VARIANTS; v++)
        bench_counts_add(&mean, &plans->route[v].counts);
    mean.recv /= BENCH_VARIANTS;
    mean.wire /= BENCH_VARIANTS;
    mean.net /= BENCH_VARIANTS;
    mean.own_node /= BENCH_VARIANTS;
    return mean;
}

static int measure(struct plans *plans)
{
    struct bench_case *bench = plans->bench;
    struct bench_series series[] = {
        {.what = "first dispatch", .prepare = prepare_new, .run = run_first, .after = after_new, .context = plans},
        {.what = "plan", .prepare = prepare_new, .run = run_plan, .after = after_new, .context = plans},
        {.what = "dispatch", .run = run_cached, .context = plans},
    };
    struct bench_measurement first = {
        .op = "first-dispatch",
        .type = "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(0, bench->request->hidden),
        .counts = mean_counts(plans),
        .measured = &series[0],
        .cached = &series[2],
    };
    struct bench_measurement plan = {
        .op = "plan", .type = "", .tokens = bench->tokens, .counts = mean_counts(plans), .measured = &series[1]};
    int code = 0;

    for (int v = 0; v < BENCH_VARIANTS && code == 0; v++)
        code = check_first(plans, v);
    if (code == 0)
        code = bench_rounds(bench->ctx, series, 3, bench->request->iters, bench->one_clock);
    if (code == 0)
        code = check_first(plans, 0);
    if (code == 0)
        code = bench_emit_row(bench, &plan);
    return code ? code : bench_emit_row(bench, &first);
}

int bench_run_plans(struct bench_case *bench)
{
    struct plans plans = {.bench = bench, .mirrors = {.ctx = bench->ctx}};
    int code = 0;

    for (int v = 0; v < BENCH_VARIANTS && code == 0; v++) {
        code = bench_routing_new(bench->ctx, bench->request, bench->tokens, v + 1, bench->ranks_per_node,
                                 &plans.routing[v], &plans.route[v]);
        if (code == 0)
            bench_mirror_route(&plans.mirrors, &plans.route[v]);
    }
    if (code == 0 && mirrors_status(&plans.mirrors) != EP_OK)
        code = ranks_emit_error(bench->ctx, mirrors_status(&plans.mirrors), "preparing the benchmark");
    verify_fill_x(bench, false);
    bench_dispatch_args(bench, false, &plans.dispatch);
    if (code == 0)
        code = measure(&plans);
    ep_plan_free(plans.plan);
    mirrors_free(&plans.mirrors);
    for (int v = 0; v < BENCH_VARIANTS; v++) {
        bench_route_done(&plans.route[v]);
        routing_free(plans.routing[v]);
    }
    return code;
}
