/* SPDX-License-Identifier: Apache-2.0 */
/* launch_connect.c - before the job runs: connects to all nodes, sorts them, runs the doctor on them. */
#include "launch_internal.h"

#include "base/clock.h"
#include "base/error.h"
#include "common/memory.h"
#include "common/output.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_MS 2000
#define CHECK_SECONDS 25
#define FINDINGS_SHOWN 20

/* --- connecting --- */

/*
 * Can the failure be temporary? A name may not resolve yet, or sshd not listen yet: pods start one after the other. A
 * host that boots (pam_nologin) and a pod that restarts close the connection; one that pulls images is late with a
 * login.
 */
static bool may_be_temporary(const struct node *node)
{
    return node->failed_at &&
           (text_is_any(node->failed_at, TEXTS("DNS", "TCP", "banner", "timeout")) ||
            remote_is_ended_by_host(node->why) || (node->remote->late && node->remote->layer == REMOTE_LOGIN));
}

void node_reconnect(struct node *node)
{
    remote_reset(node->remote);
    node->state = NODE_CONNECTING;
}

/* A connection that failed is tried again after a while. */
static void retry(struct node *node, uint64_t now_ns)
{
    if (!node->retry_ns) {
        node->retry_ns = now_ns + RETRY_MS * UINT64_C(1000000);
    } else if (now_ns > node->retry_ns) {
        node_reconnect(node);
        node->failed_at = NULL;
        node->has_answered = false;
        node->stray[0] = '\0';
        node->retry_ns = 0;
    }
}

static bool has_connected(struct launch *launch)
{
    uint64_t now_ns = ep_now_ns(), until_ns = launch->began_ns + (uint64_t)launch->options->wait_s * 1000000000u;
    const struct node *waited = NULL; /* the first that is tried again */
    int n_open = 0, n_ready = 0;

    FOR_EACH (node, launch->nodes, launch->n) {
        bool is_retried = node->state == NODE_FAILED && now_ns < until_ns && may_be_temporary(node);

        if (is_retried && !waited && node->failed_at)
            waited = node;
        if (is_retried)
            retry(node, now_ns);
        n_ready += node->state == NODE_READY;
        n_open += is_retried || node->state == NODE_CONNECTING;
    }
    if (waited && waited->failed_at)
        progress_update(n_ready, launch->n, "nodes answer; %s: %s: %.100s", waited->name, waited->failed_at,
                        waited->why);
    else
        progress_update(n_ready, launch->n, "nodes answer");
    return n_open == 0;
}

bool launch_connect(struct launch *launch)
{
    if (!launch_wait(launch, has_connected, launch->deadline_ns))
        return false;
    return !ANY_OF(i, launch->n, launch->nodes[i].state != NODE_READY);
}

/* --- the order --- */

/* Sorts by location; nodes without one come last; equal ones keep the given order. */
static int compare(const void *a, const void *b)
{
    const struct node *left = *(struct node *const *)a, *right = *(struct node *const *)b;
    int order = !*left->location - !*right->location;

    if (order == 0)
        order = strcmp(left->location, right->location);
    return order ? order : (left > right) - (left < right);
}

static void report_unknown(struct launch *launch)
{
    const char *method = job_text(launch->options->location, "method", "");
    bool is_asked = strcmp(method, "auto") != 0 && strcmp(method, "none") != 0;
    int n_unknown = 0, n_reasons = 0;
    const struct node *first = NULL;

    FOR_EACH (node, launch->nodes, launch->n) {
        if (*node->location)
            continue;
        n_unknown++;
        n_reasons += *node->location_why != '\0';
        if (!first || (!*first->location_why && *node->location_why))
            first = node;
    }
    if (!first || (n_unknown == launch->n && n_reasons == 0 && !is_asked))
        return;
    launch_note(launch, "the location of %d of %d nodes is not known, so they come last: %s%s%s%s", n_unknown,
                launch->n, first->name, *first->location_why ? ": " : "", first->location_why,
                n_unknown > 1 ? "; ..." : "");
    for (int i = 0; i < launch->n; i++)
        if (!*launch->nodes[i].location && launch->log)
            fprintf(launch->log, "epkit: %s has no location%s%s\n", launch->nodes[i].name,
                    *launch->nodes[i].location_why ? ": " : "", launch->nodes[i].location_why);
}

static void locate(struct launch *launch)
{
    const json_t *how = launch->options->location;

    if (strcmp(job_text(how, "method", "none"), "none") != 0) {
        json_t *request = json_deep_copy(how);

        json_object_set_new(request, "do", json_string("location"));
        launch_ask(launch, request, 2 * LOCATION_SECONDS + 5);
    }
    FOR_EACH (node, launch->nodes, launch->n) {
        const char *found = job_text(node->reply, "location", "");

        /* The agent is trusted, the node may not be. */
        if (location_is_valid(found))
            snprintf(node->location, sizeof(node->location), "%s", found);
        snprintf(node->location_why, sizeof(node->location_why), "%s", job_text(node->reply, "why", ""));
    }
}

/* Reports two names of one host: its GPUs and ports would be used twice. */
static void report_same(struct launch *launch)
{
    const char *first = NULL, *second = NULL, *host = "?";
    json_t *names = json_object(); /* of nodes, by machine */
    int n_same = 0;

    for (int i = 0; i < launch->n; i++) {
        const struct node *node = launch->order[i];
        const char *machine = job_text(node->facts, "machine", ""), *earlier = job_text(names, machine, NULL);

        if (*machine && !earlier)
            json_object_set_new(names, machine, json_string(node->name));
        if (!earlier || n_same++ > 0)
            continue;
        first = earlier;
        second = node->name;
        host = job_text(node->facts, "host", "?");
    }
    if (n_same)
        launch_note(launch, "%s and %s%s are one host, %s: ranks of both share its GPUs and ports", first, second,
                    n_same > 1 ? ", ..." : "", host);
    json_decref(names);
}

static ep_status write_hostfiles(struct launch *launch)
{
    const struct launch_options *options = launch->options;
    char path[sizeof(launch->folder) + 32], path_1[sizeof(path)];
    const struct {
        const char *path;
        int slots;
    } files[] = {{*launch->folder ? path : NULL, launch->gpus},
                 {*launch->folder ? path_1 : NULL, 1},
                 {options->hostfile_8, launch->gpus},
                 {options->hostfile_1, 1}};
    struct hosts sorted = {.n = launch->n, .list = memory_new((size_t)launch->n, sizeof(*sorted.list))};
    ep_status status = EP_OK;

    snprintf(path, sizeof(path), "%s/hostfile", launch->folder);
    snprintf(path_1, sizeof(path_1), "%s/hostfile-1pernode.txt", launch->folder);
    for (int i = 0; i < launch->n; i++)
        sorted.list[i] = *launch->order[i]->host;
    for (size_t i = 0; i < COUNT(files) && status == EP_OK; i++)
        if (files[i].path)
            status = hosts_write(files[i].path, &sorted, files[i].slots);
    free(sorted.list);
    return status;
}

#define GPUS_MAX 1024 /* as of --gpus-per-node */

/* The number of GPUs of each node; it must be the same on all nodes. */
static ep_status count_gpus(struct launch *launch)
{
    int gpus = job_number(launch->order[0]->facts, "gpus", 0);

    if (launch->options->gpus_per_node) {
        launch->gpus = launch->options->gpus_per_node;
        return EP_OK;
    }
    for (int i = 0; i < launch->n; i++) {
        int others = job_number(launch->order[i]->facts, "gpus", 0);

        if (others < 0 || others > GPUS_MAX)
            return ep_fail(EP_E_ARG, "%s says that it has %d GPUs, and at most %d are believed: give --gpus-per-node",
                           launch->order[i]->name, others, GPUS_MAX);
        if (others != gpus)
            return ep_fail(EP_E_MISMATCH, "%s has %d GPUs and %s has %d: give --gpus-per-node", launch->order[0]->name,
                           gpus, launch->order[i]->name, others);
    }
    launch->gpus = gpus ? gpus : 8;
    return EP_OK;
}

ep_status launch_arrange(struct launch *launch)
{
    const struct launch_job *job = &launch->options->job;

    locate(launch);
    if (launch->interrupted || launch->reason)
        return EP_OK;
    for (int i = 0; i < launch->n; i++)
        launch->order[i] = &launch->nodes[i];
    qsort(launch->order, (size_t)launch->n, sizeof(*launch->order), compare);
    for (int i = 0; i < launch->n; i++)
        launch->order[i]->rank = i;
    report_unknown(launch);
    report_same(launch);
    EP_TRY(count_gpus(launch));
    launch->per_node = job->per_node ? job->per_node : launch->gpus;
    if (!job->per_node && job->per_node_without_gpus && job_number(launch->order[0]->facts, "gpus", 0) == 0 &&
        !launch->options->gpus_per_node)
        launch->per_node = job->per_node_without_gpus;
    return write_hostfiles(launch);
}

/* --- the doctor --- */

/* Merges findings with the same text into one with several nodes. */
static void add_finding(json_t *findings, const struct node *node, const json_t *check)
{
    const char *id = job_text(check, "id", ""), *text = job_text(check, "text", "");

    FOR_JSON (finding, findings) {
        if (strcmp(job_text(finding, "id", ""), id) == 0 && strcmp(job_text(finding, "text", ""), text) == 0) {
            json_array_append_new(json_object_get(finding, "nodes"), json_string(node->name));
            return;
        }
    }
    json_array_append_new(findings,
                          json_pack("{s:s, s:s, s:s, s:[s]}", "id", id, "severity",
                                    job_text(check, "severity", "warning"), "text", text, "nodes", node->name));
}

static void save_document(struct launch *launch, const struct node *node, const char *text)
{
    FILE *stream = *launch->folder ? folder_create(launch, "doctor-%s.json", node->name) : NULL;

    if (!stream)
        return;
    fputs(text, stream);
    fclose(stream);
}

/* Where a connection may take long, the doctor may as well. */
static int check_seconds(const struct launch *launch)
{
    return launch->options->connect_s > CHECK_SECONDS ? (int)launch->options->connect_s : CHECK_SECONDS;
}

static void add_diagnosis(struct launch *launch, const struct node *node)
{
    const char *text = job_text(node->reply, "output", "");
    json_t *document = json_loads(text, 0, NULL);

    /*
     * A document with "errors" says why there is no report: common/ending.json. A node without GPU and NIC has one,
     * without checks.
     */
    if (document && json_object_get(document, "errors")) {
        launch_note(launch, "%s: the doctor failed: %.300s", node->name,
                    job_text(document, "verdict", "no reason given"));
        json_decref(document);
        return;
    }
    if (!document) {
        launch_note(launch, "%s: the doctor did not answer within %d s", node->name, check_seconds(launch));
        return;
    }
    save_document(launch, node, text);
    FOR_JSON (check, json_object_get(document, "checks"))
        if (strcmp(job_text(check, "outcome", ""), "found") == 0)
            add_finding(launch->findings, node, check);
    json_decref(document);
}

bool launch_check(struct launch *launch)
{
    const json_t *spec = launch->options->job.spec;
    int seconds = check_seconds(launch);
    json_t *finding;
    size_t n_serious = 0;

    if (!launch->options->has_checks)
        return true;
    /* In the environment that the job will have there. */
    launch_ask(launch,
               json_pack("{s:s, s:i, s:O?, s:O?, s:O?, s:O?}", "do", "doctor", "timeout_s", seconds, "source",
                         json_object_get(spec, "source"), "inherited", json_object_get(spec, "inherited"), "env",
                         json_object_get(spec, "env"), "preload", json_object_get(spec, "preload")),
               seconds + SOURCE_SECONDS + 5);
    for (int n = 0; n < launch->n; n++)
        add_diagnosis(launch, launch->order[n]);
    for (size_t i = 0; (finding = json_array_get(launch->findings, i)); i++) {
        size_t n = json_array_size(json_object_get(finding, "nodes"));
        const char *first = json_string_value(json_array_get(json_object_get(finding, "nodes"), 0));

        n_serious += strcmp(job_text(finding, "severity", ""), "serious") == 0;
        if (i < FINDINGS_SHOWN)
            launch_note(launch, "doctor: %s on %s%s: %s (%s)", job_text(finding, "id", ""), first, n > 1 ? ", ..." : "",
                        job_text(finding, "text", ""), job_text(finding, "severity", ""));
    }
    if (n_serious == 0 || !launch->options->require_checks)
        return true;
    launch_note(launch, "%zu serious finding%s: the job is not started (--checks report starts it all the same)",
                n_serious, n_serious == 1 ? "" : "s");
    return false;
}
