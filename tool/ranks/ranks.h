/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.h - run a job on every rank of a group and hear what the ranks say.
 *
 * The command itself is the launcher: it forks the ranks, or starts them with mpirun, and renders what they emit. A job
 * is a name (one row of ranks_jobs[] in jobs.c) and a JSON object of parameters, because under mpirun the ranks are
 * fresh processes. What ranks emit are JSON objects, one a line, over a pipe.
 */
#ifndef EP_TOOL_RANKS_H
#define EP_TOOL_RANKS_H

#include "net/emulation.h"

#include <epkit/epkit.h>
#include <jansson.h>

/* RANKS_TCP: epkit itself was started on each rank, as torchrun or `epkit launch` does it. */
enum ranks_boot { RANKS_FORK = 0, RANKS_MPI, RANKS_THREADS, RANKS_TCP };

struct ranks_spec {
    enum ranks_boot boot;
    int nranks;
    int nnodes;
    int timeout_ms;      /* deadline of the communicator's waits */
    int job_timeout_ms;  /* deadline of the whole job, 0: none */
    const char *backend; /* NULL: host */
    const char *network; /* between nodes; NULL: that of the boot, else the emulated one */
    ep_net_emulation emulation;
    int channels;          /* 0: default */
    int partial_type;      /* 0: default */
    char backend_why[256]; /* for reports: how the backend was chosen; the ranks are not told */
};

/* --- the rank's side --- */

struct ranks_ctx;

/*
 * Memory that a backend works on and the processor does not reach: the data of a job is made and checked in host
 * memory, and copied. Each call is complete when it returns; copy goes in any direction.
 */
struct ranks_memory {
    ep_status (*alloc)(struct ranks_ctx *ctx, size_t bytes, void **ret_memory);
    void (*free)(struct ranks_ctx *ctx, void *memory); /* NULL is fine */
    ep_status (*copy)(struct ranks_ctx *ctx, void *to, const void *from, size_t bytes);
    ep_status (*fill)(struct ranks_ctx *ctx, void *to, int byte, size_t bytes);
};

struct ranks_ctx {
    ep_comm *comm;                     /* created and freed by ranks.c */
    const struct ranks_memory *memory; /* NULL: the backend works on host memory */
    const struct ep_cuda_module *gpu;  /* NULL unless the backend is cuda */
    int rank, nranks, nnodes;
    const struct ranks_spec *spec;
    const ep_boot *boot;
    const struct ep_mpi_module *mpi; /* NULL unless the ranks run under MPI */
    struct ep_boot_mpi *mpi_boot;
    int emit_fd;
};

/* Result: an exit code of the command (0 fine, 1 failed, ...). Runs on every rank. */
typedef int (*ranks_job_fn)(struct ranks_ctx *ctx, const json_t *parameters);

/*
 * Sends one object to the launcher; consumes the reference. Usually by rank 0 only, after collecting from the others:
 * where epkit itself was started by mpirun, other ranks' events go nowhere, except that their errors are printed.
 */
void ranks_emit(struct ranks_ctx *ctx, json_t *event);

/* Emits {"event":"error", "rank", "status", "text", "hint"} for a failed call; returns 1, the exit code. */
int ranks_emit_error(struct ranks_ctx *ctx, ep_status status, const char *what);

/* --- the launcher's side --- */

typedef void (*ranks_event_fn)(void *context, const json_t *event);

/*
 * Runs the job; on_event is called for each object in order of arrival, also for errors: of ranks that failed, died or
 * did not come to an end. Returns the worst exit code, or 128 + the number of the signal that interrupted the launcher,
 * which the caller must return at once. No process is left in any case; errors have been printed, each once with the
 * ranks that it befell.
 */
int ranks_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
              void *context);

/* Can ranks be started with mpirun here (mpirun found, libepkit-mpi loads)? If not, *ret_why says what is missing. */
int ranks_mpi_available(const char **ret_why);

#endif
