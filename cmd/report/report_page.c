/* SPDX-License-Identifier: Apache-2.0 */
/* report_page.c - the pages of a run folder and of a comparison. */
#include "common/text.h"
#include "page.h"
#include "report.h"
#include "svg.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_PLOTS 8
#define MAX_HOST_PLOTS 8

/* Each kind of figure has its own scale. */
static const char *const units[] = {"GB/s (RDMA)", "GB/s (NVLink)", "GB/s (busbw)"};

static const char *tone_of(const char *result)
{
    return strcmp(result, "passed") == 0 ? "good" : strcmp(result, "failed") == 0 ? "bad" : "warn";
}

static const json_t *runs_of(const json_t *document)
{
    return json_object_get(json_object_get(document, "parsed"), "runs");
}

/* --- figures --- */

static bool is_link(const json_t *run)
{
    return strcmp(json_text(run, "dialect"), "perftest") == 0;
}

/* The rows of all measures, with the values of which there are several kinds. */
static json_t *rows_of(const json_t *document)
{
    json_t *rows = json_array(), *run, *measure;
    size_t i, j;

    json_array_foreach (runs_of(document), i, run) {
        json_array_foreach (json_object_get(run, "measures"), j, measure) {
            json_t *bus = json_object_get(measure, "busbw_gbps"), *row = json_copy(measure);
            json_t *percent = json_object_get(measure, "percent_of_peak"), *peak = json_object_get(percent, "rdma");

            if (!json_is_number(peak))
                peak = json_object_get(percent, "bus");
            if (!json_is_number(peak))
                peak = json_object_get(percent, "nvl");
            if (!json_is_number(bus))
                bus = json_object_get(json_object_get(measure, "logical_gbps"), "nvl");
            json_object_set(row, "title", json_object_get(run, "title"));
            json_object_set(row, "bus", bus);
            json_object_set(row, "peak", peak);
            /* Runs on different links differ only in the device. */
            if (is_link(run))
                json_object_set(row, "config", json_object_get(run, "device"));
            json_array_append_new(rows, row);
        }
    }
    return rows;
}

static void print_figures(FILE *stream, const json_t *document)
{
    static const struct page_column columns[] = {
        {"Program", "title", 0, 0},
        {"Operation", "op", 0, 0},
        {"Type", "type", 0, 0},
        {"#RDMA", "logical_gbps.rdma", 1, 0},
        {"#NVLink, bus", "bus", 1, 0},
        {"#Expected", "expected.value", 1, 0},
        {"Rating", "rating", 0, 0},
        {"#RDMA wire", "wire_gbps.rdma", 1, 0},
        {"#Time, us", "time_us", 1, 0},
        {"#% peak", "peak", 0, 0},
        {"Best configuration", "config", 0, 0},
    };
    json_t *rows = rows_of(document);

    if (json_array_size(rows) > 0) {
        fputs("<section><h2>Figures</h2>\n", stream);
        PAGE_TABLE(stream, columns, rows);
        fputs("<p class=\"soft\">Rates are GB/s of one rank. Logical ones count each row once for every rank or node "
              "that receives it, the sender included, as DeepEP prints them; wire rates only what leaves the node. "
              "Expected figures are published ones of the same machine, or a model's.</p></section>\n",
              stream);
    }
    json_decref(rows);
}

/* Plots measured against expected figures, of all measures with this unit and an expected figure. */
static void plot_expected(FILE *stream, const json_t *document, const char *unit)
{
    struct svg_pairs pairs = {.y_label = "GB/s of one rank", .unit = "GB/s", .names = {"measured", "expected"}};
    char title[80];
    json_t *run, *measure;
    size_t i, j;

    json_array_foreach (runs_of(document), i, run) {
        const char *name = json_text(run, "title");

        json_array_foreach (json_object_get(run, "measures"), j, measure) {
            const json_t *wanted = json_object_get(measure, "expected");
            double expected = page_number(wanted, "value"), measured = page_number(measure, "ratio") * expected;

            if (strcmp(json_text(wanted, "unit"), unit) != 0)
                continue;
            if (strstr(name, "_perf"))
                svg_add(&pairs, measured, expected, "%s %s", json_text(measure, "op"), json_text(measure, "config"));
            else
                svg_add(&pairs, measured, expected, "%s %s %s", strncmp(name, "test_", 5) == 0 ? name + 5 : name,
                        json_text(measure, "op"), json_text(measure, "type"));
        }
    }
    snprintf(title, sizeof(title), "Measured and expected, %s", unit);
    pairs.title = title;
    (void)svg_bars(stream, &pairs);
}

/* The measures of a run that have points, in one plot. */
static bool plot_sweep(FILE *stream, const json_t *run)
{
    const char *dialect = json_text(run, "dialect");
    bool is_sized = strcmp(dialect, "nccl-tests") == 0 || strcmp(dialect, "perftest") == 0;
    struct svg_lines lines = {.x_label = is_sized ? "bytes" : "number of the configuration",
                              .y_label = "GB/s",
                              .unit = "GB/s",
                              .scale = is_sized ? SVG_BYTES : SVG_NUMBERS};
    char title[120];
    json_t *measure, *point;
    size_t i, j;

    json_array_foreach (json_object_get(run, "measures"), i, measure) {
        const json_t *points = json_object_get(measure, "points");
        struct svg_curve *curve;

        if (lines.n == SVG_MAX_SERIES || json_array_size(points) < 2)
            continue;
        curve = svg_begin(&lines, "%.24s %.8s%s%.16s", json_text(measure, "op"), json_text(measure, "type"),
                          is_sized ? " " : "", is_sized ? json_text(measure, "config") : "");
        json_array_foreach (points, j, point) {
            const json_t *y = json_array_get(point, 1);

            svg_point(curve, json_number_value(json_array_get(point, 0)) + (is_sized ? 0 : 1),
                      json_is_number(y) ? json_number_value(y) : NAN);
        }
    }
    snprintf(title, sizeof(title), "%.40s%s%.30s, %s", json_text(run, "title"),
             is_link(run) && *json_text(run, "device") ? " on " : "", is_link(run) ? json_text(run, "device") : "",
             is_sized ? "by message size" : "sweep");
    lines.title = title;
    return lines.n > 0 && svg_lines(stream, &lines);
}

static void print_plots(FILE *stream, const json_t *document)
{
    json_t *run;
    size_t i;
    int n = 0;

    fputs("<section>\n", stream);
    for (i = 0; i < COUNT(units); i++)
        plot_expected(stream, document, units[i]);
    json_array_foreach (runs_of(document), i, run) {
        /* The cases of V2 are not a sweep. */
        if (n < MAX_PLOTS && strcmp(json_text(run, "dialect"), "deepep-v2") != 0)
            n += plot_sweep(stream, run);
    }
    fputs("</section>\n", stream);
}

/* --- verdicts and findings --- */

static void print_run(FILE *stream, const json_t *run)
{
    json_t *item;
    size_t i;

    page_item(stream, tone_of(json_text(run, "result")), "", "%s", json_text(run, "verdict"));
    fputs("<ul>\n", stream);
    json_array_foreach (json_object_get(run, "problems"), i, item) {
        page_item(stream, "bad", "", "%s", json_string_value(item));
    }
    json_array_foreach (json_object_get(run, "causes"), i, item) {
        page_item(stream, "", json_text(item, "id"), "%s", json_text(item, "text"));
    }
    json_array_foreach (json_object_get(run, "notes"), i, item) {
        page_item(stream, "soft", "", "%s", json_string_value(item));
    }
    fputs("</ul>\n", stream);
}

static void print_runs(FILE *stream, const json_t *document)
{
    const json_t *faults = json_object_get(json_object_get(document, "parsed"), "faults");
    json_t *item;
    size_t i;

    fputs("<section><h2>Runs</h2>\n", stream);
    json_array_foreach (runs_of(document), i, item) {
        fputs("<ul>\n", stream);
        print_run(stream, item);
        fputs("</ul>\n", stream);
    }
    if (json_array_size(runs_of(document)) == 0)
        fputs("<p>No run was recognised in the logs.</p>\n", stream);
    if (json_array_size(faults) > 0)
        fputs("<h2>Lines that name a fault</h2>\n<ul>\n", stream);
    json_array_foreach (faults, i, item) {
        page_item(stream, json_is_true(json_object_get(item, "fatal")) ? "bad" : "warn", json_text(item, "id"), "%s",
                  json_text(item, "cause"));
        page_print(stream, "<pre>%s</pre>\n", json_text(item, "text"));
    }
    if (json_array_size(faults) > 0)
        fputs("</ul>\n", stream);
    fputs("</section>\n", stream);
}

/* --- NICs and nodes --- */

static void plot_nics(FILE *stream, const json_t *host)
{
    struct svg_pairs pairs = {.y_label = "GB", .unit = "GB", .names = {"sent", "received"}};
    char title[160];
    json_t *nic;
    size_t i;

    json_array_foreach (json_object_get(host, "nics"), i, nic) {
        svg_add(&pairs, page_number(nic, "tx_bytes") / 1e9, page_number(nic, "rx_bytes") / 1e9, "%s",
                json_text(nic, "device"));
    }
    snprintf(title, sizeof(title), "NIC traffic of %.100s during the run", json_text(host, "host"));
    pairs.title = title;
    (void)svg_bars(stream, &pairs);
}

/* Hosts with an uneven NIC first: the plots of all hosts do not fit. */
static void print_nics(FILE *stream, const json_t *document)
{
    const json_t *hosts = json_object_get(json_object_get(document, "nics"), "hosts");
    json_t *host, *nic;
    size_t i, j;
    int plots = 0;

    if (json_array_size(hosts) == 0)
        return;
    fputs("<section><h2>NIC balance</h2>\n<ul>\n", stream);
    json_array_foreach (hosts, i, host) {
        json_array_foreach (json_object_get(host, "nics"), j, nic) {
            if (json_is_true(json_object_get(nic, "uneven")))
                page_item(stream, "warn", "", "%s: %s carried %.0f%% of what the others did", json_text(host, "host"),
                          json_text(nic, "device"), 100 * page_number(nic, "share"));
        }
    }
    fputs("</ul>\n", stream);
    if (page_number(json_object_get(document, "nics"), "uneven") == 0)
        fprintf(stream, "<p>All NICs of %zu node%s took part.</p>\n", json_array_size(hosts),
                json_array_size(hosts) == 1 ? "" : "s");
    for (int uneven = 1; uneven >= 0; uneven--) {
        json_array_foreach (hosts, i, host) {
            if (plots < MAX_HOST_PLOTS && (page_number(host, "uneven") > 0) == (uneven == 1)) {
                plot_nics(stream, host);
                plots++;
            }
        }
    }
    if (json_array_size(hosts) > MAX_HOST_PLOTS)
        fprintf(stream, "<p class=\"soft\">Plots of %d of %zu nodes; report.json has all counters.</p>\n", plots,
                json_array_size(hosts));
    fputs("</section>\n", stream);
}

static const struct page_column host_columns[] = {
    {"#Rank", "rank", 0, 0},  {"Node", "name", 0, 0},     {"Location", "location", 0, 0},
    {"GPU", "gpu", 0, 0},     {"Driver", "driver", 0, 0}, {"Kernel", "kernel", 0, 0},
    {"epkit", "epkit", 0, 0}, {"Failed", "why", 0, 0},    {"#Exit code", "exit_code", 0, 0},
};
static const struct page_column snapshot_columns[] = {{"Node", "host", 0, 0}, {"Snapshot", "text", 0, 0}};
static const struct page_column finding_columns[] = {
    {"Node", "host", 0, 0}, {"Severity", "severity", 0, 0}, {"Check", "id", 0, 0}, {"Finding", "title", 0, 0}};

static const struct section {
    const char *title, *key;
    const struct page_column *columns;
    size_t n;
} tables[] = {
    {"Nodes", "hosts", host_columns, COUNT(host_columns)},
    {"Machines", "snapshots", snapshot_columns, COUNT(snapshot_columns)},
    {"Findings of the doctor", "findings", finding_columns, COUNT(finding_columns)},
};

static void print_tables(FILE *stream, const json_t *document)
{
    for (size_t i = 0; i < COUNT(tables); i++) {
        const json_t *rows = json_object_get(document, tables[i].key);

        if (json_array_size(rows) == 0)
            continue;
        fprintf(stream, "<section><h2>%s</h2>\n", tables[i].title);
        page_table(stream, tables[i].columns, tables[i].n, rows);
        fputs("</section>\n", stream);
    }
}

/* --- comparison and history --- */

static void print_compared(FILE *stream, const json_t *comparison, const char *a, const char *b)
{
    const struct page_column columns[] = {
        {"Figure", "figure", 0, 0},       {"Unit", "unit", 0, 0},         {a, "a", 1, 0},       {b, "b", 1, 0},
        {"#Change, %", "change", 1, 100}, {"#Noise, %", "noise", 1, 100}, {"", "rating", 0, 0},
    };

    PAGE_TABLE(stream, columns, json_object_get(comparison, "rows"));
}

static void print_previous(FILE *stream, const json_t *document)
{
    const json_t *previous = json_object_get(document, "previous"), *before;

    if (!json_is_object(previous))
        return;
    before = json_object_get(previous, "a");
    page_print(
        stream,
        "<section><h2>Compared with the previous run</h2>\n<p>%s <span class=\"soft\">Before: %s %s</span></p>\n",
        json_text(previous, "verdict"), json_text(before, "date"), json_text(before, "folder"));
    print_compared(stream, previous, "#Before", "#Now");
    fputs("</section>\n", stream);
}

/* Plots the figures of one unit over the index of the run. */
static void plot_history(FILE *stream, const json_t *document, const json_t *history, const char *unit)
{
    struct svg_lines lines = {.x_label = "run", .y_label = unit, .unit = "GB/s", .scale = SVG_NUMBERS};
    size_t count = json_array_size(history);
    char title[80];
    const char *name;
    json_t *value;

    json_object_foreach (json_object_get(document, "figures"), name, value) {
        struct svg_curve *curve;

        if (lines.n == SVG_MAX_SERIES || strcmp(json_text(value, "unit"), unit) != 0)
            continue;
        curve = svg_begin(&lines, "%s", name);
        for (size_t i = count > SVG_MAX_POINTS ? count - SVG_MAX_POINTS : 0; i < count; i++) {
            const json_t *figures = json_object_get(json_array_get(history, i), "figures");
            const json_t *point = json_object_get(json_object_get(figures, name), "value");

            svg_point(curve, (double)(i + 1), json_is_number(point) ? json_number_value(point) : NAN);
        }
    }
    snprintf(title, sizeof(title), "All runs so far, %s", unit);
    lines.title = title;
    (void)svg_lines(stream, &lines);
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
    for (size_t i = 0; i < COUNT(units); i++)
        plot_history(stream, document, history, units[i]);
    fputs("</section>\n", stream);
}

/* --- the rest --- */

static void print_environment(FILE *stream, const json_t *document)
{
    json_t *environment = json_object_get(document, "environment"), *value;
    const char *name;

    if (json_object_size(environment) == 0)
        return;
    fputs("<section><h2>Environment</h2>\n<details><summary>Environment variables of the ranks</summary>\n<pre>",
          stream);
    json_object_foreach (environment, name, value) {
        page_print(stream, "%s=%s\n", name, json_string_value(value));
    }
    fputs("</pre></details></section>\n", stream);
}

static void print_files(FILE *stream, const json_t *document)
{
    json_t *file;
    size_t i;

    if (json_array_size(json_object_get(document, "files")) == 0)
        return;
    fputs("<section><details><summary>Source files of this report</summary>\n<ul>\n", stream);
    json_array_foreach (json_object_get(document, "files"), i, file) {
        page_print(stream, "<li>%s <span class=\"soft\">%.0f bytes</span></li>\n", json_text(file, "path"),
                   page_number(file, "bytes"));
    }
    fputs("</ul></details></section>\n", stream);
}

static void print_subtitle(FILE *stream, const json_t *document)
{
    static const char *const keys[] = {"date", "job", "hardware", "folder"};
    bool has_begun = false;

    fputs("<p class=\"soft\">", stream);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (!*json_text(document, keys[i]))
            continue;
        fputs(has_begun ? " &middot; " : "", stream);
        page_print(stream, "%s", json_text(document, keys[i]));
        has_begun = true;
    }
    if (page_number(document, "nodes") > 0)
        fprintf(stream, " &middot; %.0f node%s", page_number(document, "nodes"),
                page_number(document, "nodes") == 1 ? "" : "s");
    fputs("</p></header>\n", stream);
}

void report_page(FILE *stream, const json_t *document)
{
    page_begin(stream, "epkit report", tone_of(json_text(document, "result")), json_text(document, "verdict"));
    print_subtitle(stream, document);
    if (json_is_object(json_object_get(document, "results"))) {
        report_results(stream, json_object_get(document, "results"));
    } else {
        print_figures(stream, document);
        print_plots(stream, document);
        print_runs(stream, document);
    }
    print_previous(stream, document);
    print_history(stream, document);
    print_nics(stream, document);
    print_tables(stream, document);
    print_environment(stream, document);
    print_files(stream, document);
    fputs("<footer><p class=\"soft\">", stream);
    if (*json_text(document, "command"))
        page_print(stream, "The run was started by <code>%s</code>. ", json_text(document, "command"));
    fputs("<code>report.json</code> next to this page has the same data.</p></footer>\n", stream);
    page_end(stream);
}

void report_compare_page(FILE *stream, const json_t *document)
{
    const json_t *a = json_object_get(document, "a"), *b = json_object_get(document, "b");

    page_begin(stream, "epkit comparison of two runs", page_number(document, "regressions") > 0 ? "warn" : "good",
               json_text(document, "verdict"));
    page_print(stream, "<p class=\"soft\">A: %s %s &middot; B: %s %s</p></header>\n", json_text(a, "folder"),
               json_text(a, "date"), json_text(b, "folder"), json_text(b, "date"));
    print_compared(stream, document, "#A", "#B");
    page_end(stream);
}
