/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inherited.h - what a process inherits: signal dispositions and masks, standard streams, limits. Daemons, CI runners,
 * cron, containers and sudo each leave different ones.
 */
#ifndef EP_COMMON_INHERITED_H
#define EP_COMMON_INHERITED_H

#include <signal.h>
#include <stdbool.h>

/* A set of these signals. */
#define SIGNALS(...) signals_of((const int[]){__VA_ARGS__, 0})
sigset_t signals_of(const int *numbers);

/*
 * Called first in main(): sets everything that the command relies on.
 *
 *   - No signal is blocked. SIGTERM and SIGCHLD have their default action. SIGPIPE and SIGXFSZ have none: a failed
 *     write is reported. SIGINT, SIGHUP and SIGQUIT stay ignored if they were (nohup, background jobs).
 *   - Process number 1 of a container gets handlers: the kernel does not apply default actions of signals to it.
 *   - Closed standard streams are occupied, so that no file that is opened later takes their numbers. Writes to them
 *     are discarded, as with /dev/null; programs that are executed find them closed.
 *   - A stack limit that is too small for the command is raised, if allowed; with less than 256 KiB it ends.
 */
void inherited_init(void);

/* Called before a user's program is executed: restores signals and limits as they were inherited. */
void inherited_restore(void);

/* Was the signal ignored when the command was started? */
bool inherited_is_ignored(int number);

/* Standard output has no reader any more: ends the process by SIGPIPE. Returns if SIGPIPE was ignored. */
void inherited_broken_pipe(void);

#endif
