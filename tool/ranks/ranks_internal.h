/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks_internal.h - what the parts of the launcher share.
 *
 *   ranks.c         a rank: communicator, job, events
 *   launch.c        the launcher: starts processes, listens to the ranks, ends them
 *   hear.c          what the ranks say, by pipes
 *   mpi.c           mpirun as the starter, and libepkit-mpi
 *   claims.c        what variables of launchers say about this process
 *   world.c         epkit itself started by mpirun
 *   nics.c          the NIC of each rank
 *   report.c        errors of many ranks in few words
 */
#ifndef EP_TOOL_RANKS_INTERNAL_H
#define EP_TOOL_RANKS_INTERNAL_H

#include "cmd.h"
#include "ranks.h"

#include "mpi/module.h"

#include <stdbool.h>
#include <sys/types.h>

/* Hidden verb: a rank that mpirun starts for a launcher. */
#define RANKS_VERB "__rank"

struct ranks_job {
    const char *name; /* the table ends with NULL */
    ranks_job_fn run;
};

extern const struct ranks_job ranks_jobs[];

/* --- ranks.c --- */

/* A rank's place. The context comes first: ranks_emit() finds the rest from it. */
struct ranks_seat {
    struct ranks_ctx ctx;
    ranks_event_fn on_event; /* with ctx.emit_fd < 0: events are handed over by a call */
    void *context;
};

/* Creates the communicator over `boot`, runs the job, emits {"event":"exit"}. The result is the job's. */
int ranks_serve(struct ranks_seat *seat, const ep_boot *boot, const char *job, const json_t *parameters);

json_t *ranks_spec_to_json(const struct ranks_spec *spec);

/* Strings are borrowed from `json`. 0, or -1 if it does not describe a spec. */
int ranks_spec_from_json(const json_t *json, struct ranks_spec *ret_spec);

/* What a rank has to be told: its group and its job. */
struct ranks_order {
    struct ranks_spec spec;
    const char *job;
    const json_t *parameters;
};

/* As a message, for free(); NULL for lack of memory. `events` says where the rank reaches its launcher; may be NULL. */
char *ranks_order_print(const struct ranks_spec *spec, const char *job, const json_t *parameters, json_t *events);

/* From a message; everything is borrowed from it. 0, or -1 if it is none. */
int ranks_order_parse(const json_t *message, struct ranks_order *ret_order);

/* Of two exit codes the one that matters more: failed, wrong usage, not supported, findings, fine. */
int ranks_worse(int a, int b);

/* --- mpi.c --- */

/* What mpirun says about its ranks on standard error. */
struct ranks_mpirun {
    int rank, signal; /* the death that it reports; rank -1 if none */
    bool in_banner;
    char banner[4096]; /* the one that is being read */
    size_t used;
};

/* Takes a line and passes on what is worth reading; `quiet`: nothing is, because mpirun was told to end. */
void ranks_mpirun_line(struct ranks_mpirun *mpirun, const char *line, bool quiet);

/* Called in the forked child that becomes mpirun: execs, and returns only with an exit code for failing to. */
int ranks_exec_mpirun(const struct ranks_spec *spec, const char *job, const json_t *parameters, const int *event_fds,
                      pid_t launcher);

/* Loads libepkit-mpi.so into this process. */
ep_status ranks_mpi_load(const struct ep_mpi_module **ret_module);
/* $EPKIT_TIMEOUT_MS, or 0. */
int ranks_start_ms(void);
/*
 * MPI_Init() waits for all ranks, without a deadline of its own, and some errors in it end the process. Behind
 * `timeout_ms` this rank says so and ends.
 */
#define RANKS_MPI_START_MS 120000 /* where nobody has named a deadline: mpirun may have many hosts to start */
ep_status ranks_mpi_start(const struct ep_mpi_module *module, int timeout_ms, struct ep_boot_mpi **ret_mpi);

/* "Open MPI v4.1.4 ..." or NULL where ranks_mpi_available() says no. */
const char *ranks_mpi_version(void);

/* epkit __rank: a rank that mpirun started for a launcher. */
int ranks_main(int argc, char **argv);

/* --- claims.c --- */

/* Do variables of a launcher say that this process is one of several ranks? */
bool ranks_claims_any(void);

/* Do they say that it is one of those behind the first? Not what MPI says, which may not have been asked. */
bool ranks_claims_follower(void);

/* Those that do, "PMI_RANK=0, PMI_SIZE=4". */
void ranks_claims_print(char *ret_text, size_t bytes);

/* Do they agree with the truth? If not, ret_why names the one that does not. */
bool ranks_claims_hold(int rank, int size, char *ret_why, size_t bytes);

/*
 * Is this process one of several ranks by the variables of torchrun and `epkit launch`: RANK, WORLD_SIZE, MASTER_ADDR?
 * `asked`: the command line says so; else torchrun has to have started it, because pods and launchers of one process a
 * node set these variables for other programs, too. `alone`: also if it is the only one.
 */
bool ranks_claims_tcp(bool asked, bool alone);

/* What keeps ranks_claims_tcp(true, true) from being so, for a message: "MASTER_ADDR is not set"; NULL: nothing. */
const char *ranks_claims_lack(void);

/* --- world.c --- */

/*
 * Was this epkit started as a rank by mpirun, srun, torchrun or the like? Their variables say so. Of MPI's launchers
 * MPI is asked: what it answers counts. `call` NULL: the command line is wrong. CMD_FINE: the world is joined, or there
 * is none. CMD_USAGE where variables contradict MPI or each other, CMD_UNSUPPORTED where MPI cannot be started; both
 * are reported. All ranks get the same result.
 */
int ranks_world_join(const struct cmd *cmd, const struct cmd_call *call);

/* Rank and size in the world that was joined, -1 and 0 if there is none. */
int ranks_world_rank(void);
int ranks_world_size(void);
int ranks_world_nodes(void);            /* as the boot knows them; where the hosts make none, one for each rank */
enum ranks_boot ranks_world_boot(void); /* RANKS_MPI or RANKS_TCP */
const char *ranks_world_starter(void);  /* who has started the ranks, for texts */

/* As ranks_run(), on the world. Rank 0 only. */
int ranks_world_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
                    void *context);

/* The other ranks: run the jobs that rank 0 announces until it is done. */
int ranks_follow(void);

/*
 * Rank 0 lets the followers go; then all ranks leave with one exit code, the worst of theirs, or CMD_FAILED where they
 * have lost each other. *ret_first: the code of rank 0. Where no world was joined both are `code`.
 */
int ranks_world_done(int code, int *ret_first);

/* --- nics.c --- */

/*
 * Over the network "verbs" each rank uses the NIC that `epkit topo` assigns to its GPU, the one with the number of its
 * place on the node: EPKIT_VERBS_DEVICE, unless it is set. Nothing where not every GPU has a NIC.
 */
void ranks_choose_nics(const struct ranks_spec *spec);

/* --- report.c --- */

/*
 * Collects error events {"what", "text", "hint", "rank"} in `problems`, a JSON array; equal ones become one with a list
 * of ranks.
 */
void ranks_problem_add(json_t *problems, const json_t *event);
void ranks_problem_print(const json_t *problems);

/* The problem of a rank that ended without finishing its job. */
json_t *ranks_problem_signal(int rank, int signal_number);
json_t *ranks_problem_new(int rank, const char *what, const char *hint, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#endif
