/* SPDX-License-Identifier: Apache-2.0 */
#include "rounds.h"

#include "backend/cuda/module.h"
#include "base/clock.h"
#include "base/error.h"
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILL_SECONDS 0.3
#define LEAST_ROUNDS 5
#define MOST_ROUNDS 1000
#define GATHER_SPANS 128 /* of one rank in one ep_comm_allgather: 2 KiB */

struct rounds {
    struct ranks_ctx *ctx;
    struct bench_series *series;
    int n_series, n_rounds;
    bool one_clock;
    struct bench_span *spans;    /* [series][round], this rank's */
    struct bench_span *gathered; /* [R][GATHER_SPANS] */
    double *seconds;             /* [series][round], the group's */
    double *scratch;             /* [round] */
};

static ep_status time_on_host(const struct bench_series *series, struct bench_span *ret_span)
{
    ep_status status;

    ret_span->begin_ns = ep_now_ns();
    status = series->run(series->context);
    if (status == EP_OK && series->finish)
        status = series->finish(series->context);
    ret_span->end_ns = ep_now_ns();
    return status;
}

static ep_status time_on_gpu(struct ranks_ctx *ctx, const struct bench_series *series, struct bench_span *ret_span)
{
    ret_span->begin_ns = 0;
    EP_TRY(ctx->gpu->clock_start(ctx->comm, series->queued));
    EP_TRY(series->run(series->context));
    EP_TRY(ctx->gpu->clock_stop(ctx->comm));
    if (series->finish)
        EP_TRY(series->finish(series->context));
    return ctx->gpu->clock_read(ctx->comm, &ret_span->end_ns);
}

static int run_sample(struct rounds *rounds, struct bench_series *series, int round, struct bench_span *ret_span)
{
    struct ranks_ctx *ctx = rounds->ctx;
    ep_status status = series->prepare ? series->prepare(series->context, round) : EP_OK;

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, series->what);
    status = ep_comm_barrier(ctx->comm);
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "barrier of the benchmark");
    status = ctx->gpu ? time_on_gpu(ctx, series, ret_span) : time_on_host(series, ret_span);
    if (series->repeats)
        ret_span->end_ns = ret_span->begin_ns + (ret_span->end_ns - ret_span->begin_ns) / (uint64_t)series->repeats;
    if (status == EP_OK && series->after)
        status = series->after(series->context, round);
    return status == EP_OK ? 0 : ranks_emit_error(ctx, status, series->what);
}

/* The order rotates from round to round, because each series finds the caches as the one before has left them. */
static int run_round(struct rounds *rounds, int round, struct bench_span *spans, size_t stride)
{
    for (int i = 0; i < rounds->n_series; i++) {
        int index = (i + (round < 0 ? 0 : round)) % rounds->n_series;
        int code = run_sample(rounds, &rounds->series[index], round, spans + (size_t)index * stride);

        if (code != 0)
            return code;
    }
    return 0;
}

/* Seconds of the group for `n` samples of this rank. */
static int gather_seconds(struct rounds *rounds, const struct bench_span *mine, int n, double *ret_seconds)
{
    struct ranks_ctx *ctx = rounds->ctx;
    struct bench_span column[EP_MAX_RANKS];

    for (int first = 0; first < n; first += GATHER_SPANS) {
        int part = n - first < GATHER_SPANS ? n - first : GATHER_SPANS;
        ep_status status = ep_comm_allgather(ctx->comm, mine + first, (size_t)part * sizeof(*mine), rounds->gathered);

        if (status != EP_OK)
            return ranks_emit_error(ctx, status, "exchange of timings");
        for (int i = 0; i < part; i++) {
            for (int r = 0; r < ctx->nranks; r++)
                column[r] = rounds->gathered[r * part + i];
            ret_seconds[first + i] = bench_window(column, ctx->nranks, rounds->one_clock);
        }
    }
    return 0;
}

/* Warm-up. The time of its last sample determines the number of rounds, the same on all ranks. */
static int warm_up(struct rounds *rounds, int iters)
{
    struct bench_span spans[BENCH_MAX_SERIES];
    double seconds = 0;
    int code;

    for (int round = -BENCH_WARM_UP; round < 0; round++) {
        code = run_round(rounds, round, spans, 1);
        if (code != 0)
            return code;
    }
    code = gather_seconds(rounds, spans, 1, &seconds);
    if (code != 0)
        return code;
    rounds->n_rounds = iters > 0 ? iters : bench_rounds_for(seconds, FILL_SECONDS, LEAST_ROUNDS, MOST_ROUNDS);
    return 0;
}

static void summarise(struct rounds *rounds)
{
    size_t n = (size_t)rounds->n_rounds;

    for (int i = 0; i < rounds->n_series; i++)
        rounds->series[i].ratio =
            bench_median_ratio(rounds->seconds + (size_t)i * n, rounds->seconds, n, rounds->scratch);
    for (int i = 0; i < rounds->n_series; i++)
        bench_summarise(rounds->seconds + (size_t)i * n, n, &rounds->series[i].summary);
}

static int run_rounds(struct rounds *rounds)
{
    size_t n = (size_t)rounds->n_rounds;
    size_t all = n * (size_t)rounds->n_series;
    int code = 0;

    rounds->spans = malloc(all * sizeof(*rounds->spans));
    rounds->seconds = malloc(all * sizeof(*rounds->seconds));
    rounds->scratch = malloc(n * sizeof(*rounds->scratch));
    if (!rounds->spans || !rounds->seconds || !rounds->scratch)
        return ranks_emit_error(rounds->ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for %zu timings", all),
                                "measuring");
    for (int round = 0; round < rounds->n_rounds && code == 0; round++)
        code = run_round(rounds, round, rounds->spans + round, n);
    for (int i = 0; i < rounds->n_series && code == 0; i++)
        code = gather_seconds(rounds, rounds->spans + (size_t)i * n, rounds->n_rounds, rounds->seconds + (size_t)i * n);
    if (code == 0)
        summarise(rounds);
    return code;
}

int bench_rounds(struct ranks_ctx *ctx, struct bench_series *series, int n_series, int iters, bool one_clock)
{
    struct rounds rounds = {.ctx = ctx, .series = series, .n_series = n_series, .one_clock = one_clock && !ctx->gpu};
    int code;

    rounds.gathered = malloc((size_t)ctx->nranks * GATHER_SPANS * sizeof(*rounds.gathered));
    if (!rounds.gathered)
        return ranks_emit_error(ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for timings"), "measuring");
    code = warm_up(&rounds, iters);
    if (code == 0)
        code = run_rounds(&rounds);
    free(rounds.gathered);
    free(rounds.spans);
    free(rounds.seconds);
    free(rounds.scratch);
    return code;
}

ep_status bench_one_clock(struct ranks_ctx *ctx, bool *ret_one)
{
    unsigned char mine[64] = {0};
    unsigned char *all;
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    bool one = true;
    ep_status status;

    /* Without the file the host is unknown: treat each rank as a host. */
    if (!file || fread(mine, 1, sizeof(mine), file) == 0)
        memcpy(mine, &ctx->rank, sizeof(ctx->rank));
    if (file)
        fclose(file);
    all = malloc((size_t)ctx->nranks * sizeof(mine));
    if (!all)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for the hosts of %d ranks", ctx->nranks);
    status = ep_comm_allgather(ctx->comm, mine, sizeof(mine), all);
    for (int r = 0; status == EP_OK && r < ctx->nranks; r++)
        one = one && memcmp(all + (size_t)r * sizeof(mine), mine, sizeof(mine)) == 0;
    free(all);
    if (status == EP_OK)
        *ret_one = one;
    return status;
}
