/* SPDX-License-Identifier: Apache-2.0 */
/* plot.c - plots of the measurements of `epkit run`. */
#include "cmd/bench/bench.h"
#include "tool_report.h"

#include "page.h"
#include "svg.h"

#include <math.h>
#include <string.h>

#define MAX_BARS 16
#define MAX_TOKENS 16

static bool has_rate(const json_t *row)
{
    return json_is_number(json_object_get(row, "logical_gbps")) &&
           json_is_object(json_object_get(row, bench_baseline_of(row).key));
}

/* The measurement with the most tokens of each operation and type. */
static bool is_largest(const json_t *rows, const json_t *row)
{
    json_t *other;
    size_t i;

    json_array_foreach(rows, i, other)
    {
        if (strcmp(page_text(other, "op"), page_text(row, "op")) == 0 &&
            strcmp(page_text(other, "type"), page_text(row, "type")) == 0 &&
            page_number(other, "tokens") > page_number(row, "tokens"))
            return false;
    }
    return true;
}

struct bars {
    char labels[MAX_BARS][48];
    const char *label_list[MAX_BARS];
    double values[4][MAX_BARS];
    size_t n;
};

static void add_label(struct bars *bars, const json_t *row)
{
    snprintf(bars->labels[bars->n], sizeof(bars->labels[0]), "%.30s %.10s", page_text(row, "op"),
             page_text(row, "type"));
    bars->label_list[bars->n] = bars->labels[bars->n];
}

static bool plot_rates(FILE *stream, const json_t *rows)
{
    const char *baseline = bench_baseline_of(json_array_get(rows, 0)).name;
    char name[80];
    struct bars bars = {.n = 0};
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        if (!has_rate(row) || !is_largest(rows, row) || bars.n == MAX_BARS)
            continue;
        add_label(&bars, row);
        bars.values[0][bars.n] = page_number(row, "logical_gbps");
        bars.values[1][bars.n++] = page_number(json_object_get(row, bench_baseline_of(row).key), "gbps");
    }
    snprintf(name, sizeof(name), "%s, same bytes", baseline);
    return svg_bars(
        stream, &(struct svg_bars){.title = "Rate of one rank and of a plain copy, largest batch",
                                   .y_label = "GB/s of one rank",
                                   .unit = "GB/s",
                                   .labels = bars.label_list,
                                   .n_labels = bars.n,
                                   .series = (struct svg_series[]){{"epkit", bars.values[0]}, {name, bars.values[1]}},
                                   .n_series = 2});
}

static size_t collect_tokens(const json_t *rows, const char *op, double *x, double *y)
{
    json_t *row;
    size_t i, n = 0;

    json_array_foreach(rows, i, row)
    {
        if (!has_rate(row) || strcmp(page_text(row, "op"), op) != 0 || strcmp(page_text(row, "type"), "bf16") != 0 ||
            n == MAX_TOKENS)
            continue;
        x[n] = page_number(row, "tokens");
        y[n++] = page_number(json_object_get(row, bench_baseline_of(row).key), "time_us") / page_number(row, "time_us");
    }
    return n;
}

static bool plot_tokens(FILE *stream, const json_t *rows)
{
    double x[2][MAX_TOKENS], y[2][MAX_TOKENS];
    size_t n_dispatch = collect_tokens(rows, "dispatch", x[0], y[0]);
    size_t n_combine = collect_tokens(rows, "combine", x[1], y[1]);
    struct svg_curve curves[] = {{"dispatch bf16", x[0], y[0], n_dispatch}, {"combine bf16", x[1], y[1], n_combine}};

    return n_dispatch > 1 && n_combine > 1 &&
           svg_lines(stream, &(struct svg_lines){.title = "Relative to a plain copy, by batch size",
                                                 .x_label = "tokens of each rank",
                                                 .y_label = "times a plain copy",
                                                 .unit = "times",
                                                 .scale = SVG_LOG2,
                                                 .curves = curves,
                                                 .n_curves = 2});
}

static bool plot_phases(FILE *stream, const json_t *rows)
{
    static const char *const keys[] = {"wait_ready", "move", "wait_done", "copy"};
    struct bars bars = {.n = 0};
    json_t *row;
    size_t i;

    json_array_foreach(rows, i, row)
    {
        const json_t *phases = json_object_get(row, "phases_us");

        if (!json_is_object(phases) || !is_largest(rows, row) || bars.n == MAX_BARS)
            continue;
        add_label(&bars, row);
        for (size_t j = 0; j < 4; j++)
            bars.values[j][bars.n] = page_number(phases, keys[j]) / 1e3;
        bars.n++;
    }
    return svg_bars(stream, &(struct svg_bars){.title = "Where the time goes, largest batch",
                                               .y_label = "milliseconds",
                                               .unit = "ms",
                                               .labels = bars.label_list,
                                               .n_labels = bars.n,
                                               .series = (struct svg_series[]){{"waiting for buffers", bars.values[0]},
                                                                               {"moving rows", bars.values[1]},
                                                                               {"waiting for peers", bars.values[2]},
                                                                               {"local copies", bars.values[3]}},
                                               .n_series = 4,
                                               .is_stacked = true});
}

void report_plots(FILE *stream, const json_t *rows)
{
    (void)plot_rates(stream, rows);
    (void)plot_tokens(stream, rows);
    (void)plot_phases(stream, rows);
}
