/* SPDX-License-Identifier: Apache-2.0 */
#include "process/process.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILL_GRACE_MS 2000 /* a process inside the kernel (a module that loads) cannot be killed at once */
#define KILL_POLL_MS 5

extern char **environ;

const char *const process_preloads[] = {"LD_PRELOAD", "LD_AUDIT", "EPKIT_PRELOAD", NULL};

enum { IN, OUT, ERR, N_PIPES };

void process_close_fd(int *fd)
{
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

void process_close(struct process *process)
{
    process_close_fd(&process->in);
    process_close_fd(&process->out);
    process_close_fd(&process->err);
}

/* In the child. Reports through `failure`, which exec closes, why the program could not be executed. */
static void __attribute__((noreturn))
execute(char *const *argv, char *const *environment, const int *standard, int failure, pid_t parent)
{
    sigset_t none;
    int number;

    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent)
        _exit(1);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(standard[IN], STDIN_FILENO) >= 0 && dup2(standard[OUT], STDOUT_FILENO) >= 0 &&
        dup2(standard[ERR], STDERR_FILENO) >= 0)
        execvpe(argv[0], argv, environment ? environment : environ);
    number = errno;
    if (write(failure, &number, sizeof(number)) != sizeof(number))
        _exit(126);
    _exit(127);
}

int process_start(char *const *argv, char *const *environment, bool has_input, struct process *ret_process)
{
    int pipes[N_PIPES][2] = {{-1, -1}, {-1, -1}, {-1, -1}}, failure[2] = {-1, -1};
    struct process process = {.in = -1, .out = -1, .err = -1};
    pid_t parent = getpid();
    int result = 0, number;

    if (has_input)
        result = pipe2(pipes[IN], O_CLOEXEC);
    else
        result = (pipes[IN][0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0;
    if (result != 0 || pipe2(pipes[OUT], O_CLOEXEC) != 0 || pipe2(pipes[ERR], O_CLOEXEC) != 0 ||
        pipe2(failure, O_CLOEXEC) != 0 || (process.pid = fork()) < 0)
        result = errno;
    if (result == 0 && process.pid == 0) {
        const int standard[N_PIPES] = {pipes[IN][0], pipes[OUT][1], pipes[ERR][1]};

        execute(argv, environment, standard, failure[1], parent);
    }
    process_close_fd(&pipes[IN][0]);
    process_close_fd(&pipes[OUT][1]);
    process_close_fd(&pipes[ERR][1]);
    process_close_fd(&failure[1]);
    if (result == 0) {
        setpgid(process.pid, process.pid);
        if (read(failure[0], &number, sizeof(number)) == sizeof(number)) {
            result = number;
            waitpid(process.pid, NULL, 0);
        }
    }
    process_close_fd(&failure[0]);
    process.in = pipes[IN][1];
    process.out = pipes[OUT][0];
    process.err = pipes[ERR][0];
    if (result != 0) {
        process_close(&process);
        return result;
    }
    if (process.in >= 0)
        fcntl(process.in, F_SETFL, O_NONBLOCK);
    fcntl(process.out, F_SETFL, O_NONBLOCK);
    fcntl(process.err, F_SETFL, O_NONBLOCK);
    *ret_process = process;
    return 0;
}

void process_kill(struct process *process)
{
    uint64_t until_ns = ep_deadline_ns(KILL_GRACE_MS);

    if (process->pid > 0) {
        kill(-process->pid, SIGKILL);
        kill(process->pid, SIGKILL);
        while (waitpid(process->pid, NULL, WNOHANG) == 0 && ep_now_ns() < until_ns)
            poll(NULL, 0, KILL_POLL_MS);
        process->pid = 0;
    }
    process_close(process);
}

static bool is_one_of(const char *entry, const char *const *names)
{
    for (; *names; names++)
        if (strncmp(entry, *names, strlen(*names)) == 0 && entry[strlen(*names)] == '=')
            return true;
    return false;
}

char **process_environment(const char *const *except)
{
    size_t n = 0, kept = 0;
    char **copy;

    while (environ[n])
        n++;
    copy = calloc(n + 1, sizeof(*copy));
    for (size_t i = 0; copy && i < n; i++)
        if (!is_one_of(environ[i], except))
            copy[kept++] = environ[i];
    return copy;
}
