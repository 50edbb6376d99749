/* SPDX-License-Identifier: Apache-2.0 */
/* gather.c - builds the document of a run folder. */
#include "cmd/topo/topo_view.h"
#include "common/text.h"
#include "machine/source/source.h"
#include "report.h"

#include <epkit/epkit.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define TAIL_BYTES 4096
#define TAIL_LINES 12

/* NICs of `epkit nics --json`, in the form of run.json. */
static json_t *short_nics(const json_t *document)
{
    json_t *list = json_array(), *device;
    size_t i;

    json_array_foreach (json_object_get(document, "devices"), i, device) {
        const json_t *moved = json_object_get(device, "moved");

        if (json_is_object(moved))
            json_array_append_new(list, json_pack("{s:s, s:i, s:f, s:f}", "device", json_text(device, "device"), "port",
                                                  (int)json_number(device, "port"), "tx_bytes",
                                                  json_number(moved, "sent_bytes"), "rx_bytes",
                                                  json_number(moved, "received_bytes")));
    }
    return list;
}

static json_t *gather_nics(const struct folder *folder)
{
    json_t *hosts = json_array(), *host, *document;
    int uneven = 0;
    size_t i;
    char error[200];

    json_array_foreach (json_object_get(folder->run, "hosts"), i, host) {
        const json_t *nics = json_object_get(host, "nics");

        if (json_array_size(nics) > 0)
            json_array_append_new(hosts, runfolder_balance(json_text(host, "name"), nics, &uneven));
    }
    for (i = 0; i < folder->n_files && json_array_size(json_object_get(folder->run, "hosts")) == 0; i++) {
        if (folder->files[i].kind != FOLDER_NICS)
            continue;
        document = runfolder_load_json(folder->files[i].dir, text_base(folder->files[i].path), error, sizeof(error));
        host = short_nics(document);
        if (json_array_size(host) > 0)
            json_array_append_new(hosts, runfolder_balance(folder->files[i].host, host, &uneven));
        json_decref(host);
        json_decref(document);
    }
    return json_pack("{s:i, s:o}", "uneven", uneven, "hosts", hosts);
}

/* Files written by hand may have any content: a value of another type is left out. */
static json_t *member(const json_t *object, const char *key, json_type type)
{
    json_t *value = json_object_get(object, key);

    return value && json_typeof(value) == type ? json_incref(value) : json_null();
}

static json_t *gather_environment(const struct folder *folder)
{
    json_t *result = json_object(), *value;
    const char *name;

    json_object_foreach (json_object_get(folder->run, "environment"), name, value) {
        if (json_is_string(value))
            json_object_set(result, name, value);
    }
    return result;
}

static json_t *gather_hosts(const struct folder *folder)
{
    static const char *const texts[] = {"name", "location", "gpu", "driver", "kernel", "epkit", "why"};
    json_t *list = json_array(), *host, *copy;
    size_t i, j;

    json_array_foreach (json_object_get(folder->run, "hosts"), i, host) {
        copy = json_object();
        for (j = 0; j < sizeof(texts) / sizeof(texts[0]); j++)
            json_object_set_new(copy, texts[j], member(host, texts[j], JSON_STRING));
        json_object_set_new(copy, "rank", member(host, "rank", JSON_INTEGER));
        json_object_set_new(copy, "exit_code", member(host, "exit_code", JSON_INTEGER));
        json_array_append_new(list, copy);
    }
    return list;
}

static void add_finding(json_t *list, const char *host, const json_t *finding)
{
    json_array_append_new(list,
                          json_pack("{s:s, s:s, s:s, s:s}", "host", host, "id", json_text(finding, "id"), "severity",
                                    json_text(finding, "severity"), "title", json_text(finding, "text")));
}

/* Findings of the launcher's checks before the run; an entry may cover several nodes. */
static void add_launch_findings(const struct folder *folder, json_t *list)
{
    json_t *finding, *node;
    size_t i, j;

    json_array_foreach (json_object_get(folder->run, "findings"), i, finding) {
        json_array_foreach (json_object_get(finding, "nodes"), j, node) {
            if (json_is_string(node))
                add_finding(list, json_string_value(node), finding);
        }
    }
}

/* Findings of `epkit doctor --json` on the nodes. */
static json_t *gather_findings(const struct folder *folder)
{
    json_t *list = json_array(), *document, *finding;
    char error[200];
    size_t j;

    add_launch_findings(folder, list);
    for (size_t i = 0; i < folder->n_files; i++) {
        if (folder->files[i].kind != FOLDER_DOCTOR)
            continue;
        document = runfolder_load_json(folder->files[i].dir, text_base(folder->files[i].path), error, sizeof(error));
        json_array_foreach (json_object_get(document, "checks"), j, finding) {
            if (strcmp(json_text(finding, "outcome"), "found") == 0)
                add_finding(list, folder->files[i].host, finding);
        }
        if (!document)
            json_array_append_new(list, json_pack("{s:s, s:s, s:s, s:s}", "host", folder->files[i].host, "id", "",
                                                  "severity", "unreadable", "title", error));
        json_decref(document);
    }
    return list;
}

/* The sentence of `epkit topo`; false: ret_text has the reason why there is none. */
static bool describe_machine(const struct folder_file *file, char *ret_text, size_t bytes)
{
    int fd = openat(file->dir, text_base(file->path), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct source *source = NULL;
    struct topo *topo = NULL;
    struct map *best = NULL;
    char opened[40];
    bool good;

    snprintf(opened, sizeof(opened), "/proc/self/fd/%d", fd);
    good = fd >= 0 && source_open(opened, &source) == EP_OK && topo_read(source, &topo) == EP_OK &&
           map_best(topo, &best) == EP_OK;

    if (fd < 0)
        snprintf(ret_text, bytes, "%s", strerror(errno));
    else if (good)
        topo_sentence(&(struct topo_view){.topo = topo, .best = best}, ret_text, bytes);
    else
        snprintf(ret_text, bytes, "%s", ep_last_error());
    map_free(best);
    topo_free(topo);
    source_free(source);
    if (fd >= 0)
        close(fd);
    return good;
}

static json_t *gather_snapshots(const struct folder *folder)
{
    json_t *list = json_array();

    for (size_t i = 0; i < folder->n_files; i++) {
        char text[512] = "";
        bool good;

        if (folder->files[i].kind != FOLDER_SNAPSHOT)
            continue;
        good = describe_machine(&folder->files[i], text, sizeof(text));
        json_array_append_new(
            list, json_pack("{s:s, s:s, s:b}", "host", folder->files[i].host, "text", text, "is_readable", good));
    }
    return list;
}

static bool stat_file(const struct folder_file *file, struct stat *ret_info)
{
    return fstatat(file->dir, text_base(file->path), ret_info, AT_SYMLINK_NOFOLLOW) == 0;
}

static json_t *gather_files(const struct folder *folder)
{
    static const char *const kinds[] = {"log", "snapshot", "doctor", "env", "nics"};
    json_t *list = json_array();

    for (size_t i = 0; i < folder->n_files; i++) {
        struct stat info;
        json_int_t bytes = stat_file(&folder->files[i], &info) ? (json_int_t)info.st_size : 0;

        json_array_append_new(list, json_pack("{s:s, s:s, s:I}", "path", folder->files[i].path, "kind",
                                              kinds[folder->files[i].kind], "bytes", bytes));
    }
    return list;
}

/* The start time: from run.json, else the modification time of the first log. */
static json_t *date_of(const struct folder *folder)
{
    const char *began = json_string_value(json_object_get(folder->run, "began"));
    struct stat info;

    if (began)
        return json_string(began);
    return folder->n_files > 0 && stat_file(&folder->files[0], &info) ? out_time(info.st_mtime) : json_null();
}

/* A value, such as hardware or nodes, of the first run that has it. */
static json_t *first_of_runs(const json_t *parsed, const char *key)
{
    json_t *run;
    size_t i;

    json_array_foreach (json_object_get(parsed, "runs"), i, run) {
        json_t *value = json_object_get(run, key);

        if (value && !json_is_null(value))
            return json_incref(value);
    }
    return json_null();
}

static const char *why_of(const json_t *run, const char *name)
{
    json_t *host;
    size_t i;

    json_array_foreach (json_object_get(run, "hosts"), i, host)
        if (strcmp(json_text(host, "name"), name) == 0)
            return json_text(host, "why");
    return "";
}

/* The last lines of the first log, for a page about logs in which nothing was recognised. */
static json_t *gather_tail(const struct folder *folder, const json_t *parsed)
{
    const struct folder_file *log = folder->files, *end = log + folder->n_files;
    char text[TAIL_BYTES + 1], *at = text, *line;
    json_t *lines = json_array();
    ssize_t n = 0;
    int fd;

    while (log < end && log->kind != FOLDER_LOG)
        log++;
    fd = log == end ? -1 : openat(log->dir, text_base(log->path), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
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

static json_t *verdict_text(const struct folder *folder, const json_t *parsed, const json_t *nics)
{
    const json_t *code = json_object_get(folder->run, "exit_code"), *results = json_object_get(folder->run, "results");
    const char *host = json_text(folder->run, "failed_host"), *reason = json_text(folder->run, "reason");
    const char *verdict = json_text(parsed, "verdict"), *why = why_of(folder->run, host);
    int uneven = (int)json_number(nics, "uneven");
    char tail[200] = "";

    if (json_is_object(results))
        return json_string(json_text(results, "verdict"));
    if (uneven > 0)
        snprintf(tail, sizeof(tail), " %d NIC%s carried much less than the others.", uneven, uneven == 1 ? "" : "s");
    if (json_is_integer(code) && json_integer_value(code) != 0)
        return json_sprintf("The run %s%s%s%s%s. %s%s",
                            strcmp(reason, "deadline") == 0      ? "did not end before its deadline"
                            : strcmp(reason, "interrupted") == 0 ? "was interrupted"
                                                                 : "failed",
                            *host ? ", first on " : "", host, *why ? ": " : "", why, verdict, tail);
    return json_sprintf("%s%s", verdict, tail);
}

/* One line: the names in it are those of the folder. */
static json_t *verdict_of(const struct folder *folder, const json_t *parsed, const json_t *nics)
{
    json_t *text = verdict_text(folder, parsed, nics), *line = out_name(text ? json_string_value(text) : "");

    json_decref(text);
    return line;
}

/* A run has failed if the launcher reports it, whatever the logs contain. Idle NICs are a finding. */
static json_t *result_of(const struct folder *folder, const json_t *parsed, const json_t *nics)
{
    const json_t *code = json_object_get(folder->run, "exit_code"), *results = json_object_get(folder->run, "results");
    const char *word = json_text(results, "result");

    if (json_is_object(results))
        return json_string(strcmp(word, "works") == 0 ? "passed" : strcmp(word, "failed") == 0 ? "failed" : "nothing");
    if (json_is_integer(code) && json_integer_value(code) != 0 && json_integer_value(code) != 3)
        return json_string("failed");
    if (strcmp(json_text(parsed, "result"), "passed") == 0 && json_number(nics, "uneven") > 0)
        return json_string("uneven");
    return json_incref(json_object_get(parsed, "result"));
}

json_t *report_gather(const struct folder *folder, json_t *parsed)
{
    const json_t *run = folder->run;
    json_t *nics = gather_nics(folder), *hardware = first_of_runs(parsed, "hardware"), *document;

    if (json_is_null(hardware) && *json_text(run, "hardware"))
        hardware = json_string(json_text(run, "hardware"));
    document = json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "verdict",
                         verdict_of(folder, parsed, nics), "result", result_of(folder, parsed, nics), "folder",
                         out_text(folder->path), "date", date_of(folder), "ended", member(run, "ended", JSON_STRING),
                         "tail", gather_tail(folder, parsed), "job", member(run, "job", JSON_STRING), "command",
                         member(run, "command", JSON_STRING), "commit", member(run, "commit", JSON_STRING),
                         "launched_by", member(run, "epkit", JSON_STRING), "exit_code",
                         member(run, "exit_code", JSON_INTEGER), "hardware", hardware, "nodes",
                         json_is_integer(json_object_get(run, "nodes")) ? member(run, "nodes", JSON_INTEGER)
                                                                        : first_of_runs(parsed, "nodes"));
    json_object_update_new(document,
                           json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "hosts", gather_hosts(folder), "environment",
                                     gather_environment(folder), "nics", nics, "findings", gather_findings(folder),
                                     "snapshots", gather_snapshots(folder), "files", gather_files(folder)));
    if (parsed)
        json_object_set(document, "parsed", parsed);
    if (json_object_get(run, "results"))
        json_object_set(document, "results", json_object_get(run, "results"));
    if (json_is_array(json_object_get(run, "kept_values")))
        json_object_set(document, "kept_values", json_object_get(run, "kept_values"));
    json_object_set_new(document, "figures", report_figures(document));
    json_object_set_new(document, "previous", json_null());
    json_object_set_new(document, "history", json_array());
    return document;
}
