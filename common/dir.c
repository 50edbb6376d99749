/* SPDX-License-Identifier: Apache-2.0 */
#include "dir.h"

#include "memory.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#define LINKS_MAX 40 /* as in the kernel */
#define TRIES 100
#define RACES_MAX 1000 /* openat2() fails with EAGAIN when something was renamed while it resolved ".." */
#define UNMAPPED 65534 /* the owner, in a user namespace, of files of all users who are not in it */

mode_t dir_usual_mode(void)
{
    mode_t mask = umask(0);

    umask(mask);
    return (0644 & ~mask) | 0600;
}

void dir_random(char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
    unsigned char bytes[6] = {0};

    /* Without entropy, at boot, the names repeat: the caller tries again. */
    (void)!getrandom(bytes, sizeof(bytes), GRND_NONBLOCK);
    name += strlen(name) - sizeof(bytes);
    for (size_t i = 0; i < sizeof(bytes); i++)
        name[i] = letters[bytes[i] % (sizeof(letters) - 1)];
}

void dir_close(int fd)
{
    int number = errno;

    if (fd >= 0)
        close(fd);
    errno = number;
}

/* --- folders --- */

static int walk(int at, const char *path, bool make, int *n_links);

bool dir_trusts(uid_t owner)
{
    struct stat info;

    /* In a user namespace /proc/sys belongs to the machine's root, if it is mapped. */
    return owner == 0 || owner == geteuid() ||
           (stat("/proc/sys", &info) == 0 && owner == info.st_uid && owner != UNMAPPED);
}

/*
 * May the link in the folder `at` be followed? In a user namespace a link of the machine's root looks like that of any
 * other user who is not mapped: it is followed if nobody but the folder's owner can have made it.
 */
static bool trusts_link(int at, uid_t owner)
{
    struct stat info;

    return dir_trusts(owner) || (owner == UNMAPPED && fstat(at, &info) == 0 && info.st_uid == owner &&
                                 !(info.st_mode & (S_IWGRP | S_IWOTH)));
}

static bool is_on(int fd, long type)
{
    struct statfs info;

    return fstatfs(fd, &info) == 0 && (long)info.f_type == type;
}

/* Follows the link `fd`, `name` in `at`. */
static int follow(int at, const char *name, int fd, bool make, int *n_links)
{
    char target[PATH_MAX];
    ssize_t n = readlinkat(fd, "", target, sizeof(target) - 1);
    int from;

    if (n < 0)
        return -1;
    target[n] = '\0';
    /* The text of /proc/self/fd/1 need not be a path. */
    if (is_on(fd, PROC_SUPER_MAGIC))
        return openat(at, name, O_PATH | O_CLOEXEC);
    from = openat(at, ".", O_PATH | O_CLOEXEC);
    return from < 0 ? -1 : walk(from, target, make, n_links);
}

static int step(int at, const char *name, bool make, int *n_links)
{
    int fd = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC), result;
    struct stat info;

    if (fd < 0 && errno == ENOENT && make && (mkdirat(at, name, 0755) == 0 || errno == EEXIST))
        fd = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        return -1;
    /* A path that ends in "/." is mounted by the automounter. */
    if (is_on(fd, AUTOFS_SUPER_MAGIC)) {
        char inside[NAME_MAX + 3];

        close(fd);
        snprintf(inside, sizeof(inside), "%s/.", name);
        return openat(at, inside, O_PATH | O_DIRECTORY | O_CLOEXEC);
    }
    if (fstat(fd, &info) != 0 || !S_ISLNK(info.st_mode))
        return fd;
    errno = ELOOP;
    result = trusts_link(at, info.st_uid) && ++*n_links <= LINKS_MAX ? follow(at, name, fd, make, n_links) : -1;
    dir_close(fd);
    return result;
}

/* Consumes `at`. */
static int walk(int at, const char *path, bool make, int *n_links)
{
    if (*path == '/') {
        dir_close(at);
        at = open("/", O_PATH | O_CLOEXEC);
    }
    for (const char *left = path; at >= 0 && *left;) {
        struct piece part = text_take(&left, "/");
        char name[NAME_MAX + 1];
        int fd = -1;

        if (part.n == 0)
            continue;
        if (part.n < sizeof(name)) {
            snprintf(name, sizeof(name), "%.*s", (int)part.n, part.text);
            fd = step(at, name, make, n_links);
        } else {
            errno = ENAMETOOLONG;
        }
        dir_close(at);
        at = fd;
    }
    return at;
}

/* A file of any type (O_PATH). */
static int open_path(const char *path, bool make)
{
    int at = *path ? openat(AT_FDCWD, ".", O_PATH | O_CLOEXEC) : -1, n_links = 0;

    if (!*path)
        errno = ENOENT;
    return at < 0 && *path != '/' ? -1 : walk(at, path, make, &n_links);
}

static int as_folder(int fd)
{
    int folder = fd < 0 ? -1 : openat(fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC);

    dir_close(fd);
    return folder;
}

int dir_open(const char *path, bool make)
{
    return as_folder(open_path(path, make));
}

int dir_open_parent(const char *path, bool make, const char **ret_name)
{
    const char *base = text_base(path);
    char folder[PATH_MAX];

    if (base - path >= (ptrdiff_t)sizeof(folder)) {
        errno = ENAMETOOLONG;
        return -1;
    }
    snprintf(folder, sizeof(folder), "%.*s", (int)(base - path), path);
    *ret_name = base;
    return dir_open(base == path ? "." : folder, make);
}

int dir_open_in(int dir, const char *name, bool make)
{
    if (make && mkdirat(dir, name, 0755) != 0 && errno != EEXIST)
        return -1;
    return openat(dir, name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
}

int dir_make(const char *path, mode_t mode)
{
    const char *name;
    char *copy = memory_printf("%s", path);
    int dir, number = 0;

    for (size_t n = strlen(copy); n > 1 && copy[n - 1] == '/'; n--)
        copy[n - 1] = '\0';
    dir = dir_open_parent(copy, false, &name);
    if (dir < 0 || mkdirat(dir, name, mode) != 0)
        number = errno;
    dir_close(dir);
    free(copy);
    return number;
}

DIR *dir_list(int dir, const char *name)
{
    int fd = openat(dir, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *list = fd < 0 ? NULL : fdopendir(fd);

    if (!list)
        dir_close(fd);
    return list;
}

struct dirent *dir_next(DIR **list)
{
    struct dirent *entry = NULL;

    while (*list && (entry = readdir(*list)) && text_is_any(entry->d_name, TEXTS(".", "..")))
        ;
    if (*list && !entry) {
        closedir(*list);
        *list = NULL;
    }
    return entry;
}

/* --- without links --- */

int dir_resolve(int dir, const char *path, int flags, unsigned how_to_resolve)
{
    struct open_how how = {.flags = (unsigned)flags | O_CLOEXEC, .resolve = how_to_resolve | RESOLVE_NO_MAGICLINKS};
    int fd, tries = 0;

    do
        fd = (int)syscall(SYS_openat2, dir, path, &how, sizeof(how));
    while (fd < 0 && errno == EAGAIN && ++tries < RACES_MAX);
    return fd;
}

int dir_open_within(int dir, const char *path, int flags)
{
    if (dir >= 0)
        return dir_resolve(dir, path, flags, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS);
    errno = ENOENT;
    return -1;
}

/* --- files --- */

static int create(int dir, const char *name, int flags, mode_t mode)
{
    int fd = openat(dir, name, flags | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);

    /* Mounted buckets do not support modes. */
    if (fd >= 0)
        (void)!fchmod(fd, mode);
    return fd;
}

int dir_create(int dir, const char *name, mode_t mode)
{
    int fd = -1;

    errno = EEXIST;
    for (int i = 0; fd < 0 && errno == EEXIST && i < TRIES; i++)
        if (unlinkat(dir, name, 0) == 0 || errno == ENOENT)
            fd = create(dir, name, O_WRONLY, mode);
    return fd;
}

int dir_write(int dir, const char *name, const void *data, size_t bytes, mode_t mode)
{
    int fd = dir_create(dir, name, mode), number = fd < 0 ? errno : write_all(fd, data, bytes);

    if (fd >= 0 && close(fd) != 0 && number == 0)
        number = errno;
    return number;
}

/* Is the name, if it is a second one, that of the owner of both the file and the folder? */
static bool has_own_name(int dir, const struct stat *file)
{
    struct stat folder;

    return file->st_nlink <= 1 || dir == AT_FDCWD ||
           (fstat(dir, &folder) == 0 && folder.st_uid == file->st_uid && !(folder.st_mode & S_IWOTH));
}

static int open_regular(int dir, const char *name, int flags)
{
    int fd = openat(dir, name, flags | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    struct stat info;

    if (fd < 0 || (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
                   (flags == O_RDONLY ? has_own_name(dir, &info) : info.st_nlink <= 1)))
        return fd;
    close(fd);
    errno = S_ISREG(info.st_mode) ? EMLINK : EINVAL;
    return -1;
}

int dir_read_in(int dir, const char *name)
{
    return open_regular(dir, name, O_RDONLY);
}

int dir_append_in(int dir, const char *name, mode_t mode)
{
    int fd = -1;

    errno = EEXIST;
    for (int i = 0; fd < 0 && errno == EEXIST && i < TRIES; i++) {
        fd = open_regular(dir, name, O_RDWR | O_APPEND);
        if (fd < 0 && errno == ENOENT)
            fd = create(dir, name, O_RDWR | O_APPEND, mode);
    }
    return fd;
}

int dir_overwrite(const char *path)
{
    int fd = open_path(path, false), result;
    char link[40];

    if (fd < 0)
        return -1;
    /* The file that was found, whatever its name leads to now. */
    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    result = open(link, O_WRONLY | O_TRUNC | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
    dir_close(fd);
    if (result >= 0)
        (void)!fcntl(result, F_SETFL, 0); /* O_NONBLOCK is for the open() of a pipe that nobody reads */
    return result;
}

int dir_move_in(int dir, const char *from, const char *to)
{
    return renameat(dir, from, dir, to) == 0 ? 0 : errno;
}

int dir_link(const char *target, const char *path)
{
    const char *name;
    int dir = dir_open_parent(path, true, &name), number = dir < 0 || symlinkat(target, dir, name) != 0 ? errno : 0;

    dir_close(dir);
    return number;
}

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

const char *write_reason(int error_number)
{
    switch (error_number) {
    case EINVAL:
        return "it is not a regular file";
    case EFBIG:
        return "the limit of the file size is reached (ulimit -f)";
    case EMFILE:
        return "the limit of open files is reached (ulimit -n)";
    case EBADF:
        return "it is closed, or open only for reading";
    case ELOOP:
        return "a link in its path belongs to another user, or leads in a circle";
    case EMLINK:
        return "it has a second name, which may be that of another file";
    case ENXIO:
        return "it is a pipe that nobody reads, or a device that is not there";
    case ENOSYS:
        return "the system call openat2() is missing: Linux before 5.6, or a filter (seccomp)";
    default:
        return strerror(error_number);
    }
}
