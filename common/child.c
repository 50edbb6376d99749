/* SPDX-License-Identifier: Apache-2.0 */
#include "child.h"

#include "dir.h"
#include "inherited.h"

#include "base/clock.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

/* A process that is blocked in the kernel (a module that loads) cannot be killed at once. */
#define KILL_GRACE_MS 2000
#define KILL_POLL_MS 5
#define SUPERVISOR_TICK_NS 999000000 /* a thread of a preloaded library may consume a signal */
#define TERM_GRACE_MS 3000
#define LEAVE_GRACE_MS 5000 /* processes that are stuck in the kernel are left to init */
#define PARENT_DIED SIGRTMAX

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

/* --- the supervisor --- */

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

    while ((entry = dir_next(&folder)))
        if (isdigit((unsigned char)entry->d_name[0]) && process_parent(atoi(entry->d_name), &state) == getpid())
            kill((pid_t)atoi(entry->d_name), SIGKILL);
}

/* The program may end its own children, as mpirun does. What remains afterwards is killed. */
static _Noreturn void end_program(pid_t program)
{
    const struct timespec tick = {.tv_nsec = 20000000};
    uint64_t kill_ns = ep_deadline_ns(TERM_GRACE_MS), leave_ns = ep_deadline_ns(TERM_GRACE_MS + LEAVE_GRACE_MS);
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
    const struct timespec tick = {.tv_nsec = SUPERVISOR_TICK_NS};
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
static void run_supervisor(bool own_group, int failure_fd, pid_t parent, const sigset_t *mask)
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

/*
 * fork(), with the supervisor in between. Returns 0 in the child, which is to execute a program; in the caller the PID
 * of the supervisor, or -1 with errno. With `own_group` the supervisor leads a process group, so that both can be
 * killed together. `failure_fd`, which exec closes, receives an int, errno, when there can be no child.
 */
static pid_t supervise_fork(bool own_group, int failure_fd)
{
    pid_t parent = getpid(), pid;
    sigset_t all, mask;
    int reason;

    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &mask);
    pid = fork();
    if (pid == 0) {
        run_supervisor(own_group, failure_fd, parent, &mask);
        return 0;
    }
    reason = errno;
    sigprocmask(SIG_SETMASK, &mask, NULL);
    errno = reason;
    return pid;
}

/* --- starting a program --- */

/* Runs in the child. Writes to `failure`, which exec closes, why the program could not be executed. */
static void __attribute__((noreturn))
become(process_execute execute, const void *context, const int *standard, int failure)
{
    sigset_t none;
    int number;

    inherited_restore();
    if (standard) {
        sigemptyset(&none);
        sigprocmask(SIG_SETMASK, &none, NULL);
        signal(SIGPIPE, SIG_DFL);
    }
    if (!standard || (dup2(standard[IN], STDIN_FILENO) >= 0 && dup2(standard[OUT], STDOUT_FILENO) >= 0 &&
                      dup2(standard[ERR], STDERR_FILENO) >= 0))
        execute(context);
    number = errno;
    if (write(failure, &number, sizeof(number)) != sizeof(number))
        _exit(126);
    _exit(127);
}

/* Forks, and waits until the program is executed. `standard`: its streams; NULL: in place. 0, or errno. */
static int fork_and_execute(process_execute execute, const void *context, const int *standard, pid_t *ret_pid)
{
    int failure[2], number = 0;
    ssize_t n;
    pid_t pid;

    if (pipe2(failure, O_CLOEXEC) != 0)
        return errno;
    pid = supervise_fork(standard != NULL, failure[1]);
    if (pid == 0)
        become(execute, context, standard, failure[1]);
    if (pid < 0)
        number = errno;
    close(failure[1]);
    if (pid > 0) {
        if (standard)
            setpgid(pid, pid);
        do
            n = read(failure[0], &number, sizeof(number));
        while (n < 0 && errno == EINTR);
        if (n == sizeof(number))
            waitpid(pid, NULL, 0);
        else
            number = 0;
    }
    close(failure[0]);
    *ret_pid = pid;
    return number;
}

int process_fork(process_execute execute, const void *context, bool has_input, struct process *ret_process)
{
    int pipes[N_PIPES][2] = {{-1, -1}, {-1, -1}, {-1, -1}};
    struct process process = {.in = -1, .out = -1, .err = -1};
    int result = 0;

    if (has_input || (pipes[IN][0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0)
        result = pipe2(pipes[IN], O_CLOEXEC);
    /* Without /dev/null, as in some containers: a pipe without a writer is empty as well. */
    if (!has_input)
        process_close_fd(&pipes[IN][1]);
    if (result != 0 || pipe2(pipes[OUT], O_CLOEXEC) != 0 || pipe2(pipes[ERR], O_CLOEXEC) != 0)
        result = errno;
    else
        result =
            fork_and_execute(execute, context, (const int[]){pipes[IN][0], pipes[OUT][1], pipes[ERR][1]}, &process.pid);
    process_close_fd(&pipes[IN][0]);
    process_close_fd(&pipes[OUT][1]);
    process_close_fd(&pipes[ERR][1]);
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

int process_fork_in_place(process_execute execute, const void *context, struct process *ret_process)
{
    struct process process = {.in = -1, .out = -1, .err = -1};
    int result = fork_and_execute(execute, context, NULL, &process.pid);

    if (result == 0)
        *ret_process = process;
    return result;
}

/* The output of programs is parsed, here and where ssh passes LC_ALL on. */
static void execute_program(const void *argv)
{
    setenv("LC_ALL", "C", 1);
    execvp(*(char *const *)argv, argv);
}

void process_execute_bare(const void *argv)
{
    unsetenv("LD_PRELOAD");
    unsetenv("LD_AUDIT");
    unsetenv("EPKIT_PRELOAD");
    execute_program(argv);
}

int process_start(char *const *argv, struct process *ret_process)
{
    return process_fork(execute_program, argv, false, ret_process);
}

/* --- output and end --- */

void process_read(int *fd, int reads, void (*on_data)(void *context, const char *data, size_t bytes), void *context)
{
    char data[32768];

    for (int i = 0; i < reads && *fd >= 0; i++) {
        ssize_t n = read(*fd, data, sizeof(data));

        if (n < 0 && errno == EAGAIN)
            return;
        if (n > 0)
            on_data(context, data, (size_t)n);
        else if (n == 0 || errno != EINTR)
            process_close_fd(fd);
    }
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
    int fd, parent = 0;
    ssize_t n;
    const char *end;

    *ret_state = 'X';
    snprintf(path, sizeof(path), "/proc/%d/stat", (int)pid);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    n = read(fd, text, sizeof(text) - 1);
    process_close_fd(&fd);
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
