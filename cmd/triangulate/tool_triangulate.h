/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_TRIANGULATE_TOOL_TRIANGULATE_H
#define EP_TRIANGULATE_TOOL_TRIANGULATE_H

#include "cmd/parse/log_input.h"

#include "triangulate.h"

struct triangulate_call {
    const char *hosts, *run, *from;
    int64_t full, max_runs, timeout;
    bool plan_only, json;
    struct input_options input;
};

/* By runs of groups. */
int triangulate_live(const struct cmd *cmd, const struct triangulate_call *options, const struct reference *reference,
                     const struct verdict_options *wanted);

/* From recorded runs. */
int triangulate_recorded(const struct cmd *cmd, const struct triangulate_call *options,
                         const struct reference *reference, const struct verdict_options *wanted);

/* The document of what was found. Consumes `slow`. A new reference. */
json_t *triangulate_document(const char *verdict, const char *result, json_t *slow, json_t *nics, json_t *plan,
                             json_t *runs);

/* The worst ratio of a verdict's runs: 0 if one failed, NAN if nothing could be compared. */
double triangulate_ratio(const json_t *document);

#endif
