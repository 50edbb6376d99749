/* SPDX-License-Identifier: Apache-2.0 */
/* job_check.h - declarations shared by the checks: findings, and the nodes that fit a pod. */
#ifndef EP_DEPLOY_JOB_CHECK_H
#define EP_DEPLOY_JOB_CHECK_H

#include "get.h"

struct check {
    const json_t *snapshot;
    const struct deploy_job *job;
    json_t *findings;
    size_t n_errors;
    json_t *gpus_used; /* {node name: GPUs that its pods have} */
};

enum check_severity { CHECK_ERROR, CHECK_WARNING };

/* Adds a finding: `says` is the message of the cluster, `why` the reason, `fix` what to do. The texts are consumed. */
void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               json_t *says, json_t *why, json_t *fix);

/* Was this resource read? If not, nothing is said about it. */
bool check_knows(const struct check *check, const char *resource);

/* --- check_nodes.c --- */

/* Counts the GPUs that pods use, by node. */
void check_count_gpus(struct check *check);

/*
 * The number of pods of `set` for which a node has GPUs left: it is ready, and its labels match those that the pods and
 * `labels` (may be NULL) require.
 */
long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *labels);

/* shell_quote() of an operand: "-- " is in front of one that would be an option. */
const char *shell_operand(const char *text, char *ret_word, size_t bytes);

void check_pods(struct check *check);          /* refusals by controllers and the kubelet */
void check_queue(struct check *check);         /* messages of Kueue */
void check_nodes(struct check *check);         /* messages of the scheduler */
void check_prerequisites(struct check *check); /* what any job needs on GKE: pool, driver, NICs */
void check_site(struct check *check);
#endif
