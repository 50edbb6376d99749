/* SPDX-License-Identifier: Apache-2.0 */
/* log_input.h - shared by `epkit parse`, `report` and `triangulate`: logs, reference data, hardware. */
#ifndef EP_PARSE_LOG_INPUT_H
#define EP_PARSE_LOG_INPUT_H

#include "common/cmd.h"
#include "common/output.h"

#include "cmd/report/folder.h"
#include "verdict.h"

struct input_options {
    const char *hardware, *reference;
    int64_t nodes, tolerance;
};

/* clang-format off */
#define INPUT_OPTIONS(options_type, member)                                                                            \
    {"hardware", 'H', "NAME", OPT_STRING, offsetof(options_type, member.hardware),                                     \
     .help = "machine to compare with (--list-hardware); default: from the log", .heading = "Comparison"},             \
    {"nodes", 'n', "N", OPT_INT, offsetof(options_type, member.nodes), .min = 1, .max = 1000000,                       \
     .help = "number of nodes of the runs; default: from the log or the rates"},                                       \
    {"reference", 'r', "FILE", OPT_FILE, offsetof(options_type, member.reference),                                     \
     .help = "more reference figures, in the format of cmd/parse/reference.json"},                                       \
    {"tolerance", 't', "PERCENT", OPT_INT, offsetof(options_type, member.tolerance), .min = 1, .max = 90,              \
     .value = "15", .help = "slower than expected by more than this is a finding"}
/* clang-format on */

/* Loads the reference data that the options name. CMD_FINE, or the exit code after reporting an error. */
int input_reference(const struct cmd *cmd, const struct input_options *options, struct reference **ret_reference,
                    struct verdict_options *ret_options);

/* Reads a file, "-", or all logs of a folder. CMD_FINE, or CMD_USAGE or CMD_FAILED after reporting the error. */
int input_read(const struct cmd *cmd, struct parser *parser, const char *path);

/* Reads all logs of a folder; sets hardware and nodes from its run.json unless they are set. */
int input_read_folder(const struct cmd *cmd, struct parser *parser, const struct folder *folder,
                      const struct reference *reference, struct verdict_options *options);

/* Sets hardware and nodes from the run's document (run.json) unless they are set. */
void input_know_run(const json_t *run, const struct reference *reference, struct verdict_options *options);

/* The exit code of a verdict: CMD_FINE, CMD_FAILED, CMD_FINDINGS (slow), CMD_UNSUPPORTED (nothing was recognised). */
int input_exit_code(enum verdict_result result);

/* The verdict on the logs of a folder, and with *ret_document its document. An exit code; others than CMD_FINE were
 * reported. */
int input_judge_folder(const struct cmd *cmd, const struct folder *folder, const struct reference *reference,
                       const struct verdict_options *wanted, json_t **ret_document);

/* Prints the figures of the runs of a verdict. 0, or -1 after reporting the error. */
int verdict_measures(FILE *stream, const json_t *runs, enum out_format format);

/* "good", "bad" or "warn". */
const char *verdict_tone(const char *result);

/*
 * What text and page say of runs and faults beside the figures: [{"level": 0 (a run, a fault) or 1 (of the run before),
 * "tone": "good", "bad", "warn", "soft" or "", "kind": "note", "id": of the doctor's check, "text"}]. A new reference.
 */
json_t *verdict_items(const json_t *document);

/* Prints the lines of the text output after the first one. */
int verdict_print(const json_t *document);

#endif
