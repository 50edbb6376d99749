/* SPDX-License-Identifier: Apache-2.0 */
/* fd.h - file descriptors of the library. */
#ifndef EP_BASE_FD_H
#define EP_BASE_FD_H

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <unistd.h>

/*
 * Moves a new descriptor above the standard streams. If the process was started with one of them closed, the kernel
 * reuses its number, and output of the program would be written into shared memory. Remembers which file it is. -1 for
 * -1, or with errno if the move failed.
 */
int ep_fd_above_stdio(int fd);

/*
 * false: the program has closed the descriptor, and its number may be that of a file of the program now. Files without
 * an inode of their own (eventfd, epoll and the like) are not distinguished from each other. Costs an fstat().
 * Async-signal-safe.
 */
bool ep_fd_is_ours(int fd);
/* Closes it, if it is ours. */
void ep_fd_close(int fd);

/*
 * Call it before `need` descriptors are opened: raises the soft limit as far as necessary and as the hard limit allows.
 * EP_E_SYSTEM if this does not suffice; the text names `what`. Opens nothing.
 */
ep_status ep_fd_reserve(const char *what, int need);

/*
 * Reads a small file, as those of procfs and sysfs, as text. false: it cannot be read, or is empty. Async-signal-safe.
 */
bool ep_fd_read_text(const char *path, char *ret_text, size_t bytes);

#endif
