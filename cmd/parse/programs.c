/* SPDX-License-Identifier: Apache-2.0 */
/* programs.c - test programs whose lines are rows of recipes/programs.json. */
#include "common/embedded.h"
#include "common/json.h"
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const struct embedded programs_builtin[];

enum field { NONE, SIZE, TIME, NVL, RDMA, BUS, ALG, RANKS, X, N_FIELDS };

static const char *const fields[N_FIELDS] = {"-", "size", "time", "nvl", "rdma", "bus", "alg", "ranks", "x"};

enum role { BEGIN, ALSO, LINE, N_ROLES };

struct program_form {
    enum role role;
    const json_t *program;
    enum parse_dialect dialect;
    const char *title, *form;
    const json_t *row; /* of LINE; others: NULL */
    enum field fields[LEX_NUMBERS];
    size_t n_fields, end; /* end: index of the first form of the next program */
};

static const char *option(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

static void add_forms(struct parser *parser, const json_t *program, const json_t *rows, enum role role)
{
    const json_t *row, *name;
    size_t i, j;

    json_array_foreach (rows, i, row) {
        struct program_form *grown = realloc(parser->forms, (parser->n_forms + 1) * sizeof(*grown)), *form;

        if (!grown) {
            parser->has_failed_alloc = true;
            return;
        }
        parser->forms = grown;
        form = &grown[parser->n_forms++];
        *form = (struct program_form){.role = role, .program = program, .title = json_text(program, "title")};
        form->form = role == LINE ? json_text(row, "form") : json_string_value(row);
        form->row = role == LINE ? row : NULL;
        parser->begins[(unsigned char)*form->form] |= role != LINE;
        form->dialect = PARSE_PROGRAM;
        for (int dialect = 0; dialect < PARSE_N_DIALECTS; dialect++)
            if (strcmp(json_text(program, "dialect"), parse_dialect_name((enum parse_dialect)dialect)) == 0)
                form->dialect = (enum parse_dialect)dialect;
        json_array_foreach (json_object_get(form->row, "is"), j, name)
            for (enum field field = NONE; field < N_FIELDS && j < LEX_NUMBERS; field++)
                if (strcmp(fields[field], json_string_value(name)) == 0)
                    form->fields[form->n_fields++] = field;
    }
}

bool programs_load(struct parser *parser)
{
    const json_t *program, *lines;
    size_t i;

    parser->programs = json_loadb(programs_builtin[0].text, programs_builtin[0].bytes, 0, NULL);
    json_array_foreach (json_object_get(parser->programs, "programs"), i, program) {
        lines = json_object_get(program, "lines");
        if (json_is_string(lines))
            lines = json_object_get(json_object_get(parser->programs, "tables"), json_string_value(lines));
        add_forms(parser, program, json_object_get(program, "begin"), BEGIN);
        add_forms(parser, program, json_object_get(program, "also"), ALSO);
        add_forms(parser, program, lines, LINE);
        for (size_t k = parser->n_forms; k > 0 && parser->forms[k - 1].program == program; k--)
            parser->forms[k - 1].end = parser->n_forms;
    }
    return parser->n_forms > 0 && !parser->has_failed_alloc;
}

void programs_free(struct parser *parser)
{
    free(parser->forms);
    json_decref(parser->programs);
}

/* Is the figure the one to keep: of the largest size, of the slowest rank, or the best? */
static bool is_kept(const struct parse_measure *measure, const double *values, double rate, bool is_best)
{
    if (isnan(measure->bytes) && isnan(measure->time_us))
        return true;
    if (is_best)
        return isnan(rate) ? values[TIME] < measure->time_us : rate > measure->max;
    return isnan(values[SIZE]) ? values[TIME] > measure->time_us : values[SIZE] >= measure->bytes;
}

static void keep(struct parse_measure *measure, const struct program_form *form, const double *values)
{
    double rate = !isnan(values[RDMA]) ? values[RDMA] : !isnan(values[NVL]) ? values[NVL] : values[BUS];
    bool is_new = is_kept(measure, values, rate, json_is_true(json_object_get(form->program, "best")));
    double *const figures[N_FIELDS] = {NULL,
                                       &measure->bytes,
                                       &measure->time_us,
                                       &measure->nvl_gbps,
                                       &measure->rdma_gbps,
                                       &measure->bus_gbps,
                                       &measure->alg_gbps};

    if (!isnan(values[SIZE]) || !isnan(values[X]))
        measure_point(measure, isnan(values[SIZE]) ? values[X] : values[SIZE], rate, values[TIME]);
    for (enum field field = SIZE; field <= ALG; field++)
        if (!isnan(values[field]) && (is_new || isnan(*figures[field])))
            *figures[field] = values[field];
    measure->is_final = form->dialect != PARSE_PERFTEST;
    if (isnan(rate))
        measure->n++;
    else
        measure_sample(measure, rate);
}

/* The figures of a line, for the operation that it or an earlier line names. */
static void read_figures(struct stream *stream, struct parse_run *run, const struct program_form *form,
                         const double *numbers)
{
    const char *op = stream->program_op ? stream->program_op : option(form->program, "op");
    const char *ends = option(form->program, "ends"), *type = stream->program_type ? stream->program_type : "";
    const json_t *unit = json_object_get(form->row, "unit");
    struct parse_measure *measure;
    double values[N_FIELDS];

    for (int i = 0; i < N_FIELDS; i++)
        values[i] = NAN;
    for (size_t i = 0; i < form->n_fields; i++)
        values[form->fields[i]] =
            numbers[i] * (form->fields[i] >= NVL && form->fields[i] <= ALG && unit ? json_number_value(unit) : 1);
    if (!isnan(values[RANKS]))
        run->ranks = (int64_t)values[RANKS];
    if (form->n_fields <= !isnan(values[RANKS]) || !op)
        return;
    measure = run_measure(run, op, type, stream->program_config ? stream->program_config : "");
    if (!measure)
        return;
    snprintf(measure->device, sizeof(measure->device), "%.31s", form->dialect == PARSE_PERFTEST ? run->device : "");
    keep(measure, form, values);
    run->is_complete = run->is_complete || !ends || strcmp(ends, op) == 0;
}

static void apply(struct parser *parser, struct stream *stream, struct parse_run *run, const struct program_form *form,
                  const char *text, const char *rest, const double *numbers)
{
    const json_t *row = form->row;

    run->last_line = parser->line_number;
    if (option(row, "op")) {
        stream->program_op = option(row, "op");
        stream->program_type = json_text(row, "type");
    }
    if (option(row, "config"))
        stream->program_config = option(row, "config");
    if (option(row, "table"))
        stream->program_table = option(row, "table");
    if (option(row, "fails") && strstr(text, option(row, "fails")))
        run_problem(run, text, 0);
    if (json_is_true(json_object_get(row, "opens")))
        run->is_complete = false;
    if (option(row, "device"))
        snprintf(run->device, sizeof(run->device), "%.*s", (int)strcspn(text, " "), text);
    if (json_is_true(json_object_get(row, "device")))
        snprintf(run->device, sizeof(run->device), "%.*s", (int)strcspn(rest, " "), rest);
    parser->totals.unreadable += json_is_true(json_object_get(row, "torn"));
    read_figures(stream, run, form, numbers);
    if (json_is_true(json_object_get(row, "ends")) && stream->program_table && run->n_measures > 0) {
        run->is_complete = true;
        stream->program_table = "";
    }
}

/* Does the row hold for the table that the run is in? */
static bool is_in_table(const struct stream *stream, const struct program_form *form)
{
    const char *table = option(form->row, "in");

    return !table || (stream->program_table && strcmp(table, stream->program_table) == 0);
}

bool program_begins(const struct parser *parser, const char *line)
{
    double numbers[LEX_NUMBERS];
    char text[512];

    if (!parser->begins[(unsigned char)line[strspn(line, " \t")]] || !lex_squeeze(line, text, sizeof(text)))
        return false;
    for (size_t i = 0; i < parser->n_forms; i++) {
        if (parser->forms[i].role == LINE)
            i = parser->forms[i].end - 1;
        else if (lex_match(text, parser->forms[i].form, numbers))
            return true;
    }
    return false;
}

bool program_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    double numbers[LEX_NUMBERS];
    bool is_known = false;
    char text[512];

    /* Nearly all lines of a log are of none of these programs. */
    if (!stream || (!parser->begins[(unsigned char)line[strspn(line, " \t")]] && !stream->open[PARSE_PROGRAM] &&
                    !stream->open[PARSE_PERFTEST] && !stream->open[PARSE_EPKIT_BENCH]))
        return false;
    if (!lex_squeeze(line, text, sizeof(text)))
        return false;
    for (size_t i = 0; i < parser->n_forms; i++) {
        const struct program_form *form = &parser->forms[i];
        struct parse_run *run = stream->open[form->dialect];
        const char *rest = NULL;

        if (form->role == LINE && (!run || strcmp(run->title, form->title) != 0))
            i = form->end - 1;
        else if (form->role == LINE ? is_in_table(stream, form) : !is_known)
            rest = lex_match(text, form->form, numbers);
        if (!rest)
            continue;
        if (form->role == LINE) {
            apply(parser, stream, run, form, text, rest, numbers);
            return true;
        }
        is_known = true; /* of several titles that fit, the first */
        if (form->role == ALSO && run && (form->dialect != PARSE_PROGRAM || strcmp(run->title, form->title) == 0))
            continue;
        if (!run || strcmp(run->title, form->title) != 0 || run->n_measures > 0 || stream->program_begin == i) {
            run = run_begin(parser, form->dialect, form->title);
            stream->program_op = stream->program_type = stream->program_config = stream->program_table = NULL;
        }
        stream->program_begin = i;
        if (!run)
            return true;
        run->started = form->role == BEGIN; /* the start of the log was seen */
    }
    return is_known;
}
