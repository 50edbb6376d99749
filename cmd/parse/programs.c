/* SPDX-License-Identifier: Apache-2.0 */
/* programs.c - test programs whose lines are rows of cmd/parse/programs.json. */
#include "common/embedded.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

extern const struct embedded programs_builtin[];

enum field { NONE, SIZE, TIME, NVL, RDMA, BUS, ALG, RANKS, X, RANK, CASE, CASES, PASSED, FAILED, N_FIELDS };

static const char *const fields[N_FIELDS] = {"-",     "size", "time", "nvl",  "rdma",  "bus",    "alg",
                                             "ranks", "x",    "rank", "case", "cases", "passed", "failed"};

#define MAX_IS 12     /* entries of "is" */
#define MAX_CASES 1e5 /* of epkit test */

enum role { BEGIN, ALSO, LINE, N_ROLES };

struct program_form {
    enum role role;
    const json_t *program;
    enum parse_dialect dialect;
    const char *title, *form;
    const json_t *row; /* of LINE; others: NULL */
    struct {
        enum field field;
        const json_t *next; /* instead of a number: the operation of those that follow */
    } is[MAX_IS];
    size_t n_is, end; /* end: index of the first form of the next program */
};

static const char *option(const json_t *row, const char *key)
{
    return json_string_value(json_object_get(row, key));
}

/* The forms of cmd/parse/programs.json, for all parsers: read once, and kept to the end of the process. */
static struct program_form *forms;
static size_t n_forms;
static const json_t *commands; /* that start ranks on nodes; borrowed */
static bool begins[256];       /* a first character of forms that begin a run */

static void add_forms(const json_t *program, const json_t *rows, enum role role)
{
    const json_t *name;

    FOR_JSON (row, rows) {
        struct program_form *form;

        /* Twice as many at each power of two: one at a time copies 100 MB where realloc() always moves. */
        if ((n_forms & (n_forms - 1)) == 0)
            forms = memory_grow(forms, (n_forms ? 2 * n_forms : 1) * sizeof(*forms));
        form = &forms[n_forms++];
        *form = (struct program_form){.role = role, .program = program, .title = json_text(program, "title")};
        form->form = role == LINE ? json_text(row, "form") : json_string_value(row);
        form->row = role == LINE ? row : NULL;
        begins[(unsigned char)*form->form] |= role != LINE;
        form->dialect = PARSE_PROGRAM;
        for (int dialect = 0; dialect < PARSE_N_DIALECTS; dialect++)
            if (strcmp(json_text(program, "dialect"), parse_dialect_name((enum parse_dialect)dialect)) == 0)
                form->dialect = (enum parse_dialect)dialect;
        for (size_t j = 0; (name = json_array_get(json_object_get(form->row, "is"), j)); j++) {
            if (j == MAX_IS)
                break;
            form->is[j].next = json_is_object(name) ? name : NULL;
            while (json_is_string(name) && form->is[j].field + 1 < N_FIELDS &&
                   strcmp(fields[form->is[j].field], json_string_value(name)) != 0)
                form->is[j].field++;
            form->n_is = j + 1;
        }
    }
}

void programs_load(void)
{
    static json_t *programs;
    const json_t *lines;

    if (programs)
        return;
    programs = json_loadb(programs_builtin[0].text, programs_builtin[0].bytes, 0, NULL);
    FOR_JSON (program, json_object_get(programs, "programs")) {
        lines = json_object_get(program, "lines");
        if (json_is_string(lines))
            lines = json_object_get(json_object_get(programs, "tables"), json_string_value(lines));
        add_forms(program, json_object_get(program, "begin"), BEGIN);
        add_forms(program, json_object_get(program, "also"), ALSO);
        add_forms(program, lines, LINE);
        for (size_t k = n_forms; k > 0 && forms[k - 1].program == program; k--)
            forms[k - 1].end = n_forms;
    }
    commands = json_object_get(programs, "commands");
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
    double rate = !isnan(values[RDMA])  ? values[RDMA]
                  : !isnan(values[NVL]) ? values[NVL]
                  : !isnan(values[BUS]) ? values[BUS]
                                        : values[ALG];
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

static void keep_values(struct stream *stream, struct parse_run *run, const struct program_form *form, const char *op,
                        const char *type, const double *values)
{
    const char *ends = option(form->program, "ends");
    bool has_figure = !isnan(values[SIZE]) || !isnan(values[X]);
    struct parse_measure *measure;

    for (enum field field = TIME; field <= ALG; field++)
        has_figure |= !isnan(values[field]);
    measure =
        has_figure && op ? run_measure(run, op, type, stream->program_config ? stream->program_config : "") : NULL;
    if (!measure)
        return;
    keep(measure, form, values);
    run->is_complete = run->is_complete || !ends || strcmp(ends, op) == 0;
}

/* The run of a rank, which prints each kind of line once in a run. */
static struct parse_run *run_of_rank(struct parser *parser, struct parse_run *run, const struct program_form *form,
                                     double rank)
{
    int number = (int)rank, kind = (int)json_integer_value(json_object_get(form->row, "kind"));
    uint8_t bit = (uint8_t)(1u << (number & 7));

    if (run_whole(run)->ll_seen[kind][number / 8] & bit)
        run = run_begin(parser, form->dialect, form->title);
    run_whole(run)->ll_seen[kind][number / 8] |= bit;
    if (run->ranks < number + 1)
        run->ranks = number + 1;
    return run;
}

/* A number that is no figure. The run that it is of; NULL: none. */
static struct parse_run *read_count(struct parser *parser, struct parse_run *run, const struct program_form *form,
                                    enum field field, double number)
{
    switch (field) {
    case RANKS:
        run->ranks = (int64_t)number;
        return run;
    case RANK:
        parser->totals.unreadable += number >= LL_MAX_RANKS;
        return number < LL_MAX_RANKS ? run_of_rank(parser, run, form, number) : NULL;
    case CASE: /* they count up */
        return run->is_complete || number <= run->started ? run_begin(parser, form->dialect, form->title) : run;
    case CASES:
        run->expected = (int)fmin(number, MAX_CASES);
        return run;
    case PASSED:
        run->passed = (int)fmin(number, MAX_CASES);
        run->is_complete = true;
        return run;
    case FAILED:
        run->failed = (int)fmin(number, MAX_CASES);
        return run;
    default:
        return run;
    }
}

/* The figures of a line, for the operation that it or an earlier line names. The run that it is of; NULL: none. */
static struct parse_run *read_figures(struct parser *parser, struct stream *stream, struct parse_run *run,
                                      const struct program_form *form, const double *numbers)
{
    const json_t *unit = json_object_get(form->row, "unit");
    const char *op = stream->program_op ? stream->program_op : option(form->program, "op");
    const char *type = stream->program_type ? stream->program_type : "";
    double values[N_FIELDS];

    for (size_t i = 0; run && i <= form->n_is; i++) {
        if (i == 0 || i == form->n_is || form->is[i].next) {
            if (i > 0)
                keep_values(stream, run, form, op, type, values);
            for (int k = 0; k < N_FIELDS; k++)
                values[k] = NAN;
        }
        if (i == form->n_is)
            break;
        if (form->is[i].next) {
            op = option(form->is[i].next, "op");
            type = json_text(form->is[i].next, "type");
            continue;
        }
        values[form->is[i].field] = *numbers++;
        if (unit && form->is[i].field >= NVL && form->is[i].field <= ALG)
            values[form->is[i].field] *= json_number_value(unit);
        run = read_count(parser, run, form, form->is[i].field, numbers[-1]);
    }
    return run;
}

static void apply(struct parser *parser, struct stream *stream, struct parse_run *run, const struct program_form *form,
                  const char *text, const char *rest, const double *numbers)
{
    const json_t *row = form->row;
    bool is_failure;

    run->last_line = parser->line_number;
    if (option(row, "op")) {
        stream->program_op = option(row, "op");
        stream->program_type = json_text(row, "type");
    }
    if (option(row, "config"))
        stream->program_config = option(row, "config");
    if (option(row, "table"))
        stream->program_table = option(row, "table");
    if (json_is_true(json_object_get(row, "opens")))
        run->is_complete = false;
    run->passed += json_is_true(json_object_get(row, "passes"));
    if (option(row, "device"))
        snprintf(run->device, sizeof(run->device), "%.*s", (int)strcspn(text, " "), text);
    if (json_is_true(json_object_get(row, "device")))
        snprintf(run->device, sizeof(run->device), "%.*s", (int)strcspn(rest, " "), rest);
    parser->totals.unreadable += json_is_true(json_object_get(row, "torn"));
    run = read_figures(parser, stream, run, form, numbers);
    if (!run)
        return;
    is_failure = option(row, "fails") && strstr(text, option(row, "fails"));
    if (is_failure)
        run_problem(run, text, NULL);
    if (form->dialect == PARSE_EPKIT_TEST && form->is[0].field == CASE) {
        run->failed += is_failure;
        run->passed += !is_failure;
        run->started = run->passed + run->failed;
    }
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

/* A line of cases whose total no matrix has is another program's. */
static const char *match(const struct program_form *form, const char *text, double *numbers)
{
    const char *rest;

    numbers[1] = 0;
    rest = lex_match(text, form->form, numbers);
    return rest && form->dialect == PARSE_EPKIT_TEST && numbers[1] > MAX_CASES ? NULL : rest;
}

bool program_begins(const char *line)
{
    double numbers[LEX_NUMBERS];
    char text[512];

    if (!begins[(unsigned char)line[strspn(line, " \t")]] || !lex_squeeze(line, text, sizeof(text)))
        return false;
    for (size_t i = 0; i < n_forms; i++) {
        if (forms[i].role == LINE)
            i = forms[i].end - 1;
        else if (match(&forms[i], text, numbers))
            return true;
    }
    return false;
}

static bool piece(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    double numbers[LEX_NUMBERS];
    bool is_known = false;
    char text[512];

    /* Nearly all lines of a log are of none of these programs. */
    if (!begins[(unsigned char)line[strspn(line, " \t")]] && !stream->open[PARSE_PROGRAM] &&
        !stream->open[PARSE_PERFTEST] && !stream->open[PARSE_EPKIT_BENCH] && !stream->open[PARSE_EPKIT_TEST] &&
        !stream->open[PARSE_DEEPEP_LOW_LATENCY])
        return false;
    if (!lex_squeeze(line, text, sizeof(text)))
        return false;
    for (size_t i = 0; i < n_forms; i++) {
        const struct program_form *form = &forms[i];
        struct parse_run *run = stream->open[form->dialect];
        const char *rest = NULL;

        if (form->role == LINE && (!run || strcmp(run->title, form->title) != 0))
            i = form->end - 1;
        else if (form->role == LINE ? is_in_table(stream, form) : !is_known)
            rest = match(form, text, numbers);
        if (!rest)
            continue;
        if (form->role == LINE) {
            apply(parser, stream, run, form, text, rest, numbers);
            return true;
        }
        is_known = true; /* of several titles that fit, the first */
        if (form->role == ALSO && run && (form->dialect != PARSE_PROGRAM || strcmp(run->title, form->title) == 0))
            continue;
        if (!run || strcmp(run->title, form->title) != 0 || run->n_measures > 0 ||
            (stream->program_begin == i && !json_is_true(json_object_get(form->program, "repeats")))) {
            run = run_begin(parser, form->dialect, form->title);
            stream->program_op = stream->program_type = stream->program_config = stream->program_table = NULL;
        }
        if (form->role == BEGIN && form->dialect != PARSE_EPKIT_TEST)
            run->started = 1; /* the start of the log was seen */
        stream->program_begin = i;
    }
    return is_known;
}

/* Finds "[rank 3] " before the figures of a rank; NULL: none. */
static const char *next_rank(const char *at)
{
    while ((at = strstr(at, "[rank ")) != NULL) {
        const char *end = strchr(at, ']');

        if (end && text_begins_any(end, TEXTS("] Dispatch ", "] Combine ")))
            return at;
        at++;
    }
    return NULL;
}

bool program_line(struct parser *parser, const char *line)
{
    const char *at = next_rank(line), *next;
    bool is_ours = false;
    char text[512];

    if (!at || (at > line && prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES) > 0))
        return piece(parser, line);
    /* Lines of several ranks may be glued. */
    for (; at; at = next) {
        size_t n;

        next = next_rank(at + 1);
        n = next ? (size_t)(next - at) : strlen(at);
        snprintf(text, sizeof(text), "%.*s", (int)(n < sizeof(text) ? n : sizeof(text) - 1), at);
        is_ours |= piece(parser, text);
    }
    return is_ours;
}

/* The number behind one of these options; 0: none. */
static double setting_of(const json_t *options, const char *text)
{
    double number;

    FOR_JSON (name, options)
        if (lex_after(text, json_string_value(name), &number) && number >= 1 && number <= 1e5)
            return number;
    return 0;
}

/* "host1:8,host2:8": the number of hosts; adds up their slots, if they are named. 0: it is in a variable. */
static int count_hosts(const char *list, double *slots)
{
    int n = 0;

    if (list[strcspn(list, "$ ")] == '$')
        return 0;
    for (const char *end = list; *list && *list != ' '; list = end + (*end == ',')) {
        const char *colon = list + strcspn(list, ":, ");
        double number = 0;

        end = list + strcspn(list, ", ");
        *slots += *colon == ':' && lex_number(colon + 1, NULL, &number) ? number : 0;
        n++;
    }
    return n;
}

void program_command(struct parser *parser, const char *line)
{
    double nodes, ranks;

    FOR_JSON (row, commands) {
        const char *text = strstr(line, json_text(row, "text"));

        if (!text)
            continue;
        text = json_is_true(json_object_get(row, "before")) ? line : text;
        nodes = setting_of(json_object_get(row, "nodes"), text);
        ranks = setting_of(json_object_get(row, "ranks"), text);
        if (ranks == 0)
            ranks = nodes * setting_of(json_object_get(row, "ranks_of_node"), text);
        FOR_JSON (name, json_object_get(row, "hosts")) {
            const char *list = strstr(text, json_string_value(name));
            double slots = 0;

            nodes = list ? count_hosts(list + json_string_length(name), &slots) : nodes;
            ranks = ranks > 0 ? ranks : slots;
        }
        /* Those of an earlier command are not of this one. */
        parser->heading_nodes = nodes > 0 ? (int)nodes : 0;
        parser->command_ranks = ranks >= 1 && ranks <= LL_MAX_RANKS ? (int64_t)ranks : 0;
        return;
    }
}
