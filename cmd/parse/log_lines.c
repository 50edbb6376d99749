/* SPDX-License-Identifier: Apache-2.0 */
/*
 * log_lines.c - joins physical lines into logical lines.
 *
 * mpirun prints its tag before each chunk that it reads from a rank. A physical line may thus hold chunks of several
 * ranks, and a line of a rank may arrive in chunks:
 *
 *     [1,0]<stdout>:[testing] Running ... [1,1]<stdout>:[testing] Running ... [1,0]<stdout>: passed
 *     [1,1]<stdout>: passed
 *
 * Only the last chunk of a physical line includes the end of its rank's line.
 */
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_GUESSES 7 /* words in front of a line: date, time zone, host, program, level, place */

/* Its index, or -1. */
static int look_up(const struct parser *parser, const char *key)
{
    /* The stream of the previous line is the most likely one. */
    if (parser->current_stream >= 0 && strcmp(parser->streams[parser->current_stream]->key, key) == 0)
        return parser->current_stream;
    for (size_t i = 0; i < parser->n_streams; i++)
        if (strcmp(parser->streams[i]->key, key) == 0)
            return (int)i;
    return -1;
}

static struct stream *find_stream(struct parser *parser, const char *key)
{
    int index = look_up(parser, key);
    struct stream *stream;

    if (index >= 0) {
        parser->current_stream = index;
        return parser->streams[index];
    }
    if (parser->n_streams >= MAX_STREAMS) { /* the last stream takes all further writers */
        parser->current_stream = MAX_STREAMS - 1;
        return parser->streams[MAX_STREAMS - 1];
    }
    stream = memory_new(1, sizeof(*stream));
    parser->streams = memory_grow(parser->streams, (parser->n_streams + 1) * sizeof(stream));
    snprintf(stream->key, sizeof(stream->key), "%s", key);
    parser->streams[parser->n_streams] = stream;
    parser->current_stream = (int)parser->n_streams++;
    return stream;
}

static bool recognise(struct parser *parser, const char *text)
{
    return epkit_document_line(parser, text) || deepep_line(parser, text) || deepep_v2_line(parser, text) ||
           program_line(parser, text) || nccl_line(parser, text) || perftest_failure(parser, text, true);
}

/* Stores names such as "all_reduce_perf": some programs do not print their own name. */
static void note_program(struct parser *parser, const char *text)
{
    const char *at = strstr(text, "_perf"), *begin = at;

    if (!at || (at[5] != ' ' && at[5] != '\0'))
        return;
    while (begin > text && (begin[-1] == '_' || (begin[-1] >= 'a' && begin[-1] <= 'z')))
        begin--;
    if (at > begin)
        snprintf(parser->program, sizeof(parser->program), "%.*s", (int)(at + 5 - begin), begin);
}

/* Stores the number of a heading: "# 4 nodes", "== 2 nodes ==". What follows is another run. */
static void note_nodes(struct parser *parser, const char *text)
{
    const char *end, *at = text + strspn(text, "#=-* ");
    double nodes;

    if (!lex_number(at, &end, &nodes) || nodes < 1 || nodes > 1e5 || nodes != (int)nodes || !text_begins(end, " node"))
        return;
    end += 5 + (end[5] == 's');
    if (end[strspn(end, "#=-*: ")] != '\0')
        return;
    parser->heading_nodes = (int)nodes;
    deepep_close(parser);
}

/* Does a run start with this line? Then the text before it is a prefix of the other lines of the run as well. */
static bool begins_run(const char *text)
{
    return text_begins_any(text, TEXTS("# nThread ", "# Collective test starting:", "#  Rank ", "#   Rank ",
                                       "#       size", "Running all test cases:", "ON ", "{\"schema_version\"")) ||
           text_is_any(text, TEXTS("Config:", "{")) || program_begins(text);
}

/* Processes a complete line of one writer. */
static void logical_line(struct parser *parser, char *text)
{
    const struct stream *stream = stream_now(parser);
    char key[KEY_BYTES];
    const char *at = text;
    size_t skip, n = strlen(text);
    bool has_words = false;

    while (n > 0 && (text[n - 1] == ' ' || text[n - 1] == '\t'))
        text[--n] = '\0';

    if (*text == '\0' && !stream->document)
        return;
    fault_begin(parser, text);
    note_program(parser, text);
    note_nodes(parser, text);
    program_command(parser, text);
    if (recognise(parser, text)) {
        parser->totals.recognised++;
        fault_line(parser, text);
        return;
    }
    /* The line may have a host of an unknown launcher in front, or the prefix of a logger. */
    at += strspn(at, " ");
    snprintf(key, sizeof(key), "%s", stream->key);
    for (int round = 0; round < MAX_GUESSES; round++) {
        struct prefix prefix;
        int before = parser->current_stream;

        skip = has_words || round >= 2 ? 0 : prefix_guess(at, key, sizeof(key));
        if (skip == 0) {
            has_words = true;
            skip = prefix_word(at, key, sizeof(key));
        }
        if (skip == 0)
            break;
        at += skip;
        prefix_read(at, &prefix); /* "host: 2026-02-03T10:00:00Z text" */
        at += prefix.bytes;
        if (has_words && look_up(parser, key) < 0 && !begins_run(at))
            continue;
        (void)find_stream(parser, key);
        if (recognise(parser, at)) {
            parser->totals.recognised++;
            fault_line(parser, at);
            return;
        }
        parser->current_stream = before;
    }
    parser->totals.recognised += perftest_failure(parser, text, false);
    fault_line(parser, text);
}

static void end_piece(struct parser *parser, struct stream *stream, char *text)
{
    if (stream->n_pending == 0) {
        logical_line(parser, text);
        return;
    }
    if (stream->n_pending + strlen(text) < MAX_PENDING) {
        memcpy(stream->pending + stream->n_pending, text, strlen(text) + 1);
        stream->n_pending = 0;
        logical_line(parser, stream->pending);
    } else {
        parser->totals.long_lines++;
        stream->n_pending = 0;
        logical_line(parser, stream->pending);
        logical_line(parser, text);
    }
}

static void append_chunk(struct parser *parser, struct stream *stream, const char *text)
{
    size_t n = strlen(text);

    if (n == 0)
        return;
    if (!stream->pending)
        stream->pending = memory_grow(NULL, MAX_PENDING);
    if (stream->n_pending + n >= MAX_PENDING) {
        parser->totals.long_lines++;
        n = MAX_PENDING - 1 - stream->n_pending;
    }
    memcpy(stream->pending + stream->n_pending, text, n);
    stream->n_pending += n;
    stream->pending[stream->n_pending] = '\0';
}

/* A pod before the first tag of the line applies to all chunks of the line. */
static void piece_key(const struct prefix *head, struct prefix *piece)
{
    char key[KEY_BYTES];
    size_t pod = text_begins(head->key, "pod/") ? strcspn(head->key, " ") : 0;

    if (pod == 0)
        return;
    snprintf(key, sizeof(key), "%.*s %.60s", (int)(pod < KEY_BYTES ? pod : KEY_BYTES), head->key, piece->key);
    memcpy(piece->key, key, sizeof(key));
}

/* A byte order mark of UTF-8 or UTF-16. The zero bytes of UTF-16 were removed with the other control characters. */
static size_t mark_length(const char *line)
{
    if (text_begins(line, "\xef\xbb\xbf"))
        return 3;
    return text_begins(line, "\xff\xfe") || text_begins(line, "\xfe\xff") ? 2 : 0;
}

/*
 * What a page puts in front of a line: "> " of a quotation, which DeepEP 2 prints too; a backslash before '#', which
 * would make the line a heading; spaces before a prefix.
 */
static size_t paste_length(const char *line)
{
    size_t n = 0;
    struct prefix prefix;

    if (text_begins(line, "\\#"))
        return 1;
    if (*line != '>' && *line != ' ')
        return 0;
    while (line[n] == '>' && line[n + 1] == ' ' &&
           !text_begins_any(line + n, TEXTS("> Ranks:", "> Experts:", "> Tokens:", "> #SM:", "> Mode:", "> Testing ")))
        n += 2;
    prefix_read(line + n + strspn(line + n, " "), &prefix);
    return prefix.bytes ? n + strspn(line + n, " ") : n;
}

void stream_line(struct parser *parser, char *line, size_t n)
{
    struct prefix head, prefix;
    char *at;

    n = prefix_clean(line, n);
    line[n] = '\0';
    parser->totals.lines++;
    parser->line_number++;
    if (parser->line_number == 1)
        line += mark_length(line);
    line += paste_length(line);
    prefix_read(line, &head);
    prefix = head;
    at = line + head.bytes;
    for (;;) {
        char *next = (char *)prefix_next_tag(at);
        struct stream *stream = find_stream(parser, prefix.key);
        char saved = '\0';

        if (next) {
            saved = *next;
            *next = '\0';
        }
        if (next || prefix.is_partial)
            append_chunk(parser, stream, at);
        else
            end_piece(parser, stream, at);
        if (!next)
            return;
        *next = saved;
        prefix_read(next, &prefix);
        if (prefix.bytes == 0) /* not a tag: avoid an endless loop */
            prefix.bytes = 1;
        piece_key(&head, &prefix);
        at = next + prefix.bytes;
    }
}

void stream_flush(struct parser *parser)
{
    for (size_t i = 0; i < parser->n_streams; i++) {
        struct stream *stream = parser->streams[i];

        parser->current_stream = (int)i;
        if (stream->n_pending) {
            stream->n_pending = 0;
            logical_line(parser, stream->pending);
        }
        fault_end(parser);
        for (int dialect = 0; dialect < PARSE_N_DIALECTS; dialect++)
            if (stream->open[dialect])
                deepep_finish(stream->open[dialect], stream->deepep);
        epkit_document_end(parser);
    }
    for (size_t i = 0; i < parser->n_streams; i++) {
        free(parser->streams[i]->deepep);
        free(parser->streams[i]->pending);
        free(parser->streams[i]);
    }
    parser->n_streams = 0;
    parser->current_stream = -1;
}
