/* SPDX-License-Identifier: Apache-2.0 */
/* page.h - the frame of HTML reports: one self-contained file, for light and dark mode and all widths. */
#ifndef EP_REPORT_PAGE_H
#define EP_REPORT_PAGE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Prints everything up to the verdict. `subtitle` is HTML; title and verdict are text. */
void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict);
void page_end(FILE *stream);

/* Prints text with the special characters of HTML escaped; NULL is empty. */
void page_escape(FILE *stream, const char *text);

/* Cells of a table. A null number prints an empty cell. */
void page_text_cell(FILE *stream, const char *tone, const char *text);
void page_number_cell(FILE *stream, const json_t *value, int digits, double scale);

/* Header cells: the titles end with NULL; a title that starts with '#' is for a column of numbers. */
void page_table_begin(FILE *stream, const char *const *titles);
void page_table_end(FILE *stream);

/* Members of objects; "" or 0 if missing. */
const char *page_text(const json_t *object, const char *key);
double page_number(const json_t *object, const char *key);

#endif
