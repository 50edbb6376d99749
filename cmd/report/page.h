/* SPDX-License-Identifier: Apache-2.0 */
/* page.h - the frame of HTML reports: one self-contained file, for light and dark mode and all widths. */
#ifndef EP_REPORT_PAGE_H
#define EP_REPORT_PAGE_H

#include "common/json.h"
#include "common/output.h"

#include <stdbool.h>
#include <stdio.h>

/* Prints everything up to the verdict. */
void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict);
void page_end(FILE *stream);

/* As fprintf(), for numbers of type int and double, and for texts: their special characters of HTML are escaped. */
void page_print(FILE *stream, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line of a list; `check`: what `epkit doctor --only` is to look at, or "". */
void page_item(FILE *stream, const char *tone, const char *check, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* Bars in pairs: a label, and a value for each of two names. */
struct page_bars {
    const char *title, *unit, *names[2];
    size_t n;
    struct {
        char label[80];
        double values[2];
    } pairs[24];
};

/* Adds a pair, if there is room. */
void page_pair(struct page_bars *bars, double first, double second, const char *label, ...)
    __attribute__((format(printf, 4, 5)));
void page_draw(FILE *stream, const struct page_bars *bars);

#endif
