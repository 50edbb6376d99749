/* SPDX-License-Identifier: Apache-2.0 */
/* results_page.c - the sections of the results of `epkit run` beside those of its runs: measurements, machine. */
#include "cmd/bench/bench.h"
#include "cmd/bench/bench_host.h"
#include "page.h"
#include "report.h"

#include <string.h>

/* --- plots of the measurements --- */

static bool has_rate(const json_t *row)
{
    return json_is_number(json_object_get(row, "logical_gbps")) &&
           json_is_object(json_object_get(row, bench_baseline_of(row).key));
}

static void draw_rates(FILE *stream, const json_t *rows)
{
    struct bench_baseline baseline = bench_baseline_of(json_array_get(rows, 0));
    double most = json_number(bench_largest(rows, NULL), "tokens");
    char names[2][64];
    struct page_bars bars = {.title = "GB/s of one rank, largest batch", .unit = "GB/s", .names = {names[0], names[1]}};

    snprintf(names[0], sizeof(names[0]), "epkit%s", baseline.kind);
    snprintf(names[1], sizeof(names[1]), "%s%s, same bytes", baseline.name, baseline.kind);
    FOR_JSON (row, rows)
        if (has_rate(row) && json_number(row, "tokens") >= most)
            page_pair(&bars, bench_rate_of(row), json_number(json_object_get(row, baseline.key), "gbps"), "%s %s",
                      json_text(row, "op"), json_text(row, "type"));
    page_draw(stream, &bars);
}

static void plot_tokens(FILE *stream, const json_t *rows)
{
    static const char *const ops[] = {"dispatch", "combine"};
    struct svg_plot plot = {.title = "Relative to a plain copy, by batch size",
                            .scale = SVG_LOG2,
                            .x_label = "tokens of each rank",
                            .y_label = "times a plain copy",
                            .unit = "times"};

    for (size_t k = 0; k < 2; k++) {
        struct svg_series *series = svg_begin(&plot, "%s bf16", ops[k]);

        FOR_JSON (row, rows)
            if (has_rate(row) && strcmp(json_text(row, "op"), ops[k]) == 0 &&
                strcmp(json_text(row, "type"), "bf16") == 0)
                svg_point(series, json_number(row, "tokens"),
                          json_number(json_object_get(row, bench_baseline_of(row).key), "time_us") /
                              bench_time_of(row));
    }
    (void)svg_draw(stream, &plot);
}

/* --- speed --- */

static void print_bench(FILE *stream, const json_t *results)
{
    const json_t *bench = json_object_get(results, "bench");
    const json_t *rows = json_object_get(bench, "rows");
    const json_t *first = json_array_get(rows, 0);

    fputs("<section><h2>Speed</h2>\n", stream);
    if (!rows) {
        page_print(stream, "<p class=\"warn\">Nothing was measured: %s</p></section>\n",
                   json_text(results, "bench_missing"));
        return;
    }
    page_print(stream,
               "<p class=\"soft\">Device: %s; %.0f ranks, hidden %.0f, top-%.0f of %.0f experts, medians.</p>\n",
               json_text(bench, "device"), json_number(first, "ranks"), json_number(first, "hidden"),
               json_number(first, "topk"), json_number(first, "experts"));
    (void)bench_print_rows(stream, rows, json_text(bench, "device"), OUT_HTML);
    fputs("<div class=\"plots\">\n", stream);
    draw_rates(stream, rows);
    plot_tokens(stream, rows);
    fputs("</div>\n", stream);
    fputs(
        "<p class=\"soft\">Logical GB/s count the rows that a rank receives, its own included; wire GB/s those that "
        "come from other ranks; both over the time of the whole operation, of the slowest rank. Ratios and plots of "
        "GPUs are of queued operations, as the copy engine's figures are. memcpy, or the copy engine of GPUs, moves the same bytes, by the same processes, in the same run. A ratio above 1 is possible: a "
        "row for several ranks is read once and written to each of them, while memcpy reads it each time. On a shared "
        "machine only the ratio is meaningful.</p></section>\n",
        stream);
}

/* --- machine --- */

static void print_machine(FILE *stream, const json_t *results)
{
    const json_t *machine = json_object_get(results, "machine");
    char sentence[256];

    machine_summary(machine, sentence, sizeof(sentence));
    page_print(stream, "<section><h2>Machine</h2>\n<p>%s; %.0f NUMA node%s; %s, kernel %s, %s.</p>\n", sentence,
               json_number(machine, "numa_nodes"), json_number(machine, "numa_nodes") == 1 ? "" : "s",
               json_text(machine, "os"), json_text(machine, "kernel"), json_text(machine, "arch"));
    page_print(stream, "<p>%s</p></section>\n", json_text(results, "gpu_note"));
}

void report_results(FILE *stream, const json_t *results)
{
    print_bench(stream, results);
    print_machine(stream, results);
}
