/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verdict.h - evaluates parsed runs: which failed, which are slower than expected, and the possible causes.
 *
 * The result is one JSON document, cmd/parse/schema.json. `epkit parse --json` prints it; reports contain it.
 */
#ifndef EP_PARSE_VERDICT_H
#define EP_PARSE_VERDICT_H

#include "figures.h"
#include "parse.h"

enum verdict_result { VERDICT_PASSED, VERDICT_FAILED, VERDICT_SLOW, VERDICT_NOTHING };

struct verdict_options {
    const struct model_hardware *hardware; /* NULL: the hardware named in the log, else the lowest of all known */
    int nodes;                             /* 0: from the log or the rates */
    double tolerance;  /* a run is slow if slower by more than this share of the expected figure: 0.15 */
    char failure[400]; /* what the launcher says of all runs: "The run failed, first on node-3"; "" */
};

/* A new document, without the common keys of epkit's documents. */
json_t *verdict_make(const struct parser *parser, const struct reference *reference,
                     const struct verdict_options *options, enum verdict_result *ret_result);

#endif
