/* SPDX-License-Identifier: Apache-2.0 */
#include "write.h"

#include <errno.h>
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
