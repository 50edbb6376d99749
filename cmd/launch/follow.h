/* SPDX-License-Identifier: Apache-2.0 */
/*
 * follow.h - all pods of a job run the same command. The first pod launches; the others wait until the launch is over
 * and end with its exit code, so that the job does as well. The agent that the first pod starts on each pod notifies
 * the process that waits there, which it finds by its name, by a signal with a value.
 */
#ifndef EP_LAUNCH_FOLLOW_H
#define EP_LAUNCH_FOLLOW_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define FOLLOW_ALIVE (-1)    /* instead of an exit code: the launch is not over */
#define FOLLOW_PAUSE_MS 2000 /* a pod whose launch has failed ends later than the first one */
#define FOLLOW_TELL_MS 3000  /* it may begin to wait for the end of a launch late: its script may pause so before */

/* Sends the exit code of the launch. False if no process waits (yet). */
bool follow_send(int code);

/*
 * Waits for the launch to begin, for at most begin_s; then until it is over, for at most deadline_s (0: no limit).
 * Returns the launch's exit code; or 1 with the reason in ret_why, which is "" otherwise: the launch did not begin, or
 * sent no message for two minutes.
 */
int follow_wait(int64_t begin_s, int64_t deadline_s, char *ret_why, size_t bytes);

#endif
