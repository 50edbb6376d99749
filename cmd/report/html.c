/* SPDX-License-Identifier: Apache-2.0 */
/* html.c - the self-contained page: verdict, tables, plots, machine. */
#include "cmd/bench/bench.h"
#include "cmd/bench/host.h"
#include "tool_report.h"

#include "page.h"

#include <inttypes.h>
#include <string.h>

/* --- correctness --- */

static void print_failed_case(FILE *stream, const json_t *suite, const json_t *item)
{
    fputs("<li class=\"bad\">", stream);
    page_escape(stream, page_text(suite, "matrix"));
    fprintf(stream, ", case %d (", (int)page_number(item, "index"));
    page_escape(stream, page_text(item, "name"));
    fputs("): ", stream);
    page_escape(stream, page_text(item, "detail"));
    fputs("</li>\n", stream);
}

static void print_error(FILE *stream, const json_t *suite, const json_t *item)
{
    fputs("<li class=\"bad\">", stream);
    page_escape(stream, page_text(suite, "matrix"));
    fputs(": ", stream);
    page_escape(stream, page_text(item, "what"));
    fputs(": ", stream);
    page_escape(stream, page_text(item, "text"));
    fputs(". <span class=\"soft\">", stream);
    page_escape(stream, page_text(item, "hint"));
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
        const char *result = page_text(suite, "result");

        fputs("<tr>", stream);
        page_text_cell(stream, "", page_text(suite, "matrix"));
        page_number_cell(stream, json_object_get(parameters, "ranks"), 0, 1);
        page_number_cell(stream, json_object_get(parameters, "nodes"), 0, 1);
        page_text_cell(stream, strcmp(result, "passed") == 0 ? "good" : "bad", result);
        fprintf(stream, "<td class=\"n\">%.0f/%.0f</td>", page_number(suite, "passed"), page_number(suite, "total"));
        page_number_cell(stream, json_object_get(suite, "seconds"), 1, 1);
        fputs("</tr>\n", stream);
    }
    json_array_foreach(not_run, i, suite)
    {
        fputs("<tr>", stream);
        page_text_cell(stream, "", page_text(suite, "matrix"));
        fputs("<td></td><td></td>", stream);
        page_text_cell(stream, "warn", "not run");
        fputs("<td colspan=\"2\">", stream);
        page_escape(stream, page_text(suite, "why"));
        fputs("</td></tr>\n", stream);
    }
    fputs("</tbody></table></div>\n", stream);
    print_failures(stream, suites);
    fputs("<p class=\"soft\">Every received row is compared with a reference that is computed without the "
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
            page_text_cell(stream, "", page_text(suite, "matrix"));
            page_number_cell(stream, json_object_get(item, "index"), 0, 1);
            page_text_cell(stream, "", page_text(item, "name"));
            page_text_cell(stream, passed ? "good" : "bad", passed ? "passed" : "failed");
            page_number_cell(stream, json_object_get(item, "ms"), 0, 1);
            fputs("</tr>\n", stream);
        }
    }
    fputs("</tbody></table></div></details></section>\n", stream);
}

/* --- speed --- */

static void print_rows(FILE *stream, const json_t *rows)
{
    struct bench_baseline baseline = bench_baseline_of(json_array_get(rows, 0));
    char ratio[64];
    json_t *row;
    size_t i;

    snprintf(ratio, sizeof(ratio), "vs_%s", baseline.key);
    fputs("<div class=\"scroll\"><table><thead><tr><th>Operation</th><th>Type</th><th class=\"n\">Tokens</th>"
          "<th class=\"n\">Time, ms</th><th class=\"n\">Logical GB/s</th><th class=\"n\">Wire GB/s</th>"
          "<th class=\"n\">",
          stream);
    fprintf(stream, "%s GB/s</th><th class=\"n\">&times; %s</th></tr></thead><tbody>\n", baseline.name, baseline.name);
    json_array_foreach(rows, i, row)
    {
        fputs("<tr>", stream);
        page_text_cell(stream, "", page_text(row, "op"));
        page_text_cell(stream, "", page_text(row, "type"));
        page_number_cell(stream, json_object_get(row, "tokens"), 0, 1);
        page_number_cell(stream, json_object_get(row, "time_us"), 3, 1e-3);
        page_number_cell(stream, json_object_get(row, "logical_gbps"), 2, 1);
        page_number_cell(stream, json_object_get(row, "wire_gbps"), 2, 1);
        page_number_cell(stream, json_object_get(json_object_get(row, baseline.key), "gbps"), 2, 1);
        page_number_cell(stream, json_object_get(row, ratio), 2, 1);
        fputs("</tr>\n", stream);
    }
    fputs("</tbody></table></div>\n", stream);
}

static void print_bench(FILE *stream, const json_t *document)
{
    const json_t *bench = json_object_get(document, "bench");
    const json_t *rows = json_object_get(bench, "rows");
    const json_t *first = json_array_get(rows, 0);

    fputs("<section><h2>Speed</h2>\n", stream);
    if (!bench || json_is_null(bench)) {
        fputs("<p class=\"warn\">Nothing was measured: ", stream);
        page_escape(stream, page_text(document, "bench_missing"));
        fputs("</p></section>\n", stream);
        return;
    }
    fprintf(stream, "<p class=\"soft\">Device: ");
    page_escape(stream, page_text(bench, "device"));
    fprintf(stream, "; %.0f ranks, hidden %.0f, top-%.0f of %.0f experts, medians.</p>\n", page_number(first, "ranks"),
            page_number(first, "hidden"), page_number(first, "topk"), page_number(first, "experts"));
    print_rows(stream, rows);
    report_plots(stream, rows);
    fputs(
        "<p class=\"soft\">Logical GB/s count the rows that a rank receives, its own included; wire GB/s those that "
        "come from other ranks; both over the time of the whole operation, of the slowest rank. memcpy, or the copy "
        "engine of GPUs, moves the same bytes, by the same processes, in the same run. A ratio above 1 is possible: a "
        "row for several ranks is read once and written to each of them, while memcpy reads it each time. On a shared "
        "machine only the ratio is meaningful.</p></section>\n",
        stream);
}

/* --- machine --- */

static void print_fact(FILE *stream, const char *name, const char *text)
{
    fprintf(stream, "<tr><th>%s</th>", name);
    page_text_cell(stream, "", *text ? text : "unknown");
    fputs("</tr>\n", stream);
}

static void print_machine(FILE *stream, const json_t *document)
{
    const json_t *machine = json_object_get(document, "machine");
    const json_t *gpus = json_object_get(machine, "gpus");
    const char *mpi = page_text(machine, "mpi");
    char text[128];
    json_t *gpu;
    size_t i;

    fputs("<section><h2>Machine</h2>\n<div class=\"scroll\"><table><tbody>\n", stream);
    print_fact(stream, "CPU", page_text(machine, "cpu"));
    snprintf(text, sizeof(text), "%.0f usable, %.0f NUMA node%s", page_number(machine, "cores"),
             page_number(machine, "numa_nodes"), page_number(machine, "numa_nodes") == 1 ? "" : "s");
    print_fact(stream, "Cores", text);
    snprintf(text, sizeof(text), "%.1f GiB", page_number(machine, "memory_bytes") / (1 << 30));
    print_fact(stream, "Memory", text);
    print_fact(stream, "System", page_text(machine, "os"));
    snprintf(text, sizeof(text), "%s, %s", page_text(machine, "kernel"), page_text(machine, "arch"));
    print_fact(stream, "Kernel", text);
    json_array_foreach(gpus, i, gpu)
    {
        snprintf(text, sizeof(text), "%s at %s", page_text(gpu, "name"), page_text(gpu, "pci"));
        print_fact(stream, "GPU", text);
    }
    if (json_array_size(gpus) == 0)
        print_fact(stream, "GPUs", "no NVIDIA GPU found");
    print_fact(stream, "MPI", *mpi ? mpi : page_text(machine, "mpi_missing"));
    fputs("</tbody></table></div>\n<p>", stream);
    page_escape(stream, page_text(document, "gpu_note"));
    fputs("</p></section>\n", stream);
}

void report_html(FILE *stream, const json_t *document)
{
    const json_t *suites = json_object_get(document, "suites");
    const char *command = page_text(document, "command");
    bool good = strcmp(page_text(document, "result"), "works") == 0;
    char sentence[256];

    machine_summary(json_object_get(document, "machine"), sentence, sizeof(sentence));
    page_begin(stream, "epkit report", good ? "good" : "bad", page_text(document, "verdict"));
    fputs("<p class=\"soft\">", stream);
    page_escape(stream, sentence);
    fprintf(stream, " &middot; %s &middot; epkit %s &middot; seed %" JSON_INTEGER_FORMAT "</p></header>\n",
            page_text(document, "date"), page_text(document, "epkit"),
            json_integer_value(json_object_get(document, "seed")));
    print_suites(stream, suites, json_object_get(document, "not_run"));
    print_bench(stream, document);
    print_machine(stream, document);
    print_cases(stream, suites);
    fputs("<footer><p class=\"soft\">Made by <code>", stream);
    page_escape(stream, command);
    fprintf(stream,
            "</code> in %.0f seconds. <code>report.json</code> next to this page has the same data.</p></footer>\n",
            page_number(document, "seconds"));
    page_end(stream);
}
