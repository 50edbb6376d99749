/* SPDX-License-Identifier: Apache-2.0 */
/* text.h - helpers for texts: comparison with lists, parsing, appending, what is safe to print. */
#ifndef EP_COMMON_TEXT_H
#define EP_COMMON_TEXT_H

#include "base/array.h"
#include "memory.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

/* A list of texts as an argument: TEXTS("a", "b"). Lists end with NULL. */
#define TEXTS(...) ((const char *const[]){__VA_ARGS__, NULL})

bool text_begins(const char *text, const char *beginning);
bool text_ends(const char *text, const char *end);

/* Is it in the list? Does it begin with a text of the list? */
bool text_is_any(const char *text, const char *const *list);
bool text_begins_any(const char *text, const char *const *list);

/* The part after the last '/'; the whole text without one. */
const char *text_base(const char *path);

/* For qsort(): compares elements that are texts, or begin with one. */
int text_order(const void *left, const void *right);

/* Letters changed, inserted, removed or swapped; of longer words only TEXT_DISTANCE_BYTES - 1 letters count. */
#define TEXT_DISTANCE_BYTES 65
int text_distance(const char *a, const char *b);

/* The number that `n` digits are, from 0 to `most`; -1 if it is none. */
int text_number(const char *text, size_t n, int most);

/* A time in UTC: "2026-01-31T12:00:00Z". And that with which a text begins; -1: none. */
#define TEXT_TIME_BYTES 32
const char *text_time(time_t when, char ret_text[TEXT_TIME_BYTES]);
time_t text_time_of(const char *text);

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

/* Each part of `text`, which may be NULL; none after a separator at its end. */
#define FOR_PIECES(part, text, separators)                                                                             \
    for (const char *part##_at = (text); part##_at && *part##_at; part##_at = NULL)                                    \
        for (struct piece part; *part##_at && (part = text_take(&part##_at, separators), true);)

/* The first place of `text` in it, or NULL. */
const char *piece_find(struct piece piece, const char *text);

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

/* --- safe for terminals and JSON --- */

/* Copies `text`, which may be ret_text, truncated, with '?' for what is neither UTF-8 nor printable. */
void text_clean(const char *text, char *ret_text, size_t bytes);

/* Removes an incomplete UTF-8 sequence from the end of a truncated text. */
void text_cut(char *text);

/* The length and code of the UTF-8 sequence at `text`; 0: not UTF-8, TEXT_INCOMPLETE: the beginning of one. */
#define TEXT_INCOMPLETE ((size_t)-1)
size_t text_decode(const char *text, size_t bytes, uint32_t *ret_code);

/* False for control and format characters, such as those that reverse the writing direction, and noncharacters. */
bool text_is_printable(uint32_t code);

/*
 * The character at `text` as it may be written to a terminal: itself, or '?' if it is not printable or not UTF-8;
 * newlines and tabs stay. Returns the bytes of `text` consumed, never fewer than *ret_shown_bytes; 0: the bytes are the
 * beginning of a character.
 */
size_t text_printable(const char *text, size_t bytes, const char **ret_shown, size_t *ret_shown_bytes);

/* Does `name` lead each host to itself? Only names and addresses that say so: "localhost", "127.0.0.1", "::1". */
bool address_is_loopback(const char *name);

#endif
