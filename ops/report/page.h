/* SPDX-License-Identifier: Apache-2.0 */
/* page.h - the frame of every HTML report: one file that needs nothing else, light and dark, narrow and wide. */
#ifndef EP_OPS_REPORT_PAGE_H
#define EP_OPS_REPORT_PAGE_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* Everything up to the verdict. `subtitle` is HTML; title and verdict are text. */
void page_begin(FILE *stream, const char *title, const char *tone, const char *verdict);
void page_end(FILE *stream);

/* Text with the characters that mean something to HTML written as references; NULL is empty. */
void page_escape(FILE *stream, const char *text);

/* Cells of a table. A number that is null is an empty cell. */
void page_text_cell(FILE *stream, const char *tone, const char *text);
void page_number_cell(FILE *stream, const json_t *value, int digits, double scale);

/* Header cells: titles end with NULL; one that begins with '#' is of a column of numbers. */
void page_table_begin(FILE *stream, const char *const *titles);
void page_table_end(FILE *stream);

/* Members of objects: "" and 0 where they are missing. */
const char *page_text(const json_t *object, const char *key);
double page_number(const json_t *object, const char *key);

#endif
