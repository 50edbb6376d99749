/* SPDX-License-Identifier: Apache-2.0 */
/* open.c - opens a source: this machine, a folder with or without an overlay, or the file of a snapshot. */
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define SNAPSHOT_MAX (32u << 20) /* bytes of the file of a snapshot or an overlay */

bool source_is_live(const struct source *source)
{
    return source->is_live;
}

bool source_is_self(const struct source *source)
{
    return source->is_live && !source->process;
}

const char *source_name(const struct source *source)
{
    return source->name;
}

ep_status source_set_process(struct source *source, pid_t pid)
{
    char path[64];
    struct stat info;
    int fd;

    if (!source->is_live)
        return ep_fail(EP_E_ARG, "process %d: %s is not this machine, so its processes cannot be read", (int)pid,
                       source->name);
    if (source->has_read)
        return ep_fail(EP_E_STATE, "process %d: the machine has been read already", (int)pid);
    if (pid <= 0)
        return ep_fail(EP_E_ARG, "process %d: a process number is 1 or more", (int)pid);
    snprintf(path, sizeof(path), "/proc/%d", (int)pid);
    fd = live_open(source, path, O_PATH | O_DIRECTORY);
    if (fd < 0 || fstat(fd, &info) < 0) {
        dir_close(fd);
        return ep_fail(EP_E_ARG, "process %d: no such process", (int)pid);
    }
    close(fd);
    source->process = pid;
    return EP_OK;
}

/* --- opening --- */

/* The argument may be valid and this process lack resources: that is not an error of the caller. */
static ep_status fail_open(int error, const char *what)
{
    bool lacks = error == EMFILE || error == ENFILE || error == ENOMEM || error == EIO;

    return ep_fail_errno(lacks ? EP_E_SYSTEM : EP_E_ARG, error, "%s: cannot be opened", what);
}

/* Loads a whole regular file that the user named, as opposed to a file within a source. */
static ep_status load_document(struct source *source, int fd, const char *what)
{
    struct stat info;
    ep_status status;
    char *text;
    ssize_t n;

    if (fstat(fd, &info) < 0 || !S_ISREG(info.st_mode))
        return ep_fail(EP_E_ARG, "%s: is neither a folder nor the file of a snapshot", what);
    if (info.st_size > SNAPSHOT_MAX)
        return ep_fail(EP_E_ARG, "%s: is larger than 32 MiB, so it is not a snapshot", what);
    n = live_text(fd, SNAPSHOT_MAX, &text);
    status = n < 0 ? ep_fail_errno(EP_E_ARG, errno, "%s: cannot be read", what)
                   : snapshot_load(source, what, text, (size_t)n);
    free(text);
    return status;
}

static ep_status load_overlay(struct source *source)
{
    char what[PATH_MAX + sizeof(SOURCE_OVERLAY) + 1];
    ep_status status;
    int fd = live_open(source, "/" SOURCE_OVERLAY, O_RDONLY | O_NONBLOCK | O_NOCTTY);

    if (fd < 0 && errno == ENOENT)
        return EP_OK;
    snprintf(what, sizeof(what), "%s/%s", source->name, SOURCE_OVERLAY);
    if (fd < 0)
        return fail_open(errno, what);
    status = load_document(source, fd, what);
    close(fd);
    json_object_update(source->overlay_files, source->cached[CACHE_FILES]);
    return status;
}

static ep_status open_folder(struct source *source, const char *from)
{
    source->fd = open(from, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (source->fd < 0)
        return fail_open(errno, from);
    live_probe(source);
    if (!source->has_openat2 && !source->is_live)
        return ep_fail(EP_E_SYSTEM, "%s: cannot be read: %s", from, write_reason(ENOSYS));
    return source->is_live ? EP_OK : load_overlay(source);
}

static ep_status open_snapshot(struct source *source, const char *from)
{
    int fd = open(from, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    ep_status status;

    if (fd < 0)
        return fail_open(errno, from);
    status = load_document(source, fd, from);
    close(fd);
    return status;
}

ep_status source_open(const char *from, struct source **ret_source)
{
    bool is_live = !from || strcmp(from, "/") == 0;
    struct stat info;
    struct source *source;
    ep_status status;

    if (!is_live && stat(from, &info) < 0)
        return fail_open(errno, from);
    source = source_new(is_live ? "this machine" : from);
    source->is_live = is_live;
    status = is_live || S_ISDIR(info.st_mode) ? open_folder(source, is_live ? "/" : from) : open_snapshot(source, from);
    if (status != EP_OK) {
        source_free(source);
        return status;
    }
    *ret_source = source;
    return EP_OK;
}
