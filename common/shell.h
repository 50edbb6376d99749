/* SPDX-License-Identifier: Apache-2.0 */
/* shell.h - quoting for a shell. Names and values of a command come from machines, files and clusters of others. */
#ifndef EP_COMMON_SHELL_H
#define EP_COMMON_SHELL_H

#include <stdio.h>

/*
 * Quotes `text` as one word of a command that users paste, on one line: unchanged if it is plain, otherwise in single
 * quotes. Unprintable characters become '?', so that they cannot split a command that is pasted line by line. A word
 * that does not fit is "'...'". Returns ret_word.
 */
#define SHELL_WORD_BYTES 1200 /* enough for 253 quotes, a name of Kubernetes */
/* Characters of plain words; cmd/report reads quoted words by the same. */
#define SHELL_PLAIN "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_./+,:=@%-"
const char *shell_quote(const char *text, char *ret_word, size_t bytes);

/* Writes `text`, byte by byte, in single quotes, for scripts. */
void shell_write(FILE *stream, const char *text);

#endif
