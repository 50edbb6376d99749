/* SPDX-License-Identifier: Apache-2.0 */
#include "frame.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MARK "\036epkit "
#define HEAD_MAX 64

size_t frame_head(char kind, int rank, size_t bytes, char ret_line[64])
{
    return (size_t)snprintf(ret_line, HEAD_MAX, MARK "%c %d %zu\n", kind, rank, bytes);
}

void frame_reader_done(struct frame_reader *reader)
{
    free(reader->buffer);
    *reader = (struct frame_reader){0};
}

/* Parses the line of a frame, `head` to `newline`: as frame_head() writes it. */
static bool parse_head(const char *head, const char *newline, struct frame *ret_frame)
{
    size_t length = (size_t)(newline + 1 - head);
    char line[HEAD_MAX + 1], same[64];

    snprintf(line, sizeof(line), "%.*s", (int)length, head);
    return sscanf(line, MARK "%c %5d %7zu", &ret_frame->kind, &ret_frame->rank, &ret_frame->bytes) == 3 &&
           strchr("JOE", ret_frame->kind) && ret_frame->rank >= 0 && ret_frame->rank <= FRAME_RANKS_MAX &&
           ret_frame->bytes <= FRAME_BYTES_MAX &&
           frame_head(ret_frame->kind, ret_frame->rank, ret_frame->bytes, same) == length && strcmp(same, line) == 0;
}

/* Handles the next item at `at` and returns the new read position. *ret_waits: the frame is incomplete. */
static size_t next(const struct frame_reader *reader, size_t at,
                   void (*on_frame)(const struct frame *frame, void *context), void *context, bool *ret_waits)
{
    const char *head = memchr(reader->buffer + at, MARK[0], reader->used - at), *newline;
    struct frame frame;
    size_t begin, left;

    if (!head)
        return reader->used;
    begin = (size_t)(head - reader->buffer);
    left = reader->used - begin;
    newline = memchr(head, '\n', left < HEAD_MAX ? left : HEAD_MAX);
    *ret_waits = !newline && left < HEAD_MAX;
    if (*ret_waits)
        return begin;
    if (!newline || !parse_head(head, newline, &frame))
        return begin + 1;
    *ret_waits = (size_t)(reader->buffer + reader->used - (newline + 1)) < frame.bytes;
    if (*ret_waits)
        return begin;
    frame.data = newline + 1;
    on_frame(&frame, context);
    return (size_t)(newline + 1 - reader->buffer) + frame.bytes;
}

int frame_read(struct frame_reader *reader, const char *data, size_t bytes,
               void (*on_frame)(const struct frame *frame, void *context), void *context)
{
    bool waits = false;
    size_t at = 0;

    if (bytes == 0)
        return 0;
    if (reader->used + bytes > reader->capacity) {
        char *grown = realloc(reader->buffer, reader->used + bytes + 4096);

        if (!grown)
            return -1;
        reader->buffer = grown;
        reader->capacity = reader->used + bytes + 4096;
    }
    memcpy(reader->buffer + reader->used, data, bytes);
    reader->used += bytes;
    while (at < reader->used && !waits)
        at = next(reader, at, on_frame, context, &waits);
    memmove(reader->buffer, reader->buffer + at, reader->used - at);
    reader->used -= at;
    return 0;
}
