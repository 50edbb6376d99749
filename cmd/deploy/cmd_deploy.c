/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_deploy.c - epkit deploy: whether a cluster accepts and runs a job, and what holds it up after that. */
#include "cmd_deploy.h"

#include "common/dir.h"
#include "common/memory.h"
#include "common/output.h"
#include "common/redact.h"
#include "common/shell.h"
#include "common/temporary.h"
#include "common/text.h"
#include "get.h"

#include <errno.h>
#include <stdlib.h>

struct deploy_options {
    const char *file, *space, *queue, *topology, *from, *save, *kubectl, *context;
    int64_t gpus, timeout;
    bool required, prerequisites, json;
};

/* clang-format off */
static const struct opt deploy_table[] = {
    {"file", 'f', "FILE", OPT_FILE, offsetof(struct deploy_options, file),
     .help = "manifest to check, in YAML or JSON, as of 'helm template'; - is standard input",
     .heading = "Job to check"},
    {"gpus", 'g', "N", OPT_INT, offsetof(struct deploy_options, gpus), .min = 1, .max = 1000000,
     .help = "without a manifest: GPUs of all nodes together"},
    {"queue", 'q', "NAME", OPT_STRING, offsetof(struct deploy_options, queue),
     .help = "without a manifest: LocalQueue of Kueue"},
    {"topology", 0, "LABEL", OPT_STRING, offsetof(struct deploy_options, topology),
     .help = "without a manifest: node label of the topology level that all pods should share"},
    {"required", 0, NULL, OPT_FLAG, offsetof(struct deploy_options, required),
     .help = "with --topology: they must share it"},
    {"prerequisites", 0, NULL, OPT_FLAG, offsetof(struct deploy_options, prerequisites),
     .help = "also what any job needs on GKE: pool, driver, NICs, networks, storage; by kubectl and, if it is there, "
             "gcloud. Without a manifest: for 16 GPUs and the queue a4, or those given"},
    {"namespace", 'n', "NAME", OPT_STRING, offsetof(struct deploy_options, space), .value = "default",
     .help = "namespace of the job, if the manifest names none", .heading = "Job to check or explain"},
    {"from", 0, "FILE", OPT_FILE, offsetof(struct deploy_options, from),
     .help = "read the cluster from a file that --save wrote", .heading = "Cluster"},
    {"save", 0, "FILE", OPT_FILE, offsetof(struct deploy_options, save),
     .help = "write the data read from the cluster, without contents of Secrets and variables of containers"},
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

#define NAME_CHARACTERS "abcdefghijklmnopqrstuvwxyz0123456789-."

/* The job of the quickstart, for --prerequisites alone. */
static void set_prerequisites(struct deploy_options *options)
{
    if (!options->prerequisites || options->file)
        return;
    options->gpus = options->gpus ? options->gpus : 16;
    options->queue = options->queue ? options->queue : "a4";
    options->topology = options->topology ? options->topology : TOPOLOGY_BLOCK;
}

static int check_options(const struct cmd *cmd, const struct cmd_call *call, const struct deploy_options *options)
{
    if (call->n_args > 1)
        return cmd_usage(cmd, "check takes no argument: name the job with --file or --gpus");
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
    return CMD_FINE;
}

static int why_options(const struct cmd *cmd, const struct cmd_call *call)
{
    static const char *const others[] = {"file", "gpus", "queue", "topology", "required", "prerequisites"};

    for (size_t i = 0; i < COUNT(others); i++)
        if (cmd_given(cmd, call, others[i]))
            return cmd_usage(cmd, "--%s applies only to check", others[i]);
    if (call->n_args < 2)
        return cmd_usage(cmd, "name the job: epkit deploy why JOB");
    if (call->args[1][strspn(call->args[1], NAME_CHARACTERS)] != '\0')
        return cmd_usage(cmd, "'%.64s' is not a name: names of jobs have a-z, 0-9, '-' and '.'", call->args[1]);
    return CMD_FINE;
}

static int common_options(const struct cmd *cmd, const struct cmd_call *call, const struct deploy_options *options)
{
    if (options->kubectl[strspn(options->kubectl, " ")] == '\0')
        return cmd_usage(cmd, "--kubectl is empty");
    if (options->from && (options->context || options->save || cmd_given(cmd, call, "kubectl")))
        return cmd_usage(cmd, "--from reads a file: it excludes --context, --kubectl and --save");
    return CMD_FINE;
}

/* --- reading --- */

static FILE *open_input(const char *path)
{
    FILE *stream = strcmp(path, "-") == 0 ? stdin : file_open(path);

    if (!stream) {
        out_error("%s cannot be read: %s", path, file_error(errno));
        out_hint("--file and --from name files; '-' is standard input");
    }
    return stream;
}

static int read_manifest(const char *path, json_t **ret_documents)
{
    char *text = memory_new(DEPLOY_MANIFEST_MAX + 1, 1), why[512];
    FILE *stream = open_input(path);
    ep_status status = EP_E_ARG;
    size_t bytes = stream ? fread(text, 1, DEPLOY_MANIFEST_MAX + 1, stream) : 0;

    if (stream && ferror(stream)) {
        out_error("%s cannot be read: %s", path, strerror(errno));
    } else if (stream) {
        status = deploy_manifest_parse(path, text, bytes, ret_documents);
        text_clean(status == EP_OK ? "" : ep_last_error(), why, sizeof(why));
        if (status != EP_OK)
            out_error("%s", why);
        /* What YAML finds wrong in a template of Helm does not say that it is one. */
        if (memmem(text, bytes, "{{", 2) && (strstr(why, "not valid YAML") || strstr(why, "a plain word")))
            out_hint("a template with {{ }} has to be rendered first: helm template");
        else if (status != EP_OK)
            out_hint("--file takes what 'kubectl apply -f' takes");
    }
    if (stream && stream != stdin)
        fclose(stream);
    free(text);
    return status == EP_OK ? CMD_FINE : CMD_USAGE;
}

static int read_job(const struct deploy_options *options, json_t **ret_documents, struct deploy_job *ret_job)
{
    char why[512];

    if (options->file && read_manifest(options->file, ret_documents) != CMD_FINE)
        return CMD_USAGE;
    if (!options->file)
        *ret_documents = deploy_job_make(options->space, options->queue, options->gpus, options->topology,
                                         options->required, options->prerequisites);
    if (!*ret_documents) {
        out_error("the names given are not valid UTF-8");
        return CMD_USAGE;
    }
    if (deploy_job_find(*ret_documents, options->space, ret_job) != EP_OK) {
        text_clean(ep_last_error(), why, sizeof(why));
        out_error("%s: %s", options->file ? options->file : "the job", why);
        return CMD_USAGE;
    }
    ret_job->prerequisites = options->prerequisites;
    return CMD_FINE;
}

static int read_snapshot(const char *path, json_t **ret_snapshot)
{
    FILE *stream = open_input(path);
    json_error_t error;
    json_t *snapshot;

    if (!stream)
        return CMD_USAGE;
    file_skip_mark(stream); /* YAML allows a byte order mark; JSON does not */
    snapshot = json_loadf(stream, JSON_REJECT_DUPLICATES, &error);
    if (ferror(stream))
        out_error("%s cannot be read: %s", path, strerror(errno));
    else if (!snapshot)
        out_error("%s is no JSON: line %d: %s", path, error.line, error.text);
    else if (deploy_snapshot_check(snapshot) != EP_OK)
        out_error("%s is no snapshot of a cluster, as --save writes it: %s", path, ep_last_error());
    else
        *ret_snapshot = json_incref(snapshot);
    json_decref(snapshot);
    if (stream != stdin)
        fclose(stream);
    return *ret_snapshot ? CMD_FINE : CMD_USAGE;
}

/* Readable only by its owner: it lists what runs in the cluster. */
static int save_snapshot(const json_t *snapshot, const char *path)
{
    json_t *shown = redact_document(snapshot);
    char *text = json_dumps(shown, JSON_COMPACT | JSON_SORT_KEYS);
    int number = temporary_save(path, text, strlen(text), 0600);

    json_decref(shown);
    free(text);
    if (number)
        out_error("%s cannot be written: %s", path, write_reason(number));
    return number ? CMD_FAILED : CMD_FINE;
}

/* From a file, or with kubectl for the job (NULL: to explain one); saves it if that is asked for. */
static int get_snapshot(const struct deploy_options *options, const struct deploy_job *job, json_t **ret_snapshot)
{
    /* A job of --gpus has no image: its pods would be refused. */
    const struct kubectl kubectl = {.program = options->kubectl,
                                    .context = options->context,
                                    .space = job ? job->space : options->space,
                                    .timeout_ms = options->timeout * 1000,
                                    .derived = options->file != NULL};
    int code =
        options->from ? read_snapshot(options->from, ret_snapshot) : kubectl_snapshot(&kubectl, job, ret_snapshot);

    return code == CMD_FINE && options->save ? save_snapshot(*ret_snapshot, options->save) : code;
}

static int run_check(const struct cmd *cmd, const struct deploy_options *options)
{
    json_t *documents = NULL, *snapshot = NULL;
    struct deploy_job job;
    int code = read_job(options, &documents, &job);

    if (code == CMD_FINE)
        code = get_snapshot(options, &job, &snapshot);
    if (code == CMD_FINE)
        code = check_report(cmd, &job, snapshot, options->json);
    json_decref(documents);
    json_decref(snapshot);
    return code;
}

/* Nothing can be said without the pods, or about a job that is not there. */
static int explain(const struct cmd *cmd, const struct deploy_options *options, const char *name,
                   const json_t *snapshot)
{
    static const char *const needed[] = {"pods", "jobs", "jobsets", "leaderworkersets"};
    json_t *answer = deploy_why(snapshot, options->space, name);
    const json_t *unread = get(snapshot, "unread");
    char why[512], word[SHELL_WORD_BYTES];

    for (size_t i = 0; i < (answer ? 1 : COUNT(needed)); i++) {
        if (!get(unread, needed[i]))
            continue;
        text_clean(get_text(unread, needed[i]), why, sizeof(why));
        out_error("%s of namespace %s could not be read: %s", needed[i], options->space, why);
        json_decref(answer);
        return CMD_FAILED;
    }
    if (answer)
        return why_report(cmd, answer, snapshot, options->json);
    if (options->from && !get_items(snapshot, "jobs"))
        return cmd_refuse(cmd, options->from, "it has no jobs: 'epkit deploy why JOB --save FILE' writes such a file");
    out_error("namespace %s has no JobSet, LeaderWorkerSet or Job %s", options->space, name);
    out_hint("what has ended is removed after ttlSecondsAfterFinished; this lists the others: kubectl get jobsets,jobs "
             "-n %s",
             shell_quote(options->space, word, sizeof(word)));
    return CMD_USAGE;
}

static int run_why(const struct cmd *cmd, const struct deploy_options *options, const char *name)
{
    json_t *snapshot = NULL;
    int code = get_snapshot(options, NULL, &snapshot);

    if (code == CMD_FINE)
        code = explain(cmd, options, name, snapshot);
    json_decref(snapshot);
    return code;
}

static int cmd_deploy(const struct cmd *cmd, const struct cmd_call *call)
{
    struct deploy_options given = *(const struct deploy_options *)call->options, *options = &given;
    bool is_why = strcmp(call->args[0], "why") == 0;

    set_prerequisites(options);
    CMD_TRY(is_why ? why_options(cmd, call) : check_options(cmd, call, options));
    CMD_TRY(common_options(cmd, call, options));
    return is_why ? run_why(cmd, options, call->args[1]) : run_check(cmd, options);
}

static const char *const deploy_actions[] = {"check", "why", NULL};

const struct cmd command_deploy = {
    .name = "deploy",
    .args = "check|why [JOB]",
    .min_args = 1,
    .max_args = 2,
    .arg_choices = deploy_actions,
    .summary = "check a job against a Kubernetes cluster, or explain what holds it up",
    .description =
        "'epkit deploy check', before a job is submitted: kinds that the API server does not serve, rights, the quota of "
        "GPUs of the namespace; missing volumes, secrets, images and networks; network policies that separate the pods; "
        "Kueue's queue, quota of GPUs and topology; labels of nodes and their free GPUs; and the requirements on GKE: "
        "version, dense placement, Workload Identity, the owner of the driver. Each finding has the message that the "
        "cluster will print, the reason, and what to do. Everything else the API server says itself: kubectl makes "
        "server-side dry runs of each object of the manifest and of a pod of the job; nothing is created.\n\n"
        "The job is a manifest ('helm template NAME deploy/helm/epkit ... | epkit deploy check -f -'), or --gpus with "
        "--queue for one that requests only GPUs. kubectl reads the cluster with the rights of its user. Resources that "
        "the user may not read are listed and not checked. Messages of Kueue are those of version 0.15.\n\n"
        "With --prerequisites it also names what the cluster lacks for any job: --prerequisites alone can be called from "
        "the first command of docs/quickstart.md on, and again after each of its steps.\n\n"
        "'epkit deploy why JOB', after it was submitted: reads conditions and events of the JobSet, LeaderWorkerSet or "
        "Job, of its Workload, its pods and their nodes, and quotes what holds it up, first what explains most. It may "
        "be called at any time, and again until the job runs.",
    .options = deploy_table,
    .options_bytes = sizeof(struct deploy_options),
    .examples =
        {
            {"epkit deploy check --gpus 16 --queue a4", "Would 16 GPUs be admitted by queue a4?"},
            {"epkit deploy check -f job.yaml", "Check a rendered chart, or any JobSet, LeaderWorkerSet or Job."},
            {"epkit deploy check --prerequisites", "What does this cluster lack for 16 GPUs by queue a4?"},
            {"epkit deploy check -g 32 -q a4 --topology example.com/rack --required",
             "Is there a rack with room for four nodes?"},
            {"epkit deploy check --gpus 16 --save cluster.json", "Save the data read from the cluster."},
            {"epkit deploy check -f job.yaml --from cluster.json --json", "Check against the saved data, as JSON."},
            {"epkit deploy why my-job -n team", "What does the job wait for?"},
        },
    .exits =
        {
            {CMD_FINE, "check: no finding; why: the job runs, or is complete"},
            {CMD_FAILED, "the cluster does not answer, too little could be read of it, or a file could not be written"},
            {CMD_USAGE, "wrong usage, a file that cannot be used, or no such job"},
            {CMD_FINDINGS, "check: the cluster will refuse the job, or it has to wait; why: it is held up, or failed"},
            {CMD_UNSUPPORTED, "there is no kubectl"},
            {CMD_NOT_KNOWN, "why: the job does not run, and the cluster gives no reason"},
        },
    .run = cmd_deploy,
};
