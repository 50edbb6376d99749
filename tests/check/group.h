/* SPDX-License-Identifier: Apache-2.0 */
/*
 * group.h - run check_job() on every rank of a group and hear what rank 0 said. Stands in for the launcher of the
 * command, with fork() or threads of this process. With $EPKIT_TEST_VERBOSE set all events go to standard error as
 * well.
 */
#ifndef EP_TEST_CHECK_GROUP_H
#define EP_TEST_CHECK_GROUP_H

#include "net/emulation.h"

#include "tests/local_ranks.h"

#include <epkit/comm.h>
#include <stdbool.h>

/* What the ranks emitted. */
struct group_report {
    int code;          /* worst exit code of a rank */
    int cases, failed; /* "case" events, and those of them that failed */
    int errors;        /* "error" events */
    char detail[512];  /* of the first failed case, with its name in front */
    char error[512];   /* of the first error event */
};

struct group_spec {
    int mode; /* EP_LAUNCH_* */
    int n_ranks, n_nodes;
    int partial_type;       /* 0: default */
    bool mirrors;           /* buffers have mirrors, as with device memory */
    const char *parameters; /* JSON text */
    ep_net_emulation emulation;
};

/* Runs the group; fails the cmocka test if it could not even be started. */
void group_run(const struct group_spec *spec, struct group_report *ret_report);

/* Runs it and expects every one of `n_cases` cases to pass. */
void group_expect_pass(const struct group_spec *spec, int n_cases);

#endif
