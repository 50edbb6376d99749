/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.h - memory without a failure to handle. Where the system gives none, the command ends: a sentence on standard
 * error, the JSON document of --json, exit code 1. Files are replaced by renaming, so none is left half written;
 * private temporary folders stay as after a kill, until a later command removes them (temporary.h). (As xalloc.h of
 * util-linux. The library, which may not end its caller, has no part in it.)
 */
#ifndef EP_COMMON_MEMORY_H
#define EP_COMMON_MEMORY_H

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

/* The end, for what fails only without memory: regcomp() of a pattern of epkit's own. */
_Noreturn void memory_end(void);

/* From now on jansson's memory is such memory, too. `report` is called before the end. */
void memory_init(void (*report)(void));

/* Zeroed memory for `n` times `bytes`, and a text, all for free(). */
void *memory_new(size_t n, size_t bytes) __attribute__((returns_nonnull));
/* realloc(): what it adds is not zeroed. */
void *memory_grow(void *memory, size_t bytes) __attribute__((returns_nonnull));

char *memory_printf(const char *format, ...) __attribute__((format(printf, 1, 2), returns_nonnull));
char *memory_vprintf(const char *format, va_list args) __attribute__((format(printf, 1, 0), returns_nonnull));

/* open_memstream(). memory_close() completes the text, which is for free(). */
FILE *memory_stream(char **ret_text, size_t *ret_bytes) __attribute__((returns_nonnull));
void memory_close(FILE *stream);

/* In a function with arguments behind `format`: the result of `call`, which takes them as the va_list `args`. */
#define WITH_ARGS(args, format, call)                                                                                  \
    ({                                                                                                                 \
        va_list args;                                                                                                  \
        va_start(args, format);                                                                                        \
        __auto_type with_args = (call);                                                                                \
        va_end(args);                                                                                                  \
        with_args;                                                                                                     \
    })

#endif
