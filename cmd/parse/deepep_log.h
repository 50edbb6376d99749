/* SPDX-License-Identifier: Apache-2.0 */
/* deepep_log.h - counters of a DeepEP run until it ends. */
#ifndef EP_PARSE_DEEPEP_LOG_H
#define EP_PARSE_DEEPEP_LOG_H

#include "parse_internal.h"

/* DeepEP 1: throughput mode. */
struct v1_scratch {
    int started[2][8]; /* fp8; bits: top-k, async, previous */
    int all_started, passed, configs;
    bool has_cases, has_tuning;
    int best;                      /* "Best" lines seen */
    unsigned seen_best, last_best; /* their operations, as bits */
    struct parse_point sweep[PARSE_MAX_POINTS];
    size_t n_sweep, dropped;
};

#define V2_OPS 5

/* DeepEP 2. */
struct v2_scratch {
    uint64_t last_case;
    bool has_case;
    const char *case_type;                   /* of the open case; NULL: none */
    unsigned alignments, formats, biases;    /* bit i: the i-th value was seen */
    int64_t figures[V2_OPS], before[V2_OPS]; /* lines of each operation, and those before the open case */
    int64_t measured;                        /* cases before the open one with figures */
};

struct deepep_scratch {
    struct v1_scratch v1;
    struct v2_scratch v2;
};

struct deepep_scratch *deepep_scratch_of(struct parser *parser);

#endif
