/* SPDX-License-Identifier: Apache-2.0 */
/* get.c - reading objects of Kubernetes. */
#include "get.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
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

const char *get_text(const json_t *object, const char *path)
{
    const json_t *value = get(object, path);

    return json_is_string(value) ? json_string_value(value) : "";
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
    const json_t *value = get_key(get(object, "metadata/labels"), label);

    return json_is_string(value) ? json_string_value(value) : "";
}

const char *get_condition(const json_t *object, const char *type, const char *field)
{
    const json_t *conditions = get(object, "status/conditions"), *condition;
    size_t i;

    json_array_foreach(conditions, i,
                       condition) if (strcmp(get_text(condition, "type"), type) == 0) return get_text(condition, field);
    return "";
}

const json_t *get_items(const json_t *snapshot, const char *resource)
{
    const json_t *items = get_key(get_key(snapshot, "items"), resource);

    return json_is_array(items) ? items : NULL;
}

const json_t *get_named(const json_t *array, const char *name)
{
    const json_t *entry;
    size_t i;

    json_array_foreach(array, i, entry) if (strcmp(get_text(entry, "name"), name) == 0) return entry;
    return NULL;
}

const json_t *get_item(const json_t *snapshot, const char *resource, const char *space, const char *name)
{
    const json_t *items = get_items(snapshot, resource), *item;
    size_t i;

    json_array_foreach(items, i, item) if (strcmp(get_name(item), name) == 0 &&
                                           (!space || strcmp(get_space(item), space) == 0)) return item;
    return NULL;
}

static double suffix_factor(const char *suffix)
{
    static const struct {
        const char *suffix;
        double factor;
    } table[] = {{"", 1},
                 {"n", 1e-9},
                 {"u", 1e-6},
                 {"m", 1e-3},
                 {"k", 1e3},
                 {"M", 1e6},
                 {"G", 1e9},
                 {"T", 1e12},
                 {"P", 1e15},
                 {"E", 1e18},
                 {"Ki", 1024},
                 {"Mi", 1 << 20},
                 {"Gi", 1 << 30},
                 {"Ti", 1099511627776.0},
                 {"Pi", 1125899906842624.0},
                 {"Ei", 1152921504606846976.0}};

    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++)
        if (strcmp(suffix, table[i].suffix) == 0)
            return table[i].factor;
    return 0;
}

/* A number as Kubernetes accepts it: digits with at most one point, then a suffix or a decimal exponent; else NAN. */
static double read_quantity(const char *text)
{
    const char *digits = text + (*text == '+' || *text == '-');
    size_t n = strspn(digits, "0123456789."), exponent;
    const char *point = memchr(digits, '.', n), *rest = digits + n;
    double factor;

    if (n == (point != NULL) || (point && memchr(point + 1, '.', (size_t)(rest - point) - 1)))
        return NAN;
    if ((*rest == 'e' || *rest == 'E') && rest[1]) {
        exponent = 1 + (rest[1] == '+' || rest[1] == '-');
        n = strspn(rest + exponent, "0123456789");
        return n > 0 && !rest[exponent + n] ? strtod(text, NULL) : NAN;
    }
    factor = suffix_factor(rest);
    return factor > 0 ? strtod(text, NULL) * factor : NAN;
}

long long get_quantity(const json_t *value)
{
    double number, whole;

    if (json_is_number(value))
        number = json_number_value(value) * 1000;
    else if (json_is_string(value))
        number = read_quantity(json_string_value(value)) * 1000;
    else
        return -1;
    if (!isfinite(number) || number < 0 || number >= 9e18)
        return -1;
    /* 2.007 * 1000 is slightly above 2007 in binary and must not be rounded up to 2008. */
    whole = nearbyint(number);
    return (long long)(fabs(number - whole) <= number * 1e-12 ? whole : ceil(number));
}

static long long amount_of(const json_t *value)
{
    long long amount = get_quantity(value);

    return amount > 0 ? amount : 0;
}

static long long request_in(const json_t *resources, const char *resource)
{
    const json_t *value = get_key(get_key(resources, "requests"), resource);

    return amount_of(value ? value : get_key(get_key(resources, "limits"), resource));
}

static long long limit_in(const json_t *resources, const char *resource)
{
    return amount_of(get_key(get_key(resources, "limits"), resource));
}

static long long add(long long one, long long other)
{
    long long sum;

    return __builtin_add_overflow(one, other, &sum) ? LLONG_MAX : sum;
}

/*
 * As the scheduler computes it: containers run concurrently; init containers run before them one by one, except those
 * with restartPolicy Always, which run concurrently with all that follow. A value of the pod as a whole replaces the
 * sum. The RuntimeClass adds its overhead.
 */
static long long pod_sum(const json_t *spec, const char *resource,
                         long long (*of)(const json_t *resources, const char *resource))
{
    const json_t *container, *whole = get_key(spec, "resources");
    long long sum = 0, beside = 0, most = 0, overhead = amount_of(get_key(get_key(spec, "overhead"), resource)), amount;
    size_t i;

    json_array_foreach(get_key(spec, "initContainers"), i, container)
    {
        amount = add(beside, of(get_key(container, "resources"), resource));
        if (strcmp(get_text(container, "restartPolicy"), "Always") == 0)
            beside = amount;
        most = amount > most ? amount : most;
    }
    json_array_foreach(get_key(spec, "containers"), i, container) sum =
        add(sum, of(get_key(container, "resources"), resource));
    sum = add(sum, beside);
    sum = sum > most ? sum : most;
    amount = of(whole, resource);
    sum = amount > 0 ? amount : sum;
    return sum > 0 || of == request_in ? add(sum, overhead) : 0;
}

long long get_pod_request(const json_t *spec, const char *resource)
{
    return pod_sum(spec, resource, request_in);
}

long long get_pod_limit(const json_t *spec, const char *resource)
{
    return pod_sum(spec, resource, limit_in);
}

static bool is_among(const json_t *values, const char *text)
{
    const json_t *value;
    size_t i;

    json_array_foreach(values, i,
                       value) if (json_is_string(value) && strcmp(json_string_value(value), text) == 0) return true;
    return false;
}

bool get_labels_match(const json_t *labels, const json_t *wanted)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)wanted, key, value) if (!json_equal(get_key(labels, key), value)) return false;
    return true;
}

bool get_expression(const json_t *labels, const json_t *expression)
{
    const char *operation = get_text(expression, "operator");
    const json_t *label = get_key(labels, get_text(expression, "key")), *values = get_key(expression, "values");
    const char *text = json_is_string(label) ? json_string_value(label) : NULL;

    if (strcmp(operation, "In") == 0)
        return text && is_among(values, text);
    if (strcmp(operation, "NotIn") == 0)
        return !text || !is_among(values, text);
    if (strcmp(operation, "Exists") == 0)
        return text != NULL;
    if (strcmp(operation, "DoesNotExist") == 0)
        return text == NULL;
    if (text && (strcmp(operation, "Gt") == 0 || strcmp(operation, "Lt") == 0)) {
        long long limit = atoll(json_string_value(json_array_get(values, 0)) ?: "0");

        return *operation == 'G' ? atoll(text) > limit : atoll(text) < limit;
    }
    return false;
}

bool get_selected(const json_t *labels, const json_t *selector)
{
    const char *key;
    json_t *value;
    const json_t *expression;
    size_t i;

    json_object_foreach((json_t *)get_key(selector, "matchLabels"), key, value)
    {
        const json_t *label = get_key(labels, key);

        if (!label || !json_equal(label, value))
            return false;
    }
    json_array_foreach(get_key(selector, "matchExpressions"), i,
                       expression) if (!get_expression(labels, expression)) return false;
    return true;
}
