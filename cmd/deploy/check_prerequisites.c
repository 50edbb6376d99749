/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_prerequisites.c - what a cluster on GKE needs before any job: a pool with GPUs and a driver, NICs for RDMA on
 * its nodes and in its pods. docs/quickstart.md makes all of it; deploy/gke has the objects.
 */
#include "check.h"

#include "common/text.h"

#define GUIDE "docs/quickstart.md"
#define ACCELERATOR "cloud.google.com/gke-accelerator"
#define RDMA_CLASS "mrdma.google.com"
#define RDMA_NICS 8

/* --- nodes --- */

struct pool {
    int n, without_driver, ubuntu;
    int n_rdma; /* NICs of each node */
};

static struct pool count_nodes(const struct check *check)
{
    struct pool pool = {.n_rdma = RDMA_NICS};
    const json_t *node;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "nodes"), i, node) {
        bool has_gpus = get_gpus(get(node, "status/capacity")) > 0;

        if (!has_gpus && !*get_label(node, ACCELERATOR))
            continue;
        pool.n++;
        pool.without_driver += !has_gpus;
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
    const json_t *networks = get(check->snapshot, "gke/networks"), *network, *best = NULL;
    size_t i, n, most = 0;

    json_array_foreach (networks, i, network) {
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
    const json_t *cluster = get(check->snapshot, "gke/cluster"), *pool;
    bool has_pool = false;
    size_t i;

    if (cluster && !get_is(cluster, "networkConfig/datapathProvider", "ADVANCED_DATAPATH"))
        check_add(check, CHECK_ERROR, "dataplane", "GKE", get_text(cluster, "name"),
                  json_string("the cluster does not use Dataplane V2"),
                  json_string("networks of pods and DRANET need it, and a cluster gets it only when it is made"),
                  json_string("make the cluster with --enable-dataplane-v2: " GUIDE ", step 1"));
    json_array_foreach (get(cluster, "nodePools"), i, pool) {
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
    struct pool pool = count_nodes(check);

    if (check_knows(check, "nodes"))
        check_pool(check, &pool);
    if (!strstr(get_text(check->snapshot, "version"), "-gke."))
        return;
    check_rdma(check, &pool);
    check_gke(check, pool.n_rdma);
}
