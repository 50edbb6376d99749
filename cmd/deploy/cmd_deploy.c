/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_deploy.c - epkit deploy check: predicts whether a cluster accepts and runs a job. */
#include "common/clean.h"
#include "common/cmd.h"
#include "common/file.h"
#include "common/output.h"
#include "common/temporary.h"
#include "deploy.h"
#include "kubectl.h"

#include <epkit/status.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SNAPSHOT_BYTES_MAX ((size_t)512 << 20)

struct deploy_options {
    const char *file, *space, *queue, *topology, *from, *save, *kubectl, *context;
    int64_t gpus, timeout;
    bool required, json;
};

/* clang-format off */
static const struct opt deploy_table[] = {
    {"file", 'f', "FILE", OPT_FILE, offsetof(struct deploy_options, file),
     .help = "manifest to check, in YAML or JSON, as of 'helm template'; - is standard input", .heading = "Job"},
    {"gpus", 'g', "N", OPT_INT, offsetof(struct deploy_options, gpus), .min = 1, .max = 1000000,
     .help = "without a manifest: GPUs of all nodes together"},
    {"queue", 'q', "NAME", OPT_STRING, offsetof(struct deploy_options, queue),
     .help = "without a manifest: LocalQueue of Kueue"},
    {"topology", 0, "LABEL", OPT_STRING, offsetof(struct deploy_options, topology),
     .help = "without a manifest: node label of the topology level that all pods should share"},
    {"required", 0, NULL, OPT_FLAG, offsetof(struct deploy_options, required),
     .help = "with --topology: they must share it"},
    {"namespace", 'n', "NAME", OPT_STRING, offsetof(struct deploy_options, space), .value = "default",
     .help = "namespace of the job, if the manifest names none"},
    {"from", 0, "FILE", OPT_FILE, offsetof(struct deploy_options, from),
     .help = "read the cluster from a file that --save wrote", .heading = "Cluster"},
    {"save", 0, "FILE", OPT_FILE, offsetof(struct deploy_options, save),
     .help = "write the data read from the cluster; contents of Secrets are not read"},
    {"context", 0, "NAME", OPT_STRING, offsetof(struct deploy_options, context),
     .help = "context of kubectl; default: its current one"},
    {"kubectl", 0, "COMMAND", OPT_STRING, offsetof(struct deploy_options, kubectl), .value = "kubectl",
     .help = "program that reads the cluster, with its options"},
    {"timeout", 0, "S", OPT_INT, offsetof(struct deploy_options, timeout), .min = 1, .max = 3600, .value = "60",
     .help = "seconds that each call of kubectl may take"},
    OPT_JSON_ROW(struct deploy_options, json),
    {0},
};
/* clang-format on */

static int check_options(const struct cmd *cmd, const struct cmd_call *call, const struct deploy_options *options)
{
    if (!options->file == !options->gpus)
        return cmd_usage(cmd, "name the job: either --file MANIFEST or --gpus N");
    if (options->file && (options->queue || options->topology))
        return cmd_usage(cmd, "--queue and --topology are in the manifest when there is one");
    if (options->gpus > 8 && options->gpus % 8 != 0)
        return cmd_usage(cmd, "--gpus: %lld is not a multiple of 8, which each node has", (long long)options->gpus);
    if (options->required && !options->topology)
        return cmd_usage(cmd, "--required needs --topology");
    if (options->topology && !options->queue)
        return cmd_usage(cmd, "--topology needs --queue: only Kueue evaluates it");
    if (options->from && (options->context || options->save || cmd_given(cmd, call, "kubectl")))
        return cmd_usage(cmd, "--from reads a file: it excludes --context, --kubectl and --save");
    return CMD_FINE;
}

/* --- reading --- */

static char *read_stream(FILE *stream, size_t bytes_max, size_t *ret_bytes, const char **ret_why)
{
    size_t bytes = 0, room = 65536, n;
    char *text = malloc(room);

    *ret_why = "no memory";
    while (text && (n = fread(text + bytes, 1, room - bytes, stream)) > 0) {
        char *grown;

        bytes += n;
        if (bytes < room)
            continue;
        if (bytes > bytes_max) {
            *ret_why = "it is too large";
            free(text);
            return NULL;
        }
        room *= 2;
        grown = realloc(text, room);
        if (!grown)
            free(text);
        text = grown;
    }
    if (text && ferror(stream)) {
        *ret_why = strerror(errno);
        free(text);
        return NULL;
    }
    *ret_bytes = bytes;
    return text;
}

/* YAML allows a byte order mark; JSON does not. */
static char *read_file(const char *path, size_t bytes_max, bool skip_mark, size_t *ret_bytes)
{
    FILE *stream = strcmp(path, "-") == 0 ? stdin : file_open(path);
    const char *why = file_error(errno);
    char *text;

    if (stream && skip_mark)
        file_skip_mark(stream);
    text = stream ? read_stream(stream, bytes_max, ret_bytes, &why) : NULL;

    if (stream && stream != stdin)
        fclose(stream);
    if (!text) {
        out_error("%s cannot be read: %s", path, why);
        out_hint("--file and --from name files; '-' is standard input");
    }
    return text;
}

static int read_job(const struct deploy_options *options, json_t **ret_documents, struct deploy_job *ret_job)
{
    ep_status status = EP_OK;
    size_t bytes = 0;
    char *text, why[512];

    if (options->gpus) {
        *ret_documents =
            deploy_job_make(options->space, options->queue, options->gpus, options->topology, options->required);
        if (!*ret_documents) {
            out_error("the names given are not valid UTF-8");
            return CMD_USAGE;
        }
    } else {
        text = read_file(options->file, DEPLOY_MANIFEST_MAX, false, &bytes);
        if (!text)
            return CMD_USAGE;
        status = deploy_manifest_parse(text, bytes, ret_documents);
        free(text);
    }
    if (status == EP_OK)
        status = deploy_job_find(*ret_documents, options->space, ret_job);
    if (status != EP_OK) {
        text_clean(ep_last_error(), why, sizeof(why));
        out_error("%s: %s", options->file ? options->file : "the job", why);
        return CMD_USAGE;
    }
    return CMD_FINE;
}

static int read_snapshot(const char *path, json_t **ret_snapshot)
{
    json_error_t error;
    size_t bytes = 0;
    char *text = read_file(path, SNAPSHOT_BYTES_MAX, true, &bytes);
    json_t *snapshot;

    if (!text)
        return CMD_USAGE;
    snapshot = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    free(text);
    if (!snapshot) {
        out_error("%s is no JSON: line %d: %s", path, error.line, error.text);
        return CMD_USAGE;
    }
    if (deploy_snapshot_check(snapshot) != EP_OK) {
        out_error("%s is no snapshot of a cluster: %s", path, ep_last_error());
        json_decref(snapshot);
        return CMD_USAGE;
    }
    *ret_snapshot = snapshot;
    return CMD_FINE;
}

/* Readable only by its owner: it lists what runs in the cluster. */
static int save_snapshot(const json_t *snapshot, const char *path)
{
    char *text = json_dumps(snapshot, JSON_COMPACT | JSON_SORT_KEYS);
    int number = text ? temporary_save(path, text, strlen(text), 0600) : ENOMEM;

    free(text);
    if (number)
        out_error("%s cannot be written: %s", path, strerror(number));
    return number ? CMD_FAILED : CMD_FINE;
}

/* --- output --- */

static const char *text_of(const json_t *object, const char *key)
{
    const char *text = json_string_value(json_object_get(object, key));

    return text ? text : "";
}

struct verdict {
    int n_errors, n_warnings;
    const char *unknown; /* resources that were required and not read; NULL: none */
    long long pods;
    char text[512];
};

/* Without these no verdict is possible. */
static const char *first_unknown(const struct deploy_job *job, const json_t *snapshot)
{
    static const char *const always[] = {"namespaces", "nodes", "pods", NULL};
    static const char *const queued[] = {"localqueues", "clusterqueues", "resourceflavors", "topologies", NULL};
    const json_t *items = json_object_get(snapshot, "items");

    if (!json_is_array(json_object_get(snapshot, "groups")))
        return "groups";
    for (int i = 0; always[i]; i++)
        if (!json_is_array(json_object_get(items, always[i])))
            return always[i];
    for (int i = 0; job->queue && queued[i]; i++)
        if (!json_is_array(json_object_get(items, queued[i])))
            return queued[i];
    return NULL;
}

static struct verdict verdict_of(const struct deploy_job *job, const json_t *findings, const json_t *snapshot)
{
    struct verdict verdict = {0};
    const char *version = text_of(snapshot, "version");
    const json_t *finding;
    size_t i;

    json_array_foreach(findings, i, finding) *
        (strcmp(text_of(finding, "severity"), "error") == 0 ? &verdict.n_errors : &verdict.n_warnings) += 1;
    for (int s = 0; s < job->n_sets; s++)
        verdict.pods += job->sets[s].count;
    finding = json_array_get(findings, 0);
    verdict.unknown = first_unknown(job, snapshot);
    if (verdict.n_errors > 0)
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s will not run: %s will say '%.300s'.", job->kind,
                 job->name, text_of(finding, "by"), text_of(finding, "says"));
    else if (verdict.unknown)
        snprintf(verdict.text, sizeof(verdict.text), "No verdict on %s %.100s: %s were not read.", job->kind, job->name,
                 verdict.unknown);
    else if (verdict.n_warnings > 0)
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s may wait or be slow: %.300s.", job->kind, job->name,
                 text_of(finding, "why"));
    else
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s can run on this cluster (%.60s): %lld pods%s%.100s.",
                 job->kind, job->name, version, verdict.pods, job->queue ? " by queue " : "",
                 job->queue ? job->queue : "");
    return verdict;
}

/* Names of manifests and clusters are untrusted: print no control characters. */
static json_t *printable(const json_t *findings)
{
    json_t *copy = json_deep_copy(findings), *finding, *value;
    const char *key;
    char text[2048];
    size_t i;

    json_array_foreach(copy, i, finding) json_object_foreach(finding, key, value)
    {
        text_clean(json_string_value(value), text, sizeof(text));
        json_string_set(value, text);
    }
    return copy;
}

static const struct out_column columns[] = {
    {"SEVERITY", "severity", 0, 0},
    {"ID", "id", 0, 0},
    {"BY", "by", 0, 0},
    {"OBJECT", "object", 0, OUT_TRUNC},
};

static void print_findings(const struct verdict *verdict, const json_t *all, const json_t *unread)
{
    json_t *findings = printable(all), *value;
    const json_t *finding;
    const char *key;
    char text[1024], name[64];
    size_t i;

    text_clean(verdict->text, text, sizeof(text));
    out_verdict(verdict->n_errors ? OUT_BAD : verdict->n_warnings ? OUT_WARN : OUT_GOOD, "%s", text);
    if (json_array_size(findings) > 0) {
        out_line("%s", "");
        out_table(stdout, columns, COUNT(columns), findings, OUT_TABLE);
    }
    json_array_foreach(findings, i, finding)
    {
        out_line("%s", "");
        out_line("%s: %s", text_of(finding, "id"), text_of(finding, "object"));
        out_line("  %s will say: %s", text_of(finding, "by"), text_of(finding, "says"));
        out_line("  why: %s", text_of(finding, "why"));
        out_line("  do:  %s", text_of(finding, "fix"));
    }
    json_object_foreach((json_t *)unread, key, value)
    {
        text_clean(json_is_string(value) ? json_string_value(value) : "", text, sizeof(text));
        text_clean(key, name, sizeof(name));
        out_warning("%s could not be read and were not checked: %s", name, text);
    }
    json_decref(findings);
}

static int report(const struct cmd *cmd, const struct deploy_options *options, const struct deploy_job *job,
                  const json_t *snapshot)
{
    json_t *findings = deploy_check(snapshot, job), *document, *cluster;
    struct verdict verdict;
    int code;

    if (!findings) {
        out_error("no memory for the findings");
        return CMD_FAILED;
    }
    verdict = verdict_of(job, findings, snapshot);
    code = verdict.n_errors == 0 && verdict.unknown ? CMD_FAILED
           : json_array_size(findings) > 0          ? CMD_FINDINGS
                                                    : CMD_FINE;
    if (options->json) {
        document = out_document(cmd->name);
        json_object_set_new(document, "verdict", json_string(verdict.text) ?: json_string("the job will not run"));
        json_object_set_new(document, "will_run",
                            verdict.n_errors == 0 && verdict.unknown ? json_null()
                                                                     : json_boolean(verdict.n_errors == 0));
        cluster = json_pack("{s:s, s:O?}", "version", text_of(snapshot, "version"), "unread",
                            json_object_get(snapshot, "unread"));
        json_object_set_new(document, "cluster", cluster);
        json_object_set_new(document, "job",
                            json_pack("{s:s, s:s, s:s, s:s?, s:I}", "kind", job->kind, "name", job->name, "namespace",
                                      job->space, "queue", job->queue, "pods", (json_int_t)verdict.pods));
        json_object_set_new(document, "findings", findings);
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    print_findings(&verdict, findings, json_object_get(snapshot, "unread"));
    json_decref(findings);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

static int cmd_deploy(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct deploy_options *options = call->options;
    struct kubectl kubectl = {
        .program = options->kubectl, .context = options->context, .timeout_ms = options->timeout * 1000};
    json_t *documents = NULL, *snapshot = NULL;
    struct deploy_job job;
    int code = check_options(cmd, call, options);

    if (code == CMD_FINE)
        code = read_job(options, &documents, &job);
    if (code == CMD_FINE) {
        kubectl.space = job.space;
        code =
            options->from ? read_snapshot(options->from, &snapshot) : kubectl_snapshot(&kubectl, documents, &snapshot);
    }
    /* A job of --gpus has no image: a dry run makes no sense. */
    if (code == CMD_FINE && !options->from && options->file)
        kubectl_dry_run(&kubectl, &job, snapshot);
    if (code == CMD_FINE && options->save)
        code = save_snapshot(snapshot, options->save);
    if (code == CMD_FINE)
        code = report(cmd, options, &job, snapshot);
    json_decref(documents);
    json_decref(snapshot);
    return code;
}

static const char *const deploy_actions[] = {"check", NULL};

const struct cmd command_deploy = {
    .name = "deploy",
    .args = "check",
    .min_args = 1,
    .max_args = 1,
    .arg_choices = deploy_actions,
    .summary = "predict whether a Kubernetes cluster accepts and runs a job",
    .description =
        "'epkit deploy check' compares a job with a cluster: kinds that the API server does not serve, rights, quotas "
        "of the namespace, Pod Security, missing volumes, secrets, images and networks, network policies that "
        "separate the pods; Kueue's queue, quota, flavors and topology; nodes by label, taint, free resources, "
        "ports of the host and anti-affinity; and the requirements on GKE: version, dense placement, Workload "
        "Identity, the owner of the driver. Each finding has the message that the cluster will print, the reason, and "
        "what to do.\n\n"
        "The job is a manifest ('helm template NAME deploy/helm/epkit ... | epkit deploy check -f -'), or --gpus with "
        "--queue for one that requests only GPUs. kubectl reads the cluster with the rights of its user, and makes "
        "server-side dry runs of each object of the manifest and of a pod of the job: nothing is created. Resources "
        "that the user may not read are listed and not checked.\n\n"
        "Messages of Kueue are those of version 0.15. Pods of jobs that Kueue has admitted count as "
        "users of nodes, even if they have no node yet.",
    .options = deploy_table,
    .options_bytes = sizeof(struct deploy_options),
    .examples =
        (const struct cmd_example[]){
            {"epkit deploy check --gpus 16 --queue a4", "Would 16 GPUs be admitted by queue a4?"},
            {"epkit deploy check -f job.yaml", "Check a rendered chart, or any JobSet, LeaderWorkerSet or Job."},
            {"epkit deploy check -g 32 -q a4 --topology example.com/rack --required",
             "Is there a rack with room for four nodes?"},
            {"epkit deploy check --gpus 16 --save cluster.json", "Save the data read from the cluster."},
            {"epkit deploy check -f job.yaml --from cluster.json --json", "Check against the saved data, as JSON."},
            {NULL, NULL},
        },
    .exits =
        (const struct cmd_exit_text[]){
            {CMD_FINE, "no finding"},
            {CMD_FAILED, "the cluster does not answer, too little could be read of it, or a file could not be written"},
            {CMD_USAGE, "wrong usage, or a file that cannot be used"},
            {CMD_FINDINGS, "the cluster will refuse the job, or the job has to wait"},
            {CMD_UNSUPPORTED, "there is no kubectl"},
            {0, NULL},
        },
    .run = cmd_deploy,
};
