/* SPDX-License-Identifier: Apache-2.0 */
/* check.c - runs the checks of a job; refusals of the API server that no dry run finds, or that hold without one. */
#include "check.h"

#include "base/error.h"
#include "common/output.h"
#include "common/shell.h"

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
    json_t *finding =
        json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "id", id, "severity", is_error ? "error" : "warning", "by", by,
                  "object", out_text(object), "says", says, "why", why, "fix", fix);
    size_t place = is_error ? check->n_errors++ : json_array_size(check->findings);

    if (!finding || json_array_insert_new(check->findings, place, finding) != 0)
        check->no_memory = true;
}

bool check_knows(const struct check *check, const char *resource)
{
    return get_items(check->snapshot, resource) != NULL;
}

/* --- the API server --- */

static json_t *install_fix(const struct check *check, const char *version, const char *kind)
{
    size_t i, n = strcspn(version, "/");
    char word[SHELL_WORD_BYTES];
    const json_t *served;

    json_array_foreach (get(check->snapshot, "groups"), i, served) {
        if (version[n] == '/' && strncmp(get_string(served), version, n + 1) == 0)
            return json_sprintf("write apiVersion: %s, which it serves",
                                shell_quote(get_string(served), word, sizeof(word)));
    }
    if (text_begins(version, "resource.k8s.io/"))
        return json_string("DRA needs Kubernetes 1.34: upgrade the cluster, or set network.mode=multi");
    return json_sprintf("install what defines %s: docs/quickstart.md", shell_quote(kind, word, sizeof(word)));
}

/* A kind that is not served: its project is not installed, or the cluster is too old. */
static void check_kind(struct check *check, const json_t *document)
{
    const char *version = get_text(document, "apiVersion"), *kind = get_text(document, "kind");
    const json_t *groups = get(check->snapshot, "groups"), *served;
    size_t i;

    json_array_foreach (groups, i, served) {
        if (strcmp(get_string(served), version) == 0)
            return;
    }
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
    const json_t *object;
    size_t i;

    json_array_foreach (check->job->documents, i, object)
        check_kind(check, object);
    json_array_foreach (get_items(check->snapshot, "resourcequotas"), i, object)
        check_quota(check, object);
}

/* --- all checks --- */

/* The cluster after the objects of the manifest were created; a new reference. NULL: out of memory. */
static json_t *apply_documents(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *items = json_copy(json_object_get(snapshot, "items")), *list, *document;
    json_t *result = json_copy((json_t *)snapshot);
    char key[64];
    size_t i;

    json_array_foreach (job->documents, i, document) {
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
    if (json_object_set_new(result, "items", items) == 0)
        return result;
    json_decref(result);
    return NULL;
}

json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *applied = apply_documents(snapshot, job);
    struct check check = {.snapshot = applied, .job = job, .findings = json_array(), .gpus_used = json_object()};

    if (applied && check.findings && check.gpus_used) {
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
    } else {
        check.no_memory = true;
    }
    json_decref(check.gpus_used);
    json_decref(applied);
    if (check.no_memory) {
        json_decref(check.findings);
        return NULL;
    }
    return check.findings;
}
