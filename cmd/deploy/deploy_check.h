/* SPDX-License-Identifier: Apache-2.0 */
/* deploy_check.h - declarations shared by the checks: findings, and the nodes that fit a pod. */
#ifndef EP_DEPLOY_DEPLOY_CHECK_H
#define EP_DEPLOY_DEPLOY_CHECK_H

#include "get.h"

/* Node resources that are always counted; those that only the job requests, like rdma/hca, follow them. */
enum { CHECK_GPU, CHECK_CPU, CHECK_MEMORY, CHECK_STORAGE, CHECK_PODS, CHECK_N_ALWAYS };
#define CHECK_RESOURCES_MAX 64

/* Resources in use on each node: by bound pods, and by expected pods of admitted jobs. */
struct check_usage {
    int n_resources;
    const char *resources[CHECK_RESOURCES_MAX];
    json_t *index; /* {node name: node index} */
    long long (*used)[CHECK_RESOURCES_MAX];
    long long n_coming; /* pods that have a node assigned but do not exist yet */
    json_t *placed;     /* pods of this job that have a node: [{"node", "spec", "metadata"}] */
    json_t *kept_off;   /* {spec of a set: {name of a node that takes none of its pods: true}}, filled when asked for */
};

struct check {
    const json_t *snapshot;
    const struct deploy_job *job;
    json_t *findings;
    bool no_memory;
    struct check_usage usage;
};

enum check_severity { CHECK_ERROR, CHECK_WARNING };

/* A prediction: `says` is the message of the cluster, `why` the reason, `fix` what to do. */
struct check_text {
    char says[768], why[512], fix[512];
};
void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               const struct check_text *text);

/* Formats one of the texts. */
#define CHECK_FORMAT(field, ...) snprintf((field), sizeof(field), __VA_ARGS__)

/* Was this resource read? If not, it allows no predictions. */
bool check_knows(const struct check *check, const char *resource);

/* Does the API server serve this group and version? Version NULL: any version of the group. */
bool check_serves(const struct check *check, const char *group, const char *version);

/* Does the manifest contain an object of this kind and name? */
bool check_brings(const struct check *check, const char *kind, const char *name);

/* --- check_nodes.c --- */

/*
 * The number of pods of `set` that fit on a node: its labels match those of the pod and `extra_labels` (may be NULL),
 * the pod or `extra_tolerations` (may be NULL) tolerate its taints, it is ready, and it has free resources.
 */
long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *extra_labels, const json_t *extra_tolerations);

/* Do pods of `set`, or `extra_tolerations` (may be NULL), tolerate a taint? A taint without effect is tolerated. */
bool check_tolerates(const struct deploy_set *set, const json_t *extra_tolerations, const json_t *taint);

/* GPUs requested by one pod. */
long long check_gpus(const struct deploy_set *set);

/* --- check_usage.c --- */
void check_usage_make(struct check *check);
void check_usage_done(struct check *check);
long long check_used(const struct check *check, const json_t *node, int resource);

/* Counts `count` more pods on a node. */
void check_use(struct check *check, const json_t *node, const json_t *spec, long long count);

/* --- check_neighbours.c --- */

/* Do pods on a node keep those of a set of the job off it, by ports of the host or by anti-affinity? */
bool check_kept_off(const struct check *check, const json_t *node, const struct deploy_set *set);

/* Does a node take a single pod of the set? `ret_why`: what keeps its pods apart. */
bool check_alone(const struct check *check, const struct deploy_set *set, char *ret_why, size_t bytes);

/* Puts a pod of a set on a node, for the next sets. */
void check_place(struct check *check, const json_t *node, const struct deploy_set *set);

/* --- check_cohort.c --- */

/* Quota of a ClusterQueue for a flavor and resource, in thousandths: the maximum with borrowing, and the free part. */
struct check_quota {
    long long most, free;
};
void check_quota_room(const struct check *check, const json_t *queue, const char *flavor, const char *resource,
                      struct check_quota *ret_room);

/* The resource group of a ClusterQueue or Cohort that covers a resource; NULL if none does. */
const json_t *check_group_for(const json_t *object, const char *resource);

/* --- check_limits.c --- */

/* The spec of a pod with the defaults of the API server and LimitRanges, as a new object; NULL: out of memory. */
json_t *check_limits_apply(const json_t *snapshot, const json_t *spec);

/* Adds findings for what LimitRanges refuse in a set, as Kueue phrases them if the job has a queue. True: none. */
bool check_limits(struct check *check, size_t set);

/* --- check_resources.c --- */

/* Refusals of amounts of resources, where the API server was not asked. `job` as in the manifest. */
void check_resources(struct check *check, const struct deploy_job *job);

/* --- check_answers.c --- */

/* Refusals by the API server, from dry runs. `job` as in the manifest. */
void check_answers(struct check *check, const struct deploy_job *job);

/* --- check_quota.c --- */

/* Formats a quantity as Kubernetes does: "8", "500m", memory "250Gi". */
void check_format_amount(const char *resource, long long thousandths, char *ret_text, size_t bytes);
void check_quotas(struct check *check, const struct deploy_set *set);

void check_api(struct check *check);   /* refusals by the API server */
void check_pods(struct check *check);  /* refusals by controllers and the kubelet */
void check_queue(struct check *check); /* messages of Kueue */
void check_nodes(struct check *check); /* messages of the scheduler */
void check_site(struct check *check);  /* missing features that affect performance */

#endif
