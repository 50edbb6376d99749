/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nccl_tests.c - tables of nccl-tests (and rccl-tests), of all versions:
 *
 *     # Collective test starting: all_reduce_perf
 *     # nThread 1 nGpus 1 minBytes 2097152 maxBytes 17179869184 step: 2(factor) warmup iters: 10 iters: 1 ...
 *     #  Rank  0 Group  0 Pid  34386 on node-0 device  0 [0000:1b:00] NVIDIA B200
 *     #       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw
 * #wrong #        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
 *          2097152        524288     float     sum      -1    123.4   17.01   31.89      0    123.4   17.01   31.89 N/A
 *     # Out of bounds values : 0 OK
 *     # Avg bus bandwidth    : 40.8712
 *
 * Some versions lack the columns redop and root, others the in-place group. Early versions have "error" (a magnitude)
 * where later ones have "#wrong" (a count). Words after the groups (times of day) are ignored.
 */
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define GROUP 4            /* time, algbw, busbw, wrong */
#define GROUP_ITERATIONS 8 /* with -I also i_min, i_max, i_p99, i_cv% */

static bool is_type(const char *word)
{
    return text_is_any(word, TEXTS("float", "half", "double", "bfloat16", "bf16", "int8", "uint8", "int32", "uint32",
                                   "int64", "uint64", "char", "int", "fp8_e4m3", "f8e4m3", "f8e5m2", "fp8", "fp8_e5m2",
                                   "float16", "float8_e4m3", "float8_e5m2"));
}

static const char *title_of(const struct parser *parser)
{
    return *parser->program ? parser->program : "nccl-tests";
}

static struct parse_run *begin(struct parser *parser)
{
    struct stream *stream = stream_now(parser);

    stream->nccl_rows_seen = false;
    stream->nccl_has_error_column = false;
    stream->nccl_has_iterations = false;
    stream->n_nccl_hosts = 0;
    stream->n_nccl_ranks = 0;
    return run_begin(parser, PARSE_NCCL_TESTS, title_of(parser));
}

/* The run that a header line belongs to: the open run, unless it has rows. Is it of the beginning, or of the table? */
static struct parse_run *head(struct parser *parser, bool is_beginning)
{
    struct parse_run *run = run_open(parser, PARSE_NCCL_TESTS);

    if (!run || stream_now(parser)->nccl_rows_seen || run->is_complete)
        run = begin(parser);
    if (is_beginning)
        run->started = 1;
    return run;
}

/* The number of hosts, this one included. */
static int count_host(struct stream *stream, uint64_t host)
{
    for (int i = 0; i < stream->n_nccl_hosts; i++)
        if (stream->nccl_hosts[i] == host)
            return stream->n_nccl_hosts;
    if (stream->n_nccl_hosts < MAX_NCCL_HOSTS)
        stream->nccl_hosts[stream->n_nccl_hosts++] = host;
    return stream->n_nccl_hosts;
}

/* "#  Rank  0 Group  0 Pid  34386 on node-0 device  0 [0000:1b:00] NVIDIA B200" */
static bool rank_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    double rank;
    const char *on, *device;
    struct parse_run *run;
    int hosts;

    if (!lex_after(line, "Rank ", &rank) || rank >= 1e6)
        return false;
    on = strstr(line, " on ");
    device = on ? strstr(on + 4, " device ") : NULL; /* behind a name, which may be missing */
    if (!device || !strstr(line, "Pid"))
        return false;
    run = head(parser, true);
    /* One process prints all ranks: a second rank 0 belongs to a concurrent run. */
    if (rank == 0 && run->ranks > 0)
        run->writers++;
    if (rank >= (double)run->ranks)
        run->ranks = (int64_t)rank + 1;
    hosts = count_host(stream, text_hash(on + 4, (size_t)(device - on) - 4));
    /* A page may show some of the ranks. */
    run->nodes = 2 * ++stream->n_nccl_ranks > run->ranks ? hosts : -1;
    device = strstr(device, "] ");
    if (device)
        snprintf(run->device, sizeof(run->device), "%.*s", (int)(sizeof(run->device) - 1), device + 2);
    return true;
}

/* Some builds print Gb/s. */
static double to_gbps(const struct parse_run *run, double value)
{
    return run->bits ? value / run->bits : value;
}

/* The operation is the name of the program without "_perf". */
static void set_op(const struct parse_run *run, char *op, size_t bytes)
{
    const char *end = strstr(run->title, "_perf");

    snprintf(op, bytes, "%.*s", end ? (int)(end - run->title) : (int)bytes, end ? run->title : "collective");
}

/* "Collective test starting: all_reduce_perf"; the end of a table whose beginning is not there says it, too. */
static void set_title(struct parse_run *run, const char *line)
{
    const char *name = strchr(line, ':') + 1;

    snprintf(run->title, sizeof(run->title), "%.*s", (int)(sizeof(run->title) - 1), name + strspn(name, " "));
    for (size_t i = 0; i < run->n_measures; i++)
        set_op(run, run->measures[i].op, sizeof(run->measures[i].op));
}

static bool head_line(struct parser *parser, const char *line)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *run;

    if (strstr(line, "Collective test starting:")) {
        (void)begin(parser);
        set_title(head(parser, true), line);
        return true;
    }
    if (strstr(line, "nThread ") && strstr(line, "minBytes ")) {
        run = run_open(parser, PARSE_NCCL_TESTS);
        /* A new attempt after one that failed before its table. */
        if (run && run->n_problems > 0)
            (void)begin(parser);
        (void)head(parser, true);
        return true;
    }
    if (strstr(line, "busbw") && strstr(line, "type") &&
        ((strstr(line, "size") && strstr(line, "count")) || strstr(line, "bytes"))) {
        (void)head(parser, false);
        stream->nccl_has_iterations = strstr(line, "i_min") != NULL;
        stream->nccl_has_error_column = (strstr(line, "error") || strstr(line, " res")) && !strstr(line, "#wrong");
        return true;
    }
    if (strstr(line, "(elements)") && strstr(line, "(us)")) {
        run = head(parser, false);
        if (strstr(line, "(Gb/s)"))
            run->bits = 8;
        return true;
    }
    return strstr(line, "Using devices") || strstr(line, "out-of-place");
}

static bool tail_line(struct parser *parser, const char *line)
{
    bool is_bounds = strstr(line, "Out of bounds values :"), is_average = strstr(line, "Avg bus bandwidth");
    struct parse_run *run;
    double number;

    if (is_bounds || is_average) {
        run = run_need(parser, PARSE_NCCL_TESTS, title_of(parser));
        if (!lex_after(line, ":", &number)) {
            parser->totals.unreadable++;
        } else if (is_bounds) {
            run->wrong = number < 1e18 ? (uint64_t)number : (uint64_t)1e18;
            run->wrong += run->wrong == 0 && strstr(line, "FAILED");
        } else {
            run->average = number;
            run->is_complete = true;
            if (strstr(line, "FAILED"))
                run_problem(run, line, NULL);
        }
        return true;
    }
    if (!strstr(line, "Collective test concluded:"))
        return false;
    run = run_open(parser, PARSE_NCCL_TESTS);
    if (run) {
        set_title(run, line);
        run->is_complete = true;
    }
    return true;
}

static bool is_number_or_na(const char *word, double *ret_number)
{
    *ret_number = NAN;
    return strcmp(word, "N/A") == 0 || lex_is_number(word, ret_number);
}

/* One group of columns. */
static bool keep_group(struct parse_run *run, char **words, const char *type, bool is_in_place, double bytes,
                       bool is_magnitude)
{
    double values[GROUP], bus;
    struct parse_measure *measure;
    char op[40];

    for (int i = 0; i < GROUP; i++)
        if (!is_number_or_na(words[i], &values[i]))
            return false;
    if (isnan(values[0]) && isnan(values[2]))
        return true; /* N/A: the test has no such group */
    if (isnan(values[0]) || isnan(values[1]) || isnan(values[2]))
        return false;
    set_op(run, op, sizeof(op));
    measure = run_measure(run, op, type, is_in_place ? "in-place" : "out-of-place");
    if (!measure)
        return true;
    bus = to_gbps(run, values[2]);
    measure_sample(measure, bus);
    measure_point(measure, bytes, bus, values[0]);
    if (isnan(measure->bus_gbps) || bus > measure->bus_gbps) {
        measure->bus_gbps = bus;
        measure->alg_gbps = to_gbps(run, values[1]);
        measure->time_us = values[0];
        measure->bytes = bytes;
    }
    if (!isnan(values[3]) && !is_magnitude)
        run->failed += values[3] >= 1; /* less is a magnitude of the first versions, without the title that says so */
    return true;
}

/* Is it a row: size, count, type? Other lines that start with a number are not of nccl-tests. */
static bool row_line(struct parser *parser, const char *line)
{
    struct lex_words split;
    char **words = split.words;
    size_t n, at = 3, groups = 0, group;
    double bytes, count, number;
    struct parse_run *run;
    struct stream *stream = stream_now(parser);

    if (!lex_words(line, &split))
        return false;
    n = split.n;
    if (n < 3 || !lex_is_number(words[0], &bytes) || !lex_is_number(words[1], &count) || !is_type(words[2]) ||
        bytes != floor(bytes) || count > bytes)
        return false;
    run = run_need(parser, PARSE_NCCL_TESTS, title_of(parser));
    group = stream->nccl_has_iterations ? GROUP_ITERATIONS : GROUP;
    if (at < n && !lex_is_number(words[at], &number) && strcmp(words[at], "N/A") != 0)
        at++; /* redop */
    if (at < n) {
        /* A root is a small integer; a time of the first group is followed by exactly three more words. */
        size_t numbers = 0;

        while (at + numbers < n && is_number_or_na(words[at + numbers], &number))
            numbers++;
        if (numbers % group == 1)
            at++;
        groups = numbers / group;
    }
    stream->nccl_rows_seen = true;
    if (groups == 0 || groups > 2) {
        parser->totals.unreadable++;
        return true;
    }
    for (size_t i = 0; i < groups; i++)
        if (!keep_group(run, words + at + group * i, words[2], i == 1, bytes, stream->nccl_has_error_column))
            parser->totals.unreadable++;
    return true;
}

bool nccl_line(struct parser *parser, const char *line)
{
    while (*line == ' ')
        line++;
    /* The first versions leave out the '#', and so do pages where a '#' starts a heading. */
    if (text_begins_any(line, TEXTS("#", "Out of bounds values :", "Avg bus bandwidth    :", "nThread ", "size ",
                                    "(B) ", "bytes ", "Rank ")))
        return rank_line(parser, line) || head_line(parser, line) || tail_line(parser, line);
    return *line >= '0' && *line <= '9' && row_line(parser, line);
}
