/* SPDX-License-Identifier: Apache-2.0 */
/* epkit_log.c - documents on one line or many: those of `epkit test|run|bench --json`, and how any is found in a log.
 */
#include "common/json.h"
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BARE "{\ntest_info:" /* how a document without quotes begins */

static int64_t integer_of(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);

    return json_is_integer(value) ? (int64_t)json_integer_value(value) : -1;
}

static void read_settings(struct parse_run *run, const json_t *parameters)
{
    const json_t *tokens = json_object_get(parameters, "tokens");

    run->tokens = json_is_array(tokens) ? (int64_t)json_integer_value(json_array_get(tokens, 0))
                                        : integer_of(parameters, "tokens");
    run->hidden = integer_of(parameters, "hidden");
    run->topk = integer_of(parameters, "topk");
    run->experts = integer_of(parameters, "experts");
    run->ranks = integer_of(parameters, "ranks");
    run->nodes = integer_of(parameters, "nodes");
}

static void read_test(struct parser *parser, json_t *document)
{
    char title[64];
    struct parse_run *run;

    snprintf(title, sizeof(title), "epkit test %.40s", json_text(document, "matrix"));
    run = run_begin(parser, PARSE_EPKIT_TEST, title);
    read_settings(run, json_object_get(document, "parameters"));
    run->expected = (int)integer_of(document, "total");
    run->passed = (int)integer_of(document, "passed");
    run->failed = (int)integer_of(document, "failed");
    run->started = run->passed + run->failed;
    run->is_complete = true;
    FOR_JSON (item, json_object_get(document, "cases")) {
        char text[PARSE_TEXT];

        if (!json_is_false(json_object_get(item, "passed")))
            continue;
        snprintf(text, sizeof(text), "case %d, %.80s: %.100s", (int)integer_of(item, "index"), json_text(item, "name"),
                 json_text(item, "detail"));
        run_problem(run, text, NULL);
    }
    FOR_JSON (item, json_object_get(document, "errors")) {
        char text[PARSE_TEXT];

        snprintf(text, sizeof(text), "%.80s: %.110s", json_text(item, "what"), json_text(item, "text"));
        run_problem(run, text, NULL);
    }
}

/* Of the calls of an engine those in the way that engines call most: a figure for each operation. */
static bool is_usual_call(const json_t *row)
{
    /* A combine is always of a plan that exists. */
    const char *routing = strcmp(json_text(row, "op"), "call-combine") == 0 ? "cached" : "plan";

    return !json_object_get(row, "memory") ||
           (strcmp(json_text(row, "memory"), "ordinary") == 0 && strcmp(json_text(row, "layout"), "rank") == 0 &&
            strcmp(json_text(row, "routing"), routing) == 0);
}

/* As the lines of the table in the text form. */
static void read_bench(struct parser *parser, json_t *document)
{
    const char *device = json_text(document, "device");
    struct parse_run *run;

    feed(parser, program_line, "ON OP TYPE RANKS TOKENS TIME us P10 P90 LOGICAL GB/s WIRE GB/s");
    run = run_open(parser, PARSE_EPKIT_BENCH);
    if (!run)
        return;
    FOR_JSON (row, json_object_get(document, "rows")) {
        if (!is_usual_call(row))
            continue;
        feed(parser, program_line, "%.40s %.40s %.15s %.0f %.0f %.9f 0 0 %.9f", *device ? device : "-",
             json_text(row, "op"), json_text(row, "type"), json_number(row, "ranks"), json_number(row, "tokens"),
             json_number(row, "time_us"), json_number(row, "logical_gbps"));
    }
    read_settings(run, json_object_get(document, "parameters"));
    if (run->ranks < 0)
        run->ranks = integer_of(json_array_get(json_object_get(document, "rows"), 0), "ranks");
    snprintf(run->device, sizeof(run->device), "%.63s", json_text(document, "device"));
}

static void forget(struct stream *stream)
{
    free(stream->document);
    stream->document = NULL;
    stream->n_document = 0;
    stream->depth = 0;
    stream->in_string = stream->escaped = false;
}

/* Does a document have this key, with quotes or without, and this value? NULL: any. */
static bool has_key(const char *text, const char *key, const char *value)
{
    for (const char *at = text; (at = strstr(at, key)) != NULL; at++) {
        const char *end = at + strlen(key) + (at[strlen(key)] == '"');

        if (at == text || !strchr("\"\n{ ", at[-1]) || *end != ':')
            continue;
        end += 1 + strspn(end + 1, " ");
        if (!value || (*end == '"' && text_begins(end + 1, value) && end[1 + strlen(value)] == '"'))
            return true;
    }
    return false;
}

/* A document that is invalid or incomplete has no verdict: its run counts as failed. */
static void lose_document(struct parser *parser, const char *text, const char *why)
{
    static const struct {
        const char *key, *value, *title;
        enum parse_dialect dialect;
    } documents[] = {{"subcommand", "test", "epkit test", PARSE_EPKIT_TEST},
                     {"subcommand", "run", "epkit run", PARSE_EPKIT_TEST},
                     {"subcommand", "bench", "epkit bench", PARSE_EPKIT_BENCH},
                     {"nccl_version", NULL, "nccl-tests", PARSE_NCCL_TESTS},
                     {"#wrong", NULL, "nccl-tests", PARSE_NCCL_TESTS},
                     {"test_info", NULL, "perftest", PARSE_PERFTEST}};

    parser->totals.unreadable++;
    for (size_t i = 0; i < sizeof(documents) / sizeof(documents[0]); i++)
        if (has_key(text, documents[i].key, documents[i].value)) {
            run_problem(run_begin(parser, documents[i].dialect, documents[i].title), why, NULL);
            return;
        }
}

void epkit_document_end(struct parser *parser)
{
    struct stream *stream = stream_now(parser);

    if (!stream->document)
        return;
    lose_document(parser, stream->document, "its JSON document does not end");
    forget(stream);
}

static void read_document(struct parser *parser, const char *text, size_t bytes)
{
    json_error_t error;
    json_t *document = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &error);
    const char *subcommand;

    if (!document && text_begins(text, BARE))
        document = json_bare(text, bytes);
    subcommand = json_text(document, "subcommand");
    if (!document) {
        lose_document(parser, text, "its JSON document is torn");
    } else if (integer_of(document, "schema_version") == 1 && strcmp(subcommand, "test") == 0) {
        read_test(parser, document);
    } else if (integer_of(document, "schema_version") == 1 && strcmp(subcommand, "bench") == 0) {
        read_bench(parser, document);
    } else if (strcmp(subcommand, "run") == 0) {
        json_t *bench = json_object_get(document, "bench");

        FOR_JSON (suite, json_object_get(document, "suites"))
            read_test(parser, suite);
        if (json_is_object(bench))
            read_bench(parser, bench);
    } else {
        (void)json_results(parser, document);
    }
    json_decref(document);
}

/* Counts brackets outside of strings. What follows the document's last one; NULL: it goes on. */
static const char *follow(struct stream *stream, const char *text)
{
    for (; *text; text++) {
        if (stream->escaped)
            stream->escaped = false;
        else if (stream->in_string && *text == '\\')
            stream->escaped = true;
        else if (*text == '"')
            stream->in_string = !stream->in_string;
        else if (!stream->in_string && (*text == '{' || *text == '['))
            stream->depth++;
        else if (!stream->in_string && (*text == '}' || *text == ']') && --stream->depth == 0)
            return text + 1;
    }
    return NULL;
}

static bool append(struct stream *stream, const char *text, size_t n)
{
    if (stream->n_document + n + 2 > MAX_DOCUMENT)
        return false;
    stream->document = memory_grow(stream->document, stream->n_document + n + 2);
    stream->n_document += (size_t)sprintf(stream->document + stream->n_document, "%.*s\n", (int)n, text);
    return true;
}

/* Can the line be part of a multi-line document? It is indented, or a single bracket. */
static bool continues(const char *line)
{
    return *line && strchr(" }]{[\"", *line);
}

/* "Dual_port: OFF," in a document without quotes. */
static bool continues_bare(const char *document, const char *line)
{
    size_t n = strspn(line, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.");

    return n && line[n + strspn(line + n, " ")] == ':' && text_begins(document, BARE);
}

/* Of epkit, nccl-tests, perftest and rccl-tests. */
static bool is_first_key(const char *text)
{
    return text_begins_any(text + strspn(text, " "),
                           TEXTS("\"schema_version\":", "\"version\":", "\"test_info\":", "test_info:", "\"#wrong\":"));
}

/* A line, or what stands behind a document in one: what follows the next document's end; NULL: nothing does. */
static const char *document_piece(struct parser *parser, const char *line, bool *ret_is_ours)
{
    struct stream *stream = stream_now(parser);
    const char *rest;

    *ret_is_ours = false;
    if (!stream->document) {
        if (strcmp(line, "{") != 0 && (*line != '{' || !is_first_key(line + 1)))
            return NULL;
    } else if (stream->n_document == 2) {
        if (!strstr(line, "\"schema_version\"") && !is_first_key(line)) {
            forget(stream); /* from another program */
            return NULL;
        }
    } else if (!continues(line) && !stream->in_string && !continues_bare(stream->document, line)) {
        /* Standard error within the document, or other output after a document that was cut off. */
        *ret_is_ours = !*line || text_begins(line, "epkit:");
        return NULL;
    }
    *ret_is_ours = true;
    rest = follow(stream, line);
    if (!append(stream, line, rest ? (size_t)(rest - line) : strlen(line))) {
        parser->totals.unreadable++;
        forget(stream);
        return NULL;
    }
    if (rest) {
        read_document(parser, stream->document, stream->n_document);
        forget(stream);
    }
    return rest && *rest ? rest : NULL;
}

bool epkit_document_line(struct parser *parser, const char *line)
{
    bool is_ours, is_rest_ours;

    /* Behind one stand others, as many as were joined. */
    for (line = document_piece(parser, line, &is_ours); line;)
        line = document_piece(parser, line, &is_rest_ours);
    return is_ours;
}
