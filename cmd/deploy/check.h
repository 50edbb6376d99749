/* SPDX-License-Identifier: Apache-2.0 */
/* check.h - declarations shared by the checks: findings, and the nodes that fit a pod. */
#ifndef EP_DEPLOY_CHECK_H
#define EP_DEPLOY_CHECK_H

#include "get.h"

#include <stdio.h>

struct check {
    const json_t *snapshot;
    const struct deploy_job *job;
    json_t *findings;
    json_t *gpus_used; /* {node name: GPUs that its pods have} */
    bool no_memory;
};

enum check_severity { CHECK_ERROR, CHECK_WARNING };

/* A finding: `says` is the message of the cluster, `why` the reason, `fix` what to do. */
struct check_text {
    char says[768], why[512], fix[512];
};
void check_add(struct check *check, enum check_severity severity, const char *id, const char *by, const char *object,
               const struct check_text *text);

/* Formats one of the texts. */
#define CHECK_FORMAT(field, ...) snprintf((field), sizeof(field), __VA_ARGS__)

/* Adds a finding; `says`, `why` and `fix` are format and arguments in parentheses. */
#define CHECK_LIST(...) __VA_ARGS__
#define CHECK_FIND(check, severity, id, by, object, says_list, why_list, fix_list)                                     \
    do {                                                                                                               \
        struct check_text text_;                                                                                       \
                                                                                                                       \
        CHECK_FORMAT(text_.says, CHECK_LIST says_list);                                                                \
        CHECK_FORMAT(text_.why, CHECK_LIST why_list);                                                                  \
        CHECK_FORMAT(text_.fix, CHECK_LIST fix_list);                                                                  \
        check_add(check, severity, id, by, object, &text_);                                                            \
    } while (0)

/* Was this resource read? If not, nothing is said about it. */
bool check_knows(const struct check *check, const char *resource);

/* Does the API server serve this group and version? Version NULL: any version of the group. */
bool check_serves(const struct check *check, const char *group, const char *version);

/* --- check_nodes.c --- */

/* Counts the GPUs that pods use, by node. */
void check_count_gpus(struct check *check);

/*
 * The number of pods of `set` for which a node has GPUs left: it is ready, and its labels match those that the pods and
 * `labels` (may be NULL) require.
 */
long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *labels);

void check_api(struct check *check);     /* refusals by the API server */
void check_answers(struct check *check); /* its answers to dry runs */
void check_pods(struct check *check);    /* refusals by controllers and the kubelet */
void check_queue(struct check *check);   /* messages of Kueue */
void check_nodes(struct check *check);   /* messages of the scheduler */
void check_site(struct check *check);    /* requirements on GKE, missing features that affect performance */

#endif
