/* SPDX-License-Identifier: Apache-2.0 */
/* clean.h - texts that are safe for terminals and JSON. */
#ifndef EP_COMMON_CLEAN_H
#define EP_COMMON_CLEAN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

#endif
