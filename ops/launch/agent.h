/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent.h - epkit on a node, started by the launcher over ssh.
 *
 * It reads requests from standard input, JSON objects, one a line, and sends frames (frame.h) to standard output. It
 * runs the ranks of its node, or under mpirun takes over their output, and it ends everything that belongs to the
 * launch when it is told to, when its input ends (the launcher died, or the connection did), when it has heard nothing
 * for the time of its lease, or when it gets SIGTERM, SIGINT or SIGHUP.
 *
 * Requests, by the member "do":
 *   "hello"    "launch" JOB_MARK's value, "lease_s", "files": {name: text}; answered by the event "hello", or by
 * "error" "locate"   an object for location_find(); event "location" "ask"      "id", "argv", "timeout_s": runs a
 * command; event "answer" with "status" and "output" "nics"     event "nics" with what each port has sent and received
 *   "run"      a spec (job.h); with "mpi": true ranks come by mpirun; events "started" and "exit" for each rank
 *   "end"      "grace_s": ends what is left; event "clean" with "killed" and "left"; then the agent ends. With
 * "launch": of that launch, whose agent is lost. With "code": the launch is over, for who follows it (follow.h) "beat"
 * renews the lease
 */
#ifndef EP_OPS_LAUNCH_AGENT_H
#define EP_OPS_LAUNCH_AGENT_H

#define AGENT_COMMAND "__node" /* epkit __node: the agent */
#define AGENT_RANK "__exec" /* epkit __exec: a rank that mpirun starts */

#define AGENT_PROTOCOL 1
#define AGENT_BEAT_MS 5000 /* launcher and agent say this often that they are there */
#define AGENT_LEASE_S 30   /* after so long without one, the other is lost */

/* A command line of epkit itself, as main() gets it; returns the exit code. */
typedef int (*agent_self)(int argc, char **argv);

/* Both return an exit code. `self` runs what the launcher asks epkit for, in child processes. */
int agent_main(agent_self self);
int agent_rank_main(void);

#endif
