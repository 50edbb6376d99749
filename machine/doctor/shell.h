/* SPDX-License-Identifier: Apache-2.0 */
/* shell.h - words for commands that people paste: names of files come from a machine that may mean harm. */
#ifndef EP_DOCTOR_SHELL_H
#define EP_DOCTOR_SHELL_H

#include "source/source.h"

#include <stdbool.h>

/*
 * `text` as one word of a shell command, on one line: as it is if it is plain, else in single quotes. What cannot be
 * printed is '?', so that nothing divides a command that is pasted line by line.
 */
const char *shell_word(struct source *source, const char *text);

/* Can a shell have a variable of this name? */
bool shell_is_name(const char *name);

/* Does this line of a shell evaluate /proc/1/environ? To read one variable of it with grep is another matter. */
bool shell_evaluates_environ(const char *line, size_t bytes);

/* A command that puts `folders` in front of a search path: without an empty entry, which would be the current folder.
 */
const char *shell_prepend(struct source *source, const char *name, const char *folders);

/* A command that gives a search path without one folder, of which `path` is what it is now. */
const char *shell_leave_out(struct source *source, const char *name, const char *path, const char *folder);

#endif
