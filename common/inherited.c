/* SPDX-License-Identifier: Apache-2.0 */
#include "inherited.h"

#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <sys/resource.h>
#include <unistd.h>

#define STACK_BYTES (8u << 20) /* the usual limit; also the default size of thread stacks */
#define STACK_LEAST (256u << 10)

/* Dispositions that the command sets, whatever it inherited. */
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

/* Signals that end a process by default and that may be sent to the command. */
static const int ending[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGALRM, SIGUSR1, SIGUSR2, SIGXCPU, SIGVTALRM, SIGPROF};

#define N_ENDING (sizeof(ending) / sizeof(ending[0]))

static struct {
    bool is_settled, has_stack;
    sigset_t mask;
    struct sigaction before[NSIG];
    struct rlimit stack;
} inherited;

/*
 * O_PATH makes a descriptor that can be neither read nor written, of a directory that exists even where nothing is
 * mounted. A program that is executed finds its stream closed, as the user left it.
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

sigset_t signals_of(const int *numbers)
{
    sigset_t set;

    sigemptyset(&set);
    for (; *numbers; numbers++)
        sigaddset(&set, *numbers);
    return set;
}

static void init_signals(void)
{
    const sigset_t none = SIGNALS(0);

    for (int number = 1; number < NSIG; number++)
        if (sigaction(number, NULL, &inherited.before[number]) != 0)
            inherited.before[number].sa_handler = SIG_DFL;
    for (size_t i = 0; i < N_WANTED; i++)
        signal(wanted[i].number, wanted[i].handler);
    for (size_t i = 0; i < N_ENDING && getpid() == 1; i++)
        if (ending[i] == SIGTERM || !inherited_is_ignored(ending[i]))
            signal(ending[i], end_at_once);
    sigprocmask(SIG_SETMASK, &none, &inherited.mask);
}

/* glibc reads the limit as the default thread stack size at process start, so the new size must be set there too. */
static void raise_stack_limit(void)
{
    pthread_attr_t attributes;
    struct rlimit limit;

    if (getrlimit(RLIMIT_STACK, &inherited.stack) != 0 || inherited.stack.rlim_cur >= STACK_BYTES)
        return;
    limit = inherited.stack;
    limit.rlim_cur = limit.rlim_max < STACK_BYTES ? limit.rlim_max : STACK_BYTES;
    if (limit.rlim_cur < STACK_LEAST) {
        dprintf(STDERR_FILENO, "epkit: error: the stack has at most %llu KiB (ulimit -Hs), and epkit needs %u\n",
                (unsigned long long)limit.rlim_cur >> 10, STACK_LEAST >> 10);
        _exit(1);
    }
    inherited.has_stack = setrlimit(RLIMIT_STACK, &limit) == 0;
    if (pthread_attr_init(&attributes) != 0)
        return;
    if (pthread_attr_setstacksize(&attributes, (size_t)limit.rlim_cur) == 0)
        pthread_setattr_default_np(&attributes);
    pthread_attr_destroy(&attributes);
}

void inherited_init(void)
{
    occupy_streams();
    init_signals();
    raise_stack_limit();
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
