/* SPDX-License-Identifier: Apache-2.0 */
/* launch_connect.c - before the job runs: connects to all nodes, sorts them, runs the doctor on them. */
#include "launch_internal.h"

#include "base/clock.h"
#include "base/error.h"

#include <stdlib.h>
#include <string.h>

#define RETRY_MS 2000
#define CHECK_SECONDS 25
#define FINDINGS_SHOWN 20

/* --- connecting --- */

/*
 * Can the failure be temporary? A name may not resolve yet, or sshd not listen yet: pods start one after the other. A
 * host that boots (pam_nologin) and a pod that restarts close the connection.
 */
static bool may_be_temporary(const struct node *node)
{
    static const char *const layers[] = {"DNS", "TCP", "banner", "timeout"};

    for (size_t i = 0; node->failed_at && i < sizeof(layers) / sizeof(layers[0]); i++)
        if (strcmp(node->failed_at, layers[i]) == 0)
            return true;
    return node->failed_at && remote_is_ended_by_host(node->why);
}

static void retry(struct launch *launch)
{
    uint64_t now_ns = ep_now_ns(), until_ns = launch->began_ns + (uint64_t)launch->options->wait_s * 1000000000u;

    if (!launch->options->is_patient || now_ns > until_ns)
        return;
    for (int i = 0; i < launch->n; i++) {
        struct node *node = &launch->nodes[i];

        if (node->state != NODE_FAILED || !may_be_temporary(node))
            continue;
        if (!node->retry_ns) {
            node->retry_ns = now_ns + RETRY_MS * UINT64_C(1000000);
        } else if (now_ns > node->retry_ns) {
            remote_reset(node->remote);
            frame_reader_done(&node->reader);
            node->failed_at = NULL;
            node->has_frames = false;
            node->stray[0] = '\0';
            node->retry_ns = 0;
            node->state = NODE_CONNECTING;
        }
    }
}

static bool has_connected(struct launch *launch)
{
    int n_open = 0, n_ready = 0;
    uint64_t until_ns = launch->began_ns + (uint64_t)launch->options->wait_s * 1000000000u;

    retry(launch);
    for (int i = 0; i < launch->n; i++) {
        const struct node *node = &launch->nodes[i];

        n_ready += node->state == NODE_READY;
        n_open += node->state == NODE_CONNECTING || (node->state == NODE_FAILED && launch->options->is_patient &&
                                                     may_be_temporary(node) && ep_now_ns() < until_ns);
    }
    if (launch->options->on_progress)
        launch->options->on_progress(n_ready, launch->n, "nodes answer");
    return n_open == 0;
}

bool launch_connect(struct launch *launch)
{
    if (!launch_wait(launch, has_connected, launch->deadline_ns))
        return false;
    for (int i = 0; i < launch->n; i++)
        if (launch->nodes[i].state != NODE_READY)
            return false;
    return true;
}

/* --- the order --- */

static bool has_located(struct launch *launch)
{
    for (int i = 0; i < launch->n; i++)
        if (launch->nodes[i].state == NODE_READY && !launch->nodes[i].is_located)
            return false;
    return true;
}

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
    bool is_asked = launch->options->topology || (strcmp(method, "auto") != 0 && strcmp(method, "none") != 0);
    int n_unknown = 0, n_reasons = 0;
    const struct node *first = NULL;

    for (int i = 0; i < launch->n; i++) {
        const struct node *node = &launch->nodes[i];

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
    const struct launch_options *options = launch->options;
    bool is_none = strcmp(job_text(options->location, "method", "none"), "none") == 0;

    for (int i = 0; i < launch->n; i++) {
        struct node *node = &launch->nodes[i];
        const char *known = job_text(options->topology, node->address, NULL);
        json_t *request;

        if (options->topology || is_none) {
            snprintf(node->location, sizeof(node->location), "%s", known ? known : "");
            if (options->topology && !known)
                snprintf(node->location_why, sizeof(node->location_why), "the topology file does not list it");
            node->is_located = true;
            continue;
        }
        request = json_deep_copy(options->location);
        json_object_set_new(request, "do", json_string("locate"));
        node_send(node, request);
    }
    launch_wait(launch, has_located, ep_now_ns() + (2 * LOCATION_SECONDS + 5) * UINT64_C(1000000000));
}

static int compare_machines(const void *a, const void *b)
{
    const struct node *left = *(struct node *const *)a, *right = *(struct node *const *)b;
    int order = strcmp(job_text(left->facts, "machine", ""), job_text(right->facts, "machine", ""));

    return order ? order : left->rank - right->rank;
}

/* Reports two names of one host: its GPUs and ports would be used twice. */
static void report_same(struct launch *launch)
{
    const struct node *first = NULL, *second = NULL;
    int n_same = 0;

    qsort(launch->order, (size_t)launch->n, sizeof(*launch->order), compare_machines);
    for (int i = 1; i < launch->n; i++) {
        const char *machine = job_text(launch->order[i]->facts, "machine", "");

        if (!*machine || strcmp(machine, job_text(launch->order[i - 1]->facts, "machine", "")) != 0)
            continue;
        if (n_same++ == 0) {
            first = launch->order[i - 1];
            second = launch->order[i];
        }
    }
    for (int i = 0; i < launch->n; i++)
        launch->order[launch->nodes[i].rank] = &launch->nodes[i];
    if (first && second)
        launch_note(launch, "%s and %s%s are one host, %s: ranks of both share its GPUs and ports", first->name,
                    second->name, n_same > 1 ? ", ..." : "", job_text(first->facts, "host", "?"));
}

static ep_status write_hostfiles(struct launch *launch)
{
    const struct launch_options *options = launch->options;
    char path[sizeof(launch->folder) + 32];
    struct hosts sorted = {.n = launch->n};
    ep_status status = EP_OK;

    sorted.list = calloc((size_t)launch->n, sizeof(*sorted.list));
    if (!sorted.list)
        return ep_fail(EP_E_MEMORY, "no memory for the hostfiles");
    for (int i = 0; i < launch->n; i++)
        sorted.list[i] = *launch->order[i]->host;
    if (*launch->folder) {
        snprintf(path, sizeof(path), "%s/hostfile", launch->folder);
        status = hosts_write(path, &sorted, launch->gpus);
    }
    if (status == EP_OK && *launch->folder) {
        snprintf(path, sizeof(path), "%s/hostfile-1pernode.txt", launch->folder);
        status = hosts_write(path, &sorted, 1);
    }
    if (status == EP_OK && options->hostfile_8)
        status = hosts_write(options->hostfile_8, &sorted, launch->gpus);
    if (status == EP_OK && options->hostfile_1)
        status = hosts_write(options->hostfile_1, &sorted, 1);
    free(sorted.list);
    return status;
}

/* The number of GPUs of each node; it must be the same on all nodes. */
static ep_status count_gpus(struct launch *launch)
{
    int gpus = job_number(launch->order[0]->facts, "gpus", 0);

    if (launch->options->gpus_per_node) {
        launch->gpus = launch->options->gpus_per_node;
        return EP_OK;
    }
    for (int i = 1; i < launch->n; i++)
        if (job_number(launch->order[i]->facts, "gpus", 0) != gpus)
            return ep_fail(EP_E_MISMATCH, "%s has %d GPUs and %s has %d: give --gpus-per-node", launch->order[0]->name,
                           gpus, launch->order[i]->name, job_number(launch->order[i]->facts, "gpus", 0));
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

static bool has_answered(struct launch *launch)
{
    for (int i = 0; i < launch->n; i++)
        if (launch->nodes[i].state == NODE_READY && !launch->nodes[i].is_answered)
            return false;
    return true;
}

/* Merges findings with the same text into one with several nodes. */
static void add_finding(json_t *findings, const struct node *node, const json_t *check)
{
    const char *id = job_text(check, "id", ""), *text = job_text(check, "text", "");
    json_t *finding;
    size_t i;

    json_array_foreach(findings, i, finding)
    {
        if (strcmp(job_text(finding, "id", ""), id) == 0 && strcmp(job_text(finding, "text", ""), text) == 0) {
            json_array_append_new(json_object_get(finding, "nodes"), json_string(node->name));
            return;
        }
    }
    json_array_append_new(findings,
                          json_pack("{s:s, s:s, s:s, s:[s]}", "id", id, "severity",
                                    job_text(check, "severity", "warning"), "text", text, "nodes", node->name));
}

static void save_document(const struct launch *launch, const struct node *node, const char *text)
{
    char path[sizeof(launch->folder) + 300];
    FILE *stream;

    if (!*launch->folder)
        return;
    snprintf(path, sizeof(path), "%s/doctor-%s.json", launch->folder, node->name);
    stream = fopen(path, "we");
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
    const char *text = job_text(node->answer, "output", "");
    json_t *document = json_loads(text, 0, NULL), *check;
    size_t i;

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
    json_array_foreach(json_object_get(document, "checks"), i, check)
    {
        if (strcmp(job_text(check, "outcome", ""), "found") == 0)
            add_finding(launch->findings, node, check);
    }
    json_decref(document);
}

bool launch_check(struct launch *launch)
{
    int seconds = check_seconds(launch);
    json_t *finding;
    size_t i, n_serious = 0;

    if (!launch->options->has_checks)
        return true;
    for (int n = 0; n < launch->n; n++)
        node_send(&launch->nodes[n], json_pack("{s:s, s:[sss], s:i}", "do", "ask", "argv", "epkit", "doctor", "--json",
                                               "timeout_s", seconds));
    launch_wait(launch, has_answered, ep_now_ns() + (seconds + 5) * UINT64_C(1000000000));
    for (int n = 0; n < launch->n; n++)
        add_diagnosis(launch, launch->order[n]);
    json_array_foreach(launch->findings, i, finding)
    {
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
