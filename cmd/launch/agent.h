/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent.h - epkit on a node, started by the launcher over ssh.
 *
 * It reads requests from standard input, one JSON object per line, and sends lines (agent_lines.h) to standard output.
 * It runs the ranks of its node, or under mpirun forwards their output. It ends everything that belongs to the launch
 * on request, when its input ends (the launcher died, or the connection did), when it has received nothing for the time
 * of its lease, or on SIGTERM, SIGINT or SIGHUP.
 *
 * Requests, by the member "do":
 *   - "hello": "launch" JOB_MARK's value, "files": {name: text}, "followed": whether a process
 *     waits for the end (follow_wait()). Answered by the event "hello" or "error".
 *   - "location": an object for location_find(); event "location".
 *   - "doctor": "timeout_s": runs epkit doctor --json; event "doctor" with its "output".
 *   - "nics": event "nics" with the bytes that each port has sent and received since the first request.
 *   - "run": a spec (job.h); with "mpi": true mpirun starts the ranks; event "run", then "exit" for each rank.
 *   - "end": "grace_s": ends what is left; event "clean" with "killed" and "left"; then the agent ends. With "launch":
 *     of that launch, whose agent was lost. With "code": when the input ends, the agent tells the process that
 *     follows the launch, and ends.
 *   - "heartbeat": renews the lease.
 */
#ifndef EP_LAUNCH_AGENT_H
#define EP_LAUNCH_AGENT_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AGENT_COMMAND "__node" /* epkit __node: the agent */
#define AGENT_RANK "__exec"    /* epkit __exec: a rank that mpirun starts */

#define AGENT_HEARTBEAT_MS 5000 /* heartbeat interval of launcher and agent */
#define AGENT_LEASE_S 30        /* after this long without a heartbeat the peer is considered lost */

/* Both return an exit code. */
int agent_main(void);
int agent_rank_main(void);

/* --- predefined.c --- */

/*
 * epkit __job ACTION ARGUMENT...: executes jobs.sh with these arguments; "ring" with "" for ports measures those that
 * carry data. `argv` begins with JOB_COMMAND. Returns an exit code unless it is executed.
 */
#define JOB_COMMAND "__job"
int job_main(int argc, char **argv);

/* --- agent_node.c: the physical location of a node, as the node itself can find it --- */

#define LOCATION_BYTES 256
#define LOCATION_SECONDS 10 /* for a command or the metadata server */

/*
 * The location of this machine. `how` is an object:
 *   "method"    "auto", "metadata", "slurm", "kubernetes", "command" or "none"
 *   "command"   shell command of the method "command"; prints the location on one line
 *   "metadata"  HOST[:PORT] of the metadata server; absent: that of Google Compute Engine
 * location.sh has the methods; auto uses the first available one.
 *
 * True with the location, a word without spaces. False with the reason in ret_why; "" if there was no source.
 */
bool location_find(const json_t *how, char ret_location[LOCATION_BYTES], char *ret_why, size_t bytes);

/* Is the text a valid location: one word of printable ASCII, without characters of markup? */
bool location_is_valid(const char *text);

/*
 * --- follow.c ---
 *
 * All pods of a job run the same command. The first pod launches; the others wait until the launch is over and end with
 * its exit code, so that the job does as well. The agent that the first pod starts on each pod notifies the process
 * that waits there, which it finds by its name, by a signal with a value.
 */

#define FOLLOW_ALIVE (-1)    /* instead of an exit code: the launch is not over */
#define FOLLOW_PAUSE_MS 2000 /* a pod whose launch has failed ends later than the first one */
#define FOLLOW_TELL_MS 3000  /* it may begin to wait for the end of a launch late: its script may pause so before */

/* Sends the exit code of the launch. False if no process waits (yet). */
bool follow_send(int code);

/*
 * Waits for the launch to begin, for at most begin_s; then until it is over, for at most deadline_s (0: no limit).
 * Returns the launch's exit code; or 1 with the reason in ret_why, which is "" otherwise: the launch did not begin, or
 * sent no message for two minutes.
 */
int follow_wait(int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes);

#endif
