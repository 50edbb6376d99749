/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "base/error.h"
#include "base/module.h"
#include "common/launched_by.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"

#include <dlfcn.h>
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

    if (!routing_new(&spec, &routing, &error))
        return ranks_emit_error(ctx, ep_fail(EP_E_ARG, "%s", error.text), "generating a routing");
    bench_route_init(ret_route, routing, ctx->rank, ctx->nnodes > 1 ? ctx->nnodes : 1, expanded);
    routing_free(routing);
    return 0;
}

static void *alloc_rows(struct bench_case *bench, int64_t rows, size_t row_bytes)
{
    return mirrors_alloc(&bench->mirrors, (size_t)rows * row_bytes, 0);
}

static void *alloc_symmetric(struct bench_case *bench, size_t row_bytes)
{
    return mirrors_alloc(&bench->mirrors, (size_t)bench->capacity_rows * row_bytes, MIRRORS_SYMMETRIC);
}

ep_status bench_mirrors_status(const struct mirrors *mirrors)
{
    if (mirrors->missing)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for a buffer of %zu bytes", mirrors->missing);
    if (mirrors->status == EP_E_STATE && mirrors->n == MIRRORS_MAX)
        return ep_fail(EP_E_STATE, "benchmark: more than %d buffers", MIRRORS_MAX);
    return mirrors->status;
}

ep_status bench_copy(void *context)
{
    const struct bench_case *bench = context;

    memcpy(bench->copy_to, bench->copy_from, bench->copy_bytes);
    return EP_OK;
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

/*
 * Creates the routes and the buffers, with all pages touched. `common`: what the cases of a request have in common:
 * ctx, request, one_clock, mpi, and mirrors without buffers. bench_case_done() is allowed after an error, too.
 */
static int init_case(struct bench_case *bench, const struct bench_case *common, int tokens)
{
    int n_new = common->request->ops & (BENCH_PLAN | BENCH_ENGINE) ? BENCH_VARIANTS : 0;

    *bench = *common;
    bench->tokens = tokens;
    for (int v = 0; v <= n_new; v++) {
        struct bench_route *route = v ? &bench->new_routes[v - 1] : &bench->route;

        CMD_TRY(bench_case_route(bench, v, false, route));
        if (route->counts.recv > bench->capacity_rows)
            bench->capacity_rows = route->counts.recv;
    }
    BENCH_TRY(bench->ctx, alloc_buffers(bench), "preparing the benchmark");
    return 0;
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

ep_status bench_plan_new(struct bench_case *bench, const struct bench_route *route, unsigned flags,
                         int64_t max_recv_tokens, ep_plan **ret_plan)
{
    const ep_plan_args args = {
        .size = sizeof(args),
        .topk_idx = route->n_tokens ? mirrors_address(&bench->mirrors, route->experts) : NULL,
        .idx_type = EP_I32,
        .n_tokens = route->n_tokens,
        .topk = route->group.topk,
        .n_experts = route->group.n_experts,
        .flags = flags,
        .max_recv_tokens = max_recv_tokens,
        .max_tokens = max_recv_tokens ? bench->tokens : 0,
    };

    return ep_plan_new(bench->ctx->comm, &args, ret_plan);
}

ep_status bench_sum(struct ranks_ctx *ctx, void *values, size_t bytes)
{
    size_t n = bytes / sizeof(int64_t);
    int64_t *sums = values, *all = memory_new((size_t)ctx->nranks, bytes);
    ep_status status = ep_comm_allgather(ctx->comm, values, bytes, all);

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

/* --- routes --- */

void bench_route_init(struct bench_route *route, const struct routing *routing, int rank, int n_nodes, bool expanded)
{
    const struct reference_group *group = &route->group;

    memset(route, 0, sizeof(*route));
    (void)reference_group_init(routing, n_nodes, &route->group, NULL);
    reference_counts_init(group, rank, &route->sent);
    reference_layout_init(group, rank, expanded, 1, &route->received);
    route->rank = rank;
    route->n_tokens = group->n_tokens[rank];
    route->experts = group->experts[rank];
    route->weights = group->weights[rank];
    route->counts = (struct bench_counts){.recv = route->received.n_rows,
                                          .net = route->received.n_net,
                                          .own_node = route->sent.tokens_per_node[rank / group->ranks_per_node]};
    for (int to = 0; to < group->n_ranks; to++)
        route->counts.wire += to == rank ? 0 : route->sent.tokens_per_rank[to];
}

void bench_route_done(struct bench_route *route)
{
    reference_layout_done(&route->received);
    reference_counts_done(&route->sent);
    reference_group_done(&route->group);
    memset(route, 0, sizeof(*route));
}

/* --- memory of the library in addition to the caller's buffers, as reported by the library --- */

struct footprint {
    int64_t library;
    int64_t data; /* inputs and outputs of one dispatch and one combine */
};

/* Buffers of any engine: x and top-k in, rows and top-k out, sums out. */
static int64_t data_bytes(const struct bench_route *route, int hidden)
{
    int64_t row = 2 * (int64_t)hidden;
    int64_t choice = (int64_t)route->group.topk * (int64_t)(sizeof(int32_t) + sizeof(float));

    return route->n_tokens * (2 * row + choice) + route->counts.recv * (row + choice);
}

static ep_status run_once(struct bench_case *bench)
{
    ep_dispatch_args dispatch;
    ep_combine_args combine;

    bench_dispatch_args(bench, false, &dispatch);
    bench_combine_args(bench, &combine);
    EP_TRY(bench_plan_new(bench, &bench->route, 0, 0, &bench->plan));
    EP_TRY(ep_dispatch_sync(bench->plan, &dispatch));
    return ep_combine_sync(bench->plan, &combine);
}

static ep_status measure_footprint(struct bench_case *bench, struct footprint *ret_footprint)
{
    ep_comm_info info = {.size = sizeof(info)};

    EP_TRY(run_once(bench));
    EP_TRY(ep_comm_get_info(bench->ctx->comm, &info));
    ret_footprint->library = (int64_t)info.library_bytes;
    ret_footprint->data = data_bytes(&bench->route, bench->request->hidden);
    return EP_OK;
}

static void emit_footprint(const struct bench_case *bench, const struct footprint *sum)
{
    struct ranks_ctx *ctx = bench->ctx;

    ranks_emit(ctx,
               json_pack("{s:s, s:i, s:i, s:i, s:i, s:I, s:I, s:f}", "event", "memory", "ranks", ctx->nranks, "nodes",
                         ctx->nnodes, "tokens", bench->tokens, "hidden", bench->request->hidden, "data_bytes",
                         (json_int_t)(sum->data / ctx->nranks), "library_bytes",
                         (json_int_t)(sum->library / ctx->nranks), "share", (double)sum->library / (double)sum->data));
}

static int run_footprint(struct bench_case *bench)
{
    struct ranks_ctx *ctx = bench->ctx;
    struct footprint sum;

    BENCH_TRY(ctx, measure_footprint(bench, &sum), "first plan, dispatch and combine");
    BENCH_TRY(ctx, bench_sum(ctx, &sum, sizeof(sum)), "adding up the ranks");
    if (ctx->rank == 0)
        emit_footprint(bench, &sum);
    return 0;
}

/* --- MPI, for its all-to-all --- */

#define MODULE_FILE "libepkit-bench-mpi.so"

/* RTLD_GLOBAL: plugins of MPI need its symbols. */
static ep_status load_mpi(const struct bench_mpi_module **ret_module)
{
    const void *table = NULL;

    EP_TRY(ep_module_load(MODULE_FILE, RTLD_GLOBAL, BENCH_MPI_SYMBOL, BENCH_MPI_ABI, &table));
    *ret_module = table;
    return EP_OK;
}

static ep_status all_succeeded(struct ranks_ctx *ctx, ep_status own, bool *ret_all)
{
    int64_t n = own == EP_OK;

    if (own != EP_OK && ctx->rank == 0)
        out_warning("MPI_Alltoallv is not measured: %s", ep_last_error());
    EP_TRY(bench_sum(ctx, &n, sizeof(n)));
    *ret_all = n == ctx->nranks;
    return EP_OK;
}

/* MPI, initialised; NULL if MPI_Alltoallv is not to be measured, or one of the ranks cannot. The same on all ranks. */
static ep_status start_mpi(struct ranks_ctx *ctx, const struct bench_request *request,
                           const struct bench_mpi_module **ret_mpi)
{
    const struct bench_mpi_module *mpi = NULL;
    bool all;

    *ret_mpi = NULL;
    if (!request->baselines || ctx->memory || ranks_world_rank() < 0 || !ranks_env_is_mpirun())
        return EP_OK;
    /* MPI_Init() waits for all ranks. */
    EP_TRY(all_succeeded(ctx, load_mpi(&mpi), &all));
    if (all)
        EP_TRY(all_succeeded(ctx, mpi->start(ctx->rank, ctx->nranks), &all));
    *ret_mpi = all ? mpi : NULL;
    return EP_OK;
}

/* --- a request, on every rank --- */

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
    code = init_case(&bench, common, tokens);
    if (code == 0)
        code = run_footprint(&bench);
    emit_step(common->ctx, step, n_steps, "dispatch and combine", tokens);
    if (code == 0)
        code = bench_run_ops(&bench);
    if (code == 0 && (common->request->ops & BENCH_PLAN)) {
        emit_step(common->ctx, step, n_steps, "plans", tokens);
        code = bench_run_plans(&bench);
    }
    if (code == 0 && (common->request->ops & BENCH_ENGINE)) {
        emit_step(common->ctx, step, n_steps, "calls of an engine", tokens);
        code = bench_run_engine(&bench);
    }
    bench_case_done(&bench);
    return code;
}

static int run_request(struct ranks_ctx *ctx, const struct bench_request *request, const struct bench_mpi_module *mpi)
{
    struct bench_case common = {
        .ctx = ctx, .request = request, .mpi = mpi, .mirrors = {.ctx = ctx, .poison = VERIFY_POISON}};
    bool low_latency = request->ops & BENCH_LL;
    int n_throughput = request->ops & ~(unsigned)BENCH_LL ? request->n_token_counts : 0;
    int n_steps = n_throughput + (low_latency ? 1 : 0);

    BENCH_TRY(ctx, bench_one_clock(ctx, &common.one_clock), "exchange of hosts");
    for (int i = 0; i < n_throughput; i++)
        CMD_TRY(run_tokens(&common, request->tokens[i], i, n_steps));
    if (!low_latency)
        return 0;
    emit_step(ctx, n_steps - 1, n_steps, "low latency", request->ll_tokens);
    return bench_run_lowlat(&common);
}

int bench_job(struct ranks_ctx *ctx, const json_t *parameters)
{
    ep_comm_info info = {.size = sizeof(info)};
    const struct bench_mpi_module *mpi = NULL;
    struct bench_request request;
    char device[128];

    if (bench_request_from_json(parameters, &request) != 0)
        return ranks_emit_error(ctx, ep_fail(EP_E_FORMAT, "the parameters of the benchmark are malformed"),
                                "benchmark");
    BENCH_TRY(ctx, ep_comm_get_info(ctx->comm, &info), "benchmark");
    snprintf(device, sizeof(device), "%s", info.backend);
    if (ctx->gpu) {
        BENCH_TRY(ctx, ctx->gpu->device_name(ctx->comm, device, sizeof(device)), "benchmark");
        BENCH_TRY(ctx, ctx->gpu->set_sms(ctx->comm, request.sms), "benchmark");
    }
    BENCH_TRY(ctx, start_mpi(ctx, &request, &mpi), "benchmark");
    if (ctx->rank == 0)
        ranks_emit(ctx, json_pack("{s:s, s:s, s:s, s:s?}", "event", "start", "device", device, "network", info.network,
                                  "mpi", mpi ? mpi->library_version() : NULL));
    return run_request(ctx, &request, mpi);
}
