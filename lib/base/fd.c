/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fd.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <sys/stat.h>

/* Higher numbers are not checked. */
#define NUMBERS 65536

/* The files that the descriptors of the library were when they were made, by number; all zero: unknown. */
static struct {
    _Atomic uint64_t device, inode;
} files[NUMBERS];

static void remember(int fd)
{
    struct stat info;

    if (fd >= NUMBERS || fstat(fd, &info) != 0)
        return;
    atomic_store(&files[fd].device, (uint64_t)info.st_dev);
    atomic_store(&files[fd].inode, (uint64_t)info.st_ino);
}

int ep_fd_above_stdio(int fd)
{
    int kept = fd, error;

    if (fd >= 0 && fd <= STDERR_FILENO) {
        kept = fcntl(fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
        error = errno;
        close(fd);
        errno = error;
    }
    if (kept >= 0)
        remember(kept);
    return kept;
}

bool ep_fd_is_ours(int fd)
{
    int saved = errno;
    struct stat info;
    bool ours = fstat(fd, &info) == 0;

    errno = saved;
    if (ours && fd < NUMBERS && atomic_load(&files[fd].inode))
        ours = atomic_load(&files[fd].device) == (uint64_t)info.st_dev &&
               atomic_load(&files[fd].inode) == (uint64_t)info.st_ino;
    return ours;
}

void ep_fd_close(int fd)
{
    if (ep_fd_is_ours(fd))
        close(fd);
}

bool ep_fd_read_text(const char *path, char *ret_text, size_t bytes)
{
    size_t used = 0;
    ssize_t got;
    int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return false;
    while (used + 1 < bytes && (got = read(fd, ret_text + used, bytes - 1 - used)) > 0)
        used += (size_t)got;
    close(fd);
    ret_text[used] = '\0';
    return used > 0;
}

/* Free numbers below `limit`, at most `need`; *ret_end: 1 + the last one counted. */
static int count_free(rlim_t limit, int need, int *ret_end)
{
    int n = 0, fd = 0;

    for (; n < need && (rlim_t)fd < limit; fd++)
        n += fcntl(fd, F_GETFD) < 0;
    *ret_end = fd;
    return n;
}

ep_status ep_fd_reserve(const char *what, int need)
{
    struct rlimit limit, raised;
    int n_free, end;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return EP_OK; /* opening them reports the error */
    n_free = count_free(limit.rlim_cur, need, &end);
    if (n_free == need)
        return EP_OK;
    raised = limit;
    n_free = count_free(limit.rlim_max, need, &end);
    raised.rlim_cur = (rlim_t)end;
    if (n_free == need && setrlimit(RLIMIT_NOFILE, &raised) == 0)
        return EP_OK;
    return ep_fail(EP_E_SYSTEM,
                   "%s needs %d open files and %d are free: RLIMIT_NOFILE is %llu; raise it by %d (ulimit -Hn)", what,
                   need, n_free, (unsigned long long)limit.rlim_max, need - n_free);
}
