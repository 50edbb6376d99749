/* SPDX-License-Identifier: Apache-2.0 */
/* document.c - runs and verdicts as JSON. */
#include "common/json.h"
#include "common/output.h"
#include "verdict_internal.h"

#include <stdio.h>
#include <string.h>

#define ASSUMED_NIC 50.0 /* GB/s: 400 Gb/s, where the machine is not known */

static const char *const results[] = {"passed", "failed", "slow", "nothing"};

static json_t *number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static json_t *whole(int64_t value)
{
    return value >= 0 ? json_integer((json_int_t)value) : json_null();
}

static json_t *wire_rates(const struct run_verdict *verdict, const struct parse_measure *measure)
{
    const struct parse_run *run = verdict->run;
    double rdma = NAN, nvl = NAN;

    if (run->dialect == PARSE_PERFTEST)
        rdma = measure->rdma_gbps;
    else if (verdict->nodes > 1)
        rdma = measure->rdma_gbps * (verdict->nodes - 1) / verdict->nodes;
    if (run->dialect != PARSE_EPKIT_BENCH && run->dialect != PARSE_PROGRAM && verdict->gpus > 0 &&
        (run->dialect != PARSE_DEEPEP_LOW_LATENCY || verdict->nodes == 1))
        nvl = measure->nvl_gbps * (verdict->gpus - 1) / verdict->gpus;
    return json_pack("{s:o, s:o}", "rdma", number(rdma), "nvl", number(nvl));
}

/* Bus bandwidth of a ring over nodes whose NICs are the limit: docs/model.md. */
static double bus_peak(const struct run_verdict *verdict, double nics)
{
    double ranks = (double)verdict->ranks, nodes = verdict->nodes;

    if (nodes < 2 || ranks < 2 || !strstr(verdict->run->title, "all_reduce"))
        return NAN;
    return nics * ((ranks - 1) / ranks) * (nodes / (nodes - 1));
}

static json_t *percents(const struct run_verdict *verdict, const struct parse_measure *measure, const json_t *wire)
{
    const struct model_hardware *hardware = verdict->hardware;
    double nic = hardware ? hardware->nic_gbps : ASSUMED_NIC;
    double nics = hardware ? hardware->nics_per_node * nic : 8 * ASSUMED_NIC;
    double ways = strstr(measure->op, "(both ways)") ? 2 : 1;
    double share =
        verdict->run->dialect == PARSE_PERFTEST ? ways * nic : nics / (verdict->gpus > 0 ? verdict->gpus : 8);
    double rdma = json_number_value(json_object_get(wire, "rdma")),
           nvl = json_number_value(json_object_get(wire, "nvl"));
    double bus = NAN;
    char of[64] = "";

    if (!isnan(measure->bus_gbps))
        bus = verdict->nodes > 1 ? 100 * measure->bus_gbps / bus_peak(verdict, nics)
              : hardware         ? 100 * measure->bus_gbps / hardware->nvlink_gbps
                                 : NAN;
    if (bus > 100) /* a switch adds up (NVLS, SHARP): the formula of the bus bandwidth is not what a link carries */
        bus = NAN;
    if (rdma > 0)
        snprintf(of, sizeof(of), "NICs, %.0f GB/s for each %s", share,
                 verdict->run->dialect == PARSE_PERFTEST ? "port" : "GPU");
    else if (hardware && nvl > 0)
        snprintf(of, sizeof(of), "NVLink, %.0f GB/s for each GPU", hardware->nvlink_gbps);
    else if (isfinite(bus))
        snprintf(of, sizeof(of), "%s", verdict->nodes > 1 ? "the NICs of a node" : "NVLink");
    return json_pack("{s:s, s:o, s:o, s:o, s:b}", "of", of, "rdma", number(rdma > 0 ? 100 * rdma / share : NAN), "nvl",
                     number(nvl > 0 && hardware ? 100 * nvl / hardware->nvlink_gbps : NAN), "bus", number(bus),
                     "is_assumed", hardware == NULL);
}

static json_t *expected_document(const struct expected *expected, enum metric metric)
{
    if (isnan(expected->value))
        return json_null();
    return json_pack("{s:f, s:s, s:s, s:s, s:s?}", "value", expected->value, "unit", metric_unit(metric), "from",
                     expected->from, "source", expected->source, "hardware",
                     expected->hardware ? expected->hardware->name : NULL);
}

static const char *rating(const struct context *context, const struct expected *expected)
{
    if (isnan(expected->value))
        return NULL;
    return expected->ratio < 1 - context->options->tolerance ? "slow" : "in range";
}

static json_t *points_document(const struct parse_measure *measure)
{
    json_t *points = json_array();

    for (size_t i = 0; i < measure->n_points; i++)
        json_array_append_new(points, json_pack("[o, o, o]", number(measure->points[i].x),
                                                number(measure->points[i].gbps), number(measure->points[i].time_us)));
    return points;
}

static json_t *measure_document(const struct context *context, const struct run_verdict *verdict,
                                const struct parse_measure *measure)
{
    struct expected expected;
    json_t *wire = wire_rates(verdict, measure), *object;

    expect(context, verdict, measure, &expected);
    object = json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:{s:o, s:o}}", "op", out_text(measure->op),
                       "type", out_text(measure->type), "config", out_text(measure->config), "sms", whole(measure->sms),
                       "nvl_chunk", whole(measure->nvl_chunk), "rdma_chunk", whole(measure->rdma_chunk), "time_us",
                       number(measure->time_us), "notify_us", number(measure->notify_us), "epilogue_us",
                       number(measure->epilogue_us), "logical_gbps", "rdma", number(measure->rdma_gbps), "nvl",
                       number(measure->nvl_gbps));
    json_object_update_new(
        object,
        json_pack("{s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:I, s:o, s:o, s:s?, s:o, s:I}", "percent_of_peak",
                  percents(verdict, measure, wire), "wire_gbps", wire, "busbw_gbps", number(measure->bus_gbps),
                  "algbw_gbps", number(measure->alg_gbps), "bytes", number(measure->bytes), "min_gbps",
                  number(measure->min), "max_gbps", number(measure->max), "mean_gbps",
                  number(measure->sum > 0 ? measure->sum / (double)measure->n : NAN), "count", (json_int_t)measure->n,
                  "expected", expected_document(&expected, metric_of(verdict->run, measure)), "ratio",
                  number(expected.ratio), "rating", rating(context, &expected), "points", points_document(measure),
                  "points_dropped", (json_int_t)measure->dropped_points));
    return object;
}

static json_t *run_document(const struct context *context, const struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    json_t *object, *measures = json_array(), *problems = json_array(), *cases = json_null();

    for (size_t i = 0; i < run->n_measures; i++)
        json_array_append_new(measures, measure_document(context, verdict, &run->measures[i]));
    for (size_t i = 0; i < run->n_problems; i++)
        json_array_append_new(problems, out_text(run->problems[i].line));
    if (run->expected > 0)
        cases = json_pack("{s:i, s:i, s:i, s:i}", "passed", run->passed, "failed", run->failed, "started", run->started,
                          "expected", run->expected);
    object =
        json_pack("{s:s, s:o, s:o, s:o, s:[I, I], s:s, s:o, s:o, s:s?, s:o, s:s, s:i, s:o}", "dialect",
                  parse_dialect_name(run->dialect), "title", out_text(run->title), "source", out_text(run->source),
                  "stream", out_text(run->stream), "lines", (json_int_t)run->first_line, (json_int_t)run->last_line,
                  "result", results[verdict->result], "verdict", out_text(verdict->sentence), "device",
                  out_text(run->device), "hardware", verdict->hardware ? verdict->hardware->name : NULL, "nodes",
                  verdict->nodes > 0 ? json_integer(verdict->nodes) : json_null(), "nodes_from", verdict->nodes_from,
                  "writers", run->writers, "ranks", whole(verdict->ranks));
    json_object_update_new(
        object, json_pack("{s:{s:o, s:o, s:o, s:o, s:o, s:o}, s:o, s:I, s:o, s:b, s:o, s:o, s:O, s:O}", "settings",
                          "tokens", whole(run->tokens), "hidden", whole(run->hidden), "topk", whole(run->topk),
                          "topk_groups", whole(run->topk_groups), "experts", whole(run->experts), "sms",
                          whole(run->sms), "cases", cases, "wrong", (json_int_t)run->wrong, "average_busbw_gbps",
                          number(run->average), "complete", run->is_complete, "measures", measures, "problems",
                          problems, "causes", verdict->causes, "notes", verdict->notes));
    return object;
}

/* --- the whole --- */

/* Findings that need several runs. */
static void survey(struct context *context)
{
    for (size_t i = 0; i < parser_count(context->parser); i++) {
        const struct parse_run *run = parser_run(context->parser, i);

        context->single_ranks += run->dialect == PARSE_NCCL_TESTS && run->ranks == 1;
    }
}

/* Launchers wait for hosts and clean up after earlier attempts: no failure if a run follows that passes. */
static bool is_notice(const struct parse_fault *fault, const json_t *runs)
{
    if (!fault->known->may_pass)
        return false;
    FOR_JSON (run, runs)
        if (strcmp(json_text(run, "source"), fault->source) == 0 && strcmp(json_text(run, "result"), "failed") != 0 &&
            json_integer_value(json_array_get(json_object_get(run, "lines"), 0)) > (json_int_t)fault->last_line)
            return true;
    return false;
}

static bool is_fatal_here(const struct parse_fault *fault, const json_t *runs)
{
    return (fault->known->is_fatal && !is_notice(fault, runs)) ||
           (fault->known->is_fatal_alone && json_array_size(runs) == 0);
}

static json_t *faults_document(const struct parser *parser, const json_t *runs)
{
    size_t n;
    const struct parse_fault *faults = parser_faults(parser, &n);
    json_t *array = json_array();

    for (size_t i = 0; i < n; i++)
        json_array_append_new(array,
                              json_pack("{s:s?, s:s, s:b, s:o, s:o, s:o, s:I, s:I}", "id", faults[i].known->id, "cause",
                                        faults[i].known->cause, "fatal", is_fatal_here(&faults[i], runs), "text",
                                        out_text(faults[i].line), "source", out_text(faults[i].source), "stream",
                                        out_text(faults[i].stream), "line", (json_int_t)faults[i].line_number, "count",
                                        (json_int_t)faults[i].count));
    return array;
}

/* The fault that says most about why there is no run, or why all runs failed; of two such the first. NULL: none. */
static const struct parse_fault *first_fatal(const struct parser *parser, const json_t *runs, bool is_loose)
{
    size_t n;
    const struct parse_fault *faults = parser_faults(parser, &n);

    for (size_t i = 0; i < n; i++)
        if (is_fatal_here(&faults[i], runs) && (faults[i].is_loose || !is_loose))
            return &faults[i];
    return NULL;
}

/* The cause, and the whole line if it says more. */
static json_t *headline(const char *lead, const struct parse_fault *fault)
{
    json_t *line = out_text(fault->line);
    int n = (int)json_string_length(line);
    const char *id = fault->known->id;
    json_t *sentence;

    n = strncmp(fault->line, "Traceback ", 10) == 0 ? 0 : n - (n > 0 && strchr(".:", json_string_value(line)[n - 1]));
    sentence = json_sprintf("%s%s%s%.*s%s%s%s", lead, fault->known->cause, n ? ": " : "", n, json_string_value(line),
                            id ? " (doctor id " : "", id ? id : "", id ? ")" : "");

    json_decref(line);
    return sentence;
}

static json_t *totals_document(const struct parser *parser)
{
    struct parse_totals totals = parser_totals(parser);

    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "bytes", (json_int_t)totals.bytes, "lines",
                     (json_int_t)totals.lines, "recognised", (json_int_t)totals.recognised, "unreadable",
                     (json_int_t)totals.unreadable, "long_lines", (json_int_t)totals.long_lines, "runs_dropped",
                     (json_int_t)totals.runs_dropped);
}

/* Why the whole has failed although no run has failed; NULL: it has not. */
static json_t *failure_of_whole(const struct parser *parser, const json_t *runs, const struct verdict_options *options)
{
    const struct parse_fault *fault = first_fatal(parser, runs, true);

    if (fault && !fault->known->is_fatal_alone)
        return headline("Failed, outside of the runs: ", fault);
    if (*options->failure)
        return out_text(options->failure);
    if (parser_totals(parser).runs_dropped)
        return json_string("Failed, there are more than 2000 runs, and only the first 2000 were checked");
    return NULL;
}

/* The run with the highest weight determines the overall result. */
static int weight(enum verdict_result result)
{
    return result == VERDICT_FAILED ? 3 : result == VERDICT_SLOW ? 2 : result == VERDICT_PASSED ? 1 : 0;
}

/* `fault`: without runs, the one that says most, if there is any. */
static json_t *overall(const int *counts, size_t n, const char *worst, const struct parse_fault *fault, bool is_fatal)
{
    if (n == 0 && fault) {
        json_t *head = headline(
            is_fatal ? "No test was recognised, but a failure: " : "No test was recognised, but a warning: ", fault);
        json_t *sentence = json_sprintf("%s.", json_string_value(head));

        json_decref(head);
        return sentence;
    }
    if (n == 0)
        return json_string(
            "Nothing was recognised: no line of DeepEP, nccl-tests, perftest, epkit or another known test program.");
    if (n == 1)
        return json_sprintf("%s.", worst);
    return json_sprintf(
        "%zu runs: %d passed, %d failed, %d slow%s%s.", n, counts[VERDICT_PASSED], counts[VERDICT_FAILED],
        counts[VERDICT_SLOW],
        counts[VERDICT_PASSED] == (int)n ? "" : ". The worst: ", counts[VERDICT_PASSED] == (int)n ? "" : worst);
}

json_t *verdict_make(const struct parser *parser, const struct reference *reference,
                     const struct verdict_options *options, enum verdict_result *ret_result)
{
    struct context context = {.parser = parser, .reference = reference, .options = options};
    json_t *document = json_object(), *runs = json_array(), *faults, *sentence, *failure;
    enum verdict_result result = VERDICT_NOTHING;
    bool is_unexplained = false;
    int counts[4] = {0};
    char worst[SENTENCE] = "";
    const struct parse_fault *fatal, *known;
    size_t n_known;

    survey(&context);
    for (size_t i = 0; i < parser_count(parser); i++) {
        struct run_verdict verdict;

        identify_run(&context, parser_run(parser, i), &verdict);
        classify_run(&context, &verdict);
        counts[verdict.result]++;
        if (weight(verdict.result) > weight(result)) {
            result = verdict.result;
            snprintf(worst, sizeof(worst), "%s", verdict.sentence);
            is_unexplained = verdict.run->n_problems == 0;
        }
        json_array_append_new(runs, run_document(&context, &verdict));
        json_decref(verdict.causes);
        json_decref(verdict.notes);
    }
    fatal = first_fatal(parser, runs, false);
    faults = faults_document(parser, runs);
    if (result == VERDICT_NOTHING && fatal)
        result = VERDICT_FAILED;
    known = parser_faults(parser, &n_known);
    sentence = overall(counts, parser_count(parser), worst, fatal ? fatal : n_known ? known : NULL, fatal != NULL);
    if (!sentence) /* bytes of the log that are not UTF-8 */
        sentence = out_text(worst);
    /* A launch that failed has failed, even if its logs contain nothing that is known; and why a run did may be
     * outside. */
    failure = result == VERDICT_PASSED || result == VERDICT_SLOW || (result == VERDICT_NOTHING && *options->failure) ||
                      (result == VERDICT_FAILED && is_unexplained && first_fatal(parser, runs, true))
                  ? failure_of_whole(parser, runs, options)
                  : NULL;
    if (failure) {
        json_t *whole = json_sprintf("%s. %s", json_string_value(failure), json_string_value(sentence));

        result = VERDICT_FAILED;
        json_decref(sentence);
        json_decref(failure);
        sentence = whole;
    }
    json_object_set_new(document, "verdict", sentence);
    json_object_set_new(document, "result", json_string(results[result]));
    json_object_set_new(document, "failure", out_text_or_null(options->failure));
    json_object_set_new(document, "totals", totals_document(parser));
    json_object_set_new(document, "tolerance", json_real(options->tolerance));
    json_object_set_new(document, "runs", runs);
    json_object_set_new(document, "faults", faults);
    *ret_result = result;
    return document;
}
