/* SPDX-License-Identifier: Apache-2.0 */
/* launch_verdict.h - the verdict on the output of a run. */
#ifndef EP_LAUNCH_LAUNCH_VERDICT_H
#define EP_LAUNCH_LAUNCH_VERDICT_H

#include "common/cmd.h"
#include "launch.h"

#include "cmd/parse/parse.h"

/* Feeds the output of the nodes to the parser as it comes, for a run without a folder; launch_options.on_line. */
void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes);

/*
 * The verdict of verdict_make() on the logs in `folder` (docs/run-folder.md), or, when that is NULL, on what `parser`
 * was fed. The document of 'epkit parse --json', a new reference; NULL after the reason was reported. *ret_code is the
 * exit code of 'epkit parse'.
 */
json_t *launch_parse(const struct cmd *cmd, const char *folder, struct parser *parser,
                     const struct launch_result *result, int *ret_code);

#endif
