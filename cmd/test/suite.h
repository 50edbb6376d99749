/* SPDX-License-Identifier: Apache-2.0 */
/*
 * suite.h - runs a matrix of cases on the ranks (check/cases.h) and collects the results in the launcher. Used by the
 * commands test and run.
 */
#ifndef EP_TEST_SUITE_H
#define EP_TEST_SUITE_H

#include "common/cmd.h"
#include "common/ranks/ranks.h"

/* Largest seed: it must fit a JSON integer. */
#define SUITE_MAX_SEED INT64_MAX

struct suite_request {
    const char *matrix;                    /* one of check_matrices */
    int64_t tokens, hidden, topk, experts; /* tokens and topk 0: those of the routing file, or the default */
    const char *dtype;                     /* "all", "bf16", "fp8" */
    uint64_t seed;
    const char *routing;    /* a name or a file */
    int64_t only;           /* one case, from 1; 0: all */
    bool no_partial_reduce; /* low latency: EP_LL_NO_PARTIAL_REDUCE */
};

struct suite_result {
    int code;                  /* exit code of the job; above 128: interrupted */
    int passed, failed, total; /* cases; the rest did not run, because the ranks failed */
    double seconds;
    json_t *cases;  /* array of {"index", "name", "passed", "ms", "detail"} */
    json_t *errors; /* array of {"what", "text", "hint", "status", "ranks"} */
};

enum {
    SUITE_LINES = 1u << 0 /* a line on standard output for each case */
};

/* Number of cases of the request; 0 if there is no such matrix or case. */
int suite_count(const struct suite_request *request);

/* Validates the request before a rank is started, and reports a usage error. Reads a routing file. */
int suite_check(const struct cmd *cmd, const struct suite_request *request, int nranks);

/* Runs the matrix. Progress counts from `done` of `all` cases. suite_done() frees the result, also after a failure. */
void suite_run(const struct ranks_spec *spec, const struct suite_request *request, unsigned flags, int done, int all,
               struct suite_result *ret_result);
void suite_done(struct suite_result *result);

/* "24/24 cases passed", "22/24 cases passed, 2 failed", "3/24 cases passed, 21 did not run". */
void suite_summary(const struct suite_result *result, char *ret_text, size_t bytes);

/*
 * {"matrix", "result", "passed", "failed", "total", "seconds", "parameters" of the request and of the group, "cases",
 * "errors"}. A new reference.
 */
json_t *suite_json(const struct ranks_spec *spec, const struct suite_request *request,
                   const struct suite_result *result);

#endif
