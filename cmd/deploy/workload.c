/* SPDX-License-Identifier: Apache-2.0 */
/* workload.c - the job of a manifest: its documents as JSON, and the job among them. */
#include "base/error.h"
#include "common/text.h"
#include "common/yaml.h"
#include "get.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>

/* --- documents: the type of a plain scalar follows from its text, as kubectl sees it --- */

static json_t *scalar_value(const struct yaml_node *node)
{
    const char *text = node->text;
    char *end;
    long long whole;
    double real;

    if (!node->plain)
        return json_string(text);
    if (text_is_any(text, TEXTS("", "~", "null", "Null", "NULL")))
        return json_null();
    if (text_is_any(text, TEXTS("true", "True", "TRUE", "false", "False", "FALSE")))
        return json_boolean(tolower((unsigned char)*text) == 't');
    if (isdigit((unsigned char)text[0]) || strchr("+-.", text[0])) {
        errno = 0;
        whole = strtoll(text, &end, text[0] == '0' && isdigit((unsigned char)text[1]) ? 8 : 10);
        if (errno == 0 && *end == '\0' && end != text)
            return json_integer(whole);
        real = strtod(text, &end);
        if (*end == '\0' && end != text && isfinite(real) && !strpbrk(text, "xXpPnN"))
            return json_real(real);
    }
    return json_string(text);
}

/* A new reference. */
static json_t *node_value(const struct yaml_node *node)
{
    json_t *value = node->kind == YAML_MAP    ? json_object()
                    : node->kind == YAML_LIST ? json_array()
                                              : scalar_value(node);

    for (size_t i = 0; i < node->n; i++) {
        json_t *item = node_value(&node->items[i]);

        if (node->kind == YAML_MAP)
            json_object_set_new(value, node->keys[i], item);
        else
            json_array_append_new(value, item);
    }
    return value;
}

/* A list counts as the documents in it; empty documents are left out. Consumes `value`. */
static void add_document(json_t *documents, json_t *value)
{
    json_t *items = json_object_get(value, "items");
    const char *kind = json_string_value(json_object_get(value, "kind"));

    if (json_is_array(items) && kind && strcmp(kind, "List") == 0) {
        FOR_JSON (item, items)
            if (json_is_object(item))
                json_array_append(documents, item);
    } else if (!json_is_null(value)) {
        json_array_append(documents, value);
    }
    json_decref(value);
}

ep_status deploy_manifest_parse(const char *name, const char *text, size_t bytes, json_t **ret_documents)
{
    static const struct yaml_limits limits = {
        .what = "manifest", .bytes_max = DEPLOY_MANIFEST_MAX, .depth_max = 64, .nodes_max = 50000, .many = true};
    json_t *documents = json_array();
    struct yaml_node *tree = NULL;
    ep_status status = tree_parse(name, text, bytes, &limits, &tree);

    for (size_t i = 0; status == EP_OK && i < tree->n; i++) {
        json_t *value = node_value(&tree->items[i]);

        if (!json_is_object(value) && !json_is_null(value))
            status = ep_fail(EP_E_ARG, "%s:%d: a document is not an object", name, tree->items[i].line);
        add_document(documents, value);
    }
    tree_free(tree);
    if (status != EP_OK) {
        json_decref(documents);
        return status;
    }
    *ret_documents = documents;
    return EP_OK;
}

/* --- the job --- */

#define QUEUE_LABEL "kueue.x-k8s.io/queue-name"
#define PODS_MAX 1000000

/* A set that is left out would not be checked: `too_large` refuses the job. */
static void add_set(struct deploy_job *job, const char *name, const json_t *template, long long count)
{
    if (count < 1)
        return;
    if (job->n_sets == DEPLOY_SETS_MAX) {
        job->too_large = true;
        return;
    }
    job->sets[job->n_sets++] = (struct deploy_set){.name = name,
                                                   .metadata = get(template, "metadata"),
                                                   .spec = get(template, "spec"),
                                                   .count = count < PODS_MAX ? count : PODS_MAX};
    job->pods += job->sets[job->n_sets - 1].count;
}

/* Pods of a Job that run at the same time: no more than have to complete. */
static long long count_pods(const json_t *spec)
{
    long long pods = get_number(spec, "parallelism", 1), completions = get_number(spec, "completions", pods);

    return completions < pods ? completions : pods;
}

static void read_jobset(struct deploy_job *job)
{
    FOR_JSON (replicated, get(job->object, "spec/replicatedJobs")) {
        const json_t *spec = get(replicated, "template/spec");
        long long replicas = get_number(replicated, "replicas", 1), pods = count_pods(spec);

        job->too_large |= replicas > PODS_MAX || pods > PODS_MAX;
        if (replicas > PODS_MAX || pods > PODS_MAX || replicas < 0 || pods < 0)
            continue;
        add_set(job, get_text(replicated, "name"), get(spec, "template"), replicas * pods);
    }
}

/* A group is a leader, if it has its own template, and workers; `replicas` is the number of groups. */
static void read_leaderworkerset(struct deploy_job *job)
{
    const json_t *spec = get(job->object, "spec/leaderWorkerTemplate");
    const json_t *leader = get(spec, "leaderTemplate"), *worker = get(spec, "workerTemplate");
    long long size = get_number(spec, "size", 1), groups = get_number(job->object, "spec/replicas", 1);

    job->too_large |= groups > PODS_MAX || size > PODS_MAX || (groups > 0 && size > PODS_MAX / groups);
    if (job->too_large || groups < 1)
        return;
    job->groups = groups;

    if (leader)
        add_set(job, "leader", leader, groups);
    add_set(job, leader ? "worker" : "main", worker, groups * (leader ? size - 1 : size));
}

const char *deploy_variable(const struct deploy_job *job, const char *name)
{
    const json_t *variable;

    for (int s = 0; s < job->n_sets; s++)
        FOR_JSON (container, get(job->sets[s].spec, "containers")) {
            variable = get_entry(get(container, "env"), "name", name);
            if (variable)
                return get_text(variable, "value");
        }
    return "";
}

ep_status deploy_job_find(const json_t *documents, const char *space, struct deploy_job *ret_job)
{
    struct deploy_job job = {.documents = documents, .groups = 1};

    FOR_JSON (document, documents) {
        const char *kind = get_text(document, "kind");

        if (!text_is_any(kind, TEXTS("JobSet", "LeaderWorkerSet", "Job")))
            continue;
        if (job.object)
            return ep_fail(EP_E_ARG, "the manifest has more than one job: %s %.100s and %s %.100s", job.kind,
                           get_name(job.object), kind, get_name(document));
        job.object = document;
        job.kind = kind;
    }
    if (!job.object)
        return ep_fail(EP_E_ARG, "the manifest has no JobSet, no LeaderWorkerSet and no Job");
    job.name = get_name(job.object);
    job.space = *get_space(job.object) ? get_space(job.object) : space;
    job.queue = *get_label(job.object, QUEUE_LABEL) ? get_label(job.object, QUEUE_LABEL) : NULL;
    if (strcmp(job.kind, "JobSet") == 0)
        read_jobset(&job);
    else if (strcmp(job.kind, "LeaderWorkerSet") == 0)
        read_leaderworkerset(&job);
    else
        add_set(&job, "main", get(job.object, "spec/template"), count_pods(get(job.object, "spec")));
    if (job.too_large)
        return ep_fail(EP_E_ARG, "%s %.100s has more than %d groups of pods, or more than %d pods in one", job.kind,
                       job.name, DEPLOY_SETS_MAX, PODS_MAX);
    if (job.n_sets == 0)
        return ep_fail(EP_E_ARG, "%s %.100s has no pods", job.kind, job.name);
    *ret_job = job;
    return EP_OK;
}

json_t *deploy_job_make(const char *space, const char *queue, long long gpus, const char *topology, bool required,
                        bool bucket)
{
    static const char chart[] =
        "{s:s, s:s, s:{s:s, s:s, s:{s:s*}}, s:{s:[{s:s, s:{s:{s:I, s:I, s:{s:{s:{s:s*}}, s:{s:[{s:s, s:s}], s:o*, s:[{s:s, "
        "s:{s:{s:I}}}]}}}}}]}}";
    json_t *volumes = bucket ? json_pack("[{s:s, s:{s:s, s:{s:s}}}]", "name", "gcs-0", "csi", "driver",
                                         "gcsfuse.csi.storage.gke.io", "volumeAttributes", "bucketName", "bucket")
                             : NULL;
    json_int_t nodes = gpus > 8 ? gpus / 8 : 1, each = gpus < 8 ? gpus : 8;
    const char *level = required ? TOPOLOGY_REQUIRED : TOPOLOGY_PREFERRED;

    return json_pack("[o]",
                     json_pack(chart, "apiVersion", "jobset.x-k8s.io/v1alpha2", "kind", "JobSet", "metadata", "name",
                               "epkit", "namespace", space, "labels", QUEUE_LABEL, queue, "spec", "replicatedJobs",
                               "name", "workload", "template", "spec", "parallelism", nodes, "completions", nodes,
                               "template", "metadata", "annotations", level, topology, "spec", "tolerations", "key",
                               GPU_RESOURCE, "operator", "Exists", "volumes", volumes, "containers", "name", "workload",
                               "resources", "limits", GPU_RESOURCE, each));
}
