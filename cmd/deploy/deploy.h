/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deploy.h - whether a Kubernetes cluster accepts and runs a job, and what holds up one that was submitted.
 *
 * The inputs are data: a manifest (what `helm template` writes), and a snapshot of the cluster, one JSON document:
 *
 *     {"epkit_cluster": 1,
 *      "version": "v1.34.4",                  of the API server
 *      "groups": ["v1", "apps/v1", ...],      what the API server serves
 *      "items": {"nodes": [...], ...},        objects by resource, as the API server gives them
 *      "answers": {"<digest>": "why it is refused, or \"\"", ...},   of the API server to deploy_dry_runs()
 *      "gke": {"cluster": {...}, "networks": [...]},   what gcloud says, if it was asked
 *      "unread": {"networks": "why", ...},    what could not be read, with the reason
 *      "time": "2026-01-31T23:59:59Z"}        when it was read
 *
 * A resource that is neither in items nor in unread was not requested. Each finding has the message that the API
 * server, Kueue, the scheduler or the kubelet will print; what the API server refuses is its own answer to a dry run.
 */
#ifndef EP_DEPLOY_DEPLOY_H
#define EP_DEPLOY_DEPLOY_H

#include "common/json.h"

#include <epkit/status.h>
#include <stdbool.h>
#include <stddef.h>

#define DEPLOY_MANIFEST_MAX (4u << 20) /* bytes */
#define DEPLOY_SNAPSHOT_VERSION 1

/*
 * The documents of a manifest in YAML (or JSON) as an array of objects; empty documents are left out. EP_E_ARG with
 * "NAME:LINE: reason" in ep_last_error().
 */
ep_status deploy_manifest_parse(const char *name, const char *text, size_t bytes, json_t **ret_documents);

/* Is the document a snapshot of a cluster? EP_E_ARG with the reason if not. */
ep_status deploy_snapshot_check(const json_t *snapshot);

/* The job of a manifest: a JobSet, a LeaderWorkerSet or a Job. Strings are owned by the documents. */
#define DEPLOY_SETS_MAX 16
struct deploy_set {
    const char *name;       /* as Kueue names the pod set */
    const json_t *metadata; /* of the pod template; may be NULL */
    const json_t *spec;     /* of the pods */
    long long count;        /* pods, of all groups */
};
struct deploy_job {
    const json_t *documents;
    const json_t *object;
    const char *kind, *name, *queue; /* queue: NULL without one */
    const char *space;               /* namespace */
    int n_sets;
    bool prerequisites; /* also check what any job needs; set by the caller */
    bool too_large;     /* there are more sets or pods than these */
    long long pods;
    long long groups; /* replicas of a LeaderWorkerSet; Kueue admits each by itself. Otherwise 1 */
    struct deploy_set sets[DEPLOY_SETS_MAX];
};

/* `space` is the namespace if the job names none. EP_E_ARG: no job, or more than one. */
ep_status deploy_job_find(const json_t *documents, const char *space, struct deploy_job *ret_job);

/* The value of an environment variable of the job's first container that has it; "" without. */
const char *deploy_variable(const struct deploy_job *job, const char *name);

/* A manifest for `gpus` GPUs, 8 on each node, as the chart renders it, for a check without a manifest. `bucket`: its
 * pods mount one. */
json_t *deploy_job_make(const char *space, const char *queue, long long gpus, const char *topology, bool required,
                        bool bucket);

/*
 * An array of findings, errors first: {"id", "severity": "error" or "warning", "by": the component that reports it,
 * "object", "says", "why", "fix"}. Empty: the cluster will accept and run the job.
 */
json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job);

/*
 * What the cluster says about a job that was submitted: {"state": "waiting", "running", "complete", "failed" or
 * "unknown", "job": {"kind", "name", "namespace", "queue", "workload": has Kueue made one?, "pods", "running"},
 * "reasons": [{"object", "others": objects with the same reason, "reason", "since": null or when, "message"}], what
 * explains most first}. NULL: there is no such job.
 */
json_t *deploy_why(const json_t *snapshot, const char *space, const char *name);

enum {
    DEPLOY_CHECK = 1u << 0,     /* deploy_check() reads them */
    DEPLOY_WHY = 1u << 1,       /* deploy_why() reads them */
    DEPLOY_GLOBAL = 1u << 2,    /* they have no namespace */
    DEPLOY_CHECK_ALL = 1u << 3, /* deploy_check() reads those of all namespaces, not only of that of the job */
    DEPLOY_NAMES = 1u << 4      /* their contents are secret or not needed: only names are kept */
};

/* Kinds of objects. The list ends with a row without kind. */
struct deploy_resource {
    const char *kind;
    const char *plural; /* with its group, as kubectl names it; without the group, the key of items */
    unsigned flags;
};
extern const struct deploy_resource deploy_resources[];

/*
 * The server-side dry runs to make: one for each document of the manifest, and one for each kind of object that
 * controllers create: a Job of a JobSet and a pod of each set. An array of {"object": "Pod r-workload-", "digest": of
 * the document, "derived": is it not in the manifest?, "document"}.
 */
json_t *deploy_dry_runs(const struct deploy_job *job);

#endif
