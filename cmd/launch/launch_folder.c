/* SPDX-License-Identifier: Apache-2.0 */
/* launch_folder.c - the folder that a run leaves: see docs/run-folder.md. */
#include "launch_internal.h"

#include "base/error.h"
#include "common/file.h"
#include "common/redact.h"

#include <epkit/types.h>

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LOG_FOLDER "testbed-logs"

/*
 * Removes the files of an earlier run in the folder: logs of nodes that this run does not have would count as its own.
 */
static void remove_earlier(struct launch *launch)
{
    static const char *const forms[] = {"%s/worker-%s.log", "%s/doctor-%s.json"};
    char path[sizeof(launch->folder) + 300];
    json_t *run, *host;
    size_t i;

    snprintf(path, sizeof(path), "%s/run.json", launch->folder);
    run = json_load_file(path, 0, NULL);
    json_array_foreach (json_object_get(run, "hosts"), i, host) {
        const char *name = job_text(host, "name", "");

        if (!*name || strchr(name, '/'))
            continue;
        for (size_t k = 0; k < sizeof(forms) / sizeof(forms[0]); k++)
            if (snprintf(path, sizeof(path), forms[k], launch->folder, name) < (int)sizeof(path))
                unlink(path);
    }
    if (run) {
        launch_note(launch, "%s: replacing the run of %s in this folder", launch->folder,
                    job_text(run, "began", "unknown date"));
    }
    json_decref(run);
}

ep_status folder_open(struct launch *launch)
{
    const char *folder = launch->options->folder;
    char path[sizeof(launch->folder) + 32];

    if (!folder)
        return EP_OK;
    if (snprintf(launch->folder, sizeof(launch->folder), "%s/" LOG_FOLDER, folder) >= (int)sizeof(launch->folder))
        return ep_fail(EP_E_ARG, "%.100s...: the name is too long", folder);
    if (file_make_folder(launch->folder) != 0) {
        ep_fail_errno(EP_E_SYSTEM, errno, "making the folder %s for the logs", launch->folder);
        launch->folder[0] = '\0';
        return EP_E_SYSTEM;
    }
    snprintf(path, sizeof(path), "%s/coordinator.log", launch->folder);
    launch->log = fopen(path, "we");
    if (!launch->log)
        return ep_fail_errno(EP_E_SYSTEM, errno, "writing %s", path);
    remove_earlier(launch);
    return EP_OK;
}

bool launch_is_secret(const char *name, const char *value)
{
    return identifier_is_secret_name(name) || identifier_has_password(value);
}

/* Without secrets. */
static json_t *environment_document(const struct launch *launch)
{
    json_t *result = json_copy(json_object_get(launch->options->job.spec, "env")), *value;
    const char *name;

    json_object_foreach (result, name, value) {
        if (launch_is_secret(name, json_string_value(value)))
            json_object_set_new(result, name, json_string("(left out)"));
    }
    return result;
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
    json_t *hosts = json_array(), *document;

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
                         "environment", environment_document(launch), "findings", launch->findings);
    json_object_set_new(document, "exit_code", *launch->ended ? json_integer(launch->code) : json_null());
    json_object_set_new(document, "master", is_sorted ? json_string(launch_master(launch)) : json_null());
    return document;
}

void folder_write(struct launch *launch)
{
    char path[sizeof(launch->folder) + 32], name[sizeof(path) + 8];
    json_t *document;
    int failed;

    if (!*launch->folder)
        return;
    document = folder_document(launch);
    json_object_set_new(document, "schema_version", json_integer(1));
    snprintf(path, sizeof(path), "%s/run.json", launch->folder);
    snprintf(name, sizeof(name), "%s.new", path);
    failed = json_dump_file(document, name, JSON_INDENT(2)) != 0 || rename(name, path) != 0 ? errno : 0;
    json_decref(document);
    if (!failed)
        return;
    unlink(name);
    if (!launch->code) {
        launch->code = LAUNCH_FAILED;
        launch->reason = "log";
    }
    launch_note(launch, "writing %s: %s", path, strerror(failed));
}
