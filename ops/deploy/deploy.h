/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deploy.h - what a Kubernetes cluster will say about a job, before it is submitted.
 *
 * Two inputs, both data: a manifest (what `helm template` writes), and a snapshot of the cluster, one JSON document:
 *
 *     {"epkit_cluster": 1,
 *      "version": "v1.34.4",                  of the API server
 *      "user": "somebody",                    who asked
 *      "groups": ["v1", "apps/v1", ...],      what the API server serves
 *      "items": {"nodes": [...], ...},        objects by resource, as the API server gives them
 *      "rights": {"jobsets.jobset.x-k8s.io": true, ...},   may the user create them in the namespace?
 *      "answers": {"<digest>": "why it is refused, or \"\"", ...},   of the API server to deploy_questions()
 *      "unread": {"networks": "why", ...}}    what could not be read, with the reason
 *
 * A resource that is neither in items nor in unread was not asked for. Findings are predictions: each has the text that
 * the API server, Kueue, the scheduler or the kubelet will say, in their own words as of Kubernetes 1.34 and Kueue
 * 0.15.
 */
#ifndef EP_DEPLOY_DEPLOY_H
#define EP_DEPLOY_DEPLOY_H

#include <epkit/status.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#define DEPLOY_MANIFEST_MAX (4u << 20) /* bytes */
#define DEPLOY_SNAPSHOT_VERSION 1

/*
 * The documents of a manifest in YAML (or JSON) as an array of objects; empty documents are left out. EP_E_ARG with
 * line and reason in ep_last_error().
 */
ep_status deploy_manifest_parse(const char *text, size_t bytes, json_t **ret_documents);

/* Is it a snapshot of a cluster? EP_E_ARG with the reason if not. */
ep_status deploy_snapshot_check(const json_t *snapshot);

/* The job among the documents of a manifest: a JobSet, a LeaderWorkerSet or a Job. Strings are of the documents. */
#define DEPLOY_SETS_MAX 16
struct deploy_set {
    const char *name;       /* as Kueue names the pod set */
    const json_t *metadata; /* of the pod template; may be NULL */
    const json_t *spec;     /* of the pods */
    long long count;        /* pods */
};
struct deploy_job {
    const json_t *documents;
    const json_t *object;
    const char *kind, *name, *queue; /* queue: NULL without one */
    const char *space;               /* namespace */
    int n_sets;
    bool too_large; /* there are more sets or pods than these */
    struct deploy_set sets[DEPLOY_SETS_MAX];
};

/* `space` is the namespace where the job names none. EP_E_ARG when there is no job, or more than one. */
ep_status deploy_job_find(const json_t *documents, const char *space, struct deploy_job *ret_job);

/* A manifest for `gpus` GPUs, 8 on each node, as the chart would make it: for a question without a manifest. */
json_t *deploy_job_make(const char *space, const char *queue, long long gpus, const char *topology, bool required);

/*
 * An array of findings, errors first: {"id", "severity": "error" or "warning", "by": who will say it, "object", "says",
 * "why", "fix"}. Empty: the cluster will take the job and run it. NULL for lack of memory.
 */
json_t *deploy_check(const json_t *snapshot, const struct deploy_job *job);

/* Resources that deploy_check() reads, for who makes a snapshot. The list ends with a row without name. */
struct deploy_resource {
    const char *name;    /* key of items */
    const char *kubectl; /* argument of `kubectl get` */
    const char *group;   /* served by this API group alone; "" for those that every cluster has */
    enum { DEPLOY_CLUSTER, DEPLOY_NAMESPACE, DEPLOY_EVERYWHERE } scope;
    bool names_only; /* the objects hold secrets: only names are kept */
};
extern const struct deploy_resource deploy_resources[];

/*
 * What the API server is to be asked by server-side dry runs: each document of the manifest, and what controllers make
 * of the job, a Job of a JobSet and a pod of each set. An array of {"object": "Pod r-workload-", "digest": of the
 * document, "derived": is it not in the manifest?, "document"}.
 */
json_t *deploy_questions(const struct deploy_job *job);

/* The refusal in what a failed `kubectl create` wrote; false if it says nothing about the object. */
bool deploy_refusal(const char *error, char *ret_text, size_t bytes);

/* Resource and group of a kind as `kubectl auth can-i` wants them: "jobsets.jobset.x-k8s.io". "" if it is not known. */
const char *deploy_plural(const char *kind);

#endif
