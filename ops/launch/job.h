/* SPDX-License-Identifier: Apache-2.0 */
/*
 * job.h - what one node has to run, as it travels from the launcher to the agents and, under mpirun, to the ranks.
 */
#ifndef EP_OPS_LAUNCH_JOB_H
#define EP_OPS_LAUNCH_JOB_H

#include <epkit/status.h>

#include <jansson.h>
#include <stdbool.h>
#include <sys/types.h>

/*
 * In the environment of every process of a launch: what is killed at the end is found by it. Its value is the launch's
 * number in hexadecimal.
 */
#define JOB_MARK "EPKIT_LAUNCH"
#define JOB_SPEC "EPKIT_LAUNCH_SPEC" /* from the launcher through mpirun to its ranks */
#define JOB_ID_BYTES 17

/*
 * The members of the JSON object `spec`:
 *   "launch"    string, the value of JOB_MARK
 *   "node"      integer, place of the node in the sorted list; absent under mpirun
 *   "nodes", "per_node", "gpus"  integers
 *   "names"     strings: what the nodes call themselves; absent where nobody checks it
 *   "mpi"       true: mpirun starts the ranks
 *   "world"     "nodes" or "ranks": what RANK and WORLD_SIZE count
 *   "master"    string, "port" integer: MASTER_ADDR, MASTER_PORT
 *   "argv"      strings; the program is looked for in PATH unless "dirs" say otherwise
 *   "is_epkit"  true: the program is epkit's own file, whatever argv[0] says
 *   "dirs"      strings: folders, the first that holds the file "needs" becomes the working directory
 *   "needs"     string: file that must be there, relative to one of "dirs"
 *   "product"   string: what is not installed where "needs" is not found
 *   "env"       object of strings, or null to unset
 *   "source"    strings: shell scripts that are sourced; a name that begins with '?' may be missing
 *   "preload"   string: LD_PRELOAD of the program alone
 */

/* Is "needs" there? EP_E_UNSUPPORTED if it is not. */
ep_status job_check(const json_t *spec);

/* How one rank runs; made from the spec on its node. */
struct job_rank {
    int local;                  /* on its node */
    char **argv, **environment; /* the environment is owned, with its strings; argv's strings are the spec's */
    const char *file;           /* to execute */
    const char *dir;            /* working directory; NULL: stays */
};

/*
 * Makes what rank `local` of node `node` executes. Runs the scripts of "source". EP_E_UNSUPPORTED when "needs" is
 * not there, EP_E_SYSTEM when a script fails.
 */
ep_status job_rank_make(const json_t *spec, int node, int local, struct job_rank *ret_rank);
void job_rank_done(struct job_rank *rank);

/*
 * In a child process: becomes the program. Writes to standard error and ends with 127 or 126 if that is not possible.
 */
void __attribute__((noreturn)) job_rank_execute(const struct job_rank *rank);

/*
 * Is "NAME=VALUE" what mpirun or a scheduler told one rank of theirs? It is untrue of what is launched from there, or
 * on its node by other means; settings of the user (OMPI_MCA_btl, PMIX_MCA_...) are none of these.
 */
bool job_is_of_rank(const char *entry);

/* A string, or `other` if it is absent; an integer likewise. */
const char *job_text(const json_t *spec, const char *key, const char *other);
int job_number(const json_t *spec, const char *key, int other);

/* --- mark.c --- */

/*
 * Kills the processes of this user whose environment has JOB_MARK=id, and all that this process has started: by
 * SIGTERM, and after `grace_ms`, or when is_hurried() (may be NULL) says so, by SIGKILL, until there are none, for at
 * most two seconds more. Returns how many there were at first; *ret_left is how many are left.
 */
int mark_kill(const char *id, int grace_ms, bool (*is_hurried)(void), int *ret_left);

#endif
