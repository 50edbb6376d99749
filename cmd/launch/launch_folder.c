/* SPDX-License-Identifier: Apache-2.0 */
/* launch_folder.c - the folder that a run leaves: see docs/run-folder.md. */
#include "launch_internal.h"

#include "base/error.h"
#include "cmd/report/folder.h"
#include "common/dir.h"
#include "common/output.h"
#include "common/redact.h"

#include <epkit/types.h>

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOG_FOLDER "testbed-logs"

/*
 * Removes the files of an earlier run in the folder: logs of nodes that this run does not have would count as its own.
 */
static void remove_earlier(struct launch *launch)
{
    static const char *const forms[] = {"worker-%s.log", "doctor-%s.json"};
    char file[300];
    json_t *run = runfolder_load_json(launch->folder_fd, "run.json", file, sizeof(file));

    FOR_JSON (host, json_object_get(run, "hosts")) {
        const char *name = job_text(host, "name", "");

        if (!*name || strchr(name, '/'))
            continue;
        for (size_t k = 0; k < sizeof(forms) / sizeof(forms[0]); k++)
            if (snprintf(file, sizeof(file), forms[k], name) < (int)sizeof(file))
                unlinkat(launch->folder_fd, file, 0);
    }
    if (run) {
        launch_note(launch, "%s: replacing the run of %s in this folder", launch->folder,
                    job_text(run, "began", "unknown date"));
    }
    json_decref(run);
}

FILE *folder_create(struct launch *launch, const char *format, const char *name)
{
    char file[300];
    FILE *stream;
    int fd = -1;

    if (snprintf(file, sizeof(file), format, name) < (int)sizeof(file))
        fd = dir_create(launch->folder_fd, file, dir_usual_mode());
    else
        errno = ENAMETOOLONG;
    stream = fd < 0 ? NULL : fdopen(fd, "w");
    if (!stream && fd >= 0)
        close(fd);
    return stream;
}

/* The folder of the logs; links below the folder that the user named are not followed. */
static ep_status open_logs(struct launch *launch)
{
    int parent = dir_open(launch->options->folder, true);
    struct stat info;
    bool is_there = parent >= 0 && fstatat(parent, LOG_FOLDER, &info, AT_SYMLINK_NOFOLLOW) == 0;

    launch->folder_fd = parent < 0 ? -1 : dir_open_in(parent, LOG_FOLDER, true);
    if (launch->folder_fd < 0)
        ep_fail(EP_E_SYSTEM, "making the folder %s for the logs: %s", launch->folder,
                errno == ENOTDIR && parent >= 0 ? "a link or a file has its name" : write_reason(errno));
    dir_close(parent);
    if (launch->folder_fd < 0)
        return EP_E_SYSTEM;
    /* Some file systems give every folder such a mode. */
    if (fstat(launch->folder_fd, &info) != 0 || (is_there && (info.st_mode & S_IWOTH)))
        return ep_fail(EP_E_SYSTEM, "the folder %s for the logs: every user may write in it", launch->folder);
    return EP_OK;
}

ep_status folder_open(struct launch *launch)
{
    const char *folder = launch->options->folder;
    ep_status status;

    if (!folder)
        return EP_OK;
    if (snprintf(launch->folder, sizeof(launch->folder), "%s/" LOG_FOLDER, folder) >= (int)sizeof(launch->folder))
        return ep_fail(EP_E_ARG, "%.100s...: the name is too long", folder);
    status = open_logs(launch);
    if (status == EP_OK) {
        launch->log = folder_create(launch, "%s", "coordinator.log");
        if (!launch->log)
            status = ep_fail(EP_E_SYSTEM, "writing %s/coordinator.log: %s", launch->folder, write_reason(errno));
    }
    if (status == EP_OK)
        remove_earlier(launch);
    else
        launch->folder[0] = '\0';
    return status;
}

static json_t *node_document(const struct node *node, bool is_sorted)
{
    json_t *document;
    char log[300];
    int code = node->signal ? 128 + node->signal : node->code;

    snprintf(log, sizeof(log), "worker-%s.log", node->name);
    document = json_pack("{s:s, s:s?, s:s?, s:s?, s:O?, s:O?, s:O?, s:O?, s:i, s:o}", "name", node->name, "location",
                         *node->location ? node->location : NULL, "failed_at", node->failed_at, "why",
                         node->failed_at ? node->why : NULL, "gpu", json_object_get(node->facts, "gpu"), "driver",
                         json_object_get(node->facts, "driver"), "kernel", json_object_get(node->facts, "kernel"),
                         "epkit", json_object_get(node->facts, "epkit"), "left", node->n_left, "nics",
                         node->nics ? json_incref(node->nics) : json_array());
    json_object_set_new(document, "rank", is_sorted ? json_integer(node->rank) : json_null());
    json_object_set_new(document, "exit_code", node->n_ended || code ? json_integer(code) : json_null());
    if (*node->launch->folder)
        json_object_set_new(document, "log", json_string(log));
    return document;
}

json_t *folder_document(struct launch *launch)
{
    const struct launch_options *options = launch->options;
    bool is_sorted = launch->order[0] != NULL;
    json_t *hosts = json_array(), *environment = json_copy(json_object_get(options->job.spec, "env")), *document,
           *shown;

    json_object_update_missing(environment, json_object_get(options->job.spec, "inherited"));
    for (int i = 0; i < launch->n; i++)
        json_array_append_new(hosts, node_document(is_sorted ? launch->order[i] : &launch->nodes[i], is_sorted));
    document = json_pack("{s:s, s:s, s:O?, s:s?, s:s, s:s?, s:o, s:i, s:i, s:i, s:s, s:s?, s:s?, s:o, s:O}", "epkit",
                         ep_version(), "job", options->job.name, "argv", json_object_get(options->job.spec, "argv"),
                         "command", options->command, "began", launch->began, "ended",
                         *launch->ended ? launch->ended : NULL, "hosts", hosts, "nodes", launch->n, "gpus_per_node",
                         launch->gpus, "ranks", launch->n * launch->per_node, "launcher",
                         options->job.starter == LAUNCH_MPIRUN ? "mpirun"
                         : options->by_srun                    ? "slurm"
                                                               : "ssh",
                         "failed_host", launch->failed ? launch->failed->name : NULL, "reason", launch->reason,
                         "environment", environment, "findings", launch->findings);
    json_object_set_new(document, "exit_code", *launch->ended ? json_integer(launch->code) : json_null());
    json_object_set_new(document, "master", is_sorted ? json_string(launch_master(launch)) : json_null());
    if (json_array_size(options->kept) > 0)
        json_object_set(document, "kept_values", options->kept);
    shown = redact_document(document);
    json_decref(document);
    return shown;
}

void folder_write(struct launch *launch)
{
    json_t *document;
    char *text;
    int failed;

    if (!*launch->folder)
        return;
    document = folder_document(launch);
    json_object_set_new(document, "schema_version", json_integer(1));
    text = stream_json_text(document, JSON_INDENT(2));
    failed = temporary_save_in(launch->folder_fd, "run.json", text, strlen(text), dir_usual_mode());
    free(text);
    json_decref(document);
    if (!failed)
        return;
    if (!launch->code) {
        launch->code = LAUNCH_FAILED;
        launch->reason = "log";
    }
    launch_note(launch, "writing %s/run.json: %s", launch->folder, write_reason(failed));
}
