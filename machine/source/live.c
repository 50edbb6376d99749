/* SPDX-License-Identifier: Apache-2.0 */
/*
 * live.c - opens files within the root directory of a source.
 *
 * With openat2(RESOLVE_IN_ROOT) the kernel keeps the resolution within the root directory: absolute links start there
 * and ".." stops there, whatever is renamed meanwhile. Where it is missing (before Linux 5.6, or blocked by a seccomp
 * filter), a path is walked component by component without following links, which are then resolved here. On "/" there
 * is nothing to escape from, so the kernel may follow them.
 */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SELF "/proc/self"
#define LINKS_MAX 40   /* as in the kernel */
#define STEPS_MAX 4096 /* components of a walk, including those of links and ".." */
#define RACES_MAX 16   /* openat2() fails with EAGAIN when something was renamed while it resolved ".." */

static int call_openat2(const struct source *source, const char *path, int flags)
{
    struct open_how how = {.flags = (uint64_t)(flags | O_CLOEXEC), .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    long fd;
    int tries = 0;

    do
        fd = syscall(SYS_openat2, source->fd, path[0] == '/' && !path[1] ? "." : path, &how, sizeof(how));
    while (fd < 0 && errno == EAGAIN && ++tries < RACES_MAX);
    return (int)fd;
}

void live_probe(struct source *source)
{
    int fd = call_openat2(source, "/", O_PATH | O_DIRECTORY);

    source->has_openat2 = fd >= 0 || (errno != ENOSYS && errno != EPERM);
    if (fd >= 0)
        close(fd);
}

/* --- resolution without openat2() --- */

struct walk {
    struct source *source;
    int fd;              /* O_PATH of `path` */
    char path[PATH_MAX]; /* from the root directory, without links; "" the root directory itself */
    char rest[PATH_MAX]; /* still to resolve */
    int links, steps;
};

/* Prepends `front` to what remains to be resolved. */
static int put_before(struct walk *walk, const char *front, const char *rest)
{
    char joined[2 * PATH_MAX + 2];
    int n = snprintf(joined, sizeof(joined), "%s/%s", front, rest);

    if (n >= PATH_MAX) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(walk->rest, joined, (size_t)n + 1);
    return 0;
}

/* Restarts at the root directory; what remains to be resolved stays. */
static int walk_restart(struct walk *walk)
{
    int fd = openat(walk->source->fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return -1;
    if (walk->fd >= 0)
        close(walk->fd);
    walk->fd = fd;
    walk->path[0] = '\0';
    return 0;
}

/* Walks to the parent again: ".." of a folder may lead out if the folder was moved meanwhile. */
static int go_up(struct walk *walk, const char *rest)
{
    char parent[PATH_MAX];
    char *slash;

    memcpy(parent, walk->path, sizeof(parent));
    slash = strrchr(parent, '/');
    if (slash)
        *slash = '\0';
    return put_before(walk, parent, rest) < 0 ? -1 : walk_restart(walk);
}

static int walk_follow(struct walk *walk, int link, const char *rest)
{
    char target[PATH_MAX];
    ssize_t n = readlinkat(link, "", target, sizeof(target) - 1);

    if (n < 0)
        return -1;
    target[n] = '\0';
    if (++walk->links > LINKS_MAX) {
        errno = ELOOP;
        return -1;
    }
    if (put_before(walk, target, rest) < 0)
        return -1;
    return target[0] == '/' ? walk_restart(walk) : 0;
}

/* Resolves one component. `rest` follows it. */
static int walk_step(struct walk *walk, const char *name, const char *rest, int flags)
{
    size_t used = strlen(walk->path);
    struct stat info;
    int fd, result;

    fd = openat(walk->fd, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    if (fstat(fd, &info) < 0) {
        close(fd);
        return -1;
    }
    if (S_ISLNK(info.st_mode) && (rest[0] || !(flags & O_NOFOLLOW))) {
        result = walk_follow(walk, fd, rest);
        close(fd);
        return result;
    }
    if (used + strlen(name) + 2 > sizeof(walk->path)) {
        close(fd);
        errno = ENAMETOOLONG;
        return -1;
    }
    walk->path[used] = '/';
    memcpy(walk->path + used + 1, name, strlen(name) + 1);
    close(walk->fd);
    walk->fd = fd;
    memmove(walk->rest, rest, strlen(rest) + 1);
    return 0;
}

static int walk_on(struct walk *walk, int flags)
{
    char name[PATH_MAX], rest[PATH_MAX];
    const char *at = walk->rest + strspn(walk->rest, "/");
    size_t bytes = strcspn(at, "/");

    memcpy(name, at, bytes);
    name[bytes] = '\0';
    at += bytes;
    at += strspn(at, "/");
    memcpy(rest, at, strlen(at) + 1);
    if (++walk->steps > STEPS_MAX) {
        errno = ELOOP;
        return -1;
    }
    if (strcmp(name, "..") == 0)
        return go_up(walk, rest);
    if (strcmp(name, ".") == 0 || !name[0]) {
        memcpy(walk->rest, rest, strlen(rest) + 1);
        return 0;
    }
    return walk_step(walk, name, rest, flags);
}

/*
 * The path of a descriptor from the kernel (proc(5), /proc/self/fd); false without one: /proc is not mounted, or the
 * file has been removed meanwhile.
 */
static bool path_of(int fd, char ret_path[PATH_MAX])
{
    char link[32];
    struct stat info;
    ssize_t n;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    n = readlink(link, ret_path, PATH_MAX - 1);
    if (n <= 0 || ret_path[0] != '/' || fstat(fd, &info) < 0 || info.st_nlink == 0)
        return false;
    ret_path[n] = '\0';
    return true;
}

int live_resolve(struct source *source, const char *path, char *ret_path)
{
    char below[PATH_MAX], real[PATH_MAX];
    int fd = source->has_openat2 ? call_openat2(source, path, O_PATH) : -1;
    size_t n;

    /* Magic links of /proc are followed by their text. */
    if (fd < 0)
        return source->has_openat2 && errno != ELOOP && errno != EAGAIN ? -1 : live_walk(source, path, 0, ret_path);
    if (path_of(source->fd, below) && path_of(fd, real)) {
        n = below[1] ? strlen(below) : 0;
        if (strncmp(real, below, n) == 0 && (real[n] == '/' || !real[n])) {
            memcpy(ret_path, real[n] ? real + n : "/", real[n] ? strlen(real + n) + 1 : 2);
            return fd;
        }
    }
    close(fd);
    return live_walk(source, path, 0, ret_path);
}

int live_walk(struct source *source, const char *path, int flags, char *ret_path)
{
    struct walk *walk = calloc(1, sizeof(*walk));
    bool fine;
    int fd = -1, saved;

    if (!walk || strlen(path) >= PATH_MAX) {
        free(walk);
        errno = walk ? ENAMETOOLONG : ENOMEM;
        return -1;
    }
    walk->source = source;
    walk->fd = -1;
    memcpy(walk->rest, path, strlen(path) + 1);
    fine = walk_restart(walk) == 0;
    while (fine && walk->rest[strspn(walk->rest, "/")])
        fine = walk_on(walk, flags) == 0;
    if (fine) {
        fd = walk->fd;
        walk->fd = -1;
        memcpy(ret_path, walk->path[0] ? walk->path : "/", walk->path[0] ? strlen(walk->path) + 1 : 2);
    }
    saved = errno;
    if (walk->fd >= 0)
        close(walk->fd);
    free(walk);
    errno = saved;
    return fd;
}

/* Opens the resolved path: through its folder again, without following a link that may have replaced it. */
static int open_walked(struct source *source, const char *path, int flags)
{
    char real[PATH_MAX], folder[PATH_MAX], ignored[PATH_MAX];
    const char *name;
    int at = live_walk(source, path, flags, real), fd, saved;

    if (at < 0 || (flags & O_PATH)) {
        struct stat info;

        if (at >= 0 && (flags & O_DIRECTORY) && (fstat(at, &info) < 0 || !S_ISDIR(info.st_mode))) {
            close(at);
            errno = ENOTDIR;
            return -1;
        }
        return at;
    }
    close(at);
    if (!real[1])
        return openat(source->fd, ".", flags | O_CLOEXEC);
    name = strrchr(real, '/') + 1;
    memcpy(folder, real, (size_t)(name - real));
    folder[name - real] = '\0';
    at = live_walk(source, folder, O_NOFOLLOW, ignored);
    if (at < 0)
        return -1;
    fd = openat(at, name, flags | O_NOFOLLOW | O_CLOEXEC);
    saved = errno;
    close(at);
    errno = saved;
    return fd;
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
    if (source->has_openat2) {
        int fd = call_openat2(source, path, flags);

        /* If files are renamed all the time, it may never succeed: then walk. */
        if (fd >= 0 || errno != EAGAIN)
            return fd;
    }
    if (source->is_live)
        return openat(source->fd, path[1] ? path + 1 : ".", flags | O_CLOEXEC);
    return open_walked(source, path, flags);
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
    if (fd >= 0)
        close(fd);
    live_done(source);
    return -1;
}

/* Reads at most `most` bytes into *ret_text, for free(); the number read, or -1 with errno. */
static ssize_t read_text(int fd, size_t most, char **ret_text)
{
    size_t room = 4096, used = 0;
    struct stat info;
    char *text, *larger;
    ssize_t n = 1;

    /* The size, which is wrong for files of /proc and /sys, only saves reallocations of large files. */
    if (fstat(fd, &info) == 0 && info.st_size >= (off_t)room)
        room = (size_t)info.st_size < most ? (size_t)info.st_size + 1 : most;
    text = malloc(room);
    while (text && n > 0 && used < most) {
        if (used == room) {
            larger = realloc(text, room * 2);
            if (!larger) {
                free(text);
                errno = ENOMEM;
                return -1;
            }
            text = larger;
            room *= 2;
        }
        n = read(fd, text + used, (room < most ? room : most) - used);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            used += (size_t)n;
    }
    if (!text || n < 0) {
        free(text);
        return -1;
    }
    *ret_text = text;
    return (ssize_t)used;
}

static json_t *text_entry(int fd, size_t most)
{
    char *text;
    ssize_t n = read_text(fd, most, &text);
    json_t *entry;

    if (n < 0)
        return errno == EAGAIN ? cache_failure(SOURCE_FAILED, "gives nothing without waiting")
                               : cache_failure_errno(errno);
    entry = n > (ssize_t)SOURCE_FILE_MAX ? cache_failure(SOURCE_FAILED, "larger than 8 MiB")
                                         : json_stringn_nocheck(text, (size_t)n);
    free(text);
    return entry;
}

json_t *live_read(int fd)
{
    return text_entry(fd, SOURCE_FILE_MAX + 1);
}

json_t *live_read_part(int fd)
{
    return text_entry(fd, SOURCE_FILE_MAX);
}
