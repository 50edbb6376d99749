/* SPDX-License-Identifier: Apache-2.0 */
/* predefined.h - the named jobs of `epkit launch`. */
#ifndef EP_LAUNCH_PREDEFINED_H
#define EP_LAUNCH_PREDEFINED_H

#include "launch.h"

#include <jansson.h>

struct canned_job {
    const char *name;
    const char *argument;        /* name of an argument that it needs; NULL: none */
    enum launch_starter starter; /* mpirun: its ranks are one MPI job */
    int per_node;                /* 0: as many ranks as GPUs */
    bool by_rank;
    bool is_measured; /* its output has its own verdict */
    int64_t deadline_s;
    /* The members of the spec that this job sets (job.h); NULL after ep_fail(). */
    json_t *(*make)(const struct canned_job *job, int n_args, char **args);
    bool takes_names; /* as in launch.h */
};

extern const struct canned_job canned_jobs[]; /* the table ends with name NULL */

/* NULL: it is a program, not a named job. */
const struct canned_job *canned_job_find(const char *name);

#endif
