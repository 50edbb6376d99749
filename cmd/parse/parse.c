/* SPDX-License-Identifier: Apache-2.0 */
/* parse.c - splits bytes into lines; creates, feeds and frees a parser. */
#include "common/dir.h"
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCK_BYTES (256 << 10)
#define WAIT_MS 1000
#define MAGIC_BYTES 5 /* that identify compressed data */

static const char *const dialect_names[PARSE_N_DIALECTS] = {
    [PARSE_DEEPEP_INTRANODE] = "deepep-intranode",
    [PARSE_DEEPEP_INTERNODE] = "deepep-internode",
    [PARSE_DEEPEP_LOW_LATENCY] = "deepep-lowlatency",
    [PARSE_DEEPEP_V2] = "deepep-v2",
    [PARSE_NCCL_TESTS] = "nccl-tests",
    [PARSE_PERFTEST] = "perftest",
    [PARSE_PROGRAM] = "program",
    [PARSE_EPKIT_TEST] = "epkit-test",
    [PARSE_EPKIT_BENCH] = "epkit-bench",
};

const char *parse_dialect_name(enum parse_dialect dialect)
{
    return dialect_names[dialect];
}

struct parser *parser_new(void)
{
    struct parser *parser = memory_new(1, sizeof(*parser));

    parser->line = memory_grow(NULL, MAX_LINE + 1);
    parser->current_stream = -1;
    faults_load();
    programs_load();
    return parser;
}

void parser_free(struct parser *parser)
{
    if (!parser)
        return;
    stream_flush(parser);
    for (size_t i = 0; i < parser->n_runs; i++) {
        run_clear(parser->runs[i]);
        free(parser->runs[i]);
    }
    run_clear(&parser->lost);
    free(parser->runs);
    free(parser->streams);
    free(parser->line);
    free(parser);
}

const char *parser_last_line(struct parser *parser)
{
    size_t n = parser->n_line < PARSE_LAST_LINE ? parser->n_line : PARSE_LAST_LINE - 1;

    if (n > 0) {
        memcpy(parser->last_line, parser->line, n);
        parser->last_line[n] = '\0';
    }
    return parser->last_line;
}

static void end_line(struct parser *parser)
{
    (void)parser_last_line(parser);
    if (parser->is_cut)
        parser->totals.long_lines++;
    parser->is_cut = false;
    stream_line(parser, parser->line, parser->n_line);
    parser->n_line = 0;
}

static void add_bytes(struct parser *parser, const char *bytes, size_t n)
{
    if (parser->n_line + n > MAX_LINE) {
        parser->is_cut = true;
        n = MAX_LINE - parser->n_line;
    }
    if (n > 0)
        memcpy(parser->line + parser->n_line, bytes, n);
    parser->n_line += n;
}

/* A carriage return ends a line as well: a progress bar overwrites its line. */
void parser_feed(struct parser *parser, const char *bytes, size_t n)
{
    const char *end = bytes + n, *newline = NULL;

    parser->totals.bytes += n;
    while (bytes < end) {
        const char *back;
        size_t until, take;

        /* Once for each newline, not for each carriage return in front of it. */
        if (!newline || newline < bytes)
            newline = memchr(bytes, '\n', (size_t)(end - bytes));
        newline = newline ? newline : end;
        until = (size_t)(newline - bytes);
        back = until ? memchr(bytes, '\r', until) : NULL;
        take = back ? (size_t)(back - bytes) : until;
        /* The newline of a CRLF: its carriage return has already ended the line. */
        if (parser->after_cr && take == 0 && newline == bytes) {
            parser->after_cr = false;
            bytes++;
            continue;
        }
        if (take > 0)
            parser->after_cr = false;
        add_bytes(parser, bytes, take);
        bytes += take;
        if (bytes < end) {
            end_line(parser);
            parser->after_cr = back != NULL;
            bytes++;
        }
    }
}

static void end_source(struct parser *parser)
{
    if (parser->n_line > 0)
        end_line(parser);
    parser->after_cr = false;
    stream_flush(parser);
}

void parser_begin(struct parser *parser, const char *source)
{
    end_source(parser);
    snprintf(parser->source, sizeof(parser->source), "%s", source);
    parser->n_sources++;
    parser->line_number = 0;
    parser->program[0] = '\0';
    parser->v2_type = NULL;
    parser->heading_nodes = 0;
    parser->command_ranks = 0;
}

static bool is_compressed(const char *block, size_t n)
{
    char head[MAGIC_BYTES + 1] = "";

    memcpy(head, block, n < MAGIC_BYTES ? n : MAGIC_BYTES);
    return text_begins_any(head, TEXTS("\x1f\x8b", "\x28\xb5\x2f\xfd", "\xfd\x37zXZ", "BZh"));
}

int parser_open(int dir, const char *path, int *ret_fd)
{
    int fd = dir == AT_FDCWD ? open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC) : dir_read_in(dir, path);
    struct stat info;
    int error = 0;

    *ret_fd = fd;
    if (fd < 0)
        return errno == EINVAL ? PARSE_DEVICE : errno;
    if (fstat(fd, &info) != 0 || fcntl(fd, F_SETFL, 0) != 0)
        error = errno;
    else if (S_ISBLK(info.st_mode) || (S_ISCHR(info.st_mode) && !isatty(fd)))
        error = PARSE_DEVICE;
    if (error)
        close(fd);
    return error;
}

int parser_read(struct parser *parser, int dir, const char *path, void (*tick)(uint64_t bytes))
{
    bool is_stdin = strcmp(path, "-") == 0, is_first = true;
    int fd = STDIN_FILENO, error = is_stdin ? 0 : parser_open(dir, path, &fd);
    char *block = error ? NULL : memory_grow(NULL, BLOCK_BYTES);
    size_t held = 0;
    ssize_t n = 0;

    if (error)
        return error;
    while (!error) {
        while (tick && poll(&(struct pollfd){.fd = fd, .events = POLLIN}, 1, WAIT_MS) == 0)
            tick(parser->totals.bytes);
        n = read(fd, block + held, BLOCK_BYTES - held);
        if (n < 0 && errno != EINTR)
            error = errno;
        if (n > 0)
            held += (size_t)n;
        /* The first bytes of a pipe may arrive one at a time. */
        if (n > 0 && is_first && held < MAGIC_BYTES)
            continue;
        if (is_first && is_compressed(block, held))
            error = PARSE_COMPRESSED;
        else
            parser_feed(parser, block, held);
        is_first = is_first && held == 0;
        held = 0;
        if (n == 0)
            break;
        if (n > 0 && tick)
            tick(parser->totals.bytes);
    }
    free(block);
    if (!is_stdin)
        close(fd);
    return error;
}

void parser_end(struct parser *parser)
{
    end_source(parser);
    runs_merge(parser);
}

size_t parser_count(const struct parser *parser)
{
    return parser->n_runs;
}

struct parse_run *parser_run(const struct parser *parser, size_t i)
{
    return &parser->runs[i]->public;
}

struct parse_totals parser_totals(const struct parser *parser)
{
    return parser->totals;
}

const struct parse_fault *parser_faults(const struct parser *parser, size_t *ret_n)
{
    *ret_n = parser->n_faults;
    return parser->faults;
}
