/* SPDX-License-Identifier: Apache-2.0 */
/* get.h - reads untrusted JSON: a key that is missing or of another type is NULL, "" or 0. */
#ifndef EP_DEPLOY_GET_H
#define EP_DEPLOY_GET_H

#include "deploy.h"

#include <string.h>

#define GPU_RESOURCE "nvidia.com/gpu"
#define GPUS_MAX 1000000000LL

/* The value at a path of keys separated by '/', or NULL. Keys that contain a '/' need get_key(). */
const json_t *get(const json_t *object, const char *path);
const json_t *get_key(const json_t *object, const char *key);

/* A string, and the string at a path; or "". */
const char *get_string(const json_t *value);
const char *get_text(const json_t *object, const char *path);
long long get_number(const json_t *object, const char *path, long long otherwise);
bool get_flag(const json_t *object, const char *path);

/* metadata.name and .namespace, and a label of an object; "" if missing. */
const char *get_name(const json_t *object);
const char *get_space(const json_t *object);
const char *get_label(const json_t *object, const char *label);

/* The field "status", or `field`, of a condition in an object's status; "" without the condition. */
const char *get_condition(const json_t *object, const char *type, const char *field);

/* Objects of a resource in a snapshot, as an array; NULL if they were not read. */
const json_t *get_items(const json_t *snapshot, const char *resource);

/* One of them by name, and by namespace unless that is NULL; NULL if missing. */
const json_t *get_item(const json_t *snapshot, const char *resource, const char *space, const char *name);

/* The entry of an array with this "name"; NULL if there is none. */
const json_t *get_named(const json_t *array, const char *name);

/* A quantity of Kubernetes as a whole number ("8", "1k"), rounded down, at most 1e15; -1 if it is none. */
long long get_count(const json_t *value);

/* GPUs that the containers of a pod request together. */
long long get_pod_gpus(const json_t *spec);

/* Does a match expression (key, operator, values) hold for labels? Do all? */
bool get_expression(const json_t *labels, const json_t *expression);
bool get_expressions(const json_t *labels, const json_t *expressions);

/* Do labels hold all of these, too? */
bool get_labels_match(const json_t *labels, const json_t *wanted);

/* Do labels match a label selector (matchLabels, matchExpressions)? An empty one matches everything. */
bool get_selected(const json_t *labels, const json_t *selector);

#endif
