/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gpu.h - the CUDA backend as the command sees it: libepkit-cuda, found on demand, and device memory for the jobs.
 *
 * The launcher must not touch CUDA, because its forked ranks could then not use it: it asks in a child.
 */
#ifndef EP_TOOL_GPU_H
#define EP_TOOL_GPU_H

#include "ranks.h"

#include <sched.h>
#include <stdbool.h>

/*
 * GPUs that the CUDA backend can use here; 0 where there are none, no libepkit-cuda, or a driver that does not answer.
 * Asks once, in a child process.
 */
int gpu_count(void);

/*
 * The backend for a group that leaves the choice to us: "cuda" where each rank gets a GPU of its own, all on one node;
 * else "host". EPKIT_BACKEND goes before: then NULL, and the library reads it.
 */
const char *gpu_choose_backend(int nranks, int nnodes);

/* Is a group of this backend (NULL: the environment's) one on GPUs? */
bool gpu_is_backend(const char *backend);

/* Loads the module into this process. On failure NULL, and *ret_why (static) says why. */
const struct ep_cuda_module *gpu_load(const char **ret_why);

/*
 * Keeps this thread on those of its processors that are near the GPU of its communicator, as far as the kernel says
 * which these are.
 */
void gpu_bind(const struct ranks_ctx *ctx);

/* "0-3,8,10-11" as in sysfs. False if it is none. */
bool gpu_parse_cpus(const char *list, cpu_set_t *ret_cpus);

/* The memory of a rank whose communicator is of the backend cuda. */
extern const struct ranks_memory gpu_memory;

#endif
