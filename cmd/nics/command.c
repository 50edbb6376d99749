/* SPDX-License-Identifier: Apache-2.0 */
/*
 * command.c - runs a command between two samples of the counters.
 *
 * The command gets epkit's standard input, output and error, its signal mask and its dispositions. Signals sent to
 * epkit are forwarded, except those of the terminal, which the command receives itself.
 */
#include "common/inherited.h"
#include "common/output.h"
#include "common/supervise.h"
#include "nics.h"

#include "base/clock.h"

#include "common/clean.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define POLL_NS 200000000

struct child {
    pid_t pid;
    sigset_t signals, mask_before;
    struct sigaction children_before;
};

static int failed(const char *what, int error_number)
{
    out_error("nics: %s: %s", what, strerror(error_number));
    return CMD_FAILED;
}

static void block_signals(struct child *child)
{
    struct sigaction normal = {.sa_handler = SIG_DFL};

    sigemptyset(&child->signals);
    sigaddset(&child->signals, SIGINT);
    sigaddset(&child->signals, SIGTERM);
    sigaddset(&child->signals, SIGHUP);
    sigaddset(&child->signals, SIGQUIT);
    sigaddset(&child->signals, SIGUSR1);
    sigaddset(&child->signals, SIGUSR2);
    sigaddset(&child->signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &child->signals, &child->mask_before);
    /* If SIGCHLD is ignored, the kernel discards the exit status of a child. */
    sigaction(SIGCHLD, &normal, &child->children_before);
}

static void restore_signals(const struct child *child)
{
    sigaction(SIGCHLD, &child->children_before, NULL);
    sigprocmask(SIG_SETMASK, &child->mask_before, NULL);
}

static _Noreturn void become(const struct child *child, char **args, int error_fd)
{
    int reason;

    restore_signals(child);
    inherited_restore();
    execvp(args[0], args);
    reason = errno;
    while (write(error_fd, &reason, sizeof(reason)) < 0 && errno == EINTR)
        ;
    _exit(127);
}

/* The errno of a failed start; 0 if the command was started. */
static int start_error(int fd)
{
    int reason = 0;
    ssize_t n;

    do
        n = read(fd, &reason, sizeof(reason));
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof(reason) ? reason : 0;
}

/* *ret_reason: the errno of the start of the command, 0 if it runs. */
static int start(char **args, struct child *child, int *ret_reason)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return failed("pipe", errno);
    fflush(NULL);
    block_signals(child);
    child->pid = supervise_fork(false, ends[1]);
    if (child->pid < 0) {
        int reason = errno;

        restore_signals(child);
        close(ends[0]);
        close(ends[1]);
        return failed("fork", reason);
    }
    if (child->pid == 0)
        become(child, args, ends[1]);
    close(ends[1]);
    *ret_reason = start_error(ends[0]);
    close(ends[0]);
    return CMD_FINE;
}

/* A terminal signals the whole foreground group; the kernel marks that with process number 0. */
static bool is_for_us_alone(const siginfo_t *info)
{
    return info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
}

static int wait_for(struct nics *nics, const struct child *child)
{
    int status = 0;

    for (;;) {
        siginfo_t info;
        int signal;
        pid_t ended = waitpid(child->pid, &status, WNOHANG);

        if (ended == child->pid || (ended < 0 && errno != EINTR))
            return status;
        /* A thread of a preloaded library may take SIGCHLD: then only polling detects the exit. */
        signal = nics_wait(nics, (int64_t)ep_now_ns() + POLL_NS, &child->signals, &info);
        if (signal != SIGCHLD && signal > 0 && is_for_us_alone(&info))
            kill(child->pid, signal);
    }
}

int nics_run_command(struct nics *nics, struct nics_command *command)
{
    struct child child;
    int reason, status;

    nics_begin(nics);
    if (start(command->args, &child, &reason) != CMD_FINE)
        return CMD_FAILED;
    status = wait_for(nics, &child);
    nics_sample(nics);
    restore_signals(&child);
    command->has_started = reason == 0;
    command->signal = 0;
    if (reason) {
        char name[256];

        text_clean(command->args[0], name, sizeof(name));
        out_error("nics: '%s' could not be started: %s", name, strerror(reason));
        command->code = reason == ENOENT ? 127 : 126;
    } else if (WIFSIGNALED(status)) {
        command->signal = WTERMSIG(status);
        command->code = 128 + command->signal;
    } else {
        command->code = WEXITSTATUS(status);
    }
    return CMD_FINE;
}
