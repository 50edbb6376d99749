/* SPDX-License-Identifier: Apache-2.0 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIPE_MS 60000

/* 0, or errno. */
static int prepare(int fd)
{
    struct stat info;

    if (fstat(fd, &info) != 0 || fcntl(fd, F_SETFL, 0) != 0)
        return errno;
    if (S_ISFIFO(info.st_mode) && poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, PIPE_MS) == 0)
        return ENODATA;
    return 0;
}

FILE *file_open(const char *path)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), number;
    FILE *stream = NULL;

    if (fd < 0)
        return NULL;
    number = prepare(fd);
    if (number == 0 && !(stream = fdopen(fd, "r")))
        number = errno;
    if (!stream) {
        close(fd);
        errno = number;
    }
    return stream;
}
