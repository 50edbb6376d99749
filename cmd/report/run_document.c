/* SPDX-License-Identifier: Apache-2.0 */
#include "report.h"

#include "common/dir.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>

/* Loads a report.json; NULL after reporting the error. */
static json_t *load_report(const char *path)
{
    char error[200];
    json_t *document = runfolder_load_json(AT_FDCWD, path, error, sizeof(error));
    json_int_t version = json_integer_value(json_object_get(document, "schema_version"));

    if (version > OUT_SCHEMA_VERSION) {
        out_error("report: %s: it is in version %lld of the format, this epkit reads %d", path, (long long)version,
                  OUT_SCHEMA_VERSION);
        out_hint("compare them with the newer epkit");
    } else if (!json_is_object(json_object_get(document, "figures"))) {
        out_error("report: %s: %s", path, document ? "it is no report.json of a run" : error);
        out_hint("name the folder of a run (docs/run-folder.md), or the report.json that epkit made of one");
    } else {
        return document;
    }
    json_decref(document);
    return NULL;
}

/* --- documents --- */

/* The document of a run, from its report.json or its folder. NULL after reporting the error. */
static json_t *load(const struct cmd *cmd, const char *path, const struct reference *reference,
                    const struct verdict_options *wanted)
{
    struct folder *folder = NULL;
    char error[200];
    json_t *document = NULL, *parsed = NULL;
    struct stat info;

    if (stat(path, &info) == 0 && S_ISREG(info.st_mode))
        return load_report(path);
    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        out_error("report: %s: %s", path, error);
        out_hint("name the folder of a run (docs/run-folder.md), or the report.json that epkit made of one");
        return NULL;
    }
    if (*folder->run_error)
        out_warning("report: %s/run.json: %s; it is left out", folder->base, folder->run_error);
    if (json_is_object(json_object_get(folder->run, "results")) ||
        input_judge_folder(cmd, folder, reference, wanted, &parsed) == CMD_FINE) {
        document = out_document("report");
        json_object_update_new(document, report_gather(folder, parsed));
    }
    json_decref(parsed);
    runfolder_free(folder);
    return document;
}

static int code_of(const json_t *document)
{
    const char *result = json_text(document, "result");

    return strcmp(result, "passed") == 0                                  ? CMD_FINE
           : strcmp(result, "failed") == 0                                ? CMD_FAILED
           : strcmp(result, "slow") == 0 || strcmp(result, "uneven") == 0 ? CMD_FINDINGS
                                                                          : CMD_UNSUPPORTED;
}

/* The earlier runs of the history; other lines of the file are not changed. NULL after reporting an error. */
static json_t *read_history(const char *path, bool must_exist)
{
    json_t *history;
    int bad = 0;

    if (!path)
        return json_array();
    history = report_history_read(path, &bad);
    if (!history && errno == ENOENT && !must_exist)
        return json_array();
    if (!history)
        out_error("report: --history %s: %s", path, errno == EINVAL ? "not a regular file" : strerror(errno));
    else if (bad > 0)
        out_warning("report: --history %s: %d line%s left out", path, bad,
                    bad == 1 ? " is no entry and" : "s are no entries and");
    return history;
}

/* Adds the history, the differences to its last other run, and to the history this run. */
static int add_past(const struct report_options *options, json_t *document)
{
    json_t *all = read_history(options->history, false), *history, *entry;
    int error = 0;
    size_t n;

    if (!all)
        return CMD_USAGE;
    history = report_history_of(all, document);
    n = json_array_size(history);
    if (n > 0)
        json_object_set_new(
            document, "previous",
            report_compare(json_array_get(history, n - 1), document, (double)options->noise / 100, history));
    if (options->history) {
        entry = report_history_entry(document);
        error = report_history_add(options->history, entry);
        if (error)
            out_error("report: --history %s: %s", options->history,
                      error == EBUSY ? "another process holds its lock" : write_reason(error));
        json_array_append_new(history, entry);
    }
    json_object_set_new(document, "history", history);
    json_decref(all);
    return error ? CMD_FAILED : CMD_FINE;
}

static void print_text(const json_t *document, const char *output)
{
    const json_t *previous = json_object_get(document, "previous");

    out_verdict(code_of(document) == CMD_FINE     ? OUT_GOOD
                : code_of(document) == CMD_FAILED ? OUT_BAD
                                                  : OUT_WARN,
                "%s", json_text(document, "verdict"));
    if (json_object_get(document, "parsed"))
        (void)verdict_print(json_object_get(document, "parsed"));
    if (json_is_object(previous))
        out_line("Compared with the previous run: %s", json_text(previous, "verdict"));
    out_line("Report: %s/report.html (and report.json)", output);
}

int report_one(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path)
{
    const char *output = options->output ? options->output : path;
    struct stat info;
    json_t *document;
    int result;

    if (stat(path, &info) == 0 && S_ISREG(info.st_mode)) {
        out_error("report: %s is a file: name the folder of a run", path);
        return CMD_USAGE;
    }
    document = load(cmd, path, reference, wanted);
    if (!document)
        return CMD_USAGE;
    progress_update(0, 0, "writing the report");
    result = add_past(options, document);
    if (result == CMD_FINE && !report_write(output, NULL, document, report_page))
        result = CMD_FAILED;
    progress_stop();
    if (result == CMD_FINE) {
        result = code_of(document);
        if (options->json)
            result = out_json(json_incref(document)) == 0 ? result : CMD_FAILED;
        else
            print_text(document, output);
    }
    json_decref(document);
    return result;
}

int report_two(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path_a, const char *path_b)
{
    json_t *a = load(cmd, path_a, reference, wanted), *b = a ? load(cmd, path_b, reference, wanted) : NULL;
    json_t *history = b ? read_history(options->history, true) : NULL, *document;
    int result = CMD_USAGE;

    if (history) {
        document = out_document("report");
        json_object_update_new(document, report_compare(a, b, (double)options->noise / 100, history));
        result = json_number(document, "regressions") > 0 ? CMD_FINDINGS
                 : json_number(document, "compared") > 0  ? CMD_FINE
                                                          : CMD_UNSUPPORTED;
        progress_stop();
        if (options->output && !report_write(options->output, NULL, document, report_compare_page))
            result = CMD_FAILED;
        if (options->json) {
            result = out_json(json_incref(document)) == 0 ? result : CMD_FAILED;
        } else {
            out_verdict(result == CMD_FINE ? OUT_GOOD : OUT_WARN, "%s", json_text(document, "verdict"));
            if (report_compare_print(stdout, document, OUT_TABLE) != 0)
                result = CMD_FAILED;
        }
        json_decref(document);
    }
    json_decref(a);
    json_decref(b);
    json_decref(history);
    return result;
}
