/* SPDX-License-Identifier: Apache-2.0 */
#include "process/inherited.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <sys/resource.h>
#include <unistd.h>

#define STACK_BYTES (8u << 20) /* the usual limit, also of threads */

/* What the command sets, whatever it was. */
static const struct {
    int number;
    void (*handler)(int);
} wanted[] = {
    {SIGTERM, SIG_DFL},
    {SIGCHLD, SIG_DFL},
    {SIGPIPE, SIG_IGN},
    {SIGXFSZ, SIG_IGN},
};

#define N_WANTED (sizeof(wanted) / sizeof(wanted[0]))

/* What ends a process by default and may be sent to the command. */
static const int ending[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU, SIGVTALRM, SIGPROF};

#define N_ENDING (sizeof(ending) / sizeof(ending[0]))

static struct {
    bool is_settled, has_stack;
    sigset_t mask;
    struct sigaction before[NSIG];
    struct rlimit stack;
} inherited;

/*
 * O_PATH: a descriptor that can neither be read nor written, of what is there even where nothing is mounted. A program
 * that is executed finds its stream closed, as its user has it.
 */
static void occupy_streams(void)
{
    for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/", O_PATH | O_CLOEXEC) != fd)
            _exit(1);
}

static void end_at_once(int number)
{
    _exit(128 + number);
}

static void settle_signals(void)
{
    sigset_t none;

    for (int number = 1; number < NSIG; number++)
        if (sigaction(number, NULL, &inherited.before[number]) != 0)
            inherited.before[number].sa_handler = SIG_DFL;
    for (size_t i = 0; i < N_WANTED; i++)
        signal(wanted[i].number, wanted[i].handler);
    for (size_t i = 0; i < N_ENDING && getpid() == 1; i++)
        if (ending[i] == SIGTERM || !inherited_is_ignored(ending[i]))
            signal(ending[i], end_at_once);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, &inherited.mask);
}

/* Threads take the limit as their size when the process starts: it has to be told to glibc as well. */
static void settle_stack(void)
{
    pthread_attr_t attributes;
    struct rlimit limit;

    if (getrlimit(RLIMIT_STACK, &inherited.stack) != 0 || inherited.stack.rlim_cur >= STACK_BYTES)
        return;
    limit = inherited.stack;
    limit.rlim_cur = limit.rlim_max < STACK_BYTES ? limit.rlim_max : STACK_BYTES;
    inherited.has_stack = setrlimit(RLIMIT_STACK, &limit) == 0;
    if (pthread_attr_init(&attributes) != 0)
        return;
    if (pthread_attr_setstacksize(&attributes, (size_t)limit.rlim_cur) == 0)
        pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
}

void inherited_settle(void)
{
    occupy_streams();
    settle_signals();
    settle_stack();
    inherited.is_settled = true;
}

void inherited_restore(void)
{
    if (!inherited.is_settled)
        return;
    for (size_t i = 0; i < N_WANTED; i++)
        signal(wanted[i].number, inherited.before[wanted[i].number].sa_handler);
    sigprocmask(SIG_SETMASK, &inherited.mask, NULL);
    if (inherited.has_stack)
        setrlimit(RLIMIT_STACK, &inherited.stack);
}

bool inherited_is_ignored(int number)
{
    return inherited.before[number].sa_handler == SIG_IGN;
}

void inherited_broken_pipe(void)
{
    if (!inherited.is_settled || inherited_is_ignored(SIGPIPE))
        return;
    signal(SIGPIPE, SIG_DFL);
    raise(SIGPIPE);
}
