/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/rounds.h"

#include "backend/cuda/module.h"
#include "base/clock.h"
#include "base/error.h"
#include "bench/bench.h"
#include "check/random.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILL_SECONDS 0.3
#define LEAST_ROUNDS 5
#define MOST_ROUNDS 1000
#define GATHER_SPANS 128 /* of one rank in one ep_comm_allgather: 2 KiB */

struct rounds {
    struct ranks_ctx *ctx;
    struct bench_turn *turns;
    int n_turns, n_rounds;
    bool one_clock;
    struct bench_span *spans; /* [turn][round], this rank's */
    struct bench_span *board; /* [R][GATHER_SPANS] */
    double *seconds;          /* [turn][round], the group's */
    double *scratch;          /* [round] */
};

static ep_status time_on_host(const struct bench_turn *turn, struct bench_span *ret_span)
{
    ep_status status;

    ret_span->begin_ns = ep_now_ns();
    status = turn->run(turn->context);
    if (status == EP_OK && turn->finish)
        status = turn->finish(turn->context);
    ret_span->end_ns = ep_now_ns();
    return status;
}

static ep_status time_on_gpu(struct ranks_ctx *ctx, const struct bench_turn *turn, struct bench_span *ret_span)
{
    ret_span->begin_ns = 0;
    EP_TRY(ctx->gpu->clock_start(ctx->comm, turn->queued));
    EP_TRY(turn->run(turn->context));
    EP_TRY(ctx->gpu->clock_stop(ctx->comm));
    if (turn->finish)
        EP_TRY(turn->finish(turn->context));
    return ctx->gpu->clock_read(ctx->comm, &ret_span->end_ns);
}

static int take_turn(struct rounds *rounds, struct bench_turn *turn, int round, struct bench_span *ret_span)
{
    struct ranks_ctx *ctx = rounds->ctx;
    ep_status status = turn->prepare ? turn->prepare(turn->context, round) : EP_OK;

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, turn->what);
    status = ep_comm_barrier(ctx->comm);
    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "barrier of the benchmark");
    status = ctx->gpu ? time_on_gpu(ctx, turn, ret_span) : time_on_host(turn, ret_span);
    if (turn->repeats)
        ret_span->end_ns = ret_span->begin_ns + (ret_span->end_ns - ret_span->begin_ns) / (uint64_t)turn->repeats;
    if (status == EP_OK && turn->after)
        status = turn->after(turn->context, round);
    return status == EP_OK ? 0 : ranks_emit_error(ctx, status, turn->what);
}

/* The order rotates from round to round: whoever comes after X finds the caches as X left them. */
static int make_round(struct rounds *rounds, int round, struct bench_span *spans, size_t stride)
{
    for (int i = 0; i < rounds->n_turns; i++) {
        int turn = (i + (round < 0 ? 0 : round)) % rounds->n_turns;
        int code = take_turn(rounds, &rounds->turns[turn], round, spans + (size_t)turn * stride);

        if (code != 0)
            return code;
    }
    return 0;
}

/* Seconds of the group for `n` turns that this rank has timed. */
static int share_spans(struct rounds *rounds, const struct bench_span *mine, int n, double *ret_seconds)
{
    struct ranks_ctx *ctx = rounds->ctx;
    struct bench_span column[EP_MAX_RANKS];

    for (int first = 0; first < n; first += GATHER_SPANS) {
        int part = n - first < GATHER_SPANS ? n - first : GATHER_SPANS;
        ep_status status = ep_comm_allgather(ctx->comm, mine + first, (size_t)part * sizeof(*mine), rounds->board);

        if (status != EP_OK)
            return ranks_emit_error(ctx, status, "exchange of timings");
        for (int i = 0; i < part; i++) {
            for (int r = 0; r < ctx->nranks; r++)
                column[r] = rounds->board[r * part + i];
            ret_seconds[first + i] = bench_window(column, ctx->nranks, rounds->one_clock);
        }
    }
    return 0;
}

/* Warm-up; the time of its last turn decides how many rounds there will be, the same on all ranks. */
static int warm_up(struct rounds *rounds, int iters)
{
    struct bench_span spans[BENCH_MAX_TURNS];
    double seconds = 0;
    int code;

    for (int round = -BENCH_WARM_UP; round < 0; round++) {
        code = make_round(rounds, round, spans, 1);
        if (code != 0)
            return code;
    }
    code = share_spans(rounds, spans, 1, &seconds);
    if (code != 0)
        return code;
    rounds->n_rounds = iters > 0 ? iters : bench_rounds_for(seconds, FILL_SECONDS, LEAST_ROUNDS, MOST_ROUNDS);
    return 0;
}

static void judge(struct rounds *rounds)
{
    size_t n = (size_t)rounds->n_rounds;

    for (int i = 0; i < rounds->n_turns; i++)
        rounds->turns[i].ratio =
            bench_median_ratio(rounds->seconds + (size_t)i * n, rounds->seconds, n, rounds->scratch);
    for (int i = 0; i < rounds->n_turns; i++)
        bench_summarise(rounds->seconds + (size_t)i * n, n, &rounds->turns[i].summary);
}

static int make_rounds(struct rounds *rounds)
{
    size_t n = (size_t)rounds->n_rounds;
    size_t all = n * (size_t)rounds->n_turns;
    int code = 0;

    rounds->spans = malloc(all * sizeof(*rounds->spans));
    rounds->seconds = malloc(all * sizeof(*rounds->seconds));
    rounds->scratch = malloc(n * sizeof(*rounds->scratch));
    if (!rounds->spans || !rounds->seconds || !rounds->scratch)
        return ranks_emit_error(rounds->ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for %zu timings", all),
                                "measuring");
    for (int round = 0; round < rounds->n_rounds && code == 0; round++)
        code = make_round(rounds, round, rounds->spans + round, n);
    for (int i = 0; i < rounds->n_turns && code == 0; i++)
        code = share_spans(rounds, rounds->spans + (size_t)i * n, rounds->n_rounds, rounds->seconds + (size_t)i * n);
    if (code == 0)
        judge(rounds);
    return code;
}

int bench_rounds(struct ranks_ctx *ctx, struct bench_turn *turns, int n_turns, int iters, bool one_clock)
{
    struct rounds rounds = {.ctx = ctx, .turns = turns, .n_turns = n_turns, .one_clock = one_clock && !ctx->gpu};
    int code;

    rounds.board = malloc((size_t)ctx->nranks * GATHER_SPANS * sizeof(*rounds.board));
    if (!rounds.board)
        return ranks_emit_error(ctx, ep_fail(EP_E_MEMORY, "benchmark: no memory for timings"), "measuring");
    code = warm_up(&rounds, iters);
    if (code == 0)
        code = make_rounds(&rounds);
    free(rounds.board);
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

    /* Without the file nothing is known of the host: every rank's block is then its own. */
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
