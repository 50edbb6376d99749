/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_limits.c - LimitRanges of the namespace: their defaults for containers, and what they refuse. The API server
 * refuses single pods; Kueue checks the same earlier, with its own messages.
 */
#include "deploy_check.h"

#include <stdio.h>

#define RESOURCES_MAX 16

static const char *const lists[] = {"initContainers", "containers"};

/* --- defaults --- */

/* Copies the keys of `from` that `to` lacks. */
static void fill(json_t *to, const json_t *from)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)from, key, value) if (!json_object_get(to, key)) json_object_set(to, key, value);
}

/* The entry `name` of `object`, created if missing; NULL if it is not an object. */
static json_t *entry_of(json_t *object, const char *key)
{
    if (!json_object_get(object, key))
        json_object_set_new(object, key, json_object());
    return json_is_object(json_object_get(object, key)) ? json_object_get(object, key) : NULL;
}

static void complete(const json_t *snapshot, json_t *container)
{
    json_t *resources = entry_of(container, "resources");
    json_t *limits = resources ? entry_of(resources, "limits") : NULL;
    json_t *requests = limits ? entry_of(resources, "requests") : NULL;
    const json_t *range, *limit;
    size_t i, l;

    if (!requests)
        return;
    /* A limit without a request is the request, too; this takes precedence over all defaults. */
    fill(requests, limits);
    json_array_foreach(get_items(snapshot, "limitranges"), i, range)
        json_array_foreach(get(range, "spec/limits"), l, limit)
    {
        if (strcmp(get_text(limit, "type"), "Container") != 0)
            continue;
        fill(limits, get_key(limit, "default"));
        fill(requests, get_key(limit, "defaultRequest"));
        fill(requests, get_key(limit, "default"));
    }
}

json_t *check_limits_apply(const json_t *snapshot, const json_t *spec)
{
    json_t *copy = json_deep_copy(spec), *container;
    size_t i;

    for (size_t n = 0; copy && n < 2; n++)
        json_array_foreach(get_key(copy, lists[n]), i, container) if (json_is_object(container))
            complete(snapshot, container);
    return copy;
}

/* --- refusals --- */

/* The value that a container or a pod specifies, as the API server formats it. */
struct stated {
    long long amount; /* -1: nothing */
    char text[64];
};

static struct stated stated_of(const json_t *container, const char *kind, const char *resource)
{
    const json_t *value = get_key(get_key(get_key(container, "resources"), kind), resource);
    struct stated stated = {.amount = value ? get_quantity(value) : -1};

    if (json_is_string(value))
        CHECK_FORMAT(stated.text, "%s", json_string_value(value));
    else if (json_is_integer(value))
        CHECK_FORMAT(stated.text, "%lld", (long long)json_integer_value(value));
    return stated;
}

/* For a pod, the sum over its containers. */
static struct stated sum_of(const json_t *spec, const char *kind, const char *resource)
{
    struct stated sum = {.amount = -1};
    const json_t *container;
    size_t i;

    json_array_foreach(get_key(spec, "containers"), i, container)
    {
        struct stated one = stated_of(container, kind, resource);

        if (one.amount < 0)
            continue;
        sum.amount = sum.amount < 0 ? one.amount : sum.amount + one.amount;
        CHECK_FORMAT(sum.text, "%s", one.text);
    }
    if (sum.amount >= 0 && json_array_size(get_key(spec, "containers")) > 1) {
        if (sum.amount % 1000 == 0)
            CHECK_FORMAT(sum.text, "%lld", sum.amount / 1000);
        else
            CHECK_FORMAT(sum.text, "%lldm", sum.amount);
    }
    return sum;
}

/* Checks one bound of one resource: true, with the message of the API server, if it is violated. */
static bool breaks(const char *type, const char *resource, const char *bound, const json_t *enforced,
                   struct stated request, struct stated limit, char *ret_says, size_t bytes)
{
    bool is_max = strcmp(bound, "maximum") == 0;
    struct stated first = is_max ? limit : request, second = is_max ? request : limit;
    const char *names[] = {is_max ? "limit" : "request", is_max ? "request" : "limit"};
    long long amount = get_quantity(enforced);
    char text[64];
    size_t at;

    if (amount < 0)
        return false;
    if (json_is_string(enforced))
        CHECK_FORMAT(text, "%s", json_string_value(enforced));
    else
        CHECK_FORMAT(text, "%lld", amount / 1000);
    at = (size_t)snprintf(ret_says, bytes, "%s %s usage per %s is %s", bound, resource, type, text);
    if (at >= bytes)
        return false;
    if (first.amount < 0) {
        snprintf(ret_says + at, bytes - at, ".  No %s is specified", names[0]);
        return true;
    }
    for (int i = 0; i < 2; i++) {
        struct stated stated = i ? second : first;

        if (stated.amount < 0 || (is_max ? stated.amount <= amount : stated.amount >= amount))
            continue;
        snprintf(ret_says + at, bytes - at, ", but %s is %s", names[i], stated.text);
        return true;
    }
    return false;
}

/* Resources with a violated bound in alphabetical order, as Kueue lists them. */
struct broken {
    const char *names[RESOURCES_MAX];
    int n;
};

static void note(struct broken *broken, const char *name)
{
    int at = broken->n;

    if (broken->n == RESOURCES_MAX)
        return;
    for (; at > 0 && strcmp(broken->names[at - 1], name) > 0; at--)
        broken->names[at] = broken->names[at - 1];
    broken->names[at] = name;
    broken->n++;
}

static void add(struct check *check, const char *by, const char *says, const char *object, const char *why)
{
    struct check_text text = {0};

    CHECK_FORMAT(text.says, "%s", says);
    CHECK_FORMAT(text.why, "%s: no pod like this is created", why);
    CHECK_FORMAT(text.fix, "kubectl -n %s get limitranges -o yaml, and compare with workload.resources",
                 check->job->space);
    check_add(check, CHECK_ERROR, "limit-range", by, object, &text);
}

/* Adds the finding of Kueue for the resources listed, if the job has a queue. */
static void add_kueue(struct check *check, size_t set, const char *path, const struct broken *broken, const char *what,
                      const char *wrong, const char *object, const char *why)
{
    char says[512], names[256] = "";
    size_t at = 0;

    if (!check->job->queue || broken->n == 0)
        return;
    for (int i = 0; i < broken->n && at < sizeof(names); i++)
        at += (size_t)snprintf(names + at, sizeof(names) - at, "%s\"%s\"", i ? "," : "", broken->names[i]);
    CHECK_FORMAT(says, "%s: spec.podSets[%zu].template.spec%s: Invalid value: [%s]: %s", what, set, path, names, wrong);
    add(check, "Kueue", says, object, why);
}

/* Checks all bounds of a LimitRange entry; `path` is the path of the container in its pod, "" for the pod. */
static void check_entry(struct check *check, size_t set, const char *path, const json_t *container, const json_t *limit,
                        const char *range)
{
    static const char *const bounds[] = {"maximum", "minimum"}, *const keys[] = {"max", "min"};
    static const char *const wrong[] = {"requests must not be above the limitRange max",
                                        "requests must not be below the limitRange min"};
    const json_t *spec = check->job->sets[set].spec;
    char says[512], why[256];

    CHECK_FORMAT(why, "LimitRange %.100s of namespace %.100s", range, check->job->space);
    for (size_t b = 0; b < 2; b++) {
        struct broken broken = {0};
        const char *resource;
        json_t *enforced;

        json_object_foreach((json_t *)get_key(limit, keys[b]), resource, enforced)
        {
            struct stated request =
                container ? stated_of(container, "requests", resource) : sum_of(spec, "requests", resource);
            struct stated most =
                container ? stated_of(container, "limits", resource) : sum_of(spec, "limits", resource);

            if (!breaks(get_text(limit, "type"), resource, bounds[b], enforced, request, most, says, sizeof(says)))
                continue;
            if (!check->job->queue)
                add(check, "the API server", says, range, why);
            if (request.amount >= 0 || most.amount >= 0)
                note(&broken, resource);
        }
        add_kueue(check, set, path, &broken, "resources didn't satisfy LimitRange constraints", wrong[b], range, why);
    }
}

/* Kueue also refuses what the API server would refuse in the admitted Job. */
static void check_requests(struct check *check, size_t set, const char *path, const json_t *container)
{
    struct broken broken = {0};
    const char *resource;
    json_t *value;

    json_object_foreach((json_t *)get(container, "resources/limits"), resource, value)
    {
        long long request = get_quantity(get_key(get(container, "resources/requests"), resource));

        if (request > get_quantity(value))
            note(&broken, resource);
    }
    add_kueue(check, set, path, &broken, "resources validation failed", "requests must not exceed its limits",
              get_text(container, "name"), "a container requests more than its limit");
}

bool check_limits(struct check *check, size_t set)
{
    const json_t *spec = check->job->sets[set].spec, *range, *limit, *container;
    size_t before = json_array_size(check->findings), i, l, c;
    char path[64];

    for (size_t n = 0; n < 2; n++)
        json_array_foreach(get_key(spec, lists[n]), c, container)
        {
            CHECK_FORMAT(path, ".%s[%zu]", lists[n], c);
            check_requests(check, set, path, container);
        }
    if (json_array_size(check->findings) > before)
        return false;
    json_array_foreach(get_items(check->snapshot, "limitranges"), i, range)
        json_array_foreach(get(range, "spec/limits"), l, limit)
    {
        if (strcmp(get_text(limit, "type"), "Pod") == 0)
            check_entry(check, set, "", NULL, limit, get_name(range));
        if (strcmp(get_text(limit, "type"), "Container") != 0)
            continue;
        for (size_t n = 0; n < 2; n++)
            json_array_foreach(get_key(spec, lists[n]), c, container)
            {
                CHECK_FORMAT(path, ".%s[%zu]", lists[n], c);
                check_entry(check, set, path, container, limit, get_name(range));
            }
    }
    return json_array_size(check->findings) == before;
}
