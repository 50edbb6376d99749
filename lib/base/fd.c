/* SPDX-License-Identifier: Apache-2.0 */
#include "base/fd.h"

#include <sys/resource.h>

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
