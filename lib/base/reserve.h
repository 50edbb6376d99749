/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reserve.h - memory that exists. A page of shared memory that the kernel cannot provide when it is touched is SIGBUS
 * for whoever touches it, or the OOM killer for some process. So pages are taken when memory is allocated, after a look
 * at the limits that the kernel enforces by a signal instead of an error.
 */
#ifndef EP_BASE_RESERVE_H
#define EP_BASE_RESERVE_H

#include "base/error.h"

#include <stddef.h>
#include <sys/types.h>

/*
 * Will `bytes` more fit? EP_E_MEMORY names the limit, its size and what is left: a memory cgroup, the commit limit
 * (vm.overcommit_memory = 2), or the memory of the machine. Limits that cannot be read are not guessed.
 */
EP_PRIVATE_API ep_status ep_reserve_check(size_t bytes);

/* Gives a new memfd its size. EP_E_MEMORY names RLIMIT_FSIZE; the signal that goes with it does not reach the caller.
 */
ep_status ep_reserve_resize(int fd, size_t bytes);

/* Makes the pages [offset, offset + bytes) of a memfd exist. On failure some of them may. */
ep_status ep_reserve_file(int fd, size_t offset, size_t bytes);

/*
 * The same for a memfd that holds something already and is mapped at `base`: contents are kept. The limits are asked
 * for the `missing` pages alone, given in bytes.
 */
ep_status ep_reserve_missing(int fd, void *base, size_t bytes, size_t missing);

/* As ep_reserve_file() for anonymous shared memory at `base`. */
ep_status ep_reserve_mapping(void *base, size_t bytes);

/* After mmap() of `bytes` has failed with `error_number`: records EP_E_MEMORY or EP_E_SYSTEM with the limits. */
ep_status ep_reserve_fail_map(int error_number, size_t bytes);

#endif
