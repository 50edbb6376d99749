/* SPDX-License-Identifier: Apache-2.0 */
/* judge.c - did a run pass, is it fast enough, and what may be the cause. Identifiers are those of `epkit doctor`. */
#include "verdict/internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void add_cause(struct judged *judged, const char *id, const char *text)
{
    json_array_append_new(judged->causes, json_pack("{s:s?, s:s}", "id", id, "text", text));
}

static void __attribute__((format(printf, 2, 3))) say(struct judged *judged, const char *format, ...)
{
    size_t used = strlen(judged->sentence);
    va_list args;

    va_start(args, format);
    vsnprintf(judged->sentence + used, sizeof(judged->sentence) - used, format, args);
    va_end(args);
}

static void fail(struct judged *judged)
{
    judged->result = VERDICT_FAILED;
}

/* --- did it pass --- */

static void judge_cases(struct judged *judged)
{
    const struct parse_run *run = judged->run;

    if (run->expected > 0) {
        say(judged, ": %d/%d cases passed", run->passed, run->expected);
        if (run->failed > 0)
            say(judged, ", %d failed", run->failed);
        if (run->passed < run->expected) {
            fail(judged);
            if (run->failed == 0)
                say(judged, ", the log ends %s case %d", run->started > run->passed ? "in" : "after",
                    run->started > run->passed ? run->passed + 1 : run->started);
        }
    }
    if ((run->dialect == PARSE_DEEPEP_INTERNODE || run->dialect == PARSE_DEEPEP_V2) && run->started > 0 &&
        run->passed == 0 && run->n_problems == 0)
        add_cause(judged, "nic-handler",
                  "no case ended: an internode dispatch hangs when the NIC handler of NVSHMEM is the CPU, set or by "
                  "silent fallback");
    if ((run->dialect == PARSE_DEEPEP_INTERNODE || run->dialect == PARSE_DEEPEP_INTRANODE) && run->expected == 0 &&
        run->n_measures == 0) {
        say(judged, ": no case was begun");
        fail(judged);
    }
    if (run->dialect == PARSE_EPKIT_TEST && run->expected <= 0 && run->n_problems == 0) {
        say(judged, ": no case was run");
        fail(judged);
    }
}

/* Of DeepEP 1, whose cases are followed by the tuning. Lines of it alone are what somebody has chosen from a log. */
static void judge_tuning(struct judged *judged)
{
    const struct parse_run *run = judged->run;

    if ((run->dialect != PARSE_DEEPEP_INTERNODE && run->dialect != PARSE_DEEPEP_INTRANODE) || run->is_complete ||
        run->expected == 0 || run->passed < run->expected)
        return;
    say(judged, ", the log ends %s", run->n_measures ? "in the tuning, before the best combine" : "before the tuning");
    fail(judged);
}

/* The lines that may be among those that were torn are not missed. */
static void judge_low_latency(const struct context *context, struct judged *judged)
{
    const struct parse_run *run = judged->run;
    const struct parse_measure *measure = parse_find(run, "dispatch + combine", NULL);
    int n = measure ? (int)measure->n : 0;

    if (run->dialect != PARSE_DEEPEP_LOW_LATENCY)
        return;
    if (run->n_measures == 0)
        say(judged, ": no rank printed a result");
    else if ((uint64_t)run->lines_missing <= parser_totals(context->parser).unreadable)
        return;
    else if (n < run->ranks)
        say(judged, ": %d of %d ranks printed a result", n, (int)run->ranks);
    else
        say(judged, ": the log ends before all ranks have printed all results: %d line%s of %d missing",
            run->lines_missing, run->lines_missing == 1 ? " is" : "s", 3 * (int)run->ranks);
    fail(judged);
}

static void judge_tables(const struct context *context, struct judged *judged)
{
    const struct parse_run *run = judged->run;

    if (run->dialect == PARSE_NCCL_TESTS) {
        if (run->writers > 1 || (run->ranks == 1 && context->single_ranks > 1)) {
            say(judged, ": %d independent runs of %lld rank%s each instead of one",
                run->writers > 1 ? run->writers : context->single_ranks, (long long)run->ranks,
                run->ranks == 1 ? "" : "s");
            fail(judged);
            add_cause(judged, NULL, "the program was built without MPI, or with another MPI than mpirun's");
        } else if (run->wrong > 0 || run->failed > 0) {
            if (run->wrong)
                say(judged, ": %llu value%s wrong", (unsigned long long)run->wrong, run->wrong == 1 ? " is" : "s are");
            else
                say(judged, ": %d row%s of the table with wrong values", run->failed, run->failed == 1 ? "" : "s");
            fail(judged);
        } else if (run->n_measures == 0) {
            say(judged, ": the table has no rows");
            fail(judged);
        } else if (!run->is_complete) {
            say(judged, ": the table was cut off");
            fail(judged);
        }
        if (run->ranks == 1)
            json_array_append_new(
                judged->notes, json_string("One rank alone sends nothing: its bus bandwidth is 0, and tells nothing."));
    }
    if (run->dialect == PARSE_PERFTEST && run->n_measures == 0) {
        say(judged, ": nothing was measured");
        fail(judged);
    }
    /* Lines of the table alone are what somebody has chosen from a log. */
    if (run->dialect == PARSE_PERFTEST && run->n_measures > 0 && !run->is_complete && run->started > 0) {
        say(judged, ": the log ends within the table");
        fail(judged);
    }
    if (run->dialect == PARSE_PERFTEST && run->n_measures > 0 && run->measures[0].rdma_gbps <= 0) {
        say(judged, ": nothing was moved");
        fail(judged);
    }
    if (run->dialect == PARSE_EPKIT_BENCH && run->n_measures == 0 && run->n_problems == 0) {
        say(judged, ": the table has no rows");
        fail(judged);
    }
}

static void judge_problems(struct judged *judged)
{
    const struct parse_run *run = judged->run;

    if (run->n_problems == 0)
        return;
    fail(judged);
    say(judged, "; %s", run->problems[0]);
}

/* --- is it fast --- */

static void slow_rdma(struct judged *judged, double ratio, int nics)
{
    char text[200];

    if (ratio <= 1.3 / nics) {
        snprintf(text, sizeof(text), "%.1f GB/s is one NIC of %s: all ranks of a node use the same one",
                 judged->worst->rdma_gbps, nics == 8 ? "eight" : "many");
        add_cause(judged, "one-nic", text);
        add_cause(judged, "mapping-inactive", "the mapping of GPUs to NICs is defined but never called");
        add_cause(judged, "stale-copy", "the installed copy of DeepEP is not the patched one");
    } else if (ratio < 0.33) {
        add_cause(judged, "shared-nic", "about a quarter: several GPUs share a NIC");
        add_cause(judged, "slow-link", "or a NIC or its PCIe link runs below its speed");
    } else if (ratio <= 0.65) {
        add_cause(judged, "shared-nic", "about half: two GPUs share a NIC; look at the NIC counters first");
        add_cause(judged, "slow-link",
                  "or a link or a node is slow, which gives the same figure: 'epkit triangulate' "
                  "finds it");
    } else {
        add_cause(judged, "slow-link",
                  "a link, a node or the network between them is slow: 'epkit triangulate' finds it");
    }
}

static void slow_causes(struct judged *judged)
{
    const struct parse_run *run = judged->run;
    double ratio = judged->worst_ratio;
    int nics = judged->worst_expected.hardware ? judged->worst_expected.hardware->nics_per_node : 8;

    if (run->dialect == PARSE_PERFTEST) {
        add_cause(judged, "slow-link", "the port, or the PCIe link of the NIC, runs below its speed or width");
        add_cause(judged, "port-down", "or the path between the two ports does");
    } else if (run->dialect == PARSE_NCCL_TESTS && judged->nodes > 1) {
        if (ratio <= 1.3 / nics)
            add_cause(judged, "net-plugin", "NCCL uses one NIC, or sockets: look for 'NET/' in its log");
        add_cause(judged, "gib-settings", "the NCCL settings differ from those of the plugin");
        add_cause(judged, "slow-link", "or a NIC or a node is slow: 'epkit triangulate' finds it");
    } else if (run->dialect == PARSE_DEEPEP_LOW_LATENCY) {
        add_cause(judged, "nic-handler", "every message waits for the CPU when the NIC handler is not the GPU");
        add_cause(judged, judged->nodes > 1 ? "one-nic" : "nvlink",
                  judged->nodes > 1 ? "or all ranks use one NIC" : "or NVLink runs below its speed");
    } else if (metric_of(run, judged->worst) == METRIC_RDMA) {
        slow_rdma(judged, ratio, nics > 0 ? nics : 8);
    } else {
        add_cause(judged, "nvlink", "NVLink runs below its speed: links are down, or the fabric manager is off");
        add_cause(judged, "gpu-errors", "or a GPU is throttled or has errors");
    }
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

/* Of all runs that measured the same on a link: the median rate, or of two the higher one. NAN: there is one alone. */
static double rate_of_links(const struct parser *parser, const struct parse_measure *like)
{
    double *rates = calloc(parser_count(parser) + 1, sizeof(*rates)), rate = NAN;
    size_t n = 0;

    for (size_t i = 0; rates && i < parser_count(parser); i++) {
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

static void find_worst(const struct context *context, struct judged *judged)
{
    const struct parse_run *run = judged->run;

    if (!run->measures)
        return;
    for (size_t i = 0; i < run->n_measures; i++) {
        struct expected expected;

        expect(context, judged, &run->measures[i], &expected);
        if (!isnan(expected.value) && expected.ratio < judged->worst_ratio) {
            judged->worst_ratio = expected.ratio;
            judged->worst = &run->measures[i];
            judged->worst_expected = expected;
        }
    }
    /* Links of one kind can be compared with each other, whatever they are. */
    if (!judged->worst && run->dialect == PARSE_PERFTEST && run->n_measures > 0 && run->measures[0].rdma_gbps > 0) {
        double value = rate_of_links(context->parser, &run->measures[0]);

        if (isnan(value))
            return;
        judged->worst = &run->measures[0];
        judged->worst_ratio = run->measures[0].rdma_gbps / value;
        judged->worst_expected = (struct expected){.value = value, .from = "the other links"};
    }
}

/* Where a quotient stands out that a known fault leaves, although the machine is not known. */
static void note_half(const struct context *context, struct judged *judged)
{
    const struct model_hardware *b200 = reference_find_hardware(context->reference, "b200");
    struct judged trial = *judged;
    struct expected expected;

    if (judged->hardware || !b200 || judged->run->dialect != PARSE_DEEPEP_INTERNODE || !judged->worst ||
        judged->result == VERDICT_SLOW)
        return;
    trial.hardware = b200;
    expect(context, &trial, judged->worst, &expected);
    if (!isnan(expected.value) && expected.ratio <= 0.65)
        json_array_append_new(
            judged->notes,
            json_sprintf("On 8x B200 with 8x 400 Gb/s this would be %.0f%% of what is expected: two GPUs on one NIC "
                         "(doctor id shared-nic) or a slow link (slow-link). Name the machine with --hardware.",
                         100 * expected.ratio));
}

static void judge_speed(const struct context *context, struct judged *judged)
{
    double percent = 100 * judged->worst_ratio;
    const struct parse_measure *worst = judged->worst;
    enum metric metric;

    if (!worst)
        return;
    metric = metric_of(judged->run, worst);
    if (judged->worst_ratio >= 1 - context->options->tolerance) {
        note_half(context, judged);
        return;
    }
    say(judged, "; %s%s%s %.1f %s", worst->op, *worst->type ? " " : "", worst->type, metric_value(metric, worst),
        metric_unit(metric));
    if (metric == METRIC_TIME)
        say(judged, " where %.1f are expected", judged->worst_expected.value);
    else
        say(judged, " is %.0f%% of %s%.1f", percent,
            strcmp(judged->worst_expected.from, "lowest known") == 0      ? "the slowest known machine's "
            : strcmp(judged->worst_expected.from, "the other links") == 0 ? "the other links' "
                                                                          : "the expected ",
            judged->worst_expected.value);
    if (judged->hardware)
        say(judged, " on %s", judged->hardware->name);
    if (judged->result == VERDICT_PASSED)
        judged->result = VERDICT_SLOW;
    slow_causes(judged);
}

/* --- the sentence --- */

/* The best figures of a run that is fine. */
static void say_figures(struct judged *judged)
{
    const struct parse_run *run = judged->run;
    int said = 0;

    for (size_t i = 0; run->measures && i < run->n_measures && said < 3; i++) {
        const struct parse_measure *measure = &run->measures[i];
        enum metric metric = metric_of(run, measure);
        double value = metric_value(metric, measure);

        if (isnan(value) || strncmp(measure->op, "plan", 4) == 0 || strstr(measure->op, "recv") ||
            strstr(measure->op, "expanded") || strstr(measure->op, "cached") || strstr(measure->op, "reduced"))
            continue;
        say(judged, "%s %s%s%s %.1f %s", said ? "," : (strchr(judged->sentence, ':') ? ";" : ":"), measure->op,
            *measure->type ? " " : "", measure->type, value, metric_unit(metric));
        said++;
    }
}

static void say_causes(struct judged *judged)
{
    const json_t *first = json_array_get(judged->causes, 0);
    const char *id = json_string_value(json_object_get(first, "id"));

    if (!first)
        return;
    say(judged, ": %s", json_string_value(json_object_get(first, "text")));
    if (id)
        say(judged, " (doctor id %s)", id);
}

void judge(const struct context *context, struct judged *judged)
{
    const struct parse_run *run = judged->run;

    judged->result = VERDICT_PASSED;
    judged->causes = json_array();
    judged->notes = json_array();
    say(judged, "%s", run->title);
    if (judged->nodes > 0 && run->dialect != PARSE_PERFTEST && run->dialect != PARSE_EPKIT_TEST &&
        run->dialect != PARSE_EPKIT_BENCH)
        say(judged, ", %d node%s%s", judged->nodes, judged->nodes == 1 ? "" : "s",
            strcmp(judged->nodes_from, "rates") == 0 ? " by its rates" : "");
    if (*run->device && run->dialect == PARSE_PERFTEST)
        say(judged, " on %s", run->device);
    judge_cases(judged);
    judge_tuning(judged);
    judge_tables(context, judged);
    judge_low_latency(context, judged);
    judge_problems(judged);
    find_worst(context, judged);
    judge_speed(context, judged);
    if (judged->result == VERDICT_PASSED)
        say_figures(judged);
    else
        say_causes(judged);
}
