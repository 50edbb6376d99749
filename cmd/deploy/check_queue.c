/* SPDX-License-Identifier: Apache-2.0 */
/* check_queue.c - whether Kueue admits a job, and if not, the message of its Workload. As of Kueue 0.15. */
#include "deploy_check.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

#define REASONS_MAX 16
#define GROUPS_MAX 4096
#define REASON_BYTES 256
#define REQUIRED "kueue.x-k8s.io/podset-required-topology"
#define PREFERRED "kueue.x-k8s.io/podset-preferred-topology"
#define UNCONSTRAINED "kueue.x-k8s.io/podset-unconstrained-topology"

/* State of the flavor assignment of one pod set. */
struct assign {
    struct check *check;
    const struct deploy_set *set;
    const json_t *queue; /* ClusterQueue */
    json_t *assumed;     /* {flavor: {resource: thousandths}} of the job's earlier pod sets and groups */
    long long group;     /* of the job; the earlier ones are admitted */
    const char *level;   /* of the requested topology; NULL: none, "": any */
    bool required;
    int n_reasons;
    char reasons[REASONS_MAX][REASON_BYTES];
    const char *id; /* of the first finding */
    bool waits;     /* there is enough quota, but others use it */
    char why[512], fix[512];
};

__attribute__((format(printf, 3, 4))) static void reason(struct assign *assign, const char *id, const char *format, ...)
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

/* The amount of a flavor assigned to earlier pod sets of the job. */
static long long assumed_of(const struct assign *assign, const char *flavor, const char *resource)
{
    const json_t *amount = get_key(get_key(assign->assumed, flavor), resource);

    return json_is_integer(amount) ? json_integer_value(amount) : 0;
}

/* True if the quota of a flavor has room for the request now. */
static bool quota_fits(struct assign *assign, const char *flavor, const char *resource, long long request)
{
    long long assumed = assumed_of(assign, flavor, resource), all;
    char wanted[32], before[32], most[32];
    struct check_quota room;

    check_quota_room(assign->check, assign->queue, flavor, resource, &room);
    check_format_amount(resource, request, wanted, sizeof(wanted));
    check_format_amount(resource, assumed, before, sizeof(before));
    if (__builtin_add_overflow(request, assumed, &all))
        all = LLONG_MAX;
    /* For a later group, the first one has shown that the maximum suffices. */
    if (all > room.most && assign->group == 0) {
        check_format_amount(resource, room.most, most, sizeof(most));
        reason(assign, "quota",
               "insufficient quota for %s in flavor %s, previously considered podsets requests (%s) + current podset "
               "request (%s) > maximum capacity (%s)",
               resource, flavor, before, wanted, most);
        check_format_amount(resource, all, wanted, sizeof(wanted));
        CHECK_FORMAT(assign->why, "ClusterQueue %s can never provide %s of %s", get_name(assign->queue), wanted,
                     resource);
        CHECK_FORMAT(assign->fix, "raise nominalQuota of %s in clusterqueue/%s to at least %s, or ask for at most %s",
                     resource, get_name(assign->queue), wanted, most);
        return false;
    }
    if (all > room.free) {
        check_format_amount(resource, all - room.free, most, sizeof(most));
        reason(assign, "quota-in-use", "insufficient unused quota for %s in flavor %s, %s more needed", resource,
               flavor, most);
        if (assign->group > 0)
            CHECK_FORMAT(assign->why, "ClusterQueue %s has room for %lld of %lld groups: the others wait",
                         get_name(assign->queue), assign->group, assign->check->job->groups);
        else
            CHECK_FORMAT(assign->why, "other jobs of ClusterQueue %s use what is missing: this one waits for them",
                         get_name(assign->queue));
        CHECK_FORMAT(assign->fix, "kubectl get workloads -A, and wait or delete what is not needed");
        assign->waits = true;
        return false;
    }
    return true;
}

static void assume(struct assign *assign, const char *flavor, const char *resource, long long request)
{
    json_t *amounts = json_object_get(assign->assumed, flavor);

    if (!amounts) {
        amounts = json_object();
        json_object_set_new(assign->assumed, flavor, amounts);
    }
    json_object_set_new(amounts, resource, json_integer(assumed_of(assign, flavor, resource) + request));
}

/* --- flavors --- */

/* Kueue compares a pod's selectors with a flavor's labels only where some flavor of the group has that label. */
static bool is_label_of_group(const struct assign *assign, const json_t *group, const char *key)
{
    const json_t *flavor;
    size_t i;

    json_array_foreach(
        get_key(group, "flavors"), i,
        flavor) if (get_key(get(get_item(assign->check->snapshot, "resourceflavors", NULL, get_text(flavor, "name")),
                                "spec/nodeLabels"),
                            key)) return true;
    return false;
}

static bool affinity_matches(const struct assign *assign, const json_t *group, const json_t *flavor)
{
    const json_t *labels = get(flavor, "spec/nodeLabels"), *term, *expression;
    const json_t *terms = get(assign->set->spec, "affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/"
                                                 "nodeSelectorTerms");
    const char *key;
    json_t *value;
    size_t i, e;
    bool any = json_array_size(terms) == 0;

    json_object_foreach((json_t *)get_key(assign->set->spec, "nodeSelector"), key,
                        value) if (is_label_of_group(assign, group, key) &&
                                   !json_equal(get_key(labels, key), value)) return false;
    json_array_foreach(terms, i, term)
    {
        bool holds = true;

        json_array_foreach(get_key(term, "matchExpressions"), e,
                           expression) if (is_label_of_group(assign, group, get_text(expression, "key"))) holds =
            holds && get_expression(labels, expression);
        any = any || holds;
    }
    return any;
}

/* The first taint of a flavor that neither the pods nor the flavor tolerate. */
static const json_t *untolerated(const struct assign *assign, const json_t *flavor)
{
    const json_t *taint;
    size_t i;

    json_array_foreach(get(flavor, "spec/nodeTaints"), i,
                       taint) if (!check_tolerates(assign->set, get(flavor, "spec/tolerations"), taint)) return taint;
    return NULL;
}

static bool has_level(const json_t *topology, const char *level)
{
    const json_t *entry;
    size_t i;

    json_array_foreach(get(topology, "spec/levels"), i,
                       entry) if (strcmp(get_text(entry, "nodeLabel"), level) == 0) return true;
    return false;
}

/* Does the flavor support what the topology annotation requests? */
static bool topology_matches(struct assign *assign, const json_t *flavor)
{
    const char *name = get_text(flavor, "spec/topologyName");
    const json_t *topology = get_item(assign->check->snapshot, "topologies", NULL, name);

    if (!assign->level) {
        if (!*name)
            return true;
        reason(assign, "topology-only", "Flavor \"%s\" supports only TopologyAwareScheduling", get_name(flavor));
        return false;
    }
    if (!*name) {
        reason(assign, "topology-unsupported", "Flavor \"%s\" does not support TopologyAwareScheduling",
               get_name(flavor));
        CHECK_FORMAT(assign->why, "the job requests a topology, and ResourceFlavor %s has no topologyName",
                     get_name(flavor));
        CHECK_FORMAT(assign->fix, "--set-json tasSettings.topologyRequest=null, or give the flavor a topologyName");
        return false;
    }
    if (*assign->level && topology && !has_level(topology, assign->level)) {
        reason(assign, "topology-level", "Flavor \"%s\" does not contain the requested level", get_name(flavor));
        CHECK_FORMAT(assign->why, "Topology %s has no level %s", name, assign->level);
        CHECK_FORMAT(assign->fix, "kubectl get topology %s -o yaml, and request one of its levels", name);
        return false;
    }
    return true;
}

/* --- topology --- */

struct domain {
    char name[512];
    long long room;
};

/* The values of a node's labels down to `level` ("": all levels). false: the node lacks the label of some level. */
static bool domain_of(const json_t *node, const json_t *topology, const char *level, char *ret_name, size_t bytes)
{
    const json_t *entry;
    bool within = true;
    size_t i, at = 0;

    *ret_name = '\0';
    json_array_foreach(get(topology, "spec/levels"), i, entry)
    {
        const json_t *value = get_key(get(node, "metadata/labels"), get_text(entry, "nodeLabel"));

        if (!json_is_string(value))
            return false;
        if (within && at < bytes)
            at += (size_t)snprintf(ret_name + at, bytes - at, "%s\n", json_string_value(value));
        within = within && strcmp(get_text(entry, "nodeLabel"), level) != 0;
    }
    return true;
}

/* The number of pods that fit into the largest domain of the level, and into all domains together. */
static bool count_room(struct assign *assign, const json_t *flavor, const json_t *topology, long long *ret_one,
                       long long *ret_all)
{
    const json_t *nodes = get_items(assign->check->snapshot, "nodes"), *node;
    struct domain *domains = calloc(json_array_size(nodes) + 1, sizeof(*domains));
    size_t i, n = 0, d;

    *ret_one = *ret_all = 0;
    if (!domains) {
        assign->check->no_memory = true;
        return false;
    }
    json_array_foreach(nodes, i, node)
    {
        struct domain here = {.room = check_node_room(assign->check, node, assign->set, get(flavor, "spec/nodeLabels"),
                                                      get(flavor, "spec/tolerations"))};

        if (here.room == 0 || !domain_of(node, topology, assign->level, here.name, sizeof(here.name)))
            continue;
        if (here.room > assign->set->count)
            here.room = assign->set->count;
        for (d = 0; d < n && strcmp(domains[d].name, here.name) != 0; d++)
            ;
        n += d == n;
        here.room += domains[d].room;
        domains[d] = here;
        if (here.room > *ret_one)
            *ret_one = here.room;
    }
    for (d = 0; d < n; d++)
        *ret_all += domains[d].room;
    free(domains);
    return true;
}

static bool topology_fits(struct assign *assign, const json_t *flavor)
{
    const char *name = get_text(flavor, "spec/topologyName");
    const json_t *topology = get_item(assign->check->snapshot, "topologies", NULL, name);
    long long one, all, room;

    /* Not for later groups: check_nodes() counts the nodes of all of them. */
    if (!assign->level || assign->group > 0 || !topology || !check_knows(assign->check, "nodes") ||
        !check_knows(assign->check, "pods"))
        return true;
    if (!count_room(assign, flavor, topology, &one, &all))
        return true;
    room = assign->required ? one : all;
    if (room >= assign->set->count)
        return true;
    if (room == 0)
        reason(assign, "topology", "topology \"%s\" doesn't allow to fit any of %lld pod(s)", name, assign->set->count);
    else
        reason(assign, "topology", "topology \"%s\" allows to fit only %lld out of %lld pod(s)", name, room,
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
                     room * check_gpus(assign->set));
    return false;
}

/* --- one pod set --- */

/* All requested resources of a group must fit into one of its flavors. */
static bool try_flavor(struct assign *assign, const json_t *group, const char *name)
{
    const json_t *flavor = get_item(assign->check->snapshot, "resourceflavors", NULL, name), *covered, *taint;
    size_t i;

    if (!flavor) {
        reason(assign, "flavor-missing", "flavor %s not found", name);
        return false;
    }
    if (!topology_matches(assign, flavor))
        return false;
    taint = untolerated(assign, flavor);
    if (taint) {
        reason(assign, "flavor-taint", "untolerated taint {%s %s %s <nil>} in flavor %s", get_text(taint, "key"),
               get_text(taint, "value"), get_text(taint, "effect"), name);
        CHECK_FORMAT(assign->why, "the flavor's nodes have a taint that the pods do not tolerate");
        CHECK_FORMAT(assign->fix, "add it to tolerations");
        return false;
    }
    if (!affinity_matches(assign, group, flavor)) {
        reason(assign, "flavor-labels", "flavor %s doesn't match node affinity", name);
        CHECK_FORMAT(assign->why, "the job selects nodes by labels that the flavor's nodes do not have");
        CHECK_FORMAT(assign->fix,
                     "kubectl get resourceflavor %s -o yaml, and compare with accelerator, nodeSelector, "
                     "targetNodes",
                     name);
        return false;
    }
    json_array_foreach(get_key(group, "coveredResources"), i, covered)
    {
        const char *resource = json_is_string(covered) ? json_string_value(covered) : "";
        long long request = get_pod_request(assign->set->spec, resource), all;

        if (strcmp(resource, "pods") == 0)
            request = 1000;
        if (request > 0 && !__builtin_mul_overflow(request, assign->set->count, &all) &&
            !quota_fits(assign, name, resource, all))
            return false;
    }
    if (!topology_fits(assign, flavor))
        return false;
    json_array_foreach(get_key(group, "coveredResources"), i, covered)
    {
        const char *resource = json_is_string(covered) ? json_string_value(covered) : "";
        long long request = strcmp(resource, "pods") == 0 ? 1000 : get_pod_request(assign->set->spec, resource), all;

        if (!__builtin_mul_overflow(request, assign->set->count, &all))
            assume(assign, name, resource, all);
    }
    return true;
}

static int compare_texts(const void *left, const void *right)
{
    return strcmp(left, right);
}

static void report(struct assign *assign)
{
    struct check_text text = {0};
    size_t at;

    qsort(assign->reasons, (size_t)assign->n_reasons, REASON_BYTES, compare_texts);
    at = (size_t)snprintf(text.says, sizeof(text.says), "couldn't assign flavors to pod set %s: ", assign->set->name);
    for (int i = 0; i < assign->n_reasons && at < sizeof(text.says); i++)
        at += (size_t)snprintf(text.says + at, sizeof(text.says) - at, "%s%s", i > 0 ? ", " : "", assign->reasons[i]);
    CHECK_FORMAT(text.why, "%s", *assign->why ? assign->why : "no flavor of the ClusterQueue suits the pods");
    CHECK_FORMAT(text.fix, "%s", *assign->fix ? assign->fix : "kubectl get clusterqueues,resourceflavors -o yaml");
    check_add(assign->check, assign->waits ? CHECK_WARNING : CHECK_ERROR, assign->id, "Kueue", get_name(assign->queue),
              &text);
}

/* A requested resource that no group of the queue covers. */
static const char *uncovered(const struct assign *assign)
{
    static const char *const resources[] = {"nvidia.com/gpu", "cpu", "memory", "ephemeral-storage"};

    for (size_t r = 0; r < sizeof(resources) / sizeof(resources[0]); r++)
        if (get_pod_request(assign->set->spec, resources[r]) > 0 && !check_group_for(assign->queue, resources[r]))
            return resources[r];
    return NULL;
}

static void read_topology_request(struct assign *assign)
{
    const json_t *annotations = get_key(assign->set->metadata, "annotations");

    assign->required = get_key(annotations, REQUIRED) != NULL;
    if (assign->required)
        assign->level = json_string_value(get_key(annotations, REQUIRED));
    else if (get_key(annotations, PREFERRED))
        assign->level = json_string_value(get_key(annotations, PREFERRED));
    else if (get_key(annotations, UNCONSTRAINED))
        assign->level = "";
}

/* A queue whose flavors all have a topology uses it for every job, even without a requested level. */
static bool only_topologies(const struct assign *assign)
{
    const json_t *group, *flavor;
    size_t i, f, n = 0;

    json_array_foreach(get(assign->queue, "spec/resourceGroups"), i, group)
        json_array_foreach(get_key(group, "flavors"), f, flavor)
    {
        n++;
        if (!*get_text(get_item(assign->check->snapshot, "resourceflavors", NULL, get_text(flavor, "name")),
                       "spec/topologyName"))
            return false;
    }
    return n > 0;
}

/* Do the pods request any resource of a group? Each also counts as one of "pods". */
static bool is_asked(const struct deploy_set *set, const json_t *group)
{
    const json_t *covered;
    size_t i;

    json_array_foreach(get_key(group, "coveredResources"), i, covered)
    {
        const char *resource = json_is_string(covered) ? json_string_value(covered) : "";

        if (strcmp(resource, "pods") == 0 || get_pod_request(set->spec, resource) > 0)
            return true;
    }
    return false;
}

static bool try_group(struct assign *assign, const json_t *group)
{
    const json_t *flavor;
    size_t i;

    assign->n_reasons = 0;
    json_array_foreach(get_key(group, "flavors"), i,
                       flavor) if (try_flavor(assign, group, get_text(flavor, "name"))) return true;
    return false;
}

static void check_assignment(struct check *check, const struct deploy_set *set, const json_t *queue, json_t *assumed,
                             long long number)
{
    struct assign assign = {.check = check, .set = set, .queue = queue, .assumed = assumed, .group = number};
    const char *missing = uncovered(&assign);
    const json_t *group;
    size_t i;

    read_topology_request(&assign);
    if (!assign.level && only_topologies(&assign))
        assign.level = "";
    if (missing) {
        reason(&assign, "resource-uncovered", "resource %s unavailable in ClusterQueue", missing);
        CHECK_FORMAT(assign.why, "the pods request %s, and ClusterQueue %s has no quota of it", missing,
                     get_name(queue));
        CHECK_FORMAT(assign.fix, "add %s to coveredResources of clusterqueue/%s, or leave it out of workload.resources",
                     missing, get_name(queue));
        report(&assign);
        return;
    }
    /* Report the first group without a flavor for the pods. */
    json_array_foreach(get(queue, "spec/resourceGroups"), i, group)
    {
        if (!is_asked(set, group) || try_group(&assign, group))
            continue;
        if (assign.n_reasons > 0)
            report(&assign);
        return;
    }
}

/* --- queues --- */

static void add_queue(struct check *check, const char *id, const char *says, const char *why, const char *fix,
                      const char *object)
{
    struct check_text text = {0};

    CHECK_FORMAT(text.says, "%s", says);
    CHECK_FORMAT(text.why, "%s", why);
    CHECK_FORMAT(text.fix, "%s", fix);
    check_add(check, CHECK_ERROR, id, "Kueue", object, &text);
}

static void say_queues(const struct check *check, char *ret_text, size_t bytes)
{
    const json_t *queue;
    size_t i, at = 0;

    snprintf(ret_text, bytes, "namespace %s has no queues", check->job->space);
    json_array_foreach(get_items(check->snapshot, "localqueues"), i,
                       queue) if (strcmp(get_space(queue), check->job->space) == 0 && at < bytes) at +=
        (size_t)snprintf(ret_text + at, bytes - at, "%s%s", at ? ", " : "queues there: ", get_name(queue));
}

static const json_t *find_cluster_queue(struct check *check)
{
    const json_t *local = get_item(check->snapshot, "localqueues", check->job->space, check->job->queue), *queue;
    const char *name = get_text(local, "spec/clusterQueue");
    char says[512], why[512], fix[512];

    if (!local) {
        CHECK_FORMAT(says, "LocalQueue %s doesn't exist", check->job->queue);
        say_queues(check, why, sizeof(why));
        CHECK_FORMAT(fix, "set queue to one of them, or create LocalQueue %s in namespace %s", check->job->queue,
                     check->job->space);
        add_queue(check, "queue-missing", says, why, fix, check->job->queue);
        return NULL;
    }
    if (strncmp(get_text(local, "spec/stopPolicy"), "Hold", 4) == 0) {
        CHECK_FORMAT(says, "LocalQueue %s is inactive", check->job->queue);
        add_queue(check, "queue-stopped", says, "its stopPolicy holds new work", "ask the user who stopped it",
                  check->job->queue);
        return NULL;
    }
    queue = get_item(check->snapshot, "clusterqueues", NULL, name);
    if (!queue) {
        CHECK_FORMAT(says, "ClusterQueue %s doesn't exist", name);
        CHECK_FORMAT(why, "LocalQueue %s refers to it", check->job->queue);
        CHECK_FORMAT(fix, "create ClusterQueue %s, or let the LocalQueue refer to another one", name);
        add_queue(check, "cluster-queue-missing", says, why, fix, name);
        return NULL;
    }
    if (strcmp(get_condition(queue, "Active", "status"), "False") == 0) {
        CHECK_FORMAT(says, "ClusterQueue %s is inactive", name);
        add_queue(check, "cluster-queue-inactive", says, get_condition(queue, "Active", "message"),
                  "create the objects that its message names", name);
        return NULL;
    }
    return queue;
}

/* Without the class Kueue creates no Workload, and only its log has the reason. */
static bool check_priority_class(struct check *check)
{
    const char *name = get_label(check->job->object, "kueue.x-k8s.io/priority-class");
    char says[512];

    if (!*name || !check_knows(check, "workloadpriorityclasses") ||
        get_item(check->snapshot, "workloadpriorityclasses", NULL, name))
        return true;
    CHECK_FORMAT(says, "WorkloadPriorityClass.kueue.x-k8s.io \"%s\" not found", name);
    add_queue(check, "workload-priority-missing", says,
              "Kueue creates no Workload: the job stays suspended, and only the log of Kueue's controller reports it",
              "kubectl get workloadpriorityclasses, and use one of them", name);
    return false;
}

/* Kueue creates a Workload for each group, and admits as many as it has quota for. */
static void check_groups(struct check *check, const json_t *queue)
{
    const struct deploy_job *job = check->job;
    size_t before = json_array_size(check->findings);
    json_t *assumed = json_object();

    for (long long g = 0; g < job->groups && g < GROUPS_MAX && json_array_size(check->findings) == before; g++)
        for (int s = 0; s < job->n_sets; s++) {
            struct deploy_set set = job->sets[s];

            set.count /= job->groups;
            check_assignment(check, &set, queue, assumed, g);
        }
    json_decref(assumed);
}

void check_queue(struct check *check)
{
    const json_t *queue, *selector, *space;

    if (get_key(check->snapshot, "groups") && !check_serves(check, "kueue.x-k8s.io", NULL)) {
        add_queue(check, "kueue-missing", "the job stays suspended: nothing reads kueue.x-k8s.io/queue-name",
                  "the cluster has no Kueue, and the chart creates a job with a queue suspended",
                  "install Kueue, or leave queue empty", check->job->queue);
        return;
    }
    if (!check_knows(check, "localqueues") || !check_knows(check, "clusterqueues"))
        return;
    queue = find_cluster_queue(check);
    if (!queue)
        return;
    selector = get(queue, "spec/namespaceSelector");
    space = get_item(check->snapshot, "namespaces", NULL, check->job->space);
    if (space && (!selector || !get_selected(get(space, "metadata/labels"), selector))) {
        add_queue(check, "queue-namespace", "Workload namespace doesn't match ClusterQueue selector",
                  "the ClusterQueue accepts only jobs of other namespaces",
                  "label the namespace as the queue requires it", get_name(queue));
        return;
    }
    if (!check_priority_class(check))
        return;
    for (int s = 0; s < check->job->n_sets; s++)
        if (!check_limits(check, (size_t)s))
            return;
    if (check_knows(check, "resourceflavors"))
        check_groups(check, queue);
}
