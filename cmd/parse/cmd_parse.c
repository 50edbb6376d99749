/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_parse.c - epkit parse: evaluates the output of test programs. */
#include "log_input.h"

#include <limits.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct parse_options {
    struct input_options input;
    bool list_hardware, json;
};

/* clang-format off */
static const struct opt parse_table[] = {
    INPUT_OPTIONS(struct parse_options, input),
    {"list-hardware", 0, NULL, OPT_FLAG, offsetof(struct parse_options, list_hardware),
     .help = "list the machines with reference figures, and exit", .heading = "Output"},
    OPT_JSON_ROW(struct parse_options, json),
    {0},
};
/* clang-format on */

static int list_hardware(const struct reference *reference, bool json)
{
    static const struct out_column columns[] = {
        {"NAME", "name", 0, 0},       {"MACHINE", "title", 0, 0}, {"GPUS", "gpus", 0, 0},
        {"NICS", "nics", 0, 0},       {"NIC GB/s", "nic", 1, 0},  {"NVLINK GB/s", "nvlink", 1, 0},
        {"FIGURES", "figures", 0, 0},
    };
    json_t *rows = json_array(), *document;

    for (size_t i = 0; i < reference->n_hardware; i++) {
        const struct model_hardware *hardware = &reference->hardware[i].public;
        int figures = COUNT_OF(j, reference->n_figures, strcmp(reference->figures[j].hardware, hardware->name) == 0);

        json_array_append_new(rows, json_pack("{s:s, s:s, s:i, s:i, s:f, s:f, s:i}", "name", hardware->name, "title",
                                              hardware->title, "gpus", hardware->gpus_per_node, "nics",
                                              hardware->nics_per_node, "nic", hardware->nic_gbps, "nvlink",
                                              hardware->nvlink_gbps, "figures", figures));
    }
    if (json) {
        document = out_document("parse");
        json_object_set_new(document, "hardware", rows);
        return out_json(document) == 0 ? CMD_FINE : CMD_FAILED;
    }
    return OUT_PRINT(columns, rows) == 0 ? CMD_FINE : CMD_FAILED;
}

static int read_argument(const struct cmd *cmd, struct parser *parser, const char *path,
                         const struct reference *reference, struct verdict_options *options)
{
    struct folder *folder;
    struct stat info;
    char error[200];
    int result;

    if (strcmp(path, "-") == 0 || stat(path, &info) != 0 || !S_ISDIR(info.st_mode))
        return input_read(cmd, parser, path);
    if (!runfolder_open(path, &folder, error, sizeof(error))) {
        return cmd_refuse(cmd, path, "%s", error);
    }
    if (*folder->run_error)
        out_warning("parse: %s/run.json: %s; it is left out", folder->base, folder->run_error);
    result = input_read_folder(cmd, parser, folder, reference, options);
    runfolder_free(folder);
    return result;
}

static int show(json_t *document, enum verdict_result result, bool json)
{
    static const enum out_tone tones[] = {[VERDICT_PASSED] = OUT_GOOD,
                                          [VERDICT_FAILED] = OUT_BAD,
                                          [VERDICT_SLOW] = OUT_WARN,
                                          [VERDICT_NOTHING] = OUT_PLAIN};
    const int code = input_exit_code(result);
    json_t *whole;

    if (json) {
        whole = out_document("parse");
        json_object_update(whole, document);
        return out_json(whole) == 0 ? code : CMD_FAILED;
    }
    out_verdict(tones[result], "%s", json_string_value(json_object_get(document, "verdict")));
    return verdict_print(document) == 0 ? code : CMD_FAILED;
}

static int parse_all(const struct cmd *cmd, const struct cmd_call *call, const struct reference *reference,
                     struct verdict_options *wanted)
{
    const struct parse_options *options = call->options;
    struct parser *parser = parser_new();
    enum verdict_result verdict = VERDICT_NOTHING;
    json_t *document = NULL;
    int result = CMD_FINE;

    progress_start(cmd->name);
    for (int i = 0; i < call->n_args && result == CMD_FINE; i++)
        result = read_argument(cmd, parser, call->args[i], reference, wanted);
    if (call->n_args == 0)
        result = input_read(cmd, parser, "-");
    progress_stop();
    if (result == CMD_FINE) {
        parser_end(parser);
        document = verdict_make(parser, reference, wanted, &verdict);
        result = show(document, verdict, options->json);
    }
    json_decref(document);
    parser_free(parser);
    return result;
}

static int cmd_parse(const struct cmd *cmd, const struct cmd_call *call)
{
    const struct parse_options *options = call->options;
    struct reference *reference = NULL;
    struct verdict_options wanted;
    int result;

    if (call->n_args == 0 && !options->list_hardware && isatty(STDIN_FILENO))
        return cmd_usage(cmd, "name a log file or the folder of a run; '-' is standard input");
    CMD_TRY(input_reference(cmd, &options->input, &reference, &wanted));
    result =
        options->list_hardware ? list_hardware(reference, options->json) : parse_all(cmd, call, reference, &wanted);
    reference_free(reference);
    return result;
}

const struct cmd command_parse = {
    .name = "parse",
    .args = "[FILE|DIR...]",
    .max_args = INT_MAX,
    .summary = "evaluate the output of test programs: passed, rates, and whether they are as expected",
    .description =
        "Reads the output of the tests of DeepEP (intranode, internode, low latency, V2), of nccl-tests, of perftest "
        "(ib_write_bw and others), of NCCL EP, hybrid-ep, MoRI and OSU, and of epkit itself. Prints for each run: the "
        "cases that passed, the best configuration, logical and wire rates, the share of the link's speed, whether "
        "that is what the machine should reach with that many nodes, and the probable cause if it is not.\n\n"
        "A file may hold several runs, and lines of several nodes may be interleaved. Prefixes of kubectl logs, "
        "mpirun, srun, torchrun and 'epkit launch', times, colours and progress bars are removed. Torn lines are "
        "counted. In a folder, all *.log and *.txt are read. Without a name, or with '-', standard input is read.\n\n"
        "Logical rates count as DeepEP does: each row once for each rank (NVLink) or node (RDMA) that receives it, the "
        "sender included. Wire rates count only what leaves the GPU or the node. Expected figures come from published "
        "measurements of the same machine, else from a model (docs/model.md). If neither the log nor --hardware names "
        "the machine, only a rate below that of every known machine is a finding.",
    .options = parse_table,
    .options_bytes = sizeof(struct parse_options),
    .examples =
        {
            {"epkit parse internode.log", "whether the test passed, its rates, and whether they are as expected"},
            {"kubectl logs --prefix -l app=deepep | epkit parse --hardware b200 -",
             "the same for a stream, with the machine named"},
            {"epkit parse testbed-logs/", "all logs in the folder of a run"},
            {"epkit parse --json run.log | jq .runs[0].cases", "for scripts"},
        },
    .exits =
        {
            {CMD_FINE, "all runs passed and none is slower than expected"},
            {CMD_FAILED, "a test failed or was cut off, or a file could not be read completely"},
            {CMD_USAGE, "wrong usage; no such file"},
            {CMD_FINDINGS, "all tests passed, but something is slower than expected"},
            {CMD_UNSUPPORTED, "nothing was recognised"},
        },
    .run = cmd_parse,
};
