/* SPDX-License-Identifier: Apache-2.0 */
/* row.c - measurements as JSON. */
#include "bench_case.h"

#include "backend/cuda/module.h"

#include <stdio.h>
#include <string.h>

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
static const struct bench_series *find(const struct bench_measurement *measurement, const char *key)
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
    snprintf(name, sizeof(name), "vs_%s_rounds", key);
    json_object_set_new(row, name, json_real(baseline->ratio));
}

/* On GPUs: the queued operation and the roofline. GB/s of the pair: on the wire. */
static void set_gpu(json_t *row, const struct bench_case *bench, const struct bench_measurement *measurement,
                    double bytes)
{
    const struct bench_series *queued = find(measurement, "queued"), *bare = find(measurement, "bare");
    struct ranks_ctx *ctx = bench->ctx;
    int sms;

    if (ctx->gpu->get_sms(ctx->comm, strncmp(measurement->op, "ll-", 3) == 0, &sms) == EP_OK)
        json_object_set_new(row, "sms", json_integer(sms));
    if (queued)
        set_series(row, "queued", queued, bytes);
    if (!bare)
        return;
    set_baseline(row, "bare", queued, bare, bytes);
    set_baseline(row, "engine_all", queued, find(measurement, "engine_all"), bytes);
    set_series(row, "engine_pair", find(measurement, "engine_pair"), measurement->pair_bytes);
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

/* net_vs_puts: efficiency of the operation on the network; puts_vs_sockets: overhead of the network engine. */
static void set_network(json_t *row, const struct bench_measurement *measurement)
{
    const struct bench_series *puts = find(measurement, "puts"), *sockets = find(measurement, "sockets");
    double net = json_number_value(json_object_get(row, "net_gbps"));

    if (!puts)
        return;
    json_object_set_new(row, "puts_per_operation", json_real(measurement->n_puts));
    set_series(row, "puts", puts, measurement->net_bytes);
    json_object_set_new(row, "net_vs_puts", json_real(net / (measurement->net_bytes * 1e-9 / puts->summary.median)));
    if (!sockets)
        return;
    set_series(row, "sockets", sockets, measurement->net_bytes);
    json_object_set_new(row, "puts_vs_sockets", json_real(sockets->summary.median / puts->summary.median));
}

int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement)
{
    const struct bench_request *request = bench->request;
    struct ranks_ctx *ctx = bench->ctx;
    const struct bench_series *measured = &measurement->series[0];
    struct totals sum;
    double bytes;
    json_t *row;
    ep_status status = add_up(bench, measurement, &sum);

    if (status != EP_OK)
        return ranks_emit_error(ctx, status, "adding up the ranks");
    if (ctx->rank != 0)
        return 0;
    bytes = (double)sum.counts.recv * (double)measurement->row_bytes / ctx->nranks;
    row = json_pack("{s:s, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "event", "row", "op", measurement->op, "type",
                    measurement->type, "ranks", ctx->nranks, "nodes", ctx->nnodes, "tokens", measurement->tokens,
                    "hidden", request->hidden, "topk", request->topk, "experts", request->experts, "rounds",
                    (int)measured->summary.n);
    set_times(row, &measured->summary);
    set_rates(row, bench, measurement, &sum);
    json_object_set_new(row, "phases_us", describe_phases(&sum.phases));
    set_baseline(row, "memcpy", measured, find(measurement, "memcpy"), bytes);
    set_baseline(row, "alltoallv", measured, find(measurement, "alltoallv"), bytes);
    if (find(measurement, "cached"))
        set_baseline(row, "cached", measured, find(measurement, "cached"), bytes);
    set_network(row, measurement);
    if (ctx->gpu)
        set_gpu(row, bench, measurement, bytes);
    ranks_emit(ctx, row);
    return 0;
}
