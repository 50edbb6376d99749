/* SPDX-License-Identifier: Apache-2.0 */
/* launch_job.h - the job of one node, as the launcher sends it to the agents and, under mpirun, to the ranks. */
#ifndef EP_LAUNCH_LAUNCH_JOB_H
#define EP_LAUNCH_LAUNCH_JOB_H

#include "common/json.h"

#include <epkit/status.h>
#include <stdbool.h>
#include <sys/types.h>

/*
 * Set in the environment of every process of a launch, so that all of them can be found and killed at the end. The
 * value is the launch's number in hexadecimal.
 */
#define JOB_MARK "EPKIT_LAUNCH"
#define JOB_SPEC "EPKIT_LAUNCH_SPEC" /* from the launcher through mpirun to its ranks */
#define JOB_ID_BYTES 17

/*
 * The members of the JSON object `spec`:
 *   "launch"    string, the value of JOB_MARK
 *   "node"      integer, index of the node in the sorted list; absent under mpirun
 *   "nodes", "per_node", "gpus"  integers
 *   "mpi"       true: mpirun starts the ranks
 *   "world"     "nodes" or "ranks": what RANK and WORLD_SIZE count
 *   "master"    string, "port" integer: MASTER_ADDR, MASTER_PORT
 *   "argv"      strings
 *   "is_epkit"  true: the program is the epkit executable, whatever argv[0] is
 *   "is_job"    true: so it is, and starts another program, to which it passes "preload" on (jobs.sh)
 *   "inherited" object of strings: the environment before "source", of pods that of their container
 *   "env"       object of strings, which take precedence over those that "source" leaves
 *   "source"    strings: shell scripts that are sourced; a name that begins with '?' may be missing;
 *               JOB_ENV: what `epkit env` advises in the environment that those before it leave
 *   "preload"   string: LD_PRELOAD of the program alone
 */

#define JOB_ENV "epkit env"
#define SOURCE_SECONDS 60 /* for all scripts */

/* One rank, on its node. */
struct job_rank {
    const json_t *spec; /* borrowed */
    int node, local;    /* its node, and its number there */
    char *sourced;      /* the environment that "source" leaves, strings of `sourced_bytes` in all; for free() */
    size_t sourced_bytes;
};

/* Runs the scripts of "source". EP_E_SYSTEM when one fails. */
ep_status job_rank_make(const json_t *spec, int node, int local, struct job_rank *ret_rank);

/*
 * For `epkit doctor` before the job: "source" alone, "env" and "preload". job_doctor_execute() is called in a child
 * process with the struct job_rank, and executes it in that environment.
 */
ep_status job_environment_make(const json_t *spec, struct job_rank *ret_rank);
void job_doctor_execute(const void *rank);

/*
 * Called in a child process with a struct job_rank: executes the program. On failure writes to standard error and exits
 * with 127 or 126.
 */
void job_rank_execute(const void *rank);

/*
 * Removes the variables that mpirun or a scheduler set for one of its ranks: they are wrong for what is launched from
 * there, or on its node by other means.
 */
void job_leave_rank(void);

/* A string, or `other` if it is absent; an integer likewise. */
const char *job_text(const json_t *spec, const char *key, const char *other);
int job_number(const json_t *spec, const char *key, int other);

/* --- mark.c --- */

/*
 * Kills the processes of this user whose environment has JOB_MARK=id, and all descendants of this process: by SIGTERM,
 * and after `grace_ms`, or when is_urgent(context) (may be NULL) returns true, by SIGKILL, until there are none, for at
 * most two seconds more. Returns how many there were at first; *ret_left is how many are left.
 */
int mark_kill(const char *id, int grace_ms, bool (*is_urgent)(void *context), void *context, int *ret_left);

#endif
