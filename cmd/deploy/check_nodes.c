/* SPDX-License-Identifier: Apache-2.0 */
/* check_nodes.c - whether enough nodes have the labels that a job requires, and GPUs left; requirements on GKE. */
#include "check.h"

#include "common/text.h"

#include <stdio.h>

void check_count_gpus(struct check *check)
{
    const json_t *pod;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "pods"), i, pod) {
        const char *node = get_text(pod, "spec/nodeName");
        long long used = json_integer_value(json_object_get(check->gpus_used, node));

        if (!text_is_any(get_text(pod, "status/phase"), TEXTS("Succeeded", "Failed")))
            json_object_set_new(check->gpus_used, node, json_integer(used + get_pod_gpus(get(pod, "spec"))));
    }
}

static bool is_closed(const json_t *node)
{
    return json_is_true(get(node, "spec/unschedulable")) || strcmp(get_condition(node, "Ready"), "True") != 0;
}

/* The labels of nodeSelector, and one of the terms of the affinity. */
static bool labels_fit(const json_t *node, const json_t *spec)
{
    const json_t *labels = get(node, "metadata/labels"), *term;
    const json_t *terms =
        get(spec, "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    bool has_term = json_array_size(terms) == 0;
    size_t i;

    json_array_foreach (terms, i, term)
        has_term |= get_selected(labels, term);
    return has_term && get_labels_match(labels, get(spec, "nodeSelector"));
}

long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *labels)
{
    long long each = get_pod_gpus(set->spec), free = get_gpus(get(node, "status/allocatable"));

    if (is_closed(node) || !labels_fit(node, set->spec) || !get_labels_match(get(node, "metadata/labels"), labels))
        return 0;
    free -= json_integer_value(json_object_get(check->gpus_used, get_name(node)));
    return each == 0 ? set->count : free > 0 ? free / each : 0;
}

static void check_set(struct check *check, const struct deploy_set *set)
{
    long long left = set->count, each = get_pod_gpus(set->spec);
    int n = 0, closed = 0, labels = 0, full = 0;
    const json_t *node;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "nodes"), i, node) {
        long long room = check_node_room(check, node, set, NULL), taken = room < left ? room : left;
        long long used = json_integer_value(json_object_get(check->gpus_used, get_name(node)));

        n++;
        closed += is_closed(node);
        labels += !is_closed(node) && !labels_fit(node, set->spec);
        full += room == 0 && !is_closed(node) && labels_fit(node, set->spec);
        left -= taken;
        /* The next pod sets of the job have what is left. */
        json_object_set_new(check->gpus_used, get_name(node), json_integer(used + taken * each));
    }
    if (left == 0)
        return;
    /* With a queue, the autoscaler may add nodes after the admission. */
    check_add(check, check->job->queue ? CHECK_WARNING : CHECK_ERROR, "nodes", "the scheduler", set->name,
              json_sprintf("0/%d nodes are available", n),
              json_sprintf("%lld of %lld pods find a node: %d nodes are closed or not ready, %d have other labels, %d "
                           "have too little left",
                           set->count - left, set->count, closed, labels, full),
              json_string("kubectl get nodes -L cloud.google.com/gke-nodepool,cloud.google.com/gke-accelerator; add "
                          "nodes, or wait for other jobs"));
}

void check_nodes(struct check *check)
{
    if (!check_knows(check, "nodes") || !check_knows(check, "pods"))
        return;
    for (int s = 0; s < check->job->n_sets; s++)
        check_set(check, &check->job->sets[s]);
}

/* --- GKE --- */

#define ACCELERATOR "cloud.google.com/gke-accelerator"
#define DRIVER "cloud.google.com/gke-gpu-driver-version"
#define BLOCK "cloud.google.com/gce-topology-block"
#define METADATA "iam.gke.io/gke-metadata-server-enabled"

/* The number of nodes with GPUs whose label has one of these values ("": it is missing). */
static int count_nodes(const struct check *check, const char *label, const char *const *values)
{
    const json_t *node;
    int count = 0;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "nodes"), i, node) {
        bool has_gpus = get_gpus(get(node, "status/capacity")) > 0 || *get_label(node, ACCELERATOR);

        count += has_gpus && (!values || text_is_any(get_label(node, label), values));
    }
    return count;
}

static bool uses_buckets(const struct deploy_job *job)
{
    const json_t *volume;
    size_t i;

    for (int s = 0; s < job->n_sets; s++)
        json_array_foreach (get(job->sets[s].spec, "volumes"), i, volume) {
            if (text_begins(get_text(volume, "csi/driver"), "gcsfuse"))
                return true;
        }
    return false;
}

/* Versions as GKE writes them: v1.31.7-gke.1265000. */
static void check_version(struct check *check)
{
    static const int least[] = {1, 31, 7, 1265000};
    const char *version = get_text(check->snapshot, "version");
    int numbers[COUNT(least)] = {0};
    size_t i = 0;

    if (sscanf(version, "v%9d.%9d.%9d-gke.%9d", &numbers[0], &numbers[1], &numbers[2], &numbers[3]) != 4)
        return;
    while (i + 1 < COUNT(least) && numbers[i] == least[i])
        i++;
    if (numbers[i] < least[i] && count_nodes(check, ACCELERATOR, TEXTS("nvidia-b200")) > 0)
        check_add(
            check, CHECK_ERROR, "gke-version", "GKE", version, json_sprintf("GKE %s", version),
            json_string("A4 nodes need GKE 1.31.7-gke.1265000 or later"),
            json_string("gcloud container clusters upgrade CLUSTER --master --cluster-version=1.31.7-gke.1265000"));
}

/* Who installs the driver, according to the chart and to the labels of all nodes with GPUs. */
static void check_driver(struct check *check, int n_nodes)
{
    const char *stack = deploy_variable(check->job, "EPKIT_STACK");
    size_t n = json_array_size(get_items(check->snapshot, "nodes"));

    if (strcmp(stack, "host") == 0 && count_nodes(check, DRIVER, TEXTS("default", "latest")) == n_nodes)
        check_add(check, CHECK_ERROR, "driver-managed", "the scheduler", DRIVER,
                  json_sprintf("0/%zu nodes are available", n),
                  json_sprintf("stack=host, but GKE manages the driver of all %d GPU nodes: nothing can be installed "
                               "there",
                               n_nodes),
                  json_string("set stack=managed, or make a node pool with gpu-driver-version=disabled"));
    else if (strcmp(stack, "managed") == 0 && count_nodes(check, DRIVER, TEXTS("disabled")) == n_nodes)
        check_add(check, CHECK_ERROR, "driver-disabled", "the scheduler", DRIVER,
                  json_sprintf("0/%zu nodes are available", n),
                  json_sprintf("stack=managed, but GKE installs no driver on any of the %d GPU nodes", n_nodes),
                  json_string("set stack=host or stack=image, after deploy/daemonset has installed the driver"));
}

static void check_metrics(struct check *check)
{
    const json_t *set;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "daemonsets"), i, set) {
        if (strstr(get_name(set), "dcgm"))
            return;
    }
    if (check_knows(check, "daemonsets"))
        check_add(check, CHECK_WARNING, "dcgm", "nobody", "dcgm-exporter", json_string("no metrics of GPUs"),
                  json_string("no DaemonSet for DCGM runs in the cluster"),
                  json_string("gcloud container clusters update CLUSTER --monitoring=SYSTEM,DCGM"));
}

void check_site(struct check *check)
{
    int n = count_nodes(check, NULL, NULL), without = n - count_nodes(check, METADATA, TEXTS("true"));

    check_version(check);
    if (n > 0)
        check_driver(check, n);
    if (!strstr(get_text(check->snapshot, "version"), "-gke.") || !check_knows(check, "nodes"))
        return;
    if (n > 1 && count_nodes(check, BLOCK, TEXTS("")) == n)
        check_add(check, CHECK_WARNING, "dense-placement", "nobody", BLOCK, json_string("no topology"),
                  json_string("no GPU node has the label " BLOCK
                              ": the pool has no dense placement, and nodes may be far apart"),
                  json_string("make the pool from a reservation with deployment type DENSE"));
    if (without > 0 && uses_buckets(check->job))
        check_add(check, CHECK_ERROR, "workload-identity", "the kubelet", METADATA,
                  json_string("PermissionDenied desc = failed to get GCS bucket"),
                  json_sprintf("%d of %d GPU nodes have no metadata server of Workload Identity, which GCS FUSE needs "
                               "tokens from",
                               without, n),
                  json_string("gcloud container node-pools update POOL --workload-metadata=GKE_METADATA"));
    check_metrics(check);
}
