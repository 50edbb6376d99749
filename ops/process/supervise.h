/* SPDX-License-Identifier: Apache-2.0 */
/* supervise.h - programs that do not outlive the command, however that ends. */
#ifndef EP_OPS_SUPERVISE_H
#define EP_OPS_SUPERVISE_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * fork(), with a process in between: the supervisor. 0 in the child, which is to execute a program; in the caller the
 * number of the supervisor, or -1 with errno.
 *
 * The supervisor ends as the program does, by the same exit code or signal, and passes signals on that the caller sends
 * it. When the caller has died, also by SIGKILL, the program gets SIGTERM, and 3 s later SIGKILL, and so does whatever
 * it has started. Processes that the program leaves behind while the caller lives are its own affair.
 *
 * With `own_group` the supervisor leads a process group of its own, and program and supervisor can be killed together.
 * `failure_fd` gets an int, errno, when there can be no child. The caller waits for the end of file there, so it has
 * FD_CLOEXEC.
 */
pid_t supervise_fork(bool own_group, int failure_fd);

#endif
