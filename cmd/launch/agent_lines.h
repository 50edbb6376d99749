/* SPDX-License-Identifier: Apache-2.0 */
/*
 * agent_lines.h - output in lines. The agent of a node sends lines to the launcher, on a byte stream that may begin
 * with the greeting of a login shell: "\036J0 JSON" is an event, "\036O3 TEXT" a line that rank 3 of the node has
 * written, "\036P3 TEXT" the beginning of a line whose end it has not written yet.
 */
#ifndef EP_LAUNCH_AGENT_LINES_H
#define EP_LAUNCH_AGENT_LINES_H

#include <stdbool.h>
#include <stddef.h>

#define LINE_MARK '\036'
#define LINE_EVENT 'J'
#define LINE_OUTPUT 'O'
#define LINE_PART 'P'
#define LINE_OUTPUT_MAX 16384     /* bytes of a line that a rank writes; longer ones are cut in pieces */
#define LINE_PART_MAX 1000        /* bytes of the beginning of a line that are sent */
#define LINE_EVENT_MAX (4u << 20) /* bytes of a line of an agent */

typedef void (*line_fn)(void *context, const char *text, size_t bytes);

/* What is there of a line. */
struct line_buffer {
    char *text;
    size_t used, capacity;
};

/* Adds output, and passes on each complete line, or `max` bytes of it, NUL-terminated. False: no memory. */
bool line_add(struct line_buffer *buffer, size_t max, const char *data, size_t bytes, line_fn on_line, void *context);

/* Passes on the rest. */
void line_flush(struct line_buffer *buffer, line_fn on_line, void *context);

/* Also frees the buffer. */
void line_end(struct line_buffer *buffer, line_fn on_line, void *context);

#endif
