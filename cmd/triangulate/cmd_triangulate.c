/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_triangulate.c - epkit triangulate: finds the node that makes a run slow, by runs of groups. */
#include "common/cmd.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/output.h"
#include "tool_triangulate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
static const struct opt triangulate_table[] = {
    {"hosts", 0, "A,B,...", OPT_STRING, offsetof(struct triangulate_call, hosts),
     .help = "the nodes, with ranges as gpu[01-04]; or a hostfile, @FILE"},
    {"run", 0, "CMD", OPT_STRING, offsetof(struct triangulate_call, run),
     .help = "shell command that measures a group; {hosts} is its nodes (a,b,c), {n} their number"},
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(struct triangulate_call, timeout), .min = 1, .max = 86400, .value = "1800",
     .help = "a group that takes longer is terminated, and counts as slow"},
    {"plan", 0, NULL, OPT_FLAG, offsetof(struct triangulate_call, plan_only), .help = "show the plan, and exit"},
    INPUT_OPTIONS(struct triangulate_call, input),
    OPT_JSON_ROW(struct triangulate_call, json),
    {0},
};
/* clang-format on */

/* The lowest share of an expected figure; NAN: none. */
static double lowest_ratio(const json_t *verdict)
{
    double worst = NAN;

    FOR_JSON (run, json_object_get(verdict, "runs")) {
        FOR_JSON (measure, json_object_get(run, "measures"))
            if (json_is_number(json_object_get(measure, "ratio")))
                worst = fmin(worst, json_number(measure, "ratio"));
    }
    return worst;
}

const json_t *triangulate_run(struct triangulate_call *call, json_t *hosts, const json_t *verdict, int status,
                              const char *failure, const char *purpose)
{
    bool has_failed = text_is_any(json_text(verdict, "result"), TEXTS("failed", "nothing"));
    double ratio = lowest_ratio(verdict);

    if (!failure && (has_failed || (status != 0 && isnan(ratio))))
        failure = json_text(verdict, "verdict");
    json_array_append_new(call->runs,
                          json_pack("{s:o, s:o, s:o, s:o}", "hosts", hosts, "ratio",
                                    failure || isnan(ratio) ? json_null() : json_real(ratio), "failed",
                                    failure ? out_text(failure) : json_null(), "purpose", out_text(purpose)));
    return json_array_get(call->runs, json_array_size(call->runs) - 1);
}

bool triangulate_is_slow(const struct triangulate_call *call, const json_t *run)
{
    const json_t *ratio = json_object_get(run, "ratio");

    return json_is_number(ratio) ? json_number_value(ratio) < 1 - call->wanted.tolerance
                                 : !json_is_null(json_object_get(run, "failed"));
}

/* --- what the runs tell --- */

/* Why no run gave anything to compare; NULL: one did. *ret_passed: some passed. */
static const char *why_none(const json_t *runs, bool *ret_passed)
{
    const char *why = "";
    bool has_ratio = false;

    *ret_passed = false;
    FOR_JSON (run, runs) {
        bool has_failed = *json_text(run, "failed");

        has_ratio |= json_is_number(json_object_get(run, "ratio"));
        *ret_passed |= !has_failed;
        if (has_failed && !*why)
            why = json_text(run, "failed");
    }
    return has_ratio || (*why && *ret_passed) ? NULL : why;
}

static void describe(const struct triangulate *t, enum triangulate_end end, const json_t *slow, struct text *text)
{
    int n_slow = COUNT_OF(i, t->n_groups, t->groups[i].is_slow);
    json_t *name;

    if (end == TRIANGULATE_NONE)
        text_add(text, "No run of %zu is slow.", t->n_groups);
    else if (end == TRIANGULATE_SPREAD)
        text_add(text, "No single node: %d of %zu runs are slow, but each of their nodes is in a fast run as well.",
                 n_slow, t->n_groups);
    else
        text_add(text, "%s", end == TRIANGULATE_FOUND ? "Slow: " : "Among these is a slow node: ");
    for (size_t i = 0; (name = json_array_get(slow, i)); i++)
        text_add(text, "%s%.100s", i ? ", " : "", json_string_value(name));
    if (json_array_size(slow) > 0)
        text_add(text, ", by %zu run%s, %d of them slow.", t->n_groups, t->n_groups == 1 ? "" : "s", n_slow);
}

/* Prints the verdict, or the document. Without a verdict: the plan alone, whose text was printed. */
static int show(const struct triangulate_call *call, const char *verdict, const char *result, json_t *slow, int code)
{
    json_t *document = out_document("triangulate");

    progress_stop();
    json_object_set(document, "plan", call->plan);
    if (verdict)
        json_object_update_new(document, json_pack("{s:o, s:s, s:O, s:O}", "verdict", out_text(verdict), "result",
                                                   result, "slow", slow, "runs", call->runs));
    if (call->json)
        return out_json(document) == 0 ? code : CMD_FAILED;
    json_decref(document);
    if (verdict)
        out_verdict(code == CMD_FINE ? OUT_GOOD : OUT_BAD, "%s", verdict);
    return code;
}

static int conclude(const struct triangulate_call *call)
{
    static const char *const words[] = {[TRIANGULATE_NONE] = "none",
                                        [TRIANGULATE_FOUND] = "found",
                                        [TRIANGULATE_EITHER] = "either",
                                        [TRIANGULATE_SPREAD] = "spread"};
    const struct triangulate *t = &call->groups;
    const char *why, *word = "open";
    bool has_passed, *is_suspect = memory_new((size_t)t->n_nodes, sizeof(bool));
    json_t *slow = json_array();
    enum triangulate_end end;
    char verdict[2048];
    struct text text = text_in(verdict, sizeof(verdict));
    int result = CMD_FINDINGS;

    why = why_none(call->runs, &has_passed);
    if (why && !*why) {
        text_add(&text,
                 "Not known: no run %scould be compared with anything. --hardware names the machine, and 'epkit "
                 "parse --list-hardware' those that are known; --reference FILE adds figures.",
                 has_passed ? "failed, and none " : "");
        result = CMD_UNSUPPORTED;
    } else if (why) {
        text_add(&text, "No single node can be named: no group gave a figure: %.800s", why);
        word = words[TRIANGULATE_SPREAD];
    } else {
        end = triangulate_judge(t, is_suspect);
        for (int i = 0; i < t->n_nodes; i++)
            if (is_suspect[i])
                json_array_append_new(slow, json_string(call->fleet.list[i].word));
        describe(t, end, slow, &text);
        word = words[end];
        result = end == TRIANGULATE_NONE ? CMD_FINE : CMD_FINDINGS;
    }
    result = show(call, verdict, word, slow, result);
    json_decref(slow);
    free(is_suspect);
    return result;
}

static int check_usage(const struct cmd *cmd, const struct triangulate_call *call)
{
    if (!call->hosts || (!call->run && !call->plan_only))
        return cmd_usage(cmd, "give --hosts, and --run, the command that measures a group, or --plan");
    if (call->run && !strstr(call->run, "{hosts}"))
        return cmd_usage(cmd, "--run: there is no {hosts} in it, so every group would be the same");
    return CMD_FINE;
}

static int cmd_triangulate(const struct cmd *cmd, const struct cmd_call *with)
{
    struct triangulate_call call = *(const struct triangulate_call *)with->options;
    struct reference *reference = NULL;
    int result;

    CMD_TRY(check_usage(cmd, &call));
    CMD_TRY(input_reference(cmd, &call.input, &reference, &call.wanted));
    call.cmd = cmd;
    call.reference = reference;
    call.runs = json_array();
    progress_start(cmd->name);
    result = triangulate_measure(&call);
    if (result == CMD_FINE)
        result = call.plan_only ? show(&call, NULL, NULL, NULL, CMD_FINE) : conclude(&call);
    progress_stop();
    json_decref(call.runs);
    json_decref(call.plan);
    triangulate_done(&call.groups);
    hosts_done(&call.fleet);
    reference_free(reference);
    return result;
}

const struct cmd command_triangulate = {
    .name = "triangulate",
    .args = "",
    .summary = "find the node that makes a run slow: measure pairs of nodes",
    .description =
        "A group of nodes is as slow as its slowest one. All pairs of nodes are measured concurrently, then the nodes "
        "of slow pairs, each with a node of a fast one; if no pair is slow, all nodes together. The plan is printed "
        "first.\n\n"
        "The output of CMD is evaluated as by 'epkit parse'; the lowest share of an expected figure counts. A group "
        "that fails, hangs, or prints nothing that is recognised counts as slow. The programs of CMD have to end when "
        "its process group is terminated.",
    .options = triangulate_table,
    .options_bytes = sizeof(struct triangulate_call),
    .examples =
        {
            {"epkit triangulate --hosts @f --run 'epkit launch --hosts {hosts} ib-write-bw'",
             "pairs of the nodes in file f concurrently, then members of a slow pair"},
            {"epkit triangulate --hosts @nodes.txt --plan", "how many runs it would take"},
        },
    .exits =
        {
            {CMD_FINE, "no node is slow"},
            {CMD_FAILED, "a run could not be started"},
            {CMD_USAGE, "wrong usage; no such file"},
            {CMD_FINDINGS, "slow nodes were found"},
            {CMD_UNSUPPORTED, "no run could be compared with anything"},
        },
    .run = cmd_triangulate,
};
