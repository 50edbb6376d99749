/* SPDX-License-Identifier: Apache-2.0 */
/* get.c - reading objects of Kubernetes. */
#include "get.h"

#include <stdlib.h>

const json_t *get_key(const json_t *object, const char *key)
{
    return json_is_object(object) ? json_object_get(object, key) : NULL;
}

const json_t *get(const json_t *object, const char *path)
{
    char key[128];

    while (object && *path) {
        size_t n = strcspn(path, "/");

        if (n >= sizeof(key))
            return NULL;
        memcpy(key, path, n);
        key[n] = '\0';
        object = get_key(object, key);
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

long long get_number(const json_t *object, const char *path, long long otherwise)
{
    const json_t *value = get(object, path);

    return json_is_integer(value) ? json_integer_value(value) : otherwise;
}

bool get_flag(const json_t *object, const char *path)
{
    return json_is_true(get(object, path));
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
    return get_string(get_key(get(object, "metadata/labels"), label));
}

const char *get_condition(const json_t *object, const char *type, const char *field)
{
    const json_t *condition;
    size_t i;

    json_array_foreach (get(object, "status/conditions"), i, condition) {
        if (strcmp(get_text(condition, "type"), type) == 0)
            return get_text(condition, field);
    }
    return "";
}

const json_t *get_items(const json_t *snapshot, const char *resource)
{
    const json_t *items = get_key(get_key(snapshot, "items"), resource);

    return json_is_array(items) ? items : NULL;
}

const json_t *get_item(const json_t *snapshot, const char *resource, const char *space, const char *name)
{
    const json_t *item;
    size_t i;

    json_array_foreach (get_items(snapshot, resource), i, item) {
        if (strcmp(get_name(item), name) == 0 && (!space || strcmp(get_space(item), space) == 0))
            return item;
    }
    return NULL;
}

const json_t *get_named(const json_t *array, const char *name)
{
    const json_t *entry;
    size_t i;

    json_array_foreach (array, i, entry) {
        if (strcmp(get_text(entry, "name"), name) == 0)
            return entry;
    }
    return NULL;
}

long long get_count(const json_t *value)
{
    static const struct {
        const char *suffix;
        double factor;
    } units[] = {{"", 1}, {"m", 1e-3}, {"k", 1e3}, {"M", 1e6}, {"Ki", 1024}, {"Mi", 1 << 20}};
    const char *text = get_string(value), *unit = text + strspn(text, "0123456789.");
    double count = json_is_integer(value) ? (double)json_integer_value(value) : -1;

    for (size_t i = 0; unit > text && i < sizeof(units) / sizeof(units[0]); i++)
        if (strcmp(unit, units[i].suffix) == 0)
            count = strtod(text, NULL) * units[i].factor;
    return count < 0 ? -1 : count < 1e15 ? (long long)count : 1000000000000000;
}

long long get_pod_gpus(const json_t *spec)
{
    const json_t *container;
    long long sum = 0;
    size_t i;

    json_array_foreach (get_key(spec, "containers"), i, container) {
        const json_t *limit = get_key(get(container, "resources/limits"), GPU_RESOURCE);
        long long gpus = get_count(limit ? limit : get_key(get(container, "resources/requests"), GPU_RESOURCE));

        sum += gpus > 0 && gpus < GPUS_MAX && sum < GPUS_MAX ? gpus : 0;
    }
    return sum;
}

static bool is_among(const json_t *values, const char *text)
{
    const json_t *value;
    size_t i;

    json_array_foreach (values, i, value) {
        if (strcmp(get_string(value), text) == 0)
            return true;
    }
    return false;
}

bool get_expression(const json_t *labels, const json_t *expression)
{
    const char *operation = get_text(expression, "operator");
    const json_t *label = get_key(labels, get_text(expression, "key")), *values = get_key(expression, "values");

    if (strcmp(operation, "In") == 0)
        return label && is_among(values, get_string(label));
    if (strcmp(operation, "NotIn") == 0)
        return !label || !is_among(values, get_string(label));
    /* Gt and Lt compare numbers, which no label here has: what is not understood is no reason for a finding. */
    return strcmp(operation, "Exists") == 0 ? label != NULL : strcmp(operation, "DoesNotExist") != 0 || !label;
}

bool get_expressions(const json_t *labels, const json_t *expressions)
{
    const json_t *expression;
    size_t i;

    json_array_foreach (expressions, i, expression) {
        if (!get_expression(labels, expression))
            return false;
    }
    return true;
}

bool get_labels_match(const json_t *labels, const json_t *wanted)
{
    const char *key;
    json_t *value;

    json_object_foreach ((json_t *)wanted, key, value) {
        if (!json_equal(get_key(labels, key), value))
            return false;
    }
    return true;
}

bool get_selected(const json_t *labels, const json_t *selector)
{
    return get_labels_match(labels, get_key(selector, "matchLabels")) &&
           get_expressions(labels, get_key(selector, "matchExpressions"));
}
