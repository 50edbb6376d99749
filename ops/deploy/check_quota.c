/* SPDX-License-Identifier: Apache-2.0 */
/* check_quota.c - what the ResourceQuotas of a namespace say to the pods of a job. */
#include "check.h"

#include <stdio.h>

static void say_quantity(long long thousandths, char *ret_text, size_t bytes)
{
    if (thousandths % 1000 == 0)
        snprintf(ret_text, bytes, "%lld", thousandths / 1000);
    else
        snprintf(ret_text, bytes, "%lldm", thousandths);
}

/* One resource of one ResourceQuota. The API server counts pod by pod: the first one that does not fit is refused. */
static void check_quota(struct check *check, const struct deploy_set *set, const json_t *quota, const char *resource,
                        long long request)
{
    const json_t *hard = get_key(get(quota, "spec/hard"), resource),
                 *used = get_key(get(quota, "status/used"), resource);
    long long limit = get_quantity(hard), now = used ? get_quantity(used) : 0, fit;
    struct check_text text = {0};
    char requested[32], taken[32], limited[32];

    if (!hard || limit < 0 || now < 0 || request <= 0)
        return;
    fit = limit > now ? (limit - now) / request : 0;
    if (fit >= set->count)
        return;
    say_quantity(request, requested, sizeof(requested));
    say_quantity(now + fit * request, taken, sizeof(taken));
    say_quantity(limit, limited, sizeof(limited));
    CHECK_SAY(text.says, "exceeded quota: %s, requested: %s=%s, used: %s=%s, limited: %s=%s", get_name(quota), resource,
              requested, resource, taken, resource, limited);
    CHECK_SAY(text.why,
              "%lld of %lld pods fit into the ResourceQuota of namespace %s; a job with some of its pods waits", fit,
              set->count, check->job->space);
    CHECK_SAY(text.fix, "raise %s of resourcequota/%s, or ask for fewer GPUs", resource, get_name(quota));
    check_add(check, CHECK_ERROR, "namespace-quota", "the API server", get_name(quota), &text);
}

/* Does a quota count these pods? One with a scope that is not known here is taken as if it did not. */
static bool counts(const json_t *quota, const struct deploy_set *set)
{
    const json_t *scope, *expression;
    size_t i;

    json_array_foreach(get(quota, "spec/scopes"), i, scope)
    {
        const char *name = json_is_string(scope) ? json_string_value(scope) : "";
        bool ends = get_key(set->spec, "activeDeadlineSeconds") != NULL;

        if (!(strcmp(name, "Terminating") == 0 && ends) && !(strcmp(name, "NotTerminating") == 0 && !ends))
            return false;
    }
    json_array_foreach(get(quota, "spec/scopeSelector/matchExpressions"), i, expression)
    {
        const json_t *class = get_key(set->spec, "priorityClassName");
        json_t *labels = json_object(), *named;
        bool fits;

        if (strcmp(get_text(expression, "scopeName"), "PriorityClass") != 0) {
            json_decref(labels);
            return false;
        }
        if (class)
            json_object_set(labels, "class", (json_t *)class);
        named = json_pack("{s:s, s:s, s:O?}", "key", "class", "operator", get_text(expression, "operator"), "values",
                          get_key(expression, "values"));
        fits = named && get_expression(labels, named);
        json_decref(named);
        json_decref(labels);
        if (!fits)
            return false;
    }
    return true;
}

/* What a LimitRange of the namespace gives to containers that state nothing. */
static bool has_default(const struct check *check, const char *kind, const char *resource)
{
    const json_t *range, *limit;
    size_t i, l;

    json_array_foreach(get_items(check->snapshot, "limitranges"), i, range)
        json_array_foreach(get(range, "spec/limits"), l, limit)
    {
        if (strcmp(get_text(limit, "type"), "Container") != 0)
            continue;
        /* The default of the limit is that of the request, too. */
        if (get_key(get_key(limit, "default"), resource) ||
            (strcmp(kind, "requests") == 0 && get_key(get_key(limit, "defaultRequest"), resource)))
            return true;
    }
    return false;
}

static bool states(const json_t *container, const char *kind, const char *resource)
{
    const json_t *resources = get_key(container, "resources");

    return get_key(get_key(resources, "limits"), resource) ||
           (strcmp(kind, "requests") == 0 && get_key(get_key(resources, "requests"), resource));
}

/* Names of the containers that do not state a resource, divided by commas; false if all do. */
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
 * A quota of CPU or memory refuses pods of which a container does not state it. Resources are named in the order of the
 * API server, which is that of the alphabet.
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
        if (get_key(get(quota, "spec/hard"), rows[r].name) && !has_default(check, rows[r].kind, rows[r].resource) &&
            list_silent(set, rows[r].kind, rows[r].resource, names, sizeof(names)) && at < sizeof(missing))
            at += (size_t)snprintf(missing + at, sizeof(missing) - at, "%s%s for: %s", at ? "; " : "", rows[r].name,
                                   names);
    if (at == 0)
        return;
    CHECK_SAY(text.says, "failed quota: %s: must specify %s", get_name(quota), missing);
    CHECK_SAY(text.why, "namespace %s has a quota of it, so each container must say how much it takes",
              check->job->space);
    CHECK_SAY(text.fix, "set workload.resources.requests and limits, or give the namespace a LimitRange with defaults");
    check_add(check, CHECK_ERROR, "quota-unstated", "the API server", get_name(quota), &text);
}

void check_quotas(struct check *check, const struct deploy_set *set)
{
    static const char *const resources[] = {"nvidia.com/gpu", "cpu", "memory", "ephemeral-storage"};
    const json_t *quota;
    char name[64];
    size_t i;

    json_array_foreach(get_items(check->snapshot, "resourcequotas"), i, quota)
    {
        if (!counts(quota, set))
            continue;
        for (size_t r = 0; r < sizeof(resources) / sizeof(resources[0]); r++) {
            CHECK_SAY(name, "requests.%s", resources[r]);
            check_quota(check, set, quota, name, get_pod_request(set->spec, resources[r]));
            /* The short names of cpu, memory and ephemeral-storage mean requests as well. */
            if (r > 0)
                check_quota(check, set, quota, resources[r], get_pod_request(set->spec, resources[r]));
        }
        check_quota(check, set, quota, "pods", 1000);
        /* Without the defaults of LimitRanges nothing can be said. */
        if (check_knows(check, "limitranges"))
            check_stated(check, set, quota);
    }
}
