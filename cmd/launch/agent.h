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
 *     waits for the end (follow.h). Answered by the event "hello" or "error".
 *   - "location": an object for location_find(); event "location".
 *   - "doctor": "timeout_s": runs epkit doctor --json; event "doctor" with its "output".
 *   - "nics": event "nics" with the bytes that each port has sent and received since the first request.
 *   - "run": a spec (job.h); with "mpi": true mpirun starts the ranks; event "run", then "exit" for each rank.
 *   - "end": "grace_s": ends what is left; event "clean" with "killed" and "left"; then the agent ends. With "launch":
 *     of that launch, whose agent was lost. With "code": when the input ends, the agent tells the process that
 *     follows the launch (follow.h), and ends.
 *   - "heartbeat": renews the lease.
 */
#ifndef EP_LAUNCH_AGENT_H
#define EP_LAUNCH_AGENT_H

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

#endif
