/* SPDX-License-Identifier: Apache-2.0 */
/* check_api.c - predicts refusals of the API server for the objects of a manifest. */
#include "deploy_check.h"

#include <stdio.h>

/* A kind that is not served: its project is not installed, or the cluster is too old. */
static bool check_kind(struct check *check, const json_t *object)
{
    const char *version = get_text(object, "apiVersion"), *kind = get_text(object, "kind");
    const json_t *groups = get_key(check->snapshot, "groups"), *served;
    struct check_text text = {0};
    char object_name[320];
    const char *other = NULL;
    size_t i, n = strcspn(version, "/");

    if (!groups)
        return true;
    json_array_foreach(groups, i, served) if (json_is_string(served) &&
                                              strcmp(json_string_value(served), version) == 0) return true;
    CHECK_FORMAT(object_name, "%s %s", kind, get_name(object));
    CHECK_FORMAT(text.says, "no matches for kind \"%s\" in version \"%s\"", kind, version);
    CHECK_FORMAT(text.why, "the cluster (%s) does not serve %s", get_text(check->snapshot, "version"), version);
    json_array_foreach(groups, i, served) if (!other && version[n] == '/' && json_is_string(served) &&
                                              strncmp(json_string_value(served), version, n + 1) == 0) other =
        json_string_value(served);
    if (other)
        CHECK_FORMAT(text.fix, "write apiVersion: %.100s, which it serves", other);
    else if (strncmp(version, "jobset", 6) == 0)
        CHECK_FORMAT(text.fix, "kubectl apply --server-side -f "
                               "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml");
    else if (strncmp(version, "leaderworkerset", 15) == 0)
        CHECK_FORMAT(text.fix, "kubectl apply --server-side -f "
                               "https://github.com/kubernetes-sigs/lws/releases/download/v0.7.0/manifests.yaml");
    else if (strncmp(version, "resource.k8s.io", 15) == 0)
        CHECK_FORMAT(text.fix, "DRA needs Kubernetes 1.34: upgrade the cluster, or set network.mode=multi");
    else
        CHECK_FORMAT(text.fix, "install what defines %s", kind);
    check_add(check, CHECK_ERROR, "api-missing", "the API server", object_name, &text);
    return false;
}

static void check_space(struct check *check)
{
    struct check_text text = {0};

    if (!check_knows(check, "namespaces") || get_item(check->snapshot, "namespaces", NULL, check->job->space))
        return;
    CHECK_FORMAT(text.says, "namespaces \"%s\" not found", check->job->space);
    CHECK_FORMAT(text.why, "nothing can be created in a namespace that does not exist");
    CHECK_FORMAT(text.fix, "kubectl create namespace %s, or helm install --create-namespace", check->job->space);
    check_add(check, CHECK_ERROR, "namespace-missing", "the API server", check->job->space, &text);
}

static void check_right(struct check *check, const json_t *object)
{
    const char *plural = deploy_plural(get_text(object, "kind"));
    struct check_text text = {0};
    char resource[64], object_name[320];
    const char *group = strchr(plural, '.');

    if (!*plural || !json_is_false(get_key(get_key(check->snapshot, "rights"), plural)))
        return;
    CHECK_FORMAT(resource, "%.*s", (int)strcspn(plural, "."), plural);
    CHECK_FORMAT(object_name, "%s %s", get_text(object, "kind"), get_name(object));
    CHECK_FORMAT(text.says, "%s is forbidden: User \"%s\" cannot create resource \"%s\" in API group \"%s\"%s%s%s",
                 plural, get_text(check->snapshot, "user"), resource, group ? group + 1 : "",
                 strcmp(resource, "persistentvolumes") == 0 ? " at the cluster scope" : " in the namespace \"",
                 strcmp(resource, "persistentvolumes") == 0 ? "" : check->job->space,
                 strcmp(resource, "persistentvolumes") == 0 ? "" : "\"");
    CHECK_FORMAT(text.why, "no role bound to this user allows it");
    CHECK_FORMAT(text.fix,
                 "ask for the right: kubectl create role epkit-user -n %s --verb=create,get,list,delete "
                 "--resource=%s",
                 check->job->space, plural);
    check_add(check, CHECK_ERROR, "forbidden", "the API server", object_name, &text);
}

static void check_name(struct check *check)
{
    const char *plural = deploy_plural(check->job->kind);
    struct check_text text = {0};
    char resource[64];

    CHECK_FORMAT(resource, "%.*s", (int)strcspn(plural, "."), plural);
    if (!get_item(check->snapshot, resource, check->job->space, check->job->name))
        return;
    CHECK_FORMAT(text.says, "%s \"%s\" already exists", plural, check->job->name);
    CHECK_FORMAT(text.why, "a job of that name exists, running or ended");
    CHECK_FORMAT(text.fix, "helm -n %s uninstall %s, or choose another name", check->job->space, check->job->name);
    check_add(check, CHECK_ERROR, "exists", "the API server", check->job->name, &text);
}

static void check_priority(struct check *check, const struct deploy_set *set)
{
    const char *name = get_text(set->spec, "priorityClassName");
    struct check_text text = {0};

    if (!*name || !check_knows(check, "priorityclasses") || get_item(check->snapshot, "priorityclasses", NULL, name))
        return;
    CHECK_FORMAT(text.fix, "kubectl get priorityclasses, and set workload.priorityClassName to one of them");
    if (check->job->queue) {
        CHECK_FORMAT(text.says, "PriorityClass.scheduling.k8s.io \"%s\" not found", name);
        CHECK_FORMAT(text.why,
                     "Kueue makes no Workload: the job stays suspended, and only the log of Kueue's controller "
                     "says so");
        check_add(check, CHECK_ERROR, "priority-missing", "Kueue", name, &text);
        return;
    }
    CHECK_FORMAT(text.says, "no PriorityClass with name %s was found", name);
    CHECK_FORMAT(text.why, "pods of a class that does not exist are not created");
    check_add(check, CHECK_ERROR, "priority-missing", "the API server", name, &text);
}

void check_api(struct check *check)
{
    const json_t *document;
    size_t i;

    check_space(check);
    json_array_foreach(check->job->documents, i, document) if (check_kind(check, document))
        check_right(check, document);
    check_name(check);
    for (int s = 0; s < check->job->n_sets; s++)
        check_priority(check, &check->job->sets[s]);
}
