/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include "inherited.h"
#include "supervise.h"

#include "base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define KILL_GRACE_MS                                                                                                  \
    2000 /* a process that is blocked in the kernel (a module that loads) cannot be killed at once                     \
          */
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

/* Runs in the child. Writes to `failure`, which exec closes, why the program could not be executed. */
static void __attribute__((noreturn))
become(process_execute execute, const void *context, const int *standard, int failure)
{
    sigset_t none;
    int number;

    inherited_restore();
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    signal(SIGPIPE, SIG_DFL);
    if (dup2(standard[IN], STDIN_FILENO) >= 0 && dup2(standard[OUT], STDOUT_FILENO) >= 0 &&
        dup2(standard[ERR], STDERR_FILENO) >= 0)
        execute(context);
    number = errno;
    if (write(failure, &number, sizeof(number)) != sizeof(number))
        _exit(126);
    _exit(127);
}

/* On success our ends of the pipes stay open. 0, or errno. */
static int await_execution(const struct process *process, int failure)
{
    int number;

    setpgid(process->pid, process->pid);
    if (read(failure, &number, sizeof(number)) != sizeof(number)) {
        if (process->in >= 0)
            fcntl(process->in, F_SETFL, O_NONBLOCK);
        fcntl(process->out, F_SETFL, O_NONBLOCK);
        fcntl(process->err, F_SETFL, O_NONBLOCK);
        return 0;
    }
    waitpid(process->pid, NULL, 0);
    return number;
}

int process_fork(process_execute execute, const void *context, bool has_input, struct process *ret_process)
{
    int pipes[N_PIPES][2] = {{-1, -1}, {-1, -1}, {-1, -1}}, failure[2] = {-1, -1};
    struct process process = {.in = -1, .out = -1, .err = -1};
    int result = 0;

    if (has_input || (pipes[IN][0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        result = pipe2(pipes[IN], O_CLOEXEC);
    /* Without /dev/null, as in some containers: a pipe without a writer is empty as well. */
    if (!has_input)
        process_close_fd(&pipes[IN][1]);
    if (result != 0 || pipe2(pipes[OUT], O_CLOEXEC) != 0 || pipe2(pipes[ERR], O_CLOEXEC) != 0 ||
        pipe2(failure, O_CLOEXEC) != 0 || (process.pid = supervise_fork(true, failure[1])) < 0)
        result = errno;
    if (result == 0 && process.pid == 0)
        become(execute, context, (const int[]){pipes[IN][0], pipes[OUT][1], pipes[ERR][1]}, failure[1]);
    process_close_fd(&pipes[IN][0]);
    process_close_fd(&pipes[OUT][1]);
    process_close_fd(&pipes[ERR][1]);
    process_close_fd(&failure[1]);
    process.in = pipes[IN][1];
    process.out = pipes[OUT][0];
    process.err = pipes[ERR][0];
    if (result == 0)
        result = await_execution(&process, failure[0]);
    process_close_fd(&failure[0]);
    if (result != 0)
        process_close(&process);
    else
        *ret_process = process;
    return result;
}

struct program {
    char *const *argv;
    char *const *environment; /* NULL: the environment of this process */
};

/* The output of programs is parsed, here and where ssh passes LC_ALL on. */
static void execute_program(const void *context)
{
    const struct program *program = context;

    if (program->environment)
        environ = (char **)program->environment;
    setenv("LC_ALL", "C", 1);
    execvp(program->argv[0], program->argv);
}

int process_start(char *const *argv, char *const *environment, bool has_input, struct process *ret_process)
{
    const struct program program = {.argv = argv, .environment = environment};

    return process_fork(execute_program, &program, has_input, ret_process);
}

pid_t process_wait(pid_t pid, int options, int *ret_status)
{
    pid_t ended;

    do
        ended = waitpid(pid, ret_status, options);
    while (ended < 0 && errno == EINTR);
    if (ended >= 0)
        return ended;
    *ret_status = PROCESS_UNKNOWN << 8;
    return pid;
}

pid_t process_parent(pid_t pid, char *ret_state)
{
    char path[64], text[512];
    ssize_t n = 0;
    int fd, parent = 0;
    const char *end;

    *ret_state = 'X';
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        n = read(fd, text, sizeof(text) - 1);
        close(fd);
    }
    text[n > 0 ? n : 0] = '\0';
    /* After the name, which may contain any character. */
    end = strrchr(text, ')');
    return end && sscanf(end + 1, " %c %d", ret_state, &parent) == 2 ? (pid_t)parent : 0;
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
