/* SPDX-License-Identifier: Apache-2.0 */
/* report_page.c - the pages of a run folder and of a comparison. */
#include "page.h"
#include "report.h"
#include "svg.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_BARS 24
#define MAX_PLOTS 8
#define MAX_POINTS 160
#define MAX_HOST_PLOTS 8

/* Each kind of figure has its own scale. */
static const char *const units[] = {"GB/s (RDMA)", "GB/s (NVLink)", "GB/s (busbw)"};

#define N_UNITS (sizeof(units) / sizeof(units[0]))

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
    return strcmp(page_text(run, "dialect"), "perftest") == 0;
}

static void print_measure(FILE *stream, const json_t *run, const json_t *measure)
{
    const json_t *logical = json_object_get(measure, "logical_gbps"), *wire = json_object_get(measure, "wire_gbps");
    const json_t *percent = json_object_get(measure, "percent_of_peak"), *bus = json_object_get(measure, "busbw_gbps");
    const char *rating = page_text(measure, "rating");

    fputs("<tr>", stream);
    page_text_cell(stream, "", page_text(run, "title"));
    page_text_cell(stream, "", page_text(measure, "op"));
    page_text_cell(stream, "", page_text(measure, "type"));
    page_number_cell(stream, json_object_get(logical, "rdma"), 1, 1);
    page_number_cell(stream, json_is_number(bus) ? bus : json_object_get(logical, "nvl"), 1, 1);
    page_number_cell(stream, json_object_get(json_object_get(measure, "expected"), "value"), 1, 1);
    page_text_cell(stream, strcmp(rating, "slow") == 0 ? "warn" : *rating ? "good" : "", rating);
    page_number_cell(stream, json_object_get(wire, "rdma"), 1, 1);
    page_number_cell(stream, json_object_get(measure, "time_us"), 1, 1);
    page_number_cell(stream,
                     json_is_number(json_object_get(percent, "rdma"))  ? json_object_get(percent, "rdma")
                     : json_is_number(json_object_get(percent, "bus")) ? json_object_get(percent, "bus")
                                                                       : json_object_get(percent, "nvl"),
                     0, 1);
    /* Runs on different links differ only in the device. */
    page_text_cell(stream, "", is_link(run) ? page_text(run, "device") : page_text(measure, "config"));
    fputs("</tr>\n", stream);
}

static void print_figures(FILE *stream, const json_t *document)
{
    static const char *const titles[] = {
        "Program", "Operation",  "Type",      "#RDMA",   "#NVLink, bus",       "#Expected",
        "Rating",  "#RDMA wire", "#Time, us", "#% peak", "Best configuration", NULL};
    json_t *run, *measure;
    size_t i, j, n = 0;

    json_array_foreach(runs_of(document), i, run)
    {
        n += json_array_size(json_object_get(run, "measures"));
    }
    if (n == 0)
        return;
    fputs("<section><h2>Figures</h2>\n", stream);
    page_table_begin(stream, titles);
    json_array_foreach(runs_of(document), i, run)
    {
        json_array_foreach(json_object_get(run, "measures"), j, measure)
        {
            print_measure(stream, run, measure);
        }
    }
    page_table_end(stream);
    fputs("<p class=\"soft\">Rates are GB/s of one rank. Logical ones count each row once for every rank or node that "
          "receives it, the sender included, as DeepEP prints them; wire rates only what leaves the node. Expected "
          "figures are published ones of the same machine, or a model's.</p></section>\n",
          stream);
}

/* Plots measured against expected figures, of all measures with this unit and an expected figure. */
static void plot_expected(FILE *stream, const json_t *document, const char *unit)
{
    static char labels[MAX_BARS][80];
    const char *list[MAX_BARS];
    double measured[MAX_BARS], expected[MAX_BARS];
    char title[80];
    size_t n = 0, i, j;
    json_t *run, *measure;

    json_array_foreach(runs_of(document), i, run)
    {
        const char *name = page_text(run, "title");

        json_array_foreach(json_object_get(run, "measures"), j, measure)
        {
            const json_t *wanted = json_object_get(measure, "expected");

            if (n == MAX_BARS || strcmp(page_text(wanted, "unit"), unit) != 0)
                continue;
            if (strstr(name, "_perf"))
                snprintf(labels[n], sizeof(labels[n]), "%.24s %.16s", page_text(measure, "op"),
                         page_text(measure, "config"));
            else
                snprintf(labels[n], sizeof(labels[n]), "%.30s %.20s %.8s",
                         strncmp(name, "test_", 5) == 0 ? name + 5 : name, page_text(measure, "op"),
                         page_text(measure, "type"));
            list[n] = labels[n];
            measured[n] = page_number(measure, "ratio") * page_number(wanted, "value");
            expected[n++] = page_number(wanted, "value");
        }
    }
    snprintf(title, sizeof(title), "Measured and expected, %s", unit);
    (void)svg_bars(stream,
                   &(struct svg_bars){.title = title,
                                      .y_label = "GB/s of one rank",
                                      .unit = "GB/s",
                                      .labels = list,
                                      .n_labels = n,
                                      .series = (struct svg_series[]){{"measured", measured}, {"expected", expected}},
                                      .n_series = 2});
}

/* The measures of a run that have points, in one plot. */
static bool plot_sweep(FILE *stream, const json_t *run)
{
    static double x[SVG_MAX_SERIES][MAX_POINTS], y[SVG_MAX_SERIES][MAX_POINTS];
    static char names[SVG_MAX_SERIES][64];
    struct svg_curve curves[SVG_MAX_SERIES];
    const char *dialect = page_text(run, "dialect");
    bool is_sized = strcmp(dialect, "nccl-tests") == 0 || strcmp(dialect, "perftest") == 0;
    char title[120];
    size_t n = 0, i, j;
    json_t *measure, *point;

    json_array_foreach(json_object_get(run, "measures"), i, measure)
    {
        const json_t *points = json_object_get(measure, "points");

        if (n == SVG_MAX_SERIES || json_array_size(points) < 2)
            continue;
        snprintf(names[n], sizeof(names[n]), "%.24s %.8s%s%.16s", page_text(measure, "op"), page_text(measure, "type"),
                 is_sized ? " " : "", is_sized ? page_text(measure, "config") : "");
        curves[n] = (struct svg_curve){names[n], x[n], y[n], 0};
        json_array_foreach(points, j, point)
        {
            if (j == MAX_POINTS)
                break;
            x[n][j] = json_number_value(json_array_get(point, 0)) + (is_sized ? 0 : 1);
            y[n][j] = json_is_number(json_array_get(point, 1)) ? json_number_value(json_array_get(point, 1)) : NAN;
            curves[n].n++;
        }
        n++;
    }
    snprintf(title, sizeof(title), "%.40s%s%.30s, %s", page_text(run, "title"),
             is_link(run) && *page_text(run, "device") ? " on " : "", is_link(run) ? page_text(run, "device") : "",
             is_sized ? "by message size" : "sweep");
    return n > 0 && svg_lines(stream, &(struct svg_lines){.title = title,
                                                          .x_label = is_sized ? "bytes" : "number of the configuration",
                                                          .y_label = "GB/s",
                                                          .unit = "GB/s",
                                                          .scale = is_sized ? SVG_BYTES : SVG_NUMBERS,
                                                          .curves = curves,
                                                          .n_curves = n});
}

static void print_plots(FILE *stream, const json_t *document)
{
    json_t *run;
    size_t i;
    int n = 0;

    fputs("<section>\n", stream);
    for (i = 0; i < N_UNITS; i++)
        plot_expected(stream, document, units[i]);
    json_array_foreach(runs_of(document), i, run)
    {
        /* The cases of V2 are not a sweep. */
        if (n < MAX_PLOTS && strcmp(page_text(run, "dialect"), "deepep-v2") != 0)
            n += plot_sweep(stream, run);
    }
    fputs("</section>\n", stream);
}

/* --- verdicts and findings --- */

static void print_list_item(FILE *stream, const char *tone, const char *text, const char *id)
{
    fprintf(stream, "<li class=\"%s\">", tone);
    page_escape(stream, text);
    if (*id) {
        fputs(" <code>epkit doctor --only ", stream);
        page_escape(stream, id);
        fputs("</code>", stream);
    }
    fputs("</li>\n", stream);
}

static void print_run(FILE *stream, const json_t *run)
{
    json_t *item;
    size_t i;

    print_list_item(stream, tone_of(page_text(run, "result")), page_text(run, "verdict"), "");
    fputs("<ul>\n", stream);
    json_array_foreach(json_object_get(run, "problems"), i, item)
    {
        print_list_item(stream, "bad", json_string_value(item), "");
    }
    json_array_foreach(json_object_get(run, "causes"), i, item)
    {
        print_list_item(stream, "", page_text(item, "text"), page_text(item, "id"));
    }
    json_array_foreach(json_object_get(run, "notes"), i, item)
    {
        print_list_item(stream, "soft", json_string_value(item), "");
    }
    fputs("</ul>\n", stream);
}

static void print_runs(FILE *stream, const json_t *document)
{
    json_t *item;
    size_t i;

    fputs("<section><h2>Runs</h2>\n", stream);
    json_array_foreach(runs_of(document), i, item)
    {
        fputs("<ul>\n", stream);
        print_run(stream, item);
        fputs("</ul>\n", stream);
    }
    if (json_array_size(runs_of(document)) == 0)
        fputs("<p>No run was recognised in the logs.</p>\n", stream);
    if (json_array_size(json_object_get(json_object_get(document, "parsed"), "faults")) > 0)
        fputs("<h2>Lines that name a fault</h2>\n<ul>\n", stream);
    json_array_foreach(json_object_get(json_object_get(document, "parsed"), "faults"), i, item)
    {
        print_list_item(stream, json_is_true(json_object_get(item, "fatal")) ? "bad" : "warn", page_text(item, "cause"),
                        page_text(item, "id"));
        fputs("<pre>", stream);
        page_escape(stream, page_text(item, "text"));
        fputs("</pre>\n", stream);
    }
    if (json_array_size(json_object_get(json_object_get(document, "parsed"), "faults")) > 0)
        fputs("</ul>\n", stream);
    fputs("</section>\n", stream);
}

/* --- NICs and nodes --- */

static void plot_nics(FILE *stream, const json_t *host)
{
    static char labels[MAX_BARS][40];
    const char *list[MAX_BARS];
    double sent[MAX_BARS], received[MAX_BARS];
    char title[160];
    size_t n = 0, i;
    json_t *nic;

    json_array_foreach(json_object_get(host, "nics"), i, nic)
    {
        if (n == MAX_BARS)
            break;
        snprintf(labels[n], sizeof(labels[n]), "%.39s", page_text(nic, "device"));
        list[n] = labels[n];
        sent[n] = page_number(nic, "tx_bytes") / 1e9;
        received[n++] = page_number(nic, "rx_bytes") / 1e9;
    }
    snprintf(title, sizeof(title), "NIC traffic of %.100s during the run", page_text(host, "host"));
    (void)svg_bars(stream, &(struct svg_bars){.title = title,
                                              .y_label = "GB",
                                              .unit = "GB",
                                              .labels = list,
                                              .n_labels = n,
                                              .series = (struct svg_series[]){{"sent", sent}, {"received", received}},
                                              .n_series = 2});
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
    json_array_foreach(hosts, i, host)
    {
        json_array_foreach(json_object_get(host, "nics"), j, nic)
        {
            char text[240];

            if (!json_is_true(json_object_get(nic, "uneven")))
                continue;
            snprintf(text, sizeof(text), "%.100s: %.60s carried %.0f%% of what the others did", page_text(host, "host"),
                     page_text(nic, "device"), 100 * page_number(nic, "share"));
            print_list_item(stream, "warn", text, "");
        }
    }
    fputs("</ul>\n", stream);
    if (page_number(json_object_get(document, "nics"), "uneven") == 0)
        fprintf(stream, "<p>All NICs of %zu node%s took part.</p>\n", json_array_size(hosts),
                json_array_size(hosts) == 1 ? "" : "s");
    for (int uneven = 1; uneven >= 0; uneven--) {
        json_array_foreach(hosts, i, host)
        {
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

static void print_hosts(FILE *stream, const json_t *document)
{
    static const char *const titles[] = {"#Rank",  "Node",  "Location", "GPU",        "Driver",
                                         "Kernel", "epkit", "Failed",   "#Exit code", NULL};
    static const char *const keys[] = {"name", "location", "gpu", "driver", "kernel", "epkit", "why"};
    const json_t *hosts = json_object_get(document, "hosts");
    json_t *host;
    size_t i, j;

    if (json_array_size(hosts) == 0)
        return;
    fputs("<section><h2>Nodes</h2>\n", stream);
    page_table_begin(stream, titles);
    json_array_foreach(hosts, i, host)
    {
        fputs("<tr>", stream);
        page_number_cell(stream, json_object_get(host, "rank"), 0, 1);
        for (j = 0; j < sizeof(keys) / sizeof(keys[0]); j++)
            page_text_cell(stream, "", page_text(host, keys[j]));
        page_number_cell(stream, json_object_get(host, "exit_code"), 0, 1);
        fputs("</tr>\n", stream);
    }
    page_table_end(stream);
    fputs("</section>\n", stream);
}

static void print_snapshots(FILE *stream, const json_t *document)
{
    json_t *snapshot;
    size_t i;

    if (json_array_size(json_object_get(document, "snapshots")) == 0)
        return;
    fputs("<section><h2>Machines</h2>\n", stream);
    page_table_begin(stream, (const char *const[]){"Node", "Snapshot", NULL});
    json_array_foreach(json_object_get(document, "snapshots"), i, snapshot)
    {
        fputs("<tr>", stream);
        page_text_cell(stream, "", page_text(snapshot, "host"));
        page_text_cell(stream, json_is_true(json_object_get(snapshot, "is_readable")) ? "" : "warn",
                       page_text(snapshot, "text"));
        fputs("</tr>\n", stream);
    }
    page_table_end(stream);
    fputs("</section>\n", stream);
}

static void print_findings(FILE *stream, const json_t *document)
{
    static const char *const titles[] = {"Node", "Severity", "Check", "Finding", NULL};
    static const char *const keys[] = {"host", "severity", "id", "title"};
    json_t *finding;
    size_t i;

    if (json_array_size(json_object_get(document, "findings")) == 0)
        return;
    fputs("<section><h2>Findings of the doctor</h2>\n", stream);
    page_table_begin(stream, titles);
    json_array_foreach(json_object_get(document, "findings"), i, finding)
    {
        fputs("<tr>", stream);
        for (size_t j = 0; j < 4; j++)
            page_text_cell(stream, "", page_text(finding, keys[j]));
        fputs("</tr>\n", stream);
    }
    page_table_end(stream);
    fputs("</section>\n", stream);
}

/* --- comparison and history --- */

static void print_compared(FILE *stream, const json_t *comparison, const char *a, const char *b)
{
    const char *const titles[] = {"Figure", "Unit", a, b, "#Change, %", "#Noise, %", "", NULL};
    json_t *row;
    size_t i;

    page_table_begin(stream, titles);
    json_array_foreach(json_object_get(comparison, "rows"), i, row)
    {
        const char *rating = page_text(row, "rating");

        fputs("<tr>", stream);
        page_text_cell(stream, "", page_text(row, "figure"));
        page_text_cell(stream, "", page_text(row, "unit"));
        page_number_cell(stream, json_object_get(row, "a"), 1, 1);
        page_number_cell(stream, json_object_get(row, "b"), 1, 1);
        page_number_cell(stream, json_object_get(row, "change"), 1, 100);
        page_number_cell(stream, json_object_get(row, "noise"), 1, 100);
        page_text_cell(stream,
                       strcmp(rating, "regression") == 0    ? "bad"
                       : strcmp(rating, "improvement") == 0 ? "good"
                                                            : "",
                       rating);
        fputs("</tr>\n", stream);
    }
    page_table_end(stream);
}

static void print_previous(FILE *stream, const json_t *document)
{
    const json_t *previous = json_object_get(document, "previous");

    if (!json_is_object(previous))
        return;
    fputs("<section><h2>Compared with the previous run</h2>\n<p>", stream);
    page_escape(stream, page_text(previous, "verdict"));
    fputs(" <span class=\"soft\">Before: ", stream);
    page_escape(stream, page_text(json_object_get(previous, "a"), "date"));
    fputs(" ", stream);
    page_escape(stream, page_text(json_object_get(previous, "a"), "folder"));
    fputs("</span></p>\n", stream);
    print_compared(stream, previous, "#Before", "#Now");
    fputs("</section>\n", stream);
}

/* Plots the figures of one unit over the index of the run. */
static void plot_history(FILE *stream, const json_t *document, const json_t *history, const char *unit)
{
    static double x[SVG_MAX_SERIES][MAX_POINTS], y[SVG_MAX_SERIES][MAX_POINTS];
    struct svg_curve curves[SVG_MAX_SERIES];
    size_t n = 0, count = json_array_size(history), first = count > MAX_POINTS ? count - MAX_POINTS : 0;
    char title[80];
    const char *name;
    json_t *value;

    json_object_foreach(json_object_get(document, "figures"), name, value)
    {
        if (n == SVG_MAX_SERIES || strcmp(page_text(value, "unit"), unit) != 0)
            continue;
        curves[n] = (struct svg_curve){name, x[n], y[n], count - first};
        for (size_t i = first; i < count; i++) {
            const json_t *figures = json_object_get(json_array_get(history, i), "figures");
            const json_t *point = json_object_get(json_object_get(figures, name), "value");

            x[n][i - first] = (double)(i + 1);
            y[n][i - first] = json_is_number(point) ? json_number_value(point) : NAN;
        }
        n++;
    }
    snprintf(title, sizeof(title), "All runs so far, %s", unit);
    (void)svg_lines(stream, &(struct svg_lines){.title = title,
                                                .x_label = "run",
                                                .y_label = unit,
                                                .unit = "GB/s",
                                                .scale = SVG_NUMBERS,
                                                .curves = curves,
                                                .n_curves = n});
}

static void print_history(FILE *stream, const json_t *document)
{
    const json_t *history = json_object_get(document, "history");

    if (json_array_size(history) < 2)
        return;
    fputs("<section><h2>History</h2>\n", stream);
    fprintf(stream, "<p class=\"soft\">%zu runs of the same job on the same machines, from ", json_array_size(history));
    page_escape(stream, page_text(json_array_get(history, 0), "date"));
    fputs(" on.</p>\n", stream);
    for (size_t i = 0; i < N_UNITS; i++)
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
    json_object_foreach(environment, name, value)
    {
        page_escape(stream, name);
        fputc('=', stream);
        page_escape(stream, json_string_value(value));
        fputc('\n', stream);
    }
    fputs("</pre></details></section>\n", stream);
}

static void print_files(FILE *stream, const json_t *document)
{
    json_t *file;
    size_t i;

    fputs("<section><details><summary>Source files of this report</summary>\n<ul>\n", stream);
    json_array_foreach(json_object_get(document, "files"), i, file)
    {
        fputs("<li>", stream);
        page_escape(stream, page_text(file, "path"));
        fprintf(stream, " <span class=\"soft\">%.0f bytes</span></li>\n", page_number(file, "bytes"));
    }
    fputs("</ul></details></section>\n", stream);
}

static void print_subtitle(FILE *stream, const json_t *document)
{
    static const char *const keys[] = {"date", "job", "hardware", "folder"};
    bool has_begun = false;

    fputs("<p class=\"soft\">", stream);
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (!*page_text(document, keys[i]))
            continue;
        fputs(has_begun ? " &middot; " : "", stream);
        page_escape(stream, page_text(document, keys[i]));
        has_begun = true;
    }
    if (page_number(document, "nodes") > 0)
        fprintf(stream, " &middot; %.0f nodes", page_number(document, "nodes"));
    fputs("</p></header>\n", stream);
}

void report_page(FILE *stream, const json_t *document)
{
    page_begin(stream, "epkit report of a run", tone_of(page_text(document, "result")), page_text(document, "verdict"));
    print_subtitle(stream, document);
    print_figures(stream, document);
    print_plots(stream, document);
    print_runs(stream, document);
    print_previous(stream, document);
    print_history(stream, document);
    print_nics(stream, document);
    print_hosts(stream, document);
    print_snapshots(stream, document);
    print_findings(stream, document);
    print_environment(stream, document);
    print_files(stream, document);
    fputs("<footer><p class=\"soft\">", stream);
    if (*page_text(document, "command")) {
        fputs("The run was started by <code>", stream);
        page_escape(stream, page_text(document, "command"));
        fputs("</code>. ", stream);
    }
    fputs("<code>report.json</code> next to this page has the same data.</p></footer>\n", stream);
    page_end(stream);
}

void report_compare_page(FILE *stream, const json_t *document)
{
    const json_t *a = json_object_get(document, "a"), *b = json_object_get(document, "b");

    page_begin(stream, "epkit comparison of two runs", page_number(document, "regressions") > 0 ? "warn" : "good",
               page_text(document, "verdict"));
    fputs("<p class=\"soft\">A: ", stream);
    page_escape(stream, page_text(a, "folder"));
    fputs(" ", stream);
    page_escape(stream, page_text(a, "date"));
    fputs(" &middot; B: ", stream);
    page_escape(stream, page_text(b, "folder"));
    fputs(" ", stream);
    page_escape(stream, page_text(b, "date"));
    fputs("</p></header>\n", stream);
    print_compared(stream, document, "#A", "#B");
    page_end(stream);
}
