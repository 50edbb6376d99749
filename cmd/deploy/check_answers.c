/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_answers.c - refusals by the API server, from server-side dry runs of the objects of a job. They cover its
 * validation, admission plug-ins and webhooks, and store nothing.
 */
#include "check.h"

#include "common/text.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* Identifies the object of a dry run: an answer applies only to this object, not to another manifest. */
static void digest_of(const json_t *document, char ret_text[20])
{
    char *text = json_dumps(document, JSON_COMPACT | JSON_SORT_KEYS);

    snprintf(ret_text, 20, "%016" PRIx64, text_hash(text ? text : "", text ? strlen(text) : 0));
    free(text);
}

static void add_dry_run(json_t *dry_runs, const char *kind, const char *name, bool is_derived, json_t *document)
{
    char digest[20], object[320];

    if (!document)
        return;
    digest_of(document, digest);
    snprintf(object, sizeof(object), "%.60s %.250s", kind, name);
    json_array_append_new(dry_runs, json_pack("{s:s, s:s, s:b, s:o}", "object", object, "digest", digest, "derived",
                                              is_derived, "document", document));
}

/* The Jobs that the JobSet controller creates. */
static void add_jobs(json_t *dry_runs, const struct deploy_job *job)
{
    const json_t *replicated;
    char name[256];
    size_t i;

    if (strcmp(job->kind, "JobSet") != 0)
        return;
    json_array_foreach (get(job->object, "spec/replicatedJobs"), i, replicated) {
        json_t *labels = json_deep_copy(get(replicated, "template/metadata/labels")) ?: json_object();

        snprintf(name, sizeof(name), "%.120s-%.120s-0", job->name, get_text(replicated, "name"));
        /* A Job without labels gets those of its pods. */
        json_object_set_new(labels, "jobset.sigs.k8s.io/jobset-name", json_string(job->name));
        add_dry_run(dry_runs, "Job", name, true,
                    json_pack("{s:s, s:s, s:{s:s, s:s, s:o}, s:O?}", "apiVersion", "batch/v1", "kind", "Job",
                              "metadata", "name", name, "namespace", job->space, "labels", labels, "spec",
                              get(replicated, "template/spec")));
    }
}

/* One pod of each set, as a controller creates it: the API server generates its name. */
static void add_pods(json_t *dry_runs, const struct deploy_job *job)
{
    char name[256];

    for (int s = 0; s < job->n_sets; s++) {
        const struct deploy_set *set = &job->sets[s];
        const json_t *labels = get_key(set->metadata, "labels"), *annotations = get_key(set->metadata, "annotations");

        snprintf(name, sizeof(name), "%.120s-%.120s-", job->name, set->name);
        add_dry_run(dry_runs, "Pod", name, true,
                    json_pack("{s:s, s:s, s:{s:s, s:s, s:O*, s:O*}, s:O?}", "apiVersion", "v1", "kind", "Pod",
                              "metadata", "generateName", name, "namespace", job->space, "labels", labels,
                              "annotations", annotations, "spec", set->spec));
    }
}

json_t *deploy_dry_runs(const struct deploy_job *job)
{
    json_t *dry_runs = json_array();
    const json_t *document;
    size_t i;

    json_array_foreach (job->documents, i, document) {
        add_dry_run(dry_runs, get_text(document, "kind"), get_name(document), false, json_incref((json_t *)document));
    }
    add_jobs(dry_runs, job);
    add_pods(dry_runs, job);
    return dry_runs;
}

/* --- messages of kubectl --- */

static const char *behind(const char *text, const char *what)
{
    const char *at = strstr(text, what);

    return at ? at + strlen(what) : NULL;
}

/* Skips "error when creating "FILE": ", which names kubectl's file and not the object. */
static const char *skip_file(const char *text)
{
    const char *end = strncmp(text, "error when creating \"", 21) == 0 ? behind(text + 21, "\": ") : NULL;

    return end ? end : text;
}

bool deploy_refusal(const char *error, char *ret_text, size_t bytes)
{
    /* Errors that do not concern the object. */
    static const char *const others[] = {
        "does not support dry run", "(Timeout)", "(ServerTimeout)", "(ServiceUnavailable)", "(TooManyRequests)",
        "(Unauthorized)",           NULL};
    const char *text;
    size_t n;

    while (strncmp(error, "Warning: ", 9) == 0 && strchr(error, '\n'))
        error = strchr(error, '\n') + 1;
    for (size_t i = 0; others[i]; i++)
        if (strstr(error, others[i]))
            return false;
    if (strncmp(error, "Error from server", 17) == 0) {
        text = behind(error, ": ");
        text = text ? skip_file(text) : NULL;
    } else if (strncmp(error, "The ", 4) == 0 && strstr(error, " is invalid: ")) {
        text = error;
    } else {
        text = strstr(error, "no matches for kind ");
    }
    if (!text)
        return false;
    n = strlen(text);
    while (n > 0 && text[n - 1] == '\n')
        n--;
    snprintf(ret_text, bytes, "%.*s", (int)(n < bytes ? n : bytes - 1), text);
    return *ret_text != '\0';
}

/* --- findings --- */

/* The name of the refused object is not part of the reason: pod names are generated anew each time. */
static const char *reason_of(const char *text)
{
    const char *reason = behind(text, " is forbidden: ");

    if (!reason)
        reason = behind(text, " is invalid: ");
    reason = reason ? reason : text;
    return reason + strspn(reason, " \n");
}

/* kubectl prints several causes as lines that start with "* "; a controller prints the list of the API server. */
static void format_reason(const char *text, char *ret_text, size_t bytes)
{
    const char *reason = reason_of(text);
    bool is_list = strncmp(reason, "* ", 2) == 0;
    size_t at = (size_t)snprintf(ret_text, bytes, "%s", is_list ? "[" : "");

    for (const char *line = reason; line && at + 1 < bytes; line = strchr(line, '\n')) {
        line += *line == '\n';
        line += is_list && strncmp(line, "* ", 2) == 0 ? 2 : 0;
        at += (size_t)snprintf(ret_text + at, bytes - at, "%s%.*s", at > 1 ? ", " : "", (int)strcspn(line, "\n"), line);
    }
    if (is_list && at + 1 < bytes)
        snprintf(ret_text + at, bytes - at, "]");
}

static const char *fix_for(const char *text)
{
    static const struct {
        const char *part, *fix;
    } rows[] = {
        {"violates PodSecurity",
         "kubectl label --overwrite namespace NAMESPACE pod-security.kubernetes.io/enforce=privileged"},
        {"exceeded quota", "kubectl get resourcequotas: raise it, or remove what uses it"},
        {"must specify",
         "set workload.resources.requests and limits, or give the namespace a LimitRange with defaults"},
        {"usage per ", "kubectl get limitranges -o yaml, and set workload.resources within it"},
        {"service account", "kubectl create serviceaccount, in the namespace of the job"},
        {"PriorityClass", "kubectl get priorityclasses, and set workload.priorityClassName to one of them"},
        {"being terminated", "wait until the namespace is deleted, or use another one"},
        {"already exists", "helm list -A: use another release name, or remove the existing object"},
        {"RuntimeClass", "kubectl get runtimeclasses"},
        {"admission webhook", "it is a rule of this cluster: ask its administrator"},
        {"failed calling webhook", "the controller behind it does not answer: kubectl get pods -A"},
        {"is invalid", "correct the value that it names"},
    };

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++)
        if (strstr(text, rows[i].part))
            return rows[i].fix;
    return "correct what it names";
}

/* A finding with the same message of the API server; amounts after "requested" may differ. */
static bool is_known(const struct check *check, const char *says)
{
    const json_t *finding;
    size_t i;

    json_array_foreach (check->findings, i, finding) {
        const char *known = get_text(finding, "says"), *end = strstr(known, ", requested: ");
        size_t n = end ? (size_t)(end - known) : strlen(known);
        char part[sizeof(((struct check_text *)0)->says)];

        CHECK_FORMAT(part, "%.*s", (int)n, known);
        if (strcmp(get_text(finding, "by"), "the API server") == 0 && (strstr(says, part) || strstr(known, says)))
            return true;
    }
    return false;
}

/* A dry run creates nothing: the next one does not find the namespace or class that the manifest brings. */
static bool is_about_brought(const struct check *check, const char *answer)
{
    const json_t *document;
    char missing[512];
    size_t i;

    json_array_foreach (check->job->documents, i, document) {
        bool is_class = strcmp(get_text(document, "kind"), "PriorityClass") == 0;

        CHECK_FORMAT(missing,
                     is_class ? "no PriorityClass with name %.253s was found" : "namespaces \"%.253s\" not found",
                     get_name(document));
        if ((is_class || strcmp(get_text(document, "kind"), "Namespace") == 0) && strstr(answer, missing))
            return true;
    }
    return false;
}

/* Adds a finding from an answer. True if the API server refuses the object. */
static bool add_answer(struct check *check, const json_t *dry_run, const char *answer)
{
    bool is_derived = json_is_true(get_key(dry_run, "derived"));
    const char *object = get_text(dry_run, "object");
    struct check_text text;

    /* A controller has other rights than the user. */
    if (!*answer || (is_derived && strstr(answer, "is forbidden: User \"")) || is_about_brought(check, answer))
        return false;
    if (is_derived)
        format_reason(answer, text.says, sizeof(text.says));
    else
        CHECK_FORMAT(text.says, "%s", answer);
    if (is_known(check, text.says))
        return true;
    CHECK_FORMAT(text.why, "a dry run of %s%s is refused by the API server", object,
                 is_derived ? ", as a controller creates it," : "");
    CHECK_FORMAT(text.fix, "%s", fix_for(answer));
    check_add(check, CHECK_ERROR, "refused", "the API server", object, &text);
    return true;
}

void check_answers(struct check *check)
{
    const json_t *answers = get_key(check->snapshot, "answers"), *dry_run;
    json_t *dry_runs = deploy_dry_runs(check->job);
    bool has_job = true;
    size_t i;

    json_array_foreach (dry_runs, i, dry_run) {
        /* A controller creates nothing for a refused job. */
        if (json_is_true(get_key(dry_run, "derived")) && !has_job)
            break;
        if (add_answer(check, dry_run, get_text(answers, get_text(dry_run, "digest"))) &&
            json_equal(get_key(dry_run, "document"), check->job->object))
            has_job = false;
    }
    json_decref(dry_runs);
}
