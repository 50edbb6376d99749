/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - the CUDA backend in the command: loads libepkit-cuda on demand, queries the GPUs, and provides device memory
 * to the jobs.
 *
 * The launcher must not initialise CUDA, because its forked ranks could then not use it. It queries in a child process.
 */
#ifndef EP_COMMON_RANKS_GPU_H
#define EP_COMMON_RANKS_GPU_H

#include "ranks.h"

#include "backend/cuda/module.h"
#include "machine/source/source.h"

#include <stdbool.h>
#include <string.h>

/* Loads the module into this process. */
ep_status gpu_load(const struct ep_cuda_module **ret_module);

/* Whether this error of gpu_load(), or of a communicator, is that the module is not installed. */
bool gpu_is_missing(const char *error);

/*
 * The GPUs that are visible to this process in CUDA. Queried once, in a child process. None, with the reason in `why`,
 * if there are no GPUs or no libepkit-cuda, or if the driver does not answer.
 */
const struct ep_cuda_gpus *gpu_query(void);

/* As gpu_query(), for any machine, without a cache. */
void gpu_query_source(struct source *source, struct ep_cuda_gpus *ret_gpus);

/* Whether the machine has device files of NVIDIA GPUs, visible in CUDA or not. */
bool gpu_has_devices(struct source *source);

/*
 * Binds this thread to those of its CPUs that are local to the GPU of rank `rank`, if the kernel reports them. To be
 * called before the communicator is created, so that its memory is local, too; and only in a rank's process, because it
 * may initialise CUDA.
 */
void gpu_bind(int rank);

/* The memory of ranks with the cuda backend. */
extern const struct ranks_memory gpu_memory;

static inline bool gpu_is_backend(const char *backend)
{
    return backend && strcmp(backend, "cuda") == 0;
}

/*
 * Chooses the default backend of a group whose ranks and nodes are set: "cuda" if there is one node, a GPU for each
 * rank, and peer access between all of them; else "host". Sets backend_why. True if the choice is "host" although this
 * machine has GPUs, which the caller should report.
 *
 * Under mpirun all ranks are queried: each may see different GPUs.
 */
bool gpu_choose_backend(struct ranks_spec *spec);

/* Default number of ranks of a group on one node: one for each GPU; 0: GPUs will not be used. */
int gpu_default_ranks(void);

/*
 * Whether each rank of a group on one node gets a GPU of its own. views: the GPUs visible to each rank (`alike`:
 * views[0] for all). False with the reason. *ret_hidden: some rank does not see the GPU of another, so that peer access
 * is only known after trying it.
 */
bool gpu_check(const struct ep_cuda_gpus *views, bool alike, int nranks, bool *ret_hidden, char *ret_why, size_t bytes);

/* Under mpirun: gathers the GPUs of all ranks; emits {"event":"gpus", "backend", "why"}. A row of ranks_jobs[]. */
#define GPU_JOB "gpus"
int gpu_job(struct ranks_ctx *ctx, const json_t *parameters);

#endif
