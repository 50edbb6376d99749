/* SPDX-License-Identifier: Apache-2.0 */
/* recorded.c - finds slow nodes from recorded runs. */
#include "tool_triangulate.h"

#include "common/json.h"
#include "common/output.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PASSED "passed" /* of a run without a ratio; not printed */

/* Recorded runs: {"hosts": [...], "ratio": number or null, "nics": [{host, device, ...}], "source"}. */
static void add_run(json_t *runs, const json_t *hosts, double ratio, const char *source)
{
    json_t *names = json_array(), *host;
    size_t i;

    json_array_foreach (hosts, i, host) {
        const char *name =
            json_is_object(host) ? json_string_value(json_object_get(host, "name")) : json_string_value(host);

        if (name)
            json_array_append_new(names, out_name(name));
    }
    json_array_append_new(runs,
                          json_pack("{s:o, s:o, s:s?, s:s}", "hosts", names, "ratio",
                                    isnan(ratio) ? json_null() : json_real(ratio), "failed", NULL, "purpose", source));
}

/* NICs of a host of run.json that carried much less than its others. */
static void find_weak_nics(const json_t *host, json_t *weak)
{
    int n_uneven = 0;
    json_t *balance = runfolder_balance("", json_object_get(host, "nics"), &n_uneven), *nic;
    size_t i;

    json_array_foreach (json_object_get(balance, "nics"), i, nic) {
        if (json_is_true(json_object_get(nic, "uneven")))
            json_array_append_new(weak, json_pack("{s:o, s:o, s:O, s:O}", "host", out_name(json_text(host, "name")),
                                                  "device", out_name(json_text(nic, "device")), "share",
                                                  json_object_get(nic, "share"), "idle", json_object_get(nic, "idle")));
    }
    json_decref(balance);
}

static int add_folder(const struct cmd *cmd, const char *path, const struct reference *reference,
                      const struct verdict_options *wanted, json_t *runs, json_t *weak)
{
    struct folder *folder;
    char error[200];
    json_t *document = NULL, *hosts, *host;
    size_t i;
    double ratio;
    int result = CMD_FINE;

    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        out_error("triangulate: %s: %s", path, error);
        return CMD_FAILED;
    }
    hosts = json_object_get(folder->run, "hosts");
    if (!json_is_array(hosts))
        out_warning("triangulate: %s: no run.json with hosts; it is left out", path);
    else
        result = input_judge_folder(cmd, folder, reference, wanted, &document);
    if (document) {
        ratio = triangulate_ratio(document);
        /* A run that ended with an error and has no figures counts as slow, too. */
        if (isnan(ratio) && json_integer_value(json_object_get(folder->run, "exit_code")) != 0)
            ratio = 0;
        add_run(runs, hosts, ratio, path);
        json_array_foreach (hosts, i, host) {
            find_weak_nics(host, weak);
        }
    }
    json_decref(document);
    runfolder_free(folder);
    return result;
}

static int add_folders(const struct cmd *cmd, const char *path, const struct reference *reference,
                       const struct verdict_options *wanted, json_t *runs, json_t *weak)
{
    struct dirent **entries = NULL;
    int n = scandir(path, &entries, NULL, versionsort), result = CMD_FINE;

    for (int i = 0; i < n; i++) {
        char *inner = NULL;
        struct stat info;

        if (result == CMD_FINE && *entries[i]->d_name != '.' &&
            asprintf(&inner, "%s/%s", path, entries[i]->d_name) > 0 && lstat(inner, &info) == 0 &&
            S_ISDIR(info.st_mode))
            result = add_folder(cmd, inner, reference, wanted, runs, weak);
        free(inner);
        free(entries[i]);
    }
    free(entries);
    return result;
}

static bool is_list_of_names(const json_t *hosts)
{
    const json_t *host;
    size_t i;

    json_array_foreach (hosts, i, host) {
        if (!json_is_string(host) || !*json_string_value(host))
            return false;
    }
    return json_array_size(hosts) > 0;
}

/*
 * A run in a file without a ratio has failed, unless its "failed" is null as well: then it had nothing to be compared
 * with. If an earlier call measured it, it passed; in a document made from recorded runs, which has no plan, it may
 * have measured nothing, and is left out again.
 */
static void add_run_in_file(json_t *runs, const json_t *document, const json_t *run, const char *path)
{
    const json_t *ratio = json_object_get(run, "ratio");
    bool is_unknown = json_is_null(ratio) && json_is_null(json_object_get(run, "failed"));

    add_run(runs, json_object_get(run, "hosts"), is_unknown ? NAN : json_number_value(ratio), path);
    if (is_unknown && !json_is_null(json_object_get(document, "plan")))
        json_object_set_new(json_array_get(runs, json_array_size(runs) - 1), PASSED, json_true());
}

static int add_file(const char *path, json_t *runs)
{
    char error[200];
    json_t *document = runfolder_load_json(AT_FDCWD, path, error, sizeof(error)), *run;
    size_t i;

    if (json_integer_value(json_object_get(document, "schema_version")) > OUT_SCHEMA_VERSION) {
        out_error("triangulate: --from %s: it is in version %lld of the format, this epkit reads %d", path,
                  (long long)json_integer_value(json_object_get(document, "schema_version")), OUT_SCHEMA_VERSION);
        out_hint("use the newer epkit that wrote it");
        json_decref(document);
        return CMD_USAGE;
    }
    if (!json_is_array(json_object_get(document, "runs"))) {
        out_error("triangulate: --from %s: %s", path, document ? "there is no list 'runs' in it" : error);
        json_decref(document);
        return CMD_USAGE;
    }
    json_array_foreach (json_object_get(document, "runs"), i, run) {
        const json_t *ratio = json_object_get(run, "ratio");

        if (!is_list_of_names(json_object_get(run, "hosts")) ||
            !(json_is_null(ratio) || (json_is_number(ratio) && json_number_value(ratio) >= 0))) {
            out_error("triangulate: --from %s: runs[%zu] needs 'hosts', a list of names, and 'ratio', a number from 0 "
                      "on, or null",
                      path, i);
            json_decref(document);
            return CMD_USAGE;
        }
        add_run_in_file(runs, document, run, path);
    }
    json_decref(document);
    return CMD_FINE;
}

/* --- from names to numbers --- */

struct groups {
    const char **names;
    int n_names, n;
    int **groups, *sizes;
    bool *slow;
};

static int number_of(struct groups *groups, const char *name)
{
    for (int i = 0; i < groups->n_names; i++)
        if (strcmp(groups->names[i], name) == 0)
            return i;
    groups->names[groups->n_names] = name;
    return groups->n_names++;
}

static bool any_has_ratio(const json_t *runs)
{
    json_t *run;
    size_t i;

    json_array_foreach (runs, i, run) {
        if (json_is_number(json_object_get(run, "ratio")))
            return true;
    }
    return false;
}

/* As in measured rounds, a run that only passed counts as fast beside others: so a node that fails is found. */
static bool groups_make(const json_t *runs, double cut, struct groups *ret_groups)
{
    size_t all = 0, n = json_array_size(runs), i, j;
    struct groups *groups = ret_groups;
    bool has_ratio = any_has_ratio(runs);
    json_t *run, *host;

    json_array_foreach (runs, i, run) {
        all += json_array_size(json_object_get(run, "hosts"));
    }
    *groups = (struct groups){.names = calloc(all + 1, sizeof(char *)),
                              .groups = calloc(n + 1, sizeof(int *)),
                              .sizes = calloc(n + 1, sizeof(int)),
                              .slow = calloc(n + 1, sizeof(bool))};
    if (!groups->names || !groups->groups || !groups->sizes || !groups->slow)
        return false;
    json_array_foreach (runs, i, run) {
        const json_t *hosts = json_object_get(run, "hosts"), *ratio = json_object_get(run, "ratio");

        if ((!json_is_number(ratio) && !(has_ratio && json_object_get(run, PASSED))) || json_array_size(hosts) == 0)
            continue;
        groups->groups[groups->n] = calloc(json_array_size(hosts), sizeof(int));
        if (!groups->groups[groups->n])
            return false;
        json_array_foreach (hosts, j, host) {
            groups->groups[groups->n][j] = number_of(groups, json_string_value(host));
        }
        groups->sizes[groups->n] = (int)json_array_size(hosts);
        groups->slow[groups->n++] = json_is_number(ratio) && json_number_value(ratio) < cut;
    }
    return true;
}

static void groups_done(struct groups *groups)
{
    for (int i = 0; i < groups->n; i++)
        free(groups->groups[i]);
    free(groups->groups);
    free(groups->names);
    free(groups->sizes);
    free(groups->slow);
}

static void describe(const struct groups *groups, const int *suspects, int n, bool is_proof, const json_t *weak,
                     char *ret_text, size_t bytes)
{
    struct text text = text_in(ret_text, bytes);
    int n_slow = 0;
    json_t *nic;
    size_t i;

    for (int k = 0; k < groups->n; k++)
        n_slow += groups->slow[k];
    if (n_slow == 0) {
        text_add(&text, "No run of %d is slow.", groups->n);
    } else if (n == 0) {
        text_add(&text, "No single node: %d of %d runs are slow, but each of their nodes is in a fast run as well.",
                 n_slow, groups->n);
    } else {
        text_add(&text, "%s", is_proof ? "Slow: " : "Among these is a slow node: ");
        for (int k = 0; k < n && text.n < bytes - 200; k++)
            text_add(&text, "%s%.100s", k ? ", " : "", groups->names[suspects[k]]);
        text_add(&text, ", by %d run%s, %d of them slow.", groups->n, groups->n == 1 ? "" : "s", n_slow);
    }
    json_array_foreach (weak, i, nic) {
        const char *host = json_text(nic, "host");

        for (int k = 0; n_slow > 0 && k < n && text.n < bytes - 200; k++)
            if (strcmp(host, groups->names[suspects[k]]) == 0)
                text_add(&text, " %.60s of %.60s carried %.0f%% of the others.", json_text(nic, "device"), host,
                         100 * json_number(nic, "share"));
    }
}

static int conclude(const struct triangulate_call *options, const struct groups *groups, json_t *runs, json_t *weak)
{
    int *suspects = calloc((size_t)groups->n_names + 1, sizeof(int)), n, result;
    json_t *document, *slow = json_array();
    bool is_proof = false, any_slow = false;
    char verdict[2048];
    json_t *run;
    size_t at;

    json_array_foreach (runs, at, run) {
        json_object_del(run, PASSED);
    }
    n = suspects ? triangulate_deduce(groups->n_names, groups->n, groups->groups, groups->sizes, groups->slow, suspects,
                                      &is_proof)
                 : 0;
    for (int i = 0; i < groups->n; i++)
        any_slow |= groups->slow[i];
    for (int i = 0; i < n; i++)
        json_array_append_new(slow, json_string(groups->names[suspects[i]]));
    describe(groups, suspects, n, is_proof, weak, verdict, sizeof(verdict));
    result = any_slow ? CMD_FINDINGS : CMD_FINE;
    if (options->json) {
        document = triangulate_document(verdict,
                                        !any_slow  ? "none"
                                        : n == 0   ? "spread"
                                        : is_proof ? "found"
                                                   : "either",
                                        json_incref(slow), weak, NULL, runs);
        if (out_json(document) != 0)
            result = CMD_FAILED;
    } else {
        out_verdict(any_slow ? OUT_BAD : OUT_GOOD, "%s", verdict);
    }
    json_decref(slow);
    free(suspects);
    return result;
}

int triangulate_recorded(const struct cmd *cmd, const struct triangulate_call *options,
                         const struct reference *reference, const struct verdict_options *wanted)
{
    json_t *runs = json_array(), *weak = json_array();
    struct groups groups = {0};
    struct stat info;
    int result;

    if (stat(options->from, &info) != 0) {
        result = cmd_refuse(cmd, NULL, "--from %s: %s", options->from, strerror(errno));
    } else {
        result = S_ISDIR(info.st_mode) ? add_folders(cmd, options->from, reference, wanted, runs, weak)
                                       : add_file(options->from, runs);
    }
    if (result == CMD_FINE) {
        if (!groups_make(runs, 1 - wanted->tolerance, &groups)) {
            out_error("triangulate: out of memory");
            result = CMD_FAILED;
        } else if (groups.n == 0) {
            out_error("triangulate: %s: no run whose figures could be compared", options->from);
            out_hint("name the machine with --hardware; 'epkit parse' shows what it reads of a run");
            result = CMD_UNSUPPORTED;
        } else {
            result = conclude(options, &groups, runs, weak);
        }
        groups_done(&groups);
    }
    json_decref(runs);
    json_decref(weak);
    return result;
}
