/* SPDX-License-Identifier: Apache-2.0 */
#include "supervise.h"

#include "base/clock.h"
#include "child.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#define TICK_NS 999000000 /* a thread of a preloaded library may consume a signal */
#define TERM_GRACE_MS 3000
#define KILL_GRACE_MS 5000 /* processes that are stuck in the kernel are left to init */
#define PARENT_DIED SIGRTMAX

static void mark_parent_died(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, PARENT_DIED);
    /* The signal is sent only for a death after prctl(). */
    if (getppid() != parent)
        raise(PARENT_DIED);
}

/* Ends with the exit code or signal of the program. */
static _Noreturn void exit_like(int status)
{
    const struct rlimit no_core = {0};
    sigset_t mine;

    if (WIFEXITED(status))
        _exit(WEXITSTATUS(status));
    setrlimit(RLIMIT_CORE, &no_core);
    signal(WTERMSIG(status), SIG_DFL);
    sigemptyset(&mine);
    sigaddset(&mine, WTERMSIG(status));
    raise(WTERMSIG(status));
    sigprocmask(SIG_UNBLOCK, &mine, NULL);
    _exit(128 + WTERMSIG(status));
}

/* Orphans are reparented to this process, so each pass finds the next generation of descendants. */
static void kill_children(void)
{
    DIR *folder = opendir("/proc");
    struct dirent *entry;
    char state;

    while (folder && (entry = readdir(folder)))
        if (isdigit((unsigned char)entry->d_name[0]) && process_parent(atoi(entry->d_name), &state) == getpid())
            kill((pid_t)atoi(entry->d_name), SIGKILL);
    if (folder)
        closedir(folder);
}

/* The program may end its own children, as mpirun does. What remains afterwards is killed. */
static _Noreturn void end_program(pid_t program)
{
    const struct timespec tick = {.tv_nsec = 20000000};
    uint64_t kill_ns = ep_deadline_ns(TERM_GRACE_MS), leave_ns = ep_deadline_ns(TERM_GRACE_MS + KILL_GRACE_MS);
    pid_t ended;

    kill(program, SIGTERM);
    kill(program, SIGCONT);
    while (ep_now_ns() < leave_ns) {
        while ((ended = waitpid(-1, NULL, WNOHANG)) > 0)
            if (ended == program)
                kill_ns = 0;
        if (ended < 0 && errno == ECHILD)
            break;
        if (ep_now_ns() >= kill_ns)
            kill_children();
        nanosleep(&tick, NULL);
    }
    _exit(1);
}

static _Noreturn void supervise(pid_t program, pid_t parent)
{
    const struct timespec tick = {.tv_nsec = TICK_NS};
    sigset_t all;
    int status;

    sigfillset(&all);
    closefrom(STDERR_FILENO + 1);
    for (;;) {
        siginfo_t info;
        int number = sigtimedwait(&all, &info, &tick);
        pid_t ended;

        if (number == PARENT_DIED || getppid() != parent)
            end_program(program);
        if (number > 0 && number != SIGCHLD && info.si_pid == parent)
            kill(program, number);
        while ((ended = waitpid(-1, &status, WNOHANG)) > 0)
            if (ended == program)
                exit_like(status);
    }
}

/* The supervisor; returns only in the program's process. */
static void start(bool own_group, int failure_fd, pid_t parent, const sigset_t *mask)
{
    pid_t me = getpid(), program;
    int reason;

    if (own_group)
        setpgid(0, 0);
    signal(SIGCHLD, SIG_DFL);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    mark_parent_died(parent);
    program = fork();
    if (program > 0)
        supervise(program, parent);
    if (program < 0) {
        reason = errno;
        _exit(write(failure_fd, &reason, sizeof(reason)) < 0 ? 126 : 127);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != me)
        _exit(1);
    sigprocmask(SIG_SETMASK, mask, NULL);
}

pid_t supervise_fork(bool own_group, int failure_fd)
{
    pid_t parent = getpid(), pid;
    sigset_t all, mask;
    int reason;

    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &mask);
    pid = fork();
    if (pid == 0) {
        start(own_group, failure_fd, parent, &mask);
        return 0;
    }
    reason = errno;
    sigprocmask(SIG_SETMASK, &mask, NULL);
    errno = reason;
    return pid;
}
