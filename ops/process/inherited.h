/* SPDX-License-Identifier: Apache-2.0 */
/*
 * inherited.h - what a process inherits: signal dispositions and masks, standard streams, limits. Daemons, CI runners,
 * cron, containers and sudo each leave different ones.
 */
#ifndef EP_OPS_INHERITED_H
#define EP_OPS_INHERITED_H

#include <stdbool.h>

/*
 * The first thing that main() does: sets everything that the command relies on.
 *
 *   - No signal is blocked. SIGTERM and SIGCHLD have their default action, and SIGPIPE and SIGXFSZ none: a write that
 *     fails is reported. SIGINT, SIGHUP and SIGQUIT stay ignored where they are (nohup, jobs in the background).
 *   - A process number 1, of a container, gets handlers: the kernel spares it the default action of signals.
 *   - Standard streams that are closed are occupied, so that no file that is opened later takes their numbers. What is
 *     written to them is nobody's, as with /dev/null; programs that are executed find them closed.
 *   - A stack that is too small for the command is made larger, if it may be.
 */
void inherited_init(void);

/* Called before a user's program is executed: restores signals and limits as they were inherited. */
void inherited_restore(void);

/* Was the signal ignored when the command was started? */
bool inherited_is_ignored(int number);

/* Standard output has no reader any more: ends the process by SIGPIPE. Returns if SIGPIPE was ignored. */
void inherited_broken_pipe(void);

#endif
