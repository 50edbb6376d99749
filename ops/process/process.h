/* SPDX-License-Identifier: Apache-2.0 */
/* process.h - starts another program with pipes, in a process group of its own that does not outlive this process. */
#ifndef EP_OPS_PROCESS_H
#define EP_OPS_PROCESS_H

#include <stdbool.h>
#include <sys/types.h>

struct process {
    pid_t pid;        /* 0: none runs */
    int in, out, err; /* our ends, non-blocking and close-on-exec; -1: none */
};

/*
 * Starts argv[0], searched in PATH, and waits until it is executed. `environment` (ends with NULL) is its whole
 * environment, but for LC_ALL=C; NULL: that of this process. Standard input is a pipe if `has_input`, else empty.
 * Signals and limits are as this process inherited them (inherited.h). When the thread that started it ends, the
 * program is ended with all that it has started (supervise.h). 0, or the errno of what failed; then nothing runs and
 * nothing is open.
 */
int process_start(char *const *argv, char *const *environment, bool has_input, struct process *ret_process);

/*
 * The same for what is more than a program and its environment: `execute` runs in the child, with the standard streams
 * in place, and returns only when it cannot execute anything, with errno.
 */
typedef void (*process_become)(const void *context);
int process_fork(process_become execute, const void *context, bool has_input, struct process *ret_process);

#define PROCESS_UNKNOWN 255

/*
 * waitpid() for a child of one's own, with WNOHANG or 0: its number when it has ended, 0 while it runs. How it ended
 * may not be known, because somebody else waited for it: then the exit status is PROCESS_UNKNOWN, for it may have
 * failed.
 */
pid_t process_wait(pid_t pid, int options, int *ret_status);

/* The parent of any process, and its state as a letter of proc(5), 'Z' of a zombie; 0: there is no such process. */
pid_t process_parent(pid_t pid, char *ret_state);

/* Kills the process group and waits for its leader, for at most two seconds: a process that the kernel does not let go
 * is left behind. Closes the pipes. Does nothing if none runs. */
void process_kill(struct process *process);

/* Closes the pipes. */
void process_close(struct process *process);

/*
 * A copy of this process's environment without the variables of `except` (ends with NULL), in one block for free();
 * NULL for lack of memory.
 */
char **process_environment(const char *const *except);

/* The variables that load libraries into every program: no helper program may inherit them. Ends with NULL. */
extern const char *const process_preloads[];

/* Closes *fd unless it is -1, and sets it to -1. */
void process_close_fd(int *fd);

#endif
