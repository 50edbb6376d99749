/* SPDX-License-Identifier: Apache-2.0 */
/* show.h - the output of `epkit launch`. */
#ifndef EP_LAUNCH_SHOW_H
#define EP_LAUNCH_SHOW_H

#include "common/cmd.h"
#include "launch.h"

#include "cmd/parse/parse.h"

/* Feeds the output of the nodes to the parser as it comes, for a run without a folder; launch_options.on_line. */
void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes);

struct show_how {
    bool json;
    bool find_slow; /* after a bad result of a test, by runs of groups (slow.c) */
};

/*
 * Prints the verdict, the nodes that failed and the results in the output (`parser`, for verdict.h; NULL: not a test),
 * or one JSON document. Returns the exit code: that of the run; after a successful run that of its output.
 */
int show_result(const struct cmd *cmd, const struct cmd_call *call, const struct launch_options *options,
                const struct launch_result *result, struct parser *parser, const struct show_how *how);

/* Was the last run interrupted by a signal to epkit? */
bool show_was_interrupted(void);

/*
 * Runs an instance of the command other than the first one (hosts_source.index). A pod waits for the launch and ends
 * with its exit code: for at most wait_s until it begins, and deadline_s (0: no limit) until it is over. A task of srun
 * ends at once: its node stays in the job without it.
 */
int follow_leader(const struct hosts_source *source, const char *leader, int64_t wait_s, int64_t deadline_s);

/* --- slow.c: finds the slow node after a bad result of a test --- */

/*
 * Can groups of nodes explain the result? Not where the launch itself names the node or what is missing. `parsed_code`
 * is the verdict on the output as an exit code.
 */
bool launch_is_slow(const struct launch_result *result, int parsed_code);

/*
 * Measures groups of the nodes with the same job and options (epkit triangulate), and finds the slow node. `parsed` is
 * the verdict on all of them together. Returns the document of the triangulation, a new reference; NULL after the
 * reason was reported. It is also written to the folder of the run.
 */
json_t *launch_find_slow(const struct cmd *cmd, const struct cmd_call *call, const struct launch_options *options,
                         const json_t *parsed, bool is_quiet);

#endif
