/* SPDX-License-Identifier: Apache-2.0 */
/*
 * epkit/memory.h - symmetric memory: memory that peers of the same node can write and read directly.
 *
 * Outputs of dispatch and inputs of combine that lie in it are used in place (zero copy). Ordinary memory is accepted
 * everywhere, at the price of one local copy and of as much memory of the library's own. On the CUDA backend rows in
 * the rank layout are copied while others are on their way; in the expanded layout the copy takes time of its own.
 */
#ifndef EPKIT_MEMORY_H
#define EPKIT_MEMORY_H

#include <epkit/comm.h>

#ifdef __cplusplus
extern "C" {
#endif

/*
 * Allocates `bytes` of symmetric memory on this rank, aligned to 4096. Collective: every rank calls it in the same
 * order, each with its own size (0 is allowed and gives a valid pointer that holds nothing). Contents are undefined.
 * The communicator owns it; ep_free() or ep_comm_free() releases it.
 *
 * The host backend takes all pages at once, so that touching the memory never fails: EP_E_MEMORY names the limit that
 * `bytes` do not fit into - a memory cgroup, the machine's memory and swap, the commit limit (vm.overcommit_memory =
 * 2), RLIMIT_FSIZE (shared memory is a file to the kernel), RLIMIT_AS, RLIMIT_MEMLOCK. Taking a page costs about a
 * third of touching it for the first time. A peer that cannot map the memory when it first needs it fails the
 * communicator with its own number and reason. The host backend has room for 512 allocations of a rank, a few of its
 * own among them.
 */
EP_API ep_status ep_alloc(ep_comm *comm, size_t bytes, void **ret_memory);

/* Collective. `memory` must come from ep_alloc of the same communicator; NULL is fine. No operation may be using it. */
EP_API ep_status ep_free(ep_comm *comm, void *memory);

#ifdef __cplusplus
}
#endif

#endif
