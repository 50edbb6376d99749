/* SPDX-License-Identifier: Apache-2.0 */
/*
 * child.h - other programs, which do not outlive this process.
 *
 * Between this process and the program there is another one, the supervisor. It ends as the program does, with the same
 * exit code or signal, and forwards signals that this process sends it. When this process dies, also by SIGKILL, the
 * program and all its descendants get SIGTERM, and 3 s later SIGKILL. Processes that the program leaves behind while
 * this process lives are not touched.
 */
#ifndef EP_COMMON_CHILD_H
#define EP_COMMON_CHILD_H

#include <stdbool.h>
#include <stddef.h>
#include <sys/types.h>

struct process {
    pid_t pid;        /* of the supervisor; 0: no program runs */
    int in, out, err; /* our ends, non-blocking and close-on-exec; -1: no pipe */
};

/*
 * Starts argv[0], searched in PATH, and waits until it is executed. It has the environment of this process, with
 * LC_ALL=C, and an empty standard input. The program and its supervisor are a process group. Limits and dispositions of
 * signals are as this process inherited them (inherited.h), and no signal is blocked. 0, or the errno of the failure;
 * then nothing runs and no descriptor is open.
 */
int process_start(char *const *argv, struct process *ret_process);

/*
 * process_fork() starts a child that needs more than an argv: `execute` runs in it, with the standard streams in place.
 * It returns only when it cannot execute a program, with errno. Standard input is a pipe if `has_input`.
 */
typedef void (*process_execute)(const void *context);
int process_fork(process_execute execute, const void *context, bool has_input, struct process *ret_process);

/* For process_fork(): executes a program, by its argv, without the libraries that are preloaded here. */
void process_execute_bare(const void *argv);

/*
 * process_fork_in_place() starts a program that replaces this process for its user: it has the standard streams of this
 * process, its process group, and the signal mask that this process inherited. There are no pipes.
 */
int process_fork_in_place(process_execute execute, const void *context, struct process *ret_process);

/*
 * Reads what a pipe has, by at most `reads` calls: a program that writes without end must still reach its deadline.
 * `on_data` may close the pipe. At its end the pipe is closed, and *fd is -1.
 */
void process_read(int *fd, int reads, void (*on_data)(void *context, const char *data, size_t bytes), void *context);

#define PROCESS_UNKNOWN 255

/*
 * waitpid() for an own child, with WNOHANG or 0: its PID when it has ended, 0 while it runs. If another thread reaped
 * it, its status is unknown: the exit status is then PROCESS_UNKNOWN, because it may have failed.
 */
pid_t process_wait(pid_t pid, int options, int *ret_status);

/* The parent PID of a process, and its state letter of proc(5), 'Z' for a zombie; 0: there is no such process. */
pid_t process_parent(pid_t pid, char *ret_state);

/*
 * Kills the process group and waits for its leader, for at most two seconds: a process that is blocked in the kernel is
 * left behind. Closes the pipes. Does nothing if no program runs.
 */
void process_kill(struct process *process);

/* Closes the pipes. */
void process_close(struct process *process);

/* Closes *fd unless it is -1, and sets it to -1. */
void process_close_fd(int *fd);

#endif
