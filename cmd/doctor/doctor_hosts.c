/* SPDX-License-Identifier: Apache-2.0 */
/* doctor_hosts.c - --hosts: runs epkit doctor on other nodes over ssh, concurrently, and reports how they differ. */
#include "diagnosis.h"

#include "base/error.h"
#include "cmd/launch/hosts.h"
#include "cmd/launch/remote.h"
#include "common/capture.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/output.h"

#include "common/text.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SSH_BYTES 1024
#define REMOTE_BYTES 4096
#define WIDTH 32         /* concurrent connections */
#define LAYER_SECONDS 10 /* for each layer of a connection; the deadline of the node limits the total */
#define SHOWN_NODES 4    /* names in a cell of a table */
#define SHOWN_BYTES 60   /* of a value in a cell, starting near the first difference */

struct answers {
    struct hosts hosts;
    struct node *nodes;
    struct remote *remotes;
};

static void allocate(struct answers *answers)
{
    size_t n = (size_t)answers->hosts.n;

    answers->nodes = memory_new(n, sizeof(*answers->nodes));
    answers->remotes = memory_new(n, sizeof(*answers->remotes));
    for (size_t i = 0; i < n; i++)
        answers->nodes[i].name = answers->hosts.list[i].word;
}

static void free_answers(struct answers *answers)
{
    for (int i = 0; answers->nodes && i < answers->hosts.n; i++) {
        json_decref(answers->nodes[i].document);
        free(answers->nodes[i].text);
    }
    free(answers->nodes);
    free(answers->remotes);
    hosts_done(&answers->hosts);
}

/* --- run --- */

static void store_output(struct remote *remote, const char *data, size_t bytes)
{
    struct node *answer = remote->context;

    remote_set_up(remote);
    if (answer->bytes + bytes > CAPTURE_BYTES_MAX) {
        answer->is_cut = true;
        return;
    }
    answer->text = memory_grow(answer->text, answer->bytes + bytes + 1);
    memcpy(answer->text + answer->bytes, data, bytes);
    answer->bytes += bytes;
    answer->text[answer->bytes] = '\0';
}

static void count_ended(struct remote *remote)
{
    progress_update(remote->pool->n_ended, remote->pool->n, "nodes");
}

static void run_all(struct answers *answers, const struct hosts_options *options)
{
    static const char *const ssh_options[] = {"-o", "BatchMode=yes", "-o", "LogLevel=DEBUG1", NULL};
    char port[8];
    int64_t layer_s = options->timeout_s < LAYER_SECONDS ? options->timeout_s : LAYER_SECONDS;
    const struct remote_how remote_how = {.ssh = options->ssh,
                                          .options = ssh_options,
                                          .port = options->port ? port : NULL,
                                          .layer_timeout_ms = layer_s * 1000,
                                          .command_timeout_ms = options->timeout_s * 1000,
                                          .timeout_ms = options->timeout_s * 1000,
                                          .width = WIDTH,
                                          .has_shell = true,
                                          .on_output = store_output,
                                          .on_end = count_ended};
    struct remote_pool pool;

    snprintf(port, sizeof(port), "%d", options->port);
    for (int i = 0; i < answers->hosts.n; i++)
        answers->remotes[i] = (struct remote){
            .host = &answers->hosts.list[i], .command = options->remote_command, .context = &answers->nodes[i]};
    remote_pool_init(&remote_how, answers->remotes, answers->hosts.n, &pool);
    progress_start("asking nodes");
    while (pool.n_ended < pool.n)
        remote_pool_step(&pool, 1000, NULL, 0);
    progress_stop();
    remote_pool_done(&pool);
}

/* --- parse answers --- */

/* A greeting of the login shell may precede the document. */
static void classify(const struct remote *remote, struct node *node)
{
    const char *start = node->text ? strchr(node->text, '{') : NULL, *verdict;
    size_t bytes = sizeof(node->why);
    json_t *document = NULL;
    json_error_t error;
    long long version;

    if (remote->start_error || remote->late) {
        node->layer = remote->failed_at;
        snprintf(node->why, bytes, "%s", remote->why);
        return;
    }
    if (start && !node->is_cut)
        document = json_loadb(start, node->bytes - (size_t)(start - node->text), JSON_DISABLE_EOF_CHECK, &error);
    verdict = json_text(document, "verdict");
    version = json_integer_value(json_object_get(document, "schema_version"));
    node->layer = "answer";
    if (strcmp(json_text(document, "subcommand"), "doctor") == 0 &&
        json_is_object(json_object_get(document, "facts"))) {
        if (version == OUT_SCHEMA_VERSION) {
            node->document = document;
            return;
        }
        node->layer = "version";
        snprintf(node->why, bytes, "its epkit answers in version %lld of the format, this one reads %d", version,
                 OUT_SCHEMA_VERSION);
    } else if (document) {
        /* The node could not run the diagnosis, and says why. */
        text_clean(*verdict ? verdict : "the answer is not that of epkit doctor", node->why, 160);
    } else if (remote->failed_at) {
        node->layer = strcmp(remote->failed_at, "command") == 0 ? "answer" : remote->failed_at;
        snprintf(node->why, bytes, "%s", remote->why);
    } else if (node->is_cut) {
        snprintf(node->why, bytes, "the answer is larger than %u MiB", CAPTURE_BYTES_MAX >> 20);
    } else if (!start) {
        snprintf(node->why, bytes, "%s", node->bytes ? "the answer is no JSON" : "there was no answer");
    } else {
        text_clean(error.text, error.text, sizeof(error.text));
        snprintf(node->why, bytes, "the answer is no JSON: line %d: %s", error.line, error.text);
    }
    json_decref(document);
}

/* --- report --- */

/* "node1, node2 and 5 more" */
static void name_nodes(const json_t *names, char *ret_text, size_t bytes)
{
    size_t n = json_array_size(names);
    struct text text = text_in(ret_text, bytes);

    for (size_t i = 0; i < n && i < SHOWN_NODES; i++)
        text_add(&text, "%s%s", i ? ", " : "", json_string_value(json_array_get(names, i)));
    if (n > SHOWN_NODES)
        text_add(&text, " and %zu more", n - SHOWN_NODES);
}

/* Cuts two values at the same position, so that the difference is visible. --json contains them in full. */
static void cut_values(const char *const values[2], char ret_cut[2][SHOWN_BYTES + 8])
{
    size_t same = 0, start;

    while (values[0][same] && values[0][same] == values[1][same])
        same++;
    start = same > SHOWN_BYTES / 2 ? same - SHOWN_BYTES / 4 : 0;
    if (strlen(values[0]) <= SHOWN_BYTES && strlen(values[1]) <= SHOWN_BYTES)
        start = 0;
    /* The text before this position is equal in both; move back to the start of a character. */
    while (start > 0 && (values[0][start] & 0xc0) == 0x80)
        start--;
    for (int i = 0; i < 2; i++) {
        char shown[SHOWN_BYTES + 1];

        snprintf(shown, sizeof(shown), "%s", values[i] + start);
        text_cut(shown);
        snprintf(ret_cut[i], SHOWN_BYTES + 8, "%s%s%s", start ? "..." : "", shown,
                 strlen(values[i] + start) > SHOWN_BYTES ? "..." : "");
    }
}

static void print_differences(const json_t *differences)
{
    static const struct out_column columns[] = {{"FACT", "fact", 0, 0},
                                                {"MOST HAVE", "most", 0, OUT_TRUNC},
                                                {"NODES", "nodes", 0, 0},
                                                {"HAVE", "have", 0, OUT_TRUNC}};
    json_t *rows = json_array();

    for (size_t i = 0; i < json_array_size(differences); i++) {
        const json_t *row = json_array_get(differences, i), *others = json_object_get(row, "others");

        for (size_t k = 0; k < json_array_size(others); k++) {
            const json_t *other = json_array_get(others, k);
            const char *const values[2] = {json_text(row, "value"), json_text(other, "value")};
            char names[512], cut[2][SHOWN_BYTES + 8];

            name_nodes(json_object_get(other, "nodes"), names, sizeof(names));
            cut_values(values, cut);
            json_array_append_new(rows, json_pack("{s:O, s:s, s:s, s:s}", "fact", json_object_get(row, "fact"), "most",
                                                  cut[0], "nodes", names, "have", cut[1]));
        }
    }
    out_line("\nDifferences:");
    OUT_PRINT(columns, rows);
}

static void print_silent(const struct answers *answers)
{
    static const struct out_column columns[] = {
        {"NODE", "node", 0, 0}, {"FAILED AT", "layer", 0, 0}, {"WHY", "why", 0, 0}};
    json_t *rows = json_array();

    for (int i = 0; i < answers->hosts.n; i++)
        if (!answers->nodes[i].document)
            json_array_append_new(rows, json_pack("{s:s, s:s, s:s}", "node", answers->nodes[i].name, "layer",
                                                  answers->nodes[i].layer, "why", answers->nodes[i].why));
    out_line("\nNo answer from:");
    out_table(stdout, columns, COUNT(columns), rows, OUT_TABLE);
    remote_print_advice(rows, "layer", true);
    json_decref(rows);
}

static void print_findings(const json_t *findings)
{
    static const struct out_column columns[] = {
        {"SEVERITY", "severity", 0, 0}, {"ID", "id", 0, 0}, {"NODES", "names", 0, 0}, {"WHAT", "text", 0, OUT_TRUNC}};
    json_t *rows = json_array();

    for (size_t i = 0; i < json_array_size(findings); i++) {
        json_t *row = json_copy(json_array_get(findings, i));
        char names[512];

        name_nodes(json_object_get(row, "nodes"), names, sizeof(names));
        json_object_set_new(row, "names", out_text(names));
        json_array_append_new(rows, row);
    }
    out_line("\nFindings:");
    OUT_PRINT(columns, rows);
}

struct outcome {
    int n, n_silent;
    int n_empty;     /* of those that answered: without GPU and NIC */
    int n_not_known; /* of those that answered: with inconclusive checks */
    json_t *differences, *findings;
};

static const char *plural(size_t n)
{
    return n == 1 ? "" : "s";
}

static void make_verdict(const struct outcome *outcome, char *ret_text, size_t bytes)
{
    size_t n_differences = json_array_size(outcome->differences), n_findings = json_array_size(outcome->findings);
    int n_answered = outcome->n - outcome->n_silent;

    if (n_answered == 0)
        snprintf(ret_text, bytes, "None of %d node%s answered.", outcome->n, plural((size_t)outcome->n));
    else if (n_differences == 0 && n_answered == outcome->n_empty && outcome->n_silent == 0)
        snprintf(ret_text, bytes, "Nothing to look at: none of %d node%s has a GPU or an RDMA NIC.", n_answered,
                 plural((size_t)n_answered));
    else if (n_differences == 0 && n_findings == 0 && outcome->n_silent == 0 && outcome->n_not_known > 0)
        snprintf(ret_text, bytes, "Not known whether %d of %d node%s are healthy; nothing was found on the others.",
                 outcome->n_not_known, n_answered, plural((size_t)n_answered));
    else if (n_differences == 0 && n_findings == 0 && outcome->n_silent == 0)
        snprintf(ret_text, bytes, "Healthy: %d node%s, nothing found%s.", n_answered, plural((size_t)n_answered),
                 n_answered > 1 ? ", no differences" : "");
    else
        snprintf(ret_text, bytes, "%zu difference%s between %d node%s, %zu finding%s; %d of %d did not answer.",
                 n_differences, plural(n_differences), n_answered, plural((size_t)n_answered), n_findings,
                 plural(n_findings), outcome->n_silent, outcome->n);
}

static json_t *make_document(const char *command, const struct answers *answers, const struct outcome *outcome,
                             const char *verdict)
{
    json_t *document = out_document(command), *list = json_array();

    FOR_EACH (node, answers->nodes, answers->hosts.n)
        json_array_append_new(list, json_pack("{s:s, s:b, s:s?, s:s?, s:O?}", "host", node->name, "answered",
                                              node->document != NULL, "failed_at", node->document ? NULL : node->layer,
                                              "why", node->document ? NULL : node->why, "document", node->document));
    json_object_set_new(document, "verdict", out_text(verdict));
    json_object_set_new(document, "hosts", list);
    json_object_set(document, "differences", outcome->differences);
    json_object_set(document, "findings", outcome->findings);
    return document;
}

static int report(const struct cmd *cmd, const struct answers *answers, const struct outcome *outcome, bool json)
{
    bool is_clean = json_array_size(outcome->differences) == 0 && json_array_size(outcome->findings) == 0;
    bool is_empty = outcome->n_empty == outcome->n;
    int code = outcome->n_silent      ? CMD_FAILED
               : !is_clean            ? CMD_FINDINGS
               : is_empty             ? CMD_UNSUPPORTED
               : outcome->n_not_known ? CMD_NOT_KNOWN
                                      : CMD_FINE;
    char verdict[256];

    make_verdict(outcome, verdict, sizeof(verdict));
    if (json)
        return out_json(make_document(cmd->name, answers, outcome, verdict)) == 0 ? code : CMD_FAILED;
    out_verdict(code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    if (json_array_size(outcome->differences))
        print_differences(outcome->differences);
    if (outcome->n_silent)
        print_silent(answers);
    if (json_array_size(outcome->findings))
        print_findings(outcome->findings);
    return out_finish() == CMD_FINE ? code : CMD_FAILED;
}

static int read_hosts(const struct cmd *cmd, const struct hosts_options *options, struct answers *answers)
{
    bool is_list;

    if (strlen(options->ssh) >= SSH_BYTES || strspn(options->ssh, " \t") == strlen(options->ssh))
        return cmd_usage(cmd, "--ssh: no program, or longer than %d characters", SSH_BYTES - 1);
    if (strlen(options->remote_command) >= REMOTE_BYTES)
        return cmd_usage(cmd, "--remote-command: longer than %d characters", REMOTE_BYTES - 1);
    /* A list contains characters that are rare in file names; an existing file takes precedence. */
    is_list = strpbrk(options->file, ",[ \n@:") && access(options->file, F_OK) != 0;
    if (is_list && hosts_add_list("--hosts", options->file, &answers->hosts) != EP_OK)
        return cmd_refuse(cmd, NULL, "%s", ep_last_error());
    if (!is_list && !strchr(options->file, '/') && access(options->file, F_OK) != 0)
        return cmd_refuse(cmd, "--hosts", "%s: %s; a single host is written USER@%s or %s:PORT", options->file,
                          strerror(errno), options->file, options->file);
    if (!is_list && hosts_add_file(options->file, HOSTS_OPEN_MPI, &answers->hosts) != EP_OK)
        return cmd_refuse(cmd, "--hosts", "%s", ep_last_error());
    return CMD_FINE;
}

int hosts_run(const struct cmd *cmd, const struct hosts_options *options)
{
    struct answers answers = {.nodes = NULL};
    struct outcome outcome = {.n = 0};
    int code = read_hosts(cmd, options, &answers);

    if (code == CMD_FINE) {
        allocate(&answers);
        run_all(&answers, options);
        outcome.n = answers.hosts.n;
        for (int i = 0; i < outcome.n; i++) {
            const json_t *document;

            classify(&answers.remotes[i], &answers.nodes[i]);
            document = answers.nodes[i].document;
            outcome.n_silent += document == NULL;
            outcome.n_empty += document && !json_is_array(json_object_get(document, "checks"));
            outcome.n_not_known += strcmp(json_text(document, "state"), "not-known") == 0;
        }
        outcome.differences = compare_nodes(answers.nodes, outcome.n);
        outcome.findings = compare_findings(answers.nodes, outcome.n);
        code = report(cmd, &answers, &outcome, options->json);
        json_decref(outcome.differences);
        json_decref(outcome.findings);
    }
    free_answers(&answers);
    return code;
}
