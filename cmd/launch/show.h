/* SPDX-License-Identifier: Apache-2.0 */
/* show.h - the output of `epkit launch`. */
#ifndef EP_LAUNCH_SHOW_H
#define EP_LAUNCH_SHOW_H

#include "common/cmd.h"
#include "launch.h"

#include "cmd/parse/parse.h"

/* Feeds the output of the nodes to the parser as it comes, for a run without a folder; launch_options.on_line. */
void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes);

/*
 * Prints the verdict, the nodes that failed and the results in the output (`parser`, for verdict.h; NULL: not a test),
 * or one JSON document. Returns the exit code: that of the run; after a successful run that of its output.
 */
int show_result(const struct cmd *cmd, const struct launch_options *options, const struct launch_result *result,
                struct parser *parser, bool json);

/* Was the last run interrupted by a signal to epkit? */
bool show_was_interrupted(void);

/*
 * Runs an instance of the command other than the first one (hosts_source.index). A pod waits for the launch and ends
 * with its exit code: for at most wait_s until it begins, and deadline_s (0: no limit) until it is over. A task of srun
 * ends at once: its node stays in the job without it.
 */
int follow_leader(const struct hosts_source *source, const char *leader, int64_t wait_s, int64_t deadline_s);

#endif
