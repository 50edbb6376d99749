/* SPDX-License-Identifier: Apache-2.0 */
/* shell.h - words and commands of fixes. */
#ifndef EP_DOCTOR_SHELL_H
#define EP_DOCTOR_SHELL_H

#include "machine/source/source.h"

#include <stdbool.h>

/* shell_quote() of any length, owned by the source. */
const char *shell_word(struct source *source, const char *text);

/* Is it a valid name of a shell variable? */
bool shell_is_name(const char *name);

/* Does a line of a shell script evaluate /proc/1/environ? Reading one variable from it with grep does not count. */
bool shell_evaluates_environ(const char *line, size_t bytes);

/* Prepends `folders` to a search path without an empty entry, which would mean the current folder. */
const char *shell_prepend(struct source *source, const char *name, const char *folders);

/* A command that removes `folder` from a search path, `path` being its current value. */
const char *shell_leave_out(struct source *source, const char *name, const char *path, const char *folder);

#endif
