/* SPDX-License-Identifier: Apache-2.0 */
/*
 * json_results.c - documents of other programs: nccl-tests (-J), rccl-tests (--output_file) and perftest (--out_json).
 * Each becomes the lines that the program would have printed, for the reader of those.
 */
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WORD 64 /* of a text from a document */

void feed(struct parser *parser, bool (*reader)(struct parser *, const char *), const char *format, ...)
{
    char line[512];

    WITH_ARGS(args, format, vsnprintf(line, sizeof(line), format, args));
    line[prefix_clean(line, strlen(line))] = '\0'; /* texts of a document may hold any character */
    (void)reader(parser, line);
}

/* Time, rates and wrong values of one place; N/A: there are none. */
static void group(const json_t *place, char *ret_text, size_t bytes)
{
    const json_t *wrong = json_object_get(place, "nwrong");
    char count[32] = "N/A";

    if (json_is_number(wrong))
        snprintf(count, sizeof(count), "%.0f", json_number_value(wrong));
    if (!json_is_object(place))
        snprintf(ret_text, bytes, "N/A N/A N/A N/A");
    else
        snprintf(ret_text, bytes, "%.6f %.6f %.6f %s", json_number(place, "time") + json_number(place, "cpu_time"),
                 json_number(place, "alg_bw"), json_number(place, "bus_bw"), count);
}

static void read_nccl_tests(struct parser *parser, const json_t *document)
{
    const json_t *bounds = json_object_get(document, "out_of_bounds");
    const char *program = json_string_value(json_array_get(json_object_get(document, "args"), 0));

    feed(parser, nccl_line, "# Collective test starting: %.*s", WORD, program ? text_base(program) : "nccl-tests");
    FOR_JSON (row, json_object_get(json_object_get(document, "config"), "devices"))
        feed(parser, nccl_line, "#  Rank %.0f Pid %.0f on %.*s device %.0f [%.*s] %.*s", json_number(row, "rank"),
             json_number(row, "pid"), WORD, json_text(row, "hostname"), json_number(row, "device"), WORD,
             json_text(row, "device_hex"), WORD, json_text(row, "device_info"));
    FOR_JSON (row, json_object_get(document, "results")) {
        char places[2][120];

        group(json_object_get(row, "out_of_place"), places[0], sizeof(places[0]));
        group(json_object_get(row, "in_place"), places[1], sizeof(places[1]));
        feed(parser, nccl_line, "%.0f %.0f %.*s %.*s -1 %s %s", json_number(row, "size"), json_number(row, "count"),
             WORD, json_text(row, "type"), WORD, json_text(row, "redop"), places[0], places[1]);
    }
    if (bounds)
        feed(parser, nccl_line, "# Out of bounds values : %.0f %s", json_number(bounds, "count"),
             strcmp(json_text(bounds, "okay"), "false") == 0 ? "FAILED" : "OK");
    if (json_object_get(document, "average_bus_bandwidth"))
        feed(parser, nccl_line, "# Avg bus bandwidth    : %g",
             json_number(json_object_get(document, "average_bus_bandwidth"), "bandwidth"));
}

/* A document for each size and place: "AllReduce" is all_reduce_perf. There is no last one. */
static void read_rccl_tests(struct parser *parser, const json_t *document)
{
    bool is_in_place = json_number(document, "inPlace") != 0;
    struct parse_run *run = run_open(parser, PARSE_NCCL_TESTS);
    const struct parse_measure *last = run && run->n_measures ? &run->measures[run->n_measures - 1] : NULL;
    double size = json_number(document, "size");
    char name[WORD] = "";
    size_t n = 0;

    for (const char *at = json_text(document, "name"); *at && n + 2 < sizeof(name); at++) {
        if (isupper((unsigned char)*at) && n > 0 && !text_begins(name, "allto"))
            name[n++] = '_';
        name[n++] = (char)tolower((unsigned char)*at);
    }
    if (!run || (last && last->n_points && size < last->points[last->n_points - 1].x))
        feed(parser, nccl_line, "# Collective test starting: %s_perf", name);
    feed(parser, nccl_line, "%.0f 0 %.*s %.*s -1 %s%.6f %.6f %.6f %.*s", size, WORD, json_text(document, "type"), WORD,
         json_text(document, "redop"), is_in_place ? "N/A N/A N/A N/A " : "", json_number(document, "time"),
         json_number(document, "algBw"), json_number(document, "busBw"), WORD, json_text(document, "#wrong"));
    run = run_open(parser, PARSE_NCCL_TESTS);
    if (run) {
        run->ranks = (int64_t)json_number(document, "gpus");
        run->is_complete = true;
    }
}

static void perftest_row(struct parser *parser, const json_t *row)
{
    double size = json_number(row, "MsgSize"), rate = json_number(row, "BW_average");
    double bytes = json_number(row, "MsgRate") * 1e6 * size;

    /* The document does not name the unit of the rates, but has the number of messages. */
    const char *unit = fabs(bytes * 8 / 1e9 - rate) < fabs(bytes / 1048576 - rate) ? "Gb/sec" : "MiB/sec";

    if (json_object_get(row, "t_avg")) {
        feed(parser, program_line, "#bytes #iterations t_min[usec] t_max[usec] t_typical[usec] t_avg[usec]");
        feed(parser, program_line, "%.0f %.0f %f %f %f %f", size, json_number(row, "n_iterations"),
             json_number(row, "t_min"), json_number(row, "t_max"), json_number(row, "t_typical"),
             json_number(row, "t_avg"));
    } else {
        feed(parser, program_line, "#bytes #iterations BW peak[%s] BW average[%s] MsgRate[Mpps]", unit, unit);
        feed(parser, program_line, "%.0f %.0f %f %f %f", size, json_number(row, "n_iterations"),
             json_number(row, "BW_peak"), rate, json_number(row, "MsgRate"));
    }
}

static void read_perftest(struct parser *parser, const json_t *document)
{
    const json_t *info = json_object_get(document, "test_info"), *results = json_object_get(document, "results");
    char title[WORD];

    /* "RDMA_Write_BW_Test" */
    snprintf(title, sizeof(title), "%s", json_text(info, "test"));
    for (const char *const *part = TEXTS("_Bidirectional", "_Post_List", "_BW_Test", "_Latency_Test"); *part; part++) {
        char *at = strstr(title, *part);

        for (size_t n = at ? strlen(*part) : 0; n > 0; n--, at++)
            *at = *at == '_' ? ' ' : *at;
    }
    feed(parser, program_line, "%s", title);
    feed(parser, program_line, " Device         : %.*s", WORD, json_text(info, "Device"));
    if (json_is_object(results))
        perftest_row(parser, results);
    FOR_JSON (row, results)
        perftest_row(parser, row);
    feed(parser, program_line, "---------------------------------------");
}

json_t *json_bare(const char *text, size_t bytes)
{
    char *quoted = memory_grow(NULL, 3 * bytes + 1), *out = quoted;
    json_t *document;

    for (const char *at = text, *end = text + bytes; at < end;) {
        size_t n = strcspn(at, " \t\n,:{}[]\"");
        bool is_word = n > 0 && !isdigit((unsigned char)*at) && *at != '-';

        if (n == 0 && *at == '"')
            n = strcspn(at + 1, "\"") + 2;
        if (n == 0)
            n = *at != ',' || !strchr("}]", at[1 + strspn(at + 1, " \n")]);
        out += sprintf(out, is_word ? "\"%.*s\"" : "%.*s", (int)n, at);
        at += n ? n : 1;
    }
    document = json_loadb(quoted, (size_t)(out - quoted), JSON_REJECT_DUPLICATES, NULL);
    free(quoted);
    return document;
}

bool json_results(struct parser *parser, const json_t *document)
{
    if (json_object_get(document, "test_info"))
        read_perftest(parser, document);
    else if (json_object_get(document, "busBw"))
        read_rccl_tests(parser, document);
    else if (json_object_get(document, "nccl_version"))
        read_nccl_tests(parser, document);
    else
        return false;
    return true;
}
