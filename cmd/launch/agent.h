/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent.h - epkit on a node, started by the launcher over ssh.
 *
 * It reads requests from standard input, one JSON object per line, and sends frames (frame.h) to standard output. It
 * runs the ranks of its node, or under mpirun forwards their output. It ends everything that belongs to the launch on
 * request, when its input ends (the launcher died, or the connection did), when it has received nothing for the time of
 * its lease, or on SIGTERM, SIGINT or SIGHUP.
 *
 * Requests, by the member "do":
 *   - "hello": "launch" JOB_MARK's value, "lease_s", "files": {name: text}; answered by the event "hello" or "error".
 *   - "locate": an object for location_find(); event "location".
 *   - "ask": "id", "argv", "timeout_s": runs a command; event "answer" with "status" and "output".
 *   - "nics": event "nics" with the bytes that each port has sent and received.
 *   - "run": a spec (job.h); with "mpi": true mpirun starts the ranks; events "started" and "exit" for each rank.
 *   - "end": "grace_s": ends what is left; event "clean" with "killed" and "left"; then the agent ends. With "launch":
 *     of that launch, whose agent was lost. With "code": the launch is over, for processes that follow it (follow.h).
 *   - "beat": renews the lease.
 */
#ifndef EP_LAUNCH_AGENT_H
#define EP_LAUNCH_AGENT_H

#define AGENT_COMMAND "__node" /* epkit __node: the agent */
#define AGENT_RANK "__exec"    /* epkit __exec: a rank that mpirun starts */

#define AGENT_PROTOCOL 1
#define AGENT_HEARTBEAT_MS 5000 /* heartbeat interval of launcher and agent */
#define AGENT_LEASE_S 30        /* after this long without a heartbeat the peer is considered lost */

/* Runs a command line of epkit itself, as main() gets it; returns the exit code. */
typedef int (*agent_self)(int argc, char **argv);

/* Both return an exit code. `self` runs epkit commands for the launcher, in child processes. */
int agent_main(agent_self self);
int agent_rank_main(void);

#endif
