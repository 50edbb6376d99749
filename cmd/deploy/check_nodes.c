/* SPDX-License-Identifier: Apache-2.0 */
/* check_nodes.c - whether enough nodes have the labels that a job requires, and GPUs left. */
#include "check.h"

void check_count_gpus(struct check *check)
{
    const json_t *pod;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "pods"), i, pod) {
        const char *node = get_text(pod, "spec/nodeName"), *phase = get_text(pod, "status/phase");
        long long gpus = get_pod_gpus(get_key(pod, "spec"));

        if (gpus > 0 && strcmp(phase, "Succeeded") != 0 && strcmp(phase, "Failed") != 0)
            json_object_set_new(check->gpus_used, node,
                                json_integer(json_integer_value(json_object_get(check->gpus_used, node)) + gpus));
    }
}

static bool is_closed(const json_t *node)
{
    return get_flag(node, "spec/unschedulable") || strcmp(get_condition(node, "Ready", "status"), "True") != 0;
}

/* One of the terms must match, with all of its expressions. */
static bool affinity_fits(const json_t *labels, const json_t *spec)
{
    const json_t *terms =
        get(spec, "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    const json_t *term;
    size_t i;

    json_array_foreach (terms, i, term) {
        if (get_expressions(labels, get_key(term, "matchExpressions")))
            return true;
    }
    return json_array_size(terms) == 0;
}

static bool labels_fit(const json_t *node, const json_t *spec)
{
    const json_t *labels = get(node, "metadata/labels");

    return get_labels_match(labels, get_key(spec, "nodeSelector")) && affinity_fits(labels, spec);
}

static long long room_on(const struct check *check, const json_t *node, const struct deploy_set *set)
{
    long long each = get_pod_gpus(set->spec), free = get_count(get_key(get(node, "status/allocatable"), GPU_RESOURCE));

    free -= json_integer_value(json_object_get(check->gpus_used, get_name(node)));
    return each == 0 ? set->count : free > 0 ? free / each : 0;
}

long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *labels)
{
    if (is_closed(node) || !labels_fit(node, set->spec) || !get_labels_match(get(node, "metadata/labels"), labels))
        return 0;
    return room_on(check, node, set);
}

static void check_set(struct check *check, const struct deploy_set *set)
{
    long long left = set->count, each = get_pod_gpus(set->spec);
    int n = 0, closed = 0, labels = 0, full = 0;
    const json_t *node;
    size_t i;

    json_array_foreach (get_items(check->snapshot, "nodes"), i, node) {
        const char *name = get_name(node);
        long long room = check_node_room(check, node, set, NULL), taken = room < left ? room : left;

        n++;
        closed += is_closed(node);
        labels += !is_closed(node) && !labels_fit(node, set->spec);
        full += room == 0 && !is_closed(node) && labels_fit(node, set->spec);
        left -= taken;
        /* The next pod sets of the job have what is left. */
        json_object_set_new(check->gpus_used, name,
                            json_integer(json_integer_value(json_object_get(check->gpus_used, name)) + taken * each));
    }
    if (left == 0)
        return;
    /* With a queue, the autoscaler may add nodes after the admission. */
    CHECK_FIND(check, check->job->queue ? CHECK_WARNING : CHECK_ERROR, "nodes", "the scheduler", set->name,
               ("0/%d nodes are available", n),
               ("%lld of %lld pods find a node: %d nodes are closed or not ready, %d have other labels, %d have too "
                "little left",
                set->count - left, set->count, closed, labels, full),
               ("kubectl get nodes -L cloud.google.com/gke-nodepool,cloud.google.com/gke-accelerator; add nodes, or "
                "wait for other jobs"));
}

void check_nodes(struct check *check)
{
    if (!check_knows(check, "nodes") || !check_knows(check, "pods"))
        return;
    for (int s = 0; s < check->job->n_sets; s++)
        check_set(check, &check->job->sets[s]);
}
