/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job_check.c - runs the checks of a job; refusals of the API server: from server-side dry runs of the objects of a
 * job, which cover its validation, admission plug-ins and webhooks and store nothing, and those that no dry run finds.
 */
#include "job_check.h"
#include "base/error.h"
#include "common/output.h"
#include "common/shell.h"

#include <inttypes.h>
#include <stdlib.h>

/* --- answers to dry runs --- */

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
    json_t *dry_runs = json_array(), *document, *labels;
    char name[512];

    FOR_JSON (given, job->documents)
        add_dry_run(dry_runs, get_text(given, "kind"), get_name(given), false, json_incref(given));
    /* The Jobs that the JobSet controller creates. A Job without labels gets those of its pods. */
    FOR_JSON (replicated, get(job->object, "spec/replicatedJobs")) {
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
    FOR_JSON (finding, check->findings) {
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
    char missing[512];

    FOR_JSON (document, check->job->documents) {
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

static void check_answers(struct check *check)
{
    json_t *dry_runs = deploy_dry_runs(check->job);
    bool has_job = true;

    FOR_JSON (dry_run, dry_runs) {
        const char *answer = get_text(get(check->snapshot, "answers"), get_text(dry_run, "digest"));

        /* A controller creates nothing for a refused job. */
        if (json_is_true(get(dry_run, "derived")) && !has_job)
            break;
        if (add_answer(check, dry_run, answer) && get(dry_run, "document") == check->job->object)
            has_job = false;
    }
    json_decref(dry_runs);
}

/* --- what the checks share --- */

const struct deploy_resource deploy_resources[] = {
    {"Namespace", "namespaces", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"Node", "nodes", DEPLOY_CHECK | DEPLOY_WHY | DEPLOY_GLOBAL},
    {"Pod", "pods", DEPLOY_CHECK | DEPLOY_CHECK_ALL | DEPLOY_WHY},
    {"ResourceQuota", "resourcequotas", DEPLOY_CHECK},
    {"NetworkPolicy", "networkpolicies.networking.k8s.io", DEPLOY_CHECK},
    {"Secret", "secrets", DEPLOY_CHECK | DEPLOY_NAMES},
    {"PersistentVolumeClaim", "persistentvolumeclaims", DEPLOY_CHECK},
    {"CSIDriver", "csidrivers.storage.k8s.io", DEPLOY_CHECK | DEPLOY_GLOBAL | DEPLOY_NAMES},
    {"DaemonSet", "daemonsets.apps", DEPLOY_CHECK | DEPLOY_CHECK_ALL | DEPLOY_NAMES},
    {"DeviceClass", "deviceclasses.resource.k8s.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"Network", "networks.networking.gke.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"GKENetworkParamSet", "gkenetworkparamsets.networking.gke.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"LocalQueue", "localqueues.kueue.x-k8s.io", DEPLOY_CHECK},
    {"ClusterQueue", "clusterqueues.kueue.x-k8s.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"ResourceFlavor", "resourceflavors.kueue.x-k8s.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"Topology", "topologies.kueue.x-k8s.io", DEPLOY_CHECK | DEPLOY_GLOBAL},
    {"JobSet", "jobsets.jobset.x-k8s.io", DEPLOY_WHY},
    {"LeaderWorkerSet", "leaderworkersets.leaderworkerset.x-k8s.io", DEPLOY_WHY},
    {"Job", "jobs.batch", DEPLOY_WHY},
    {"Workload", "workloads.kueue.x-k8s.io", DEPLOY_WHY},
    {"Event", "events", DEPLOY_WHY},
    {0},
};

ep_status deploy_snapshot_check(const json_t *snapshot)
{
    long long version = get_number(snapshot, "epkit_cluster", 0);

    if (version == 0)
        return ep_fail(EP_E_ARG, "it has no key epkit_cluster: --save FILE writes such a file");
    if (version != DEPLOY_SNAPSHOT_VERSION)
        return ep_fail(EP_E_ARG, "it is of version %lld, and this epkit reads version %d", version,
                       DEPLOY_SNAPSHOT_VERSION);
    if (!json_is_object(get(snapshot, "items")))
        return ep_fail(EP_E_ARG, "it has no objects (key items)");
    return EP_OK;
}

void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               json_t *says, json_t *why, json_t *fix)
{
    bool is_error = severity == CHECK_ERROR;
    size_t place = is_error ? check->n_errors++ : json_array_size(check->findings);

    /* A text of the cluster that is cut within a character is none. */
    json_array_insert_new(check->findings, place,
                          json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "id", id, "severity",
                                    is_error ? "error" : "warning", "by", by, "object", out_text(object), "says",
                                    says ?: json_string("?"), "why", why ?: json_string("?"), "fix",
                                    fix ?: json_string("?")));
}

bool check_knows(const struct check *check, const char *resource)
{
    return get_items(check->snapshot, resource) != NULL;
}

/* --- the API server --- */

static json_t *install_fix(const struct check *check, const char *version, const char *kind)
{
    size_t n = strcspn(version, "/");
    char word[SHELL_WORD_BYTES];

    FOR_JSON (served, get(check->snapshot, "groups"))
        if (version[n] == '/' && strncmp(get_string(served), version, n + 1) == 0)
            return json_sprintf("write apiVersion: %s, which it serves",
                                shell_quote(get_string(served), word, sizeof(word)));
    if (text_begins(version, "resource.k8s.io/"))
        return json_string("DRA needs Kubernetes 1.34: upgrade the cluster, or set network.mode=multi");
    return json_sprintf("install what defines %s: docs/quickstart.md", shell_quote(kind, word, sizeof(word)));
}

/* A kind that is not served: its project is not installed, or the cluster is too old. */
static void check_kind(struct check *check, const json_t *document)
{
    const char *version = get_text(document, "apiVersion"), *kind = get_text(document, "kind");
    const json_t *groups = get(check->snapshot, "groups");

    FOR_JSON (served, groups)
        if (strcmp(get_string(served), version) == 0)
            return;
    if (groups)
        check_add(check, CHECK_ERROR, "api-missing", "the API server", kind,
                  json_sprintf("no matches for kind \"%s\" in version \"%s\"", kind, version),
                  json_sprintf("the cluster (%s) does not serve %s", get_text(check->snapshot, "version"), version),
                  install_fix(check, version, kind));
}

/* The API server checks pod by pod: a dry run of one finds room where all of them have none. */
static void check_quota(struct check *check, const json_t *quota)
{
    static const char entry[] = "requests." GPU_RESOURCE;
    long long hard = get_count(json_object_get(get(quota, "spec/hard"), entry));
    long long used = get_count(json_object_get(get(quota, "status/used"), entry));
    char word[SHELL_WORD_BYTES];

    used = used > 0 ? used : 0;
    for (int s = 0; s < check->job->n_sets && hard >= 0; s++) {
        const struct deploy_set *set = &check->job->sets[s];
        long long each = get_pod_gpus(set->spec), room = hard > used ? hard - used : 0;
        long long fit = each > 0 ? room / each : set->count;

        if (fit >= set->count) {
            used += each * set->count;
            continue;
        }
        check_add(check, CHECK_ERROR, "namespace-quota", "the API server", get_name(quota),
                  json_sprintf("exceeded quota: %s, requested: %s=%lld, used: %s=%lld, limited: %s=%lld",
                               get_name(quota), entry, each, entry, used + fit * each, entry, hard),
                  json_sprintf("%lld of %lld pods fit into the ResourceQuota of namespace %s; a job with some of its "
                               "pods waits",
                               fit, set->count, check->job->space),
                  json_sprintf("raise %s of resourcequota/%s, or ask for fewer GPUs", entry,
                               shell_quote(get_name(quota), word, sizeof(word))));
        return;
    }
}

static void check_api(struct check *check)
{
    FOR_JSON (object, check->job->documents)
        check_kind(check, object);
    FOR_JSON (object, get_items(check->snapshot, "resourcequotas"))
        check_quota(check, object);
}

/* --- all checks --- */

/* The cluster after the objects of the manifest were created; a new reference. */
static json_t *apply_documents(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *items = json_copy(json_object_get(snapshot, "items")), *list;
    json_t *result = json_copy((json_t *)snapshot);
    char key[64];

    FOR_JSON (document, job->documents) {
        const struct deploy_resource *resource = deploy_resources;

        while (resource->kind && !get_is(document, "kind", resource->kind))
            resource++;
        if (!resource->kind || (*get_space(document) && strcmp(get_space(document), job->space) != 0))
            continue;
        snprintf(key, sizeof(key), "%.*s", (int)strcspn(resource->plural, "."), resource->plural);
        list = json_object_get(items, key);
        if (!json_is_array(list) || get_item(snapshot, key, job->space, get_name(document)))
            continue;
        list = json_copy(list);
        json_array_append(list, document);
        json_object_set_new(items, key, list);
    }
    json_object_set_new(result, "items", items);
    return result;
}

json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *applied = apply_documents(snapshot, job);
    struct check check = {.snapshot = applied, .job = job, .findings = json_array(), .gpus_used = json_object()};

    check_count_gpus(&check);
    check_api(&check);
    if (job->prerequisites)
        check_prerequisites(&check);
    check_pods(&check);
    if (job->queue)
        check_queue(&check);
    check_nodes(&check);
    check_site(&check);
    check_answers(&check);
    json_decref(check.gpus_used);
    json_decref(applied);
    return check.findings;
}
