/* SPDX-License-Identifier: Apache-2.0 */
/* plans.c - cost of a new routing: its plan, and its first dispatch compared with that of an existing plan. */
#include "bench_case.h"

#include "base/error.h"

struct plans {
    struct bench_case *bench;
    const struct bench_route *route; /* of the next plan */
    ep_dispatch_args dispatch;
    ep_plan *plan;
};

static void choose(struct plans *plans, const struct bench_route *route)
{
    plans->route = route;
    plans->dispatch.topk_weights = mirrors_address(&plans->bench->mirrors, route->weights);
}

/* Each sample has another routing than the one before. */
static ep_status prepare_new(void *context, int round)
{
    struct plans *plans = context;

    choose(plans, &plans->bench->new_routes[(round + BENCH_WARM_UP) % BENCH_VARIANTS]);
    return EP_OK;
}

static ep_status run_plan(void *context)
{
    struct plans *plans = context;

    return bench_plan_new(plans->bench, plans->route, &plans->plan);
}

static ep_status run_first(void *context)
{
    struct plans *plans = context;

    EP_TRY(run_plan(plans));
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

static int check_first(struct plans *plans, const struct bench_route *route)
{
    struct bench_case *bench = plans->bench;
    ep_status status;

    choose(plans, route);
    verify_poison_received(bench, route);
    status = run_first(plans);
    if (status != EP_OK)
        return ranks_emit_error(bench->ctx, status, "first dispatch");
    after_new(plans, 0);
    return verify_dispatch(bench, route, false);
}

/* The mean of the routings, which are used equally often. */
static struct bench_counts mean_counts(const struct bench_case *bench)
{
    struct bench_counts mean = {0};

    for (int v = 0; v < BENCH_VARIANTS; v++)
        bench_counts_add(&mean, &bench->new_routes[v].counts);
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
        {.what = "dispatch", .key = "cached", .run = run_cached, .context = plans},
        {.what = "plan", .prepare = prepare_new, .run = run_plan, .after = after_new, .context = plans},
    };
    struct bench_measurement first = {
        .op = "first-dispatch",
        .type = "bf16",
        .tokens = bench->tokens,
        .row_bytes = bench_row_bytes(0, bench->request->hidden),
        .counts = mean_counts(bench),
        .series = series,
        .n_series = 2,
    };
    struct bench_measurement plan = {.op = "plan",
                                     .type = "",
                                     .tokens = bench->tokens,
                                     .counts = mean_counts(bench),
                                     .series = &series[2],
                                     .n_series = 1};
    int code = 0;

    for (int v = 0; v < BENCH_VARIANTS && code == 0; v++)
        code = check_first(plans, &bench->new_routes[v]);
    if (code == 0)
        code = bench_rounds(bench->ctx, series, 3, bench->request->iters, bench->one_clock);
    if (code == 0)
        code = check_first(plans, &bench->new_routes[0]);
    if (code == 0)
        code = bench_emit_row(bench, &plan);
    return code ? code : bench_emit_row(bench, &first);
}

int bench_run_plans(struct bench_case *bench)
{
    struct plans plans = {.bench = bench};
    int code;

    verify_fill_x(bench, false);
    bench_dispatch_args(bench, false, &plans.dispatch);
    code = measure(&plans);
    ep_plan_free(plans.plan);
    return code;
}
