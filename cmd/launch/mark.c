/* SPDX-License-Identifier: Apache-2.0 */
/*
 * mark.c - the processes of a launch on this machine, whatever their parent is.
 *
 * A new session, a double fork and mpirun's daemon all leave a process group. A process and its children keep the
 * environment that it was started with. Some programs clear it or overwrite it (setproctitle). So the descendants of
 * this process are found by their parents as well: an orphan becomes a child of the agent (PR_SET_CHILD_SUBREAPER).
 */
#include "launch_job.h"

#include "base/clock.h"
#include "common/child.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define POLL_MS 20
#define KILL_MS 2000
#define DEPTH_MAX 1000 /* levels of parents */
#define ENVIRONMENT_MAX (1u << 20)

static bool has_entry(const char *environment, size_t bytes, const char *entry)
{
    size_t length = strlen(entry) + 1;

    for (size_t at = 0; at + length <= bytes;) {
        const char *end;

        if (memcmp(environment + at, entry, length) == 0)
            return true;
        end = memchr(environment + at, '\0', bytes - at);
        if (!end)
            return false;
        at = (size_t)(end - environment) + 1;
    }
    return false;
}

/* The environment of a zombie, or of another user's process, cannot be read. */
static bool is_marked(pid_t pid, const char *entry, char *buffer)
{
    char path[64];
    size_t used = 0;
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while (used < ENVIRONMENT_MAX && (n = read(fd, buffer + used, ENVIRONMENT_MAX - used)) > 0)
        used += (size_t)n;
    close(fd);
    return has_entry(buffer, used, entry);
}

static bool is_below(pid_t pid)
{
    char state;

    for (int depth = 0; depth < DEPTH_MAX && pid > 1; depth++) {
        pid = process_parent(pid, &state);
        /* A process that has ended only waits for its parent. */
        if (state == 'Z' || state == 'X')
            return false;
        if (pid == getpid())
            return true;
    }
    return false;
}

/* Sends `signal` to all of them (0: none). Returns how many there are. */
static int signal_marked(const char *entry, int signal, char *buffer)
{
    DIR *folder = opendir("/proc");
    struct dirent *item;
    int n = 0;

    while (folder && (item = readdir(folder))) {
        pid_t pid = (pid_t)atoi(item->d_name);

        if (pid <= 1 || pid == getpid() || (!is_marked(pid, entry, buffer) && !is_below(pid)))
            continue;
        n++;
        if (signal)
            kill(pid, signal);
    }
    if (folder)
        closedir(folder);
    return n;
}

static int wait_for_end(const char *entry, int signal, int timeout_ms, bool (*is_urgent)(void), char *buffer)
{
    uint64_t until_ns = ep_deadline_ns(timeout_ms);
    int left;

    while ((left = signal_marked(entry, signal, buffer)) > 0 && ep_now_ns() < until_ns && !(is_urgent && is_urgent()))
        poll(NULL, 0, POLL_MS);
    return left;
}

int mark_kill(const char *id, int grace_ms, bool (*is_urgent)(void), int *ret_left)
{
    char *buffer = malloc(ENVIRONMENT_MAX), entry[64];
    int n = 0, left = 0;

    snprintf(entry, sizeof(entry), JOB_MARK "=%.*s", JOB_ID_BYTES, id);
    if (buffer) {
        left = n = signal_marked(entry, SIGTERM, buffer);
        /* A stopped process must continue, or it cannot handle the signal. */
        if (n > 0)
            signal_marked(entry, SIGCONT, buffer);
        if (n > 0)
            left = wait_for_end(entry, 0, grace_ms, is_urgent, buffer);
        /* Repeats: a process may fork between being found and being killed. */
        if (left > 0)
            left = wait_for_end(entry, SIGKILL, KILL_MS, NULL, buffer);
    }
    free(buffer);
    *ret_left = left;
    return n;
}
