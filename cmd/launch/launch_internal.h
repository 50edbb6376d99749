/* SPDX-License-Identifier: Apache-2.0 */
/* launch_internal.h - what the files of the launcher share. */
#ifndef EP_LAUNCH_LAUNCH_INTERNAL_H
#define EP_LAUNCH_LAUNCH_INTERNAL_H

#include "agent.h"
#include "agent_lines.h"
#include "launch.h"
#include "launch_job.h"
#include "remote.h"

#include "common/temporary.h"
#include "common/text.h"

#include <stdio.h>

#define QUEUE_PAUSE_BYTES (1u << 20) /* of output that has not been read: above it the nodes have to wait */

enum node_state {
    NODE_CONNECTING,
    NODE_READY,  /* the agent has answered */
    NODE_FAILED, /* it did not answer, or was lost */
    NODE_ENDED   /* ended normally */
};

struct launch;

struct node {
    struct launch *launch;
    const struct host *host;
    const char *address; /* of the host, without user and port */
    const char *name;    /* for messages and files: the address, with the port where several hosts share an address */
    char numbered[300];
    struct remote *remote;
    struct line_buffer stream; /* of its agent */
    enum node_state state;
    int rank; /* position in the sorted list */
    uint64_t retry_ns;

    /* From the agent: */
    json_t *facts;
    char location[LOCATION_BYTES], location_why[300];
    bool is_clean;
    int n_left;     /* processes that could not be killed */
    char asked[16]; /* the request whose reply is missing; "": none */
    json_t *reply;  /* to the last request; NULL: none */
    json_t *nics;   /* their traffic during the run */

    bool has_answered;
    char stray[120]; /* the last line on its standard output before the agent's: from a login script or nologin */

    const char *failed_at; /* the layer; NULL: no failure */
    char why[400];

    int n_ended;      /* ranks */
    int code, signal; /* of the first rank that failed */
    uint64_t heard_ns, output_ns;
    int n_silent;  /* how often its silence was reported */
    bool is_swept; /* its agent was lost: another agent only ends what is left */

    FILE *log;
    bool has_log_failed;
    char last_line[120];
    int last_rank; /* the rank that wrote it */
    char part[LINE_PART_MAX];
    size_t part_bytes; /* of a line whose end has not arrived */
    int part_rank;
};

struct launch {
    const struct launch_options *options;
    char id[JOB_ID_BYTES];
    int n, per_node, gpus;
    struct node *nodes;
    struct node **order; /* by rank */
    struct remote_how how;
    struct remote_pool pool;
    struct remote *remotes;
    char *agent_command, *rank_command; /* what ssh and mpirun run on a node */
    int signals;                        /* signalfd */
    uint64_t began_ns, deadline_ns, beat_ns;
    char began[TEXT_TIME_BYTES], ended[TEXT_TIME_BYTES];

    int interrupted;
    const char *reason; /* why it ended early; NULL: it did not */
    struct node *failed;
    int code;
    bool is_ending, is_urgent;

    struct process mpirun;
    struct temporary mpirun_folder; /* with its hostfile */
    int mpirun_status;
    bool mpirun_ended;
    struct line_buffer mpirun_lines[2];
    char mpirun_message[300];

    char folder[4096]; /* with the logs; files in it are opened by folder_fd */
    int folder_fd;
    FILE *log; /* coordinator.log */
    bool has_log_failed, has_output_failed;
    bool is_log_lost; /* one of the nodes', or its own */
    char *queue;      /* for options->output_fd */
    size_t queued, queue_capacity;

    json_t *findings; /* of the doctor: [{"id", "severity", "text", "nodes"}] */
};

typedef bool (*launch_condition)(struct launch *launch);

/* --- launch.c --- */

/* Handles events until `is_done`, a signal, or the time `until_ns` (0: none). Returns whether `is_done`. */
bool launch_wait(struct launch *launch, launch_condition is_done, uint64_t until_ns);

/* A line on standard error and in coordinator.log. */
void launch_note(struct launch *launch, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Sends a request to a node, and consumes it. */
void node_send(struct node *node, json_t *request);

/* Sends a request whose reply is the event of the same name. Consumes it. */
void node_ask(struct node *node, json_t *request);

/* Has each node replied, or has the launch failed? */
bool launch_has_replies(struct launch *launch);

/* Asks all nodes, and waits for their replies for at most `seconds`. Consumes the request. */
void launch_ask(struct launch *launch, json_t *request, int seconds);

/* --- launch_events.c --- */

void node_on_output(struct remote *remote, const char *data, size_t bytes);
void node_on_end(struct remote *remote);

/* Records a failure before or during the run, which ends the launch. `code` is its exit code. */
void launch_fail(struct launch *launch, struct node *node, int code, const char *reason);

/* --- launch_output.c --- */

/* A line that a rank has written. */
void node_write(struct node *node, int rank, const char *text, size_t bytes);

/* A rank of the node has written no whole line yet: it is kept in case that the node is lost before its end. */
void node_keep_part(struct node *node, int rank, const char *text, size_t bytes);
void launch_log(struct launch *launch, const char *text);

/* Writes as much as the reader accepts now. */
void launch_flush(struct launch *launch);

/* --- launch_connect.c --- */

/* Connects to all nodes; false when some did not answer or it was interrupted. */
bool launch_connect(struct launch *launch);

/* Starts the agent of a node again, after its connection has ended. */
void node_reconnect(struct node *node);

/* Determines locations, order and per_node, and writes hostfiles. EP_OK, or the reason. */
ep_status launch_arrange(struct launch *launch);

/* Runs the doctor on all nodes; false when a finding prevents the start of the job. */
bool launch_check(struct launch *launch);

/* --- launch_work.c --- */

/*
 * The address of the first node for the others: the one that the user gave, unless that is the loopback ("localhost"),
 * which leads each node to itself; then the node's hostname.
 */
const char *launch_master(const struct launch *launch);

/* Runs the job; the result is in launch->failed, ->code, ->reason. */
void launch_work(struct launch *launch);

/* Does a process wait there for the end of the launch? */
bool node_is_followed(const struct node *node);

/* The request to a node to end everything. */
json_t *make_end(const struct launch *launch, const struct node *node);

/* Ends everything on all nodes. */
void launch_end(struct launch *launch);

/* Everything has been written: the agents tell those that follow, and end. */
void launch_tell(struct launch *launch);

/* --- mpirun.c --- */

/* Starts mpirun with the spec in its environment. */
ep_status mpirun_start(struct launch *launch, const json_t *spec);
void mpirun_poll(struct launch *launch, const struct pollfd *polls);
void mpirun_end(struct launch *launch);

/* --- launch_folder.c --- */

ep_status folder_open(struct launch *launch);

/* Writes run.json. */
void folder_write(struct launch *launch);
/* A new file in it, whose name is made of `format` and `name`; NULL with errno. */
FILE *folder_create(struct launch *launch, const char *format, const char *name);
json_t *folder_document(struct launch *launch);

#endif
