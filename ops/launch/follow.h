/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.h - pods of a job all run the same command: the first one launches, the others have to stay until it is over,
 * and to end with its exit code, so that the job does. The agent that the first one starts on a pod tells the process
 * that waits there, by datagrams to an abstract socket.
 */
#ifndef EP_OPS_LAUNCH_FOLLOW_H
#define EP_OPS_LAUNCH_FOLLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum follow_word { FOLLOW_ALIVE, FOLLOW_END };

/* False where nobody waits (yet). */
bool follow_tell(enum follow_word word, int code);

/*
 * Waits for the launch to begin, for at most begin_s; then until it is over, for at most deadline_s (0: no limit). The
 * launch's exit code; or 1 with the reason in ret_why, which is "" otherwise: it did not begin, or nothing was heard of
 * it for two minutes.
 */
int follow_wait(int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes);

#endif
