/* SPDX-License-Identifier: Apache-2.0 */
/* supervise.h - programs that do not outlive the command, however it ends. */
#ifndef EP_COMMON_SUPERVISE_H
#define EP_COMMON_SUPERVISE_H

#include <stdbool.h>
#include <sys/types.h>

/*
 * fork(), with a process in between: the supervisor. Returns 0 in the child, which is to execute a program; in the
 * caller the PID of the supervisor, or -1 with errno.
 *
 * The supervisor ends as the program does, with the same exit code or signal, and forwards signals that the caller
 * sends it. When the caller dies, also by SIGKILL, the program and all its descendants get SIGTERM, and 3 s later
 * SIGKILL. Processes that the program leaves behind while the caller lives are not touched.
 *
 * With `own_group` the supervisor leads its own process group, so that program and supervisor can be killed together.
 * `failure_fd` receives an int, errno, when there can be no child. The caller waits for end-of-file there, so the
 * descriptor has FD_CLOEXEC.
 */
pid_t supervise_fork(bool own_group, int failure_fd);

#endif
