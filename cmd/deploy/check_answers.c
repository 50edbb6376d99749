/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_answers.c - refusals by the API server, from server-side dry runs of the objects of a job. They cover its
 * validation, admission plug-ins and webhooks, and store nothing.
 */
#include "check.h"

#include "common/output.h"

#include <inttypes.h>
#include <stdlib.h>

/* The digest identifies the object: an answer applies only to this object, not to another manifest. */
static void add_dry_run(json_t *dry_runs, const char *kind, const char *name, bool is_derived, json_t *document)
{
    char *text = json_dumps(document, JSON_COMPACT | JSON_SORT_KEYS), digest[20];

    if (text) {
        snprintf(digest, sizeof(digest), "%016" PRIx64, text_hash(text, strlen(text)));
        json_array_append_new(dry_runs, json_pack("{s:o, s:s, s:b, s:O}", "object", json_sprintf("%s %s", kind, name),
                                                  "digest", digest, "derived", is_derived, "document", document));
    }
    free(text);
    json_decref(document);
}

json_t *deploy_dry_runs(const struct deploy_job *job)
{
    const json_t *replicated;
    json_t *dry_runs = json_array(), *document, *labels;
    char name[512];
    size_t i;

    json_array_foreach (job->documents, i, document)
        add_dry_run(dry_runs, get_text(document, "kind"), get_name(document), false, json_incref(document));
    /* The Jobs that the JobSet controller creates. A Job without labels gets those of its pods. */
    json_array_foreach (get(job->object, "spec/replicatedJobs"), i, replicated) {
        snprintf(name, sizeof(name), "%.120s-%.120s-0", job->name, get_text(replicated, "name"));
        labels = json_deep_copy(get(replicated, "template/metadata/labels")) ?: json_object();
        json_object_set_new(labels, "jobset.sigs.k8s.io/jobset-name", json_string(job->name));
        document = json_pack("{s:s, s:s, s:{s:s, s:s, s:o}, s:O?}", "apiVersion", "batch/v1", "kind", "Job", "metadata",
                             "name", name, "namespace", job->space, "labels", labels, "spec",
                             get(replicated, "template/spec"));
        add_dry_run(dry_runs, "Job", name, true, document);
    }
    /* One pod of each set, as a controller creates it: the API server generates its name. */
    for (int s = 0; s < job->n_sets; s++) {
        const json_t *metadata = job->sets[s].metadata;

        snprintf(name, sizeof(name), "%.120s-%.120s-", job->name, job->sets[s].name);
        document =
            json_pack("{s:s, s:s, s:{s:s, s:s, s:O*, s:O*}, s:O?}", "apiVersion", "v1", "kind", "Pod", "metadata",
                      "generateName", name, "namespace", job->space, "labels", get(metadata, "labels"), "annotations",
                      get(metadata, "annotations"), "spec", job->sets[s].spec);
        add_dry_run(dry_runs, "Pod", name, true, document);
    }
    return dry_runs;
}

/* --- findings --- */

/*
 * The reason alone: names of pods are generated anew each time. kubectl prints several causes as lines that start with
 * "* "; a controller prints the list of the API server.
 */
static json_t *reason_of(const char *answer)
{
    static const char *const heads[] = {" is forbidden: ", " is invalid: "};
    char bytes[2048];
    struct text text = text_in(bytes, sizeof(bytes));
    const char *reason = answer;
    bool is_list;

    for (size_t i = 0; i < COUNT(heads) && reason == answer; i++)
        if (strstr(answer, heads[i]))
            reason = strstr(answer, heads[i]) + strlen(heads[i]);
    reason += strspn(reason, " \n");
    is_list = text_begins(reason, "* ");
    text_add(&text, "%s", is_list ? "[" : "");
    while (*reason) {
        struct piece line = text_take(&reason, "\n");
        int mark = is_list && line.n > 1 && text_begins(line.text, "* ") ? 2 : 0;

        text_add(&text, "%.*s%s", (int)line.n - mark, line.text + mark, *reason ? ", " : "");
    }
    text_add(&text, "%s", is_list ? "]" : "");
    return out_text(*bytes ? bytes : answer);
}

static const char *fix_for(const char *answer)
{
    static const char *const rows[][2] = {
        {"is forbidden: User \"",
         "ask for the right: kubectl create role, with the verbs create, get, list and delete"},
        {"violates PodSecurity",
         "kubectl label --overwrite namespace NAMESPACE pod-security.kubernetes.io/enforce=privileged"},
        {"must specify",
         "set workload.resources.requests and limits, or give the namespace a LimitRange with defaults"},
        {"usage per ", "kubectl get limitranges -o yaml, and set workload.resources within it"},
        {"already exists", "helm list -A: use another release name, or remove the existing object"},
    };

    for (size_t i = 0; i < COUNT(rows); i++)
        if (strstr(answer, rows[i][0]))
            return rows[i][1];
    return "correct what it names, or ask the administrator of the cluster";
}

/* Is there a finding with the same message of the API server? Amounts after "requested" may differ. */
static bool is_known(const struct check *check, const char *says)
{
    const json_t *finding;
    size_t i;

    json_array_foreach (check->findings, i, finding) {
        const char *known = get_text(finding, "says"), *end = strstr(known, ", requested: ");
        size_t n = end ? (size_t)(end - known) : strlen(known);

        if (get_is(finding, "by", "the API server") && (memmem(says, strlen(says), known, n) || strstr(known, says)))
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
        bool is_class = get_is(document, "kind", "PriorityClass");

        snprintf(missing, sizeof(missing),
                 is_class ? "no PriorityClass with name %.253s was found" : "namespaces \"%.253s\" not found",
                 get_name(document));
        if ((is_class || get_is(document, "kind", "Namespace")) && strstr(answer, missing))
            return true;
    }
    return false;
}

/* Adds a finding from an answer. True if the API server refuses the object. */
static bool add_answer(struct check *check, const json_t *dry_run, const char *answer)
{
    bool is_derived = json_is_true(get(dry_run, "derived")), is_right = strstr(answer, "is forbidden: User \"");
    const char *object = get_text(dry_run, "object");
    json_t *says;

    /* A controller has other rights than the user. */
    if (!*answer || (is_derived && is_right) || is_about_brought(check, answer))
        return false;
    says = is_derived ? reason_of(answer) : json_string(answer);
    if (is_known(check, get_string(says)))
        json_decref(says);
    else
        check_add(check, CHECK_ERROR, is_right ? "forbidden" : "refused", "the API server", object, says,
                  json_sprintf("a dry run of %s%s is refused by the API server", object,
                               is_derived ? ", as a controller creates it," : ""),
                  json_string(fix_for(answer)));
    return true;
}

void check_answers(struct check *check)
{
    json_t *dry_runs = deploy_dry_runs(check->job), *dry_run;
    bool has_job = true;
    size_t i;

    json_array_foreach (dry_runs, i, dry_run) {
        const char *answer = get_text(get(check->snapshot, "answers"), get_text(dry_run, "digest"));

        /* A controller creates nothing for a refused job. */
        if (json_is_true(get(dry_run, "derived")) && !has_job)
            break;
        if (add_answer(check, dry_run, answer) && get(dry_run, "document") == check->job->object)
            has_job = false;
    }
    json_decref(dry_runs);
}
