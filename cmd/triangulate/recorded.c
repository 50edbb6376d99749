/* SPDX-License-Identifier: Apache-2.0 */
/* recorded.c - reads recorded runs of groups: folders of runs. */
#include "tool_triangulate.h"

#include "common/json.h"
#include "common/output.h"

#include <dirent.h>
#include <errno.h>
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
            json_array_append_new(weak, json_pack("{s:o, s:o, s:O}", "host", out_name(json_text(host, "name")),
                                                  "device", out_name(json_text(nic, "device")), "share",
                                                  json_object_get(nic, "share")));
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

int triangulate_recorded(struct triangulate_call *call)
{
    struct dirent **entries = NULL;
    int n = scandir(call->from, &entries, NULL, versionsort), n_folders = 0, result = CMD_FINE;

    if (n < 0)
        return cmd_refuse(call->cmd, NULL, "--from %s: %s", call->from, strerror(errno));
    for (int i = 0; i < n; i++) {
        char *inner = NULL;
        struct stat info;

        if (result == CMD_FINE && *entries[i]->d_name != '.' &&
            asprintf(&inner, "%s/%s", call->from, entries[i]->d_name) > 0 && lstat(inner, &info) == 0 &&
            S_ISDIR(info.st_mode)) {
            n_folders++;
            result = add_folder(call, inner);
        }
        free(inner);
        free(entries[i]);
    }
    free(entries);
    if (n_folders == 0)
        return cmd_refuse(call->cmd, NULL, "--from %s: there is no folder in it, and each run is one", call->from);
    return result;
}
