/* SPDX-License-Identifier: Apache-2.0 */
/*
 * deepep_log.c - test_intranode.py and test_internode.py of DeepEP 1, in all forms of their lines since its release:
 *
 *     [config] num_tokens=4096, hidden=7168, num_topk_groups=4, num_topk=8
 *     [layout] Kernel performance: 0.049 ms
 *     [testing] Running with BF16, without top-k (async=False, previous=False) ... passed
 *     [tuning] SMs 24, NVL chunk 4: 317.45 GB/s (NVL)
 *     [tuning] SMs 24, NVL chunk default: 194.60 GB/s (NVL), 821.28 us
 *     [tuning] Best dispatch (FP8): SMs 24, NVL chunk 8, 325.23 GB/s (NVL), t: 492.59 us
 *     [tuning] Best combine: SMs 24, NVL chunk 4: 328.64 GB/s (NVL), t: 945.40 us
 *     [tuning] Best dispatch (BF16): SMs 24, NVL chunk 16, RDMA chunk 8: 81.0 GB/s (RDMA), 268.1 GB/s (NVL)
 *     [tuning] Best dispatch (BF16): SMs 24, NVL chunk 16, RDMA chunk 8: 12 + 345 us, 81.0 GB/s (RDMA), ...
 *     [tuning] Best combine: SMs 24, NVL chunk 3, RDMA chunk 12, 12.30 + 345.60 us, 75.0 GB/s (RDMA), ...
 *     [tuning] Best dispatch (FP8): SMs 24, ..., transmit: 345.1 us, notify: 12.3 us, BW: 70.1 GB/s (RDMA), ...
 *
 * The first process of each node prints. Without prefixes the lines of the nodes are interleaved: then counts are sums
 * over all nodes, and the number of nodes follows from the [config] lines or from how often a case occurs.
 */
#include "common/memory.h"
#include "common/text.h"
#include "parse_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define CASES_INTRANODE 24
#define CASES_INTERNODE 32
#define MAX_BEFORE_SMS 40

struct deepep_scratch *deepep_scratch_of(struct parser *parser)
{
    struct stream *stream = stream_now(parser);

    if (!stream->deepep)
        stream->deepep = memory_new(1, sizeof(*stream->deepep));
    return stream->deepep;
}

/* The open run, intranode or internode; a later line may decide which. */
static struct parse_run *v1_open(struct parser *parser)
{
    struct parse_run *run = run_open(parser, PARSE_DEEPEP_INTERNODE);

    return run ? run : run_open(parser, PARSE_DEEPEP_INTRANODE);
}

void deepep_close(struct parser *parser)
{
    struct deepep_scratch *scratch = deepep_scratch_of(parser);

    for (int dialect = PARSE_DEEPEP_INTRANODE; dialect <= PARSE_DEEPEP_INTERNODE; dialect++)
        run_end(parser, dialect);
    memset(&scratch->v1, 0, sizeof(scratch->v1));
}

static struct parse_run *v1_begin(struct parser *parser, bool is_internode)
{
    deepep_close(parser);
    return run_begin(parser, is_internode ? PARSE_DEEPEP_INTERNODE : PARSE_DEEPEP_INTRANODE,
                     is_internode ? "test_internode" : "test_intranode");
}

static struct parse_run *v1_need(struct parser *parser, bool is_internode)
{
    struct parse_run *run = v1_open(parser);

    return run ? run : v1_begin(parser, is_internode);
}

/* A line has shown that the run is internode. */
static void become_internode(struct parser *parser, struct parse_run *run)
{
    struct stream *stream = stream_now(parser);

    if (run->dialect == PARSE_DEEPEP_INTERNODE)
        return;
    stream->open[PARSE_DEEPEP_INTRANODE] = NULL;
    stream->open[PARSE_DEEPEP_INTERNODE] = run;
    run->dialect = PARSE_DEEPEP_INTERNODE;
    snprintf(run->title, sizeof(run->title), "test_internode");
}

static bool config_line(struct parser *parser, const char *at)
{
    int64_t tokens = lex_setting(at, "num_tokens="), groups = lex_setting(at, "num_topk_groups=");
    struct deepep_scratch *scratch = deepep_scratch_of(parser);
    struct parse_run *run = v1_open(parser);

    if (tokens < 0) {
        parser->totals.unreadable++;
        return true;
    }
    /* From another node, or of a new run? All nodes print this line before any node starts the cases. */
    if (!run || scratch->v1.has_cases || scratch->v1.has_tuning || run->n_problems > 0 ||
        (scratch->v1.configs > 0 && run->tokens >= 0 && run->tokens != tokens))
        run = v1_begin(parser, groups >= 0);
    scratch->v1.configs++;
    run->tokens = tokens;
    run->hidden = lex_setting(at, "hidden=");
    run->topk = lex_setting(at, "num_topk=");
    run->experts = lex_setting(at, "num_experts=");
    run->topk_groups = groups;
    return true;
}

/* "[testing] Running with FP8, with top-k (async=True, previous=False) ... passed" */
static bool testing_line(struct parser *parser, const char *at)
{
    struct deepep_scratch *scratch = deepep_scratch_of(parser);
    const char *with = strstr(at, "Running with "), *passed;
    bool is_fp8, has_topk, is_async, has_previous;

    if (!with)
        return false;
    with += strlen("Running with ");
    is_fp8 = text_begins(with, "FP8");
    if ((!is_fp8 && !text_begins(with, "BF16")) || !strstr(with, "top-k") || !strstr(with, "previous=")) {
        parser->totals.unreadable++;
        return true;
    }
    if (scratch->v1.has_tuning && scratch->v1.best >= 3)
        v1_begin(parser, false);
    else
        v1_need(parser, false);
    has_topk = !strstr(with, "without top-k");
    is_async = strstr(with, "async=True") != NULL;
    has_previous = strstr(with, "previous=True") != NULL;
    scratch->v1.has_cases = true;
    scratch->v1.started[is_fp8][has_topk + 2 * is_async + 4 * has_previous]++;
    scratch->v1.all_started++;
    for (passed = with; (passed = strstr(passed, " passed")) != NULL; passed += 7)
        scratch->v1.passed++;
    return true;
}

/* Only the end of a case's line: a line of another node split it. */
static bool passed_line(struct parser *parser, const char *line)
{
    struct deepep_scratch *scratch = stream_now(parser)->deepep;
    int n = 0;

    if (!scratch || !v1_open(parser) || scratch->v1.passed >= scratch->v1.all_started)
        return false;
    for (const char *at = line; *at;) {
        while (*at == ' ' || *at == '.')
            at++;
        if (text_begins(at, "passed")) {
            n++;
            at += 6;
        } else if (*at) {
            return false;
        }
    }
    scratch->v1.passed += n;
    return n > 0;
}

struct tuning {
    bool is_best, is_combine, is_fp8;
    int sms, nvl_chunk, rdma_chunk;
    double nvl, rdma, time_us, notify_us;
};

static int chunk_of(const char *at, const char *label)
{
    int64_t value = lex_setting(at, label);

    return value >= 0 && value < 1000000 ? (int)value : -1;
}

/* Reads numbers by their units: "12 + 345 us", "81.0 GB/s (RDMA)", "t: 492.59 us", "notify: 3 us". */
static void read_figures(const char *at, struct tuning *ret_tuning)
{
    (void)lex_before(at, " GB/s (RDMA)", &ret_tuning->rdma);
    (void)lex_before(at, " GB/s (NVL)", &ret_tuning->nvl);
    if (lex_after(at, "transmit:", &ret_tuning->time_us))
        (void)lex_after(at, "notify:", &ret_tuning->notify_us);
    else if (lex_before(at, " us", &ret_tuning->time_us) && lex_before(at, " + ", &ret_tuning->notify_us))
        (void)lex_after(at, " + ", &ret_tuning->time_us);
}

static bool read_tuning(const char *at, struct tuning *ret_tuning)
{
    const char *best = strstr(at, "Best ");

    *ret_tuning = (struct tuning){.nvl = NAN, .rdma = NAN, .time_us = NAN, .notify_us = NAN};
    ret_tuning->is_best = best != NULL;
    if (best) {
        ret_tuning->is_combine = text_begins(best, "Best combine");
        ret_tuning->is_fp8 = strstr(best, "(FP8)") != NULL;
        if (!ret_tuning->is_combine &&
            (!text_begins(best, "Best dispatch") || (!ret_tuning->is_fp8 && !strstr(best, "(BF16)"))))
            return false;
    }
    ret_tuning->sms = chunk_of(at, "SMs ");
    ret_tuning->nvl_chunk = chunk_of(at, "NVL chunk ");
    ret_tuning->rdma_chunk = chunk_of(at, "RDMA chunk ");
    read_figures(at, ret_tuning);
    /* Some forks print "0.00 GB/s (RDMA)" for one node. */
    if (ret_tuning->rdma == 0 && ret_tuning->rdma_chunk <= 0) {
        ret_tuning->rdma = NAN;
        ret_tuning->rdma_chunk = -1;
    }
    if (ret_tuning->rdma_chunk >= 0 && isnan(ret_tuning->rdma))
        return false;
    return !isnan(ret_tuning->nvl) && ret_tuning->sms >= 0;
}

static void keep_best(struct parse_run *run, struct v1_scratch *v1, const struct tuning *tuning)
{
    struct parse_measure *measure = run_measure(run, tuning->is_combine ? "combine" : "dispatch",
                                                tuning->is_fp8 && !tuning->is_combine ? "fp8" : "bf16", NULL);
    double rate = isnan(tuning->rdma) ? tuning->nvl : tuning->rdma;
    bool is_slower;

    if (!measure)
        return;
    is_slower = measure->n == 0 || rate < measure->min;
    measure_sample(measure, rate);
    if (is_slower) {
        measure->sms = tuning->sms;
        measure->nvl_chunk = tuning->nvl_chunk;
        measure->rdma_chunk = tuning->rdma_chunk;
        measure->nvl_gbps = tuning->nvl;
        measure->rdma_gbps = tuning->rdma;
        measure->time_us = tuning->time_us;
        measure->notify_us = tuning->notify_us;
        snprintf(measure->config, sizeof(measure->config), "%d SMs", tuning->sms);
        if (tuning->nvl_chunk >= 0)
            text_append(measure->config, sizeof(measure->config), ", NVL chunk %d", tuning->nvl_chunk);
        if (tuning->rdma_chunk >= 0)
            text_append(measure->config, sizeof(measure->config), ", RDMA chunk %d", tuning->rdma_chunk);
    }
    measure->is_final = true;
    if (measure->n_points == 0)
        for (size_t i = 0; i < v1->n_sweep; i++)
            measure_point(measure, v1->sweep[i].x, v1->sweep[i].gbps, v1->sweep[i].time_us);
    measure->dropped_points += v1->dropped;
    v1->n_sweep = v1->dropped = 0;
}

/*
 * Does an excerpt of best lines begin again? All nodes tune an operation at the same time, so the lines of one run do
 * not return to an operation.
 */
static bool begins_again(struct v1_scratch *v1, const struct tuning *tuning)
{
    unsigned bit = 1u << (tuning->is_combine ? 2 : tuning->is_fp8), seen = v1->seen_best;
    bool is_again = (seen & bit) && v1->last_best != bit && v1->configs == 0 && !v1->has_cases;

    v1->seen_best |= bit;
    v1->last_best = bit;
    return is_again;
}

static bool tuning_line(struct parser *parser, const char *at)
{
    struct deepep_scratch *scratch = deepep_scratch_of(parser);
    struct parse_run *run;
    struct tuning tuning;

    if (!read_tuning(at, &tuning)) {
        bool is_similar = !strstr(at, "SMs ") && strlen(at) > MAX_BEFORE_SMS; /* a program's that is not DeepEP */

        parser->totals.unreadable += !is_similar;
        return !is_similar;
    }
    run = v1_need(parser, tuning.rdma_chunk >= 0);
    if (tuning.is_best && begins_again(&scratch->v1, &tuning)) {
        run = v1_begin(parser, tuning.rdma_chunk >= 0);
        (void)begins_again(&scratch->v1, &tuning);
    }
    if (tuning.rdma_chunk >= 0)
        become_internode(parser, run);
    scratch->v1.has_tuning = true;
    run->sms = tuning.sms;
    if (tuning.is_best) {
        scratch->v1.best++;
        keep_best(run, &scratch->v1, &tuning);
        return true;
    }
    if (scratch->v1.n_sweep < PARSE_MAX_POINTS) {
        double x = (double)scratch->v1.n_sweep;

        scratch->v1.sweep[scratch->v1.n_sweep++] =
            (struct parse_point){x, isnan(tuning.rdma) ? tuning.nvl : tuning.rdma, tuning.time_us};
    } else {
        scratch->v1.dropped++;
    }
    return true;
}

/* One part of a line, which starts with a marker. */
static bool piece(struct parser *parser, const char *at)
{
    if (text_begins(at, "[config]"))
        return config_line(parser, at);
    if (text_begins(at, "[testing]"))
        return testing_line(parser, at);
    if (text_begins(at, "[tuning]"))
        return tuning_line(parser, at);
    if (text_begins(at, "[layout]")) {
        v1_need(parser, false);
        return true;
    }
    return false;
}

static const char *next_marker(const char *at)
{
    for (at = strchr(at, '['); at; at = strchr(at + 1, '['))
        if (text_begins_any(at, TEXTS("[config] ", "[testing] ", "[tuning] ", "[layout] ")))
            return at;
    return NULL;
}

/* Output of several writers may be mixed in one line: each part that starts with a marker is read separately. */
bool deepep_line(struct parser *parser, const char *line)
{
    const char *at = next_marker(line), *next;
    char text[1024];
    bool is_ours = false;

    if (!at)
        return passed_line(parser, line);
    /* Text before the marker may be a host name, thus another stream: the caller looks for a prefix. */
    if (at > line && prefix_guess(line, (char[KEY_BYTES]){""}, KEY_BYTES) > 0 && line + strspn(line, " ") != at)
        return false;
    for (; at; at = next) {
        next = next_marker(at + 1);
        snprintf(text, sizeof(text), "%.*s", next ? (int)(next - at < 1000 ? next - at : 1000) : 1000, at);
        is_ours |= piece(parser, text);
    }
    return is_ours;
}

static int best_key_count(const int started[8])
{
    int best = 0;

    for (int i = 0; i < 8; i++)
        best = started[i] > best ? started[i] : best;
    return best;
}

/* The first six cases are the same in both versions; then follow two more with FP8, or the first ones again. */
static bool has_32_cases(const struct parse_run *run, bool has_two_fp8)
{
    if (has_two_fp8 || run->started > CASES_INTRANODE)
        return true;
    return run->dialect == PARSE_DEEPEP_INTERNODE && run->started <= 6;
}

/* Rows of a sweep alone, without what came before and after them: their operation is not known. */
static void keep_rows(struct parse_run *run, struct v1_scratch *v1)
{
    struct parse_measure *measure = run_measure(run, "tuning", "", NULL);

    if (!measure)
        return;
    for (size_t i = 0; i < v1->n_sweep; i++) {
        measure_sample(measure, v1->sweep[i].gbps);
        measure_point(measure, (double)measure->n_points, v1->sweep[i].gbps, v1->sweep[i].time_us);
    }
    *(run->dialect == PARSE_DEEPEP_INTERNODE ? &measure->rdma_gbps : &measure->nvl_gbps) = measure->max;
    measure->dropped_points += v1->dropped;
    v1->n_sweep = v1->dropped = 0;
}

static void finish_v1(struct parse_run *run, struct v1_scratch *v1)
{
    const struct parse_measure *combine = parse_find(run, "combine", NULL);
    int bf16 = best_key_count(v1->started[0]), fp8 = best_key_count(v1->started[1]);
    int writers = v1->configs;

    /* Each case has two kinds of BF16 data, so a writer prints its line twice. */
    if (writers < (bf16 + 1) / 2)
        writers = (bf16 + 1) / 2;
    if (writers < 1)
        writers = 1;
    if (v1->n_sweep > 0 && v1->configs == 0 && !v1->has_cases && v1->best == 0)
        keep_rows(run, v1);
    run->writers = writers;
    run->started = (v1->all_started + writers - 1) / writers;
    run->passed = v1->passed / writers;
    run->expected = 0;
    if (v1->has_cases)
        run->expected = has_32_cases(run, fp8 >= 2 * writers) ? CASES_INTERNODE : CASES_INTRANODE;
    /* The last line of each writer. */
    run->is_complete = combine && combine->n >= (uint64_t)writers;
    /*
     * Similar programs print nothing for a case that passed: then it has where the next one begins, and all have where
     * the tuning does.
     */
    if (v1->passed == 0 && run->started > 0)
        run->passed = run->is_complete || run->n_measures > 0 ? run->started : run->started - 1;
}

/*
 * Was the log of DeepEP 2 cut within the figures of the last case? All ranks print the same operations as in the cases
 * before. In the log of one rank, behind a prefix, only the number of lines of each operation can be compared.
 */
static bool is_cut_v2(const struct parse_run *run, const struct v2_scratch *v2)
{
    bool has_all_ranks = v2->measured > 0, has_figures = false;
    int64_t most = 0;

    for (size_t i = 0; i < V2_OPS; i++) {
        has_all_ranks = has_all_ranks && (v2->before[i] == 0 || v2->before[i] == v2->measured * run->ranks);
        has_figures = has_figures || v2->figures[i] > v2->before[i];
        most = v2->figures[i] > most ? v2->figures[i] : most;
    }
    if (!has_figures)
        return v2->measured > 1 && v2->measured == run->started - 1;
    for (size_t i = 0; i < V2_OPS; i++) {
        bool is_printed = v2->measured == 0 ? most > 0 : v2->before[i] > 0;

        if (is_printed && v2->figures[i] != (has_all_ranks ? (v2->measured + 1) * run->ranks : most))
            return true;
    }
    return false;
}

void deepep_finish(struct parse_run *run, struct deepep_scratch *scratch)
{
    struct v2_scratch *v2;
    int64_t figures = 0, measured;
    int cases;

    if (!scratch)
        return;
    if (run->dialect == PARSE_DEEPEP_INTRANODE || run->dialect == PARSE_DEEPEP_INTERNODE)
        finish_v1(run, &scratch->v1);
    if (run->dialect != PARSE_DEEPEP_V2)
        return;
    v2 = &scratch->v2;
    /* Options of the test leave whole values of a setting out; a run that was cut off misses other combinations. */
    cases =
        2 * __builtin_popcount(v2->alignments) * __builtin_popcount(v2->formats) * __builtin_popcount(v2->biases) * 6;
    for (size_t i = 0; i < V2_OPS; i++)
        figures += v2->figures[i];
    /* The line of a case comes before it: the only one needs figures to have passed. */
    run->is_complete = run->started > 0 && (run->started == cases || run->started == 1) &&
                       (run->started > 1 || figures > 0) && !is_cut_v2(run, v2);
    measured = v2->measured + (memcmp(v2->before, v2->figures, sizeof(v2->before)) != 0);
    run_whole(run)->has_all_ranks = measured > 0 && run->ranks > 0 && v2->figures[V2_OPS - 1] >= measured * run->ranks;
    run->expected = run->is_complete ? run->started : 144;
    run->passed = run->is_complete || run->started == 0 ? run->started : run->started - 1;
}
