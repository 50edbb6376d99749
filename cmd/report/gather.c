/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c - builds the document of a run folder. */
#include "common/dir.h"
#include "common/text.h"
#include "report.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define TAIL_BYTES 4096
#define TAIL_LINES 12

/* A file that another program or a person wrote may have any content: a value of another type is left out. */
struct member {
    const char *key, *from;
    json_type type;
};

static const struct member run_members[] = {
    {"ended", "ended", JSON_STRING},   {"job", "job", JSON_STRING},           {"command", "command", JSON_STRING},
    {"commit", "commit", JSON_STRING}, {"launched_by", "epkit", JSON_STRING}, {"exit_code", "exit_code", JSON_INTEGER},
    {"nodes", "nodes", JSON_INTEGER},  {"hardware", "hardware", JSON_STRING}};

static const struct member host_members[] = {
    {"name", "name", JSON_STRING},     {"location", "location", JSON_STRING}, {"gpu", "gpu", JSON_STRING},
    {"driver", "driver", JSON_STRING}, {"kernel", "kernel", JSON_STRING},     {"epkit", "epkit", JSON_STRING},
    {"why", "why", JSON_STRING},       {"rank", "rank", JSON_INTEGER},        {"exit_code", "exit_code", JSON_INTEGER}};

static void copy_members(json_t *into, const json_t *from, const struct member *members, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        json_t *value = json_object_get(from, members[i].from);

        json_object_set_new(into, members[i].key,
                            value && json_typeof(value) == members[i].type ? json_incref(value) : json_null());
    }
}

static json_t *gather_nics(const json_t *run)
{
    json_t *hosts = json_array();
    int uneven = 0;

    FOR_JSON (host, json_object_get(run, "hosts")) {
        const json_t *nics = json_object_get(host, "nics");

        if (json_array_size(nics) > 0)
            json_array_append_new(hosts, runfolder_balance(json_text(host, "name"), nics, &uneven));
    }
    return json_pack("{s:i, s:o}", "uneven", uneven, "hosts", hosts);
}

static json_t *gather_environment(const json_t *run)
{
    json_t *result = json_object();

    FOR_MEMBERS (name, value, json_object_get(run, "environment"))
        if (json_is_string(value))
            json_object_set(result, name, value);
    return result;
}

static json_t *gather_hosts(const json_t *run)
{
    json_t *list = json_array(), *copy;

    FOR_JSON (host, json_object_get(run, "hosts")) {
        copy = json_object();
        copy_members(copy, host, host_members, COUNT(host_members));
        json_array_append_new(list, copy);
    }
    return list;
}

/* Of the launcher's checks before the run: one for each node. */
static json_t *gather_findings(const json_t *run)
{
    json_t *list = json_array();

    FOR_JSON (finding, json_object_get(run, "findings")) {
        FOR_JSON (node, json_object_get(finding, "nodes"))
            if (json_is_string(node))
                json_array_append_new(
                    list, json_pack("{s:O, s:s, s:s, s:s}", "host", node, "id", json_text(finding, "id"), "severity",
                                    json_text(finding, "severity"), "title", json_text(finding, "text")));
    }
    return list;
}

/* The start time: from run.json, else the modification time of the first log. */
static json_t *date_of(const struct folder *folder)
{
    const char *began = json_string_value(json_object_get(folder->run, "began"));
    const struct folder_file *log = folder->files;
    struct stat info;

    if (began)
        return json_string(began);
    return log && fstatat(log->dir, text_base(log->path), &info, AT_SYMLINK_NOFOLLOW) == 0 ? out_time(info.st_mtime)
                                                                                           : json_null();
}

/* A value, such as hardware or nodes, of the first run that has it, borrowed; NULL: none has. */
static json_t *first_of_runs(const json_t *parsed, const char *key)
{
    json_t *value;

    FOR_JSON (run, json_object_get(parsed, "runs")) {
        value = json_object_get(run, key);
        if (value && !json_is_null(value))
            return value;
    }
    return NULL;
}

/* The last lines of the first log, for a page about logs in which nothing was recognised. */
static json_t *gather_tail(const struct folder *folder, const json_t *parsed)
{
    const struct folder_file *log = folder->files;
    char text[TAIL_BYTES + 1], *at = text, *line;
    json_t *lines = json_array();
    ssize_t n = 0;
    int fd;

    fd = !log ? -1 : dir_read_in(log->dir, text_base(log->path));
    if (fd >= 0) {
        (void)lseek(fd, -TAIL_BYTES, SEEK_END); /* a shorter file is read from its beginning */
        n = read(fd, text, TAIL_BYTES);
        close(fd);
    }
    text[n > 0 ? n : 0] = '\0';
    while ((line = strsep(&at, "\n")))
        if (*line)
            json_array_append_new(lines, out_text(line));
    while (json_array_size(lines) > TAIL_LINES)
        json_array_remove(lines, 0);
    if (strcmp(json_text(parsed, "result"), "nothing") == 0 && json_array_size(lines) > 0)
        return json_pack("{s:s, s:o}", "source", text_base(log->path), "lines", lines);
    json_decref(lines);
    return json_null();
}

/* One line: the names in it are those of the folder. */
static json_t *verdict_of(const json_t *run, const json_t *parsed, int uneven)
{
    const json_t *results = json_object_get(run, "results");
    const char *verdict = json_text(json_is_object(results) ? results : parsed, "verdict");
    const char *failure = text_begins(verdict, json_text(parsed, "failure")) ? "" : json_text(parsed, "failure");
    json_t *text, *line;
    char tail[80] = "";

    if (uneven > 0)
        snprintf(tail, sizeof(tail), " %d NIC%s carried much less than the others.", uneven, uneven == 1 ? "" : "s");
    text = json_sprintf("%s%s%s%s", failure, *failure ? ". " : "", verdict, tail);
    line = out_name(text ? json_string_value(text) : "");
    json_decref(text);
    return line;
}

/* Idle NICs are a finding. */
static json_t *result_of(const json_t *run, const json_t *parsed, int uneven)
{
    const json_t *results = json_object_get(run, "results");
    const char *word = json_text(results, "result");

    if (json_is_object(results))
        return json_string(strcmp(word, "works") == 0 ? "passed" : strcmp(word, "failed") == 0 ? "failed" : "nothing");
    if (strcmp(json_text(parsed, "result"), "passed") == 0 && uneven > 0)
        return json_string("uneven");
    return json_incref(json_object_get(parsed, "result"));
}

/* The results of `epkit run`, as `epkit parse` reads them. */
static json_t *parse_results(const json_t *results)
{
    struct parser *parser = parser_new();
    struct reference *reference = reference_new();
    char *text = json_dumps(results, JSON_COMPACT);
    struct verdict_options options = {.tolerance = 1};
    enum verdict_result verdict;
    json_t *parsed;

    parser_begin(parser, "run.json");
    parser_feed(parser, text, strlen(text));
    parser_end(parser);
    parsed = verdict_make(parser, reference, &options, &verdict);
    free(text);
    reference_free(reference);
    parser_free(parser);
    return parsed;
}

json_t *report_gather(const struct folder *folder, json_t *parsed)
{
    const json_t *run = folder->run;
    json_t *nics = gather_nics(run), *results = json_object_get(run, "results"), *document = json_object();
    json_t *kept = json_object_get(run, "kept_values"), *own;
    int uneven = (int)json_number(nics, "uneven");

    results = json_is_object(results) ? results : NULL;
    own = results ? parse_results(results) : NULL;
    parsed = own ? own : parsed;
    copy_members(document, run, run_members, COUNT(run_members));
    if (json_is_null(json_object_get(document, "nodes")))
        json_object_set(document, "nodes", first_of_runs(parsed, "nodes"));
    json_object_set(document, "hardware", first_of_runs(parsed, "hardware"));
    json_object_update_new(
        document, json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:O*, s:O*, s:O*, s:n, s:[]}", "verdict",
                            verdict_of(run, parsed, uneven), "result", result_of(run, parsed, uneven), "folder",
                            out_text(folder->path), "date", date_of(folder), "tail", gather_tail(folder, parsed),
                            "hosts", gather_hosts(run), "environment", gather_environment(run), "nics", nics,
                            "findings", gather_findings(run), "parsed", parsed, "results", results, "kept_values",
                            json_is_array(kept) ? kept : NULL, "previous", "history"));
    json_object_set_new(document, "figures", report_figures(document));
    json_decref(own);
    return document;
}
