/* SPDX-License-Identifier: Apache-2.0 */
#include "temporary.h"

#include "dir.h"
#include "memory.h"
#include "text.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANDOM "XXXXXX"
#define BASE_MAX 200 /* of the name within the temporary name; a name has at most 255 bytes */
#define TRIES 100

/* --- temporary names of dead processes --- */

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static void remove_files(int folder)
{
    DIR *list = dir_list(folder, ".");
    struct dirent *item;

    while ((item = dir_next(&list)))
        unlinkat(folder, item->d_name, 0); /* not a folder: there are none in ours */
}

/* If the lock can be taken and the name still exists, its process is dead: it holds the lock until after renaming. */
static void remove_left(int parent, const char *name)
{
    int fd = openat(parent, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat held, named;

    if (fd < 0)
        return;
    if (fstat(fd, &held) == 0 && held.st_uid == geteuid() && (S_ISREG(held.st_mode) || S_ISDIR(held.st_mode)) &&
        flock(fd, LOCK_EX | LOCK_NB) == 0 && fstatat(parent, name, &named, AT_SYMLINK_NOFOLLOW) == 0 &&
        is_same(&held, &named)) {
        if (S_ISDIR(held.st_mode))
            remove_files(fd);
        unlinkat(parent, name, S_ISDIR(held.st_mode) ? AT_REMOVEDIR : 0);
    }
    close(fd);
}

/* All names of that pattern. */
static void sweep(int parent, const char *pattern)
{
    size_t length = strlen(pattern), fixed = length - strlen(RANDOM);
    DIR *list = dir_list(parent, ".");
    struct dirent *item;

    while ((item = dir_next(&list)))
        if (strlen(item->d_name) == length && strncmp(item->d_name, pattern, fixed) == 0)
            remove_left(parent, item->d_name);
}

/* --- making one --- */

/* A descriptor, or -1 and errno. EAGAIN: a process that cleans up removed the folder before it was locked. */
static int make_folder(int parent, const char *name)
{
    int fd = -1;

    if (mkdirat(parent, name, 0700) != 0)
        return -1;
    if (fchmodat(parent, name, 0700, AT_SYMLINK_NOFOLLOW) == 0) /* umask may have removed bits */
        fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        int number = errno == ENOENT ? EAGAIN : errno;

        unlinkat(parent, name, AT_REMOVEDIR);
        errno = number;
    }
    return fd;
}

static int make_once(int parent, const char *name, bool is_folder, int *ret_fd)
{
    struct stat held, named;
    int fd, number;

    fd = is_folder ? make_folder(parent, name)
                   : openat(parent, name, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return errno == EEXIST ? EAGAIN : errno;
    /* A process that cleans up may have removed it before it was locked. */
    number = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK ? EAGAIN : 0;
    if (number == 0 && (fstat(fd, &held) != 0 || fstatat(parent, name, &named, AT_SYMLINK_NOFOLLOW) != 0 ||
                        !is_same(&held, &named) || (is_folder && held.st_uid != geteuid())))
        number = EAGAIN;
    if (number == 0)
        *ret_fd = fd;
    else
        close(fd);
    return number;
}

/* Consumes `parent` (an error number if it is negative) and the pattern of the name. */
static int make(int parent, char *pattern, bool is_folder, struct temporary *ret_temporary)
{
    int number = parent < 0 ? -parent : EAGAIN;

    *ret_temporary = (struct temporary){.fd = -1, .parent = parent, .is_folder = is_folder};
    if (parent >= 0)
        sweep(parent, pattern);
    for (int i = 0; number == EAGAIN && i < TRIES; i++) {
        dir_random(pattern);
        number = make_once(parent, pattern, is_folder, &ret_temporary->fd);
    }
    if (number == 0) {
        ret_temporary->name = pattern;
        return 0;
    }
    free(pattern);
    dir_close(parent);
    return number;
}

int temporary_file(int parent, const char *name, struct temporary *ret_temporary)
{
    int own = openat(parent, ".", O_PATH | O_CLOEXEC);

    return make(own < 0 ? -errno : own, memory_printf(".%.*s.epkit-" RANDOM, BASE_MAX, name), false, ret_temporary);
}

/* In a folder of another user the name could be replaced at any time, unless only the owner of a name may do that. */
static int open_parent(const char *path)
{
    int fd = dir_open(path, false);
    struct stat info;

    if (fd < 0)
        return -errno;
    if (fstat(fd, &info) == 0 && (dir_trusts(info.st_uid) || (info.st_mode & S_ISVTX)))
        return fd;
    close(fd);
    return -EPERM;
}

int temporary_folder_in(const char *parent, const char *name, struct temporary *ret_temporary)
{
    int number = make(open_parent(parent), memory_printf("%s-" RANDOM, name), true, ret_temporary);

    if (number == 0)
        ret_temporary->path = memory_printf("%s/%s", parent, ret_temporary->name);
    return number;
}

/* --- its end --- */

static void forget(struct temporary *temporary)
{
    close(temporary->fd);
    close(temporary->parent);
    free(temporary->name);
    free(temporary->path);
    *temporary = (struct temporary){.fd = -1};
}

int temporary_rename(struct temporary *temporary, const char *name)
{
    if (renameat(temporary->parent, temporary->name, temporary->parent, name) != 0)
        return errno;
    forget(temporary);
    return 0;
}

void temporary_remove(struct temporary *temporary)
{
    if (!temporary->name)
        return;
    if (temporary->is_folder)
        remove_files(temporary->fd);
    unlinkat(temporary->parent, temporary->name, temporary->is_folder ? AT_REMOVEDIR : 0);
    forget(temporary);
}

void temporary_hold_signals(sigset_t *ret_before)
{
    sigset_t all;

    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, ret_before);
}

void temporary_release_signals(const sigset_t *before)
{
    pthread_sigmask(SIG_SETMASK, before, NULL);
}

bool temporary_is_interrupted(void)
{
    static const int ending[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    struct sigaction action;
    sigset_t pending;

    if (sigpending(&pending) != 0)
        return false;
    /* An ignored signal is pending as well while it is blocked. */
    return ANY_OF(i, COUNT(ending),
                  sigismember(&pending, ending[i]) > 0 && sigaction(ending[i], NULL, &action) == 0 &&
                      action.sa_handler != SIG_IGN);
}

int temporary_save_in(int parent, const char *name, const char *text, size_t bytes, mode_t mode)
{
    struct temporary temporary;
    sigset_t before;
    int number;

    temporary_hold_signals(&before);
    number = temporary_file(parent, name, &temporary);
    if (number == 0)
        number = write_all(temporary.fd, text, bytes);
    /* File systems without fsync() fail with EINVAL. */
    if (number == 0 && (fchmod(temporary.fd, mode) != 0 || (fsync(temporary.fd) != 0 && errno != EINVAL)))
        number = errno;
    if (number == 0)
        number = temporary_rename(&temporary, name);
    temporary_remove(&temporary);
    temporary_release_signals(&before);
    return number;
}

/* Renaming over a device or a pipe would remove it, for all who use it. /dev/stdout may lead to a file, and is none. */
static bool is_replaceable(const char *dest)
{
    char target[sizeof("/proc/")] = "";
    struct stat info;

    return (stat(dest, &info) != 0 || S_ISREG(info.st_mode)) &&
           (readlink(dest, target, sizeof(target) - 1) < 0 || strcmp(target, "/proc/") != 0);
}

int temporary_save(const char *dest, const char *text, size_t bytes, mode_t mode)
{
    const char *name;
    int parent = dir_open_parent(dest, false, &name), number = parent < 0 ? errno : is_replaceable(dest) ? 0 : EINVAL;

    if (number == 0)
        number = temporary_save_in(parent, name, text, bytes, mode);
    dir_close(parent);
    return number;
}
