/* SPDX-License-Identifier: Apache-2.0 */
/* check_quota.c - whether the ResourceQuotas of a namespace allow the pods of a job. */
#include "deploy_check.h"

#include <limits.h>
#include <stdio.h>

void check_format_amount(const char *resource, long long thousandths, char *ret_text, size_t bytes)
{
    static const char *const units[] = {"", "Ki", "Mi", "Gi", "Ti"};
    long long whole = thousandths / 1000;
    int unit = 0;

    if (strstr(resource, "memory") || strstr(resource, "storage"))
        for (; unit < 4 && whole != 0 && whole % 1024 == 0; unit++)
            whole /= 1024;
    if (thousandths % 1000 != 0)
        snprintf(ret_text, bytes, "%lldm", thousandths);
    else
        snprintf(ret_text, bytes, "%lld%s", whole, units[unit]);
}

/* What a pod uses of an entry of a ResourceQuota; 0 for entries that do not concern pods. */
static long long used_by(const struct deploy_set *set, const char *entry)
{
    if (strcmp(entry, "pods") == 0 || strcmp(entry, "count/pods") == 0)
        return 1000;
    if (strncmp(entry, "requests.", 9) == 0)
        return get_pod_request(set->spec, entry + 9);
    if (strncmp(entry, "limits.", 7) == 0)
        return get_pod_limit(set->spec, entry + 7);
    /* The short names mean requests. */
    if (strcmp(entry, "cpu") == 0 || strcmp(entry, "memory") == 0 || strcmp(entry, "ephemeral-storage") == 0)
        return get_pod_request(set->spec, entry);
    return 0;
}

/* The QoS class BestEffort: neither CPU nor memory is specified; GPUs do not matter. */
static bool is_best_effort(const struct deploy_set *set)
{
    static const char *const resources[] = {"cpu", "memory"};

    for (size_t r = 0; r < sizeof(resources) / sizeof(resources[0]); r++)
        if (get_pod_request(set->spec, resources[r]) > 0 || get_pod_limit(set->spec, resources[r]) > 0)
            return false;
    return true;
}

static bool class_fits(const struct deploy_set *set, const json_t *expression)
{
    const json_t *class = get_key(set->spec, "priorityClassName");
    json_t *labels = json_object(), *named;
    bool fits;

    if (class)
        json_object_set(labels, "class", (json_t *)class);
    named = json_pack("{s:s, s:s, s:O?}", "key", "class", "operator", get_text(expression, "operator"), "values",
                      get_key(expression, "values"));
    fits = named && get_expression(labels, named);
    json_decref(named);
    json_decref(labels);
    return fits;
}

/* Are the pods in a scope? `expression` refines it and may be NULL. Unknown scopes: no. */
static bool is_in_scope(const struct deploy_set *set, const char *scope, const json_t *expression)
{
    bool ends = get_key(set->spec, "activeDeadlineSeconds") != NULL;

    if (strcmp(scope, "Terminating") == 0)
        return ends;
    if (strcmp(scope, "NotTerminating") == 0)
        return !ends;
    if (strcmp(scope, "BestEffort") == 0)
        return is_best_effort(set);
    if (strcmp(scope, "NotBestEffort") == 0)
        return !is_best_effort(set);
    return strcmp(scope, "PriorityClass") == 0 && (!expression || class_fits(set, expression));
}

/* Does a quota apply to these pods? Only if they are in all of its scopes. */
static bool counts(const json_t *quota, const struct deploy_set *set)
{
    const json_t *scope, *expression;
    size_t i;

    json_array_foreach(
        get(quota, "spec/scopes"), i,
        scope) if (!is_in_scope(set, json_is_string(scope) ? json_string_value(scope) : "", NULL)) return false;
    json_array_foreach(get(quota, "spec/scopeSelector/matchExpressions"), i,
                       expression) if (!is_in_scope(set, get_text(expression, "scopeName"), expression)) return false;
    return true;
}

/* What the pod sets before this one use of an entry: they are created as well. */
static long long used_before(const struct check *check, const struct deploy_set *set, const json_t *quota,
                             const char *entry)
{
    long long sum = 0, amount;

    for (const struct deploy_set *other = check->job->sets; other < set; other++)
        if (counts(quota, other) && (__builtin_mul_overflow(used_by(other, entry), other->count, &amount) ||
                                     __builtin_add_overflow(sum, amount, &sum)))
            return LLONG_MAX;
    return sum;
}

/* The number of pods for which an entry has room; -1: it does not count pods. */
static long long room_in(const struct check *check, const struct deploy_set *set, const json_t *quota,
                         const char *entry, long long *ret_now)
{
    const json_t *used = get_key(get(quota, "status/used"), entry);
    long long limit = get_quantity(get_key(get(quota, "spec/hard"), entry)), each = used_by(set, entry);

    *ret_now = used ? get_quantity(used) : 0;
    if (limit < 0 || *ret_now < 0 || each <= 0)
        return -1;
    if (__builtin_add_overflow(*ret_now, used_before(check, set, quota, entry), ret_now))
        return 0;
    return limit > *ret_now ? (limit - *ret_now) / each : 0;
}

/* The API server checks pod by pod: it refuses the first that does not fit and lists all entries it exceeds. */
static void check_amounts(struct check *check, const struct deploy_set *set, const json_t *quota)
{
    const json_t *hard = get(quota, "spec/hard");
    long long fit = set->count, room, now;
    char requested[200] = "", used[200] = "", limited[200] = "", amount[32];
    size_t at_requested = 0, at_used = 0, at_limited = 0;
    struct check_text text = {0};
    const char *entry, *first = NULL;
    json_t *value;

    json_object_foreach((json_t *)hard, entry, value)
    {
        room = room_in(check, set, quota, entry, &now);
        fit = room >= 0 && room < fit ? room : fit;
    }
    if (fit >= set->count)
        return;
    json_object_foreach((json_t *)hard, entry, value)
    {
        const char *comma = first ? "," : "";

        if (room_in(check, set, quota, entry, &now) != fit || at_requested >= sizeof(requested) ||
            at_used >= sizeof(used) || at_limited >= sizeof(limited))
            continue;
        first = first ? first : entry;
        check_format_amount(entry, used_by(set, entry), amount, sizeof(amount));
        at_requested += (size_t)snprintf(requested + at_requested, sizeof(requested) - at_requested, "%s%s=%s", comma,
                                         entry, amount);
        check_format_amount(entry, now + fit * used_by(set, entry), amount, sizeof(amount));
        at_used += (size_t)snprintf(used + at_used, sizeof(used) - at_used, "%s%s=%s", comma, entry, amount);
        check_format_amount(entry, get_quantity(value), amount, sizeof(amount));
        at_limited +=
            (size_t)snprintf(limited + at_limited, sizeof(limited) - at_limited, "%s%s=%s", comma, entry, amount);
    }
    CHECK_FORMAT(text.says, "exceeded quota: %s, requested: %s, used: %s, limited: %s", get_name(quota), requested,
                 used, limited);
    CHECK_FORMAT(text.why,
                 "%lld of %lld pods fit into the ResourceQuota of namespace %s; a job with some of its pods waits", fit,
                 set->count, check->job->space);
    CHECK_FORMAT(text.fix, "raise %s of resourcequota/%s, or ask for fewer GPUs", first ? first : "it",
                 get_name(quota));
    check_add(check, CHECK_ERROR, "namespace-quota", "the API server", get_name(quota), &text);
}

static bool states(const json_t *container, const char *kind, const char *resource)
{
    const json_t *resources = get_key(container, "resources");

    return get_key(get_key(resources, "limits"), resource) ||
           (strcmp(kind, "requests") == 0 && get_key(get_key(resources, "requests"), resource));
}

/* The names of the containers that do not specify a resource, separated by commas; false: all specify it. */
static bool list_silent(const struct deploy_set *set, const char *kind, const char *resource, char *ret_text,
                        size_t bytes)
{
    static const char *const lists[] = {"containers", "initContainers"};
    const json_t *container;
    size_t at = 0, i;

    *ret_text = '\0';
    for (size_t n = 0; n < 2; n++)
        json_array_foreach(get_key(set->spec, lists[n]), i,
                           container) if (!states(container, kind, resource) && at < bytes) at +=
            (size_t)snprintf(ret_text + at, bytes - at, "%s%.64s", at ? "," : "", get_text(container, "name"));
    return at > 0;
}

/*
 * A quota of CPU or memory refuses pods with a container that does not specify it. Resources are listed alphabetically,
 * as the API server does.
 */
static void check_stated(struct check *check, const struct deploy_set *set, const json_t *quota)
{
    static const struct {
        const char *name, *kind, *resource;
    } rows[] = {{"cpu", "requests", "cpu"},
                {"limits.cpu", "limits", "cpu"},
                {"limits.memory", "limits", "memory"},
                {"memory", "requests", "memory"},
                {"requests.cpu", "requests", "cpu"},
                {"requests.memory", "requests", "memory"}};
    struct check_text text = {0};
    char missing[512] = "", names[200];
    size_t at = 0;

    for (size_t r = 0; r < sizeof(rows) / sizeof(rows[0]); r++)
        if (get_key(get(quota, "spec/hard"), rows[r].name) &&
            list_silent(set, rows[r].kind, rows[r].resource, names, sizeof(names)) && at < sizeof(missing))
            at += (size_t)snprintf(missing + at, sizeof(missing) - at, "%s%s for: %s", at ? "; " : "", rows[r].name,
                                   names);
    if (at == 0)
        return;
    CHECK_FORMAT(text.says, "failed quota: %s: must specify %s", get_name(quota), missing);
    CHECK_FORMAT(text.why, "namespace %s has a quota of it, so each container must specify it", check->job->space);
    CHECK_FORMAT(text.fix,
                 "set workload.resources.requests and limits, or give the namespace a LimitRange with defaults");
    check_add(check, CHECK_ERROR, "quota-unstated", "the API server", get_name(quota), &text);
}

void check_quotas(struct check *check, const struct deploy_set *set)
{
    const json_t *quota;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "resourcequotas"), i, quota)
    {
        if (!counts(quota, set))
            continue;
        check_amounts(check, set, quota);
        /* Without the defaults of LimitRanges no prediction is possible. */
        if (check_knows(check, "limitranges"))
            check_stated(check, set, quota);
    }
}
