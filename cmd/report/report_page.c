/* SPDX-License-Identifier: Apache-2.0 */
/* report_page.c - the pages of a run folder and of a comparison. */
#include "common/redact.h"
#include "common/text.h"
#include "page.h"
#include "report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PLOTS 8

/* Each kind of figure has its own scale. */
static const char *const units[] = {"GB/s (RDMA)", "GB/s (NVLink)", "GB/s (busbw)", "GB/s"};

static const json_t *runs_of(const json_t *document)
{
    return json_object_get(json_object_get(document, "parsed"), "runs");
}

/* --- figures --- */

static void print_figures(FILE *stream, const json_t *document)
{
    size_t n = 0;

    FOR_JSON (run, runs_of(document))
        n += json_array_size(json_object_get(run, "measures"));
    if (n == 0)
        return;
    fputs("<section><h2>Figures</h2>\n", stream);
    (void)verdict_measures(stream, runs_of(document), OUT_HTML);
    fputs("<p class=\"soft\">Rates are GB/s of one rank. Logical ones count each row once for every rank or node "
          "that receives it, the sender included, as DeepEP prints them; wire rates only what leaves the node. "
          "Expected figures are published ones of the same machine, or a model's.</p></section>\n",
          stream);
}

/* Measured and expected figures of all measures with this unit. */
static void draw_expected(FILE *stream, const json_t *document, const char *unit)
{
    struct page_bars bars = {.title = unit, .unit = "GB/s", .names = {"measured", "expected"}};

    FOR_JSON (run, runs_of(document)) {
        const char *name = json_array_size(runs_of(document)) > 1 ? json_text(run, "title") : "";
        bool is_perf = strstr(json_text(run, "title"), "_perf");

        FOR_JSON (measure, json_object_get(run, "measures")) {
            const json_t *wanted = json_object_get(measure, "expected");
            double expected = json_number(wanted, "value"), measured = json_number(measure, "ratio") * expected;

            if (strcmp(json_text(wanted, "unit"), unit) == 0)
                page_pair(&bars, measured, expected, "%s%s%s %s %s", is_perf ? "" : name, *name && !is_perf ? " " : "",
                          json_text(measure, "op"), json_text(measure, "type"),
                          is_perf ? json_text(measure, "config") : "");
        }
    }
    page_draw(stream, &bars);
}

/* The measures of a run that have points, in one plot. */
static bool plot_sweep(FILE *stream, const json_t *run)
{
    const char *dialect = json_text(run, "dialect");
    bool is_link = strcmp(dialect, "perftest") == 0, is_sized = is_link || strcmp(dialect, "nccl-tests") == 0;
    struct svg_plot plot = {.scale = is_sized ? SVG_BYTES : SVG_NUMBERS,
                            .x_label = is_sized ? "bytes" : "number of the configuration",
                            .y_label = "GB/s",
                            .unit = "GB/s"};

    snprintf(plot.title, sizeof(plot.title), "%.40s%s%.30s, %s", json_text(run, "title"),
             is_link && *json_text(run, "device") ? " on " : "", is_link ? json_text(run, "device") : "",
             is_sized ? "by message size" : "sweep");
    FOR_JSON (measure, json_object_get(run, "measures")) {
        const json_t *points = json_object_get(measure, "points");
        struct svg_series *series;

        if (plot.n == SVG_MAX_SERIES || json_array_size(points) < 2)
            continue;
        series = svg_begin(&plot, "%.24s %.8s%s%.16s", json_text(measure, "op"), json_text(measure, "type"),
                           is_sized ? " " : "", is_sized ? json_text(measure, "config") : "");
        FOR_JSON (point, points) {
            const json_t *y = json_array_get(point, 1);

            svg_point(series, json_number_value(json_array_get(point, 0)) + (is_sized ? 0 : 1),
                      json_is_number(y) ? json_number_value(y) : NAN);
        }
    }
    return svg_draw(stream, &plot);
}

static void print_plots(FILE *stream, const json_t *document)
{
    int n = 0;

    fputs("<section class=\"plots\">\n", stream);
    for (size_t i = 0; i < COUNT(units); i++)
        draw_expected(stream, document, units[i]);
    FOR_JSON (run, runs_of(document)) {
        /* The cases of V2 are not a sweep. */
        if (n < MAX_PLOTS && strcmp(json_text(run, "dialect"), "deepep-v2") != 0)
            n += plot_sweep(stream, run);
    }
    fputs("</section>\n", stream);
}

/* --- verdicts and findings --- */

/* Of a log in which no run was recognised. */
static void print_tail(FILE *stream, const json_t *tail)
{
    if (!json_is_object(tail))
        return;
    page_print(stream, "<p>No run was recognised in the logs. %s ends with:</p>\n<pre>", json_text(tail, "source"));
    FOR_JSON (line, json_object_get(tail, "lines"))
        page_print(stream, "%s\n", json_string_value(line));
    fputs("</pre>\n<p>What to try:</p>\n<ul><li>If it is a program that <code>epkit parse --help</code> names, its "
          "output has to be in the log, standard error too: <code>program &gt;run.log 2&gt;&amp;1</code></li>\n"
          "<li><code>epkit launch nccl</code> or <code>deepep-internode</code> run tests whose output is known, on the "
          "same nodes.</li>\n<li><code>epkit doctor</code> on each node needs no log.</li></ul>\n",
          stream);
}

static void print_runs(FILE *stream, const json_t *document)
{
    json_t *items = verdict_items(json_object_get(document, "parsed"));
    bool is_inner = false;

    fputs("<section><h2>Runs</h2>\n<ul>\n", stream);
    FOR_JSON (item, items) {
        const char *kind = json_text(item, "kind");

        if (is_inner != (json_number(item, "level") > 0))
            fputs(is_inner ? "</ul>\n" : "<ul>\n", stream);
        is_inner = json_number(item, "level") > 0;
        page_item(stream, json_text(item, "tone"), json_text(item, "id"), "%s%s%s", kind, *kind ? ": " : "",
                  json_text(item, "text"));
    }
    fputs(is_inner ? "</ul>\n</ul>\n" : "</ul>\n", stream);
    json_decref(items);
    print_tail(stream, json_object_get(document, "tail"));
    fputs("</section>\n", stream);
}

/* --- NICs and nodes --- */

static void print_nics(FILE *stream, const json_t *document)
{
    const json_t *hosts = json_object_get(json_object_get(document, "nics"), "hosts");
    size_t n_alike = 0;

    if (json_array_size(hosts) == 0)
        return;
    fputs("<section><h2>NIC balance</h2>\n<ul>\n", stream);
    FOR_JSON (host, hosts) {
        FOR_JSON (nic, json_object_get(host, "nics"))
            if (json_is_true(json_object_get(nic, "uneven")))
                page_item(stream, "warn", "", "%s: %s carried %.0f%% of what the others did", json_text(host, "host"),
                          json_text(nic, "device"), 100 * json_number(nic, "share"));
    }
    FOR_JSON (host, hosts)
        n_alike += json_number(host, "uneven") == 0;
    fputs("</ul>\n", stream);
    if (n_alike > 0)
        fprintf(stream, "<p>Nodes whose NICs carried alike: %zu of %zu; report.json has all counters.</p>\n", n_alike,
                json_array_size(hosts));
    fputs("</section>\n", stream);
}

static const struct out_column host_columns[] = {
    {"RANK", "rank", 0, OUT_IF_PRESENT},
    {"NODE", "name", 0, 0},
    {"LOCATION", "location", 0, OUT_IF_PRESENT},
    {"GPU", "gpu", 0, 0},
    {"DRIVER", "driver", 0, 0},
    {"KERNEL", "kernel", 0, 0},
    {"EPKIT", "epkit", 0, 0},
    {"FAILED", "why", 0, OUT_IF_PRESENT},
    {"EXIT CODE", "exit_code", 0, 0},
};
static const struct out_column finding_columns[] = {
    {"NODE", "host", 0, 0}, {"SEVERITY", "severity", 0, 0}, {"CHECK", "id", 0, 0}, {"FINDING", "title", 0, 0}};

static const struct section {
    const char *title, *key;
    const struct out_column *columns;
    size_t n;
} tables[] = {
    {"Nodes", "hosts", host_columns, COUNT(host_columns)},
    {"Findings of the doctor", "findings", finding_columns, COUNT(finding_columns)},
};

static void print_tables(FILE *stream, const json_t *document)
{
    for (size_t i = 0; i < COUNT(tables); i++) {
        const json_t *rows = json_object_get(document, tables[i].key);

        if (json_array_size(rows) == 0)
            continue;
        fprintf(stream, "<section><h2>%s</h2>\n", tables[i].title);
        (void)out_table(stream, tables[i].columns, tables[i].n, rows, OUT_HTML);
        fputs("</section>\n", stream);
    }
}

/* --- comparison and history --- */

static void print_previous(FILE *stream, const json_t *document)
{
    const json_t *previous = json_object_get(document, "previous"), *before;

    if (!json_is_object(previous))
        return;
    before = json_object_get(previous, "a");
    page_print(stream,
               "<section><h2>Compared with the previous run</h2>\n"
               "<p>%s <span class=\"soft\">A: %s %s; B: this run</span></p>\n",
               json_text(previous, "verdict"), json_text(before, "date"), json_text(before, "folder"));
    (void)report_compare_print(stream, previous, OUT_HTML);
    fputs("</section>\n", stream);
}

/* Plots the figures of one unit over the index of the run. */
static void plot_history(FILE *stream, const json_t *document, const json_t *history, const char *unit)
{
    struct svg_plot plot = {.scale = SVG_NUMBERS, .x_label = "run", .y_label = unit, .unit = "GB/s"};
    size_t count = json_array_size(history);

    snprintf(plot.title, sizeof(plot.title), "All runs so far, %s", unit);
    FOR_MEMBERS (name, value, json_object_get(document, "figures")) {
        struct svg_series *series;

        if (plot.n == SVG_MAX_SERIES || strcmp(json_text(value, "unit"), unit) != 0)
            continue;
        series = svg_begin(&plot, "%s", name);
        for (size_t i = count > SVG_MAX_POINTS ? count - SVG_MAX_POINTS : 0; i < count; i++) {
            const json_t *figures = json_object_get(json_array_get(history, i), "figures");
            const json_t *point = json_object_get(json_object_get(figures, name), "value");

            svg_point(series, (double)(i + 1), json_is_number(point) ? json_number_value(point) : NAN);
        }
    }
    (void)svg_draw(stream, &plot);
}

static void print_history(FILE *stream, const json_t *document)
{
    const json_t *history = json_object_get(document, "history");

    if (json_array_size(history) < 2)
        return;
    page_print(stream,
               "<section><h2>History</h2>\n"
               "<p class=\"soft\">%d runs of the same job on the same machines, from %s on.</p>\n",
               (int)json_array_size(history), json_text(json_array_get(history, 0), "date"));
    fputs("<div class=\"plots\">\n", stream);
    for (size_t i = 0; i < COUNT(units); i++)
        plot_history(stream, document, history, units[i]);
    fputs("</div></section>\n", stream);
}

/* --- the rest --- */

static void print_environment(FILE *stream, const json_t *document)
{
    json_t *environment = json_object_get(document, "environment");

    if (json_object_size(environment) == 0)
        return;
    fputs("<section><h2>Environment</h2>\n<details><summary>Environment variables of the ranks</summary>\n<pre>",
          stream);
    FOR_MEMBERS (name, value, environment)
        page_print(stream, "%s=%s\n", name, json_string_value(value));
    fputs("</pre></details></section>\n", stream);
}

/* "deepep-internode, 2 nodes of b200: passed, 2026-11-28T10:00" */
static void title_of(const json_t *document, char *ret_title, size_t bytes)
{
    const char *job = json_text(document, "job"), *result = json_text(document, "result");
    double nodes = json_number(document, "nodes");
    struct text title = text_in(ret_title, bytes);

    text_add(&title, "%.80s", *job ? job : text_base(json_text(document, "folder")));
    if (nodes > 0)
        text_add(&title, ", %.0f node%s", nodes, nodes == 1 ? "" : "s");
    if (*json_text(document, "hardware"))
        text_add(&title, " of %.40s", json_text(document, "hardware"));
    text_add(&title, ": %s",
             strcmp(result, "nothing") == 0  ? "not recognised"
             : strcmp(result, "uneven") == 0 ? "passed, NICs uneven"
                                             : result);
    if (*json_text(document, "date"))
        text_add(&title, ", %.16s", json_text(document, "date"));
}

static void print_subtitle(FILE *stream, const json_t *document)
{
    time_t began = text_time_of(json_text(document, "date")), ended = text_time_of(json_text(document, "ended"));

    page_print(stream, "<p class=\"soft\">%s", json_text(document, "date"));
    if (began >= 0 && ended >= began)
        fprintf(stream, ", %lld:%02lld minutes", (long long)(ended - began) / 60, (long long)(ended - began) % 60);
    page_print(stream, " &middot; %s</p></header>\n", json_text(document, "folder"));
}

void report_page(FILE *stream, const json_t *document)
{
    char title[200];

    title_of(document, title, sizeof(title));
    page_begin(stream, title, verdict_tone(json_text(document, "result")), json_text(document, "verdict"));
    print_subtitle(stream, document);
    if (json_is_object(json_object_get(document, "results"))) {
        report_results(stream, json_object_get(document, "results"));
    } else {
        print_figures(stream, document);
        print_plots(stream, document);
    }
    print_runs(stream, document);
    print_previous(stream, document);
    print_history(stream, document);
    print_nics(stream, document);
    print_tables(stream, document);
    print_environment(stream, document);
    fputs("<footer><p class=\"soft\">", stream);
    if (*json_text(document, "command") && strcmp(json_text(document, "command"), REDACTED) != 0)
        page_print(stream, "The run was started by <code>%s</code>. ", json_text(document, "command"));
    fputs("<code>report.json</code> next to this page has the same data.</p></footer>\n", stream);
    page_end(stream);
}

void report_compare_page(FILE *stream, const json_t *document)
{
    const json_t *a = json_object_get(document, "a"), *b = json_object_get(document, "b");
    char title[200];

    snprintf(title, sizeof(title), "%.80s compared with %.80s", text_base(json_text(b, "folder")),
             text_base(json_text(a, "folder")));
    page_begin(stream, title, json_number(document, "regressions") > 0 ? "warn" : "good",
               json_text(document, "verdict"));
    page_print(stream, "<p class=\"soft\">A: %s %s &middot; B: %s %s</p></header>\n", json_text(a, "folder"),
               json_text(a, "date"), json_text(b, "folder"), json_text(b, "date"));
    (void)report_compare_print(stream, document, OUT_HTML);
    page_end(stream);
}
