/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void tail_open(struct tail *tail, const char *path)
{
    *tail = (struct tail){.path = path, .fd = -1};
    if (strcmp(path, "-") == 0) {
        tail->fd = STDIN_FILENO;
        tail->is_pipe = true; /* a file as well: it is read up to its end */
    }
}

void tail_close(struct tail *tail)
{
    if (tail->fd > STDIN_FILENO)
        close(tail->fd);
    tail->fd = -1;
}

/* The file that has the name now; nothing, if it is the open one or there is none. */
static enum tail_event look_up(struct tail *tail)
{
    bool is_first = tail->fd < 0;
    struct stat info;
    int fd, error;

    if (!is_first && stat(tail->path, &info) == 0 && info.st_dev == tail->device && info.st_ino == tail->inode)
        return TAIL_NOTHING;
    error = parser_open(AT_FDCWD, tail->path, &fd);
    if (fd < 0 && (error == ENOENT || !is_first))
        return TAIL_NOTHING;
    if (!error && (fstat(fd, &info) != 0 || S_ISDIR(info.st_mode))) {
        error = EISDIR;
        close(fd);
    }
    errno = error == PARSE_DEVICE ? EINVAL : error;
    if (error)
        return TAIL_ERROR;
    tail_close(tail);
    tail->fd = fd;
    tail->is_pipe = tail->is_pipe || !S_ISREG(info.st_mode);
    tail->offset = 0;
    tail->device = info.st_dev;
    tail->inode = info.st_ino;
    return is_first ? TAIL_NOTHING : TAIL_REPLACED;
}

enum tail_event tail_read(struct tail *tail, char *buffer, size_t bytes, int wait_ms, size_t *ret_n)
{
    enum tail_event event;
    struct stat info;
    ssize_t n;

    if (tail->fd < 0 && look_up(tail) == TAIL_ERROR)
        return TAIL_ERROR;
    if (tail->fd < 0) {
        poll(NULL, 0, wait_ms);
        return TAIL_NOTHING;
    }
    if (tail->is_pipe && poll(&(struct pollfd){.fd = tail->fd, .events = POLLIN}, 1, wait_ms) <= 0)
        return TAIL_NOTHING;
    n = read(tail->fd, buffer, bytes);
    if (n < 0)
        return errno == EINTR || errno == EAGAIN ? TAIL_NOTHING : TAIL_ERROR;
    tail->offset += n;
    *ret_n = (size_t)n;
    if (n > 0)
        return TAIL_BYTES;
    if (tail->is_pipe)
        return TAIL_END;
    if (fstat(tail->fd, &info) == 0 && info.st_size < tail->offset) {
        tail->offset = lseek(tail->fd, 0, SEEK_SET);
        return TAIL_TRUNCATED;
    }
    event = look_up(tail);
    if (event == TAIL_NOTHING)
        poll(NULL, 0, wait_ms);
    return event;
}
