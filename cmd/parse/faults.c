/* SPDX-License-Identifier: Apache-2.0 */
/* faults.c - lines that name a fault, whatever program printed them: cmd/parse/failures.json. */
#include "common/embedded.h"
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <ctype.h>
#include <regex.h>
#include <stdio.h>
#include <string.h>

#define TRACEBACK "Traceback (most recent call last)"

extern const struct embedded failures_builtin[];

/* As cmd/parse/failures.json explains them. The higher of two is the headline. */
enum kind { WARNING, STEP, LAUNCHER, BEGINNING, FRAME, EFFECT, WORD, TRACEBACK_END, EXCEPTION, FAULT };

static const char *const kinds[] = {"warning", "step", "launcher",  "beginning", "frame",
                                    "effect",  "word", "traceback", "exception", "fault"};

struct known {
    struct parse_known public;
    const char *text, *also; /* both must be in the line */
    const char *absent;      /* must not be in it */
    const json_t *next;      /* the line goes on with those that begin with one of these texts; NULL: it is whole */
    const char *after;       /* has to be in an earlier line of the stream; NULL: none */
    regex_t *pattern;        /* has to match it; NULL: none */
    bool is_perftest;        /* of that program alone, whose run it begins if none is open */
};

/* The rows of cmd/parse/failures.json, for all parsers: read once, and kept to the end of the process. */
static struct known *known;
static size_t n_known;

void faults_load(void)
{
    static json_t *failures;
    const json_t *rows, *row;

    if (failures)
        return;
    failures = json_loadb(failures_builtin[0].text, failures_builtin[0].bytes, 0, NULL);
    rows = json_object_get(failures, "failures");
    n_known = json_array_size(rows);
    known = memory_new(n_known, sizeof(*known));
    for (size_t i = 0; (row = json_array_get(rows, i)); i++) {
        const char *pattern = json_string_value(json_object_get(row, "pattern"));
        enum kind kind = WARNING;

        while (kind < FAULT && strcmp(kinds[kind], json_text(row, "kind")) != 0)
            kind++;
        known[i] = (struct known){
            .public = {.id = json_string_value(json_object_get(row, "id")),
                       .cause = json_text(row, "cause"),
                       .rank = (int)kind,
                       .is_fatal = kind > STEP,
                       .is_fatal_alone = kind == STEP,
                       .may_pass = kind == LAUNCHER || json_is_true(json_object_get(row, "may_pass")),
                       .is_specific = kind == FAULT},
            .text = json_text(row, "text"),
            .also = json_string_value(json_object_get(row, "also")),
            .absent = json_string_value(json_object_get(row, "absent")),
            .after = json_string_value(json_object_get(row, "after")),
            .next = json_object_get(row, "next"),
            .is_perftest = strcmp(json_text(row, "run"), "perftest") == 0,
            .pattern = pattern ? memory_new(1, sizeof(*known->pattern)) : NULL,
        };
        if (pattern && regcomp(known[i].pattern, pattern, REG_EXTENDED | REG_NOSUB) != 0)
            memory_end();
    }
}

/* Behind the name of a host, if that may stand in front. */
static const char *skip_host(const char *line)
{
    return line + prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES);
}

static bool is_indented(const char *line)
{
    return text_begins(line, "  ") || text_begins(skip_host(line), "  ");
}

/* "RuntimeError: text", "queue.Empty", "KeyboardInterrupt": the last line of a traceback. */
static bool is_exception(const char *text)
{
    size_t n = 0;

    while (isalnum((unsigned char)text[n]) || (n && text[n] == '.') || text[n] == '_')
        n++;
    return n && !isdigit((unsigned char)*text) && (text[n] == '\0' || text_begins(text + n, ": "));
}

/*
 * A traceback from the cleanup of an object is harmless: Python prints "Exception ignored in" in the line before. Its
 * first line that is not indented is the exception. Lines of other ranks may come between.
 */
static bool is_ignored(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    bool was_ignoring = stream->ignores_traceback;

    stream->ignores_traceback = strstr(line, "Exception ignored in") != NULL;
    if (strstr(line, TRACEBACK)) {
        stream->n_ignored = was_ignoring ? stream->n_ignored + 1 : 0;
        return was_ignoring;
    }
    if (stream->n_ignored == 0)
        return false;
    if (is_indented(line))
        return true;
    if (!is_exception(line) && !is_exception(skip_host(line)))
        return false;
    stream->n_ignored--;
    return true;
}

/* How far a traceback is indented by what quotes it; its frames are by two more. */
static size_t indent_of(const char *line)
{
    size_t n = strspn(line, " ");

    return n >= 2 && text_begins(line + n, "File \"") ? n - 2 : n;
}

/* The last line of the traceback in progress; lines of the code in it may contain the name of any exception. */
static bool may_end_traceback(const struct stream *stream, const char *line)
{
    const char *behind = skip_host(line);

    return stream->in_traceback && strspn(line, " ") <= stream->traceback_indent &&
           (behind == line || !text_begins(behind, "  "));
}

static bool holds(const struct known *row, const struct stream *stream, const char *line)
{
    if (row->public.rank == TRACEBACK_END && !may_end_traceback(stream, line))
        return false;
    if (row->public.rank == FRAME && !stream->is_over)
        return false;
    if (row->after && !(stream->after && strcmp(stream->after, row->after) == 0))
        return false;
    return strstr(line, row->text) && (!row->also || strstr(line, row->also)) &&
           !(row->absent && strstr(line, row->absent)) &&
           (!row->pattern || regexec(row->pattern, line, 0, NULL, 0) == 0);
}

static const struct known *find(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    const struct known *found = NULL;
    bool was_in = stream->in_traceback;

    /* A stack that a logger or a debugger prints is of no error. */
    stream->in_stack = strstr(line, "Stack (most recent call last)") || strstr(line, "(most recent call first)") ||
                       (stream->in_stack && is_indented(line));
    for (size_t i = 0; i < n_known && !found; i++) {
        const struct known *row = &known[i];

        if (row->after && strstr(line, row->after))
            stream->after = row->after;
        if (!row->is_perftest && holds(row, stream, line))
            found = row;
    }
    if (found) {
        stream->in_traceback =
            strcmp(found->text, TRACEBACK) == 0 ||
            (stream->in_traceback && found->public.rank != EXCEPTION && found->public.rank != TRACEBACK_END);
        stream->is_explained |= found->public.rank > FRAME;
    } else if (!stream->in_stack && strstr(line, "File \"") && strstr(line, "\", line ")) {
        stream->in_traceback = true; /* perhaps of one whose beginning is not there */
        snprintf(stream->frame, sizeof(stream->frame), "%s", line);
        stream->frame_line = parser->line_number;
    }
    if (!was_in && stream->in_traceback)
        stream->traceback_indent = indent_of(line);
    return found;
}

/* Otherwise than at its start a host name may precede it, which identifies the run that failed. */
bool perftest_failure(struct parser *parser, const char *line, bool is_whole)
{
    FOR_EACH (row, known, n_known) {
        const char *at = row->is_perftest ? strstr(line, row->text) : NULL;

        if (!at || (is_whole && at > line + strspn(line, " ")) || (row->also && !strstr(line, row->also)))
            continue;
        run_problem(run_need(parser, PARSE_PERFTEST, *parser->program ? parser->program : "perftest"),
                    line + strspn(line, " "), &row->public);
        return true;
    }
    return false;
}

/* The run in progress: the run of this stream that had the latest line. */
static struct parse_run *latest(struct parser *parser)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *best = NULL;

    for (int i = 0; i < PARSE_N_DIALECTS; i++)
        if (stream->open[i] && (!best || stream->open[i]->last_line > best->last_line))
            best = stream->open[i];
    if (best || parser->n_runs == 0)
        return best;
    return &parser->runs[parser->n_runs - 1]->public;
}

static void whole_line(struct parser *parser, const char *line, uint64_t line_number)
{
    const struct known *row = is_ignored(parser, line) ? NULL : find(parser, line);
    const struct parse_known *fault = row ? &row->public : NULL;
    bool is_loose = false;
    struct parse_fault *entry = parser->faults, *end = entry + parser->n_faults;
    char text[PARSE_TEXT];
    struct parse_run *run;

    if (!fault)
        return;
    /* Whole, if that is possible: columns of spaces may stand before what matters. */
    snprintf(text, sizeof(text), "%s", line + strspn(line, " "));
    if (strlen(line) >= sizeof(text))
        (void)lex_squeeze(line, text, sizeof(text));
    if (fault->is_fatal) {
        run = fault->rank == FRAME ? NULL : latest(parser); /* it is read at the end */
        is_loose = !run || strcmp(run->source, parser->source) != 0;
        if (!is_loose)
            run_problem(run, text, fault);
    }
    /* A step and a failure may have the same cause: the verdicts on them differ. */
    while (entry < end && (strcmp(entry->known->cause, fault->cause) != 0 || entry->known->rank != fault->rank))
        entry++;
    if (entry < end) {
        entry->count++;
        entry->is_loose |= is_loose;
        entry->last_line = line_number;
        return;
    }
    while (entry > parser->faults && entry[-1].known->rank < fault->rank)
        entry--;
    if (entry == parser->faults + MAX_FAULTS)
        return;
    parser->n_faults += parser->n_faults < MAX_FAULTS;
    memmove(entry + 1, entry, (size_t)(parser->faults + parser->n_faults - entry - 1) * sizeof(*entry));
    *entry = (struct parse_fault){
        .known = fault,
        .is_loose = is_loose,
        .line_number = line_number,
        .last_line = line_number,
        .count = 1,
    };
    snprintf(entry->line, sizeof(entry->line), "%s", text);
    snprintf(entry->source, sizeof(entry->source), "%s", parser->source);
    snprintf(entry->stream, sizeof(entry->stream), "%s", stream_now(parser)->key);
}

/* How a line goes on that a program breaks; NULL: it is whole. */
static const json_t *rest_of(const struct stream *stream, const char *line)
{
    for (size_t i = 0; i < n_known; i++)
        if (known[i].next && holds(&known[i], stream, line))
            return known[i].next;
    return NULL;
}

/* The text of the line, if it continues the one that is held; else NULL. */
static const char *continued(const struct stream *stream, const char *line)
{
    line = skip_host(line);
    line += strspn(line, " ");
    FOR_JSON (text, stream->next)
        if (text_begins(line, json_string_value(text)))
            return line;
    return NULL;
}

static void release(struct parser *parser, struct stream *stream)
{
    if (stream->next)
        whole_line(parser, stream->begun, stream->begun_line);
    stream->next = NULL;
}

void fault_begin(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);

    if (stream->next && !continued(stream, line))
        release(parser, stream);
}

void fault_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    const char *text = continued(stream, line);

    if (text) {
        text_append(stream->begun, sizeof(stream->begun), " %s", text);
        return;
    }
    release(parser, stream);
    stream->next = rest_of(stream, line);
    stream->begun_line = parser->line_number;
    if (stream->next)
        snprintf(stream->begun, sizeof(stream->begun), "%s", line);
    else
        whole_line(parser, line, parser->line_number);
}

void fault_end(struct parser *parser)
{
    struct stream *stream = stream_now(parser);

    release(parser, stream);
    stream->is_over = true;
    /* Of a traceback without its end the last frame says most. */
    if (stream->in_traceback && !stream->is_explained && *stream->frame)
        whole_line(parser, stream->frame, stream->frame_line);
}
