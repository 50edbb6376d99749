/* SPDX-License-Identifier: Apache-2.0 */
/* recorded.c - reads recorded runs of groups: folders of runs, or a document. */
#include "tool_triangulate.h"

#include "common/json.h"
#include "common/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* The name of a host, and NICs of it that carried much less than its others. */
static void add_host(const json_t *host, json_t *names, json_t *weak)
{
    int n_uneven = 0;
    json_t *balance = runfolder_balance("", json_object_get(host, "nics"), &n_uneven), *nic;
    size_t i;

    if (*json_text(host, "name"))
        json_array_append_new(names, out_name(json_text(host, "name")));
    json_array_foreach (json_object_get(balance, "nics"), i, nic) {
        if (json_is_true(json_object_get(nic, "uneven")))
            json_array_append_new(weak, json_pack("{s:o, s:o, s:O, s:O}", "host", out_name(json_text(host, "name")),
                                                  "device", out_name(json_text(nic, "device")), "share",
                                                  json_object_get(nic, "share"), "idle", json_object_get(nic, "idle")));
    }
    json_decref(balance);
}

static int add_folder(struct triangulate_call *call, const char *path)
{
    struct folder *folder;
    char error[200];
    json_t *verdict = NULL, *hosts, *host, *names = json_array();
    int status, result = CMD_FINE;
    size_t i;

    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        out_error("triangulate: %s: %s", path, error);
        json_decref(names);
        return CMD_FAILED;
    }
    hosts = json_object_get(folder->run, "hosts");
    status = (int)json_integer_value(json_object_get(folder->run, "exit_code"));
    if (!json_is_array(hosts))
        out_warning("triangulate: %s: no run.json with hosts; it is left out", path);
    else
        result = input_judge_folder(call->cmd, folder, call->reference, &call->wanted, &verdict);
    /* A run that measured nothing clears no node. */
    if (verdict && status == 0 && strcmp(json_text(verdict, "result"), "nothing") == 0) {
        out_warning("triangulate: %s: nothing was recognised in its logs; it is left out", path);
    } else if (verdict) {
        json_array_foreach (hosts, i, host)
            add_host(host, names, call->nics);
        (void)triangulate_run(call, json_incref(names), verdict, status, NULL, path);
    }
    json_decref(names);
    json_decref(verdict);
    runfolder_free(folder);
    return result;
}

static int add_folders(struct triangulate_call *call)
{
    struct dirent **entries = NULL;
    int n = scandir(call->from, &entries, NULL, versionsort), result = CMD_FINE;

    for (int i = 0; i < n; i++) {
        char *inner = NULL;
        struct stat info;

        if (result == CMD_FINE && *entries[i]->d_name != '.' &&
            asprintf(&inner, "%s/%s", call->from, entries[i]->d_name) > 0 && lstat(inner, &info) == 0 &&
            S_ISDIR(info.st_mode))
            result = add_folder(call, inner);
        free(inner);
        free(entries[i]);
    }
    free(entries);
    return result;
}

static bool is_list_of_names(const json_t *hosts)
{
    const json_t *host;
    size_t i;

    json_array_foreach (hosts, i, host) {
        if (!json_is_string(host) || !*json_string_value(host))
            return false;
    }
    return json_array_size(hosts) > 0;
}

/*
 * A run without a ratio has failed, unless its "failed" is null as well: then it passed, with nothing to compare it
 * with. false: it is no run.
 */
static bool add_run_in_file(struct triangulate_call *call, const json_t *run)
{
    json_t *ratio = json_object_get(run, "ratio"), *hosts = json_object_get(run, "hosts"), *names, *host;
    const json_t *failed = json_object_get(run, "failed");
    const char *why = json_is_string(failed) ? json_string_value(failed) : "it has no ratio";
    size_t i;

    if (!is_list_of_names(hosts) || !(json_is_null(ratio) || (json_is_number(ratio) && json_number_value(ratio) >= 0)))
        return false;
    names = json_array();
    json_array_foreach (hosts, i, host)
        json_array_append_new(names, out_name(json_string_value(host)));
    json_array_append_new(call->runs,
                          json_pack("{s:o, s:O, s:o, s:s}", "hosts", names, "ratio", ratio, "failed",
                                    json_is_number(ratio) || json_is_null(failed) ? json_null() : out_name(why),
                                    "purpose", call->from));
    return true;
}

static int add_file(struct triangulate_call *call)
{
    char error[200];
    json_t *document = runfolder_load_json(AT_FDCWD, call->from, error, sizeof(error)), *run;
    json_int_t version = json_integer_value(json_object_get(document, "schema_version"));
    int result = CMD_USAGE;
    size_t i;

    if (version > OUT_SCHEMA_VERSION) {
        out_error("triangulate: --from %s: it is in version %lld of the format, this epkit reads %d", call->from,
                  (long long)version, OUT_SCHEMA_VERSION);
        out_hint("use the newer epkit that wrote it");
    } else if (!json_is_array(json_object_get(document, "runs"))) {
        out_error("triangulate: --from %s: %s", call->from, document ? "there is no list 'runs' in it" : error);
    } else {
        result = CMD_FINE;
    }
    json_array_foreach (json_object_get(document, "runs"), i, run) {
        if (result != CMD_FINE || add_run_in_file(call, run))
            continue;
        out_error("triangulate: --from %s: runs[%zu] needs 'hosts', a list of names, and 'ratio', a number from 0 "
                  "on, or null",
                  call->from, i);
        result = CMD_USAGE;
    }
    json_decref(document);
    return result;
}

int triangulate_recorded(struct triangulate_call *call)
{
    struct stat info;

    if (stat(call->from, &info) != 0)
        return cmd_refuse(call->cmd, NULL, "--from %s: %s", call->from, strerror(errno));
    return S_ISDIR(info.st_mode) ? add_folders(call) : add_file(call);
}
