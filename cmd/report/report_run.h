/* SPDX-License-Identifier: Apache-2.0 */
/* report_run.h - the parts of `epkit report`. */
#ifndef EP_REPORT_REPORT_RUN_H
#define EP_REPORT_REPORT_RUN_H

#include "cmd/parse/log_input.h"

struct report_options {
    const char *output, *history, *previous, *upload;
    int64_t noise;
    bool compare, json;
    struct input_options input;
};

int report_one(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path);
int report_two(const struct cmd *cmd, const struct report_options *options, const struct reference *reference,
               const struct verdict_options *wanted, const char *path_a, const char *path_b);

/*
 * Copies the files of a folder, and the two of its report in `output`, to DEST. CMD_FINE, or the exit code after
 * reporting the error. *ret_n: files that were copied and verified.
 */
int report_upload(const struct folder *folder, const char *output, const char *dest, int *ret_n);

/* [{host, text, is_readable}]: the summary of `epkit topo` for each snapshot of a folder. A new reference. */
json_t *report_snapshots(const struct folder *folder);

#endif
