/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ranks.h - runs a job on every rank of a group and receives the events of the ranks.
 *
 * The command itself is the launcher: it forks the ranks and prints their events. A job is a name (a row of
 * ranks_jobs[] in jobs.c) and a JSON object of parameters, because ranks that a launcher such as mpirun has started are
 * processes of their own. Events are JSON objects, one per line, sent over a pipe.
 */
#ifndef EP_COMMON_RANKS_RANKS_H
#define EP_COMMON_RANKS_RANKS_H

#include "net/emulation.h"

#include <epkit/epkit.h>
#include <jansson.h>

/* RANKS_TCP: epkit itself was started on each rank, for example by mpirun, torchrun or `epkit launch`. */
enum ranks_boot { RANKS_FORK = 0, RANKS_THREADS, RANKS_TCP };

struct ranks_spec {
    enum ranks_boot boot;
    int nranks;
    int nnodes;
    int timeout_ms;      /* deadline of the communicator's waits */
    const char *backend; /* NULL: host */
    const char *network; /* between nodes; NULL: that of the boot, else the emulated one */
    ep_net_emulation emulation;
    int channels;          /* 0: default */
    int partial_type;      /* 0: default */
    char backend_why[256]; /* for reports: why the backend was chosen; not sent to the ranks */
};

/* --- ranks --- */

struct ranks_ctx;

/* Device memory of a backend, to which jobs copy data that they make in host memory; all calls are synchronous. */
struct ranks_memory {
    ep_status (*alloc)(struct ranks_ctx *ctx, size_t bytes, void **ret_memory);
    void (*free)(struct ranks_ctx *ctx, void *memory); /* accepts NULL */
    ep_status (*copy)(struct ranks_ctx *ctx, void *to, const void *from, size_t bytes);
    ep_status (*fill)(struct ranks_ctx *ctx, void *to, int byte, size_t bytes);
};

struct ranks_ctx {
    ep_comm *comm;                     /* created and freed by ranks.c */
    const struct ranks_memory *memory; /* NULL: host memory */
    const struct ep_cuda_module *gpu;  /* NULL unless the backend is cuda */
    int rank, nranks, nnodes;
    const struct ranks_spec *spec;
    const ep_boot *boot;
    int emit_fd;
};

/* Result: an exit code of the command (0 fine, 1 failed, ...). Runs on every rank. */
typedef int (*ranks_job_fn)(struct ranks_ctx *ctx, const json_t *parameters);

/*
 * Sends one event to the launcher; consumes the reference. Usually called by rank 0 only, after gathering data from the
 * other ranks: if epkit itself was started by a launcher, events of other ranks are dropped and only their errors
 * printed.
 */
void ranks_emit(struct ranks_ctx *ctx, json_t *event);

/* Emits {"event":"error", "rank", "status", "text", "hint"} for a failed call; returns 1, the exit code. */
int ranks_emit_error(struct ranks_ctx *ctx, ep_status status, const char *what);

/* --- launcher --- */

typedef void (*ranks_event_fn)(void *context, const json_t *event);

/*
 * Runs the job. on_event is called for each event in order of arrival, including errors of ranks that failed, died or
 * did not finish. Returns the worst exit code, or 128 + the number of the signal that interrupted the launcher, which
 * the caller must return at once. All processes have ended on return; each error has been printed once, with the ranks
 * that reported it.
 */
int ranks_run(const struct ranks_spec *spec, const char *job, const json_t *parameters, ranks_event_fn on_event,
              void *context);

#endif
