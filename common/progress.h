/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.h - progress of a long command, on standard error.
 *
 * On a terminal one line is rewritten at most six times a second; elsewhere a plain line is printed every few seconds.
 * Nothing is shown during the first second. A command has at most one progress at a time.
 */
#ifndef EP_COMMON_PROGRESS_H
#define EP_COMMON_PROGRESS_H

/* `label` is copied. progress_stop() clears the line; it may be called at any time. */
void progress_start(const char *label);
void progress_stop(void);

/* `done` of `total` steps (0: unknown) are done; the text describes the current one. Cheap: call it for every step. */
void progress_update(long done, long total, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Updates the elapsed time; to be called while waiting. */
void progress_tick(void);

/* Clears the line so that other output can be written; the next update shows it again. */
void progress_hide(void);

#endif
