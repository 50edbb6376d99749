/* SPDX-License-Identifier: Apache-2.0 */
/* get.c - reading objects of Kubernetes. */
#include "get.h"

#include <ctype.h>
#include <stdlib.h>

const json_t *get(const json_t *object, const char *path)
{
    while (object && *path) {
        size_t n = strcspn(path, "/");

        object = json_object_getn(object, path, n);
        path += n + (path[n] == '/');
    }
    return object;
}

const char *get_string(const json_t *value)
{
    return json_is_string(value) ? json_string_value(value) : "";
}

const char *get_text(const json_t *object, const char *path)
{
    return get_string(get(object, path));
}

bool get_is(const json_t *object, const char *path, const char *text)
{
    return strcmp(get_text(object, path), text) == 0;
}

long long get_number(const json_t *object, const char *path, long long otherwise)
{
    const json_t *value = get(object, path);

    return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

const char *get_name(const json_t *object)
{
    return get_text(object, "metadata/name");
}

const char *get_space(const json_t *object)
{
    return get_text(object, "metadata/namespace");
}

const char *get_label(const json_t *object, const char *label)
{
    return get_string(json_object_get(get(object, "metadata/labels"), label));
}

const char *get_condition(const json_t *object, const char *type)
{
    return get_text(get_entry(get(object, "status/conditions"), "type", type), "status");
}

const json_t *get_items(const json_t *snapshot, const char *resource)
{
    const json_t *items = json_object_get(get(snapshot, "items"), resource);

    return json_is_array(items) ? items : NULL;
}

const json_t *get_item(const json_t *snapshot, const char *resource, const char *space, const char *name)
{
    FOR_JSON (item, get_items(snapshot, resource))
        if (strcmp(get_name(item), name) == 0 && (!*get_space(item) || strcmp(get_space(item), space) == 0))
            return item;
    return NULL;
}

const json_t *get_entry(const json_t *array, const char *key, const char *text)
{
    FOR_JSON (entry, array)
        if (get_is(entry, key, text))
            return entry;
    return NULL;
}

bool get_serves(const json_t *snapshot, const char *group)
{
    const json_t *groups = get(snapshot, "groups");
    size_t n = strlen(group);

    FOR_JSON (served, groups)
        if (strncmp(get_string(served), group, n) == 0 && get_string(served)[n] == '/')
            return true;
    return n == 0 || !groups;
}

long long get_count(const json_t *value)
{
    const char *text = get_string(value);
    char *unit = (char *)"";
    long long count = json_is_integer(value) ? json_integer_value(value) : -1;

    if (isdigit((unsigned char)*text))
        count = strtoll(text, &unit, 10);
    count = count < GPUS_MAX ? count : GPUS_MAX;
    if (*unit && strcmp(unit, "k") != 0)
        return -1;
    count *= *unit ? 1000 : 1;
    return count < 0 ? -1 : count < GPUS_MAX ? count : GPUS_MAX;
}

long long get_gpus(const json_t *resources)
{
    return get_count(json_object_get(resources, GPU_RESOURCE));
}

long long get_pod_gpus(const json_t *spec)
{
    long long sum = 0;

    FOR_JSON (container, get(spec, "containers")) {
        long long limit = get_gpus(get(container, "resources/limits"));
        long long gpus = limit >= 0 ? limit : get_gpus(get(container, "resources/requests"));

        sum += gpus > 0 && sum < GPUS_MAX ? gpus : 0;
    }
    return sum;
}

static bool expression_holds(const json_t *labels, const json_t *expression)
{
    const json_t *label = json_object_get(labels, get_text(expression, "key"));
    bool is_among = false;

    FOR_JSON (value, get(expression, "values"))
        is_among |= label && json_equal(value, label);
    if (get_is(expression, "operator", "In"))
        return is_among;
    if (get_is(expression, "operator", "NotIn"))
        return !is_among;
    if (get_is(expression, "operator", "Exists"))
        return label != NULL;
    /* Gt and Lt compare numbers, which no label here has: what is not understood is no reason for a finding. */
    return !get_is(expression, "operator", "DoesNotExist") || !label;
}

bool get_labels_match(const json_t *labels, const json_t *wanted)
{
    FOR_MEMBERS (key, value, wanted)
        if (!json_equal(json_object_get(labels, key), value))
            return false;
    return true;
}

bool get_selected(const json_t *labels, const json_t *selector)
{
    FOR_JSON (expression, get(selector, "matchExpressions"))
        if (!expression_holds(labels, expression))
            return false;
    return get_labels_match(labels, get(selector, "matchLabels"));
}
