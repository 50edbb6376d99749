/* SPDX-License-Identifier: Apache-2.0 */
#include "temporary.h"

#include "text.h"
#include "write.h"

#include <dirent.h>
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

/* --- names --- */

/* NULL: out of memory. */
static char *pattern_of(const char *dest)
{
    const char *base = text_base(dest);
    char *pattern;

    return asprintf(&pattern, "%s%.*s.%.*s.epkit-" RANDOM, base == dest ? "./" : "", (int)(base - dest), dest, BASE_MAX,
                    base) < 0
               ? NULL
               : pattern;
}

/* --- temporary names of dead processes --- */

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

static void remove_files(int folder)
{
    int fd = dup(folder);
    DIR *stream = fd < 0 ? NULL : fdopendir(fd);
    struct dirent *item;

    if (!stream && fd >= 0)
        close(fd);
    while (stream && (item = readdir(stream)))
        if (strcmp(item->d_name, ".") != 0 && strcmp(item->d_name, "..") != 0)
            unlinkat(folder, item->d_name, 0); /* not a folder: there are none in ours */
    if (stream)
        closedir(stream);
}

/*
 * If the lock can be taken and the name still exists, its process is dead: a running one holds the lock beyond the
 * renaming.
 */
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
static void sweep(const char *pattern)
{
    const char *name = strrchr(pattern, '/') + 1;
    size_t length = strlen(name), fixed = length - strlen(RANDOM);
    char *parent = strndup(pattern, (size_t)(name - pattern));
    DIR *stream = parent ? opendir(parent) : NULL;
    struct dirent *item;

    while (stream && (item = readdir(stream)))
        if (strlen(item->d_name) == length && strncmp(item->d_name, name, fixed) == 0)
            remove_left(dirfd(stream), item->d_name);
    if (stream)
        closedir(stream);
    free(parent);
}

/* --- making one --- */

/* A descriptor, or -1 and errno. EAGAIN: a process that cleans up removed the folder before it was locked. */
static int make_folder(char *path)
{
    int fd = -1;

    if (!mkdtemp(path))
        return -1;
    if (chmod(path, 0700) == 0) /* umask may have removed bits */
        fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0) {
        int number = errno == ENOENT ? EAGAIN : errno;

        rmdir(path);
        errno = number;
    }
    return fd;
}

static int make_once(char *path, bool is_folder, int *ret_fd)
{
    struct stat held, named;
    int fd, number;

    fd = is_folder ? make_folder(path) : mkostemp(path, O_CLOEXEC);
    if (fd < 0)
        return errno;
    /* A process that cleans up may have removed it before it was locked. */
    number = flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK ? EAGAIN : 0;
    if (number == 0 && (fstat(fd, &held) != 0 || lstat(path, &named) != 0 || !is_same(&held, &named)))
        number = EAGAIN;
    if (number == 0)
        *ret_fd = fd;
    else
        close(fd);
    return number;
}

/* Consumes the pattern; NULL: there was no memory for it. */
static int make(char *pattern, bool is_folder, struct temporary *ret_temporary)
{
    int number = pattern ? EAGAIN : ENOMEM;
    char *path = NULL;

    *ret_temporary = (struct temporary){.fd = -1, .is_folder = is_folder};
    if (pattern)
        sweep(pattern);
    for (int i = 0; number == EAGAIN && i < TRIES; i++) {
        free(path);
        path = strdup(pattern);
        number = path ? make_once(path, is_folder, &ret_temporary->fd) : ENOMEM;
    }
    if (number == 0)
        ret_temporary->path = path;
    else
        free(path);
    free(pattern);
    return number;
}

int temporary_file(const char *dest, struct temporary *ret_temporary)
{
    return make(pattern_of(dest), false, ret_temporary);
}

int temporary_folder_in(const char *parent, const char *name, struct temporary *ret_temporary)
{
    char *pattern;

    return make(asprintf(&pattern, "%s/%s-" RANDOM, parent, name) < 0 ? NULL : pattern, true, ret_temporary);
}

int temporary_write(const struct temporary *temporary, const char *text, size_t bytes)
{
    return write_all(temporary->fd, text, bytes);
}

/* --- its end --- */

static void forget(struct temporary *temporary)
{
    if (temporary->fd >= 0)
        close(temporary->fd);
    free(temporary->path);
    *temporary = (struct temporary){.fd = -1};
}

int temporary_rename(struct temporary *temporary, const char *dest)
{
    if (rename(temporary->path, dest) != 0)
        return errno;
    forget(temporary);
    return 0;
}

void temporary_remove(struct temporary *temporary)
{
    if (temporary->path && temporary->is_folder) {
        remove_files(temporary->fd);
        rmdir(temporary->path);
    } else if (temporary->path) {
        unlink(temporary->path);
    }
    if (temporary->path)
        forget(temporary);
}

mode_t temporary_usual_mode(void)
{
    mode_t mask = umask(0);

    umask(mask);
    return (0644 & ~mask) | 0600;
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
    for (size_t i = 0; i < sizeof(ending) / sizeof(ending[0]); i++)
        if (sigismember(&pending, ending[i]) > 0 && sigaction(ending[i], NULL, &action) == 0 &&
            action.sa_handler != SIG_IGN)
            return true;
    return false;
}

int temporary_save(const char *dest, const char *text, size_t bytes, mode_t mode)
{
    struct temporary temporary;
    sigset_t before;
    int number;

    temporary_hold_signals(&before);
    number = temporary_file(dest, &temporary);
    if (number == 0)
        number = temporary_write(&temporary, text, bytes);
    /* File systems without fsync() fail with EINVAL. */
    if (number == 0 && (fchmod(temporary.fd, mode) != 0 || (fsync(temporary.fd) != 0 && errno != EINVAL)))
        number = errno;
    if (number == 0)
        number = temporary_rename(&temporary, dest);
    temporary_remove(&temporary);
    temporary_release_signals(&before);
    return number;
}
