/* SPDX-License-Identifier: Apache-2.0 */
/*
 * reserve.h - allocation of the pages of shared memory. If the kernel cannot provide a page at its first access, the
 * accessing process gets SIGBUS, or the OOM killer ends some process. So all pages are allocated together with the
 * memory, after a check of the limits that the kernel enforces by a signal instead of an error.
 */
#ifndef EP_BASE_RESERVE_H
#define EP_BASE_RESERVE_H

#include "base/error.h"

#include <stddef.h>
#include <sys/types.h>

/*
 * Do `bytes` more fit? EP_E_MEMORY names the limit, its size and what is left: a memory cgroup, the commit limit
 * (vm.overcommit_memory = 2), or the memory of the machine. Limits that cannot be read are ignored.
 */
EP_PRIVATE_API ep_status ep_reserve_check(size_t bytes);

/* Sets the size of a new memfd. EP_E_MEMORY names RLIMIT_FSIZE; the application does not get SIGXFSZ. */
ep_status ep_reserve_resize(int fd, size_t bytes);

/* Allocates the pages [offset, offset + bytes) of a memfd. After a failure some of them may be allocated. */
ep_status ep_reserve_file(int fd, size_t offset, size_t bytes);

/* As ep_reserve_file() for anonymous shared memory at `base`. */
ep_status ep_reserve_mapping(void *base, size_t bytes);

/* After mmap() of `bytes` has failed with `error_number`: records EP_E_MEMORY or EP_E_SYSTEM with the limits. */
EP_PRIVATE_API ep_status ep_reserve_fail_map(int error_number, size_t bytes);

#endif
