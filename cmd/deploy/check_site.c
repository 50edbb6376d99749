/* SPDX-License-Identifier: Apache-2.0 */
/* check_site.c - requirements on a GKE cluster, and the driver of its nodes according to their labels. */
#include "check.h"

#include <stdlib.h>

#define ACCELERATOR "cloud.google.com/gke-accelerator"
#define DRIVER "cloud.google.com/gke-gpu-driver-version"
#define BLOCK "cloud.google.com/gce-topology-block"
#define METADATA "iam.gke.io/gke-metadata-server-enabled"

/* Versions as GKE writes them: v1.31.7-gke.1265000. Negative when a < b. */
static int compare_versions(const char *a, const char *b)
{
    while (*a || *b) {
        char *end_a, *end_b;
        long left, right;

        a += strcspn(a, "0123456789");
        b += strcspn(b, "0123456789");
        left = strtol(a, &end_a, 10);
        right = strtol(b, &end_b, 10);
        if (left != right)
            return left < right ? -1 : 1;
        a = end_a;
        b = end_b;
    }
    return 0;
}

/* Nodes with GPUs, and the number of them that pass a test. */
struct count {
    int n, without_block, without_metadata, managed, unmanaged;
    bool a4;
};

static struct count count_nodes(const struct check *check)
{
    struct count count = {0};
    const json_t *node;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "nodes"), i, node) {
        const char *driver = get_label(node, DRIVER);

        if (get_count(get_key(get(node, "status/capacity"), "nvidia.com/gpu")) <= 0 && !*get_label(node, ACCELERATOR))
            continue;
        count.n++;
        count.a4 |= strcmp(get_label(node, ACCELERATOR), "nvidia-b200") == 0;
        count.without_block += !*get_label(node, BLOCK);
        count.without_metadata += strcmp(get_label(node, METADATA), "true") != 0;
        count.managed += strcmp(driver, "default") == 0 || strcmp(driver, "latest") == 0;
        count.unmanaged += strcmp(driver, "disabled") == 0;
    }
    return count;
}

static const char *stack_of(const struct deploy_job *job)
{
    for (int s = 0; s < job->n_sets; s++)
        if (*deploy_variable(&job->sets[s], "EPKIT_STACK"))
            return deploy_variable(&job->sets[s], "EPKIT_STACK");
    return "image";
}

static bool uses_buckets(const struct deploy_job *job)
{
    const json_t *volume;
    size_t i;

    for (int s = 0; s < job->n_sets; s++)
        json_array_foreach (get_key(job->sets[s].spec, "volumes"), i, volume) {
            if (strncmp(get_text(volume, "csi/driver"), "gcsfuse", 7) == 0)
                return true;
        }
    return false;
}

static void check_version(struct check *check, const struct count *count)
{
    static const char least[] = "v1.31.7-gke.1265000";
    const char *version = get_text(check->snapshot, "version");

    if (count->a4 && strstr(version, "-gke.") && compare_versions(version, least) < 0)
        CHECK_FIND(check, CHECK_ERROR, "gke-version", "GKE", version, ("GKE %s", version),
                   ("A4 nodes need GKE %s or later", least + 1),
                   ("gcloud container clusters upgrade CLUSTER --master --cluster-version=%s", least + 1));
}

static void check_driver_mode(struct check *check, const struct count *count)
{
    const char *stack = stack_of(check->job);
    size_t n = json_array_size(get_items(check->snapshot, "nodes"));

    if (strcmp(stack, "host") == 0 && count->n > 0 && count->managed == count->n)
        CHECK_FIND(
            check, CHECK_ERROR, "driver-managed", "the scheduler", DRIVER, ("0/%zu nodes are available", n),
            ("stack=host, but GKE manages the driver of all %d GPU nodes: nothing can be installed there", count->n),
            ("set stack=managed, or make a node pool with gpu-driver-version=disabled"));
    else if (strcmp(stack, "managed") == 0 && count->n > 0 && count->unmanaged == count->n)
        CHECK_FIND(check, CHECK_ERROR, "driver-disabled", "the scheduler", DRIVER, ("0/%zu nodes are available", n),
                   ("stack=managed, but GKE installs no driver on any of the %d GPU nodes", count->n),
                   ("set stack=host or stack=image, after deploy/daemonset has installed the driver"));
}

static void check_metrics(struct check *check)
{
    const json_t *set;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "daemonsets"), i, set) {
        if (strstr(get_name(set), "dcgm"))
            return;
    }
    CHECK_FIND(check, CHECK_WARNING, "dcgm", "nobody", "dcgm-exporter", ("no metrics of GPUs"),
               ("no DaemonSet for DCGM runs in the cluster"),
               ("gcloud container clusters update CLUSTER --monitoring=SYSTEM,DCGM"));
}

void check_site(struct check *check)
{
    struct count count = count_nodes(check);

    check_version(check, &count);
    check_driver_mode(check, &count);
    if (!strstr(get_text(check->snapshot, "version"), "-gke.") || !check_knows(check, "nodes"))
        return;
    if (count.n > 1 && count.without_block == count.n)
        CHECK_FIND(check, CHECK_WARNING, "dense-placement", "nobody", BLOCK, ("no topology"),
                   ("no GPU node has the label " BLOCK ": the pool has no dense placement, and nodes may be far apart"),
                   ("make the pool from a reservation with deployment type DENSE"));
    if (count.without_metadata > 0 && uses_buckets(check->job))
        CHECK_FIND(check, CHECK_ERROR, "workload-identity", "the kubelet", METADATA,
                   ("PermissionDenied desc = failed to get GCS bucket"),
                   ("%d of %d GPU nodes have no metadata server of Workload Identity, which GCS FUSE needs tokens from",
                    count.without_metadata, count.n),
                   ("gcloud container node-pools update POOL --workload-metadata=GKE_METADATA"));
    if (check_knows(check, "daemonsets"))
        check_metrics(check);
}
