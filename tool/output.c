/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"
#include "cmd.h"
#include "progress.h"
#include "ranks_internal.h"

#include <epkit/types.h>
#include <errno.h>
#include <libsmartcols.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool out_is_terminal(FILE *stream)
{
    const char *term = getenv("TERM");

    /* Open MPI gives its ranks a pseudo-terminal, whatever its own output is. */
    return isatty(fileno(stream)) && term && strcmp(term, "dumb") != 0 && ranks_world_rank() < 0;
}

static bool wants_colour(FILE *stream)
{
    const char *no_color = getenv("NO_COLOR");

    return out_is_terminal(stream) && !(no_color && *no_color);
}

const char *out_tone_begin(FILE *stream, enum out_tone tone)
{
    static const char *const sequences[] = {
        [OUT_PLAIN] = "",        [OUT_GOOD] = "\033[32m", [OUT_BAD] = "\033[31m",
        [OUT_WARN] = "\033[33m", [OUT_FAINT] = "\033[2m",
    };

    return wants_colour(stream) ? sequences[tone] : "";
}

const char *out_tone_end(FILE *stream, enum out_tone tone)
{
    return tone != OUT_PLAIN && wants_colour(stream) ? "\033[0m" : "";
}

void out_verdict(enum out_tone tone, const char *format, ...)
{
    va_list args;

    progress_hide();
    fputs(out_tone_begin(stdout, tone), stdout);
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("%s\n", out_tone_end(stdout, tone));
    fflush(stdout);
}

void out_line(const char *format, ...)
{
    va_list args;

    progress_hide();
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    putchar('\n');
    fflush(stdout);
}

static void __attribute__((format(printf, 3, 0)))
print_message(enum out_tone tone, const char *label, const char *format, va_list args)
{
    progress_hide();
    fflush(stdout);
    fprintf(stderr, "epkit: %s%s%s", out_tone_begin(stderr, tone), label, out_tone_end(stderr, tone));
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
}

void out_error(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    print_message(OUT_BAD, "error: ", format, args);
    va_end(args);
}

void out_warning(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    print_message(OUT_WARN, "warning: ", format, args);
    va_end(args);
}

void out_hint(const char *format, ...)
{
    va_list args;

    progress_hide();
    fputs("       ", stderr);
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
}

void out_problem(const char *what, const char *where, const char *why, const char *hint)
{
    out_error("%s", what);
    if (where && *where)
        out_hint("where: %s", where);
    if (why && *why)
        out_hint("why:   %s", why);
    if (hint && *hint)
        out_hint("hint:  %s", hint);
}

int out_finish(void)
{
    if (fflush(stdout) == 0 && !ferror(stdout))
        return CMD_FINE;
    /* The reader has gone (a pipe to head): nobody is left to tell. */
    if (errno != EPIPE)
        out_error("writing to standard output: %s", strerror(errno));
    clearerr(stdout);
    return CMD_FAILED;
}

json_t *out_document(const char *verb)
{
    return json_pack("{s:i, s:s, s:s}", "schema_version", OUT_SCHEMA_VERSION, "epkit", ep_version(), "verb", verb);
}

int out_json(json_t *document)
{
    int result;

    progress_hide();
    result = json_dumpf(document, stdout, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(document);
    if (result != 0 || putchar('\n') == EOF || fflush(stdout) != 0)
        return out_finish() == CMD_FINE ? 0 : -1;
    return 0;
}

/* The cell as text: in `room` if it has to be formatted, else borrowed from the value. */
static const char *cell_text(const struct out_column *column, const json_t *row, char *room, size_t room_bytes)
{
    const json_t *value = json_object_get(row, column->key);

    if (json_is_string(value))
        return json_string_value(value);
    if (json_is_integer(value))
        snprintf(room, room_bytes, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else if (json_is_real(value))
        snprintf(room, room_bytes, "%.*f", column->digits, json_real_value(value));
    else if (json_is_boolean(value))
        return json_is_true(value) ? "yes" : "no";
    else
        return "";
    return room;
}

json_t *out_rows(const struct out_column *columns, size_t n_columns, const json_t *rows)
{
    json_t *result = json_array();

    for (size_t i = 0; i < json_array_size(rows); i++) {
        json_t *row = json_object();

        for (size_t c = 0; c < n_columns; c++) {
            json_t *value = json_object_get(json_array_get(rows, i), columns[c].key);

            json_object_set_new(row, columns[c].key, value ? json_incref(value) : json_null());
        }
        json_array_append_new(result, row);
    }
    return result;
}

static void print_csv_cell(FILE *stream, const char *text)
{
    if (!strpbrk(text, ",\"\r\n")) {
        fputs(text, stream);
        return;
    }
    fputc('"', stream);
    for (; *text; text++) {
        if (*text == '"')
            fputc('"', stream);
        fputc(*text, stream);
    }
    fputc('"', stream);
}

static void print_csv(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows)
{
    char room[64];

    for (size_t c = 0; c < n_columns; c++) {
        fputs(c ? "," : "", stream);
        print_csv_cell(stream, columns[c].key);
    }
    fputc('\n', stream);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        for (size_t c = 0; c < n_columns; c++) {
            fputs(c ? "," : "", stream);
            print_csv_cell(stream, cell_text(&columns[c], json_array_get(rows, i), room, sizeof(room)));
        }
        fputc('\n', stream);
    }
}

static bool is_number_column(const struct out_column *column, const json_t *rows)
{
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *value = json_object_get(json_array_get(rows, i), column->key);

        if (json_is_string(value))
            return false;
    }
    return true;
}

static bool is_shown(const struct out_column *column, const json_t *rows)
{
    if (!(column->flags & OUT_GIVEN))
        return !(column->flags & OUT_DATA);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *value = json_object_get(json_array_get(rows, i), column->key);

        if (value && !json_is_null(value))
            return true;
    }
    return false;
}

static int fill_table(struct libscols_table *table, const struct out_column *columns, size_t n_columns,
                      const json_t *rows)
{
    char room[64];

    for (size_t c = 0; c < n_columns; c++) {
        int flags = (columns[c].flags & OUT_TRUNC) ? SCOLS_FL_TRUNC : 0;

        if (!is_shown(&columns[c], rows))
            continue;
        if ((columns[c].flags & OUT_RIGHT) || is_number_column(&columns[c], rows))
            flags |= SCOLS_FL_RIGHT;
        if (!scols_table_new_column(table, columns[c].title, 1, flags))
            return -1;
    }
    for (size_t i = 0; i < json_array_size(rows); i++) {
        struct libscols_line *line = scols_table_new_line(table, NULL);
        size_t cell = 0;

        if (!line)
            return -1;
        for (size_t c = 0; c < n_columns; c++) {
            if (!is_shown(&columns[c], rows))
                continue;
            if (scols_line_set_data(line, cell++,
                                    cell_text(&columns[c], json_array_get(rows, i), room, sizeof(room))) != 0)
                return -1;
        }
    }
    return 0;
}

static int print_table(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows)
{
    struct libscols_table *table;
    int result;

    scols_init_debug(0);
    table = scols_new_table();
    if (!table)
        return -1;
    scols_table_set_stream(table, stream);
    result = fill_table(table, columns, n_columns, rows);
    if (result == 0)
        result = scols_print_table(table);
    scols_unref_table(table);
    return result == 0 ? 0 : -1;
}

int out_table(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows,
              enum out_format format)
{
    json_t *cut;
    int result = 0;

    progress_hide();
    switch (format) {
    case OUT_TABLE:
        result = print_table(stream, columns, n_columns, rows);
        break;
    case OUT_JSON:
        cut = out_rows(columns, n_columns, rows);
        result = json_dumpf(cut, stream, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
        json_decref(cut);
        fputc('\n', stream);
        break;
    case OUT_CSV:
        print_csv(stream, columns, n_columns, rows);
        break;
    }
    if (result == 0 && fflush(stream) == 0 && !ferror(stream))
        return 0;
    if (errno != EPIPE)
        out_error("writing a table: %s", strerror(errno));
    return -1;
}
