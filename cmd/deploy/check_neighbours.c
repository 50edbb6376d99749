/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_neighbours.c - pods that keep others off a node: by the ports of the host that they take, and by anti-affinity.
 *
 * Anti-affinity that is only preferred keeps no pod off. A term with matchLabelKeys is left out: its labels are known
 * only when the pod exists.
 */
#include "deploy_check.h"

#include <stdio.h>

#define HOSTNAME "kubernetes.io/hostname"
#define ANTI_AFFINITY "affinity/podAntiAffinity/requiredDuringSchedulingIgnoredDuringExecution"

/* --- ports of the host --- */

/* 0: the port is not one of the host. In the network of the host every port is. */
static long long host_port(const json_t *spec, const json_t *port)
{
    long long number = get_number(port, "hostPort", 0);

    return number == 0 && get_flag(spec, "hostNetwork") ? get_number(port, "containerPort", 0) : number;
}

/* To the scheduler "::" is an address like others. */
static bool is_any_address(const char *address)
{
    return !*address || strcmp(address, "0.0.0.0") == 0;
}

static bool ports_collide(const json_t *one, const json_t *other)
{
    const char *protocols[] = {get_text(one, "protocol"), get_text(other, "protocol")};
    const char *addresses[] = {get_text(one, "hostIP"), get_text(other, "hostIP")};

    for (int i = 0; i < 2; i++)
        protocols[i] = *protocols[i] ? protocols[i] : "TCP";
    return strcmp(protocols[0], protocols[1]) == 0 &&
           (is_any_address(addresses[0]) || is_any_address(addresses[1]) || strcmp(addresses[0], addresses[1]) == 0);
}

static void add_ports(const json_t *spec, const json_t *container, json_t *ports)
{
    json_t *port;
    size_t i;

    json_array_foreach(get_key(container, "ports"), i, port)
    {
        if (host_port(spec, port) != 0)
            json_array_append(ports, port);
    }
}

/* The ports of the host that pods of `spec` take while they run, also by sidecars; a new reference. */
static json_t *host_ports(const json_t *spec)
{
    json_t *ports = json_array(), *container;
    size_t i;

    json_array_foreach(get_key(spec, "initContainers"), i, container)
    {
        if (strcmp(get_text(container, "restartPolicy"), "Always") == 0)
            add_ports(spec, container, ports);
    }
    json_array_foreach(get_key(spec, "containers"), i, container)
    {
        add_ports(spec, container, ports);
    }
    return ports;
}

/* A port of the host that pods of `spec` and `other` both want; 0 if there is none. */
static long long shared_port(const json_t *spec, const json_t *other)
{
    json_t *ports = host_ports(spec), *others = host_ports(other), *port, *other_port;
    long long shared = 0;
    size_t i, j;

    json_array_foreach(ports, i, port) json_array_foreach(others, j, other_port)
    {
        if (!shared && host_port(spec, port) == host_port(other, other_port) && ports_collide(port, other_port))
            shared = host_port(spec, port);
    }
    json_decref(ports);
    json_decref(others);
    return shared;
}

/* --- anti-affinity --- */

/* Pods as far as others see them. */
struct kind {
    const json_t *spec, *labels;
    const char *space;
};

static bool names_space(const struct check *check, const json_t *term, const char *own, const char *space)
{
    const json_t *names = get_key(term, "namespaces"), *selector = get_key(term, "namespaceSelector"), *name;
    size_t i;

    if (json_array_size(names) == 0 && !selector)
        return strcmp(own, space) == 0;
    json_array_foreach(names, i,
                       name) if (json_is_string(name) && strcmp(json_string_value(name), space) == 0) return true;
    return selector &&
           get_selected(get(get_item(check->snapshot, "namespaces", NULL, space), "metadata/labels"), selector);
}

/* Does a term of pods of `kind` keep away from pods of `other`? */
static bool avoids(const struct check *check, const json_t *term, const struct kind *kind, const struct kind *other)
{
    const json_t *selector = get_key(term, "labelSelector");

    return selector && !get_key(term, "matchLabelKeys") && !get_key(term, "mismatchLabelKeys") &&
           names_space(check, term, kind->space, other->space) && get_selected(other->labels, selector);
}

/* Notes the domains of `node` that anti-affinity of `kind` against `other` names, as {label: {value: true}}. */
static void note_domains(const struct check *check, const struct kind *kind, const struct kind *other,
                         const json_t *node, json_t *domains)
{
    const json_t *term;
    size_t i;

    json_array_foreach(get(kind->spec, ANTI_AFFINITY), i, term)
    {
        const char *key = get_text(term, "topologyKey"), *value = get_label(node, key);

        if (!*value || !avoids(check, term, kind, other))
            continue;
        if (!json_object_get(domains, key))
            json_object_set_new(domains, key, json_object());
        json_object_set_new(json_object_get(domains, key), value, json_true());
    }
}

/* The labels of the pods of a set, with those that their controllers add; a new reference. */
static json_t *labels_of(const struct check *check, const struct deploy_set *set)
{
    static const char *const added[][2] = {{"Job", "job-name"},
                                           {"Job", "batch.kubernetes.io/job-name"},
                                           {"JobSet", "jobset.sigs.k8s.io/jobset-name"},
                                           {"LeaderWorkerSet", "leaderworkerset.sigs.k8s.io/name"}};
    json_t *labels = json_copy((json_t *)get_key(set->metadata, "labels"));

    if (!json_is_object(labels)) {
        json_decref(labels);
        labels = json_object();
    }
    for (size_t i = 0; i < sizeof(added) / sizeof(added[0]); i++)
        if (strcmp(check->job->kind, added[i][0]) == 0)
            json_object_set_new(labels, added[i][1], json_string(check->job->name));
    if (strcmp(check->job->kind, "JobSet") == 0)
        json_object_set_new(labels, "jobset.sigs.k8s.io/replicatedjob-name", json_string(set->name));
    return labels;
}

/* --- nodes --- */

/* Adds what a pod on a node keeps pods of `kind` off: that node, for a port, or the domains of anti-affinity. */
static void note_pod(const struct check *check, const struct kind *kind, const json_t *pod, const char *name,
                     json_t *nodes, json_t *domains)
{
    const struct kind other = {get_key(pod, "spec"), get(pod, "metadata/labels"), get_space(pod)};
    const json_t *number = get_key(check->usage.index, name), *node;
    bool has_port = shared_port(kind->spec, other.spec) != 0;

    if (!number || (!has_port && !get(kind->spec, ANTI_AFFINITY) && !get(other.spec, ANTI_AFFINITY)))
        return;
    node = json_array_get(get_items(check->snapshot, "nodes"), (size_t)json_integer_value(number));
    if (has_port)
        json_object_set_new(nodes, name, json_true());
    note_domains(check, kind, &other, node, domains);
    note_domains(check, &other, kind, node, domains);
}

/* {node name: true}: nodes that take no pod of the set because of the pods that are there. */
static json_t *find_kept(const struct check *check, const struct deploy_set *set)
{
    json_t *nodes = json_object(), *domains = json_object(), *labels = labels_of(check, set), *values;
    const struct kind kind = {set->spec, labels, check->job->space};
    const json_t *pod, *node;
    const char *key;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "pods"), i, pod)
    {
        const char *name = get_text(pod, "spec/nodeName"), *phase = get_text(pod, "status/phase");

        if (*name && strcmp(phase, "Succeeded") != 0 && strcmp(phase, "Failed") != 0)
            note_pod(check, &kind, pod, name, nodes, domains);
    }
    json_array_foreach(check->usage.placed, i, pod) note_pod(check, &kind, pod, get_text(pod, "node"), nodes, domains);
    json_object_foreach(domains, key, values) json_array_foreach(
        get_items(check->snapshot, "nodes"), i, node) if (json_object_get(values, get_label(node, key)))
        json_object_set_new(nodes, get_name(node), json_true());
    json_decref(domains);
    json_decref(labels);
    return nodes;
}

bool check_kept_off(const struct check *check, const json_t *node, const struct deploy_set *set)
{
    char key[32];
    json_t *nodes;

    snprintf(key, sizeof(key), "%p", (const void *)set->spec);
    nodes = json_object_get(check->usage.kept_off, key);
    if (!nodes) {
        nodes = find_kept(check, set);
        json_object_set_new(check->usage.kept_off, key, nodes);
    }
    return json_object_get(nodes, get_name(node)) != NULL;
}

bool check_alone(const struct check *check, const struct deploy_set *set, char *ret_why, size_t bytes)
{
    json_t *labels = labels_of(check, set);
    const struct kind kind = {set->spec, labels, check->job->space};
    long long port = shared_port(set->spec, set->spec);
    bool is_alone = port > 0;
    const json_t *term;
    size_t i;

    json_array_foreach(get(set->spec, ANTI_AFFINITY), i, term) is_alone |=
        strcmp(get_text(term, "topologyKey"), HOSTNAME) == 0 && avoids(check, term, &kind, &kind);
    json_decref(labels);
    if (port)
        snprintf(ret_why, bytes, "port %lld of the host", port);
    else
        snprintf(ret_why, bytes, "their anti-affinity");
    return is_alone;
}

void check_place(struct check *check, const json_t *node, const struct deploy_set *set)
{
    json_t *labels = labels_of(check, set);

    json_array_append_new(check->usage.placed,
                          json_pack("{s:s, s:O, s:{s:s, s:o}}", "node", get_name(node), "spec", (json_t *)set->spec,
                                    "metadata", "namespace", check->job->space, "labels", labels));
}
