/* SPDX-License-Identifier: Apache-2.0 */
/* verdict.h - what the output of a run says. */
#ifndef EP_TOOL_LAUNCH_VERDICT_H
#define EP_TOOL_LAUNCH_VERDICT_H

#include "cmd.h"
#include "launch/launch.h"

#include "parse/parse.h"

/* Takes the output of the nodes as it comes, for a run that leaves no folder; launch_options.on_line. */
void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes);

/*
 * What verdict_make() says about the logs in `folder` (docs/run-folder.md), or, when that is NULL, about what `parser`
 * was fed. The document of 'epkit parse --json', a new reference; NULL after the reason was reported. *ret_code is the
 * exit code of 'epkit parse'.
 */
json_t *launch_parse(const struct cmd *cmd, const char *folder, struct parser *parser,
                     const struct launch_result *result, int *ret_code);

#endif
