/* SPDX-License-Identifier: Apache-2.0 */
/* file.h - files named by users. */
#ifndef EP_COMMON_FILE_H
#define EP_COMMON_FILE_H

#include <stdbool.h>
#include <stdio.h>

/* Opens a file for reading; waits for the data of a pipe, `<(program)`, up to 60 s. NULL with errno. */
FILE *file_open(const char *path);

/* file_open_regular() opens only regular files: EINVAL for others, at once. */
FILE *file_open_regular(const char *path);

/* file_open_within() is the same for a file below a folder, without any link in its path (dir_open_within()). */
FILE *file_open_within(int dir, const char *path);

/* What errno of these means. */
const char *file_error(int number);

/* Skips a byte order mark, as editors of other systems write it, at the beginning of a text. */
void file_skip_mark(FILE *stream);

#endif
