/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - the CUDA backend as the command sees it: libepkit-cuda, found on demand, the GPUs that there are, and device
 * memory for the jobs.
 *
 * The launcher must not touch CUDA, because its forked ranks could then not use it: it asks in a child.
 */
#ifndef EP_TOOL_GPU_H
#define EP_TOOL_GPU_H

#include "ranks.h"

#include "backend/cuda/module.h"
#include "source/root.h"

#include <stdbool.h>
#include <string.h>

/* --- gpu.c --- */

/* Loads the module into this process. */
ep_status gpu_load(const struct ep_cuda_module **ret_module);

/* Is the module installed with this epkit, whether it can be loaded or not? */
bool gpu_is_built(void);

/*
 * The GPUs that CUDA shows to this process, asked once, in a child. None, with the reason in `why`, where there are
 * none, no libepkit-cuda, or a driver that does not answer.
 */
const struct ep_cuda_gpus *gpu_query(void);

/* As gpu_query(), of any machine, and each time anew. */
void gpu_query_root(struct root *root, struct ep_cuda_gpus *ret_gpus);

/* Has the machine device files of NVIDIA GPUs, whether or not CUDA shows them? */
bool gpu_has_devices(struct root *root);

/*
 * Keeps this thread on those of its processors that are near the GPU that rank `rank` will get, as far as the kernel
 * says which these are. Before the communicator is made, so that its memory is there, too. In a rank's process: it may
 * start CUDA.
 */
void gpu_bind(int rank);

/* The memory of a rank whose communicator is of the backend cuda. */
extern const struct ranks_memory gpu_memory;

/* --- gpu_choose.c --- */

static inline bool gpu_is_backend(const char *backend)
{
    return backend && strcmp(backend, "cuda") == 0;
}

/*
 * Chooses the backend of a group whose ranks and nodes are set, when nobody has named one: "cuda" where each rank gets
 * a GPU of its own and these reach each other, all on one node; else "host". `backend_why` says why. True if it is
 * "host" although this machine has GPUs, which is worth a line.
 *
 * Where the ranks are those of an mpirun, each of them is asked: it may see GPUs that others do not.
 */
bool gpu_choose_backend(struct ranks_spec *spec);

/* Ranks that a group on one node has, one for each GPU, when nobody says how many; 0: it will not be on GPUs. */
int gpu_default_ranks(void);

/*
 * What the ranks of a group on one node would get, each as it sees the machine (`alike`: all as views[0]). False, with
 * the reason, when that is not a GPU for each. *ret_hidden: some rank does not see the GPU of another, so that only a
 * trial shows whether they reach each other.
 */
bool gpu_check(const struct ep_cuda_gpus *views, bool alike, int nranks, bool *ret_hidden, char *ret_why, size_t bytes);

/* The ranks of an mpirun tell rank 0 what they see: {"event":"gpus", "backend", "why"}. A row of ranks_jobs[]. */
#define GPU_JOB "gpus"
int gpu_job(struct ranks_ctx *ctx, const json_t *parameters);

#endif
