/* SPDX-License-Identifier: Apache-2.0 */
/* check_api.c - refusals of the API server that no dry run finds, or that have to be said without one. */
#include "check.h"

/* What to do about a kind whose group is not served. */
static const struct {
    const char *group, *fix;
} installs[] = {
    {"jobset", "kubectl apply --server-side -f "
               "https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml"},
    {"leaderworkerset", "kubectl apply --server-side -f "
                        "https://github.com/kubernetes-sigs/lws/releases/download/v0.7.0/manifests.yaml"},
    {"resource.k8s.io", "DRA needs Kubernetes 1.34: upgrade the cluster, or set network.mode=multi"},
};

static void find_install(const struct check *check, const char *version, const char *kind, char ret_fix[512])
{
    size_t i, n = strcspn(version, "/");
    const json_t *served;

    snprintf(ret_fix, 512, "install what defines %s", kind);
    for (i = 0; i < sizeof(installs) / sizeof(installs[0]); i++)
        if (strncmp(version, installs[i].group, strlen(installs[i].group)) == 0)
            snprintf(ret_fix, 512, "%s", installs[i].fix);
    json_array_foreach (get_key(check->snapshot, "groups"), i, served) {
        if (version[n] == '/' && strncmp(get_string(served), version, n + 1) == 0)
            snprintf(ret_fix, 512, "write apiVersion: %.100s, which it serves", get_string(served));
    }
}

/* A kind that is not served: its project is not installed, or the cluster is too old. */
static bool check_kind(struct check *check, const json_t *object, const char *object_name)
{
    const char *version = get_text(object, "apiVersion"), *kind = get_text(object, "kind");
    const json_t *groups = get_key(check->snapshot, "groups"), *served;
    char fix[512];
    size_t i;

    json_array_foreach (groups, i, served) {
        if (strcmp(get_string(served), version) == 0)
            return true;
    }
    if (!groups)
        return true;
    find_install(check, version, kind, fix);
    CHECK_FIND(check, CHECK_ERROR, "api-missing", "the API server", object_name,
               ("no matches for kind \"%s\" in version \"%s\"", kind, version),
               ("the cluster (%s) does not serve %s", get_text(check->snapshot, "version"), version), ("%s", fix));
    return false;
}

static void check_space(struct check *check)
{
    const char *space = check->job->space;

    if (!check_knows(check, "namespaces") || get_item(check->snapshot, "namespaces", NULL, space))
        return;
    CHECK_FIND(check, CHECK_ERROR, "namespace-missing", "the API server", space, ("namespaces \"%s\" not found", space),
               ("nothing can be created in a namespace that does not exist"),
               ("kubectl create namespace %s, or helm install --create-namespace", space));
}

static void check_right(struct check *check, const json_t *object, const char *object_name)
{
    const char *plural = deploy_plural(get_text(object, "kind")), *group = strchr(plural, '.');
    bool is_global = strcmp(plural, "persistentvolumes") == 0;

    if (!*plural || !json_is_false(get_key(get_key(check->snapshot, "rights"), plural)))
        return;
    CHECK_FIND(check, CHECK_ERROR, "forbidden", "the API server", object_name,
               ("%s is forbidden: User \"%s\" cannot create resource \"%.*s\" in API group \"%s\"%s%s%s", plural,
                get_text(check->snapshot, "user"), (int)strcspn(plural, "."), plural, group ? group + 1 : "",
                is_global ? " at the cluster scope" : " in the namespace \"", is_global ? "" : check->job->space,
                is_global ? "" : "\""),
               ("no role bound to this user allows it"),
               ("ask for the right: kubectl create role epkit-user -n %s --verb=create,get,list,delete --resource=%s",
                check->job->space, plural));
}

/* The API server checks pod by pod: a dry run of one finds room where all of them have none. */
static void check_quota(struct check *check, const json_t *quota)
{
    static const char entry[] = "requests." GPU_RESOURCE;
    long long hard = get_count(get_key(get(quota, "spec/hard"), entry));
    long long used = get_count(get_key(get(quota, "status/used"), entry));

    used = used > 0 ? used : 0;
    for (int s = 0; s < check->job->n_sets && hard >= 0; s++) {
        const struct deploy_set *set = &check->job->sets[s];
        long long each = get_pod_gpus(set->spec), room = hard > used ? hard - used : 0;
        long long fit = each > 0 ? room / each : set->count;

        if (fit >= set->count) {
            used += each * set->count;
            continue;
        }
        CHECK_FIND(check, CHECK_ERROR, "namespace-quota", "the API server", get_name(quota),
                   ("exceeded quota: %s, requested: %s=%lld, used: %s=%lld, limited: %s=%lld", get_name(quota), entry,
                    each, entry, used + fit * each, entry, hard),
                   ("%lld of %lld pods fit into the ResourceQuota of namespace %s; a job with some of its pods waits",
                    fit, set->count, check->job->space),
                   ("raise %s of resourcequota/%s, or ask for fewer GPUs", entry, get_name(quota)));
        return;
    }
}

void check_api(struct check *check)
{
    const json_t *object;
    char name[320];
    size_t i;

    check_space(check);
    json_array_foreach (check->job->documents, i, object) {
        CHECK_FORMAT(name, "%.60s %.250s", get_text(object, "kind"), get_name(object));
        if (check_kind(check, object, name))
            check_right(check, object, name);
    }
    json_array_foreach (get_items(check->snapshot, "resourcequotas"), i, object) {
        check_quota(check, object);
    }
}
