/* SPDX-License-Identifier: Apache-2.0 */
/* get.h - reads untrusted JSON of Kubernetes: what is missing or of another type is NULL, "" or 0. */
#ifndef EP_DEPLOY_GET_H
#define EP_DEPLOY_GET_H

#include "deploy.h"

#include <string.h>

#define GPU_RESOURCE "nvidia.com/gpu"
#define TOPOLOGY_BLOCK "cloud.google.com/gce-topology-block" /* label of a node */
#define TOPOLOGY_REQUIRED "kueue.x-k8s.io/podset-required-topology"
#define TOPOLOGY_PREFERRED "kueue.x-k8s.io/podset-preferred-topology"
#define GPUS_MAX 1000000000LL

/* The value at a path of keys separated by '/', or NULL; the object itself for "". */
const json_t *get(const json_t *object, const char *path);

/* The text of a value, or at a path; or "". */
const char *get_string(const json_t *value);
const char *get_text(const json_t *object, const char *path);
bool get_is(const json_t *object, const char *path, const char *text);
long long get_number(const json_t *object, const char *path, long long otherwise);

/* metadata.name, .namespace and a label of an object; "" if missing. */
const char *get_name(const json_t *object);
const char *get_space(const json_t *object);
const char *get_label(const json_t *object, const char *label);

/* The status of a condition; "" without it. */
const char *get_condition(const json_t *object, const char *type);

/* Objects of a resource in a snapshot, as an array; NULL if they were not read. */
const json_t *get_items(const json_t *snapshot, const char *resource);

/* One of them by name, in this namespace or in none; NULL if missing. */
const json_t *get_item(const json_t *snapshot, const char *resource, const char *space, const char *name);

/* The entry of an array whose member `key` is this text; NULL if there is none. */
const json_t *get_entry(const json_t *array, const char *key, const char *text);

/* Does the API server serve a version of this group? Also true of "", the core, and if its groups were not read. */
bool get_serves(const json_t *snapshot, const char *group);

/* A quantity of Kubernetes ("8", "1k"), at most GPUS_MAX; -1 if it is none. The GPUs in a list of resources. */
long long get_count(const json_t *value);
long long get_gpus(const json_t *resources);

/* GPUs that the containers of a pod request together. */
long long get_pod_gpus(const json_t *spec);

/* Do labels hold all of these, too? */
bool get_labels_match(const json_t *labels, const json_t *wanted);

/* Do labels match a selector (matchLabels, matchExpressions)? An empty one matches everything. */
bool get_selected(const json_t *labels, const json_t *selector);

#endif
