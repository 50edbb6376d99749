/* SPDX-License-Identifier: Apache-2.0 */
/* predefined.h - the named jobs of `epkit launch`. */
#ifndef EP_LAUNCH_PREDEFINED_H
#define EP_LAUNCH_PREDEFINED_H

#include "launch.h"

#include <jansson.h>

struct canned_job {
    const char *name;
    const char *args; /* its arguments, for the help */
    const char *text; /* its description, for the help */
    bool needs_args;
    enum launch_starter starter;
    bool is_mpi;  /* its ranks are one MPI job: it requires mpirun */
    int per_node; /* 0: as many ranks as GPUs */
    bool by_rank;
    bool has_checks;  /* the doctor checks the nodes first, by default */
    bool is_measured; /* its output has its own verdict */
    int64_t deadline_s;
    /* The members of the spec that this job sets (job.h); NULL after ep_fail(). */
    json_t *(*make)(const struct canned_job *job, int n_args, char **args);
    json_t *(*argv_of)(const json_t *argv, int phase, int rank, int n_nodes, const char *const *names,
                       bool *ret_is_last); /* as in launch.h */
};

extern const struct canned_job canned_jobs[]; /* the table ends with name NULL */

/* NULL: it is a program, not a named job. */
const struct canned_job *canned_job_find(const char *name);

#endif
