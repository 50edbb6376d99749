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
#include "deepep_log.h"

#include <math.h>
#include <string.h>

enum { LL_BOTH, LL_APART, LL_HOOK };

static bool has_seen(struct parse_run *run, int kind, int rank)
{
    uint8_t bit = (uint8_t)(1u << (rank & 7)), *byte = &run_whole(run)->ll_seen[kind][rank / 8];
    bool seen = *byte & bit;

    *byte |= bit;
    return seen;
}

static struct parse_run *ll_begin(struct parser *parser, struct deepep_scratch *scratch)
{
    memset(&scratch->ll, 0, sizeof(scratch->ll));
    return run_begin(parser, PARSE_DEEPEP_LOW_LATENCY, "test_low_latency");
}

/* A rank prints each kind of line once in a run. */
static struct parse_run *ll_run(struct parser *parser, int kind, int rank)
{
    struct deepep_scratch *scratch = deepep_scratch_of(parser);
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_LOW_LATENCY);

    if (!scratch)
        return NULL;
    if (!run || has_seen(run, kind, rank)) {
        run = ll_begin(parser, scratch);
        if (run)
            (void)has_seen(run, kind, rank);
    }
    scratch->ll.has_lines = true;
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

/* " 236.10 GB/s, avg_t=31.90 us" after a label */
static bool bandwidth(const char *text, const char *label, double *ret_gbps, double *ret_us)
{
    const char *at = strstr(text, label), *unit, *time;

    if (!at || !lex_number(at + strlen(label), &unit, ret_gbps) || !lex_starts(unit, " GB/s"))
        return false;
    time = strstr(unit, "avg_t=");
    return time && lex_number(time + 6, &unit, ret_us) && lex_starts(unit, " us");
}

/* "27.25 + 7.71 us" or "34.96 us" after a label; a single time goes into the first value. */
static bool times(const char *text, const char *label, double *ret_send, double *ret_recv)
{
    const char *at = strstr(text, label), *end;

    if (!at || !lex_number(at + strlen(label), &end, ret_send))
        return false;
    *ret_recv = NAN;
    if (lex_starts(end, " + ") && !lex_number(end + 3, &end, ret_recv))
        return false;
    return lex_starts(end, " us");
}

static bool hook_line(struct parser *parser, const char *text, int rank)
{
    double dispatch[2], combine[2];
    struct parse_run *run;

    if (!times(text, "Dispatch send/recv time:", &dispatch[0], &dispatch[1]) ||
        !times(text, "Combine send/recv time:", &combine[0], &combine[1]))
        return false;
    run = ll_run(parser, LL_HOOK, rank);
    if (!run)
        return true;
    keep_slowest(run, isnan(dispatch[1]) ? "dispatch send + recv" : "dispatch send", "fp8", NAN, dispatch[0]);
    if (!isnan(dispatch[1]))
        keep_slowest(run, "dispatch recv", "fp8", NAN, dispatch[1]);
    keep_slowest(run, isnan(combine[1]) ? "combine send + recv" : "combine send", "bf16", NAN, combine[0]);
    if (!isnan(combine[1]))
        keep_slowest(run, "combine recv", "bf16", NAN, combine[1]);
    return true;
}

static bool apart_line(struct parser *parser, const char *text, int rank)
{
    double dispatch[2], combine[2];
    struct parse_run *run;

    if (!bandwidth(text, "Dispatch bandwidth:", &dispatch[0], &dispatch[1]) ||
        !bandwidth(text, "Combine bandwidth:", &combine[0], &combine[1]))
        return false;
    run = ll_run(parser, LL_APART, rank);
    if (!run)
        return true;
    keep_slowest(run, "dispatch", "fp8", dispatch[0], dispatch[1]);
    keep_slowest(run, "combine", "bf16", combine[0], combine[1]);
    return true;
}

static bool both_line(struct parser *parser, const char *text, int rank)
{
    double gbps, time_us;
    struct parse_run *run;

    if (!bandwidth(text, "Dispatch + combine bandwidth:", &gbps, &time_us))
        return false;
    run = ll_run(parser, LL_BOTH, rank);
    if (run)
        keep_slowest(run, "dispatch + combine", "", gbps, time_us);
    return true;
}

/* Finds "[rank 3] " before one of the lines above; NULL: none. */
static const char *next_rank(const char *at)
{
    while ((at = strstr(at, "[rank ")) != NULL) {
        const char *end = strchr(at, ']');

        if (end && (lex_starts(end, "] Dispatch ") || lex_starts(end, "] Combine ")))
            return at;
        at++;
    }
    return NULL;
}

static void rank_piece(struct parser *parser, const char *at, size_t n)
{
    char text[512];
    double number;
    bool good = false;

    n = n < sizeof(text) - 1 ? n : sizeof(text) - 1;
    memcpy(text, at, n);
    text[n] = '\0';
    if (lex_after(text, "[rank ", &number) && number < LL_MAX_RANKS) {
        int rank = (int)number;

        good = both_line(parser, text, rank) || apart_line(parser, text, rank) || hook_line(parser, text, rank);
    }
    parser->totals.unreadable += !good;
}

bool deepep_ll_line(struct parser *parser, const char *line)
{
    const char *at = next_rank(line);
    struct deepep_scratch *scratch;

    if (lex_starts(line, "Allocating buffer size: ")) {
        scratch = deepep_scratch_of(parser);
        if (scratch && (!run_open(parser, PARSE_DEEPEP_LOW_LATENCY) || scratch->ll.has_lines))
            (void)ll_begin(parser, scratch);
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
