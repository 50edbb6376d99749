/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - what readers, rules and reports do with texts all the time: compare with a list, take a list apart, add. */
#ifndef EP_MACHINE_SOURCE_TEXT_H
#define EP_MACHINE_SOURCE_TEXT_H

#include <stdbool.h>
#include <stddef.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* A list of texts in the place of a parameter: TEXTS("a", "b"). Lists end with NULL. */
#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

bool text_begins(const char *text, const char *beginning);
bool text_ends(const char *text, const char *end);

/* Is it one of the list? Does it begin, or end, like one of them? */
bool text_is_any(const char *text, const char *const *list);
bool text_begins_any(const char *text, const char *const *list);
bool text_ends_any(const char *text, const char *const *list);

/* What stands behind the last '/'; the whole text without one. */
const char *text_base(const char *path);

/*
 * How many letters have to be changed, inserted, left out or swapped with their neighbour to get from `a` to `b`; of
 * longer words the first TEXT_DISTANCE_BYTES - 1 count.
 */
#define TEXT_DISTANCE_BYTES 65
int text_distance(const char *a, const char *b);

/* A part of a text. */
struct piece {
    const char *text;
    size_t n;
};

/* The next part of *at, up to one of `separators` or the end; *at moves behind the separator. */
struct piece text_take(const char **at, const char *separators);

/* A text that grows in memory of the caller's, and is cut where that ends. */
struct text {
    char *bytes;
    size_t room, n;
};

/* An empty one. */
struct text text_in(char *bytes, size_t room);
void text_add(struct text *text, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Adds to what is in `text`, of `room` bytes, already. */
void text_append(char *text, size_t room, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
