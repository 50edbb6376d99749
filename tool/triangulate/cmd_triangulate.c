/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_triangulate.c - epkit triangulate: which node makes a run slow, by runs of groups or from runs that are there. */
#include "cmd.h"
#include "output.h"
#include "progress.h"
#include "tool_triangulate.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* clang-format off */
static const struct opt triangulate_table[] = {
    {"hosts", 0, "A,B,...", OPT_STRING, offsetof(struct triangulate_call, hosts),
     .help = "the nodes, with ranges as gpu[01-04]; or a hostfile, @FILE", .heading = "Measure groups of nodes"},
    {"run", 0, "CMD", OPT_STRING, offsetof(struct triangulate_call, run),
     .help = "shell command that measures a group; {hosts} is its nodes (a,b,c), {n} their number"},
    {"full", 0, "PERCENT", OPT_INT, offsetof(struct triangulate_call, full), .min = 1, .max = 99,
     .help = "what all nodes together reached of what is expected, if that has been measured"},
    {"max-runs", 0, "N", OPT_INT, offsetof(struct triangulate_call, max_runs), .min = 1, .max = 100000, .value = "40",
     .help = "groups that are measured at most"},
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(struct triangulate_call, timeout), .min = 1, .max = 86400, .value = "1800",
     .help = "a group that takes longer is ended, and counts as slow"},
    {"plan", 0, NULL, OPT_FLAG, offsetof(struct triangulate_call, plan_only), .help = "show the plan, and end"},
    {"from", 0, "PATH", OPT_FILE, offsetof(struct triangulate_call, from),
     .help = "runs that are there: a folder of run folders, or a JSON file", .heading = "Use recorded runs"},
    INPUT_OPTIONS(struct triangulate_call, input),
    OPT_JSON_ROW(struct triangulate_call, json),
    {0},
};
/* clang-format on */

static const struct cmd_example triangulate_examples[] = {
    {"epkit triangulate --hosts @f --run 'epkit launch --hosts {hosts} ib-write-bw'",
     "pairs of the nodes in file f side by side, then members of a slow pair"},
    {"epkit triangulate --hosts @nodes.txt --plan", "how many runs it would take"},
    {"epkit triangulate --from runs/ --hardware b200", "from the folders of runs that were made already"},
    {NULL, NULL},
};

static const struct cmd_exit_text triangulate_exits[] = {
    {CMD_FINE, "no node is slow"},
    {CMD_FAILED, "the runs do not tell, or could not be started"},
    {CMD_USAGE, "wrong usage; no such file"},
    {CMD_FINDINGS, "slow nodes were found"},
    {CMD_UNSUPPORTED, "no run could be compared with anything"},
    {0, NULL},
};

static int cmd_triangulate(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct triangulate_call *options = call->options;
    struct reference *reference = NULL;
    struct verdict_options wanted;
    int result;

    if (!options->from == !options->hosts)
        return cmd_usage(cmd, "give either --hosts, with --run or --plan, or --from");
    if (options->hosts && !options->run && !options->plan_only)
        return cmd_usage(cmd, "--hosts needs --run, the command that measures a group, or --plan");
    if (options->from && (options->run || options->plan_only))
        return cmd_usage(cmd, "--from uses runs that are there: without --run and --plan");
    if (options->run && !strstr(options->run, "{hosts}"))
        return cmd_usage(cmd, "--run: there is no {hosts} in it, so every group would be the same");
    result = input_reference(cmd, &options->input, &reference, &wanted);
    if (result != CMD_FINE)
        return result;
    progress_start(cmd->name);
    result = options->from ? triangulate_recorded(cmd, options, reference, &wanted)
                           : triangulate_live(cmd, options, reference, &wanted);
    progress_stop();
    reference_free(reference);
    return result;
}

const struct cmd command_triangulate = {
    .name = "triangulate",
    .args = "",
    .summary = "which node makes a run slow: measure pairs, then halves",
    .description =
        "A group of nodes is as slow as its slowest one. With --hosts and --run, groups are measured until one node is left: "
        "with few nodes all pairs, side by side, and then the members of slow pairs; with many, halves of the suspects. "
        "The plan comes first, and the number of runs is bounded. Afterwards all other nodes run together once, to see "
        "whether there is another slow one.\n"
        "\n"
        "What CMD prints is read as 'epkit parse' reads it; the worst figure in proportion to the expected one counts. A "
        "group that fails, hangs, or prints nothing that is known counts as slow. The programs of CMD have to end when its "
        "process group is ended.\n"
        "\n"
        "With --from, conclusions come from runs that were made already: a folder that holds folders of runs "
        "(docs/run-folder.md), whose run.json name the hosts, or a file {\"runs\": [{\"hosts\": [\"a\", \"b\"], \"ratio\": "
        "0.53}, ...]}. If counters of NICs are there, an idle or slow NIC of the node is named as well.",
    .options = triangulate_table,
    .options_bytes = sizeof(struct triangulate_call),
    .examples = triangulate_examples,
    .exits = triangulate_exits,
    .run = cmd_triangulate,
};
