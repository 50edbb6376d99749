/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_triangulate.c - epkit triangulate: finds the node that makes a run slow, by new or recorded runs of groups. */
#include "common/cmd.h"
#include "common/progress.h"
#include "tool_triangulate.h"

#include <string.h>

/* clang-format off */
static const struct opt triangulate_table[] = {
    {"hosts", 0, "A,B,...", OPT_STRING, offsetof(struct triangulate_call, hosts),
     .help = "the nodes, with ranges as gpu[01-04]; or a hostfile, @FILE", .heading = "Measure groups of nodes"},
    {"run", 0, "CMD", OPT_STRING, offsetof(struct triangulate_call, run),
     .help = "shell command that measures a group; {hosts} is its nodes (a,b,c), {n} their number"},
    {"full", 0, "PERCENT", OPT_INT, offsetof(struct triangulate_call, full), .min = 1, .max = 99,
     .help = "share of the expected figure that all nodes together reached, if measured"},
    {"max-runs", 0, "N", OPT_INT, offsetof(struct triangulate_call, max_runs), .min = 1, .max = 100000, .value = "40",
     .help = "maximum number of groups to measure"},
    {"timeout", 0, "SECONDS", OPT_INT, offsetof(struct triangulate_call, timeout), .min = 1, .max = 86400, .value = "1800",
     .help = "a group that takes longer is terminated, and counts as slow"},
    {"plan", 0, NULL, OPT_FLAG, offsetof(struct triangulate_call, plan_only), .help = "show the plan, and exit"},
    {"from", 0, "PATH", OPT_FILE, offsetof(struct triangulate_call, from),
     .help = "recorded runs: a folder of run folders, or a JSON file", .heading = "Use recorded runs"},
    INPUT_OPTIONS(struct triangulate_call, input),
    OPT_JSON_ROW(struct triangulate_call, json),
    {0},
};
/* clang-format on */

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
        return cmd_usage(cmd, "--from uses recorded runs: it excludes --run and --plan");
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
    .summary = "find the node that makes a run slow: measure pairs, then halves",
    .description =
        "A group of nodes is as slow as its slowest one. With --hosts and --run, groups are measured until one node is "
        "left: with few nodes all pairs concurrently, then the members of slow pairs; with many, halves of the "
        "suspects. The plan is printed first, and the number of runs is bounded. Finally all other nodes run together "
        "once, to check for another slow one.\n"
        "\n"
        "The output of CMD is evaluated as by 'epkit parse'; the lowest share of an expected figure counts. A group "
        "that fails, hangs, or prints nothing that is recognised counts as slow. The programs of CMD have to end when "
        "its process group is terminated.\n"
        "\n"
        "With --from, recorded runs are evaluated: a folder that contains folders of runs "
        "(docs/run-folder.md), whose run.json name the hosts, or a file {\"runs\": [{\"hosts\": [\"a\", \"b\"], "
        "\"ratio\": 0.53}, ...]}. If counters of NICs are there, an idle or slow NIC of the node is named as well.",
    .options = triangulate_table,
    .options_bytes = sizeof(struct triangulate_call),
    .examples =
        {
            {"epkit triangulate --hosts @f --run 'epkit launch --hosts {hosts} ib-write-bw'",
             "pairs of the nodes in file f concurrently, then members of a slow pair"},
            {"epkit triangulate --hosts @nodes.txt --plan", "how many runs it would take"},
            {"epkit triangulate --from runs/ --hardware b200", "from the folders of recorded runs"},
        },
    .exits =
        {
            {CMD_FINE, "no node is slow"},
            {CMD_FAILED, "the runs are inconclusive, or could not be started"},
            {CMD_USAGE, "wrong usage; no such file"},
            {CMD_FINDINGS, "slow nodes were found"},
            {CMD_UNSUPPORTED, "no run could be compared with anything"},
        },
    .run = cmd_triangulate,
};
