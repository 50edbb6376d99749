/* SPDX-License-Identifier: Apache-2.0 */
/* file.h - files that users name. */
#ifndef EP_TOOL_FILE_H
#define EP_TOOL_FILE_H

#include <stdio.h>

/*
 * Opens one for reading. A pipe is waited for, as `<(program)` needs it, but not without end: ENODATA when nobody has
 * written to it within 60 s. NULL with errno.
 */
FILE *file_open(const char *path);

#endif
