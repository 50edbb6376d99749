/* SPDX-License-Identifier: Apache-2.0 */
#ifndef EP_PARSE_VERDICT_INTERNAL_H
#define EP_PARSE_VERDICT_INTERNAL_H

#include "verdict.h"

#include <math.h>

#define SENTENCE 1024

/* The figure by which a measure is compared with what is expected. */
enum metric { METRIC_NONE, METRIC_RDMA, METRIC_NVL, METRIC_BUS, METRIC_RATE, METRIC_TIME };

struct expected {
    double value;     /* NAN: nothing to compare with */
    double ratio;     /* measured / expected; for times expected / measured */
    const char *from; /* "reference", "model", "lowest known", "the other links" */
    char source[160];
    const struct model_hardware *hardware;
};

struct context {
    const struct parser *parser;
    const struct reference *reference;
    const struct verdict_options *options;
    int single_ranks; /* runs of nccl-tests with one rank each */
};

/* One run, and its verdict. */
struct run_verdict {
    const struct parse_run *run;
    const struct model_hardware *hardware; /* NULL: not known */
    int nodes;                             /* 0: not known */
    const char *nodes_from;                /* "option", "log", "rates", "none" */
    int64_t ranks;                         /* -1: not known */
    int gpus;                              /* of a node */
    enum verdict_result result;
    double worst_ratio; /* of the measures; INFINITY: none was compared */
    double best_ratio;  /* 0: none was compared */
    const struct parse_measure *worst;
    struct expected worst_expected;
    char sentence[SENTENCE];
    json_t *causes, *notes;
};

enum metric metric_of(const struct parse_run *run, const struct parse_measure *measure);
double metric_value(enum metric metric, const struct parse_measure *measure);
const char *metric_unit(enum metric metric);

/* --- expect.c --- */
void identify_run(const struct context *context, const struct parse_run *run, struct run_verdict *ret_verdict);
void expect(const struct context *context, const struct run_verdict *verdict, const struct parse_measure *measure,
            struct expected *ret_expected);

/* --- classify.c --- */
void classify_run(const struct context *context, struct run_verdict *verdict);

#endif
