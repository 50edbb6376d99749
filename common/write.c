/* SPDX-License-Identifier: Apache-2.0 */
#include "write.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

int write_all(int fd, const void *data, size_t bytes)
{
    const char *at = data;

    while (bytes > 0) {
        ssize_t n = write(fd, at, bytes);

        if (n < 0 && errno != EINTR)
            return errno;
        at += n > 0 ? n : 0;
        bytes -= n > 0 ? (size_t)n : 0;
    }
    return 0;
}

const char *write_reason(int error_number)
{
    switch (error_number) {
    case EFBIG:
        return "the limit of the file size is reached (ulimit -f)";
    case EMFILE:
        return "the limit of open files is reached (ulimit -n)";
    case EBADF:
        return "it is closed, or open only for reading";
    case ELOOP:
        return "a link in its path belongs to another user, or leads in a circle";
    case EMLINK:
        return "it has a second name, which may be that of another file";
    case ENXIO:
        return "it is a pipe that nobody reads, or a device that is not there";
    case ENOSYS:
        return "the system call openat2() is missing: Linux before 5.6, or a filter (seccomp)";
    default:
        return strerror(error_number);
    }
}
