/* SPDX-License-Identifier: Apache-2.0 */
#include "output.h"
#include "cmd.h"
#include "launched_by.h"
#include "memory.h"
#include "redact.h"

#include "dir.h"

#include <epkit/types.h>
#include <errno.h>
#include <libsmartcols.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool out_is_terminal(FILE *stream)
{
    const char *term = getenv("TERM");

    /* Open MPI gives its ranks a pseudo-terminal even if its own output is none. */
    return isatty(stream == stderr ? STDERR_FILENO : STDOUT_FILENO) && term && strcmp(term, "dumb") != 0 &&
           !ranks_env_is_launched();
}

static bool wants_colour(FILE *stream)
{
    const char *no_color = getenv("NO_COLOR");

    return out_is_terminal(stream) && !(no_color && *no_color);
}

void out_tone(FILE *stream, enum out_tone tone)
{
    static const char *const sequences[] = {
        [OUT_PLAIN] = "\033[0m", [OUT_GOOD] = "\033[32m", [OUT_BAD] = "\033[31m",
        [OUT_WARN] = "\033[33m", [OUT_FAINT] = "\033[2m",
    };

    static enum out_tone current[2];
    enum out_tone *mine = &current[stream == stderr];

    if ((stream != stdout && stream != stderr) || *mine == tone || !wants_colour(stream))
        return;
    *mine = tone;
    stream_control(stream, sequences[tone]);
}

/* A text without secrets, for free(). */
static char *__attribute__((format(printf, 1, 0))) make_text(const char *format, va_list args)
{
    char *text = memory_vprintf(format, args), *shown = redact_text(text);

    free(text);
    return shown;
}

void out_verdict(enum out_tone tone, const char *format, ...)
{
    char *text = WITH_ARGS(args, format, make_text(format, args));

    progress_hide();
    ending_dismiss();
    out_tone(stdout, tone);
    fputs(text, stdout);
    out_tone(stdout, OUT_PLAIN);
    putchar('\n');
    fflush(stdout);
    free(text);
}

/* Formats a message as one line: newlines in names become spaces. To be freed. */
static char *__attribute__((format(printf, 1, 0))) make_line(const char *format, va_list args)
{
    char *text = make_text(format, args);

    for (char *at = text; *at; at++)
        if (*at == '\n')
            *at = ' ';
    return text;
}

static void print_line(const char *text)
{
    fprintf(stderr, "%s\n", text);
    fflush(stderr);
}

void out_message(enum out_tone tone, const char *format, ...)
{
    char *text = WITH_ARGS(args, format, make_line(format, args));

    progress_hide();
    fflush(stdout);
    fputs("epkit: ", stderr);
    out_tone(stderr, tone);
    fputs(tone == OUT_BAD ? "error: " : tone == OUT_WARN ? "warning: " : "", stderr);
    out_tone(stderr, OUT_PLAIN);
    print_line(text);
    if (tone == OUT_BAD)
        ending_add(text);
    free(text);
}

void out_detail(const char *key, const char *label, const char *format, ...)
{
    char *text = WITH_ARGS(args, format, make_line(format, args));

    progress_hide();
    fprintf(stderr, "       %s", label);
    print_line(text);
    ending_detail(key, text);
    free(text);
}

void out_problem(const char *what, const char *where, const char *why, const char *hint)
{
    out_error("%s", what);
    if (where && *where)
        out_detail("where", "where: ", "%s", where);
    if (why && *why)
        out_detail("why", "why:   ", "%s", why);
    if (hint && *hint)
        out_detail("hint", "hint:  ", "%s", hint);
}

int out_finish(void)
{
    static bool is_reported;
    int reason;

    fflush(stdout);
    reason = stream_error(stdout);
    if (reason == 0)
        return CMD_FINE;
    /* No report if the reader has exited (a pipe to head), or if a signal ends the command. */
    if (!is_reported && reason != EPIPE && reason != EINTR) {
        is_reported = true;
        out_error("writing to standard output: %s", write_reason(reason));
    }
    return CMD_FAILED;
}

json_t *out_name(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *clean = memory_new(1, bytes);
    json_t *string;

    text_clean(text, clean, bytes);
    string = json_string(clean);
    free(clean);
    return string;
}

json_t *out_text(const char *text)
{
    json_t *string = json_string(text);

    return string ? string : out_name(text);
}

json_t *out_time(time_t when)
{
    char text[TEXT_TIME_BYTES];

    return json_string(text_time(when, text));
}

json_t *out_text_or_null(const char *text)
{
    return *text ? out_text(text) : json_null();
}

json_t *out_document(const char *command)
{
    return json_pack("{s:i, s:s, s:s}", "schema_version", OUT_SCHEMA_VERSION, "epkit", ep_version(), "subcommand",
                     command);
}

int out_json(json_t *document)
{
    json_t *shown = redact_document(document);
    int result;

    json_decref(document);
    progress_hide();
    ending_dismiss();
    result = stream_json(stdout, shown, JSON_INDENT(2) | JSON_REAL_PRECISION(9));
    json_decref(shown);
    if (out_finish() != CMD_FINE)
        return -1;
    if (result != 0)
        out_error("writing the JSON document: out of memory");
    return result;
}

int out_digits(int digits, double value)
{
    return digits != 1 || value <= 0 || value >= 1 ? digits : value < 0.01 ? 4 : 2;
}

/* The text of the cell: in `buffer` if it has to be formatted, else borrowed from the value. */
static const char *cell_text(const struct out_column *column, const json_t *row, char *buffer, size_t bytes)
{
    const json_t *value = json_object_get(row, column->key);

    if (json_is_string(value))
        return json_string_value(value);
    if (json_is_integer(value))
        snprintf(buffer, bytes, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
    else if (json_is_real(value))
        snprintf(buffer, bytes, "%.*f", out_digits(column->digits, json_real_value(value)), json_real_value(value));
    else if (json_is_boolean(value))
        return json_is_true(value) ? "yes" : "no";
    else
        return "";
    return buffer;
}

static const json_t *cell_of(const struct out_column *column, const json_t *rows, int i)
{
    return json_object_get(json_array_get(rows, (size_t)i), column->key);
}

static bool is_number_column(const struct out_column *column, const json_t *rows)
{
    return !ANY_OF(i, json_array_size(rows), json_is_string(cell_of(column, rows, i)));
}

static bool is_nonzero(const json_t *value)
{
    return json_is_string(value) ? *json_string_value(value) != '\0' : json_number_value(value) != 0;
}

static bool is_shown(const struct out_column *column, const json_t *rows)
{
    if (column->flags & OUT_NONZERO)
        return ANY_OF(i, json_array_size(rows), is_nonzero(cell_of(column, rows, i)));
    return !(column->flags & OUT_IF_PRESENT) ||
           ANY_OF(i, json_array_size(rows), cell_of(column, rows, i) && !json_is_null(cell_of(column, rows, i)));
}

/* libsmartcols aligns by the width of characters: replace invisible characters first. */
static int set_cell(struct libscols_line *line, size_t cell, const char *text)
{
    char *shown = redact_text(text);
    int result;

    text_clean(shown, shown, strlen(shown) + 1);
    result = scols_line_set_data(line, cell, shown);
    free(shown);
    return result;
}

static int fill_table(struct libscols_table *table, const struct out_column *columns, size_t n_columns,
                      const json_t *rows)
{
    char buffer[64];

    for (size_t c = 0; c < n_columns; c++) {
        int flags = (columns[c].flags & OUT_TRUNC) ? SCOLS_FL_TRUNC : 0;

        if ((columns[c].flags & OUT_RIGHT) || is_number_column(&columns[c], rows))
            flags |= SCOLS_FL_RIGHT;
        if (!scols_table_new_column(table, columns[c].title, 1, flags))
            return -1;
    }
    for (size_t i = 0; i < json_array_size(rows); i++) {
        struct libscols_line *line = scols_table_new_line(table, NULL);

        if (!line)
            return -1;
        for (size_t c = 0; c < n_columns; c++)
            if (set_cell(line, c, cell_text(&columns[c], json_array_get(rows, i), buffer, sizeof(buffer))) != 0)
                return -1;
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

/* --- HTML --- */

void out_html(FILE *stream, const char *text)
{
    static const char characters[] = "&<>\"'";
    static const char *const names[] = {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"};
    size_t left = text ? strlen(text) : 0, n;

    for (; left; text += n, left -= n) {
        const char *special = strchr(characters, *text), *shown = "?";
        size_t bytes = 1;

        n = text_printable(text, left, &shown, &bytes);
        n = n ? n : left;
        if (special)
            fputs(names[special - characters], stream);
        /* Control characters are not allowed in HTML; others may reverse or hide what is around them. */
        else if ((unsigned char)*text >= 0x20 || *text == '\n' || *text == '\t')
            fwrite(shown, 1, bytes, stream);
    }
}

/* The class of a cell: words that rate something have a colour. */
static const char *class_of(const json_t *value)
{
    static const char *const words[][2] = {
        {"passed", "good"}, {"in range", "good"},   {"improvement", "good"}, {"slow", "warn"},
        {"failed", "bad"},  {"unsupported", "bad"}, {"regression", "bad"},   {"not run", "warn"},
    };

    if (json_is_number(value))
        return "n";
    for (size_t i = 0; i < COUNT(words) && json_is_string(value); i++)
        if (strcmp(words[i][0], json_string_value(value)) == 0)
            return words[i][1];
    return "";
}

static void print_html(FILE *stream, const struct out_column *columns, size_t n_columns, const json_t *rows)
{
    char buffer[64];

    fputs("<table><thead><tr>", stream);
    for (size_t c = 0; c < n_columns; c++) {
        fputs(is_number_column(&columns[c], rows) ? "<th class=\"n\">" : "<th>", stream);
        out_html(stream, columns[c].title);
        fputs("</th>", stream);
    }
    fputs("</tr></thead><tbody>\n", stream);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        const json_t *row = json_array_get(rows, i);

        fputs("<tr>", stream);
        for (size_t c = 0; c < n_columns; c++) {
            /* On a narrow page each row is a card, whose values have their titles beside them. */
            fprintf(stream, "<td class=\"%s\" data-label=\"", class_of(json_object_get(row, columns[c].key)));
            out_html(stream, columns[c].title);
            fputs("\">", stream);
            out_html(stream, cell_text(&columns[c], row, buffer, sizeof(buffer)));
            fputs("</td>", stream);
        }
        fputs("</tr>\n", stream);
    }
    fputs("</tbody></table>\n", stream);
}

int out_table(FILE *stream, const struct out_column *all, size_t n_all, const json_t *rows, enum out_format format)
{
    struct out_column *columns = memory_new(n_all, sizeof(*columns));
    size_t n_columns = 0;
    int result = 0;

    for (size_t c = 0; c < n_all; c++)
        if (is_shown(&all[c], rows))
            columns[n_columns++] = all[c];
    progress_hide();
    if (stream == stdout)
        ending_dismiss();
    if (format == OUT_HTML)
        print_html(stream, columns, n_columns, rows);
    else
        result = print_table(stream, columns, n_columns, rows);
    free(columns);
    if (stream == stdout && out_finish() != CMD_FINE)
        return -1;
    if (result == 0 && fflush(stream) == 0 && !ferror(stream))
        return 0;
    if (stream == stdout)
        out_error("writing a table: out of memory");
    return -1;
}

int out_print(const struct out_column *columns, size_t n_columns, json_t *rows)
{
    int result = out_table(stdout, columns, n_columns, rows, OUT_TABLE);

    json_decref(rows);
    return result;
}
