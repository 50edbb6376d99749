/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_nodes.c - whether enough nodes have the labels that a job requires, and GPUs left; what a cluster on GKE needs
 * before any job: a pool with GPUs and a driver, NICs for RDMA on its nodes and in its pods. docs/quickstart.md makes
 * all of it; deploy/gke has the objects.
 */
#include "common/text.h"
#include "job_check.h"

#include <stdio.h>

void check_count_gpus(struct check *check)
{
    FOR_JSON (pod, get_items(check->snapshot, "pods")) {
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
    const json_t *labels = get(node, "metadata/labels");
    const json_t *terms =
        get(spec, "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    bool has_term = json_array_size(terms) == 0;

    FOR_JSON (term, terms)
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

    FOR_JSON (node, get_items(check->snapshot, "nodes")) {
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
#define METADATA "iam.gke.io/gke-metadata-server-enabled"

static bool is_gpu_node(const json_t *node)
{
    return get_gpus(get(node, "status/capacity")) > 0 || *get_label(node, ACCELERATOR);
}

/* The number of nodes with GPUs whose label has one of these values ("": it is missing). */
static int count_nodes(const struct check *check, const char *label, const char *const *values)
{
    int count = 0;

    FOR_JSON (node, get_items(check->snapshot, "nodes"))
        count += is_gpu_node(node) && (!values || text_is_any(get_label(node, label), values));
    return count;
}

static bool uses_buckets(const struct deploy_job *job)
{
    for (int s = 0; s < job->n_sets; s++)
        FOR_JSON (volume, get(job->sets[s].spec, "volumes"))
            if (text_begins(get_text(volume, "csi/driver"), "gcsfuse"))
                return true;
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
    FOR_JSON (set, get_items(check->snapshot, "daemonsets"))
        if (strstr(get_name(set), "dcgm"))
            return;
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
    if (n > 1 && count_nodes(check, TOPOLOGY_BLOCK, TEXTS("")) == n)
        check_add(check, CHECK_WARNING, "dense-placement", "nobody", TOPOLOGY_BLOCK, json_string("no topology"),
                  json_string("no GPU node has the label " TOPOLOGY_BLOCK
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

/* --- prerequisites --- */

#define GUIDE "docs/quickstart.md"
#define RDMA_CLASS "mrdma.google.com"
#define RDMA_NICS 8

struct pool {
    int n, without_driver, ubuntu;
    int n_rdma; /* NICs of each node */
};

static struct pool count_pool(const struct check *check)
{
    struct pool pool = {.n_rdma = RDMA_NICS};

    FOR_JSON (node, get_items(check->snapshot, "nodes")) {
        if (!is_gpu_node(node))
            continue;
        pool.n++;
        pool.without_driver += get_gpus(get(node, "status/capacity")) <= 0;
        pool.ubuntu += strstr(get_text(node, "status/nodeInfo/osImage"), "Ubuntu") != NULL;
        if (text_begins(get_label(node, ACCELERATOR), "nvidia-gb200"))
            pool.n_rdma = 4;
    }
    return pool;
}

static void check_pool(struct check *check, const struct pool *pool)
{
    if (pool->n == 0)
        check_add(check, CHECK_ERROR, "gpu-nodes", "the scheduler", ACCELERATOR,
                  json_sprintf("0/%zu nodes are available", json_array_size(get_items(check->snapshot, "nodes"))),
                  json_string("no node has GPUs or the label " ACCELERATOR),
                  json_string("make a pool with GPUs: " GUIDE ", step 1"));
    else if (pool->without_driver > 0)
        check_add(
            check, CHECK_ERROR, "gpu-driver", "the scheduler", GPU_RESOURCE, json_string("Insufficient " GPU_RESOURCE),
            json_sprintf("%d of %d nodes with GPUs offer none: no driver is installed, or it does not load",
                         pool->without_driver, pool->n),
            json_string(pool->ubuntu ? "kubectl apply -k deploy/daemonset/overlays/b200 (or h200): " GUIDE ", step 1"
                                     : "make the pool with gpu-driver-version=latest"));
}

/* --- networks of pods --- */

static bool has_item(const struct check *check, const char *resource, const char *name)
{
    return get_item(check->snapshot, resource, "", name) != NULL;
}

/* A Network exists, and what it refers to is not ready. */
static void check_parameters(struct check *check, const json_t *network)
{
    const char *name = get_text(network, "spec/parametersRef/name");
    const json_t *parameters = get_item(check->snapshot, "gkenetworkparamsets", "", name), *ready;

    if (!*name || !check_knows(check, "gkenetworkparamsets"))
        return;
    ready = get_entry(get(parameters, "status/conditions"), "type", "Ready");
    if (parameters && (!ready || get_is(ready, "status", "True")))
        return;
    check_add(check, CHECK_ERROR, "network-parameters", "GKE", get_name(network),
              parameters ? json_sprintf("%s", get_text(ready, "message"))
                         : json_sprintf("GKENetworkParamSet \"%s\" not found", name),
              json_sprintf("network %s has no VPC and subnet that are attached to the nodes", get_name(network)),
              json_string("helm upgrade --install prerequisites deploy/gke, with the names of the subnets: " GUIDE
                          ", step 1"));
}

static void check_networks(struct check *check, int n_rdma)
{
    char name[16], names[256], first[16] = "";
    struct text missing = text_in(names, sizeof(names));
    int n = 0;

    names[0] = '\0';
    for (int i = 0; i <= n_rdma; i++) {
        const json_t *network;

        if (i == 0)
            snprintf(name, sizeof(name), "gvnic-1");
        else
            snprintf(name, sizeof(name), "rdma-%d", i - 1);
        network = get_item(check->snapshot, "networks", "", name);
        if (network) {
            check_parameters(check, network);
            continue;
        }
        if (n++ == 0)
            snprintf(first, sizeof(first), "%s", name);
        text_add(&missing, "%s%s", n > 1 ? ", " : "", name);
    }
    if (n > 0)
        check_add(check, CHECK_ERROR, "network-missing", "the kubelet", first,
                  json_sprintf("network \"%s\" not found", first),
                  json_sprintf("%d of the %d networks of the chart are missing: %s", n, n_rdma + 1, names),
                  json_string("helm upgrade --install prerequisites deploy/gke: " GUIDE ", step 1"));
}

static void check_rdma(struct check *check, const struct pool *pool)
{
    /* Networks of GKE are for Container-Optimized OS: pods on Ubuntu use those of the node. */
    if (pool->n == 0 || pool->ubuntu == pool->n || has_item(check, "deviceclasses", RDMA_CLASS))
        return;
    if (!get_serves(check->snapshot, "networking.gke.io"))
        check_add(check, CHECK_ERROR, "multi-network", "nobody", "networking.gke.io",
                  json_string("the pods start with one interface"),
                  json_string("the cluster has no multi-networking and no DRANET, so pods get no NICs for RDMA"),
                  json_string("create the cluster with --enable-multi-networking, or set network.mode=host"));
    else if (check_knows(check, "networks"))
        check_networks(check, pool->n_rdma);
}

/* --- what gcloud says --- */

/* The last part of a URL of Compute Engine. */
static const char *base_name(const char *url)
{
    const char *slash = strrchr(url, '/');

    return slash ? slash + 1 : url;
}

static void check_rdma_vpc(struct check *check, int n_rdma)
{
    const json_t *networks = get(check->snapshot, "gke/networks"), *best = NULL;
    size_t n, most = 0;

    FOR_JSON (network, networks) {
        n = json_array_size(get(network, "subnetworks"));
        if (!strstr(base_name(get_text(network, "networkProfile")), "-vpc-roce") || (best && n <= most))
            continue;
        best = network;
        most = n;
    }
    if (networks && (!best || most < (size_t)n_rdma))
        check_add(check, CHECK_ERROR, best ? "rdma-subnets" : "rdma-vpc", "Compute Engine",
                  best ? get_text(best, "name") : "ZONE-vpc-roce", json_string("no pool can have NICs for RDMA"),
                  best ? json_sprintf("network %s has %zu subnets, and each NIC needs one: %d", get_text(best, "name"),
                                      most, n_rdma)
                       : json_string("no network of the project has the network profile ZONE-vpc-roce"),
                  json_string("gcloud compute networks create --network-profile, and subnets: " GUIDE ", step 1"));
}

static void check_node_pool(struct check *check, const json_t *pool, int n_rdma)
{
    size_t n = json_array_size(get(pool, "networkConfig/additionalNodeNetworkConfigs"));
    const char *name = get_text(pool, "name");

    if (n <= (size_t)n_rdma && !get_is(pool, "networkConfig/acceleratorNetworkProfile", "auto"))
        check_add(check, CHECK_ERROR, "node-networks", "nobody", name, json_string("the nodes have no NICs for RDMA"),
                  json_sprintf("pool %s has %zu additional networks; it needs one for gVNIC and %d for RDMA, and gets "
                               "them only when it is made",
                               name, n, n_rdma),
                  json_string("delete the pool, and make it with --additional-node-network: " GUIDE ", step 1"));
}

static void check_gke(struct check *check, int n_rdma)
{
    const json_t *cluster = get(check->snapshot, "gke/cluster");
    bool has_pool = false;

    if (cluster && !get_is(cluster, "networkConfig/datapathProvider", "ADVANCED_DATAPATH"))
        check_add(check, CHECK_ERROR, "dataplane", "GKE", get_text(cluster, "name"),
                  json_string("the cluster does not use Dataplane V2"),
                  json_string("networks of pods and DRANET need it, and a cluster gets it only when it is made"),
                  json_string("make the cluster with --enable-dataplane-v2: " GUIDE ", step 1"));
    FOR_JSON (pool, get(cluster, "nodePools")) {
        if (json_array_size(get(pool, "config/accelerators")) == 0)
            continue;
        has_pool = true;
        check_node_pool(check, pool, n_rdma);
    }
    if (!has_pool)
        check_rdma_vpc(check, n_rdma);
}

/* --- all --- */

void check_prerequisites(struct check *check)
{
    struct pool pool = count_pool(check);

    if (check_knows(check, "nodes"))
        check_pool(check, &pool);
    if (!strstr(get_text(check->snapshot, "version"), "-gke."))
        return;
    check_rdma(check, &pool);
    check_gke(check, pool.n_rdma);
}
