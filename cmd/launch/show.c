/* SPDX-License-Identifier: Apache-2.0 */
#include "cmd_launch.h"

#include "agent.h"
#include "cmd/parse/log_input.h"
#include "remote.h"

#include <stdio.h>
#include <string.h>

#define TOLERANCE 15 /* percent, as of epkit parse */

void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes)
{
    parser_feed(parser, prefix, strlen(prefix));
    parser_feed(parser, text, bytes);
    parser_feed(parser, "\n", 1);
}

static int read_folder(const struct cmd *cmd, const char *path, struct parser *parser,
                       const struct reference *reference, struct verdict_options *options)
{
    struct folder *folder;
    char error[200];
    int code;

    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        out_error("%s: %s: %s", cmd->name, path, error);
        return CMD_FAILED;
    }
    code = input_read_folder(cmd, parser, folder, reference, options);
    runfolder_free(folder);
    return code;
}

/*
 * The verdict of verdict_make() on the logs in `folder` (docs/run-folder.md), or, when that is NULL, on what `parser`
 * was fed. The document of 'epkit parse --json', a new reference; NULL after the reason was reported. *ret_code is the
 * exit code of 'epkit parse'.
 */
static json_t *parse_output(const struct cmd *cmd, const char *folder, struct parser *parser,
                            const struct launch_result *result, int *ret_code)
{
    const struct input_options none = {.tolerance = TOLERANCE};
    struct verdict_options options;
    struct reference *reference;
    enum verdict_result verdict;
    json_t *document = NULL, *whole;

    *ret_code = input_reference(cmd, &none, &reference, &options);
    if (*ret_code != CMD_FINE)
        return NULL;
    if (folder)
        *ret_code = read_folder(cmd, folder, parser, reference, &options);
    else
        input_know_run(result->document, reference, &options);
    if (*ret_code == CMD_FINE) {
        parser_end(parser);
        document = verdict_make(parser, reference, &options, &verdict);
        *ret_code = input_exit_code(verdict);
    }
    reference_free(reference);
    if (!document)
        return NULL;
    whole = out_document("parse");
    json_object_update(whole, document);
    json_decref(document);
    return whole;
}

static void print_failures(const json_t *hosts)
{
    static const struct out_column columns[] = {
        {"NODE", "name", 0, 0}, {"FAILED AT", "failed_at", 0, 0}, {"WHY", "why", 0, 0}};
    json_t *rows = json_array();

    FOR_JSON (host, hosts)
        if (json_is_string(json_object_get(host, "failed_at")))
            json_array_append(rows, host);
    if (json_array_size(rows))
        out_table(stdout, columns, sizeof(columns) / sizeof(columns[0]), rows, OUT_TABLE);
    remote_print_advice(rows, "failed_at", false);
    json_decref(rows);
}

static int print_document(const struct cmd *cmd, const struct launch_result *result, int code, json_t *parsed)
{
    json_t *document = out_document(cmd->name);

    json_object_update(document, result->document);
    json_object_set_new(document, "verdict", out_text(result->verdict));
    json_object_set_new(document, "exit_code", json_integer(code));
    json_object_set_new(document, "result", parsed ? json_incref(parsed) : json_null());
    return out_json(document);
}

static void print_verdicts(const struct launch_options *options, const struct launch_result *result,
                           const json_t *parsed, int parsed_code)
{
    const char *verdict = json_string_value(json_object_get(parsed, "verdict"));
    bool has_begun =
        json_array_size(json_object_get(parsed, "runs")) + json_array_size(json_object_get(parsed, "faults")) > 0;

    out_verdict(result->code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", result->verdict);
    /* A test that never began has no verdict, only a reason. */
    if (verdict && (has_begun || result->code == CMD_FINE))
        out_verdict(parsed_code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    if (result->code != CMD_FINE)
        print_failures(json_object_get(result->document, "hosts"));
    if (options->folder)
        fprintf(stderr, "epkit: logs in %s\n", options->folder);
}

int show_result(const struct cmd *cmd, const struct launch_options *options, const struct launch_result *result,
                struct parser *parser, bool json)
{
    json_t *parsed = NULL;
    int code = result->code, parsed_code = CMD_FINE;

    if (result->interrupted)
        return code;
    if (parser && result->is_connected)
        parsed = parse_output(cmd, options->folder, parser, result, &parsed_code);
    /* A test whose output was not recognised has no result, whatever its exit code. */
    if (code == CMD_FINE && parsed_code != CMD_FINE)
        code = parsed_code == CMD_FINDINGS ? CMD_FINDINGS : CMD_FAILED;
    if (!json)
        print_verdicts(options, result, parsed, parsed_code);
    if (result->code == CMD_FINE && parsed_code == CMD_FINDINGS && options->hosts.n > 2)
        out_hint(
            "'epkit triangulate' finds the node that makes it slow: --run takes this command, with {hosts} for the "
            "nodes");
    if (json && print_document(cmd, result, code, parsed) != 0 && code == CMD_FINE)
        code = CMD_FAILED;
    json_decref(parsed);
    return code;
}

int follow_leader(const struct hosts_source *source, const char *leader, int64_t wait_s, int64_t deadline_s)
{
    char why[200], text[600];
    int code;

    if (!source->is_pods) {
        snprintf(text, sizeof(text), "%s: task %d leaves the launch to task 0 (%s)", source->text, source->index,
                 leader);
        out_note("%s", text);
        ending_write(CMD_FINE, text);
        return CMD_FINE;
    }
    fprintf(stderr, "epkit: %s: pod %d waits for the launch by the first one (%s)\n", source->text, source->index,
            leader);
    code = follow_wait(wait_s, deadline_s, why, sizeof(why));
    if (*why) {
        out_error("launch: %s", why);
    } else {
        snprintf(text, sizeof(text), "the launch by %s has ended with status %d", leader, code);
        out_note("%s", text);
        ending_write(code, text);
    }
    /* The first pod ends first: Kubernetes deletes those of a failed job that still run, and their output. */
    if (code != CMD_FINE)
        poll(NULL, 0, FOLLOW_PAUSE_MS);
    return code;
}
