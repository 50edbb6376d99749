/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_report.c - epkit report: the folder of a run as a page and a document; comparison, history. */
#include "common/cmd.h"
#include "report.h"

/* clang-format off */
static const struct opt report_table[] = {
    {"output", 'o', "DIR", OPT_DIR, offsetof(struct report_options, output),
     .help = "folder for report.html and report.json; default: the run's folder"},
    {"history", 0, "FILE", OPT_FILE, offsetof(struct report_options, history),
     .help = "add the run to this file as one line, and show the runs before it"},
    {"compare", 0, NULL, OPT_FLAG, offsetof(struct report_options, compare),
     .help = "compare two runs, A and B: folders, or their report.json", .heading = "Compare"},
    {"noise", 0, "PERCENT", OPT_INT, offsetof(struct report_options, noise), .min = 1, .max = 90, .value = "5",
     .help = "ignore smaller changes of figures that are too rare in the history"},
    INPUT_OPTIONS(struct report_options, input),
    OPT_JSON_ROW(struct report_options, json),
    {0},
};
/* clang-format on */

static int check_usage(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct report_options *options = call->options;

    if (options->compare && call->n_args != 2)
        return cmd_usage(cmd, "--compare takes two runs, A and B");
    if (!options->compare && call->n_args != 1)
        return cmd_usage(cmd, "name the folder of one run; --compare takes two");
    return CMD_FINE;
}

static int cmd_report(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct report_options *options = call->options;
    struct reference *reference = NULL;
    struct verdict_options wanted;
    int result;

    CMD_TRY(check_usage(cmd, call));
    CMD_TRY(input_reference(cmd, &options->input, &reference, &wanted));
    progress_start(cmd->name);
    if (options->compare)
        result = report_two(cmd, options, reference, &wanted, call->args[0], call->args[1]);
    else
        result = report_one(cmd, options, reference, &wanted, call->args[0]);
    progress_stop();
    reference_free(reference);
    return result;
}

const struct cmd command_report = {
    .name = "report",
    .args = "DIR | --compare A B",
    .max_args = 2,
    .summary = "the folder of a run as one page and one document; comparison, history",
    .description =
        "Collects the contents of the folder of a run (docs/run-folder.md): the verdict of 'epkit parse' on its logs, "
        "environment, versions, NIC balance, findings of the doctor. Writes report.html, a self-contained page with "
        "plots, and report.json with the same data. Each file appears whole or not at all.\n\n"
        "With --history, the run becomes a line of a file (date, job, hardware, versions, commit, figures), and the "
        "page shows those before it and the differences to the last other run. With --compare, two runs are compared; "
        "a figure is worse when it changed by more than noise: three standard deviations of its history if that holds "
        "four runs, else --noise.",
    .options = report_table,
    .options_bytes = sizeof(struct report_options),
    .examples =
        {
            {"epkit report runs/0203", "report.html and report.json of a run, in its folder"},
            {"epkit report runs/7 --history runs/all.jsonl", "also compare with the runs before"},
            {"epkit report --compare runs/0127 runs/0203", "what became slower"},
        },
    .exits =
        {
            {CMD_FINE, "the report was written, and the run passed; or nothing is worse"},
            {CMD_FAILED, "the run failed, or the report could not be written"},
            {CMD_USAGE, "wrong usage; no such folder"},
            {CMD_FINDINGS, "the run passed, but is slow; or B is worse than A beyond noise"},
            {CMD_UNSUPPORTED, "nothing was recognised in the logs"},
        },
    .run = cmd_report,
};
