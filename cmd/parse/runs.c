/* SPDX-License-Identifier: Apache-2.0 */
/* runs.c - runs and their measures; merges the parts of one run that several writers printed. */
#include "common/memory.h"
#include "parse_internal.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SPREAD 1.5 /* of the rates of the nodes of one run */
#define BLOCK_RANKS 8  /* of a node, whose log may be missing */

#define N_SAME 5   /* settings in which parts of one run do not differ */
#define N_JOINED 7 /* settings that one part may know */
#define N_SETTINGS 8

/* A setting named in the log; -1: not named. */
static int64_t *setting(const struct parse_run *run, size_t i)
{
    static const size_t places[N_SETTINGS] = {
        offsetof(struct parse_run, tokens), offsetof(struct parse_run, hidden),
        offsetof(struct parse_run, topk),   offsetof(struct parse_run, experts),
        offsetof(struct parse_run, nodes),  offsetof(struct parse_run, topk_groups),
        offsetof(struct parse_run, sms),    offsetof(struct parse_run, ranks),
    };

    return (int64_t *)((char *)run + places[i]);
}

struct stream *stream_now(struct parser *parser)
{
    return parser->streams[parser->current_stream];
}

struct run *run_whole(struct parse_run *public)
{
    return (struct run *)public;
}

void run_clear(struct run *run)
{
    for (size_t i = 0; i < run->public.n_measures; i++)
        free(run->public.measures[i].points);
    free(run->public.measures);
    *run = (struct run){0};
}

struct parse_run *run_open(struct parser *parser, enum parse_dialect dialect)
{
    struct parse_run *run = stream_now(parser)->open[dialect];

    if (run)
        run->last_line = parser->line_number;
    return run;
}

void run_end(struct parser *parser, enum parse_dialect dialect)
{
    struct stream *stream = stream_now(parser);
    struct parse_run *run = stream->open[dialect];

    if (!run)
        return;
    deepep_finish(run, stream->deepep);
    /* The line that begins the next run was offered to this one. */
    run->last_line -= run->last_line == parser->line_number && run->last_line > run->first_line;
    stream->open[dialect] = NULL;
}

struct parse_run *run_begin(struct parser *parser, enum parse_dialect dialect, const char *title)
{
    struct stream *stream = stream_now(parser);
    struct run *run = &parser->lost;

    run_end(parser, dialect);
    if (parser->n_runs < MAX_RUNS) {
        run = memory_new(1, sizeof(*run));
        parser->runs = memory_grow(parser->runs, (parser->n_runs + 1) * sizeof(run));
        parser->runs[parser->n_runs++] = run;
    } else {
        parser->totals.runs_dropped++;
        run_clear(run);
    }
    run->public = (struct parse_run){
        .dialect = dialect,
        .first_line = parser->line_number,
        .last_line = parser->line_number,
        .writers = 1,
        .average = NAN,
    };
    for (size_t i = 0; i < N_SETTINGS; i++)
        *setting(&run->public, i) = -1;
    if (parser->heading_nodes > 0)
        run->public.nodes = parser->heading_nodes;
    if (parser->command_ranks > 0 && dialect == PARSE_DEEPEP_LOW_LATENCY)
        run->public.ranks = parser->command_ranks;
    snprintf(run->public.title, sizeof(run->public.title), "%s", title);
    snprintf(run->public.source, sizeof(run->public.source), "%s", parser->source);
    snprintf(run->public.stream, sizeof(run->public.stream), "%s", stream->key);
    run->stream = parser->current_stream;
    run->source = parser->n_sources;
    run->ordinal = stream->ordinal[dialect]++;
    stream->open[dialect] = &run->public;
    return &run->public;
}

struct parse_run *run_need(struct parser *parser, enum parse_dialect dialect, const char *title)
{
    struct parse_run *run = run_open(parser, dialect);

    return run ? run : run_begin(parser, dialect, title);
}

struct parse_measure *run_measure(struct parse_run *run, const char *op, const char *type, const char *config)
{
    struct parse_measure *measure;

    for (size_t i = 0; i < run->n_measures; i++) {
        measure = &run->measures[i];
        if (strcmp(measure->op, op) == 0 && strcmp(measure->type, type) == 0 &&
            (!config || strcmp(measure->config, config) == 0))
            return measure;
    }
    if (run->n_measures == PARSE_MAX_MEASURES)
        return NULL;
    run->measures = memory_grow(run->measures, (run->n_measures + 1) * sizeof(*measure));
    measure = &run->measures[run->n_measures++];
    *measure = (struct parse_measure){
        .sms = -1,
        .nvl_chunk = -1,
        .rdma_chunk = -1,
        .nvl_gbps = NAN,
        .rdma_gbps = NAN,
        .bus_gbps = NAN,
        .alg_gbps = NAN,
        .time_us = NAN,
        .notify_us = NAN,
        .epilogue_us = NAN,
        .bytes = NAN,
        .min = NAN,
        .max = NAN,
    };
    snprintf(measure->op, sizeof(measure->op), "%s", op);
    snprintf(measure->type, sizeof(measure->type), "%s", type);
    snprintf(measure->config, sizeof(measure->config), "%s", config ? config : "");
    return measure;
}

const struct parse_measure *parse_find(const struct parse_run *run, const char *op, const char *type)
{
    for (size_t i = 0; i < run->n_measures; i++)
        if (strcmp(run->measures[i].op, op) == 0 && (!type || strcmp(run->measures[i].type, type) == 0))
            return &run->measures[i];
    return NULL;
}

void measure_point(struct parse_measure *measure, double x, double gbps, double time_us)
{
    if (measure->n_points == PARSE_MAX_POINTS) {
        measure->dropped_points++;
        return;
    }
    measure->points = memory_grow(measure->points, (measure->n_points + 1) * sizeof(*measure->points));
    measure->points[measure->n_points++] = (struct parse_point){x, gbps, time_us};
}

void measure_sample(struct parse_measure *measure, double rate)
{
    if (isnan(rate))
        return;
    measure->min = fmin(measure->min, rate);
    measure->max = fmax(measure->max, rate);
    measure->sum += rate;
    measure->n++;
}

static int rank_of(const struct parse_known *known)
{
    return known ? known->rank : 0;
}

void run_problem(struct parse_run *run, const char *line, const struct parse_known *known)
{
    struct parse_problem *problem = run->problems + run->n_problems, *all = run->problems;

    for (size_t i = 0; i < run->n_problems; i++)
        if (strncmp(all[i].line, line, PARSE_TEXT - 1) == 0)
            return;
    while (problem > all && rank_of(problem[-1].known) < rank_of(known))
        problem--;
    if (problem == all + PARSE_MAX_PROBLEMS)
        return;
    run->n_problems += run->n_problems < PARSE_MAX_PROBLEMS;
    memmove(problem + 1, problem, (size_t)(all + run->n_problems - problem - 1) * sizeof(*problem));
    snprintf(problem->line, sizeof(problem->line), "%s", line);
    problem->known = known;
}

/* --- joining --- */

/* Do all writers of this dialect belong to one run, each with its own lines? */
static bool is_joint(enum parse_dialect dialect)
{
    return dialect == PARSE_DEEPEP_INTERNODE || dialect == PARSE_DEEPEP_LOW_LATENCY || dialect == PARSE_DEEPEP_V2;
}

static bool agree(int64_t a, int64_t b)
{
    return a < 0 || b < 0 || a == b;
}

/* Different ranks printed parts of one low-latency run; each part knows the ranks up to its own highest. */
static bool have_common_ranks(const struct run *a, const struct run *b)
{
    for (int kind = 0; kind < LL_KINDS; kind++)
        for (size_t i = 0; i < sizeof(a->ll_seen[kind]); i++)
            if (a->ll_seen[kind][i] & b->ll_seen[kind][i])
                return true;
    return false;
}

static bool have_same_ranks(const struct run *a, const struct run *b)
{
    if (a->public.dialect == PARSE_DEEPEP_LOW_LATENCY)
        return !have_common_ranks(a, b);
    return agree(a->public.ranks, b->public.ranks);
}

/*
 * Are runs in two files parts of one? They need a known setting in common, and in throughput mode all nodes wait for
 * the slowest: their rates differ little.
 */
static bool are_parts(const struct run *a, const struct run *b)
{
    const struct parse_run *x = &a->public, *y = &b->public;

    if (a->source == b->source || x->dialect == PARSE_DEEPEP_LOW_LATENCY)
        return true;
    if (x->dialect == PARSE_DEEPEP_V2)
        return !a->has_all_ranks && !b->has_all_ranks;
    for (size_t i = 0; i < x->n_measures; i++) {
        const struct parse_measure *other = parse_find(y, x->measures[i].op, x->measures[i].type);

        if (other && !(fmax(other->rdma_gbps, x->measures[i].rdma_gbps) <
                       MAX_SPREAD * fmin(other->rdma_gbps, x->measures[i].rdma_gbps)))
            return false;
    }
    return x->tokens >= 0 && y->tokens >= 0;
}

static bool is_same_run(const struct run *a, const struct run *b)
{
    const struct parse_run *x = &a->public, *y = &b->public;

    for (size_t i = 0; i < N_SAME; i++)
        if (!agree(*setting(x, i), *setting(y, i)))
            return false;
    return are_parts(a, b) && x->dialect == y->dialect && is_joint(x->dialect) && a->ordinal == b->ordinal &&
           (a->stream != b->stream || a->source != b->source) && strcmp(x->title, y->title) == 0 &&
           have_same_ranks(a, b);
}

/* Of two figures for the same value the slower one counts: by time if ranks print them, by rate if nodes do. */
static void join_measure(struct parse_measure *into, const struct parse_measure *from, bool is_by_time)
{
    bool is_slower =
        is_by_time && !isnan(from->time_us) && !isnan(into->time_us)
            ? from->time_us > into->time_us
            : from->rdma_gbps < into->rdma_gbps || (isnan(into->rdma_gbps) && from->nvl_gbps < into->nvl_gbps);

    if (is_slower) {
        struct parse_measure kept = *into;

        *into = *from;
        into->points = kept.points;
        into->n_points = kept.n_points;
        into->dropped_points = kept.dropped_points;
        into->min = kept.min;
        into->max = kept.max;
        into->sum = kept.sum;
        into->n = kept.n;
    }
    into->min = fmin(into->min, from->min);
    into->max = fmax(into->max, from->max);
    into->sum += from->sum;
    into->n += from->n;
}

/* Only the first process of a node prints cases; the other parts have no information about them. */
static void join_cases(struct parse_run *into, const struct parse_run *from)
{
    if (from->dialect == PARSE_DEEPEP_V2 && from->started == 0 && from->n_measures > 0)
        return;
    if (into->dialect == PARSE_DEEPEP_V2 && into->started == 0 && into->n_measures > 0) {
        into->passed = from->passed;
        into->expected = from->expected;
        into->is_complete = from->is_complete;
    }
    into->passed = into->passed < from->passed ? into->passed : from->passed;
    into->started = into->started > from->started ? into->started : from->started;
    into->expected = into->expected > from->expected ? into->expected : from->expected;
    into->is_complete = into->is_complete && from->is_complete;
}

static void join(struct run *whole, const struct run *other)
{
    struct parse_run *into = &whole->public;
    const struct parse_run *from = &other->public;

    for (int kind = 0; kind < LL_KINDS; kind++)
        for (size_t i = 0; i < sizeof(whole->ll_seen[kind]); i++)
            whole->ll_seen[kind][i] |= other->ll_seen[kind][i];
    into->writers += from->writers;
    join_cases(into, from);
    into->failed += from->failed;
    for (size_t i = 0; i < N_JOINED; i++)
        if (*setting(into, i) < 0)
            *setting(into, i) = *setting(from, i);
    into->ranks = into->ranks > from->ranks ? into->ranks : from->ranks;
    for (size_t i = 0; i < from->n_measures; i++) {
        size_t before = into->n_measures;
        struct parse_measure *measure = run_measure(into, from->measures[i].op, from->measures[i].type, NULL);

        if (!measure)
            continue;
        if (into->n_measures > before) {
            *measure = from->measures[i];
            measure->points = NULL;
            measure->n_points = 0;
        } else {
            join_measure(measure, &from->measures[i], into->dialect != PARSE_DEEPEP_INTERNODE);
        }
    }
    for (size_t i = 0; i < from->n_problems; i++)
        run_problem(into, from->problems[i].line, from->problems[i].known);
}

static bool has_rank(const struct run *run, int kind, int64_t rank)
{
    return run->ll_seen[kind][rank / 8] & (1u << (rank & 7));
}

/*
 * Counts missing low-latency lines: each rank prints one of each kind. Blocks of ranks that printed nothing are nodes
 * whose logs are not here. A kind that no rank printed is missed only in a log that begins as DeepEP's: similar
 * programs print fewer kinds, and so do excerpts.
 */
static void count_missing(struct parse_run *run)
{
    const struct run *whole = run_whole(run);
    bool is_printed[LL_KINDS];

    run->ranks_absent = run->lines_missing = run->kinds = 0;
    for (int kind = 0; kind < LL_KINDS; kind++) {
        is_printed[kind] = run->started > 0;
        for (int64_t rank = 0; rank < run->ranks && !is_printed[kind]; rank++)
            is_printed[kind] = has_rank(whole, kind, rank);
        run->kinds += is_printed[kind];
    }
    for (int64_t first = 0; first < run->ranks; first += BLOCK_RANKS) {
        int64_t end = first + BLOCK_RANKS < run->ranks ? first + BLOCK_RANKS : run->ranks;
        int seen = 0;

        for (int64_t rank = first; rank < end; rank++)
            for (int kind = 0; kind < LL_KINDS; kind++)
                seen += is_printed[kind] && has_rank(whole, kind, rank);
        if (seen == 0)
            run->ranks_absent += (int)(end - first);
        else
            run->lines_missing += run->kinds * (int)(end - first) - seen;
    }
    if (run->ranks < 1)
        run->lines_missing = LL_KINDS;
}

/* Computes what needs the complete run. */
static void conclude(struct parse_run *run)
{
    if (run->dialect == PARSE_DEEPEP_INTERNODE && run->nodes < 0 && run->writers > 1 &&
        run->writers >= run->topk_groups)
        run->nodes = run->writers;
    if (run->dialect == PARSE_DEEPEP_LOW_LATENCY) {
        count_missing(run);
        run->is_complete = run->lines_missing == 0;
    }
}

/* nccl-tests: the first header of runs at once, whose ranks and rows all came after the second one. */
static bool is_head_of(const struct run *run, const struct run *next)
{
    const struct parse_run *head = &run->public;

    return head->dialect == PARSE_NCCL_TESTS && next->public.writers > 1 && run->source == next->source &&
           head->ranks < 0 && head->n_measures == 0 && head->n_problems == 0 &&
           strcmp(head->title, next->public.title) == 0;
}

void parser_refresh(struct parser *parser)
{
    for (size_t i = 0; i < parser->n_runs; i++)
        parser->runs[i]->public.is_open = false;
    for (size_t i = 0; i < parser->n_streams; i++) {
        for (int dialect = 0; dialect < PARSE_N_DIALECTS; dialect++) {
            struct parse_run *run = parser->streams[i]->open[dialect];

            if (!run)
                continue;
            run->is_open = true;
            deepep_finish(run, parser->streams[i]->deepep);
            if (dialect == PARSE_DEEPEP_LOW_LATENCY)
                conclude(run);
        }
    }
}

void runs_merge(struct parser *parser)
{
    size_t used = 0;

    for (size_t i = 0; i < parser->n_runs; i++) {
        struct run *run = parser->runs[i];
        size_t same = 0;

        if (i + 1 < parser->n_runs && is_head_of(run, parser->runs[i + 1])) {
            run_clear(run);
            free(run);
            continue;
        }
        while (same < used && !is_same_run(parser->runs[same], run))
            same++;
        if (same < used) {
            join(parser->runs[same], run);
            run_clear(run);
            free(run);
        } else {
            parser->runs[used++] = run;
        }
    }
    parser->n_runs = used;
    for (size_t i = 0; i < used; i++)
        conclude(&parser->runs[i]->public);
}
