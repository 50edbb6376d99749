/* SPDX-License-Identifier: Apache-2.0 */
#include "watch.h"

#include "common/text.h"

#include <math.h>

/* The first case of DeepEP 2 looks like a run of one case. */
static bool is_over(const struct parse_run *run)
{
    return run->is_complete && (run->dialect != PARSE_DEEPEP_V2 || run->started > 1);
}

static size_t finals(const struct parse_run *run)
{
    return COUNT_OF(i, run->n_measures, run->measures[i].is_final);
}

/* Of runs that print the same the one with the lowest number is the last. */
static double progress_of(const struct parse_run *run)
{
    return is_over(run) ? INFINITY : run->passed + run->failed + 1e6 * (double)finals(run) + 1e-3 * run->started;
}

static void add_phase(struct text *text, const struct parse_run *run)
{
    const struct parse_measure *last = run->n_measures ? &run->measures[run->n_measures - 1] : NULL;
    bool is_tuned = run->dialect == PARSE_DEEPEP_INTRANODE || run->dialect == PARSE_DEEPEP_INTERNODE;

    if (is_over(run))
        text_add(text, "complete");
    else if (is_tuned && run->expected > 0 && run->passed >= run->expected)
        text_add(text, "all %d cases passed, tuning %zu of 3", run->expected, finals(run) + (finals(run) < 3));
    else if (run->expected > 0)
        text_add(text, "%d of %d cases passed%s", run->passed, run->expected, run->failed ? ", some failed" : "");
    else if (run->dialect == PARSE_DEEPEP_LOW_LATENCY && run->ranks > 0)
        text_add(text, "%llu of %lld ranks have printed results", last ? (unsigned long long)run->measures[0].n : 0ull,
                 (long long)run->ranks);
    else if (last && last->n_points > 0 && last->points[last->n_points - 1].x >= 1048576)
        text_add(text, "%zu rows, up to %.4g MiB", last->n_points, last->points[last->n_points - 1].x / 1048576);
    else if (last && last->n_points > 0)
        text_add(text, "%zu row%s", last->n_points, last->n_points == 1 ? "" : "s");
    else
        text_add(text, "begun");
}

static void note_failure(struct standing *standing, const struct parser *parser, struct text *text)
{
    size_t n;
    const struct parse_fault *fault = parser_faults(parser, &n), *end = fault + n;

    while (fault < end && (!fault->known->is_fatal || fault->known->may_pass))
        fault++;
    standing->has_failed = fault < end;
    if (fault < end)
        text_add(text, "%sfailed: %.120s", text->n ? "; " : "", fault->line);
}

void standing_update(struct standing *standing, struct parser *parser, uint64_t now_ns)
{
    struct text where = text_in(standing->where, sizeof(standing->where)),
                late = text_in(standing->late, sizeof(standing->late));
    const struct parse_run *slowest = NULL, *silent = NULL;
    uint64_t newest = 0, oldest = UINT64_MAX;
    size_t n_open = 0, n = parser_count(parser);

    parser_refresh(parser);
    standing->may_be_over = true;
    for (size_t i = 0; i < n; i++) {
        struct parse_run *run = parser_run(parser, i);

        /* Of DeepEP 2 only the first process of a node prints cases. */
        if (!run->is_open || (run->dialect == PARSE_DEEPEP_V2 && run->started == 0 && run->n_measures > 0))
            continue;
        n_open++;
        standing->may_be_over &= run->is_complete;
        if (run->seen_line != run->last_line)
            run->seen_ns = now_ns;
        run->seen_line = run->last_line;
        newest = run->seen_ns > newest ? run->seen_ns : newest;
        if (!slowest || progress_of(run) < progress_of(slowest))
            slowest = run;
        if (!is_over(run) && run->seen_ns < oldest) {
            oldest = run->seen_ns;
            silent = run;
        }
    }
    standing->is_over = slowest && is_over(slowest);
    standing->may_be_over &= n_open > 0;
    if (slowest) {
        if (n > n_open)
            text_add(&where, "%zu before; ", n - n_open);
        text_add(&where, "%s%s%s: ", slowest->title, n_open > 1 && *slowest->stream ? " of " : "",
                 n_open > 1 ? slowest->stream : "");
        add_phase(&where, slowest);
    }
    note_failure(standing, parser, &where);
    /* Only beside others that went on: else nothing at all is written. */
    if (silent && newest > oldest && now_ns - oldest > LATE_S * UINT64_C(1000000000) &&
        newest - oldest > LATE_S * UINT64_C(1000000000))
        text_add(&late, "%s silent for %llu s", *silent->stream ? silent->stream : silent->title,
                 (unsigned long long)((now_ns - oldest) / 1000000000u));
}
