/* SPDX-License-Identifier: Apache-2.0 */
/* check.c - runs the checks of a job; functions shared by them. */
#include "check.h"

#include "base/error.h"
#include "common/output.h"

#include <ctype.h>

const struct deploy_resource deploy_resources[] = {
    {"namespaces", "namespaces", "", DEPLOY_CLUSTER, false},
    {"nodes", "nodes", "", DEPLOY_CLUSTER, false},
    {"pods", "pods", "", DEPLOY_EVERYWHERE, false},
    {"resourcequotas", "resourcequotas", "", DEPLOY_NAMESPACE, false},
    {"networkpolicies", "networkpolicies.networking.k8s.io", "", DEPLOY_NAMESPACE, false},
    {"secrets", "secrets", "", DEPLOY_NAMESPACE, true},
    {"persistentvolumeclaims", "persistentvolumeclaims", "", DEPLOY_NAMESPACE, false},
    {"csidrivers", "csidrivers.storage.k8s.io", "", DEPLOY_CLUSTER, true},
    {"daemonsets", "daemonsets.apps", "", DEPLOY_EVERYWHERE, true},
    {"deviceclasses", "deviceclasses.resource.k8s.io", "resource.k8s.io", DEPLOY_CLUSTER, false},
    {"networks", "networks.networking.gke.io", "networking.gke.io", DEPLOY_CLUSTER, false},
    {"localqueues", "localqueues.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_NAMESPACE, false},
    {"clusterqueues", "clusterqueues.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
    {"resourceflavors", "resourceflavors.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_CLUSTER, false},
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
        return ep_fail(EP_E_ARG, "it has no key epkit_cluster: --save FILE writes such a file");
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
    /* "s+": names are untrusted, and a truncated text may end inside a character. */
    json_t *finding = json_pack("{s:s, s:s, s:s, s:o, s:o, s:o, s:o}", "id", id, "severity",
                                severity == CHECK_ERROR ? "error" : "warning", "by", by, "object", out_text(object),
                                "says", out_text(text->says), "why", out_text(text->why), "fix", out_text(text->fix));

    if (!finding || json_array_append_new(check->findings, finding) != 0)
        check->no_memory = true;
}

bool check_knows(const struct check *check, const char *resource)
{
    return get_items(check->snapshot, resource) != NULL;
}

bool check_serves(const struct check *check, const char *group, const char *version)
{
    const json_t *served;
    size_t i, n = strlen(group);

    json_array_foreach (get_key(check->snapshot, "groups"), i, served) {
        const char *text = get_string(served);

        if (strncmp(text, group, n) == 0 && text[n] == '/' && (!version || strcmp(text + n + 1, version) == 0))
            return true;
    }
    return false;
}

/* The resource of a kind, as in items: the plural of its name in lower case. */
static void plural_of(const char *kind, char ret_resource[64])
{
    struct text text = text_in(ret_resource, 64);

    for (; *kind; kind++)
        if (kind[0] == 'y' && kind[1] == '\0')
            text_add(&text, "ies");
        else
            text_add(&text, "%c%s", tolower((unsigned char)*kind), kind[1] ? "" : kind[0] == 's' ? "es" : "s");
}

/* Adds an object of the manifest to the objects of the cluster, unless that has it or they were not read. */
static void add_brought(json_t *items, const json_t *document, const char *space)
{
    const json_t *known, *item;
    json_t *list, *object;
    char resource[64];
    size_t i;

    plural_of(get_text(document, "kind"), resource);
    known = json_object_get(items, resource);
    if (!json_is_array(known) || (*get_space(document) && strcmp(get_space(document), space) != 0))
        return;
    json_array_foreach (known, i, item) {
        if (strcmp(get_name(item), get_name(document)) == 0 &&
            (!*get_space(item) || strcmp(get_space(item), space) == 0))
            return;
    }
    list = json_copy((json_t *)known);
    object = json_deep_copy(document);
    json_object_set_new(json_object_get(object, "metadata"), "namespace", json_string(space));
    json_array_append_new(list, object);
    json_object_set_new(items, resource, list);
}

/* The cluster after the objects of the manifest were created; a new reference. NULL: out of memory. */
static json_t *apply_documents(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *items = json_copy(json_object_get(snapshot, "items")), *result = json_copy((json_t *)snapshot);
    const json_t *document;
    size_t i;

    json_array_foreach (job->documents, i, document) {
        add_brought(items, document, job->space);
    }
    if (result && items && json_object_set_new(result, "items", items) == 0)
        return result;
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
        json_array_foreach (findings, i, finding) {
            if (strcmp(get_text(finding, "severity"), severities[s]) == 0)
                json_array_append(result, finding);
        }
    json_decref(findings);
    return result;
}

json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job)
{
    json_t *applied = apply_documents(snapshot, job);
    struct check check = {.snapshot = applied, .job = job, .findings = json_array(), .gpus_used = json_object()};

    if (!check.findings || !applied || !check.gpus_used) {
        check.no_memory = true;
    } else {
        check_count_gpus(&check);
        check_api(&check);
        check_pods(&check);
        if (job->queue)
            check_queue(&check);
        check_nodes(&check);
        check_site(&check);
        check_answers(&check);
    }
    json_decref(check.gpus_used);
    json_decref(applied);
    if (check.no_memory) {
        json_decref(check.findings);
        return NULL;
    }
    return sorted(check.findings);
}
