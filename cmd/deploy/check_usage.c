/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_usage.c - resources in use on the nodes.
 *
 * Between the admission of a job by Kueue and the binding of its pods nothing runs, but the resources are assigned.
 * With topology-aware scheduling the Workload lists the domains of its pods; without, pods are assigned where they fit.
 */
#include "deploy_check.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>

#define WORKLOAD "kueue.x-k8s.io/workload" /* annotation of a pod */
#define POD_SET "kueue.x-k8s.io/podset"    /* label of a pod */

static const char *const always[CHECK_N_ALWAYS] = {"nvidia.com/gpu", "cpu", "memory", "ephemeral-storage", "pods"};

/* --- resources --- */

/* Does a DeviceClass provide the resource? Then the scheduler allocates devices, and nodes do not list it. */
static bool is_of_class(const struct check *check, const char *name)
{
    const json_t *class;
    size_t i;

    if (strncmp(name, "deviceclass.resource.kubernetes.io/", 35) == 0)
        return true;
    json_array_foreach(get_items(check->snapshot, "deviceclasses"), i,
                       class) if (strcmp(get_text(class, "spec/extendedResourceName"), name) == 0) return true;
    return false;
}

static void note_resource(struct check *check, const char *name)
{
    struct check_usage *usage = &check->usage;

    for (int r = 0; r < usage->n_resources; r++)
        if (strcmp(usage->resources[r], name) == 0)
            return;
    if (usage->n_resources < CHECK_RESOURCES_MAX && !is_of_class(check, name))
        usage->resources[usage->n_resources++] = name;
}

static void note_resources(struct check *check, const json_t *object)
{
    static const char *const kinds[] = {"requests", "limits"};
    const char *name;
    json_t *value;

    for (size_t k = 0; k < sizeof(kinds) / sizeof(kinds[0]); k++)
        json_object_foreach((json_t *)get_key(get_key(object, "resources"), kinds[k]), name, value)
            note_resource(check, name);
}

static void list_resources(struct check *check)
{
    static const char *const lists[] = {"containers", "initContainers"};
    const json_t *container;
    size_t i;

    for (int r = 0; r < CHECK_N_ALWAYS; r++)
        note_resource(check, always[r]);
    for (int s = 0; s < check->job->n_sets; s++) {
        note_resources(check, check->job->sets[s].spec);
        for (size_t n = 0; n < sizeof(lists) / sizeof(lists[0]); n++)
            json_array_foreach(get_key(check->job->sets[s].spec, lists[n]), i, container)
                note_resources(check, container);
    }
}

/* --- bound pods --- */

static long long number_of(const struct check *check, const char *node)
{
    const json_t *number = get_key(check->usage.index, node);

    return json_is_integer(number) ? json_integer_value(number) : -1;
}

static void add_usage(struct check *check, long long number, const json_t *spec, long long count)
{
    for (int r = 0; r < check->usage.n_resources; r++) {
        long long request = r == CHECK_PODS ? 1000 : get_pod_request(spec, check->usage.resources[r]);
        long long *used = &check->usage.used[number][r];

        if (__builtin_mul_overflow(request, count, &request) || __builtin_add_overflow(*used, request, used))
            *used = LLONG_MAX;
    }
}

void check_use(struct check *check, const json_t *node, const json_t *spec, long long count)
{
    long long number = number_of(check, get_name(node));

    if (number >= 0 && check->usage.used)
        add_usage(check, number, spec, count);
}

static bool has_ended(const json_t *pod)
{
    const char *phase = get_text(pod, "status/phase");

    return strcmp(phase, "Succeeded") == 0 || strcmp(phase, "Failed") == 0;
}

static void add_bound(struct check *check)
{
    const json_t *pod;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "pods"), i, pod)
    {
        long long number = number_of(check, get_text(pod, "spec/nodeName"));

        if (number >= 0 && !has_ended(pod))
            add_usage(check, number, get_key(pod, "spec"), 1);
    }
}

/* --- admitted Workloads --- */

/* A pod set of an admitted Workload. */
struct coming {
    const char *workload, *space, *name;
    struct deploy_set set;
    const json_t *flavor; /* its labels and tolerations; NULL: none */
};

/* Does a pod belong to it and have a node? A pod that succeeded no longer needs one. */
static bool is_placed(const struct coming *coming, const json_t *pod)
{
    const json_t *workload = get_key(get(pod, "metadata/annotations"), WORKLOAD);

    return json_is_string(workload) && strcmp(json_string_value(workload), coming->workload) == 0 &&
           strcmp(get_space(pod), coming->space) == 0 && strcmp(get_label(pod, POD_SET), coming->name) == 0 &&
           *get_text(pod, "spec/nodeName") && strcmp(get_text(pod, "status/phase"), "Failed") != 0;
}

/* On any node, or with `labels` on a node that has them. */
static long long count_placed(const struct check *check, const struct coming *coming, const json_t *labels)
{
    const json_t *pod;
    long long n = 0;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "pods"), i, pod)
    {
        const json_t *node;

        if (!is_placed(coming, pod))
            continue;
        node = labels ? get_item(check->snapshot, "nodes", NULL, get_text(pod, "spec/nodeName")) : NULL;
        n += !labels || get_labels_match(get(node, "metadata/labels"), labels);
    }
    return n;
}

/* Assigns `count` pods to nodes with these labels (NULL: all) where they fit. */
static void place(struct check *check, const struct coming *coming, const json_t *labels, long long count)
{
    const json_t *node;
    size_t i;

    count -= count_placed(check, coming, labels);
    json_array_foreach(get_items(check->snapshot, "nodes"), i, node)
    {
        long long room;

        if (count <= 0)
            return;
        if (labels && !get_labels_match(get(node, "metadata/labels"), labels))
            continue;
        room = check_node_room(check, node, &coming->set, get(coming->flavor, "spec/nodeLabels"),
                               get(coming->flavor, "spec/tolerations"));
        if (room > count)
            room = count;
        if (room <= 0)
            continue;
        add_usage(check, number_of(check, get_name(node)), coming->set.spec, room);
        check->usage.n_coming += room;
        count -= room;
    }
}

/* --- domains assigned by Kueue --- */

/* One value of a level in domain `d` of a slice: the same for all, or a prefix, its own part, a suffix. */
static void value_of(const json_t *values, size_t d, char *ret_text, size_t bytes)
{
    const json_t *individual = get_key(values, "individual"), *root = json_array_get(get_key(individual, "roots"), d);

    if (individual)
        snprintf(ret_text, bytes, "%s%s%s", get_text(individual, "prefix"),
                 json_is_string(root) ? json_string_value(root) : "", get_text(individual, "suffix"));
    else
        snprintf(ret_text, bytes, "%s", get_text(values, "universal"));
}

static long long count_of(const json_t *counts, size_t d)
{
    const json_t *count = get_key(counts, "universal");

    if (!count)
        count = json_array_get(get_key(counts, "individual"), d);
    return json_is_integer(count) ? json_integer_value(count) : 0;
}

/* The labels of a domain; a new reference. `values` are those of v1beta1: one array of strings for each domain. */
static json_t *labels_of(const json_t *levels, const json_t *values, const json_t *per_level, size_t d)
{
    json_t *labels = json_object(), *level;
    char text[256];
    size_t l;

    json_array_foreach((json_t *)levels, l, level)
    {
        const json_t *value = json_array_get(values, l);

        if (!json_is_string(level))
            continue;
        if (per_level)
            value_of(json_array_get(per_level, l), d, text, sizeof(text));
        else
            snprintf(text, sizeof(text), "%s", json_is_string(value) ? json_string_value(value) : "");
        json_object_set_new(labels, json_string_value(level), json_string(text));
    }
    return labels;
}

static void place_domain(struct check *check, const struct coming *coming, json_t *labels, long long count)
{
    place(check, coming, labels, count);
    json_decref(labels);
}

static void place_assigned(struct check *check, const struct coming *coming, const json_t *topology)
{
    const json_t *levels = get_key(topology, "levels"), *slice, *domain;
    size_t i;

    /* v1beta2 has slices of domains, v1beta1 the domains themselves. */
    json_array_foreach(get_key(topology, "slices"), i, slice)
    {
        size_t n = (size_t)get_number(slice, "domainCount", 0),
               nodes = json_array_size(get_items(check->snapshot, "nodes"));

        for (size_t d = 0; d < n && d < nodes; d++)
            place_domain(check, coming, labels_of(levels, NULL, get_key(slice, "valuesPerLevel"), d),
                         count_of(get_key(slice, "podCounts"), d));
    }
    json_array_foreach(get_key(topology, "domains"), i, domain) place_domain(
        check, coming, labels_of(levels, get_key(domain, "values"), NULL, 0), get_number(domain, "count", 0));
}

/* --- Workloads --- */

static void place_set(struct check *check, const json_t *workload, const json_t *assignment)
{
    struct coming coming = {.workload = get_name(workload), .space = get_space(workload)};
    const json_t *set, *topology = get_key(assignment, "topologyAssignment"), *flavors = get_key(assignment, "flavors");
    const char *flavor = get_text(flavors, "cpu");

    coming.name = get_text(assignment, "name");
    set = get_named(get(workload, "spec/podSets"), coming.name);
    coming.set = (struct deploy_set){.name = coming.name, .spec = get(set, "template/spec")};
    coming.set.count = get_number(assignment, "count", get_number(set, "count", 0));
    if (json_is_string(get_key(flavors, "nvidia.com/gpu")))
        flavor = json_string_value(get_key(flavors, "nvidia.com/gpu"));
    coming.flavor = get_item(check->snapshot, "resourceflavors", NULL, flavor);
    if (!set || count_placed(check, &coming, NULL) >= coming.set.count)
        return;
    if (topology)
        place_assigned(check, &coming, topology);
    else
        place(check, &coming, NULL, coming.set.count);
}

static void add_admitted(struct check *check)
{
    const json_t *workload, *assignment;
    size_t i, a;

    json_array_foreach(get_items(check->snapshot, "workloads"), i, workload)
    {
        if (strcmp(get_condition(workload, "QuotaReserved", "status"), "True") != 0 ||
            strcmp(get_condition(workload, "Finished", "status"), "True") == 0)
            continue;
        json_array_foreach(get(workload, "status/admission/podSetAssignments"), a, assignment)
            place_set(check, workload, assignment);
    }
}

void check_usage_make(struct check *check)
{
    const json_t *nodes = get_items(check->snapshot, "nodes"), *node;
    size_t i;

    list_resources(check);
    check->usage.index = json_object();
    check->usage.used = calloc(json_array_size(nodes) + 1, sizeof(*check->usage.used));
    check->usage.placed = json_array();
    check->usage.kept_off = json_object();
    if (!check->usage.index || !check->usage.used || !check->usage.placed || !check->usage.kept_off) {
        check->no_memory = true;
        return;
    }
    json_array_foreach(nodes, i, node)
        json_object_set_new(check->usage.index, get_name(node), json_integer((long long)i));
    add_bound(check);
    add_admitted(check);
}

void check_usage_done(struct check *check)
{
    json_decref(check->usage.index);
    json_decref(check->usage.placed);
    json_decref(check->usage.kept_off);
    free(check->usage.used);
    check->usage = (struct check_usage){0};
}

long long check_used(const struct check *check, const json_t *node, int resource)
{
    long long number = number_of(check, get_name(node));

    return number >= 0 && check->usage.used ? check->usage.used[number][resource] : 0;
}
