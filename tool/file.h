/* SPDX-License-Identifier: Apache-2.0 */
/* file.h - files named by users. */
#ifndef EP_TOOL_FILE_H
#define EP_TOOL_FILE_H

#include <stdio.h>

/*
 * Opens a file for reading. Waits for data on a pipe, as needed for `<(program)`, up to 60 s: then ENODATA. NULL with
 * errno on failure.
 */
FILE *file_open(const char *path);

#endif
