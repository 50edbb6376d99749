/* SPDX-License-Identifier: Apache-2.0 */
/*
 * command.c - runs a command between two samples of the counters.
 *
 * The command gets epkit's standard input, output and error, its signal mask and its dispositions. Signals sent to
 * epkit are forwarded, except those of the terminal, which the command receives itself.
 */
#include "common/child.h"
#include "common/output.h"
#include "nics.h"

#include "base/clock.h"

#include "common/clean.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define POLL_NS 200000000

struct child {
    struct process process;
    sigset_t signals, mask_before;
    struct sigaction children_before;
};

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

static void execute(const void *context)
{
    char *const *args = context;

    execvp(args[0], args);
}

/* A terminal signals the whole foreground group; the kernel marks that with process number 0. */
static bool is_for_us_alone(const siginfo_t *info)
{
    return info->si_code == SI_USER || info->si_code == SI_QUEUE || info->si_code == SI_TKILL;
}

static int wait_for(struct nics *nics, const struct child *child)
{
    int status = 0;

    while (process_wait(child->process.pid, WNOHANG, &status) == 0) {
        siginfo_t info;
        /* A thread of a preloaded library may take SIGCHLD: then only polling detects the exit. */
        int signal = nics_wait(nics, (int64_t)ep_now_ns() + POLL_NS, &child->signals, &info);

        if (signal != SIGCHLD && signal > 0 && is_for_us_alone(&info))
            kill(child->process.pid, signal);
    }
    return status;
}

void nics_run_command(struct nics *nics, struct nics_command *command)
{
    struct child child;
    int reason, status = 0;

    nics_begin(nics);
    fflush(NULL);
    block_signals(&child);
    reason = process_fork_in_place(execute, command->args, &child.process);
    if (reason == 0)
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
}
