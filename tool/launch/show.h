/* SPDX-License-Identifier: Apache-2.0 */
/* show.h - what `epkit launch` prints. */
#ifndef EP_TOOL_LAUNCH_SHOW_H
#define EP_TOOL_LAUNCH_SHOW_H

#include "cmd.h"
#include "launch/launch.h"

#include "parse/parse.h"

/* Lines on standard error while a job runs. */
void show_note(const char *text);
void show_progress(long done, long total, const char *text);

struct show_how {
    bool json;
    bool find_slow; /* after a bad result of a test, by runs of groups (slow.h) */
};

/*
 * The verdict, nodes that failed, what the output says (`parser`, for verdict.h; NULL: it is no test), or one JSON
 * document. The exit code: that of the run; of a run that went well that of its output.
 */
int show_result(const struct cmd *cmd, const struct cmd_call *call, const struct launch_options *options,
                const struct launch_result *result, struct parser *parser, const struct show_how *how);

/* Did the last result end by a signal to epkit? */
bool show_was_interrupted(void);

/*
 * What an instance of the command other than the first one does (hosts_source.index). A pod waits for the launch and
 * ends with its exit code: for at most wait_s until it begins, and deadline_s (0: no limit) until it is over. A task of
 * srun ends at once: its node stays in the job without it.
 */
int follow_leader(const struct hosts_source *source, const char *leader, int64_t wait_s, int64_t deadline_s);

#endif
