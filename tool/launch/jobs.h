/* SPDX-License-Identifier: Apache-2.0 */
/* jobs.h - the jobs that `epkit launch` knows by name. */
#ifndef EP_TOOL_LAUNCH_JOBS_H
#define EP_TOOL_LAUNCH_JOBS_H

#include "launch/launch.h"

#include <jansson.h>

struct canned_job {
    const char *name;
    const char *args; /* what it takes, for the help */
    const char *text; /* what it does, for the help */
    bool needs_args;
    enum launch_starter starter;
    bool is_mpi;  /* its ranks are one MPI job: it cannot do without mpirun */
    int per_node; /* 0: as many ranks as GPUs */
    bool by_rank;
    bool has_checks;  /* the doctor looks at the nodes first, unless told otherwise */
    bool is_measured; /* its output has a verdict of its own */
    int64_t deadline_s;
    /* The members of the spec that are its own (job.h); NULL after ep_fail(). */
    json_t *(*make)(const struct canned_job *job, int n_args, char **args);
    json_t *(*argv_of)(int phase, int rank, int n_nodes, const char *const *names, bool *ret_is_last);
};

extern const struct canned_job canned_jobs[]; /* ends with name NULL */

/* NULL: it is a program. */
const struct canned_job *canned_job_find(const char *name);

#endif
