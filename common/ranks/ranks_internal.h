/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks_internal.h - shared by the parts of the launcher.
 *
 *   ranks.c         a rank: communicator, job, events
 *   launcher.c      starts processes, reads their events, ends them
 *   events.c        the event pipes of the ranks; merges the errors of many ranks
 *   world.c         epkit itself started on each rank, by mpirun, srun or torchrun
 */
#ifndef EP_COMMON_RANKS_RANKS_INTERNAL_H
#define EP_COMMON_RANKS_RANKS_INTERNAL_H

#include "common/cmd.h"
#include "common/launched_by.h"
#include "ranks.h"

#include <stdbool.h>
#include <sys/types.h>

struct ranks_job {
    const char *name; /* the table ends with NULL */
    ranks_job_fn run;
};

extern const struct ranks_job ranks_jobs[];

/* --- ranks.c --- */

/* The context of a rank. ctx is the first member, because ranks_emit() casts from it. */
struct ranks_rank_context {
    struct ranks_ctx ctx;
    ranks_event_fn on_event; /* with ctx.emit_fd < 0: called with each event */
    void *context;
};

/* Creates the communicator over `boot`, runs the job, emits {"event":"exit"}. Returns the exit code of the job. */
int ranks_run_rank(struct ranks_rank_context *self, const ep_boot *boot, const char *job, const json_t *parameters);

json_t *ranks_spec_to_json(const struct ranks_spec *spec);

/* Strings are borrowed from `json`. 0, or -1 if it is not a spec. */
int ranks_spec_from_json(const json_t *json, struct ranks_spec *ret_spec);

/* A job to be run on all ranks of a group. */
struct ranks_request {
    struct ranks_spec spec;
    const char *job;
    const json_t *parameters;
};

/* As a JSON message, to be freed. */
char *ranks_request_print(const struct ranks_spec *spec, const char *job, const json_t *parameters);

/* From a message, from which everything is borrowed. 0, or -1 if it is not a request. */
int ranks_request_parse(const json_t *message, struct ranks_request *ret_request);

/* The more severe of two exit codes; in descending order: failed, usage, unsupported, findings, fine. */
int ranks_worse(int a, int b);

/* --- world.c --- */

/*
 * Joins the other ranks, over tcp, if the environment says that mpirun, srun, torchrun or the like has started this
 * epkit as a rank. `call` NULL: usage error. CMD_FINE: the world was joined, or there is none. After reporting the
 * error: CMD_USAGE if variables contradict each other or do not say where to meet, CMD_FAILED if a rank is missing.
 */
int ranks_world_join(const struct cmd *cmd, const struct cmd_call *call);

/* Rank and size in the joined world; -1 and 0: none. */
int ranks_world_rank(void);
int ranks_world_size(void);
int ranks_world_nodes(void);            /* of the boot; if hosts have different numbers of ranks, one per rank */
bool ranks_world_is_mpirun(void);       /* by ranks_env_is_launched() */
const char *ranks_world_launcher(void); /* what started the ranks, for texts */

/* As ranks_run(), on the world. Rank 0 only. */
int ranks_world_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
                    void *context);

/* On the other ranks: runs the jobs of rank 0 until it is done. */
int ranks_follow(void);

/*
 * Leaves the world. Rank 0 ends the followers; all ranks return the worst exit code of all, or CMD_FAILED if the
 * connection between them was lost. *ret_first: the code of rank 0. Without a world both are `code`.
 */
int ranks_world_done(int code, int *ret_first);

/* --- events.c --- */

/* Adds an error event {"what", "text", "hint", "rank"}; equal ones become one with a list of ranks. */
void ranks_problem_add(json_t *problems, const json_t *event);
void ranks_problem_print(const json_t *problems);

/* The error event of a rank that a signal ended, and any other error event. */
json_t *ranks_problem_signal(int rank, int signal_number);
json_t *ranks_problem_new(int rank, const char *what, const char *hint, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Reads the events of the ranks of a job. Each rank has its own pipe, so that long lines of different ranks do not mix.
 */
struct rank_pipe {
    int fds[2]; /* -1 when closed */
    char *text;
    size_t used, room;
    bool finished; /* {"event":"exit"} was received */
    int code;
};

struct rank_reader {
    const struct ranks_spec *spec;
    ranks_event_fn on_event;
    void *context;
    struct rank_pipe *pipes; /* [nranks] */
    json_t *problems;
};

/* Opens the pipes. CMD_FINE, or CMD_FAILED after reporting why. rank_reader_done() is needed in both cases. */
int rank_reader_init(const struct ranks_spec *spec, ranks_event_fn on_event, void *context,
                     struct rank_reader *ret_reader);
void rank_reader_done(struct rank_reader *reader);

/* Reads what is available. True if the exit event of a rank was among it. */
bool rank_reader_read(struct rank_reader *reader, int rank);

/* Adds an error event to the problems of the job and passes it to on_event. Consumes the reference. */
void rank_reader_add_problem(struct rank_reader *reader, json_t *problem);

#endif
