/* SPDX-License-Identifier: Apache-2.0 */
/*
 * why.c - what holds up a job that was submitted, in the words of the cluster: conditions and events of the job, of its
 * Workload, of its pods and of their nodes. Nothing depends on the meaning of a message.
 */
#include "get.h"

#include "common/output.h"

#define JOBSET_LABEL "jobset.sigs.k8s.io/jobset-name"
#define GROUP_LABEL "leaderworkerset.sigs.k8s.io/name"
/* Messages of several pods that begin alike are one row: their ends have names of pods. */
#define ALIKE 48

/* What explains most comes first. */
enum order {
    ORDER_QUEUE, /* a Workload that is not admitted: pods of before are being removed */
    ORDER_ADMISSION,
    ORDER_NODE, /* a node that does not answer */
    ORDER_POD,  /* evicted, preempted, refused by the kubelet */
    ORDER_CONTAINER,
    ORDER_UNPLACED,
    ORDER_WARNING, /* events */
    ORDER_JOB,
    ORDER_PRESSURE,
    ORDER_NORMAL /* the last event, where nothing else explains */
};

/* Conditions of objects that hold up a job; "Job" stands for any kind of job. */
static const struct {
    const char *kind, *type, *status;
    enum order order;
} conditions[] = {
    {"Workload", "QuotaReserved", "False", ORDER_QUEUE},
    {"Workload", "Evicted", "True", ORDER_QUEUE},
    {"Workload", "Preempted", "True", ORDER_QUEUE},
    {"Workload", "DeactivationTarget", "True", ORDER_QUEUE},
    {"Workload", "Requeued", "False", ORDER_QUEUE},
    {"Workload", "Admitted", "False", ORDER_ADMISSION},
    {"Node", "Ready", "False", ORDER_NODE},
    {"Node", "Ready", "Unknown", ORDER_NODE},
    {"Node", "NetworkUnavailable", "True", ORDER_NODE},
    {"Node", "MemoryPressure", "True", ORDER_PRESSURE},
    {"Node", "DiskPressure", "True", ORDER_PRESSURE},
    {"Node", "PIDPressure", "True", ORDER_PRESSURE},
    {"Pod", "DisruptionTarget", "True", ORDER_POD},
    {"Pod", "PodScheduled", "False", ORDER_UNPLACED},
    {"Job", "Failed", "True", ORDER_JOB},
    {"Job", "FailureTarget", "True", ORDER_JOB},
    {"Job", "Suspended", "True", ORDER_JOB},
    {"Job", "StartupPolicyInProgress", "True", ORDER_JOB},
};

struct why {
    const json_t *snapshot, *job;
    const char *kind;
    json_t *known; /* {"Kind name": uid} of the job and what belongs to it; null: its events do not matter */
    json_t *rows;
    long long running, ended;
    bool has_workload;
};

/* --- rows --- */

/* `later`: when it was seen last, if that differs from `since`. */
static void add_row(struct why *why, enum order order, const char *object, const char *reason, const char *message,
                    const char *since, const char *later)
{
    bool is_event = order == ORDER_WARNING || order == ORDER_NORMAL;
    json_t *row;

    later = *later ? later : since;
    for (size_t i = 0; (row = json_array_get(why->rows, i)); i++) {
        bool is_same = get_is(row, "reason", reason);

        if (!get_is(row, "object", object))
            continue;
        /* The condition of a pod has the message of its event. */
        if (get_is(row, "message", message) && (*message || is_same))
            return;
        if (!is_event || get_number(row, "order", 0) != (long long)order || (order == ORDER_WARNING && !is_same))
            continue;
        /* The last event of a reason, of normal events the last one, is how it is now. */
        if (strcmp(later, get_text(row, "later")) < 0)
            return;
        json_array_remove(why->rows, i);
        break;
    }
    json_array_append_new(why->rows,
                          json_pack("{s:i, s:o, s:i, s:o, s:o, s:o, s:o}", "order", (int)order, "object",
                                    out_text(object), "others", 0, "reason", out_text(reason), "message",
                                    out_text(message), "since", out_text_or_null(since), "later", out_text(later)));
}

static const char *name_object(const char *kind, const char *name, char ret_name[320])
{
    snprintf(ret_name, 320, "%.60s %.250s", kind, name);
    return ret_name;
}

/* Adds the conditions of an object that are in the table for `kind`. */
static void add_conditions(struct why *why, const char *kind, const char *object, const json_t *of)
{
    for (size_t c = 0; c < COUNT(conditions); c++)
        FOR_JSON (condition, strcmp(conditions[c].kind, kind) == 0 ? get(of, "status/conditions") : NULL) {
            const char *reason = get_text(condition, "reason");

            if (get_is(condition, "type", conditions[c].type) && get_is(condition, "status", conditions[c].status))
                add_row(why, conditions[c].order, object, *reason ? reason : conditions[c].type,
                        get_text(condition, "message"), get_text(condition, "lastTransitionTime"), "");
        }
}

/* --- what belongs to the job --- */

static void know(struct why *why, const char *object, const json_t *of, bool is_fine)
{
    json_object_set_new(why->known, object, is_fine ? json_null() : out_text(get_text(of, "metadata/uid")));
}

/* Is one of its owners the job, or a Job or a pod of it? */
static bool is_owned(const struct why *why, const json_t *object)
{
    char name[320];

    FOR_JSON (owner, get(object, "metadata/ownerReferences"))
        if (json_object_get(why->known, name_object(get_text(owner, "kind"), get_text(owner, "name"), name)))
            return true;
    return false;
}

/* Labels hold also where a pod's owner is an object in between, which is not read. */
static bool is_pod_of(const struct why *why, const json_t *pod)
{
    const char *label = strcmp(why->kind, "LeaderWorkerSet") == 0 ? GROUP_LABEL : JOBSET_LABEL;

    return is_owned(why, pod) ||
           (strcmp(why->kind, "Job") != 0 && strcmp(get_label(pod, label), get_name(why->job)) == 0);
}

static void add_job(struct why *why, const char *kind, const json_t *job)
{
    char object[320];

    know(why, name_object(kind, get_name(job), object), job, false);
    add_conditions(why, "Job", object, job);
}

/* False if one of the containers waits. */
static bool add_containers(struct why *why, const char *object, const json_t *pod, const char *list)
{
    bool is_fine = true;

    FOR_JSON (container, get(pod, list)) {
        const json_t *waiting = get(container, "state/waiting"), *now = get(container, "state/terminated");
        /* Of a container that is started again and again: how it ended. */
        const json_t *ended = now ? now : get(container, "lastState/terminated");
        const char *reason = get_text(waiting, "reason"), *said = get_text(waiting, "message");
        bool is_stuck = waiting && !text_is_any(reason, TEXTS("", "ContainerCreating", "PodInitializing"));
        bool has_failed = (waiting || now) && get_number(ended, "exitCode", 0) != 0;
        char bytes[2048];
        struct text message = text_in(bytes, sizeof(bytes));

        is_fine = is_fine && !waiting;
        if (!is_stuck && !has_failed)
            continue;
        text_add(&message, "container %.63s", get_text(container, "name"));
        if (is_stuck && *said)
            text_add(&message, ": %.1500s", said);
        if (has_failed)
            text_add(&message, "%s ended with exit code %lld (%.63s)", is_stuck ? "; it" : "",
                     get_number(ended, "exitCode", 0), get_text(ended, "reason"));
        if (has_failed && *get_text(ended, "message"))
            text_add(&message, " %.300s", get_text(ended, "message"));
        add_row(why, ORDER_CONTAINER, object, *reason ? reason : get_text(ended, "reason"), bytes,
                waiting ? get_text(pod, "status/startTime") : get_text(ended, "finishedAt"), "");
    }
    return is_fine;
}

static void add_pod(struct why *why, const json_t *pod)
{
    const json_t *node = get_item(why->snapshot, "nodes", "", get_text(pod, "spec/nodeName"));
    const char *reason = get_text(pod, "status/reason");
    char object[320], name[320];
    bool is_fine;

    name_object("Pod", get_name(pod), object);
    if (get_is(pod, "status/phase", "Succeeded")) {
        why->ended++;
        know(why, object, pod, true);
        return;
    }
    is_fine = get_is(pod, "status/phase", "Running") && !get(pod, "metadata/deletionTimestamp") &&
              (!node || strcmp(get_condition(node, "Ready"), "True") == 0);
    if (*reason)
        add_row(why, ORDER_POD, object, reason, get_text(pod, "status/message"), get_text(pod, "status/startTime"), "");
    add_conditions(why, "Pod", object, pod);
    is_fine &= add_containers(why, object, pod, "status/initContainerStatuses");
    is_fine &= add_containers(why, object, pod, "status/containerStatuses");
    if (node)
        add_conditions(why, "Node", name_object("Node", get_name(node), name), node);
    why->running += is_fine;
    know(why, object, pod, is_fine);
}

static void add_workload(struct why *why, const json_t *workload)
{
    bool is_admitted = strcmp(get_condition(workload, "Finished"), "True") == 0 ||
                       (strcmp(get_condition(workload, "Admitted"), "True") == 0 &&
                        strcmp(get_condition(workload, "Evicted"), "True") != 0);
    char object[320], reason[320];

    why->has_workload = true;
    know(why, name_object("Workload", get_name(workload), object), workload, is_admitted);
    if (is_admitted)
        return;
    add_conditions(why, "Workload", object, workload);
    FOR_JSON (check, get(workload, "status/admissionChecks")) {
        snprintf(reason, sizeof(reason), "%.200s: %.60s", get_text(check, "name"), get_text(check, "state"));
        if (!get_is(check, "state", "Ready"))
            add_row(why, ORDER_QUEUE, object, reason, get_text(check, "message"), get_text(check, "lastTransitionTime"),
                    "");
    }
}

static void add_event(struct why *why, const json_t *event)
{
    const json_t *about = get(event, "involvedObject"), *uid;
    const char *first = get_text(event, "firstTimestamp"), *last = get_text(event, "series/lastObservedTime");
    char object[320];

    uid = json_object_get(why->known, name_object(get_text(about, "kind"), get_text(about, "name"), object));
    /* An object of the same name before this one. */
    if (!json_is_string(uid) || (*get_text(about, "uid") && *get_string(uid) && !get_is(about, "uid", get_string(uid))))
        return;
    add_row(why, get_is(event, "type", "Warning") ? ORDER_WARNING : ORDER_NORMAL, object, get_text(event, "reason"),
            get_text(event, "message"), *first ? first : get_text(event, "eventTime"),
            *last ? last : get_text(event, "lastTimestamp"));
}

/* --- all of it --- */

/* A row like this one of another object; NULL: there is none. */
static json_t *find_alike(const json_t *rows, const json_t *row)
{
    FOR_JSON (other, rows) {
        size_t n = strlen(get_text(row, "message"));

        if (get_number(other, "order", 0) == get_number(row, "order", 0) &&
            !get_is(other, "object", get_text(row, "object")) && get_is(other, "reason", get_text(row, "reason")) &&
            strncmp(get_text(other, "message"), get_text(row, "message"), n < ALIKE ? n : ALIKE) == 0)
            return other;
    }
    return NULL;
}

/* What explains most first, alike rows as one; normal events only if there is nothing else. */
static json_t *sort_rows(const struct why *why, bool with_normal)
{
    json_t *sorted = json_array(), *alike;

    for (int order = 0; order <= ORDER_NORMAL; order++)
        FOR_JSON (row, why->rows) {
            if (get_number(row, "order", 0) != order ||
                (order == ORDER_NORMAL &&
                 (!with_normal || get_number(json_array_get(sorted, 0), "order", order) != order)))
                continue;
            alike = find_alike(sorted, row);
            if (alike)
                json_object_set_new(alike, "others", json_integer(get_number(alike, "others", 0) + 1));
            else
                json_array_append(sorted, row);
        }
    FOR_JSON (row, sorted) {
        json_object_del(row, "order");
        json_object_del(row, "later");
    }
    return sorted;
}

static void collect(struct why *why)
{
    bool is_jobset = strcmp(why->kind, "JobSet") == 0;
    char groups[320];

    add_job(why, why->kind, why->job);
    /* The groups of a LeaderWorkerSet are a StatefulSet of its name, which is not read: its events are. */
    if (strcmp(why->kind, "LeaderWorkerSet") == 0)
        json_object_set_new(why->known, name_object("StatefulSet", get_name(why->job), groups), json_string(""));
    FOR_JSON (item, get_items(why->snapshot, "jobs"))
        if (is_jobset && is_owned(why, item))
            add_job(why, "Job", item);
    FOR_JSON (item, get_items(why->snapshot, "pods"))
        if (is_pod_of(why, item))
            add_pod(why, item);
    FOR_JSON (item, get_items(why->snapshot, "workloads"))
        if (is_owned(why, item))
            add_workload(why, item);
    FOR_JSON (item, get_items(why->snapshot, "events"))
        add_event(why, item);
}

static const char *state_of(const struct why *why, long long pods)
{
    if (strcmp(get_condition(why->job, "Completed"), "True") == 0 ||
        strcmp(get_condition(why->job, "Complete"), "True") == 0)
        return "complete";
    if (strcmp(get_condition(why->job, "Failed"), "True") == 0)
        return "failed";
    if (why->running > 0 && why->running + why->ended >= pods)
        return "running";
    return json_array_size(why->rows) > 0 ? "waiting" : "unknown";
}

json_t *deploy_why(const json_t *snapshot, const char *space, const char *name)
{
    /* A Job of a JobSet has another name than that. */
    static const char *const kinds[][2] = {
        {"jobsets", "JobSet"}, {"leaderworkersets", "LeaderWorkerSet"}, {"jobs", "Job"}};
    struct why why = {.snapshot = snapshot};
    struct deploy_job job = {0};
    json_t *documents, *result;
    const char *state;

    for (size_t i = 0; i < COUNT(kinds) && !why.job; i++) {
        why.job = get_item(snapshot, kinds[i][0], space, name);
        why.kind = kinds[i][1];
    }
    if (!why.job)
        return NULL;
    why.known = json_object();
    why.rows = json_array();
    /* The API server leaves the kind out in lists. */
    documents = json_pack("[o]", json_copy((json_t *)why.job));
    json_object_set_new(json_array_get(documents, 0), "kind", json_string(why.kind));
    if (deploy_job_find(documents, space, &job) != EP_OK)
        job = (struct deploy_job){0};
    collect(&why);
    state = state_of(&why, job.pods);
    result = json_pack("{s:s, s:{s:s, s:s, s:s, s:s?, s:b, s:I, s:I}, s:o}", "state", state, "job", "kind", why.kind,
                       "name", name, "namespace", space, "queue", job.queue, "workload", why.has_workload, "pods",
                       (json_int_t)job.pods, "running", (json_int_t)why.running, "reasons",
                       sort_rows(&why, text_is_any(state, TEXTS("waiting", "unknown"))));
    json_decref(documents);
    json_decref(why.known);
    json_decref(why.rows);
    return result;
}
