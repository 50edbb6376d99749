/* SPDX-License-Identifier: Apache-2.0 */
/* agent_internal.h - what the files of the agent share. */
#ifndef EP_LAUNCH_AGENT_INTERNAL_H
#define EP_LAUNCH_AGENT_INTERNAL_H

#include "agent.h"
#include "agent_lines.h"
#include "launch_job.h"

#include "common/temporary.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#define AGENT_TEXT_BYTES 512
#define AGENT_RANKS_MAX 1024

/* A rank of this node. */
struct agent_rank {
    int local;
    pid_t pid;   /* PID, if it is a child of the agent; 0: ended, or started by mpirun */
    int control; /* socket to the process that mpirun started; -1: none */
    int fds[2];  /* its standard output and error; -1: closed */
    struct line_buffer lines[2];
};

struct agent {
    char id[JOB_ID_BYTES];
    struct temporary folder; /* holds the files of the launch */
    uint64_t heard_ns, sent_ns;
    json_t *spec, *nics; /* its job; counters at the beginning */
    int node;
    int n_ranks;
    struct agent_rank ranks[AGENT_RANKS_MAX];
    int listener; /* for ranks of mpirun; -1: none */
    char *input;
    size_t input_used;
    bool is_ending;
    bool is_followed; /* a process waits here for the end (follow_wait()) */
    json_t *code;     /* of the launch, for that process; NULL: it goes on */
};

/* --- agent.c --- */

/* Output or an event is lost: the agent says so on standard error, and ends with everything that it has started. */
void agent_no_memory(void);

/* Sends a line of a rank, of at most LINE_OUTPUT_MAX bytes; `kind`: LINE_OUTPUT, LINE_PART. */
void agent_send_line(char kind, int rank, const char *text, size_t bytes);

/* Sends the beginning of a line of a rank: of each line once, and at most twice a second of those that grow. */
void agent_send_part(int rank, const char *text, size_t bytes, bool is_new);

/* Sends {"event": name, ...} and consumes `object`, which holds the other members. */
void agent_event(const char *name, json_t *object);

/* --- agent_ranks.c --- */

/* Starts the ranks of the spec. EP_OK, or the reason with ep_fail(); then no rank runs. */
ep_status agent_start_ranks(struct agent *agent);

/* Accepts the connection of a rank that mpirun has started. */
void agent_accept(struct agent *agent);

/* Forwards the output of a rank; `which`: 0 output, 1 error. */
void agent_read_rank(struct agent_rank *rank, int which, int reads);

/* Reads the report of the process that mpirun started about the end of its rank. */
void agent_read_control(struct agent_rank *rank);

/* Reaps children that have ended. */
void agent_reap(struct agent *agent);

void agent_free_ranks(struct agent *agent);

/* --- agent_node.c --- */

/*
 * Checks that TMPDIR can be written. If there are `files` ({name: text}), makes a folder for the launch there and
 * writes them into it.
 */
ep_status agent_write_files(struct agent *agent, const json_t *files);
void agent_remove_files(struct agent *agent);

/* {"host", "machine", "epkit", "kernel", "driver", "gpu", "gpus"} */
json_t *agent_facts(void);

/*
 * [{"device", "port", "tx_bytes", "rx_bytes"}] of all RDMA ports: the traffic since the first call, which stores the
 * counters in the object `begin`.
 */
json_t *agent_nics(json_t *begin);

#endif
