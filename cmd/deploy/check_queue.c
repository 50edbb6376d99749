/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_queue.c - a job against its queue of Kueue: whether it exists and takes work, its quota of GPUs, and its
 * topology. Messages are those of Kueue 0.15. What depends on other ClusterQueues of a Cohort is not computed.
 */
#include "job_check.h"

#include "common/output.h"
#include "common/shell.h"

#define UNCONSTRAINED "kueue.x-k8s.io/podset-unconstrained-topology"

/* State of the flavor assignment of one pod set. */
struct assign {
    struct check *check;
    const struct deploy_set *set; /* of one group */
    const json_t *queue;          /* ClusterQueue */
    long long before;             /* GPUs of the job's earlier pod sets */
    const char *level;            /* of the requested topology; NULL: none, "": any */
    bool required;
    json_t *reasons; /* sorted, as Kueue prints them */
    const char *id;  /* of the first reason */
    bool waits;      /* there is enough quota, but others use it */
    json_t *why, *fix;
};

/* Notes why a flavor cannot be used; always false. */
static bool reject(struct assign *assign, const char *id, json_t *reason, json_t *why, json_t *fix)
{
    size_t place = 0;

    while (strcmp(get_string(json_array_get(assign->reasons, place)), get_string(reason)) < 0 &&
           place < json_array_size(assign->reasons))
        place++;
    json_array_insert_new(assign->reasons, place, reason);
    json_decref(assign->why);
    json_decref(assign->fix);
    assign->why = why;
    assign->fix = fix;
    assign->id = assign->id ? assign->id : id;
    return false;
}

/* --- quota --- */

/*
 * True if the quota of a flavor has room for the request now. A queue of a Cohort borrows up to its borrowingLimit;
 * without one, as much as the Cohort lends.
 */
static bool quota_fits(struct assign *assign, const json_t *flavor)
{
    const char *name = get_text(flavor, "name"), *queue = get_name(assign->queue);
    const json_t *quota = get_entry(get(flavor, "resources"), "name", GPU_RESOURCE);
    const json_t *used = get_entry(get(assign->queue, "status/flavorsReservation"), "name", name);
    long long nominal = get_count(get(quota, "nominalQuota")), limit = get_count(get(quota, "borrowingLimit"));
    long long reserved = get_count(get(get_entry(get(used, "resources"), "name", GPU_RESOURCE), "total"));
    bool borrows = *get_text(assign->queue, "spec/cohortName") || *get_text(assign->queue, "spec/cohort");
    long long request = get_pod_gpus(assign->set->spec) * assign->set->count, all = assign->before + request;
    long long most = (nominal > 0 ? nominal : 0) + (borrows ? limit : 0), groups = assign->check->job->groups;
    char word[SHELL_WORD_BYTES];
    long long free = reserved <= 0 ? most : most > reserved ? most - reserved : 0, fit = all > 0 ? free / all : groups;

    if (borrows && limit < 0)
        return true;
    if (all > most)
        return reject(
            assign, "quota",
            json_sprintf("insufficient quota for %s in flavor %s, previously considered podsets requests (%lld) + "
                         "current podset request (%lld) > maximum capacity (%lld)",
                         GPU_RESOURCE, name, assign->before, request, most),
            json_sprintf("ClusterQueue %s can never provide %lld of %s", queue, all, GPU_RESOURCE),
            most > 0
                ? json_sprintf("raise nominalQuota of %s in clusterqueue/%s to at least %lld, or ask for at most %lld",
                               GPU_RESOURCE, shell_quote(queue, word, sizeof(word)), all, most)
                : json_sprintf("raise nominalQuota of %s in clusterqueue/%s to at least %lld", GPU_RESOURCE,
                               shell_quote(queue, word, sizeof(word)), all));
    /* Kueue admits each group of a LeaderWorkerSet by itself. */
    if (fit >= groups)
        return true;
    assign->waits = true;
    return reject(
        assign, "quota-in-use",
        json_sprintf("insufficient unused quota for %s in flavor %s, %lld more needed", GPU_RESOURCE, name,
                     (fit + 1) * all - free),
        fit > 0 ? json_sprintf("ClusterQueue %s has room for %lld of %lld groups: the others wait", queue, fit, groups)
                : json_sprintf("other jobs of ClusterQueue %s use what is missing: this one waits for them", queue),
        json_string("kubectl get workloads -A, and wait or delete what is not needed"));
}

/* --- topology --- */

/* Does the flavor support what the topology annotation requests? */
static bool topology_matches(struct assign *assign, const json_t *flavor, const json_t *topology)
{
    const char *name = get_text(flavor, "spec/topologyName");
    char word[SHELL_WORD_BYTES];

    if (!*name)
        return reject(
            assign, "topology-unsupported",
            json_sprintf("Flavor \"%s\" does not support TopologyAwareScheduling", get_name(flavor)),
            json_sprintf("the job requests a topology, and ResourceFlavor %s has no topologyName", get_name(flavor)),
            json_string("--set-json tasSettings.topologyRequest=null, or give the flavor a topologyName"));
    if (*assign->level && topology && !get_entry(get(topology, "spec/levels"), "nodeLabel", assign->level))
        return reject(assign, "topology-level",
                      json_sprintf("Flavor \"%s\" does not contain the requested level", get_name(flavor)),
                      json_sprintf("Topology %s has no level %s", name, assign->level),
                      json_sprintf("request one of the levels that this lists: kubectl get topology -o yaml %s",
                                   shell_operand(name, word, sizeof(word))));
    return true;
}

/* The number of pods that fit into the largest domain of the level ("": the lowest), and into all together. */
static void count_room(struct assign *assign, const json_t *flavor, const json_t *topology, long long *ret_one,
                       long long *ret_all)
{
    json_t *domains = json_object();

    *ret_one = *ret_all = 0;
    FOR_JSON (node, get_items(assign->check->snapshot, "nodes")) {
        long long room = check_node_room(assign->check, node, assign->set, get(flavor, "spec/nodeLabels"));
        char bytes[512];
        struct text name = text_in(bytes, sizeof(bytes));
        bool is_within = true;

        room = room < assign->set->count ? room : assign->set->count;
        FOR_JSON (level, get(topology, "spec/levels")) {
            const char *value = get_label(node, get_text(level, "nodeLabel"));

            if (is_within)
                text_add(&name, "%s\n", value);
            is_within = is_within && !get_is(level, "nodeLabel", assign->level);
            /* A node without the label of some level is in no domain. */
            room = *value ? room : 0;
        }
        *ret_all += room;
        room += json_integer_value(json_object_get(domains, bytes));
        json_object_set_new(domains, bytes, json_integer(room));
        *ret_one = room > *ret_one ? room : *ret_one;
    }
    json_decref(domains);
}

static bool topology_fits(struct assign *assign, const json_t *flavor, const json_t *topology)
{
    long long one, all, room, count = assign->set->count;
    char word[SHELL_WORD_BYTES];
    const char *name = get_name(topology);

    if (!check_knows(assign->check, "nodes") || !check_knows(assign->check, "pods"))
        return true;
    count_room(assign, flavor, topology, &one, &all);
    room = assign->required ? one : all;
    if (room >= count)
        return true;
    return reject(
        assign, "topology",
        room == 0 ? json_sprintf("topology \"%s\" doesn't allow to fit any of %lld pod(s)", name, count)
                  : json_sprintf("topology \"%s\" allows to fit only %lld out of %lld pod(s)", name, room, count),
        assign->required ? json_sprintf("the largest %s has room for %lld pods; all of them together for %lld",
                                        assign->level, one, all)
                         : json_sprintf("nodes of flavor %s with all labels of the topology have room for %lld pods",
                                        get_name(flavor), all),
        all >= count ? json_sprintf("prefer the level instead of requiring it: tasSettings.topologyRequest.%s=%s",
                                    TOPOLOGY_PREFERRED, shell_quote(assign->level, word, sizeof(word)))
        : room > 0   ? json_sprintf("ask for at most %lld GPUs, add nodes, or wait for other jobs",
                                    room * get_pod_gpus(assign->set->spec))
                     : json_string("add nodes, or wait for other jobs"));
}

/* --- one pod set --- */

static bool flavor_fits(struct assign *assign, const json_t *entry)
{
    const json_t *snapshot = assign->check->snapshot;
    const json_t *flavor = get_item(snapshot, "resourceflavors", "", get_text(entry, "name"));
    const json_t *topology = get_item(snapshot, "topologies", "", get_text(flavor, "spec/topologyName"));

    if (flavor && assign->level && !topology_matches(assign, flavor, topology))
        return false;
    return quota_fits(assign, entry) && (!assign->level || !topology || topology_fits(assign, flavor, topology));
}

/* The flavors of the resource group that covers GPUs; NULL if none does. */
static const json_t *gpu_flavors(const json_t *queue)
{
    FOR_JSON (group, get(queue, "spec/resourceGroups")) {
        FOR_JSON (covered, get(group, "coveredResources"))
            if (strcmp(get_string(covered), GPU_RESOURCE) == 0)
                return get(group, "flavors");
    }
    return NULL;
}

static void add_finding(struct assign *assign)
{
    char text[2048];
    struct text says = text_in(text, sizeof(text));
    const json_t *reason;

    text_add(&says, "couldn't assign flavors to pod set %s: ", assign->set->name);
    for (size_t i = 0; (reason = json_array_get(assign->reasons, i)); i++)
        text_add(&says, "%s%s", i ? ", " : "", get_string(reason));
    check_add(assign->check, assign->waits ? CHECK_WARNING : CHECK_ERROR, assign->id, "Kueue", get_name(assign->queue),
              out_text(text), assign->why, assign->fix);
}

static void check_assignment(struct check *check, struct deploy_set *set, const json_t *queue, long long before)
{
    struct assign assign = {.check = check, .set = set, .queue = queue, .before = before, .reasons = json_array()};
    const json_t *flavors = gpu_flavors(queue), *annotations = get(set->metadata, "annotations");
    const json_t *required = json_object_get(annotations, TOPOLOGY_REQUIRED);
    const json_t *level = required ? required : json_object_get(annotations, TOPOLOGY_PREFERRED);
    char word[SHELL_WORD_BYTES];

    assign.required = required != NULL;
    assign.level = level || json_object_get(annotations, UNCONSTRAINED) ? get_string(level) : NULL;
    if (!flavors)
        reject(
            &assign, "resource-uncovered", json_sprintf("resource %s unavailable in ClusterQueue", GPU_RESOURCE),
            json_sprintf("the pods request %s, and ClusterQueue %s has no quota of it", GPU_RESOURCE, get_name(queue)),
            json_sprintf("add %s to coveredResources of clusterqueue/%s", GPU_RESOURCE,
                         shell_quote(get_name(queue), word, sizeof(word))));
    FOR_JSON (entry, flavors)
        if (flavor_fits(&assign, entry))
            goto done;
    if (assign.id) {
        add_finding(&assign);
        assign.why = assign.fix = NULL;
    }
done:
    json_decref(assign.why);
    json_decref(assign.fix);
    json_decref(assign.reasons);
}

/* --- queues --- */

static const json_t *find_cluster_queue(struct check *check)
{
    const char *local_name = check->job->queue, *space = check->job->space, *name;
    const json_t *local = get_item(check->snapshot, "localqueues", space, local_name), *queue, *active;
    char word[SHELL_WORD_BYTES];

    name = get_text(local, "spec/clusterQueue");
    queue = get_item(check->snapshot, "clusterqueues", "", name);
    active = get_entry(get(queue, "status/conditions"), "type", "Active");
    if (!local)
        check_add(check, CHECK_ERROR, "queue-missing", "Kueue", local_name,
                  json_sprintf("LocalQueue %s doesn't exist", local_name),
                  json_sprintf("namespace %s has no such queue", space),
                  json_sprintf("helm install prerequisites deploy/gke makes a4 (docs/quickstart.md, step 1); or set "
                               "queue to one that this lists: kubectl get localqueues -n %s",
                               shell_quote(space, word, sizeof(word))));
    else if (!queue)
        check_add(check, CHECK_ERROR, "cluster-queue-missing", "Kueue", name,
                  json_sprintf("ClusterQueue %s doesn't exist", name),
                  json_sprintf("LocalQueue %s refers to it", local_name),
                  json_sprintf("create ClusterQueue %s, or let the LocalQueue refer to another one",
                               shell_quote(name, word, sizeof(word))));
    else if (get_is(active, "status", "False"))
        check_add(check, CHECK_ERROR, "cluster-queue-inactive", "Kueue", name,
                  json_sprintf("ClusterQueue %s is inactive", name),
                  json_sprintf("its condition Active is False: %s", get_text(active, "message")),
                  json_string("create the objects that its message names"));
    else
        return queue;
    return NULL;
}

void check_queue(struct check *check)
{
    const json_t *queue;
    long long before = 0;

    if (!get_serves(check->snapshot, "kueue.x-k8s.io")) {
        check_add(
            check, CHECK_ERROR, "kueue-missing", "Kueue", check->job->queue,
            json_string("the job stays suspended: nothing reads kueue.x-k8s.io/queue-name"),
            json_string("the cluster has no Kueue, and the chart creates a job with a queue suspended"),
            json_string("install Kueue, by kubectl apply as in docs/quickstart.md, step 1; or leave queue empty"));
        return;
    }
    if (!check_knows(check, "localqueues") || !check_knows(check, "clusterqueues"))
        return;
    queue = find_cluster_queue(check);
    for (int s = 0; queue && s < check->job->n_sets && check_knows(check, "resourceflavors"); s++) {
        struct deploy_set set = check->job->sets[s];

        set.count /= check->job->groups;
        if (get_pod_gpus(set.spec) > 0)
            check_assignment(check, &set, queue, before);
        before += get_pod_gpus(set.spec) * set.count;
    }
}
