/* SPDX-License-Identifier: Apache-2.0 */
/* slow.h - after a bad result of a test: which node is it? */
#ifndef EP_TOOL_LAUNCH_SLOW_H
#define EP_TOOL_LAUNCH_SLOW_H

#include "cmd.h"

#include "launch/launch.h"

/*
 * Is it a result that groups of nodes can explain? Not where the launch itself names the node or what is missing.
 * `parsed_code` is what the verdict on the output means as an exit code.
 */
bool launch_is_slow(const struct launch_result *result, int parsed_code);

/*
 * Measures groups of the nodes with the same job and options (epkit triangulate), and says which node is slow. `parsed`
 * is the verdict on all of them together. The document of the triangulation, a new reference; NULL after the reason was
 * reported. It is also written into the folder of the run.
 */
json_t *launch_find_slow(const struct cmd *cmd, const struct cmd_call *call, const struct launch_options *options,
                         const json_t *parsed, bool is_quiet);

#endif
