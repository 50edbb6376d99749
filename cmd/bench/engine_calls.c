/* SPDX-License-Identifier: Apache-2.0 */
/*
 * engine_calls.c - operations as engines call them: ordinary and symmetric memory; the routing of an earlier call, a
 * new one whose counts stay on the device, and a new one whose counts the host waits for; layers queued one behind
 * another.
 *
 * Rows are small integers, so that sums are exact in any order: each token comes back once from each rank, in the
 * expanded layout from each expert, and is compared before and after the rounds. Calls with fp8 rows are preceded by
 * the same in bf16; their own rows are compared by the measurement of dispatch (bench_ops.c).
 */
#include "bench_case.h"

#include "base/error.h"
#include "cmd/test/check/number_formats.h"

enum { LAYERS = 16 };
/* On GPUs a round takes a millisecond, whatever its call takes: 40 kinds of calls, four seconds. */
enum { ROUNDS = 100 };
enum way { CACHED, UPDATED, PLANNED, WAYS };
static const char *const way_names[] = {"cached", "update", "plan"};

/* Where the rows arrive. */
struct place {
    const char *name;
    unsigned flags; /* of mirrors_alloc() */
    unsigned char *x, *scales, *experts, *weights;
};

struct engine {
    struct bench_case *bench;
    struct place places[2];
    int64_t rows[2]; /* that this rank receives at most, by layout */
    ep_plan *cached[2], *fixed[2];
};

/* A kind of call. */
struct call {
    struct engine *engine;
    const struct place *place;
    enum way way;
    bool expanded, fp8, dispatches, combines;
    int next;      /* number of the next routing */
    ep_plan *plan; /* of the last call */
};

static const struct bench_route *route_of(const struct call *c)
{
    return c->way == CACHED ? &c->engine->bench->route : &c->engine->bench->new_routes[c->next % BENCH_VARIANTS];
}

static void free_plan(struct call *c)
{
    if (c->way == PLANNED)
        ep_plan_free(c->plan);
    c->plan = NULL;
}

static ep_status begin(struct call *c)
{
    struct engine *e = c->engine;
    const struct bench_route *route = route_of(c);
    unsigned flags = c->expanded ? EP_PLAN_EXPANDED : 0;
    ep_plan_update_args args = EP_PLAN_UPDATE_ARGS_INIT;

    free_plan(c);
    if (c->way == PLANNED)
        return bench_plan_new(e->bench, route, flags, 0, &c->plan);
    c->plan = c->way == CACHED ? e->cached[c->expanded] : e->fixed[c->expanded];
    if (c->way == CACHED)
        return EP_OK;
    args.topk_idx = mirrors_address(&e->bench->mirrors, route->experts);
    args.n_tokens = route->n_tokens;
    return ep_plan_update(c->plan, &args, NULL);
}

static ep_status dispatch(const struct call *c)
{
    const struct mirrors *mirrors = &c->engine->bench->mirrors;
    ep_dispatch_args args;

    bench_dispatch_args(c->engine->bench, c->fp8, &args);
    args.topk_weights = mirrors_address(mirrors, route_of(c)->weights);
    args.recv_x = mirrors_address(mirrors, c->place->x);
    args.recv_scales = c->fp8 ? mirrors_address(mirrors, c->place->scales) : NULL;
    args.recv_topk_idx = c->expanded ? NULL : mirrors_address(mirrors, c->place->experts);
    args.recv_topk_weights = mirrors_address(mirrors, c->place->weights);
    args.out_rows = c->engine->rows[c->expanded];
    return ep_dispatch(c->plan, &args, NULL);
}

/* Expanded: the sum of each rank rounded first, as DeepEP's ElasticBuffer. */
static ep_status combine(const struct call *c)
{
    struct bench_case *bench = c->engine->bench;
    ep_combine_args args;

    bench_combine_args(bench, &args);
    args.x = mirrors_address(&bench->mirrors, c->place->x);
    if (c->expanded && bench->ctx->nnodes < 2)
        args.flags = EP_COMBINE_BY_CHOICE | EP_COMBINE_ROUND_PARTIAL;
    return ep_combine(c->plan, &args, NULL);
}

static ep_status run_layer(struct call *c)
{
    if (c->dispatches) {
        EP_TRY(begin(c));
        EP_TRY(dispatch(c));
    }
    if (c->combines)
        EP_TRY(combine(c));
    c->next += c->dispatches;
    return EP_OK;
}

static ep_status run_call(void *context)
{
    struct call *c = context;

    for (int i = 0; i < (c->dispatches && c->combines ? LAYERS : 1); i++)
        EP_TRY(run_layer(c));
    return EP_OK;
}

static ep_status finish_call(void *context)
{
    return ep_stream_sync(((struct call *)context)->engine->bench->ctx->comm, NULL);
}

/* --- rows and sums --- */

static float element(int rank, int token, int i)
{
    return (float)((rank * 5 + token * 3 + i) % 7 - 3);
}

static void fill(struct bench_case *bench)
{
    int hidden = bench->request->hidden;
    uint16_t *x = bench->x;

    for (int token = 0; token < bench->tokens; token++)
        for (int i = 0; i < hidden; i++)
            x[(size_t)token * (size_t)hidden + (size_t)i] = format_to_bf16(element(bench->ctx->rank, token, i));
    mirrors_push(&bench->mirrors, x, (size_t)bench->tokens * (size_t)hidden * sizeof(*x));
}

/* How often the token comes back. */
static int times_of(const struct bench_route *route, int token, bool expanded)
{
    int topk = route->group.topk, local = route->group.n_experts / route->group.n_ranks, n = 0;
    const int32_t *experts = route->experts + (size_t)token * (size_t)topk;

    for (int k = 0; k < topk; k++) {
        bool counts = experts[k] >= 0;

        for (int j = 0; j < k && !expanded; j++)
            counts = counts && (experts[j] < 0 || experts[j] / local != experts[k] / local);
        n += counts;
    }
    return n;
}

/* One dispatch and combine of the kind, on poisoned memory. */
static int check(struct call *c)
{
    struct bench_case *bench = c->engine->bench;
    struct call pair = *c;
    int hidden = bench->request->hidden;
    const struct bench_route *route = route_of(&pair);
    size_t bytes = (size_t)route->n_tokens * 2 * (size_t)hidden;
    char wrong[128] = "";
    ep_status status;

    pair.dispatches = pair.combines = true;
    pair.fp8 = false;
    pair.plan = NULL;
    mirrors_poison(&bench->mirrors, pair.place->x, (size_t)c->engine->rows[pair.expanded] * 2 * (size_t)hidden);
    mirrors_poison(&bench->mirrors, bench->out, bytes);
    status = bench_mirrors_status(&bench->mirrors);
    if (status == EP_OK)
        status = run_layer(&pair);
    if (status == EP_OK)
        status = finish_call(&pair);
    free_plan(&pair);
    if (status != EP_OK)
        return ranks_emit_error(bench->ctx, status, "a layer");
    mirrors_pull(&bench->mirrors, bench->out, bytes);
    for (int token = 0; token < route->n_tokens && !*wrong; token++)
        for (int i = 0, n = times_of(route, token, pair.expanded); i < hidden && !*wrong; i++)
            if (bench->out[(size_t)token * (size_t)hidden + (size_t)i] !=
                format_to_bf16(n ? (float)n * element(bench->ctx->rank, token, i) : 0.0f))
                snprintf(wrong, sizeof(wrong), "token %d, element %d is not %d times what was sent", token, i, n);
    return verify_agree(bench->ctx, "verifying a layer", wrong);
}

/* --- the measurements --- */

static int measure(struct call *c)
{
    struct bench_case *bench = c->engine->bench;
    bool layer = c->dispatches && c->combines;
    struct bench_series series = {.what = layer         ? "layers"
                                          : c->combines ? "combine"
                                                        : "dispatch",
                                  .run = run_call,
                                  .finish = finish_call,
                                  .context = c,
                                  .repeats = layer ? LAYERS : 0,
                                  .most_rounds = ROUNDS};
    struct bench_measurement measurement = {.op = layer         ? "layer"
                                                  : c->combines ? "call-combine"
                                                                : "call-dispatch",
                                            .type = c->fp8 ? "fp8" : "bf16",
                                            .memory = c->place->name,
                                            .layout = c->expanded ? "expanded" : "rank",
                                            .routing = way_names[c->way],
                                            .tokens = bench->tokens,
                                            .row_bytes = bench_row_bytes(c->fp8, bench->request->hidden),
                                            .counts = bench->route.counts,
                                            .series = &series,
                                            .n_series = 1};
    int code = check(c);

    if (c->expanded)
        measurement.row_bytes = 0; /* rows are counted by rank */
    if (code == 0 && !c->dispatches)
        c->plan = c->engine->cached[c->expanded];
    if (code == 0)
        code = bench_rounds(bench->ctx, &series, 1, bench->request->iters, bench->one_clock);
    free_plan(c);
    if (code == 0)
        code = check(c);
    return code ? code : bench_emit_row(bench, &measurement);
}

static int measure_layout(struct engine *engine, const struct place *place, bool expanded)
{
    unsigned types = engine->bench->request->types;
    int code = 0;

    for (int fp8 = 0; fp8 < 2; fp8++)
        for (enum way way = CACHED; way < WAYS && types & (fp8 ? BENCH_FP8 : BENCH_BF16) && code == 0; way++)
            code = measure(&(struct call){
                .engine = engine, .place = place, .way = way, .expanded = expanded, .fp8 = fp8, .dispatches = true});
    if (code == 0)
        code = measure(&(struct call){.engine = engine, .place = place, .expanded = expanded, .combines = true});
    for (enum way way = CACHED; way < WAYS && code == 0; way++)
        code = measure(&(struct call){
            .engine = engine, .place = place, .way = way, .expanded = expanded, .dispatches = true, .combines = true});
    return code;
}

/* The most rows that this rank receives of one of the routings; a plan of fixed capacity has at least one. */
static int count_rows(struct engine *engine)
{
    struct bench_case *bench = engine->bench;

    engine->rows[0] = bench->capacity_rows ? bench->capacity_rows : 1;
    engine->rows[1] = 1;
    for (int v = 0; v <= BENCH_VARIANTS; v++) {
        struct bench_route route;

        CMD_TRY(bench_case_route(bench, v, true, &route));
        if (engine->rows[1] < route.counts.recv)
            engine->rows[1] = route.counts.recv;
        bench_route_done(&route);
    }
    return 0;
}

static ep_status prepare(struct engine *engine)
{
    struct bench_case *bench = engine->bench;
    size_t hidden = (size_t)bench->request->hidden, topk = (size_t)bench->request->topk;
    size_t by_rank = (size_t)engine->rows[0],
           most = by_rank > (size_t)engine->rows[1] ? by_rank : (size_t)engine->rows[1];

    FOR_EACH (place, engine->places, 2) {
        place->x = mirrors_alloc(&bench->mirrors, most * 2 * hidden, place->flags);
        place->scales = mirrors_alloc(&bench->mirrors, most * hidden / EP_SCALE_BLOCK * sizeof(float), place->flags);
        place->experts = mirrors_alloc(&bench->mirrors, by_rank * topk * sizeof(int32_t), place->flags);
        place->weights = mirrors_alloc(&bench->mirrors, most * topk * sizeof(float), place->flags);
    }
    EP_TRY(bench_mirrors_status(&bench->mirrors));
    for (int expanded = 0; expanded < 2; expanded++) {
        unsigned flags = expanded ? EP_PLAN_EXPANDED : 0;

        EP_TRY(bench_plan_new(bench, &bench->route, flags, 0, &engine->cached[expanded]));
        EP_TRY(bench_plan_new(bench, &bench->route, flags, engine->rows[expanded], &engine->fixed[expanded]));
    }
    fill(bench);
    return bench_mirrors_status(&bench->mirrors);
}

int bench_run_engine(struct bench_case *bench)
{
    struct engine engine = {.bench = bench,
                            .places = {{.name = "symmetric", .flags = MIRRORS_SYMMETRIC}, {.name = "ordinary"}}};
    int code = count_rows(&engine);
    ep_status status = code ? EP_OK : prepare(&engine);

    if (status != EP_OK)
        code = ranks_emit_error(bench->ctx, status, "preparing the calls of an engine");
    for (int i = 0; i < 2; i++)
        for (int expanded = 0; expanded < 2 && code == 0; expanded++)
            code = measure_layout(&engine, &engine.places[i], expanded);
    for (int expanded = 0; expanded < 2; expanded++) {
        ep_plan_free(engine.cached[expanded]);
        ep_plan_free(engine.fixed[expanded]);
    }
    return code;
}
