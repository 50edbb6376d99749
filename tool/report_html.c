/* SPDX-License-Identifier: Apache-2.0 */
/* report_html.c - the page: verdict on top, then tables, plots, machine. Everything it needs is in it. */
#include "bench/bench.h"
#include "machine.h"
#include "report.h"

#include <inttypes.h>
#include <string.h>

static const char style[] =
    ":root{color-scheme:light dark;--fg:#1f2933;--soft:#5b6770;--bg:#fff;--card:#f6f7f9;--line:#dde1e6;--good:#1a7f4b;"
    "--bad:#b3261e;--warn:#8a6100}\n"
    "@media (prefers-color-scheme:dark){:root{--fg:#e3e6ea;--soft:#9aa5ae;--bg:#15191e;--card:#1d232a;--line:#343c45;"
    "--good:#5cc98f;--bad:#f28b82;--warn:#e0b354}}\n"
    "body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}\n"
    "main{max-width:58rem;margin:0 auto;padding:2.5rem 1.25rem 4rem}\n"
    "h1{font-size:1rem;font-weight:600;color:var(--soft);margin:0 0 .75rem}\n"
    "h2{font-size:1.15rem;margin:2.5rem 0 .75rem}\n"
    ".verdict{font-size:1.35rem;line-height:1.4;font-weight:600;margin:0;padding:1rem 1.25rem;background:var(--card);"
    "border-left:.35rem solid var(--good);border-radius:.25rem}\n"
    ".verdict.bad{border-color:var(--bad)}.verdict.good,.verdict.bad{color:var(--fg)}\n"
    ".soft{color:var(--soft);font-size:.9rem}\n"
    ".good{color:var(--good)}.bad{color:var(--bad)}.warn{color:var(--warn)}\n"
    ".scroll{overflow-x:auto}\n"
    "table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}\n"
    "th,td{text-align:left;padding:.4rem .75rem;border-bottom:1px solid var(--line);vertical-align:top}\n"
    "th:first-child,td:first-child{padding-left:0}\n"
    "th{font-weight:600;color:var(--soft);white-space:nowrap}\n"
    "td.n,th.n{text-align:right}\n"
    "figure{margin:1.5rem 0}figcaption{font-weight:600;margin-bottom:.25rem}\n"
    "figure svg{width:100%;height:auto}figure svg text{fill:var(--fg)}\n"
    "figure svg path[stroke='black']{stroke:var(--soft)}figure svg .gridline{stroke:var(--line)}\n"
    "code,pre{font:.88em ui-monospace,monospace}pre{background:var(--card);padding:.75rem 1rem;overflow-x:auto;"
    "border-radius:.25rem}\n"
    "summary{cursor:pointer;color:var(--soft)}\n";

void report_escape(FILE *stream, const char *text)
{
    for (; text && *text; text++) {
        switch (*text) {
        case '&':
            fputs("&amp;", stream);
            break;
        case '<':
            fputs("&lt;", stream);
            break;
        case '>':
            fputs("&gt;", stream);
            break;
        case '"':
            fputs("&quot;", stream);
            break;
        case '\'':
            fputs("&#39;", stream);
            break;
        default:
            fputc(*text, stream);
        }
    }
}

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text ? text : "";
}

static double number_of(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key));
}

static void print_text_cell(FILE *stream, const char *tone, const char *text)
{
    fprintf(stream, "<td%s%s%s>", *tone ? " class=\"" : "", tone, *tone ? "\"" : "");
    report_escape(stream, text);
    fputs("</td>", stream);
}

/* A number, or an empty cell where there is none. */
static void print_number_cell(FILE *stream, const json_t *value, int digits, double scale)
{
    fputs("<td class=\"n\">", stream);
    if (json_is_number(value))
        fprintf(stream, "%.*f", digits, json_number_value(value) * scale);
    fputs("</td>", stream);
}

/* --- correctness --- */

static void print_failed_case(FILE *stream, const json_t *suite, const json_t *item)
{
    fputs("<li class=\"bad\">", stream);
    report_escape(stream, text_of(suite, "matrix"));
    fprintf(stream, ", case %d (", (int)number_of(item, "index"));
    report_escape(stream, text_of(item, "name"));
    fputs("): ", stream);
    report_escape(stream, text_of(item, "detail"));
    fputs("</li>\n", stream);
}

static void print_error(FILE *stream, const json_t *suite, const json_t *item)
{
    fputs("<li class=\"bad\">", stream);
    report_escape(stream, text_of(suite, "matrix"));
    fputs(": ", stream);
    report_escape(stream, text_of(item, "what"));
    fputs(": ", stream);
    report_escape(stream, text_of(item, "text"));
    fputs(". <span class=\"soft\">", stream);
    report_escape(stream, text_of(item, "hint"));
    fputs("</span></li>\n", stream);
}

static void print_failures(FILE *stream, const json_t *suites)
{
    json_t *suite, *item;
    size_t i, j;

    fputs("<ul>\n", stream);
    json_array_foreach(suites, i, suite)
    {
        json_array_foreach(json_object_get(suite, "cases"), j, item)
        {
            if (!json_is_true(json_object_get(item, "passed")))
                print_failed_case(stream, suite, item);
        }
        json_array_foreach(json_object_get(suite, "errors"), j, item)
        {
            print_error(stream, suite, item);
        }
    }
    fputs("</ul>\n", stream);
}

static void print_suites(FILE *stream, const json_t *suites, const json_t *not_run)
{
    json_t *suite;
    size_t i;

    fputs("<section><h2>Correctness</h2>\n<div class=\"scroll\"><table><thead><tr><th>Cases</th><th class=\"n\">Ranks"
          "</th><th class=\"n\">Nodes</th><th>Result</th><th class=\"n\">Passed</th><th class=\"n\">Seconds</th>"
          "</tr></thead><tbody>\n",
          stream);
    json_array_foreach(suites, i, suite)
    {
        const json_t *parameters = json_object_get(suite, "parameters");
        const char *result = text_of(suite, "result");

        fputs("<tr>", stream);
        print_text_cell(stream, "", text_of(suite, "matrix"));
        print_number_cell(stream, json_object_get(parameters, "ranks"), 0, 1);
        print_number_cell(stream, json_object_get(parameters, "nodes"), 0, 1);
        print_text_cell(stream, strcmp(result, "passed") == 0 ? "good" : "bad", result);
        fprintf(stream, "<td class=\"n\">%.0f/%.0f</td>", number_of(suite, "passed"), number_of(suite, "total"));
        print_number_cell(stream, json_object_get(suite, "seconds"), 1, 1);
        fputs("</tr>\n", stream);
    }
    json_array_foreach(not_run, i, suite)
    {
        fputs("<tr>", stream);
        print_text_cell(stream, "", text_of(suite, "matrix"));
        fputs("<td></td><td></td>", stream);
        print_text_cell(stream, "warn", "not run");
        fputs("<td colspan=\"2\">", stream);
        report_escape(stream, text_of(suite, "why"));
        fputs("</td></tr>\n", stream);
    }
    fputs("</tbody></table></div>\n", stream);
    print_failures(stream, suites);
    fputs("<p class=\"soft\">Every row that arrives is compared with a reference that is computed without the "
          "library. Nodes are emulated on this machine.</p></section>\n",
          stream);
}

static void print_cases(FILE *stream, const json_t *suites)
{
    json_t *suite, *item;
    size_t i, j;

    fputs("<section><details><summary>All cases</summary>\n<div class=\"scroll\"><table><thead><tr><th>Matrix</th>"
          "<th class=\"n\">Case</th><th>What</th><th>Result</th><th class=\"n\">ms</th></tr></thead><tbody>\n",
          stream);
    json_array_foreach(suites, i, suite)
    {
        json_array_foreach(json_object_get(suite, "cases"), j, item)
        {
            bool passed = json_is_true(json_object_get(item, "passed"));

            fputs("<tr>", stream);
            print_text_cell(stream, "", text_of(suite, "matrix"));
            print_number_cell(stream, json_object_get(item, "index"), 0, 1);
            print_text_cell(stream, "", text_of(item, "name"));
            print_text_cell(stream, passed ? "good" : "bad", passed ? "passed" : "failed");
            print_number_cell(stream, json_object_get(item, "ms"), 0, 1);
            fputs("</tr>\n", stream);
        }
    }
    fputs("</tbody></table></div></details></section>\n", stream);
}

/* --- speed --- */

static void print_rows(FILE *stream, const json_t *rows)
{
    struct bench_yardstick yardstick = bench_yardstick_of(json_array_get(rows, 0));
    char ratio[64];
    json_t *row;
    size_t i;

    snprintf(ratio, sizeof(ratio), "vs_%s", yardstick.key);
    fputs("<div class=\"scroll\"><table><thead><tr><th>Operation</th><th>Type</th><th class=\"n\">Tokens</th>"
          "<th class=\"n\">Time, ms</th><th class=\"n\">Logical GB/s</th><th class=\"n\">Wire GB/s</th>"
          "<th class=\"n\">",
          stream);
    fprintf(stream, "%s GB/s</th><th class=\"n\">&times; %s</th></tr></thead><tbody>\n", yardstick.name,
            yardstick.name);
    json_array_foreach(rows, i, row)
    {
        fputs("<tr>", stream);
        print_text_cell(stream, "", text_of(row, "op"));
        print_text_cell(stream, "", text_of(row, "type"));
        print_number_cell(stream, json_object_get(row, "tokens"), 0, 1);
        print_number_cell(stream, json_object_get(row, "time_us"), 3, 1e-3);
        print_number_cell(stream, json_object_get(row, "logical_gbps"), 2, 1);
        print_number_cell(stream, json_object_get(row, "wire_gbps"), 2, 1);
        print_number_cell(stream, json_object_get(json_object_get(row, yardstick.key), "gbps"), 2, 1);
        print_number_cell(stream, json_object_get(row, ratio), 2, 1);
        fputs("</tr>\n", stream);
    }
    fputs("</tbody></table></div>\n", stream);
}

static void print_bench(FILE *stream, const json_t *document)
{
    const json_t *bench = json_object_get(document, "bench");
    const json_t *rows = json_object_get(bench, "rows");
    const json_t *first = json_array_get(rows, 0);
    const char *why;

    fputs("<section><h2>Speed</h2>\n", stream);
    if (!bench || json_is_null(bench)) {
        fputs("<p class=\"warn\">Nothing was measured: ", stream);
        report_escape(stream, text_of(document, "bench_missing"));
        fputs("</p></section>\n", stream);
        return;
    }
    fprintf(stream, "<p class=\"soft\">Device: ");
    report_escape(stream, text_of(bench, "device"));
    fprintf(stream, "; %.0f ranks, hidden %.0f, top-%.0f of %.0f experts, medians.</p>\n", number_of(first, "ranks"),
            number_of(first, "hidden"), number_of(first, "topk"), number_of(first, "experts"));
    print_rows(stream, rows);
    report_plots(stream, rows, &why);
    if (why)
        fprintf(stream, "<p class=\"warn\">%s.</p>\n", why);
    fputs(
        "<p class=\"soft\">Logical GB/s count the rows that a rank receives, its own included; wire GB/s those that "
        "come from other ranks; both over the time of the whole operation, of the slowest rank. memcpy, or the copy "
        "engine of GPUs, moves the same bytes, by the same processes, in the same run. A ratio above 1 is no mistake: a row that goes to several "
        "ranks is read once and placed on each of them, where memcpy reads it each time. On a machine that is shared "
        "with others only the ratio means something.</p></section>\n",
        stream);
}

/* --- machine --- */

static void print_fact(FILE *stream, const char *name, const char *text)
{
    fprintf(stream, "<tr><th>%s</th>", name);
    print_text_cell(stream, "", *text ? text : "unknown");
    fputs("</tr>\n", stream);
}

static void print_machine(FILE *stream, const json_t *document)
{
    const json_t *machine = json_object_get(document, "machine");
    const json_t *gpus = json_object_get(machine, "gpus");
    const char *mpi = text_of(machine, "mpi");
    char text[128];
    json_t *gpu;
    size_t i;

    fputs("<section><h2>Machine</h2>\n<div class=\"scroll\"><table><tbody>\n", stream);
    print_fact(stream, "CPU", text_of(machine, "cpu"));
    snprintf(text, sizeof(text), "%.0f usable, %.0f NUMA node%s", number_of(machine, "cores"),
             number_of(machine, "numa_nodes"), number_of(machine, "numa_nodes") == 1 ? "" : "s");
    print_fact(stream, "Cores", text);
    snprintf(text, sizeof(text), "%.1f GiB", number_of(machine, "memory_bytes") / (1 << 30));
    print_fact(stream, "Memory", text);
    print_fact(stream, "System", text_of(machine, "os"));
    snprintf(text, sizeof(text), "%s, %s", text_of(machine, "kernel"), text_of(machine, "arch"));
    print_fact(stream, "Kernel", text);
    json_array_foreach(gpus, i, gpu)
    {
        snprintf(text, sizeof(text), "%s at %s", text_of(gpu, "name"), text_of(gpu, "pci"));
        print_fact(stream, "GPU", text);
    }
    if (json_array_size(gpus) == 0)
        print_fact(stream, "GPUs", "no NVIDIA GPU found");
    print_fact(stream, "MPI", *mpi ? mpi : text_of(machine, "mpi_missing"));
    fputs("</tbody></table></div>\n<p>", stream);
    report_escape(stream, text_of(document, "gpu_note"));
    fputs("</p></section>\n", stream);
}

void report_html(FILE *stream, const json_t *document)
{
    const json_t *suites = json_object_get(document, "suites");
    const char *command = text_of(document, "command");
    bool good = strcmp(text_of(document, "result"), "works") == 0;
    char sentence[256];

    machine_sentence(json_object_get(document, "machine"), sentence, sizeof(sentence));
    fprintf(stream,
            "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>epkit report</title>\n"
            "<style>\n%s</style>\n</head>\n<body>\n<main>\n<header><h1>epkit report</h1>\n<p class=\"verdict %s\">",
            style, good ? "good" : "bad");
    report_escape(stream, text_of(document, "verdict"));
    fputs("</p>\n<p class=\"soft\">", stream);
    report_escape(stream, sentence);
    fprintf(stream, " &middot; %s &middot; epkit %s &middot; seed %" JSON_INTEGER_FORMAT "</p></header>\n",
            text_of(document, "date"), text_of(document, "epkit"),
            json_integer_value(json_object_get(document, "seed")));
    print_suites(stream, suites, json_object_get(document, "not_run"));
    print_bench(stream, document);
    print_machine(stream, document);
    print_cases(stream, suites);
    fputs("<footer><p class=\"soft\">Made by <code>", stream);
    report_escape(stream, command);
    fprintf(stream,
            "</code> in %.0f seconds. <code>report.json</code> beside this page holds the same data.</p></footer>\n"
            "</main>\n</body>\n</html>\n",
            number_of(document, "seconds"));
}
