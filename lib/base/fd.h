/* SPDX-License-Identifier: Apache-2.0 */
/* fd.h - descriptors that the library keeps. */
#ifndef EP_BASE_FD_H
#define EP_BASE_FD_H

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/*
 * Moves a new descriptor above the standard streams. In a process that was started with one of them closed the kernel
 * gives out its number, and what the program then prints would land in the middle of shared memory. -1 stays -1; errno
 * says why the move failed.
 */
static inline int ep_fd_above_stdio(int fd)
{
    int kept, error;

    if (fd < 0 || fd > STDERR_FILENO)
        return fd;
    kept = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
    error = errno;
    close(fd);
    errno = error;
    return kept;
}

/*
 * Before `need` descriptors are opened one after the other: raises the soft limit, by no more than that takes, where
 * the hard one allows it. EP_E_SYSTEM: there are not so many, said of `what`. Nothing is opened here.
 */
ep_status ep_fd_reserve(const char *what, int need);

#endif
