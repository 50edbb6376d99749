/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - helpers for texts: comparison with lists, parsing, appending. */
#ifndef EP_COMMON_TEXT_H
#define EP_COMMON_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A list of texts as an argument: TEXTS("a", "b"). Lists end with NULL. */
#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

bool text_begins(const char *text, const char *beginning);
bool text_ends(const char *text, const char *end);

/* Is it in the list? Does it begin with a text of the list? */
bool text_is_any(const char *text, const char *const *list);
bool text_begins_any(const char *text, const char *const *list);

/* The part after the last '/'; the whole text without one. */
const char *text_base(const char *path);

/* Letters changed, inserted, removed or swapped; of longer words only TEXT_DISTANCE_BYTES - 1 letters count. */
#define TEXT_DISTANCE_BYTES 65
int text_distance(const char *a, const char *b);

/* 64-bit FNV-1a hash. */
uint64_t text_hash(const char *text, size_t bytes);

/* A part of a text. */
struct piece {
    const char *text;
    size_t n;
};

bool piece_is(struct piece piece, const char *text);

/* The next part of *at, up to one of `separators` or the end; advances *at past the separator. */
struct piece text_take(const char **at, const char *separators);

/* A text in a buffer of the caller, truncated at its end. */
struct text {
    char *bytes;
    size_t room, n;
};

/* An empty one. */
struct text text_in(char *bytes, size_t room);
void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends to the text in the buffer `text` of `room` bytes. */
void text_append(char *text, size_t room, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
