/* SPDX-License-Identifier: Apache-2.0 */
#include "text.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool text_begins(const char *text, const char *beginning)
{
    return strncmp(text, beginning, strlen(beginning)) == 0;
}

bool text_ends(const char *text, const char *end)
{
    size_t n = strlen(text), n_end = strlen(end);

    return n >= n_end && strcmp(text + n - n_end, end) == 0;
}

bool text_is_any(const char *text, const char *const *list)
{
    while (*list && strcmp(text, *list) != 0)
        list++;
    return *list;
}

bool text_begins_any(const char *text, const char *const *list)
{
    while (*list && !text_begins(text, *list))
        list++;
    return *list;
}

const char *text_base(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

int text_distance(const char *a, const char *b)
{
    int rows[3][TEXT_DISTANCE_BYTES];
    int *before = rows[0], *above = rows[1], *row = rows[2];
    size_t n_a = strnlen(a, TEXT_DISTANCE_BYTES - 1), n_b = strnlen(b, TEXT_DISTANCE_BYTES - 1);

    for (size_t j = 0; j <= n_b; j++)
        above[j] = (int)j;
    for (size_t i = 1; i <= n_a; i++) {
        int *spare = before;

        row[0] = (int)i;
        for (size_t j = 1; j <= n_b; j++) {
            int cost = above[j - 1] + (a[i - 1] != b[j - 1]);

            cost = above[j] + 1 < cost ? above[j] + 1 : cost;
            cost = row[j - 1] + 1 < cost ? row[j - 1] + 1 : cost;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < cost)
                cost = before[j - 2] + 1;
            row[j] = cost;
        }
        before = above;
        above = row;
        row = spare;
    }
    return above[n_b];
}

bool piece_is(struct piece piece, const char *text)
{
    return piece.n == strlen(text) && strncmp(piece.text, text, piece.n) == 0;
}

struct piece text_take(const char **at, const char *separators)
{
    /* Tables of words are searched at each byte of a text: strcspn() prepares more than it searches. */
    size_t n = separators[1] ? strcspn(*at, separators) : (size_t)(strchrnul(*at, *separators) - *at);
    struct piece piece = {*at, n};

    *at += piece.n + (piece.text[piece.n] != '\0');
    return piece;
}

struct text text_in(char *bytes, size_t room)
{
    bytes[0] = '\0';
    return (struct text){bytes, room, 0};
}

void text_add(struct text *text, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = vsnprintf(text->bytes + text->n, text->room - text->n, format, args);
    va_end(args);
    text->n += n > 0 ? (size_t)n : 0;
    if (text->n >= text->room)
        text->n = text->room - 1;
}

void text_append(char *text, size_t room, const char *format, ...)
{
    size_t n = strlen(text);
    va_list args;

    va_start(args, format);
    vsnprintf(text + n, room - n, format, args);
    va_end(args);
}

uint64_t text_hash(const char *text, size_t bytes)
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325);

    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ (unsigned char)text[i]) * UINT64_C(0x100000001b3);
    return hash;
}
