/* SPDX-License-Identifier: Apache-2.0 */
#include "log_input.h"

#include "common/dir.h"
#include "common/json.h"
#include "common/text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>

static const char *reading;

static void tick(uint64_t bytes)
{
    progress_update(0, 0, "reading %s, %.0f MB", reading, (double)bytes / 1e6);
}

static bool add_reference(struct reference *reference, const char *path, char *ret_error, size_t bytes)
{
    FILE *stream = file_open(path);
    bool is_added;

    if (!stream) {
        snprintf(ret_error, bytes, "%s", file_error(errno));
        return false;
    }
    file_skip_mark(stream);
    is_added = reference_add(reference, stream, ret_error, bytes);
    fclose(stream);
    return is_added;
}

int input_reference(const struct cmd *cmd, const struct input_options *options, struct reference **ret_reference,
                    struct verdict_options *ret_options)
{
    struct reference *reference = reference_new();
    char error[300];

    if (options->reference && !add_reference(reference, options->reference, error, sizeof(error))) {
        out_error("%s: --reference %s: %s", cmd->name, options->reference, error);
        out_hint("cmd/parse/reference.json shows the format");
        reference_free(reference);
        return CMD_USAGE;
    }
    *ret_options =
        (struct verdict_options){.nodes = (int)options->nodes, .tolerance = (double)options->tolerance / 100};
    if (options->hardware) {
        ret_options->hardware = reference_find_hardware(reference, options->hardware);
        if (!ret_options->hardware) {
            out_error("%s: --hardware: no machine '%s' is known", cmd->name, options->hardware);
            out_hint("'epkit parse --list-hardware' lists them; --reference FILE adds others");
            reference_free(reference);
            return CMD_USAGE;
        }
    }
    *ret_reference = reference;
    return CMD_FINE;
}

static int read_file(const struct cmd *cmd, struct parser *parser, int dir, const char *path, const char *source)
{
    int error;

    reading = source;
    parser_begin(parser, source);
    error = parser_read(parser, dir, path, tick);
    if (error == 0)
        return CMD_FINE;
    if (error == PARSE_COMPRESSED) {
        out_error("%s: %s: it is compressed", cmd->name, reading);
        out_hint("decompress it in a pipe: zcat FILE | epkit parse - (xzcat, zstdcat, bzcat)");
        return CMD_USAGE;
    }
    if (error == PARSE_DEVICE) {
        out_error("%s: %s: it is a device%s, not a log", cmd->name, reading, dir == AT_FDCWD ? "" : " or a pipe");
        return CMD_USAGE;
    }
    cmd_refuse(cmd, reading, "%s", write_reason(error));
    return error == ENOENT || error == EISDIR || error == EACCES || error == ENOTDIR || error == ELOOP ? CMD_USAGE
                                                                                                       : CMD_FAILED;
}

int input_read(const struct cmd *cmd, struct parser *parser, const char *path)
{
    return read_file(cmd, parser, AT_FDCWD, path, strcmp(path, "-") == 0 ? "standard input" : path);
}

static const char *why_of(const json_t *run, const char *name)
{
    FOR_JSON (host, json_object_get(run, "hosts"))
        if (strcmp(json_text(host, "name"), name) == 0)
            return json_text(host, "why");
    return "";
}

/* The logs may not show it: a node was lost, or the launcher was killed. */
static void know_failure(const json_t *run, struct verdict_options *options)
{
    const json_t *code = json_object_get(run, "exit_code");
    const char *reason = json_text(run, "reason"), *host = json_text(run, "failed_host"), *why = why_of(run, host);

    if (*options->failure)
        return;
    /* 3: slow, which the logs show. */
    if (json_is_integer(code) && json_integer_value(code) != 0 && json_integer_value(code) != CMD_FINDINGS)
        snprintf(options->failure, sizeof(options->failure), "The run %s%s%.80s%s%.200s",
                 strcmp(reason, "deadline") == 0      ? "did not end before its deadline"
                 : strcmp(reason, "interrupted") == 0 ? "was interrupted"
                                                      : "failed",
                 *host ? ", first on " : "", host, *why ? ": " : "", why);
    else if (json_is_null(code) && json_is_string(json_object_get(run, "began")))
        snprintf(options->failure, sizeof(options->failure), "The run has not ended, or its launcher was killed");
    text_clean(options->failure, options->failure, sizeof(options->failure));
}

void input_know_run(const json_t *run, const struct reference *reference, struct verdict_options *options)
{
    const char *hardware = json_string_value(json_object_get(run, "hardware"));
    json_int_t nodes = json_integer_value(json_object_get(run, "nodes"));
    const json_t *first = json_array_get(json_object_get(run, "hosts"), 0);
    const char *gpu = json_string_value(json_object_get(first, "gpu"));

    if (!options->hardware && hardware)
        options->hardware = reference_find_hardware(reference, hardware);
    if (!options->hardware && gpu)
        options->hardware = reference_find_hardware(reference, gpu);
    if (options->nodes == 0 && nodes > 0 && nodes < 1000000)
        options->nodes = (int)nodes;
    know_failure(run, options);
}

int input_exit_code(enum verdict_result result)
{
    static const int codes[] = {[VERDICT_PASSED] = CMD_FINE,
                                [VERDICT_FAILED] = CMD_FAILED,
                                [VERDICT_SLOW] = CMD_FINDINGS,
                                [VERDICT_NOTHING] = CMD_UNSUPPORTED};

    return codes[result];
}

int input_read_folder(const struct cmd *cmd, struct parser *parser, const struct folder *folder,
                      const struct reference *reference, struct verdict_options *options)
{
    int result = CMD_FINE;

    input_know_run(folder->run, reference, options);
    for (size_t i = 0; i < folder->n_files && result == CMD_FINE; i++)
        result = read_file(cmd, parser, folder->files[i].dir, text_base(folder->files[i].path), folder->files[i].path);
    if (folder->n_files == 0) {
        out_error("%s: %s: there is no *.log and no *.txt in it", cmd->name, folder->path);
        out_hint("docs/run-folder.md describes the folder of a run");
        return CMD_USAGE;
    }
    return result;
}

int input_judge_folder(const struct cmd *cmd, const struct folder *folder, const struct reference *reference,
                       const struct verdict_options *wanted, json_t **ret_document)
{
    struct verdict_options options = *wanted;
    struct parser *parser = parser_new();
    enum verdict_result verdict;
    int result = input_read_folder(cmd, parser, folder, reference, &options);

    if (result == CMD_FINE) {
        parser_end(parser);
        *ret_document = verdict_make(parser, reference, &options, &verdict);
    }
    parser_free(parser);
    return result;
}

/* --- text --- */

/* With its unit, but not the link, which the columns of the figures name: "43.0 GB/s", "65.0 us". */
static json_t *expected_text(const json_t *expected)
{
    const char *unit = json_text(expected, "unit");

    if (!json_is_number(json_object_get(expected, "value")))
        return json_null();
    return json_sprintf("%.1f %.*s", json_number_value(json_object_get(expected, "value")), (int)strcspn(unit, " "),
                        unit);
}

static json_t *number_row(const json_t *run, const json_t *measure)
{
    const json_t *percent = json_object_get(measure, "percent_of_peak");
    const json_t *logical = json_object_get(measure, "logical_gbps"), *wire = json_object_get(measure, "wire_gbps");
    json_t *bus = json_object_get(measure, "busbw_gbps"), *share = NULL;
    json_t *nvl = json_is_number(bus) ? bus : json_object_get(logical, "nvl");
    /* Runs on different links differ only in the device. */
    bool is_link = strcmp(json_text(run, "dialect"), "perftest") == 0;

    for (const char *const *link = TEXTS("rdma", "bus", "nvl"); *link && !json_is_number(share); link++)
        share = json_object_get(percent, *link);
    return json_pack("{s:O?, s:O?, s:O?, s:O?, s:O?, s:O?, s:O?, s:O?, s:O?, s:O?, s:o, s:O?, s:O?}", "run",
                     json_object_get(run, "title"), "op", json_object_get(measure, "op"), "type",
                     json_object_get(measure, "type"), "rdma", json_object_get(logical, "rdma"), "nvl", nvl, "rate",
                     json_is_number(nvl) || is_link ? NULL : json_object_get(measure, "algbw_gbps"), "rdma_wire",
                     json_object_get(wire, "rdma"), "nvl_wire", json_object_get(wire, "nvl"), "time",
                     json_object_get(measure, "time_us"), "percent", share, "expected",
                     expected_text(json_object_get(measure, "expected")), "rating", json_object_get(measure, "rating"),
                     "config", is_link ? json_object_get(run, "device") : json_object_get(measure, "config"));
}

int verdict_measures(FILE *stream, const json_t *runs, enum out_format format)
{
    static const struct out_column columns[] = {
        {"RUN", "run", 0, 0},
        {"OP", "op", 0, 0},
        {"TYPE", "type", 0, OUT_IF_PRESENT},
        {"RDMA GB/s", "rdma", 1, OUT_IF_PRESENT},
        {"NVL/BUS GB/s", "nvl", 1, OUT_IF_PRESENT},
        {"GB/s", "rate", 1, OUT_IF_PRESENT},
        {"RDMA WIRE GB/s", "rdma_wire", 1, OUT_IF_PRESENT},
        {"NVL WIRE GB/s", "nvl_wire", 1, OUT_IF_PRESENT},
        {"TIME us", "time", 1, OUT_IF_PRESENT},
        {"% PEAK", "percent", 0, OUT_IF_PRESENT},
        {"EXPECTED", "expected", 0, OUT_IF_PRESENT},
        {"RATING", "rating", 0, OUT_IF_PRESENT},
        {"BEST CONFIGURATION", "config", 0, OUT_IF_PRESENT | OUT_TRUNC},
    };
    json_t *rows = json_array();
    int result = 0;

    FOR_JSON (run, runs) {
        FOR_JSON (measure, json_object_get(run, "measures"))
            json_array_append_new(rows, number_row(run, measure));
    }
    if (json_array_size(rows) > 0)
        result = out_table(stream, columns, COUNT(columns), rows, format);
    json_decref(rows);
    return result;
}

const char *verdict_tone(const char *result)
{
    return strcmp(result, "passed") == 0 ? "good" : strcmp(result, "failed") == 0 ? "bad" : "warn";
}

/* Consumes `text`. */
static void add_item(json_t *items, int level, const char *tone, const char *kind, const char *id, json_t *text)
{
    json_array_append_new(items, json_pack("{s:i, s:s, s:s, s:s, s:o}", "level", level, "tone", tone, "kind", kind,
                                           "id", id, "text", text));
}

/* Texts of a run, or objects with a text and an ID. */
static void add_list(json_t *items, const json_t *list, const char *tone, const char *kind)
{
    FOR_JSON (item, list)
        add_item(items, 1, tone, kind, json_text(item, "id"),
                 json_incref(json_is_string(item) ? item : json_object_get(item, "text")));
}

static void add_run(json_t *items, const json_t *run)
{
    json_int_t first = json_integer_value(json_array_get(json_object_get(run, "lines"), 0)),
               last = json_integer_value(json_array_get(json_object_get(run, "lines"), 1));
    const json_t *measure = json_array_get(json_object_get(run, "measures"), 0);
    const json_t *peak = json_object_get(measure, "percent_of_peak"), *expected = json_object_get(measure, "expected");

    add_item(items, 0, verdict_tone(json_text(run, "result")), "", "", json_incref(json_object_get(run, "verdict")));
    if (first != last)
        add_item(items, 1, "soft", "", "",
                 json_sprintf("%s:%lld..%lld%s%s", json_text(run, "source"), (long long)first, (long long)last,
                              *json_text(run, "stream") ? ", of " : "", json_text(run, "stream")));
    add_list(items, json_object_get(run, "problems"), "bad", "");
    add_list(items, json_object_get(run, "causes"), "", "probable cause");
    add_list(items, json_object_get(run, "notes"), "soft", "note");
    if (*json_text(peak, "of"))
        add_item(items, 1, "soft", "", "",
                 json_sprintf("%% PEAK is of %s%s", json_text(peak, "of"),
                              json_is_true(json_object_get(peak, "is_assumed"))
                                  ? ", assumed because no machine is named (--hardware)"
                                  : ""));
    if (*json_text(expected, "source"))
        add_item(items, 1, "soft", "", "",
                 json_sprintf("EXPECTED is of: %s, %s", json_text(expected, "from"), json_text(expected, "source")));
}

json_t *verdict_items(const json_t *document)
{
    const json_t *totals = json_object_get(document, "totals");
    json_t *items = json_array();

    FOR_JSON (item, json_object_get(document, "runs"))
        add_run(items, item);
    FOR_JSON (item, json_object_get(document, "faults")) {
        bool is_fatal = json_is_true(json_object_get(item, "fatal"));

        add_item(items, 0, is_fatal ? "bad" : "warn", is_fatal ? "fault" : "warning", json_text(item, "id"),
                 json_sprintf("%s (%s:%.0f%s%s, %.0f times): %s", json_text(item, "cause"), json_text(item, "source"),
                              json_number(item, "line"), *json_text(item, "stream") ? ", " : "",
                              json_text(item, "stream"), json_number(item, "count"), json_text(item, "text")));
    }
    if (json_number(totals, "unreadable") > 0)
        add_item(items, 0, "soft", "", "",
                 json_sprintf("%.0f of %.0f lines were torn and could not be read.", json_number(totals, "unreadable"),
                              json_number(totals, "lines")));
    if (json_number(totals, "runs_dropped") > 0)
        add_item(items, 0, "soft", "", "", json_string("There are more runs: the first 2000 are kept"));
    return items;
}

/* The verdict on a single run was printed already. */
int verdict_print(const json_t *document)
{
    const json_t *runs = json_object_get(document, "runs");
    json_t *items = verdict_items(document), *item;
    int result = verdict_measures(stdout, runs, OUT_TABLE);

    for (size_t i = 0; (item = json_array_get(items, i)); i++) {
        const char *kind = json_text(item, "kind"), *id = json_text(item, "id");

        if (i > 0 || json_array_size(runs) != 1)
            out_line("%*s%s%s%s%s%s%s", 2 * (int)json_number(item, "level"), "", kind, *id ? " (doctor id " : "", id,
                     *id ? ")" : "", *kind ? ": " : "", json_text(item, "text"));
    }
    json_decref(items);
    return result;
}
