/* SPDX-License-Identifier: Apache-2.0 */
/*
 * output.h - output to the user. Data goes to standard output, everything else to standard error.
 *
 * A report is a verdict in one sentence, then a table, then details. Rows of tables are JSON objects.
 */
#ifndef EP_COMMON_OUTPUT_H
#define EP_COMMON_OUTPUT_H

#include "json.h"
#include "text.h"

#include <stdbool.h>
#include <stdio.h>
#include <time.h>

#define OUT_SCHEMA_VERSION 1

enum out_format { OUT_TABLE, OUT_HTML };

enum out_tone { OUT_PLAIN, OUT_GOOD, OUT_BAD, OUT_WARN, OUT_FAINT };

enum {
    OUT_RIGHT = 1u << 0,      /* text: right-aligned, as numbers always are */
    OUT_TRUNC = 1u << 1,      /* text: truncated on a narrow terminal */
    OUT_IF_PRESENT = 1u << 2, /* omitted if no row has it */
    OUT_NONZERO = 1u << 3     /* omitted if it is missing, empty or 0 in every row */
};

struct out_column {
    const char *title; /* header of the text table */
    const char *key;   /* of the row object */
    int digits;        /* real numbers: after the point */
    unsigned flags;    /* OUT_* */
};

/* The digits of a real number, of these: more for a rate below 1 and below 0.01. A slow link is not 0.0 GB/s. */
int out_digits(int digits, double value);

/* Prints `rows`; a missing key or null is an empty cell. 0, or -1 after reporting that it could not be written. */
int out_table(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows,
              enum out_format format);

/* Prints a text with the special characters of HTML escaped; NULL: nothing. */
void out_html(FILE *stream, const char *text);

/* Prints `rows` as a text table on standard output and consumes them; `columns` is an array. Returns as out_table(). */
#define OUT_PRINT(columns, rows) out_print(columns, COUNT(columns), rows)
int out_print(const struct out_column *columns, size_t n_columns, json_t *rows);

/* A JSON string of any text: invalid UTF-8 becomes '?', so that the row is kept. A new reference. */
json_t *out_text(const char *text);

/* The same for a part of a sentence: newlines and what is invisible become '?', too. */
json_t *out_name(const char *text);

/* A JSON string of a time, in UTC: "2026-01-31T12:00:00Z". A new reference. */
json_t *out_time(time_t when);

/* out_text_or_null() returns null for "", and out_text() for other texts. */
json_t *out_text_or_null(const char *text);

/* {"schema_version", "epkit": version, "subcommand": command}: the start of every --json document. */
json_t *out_document(const char *command);

/* Prints the document without secrets to standard output and consumes it. 0, or -1 after reporting the error. */
int out_json(json_t *document);

/*
 * out_verdict() prints the result in one sentence, on a line of its own on standard output, and out_line() any line;
 * they clear the progress line first.
 */
#define out_line(...) out_verdict(OUT_PLAIN, __VA_ARGS__)
void out_verdict(enum out_tone tone, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Whether the stream is an interactive terminal. */
bool out_is_terminal(FILE *stream);

/* Sets the colour of what is printed to `stream` from here on, if colour is enabled. OUT_PLAIN resets it. */
void out_tone(FILE *stream, enum out_tone tone);

/* "epkit: <text>" on standard error; of an error OUT_BAD, and of a warning OUT_WARN. */
#define out_error(...) out_message(OUT_BAD, __VA_ARGS__)
#define out_warning(...) out_message(OUT_WARN, __VA_ARGS__)
#define out_note(...) out_message(OUT_PLAIN, __VA_ARGS__)
void out_message(enum out_tone tone, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* "       <text>" on standard error: what to do about the error just reported; `key` of it in its JSON document. */
#define out_hint(...) out_detail("hint", "", __VA_ARGS__)
void out_detail(const char *key, const char *label, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* A complete error on standard error: what failed, where (may be NULL), why, and what to do (may be NULL or ""). */
void out_problem(const char *what, const char *where, const char *why, const char *hint);

/* Flushes standard output. CMD_FINE, or CMD_FAILED after reporting, once, why it could not be written. */
int out_finish(void);

/*
 * --- progress of a long command, on standard error (progress.c) ---
 *
 * On a terminal one line is rewritten at most six times a second; elsewhere a plain line is printed every few seconds.
 * Nothing is shown during the first second. A command has at most one progress at a time.
 */

/* `label` is copied. progress_stop() clears the line; it may be called at any time. */
void progress_start(const char *label);
void progress_stop(void);

/* `done` of `total` steps (0: unknown) are done; the text describes the current one. Cheap: call it for every step. */
void progress_update(long done, long total, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Updates the elapsed time; to be called while waiting. */
void progress_tick(void);

/* Clears the line so that other output can be written; the next update shows it again. */
void progress_hide(void);

/*
 * --- the end without a report (ending.c) ---
 *
 * The JSON document of a command that was refused, failed early, timed out or was interrupted; its schema is
 * common/ending.json. With --json, standard output is one document. It is empty only after a usage error (cmd_usage(),
 * exit code 2), or if a signal ended the command.
 */

/* Enables the document for a command called with --json. Child processes never write it. */
void ending_expect(const char *command);

/* Disables the document: other output is written to standard output, or none at all. */
void ending_dismiss(void);

/* Adds an error printed to standard error, in a sentence; and a detail of the last one: "where", "why" or "hint". */
void ending_add(const char *what);
void ending_detail(const char *key, const char *text);

/*
 * Writes the document, if it is still enabled: `verdict` (NULL: the first error, or the meaning of `code`), all errors,
 * and the exit code `code`. A failure to write standard output has been reported already.
 */
void ending_write(int code, const char *verdict);

/*
 * ending_write_late() writes the document from another thread, while the main thread hangs and may hold stdio locks.
 * The caller must end the process at once. The main thread can write no report from then on.
 */
void ending_write_late(int code, const char *what, const char *where, const char *why, const char *hint);

/* For memory_init(). */
void ending_write_memory(void);

/*
 * --- standard output and standard error (terminal.c) ---
 *
 * Text may come from file names, options, other machines and drivers. After stream_open() everything printed to stdout
 * and stderr passes a filter: control, bidirectional and invisible characters become '?', or escapes in JSON. epkit's
 * own control sequences, for colours and the progress line, are written by stream_control().
 */

/* Replaces stdout and stderr by filtering streams. To be called once, before anything is printed. 0, or -1. */
int stream_open(void);

/* Writes a control sequence of epkit, after what was printed before. */
void stream_control(FILE *stream, const char *sequence);

/* json_dumps() with invisible characters as \u escapes; to be freed, NULL without memory. */
char *stream_json_text(const json_t *document, size_t flags);

/*
 * Prints one JSON document and a newline to any stream; invisible characters become \u escapes. `flags` as for
 * json_dumps(). A signal that ends the process does so before or after all of it, unless the reader stalls. 0, or -1
 * with errno.
 */
int stream_json(FILE *stream, const json_t *document, size_t flags);

/* errno of the first write to the stream that failed, or 0. (errno itself may be of a later flush.) */
int stream_error(FILE *stream);

#endif
