/* SPDX-License-Identifier: Apache-2.0 */
/* deploy_check.c - runs the checks of a job; functions shared by them. */
#include "deploy_check.h"

#include "base/error.h"

#include <stdio.h>

const struct deploy_resource deploy_resources[] = {
    {"namespaces", "namespaces", "", DEPLOY_CLUSTER, false},
    {"nodes", "nodes", "", DEPLOY_CLUSTER, false},
    {"pods", "pods", "", DEPLOY_EVERYWHERE, false},
    {"resourcequotas", "resourcequotas", "", DEPLOY_NAMESPACE, false},
    {"limitranges", "limitranges", "", DEPLOY_NAMESPACE, false},
    {"networkpolicies", "networkpolicies.networking.k8s.io", "", DEPLOY_NAMESPACE, false},
    {"serviceaccounts", "serviceaccounts", "", DEPLOY_NAMESPACE, false},
    {"secrets", "secrets", "", DEPLOY_NAMESPACE, true},
    {"persistentvolumeclaims", "persistentvolumeclaims", "", DEPLOY_NAMESPACE, false},
    {"configmaps", "configmaps", "", DEPLOY_NAMESPACE, true},
    {"storageclasses", "storageclasses.storage.k8s.io", "", DEPLOY_CLUSTER, false},
    {"resourceclaimtemplates", "resourceclaimtemplates.resource.k8s.io", "resource.k8s.io", DEPLOY_NAMESPACE, true},
    {"priorityclasses", "priorityclasses.scheduling.k8s.io", "", DEPLOY_CLUSTER, true},
    {"csidrivers", "csidrivers.storage.k8s.io", "", DEPLOY_CLUSTER, true},
    {"daemonsets", "daemonsets.apps", "", DEPLOY_EVERYWHERE, true},
    {"deviceclasses", "deviceclasses.resource.k8s.io", "resource.k8s.io", DEPLOY_CLUSTER, false},
    {"networks", "networks.networking.gke.io", "networking.gke.io", DEPLOY_CLUSTER, false},
    {"jobsets", "jobsets.jobset.x-k8s.io", "jobset.x-k8s.io", DEPLOY_NAMESPACE, true},
    {"leaderworkersets", "leaderworkersets.leaderworkerset.x-k8s.io", "leaderworkerset.x-k8s.io", DEPLOY_NAMESPACE,
     true},
    {"localqueues", "localqueues.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_NAMESPACE, false},
    {"clusterqueues", "clusterqueues.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
    {"resourceflavors", "resourceflavors.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
    {"cohorts", "cohorts.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
    {"workloadpriorityclasses", "workloadpriorityclasses.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, true},
    {"workloads", "workloads.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_EVERYWHERE, false},
    {"topologies", "topologies.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
    {0},
};

static const struct {
    const char *kind, *plural;
} plurals[] = {
    {"JobSet", "jobsets.jobset.x-k8s.io"},
    {"LeaderWorkerSet", "leaderworkersets.leaderworkerset.x-k8s.io"},
    {"Job", "jobs.batch"},
    {"ConfigMap", "configmaps"},
    {"Secret", "secrets"},
    {"PersistentVolume", "persistentvolumes"},
    {"PersistentVolumeClaim", "persistentvolumeclaims"},
    {"NetworkPolicy", "networkpolicies.networking.k8s.io"},
    {"ResourceClaimTemplate", "resourceclaimtemplates.resource.k8s.io"},
};

const char *deploy_plural(const char *kind)
{
    for (size_t i = 0; i < sizeof(plurals) / sizeof(plurals[0]); i++)
        if (strcmp(plurals[i].kind, kind) == 0)
            return plurals[i].plural;
    return "";
}

ep_status deploy_snapshot_check(const json_t *snapshot)
{
    if (get_number(snapshot, "epkit_cluster", 0) == 0)
        return ep_fail(EP_E_ARG, "it has no key epkit_cluster: 'epkit deploy check --save FILE' writes such a file");
    if (get_number(snapshot, "epkit_cluster", 0) != DEPLOY_SNAPSHOT_VERSION)
        return ep_fail(EP_E_ARG, "it is of version %lld, and this epkit reads version %d",
                       get_number(snapshot, "epkit_cluster", 0), DEPLOY_SNAPSHOT_VERSION);
    if (!json_is_object(get_key(snapshot, "items")))
        return ep_fail(EP_E_ARG, "it has no objects (key items)");
    return EP_OK;
}

void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               const struct check_text *text)
{
    /* "s+%": names are untrusted, and a truncated text may end inside a character. */
    json_t *finding = json_pack("{s:s, s:s, s:s, s:s}", "id", id, "severity",
                                severity == CHECK_ERROR ? "error" : "warning", "by", by, "object", object);
    const struct {
        const char *key, *text;
    } texts[] = {{"says", text->says}, {"why", text->why}, {"fix", text->fix}};

    for (size_t i = 0; finding && i < sizeof(texts) / sizeof(texts[0]); i++) {
        json_t *string = NULL;

        for (size_t n = strlen(texts[i].text); !string && n + 4 > strlen(texts[i].text); n--)
            string = json_stringn(texts[i].text, n);
        json_object_set_new(finding, texts[i].key, string ? string : json_string(""));
    }
    if (!finding || json_array_append_new(check->findings, finding) != 0)
        check->no_memory = true;
}

bool check_knows(const struct check *check, const char *resource)
{
    return get_items(check->snapshot, resource) != NULL;
}

bool check_serves(const struct check *check, const char *group, const char *version)
{
    const json_t *groups = get_key(check->snapshot, "groups"), *served;
    size_t i, n = strlen(group);

    json_array_foreach(groups, i, served)
    {
        const char *text = json_is_string(served) ? json_string_value(served) : "";

        if (strncmp(text, group, n) == 0 && text[n] == '/' && (!version || strcmp(text + n + 1, version) == 0))
            return true;
    }
    return false;
}

bool check_brings(const struct check *check, const char *kind, const char *name)
{
    const json_t *document;
    size_t i;

    json_array_foreach(check->job->documents, i, document) if (strcmp(get_text(document, "kind"), kind) == 0 &&
                                                               strcmp(get_name(document), name) == 0) return true;
    return false;
}

/* Kinds whose objects are there as soon as the manifest is applied; claims are not, because they have to be bound. */
static const struct {
    const char *kind, *resource;
    bool is_namespaced;
} brought[] = {
    {"Namespace", "namespaces", false},
    {"ResourceQuota", "resourcequotas", true},
    {"LimitRange", "limitranges", true},
    {"StorageClass", "storageclasses", false},
    {"PriorityClass", "priorityclasses", false},
    {"CSIDriver", "csidrivers", false},
    {"DeviceClass", "deviceclasses", false},
    {"Network", "networks", false},
    {"LocalQueue", "localqueues", true},
    {"ClusterQueue", "clusterqueues", false},
    {"ResourceFlavor", "resourceflavors", false},
    {"Cohort", "cohorts", false},
    {"WorkloadPriorityClass", "workloadpriorityclasses", false},
    {"Topology", "topologies", false},
};

/* Adds an object of the manifest to the objects of the cluster, unless that has it or they were not read. */
static void add_brought(json_t *items, const char *resource, const json_t *document, const char *space)
{
    const json_t *known = json_object_get(items, resource), *item;
    json_t *list, *object;
    size_t i;

    if (!json_is_array(known) || (space && *get_space(document) && strcmp(get_space(document), space) != 0))
        return;
    json_array_foreach(known, i, item) if (strcmp(get_name(item), get_name(document)) == 0 &&
                                           (!space || strcmp(get_space(item), space) == 0)) return;
    list = json_copy((json_t *)known);
    object = json_deep_copy(document);
    if (space)
        json_object_set_new(json_object_get(object, "metadata"), "namespace", json_string(space));
    json_array_append_new(list, object);
    json_object_set_new(items, resource, list);
}

static void add_document(json_t *items, const json_t *document, const char *space)
{
    for (size_t i = 0; i < sizeof(brought) / sizeof(brought[0]); i++)
        if (strcmp(get_text(document, "kind"), brought[i].kind) == 0)
            add_brought(items, brought[i].resource, document, brought[i].is_namespaced ? space : NULL);
}

/* The cluster after the objects of the manifest were created; a new reference. NULL: out of memory. */
static json_t *apply_documents(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *result = json_copy((json_t *)snapshot), *items = json_copy(json_object_get(snapshot, "items"));
    const json_t *document;
    size_t i;

    json_array_foreach(job->documents, i, document) add_document(items, document, job->space);
    if (result && items && json_object_set(result, "items", items) == 0) {
        json_decref(items);
        return result;
    }
    json_decref(items);
    json_decref(result);
    return NULL;
}

/* Errors first; within a group, in the order found. */
static json_t *sorted(json_t *findings)
{
    static const char *const severities[] = {"error", "warning"};
    json_t *result = json_array(), *finding;
    size_t i;

    for (size_t s = 0; s < 2; s++)
        json_array_foreach(findings, i, finding) if (strcmp(get_text(finding, "severity"), severities[s]) == 0)
            json_array_append(result, finding);
    json_decref(findings);
    return result;
}

json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job)
{
    struct deploy_job filled = *job;
    json_t *applied = apply_documents(snapshot, job);
    struct check check = {.snapshot = applied, .job = &filled, .findings = json_array()};
    json_t *specs[DEPLOY_SETS_MAX] = {NULL};

    if (!check.findings || !applied) {
        json_decref(check.findings);
        json_decref(applied);
        return NULL;
    }
    for (int s = 0; s < job->n_sets; s++) {
        specs[s] = check_limits_apply(applied, job->sets[s].spec);
        filled.sets[s].spec = specs[s];
        check.no_memory |= job->sets[s].spec && !specs[s];
    }
    check_usage_make(&check);
    check_api(&check);
    check_pods(&check);
    if (job->queue)
        check_queue(&check);
    check_nodes(&check);
    check_site(&check);
    check_answers(&check, job);
    check_usage_done(&check);
    for (int s = 0; s < job->n_sets; s++)
        json_decref(specs[s]);
    json_decref(applied);
    if (check.no_memory) {
        json_decref(check.findings);
        return NULL;
    }
    return sorted(check.findings);
}
