/* SPDX-License-Identifier: Apache-2.0 */
/* verdict.h - what the output of a run says. */
#ifndef EP_TOOL_LAUNCH_VERDICT_H
#define EP_TOOL_LAUNCH_VERDICT_H

#include <jansson.h>

/*
 * The document of 'epkit parse --json' on the folder of a run (docs/run-folder.md), a new reference; NULL where this
 * epkit has no such command, or nothing could be parsed. *ret_code is its exit code.
 */
json_t *launch_parse(const char *folder, int *ret_code);

#endif
