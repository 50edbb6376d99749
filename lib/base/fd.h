/* SPDX-License-Identifier: Apache-2.0 */
/* fd.h - file descriptors of the library. */
#ifndef EP_BASE_FD_H
#define EP_BASE_FD_H

#include "base/error.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

/*
 * Moves a new descriptor above the standard streams. If the process was started with one of them closed, the kernel
 * reuses its number, and output of the program would be written into shared memory. -1 for -1, or with errno if the
 * move failed.
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
 * Call it before `need` descriptors are opened: raises the soft limit as far as necessary and as the hard limit allows.
 * EP_E_SYSTEM if this does not suffice; the text names `what`. Opens nothing.
 */
ep_status ep_fd_reserve(const char *what, int need);

/*
 * Reads a small file, as those of procfs and sysfs, as text. false: it cannot be read, or is empty. Async-signal-safe.
 */
bool ep_fd_read_text(const char *path, char *ret_text, size_t bytes);

#endif
