/* SPDX-License-Identifier: Apache-2.0 */
#include "file.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIPE_MS 60000

FILE *file_open(const char *path)
{
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC), number = 0;
    struct stat info;
    FILE *stream = NULL;

    if (fd < 0)
        return NULL;
    if (fstat(fd, &info) != 0)
        number = errno;
    else if (S_ISFIFO(info.st_mode) && poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, PIPE_MS) == 0)
        number = ENODATA;
    else if (fcntl(fd, F_SETFL, 0) != 0 || !(stream = fdopen(fd, "r")))
        number = errno;
    if (!stream) {
        close(fd);
        errno = number;
    }
    return stream;
}
