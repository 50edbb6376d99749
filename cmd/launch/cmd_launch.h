/* SPDX-License-Identifier: Apache-2.0 */
/* cmd_launch.h - what the files of the command `epkit launch` share; launch.h is what it calls. */
#ifndef EP_LAUNCH_CMD_LAUNCH_H
#define EP_LAUNCH_CMD_LAUNCH_H

#include "cmd/parse/parse.h"
#include "common/cmd.h"
#include "launch.h"

/* --- predefined.c: the named jobs --- */

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
    bool takes_names;  /* as in launch.h */
    bool is_internode; /* what it tests is between nodes, and refuses one alone */
};

extern const struct canned_job canned_jobs[]; /* the table ends with name NULL */

/* NULL: it is a program, not a named job. */
const struct canned_job *canned_job_find(const char *name);

/* --- rank_environment.c: the variables that the ranks get --- */

/* Options of the command; borrowed. */
struct launch_environment {
    const struct opt_strings *env, *source; /* --env, --source */
    const char *preload;                    /* --preload; NULL: LD_PRELOAD of epkit itself */
    bool debug;
};

/*
 * Sets env, source and preload of a job's spec. `is_pods`: the hosts are pods of the job that epkit runs in. CMD_FINE,
 * or an exit code after the reason was reported.
 */
int launch_environment(const struct cmd *cmd, const struct launch_environment *args, bool is_pods, json_t *spec);

/* Adds a secret for the ranks of this job, which find each other over TCP, unless `env` has one. Result as above. */
int launch_add_secret(const struct cmd *cmd, json_t *env);

/* --- show.c: the output --- */

/* Feeds the output of the nodes to the parser as it comes, for a run without a folder; launch_options.on_line. */
void launch_feed(void *parser, const char *prefix, const char *text, size_t bytes);

/*
 * Prints the verdict, the nodes that failed and the results in the output (`parser`, for verdict.h; NULL: not a test),
 * or one JSON document. Returns the exit code: that of the run; after a successful run that of its output.
 */
int show_result(const struct cmd *cmd, const struct launch_options *options, const struct launch_result *result,
                struct parser *parser, bool json);

/*
 * Runs an instance of the command other than the first one (hosts_source.index). A pod waits for the launch and ends
 * with its exit code: for at most wait_s until it begins, and deadline_s (0: no limit) until it is over. A task of srun
 * ends at once: its node stays in the job without it.
 */
int follow_leader(const struct hosts_source *source, const char *leader, int64_t wait_s, int64_t deadline_s);

#endif
