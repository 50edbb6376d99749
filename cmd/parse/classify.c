/* SPDX-License-Identifier: Apache-2.0 */
/* classify.c - whether a run passed and is fast enough, and possible causes, with the check IDs of `epkit doctor`. */
#include "common/memory.h"
#include "common/output.h"
#include "common/text.h"
#include "verdict_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_cause(struct run_verdict *verdict, const char *id, const char *text)
{
    json_array_append_new(verdict->causes, json_pack("{s:s?, s:s}", "id", id, "text", text));
}

#define append(verdict, ...) text_append((verdict)->sentence, sizeof((verdict)->sentence), __VA_ARGS__)

static void fail(struct run_verdict *verdict)
{
    verdict->result = VERDICT_FAILED;
}

#define fail_with(verdict, ...) (fail(verdict), append(verdict, __VA_ARGS__))

/* --- did it pass --- */

static void check_cases(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;

    if (run->dialect == PARSE_DEEPEP_V2 && run->started == 0 && run->n_measures > 0) {
        append(verdict, ": part of a run, whose cases are missing");
    } else if (run->expected > 0) {
        append(verdict, ": %d/%d cases passed", run->passed, run->expected);
        if (run->failed > 0)
            append(verdict, ", %d failed", run->failed);
        if (run->passed < run->expected) {
            fail(verdict);
            if (run->failed == 0)
                append(verdict, ", the log ends %s case %d", run->started > run->passed ? "in" : "after",
                       run->started > run->passed ? run->passed + 1 : run->started);
        }
    }
    if (run->dialect == PARSE_DEEPEP_V2 && run->started == 1 && run->n_measures == 0 && run->n_problems == 0)
        add_cause(verdict, NULL,
                  "the first case printed no result: it hangs, or was ended while it compiled its kernels, which takes "
                  "more than a minute");
    if (run->dialect == PARSE_DEEPEP_INTERNODE && run->started > 0 && run->passed == 0 && run->n_problems == 0)
        add_cause(verdict, "nic-handler",
                  "no case ended: an internode dispatch hangs when the NIC handler of NVSHMEM is the CPU, set or by "
                  "silent fallback");
    if ((run->dialect == PARSE_DEEPEP_INTERNODE || run->dialect == PARSE_DEEPEP_INTRANODE) && run->expected == 0 &&
        run->n_measures == 0)
        fail_with(verdict, run->sms < 0 ? ": no case was begun" : ": the log ends in the tuning, before a best figure");
    if (run->dialect == PARSE_EPKIT_TEST && run->expected <= 0 && run->n_problems == 0) {
        fail_with(verdict, ": no case was run");
    }
}

/* DeepEP 1 runs the tuning after the cases. Tuning lines without cases are an excerpt of a log. */
static void check_tuning(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;

    if ((run->dialect != PARSE_DEEPEP_INTERNODE && run->dialect != PARSE_DEEPEP_INTRANODE) || run->is_complete ||
        run->expected == 0 || run->passed < run->expected)
        return;
    fail_with(verdict, ", the log ends %s",
              run->n_measures ? "in the tuning, before the best combine" : "before the tuning");
}

/* What the log does not contain of a run whose other nodes have logs of their own. */
static void note_parts(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    json_t *note = NULL;

    if (run->dialect == PARSE_DEEPEP_LOW_LATENCY && run->ranks_absent > 0)
        note = json_sprintf("Part of a run: the logs of %d of at least %d ranks are missing.", run->ranks_absent,
                            (int)run->ranks);
    else if (run->dialect == PARSE_DEEPEP_LOW_LATENCY && verdict->nodes == 0)
        note = json_sprintf("Part of a run, if it had more than these %d ranks: then the logs of the other nodes are "
                            "missing. Without the number of nodes (--nodes) nothing is expected of the rates.",
                            (int)run->ranks);
    else if (run->dialect == PARSE_DEEPEP_INTERNODE && verdict->nodes > run->writers)
        note = json_sprintf("Part of a run: this is the log of %d of %d nodes.", run->writers, verdict->nodes);
    else if (run->dialect == PARSE_NCCL_TESTS)
        note = json_string("Part of a run: rows of a table, without its beginning and its end.");
    else if (run->dialect == PARSE_PROGRAM)
        note = json_string("Part of a run: its beginning and its last figures are missing.");
    else if (parse_find(run, "tuning", NULL))
        note = json_string("Part of a run: rows of the tuning of an operation, without its cases and its best figure.");
    if (note)
        json_array_append_new(verdict->notes, note);
}

/* Missing lines are not reported if there are as many torn lines: they may be the same. */
static void check_low_latency(const struct context *context, struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    const struct parse_measure *measure = parse_find(run, "dispatch + combine", NULL);
    int n = measure || (measure = parse_find(run, "dispatch", NULL)) ? (int)measure->n : 0;
    bool is_cut = (uint64_t)run->lines_missing > parser_totals(context->parser).unreadable;

    if (run->dialect != PARSE_DEEPEP_LOW_LATENCY)
        return;
    if (run->n_measures == 0)
        fail_with(verdict, ": no rank printed a result");
    else if (is_cut && n < run->ranks - run->ranks_absent)
        fail_with(verdict, ": %d of %d ranks printed a result", n, (int)run->ranks);
    else if (is_cut)
        fail_with(verdict, ": the log ends before all ranks have printed all results: %d line%s of %d missing",
                  run->lines_missing, run->lines_missing == 1 ? " is" : "s",
                  run->kinds * ((int)run->ranks - run->ranks_absent));
    if (verdict->result == VERDICT_PASSED || (run->n_measures > 0 && run->ranks_absent > 0))
        note_parts(verdict);
}

static void check_tables(const struct context *context, struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;

    if (run->dialect == PARSE_NCCL_TESTS) {
        if (run->writers > 1 || (run->ranks == 1 && context->single_ranks > 1)) {
            fail_with(verdict, ": %d independent runs of %lld rank%s each instead of one",
                      run->writers > 1 ? run->writers : context->single_ranks, (long long)run->ranks,
                      run->ranks == 1 ? "" : "s");
            add_cause(verdict, NULL, "the program was built without MPI, or with another MPI than mpirun's");
        } else if (run->wrong > 0 || run->failed > 0) {
            if (run->wrong)
                fail_with(verdict, ": %llu value%s wrong", (unsigned long long)run->wrong,
                          run->wrong == 1 ? " is" : "s are");
            else
                fail_with(verdict, ": %d row%s of the table with wrong values", run->failed,
                          run->failed == 1 ? "" : "s");
        } else if (run->n_measures == 0 && (run->started > 0 || !(run->average > 0))) {
            fail_with(verdict, ": the table has no rows");
        } else if (!run->is_complete && run->started > 0) {
            fail_with(verdict, ": the table was cut off");
        } else if (run->n_measures == 0) {
            append(verdict, ": the average bus bandwidth is %.1f GB/s, of a table that is not there", run->average);
        } else if (!run->is_complete) {
            note_parts(verdict);
        }
        if (run->ranks == 1)
            json_array_append_new(verdict->notes,
                                  json_string("One rank alone sends nothing: its bus bandwidth of 0 has no meaning."));
    }
    if (run->dialect == PARSE_PROGRAM && run->passed > 0)
        append(verdict, ": %d check%s passed", run->passed, run->passed == 1 ? "" : "s");
    if ((run->dialect == PARSE_PERFTEST || run->dialect == PARSE_PROGRAM) && run->n_measures == 0)
        fail_with(verdict, ": nothing was measured");
    else if (run->dialect == PARSE_PROGRAM && !run->is_complete && run->started > 0)
        fail_with(verdict, "%s the log ends before the last figures", run->passed ? "," : ":");
    else if (run->dialect == PARSE_PROGRAM && !run->is_complete)
        note_parts(verdict);
    /* Table lines without a header are an excerpt of a log. */
    if (run->dialect == PARSE_PERFTEST && run->n_measures > 0 && !run->is_complete && run->started > 0)
        fail_with(verdict, ": the log ends within the table");
    if (run->dialect == PARSE_PERFTEST && run->n_measures > 0 && run->measures[0].rdma_gbps <= 0)
        fail_with(verdict, ": nothing was moved");
    if (run->dialect == PARSE_EPKIT_BENCH && run->n_measures == 0 && run->n_problems == 0)
        fail_with(verdict, ": the table has no rows");
}

static void check_problems(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    const struct parse_known *known;
    size_t n;

    if (run->n_problems == 0)
        return;
    fail(verdict);
    n = strlen(run->problems[0].line);
    append(verdict, "; %.*s", (int)(n - (n > 0 && strchr(".:", run->problems[0].line[n - 1]))), run->problems[0].line);
    known = run->problems[0].known;
    if (known && (known->is_specific || known->id))
        add_cause(verdict, known->id, known->cause);
}

/* What the log warns of, where nothing else says why there is no result. */
static void check_warnings(const struct context *context, struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    size_t n;
    const struct parse_fault *fault = parser_faults(context->parser, &n), *end = fault + n;
    char text[2 * PARSE_TEXT];

    if (verdict->result != VERDICT_FAILED || run->n_problems + run->n_measures > 0 || run->passed > 0 ||
        json_array_size(verdict->causes) > 0)
        return;
    while (fault < end && (strcmp(fault->source, run->source) != 0 || fault->line_number < run->first_line))
        fault++;
    if (fault == end)
        return;
    snprintf(text, sizeof(text), "%s: %s", fault->known->cause, fault->line);
    add_cause(verdict, fault->known->id, text);
}

/* --- is it fast --- */

static void slow_rdma(struct run_verdict *verdict, double ratio, int nics)
{
    char text[200];

    if (verdict->best_ratio >= 0.9) {
        add_cause(
            verdict, NULL,
            "another operation is as fast as expected over the same links, so neither NICs nor links are the cause: "
            "compare the number of SMs, the chunks and the version");
    } else if (ratio <= 1.3 / nics) {
        snprintf(text, sizeof(text), "%.1f GB/s is one NIC of %s: all ranks of a node use the same one",
                 verdict->worst->rdma_gbps, nics == 8 ? "eight" : "many");
        add_cause(verdict, "one-nic", text);
        add_cause(verdict, "mapping-inactive", "the mapping of GPUs to NICs is defined but never called");
        add_cause(verdict, "stale-copy", "the installed copy of DeepEP is not the patched one");
    } else if (ratio < 0.33) {
        add_cause(verdict, "shared-nic", "about a quarter: several GPUs share a NIC");
        add_cause(verdict, "slow-link", "or a NIC or its PCIe link runs below its speed");
    } else if (ratio <= 0.65) {
        add_cause(verdict, "shared-nic", "about half: two GPUs share a NIC; check the NIC counters first");
        add_cause(verdict, "slow-link",
                  "or a link or a node is slow, which gives the same figure: 'epkit triangulate' finds it");
    } else {
        add_cause(verdict, "slow-link",
                  "a link, a node or the network between them is slow: 'epkit triangulate' finds it");
    }
}

static void slow_causes(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    double ratio = verdict->worst_ratio;
    int nics = verdict->worst_expected.hardware ? verdict->worst_expected.hardware->nics_per_node : 8;

    if (run->dialect == PARSE_PERFTEST) {
        add_cause(verdict, "slow-link", "the port, or the PCIe link of the NIC, runs below its speed or width");
        add_cause(verdict, "port-down", "or the path between the two ports does");
    } else if (run->dialect == PARSE_NCCL_TESTS && verdict->nodes > 1) {
        if (ratio <= 1.3 / nics)
            add_cause(verdict, "net-plugin", "NCCL uses one NIC, or sockets: look for 'NET/' in its log");
        add_cause(verdict, "gib-settings", "the NCCL settings differ from those of the plugin");
        add_cause(verdict, "slow-link", "or a NIC or a node is slow: 'epkit triangulate' finds it");
    } else if (run->dialect == PARSE_DEEPEP_LOW_LATENCY && verdict->nodes > 1) {
        add_cause(verdict, "nic-handler", "every message waits for the CPU when the NIC handler is not the GPU");
        add_cause(verdict, "one-nic", "or all ranks use one NIC");
    } else if (metric_of(run, verdict->worst) == METRIC_RDMA) {
        slow_rdma(verdict, ratio, nics > 0 ? nics : 8);
    } else {
        add_cause(verdict, "nvlink", "NVLink runs below its speed: links are down, or the fabric manager is off");
        add_cause(verdict, "gpu-errors", "or a GPU is throttled or has errors");
    }
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* The median rate of all runs that measured the same on a link; of two the higher one. NAN: there is only one run. */
static double rate_of_links(const struct parser *parser, const struct parse_measure *like)
{
    double *rates = memory_new(parser_count(parser), sizeof(*rates)), rate = NAN;
    size_t n = 0;

    for (size_t i = 0; i < parser_count(parser); i++) {
        const struct parse_run *run = parser_run(parser, i);
        const struct parse_measure *measure = parse_find(run, like->op, like->type);

        if (run->dialect == PARSE_PERFTEST && measure && measure->rdma_gbps > 0 && measure->bytes == like->bytes)
            rates[n++] = measure->rdma_gbps;
    }
    if (n >= 2) {
        qsort(rates, n, sizeof(*rates), compare_doubles);
        rate = rates[n / 2];
    }
    free(rates);
    return rate;
}

static void find_worst(const struct context *context, struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;

    if (!run->measures)
        return;
    for (size_t i = 0; i < run->n_measures; i++) {
        struct expected expected;

        expect(context, verdict, &run->measures[i], &expected);
        if (!isnan(expected.value) && expected.ratio > verdict->best_ratio)
            verdict->best_ratio = expected.ratio;
        if (!isnan(expected.value) && expected.ratio < verdict->worst_ratio) {
            verdict->worst_ratio = expected.ratio;
            verdict->worst = &run->measures[i];
            verdict->worst_expected = expected;
        }
    }
    /* Links of one kind can be compared with each other without reference figures. */
    if (!verdict->worst && run->dialect == PARSE_PERFTEST && run->n_measures > 0 && run->measures[0].rdma_gbps > 0) {
        double value = rate_of_links(context->parser, &run->measures[0]);

        if (isnan(value))
            return;
        verdict->worst = &run->measures[0];
        verdict->worst_ratio = run->measures[0].rdma_gbps / value;
        verdict->worst_expected = (struct expected){.value = value, .from = "the other links"};
    }
}

static void check_speed(const struct context *context, struct run_verdict *verdict)
{
    double percent = 100 * verdict->worst_ratio;
    const struct parse_measure *worst = verdict->worst;
    enum metric metric;

    /* The rates of a run that failed are those until then. */
    if (!worst || verdict->run->n_problems > 0 || verdict->worst_ratio >= 1 - context->options->tolerance)
        return;
    metric = metric_of(verdict->run, worst);
    append(verdict, "; %s%s%s %.*f %s", worst->op, *worst->type ? " " : "", worst->type,
           out_digits(1, metric_value(metric, worst)), metric_value(metric, worst), metric_unit(metric));
    if (metric == METRIC_TIME)
        append(verdict, " where %.1f are expected", verdict->worst_expected.value);
    else
        append(verdict, " is %.0f%% of %s%.1f", percent,
               strcmp(verdict->worst_expected.from, "lowest known") == 0      ? "the slowest known machine's "
               : strcmp(verdict->worst_expected.from, "the other links") == 0 ? "the other links' "
                                                                              : "the expected ",
               verdict->worst_expected.value);
    if (verdict->hardware)
        append(verdict, " on %s", verdict->hardware->name);
    if (verdict->result == VERDICT_PASSED)
        verdict->result = VERDICT_SLOW;
    slow_causes(verdict);
}

/* --- the sentence --- */

/* The best figures of a run that passed. */
static void append_figures(struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    int n_appended = 0;

    for (size_t i = 0; run->measures && i < run->n_measures && n_appended < 3; i++) {
        const struct parse_measure *measure = &run->measures[i];
        enum metric metric = metric_of(run, measure);
        double value = metric_value(metric, measure);

        if (isnan(value) || strncmp(measure->op, "plan", 4) == 0 || strstr(measure->op, "recv") ||
            strstr(measure->op, "expanded") || strstr(measure->op, "cached") || strstr(measure->op, "reduced"))
            continue;
        append(verdict, "%s %s%s%s", n_appended ? "," : (strchr(verdict->sentence, ':') ? ";" : ":"), measure->op,
               *measure->type ? " " : "", measure->type);
        if (run->dialect == PARSE_NCCL_TESTS)
            append(verdict, " %s", measure->config); /* in-place or not */
        append(verdict, " %.*f %s", out_digits(1, value), value, metric_unit(metric));
        n_appended++;
    }
}

static void append_causes(struct run_verdict *verdict)
{
    const json_t *first = json_array_get(verdict->causes, 0);
    const char *id = json_string_value(json_object_get(first, "id"));

    if (!first)
        return;
    append(verdict, ": %s", json_string_value(json_object_get(first, "text")));
    if (id)
        append(verdict, " (doctor id %s)", id);
}

void classify_run(const struct context *context, struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;

    verdict->result = VERDICT_PASSED;
    verdict->causes = json_array();
    verdict->notes = json_array();
    append(verdict, "%s", run->title);
    if (verdict->nodes > 0 && run->dialect != PARSE_PERFTEST && run->dialect != PARSE_EPKIT_TEST &&
        run->dialect != PARSE_EPKIT_BENCH)
        append(verdict, ", %d node%s%s", verdict->nodes, verdict->nodes == 1 ? "" : "s",
               strcmp(verdict->nodes_from, "rates") == 0 ? " by its rates" : "");
    if (verdict->nodes == 0 && run->dialect == PARSE_DEEPEP_LOW_LATENCY && run->ranks > 0)
        append(verdict, ", number of nodes unknown");
    if (*run->device && run->dialect == PARSE_PERFTEST)
        append(verdict, " on %s", run->device);
    check_cases(verdict);
    check_tuning(verdict);
    check_tables(context, verdict);
    check_low_latency(context, verdict);
    if (run->dialect == PARSE_DEEPEP_INTERNODE || run->dialect == PARSE_DEEPEP_INTRANODE)
        note_parts(verdict);
    check_problems(verdict);
    check_warnings(context, verdict);
    find_worst(context, verdict);
    check_speed(context, verdict);
    if (verdict->result == VERDICT_PASSED)
        append_figures(verdict);
    else
        append_causes(verdict);
}
