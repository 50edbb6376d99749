/* SPDX-License-Identifier: Apache-2.0 */
/*
 * check_queue.c - a job against its queue of Kueue: whether it exists and takes work, its quota of GPUs, and its
 * topology. Messages are those of Kueue 0.15. What depends on other ClusterQueues of a Cohort is not computed.
 */
#include "check.h"

#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>

#define REASONS_MAX 16
#define REASON_BYTES 256
#define REQUIRED "kueue.x-k8s.io/podset-required-topology"
#define PREFERRED "kueue.x-k8s.io/podset-preferred-topology"
#define UNCONSTRAINED "kueue.x-k8s.io/podset-unconstrained-topology"

/* State of the flavor assignment of one pod set. */
struct assign {
    struct check *check;
    const struct deploy_set *set; /* of one group */
    const json_t *queue;          /* ClusterQueue */
    long long before;             /* GPUs of the job's earlier pod sets */
    const char *level;            /* of the requested topology; NULL: none, "": any */
    bool required;
    int n_reasons;
    char reasons[REASONS_MAX][REASON_BYTES];
    const char *id; /* of the first reason */
    bool waits;     /* there is enough quota, but others use it */
    char why[512], fix[512];
};

__attribute__((format(printf, 3, 4))) static void add_reason(struct assign *assign, const char *id, const char *format,
                                                             ...)
{
    va_list args;

    if (assign->n_reasons == REASONS_MAX)
        return;
    va_start(args, format);
    vsnprintf(assign->reasons[assign->n_reasons++], REASON_BYTES, format, args);
    va_end(args);
    if (!assign->id)
        assign->id = id;
}

/* --- quota --- */

struct quota {
    long long most, free; /* LLONG_MAX: as much as the Cohort lends */
};

/* The quota of GPUs of a flavor. A queue of a Cohort borrows up to its borrowingLimit. */
static struct quota quota_of(const json_t *queue, const json_t *flavor)
{
    const json_t *quota = get_named(get_key(flavor, "resources"), GPU_RESOURCE);
    const json_t *used = get_named(get(queue, "status/flavorsReservation"), get_text(flavor, "name"));
    long long nominal = get_count(get_key(quota, "nominalQuota")), limit = get_count(get_key(quota, "borrowingLimit"));
    long long reserved = get_count(get_key(get_named(get_key(used, "resources"), GPU_RESOURCE), "total"));
    bool borrows = *get_text(queue, "spec/cohortName") || *get_text(queue, "spec/cohort");

    nominal = nominal > 0 && nominal < GPUS_MAX ? nominal : nominal > 0 ? GPUS_MAX : 0;
    if (borrows && (limit < 0 || limit > GPUS_MAX))
        return (struct quota){LLONG_MAX, LLONG_MAX};
    nominal += borrows ? limit : 0;
    return (struct quota){nominal, reserved <= 0 ? nominal : nominal > reserved ? nominal - reserved : 0};
}

/* True if the quota of a flavor has room for the request now. */
static bool quota_fits(struct assign *assign, const json_t *flavor)
{
    long long request = get_pod_gpus(assign->set->spec) * assign->set->count, all = assign->before + request;
    const char *name = get_text(flavor, "name"), *queue = get_name(assign->queue);
    long long groups = assign->check->job->groups, fit;
    struct quota quota = quota_of(assign->queue, flavor);

    if (all > quota.most) {
        add_reason(assign, "quota",
                   "insufficient quota for %s in flavor %s, previously considered podsets requests (%lld) + current "
                   "podset request (%lld) > maximum capacity (%lld)",
                   GPU_RESOURCE, name, assign->before, request, quota.most);
        CHECK_FORMAT(assign->why, "ClusterQueue %s can never provide %lld of %s", queue, all, GPU_RESOURCE);
        CHECK_FORMAT(assign->fix,
                     "raise nominalQuota of %s in clusterqueue/%s to at least %lld, or ask for at most %lld",
                     GPU_RESOURCE, queue, all, quota.most);
        return false;
    }
    /* Kueue admits each group of a LeaderWorkerSet by itself. */
    fit = all > 0 ? quota.free / all : groups;
    if (fit >= groups)
        return true;
    add_reason(assign, "quota-in-use", "insufficient unused quota for %s in flavor %s, %lld more needed", GPU_RESOURCE,
               name, (fit + 1) * all - quota.free);
    if (fit > 0)
        CHECK_FORMAT(assign->why, "ClusterQueue %s has room for %lld of %lld groups: the others wait", queue, fit,
                     groups);
    else
        CHECK_FORMAT(assign->why, "other jobs of ClusterQueue %s use what is missing: this one waits for them", queue);
    CHECK_FORMAT(assign->fix, "kubectl get workloads -A, and wait or delete what is not needed");
    assign->waits = true;
    return false;
}

/* --- topology --- */

static bool has_level(const json_t *topology, const char *level)
{
    const json_t *entry;
    size_t i;

    json_array_foreach (get(topology, "spec/levels"), i, entry) {
        if (strcmp(get_text(entry, "nodeLabel"), level) == 0)
            return true;
    }
    return false;
}

/* Does the flavor support what the topology annotation requests? */
static bool topology_matches(struct assign *assign, const json_t *flavor, const json_t *topology)
{
    const char *name = get_text(flavor, "spec/topologyName");

    if (!*name) {
        add_reason(assign, "topology-unsupported", "Flavor \"%s\" does not support TopologyAwareScheduling",
                   get_name(flavor));
        CHECK_FORMAT(assign->why, "the job requests a topology, and ResourceFlavor %s has no topologyName",
                     get_name(flavor));
        CHECK_FORMAT(assign->fix, "--set-json tasSettings.topologyRequest=null, or give the flavor a topologyName");
        return false;
    }
    if (*assign->level && topology && !has_level(topology, assign->level)) {
        add_reason(assign, "topology-level", "Flavor \"%s\" does not contain the requested level", get_name(flavor));
        CHECK_FORMAT(assign->why, "Topology %s has no level %s", name, assign->level);
        CHECK_FORMAT(assign->fix, "kubectl get topology %s -o yaml, and request one of its levels", name);
        return false;
    }
    return true;
}

/* The values of a node's labels down to `level` ("": all levels). false: the node lacks the label of some level. */
static bool domain_of(const json_t *node, const json_t *topology, const char *level, char ret_name[512])
{
    const json_t *entry;
    size_t i, at = 0;
    bool within = true;

    *ret_name = '\0';
    json_array_foreach (get(topology, "spec/levels"), i, entry) {
        const char *label = get_text(entry, "nodeLabel"), *value = get_label(node, label);

        if (!*value)
            return false;
        if (within && at < 512)
            at += (size_t)snprintf(ret_name + at, 512 - at, "%s\n", value);
        within = within && strcmp(label, level) != 0;
    }
    return true;
}

/* The number of pods that fit into the largest domain of the level, and into all domains together. */
static void count_room(struct assign *assign, const json_t *flavor, const json_t *topology, long long *ret_one,
                       long long *ret_all)
{
    json_t *domains = json_object();
    const json_t *node;
    char name[512];
    size_t i;

    *ret_one = *ret_all = 0;
    json_array_foreach (get_items(assign->check->snapshot, "nodes"), i, node) {
        long long room = check_node_room(assign->check, node, assign->set, get(flavor, "spec/nodeLabels"));

        if (room == 0 || !domain_of(node, topology, assign->level, name))
            continue;
        room = room < assign->set->count ? room : assign->set->count;
        *ret_all += room;
        room += json_integer_value(json_object_get(domains, name));
        json_object_set_new(domains, name, json_integer(room));
        *ret_one = room > *ret_one ? room : *ret_one;
    }
    json_decref(domains);
}

static bool topology_fits(struct assign *assign, const json_t *flavor, const json_t *topology)
{
    const char *name = get_name(topology);
    long long one, all, room;

    if (!check_knows(assign->check, "nodes") || !check_knows(assign->check, "pods"))
        return true;
    count_room(assign, flavor, topology, &one, &all);
    room = assign->required ? one : all;
    if (room >= assign->set->count)
        return true;
    if (room == 0)
        add_reason(assign, "topology", "topology \"%s\" doesn't allow to fit any of %lld pod(s)", name,
                   assign->set->count);
    else
        add_reason(assign, "topology", "topology \"%s\" allows to fit only %lld out of %lld pod(s)", name, room,
                   assign->set->count);
    if (assign->required)
        CHECK_FORMAT(assign->why, "the largest %s has room for %lld pods; all of them together for %lld", assign->level,
                     one, all);
    else
        CHECK_FORMAT(assign->why, "nodes of flavor %s with all labels of the topology have room for %lld pods",
                     get_name(flavor), all);
    if (assign->required && all >= assign->set->count)
        CHECK_FORMAT(assign->fix, "prefer the level instead of requiring it: tasSettings.topologyRequest.%s=%s",
                     PREFERRED, assign->level);
    else
        CHECK_FORMAT(assign->fix, "ask for at most %lld GPUs, add nodes, or wait for other jobs",
                     room * get_pod_gpus(assign->set->spec));
    return false;
}

/* --- one pod set --- */

static bool try_flavor(struct assign *assign, const json_t *entry)
{
    const char *name = get_text(entry, "name");
    const json_t *flavor = get_item(assign->check->snapshot, "resourceflavors", NULL, name);
    const json_t *topology =
        get_item(assign->check->snapshot, "topologies", NULL, get_text(flavor, "spec/topologyName"));

    if (flavor && assign->level && !topology_matches(assign, flavor, topology))
        return false;
    return quota_fits(assign, entry) && (!assign->level || !topology || topology_fits(assign, flavor, topology));
}

static int compare_texts(const void *left, const void *right)
{
    return strcmp(left, right);
}

static void add_finding(struct assign *assign)
{
    struct check_text text;
    size_t at;

    qsort(assign->reasons, (size_t)assign->n_reasons, REASON_BYTES, compare_texts);
    at = (size_t)CHECK_FORMAT(text.says, "couldn't assign flavors to pod set %s: ", assign->set->name);
    for (int i = 0; i < assign->n_reasons && at < sizeof(text.says); i++)
        at += (size_t)snprintf(text.says + at, sizeof(text.says) - at, "%s%s", i > 0 ? ", " : "", assign->reasons[i]);
    CHECK_FORMAT(text.why, "%s", assign->why);
    CHECK_FORMAT(text.fix, "%s", assign->fix);
    check_add(assign->check, assign->waits ? CHECK_WARNING : CHECK_ERROR, assign->id, "Kueue", get_name(assign->queue),
              &text);
}

static void read_topology_request(struct assign *assign)
{
    const json_t *annotations = get_key(assign->set->metadata, "annotations");

    assign->required = get_key(annotations, REQUIRED) != NULL;
    if (assign->required || get_key(annotations, PREFERRED))
        assign->level = get_string(get_key(annotations, assign->required ? REQUIRED : PREFERRED));
    else if (get_key(annotations, UNCONSTRAINED))
        assign->level = "";
}

/* The flavors of the resource group that covers GPUs; NULL if none does. */
static const json_t *gpu_flavors(const json_t *queue)
{
    const json_t *group, *covered;
    size_t i, r;

    json_array_foreach (get(queue, "spec/resourceGroups"), i, group) {
        json_array_foreach (get_key(group, "coveredResources"), r, covered) {
            if (strcmp(get_string(covered), GPU_RESOURCE) == 0)
                return get_key(group, "flavors");
        }
    }
    return NULL;
}

static void check_assignment(struct check *check, struct deploy_set *set, const json_t *queue, long long before)
{
    struct assign assign = {.check = check, .set = set, .queue = queue, .before = before};
    const json_t *flavors = gpu_flavors(queue), *entry;
    size_t i;

    read_topology_request(&assign);
    if (!flavors) {
        add_reason(&assign, "resource-uncovered", "resource %s unavailable in ClusterQueue", GPU_RESOURCE);
        CHECK_FORMAT(assign.why, "the pods request %s, and ClusterQueue %s has no quota of it", GPU_RESOURCE,
                     get_name(queue));
        CHECK_FORMAT(assign.fix, "add %s to coveredResources of clusterqueue/%s", GPU_RESOURCE, get_name(queue));
    }
    json_array_foreach (flavors, i, entry) {
        if (try_flavor(&assign, entry))
            return;
    }
    if (assign.n_reasons > 0)
        add_finding(&assign);
}

/* --- queues --- */

static void add_queue(struct check *check, const char *id, const char *object, const char *says, const char *why,
                      const char *fix)
{
    CHECK_FIND(check, CHECK_ERROR, id, "Kueue", object, ("%s", says), ("%s", why), ("%s", fix));
}

static void list_queues(const struct check *check, char ret_text[512])
{
    const json_t *queue;
    size_t i, at = 0;

    snprintf(ret_text, 512, "namespace %s has no queues", check->job->space);
    json_array_foreach (get_items(check->snapshot, "localqueues"), i, queue) {
        if (strcmp(get_space(queue), check->job->space) == 0 && at < 512)
            at += (size_t)snprintf(ret_text + at, 512 - at, "%s%s", at ? ", " : "queues there: ", get_name(queue));
    }
}

static const json_t *find_cluster_queue(struct check *check)
{
    const char *local_name = check->job->queue, *space = check->job->space, *name, *state;
    const json_t *local = get_item(check->snapshot, "localqueues", space, local_name), *queue;
    char says[512], why[512], fix[512];

    name = get_text(local, "spec/clusterQueue");
    queue = get_item(check->snapshot, "clusterqueues", NULL, name);
    state = get_condition(queue, "Active", "status");
    if (!local) {
        CHECK_FORMAT(says, "LocalQueue %s doesn't exist", local_name);
        list_queues(check, why);
        CHECK_FORMAT(fix, "set queue to one of them, or create LocalQueue %s in namespace %s", local_name, space);
        add_queue(check, "queue-missing", local_name, says, why, fix);
    } else if (!queue) {
        CHECK_FORMAT(says, "ClusterQueue %s doesn't exist", name);
        CHECK_FORMAT(why, "LocalQueue %s refers to it", local_name);
        CHECK_FORMAT(fix, "create ClusterQueue %s, or let the LocalQueue refer to another one", name);
        add_queue(check, "cluster-queue-missing", name, says, why, fix);
    } else if (strcmp(state, "False") == 0) {
        CHECK_FORMAT(says, "ClusterQueue %s is inactive", name);
        add_queue(check, "cluster-queue-inactive", name, says, get_condition(queue, "Active", "message"),
                  "create the objects that its message names");
    } else {
        return queue;
    }
    return NULL;
}

void check_queue(struct check *check)
{
    const json_t *queue;
    long long before = 0;

    if (get_key(check->snapshot, "groups") && !check_serves(check, "kueue.x-k8s.io", NULL)) {
        add_queue(check, "kueue-missing", check->job->queue,
                  "the job stays suspended: nothing reads kueue.x-k8s.io/queue-name",
                  "the cluster has no Kueue, and the chart creates a job with a queue suspended",
                  "install Kueue, or leave queue empty");
        return;
    }
    if (!check_knows(check, "localqueues") || !check_knows(check, "clusterqueues"))
        return;
    queue = find_cluster_queue(check);
    if (!queue)
        return;
    for (int s = 0; s < check->job->n_sets && check_knows(check, "resourceflavors"); s++) {
        struct deploy_set set = check->job->sets[s];

        set.count /= check->job->groups;
        if (get_pod_gpus(set.spec) > 0)
            check_assignment(check, &set, queue, before);
        before += get_pod_gpus(set.spec) * set.count;
    }
}
