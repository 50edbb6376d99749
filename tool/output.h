/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.h - what the user sees. Data goes to standard output, everything else to standard error.
 *
 * A report is a verdict sentence first, then a table, then detail. Rows of tables are JSON objects; one table of
 * columns says how they look as text, which keys they have as JSON, and in which order as CSV.
 */
#ifndef EP_TOOL_OUTPUT_H
#define EP_TOOL_OUTPUT_H

#include "source/text.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

#define OUT_SCHEMA_VERSION 1

enum out_format { OUT_TABLE, OUT_JSON, OUT_CSV };

enum out_tone { OUT_PLAIN, OUT_GOOD, OUT_BAD, OUT_WARN, OUT_FAINT };

enum {
    OUT_RIGHT = 1u << 0,      /* text: aligned right; numbers are anyway */
    OUT_TRUNC = 1u << 1,      /* text: cut when the terminal is narrow */
    OUT_DATA = 1u << 2,       /* JSON and CSV only */
    OUT_IF_PRESENT = 1u << 3, /* text: left out when no row has it */
    OUT_NONZERO = 1u << 4     /* text: left out when it is missing, empty or 0 in every row */
};

struct out_column {
    const char *title; /* header of the text table */
    const char *key;   /* of the row object */
    int digits;        /* real numbers: after the point */
    unsigned flags;    /* OUT_* */
};

/*
 * Prints `rows` (an array of objects). A missing key or null is an empty cell (null in JSON). Returns 0, or -1 after
 * reporting that the output could not be written.
 */
int out_table(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows,
              enum out_format format);

/* Prints `rows` as a table on standard output and consumes them; `columns` is an array. As out_table(). */
#define OUT_PRINT(columns, rows) out_print(columns, COUNT(columns), rows)
int out_print(const struct out_column *columns, size_t n_columns, json_t *rows);

/* A JSON string of any text: what is no UTF-8 becomes '?', so that no row is lost for it. A new reference. */
json_t *out_text(const char *text);

/* The same; null for "". */
json_t *out_text_or_null(const char *text);

/* {"schema_version", "epkit": version, "verb"}: the start of every --json document. */
json_t *out_document(const char *verb);

/* Prints the document to standard output and consumes it. 0, or -1 after reporting why not. */
int out_json(json_t *document);

/* The sentence that answers the question, on a line of its own on standard output. */
void out_verdict(enum out_tone tone, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A line on standard output; progress on the terminal makes way for it. */
void out_line(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Is the stream a terminal that a person may be looking at? */
bool out_is_terminal(FILE *stream);

/* What is printed to `stream` from here on has this tone; nothing where colour is not wanted. OUT_PLAIN ends it. */
void out_tone(FILE *stream, enum out_tone tone);

/* "epkit: <text>" on standard error. */
void out_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void out_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
void out_note(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* "       <text>" on standard error: what to do about the error just reported. */
void out_hint(const char *format, ...) __attribute__((format(printf, 1, 2)));

/*
 * An error in full on standard error: what failed, where (ranks; may be NULL), why, and what to do about it (may be
 * NULL or "").
 */
void out_problem(const char *what, const char *where, const char *why, const char *hint);

/* Flushes standard output. CMD_FINE, or CMD_FAILED after reporting once why it could not be written (full disk). */
int out_finish(void);

/* Why a write failed, by errno. */
const char *out_reason(int error_number);

#endif
