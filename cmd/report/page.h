/* SPDX-License-Identifier: Apache-2.0 */
/* page.h - the frame of HTML reports: one self-contained file, for light and dark mode and all widths. */
#ifndef EP_REPORT_PAGE_H
#define EP_REPORT_PAGE_H

#include "common/json.h"

#include <stdbool.h>
#include <stdio.h>

/* Prints everything up to the verdict. `subtitle` is HTML; title and verdict are text. */
void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict);
void page_end(FILE *stream);

/* As fprintf(), for numbers of type int and double, and for texts: their special characters of HTML are escaped. */
void page_print(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line of a list; `check`: what `epkit doctor --only` is to look at, or "". */
void page_item(FILE *stream, const char *tone, const char *check, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* A title that begins with '#' is of a column of numbers, with `digits`, in units of 1 / `scale` (0: 1). */
struct page_column {
    const char *title;
    const char *key; /* of the row; "a.b": of its object a */
    int digits;
    double scale;
};

/* A table of `rows`. A word that rates something has its colour; a missing value is an empty cell. */
#define PAGE_TABLE(stream, columns, rows) page_table(stream, columns, sizeof(columns) / sizeof((columns)[0]), rows)
void page_table(FILE *stream, const struct page_column *columns, size_t n, const json_t *rows);

/* A member of an object; 0 if missing. */
double page_number(const json_t *object, const char *key);

#endif
