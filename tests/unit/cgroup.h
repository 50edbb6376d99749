/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup.h - a memory cgroup for a test, of either version, below the root of the hierarchy. */
#ifndef EP_TESTS_UNIT_CGROUP_H
#define EP_TESTS_UNIT_CGROUP_H

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct cgroup {
    char folder[256];
    const char *limit_file; /* its name says which version it is */
};

static inline bool cgroup_put(const char *folder, const char *name, const char *text)
{
    char path[400];
    int fd;
    bool good;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    good = write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    close(fd);
    return good;
}

/* false where it cannot be made. */
static inline bool cgroup_make(struct cgroup *ret_cgroup, size_t limit_bytes)
{
    static const struct {
        const char *mount, *limit;
    } kinds[] = {{"/sys/fs/cgroup/memory", "memory.limit_in_bytes"}, {"/sys/fs/cgroup", "memory.max"}};
    char bytes[32];

    snprintf(bytes, sizeof(bytes), "%zu", limit_bytes);
    for (size_t i = 0; i < 2; i++) {
        snprintf(ret_cgroup->folder, sizeof(ret_cgroup->folder), "%s/epkit-test-%d", kinds[i].mount, (int)getpid());
        ret_cgroup->limit_file = kinds[i].limit;
        if (mkdir(ret_cgroup->folder, 0755) != 0)
            continue;
        if (cgroup_put(ret_cgroup->folder, ret_cgroup->limit_file, bytes))
            return true;
        rmdir(ret_cgroup->folder);
    }
    return false;
}

/* This process, and those that it forks later. */
static inline bool cgroup_join(const struct cgroup *cgroup)
{
    return cgroup_put(cgroup->folder, "cgroup.procs", "0");
}

/* Its processes have ended, but the kernel may need a moment. */
static inline void cgroup_remove(const struct cgroup *cgroup)
{
    for (int tries = 0; rmdir(cgroup->folder) != 0 && errno == EBUSY && tries < 1000; tries++)
        usleep(10000);
}

#endif
