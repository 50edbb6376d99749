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

enum field { NONE, SIZE, TIME, NVL, RDMA, BUS, ALG, MB, RANKS, N_FIELDS };

static const char *const fields[N_FIELDS] = {
    [NONE] = "-",  [SIZE] = "size", [TIME] = "time", [NVL] = "nvl",     [RDMA] = "rdma",
    [BUS] = "bus", [ALG] = "alg",   [MB] = "mb",     [RANKS] = "ranks",
};

enum role { BEGIN, ALSO, LINE };

struct program_form {
    enum role role;
    const char *program, *ends; /* title of the program; the operation whose figures come last */
    const char *form, *op, *type, *config, *fails;
    bool opens;
    enum field fields[LEX_NUMBERS];
    size_t n_fields;
};

static struct program_form *add_form(struct parser *parser, const json_t *program, const char *form, enum role role)
{
    struct program_form *grown = realloc(parser->forms, (parser->n_forms + 1) * sizeof(*grown));

    if (!grown)
        return NULL;
    parser->forms = grown;
    grown += parser->n_forms++;
    *grown = (struct program_form){
        .role = role,
        .program = json_text(program, "title"),
        .ends = json_string_value(json_object_get(program, "ends")),
        .form = form,
    };
    return grown;
}

static bool add_program(struct parser *parser, const json_t *program)
{
    const json_t *row, *name;
    size_t i, j;

    json_array_foreach (json_object_get(program, "begin"), i, row)
        if (!add_form(parser, program, json_string_value(row), BEGIN))
            return false;
    json_array_foreach (json_object_get(program, "also"), i, row)
        if (!add_form(parser, program, json_string_value(row), ALSO))
            return false;
    json_array_foreach (json_object_get(program, "lines"), i, row) {
        struct program_form *form = add_form(parser, program, json_text(row, "form"), LINE);

        if (!form)
            return false;
        form->op = json_string_value(json_object_get(row, "op"));
        form->type = json_text(row, "type");
        form->config = json_string_value(json_object_get(row, "config"));
        form->fails = json_string_value(json_object_get(row, "fails"));
        form->opens = json_is_true(json_object_get(row, "opens"));
        json_array_foreach (json_object_get(row, "is"), j, name)
            for (enum field field = NONE; field < N_FIELDS && j < LEX_NUMBERS; field++)
                if (strcmp(fields[field], json_string_value(name)) == 0)
                    form->fields[form->n_fields++] = field;
    }
    return true;
}

bool programs_load(struct parser *parser)
{
    const json_t *program;
    size_t i;

    parser->programs = json_loadb(programs_builtin[0].text, programs_builtin[0].bytes, 0, NULL);
    json_array_foreach (json_object_get(parser->programs, "programs"), i, program)
        if (!add_program(parser, program))
            return false;
    return parser->n_forms > 0;
}

void programs_free(struct parser *parser)
{
    free(parser->forms);
    json_decref(parser->programs);
}

/* One space for each run of spaces, and none at the ends. false: longer than any form. */
static bool squeeze(const char *line, char *ret_text, size_t bytes)
{
    size_t n = 0;

    for (; *line; line++) {
        bool is_space = *line == ' ' || *line == '\t';

        if (is_space && (n == 0 || ret_text[n - 1] == ' '))
            continue;
        if (n == bytes - 1)
            return false;
        ret_text[n++] = is_space ? ' ' : *line;
    }
    n -= n > 0 && ret_text[n - 1] == ' ';
    ret_text[n] = '\0';
    return n > 0;
}

/* What the numbers of a line say of a measure. */
static void keep(struct parse_measure *measure, const struct program_form *form, const double *numbers)
{
    double values[N_FIELDS], rate;
    bool is_later = isnan(measure->bytes) && isnan(measure->time_us);

    for (int i = 0; i < N_FIELDS; i++)
        values[i] = NAN;
    for (size_t i = 0; i < form->n_fields; i++)
        values[form->fields[i]] = numbers[i];
    if (!isnan(values[MB]))
        values[BUS] = values[MB] / 1000;
    is_later = is_later || values[SIZE] >= measure->bytes || (isnan(values[SIZE]) && values[TIME] > measure->time_us);
    rate = !isnan(values[RDMA]) ? values[RDMA] : !isnan(values[NVL]) ? values[NVL] : values[BUS];
    if (!isnan(values[SIZE]))
        measure_point(measure, values[SIZE], rate, values[TIME]);
    const struct {
        double *to;
        enum field from;
    } all[] = {{&measure->bytes, SIZE},    {&measure->time_us, TIME}, {&measure->nvl_gbps, NVL},
               {&measure->rdma_gbps, RDMA}, {&measure->bus_gbps, BUS}, {&measure->alg_gbps, ALG}};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++)
        if (!isnan(values[all[i].from]) && (is_later || isnan(*all[i].to)))
            *all[i].to = values[all[i].from];
    measure->is_final = true;
    if (isnan(rate))
        measure->n++;
    else
        measure_sample(measure, rate);
}

static void apply(struct stream *stream, struct parse_run *run, const struct program_form *form, const char *text,
                  const double *numbers)
{
    struct parse_measure *measure;
    const char *op;

    stream->program_op = form->op ? form->op : stream->program_op;
    stream->program_config = form->config ? form->config : stream->program_config;
    op = stream->program_op;
    run->is_complete = run->is_complete && !form->opens;
    if (form->fails && strstr(text, form->fails))
        run_problem(run, text, 0);
    if (form->n_fields > 0 && form->fields[0] == RANKS)
        run->ranks = (int64_t)numbers[0];
    else if (form->n_fields > 0 && op) {
        measure = run_measure(run, op, form->type, stream->program_config ? stream->program_config : "");
        if (measure)
            keep(measure, form, numbers);
        run->is_complete = run->is_complete || !form->ends || strcmp(form->ends, op) == 0;
    }
}

bool program_begins(const struct parser *parser, const char *line)
{
    double numbers[LEX_NUMBERS];
    char text[512];

    for (size_t i = 0; squeeze(line, text, sizeof(text)) && i < parser->n_forms; i++)
        if (parser->forms[i].role != LINE && lex_match(text, parser->forms[i].form, numbers))
            return true;
    return false;
}

bool program_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *run = stream ? stream->open[PARSE_PROGRAM] : NULL;
    double numbers[LEX_NUMBERS];
    bool is_known = false;
    char text[512];

    if (!stream || !squeeze(line, text, sizeof(text)))
        return false;
    for (size_t i = 0; i < parser->n_forms; i++) {
        const struct program_form *form = &parser->forms[i];
        bool is_open = run && strcmp(run->title, form->program) == 0;

        if ((form->role == LINE ? !is_open : is_known) || !lex_match(text, form->form, numbers))
            continue;
        if (form->role == LINE) {
            run->last_line = parser->line_number;
            apply(stream, run, form, text, numbers);
            return true;
        }
        if (!is_open || (form->role == BEGIN && run->n_measures > 0)) {
            run = run_begin(parser, PARSE_PROGRAM, form->program);
            stream->program_op = stream->program_config = NULL;
        }
        is_known = true; /* of several titles that fit, the first */
        if (!run)
            return true;
    }
    return is_known;
}
