/* SPDX-License-Identifier: Apache-2.0 */
/* pair_tests.c - measures groups of nodes with the user's command. */
#include "tool_triangulate.h"

#include "base/error.h"
#include "cmd/launch/hosts.h"
#include "common/capture.h"
#include "common/output.h"
#include "common/progress.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIDE_BY_SIDE 64 /* groups of one round that run concurrently */

struct live {
    const struct triangulate_call *options;
    const struct reference *reference;
    const struct verdict_options *wanted;
    const struct hosts *fleet;
    json_t *runs;
    bool has_failed; /* a group has failed */
    bool has_ratio;  /* a figure of a group was compared */
    bool is_blind;   /* figures of a group had nothing to be compared with */
};

/* --- nodes --- */

/* A list as for epkit launch, or a hostfile. Valid host names are safe in a shell command. */
static int read_fleet(const char *text, struct hosts *fleet)
{
    ep_status status =
        *text == '@' ? hosts_add_file(text + 1, HOSTS_OPEN_MPI, fleet) : hosts_add_list("--hosts", text, fleet);

    if (status != EP_OK)
        out_error("triangulate: %s", ep_last_error());
    else if (fleet->n < 2)
        out_error("triangulate: --hosts: %d node%s: it takes two to compare", fleet->n, fleet->n == 1 ? "" : "s");
    return status == EP_OK && fleet->n >= 2 ? CMD_FINE : CMD_USAGE;
}

/* --- one round --- */

static json_t *hosts_of(const struct hosts *fleet, const int *nodes, int n)
{
    json_t *hosts = json_array();

    for (int i = 0; i < n; i++)
        json_array_append_new(hosts, json_string(fleet->list[nodes[i]].word));
    return hosts;
}

/* `pattern` with the nodes for {hosts} and their number for {n}. */
static char *fill_in(const char *pattern, const struct hosts *fleet, const int *nodes, int n)
{
    char *text = NULL;
    size_t bytes;
    FILE *stream = open_memstream(&text, &bytes);

    for (const char *at = pattern; stream && *at;) {
        if (strncmp(at, "{hosts}", 7) == 0) {
            for (int i = 0; i < n; i++)
                fprintf(stream, "%s%s", i ? "," : "", fleet->list[nodes[i]].word);
            at += 7;
        } else if (strncmp(at, "{n}", 3) == 0) {
            fprintf(stream, "%d", n);
            at += 3;
        } else {
            fputc(*at++, stream);
        }
    }
    if (!stream || fclose(stream) != 0)
        return NULL;
    return text;
}

static char *names_of(const struct hosts *fleet, const int *nodes, int n)
{
    return fill_in("{hosts}", fleet, nodes, n);
}

double triangulate_ratio(const json_t *document)
{
    double worst = NAN;
    json_t *run, *measure;
    size_t i, j;

    json_array_foreach (json_object_get(document, "runs"), i, run) {
        if (strcmp(json_string_value(json_object_get(run, "result")), "failed") == 0)
            return 0;
        json_array_foreach (json_object_get(run, "measures"), j, measure) {
            const json_t *ratio = json_object_get(measure, "ratio");

            if (json_is_number(ratio) && (isnan(worst) || json_number_value(ratio) < worst))
                worst = json_number_value(ratio);
        }
    }
    return worst;
}

static bool has_measures(const json_t *document)
{
    json_t *run;
    size_t i;

    json_array_foreach (json_object_get(document, "runs"), i, run) {
        if (json_array_size(json_object_get(run, "measures")) > 0)
            return true;
    }
    return false;
}

/*
 * The lowest share of an expected figure in the output of a group's command; NAN with the reason. A test that passed
 * counts as fast if it has no figures, or if they have nothing to be compared with: so a node that fails is found.
 * *ret_is_compared is false in the latter case.
 */
static double ratio_of_output(struct live *live, const struct capture *capture, int n_nodes, char **ret_why,
                              bool *ret_is_compared)
{
    struct verdict_options options = *live->wanted;
    struct parser *parser = parser_new();
    enum verdict_result verdict;
    double ratio = NAN;
    json_t *document;

    *ret_why = NULL;
    *ret_is_compared = true;
    if (capture->start_error || !parser) {
        *ret_why = strdup(strerror(capture->start_error ? capture->start_error : ENOMEM));
    } else if (capture->late) {
        *ret_why = strdup("it was terminated at its deadline");
    } else {
        parser_begin(parser, "output");
        parser_feed(parser, capture->output.text, capture->output.bytes);
        parser_feed(parser, "\n", 1);
        parser_feed(parser, capture->error.text, capture->error.bytes);
        parser_end(parser);
        if (options.nodes == 0)
            options.nodes = n_nodes;
        document = verdict_make(parser, live->reference, &options, &verdict);
        ratio = triangulate_ratio(document);
        if (verdict == VERDICT_FAILED || isnan(ratio) || capture->status != 0) {
            if (isnan(ratio) || ratio == 0 || verdict == VERDICT_FAILED)
                *ret_why = strdup(json_string_value(json_object_get(document, "verdict")));
            if (verdict == VERDICT_FAILED)
                ratio = NAN;
        }
        live->has_ratio |= !isnan(ratio);
        if (verdict == VERDICT_PASSED && capture->status == 0 && isnan(ratio)) {
            free(*ret_why);
            *ret_why = NULL;
            ratio = 1;
            *ret_is_compared = !has_measures(document);
            live->is_blind |= !*ret_is_compared;
        }
        json_decref(document);
    }
    parser_free(parser);
    live->has_failed |= isnan(ratio);
    return ratio;
}

/* `hosts` is consumed. */
static void store_run(struct live *live, json_t *hosts, const char *names, double ratio, bool is_compared,
                      const char *why, const char *purpose)
{
    json_array_append_new(live->runs, json_pack("{s:o, s:o, s:s?, s:s}", "hosts", hosts, "ratio",
                                                !isnan(ratio) && is_compared ? json_real(ratio) : json_null(), "failed",
                                                why, "purpose", purpose));
    if (live->options->json)
        return;
    if (isnan(ratio))
        out_line("%s: failed: %s", names, why ? why : "no figure");
    else if (!is_compared)
        out_line("%s: passed; there is nothing to compare its figures with", names);
    else
        out_line("%s: %.0f%% of what is expected", names, 100 * ratio);
}

/* The command that measures a group. */
struct group_command {
    char *names, *text;
    const char *argv[4];
};

static bool make_command(const struct live *live, const int *nodes, int n, struct group_command *ret_command)
{
    char *names = names_of(live->fleet, nodes, n), *text = fill_in(live->options->run, live->fleet, nodes, n);

    *ret_command = (struct group_command){names, text, {"/bin/sh", "-c", text, NULL}};
    return names && text;
}

static bool measure_round(struct live *live, struct triangulate *t, const struct triangulate_round *round)
{
    struct capture *captures = calloc((size_t)round->n_groups, sizeof(*captures));
    struct group_command *commands = calloc((size_t)round->n_groups, sizeof(*commands));
    bool good = captures && commands;

    for (int i = 0; good && i < round->n_groups; i++) {
        good = make_command(live, round->groups[i], round->sizes[i], &commands[i]);
        captures[i].argv = (char *const *)commands[i].argv;
    }
    progress_update((uint64_t)triangulate_runs(t), (uint64_t)live->options->max_runs, "%s", round->why);
    good = good && capture_run(captures, round->n_groups, SIDE_BY_SIDE, live->options->timeout * 1000, NULL, NULL) == 0;
    for (int i = 0; i < round->n_groups; i++) {
        if (good) {
            char *why;
            bool is_compared;
            double ratio = ratio_of_output(live, &captures[i], round->sizes[i], &why, &is_compared);

            triangulate_result(t, i, ratio);
            store_run(live, hosts_of(live->fleet, round->groups[i], round->sizes[i]), commands[i].names, ratio,
                      is_compared, why, round->why);
            free(why);
            capture_done(&captures[i]);
        }
        if (commands) {
            free(commands[i].names);
            free(commands[i].text);
        }
    }
    free(captures);
    free(commands);
    if (!good)
        out_error("triangulate: out of memory");
    return good;
}

/* --- plan and end --- */

static json_t *plan_of(const struct live *live, const struct triangulate_options *options)
{
    int n = live->fleet->n;
    enum triangulate_strategy strategy = triangulate_choose(n, options);
    bool is_pairs = strategy == TRIANGULATE_PAIRS;

    return json_pack("{s:i, s:s, s:i, s:i, s:i, s:i, s:s?}", "nodes", n, "strategy", is_pairs ? "pairs" : "halves",
                     "worst_case_runs", triangulate_worst_case(n, strategy), "least_runs", triangulate_least(n),
                     "max_runs", options->max_runs, "timeout_s", (int)live->options->timeout, "command",
                     live->options->run);
}

static void print_plan(const json_t *plan)
{
    int n = (int)json_integer_value(json_object_get(plan, "nodes"));
    bool is_pairs = strcmp(json_string_value(json_object_get(plan, "strategy")), "pairs") == 0;
    const char *command = json_string_value(json_object_get(plan, "command"));

    if (is_pairs)
        out_line("Plan: %d nodes: %d pair%s concurrently, then members of a slow pair with a node of a fast one.", n,
                 n / 2, n / 2 == 1 ? "" : "s");
    else
        out_line("Plan: %d nodes: halves of the suspects one after the other, then all others together.", n);
    out_line(
        "One slow node takes at most %d runs (no method takes less than %d); the limit is %d runs of %d s at most.",
        (int)json_integer_value(json_object_get(plan, "worst_case_runs")),
        (int)json_integer_value(json_object_get(plan, "least_runs")),
        (int)json_integer_value(json_object_get(plan, "max_runs")),
        (int)json_integer_value(json_object_get(plan, "timeout_s")));
    if (command)
        out_line("Each run: %s", command);
    fflush(stdout);
}

/* Why no group has a figure: then the command or all nodes fail, and no node can be named. NULL: some have one. */
static const char *why_none(const json_t *runs)
{
    const char *why = NULL;
    json_t *run;
    size_t i;

    json_array_foreach (runs, i, run) {
        if (json_is_number(json_object_get(run, "ratio")) || json_is_null(json_object_get(run, "failed")))
            return NULL;
        if (!why)
            why = json_string_value(json_object_get(run, "failed"));
    }
    return why ? why : "no figure";
}

json_t *triangulate_document(const char *verdict, const char *result, json_t *slow, json_t *nics, json_t *plan,
                             json_t *runs)
{
    json_t *document = out_document("triangulate");

    json_object_update_new(document, json_pack("{s:s, s:s, s:o, s:o, s:O?, s:O}", "verdict", verdict, "result", result,
                                               "slow", slow, "nics", nics ? json_incref(nics) : json_array(), "plan",
                                               plan, "runs", runs));
    return document;
}

static int conclude(struct live *live, struct triangulate *t, json_t *plan)
{
    static const char *const words[] = {
        [TRIANGULATE_OPEN] = "open",     [TRIANGULATE_FOUND] = "found", [TRIANGULATE_EITHER] = "either",
        [TRIANGULATE_SPREAD] = "spread", [TRIANGULATE_NONE] = "none",   [TRIANGULATE_BUDGET] = "budget"};
    const int *slow;
    int n, result = CMD_FINDINGS;
    enum triangulate_end end = triangulate_end(t, &slow, &n);
    char *names = names_of(live->fleet, slow, n), verdict[1024];
    const char *why = why_none(live->runs);
    bool is_unknown = end == TRIANGULATE_NONE && live->is_blind && !live->has_ratio && !live->has_failed;
    json_t *document, *list = hosts_of(live->fleet, slow, why ? 0 : n);

    if (why)
        end = TRIANGULATE_SPREAD;
    if (why)
        snprintf(verdict, sizeof(verdict), "No single node can be named: no group gave a figure: %.800s", why);
    else if (end == TRIANGULATE_FOUND)
        snprintf(verdict, sizeof(verdict), "Slow: %.800s. Found in %d runs.", names, triangulate_runs(t));
    else if (end == TRIANGULATE_EITHER)
        snprintf(verdict, sizeof(verdict), "One of %.800s is slow: a third node is needed to find out which.", names);
    else if (end == TRIANGULATE_SPREAD)
        snprintf(verdict, sizeof(verdict), "No single node: the group %.700s is slow, its parts are not.", names);
    else if (end == TRIANGULATE_BUDGET)
        snprintf(verdict, sizeof(verdict), "Not finished in %d runs: among %.800s.", triangulate_runs(t), names);
    else if (is_unknown)
        snprintf(verdict, sizeof(verdict),
                 "Not known: no run could be compared with anything. --hardware names the machine, and 'epkit parse "
                 "--list-hardware' those that are known; --reference FILE adds figures.");
    else
        snprintf(verdict, sizeof(verdict), "No node is slow.");
    end = is_unknown ? TRIANGULATE_OPEN : end;
    result = is_unknown                  ? CMD_UNSUPPORTED
             : end == TRIANGULATE_NONE   ? CMD_FINE
             : end == TRIANGULATE_BUDGET ? CMD_FAILED
                                         : CMD_FINDINGS;
    progress_stop();
    if (live->options->json) {
        document = triangulate_document(verdict, words[end], list, NULL, plan, live->runs);
        if (out_json(document) != 0)
            result = CMD_FAILED;
    } else {
        json_decref(list);
    }
    if (!live->options->json)
        out_verdict(result == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    free(names);
    return result;
}

static int run_all(struct live *live, const struct triangulate_options *options)
{
    struct triangulate *t = triangulate_new(live->fleet->n, options);
    struct triangulate_round round;
    json_t *plan = plan_of(live, options);
    int result = t ? CMD_FINE : CMD_FAILED;

    if (!live->options->json) {
        print_plan(plan);
    } else if (live->options->plan_only) {
        json_t *document = out_document("triangulate");

        json_object_set(document, "plan", plan);
        result = out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
    }
    if (t && !live->options->plan_only) {
        while (result == CMD_FINE && triangulate_next(t, &round))
            result = measure_round(live, t, &round) ? CMD_FINE : CMD_FAILED;
        if (result == CMD_FINE)
            result = conclude(live, t, plan);
    }
    json_decref(plan);
    triangulate_free(t);
    return result;
}

int triangulate_live(const struct cmd *cmd, const struct triangulate_call *options, const struct reference *reference,
                     const struct verdict_options *wanted)
{
    struct hosts fleet = {0};
    struct live live = {.options = options, .reference = reference, .wanted = wanted, .fleet = &fleet};
    struct triangulate_options how = {
        .max_runs = (int)options->max_runs,
        .margin = 0.03,
        .cut = options->full ? 0 : 1 - wanted->tolerance,
        .full = (double)options->full / 100,
    };
    int result = read_fleet(options->hosts, &fleet);

    (void)cmd;
    live.runs = json_array();
    if (result == CMD_FINE)
        result = run_all(&live, &how);
    json_decref(live.runs);
    hosts_done(&fleet);
    return result;
}
