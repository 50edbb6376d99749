/* SPDX-License-Identifier: Apache-2.0 */
/*
 * terminal.h - standard output and standard error of the command.
 *
 * Text may come from file names, options, other machines and drivers. After stream_open() everything printed to stdout
 * and stderr passes a filter: control, bidirectional and invisible characters become '?', or escapes in JSON. epkit's
 * own control sequences, for colours and the progress line, are written by stream_control().
 */
#ifndef EP_COMMON_TERMINAL_H
#define EP_COMMON_TERMINAL_H

#include <jansson.h>
#include <stdio.h>

/* Replaces stdout and stderr by filtering streams. To be called once, before anything is printed. 0, or -1. */
int stream_open(void);

/* Writes a control sequence of epkit, after what was printed before. */
void stream_control(FILE *stream, const char *sequence);

/* json_dumps() with invisible characters as \u escapes; to be freed, NULL without memory. */
char *stream_json_text(const json_t *document, size_t flags);

/*
 * Prints one JSON document and a newline to any stream; invisible characters become \u escapes. `flags` as for
 * json_dumps(). A signal that ends the process does so before or after all of it, unless the reader stalls. 0, or -1
 * with errno.
 */
int stream_json(FILE *stream, const json_t *document, size_t flags);

/* errno of the first write to the stream that failed, or 0. (errno itself may be of a later flush.) */
int stream_error(FILE *stream);

#endif
