/* SPDX-License-Identifier: Apache-2.0 */
/*
 * progress.h - where a long command is, on standard error.
 *
 * On a terminal one line that is rewritten at most six times a second; elsewhere a plain line every few seconds.
 * Nothing is shown during the first second. A command has one progress at a time.
 */
#ifndef EP_TOOL_PROGRESS_H
#define EP_TOOL_PROGRESS_H

/* `label` is copied. progress_stop() ends it and clears the line; it may be called at any time. */
void progress_start(const char *label);
void progress_stop(void);

/* `done` of `total` steps (total 0: not known), with what is being done now. Cheap enough to call for every step. */
void progress_update(long done, long total, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Shows elapsed time again; called while waiting. */
void progress_tick(void);

/* Clears the line so that other output can be written; the next update shows it again. */
void progress_hide(void);

#endif
