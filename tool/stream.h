/* SPDX-License-Identifier: Apache-2.0 */
/*
 * stream.h - standard output and standard error of the command.
 *
 * Text comes from file names, options, other machines and drivers. After stream_open() all that is printed to stdout
 * and stderr goes through one filter: a character that a terminal obeys, that reverses the direction of writing or that
 * nobody sees becomes '?', or in JSON its escape. What epkit itself has for the terminal, colours and the line of
 * progress, goes through stream_control().
 */
#ifndef EP_TOOL_STREAM_H
#define EP_TOOL_STREAM_H

#include <jansson.h>
#include <stdio.h>

/* Puts filtering streams in the place of stdout and stderr. Once, before anything is printed. 0, or -1. */
int stream_open(void);

/*
 * The same filter for a file that is written anew; at most one at a time, for fclose(). NULL with errno. Before it is
 * closed stream_error() tells why not all of it could be written.
 */
FILE *stream_file(const char *file);

/* Writes control sequences of epkit's own, behind what was printed before. */
void stream_control(FILE *stream, const char *sequence);

/*
 * Prints one JSON document and a newline to `stream`, which may be any: hidden characters become \u escapes. `flags`
 * are those of json_dumps(). 0, or -1 with errno.
 */
int stream_json(FILE *stream, const json_t *document, size_t flags);

/*
 * Why nothing more can be written to the stream: errno of the first write that failed, 0 if none did. A later errno
 * tells nothing: the stream is flushed more than once.
 */
int stream_error(FILE *stream);

#endif
