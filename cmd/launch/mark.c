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
#include "common/dir.h"

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

static char buffer[ENVIRONMENT_MAX]; /* an agent that is out of memory still has to end everything */

/*
 * `entry` with a NUL in front and behind, of `length` bytes, is searched in the environment. That of a zombie, or of
 * another user's process, cannot be read.
 */
static bool is_marked(pid_t pid, const char *entry, size_t length)
{
    char path[64];
    size_t used = 1; /* the first byte stays NUL */
    ssize_t n;
    int fd;

    snprintf(path, sizeof(path), "/proc/%d/environ", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    while (used < ENVIRONMENT_MAX && (n = read(fd, buffer + used, ENVIRONMENT_MAX - used)) > 0)
        used += (size_t)n;
    close(fd);
    return memmem(buffer, used, entry, length);
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
static int signal_marked(const char *id, int signal)
{
    DIR *folder = opendir("/proc");
    struct dirent *item;
    char entry[64] = "";
    size_t length = (size_t)snprintf(entry + 1, sizeof(entry) - 1, JOB_MARK "=%.40s", id) + 2;
    int n = 0;

    while ((item = dir_next(&folder))) {
        pid_t pid = (pid_t)atoi(item->d_name);

        if (pid <= 1 || pid == getpid() || (!is_marked(pid, entry, length) && !is_below(pid)))
            continue;
        n++;
        if (signal)
            kill(pid, signal);
    }
    return n;
}

static int wait_for_end(const char *id, int signal, int timeout_ms, bool (*is_urgent)(void *context), void *context)
{
    uint64_t until_ns = ep_deadline_ns(timeout_ms);
    int left;

    while ((left = signal_marked(id, signal)) > 0 && ep_now_ns() < until_ns && !(is_urgent && is_urgent(context)))
        poll(NULL, 0, POLL_MS);
    return left;
}

int mark_kill(const char *id, int grace_ms, bool (*is_urgent)(void *context), void *context, int *ret_left)
{
    int n = signal_marked(id, SIGTERM), left = n;

    /* A stopped process must continue, or it cannot handle the signal. */
    if (n > 0)
        signal_marked(id, SIGCONT);
    if (n > 0)
        left = wait_for_end(id, 0, grace_ms, is_urgent, context);
    /* Repeats: a process may fork between being found and being killed. */
    if (left > 0)
        left = wait_for_end(id, SIGKILL, KILL_MS, NULL, NULL);
    *ret_left = left;
    return n;
}
