/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_answers.c - refusals by the API server, from server-side dry runs of the objects of a job. They cover its
 * validation, admission plug-ins and webhooks, and store nothing.
 */
#include "deploy_check.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

/* Identifies the object of a dry run: an answer applies only to this object, not to another manifest. */
static void digest_of(const json_t *document, char ret_text[20])
{
    char *text = json_dumps(document, JSON_COMPACT | JSON_SORT_KEYS);
    uint64_t hash = 14695981039346656037u;

    for (const char *at = text; at && *at; at++)
        hash = (hash ^ (unsigned char)*at) * 1099511628211u;
    free(text);
    snprintf(ret_text, 20, "%016" PRIx64, hash);
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
    json_array_foreach(get(job->object, "spec/replicatedJobs"), i, replicated)
    {
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

    json_array_foreach(job->documents, i, document)
        add_dry_run(dry_runs, get_text(document, "kind"), get_name(document), false, json_incref((json_t *)document));
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
        {"usage per ", "kubectl get limitranges -o yaml, and set workload.resources within it"},
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

/* A finding predicted without the API server: compares only the text before the amounts or names. */
static json_t *known_finding(const struct check *check, const char *answer)
{
    json_t *finding;
    size_t i;

    json_array_foreach(check->findings, i, finding)
    {
        const char *says = get_text(finding, "says"), *end;
        char part[768];

        if (strcmp(get_text(finding, "by"), "the API server") != 0)
            continue;
        end = strstr(says, ", requested: ");
        end = end ? end : strstr(says, ": must specify ");
        CHECK_FORMAT(part, "%.*s", end ? (int)(end - says) : (int)strlen(says), says);
        if (strstr(answer, part) || strstr(part, reason_of(answer)))
            return finding;
    }
    return NULL;
}

/* The message that a controller gets from the API server. */
static void format_derived(const char *object, const char *answer, char *ret_text, size_t bytes)
{
    int at = 0;

    if (strncmp(object, "Job ", 4) == 0 && strstr(answer, " is invalid: "))
        at = snprintf(ret_text, bytes, "Job.batch \"%.250s\" is invalid: ", object + 4);
    else if (strncmp(object, "Pod ", 4) != 0)
        at = -1;
    if (at < 0)
        snprintf(ret_text, bytes, "%s", answer);
    else
        format_reason(answer, ret_text + at, bytes - (size_t)at);
}

/* A dry run creates nothing: the next one does not find the namespace or class that the manifest brings. */
static bool is_about_brought(const struct check *check, const char *answer)
{
    static const struct {
        const char *kind, *says, *end;
    } rows[] = {{"Namespace", "namespaces \"", "\" not found"},
                {"PriorityClass", "no PriorityClass with name ", " was found"}};
    char name[256];

    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        const char *begin = behind(answer, rows[i].says), *end = begin ? strstr(begin, rows[i].end) : NULL;

        if (!end || end - begin >= (ptrdiff_t)sizeof(name))
            continue;
        CHECK_FORMAT(name, "%.*s", (int)(end - begin), begin);
        if (check_brings(check, rows[i].kind, name))
            return true;
    }
    return false;
}

/* Adds a finding from an answer. True if the API server refuses the object. */
static bool add_answer(struct check *check, const json_t *dry_run, const char *answer)
{
    bool is_derived = json_is_true(get_key(dry_run, "derived"));
    const char *object = get_text(dry_run, "object");
    struct check_text text = {0};
    json_t *known;

    /* A controller has other rights than the user. */
    if (!*answer || (is_derived && strstr(answer, "is forbidden: User \"")) || is_about_brought(check, answer))
        return false;
    if (is_derived)
        format_derived(object, answer, text.says, sizeof(text.says));
    else
        CHECK_FORMAT(text.says, "%s", answer);
    known = known_finding(check, text.says);
    if (known) {
        /* The answer has all reasons, the prediction only one: replace it. */
        if (strlen(reason_of(text.says)) > strlen(reason_of(get_text(known, "says"))))
            json_object_set_new(known, "says", json_string(text.says));
        return true;
    }
    CHECK_FORMAT(text.why, "a dry run of %s%s is refused by the API server", object,
                 is_derived ? ", as a controller creates it," : "");
    CHECK_FORMAT(text.fix, "%s", fix_for(answer));
    check_add(check, CHECK_ERROR, "refused", "the API server", object, &text);
    return true;
}

/* Removes findings with the same message. */
static void drop_repeated(struct check *check)
{
    for (size_t i = 0; i < json_array_size(check->findings); i++)
        for (size_t k = json_array_size(check->findings); k-- > i + 1;) {
            const json_t *one = json_array_get(check->findings, i), *two = json_array_get(check->findings, k);

            if (strcmp(get_text(one, "says"), get_text(two, "says")) == 0 &&
                strcmp(get_text(one, "by"), "the API server") == 0 &&
                strcmp(get_text(two, "by"), "the API server") == 0)
                json_array_remove(check->findings, k);
        }
}

void check_answers(struct check *check, const struct deploy_job *job)
{
    const json_t *answers = get_key(check->snapshot, "answers"), *dry_run;
    json_t *dry_runs;
    bool has_job = true, is_held = false;
    char digest[20];
    size_t i;

    digest_of(job->object, digest);
    if (!get_key(answers, digest))
        check_resources(check, job);
    if (!json_is_object(answers))
        return;
    json_array_foreach(check->findings, i, dry_run) is_held |=
        strcmp(get_text(dry_run, "by"), "Kueue") == 0 && strcmp(get_text(dry_run, "severity"), "error") == 0;
    dry_runs = deploy_dry_runs(job);
    json_array_foreach(dry_runs, i, dry_run)
    {
        bool is_refused = false;

        /* A controller creates nothing for a refused job, and no pods for one that Kueue does not admit. */
        if (json_is_true(get_key(dry_run, "derived")) &&
            (!has_job || (is_held && strncmp(get_text(dry_run, "object"), "Pod ", 4) == 0)))
            continue;
        is_refused = add_answer(check, dry_run, get_text(answers, get_text(dry_run, "digest")));
        has_job = has_job && !(is_refused && json_equal(get_key(dry_run, "document"), job->object));
    }
    json_decref(dry_runs);
    drop_repeated(check);
}
