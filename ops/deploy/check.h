/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - what the checks share: the findings, and which nodes take a pod. */
#ifndef EP_DEPLOY_CHECK_H
#define EP_DEPLOY_CHECK_H

#include "get.h"

/* Resources of nodes that are counted. */
enum check_resource { CHECK_GPU, CHECK_CPU, CHECK_MEMORY, CHECK_STORAGE, CHECK_PODS, CHECK_N_RESOURCES };
extern const char *const check_resources[CHECK_N_RESOURCES];

/* What is taken of each node: by pods that are bound to it, and by those of admitted jobs that are still to come. */
struct check_usage {
    json_t *index; /* {name of a node: its number} */
    long long (*taken)[CHECK_N_RESOURCES];
    long long n_coming; /* pods that have a place, but are not there yet */
};

struct check {
    const json_t *snapshot;
    const struct deploy_job *job;
    json_t *findings;
    bool no_memory;
    struct check_usage usage;
};

enum check_severity { CHECK_ERROR, CHECK_WARNING };

/* A prediction. The texts are formatted into one buffer each: says (the cluster's words), why, fix. */
struct check_text {
    char says[768], why[512], fix[512];
};
void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               const struct check_text *text);

/* printf into one of the texts. */
#define CHECK_SAY(field, ...) snprintf((field), sizeof(field), __VA_ARGS__)

/* Was this resource read? If not, nothing can be predicted from it. */
bool check_knows(const struct check *check, const char *resource);

/* Does the API server serve this group and version, or with version NULL any of the group? */
bool check_serves(const struct check *check, const char *group, const char *version);

/* Is an object of this kind and name part of the manifest? */
bool check_brings(const struct check *check, const char *kind, const char *name);

/* --- check_nodes.c --- */

/*
 * How many pods of `set` a node has room for: its labels match the pod's and `extra_labels` (may be NULL), its taints
 * are tolerated by the pod or by `extra_tolerations` (may be NULL), it is ready, and its resources are free.
 */
long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *extra_labels, const json_t *extra_tolerations);

/* Do pods of `set`, or `extra_tolerations` (may be NULL), tolerate a taint? One that forbids nothing is tolerated. */
bool check_tolerates(const struct deploy_set *set, const json_t *extra_tolerations, const json_t *taint);

/* GPUs asked for by one pod. */
long long check_gpus(const struct deploy_set *set);

/* --- check_usage.c --- */
void check_usage_make(struct check *check);
void check_usage_done(struct check *check);
long long check_taken(const struct check *check, const json_t *node, enum check_resource resource);

/* --- check_cohort.c --- */

/* Of a flavor and resource, in thousandths: what a ClusterQueue may have at most with what it borrows, and has now. */
struct check_quota {
    long long most, free;
};
void check_quota_room(const struct check *check, const json_t *queue, const char *flavor, const char *resource,
                      struct check_quota *ret_room);

/* The resource group of a ClusterQueue or Cohort that covers a resource; NULL if none does. */
const json_t *check_group_for(const json_t *object, const char *resource);

/* --- check_limits.c --- */

/* The spec of a pod with what the API server and LimitRanges fill in, as a new object; NULL for lack of memory. */
json_t *check_limits_apply(const json_t *snapshot, const json_t *spec);

/* What LimitRanges refuse in a set: by Kueue's words where the job has a queue. True if nothing. */
bool check_limits(struct check *check, size_t set);

/* --- check_answers.c --- */

/* Refusals by the API server itself, where it was asked. `job` as it is in the manifest. */
void check_answers(struct check *check, const struct deploy_job *job);

/* --- check_quota.c --- */

/* As Kubernetes writes a quantity: "8", "500m", and memory "250Gi". */
void check_say_amount(const char *resource, long long thousandths, char *ret_text, size_t bytes);
void check_quotas(struct check *check, const struct deploy_set *set);

void check_api(struct check *check);   /* what the API server will refuse */
void check_pods(struct check *check);  /* what the controllers and the kubelet will refuse */
void check_queue(struct check *check); /* what Kueue will say */
void check_nodes(struct check *check); /* what the scheduler will say */
void check_site(struct check *check);  /* what the cluster lacks for the work to be fast */

#endif
