/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deepep_ll.c - test_low_latency.py of DeepEP 1. Every rank prints:
 *
 *     Allocating buffer size: 2116.29 MB ...
 *     [rank 3] Dispatch + combine bandwidth: 256.81 GB/s, avg_t=85.85 us, min_t=76.42 us, max_t=106.50 us
 *     [rank 3] Dispatch bandwidth: 236.10 GB/s, avg_t=31.90 us | Combine bandwidth: 356.20 GB/s, avg_t=40.90 us
 *     [rank 3] Dispatch send/recv time: 27.25 + 7.71 us | Combine send/recv time: 32.48 + 9.45 us
 *
 * Earlier versions have one time on the last line: "Dispatch send/recv time: 34.96 us".
 */
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <string.h>

enum { LL_BOTH, LL_APART, LL_HOOK };

/* The numbers of a line are those of its measures: a rate, if it has one, and a time. */
static const struct result_line {
    int kind;
    const char *format;
    bool has_rates;
    struct {
        const char *op, *type;
    } measures[4];
} result_lines[] = {
    {LL_BOTH, "[rank %f] Dispatch + combine bandwidth:%f GB/s, avg_t=%f us", true, {{"dispatch + combine", ""}}},
    {LL_APART,
     "[rank %f] Dispatch bandwidth:%f GB/s, avg_t=%f us | Combine bandwidth:%f GB/s, avg_t=%f us",
     true,
     {{"dispatch", "fp8"}, {"combine", "bf16"}}},
    {LL_HOOK,
     "[rank %f] Dispatch send/recv time:%f + %f us | Combine send/recv time:%f + %f us",
     false,
     {{"dispatch send", "fp8"}, {"dispatch recv", "fp8"}, {"combine send", "bf16"}, {"combine recv", "bf16"}}},
    {LL_HOOK,
     "[rank %f] Dispatch send/recv time:%f us | Combine send/recv time:%f us",
     false,
     {{"dispatch send + recv", "fp8"}, {"combine send + recv", "bf16"}}},
};

static bool has_seen(struct parse_run *run, int kind, int rank)
{
    uint8_t bit = (uint8_t)(1u << (rank & 7)), *byte = &run_whole(run)->ll_seen[kind][rank / 8];
    bool seen = *byte & bit;

    *byte |= bit;
    return seen;
}

static struct parse_run *ll_begin(struct parser *parser)
{
    return run_begin(parser, PARSE_DEEPEP_LOW_LATENCY, "test_low_latency");
}

/* A rank prints each kind of line once in a run. */
static struct parse_run *ll_run(struct parser *parser, int kind, int rank)
{
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_LOW_LATENCY);

    if (!run || has_seen(run, kind, rank)) {
        run = ll_begin(parser);
        if (run)
            (void)has_seen(run, kind, rank);
    }
    if (run && run->ranks < rank + 1)
        run->ranks = rank + 1;
    return run;
}

/* The slowest rank counts. */
static void keep_slowest(struct parse_run *run, const char *op, const char *type, double gbps, double time_us)
{
    struct parse_measure *measure = run_measure(run, op, type, NULL);

    if (!measure)
        return;
    if (isnan(measure->time_us) || time_us > measure->time_us) {
        measure->time_us = time_us;
        measure->nvl_gbps = gbps;
    }
    measure->is_final = true;
    if (isnan(gbps))
        measure->n++;
    else
        measure_sample(measure, gbps);
}

static bool rank_line(struct parser *parser, const char *text, int rank)
{
    const struct result_line *line = result_lines, *end = line + sizeof(result_lines) / sizeof(result_lines[0]);
    double numbers[LEX_NUMBERS], *number = numbers + 1; /* after the rank */
    struct parse_run *run;

    while (line < end && !lex_match(text, line->format, numbers))
        line++;
    if (line == end)
        return false;
    run = ll_run(parser, line->kind, rank);
    for (int i = 0; run && i < 4 && line->measures[i].op; i++) {
        double gbps = line->has_rates ? *number++ : NAN;

        keep_slowest(run, line->measures[i].op, line->measures[i].type, gbps, *number++);
    }
    return true;
}

/* Finds "[rank 3] " before one of the lines above; NULL: none. */
static const char *next_rank(const char *at)
{
    while ((at = strstr(at, "[rank ")) != NULL) {
        const char *end = strchr(at, ']');

        if (end && (text_begins(end, "] Dispatch ") || text_begins(end, "] Combine ")))
            return at;
        at++;
    }
    return NULL;
}

static void rank_piece(struct parser *parser, const char *at, size_t n)
{
    char text[512];
    double number;

    n = n < sizeof(text) - 1 ? n : sizeof(text) - 1;
    memcpy(text, at, n);
    text[n] = '\0';
    if (!lex_match(text, "[rank %f", &number) || number >= LL_MAX_RANKS || !rank_line(parser, text, (int)number))
        parser->totals.unreadable++;
}

bool deepep_ll_line(struct parser *parser, const char *line)
{
    const char *at = next_rank(line);
    struct parse_run *run;

    if (text_begins(line, "Allocating buffer size: ")) {
        run = run_open(parser, PARSE_DEEPEP_LOW_LATENCY);
        if (!run || run->ranks > 0)
            run = ll_begin(parser);
        if (run)
            run->started = 1; /* the start of the log was seen */
        return true;
    }
    if (!at || (at > line && prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES) > 0))
        return false;
    while (at) {
        const char *next = next_rank(at + 1);

        rank_piece(parser, at, next ? (size_t)(next - at) : strlen(at));
        at = next;
    }
    return true;
}
