/* SPDX-License-Identifier: Apache-2.0 */
/* deploy_output.c - the reports of epkit deploy as text and JSON. */
#include "deploy_output.h"

#include "common/clean.h"
#include "common/output.h"
#include "get.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Names and messages of manifests and clusters are untrusted: print no control characters. */
static json_t *printable(const json_t *rows)
{
    json_t *copy = json_deep_copy(rows), *row, *value;
    const char *key;
    char text[2048];
    size_t i;

    json_array_foreach (copy, i, row) {
        json_object_foreach (row, key, value) {
            text_clean(get_string(value), text, sizeof(text));
            json_string_set(value, text);
        }
    }
    return copy;
}

static void print_verdict(enum out_tone tone, const char *verdict)
{
    char text[2048];

    text_clean(verdict, text, sizeof(text));
    out_verdict(tone, "%s", text);
}

static void print_unread(const json_t *snapshot)
{
    char text[1024], name[64];
    const char *key;
    json_t *value;

    json_object_foreach ((json_t *)get_key(snapshot, "unread"), key, value) {
        text_clean(get_string(value), text, sizeof(text));
        text_clean(key, name, sizeof(name));
        out_warning("%s could not be read and were not checked: %s", name, text);
    }
}

/* The start of a document, with what was read of the cluster. */
static json_t *start_document(const struct cmd *cmd, const char *verdict, const json_t *snapshot)
{
    json_t *document = out_document(cmd->name);

    json_object_set_new(document, "verdict", out_text(verdict));
    json_object_set_new(
        document, "cluster",
        json_pack("{s:s, s:O?}", "version", get_text(snapshot, "version"), "unread", get_key(snapshot, "unread")));
    return document;
}

/* --- check --- */

struct verdict {
    int n_errors, n_warnings;
    const char *unknown; /* resources that were required and not read; NULL: none */
    long long pods;
    char text[512];
};

/* Without these no verdict is possible. */
static const char *first_unknown(const struct deploy_job *job, const json_t *snapshot)
{
    static const char *const always[] = {"namespaces", "nodes", "pods", NULL};
    static const char *const queued[] = {"localqueues", "clusterqueues", "resourceflavors", "topologies", NULL};

    if (!json_is_array(get_key(snapshot, "groups")))
        return "groups";
    for (int i = 0; always[i]; i++)
        if (!get_items(snapshot, always[i]))
            return always[i];
    for (int i = 0; job->queue && queued[i]; i++)
        if (!get_items(snapshot, queued[i]))
            return queued[i];
    return NULL;
}

static struct verdict verdict_of(const struct deploy_job *job, const json_t *findings, const json_t *snapshot)
{
    struct verdict verdict = {.unknown = first_unknown(job, snapshot)};
    const json_t *finding;
    size_t i;

    json_array_foreach (findings, i, finding) {
        *(strcmp(get_text(finding, "severity"), "error") == 0 ? &verdict.n_errors : &verdict.n_warnings) += 1;
    }
    for (int s = 0; s < job->n_sets; s++)
        verdict.pods += job->sets[s].count;
    finding = json_array_get(findings, 0);
    if (verdict.n_errors > 0)
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s will not run: %s will say '%.300s'.", job->kind,
                 job->name, get_text(finding, "by"), get_text(finding, "says"));
    else if (verdict.unknown)
        snprintf(verdict.text, sizeof(verdict.text), "No verdict on %s %.100s: %s were not read.", job->kind, job->name,
                 verdict.unknown);
    else if (verdict.n_warnings > 0)
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s may wait or be slow: %.300s.", job->kind, job->name,
                 get_text(finding, "why"));
    else
        snprintf(verdict.text, sizeof(verdict.text), "%s %.100s can run on this cluster (%.60s): %lld pods%s%.100s.",
                 job->kind, job->name, get_text(snapshot, "version"), verdict.pods, job->queue ? " by queue " : "",
                 job->queue ? job->queue : "");
    return verdict;
}

static const struct out_column check_columns[] = {
    {"SEVERITY", "severity", 0, 0},
    {"ID", "id", 0, 0},
    {"BY", "by", 0, 0},
    {"OBJECT", "object", 0, OUT_TRUNC},
};

static void print_findings(const json_t *all)
{
    json_t *findings = printable(all), *finding;
    size_t i;

    if (json_array_size(findings) > 0) {
        out_line("%s", "");
        out_table(stdout, check_columns, COUNT(check_columns), findings, OUT_TABLE);
    }
    json_array_foreach (findings, i, finding) {
        out_line("%s", "");
        out_line("%s: %s", get_text(finding, "id"), get_text(finding, "object"));
        out_line("  %s will say: %s", get_text(finding, "by"), get_text(finding, "says"));
        out_line("  why: %s", get_text(finding, "why"));
        out_line("  do:  %s", get_text(finding, "fix"));
    }
    json_decref(findings);
}

int check_report(const struct cmd *cmd, const struct deploy_job *job, const json_t *snapshot, bool is_json)
{
    json_t *findings = deploy_check(snapshot, job), *document;
    struct verdict verdict;
    bool is_open;
    int code;

    if (!findings) {
        out_error("no memory for the findings");
        return CMD_FAILED;
    }
    verdict = verdict_of(job, findings, snapshot);
    is_open = verdict.n_errors == 0 && verdict.unknown;
    code = is_open ? CMD_FAILED : json_array_size(findings) > 0 ? CMD_FINDINGS : CMD_FINE;
    if (is_json) {
        document = start_document(cmd, verdict.text, snapshot);
        json_object_set_new(document, "will_run", is_open ? json_null() : json_boolean(verdict.n_errors == 0));
        json_object_set_new(document, "job",
                            json_pack("{s:s, s:s, s:s, s:s?, s:I}", "kind", job->kind, "name", job->name, "namespace",
                                      job->space, "queue", job->queue, "pods", (json_int_t)verdict.pods));
        json_object_set_new(document, "findings", findings);
        return out_json(document) == 0 ? code : CMD_FAILED;
    }
    print_verdict(verdict.n_errors ? OUT_BAD : verdict.n_warnings ? OUT_WARN : OUT_GOOD, verdict.text);
    print_findings(findings);
    print_unread(snapshot);
    json_decref(findings);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

/* --- why --- */

static const struct {
    const char *state;
    int code;
    enum out_tone tone;
} states[] = {
    {"running", CMD_FINE, OUT_GOOD},   {"complete", CMD_FINE, OUT_GOOD},     {"waiting", CMD_FINDINGS, OUT_WARN},
    {"failed", CMD_FINDINGS, OUT_BAD}, {"unknown", CMD_NOT_KNOWN, OUT_WARN},
};

static void format_verdict(const json_t *answer, char ret_text[2048])
{
    const json_t *job = get_key(answer, "job"), *reason = json_array_get(get_key(answer, "reasons"), 0);
    const char *state = get_text(answer, "state");
    long long pods = get_number(job, "pods", 0), running = get_number(job, "running", 0);
    long long others = get_number(reason, "others", 0);
    struct text text = text_in(ret_text, 2048);

    text_add(&text, "%s %.253s ", get_text(job, "kind"), get_text(job, "name"));
    if (strcmp(state, "running") == 0)
        text_add(&text, "is running: %lld pod%s", running, running == 1 ? "" : "s");
    else if (strcmp(state, "complete") == 0)
        text_add(&text, "is complete");
    else if (!reason)
        text_add(&text, "has %lld of %lld pods running, and the cluster gives no reason", running, pods);
    else
        text_add(&text, "%s: %.320s", strcmp(state, "failed") == 0 ? "failed" : "is held up",
                 get_text(reason, "object"));
    if (others > 0)
        text_add(&text, " and %lld other%s", others, others > 1 ? "s" : "");
    if (reason)
        text_add(&text, ": %.200s: %.1000s", get_text(reason, "reason"), get_text(reason, "message"));
    if (*get_text(job, "queue") && json_is_false(get_key(job, "workload")) && strcmp(state, "complete") != 0)
        text_add(&text, "; Kueue has made no Workload for it");
    if (text.n > 0 && text.n < text.room && ret_text[text.n - 1] != '.')
        text_add(&text, ".");
}

static time_t parse_time(const char *text)
{
    struct tm utc = {0};

    return strptime(text, "%Y-%m-%dT%H:%M:%S", &utc) ? timegm(&utc) : 0;
}

/* "5m": how long before `now` it was; "" if that is not known. */
static void format_age(const char *since, const char *now, char ret_text[32])
{
    static const struct {
        long long seconds;
        char unit;
    } units[] = {{86400, 'd'}, {3600, 'h'}, {60, 'm'}, {1, 's'}};
    long long age = (long long)parse_time(now) - (long long)parse_time(since);

    *ret_text = '\0';
    if (parse_time(since) == 0 || parse_time(now) == 0)
        return;
    age = age > 0 ? age : 0;
    for (size_t i = 0; i < COUNT(units) && !*ret_text; i++)
        if (age >= 2 * units[i].seconds || i + 1 == COUNT(units))
            snprintf(ret_text, 32, "%lld%c", age / units[i].seconds, units[i].unit);
}

static const struct out_column why_columns[] = {
    {"OBJECT", "object", 0, 0},       {"OTHERS", "others", 0, OUT_NONZERO}, {"REASON", "reason", 0, 0},
    {"SINCE", "since", 0, OUT_RIGHT}, {"MESSAGE", "message", 0, OUT_TRUNC},
};

static void print_reasons(const json_t *answer, const json_t *snapshot)
{
    json_t *rows = printable(get_key(answer, "reasons")), *row;
    char age[32];
    size_t i;

    json_array_foreach (rows, i, row) {
        format_age(get_text(row, "since"), get_text(snapshot, "time"), age);
        json_object_set_new(row, "since", json_string(age));
    }
    if (json_array_size(rows) > 0) {
        out_line("%s", "");
        out_table(stdout, why_columns, COUNT(why_columns), rows, OUT_TABLE);
    }
    json_decref(rows);
}

int why_report(const struct cmd *cmd, json_t *answer, const json_t *snapshot, bool is_json)
{
    char verdict[2048];
    size_t s = 0;

    while (strcmp(states[s].state, get_text(answer, "state")) != 0)
        s++;
    format_verdict(answer, verdict);
    if (is_json) {
        json_t *document = start_document(cmd, verdict, snapshot);

        json_object_update(document, answer);
        json_decref(answer);
        return out_json(document) == 0 ? states[s].code : CMD_FAILED;
    }
    print_verdict(states[s].tone, verdict);
    print_reasons(answer, snapshot);
    print_unread(snapshot);
    json_decref(answer);
    return out_finish() == CMD_FINE ? states[s].code : CMD_FAILED;
}
