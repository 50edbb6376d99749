/* SPDX-License-Identifier: Apache-2.0 */
/* slow.h - finds the slow node after a bad result of a test. */
#ifndef EP_LAUNCH_SLOW_H
#define EP_LAUNCH_SLOW_H

#include "common/cmd.h"

#include "launch.h"

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
