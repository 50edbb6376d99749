/* SPDX-License-Identifier: Apache-2.0 */
/*
 * verdict.h - what parsed runs mean: which failed, which are slower than they should be, and why that may be.
 *
 * The result is one JSON document, tool/schema/parse.json, which `epkit parse --json` prints and reports are made of.
 */
#ifndef EP_OPS_VERDICT_H
#define EP_OPS_VERDICT_H

#include "model/reference.h"
#include "parse/parse.h"

enum verdict_result { VERDICT_PASSED, VERDICT_FAILED, VERDICT_SLOW, VERDICT_NOTHING };

struct verdict_options {
    const struct model_hardware *hardware; /* NULL: what the log names; else the lowest of all known machines counts */
    int nodes;                             /* 0: what the log says, or the rates tell */
    double tolerance;                      /* slower by more than this share of the expected figure is slow: 0.15 */
    char failure[200]; /* what the launcher says of the runs as a whole: "the launch ended with status 7"; "" */
};

/* A new document, without the keys that every document of epkit begins with. NULL: out of memory. */
json_t *verdict_make(const struct parser *parser, const struct reference *reference,
                     const struct verdict_options *options, enum verdict_result *ret_result);

#endif
