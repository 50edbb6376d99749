/* SPDX-License-Identifier: Apache-2.0 */
/* row.c - measurements as JSON. */
#include "bench/case.h"

#include "backend/cuda/module.h"
#include "base/error.h"

#include <stdlib.h>
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
    phases->ready += stats.ns_wait_ready;
    phases->move += stats.ns_move;
    phases->done += stats.ns_wait_done;
    phases->copy += stats.ns_copy;
    phases->total += stats.ns_total;
    phases->net_bytes += stats.bytes_net;
    phases->n++;
}

static ep_status add_up(const struct bench_case *bench, const struct bench_measurement *measurement,
                        struct totals *ret_sum)
{
    struct ranks_ctx *ctx = bench->ctx;
    struct totals mine = {.counts = measurement->counts};
    struct totals *all = malloc((size_t)ctx->nranks * sizeof(*all));
    struct totals sum = {.phases.n = 0};
    ep_status status;

    if (!all)
        return ep_fail(EP_E_MEMORY, "benchmark: no memory for the counts of %d ranks", ctx->nranks);
    if (measurement->phases) {
        mine.phases = *measurement->phases;
        mine.counts.net_bytes = mine.phases.n ? (int64_t)(mine.phases.net_bytes / mine.phases.n) : 0;
    }
    status = ep_comm_allgather(ctx->comm, &mine, sizeof(mine), all);
    for (int r = 0; status == EP_OK && r < ctx->nranks; r++) {
        bench_counts_add(&sum.counts, &all[r].counts);
        sum.phases.ready += all[r].phases.ready;
        sum.phases.move += all[r].phases.move;
        sum.phases.done += all[r].phases.done;
        sum.phases.copy += all[r].phases.copy;
        sum.phases.total += all[r].phases.total;
        sum.phases.n += all[r].phases.n;
    }
    free(all);
    if (status == EP_OK)
        *ret_sum = sum;
    return status;
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

/* Adds a baseline. vs_NAME: speed-up of the measured series over it. */
static void set_baseline(json_t *row, const char *name, const struct bench_series *measured,
                         const struct bench_series *baseline, double bytes)
{
    char key[64];
    json_t *object;

    if (!baseline) {
        json_object_set_new(row, name, json_null());
        return;
    }
    object = json_object();
    set_times(object, &baseline->summary);
    json_object_set_new(object, "gbps", json_real(bytes * 1e-9 / baseline->summary.median));
    json_object_set_new(row, name, object);
    if (baseline == measured)
        return;
    snprintf(key, sizeof(key), "vs_%s", name);
    json_object_set_new(row, key, json_real(baseline->summary.median / measured->summary.median));
    snprintf(key, sizeof(key), "vs_%s_rounds", name);
    json_object_set_new(row, key, json_real(baseline->ratio));
}

/* On GPUs: the queued operation and the roofline. GB/s of the pair: on the wire. */
static void set_gpu(json_t *row, const struct bench_case *bench, const struct bench_measurement *measurement,
                    double bytes)
{
    const struct bench_series *measured = measurement->queued ? measurement->queued : measurement->measured;
    struct ranks_ctx *ctx = bench->ctx;
    int sms;

    if (ctx->gpu->get_sms(ctx->comm, strncmp(measurement->op, "ll-", 3) == 0, &sms) == EP_OK)
        json_object_set_new(row, "sms", json_integer(sms));
    if (measurement->queued)
        set_baseline(row, "queued", measured, measured, bytes);
    if (!measurement->raw_rows)
        return;
    set_baseline(row, "bare", measured, measurement->raw_rows, bytes);
    set_baseline(row, "engine_all", measured, measurement->engine_all, bytes);
    set_baseline(row, "engine_pair", measurement->engine_pair, measurement->engine_pair, measurement->pair_bytes);
}

static void set_rates(json_t *row, const struct bench_case *bench, const struct bench_measurement *measurement,
                      const struct totals *sum)
{
    int n_ranks = bench->ctx->nranks;
    struct bench_rates rates =
        bench_rates_of(&sum->counts, n_ranks, measurement->row_bytes, measurement->measured->summary.median);

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
    double net = json_number_value(json_object_get(row, "net_gbps")), puts;

    if (!measurement->puts)
        return;
    puts = measurement->net_bytes * 1e-9 / measurement->puts->summary.median;
    json_object_set_new(row, "puts_per_operation", json_real(measurement->n_puts));
    set_baseline(row, "puts", measurement->puts, measurement->puts, measurement->net_bytes);
    json_object_set_new(row, "net_vs_puts", json_real(net / puts));
    if (!measurement->sockets)
        return;
    set_baseline(row, "sockets", measurement->sockets, measurement->sockets, measurement->net_bytes);
    json_object_set_new(row, "puts_vs_sockets",
                        json_real(measurement->sockets->summary.median / measurement->puts->summary.median));
}

int bench_emit_row(const struct bench_case *bench, const struct bench_measurement *measurement)
{
    const struct bench_request *request = bench->request;
    struct ranks_ctx *ctx = bench->ctx;
    const struct bench_series *measured = measurement->measured;
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
    set_baseline(row, "memcpy", measured, measurement->copy, bytes);
    set_baseline(row, "alltoallv", measured, measurement->naive, bytes);
    if (measurement->cached)
        set_baseline(row, "cached", measured, measurement->cached, bytes);
    set_network(row, measurement);
    if (ctx->gpu)
        set_gpu(row, bench, measurement, bytes);
    ranks_emit(ctx, row);
    return 0;
}
