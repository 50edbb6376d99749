/* SPDX-License-Identifier: Apache-2.0 */
/* deploy_output.c - the reports of epkit deploy as text and JSON. */
#include "cmd_deploy.h"

#include "common/output.h"
#include "common/text.h"
#include "get.h"

#include <stdio.h>

/* The key of the rows in the document, and their table. */
struct report {
    const char *key;
    const struct out_column *columns;
    size_t n_columns;
};

/* Names and messages of manifests and clusters are untrusted: no control characters. Those of webhooks have lines. */
static void clean_line(const char *text, char *ret_clean, size_t bytes)
{
    snprintf(ret_clean, bytes, "%s", text);
    for (char *at = ret_clean; (at = strpbrk(at, "\n\r")); at++)
        *at = ' ';
    text_clean(ret_clean, ret_clean, bytes);
}

static void print_text(const char *label, const char *text)
{
    char clean[2048];

    clean_line(text, clean, sizeof(clean));
    out_line("%s%s", label, clean);
}

static void print_unread(const json_t *snapshot)
{
    char text[1024], name[64];

    FOR_MEMBERS (key, value, json_object_get(snapshot, "unread")) {
        clean_line(get_string(value), text, sizeof(text));
        text_clean(key, name, sizeof(name));
        out_warning("%s could not be read and were not checked: %s", name, text);
    }
}

/* What the table of findings has no room for. */
static void print_details(const json_t *findings)
{
    char label[64];

    FOR_JSON (finding, findings) {
        out_line("%s", "");
        snprintf(label, sizeof(label), "%s: ", get_text(finding, "id"));
        print_text(label, get_text(finding, "object"));
        snprintf(label, sizeof(label), "  %s will say: ", get_text(finding, "by"));
        print_text(label, get_text(finding, "says"));
        print_text("  why: ", get_text(finding, "why"));
        print_text("  do:  ", get_text(finding, "fix"));
    }
}

/* "5m": how long before `now` it was; "" if that is not known. */
static void format_age(const char *since, const char *now, char ret_text[32])
{
    static const struct {
        long long seconds;
        char unit;
    } units[] = {{86400, 'd'}, {3600, 'h'}, {60, 'm'}, {1, 's'}};
    time_t began = text_time_of(since), ended = text_time_of(now);
    long long age = (long long)ended - (long long)began;
    size_t i = 0;

    *ret_text = '\0';
    if (began < 0 || ended < 0)
        return;
    while (i + 1 < COUNT(units) && age < 2 * units[i].seconds)
        i++;
    snprintf(ret_text, 32, "%lld%c", age > 0 ? age / units[i].seconds : 0, units[i].unit);
}

/* Prints the answer, with what was read of the cluster, and consumes it. Returns `code`, or CMD_FAILED. */
static int print_answer(const struct cmd *cmd, const struct report *report, enum out_tone tone, const char *verdict,
                        json_t *answer, const json_t *snapshot, bool is_json, int code)
{
    json_t *document = out_document(cmd->name), *rows = json_object_get(answer, report->key);
    char text[2048];

    if (is_json) {
        json_object_set_new(document, "verdict", out_text(verdict));
        json_object_set_new(
            document, "cluster",
            json_pack("{s:s, s:O?}", "version", get_text(snapshot, "version"), "unread", get(snapshot, "unread")));
        json_object_update(document, answer);
        json_decref(answer);
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    json_decref(document);
    clean_line(verdict, text, sizeof(text));
    out_verdict(tone, "%s", text);
    FOR_JSON (row, rows) {
        if (!get(row, "since"))
            continue;
        format_age(get_text(row, "since"), get_text(snapshot, "time"), text);
        json_object_set_new(row, "since", json_string(text));
    }
    if (json_array_size(rows) > 0) {
        out_line("%s", "");
        out_table(stdout, report->columns, report->n_columns, rows, OUT_TABLE);
    }
    print_details(get(answer, "findings"));
    print_unread(snapshot);
    json_decref(answer);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

/* --- check --- */

/* Without these no verdict is possible. */
static const char *first_unknown(const struct deploy_job *job, const json_t *snapshot)
{
    static const char *const needed[] = {"namespaces",    "nodes",           "pods",      "localqueues",
                                         "clusterqueues", "resourceflavors", "topologies"};
    static const char *const of_networks[] = {"networks", "gkenetworkparamsets"};

    if (!get(snapshot, "groups"))
        return "groups";
    for (size_t i = 0; i < (job->queue ? COUNT(needed) : 3); i++)
        if (!get_items(snapshot, needed[i]))
            return needed[i];
    /* On GKE: which networks the pool has is known to gcloud alone. */
    if (job->prerequisites && strstr(get_text(snapshot, "version"), "-gke.")) {
        for (size_t i = 0; i < COUNT(of_networks); i++)
            if (!get_items(snapshot, of_networks[i]))
                return of_networks[i];
        if (!get(snapshot, "gke/cluster") || !get(snapshot, "gke/networks"))
            return "answers of gcloud";
    }
    return NULL;
}

int check_report(const struct cmd *cmd, const struct deploy_job *job, const json_t *snapshot, bool is_json)
{
    static const struct out_column columns[] = {
        {"SEVERITY", "severity", 0, 0}, {"ID", "id", 0, 0}, {"BY", "by", 0, 0}, {"OBJECT", "object", 0, OUT_TRUNC}};
    static const struct report report = {"findings", columns, COUNT(columns)};
    json_t *findings = deploy_check(snapshot, job), *answer;
    const json_t *first = json_array_get(findings, 0);
    const char *unknown = first_unknown(job, snapshot);
    bool is_refused = get_is(first, "severity", "error"), is_open = !is_refused && unknown;
    size_t n_errors = 0;
    char verdict[512];
    struct text text = text_in(verdict, sizeof(verdict));

    while (get_is(json_array_get(findings, n_errors), "severity", "error"))
        n_errors++;
    text_add(&text, is_open ? "No verdict on %s %.100s" : "%s %.100s", job->kind, job->name);
    if (is_refused && job->prerequisites)
        text_add(&text, " will not run: %zu prerequisite%s missing, the first: %.300s.", n_errors,
                 n_errors == 1 ? " is" : "s are", get_text(first, "why"));
    else if (is_refused)
        text_add(&text, " will not run: %s will say '%.300s'.", get_text(first, "by"), get_text(first, "says"));
    else if (is_open)
        text_add(&text, ": %s were not read.", unknown);
    else if (first)
        text_add(&text, " may wait or be slow: %.300s.", get_text(first, "why"));
    else
        text_add(&text, " can run on this cluster (%.60s): %lld pods%s%.100s.", get_text(snapshot, "version"),
                 job->pods, job->queue ? " by queue " : "", job->queue ? job->queue : "");
    answer =
        json_pack("{s:o, s:{s:s, s:s, s:s, s:s?, s:I}, s:o}", "will_run",
                  is_open ? json_null() : json_boolean(!is_refused), "job", "kind", job->kind, "name", job->name,
                  "namespace", job->space, "queue", job->queue, "pods", (json_int_t)job->pods, "findings", findings);
    return print_answer(cmd, &report,
                        is_refused ? OUT_BAD
                        : first    ? OUT_WARN
                                   : OUT_GOOD,
                        verdict, answer, snapshot, is_json,
                        is_open ? CMD_FAILED
                        : first ? CMD_FINDINGS
                                : CMD_FINE);
}

/* --- why --- */

static void format_verdict(const json_t *answer, char ret_text[2048])
{
    const json_t *job = get(answer, "job"), *reason = json_array_get(get(answer, "reasons"), 0);
    long long pods = get_number(job, "pods", 0), running = get_number(job, "running", 0);
    long long others = get_number(reason, "others", 0);
    struct text text = text_in(ret_text, 2048);

    text_add(&text, "%s %.253s ", get_text(job, "kind"), get_text(job, "name"));
    if (get_is(answer, "state", "running"))
        text_add(&text, "is running: %lld pod%s", running, running == 1 ? "" : "s");
    else if (get_is(answer, "state", "complete"))
        text_add(&text, "is complete");
    else if (!reason)
        text_add(&text, "has %lld of %lld pods running, and the cluster gives no reason", running, pods);
    else
        text_add(&text, "%s: %.320s", get_is(answer, "state", "failed") ? "failed" : "is held up",
                 get_text(reason, "object"));
    if (others > 0)
        text_add(&text, " and %lld other%s", others, others > 1 ? "s" : "");
    if (reason)
        text_add(&text, ": %.200s: %.1000s", get_text(reason, "reason"), get_text(reason, "message"));
    if (*get_text(job, "queue") && json_is_false(get(job, "workload")) && !get_is(answer, "state", "complete"))
        text_add(&text, "; Kueue has made no Workload for it");
    if (ret_text[text.n - 1] != '.')
        text_add(&text, ".");
}

int why_report(const struct cmd *cmd, json_t *answer, const json_t *snapshot, bool is_json)
{
    static const struct out_column columns[] = {
        {"OBJECT", "object", 0, 0},       {"OTHERS", "others", 0, OUT_NONZERO}, {"REASON", "reason", 0, 0},
        {"SINCE", "since", 0, OUT_RIGHT}, {"MESSAGE", "message", 0, OUT_TRUNC},
    };
    static const struct report report = {"reasons", columns, COUNT(columns)};
    static const struct {
        const char *state;
        int code;
        enum out_tone tone;
    } states[] = {
        {"running", CMD_FINE, OUT_GOOD},   {"complete", CMD_FINE, OUT_GOOD},     {"waiting", CMD_FINDINGS, OUT_WARN},
        {"failed", CMD_FINDINGS, OUT_BAD}, {"unknown", CMD_NOT_KNOWN, OUT_WARN},
    };
    char verdict[2048];
    size_t s = 0;

    while (!get_is(answer, "state", states[s].state))
        s++;
    format_verdict(answer, verdict);
    return print_answer(cmd, &report, states[s].tone, verdict, answer, snapshot, is_json, states[s].code);
}
