/* SPDX-License-Identifier: Apache-2.0 */
/* check_nodes.c - the nodes that fit a pod, and the message of the scheduler if there are too few. */
#include "deploy_check.h"

#include <limits.h>
#include <stdio.h>

long long check_gpus(const struct deploy_set *set)
{
    return get_pod_request(set->spec, "nvidia.com/gpu") / 1000;
}

static bool tolerates(const json_t *tolerations, const json_t *taint)
{
    const json_t *toleration;
    size_t i;

    json_array_foreach(tolerations, i, toleration)
    {
        const char *key = get_text(toleration, "key"), *effect = get_text(toleration, "effect");
        bool exists = strcmp(get_text(toleration, "operator"), "Exists") == 0;

        if (*effect && strcmp(effect, get_text(taint, "effect")) != 0)
            continue;
        if (*key ? strcmp(key, get_text(taint, "key")) != 0 : !exists)
            continue;
        if (exists || strcmp(get_text(toleration, "value"), get_text(taint, "value")) == 0)
            return true;
    }
    return false;
}

bool check_tolerates(const struct deploy_set *set, const json_t *extra_tolerations, const json_t *taint)
{
    const char *effect = get_text(taint, "effect");

    return (strcmp(effect, "NoSchedule") != 0 && strcmp(effect, "NoExecute") != 0) ||
           tolerates(get_key(set->spec, "tolerations"), taint) || tolerates(extra_tolerations, taint);
}

/*
 * GKE runs the admission plug-in ExtendedResourceToleration: a pod that requests nvidia.com/gpu gets a toleration of a
 * taint with that key. Kueue does not see it, because Workloads have none of what is added to pods.
 */
static bool is_tolerated_on_gke(const struct check *check, const struct deploy_set *set, const json_t *taint)
{
    const char *key = get_text(taint, "key");

    return strstr(get_text(check->snapshot, "version"), "-gke.") && strchr(key, '/') &&
           strcmp(get_text(taint, "effect"), "NoSchedule") == 0 && get_pod_request(set->spec, key) > 0;
}

/*
 * The first taint of a node that pods do not tolerate; NULL if none. `for_queue`: as Kueue sees it, before GKE has
 * added its toleration.
 */
static const json_t *find_taint(const struct check *check, const json_t *node, const struct deploy_set *set,
                                const json_t *extra_tolerations, bool for_queue)
{
    const json_t *taint;
    size_t i;

    json_array_foreach(get(node, "spec/taints"), i,
                       taint) if (!check_tolerates(set, extra_tolerations, taint) &&
                                  !(!for_queue && is_tolerated_on_gke(check, set, taint))) return taint;
    return NULL;
}

/* A cordoned node accepts only pods that tolerate its taint, also by "operator: Exists" without a key. */
static bool is_cordoned(const json_t *node, const struct deploy_set *set)
{
    json_t *taint;
    bool tolerated;

    if (!get_flag(node, "spec/unschedulable"))
        return false;
    taint = json_pack("{s:s, s:s}", "key", "node.kubernetes.io/unschedulable", "effect", "NoSchedule");
    tolerated = taint && tolerates(get_key(set->spec, "tolerations"), taint);
    json_decref(taint);
    return !tolerated;
}

/* matchFields of Kubernetes supports only the name of a node. */
static bool fields_hold(const json_t *node, const json_t *term)
{
    json_t *fields = json_pack("{s:s}", "metadata.name", get_name(node));
    const json_t *expression;
    bool holds = fields != NULL;
    size_t i;

    json_array_foreach(get_key(term, "matchFields"), i, expression) holds = holds && get_expression(fields, expression);
    json_decref(fields);
    return holds;
}

/* One of the terms must match, with all of its expressions; a term without expressions matches no node. */
static bool affinity_fits(const json_t *node, const json_t *spec)
{
    const json_t *terms =
        get(spec, "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms");
    const json_t *term, *expression, *labels = get(node, "metadata/labels");
    size_t i, e;

    if (json_array_size(terms) == 0)
        return true;
    json_array_foreach(terms, i, term)
    {
        bool holds =
            json_array_size(get_key(term, "matchExpressions")) + json_array_size(get_key(term, "matchFields")) > 0;

        json_array_foreach(get_key(term, "matchExpressions"), e, expression) holds =
            holds && get_expression(labels, expression);
        if (holds && fields_hold(node, term))
            return true;
    }
    return false;
}

static long long room_for(const struct check *check, const json_t *node, const struct deploy_set *set)
{
    long long room = LLONG_MAX;

    for (int r = 0; r < check->usage.n_resources; r++) {
        const char *name = check->usage.resources[r];
        long long request = r == CHECK_PODS ? 1000 : get_pod_request(set->spec, name);
        long long there = get_quantity(get_key(get(node, "status/allocatable"), name)), used;

        if (request == 0 || (r == CHECK_PODS && there < 0))
            continue;
        used = check_used(check, node, r);
        if (there < 0 || there <= used)
            return 0;
        if ((there - used) / request < room)
            room = (there - used) / request;
    }
    return room == LLONG_MAX ? set->count : room;
}

long long check_node_room(const struct check *check, const json_t *node, const struct deploy_set *set,
                          const json_t *extra_labels, const json_t *extra_tolerations)
{
    const json_t *labels = get(node, "metadata/labels");

    /* With the labels of a flavor this is Kueue's view, which excludes every cordoned node. */
    if ((extra_labels ? get_flag(node, "spec/unschedulable") : is_cordoned(node, set)) ||
        strcmp(get_condition(node, "Ready", "status"), "True") != 0)
        return 0;
    if (!get_labels_match(labels, get_key(set->spec, "nodeSelector")) || !get_labels_match(labels, extra_labels) ||
        !affinity_fits(node, set->spec) || find_taint(check, node, set, extra_tolerations, extra_labels != NULL))
        return 0;
    return room_for(check, node, set);
}

/* The scheduler's view: also what keeps the pods apart, from each other and from those that are there. */
static long long room_beside(const struct check *check, const json_t *node, const struct deploy_set *set, bool alone)
{
    long long room = check_node_room(check, node, set, NULL, NULL);

    if (room == 0 || check_kept_off(check, node, set))
        return 0;
    return alone ? 1 : room;
}

/* Number of nodes by the reason why they do not fit, for the message. */
struct reasons {
    int closed, labels, taints, resources, pods, n;
    const json_t *taint; /* one that is not tolerated */
};

static struct reasons count_reasons(const struct check *check, const struct deploy_set *set)
{
    struct reasons reasons = {0};
    const json_t *node, *taint;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "nodes"), i, node)
    {
        const json_t *labels = get(node, "metadata/labels");

        reasons.n++;
        if (is_cordoned(node, set) || strcmp(get_condition(node, "Ready", "status"), "True") != 0)
            reasons.closed++;
        else if (!get_labels_match(labels, get_key(set->spec, "nodeSelector")) || !affinity_fits(node, set->spec))
            reasons.labels++;
        else if ((taint = find_taint(check, node, set, NULL, false)) != NULL) {
            reasons.taints++;
            reasons.taint = taint;
        } else if (room_for(check, node, set) == 0)
            reasons.resources++;
        else if (check_kept_off(check, node, set))
            reasons.pods++;
    }
    return reasons;
}

/* A requested resource that no node has: a wrong name, or a device plugin that is missing; NULL if none. */
static const char *find_absent(const struct check *check, const struct deploy_set *set)
{
    const json_t *node;
    size_t i;

    for (int r = 0; r < check->usage.n_resources; r++) {
        const char *name = check->usage.resources[r];
        bool is_there = r == CHECK_PODS || get_pod_request(set->spec, name) == 0;

        json_array_foreach(get_items(check->snapshot, "nodes"), i, node) is_there |=
            get_quantity(get_key(get(node, "status/allocatable"), name)) > 0;
        if (!is_there)
            return name;
    }
    return NULL;
}

/* The next pod sets of the job have what is left. */
static void occupy(struct check *check, const struct deploy_set *set)
{
    const json_t *node;
    char why[64];
    bool alone = check_alone(check, set, why, sizeof(why));
    long long left = set->count;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "nodes"), i, node)
    {
        long long room = room_beside(check, node, set, alone), n = room < left ? room : left;

        check_use(check, node, set->spec, n);
        if (n > 0 && check->job->n_sets > 1)
            check_place(check, node, set);
        left -= n;
    }
}

static void check_set(struct check *check, const struct deploy_set *set)
{
    const json_t *node;
    struct reasons reasons;
    struct check_text text = {0};
    char coming[80] = "", taint[160] = "", absent[160] = "", pods[96] = "", one[128] = "", why[64];
    bool alone = check_alone(check, set, why, sizeof(why));
    const char *name;
    long long room = 0;
    size_t i;

    json_array_foreach(get_items(check->snapshot, "nodes"), i, node)
    {
        long long more = room_beside(check, node, set, alone);

        room += more < set->count ? more : set->count;
    }
    if (room >= set->count)
        return;
    reasons = count_reasons(check, set);
    if (check->usage.n_coming > 0)
        CHECK_FORMAT(coming, " (%lld pods of jobs that are admitted are still to come)", check->usage.n_coming);
    CHECK_FORMAT(text.says, "0/%d nodes are available", reasons.n);
    if (reasons.taint)
        CHECK_FORMAT(taint, " that is not tolerated (%.90s:%.20s)", get_text(reasons.taint, "key"),
                     get_text(reasons.taint, "effect"));
    if (reasons.pods > 0)
        CHECK_FORMAT(pods, ", %d have a pod that keeps them off (by a port of the host, or by anti-affinity)",
                     reasons.pods);
    if (alone)
        CHECK_FORMAT(one, "; a node takes one of them, because of %s", why);
    name = find_absent(check, set);
    if (name)
        CHECK_FORMAT(absent, " (no node has any %.120s)", name);
    CHECK_FORMAT(
        text.why,
        "%lld of %lld pods find a node: %d nodes are closed or not ready, %d have other labels, %d have a taint%s, %d "
        "have too little left%s%s%s%s",
        room, set->count, reasons.closed, reasons.labels, reasons.taints, taint, reasons.resources, absent, pods, one,
        coming);
    CHECK_FORMAT(text.fix, "kubectl get nodes -L cloud.google.com/gke-nodepool,cloud.google.com/gke-accelerator; add "
                           "nodes, or wait for other jobs");
    /* With a queue, the autoscaler may add nodes after the admission. */
    check_add(check, check->job->queue ? CHECK_WARNING : CHECK_ERROR, "nodes", "the scheduler", set->name, &text);
}

void check_nodes(struct check *check)
{
    if (!check_knows(check, "nodes") || !check_knows(check, "pods"))
        return;
    for (int s = 0; s < check->job->n_sets; s++) {
        check_set(check, &check->job->sets[s]);
        occupy(check, &check->job->sets[s]);
    }
}
