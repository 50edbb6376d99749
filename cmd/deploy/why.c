/* SPDX-License-Identifier: Apache-2.0 */
/*
 * why.c - what holds up a job that was submitted, in the words of the cluster: conditions and events of the job, of its
 * Workload, of its pods and of their nodes. Nothing depends on the meaning of a message.
 */
#include "get.h"

#include "common/output.h"
#include "common/text.h"

#include <stdio.h>
#include <stdlib.h>

#define JOBSET_LABEL "jobset.sigs.k8s.io/jobset-name"
#define GROUP_LABEL "leaderworkerset.sigs.k8s.io/name"
/* Messages of several pods that begin alike are one row: their ends have names of pods. */
#define ALIKE 48

const struct deploy_resource deploy_why_resources[] = {
    {"jobsets", "jobsets.jobset.x-k8s.io", "jobset.x-k8s.io", DEPLOY_NAMESPACE, false},
    {"leaderworkersets", "leaderworkersets.leaderworkerset.x-k8s.io", "leaderworkerset.x-k8s.io", DEPLOY_NAMESPACE,
     false},
    {"jobs", "jobs.batch", "", DEPLOY_NAMESPACE, false},
    {"workloads", "workloads.kueue.x-k8s.io", "kueue.x-k8s.io", DEPLOY_NAMESPACE, false},
    {"pods", "pods", "", DEPLOY_NAMESPACE, false},
    {"events", "events", "", DEPLOY_NAMESPACE, false},
    {"nodes", "nodes", "", DEPLOY_CLUSTER, false},
    {0},
};

/* What explains most comes first. */
enum order {
    ORDER_QUEUE, /* a Workload that is not admitted: pods of before are being removed */
    ORDER_NODE,  /* a node that does not answer */
    ORDER_POD,   /* evicted, preempted, refused by the kubelet */
    ORDER_CONTAINER,
    ORDER_UNPLACED,
    ORDER_GATED,
    ORDER_WARNING, /* events */
    ORDER_JOB,
    ORDER_PRESSURE,
    ORDER_NORMAL /* the last event, where nothing else explains */
};

struct why {
    const json_t *snapshot, *job;
    const char *kind;
    json_t *known; /* {"Kind/name": uid} of the job and what belongs to it; null: its events do not matter */
    json_t *rows;  /* {"Pod name": its rows} */
    int n_rows;
    long long running, ended;
    bool has_workload;
};

/* --- rows --- */

/* `later`: when it was seen last, if that differs from `since`. */
static void add_row(struct why *why, enum order order, const char *object, const char *reason, const char *message,
                    const char *since, const char *later)
{
    json_t *rows = json_object_get(why->rows, object), *row;
    bool is_event = order == ORDER_WARNING || order == ORDER_NORMAL;
    size_t i;

    later = *later ? later : since;
    /* Fails for a name that was truncated inside a character. */
    if (!rows && json_object_set_new(why->rows, object, json_array()) != 0)
        return;
    rows = json_object_get(why->rows, object);
    json_array_foreach (rows, i, row) {
        bool is_same = strcmp(get_text(row, "reason"), reason) == 0;

        /* The condition of a pod has the message of its event. */
        if (strcmp(get_text(row, "message"), message) == 0 && (*message || is_same))
            return;
        if (!is_event || get_number(row, "order", 0) != (long long)order || (order == ORDER_WARNING && !is_same))
            continue;
        /* The last event of a reason, of normal events the last one, is how it is now. */
        if (strcmp(later, get_text(row, "later")) < 0)
            return;
        json_array_remove(rows, i);
        break;
    }
    json_array_append_new(rows, json_pack("{s:i, s:i, s:o, s:i, s:o, s:o, s:o, s:o}", "order", (int)order, "place",
                                          why->n_rows++, "object", out_text(object), "others", 0, "reason",
                                          out_text(reason), "message", out_text(message), "since",
                                          out_text_or_null(since), "later", out_text(later)));
}

static void add_condition(struct why *why, enum order order, const char *object, const json_t *condition)
{
    const char *reason = get_text(condition, "reason"), *message = get_text(condition, "message");

    add_row(why, order, object, *reason ? reason : get_text(condition, "type"), message,
            get_text(condition, "lastTransitionTime"), "");
}

struct bad {
    const char *type, *status;
    enum order order;
};

/* Adds the conditions of an object that are in the table, which ends with a type NULL. */
static void add_conditions(struct why *why, const char *object, const json_t *of, const struct bad *bad)
{
    const json_t *condition;
    size_t i;

    for (; bad->type; bad++)
        json_array_foreach (get(of, "status/conditions"), i, condition) {
            if (strcmp(get_text(condition, "type"), bad->type) == 0 &&
                strcmp(get_text(condition, "status"), bad->status) == 0)
                add_condition(why, bad->order, object, condition);
        }
}

static const char *name_object(const char *kind, const json_t *object, char ret_name[320])
{
    snprintf(ret_name, 320, "%.60s %.250s", kind, get_name(object));
    return ret_name;
}

/* --- what belongs to the job --- */

static void know(struct why *why, const char *kind, const json_t *object, bool is_fine)
{
    char key[320];

    snprintf(key, sizeof(key), "%.60s/%.250s", kind, get_name(object));
    json_object_set_new(why->known, key, is_fine ? json_null() : out_text(get_text(object, "metadata/uid")));
}

/* Is one of its owners the job, or a Job or a pod of it? */
static bool is_owned(const struct why *why, const json_t *object)
{
    const json_t *owner;
    char key[320];
    size_t i;

    json_array_foreach (get(object, "metadata/ownerReferences"), i, owner) {
        snprintf(key, sizeof(key), "%.60s/%.250s", get_text(owner, "kind"), get_text(owner, "name"));
        if (json_object_get(why->known, key))
            return true;
    }
    return false;
}

/* Labels hold also where a pod's owner is an object in between, which is not read. */
static bool is_pod_of(const struct why *why, const json_t *pod)
{
    const char *label = strcmp(why->kind, "LeaderWorkerSet") == 0 ? GROUP_LABEL : JOBSET_LABEL;

    return is_owned(why, pod) ||
           (strcmp(why->kind, "Job") != 0 && strcmp(get_label(pod, label), get_name(why->job)) == 0);
}

/* --- pods and their nodes --- */

static void add_containers(struct why *why, const char *object, const json_t *pod, const char *list, bool *is_fine)
{
    const json_t *container;
    char message[2048];
    size_t i;

    json_array_foreach (get(pod, list), i, container) {
        const json_t *state = get(container, "state/terminated"), *waiting = get(container, "state/waiting");
        const char *reason = get_text(waiting, "reason"), *name = get_text(container, "name");
        bool starts = text_is_any(reason, TEXTS("", "ContainerCreating", "PodInitializing"));

        *is_fine = *is_fine && !waiting;
        /* A container that is started again and again: how it ended. */
        state = state ? state : get(container, "lastState/terminated");
        if (waiting && !starts)
            snprintf(message, sizeof(message), "container %.63s%s%.1500s", name,
                     *get_text(waiting, "message") ? ": " : "", get_text(waiting, "message"));
        else
            snprintf(message, sizeof(message), "container %.63s", name);
        if (state && get_number(state, "exitCode", 0) != 0)
            text_append(message, sizeof(message), "%s ended with exit code %lld (%.63s) %.300s",
                        waiting && !starts ? "; it" : "", get_number(state, "exitCode", 0), get_text(state, "reason"),
                        get_text(state, "message"));
        else if (!waiting || starts)
            continue;
        message[strlen(message) - (message[strlen(message) - 1] == ' ')] = '\0';
        if (waiting || get(container, "state/terminated"))
            add_row(why, ORDER_CONTAINER, object, *reason ? reason : get_text(state, "reason"), message,
                    waiting ? get_text(pod, "status/startTime") : get_text(state, "finishedAt"), "");
    }
}

static bool is_ready(const json_t *node)
{
    return !node || strcmp(get_condition(node, "Ready", "status"), "True") == 0;
}

static void add_node(struct why *why, const json_t *node)
{
    static const struct bad bad[] = {{"Ready", "False", ORDER_NODE},
                                     {"Ready", "Unknown", ORDER_NODE},
                                     {"NetworkUnavailable", "True", ORDER_NODE},
                                     {"MemoryPressure", "True", ORDER_PRESSURE},
                                     {"DiskPressure", "True", ORDER_PRESSURE},
                                     {"PIDPressure", "True", ORDER_PRESSURE},
                                     {NULL, NULL, ORDER_NODE}};
    char object[320];

    if (node)
        add_conditions(why, name_object("Node", node, object), node, bad);
}

static void add_pod(struct why *why, const json_t *pod)
{
    static const struct bad bad[] = {{"DisruptionTarget", "True", ORDER_POD}, {NULL, NULL, ORDER_POD}};
    const json_t *node = get_item(why->snapshot, "nodes", NULL, get_text(pod, "spec/nodeName")), *condition;
    const char *phase = get_text(pod, "status/phase");
    bool is_fine = strcmp(phase, "Running") == 0 && is_ready(node) && !get(pod, "metadata/deletionTimestamp");
    char object[320];
    size_t i;

    name_object("Pod", pod, object);
    if (strcmp(phase, "Succeeded") == 0) {
        why->ended++;
        know(why, "Pod", pod, true);
        return;
    }
    if (*get_text(pod, "status/reason"))
        add_row(why, ORDER_POD, object, get_text(pod, "status/reason"), get_text(pod, "status/message"),
                get_text(pod, "status/startTime"), "");
    add_conditions(why, object, pod, bad);
    json_array_foreach (get(pod, "status/conditions"), i, condition) {
        bool is_gated = strcmp(get_text(condition, "reason"), "SchedulingGated") == 0;

        if (strcmp(get_text(condition, "type"), "PodScheduled") == 0 &&
            strcmp(get_text(condition, "status"), "False") == 0)
            add_condition(why, is_gated ? ORDER_GATED : ORDER_UNPLACED, object, condition);
    }
    add_containers(why, object, pod, "status/initContainerStatuses", &is_fine);
    add_containers(why, object, pod, "status/containerStatuses", &is_fine);
    add_node(why, node);
    why->running += is_fine;
    know(why, "Pod", pod, is_fine);
}

/* --- the job and its Workload --- */

static void add_job(struct why *why, const char *kind, const json_t *job)
{
    static const struct bad bad[] = {{"Failed", "True", ORDER_JOB},
                                     {"FailureTarget", "True", ORDER_JOB},
                                     {"Suspended", "True", ORDER_JOB},
                                     {"StartupPolicyInProgress", "True", ORDER_JOB},
                                     {NULL, NULL, ORDER_JOB}};
    char object[320];

    know(why, kind, job, false);
    add_conditions(why, name_object(kind, job, object), job, bad);
}

static bool is_admitted(const json_t *workload)
{
    return strcmp(get_condition(workload, "Finished", "status"), "True") == 0 ||
           (strcmp(get_condition(workload, "Admitted", "status"), "True") == 0 &&
            strcmp(get_condition(workload, "Evicted", "status"), "True") != 0);
}

static void add_workload(struct why *why, const json_t *workload)
{
    static const struct bad bad[] = {
        {"QuotaReserved", "False", ORDER_QUEUE}, {"Evicted", "True", ORDER_QUEUE},
        {"Preempted", "True", ORDER_QUEUE},      {"DeactivationTarget", "True", ORDER_QUEUE},
        {"Requeued", "False", ORDER_QUEUE},      {NULL, NULL, ORDER_QUEUE}};
    static const struct bad unadmitted[] = {{"Admitted", "False", ORDER_QUEUE}, {NULL, NULL, ORDER_QUEUE}};
    const json_t *check;
    char object[320];
    size_t i;

    why->has_workload = true;
    know(why, "Workload", workload, is_admitted(workload));
    if (is_admitted(workload))
        return;
    add_conditions(why, name_object("Workload", workload, object), workload, bad);
    json_array_foreach (get(workload, "status/admissionChecks"), i, check) {
        char reason[320];

        snprintf(reason, sizeof(reason), "%.200s: %.60s", get_text(check, "name"), get_text(check, "state"));
        if (strcmp(get_text(check, "state"), "Ready") != 0)
            add_row(why, ORDER_QUEUE, object, reason, get_text(check, "message"), get_text(check, "lastTransitionTime"),
                    "");
    }
    add_conditions(why, object, workload, unadmitted);
}

/* --- events --- */

static void add_event(struct why *why, const json_t *event)
{
    const json_t *about = get_key(event, "involvedObject"), *uid;
    const char *first = get_text(event, "firstTimestamp"), *last = get_text(event, "lastTimestamp");
    const char *series = get_text(event, "series/lastObservedTime");
    char key[320], object[320];

    snprintf(key, sizeof(key), "%.60s/%.250s", get_text(about, "kind"), get_text(about, "name"));
    uid = json_object_get(why->known, key);
    /* An object of the same name before this one. */
    if (!json_is_string(uid) ||
        (*get_text(about, "uid") && *get_string(uid) && strcmp(get_text(about, "uid"), get_string(uid)) != 0))
        return;
    first = *first ? first : get_text(event, "eventTime");
    snprintf(object, sizeof(object), "%.60s %.250s", get_text(about, "kind"), get_text(about, "name"));
    add_row(why, strcmp(get_text(event, "type"), "Warning") == 0 ? ORDER_WARNING : ORDER_NORMAL, object,
            get_text(event, "reason"), get_text(event, "message"), first, *series ? series : last);
}

/* --- all of it --- */

static int compare_rows(const void *left, const void *right)
{
    const json_t *rows[] = {*(json_t *const *)left, *(json_t *const *)right};
    long long orders[] = {get_number(rows[0], "order", 0), get_number(rows[1], "order", 0)};
    long long places[] = {get_number(rows[0], "place", 0), get_number(rows[1], "place", 0)};

    if (orders[0] != orders[1])
        return orders[0] < orders[1] ? -1 : 1;
    return places[0] < places[1] ? -1 : places[0] > places[1];
}

/* A row like this one of another object, in what is sorted so far. */
static json_t *find_alike(const json_t *sorted, const json_t *row)
{
    char begin[ALIKE + 1];
    json_t *other;
    size_t i;

    snprintf(begin, sizeof(begin), "%s", get_text(row, "message"));
    json_array_foreach (sorted, i, other) {
        if (get_number(other, "order", 0) == get_number(row, "order", 0) &&
            strcmp(get_text(other, "object"), get_text(row, "object")) != 0 &&
            strcmp(get_text(other, "reason"), get_text(row, "reason")) == 0 &&
            strncmp(get_text(other, "message"), begin, strlen(begin)) == 0)
            return other;
    }
    return NULL;
}

/* What explains most first, alike rows as one; normal events only if there is nothing else. NULL: out of memory. */
static json_t *sort_rows(const struct why *why, bool with_normal)
{
    json_t **list = calloc((size_t)why->n_rows + 1, sizeof(*list)), *sorted = json_array(), *rows, *row, *alike;
    const char *object;
    size_t n = 0, i;

    json_object_foreach (why->rows, object, rows) {
        json_array_foreach (rows, i, row) {
            if (list)
                list[n++] = row;
        }
    }
    if (list)
        qsort(list, n, sizeof(json_t *), compare_rows);
    for (i = 0; i < n; i++) {
        bool is_normal = get_number(list[i], "order", 0) == ORDER_NORMAL;

        if (is_normal && (!with_normal || get_number(list[0], "order", 0) != ORDER_NORMAL))
            continue;
        alike = find_alike(sorted, list[i]);
        if (alike)
            json_object_set_new(alike, "others", json_integer(get_number(alike, "others", 0) + 1));
        else
            json_array_append(sorted, list[i]);
    }
    json_array_foreach (sorted, i, row) {
        json_object_del(row, "place");
        json_object_del(row, "order");
        json_object_del(row, "later");
    }
    free(list);
    return sorted;
}

static void collect(struct why *why)
{
    static const char *const resources[] = {"jobs", "pods", "workloads", "events"};
    const json_t *item;
    char groups[320];
    size_t i;

    add_job(why, why->kind, why->job);
    /* The groups of a LeaderWorkerSet are a StatefulSet of its name, which is not read: its events are. */
    snprintf(groups, sizeof(groups), "StatefulSet/%.250s", get_name(why->job));
    if (strcmp(why->kind, "LeaderWorkerSet") == 0)
        json_object_set_new(why->known, groups, json_string(""));
    for (size_t r = 0; r < COUNT(resources); r++)
        json_array_foreach (get_items(why->snapshot, resources[r]), i, item) {
            if (r == 0 && strcmp(why->kind, "JobSet") == 0 && is_owned(why, item))
                add_job(why, "Job", item);
            else if (r == 1 && is_pod_of(why, item))
                add_pod(why, item);
            else if (r == 2 && is_owned(why, item))
                add_workload(why, item);
            else if (r == 3)
                add_event(why, item);
        }
}

static const char *state_of(const struct why *why, long long pods, bool is_held)
{
    const char *const complete[] = {get_condition(why->job, "Completed", "status"),
                                    get_condition(why->job, "Complete", "status")};

    if (strcmp(complete[0], "True") == 0 || strcmp(complete[1], "True") == 0)
        return "complete";
    if (strcmp(get_condition(why->job, "Failed", "status"), "True") == 0)
        return "failed";
    if (why->running > 0 && why->running + why->ended >= pods)
        return "running";
    return is_held ? "waiting" : "unknown";
}

/* A JobSet, a LeaderWorkerSet or a Job: a Job of a JobSet has another name than that. */
static bool find_job(struct why *why, const char *space, const char *name)
{
    static const char *const kinds[][2] = {
        {"jobsets", "JobSet"}, {"leaderworkersets", "LeaderWorkerSet"}, {"jobs", "Job"}};

    for (size_t i = 0; i < COUNT(kinds) && !why->job; i++) {
        why->job = get_item(why->snapshot, kinds[i][0], space, name);
        why->kind = kinds[i][1];
    }
    return why->job != NULL;
}

json_t *deploy_why(const json_t *snapshot, const char *space, const char *name)
{
    struct why why = {.snapshot = snapshot, .known = json_object(), .rows = json_object()};
    struct deploy_job job = {0};
    json_t *documents = NULL, *object = NULL, *result = NULL;
    const char *state;
    long long pods = 0;

    if (!find_job(&why, space, name))
        goto done;
    /* The API server leaves the kind out in lists. */
    object = json_copy((json_t *)why.job);
    json_object_set_new(object, "kind", json_string(why.kind));
    documents = json_pack("[O]", object);
    if (deploy_job_find(documents, space, &job) == EP_OK)
        for (int s = 0; s < job.n_sets; s++)
            pods += job.sets[s].count;
    collect(&why);
    state = state_of(&why, pods, why.n_rows > 0);
    result = json_pack("{s:s, s:{s:s, s:s, s:s, s:s?, s:b, s:I, s:I}, s:o}", "state", state, "job", "kind", why.kind,
                       "name", name, "namespace", space, "queue", job.queue, "workload", why.has_workload, "pods",
                       (json_int_t)pods, "running", (json_int_t)why.running, "reasons",
                       sort_rows(&why, text_is_any(state, TEXTS("waiting", "unknown"))));
done:
    json_decref(documents);
    json_decref(object);
    json_decref(why.known);
    json_decref(why.rows);
    return result;
}
