/* SPDX-License-Identifier: Apache-2.0 */
#include "agent_lines.h"

#include <stdlib.h>
#include <string.h>

#define GROWTH 4096

static bool make_room(struct line_buffer *buffer, size_t bytes)
{
    size_t needed = buffer->used + bytes + 1;
    char *grown = needed > buffer->capacity ? realloc(buffer->text, 2 * needed + GROWTH) : buffer->text;

    if (!grown)
        return false;
    buffer->capacity = needed > buffer->capacity ? 2 * needed + GROWTH : buffer->capacity;
    buffer->text = grown;
    return true;
}

static void pass_on(struct line_buffer *buffer, line_fn on_line, void *context)
{
    size_t bytes = buffer->used;

    buffer->text[bytes] = '\0';
    buffer->used = 0;
    on_line(context, buffer->text, bytes);
}

bool line_add(struct line_buffer *buffer, size_t max, const char *data, size_t bytes, line_fn on_line, void *context)
{
    while (bytes > 0) {
        const char *newline = memchr(data, '\n', bytes);
        size_t length = newline ? (size_t)(newline - data) : bytes;
        size_t room = max - buffer->used, taken = length < room ? length : room;
        bool is_line = newline && taken == length;

        if (!make_room(buffer, taken))
            return false;
        memcpy(buffer->text + buffer->used, data, taken);
        buffer->used += taken;
        data += taken + is_line;
        bytes -= taken + is_line;
        if (is_line || buffer->used == max)
            pass_on(buffer, on_line, context);
    }
    return true;
}

void line_flush(struct line_buffer *buffer, line_fn on_line, void *context)
{
    if (buffer->used)
        pass_on(buffer, on_line, context);
}

void line_end(struct line_buffer *buffer, line_fn on_line, void *context)
{
    line_flush(buffer, on_line, context);
    free(buffer->text);
    *buffer = (struct line_buffer){0};
}
