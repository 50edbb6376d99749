/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_TRIANGULATE_TOOL_TRIANGULATE_H
#define EP_TRIANGULATE_TOOL_TRIANGULATE_H

#include "cmd/launch/hosts.h"
#include "cmd/parse/log_input.h"

#include "triangulate.h"

struct triangulate_call {
    const char *hosts, *run;
    int64_t timeout;
    bool plan_only, json;
    struct input_options input;
    const struct cmd *cmd;
    const struct reference *reference;
    struct verdict_options wanted;
    struct hosts fleet;
    struct triangulate groups; /* whose nodes are numbers in the fleet */
    json_t *runs, *plan;       /* as in the document (schema.json): groups that were measured, and how */
};

/* Measures groups. CMD_FINE, or an exit code after reporting the error. */
int triangulate_measure(struct triangulate_call *call);

/*
 * Adds the run of a group, by `failure`, or if that is NULL by its exit status and the verdict of `epkit parse`: the
 * lowest share of an expected figure, or why it failed; neither: it passed, and there is nothing to compare it with.
 * Consumes `hosts`. Borrowed.
 */
const json_t *triangulate_run(struct triangulate_call *call, json_t *hosts, const json_t *verdict, int status,
                              const char *failure, const char *purpose);

/* A run that failed is slow; one that passed with nothing to compare it with is not. */
bool triangulate_is_slow(const struct triangulate_call *call, const json_t *run);

#endif
