/* SPDX-License-Identifier: Apache-2.0 */
/*
 * launch.h - runs a job on many nodes: connects to all nodes, sorts and checks them, starts the ranks, forwards their
 * output, ends everything.
 */
#ifndef EP_LAUNCH_LAUNCH_H
#define EP_LAUNCH_LAUNCH_H

#include "common/json.h"
#include "hosts.h"

#include <stdbool.h>
#include <stdint.h>

enum launch_starter {
    LAUNCH_SSH,   /* the agents start the ranks */
    LAUNCH_MPIRUN /* mpirun starts the ranks */
};

/* Exit codes of a run in addition to those of the program. */
enum { LAUNCH_FAILED = 1, LAUNCH_UNSUPPORTED = 4, LAUNCH_DEADLINE = 124 };

struct launch_job {
    const char *name; /* "hostname", "nccl", "workload" */
    enum launch_starter starter;
    int per_node;              /* ranks on a node; 0: as many as it has GPUs */
    int per_node_without_gpus; /* used where nodes have no GPUs; 0: as for 8 GPUs */
    bool by_rank;              /* RANK and WORLD_SIZE count ranks, not nodes */
    json_t *spec;              /* see job.h */
    json_t *files;             /* {name: text} for the folder of the launch on each node; NULL: none */
    bool takes_names;          /* the names of the nodes are its last arguments */
};

struct launch_options {
    struct hosts hosts;
    const char *command;      /* the command line, for run.json */
    json_t *kept;             /* names of variables whose values run.json has although they look like secrets */
    const char *ssh, *port;   /* port NULL: that of ssh's configuration */
    const char *remote_epkit; /* NULL: the path of this executable where it exists, else "epkit" in PATH */
    bool by_srun;             /* agents are started by srun instead of ssh */
    bool has_followers;       /* a process waits for the end on all hosts but the first (agent.h) */
    int64_t connect_s;        /* deadline of each layer */
    int64_t wait_s;           /* hosts whose name does not resolve yet, or that refuse, are retried for this long */
    int64_t deadline_s;       /* of the run; 0: none */
    int64_t silent_s;         /* report a node that has been silent this long; 0: never */
    int64_t grace_s;          /* between SIGTERM and SIGKILL */
    int gpus_per_node;        /* 0: as many as a node has, 8 where it has no GPUs */
    int master_port;
    json_t *location;                    /* how nodes find their location, see agent.h */
    bool has_checks;                     /* run the doctor */
    bool require_checks;                 /* do not start when the doctor has a serious finding */
    const char *hostfile_8, *hostfile_1; /* written when the order is known; NULL: not written */
    const char *folder;                  /* for logs and run.json; NULL: none */
    int output_fd; /* for the output of the nodes, prefixed with the node; -1: only into the logs */
    struct launch_job job;
    /* Called with each unmodified line of a rank, and its prefix; may be NULL. */
    void (*on_line)(void *context, const char *prefix, const char *text, size_t bytes);
    void *line_context;
};

struct launch_result {
    int code;          /* for exit(): of the first node that failed; 128 + signal when epkit was interrupted */
    int interrupted;   /* the signal, or 0 */
    bool is_connected; /* all nodes answered */
    char verdict[512];
    json_t *document;      /* {"job", "nodes": [...], ...}: the body of --json */
    struct launch *launch; /* with the connections to nodes where a process waits for its end */
};

/*
 * Runs the job. EP_OK whatever its result; otherwise it could not begin, with the reason by ep_fail(). Either way
 * launch_result_done() has to follow, when everything has been written: it tells those that wait.
 */
ep_status launch_run(const struct launch_options *options, struct launch_result *ret_result);

void launch_result_done(struct launch_result *result);

#endif
