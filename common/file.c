/* SPDX-License-Identifier: Apache-2.0 */
#include "dir.h"
#include "output.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FLAGS (O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)
#define REGULAR_BYTES_MAX ((off_t)1 << 30)
#define PIPE_MS 60000
#define SILENT_MS 2000 /* of it; then a note names what is waited for */

static bool has_data(int fd, int timeout_ms)
{
    return poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, timeout_ms) != 0;
}

/* 0, or errno. */
static int prepare(int fd, const char *path, bool waits)
{
    struct stat info;

    if (fstat(fd, &info) != 0 || fcntl(fd, F_SETFL, 0) != 0)
        return errno;
    if (!waits)
        return S_ISREG(info.st_mode) ? 0 : EINVAL;
    if (!S_ISFIFO(info.st_mode) || has_data(fd, SILENT_MS))
        return 0;
    out_note("%s is a pipe: waiting for data, at most %d s", path, PIPE_MS / 1000);
    return has_data(fd, PIPE_MS - SILENT_MS) ? 0 : ENODATA;
}

/* Consumes `fd`. */
static FILE *open_file(int fd, const char *path, bool waits)
{
    FILE *stream = NULL;
    int number;

    if (fd < 0)
        return NULL;
    number = prepare(fd, path, waits);
    if (number == 0 && !(stream = fdopen(fd, "r")))
        number = errno;
    if (!stream) {
        close(fd);
        errno = number;
    }
    return stream;
}

FILE *file_open(const char *path)
{
    return open_file(open(path, FLAGS), path, true);
}

FILE *file_open_regular(const char *path)
{
    FILE *stream = open_file(open(path, FLAGS), path, false);
    struct stat info;

    /* One line of a file with a hole would take all memory. */
    if (!stream || (fstat(fileno(stream), &info) == 0 && info.st_size <= REGULAR_BYTES_MAX))
        return stream;
    fclose(stream);
    errno = EFBIG;
    return NULL;
}

FILE *file_open_within(int dir, const char *path)
{
    return open_file(dir_open_within(dir, path, FLAGS), path, false);
}

const char *file_error(int number)
{
    return number == ENODATA ? "no data came from the pipe" : strerror(number);
}

void file_skip_mark(FILE *stream)
{
    int c = getc(stream);

    if (c == 0xef && getc(stream) == 0xbb)
        (void)getc(stream);
    else if (c != 0xef && c != EOF)
        ungetc(c, stream);
}
