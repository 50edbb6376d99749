/* SPDX-License-Identifier: Apache-2.0 */
/*
 * live.c - opens files within the root directory of a source.
 *
 * With openat2(RESOLVE_IN_ROOT) the kernel keeps the resolution within the root directory: absolute links start there
 * and ".." stops there, whatever is renamed meanwhile. Where it is missing (before Linux 5.6, or blocked by a seccomp
 * filter), only "/" can be read, where there is nothing to escape from.
 */
#include "common/memory.h"
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SELF "/proc/self"
#define LINKS_MAX 40 /* as in the kernel */

static int call_openat2(const struct source *source, const char *path, int flags)
{
    return dir_resolve(source->fd, path[0] == '/' && !path[1] ? "." : path, flags, RESOLVE_IN_ROOT);
}

void live_probe(struct source *source)
{
    int fd = call_openat2(source, "/", O_PATH | O_DIRECTORY);

    source->has_openat2 = fd >= 0 || (errno != ENOSYS && errno != EPERM);
    dir_close(fd);
}

/* --- resolution --- */

static int fail_with(int number)
{
    errno = number;
    return -1;
}

int live_resolve(const struct source *source, const char *path, char *ret_real)
{
    char rest[PATH_MAX], joined[PATH_MAX], target[PATH_MAX];
    size_t used = 0, n;
    int links = 0;

    if (snprintf(rest, sizeof(rest), "%s", path) >= PATH_MAX)
        return fail_with(ENAMETOOLONG);
    for (const char *at = rest + strspn(rest, "/"); *at; at += n + strspn(at + n, "/")) {
        ssize_t n_target;

        n = strcspn(at, "/");
        if (n == 1 && *at == '.')
            continue;
        if (n == 2 && at[0] == '.' && at[1] == '.') {
            while (used > 0 && ret_real[--used] != '/')
                continue;
            continue;
        }
        if (used + n + 2 > PATH_MAX)
            return fail_with(ENAMETOOLONG);
        snprintf(ret_real + used, PATH_MAX - used, "/%.*s", (int)n, at);
        n_target = readlinkat(source->fd, ret_real + 1, target, sizeof(target) - 1);
        if (n_target < 0 && errno != EINVAL)
            return -1;
        if (n_target < 0) {
            used += n + 1;
            continue;
        }
        target[n_target] = '\0';
        if (++links > LINKS_MAX)
            return fail_with(ELOOP);
        if (snprintf(joined, sizeof(joined), "%s/%s", target, at + n) >= PATH_MAX)
            return fail_with(ENAMETOOLONG);
        used = target[0] == '/' ? 0 : used;
        memcpy(rest, joined, sizeof(rest));
        at = rest;
        n = 0;
    }
    snprintf(ret_real + used, PATH_MAX - used, "%s", used ? "" : "/");
    return 0;
}

/* --- interface --- */

const char *live_own_path(const struct source *source, const char *path, char own[PATH_MAX])
{
    size_t bytes = sizeof(SELF) - 1;

    if (!source->process || strncmp(path, SELF, bytes) != 0 || (path[bytes] && path[bytes] != '/'))
        return path;
    /* A path that does not fit becomes a name too long for any folder. */
    snprintf(own, PATH_MAX, "/proc/%d%s", (int)source->process, path + bytes);
    return own;
}

void live_self_path(const struct source *source, char path[PATH_MAX])
{
    char own[32], rest[PATH_MAX];
    pid_t process = source->process ? source->process : getpid();
    int n = snprintf(own, sizeof(own), "/proc/%d", (int)process);

    if (!source->is_live || strncmp(path, own, (size_t)n) != 0 || (path[n] && path[n] != '/'))
        return;
    memcpy(rest, path + n, strlen(path + n) + 1);
    if (strlen(rest) + sizeof(SELF) <= PATH_MAX) {
        memcpy(path, SELF, sizeof(SELF));
        memcpy(path + sizeof(SELF) - 1, rest, strlen(rest) + 1);
    }
}

int live_open(struct source *source, const char *path, int flags)
{
    char own[PATH_MAX];

    path = live_own_path(source, path, own);
    return source->has_openat2 ? call_openat2(source, path, flags)
                               : openat(source->fd, path[1] ? path + 1 : ".", flags | O_CLOEXEC);
}

static const char *what_it_is(mode_t mode)
{
    if (S_ISDIR(mode))
        return "is a folder";
    if (S_ISFIFO(mode))
        return "is a FIFO";
    if (S_ISSOCK(mode))
        return "is a socket";
    return S_ISCHR(mode) || S_ISBLK(mode) ? "is a device" : "is not a regular file";
}

int live_open_file(struct source *source, const char *path, int64_t *ret_bytes, json_t **ret_failure)
{
    struct stat info;
    int fd;

    source_set_current_path(source, path);
    /* Opening a device can have effects (a tape, a watchdog), so check the type first. */
    fd = live_open(source, path, O_PATH);
    if (fd >= 0 && fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) {
        close(fd);
        fd = live_open(source, path, O_RDONLY | O_NONBLOCK | O_NOCTTY);
    }
    if (fd < 0 || fstat(fd, &info) < 0) {
        *ret_failure = cache_failure_errno(errno);
    } else if (!S_ISREG(info.st_mode)) {
        *ret_failure = cache_failure(SOURCE_FAILED, what_it_is(info.st_mode));
    } else {
        *ret_bytes = (int64_t)info.st_size;
        return fd;
    }
    dir_close(fd);
    live_done(source);
    return -1;
}

ssize_t live_text(int fd, size_t most, char **ret_text)
{
    size_t room = 4096, used = 0;
    struct stat info;
    ssize_t n = 1;
    char *text;

    /* The size, which is 0 for files of /proc, and for those of /sys more than they have, only saves memory. */
    if (fstat(fd, &info) == 0 && info.st_size > 0)
        room = (size_t)info.st_size < most ? (size_t)info.st_size + 1 : most;
    text = memory_grow(NULL, room);
    while (n > 0 && used < most) {
        if (used == room)
            text = memory_grow(text, room *= 2);
        n = read(fd, text + used, (room < most ? room : most) - used);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            used += (size_t)n;
    }
    *ret_text = text;
    return n < 0 ? -1 : (ssize_t)used;
}

json_t *live_read(int fd, size_t most)
{
    char *text;
    ssize_t n = live_text(fd, most, &text);
    json_t *entry;

    if (n < 0)
        entry = errno == EAGAIN ? cache_failure(SOURCE_FAILED, "gives nothing without waiting")
                                : cache_failure_errno(errno);
    else
        entry = n > (ssize_t)SOURCE_FILE_MAX ? cache_failure(SOURCE_FAILED, "larger than 8 MiB")
                                             : json_stringn_nocheck(text, (size_t)n);
    free(text);
    return entry;
}
