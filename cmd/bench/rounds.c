/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_case.h"

#include "base/clock.h"
#include "base/error.h"
#include "common/memory.h"

#include <epkit/types.h>
#include <math.h>
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

    if (series->prepare)
        BENCH_TRY(ctx, series->prepare(series->context, round), series->what);
    BENCH_TRY(ctx, ep_comm_barrier(ctx->comm), "barrier of the benchmark");
    BENCH_TRY(ctx, ctx->gpu ? time_on_gpu(ctx, series, ret_span) : time_on_host(series, ret_span), series->what);
    if (series->repeats)
        ret_span->end_ns = ret_span->begin_ns + (ret_span->end_ns - ret_span->begin_ns) / (uint64_t)series->repeats;
    if (series->after)
        BENCH_TRY(ctx, series->after(series->context, round), series->what);
    return 0;
}

/* The order rotates from round to round, because each series finds the caches as the one before has left them. */
static int run_round(struct rounds *rounds, int round, struct bench_span *spans, size_t stride)
{
    for (int i = 0; i < rounds->n_series; i++) {
        int index = (i + (round < 0 ? 0 : round)) % rounds->n_series;

        CMD_TRY(run_sample(rounds, &rounds->series[index], round, spans + (size_t)index * stride));
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

        BENCH_TRY(ctx, ep_comm_allgather(ctx->comm, mine + first, (size_t)part * sizeof(*mine), rounds->gathered),
                  "exchange of timings");
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
    int most = rounds->series[0].most_rounds ? rounds->series[0].most_rounds : MOST_ROUNDS;
    double seconds = 0;

    for (int round = -BENCH_WARM_UP; round < 0; round++)
        CMD_TRY(run_round(rounds, round, spans, 1));
    CMD_TRY(gather_seconds(rounds, spans, 1, &seconds));
    rounds->n_rounds = iters > 0 ? iters : bench_rounds_for(seconds, FILL_SECONDS, LEAST_ROUNDS, most);
    return 0;
}

static int run_rounds(struct rounds *rounds)
{
    size_t n = (size_t)rounds->n_rounds;
    size_t all = n * (size_t)rounds->n_series;

    rounds->spans = memory_new(all, sizeof(*rounds->spans));
    rounds->seconds = memory_new(all, sizeof(*rounds->seconds));
    for (int round = 0; round < rounds->n_rounds; round++)
        CMD_TRY(run_round(rounds, round, rounds->spans + round, n));
    for (int i = 0; i < rounds->n_series; i++) {
        double *seconds = rounds->seconds + (size_t)i * n;

        CMD_TRY(gather_seconds(rounds, rounds->spans + (size_t)i * n, rounds->n_rounds, seconds));
        bench_summarise(seconds, n, &rounds->series[i].summary);
    }
    return 0;
}

int bench_rounds(struct ranks_ctx *ctx, struct bench_series *series, int n_series, int iters, bool one_clock)
{
    struct rounds rounds = {.ctx = ctx, .series = series, .n_series = n_series, .one_clock = one_clock && !ctx->gpu};
    int code;

    rounds.gathered = memory_new((size_t)ctx->nranks * GATHER_SPANS, sizeof(*rounds.gathered));
    code = warm_up(&rounds, iters);
    if (code == 0)
        code = run_rounds(&rounds);
    free(rounds.gathered);
    free(rounds.spans);
    free(rounds.seconds);
    return code;
}

ep_status bench_one_clock(struct ranks_ctx *ctx, bool *ret_one)
{
    unsigned char mine[64] = {0};
    unsigned char *all = memory_new((size_t)ctx->nranks, sizeof(mine));
    FILE *file = fopen("/proc/sys/kernel/random/boot_id", "re");
    bool one = true;
    ep_status status;

    /* Without the file the host is unknown: treat each rank as a host. */
    if (!file || fread(mine, 1, sizeof(mine), file) == 0)
        memcpy(mine, &ctx->rank, sizeof(ctx->rank));
    if (file)
        fclose(file);
    status = ep_comm_allgather(ctx->comm, mine, sizeof(mine), all);
    for (int r = 0; status == EP_OK && r < ctx->nranks; r++)
        one = one && memcmp(all + (size_t)r * sizeof(mine), mine, sizeof(mine)) == 0;
    free(all);
    if (status == EP_OK)
        *ret_one = one;
    return status;
}

/* --- statistics --- */

double bench_quantile(const double *sorted, size_t n, double q)
{
    double position = q * (double)(n - 1);
    size_t below = (size_t)position;
    double part = position - (double)below;

    if (below + 1 >= n)
        return sorted[n - 1];
    return sorted[below] + part * (sorted[below + 1] - sorted[below]);
}

static int compare_doubles(const void *left, const void *right)
{
    double a = *(const double *)left;
    double b = *(const double *)right;

    return (a > b) - (a < b);
}

void bench_summarise(double *values, size_t n, struct bench_summary *ret_summary)
{
    memset(ret_summary, 0, sizeof(*ret_summary));
    if (n == 0)
        return;
    qsort(values, n, sizeof(*values), compare_doubles);
    ret_summary->n = n;
    ret_summary->median = bench_quantile(values, n, 0.5);
    ret_summary->p10 = bench_quantile(values, n, 0.1);
    ret_summary->p90 = bench_quantile(values, n, 0.9);
    ret_summary->min = values[0];
    ret_summary->max = values[n - 1];
}

double bench_window(const struct bench_span *spans, int n_ranks, int one_clock)
{
    uint64_t begin = UINT64_MAX;
    uint64_t end = 0;
    uint64_t longest = 0;

    for (int r = 0; r < n_ranks; r++) {
        uint64_t span = spans[r].end_ns - spans[r].begin_ns;

        begin = spans[r].begin_ns < begin ? spans[r].begin_ns : begin;
        end = spans[r].end_ns > end ? spans[r].end_ns : end;
        longest = span > longest ? span : longest;
    }
    return (double)(one_clock ? end - begin : longest) * 1e-9;
}

int bench_rounds_for(double seconds, double fill_seconds, int least, int most)
{
    double rounds = seconds > 0 ? ceil(fill_seconds / seconds) : most;

    if (rounds < least)
        return least;
    return rounds > most ? most : (int)rounds;
}

/* --- rates --- */

int64_t bench_row_bytes(int is_fp8, int hidden)
{
    if (is_fp8)
        return hidden + (int64_t)sizeof(float) * (hidden / EP_SCALE_BLOCK);
    return INT64_C(2) * hidden;
}

void bench_counts_add(struct bench_counts *sum, const struct bench_counts *rank)
{
    sum->recv += rank->recv;
    sum->wire += rank->wire;
    sum->net += rank->net;
    sum->own_node += rank->own_node;
    sum->net_bytes += rank->net_bytes;
}

struct bench_rates bench_rates_of(const struct bench_counts *sum, int n_ranks, int64_t row_bytes, double seconds)
{
    struct bench_rates rates = {0};
    double scale;

    if (seconds <= 0)
        return rates;
    scale = 1e-9 / (seconds * n_ranks);
    rates.logical = (double)sum->recv * (double)row_bytes * scale;
    rates.wire = (double)sum->wire * (double)row_bytes * scale;
    rates.printed = (double)(sum->net + sum->own_node) * (double)row_bytes * scale;
    rates.net = (double)sum->net_bytes * scale;
    return rates;
}

/* --- measurements as JSON --- */

/* Summed over the ranks. */
struct totals {
    struct bench_counts counts;
    struct bench_phases phases;
};

void bench_phases_add(struct bench_phases *phases, const ep_comm *comm)
{
    ep_stats stats = {.size = sizeof(stats)};

    if (ep_comm_get_stats(comm, &stats) != EP_OK)
        return;
    phases->ready += (int64_t)stats.ns_wait_ready;
    phases->move += (int64_t)stats.ns_move;
    phases->done += (int64_t)stats.ns_wait_done;
    phases->copy += (int64_t)stats.ns_copy;
    phases->total += (int64_t)stats.ns_total;
    phases->net_bytes += (int64_t)stats.bytes_net;
    phases->n++;
}

static ep_status add_up(const struct bench_case *bench, const struct bench_measurement *measurement,
                        struct totals *ret_sum)
{
    *ret_sum = (struct totals){.counts = measurement->counts};
    if (measurement->phases) {
        ret_sum->phases = *measurement->phases;
        ret_sum->counts.net_bytes = ret_sum->phases.n ? ret_sum->phases.net_bytes / ret_sum->phases.n : 0;
    }
    return bench_sum(bench->ctx, ret_sum, sizeof(*ret_sum));
}

static json_t *describe_phases(const struct bench_phases *sum)
{
    double scale;

    if (!sum->n)
        return json_null();
    scale = 1e-3 / (double)sum->n;
    return json_pack("{s:f, s:f, s:f, s:f, s:f}", "wait_ready", (double)sum->ready * scale, "move",
                     (double)sum->move * scale, "wait_done", (double)sum->done * scale, "copy",
                     (double)sum->copy * scale, "total", (double)sum->total * scale);
}

static void set_times(json_t *object, const struct bench_summary *summary)
{
    json_object_set_new(object, "time_us", json_real(summary->median * 1e6));
    json_object_set_new(object, "p10_us", json_real(summary->p10 * 1e6));
    json_object_set_new(object, "p90_us", json_real(summary->p90 * 1e6));
    json_object_set_new(object, "min_us", json_real(summary->min * 1e6));
    json_object_set_new(object, "max_us", json_real(summary->max * 1e6));
}

/* The series of that key; NULL: not measured. */
static const struct bench_series *find_series(const struct bench_measurement *measurement, const char *key)
{
    for (int i = 1; i < measurement->n_series; i++)
        if (strcmp(measurement->series[i].key, key) == 0)
            return &measurement->series[i];
    return NULL;
}

/* Adds a series as an object with GB/s; null if it is NULL. */
static void set_series(json_t *row, const char *key, const struct bench_series *series, double bytes)
{
    json_t *object = series ? json_object() : json_null();

    if (series) {
        set_times(object, &series->summary);
        json_object_set_new(object, "gbps", json_real(bytes * 1e-9 / series->summary.median));
    }
    json_object_set_new(row, key, object);
}

/* Adds a baseline. vs_KEY: speed-up of the measured series over it. */
static void set_baseline(json_t *row, const char *key, const struct bench_series *measured,
                         const struct bench_series *baseline, double bytes)
{
    char name[64];

    set_series(row, key, baseline, bytes);
    if (!baseline)
        return;
    snprintf(name, sizeof(name), "vs_%s", key);
    json_object_set_new(row, name, json_real(baseline->summary.median / measured->summary.median));
}

/* On GPUs: the queued operation and the roofline. GB/s of the pair: on the wire. */
static void set_gpu(json_t *row, const struct bench_case *bench, const struct bench_measurement *measurement,
                    double bytes)
{
    const struct bench_series *queued = find_series(measurement, "queued"), *bare = find_series(measurement, "bare");
    struct ranks_ctx *ctx = bench->ctx;
    int sms;

    if (ctx->gpu->get_sms(ctx->comm, strncmp(measurement->op, "ll-", 3) == 0, &sms) == EP_OK)
        json_object_set_new(row, "sms", json_integer(sms));
    if (queued)
        set_series(row, "queued", queued, bytes);
    if (!bare)
        return;
    set_baseline(row, "bare", queued, bare, bytes);
    set_baseline(row, "engine_all", queued, find_series(measurement, "engine_all"), bytes);
    set_series(row, "engine_pair", find_series(measurement, "engine_pair"), measurement->pair_bytes);
}

static void set_rates(json_t *row, const struct bench_case *bench, const struct bench_measurement *measurement,
                      const struct totals *sum)
{
    int n_ranks = bench->ctx->nranks;
    struct bench_rates rates =
        bench_rates_of(&sum->counts, n_ranks, measurement->row_bytes, measurement->series[0].summary.median);

    json_object_set_new(row, "rows", json_real((double)sum->counts.recv / n_ranks));
    json_object_set_new(row, "wire_rows", json_real((double)sum->counts.wire / n_ranks));
    json_object_set_new(row, "row_bytes", json_integer(measurement->row_bytes));
    if (!measurement->row_bytes)
        return;
    json_object_set_new(row, "logical_gbps", json_real(rates.logical));
    json_object_set_new(row, "wire_gbps", json_real(rates.wire));
    if (bench->ctx->nnodes < 2 || !(measurement->phases || sum->counts.net_bytes))
        return;
    if (measurement->phases)
        json_object_set_new(row, "net_printed_gbps", json_real(rates.printed));
    json_object_set_new(row, "net_gbps", json_real(rates.net));
}

int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement)
{
    const struct bench_request *request = bench->request;
    struct ranks_ctx *ctx = bench->ctx;
    const struct bench_series *measured = &measurement->series[0];
    struct totals sum;
    double bytes;
    json_t *row;

    BENCH_TRY(ctx, add_up(bench, measurement, &sum), "adding up the ranks");
    if (ctx->rank != 0)
        return 0;
    bytes = (double)sum.counts.recv * (double)measurement->row_bytes / ctx->nranks;
    row = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "event", "row", "op", measurement->op, "type",
                    measurement->type, "ranks", ctx->nranks, "nodes", ctx->nnodes, "tokens", measurement->tokens,
                    "hidden", request->hidden, "topk", request->topk, "experts", request->experts, "rounds",
                    (int)measured->summary.n);
    if (measurement->memory)
        json_object_update_new(row, json_pack("{s:s, s:s, s:s}", "memory", measurement->memory, "layout",
                                              measurement->layout, "routing", measurement->routing));
    set_times(row, &measured->summary);
    set_rates(row, bench, measurement, &sum);
    json_object_set_new(row, "phases_us", describe_phases(&sum.phases));
    set_baseline(row, "memcpy", measured, find_series(measurement, "memcpy"), bytes);
    set_baseline(row, "alltoallv", measured, find_series(measurement, "alltoallv"), bytes);
    if (find_series(measurement, "cached"))
        set_baseline(row, "cached", measured, find_series(measurement, "cached"), bytes);
    if (ctx->gpu)
        set_gpu(row, bench, measurement, bytes);
    ranks_emit(ctx, row);
    return 0;
}
