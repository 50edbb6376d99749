/* SPDX-License-Identifier: Apache-2.0 */
/* expect.c - on which machine a run ran, and which figures that machine should reach. */
#include "verdict/internal.h"

#include <stdio.h>
#include <string.h>

#define GPUS 8            /* of a node, where nothing is said */
#define SMALL_BYTES 16384 /* messages below do not fill a link, however good it is */

enum metric metric_of(const struct parse_run *run, const struct parse_measure *measure)
{
    switch (run->dialect) {
    case PARSE_DEEPEP_INTRANODE:
        return METRIC_NVL;
    case PARSE_DEEPEP_INTERNODE:
        return METRIC_RDMA;
    case PARSE_DEEPEP_LOW_LATENCY:
        return METRIC_TIME;
    case PARSE_DEEPEP_V2:
        return isnan(measure->rdma_gbps) ? METRIC_NVL : METRIC_RDMA;
    case PARSE_NCCL_TESTS:
        return METRIC_BUS;
    case PARSE_PERFTEST:
        return isnan(measure->rdma_gbps) ? METRIC_TIME : METRIC_RDMA;
    case PARSE_EPKIT_BENCH:
        return METRIC_NVL;
    default:
        return METRIC_NONE;
    }
}

double metric_value(enum metric metric, const struct parse_measure *measure)
{
    switch (metric) {
    case METRIC_RDMA:
        return measure->rdma_gbps;
    case METRIC_NVL:
        return measure->nvl_gbps;
    case METRIC_BUS:
        return measure->bus_gbps;
    case METRIC_TIME:
        return measure->time_us;
    default:
        return NAN;
    }
}

const char *metric_unit(enum metric metric)
{
    return metric == METRIC_RDMA   ? "GB/s (RDMA)"
           : metric == METRIC_NVL  ? "GB/s (NVLink)"
           : metric == METRIC_BUS  ? "GB/s (busbw)"
           : metric == METRIC_TIME ? "us"
                                   : "";
}

static void settings_of(const struct judged *judged, const struct parse_measure *measure, struct model_case *ret_case)
{
    const struct parse_run *run = judged->run;

    *ret_case = (struct model_case){
        .nodes = judged->nodes > 0 ? judged->nodes : 1,
        .tokens = run->tokens > 0 ? (double)run->tokens : 4096,
        .hidden = run->hidden > 0 ? (double)run->hidden : 7168,
        .topk = run->topk > 0 ? (double)run->topk : 8,
        .experts = run->experts > 0 ? (double)run->experts : 256,
        .topk_groups = run->topk_groups > 0 ? (int)run->topk_groups : 0,
    };
    if (run->dialect == PARSE_DEEPEP_INTERNODE && ret_case->topk_groups == 0)
        ret_case->topk_groups = ret_case->nodes < 4 ? ret_case->nodes : 4; /* default of the test */
    if (measure) {
        ret_case->is_fp8 = strcmp(measure->type, "fp8") == 0;
        ret_case->is_combine = strstr(measure->op, "combine") != NULL;
    }
}

static int guess_nodes(const struct context *context, const struct judged *judged)
{
    const struct parse_run *run = judged->run;
    struct model_case what;

    settings_of(judged, NULL, &what);
    what.topk_groups = run->topk_groups > 0 ? (int)run->topk_groups : 0;
    for (size_t i = 0; i < run->n_measures; i++) {
        int nodes = model_guess_nodes(reference_hardware(context->reference, 0), &what, run->measures[i].rdma_gbps,
                                      run->measures[i].nvl_gbps);

        if (nodes > 0)
            return nodes;
    }
    return 0;
}

void judge_identify(const struct context *context, const struct parse_run *run, struct judged *ret_judged)
{
    const struct verdict_options *options = context->options;
    struct judged *judged = ret_judged;

    *judged = (struct judged){.run = run, .nodes_from = "none", .gpus = GPUS, .worst_ratio = INFINITY};
    judged->hardware = options->hardware;
    if (*run->device && run->dialect != PARSE_PERFTEST && reference_find_hardware(context->reference, run->device))
        judged->hardware = reference_find_hardware(context->reference, run->device);
    if (judged->hardware)
        judged->gpus = judged->hardware->gpus_per_node;
    if (run->dialect == PARSE_DEEPEP_INTRANODE) {
        judged->nodes = 1;
        judged->nodes_from = "log";
    } else if (run->dialect == PARSE_PERFTEST) {
        judged->nodes = 2;
        judged->nodes_from = "log";
    } else if (options->nodes > 0) {
        judged->nodes = options->nodes;
        judged->nodes_from = "option";
    } else if (run->nodes > 0) {
        judged->nodes = (int)run->nodes;
        judged->nodes_from = "log";
    } else if (run->dialect == PARSE_DEEPEP_INTERNODE) {
        judged->nodes = guess_nodes(context, judged);
        judged->nodes_from = judged->nodes > 0 ? "rates" : "none";
    } else if (run->ranks > 0 && run->dialect == PARSE_DEEPEP_LOW_LATENCY) {
        judged->nodes = (int)((run->ranks + judged->gpus - 1) / judged->gpus);
        judged->nodes_from = "log";
    }
    if (run->ranks > 0 && judged->nodes > 0 && run->ranks % judged->nodes == 0)
        judged->gpus = (int)(run->ranks / judged->nodes);
}

static double figure_value(const struct reference_figure *figure, enum metric metric)
{
    switch (metric) {
    case METRIC_RDMA:
        return figure->rdma.low;
    case METRIC_NVL:
        return figure->nvl.low;
    case METRIC_BUS:
        return figure->busbw.low;
    case METRIC_TIME:
        return figure->time_us.high;
    default:
        return 0;
    }
}

/* Figures of other numbers of tokens say little: below a factor of 1.5 they do. */
static bool has_close_tokens(const struct parse_run *run, const struct reference_figure *figure)
{
    return run->tokens <= 0 || figure->tokens <= 0 || fabs(log((double)run->tokens / figure->tokens)) < log(1.5);
}

/* The published figure of this kind of machine, or else the model's. false: neither. */
static bool expect_on(const struct context *context, const struct judged *judged, const struct parse_measure *measure,
                      const struct model_hardware *hardware, struct expected *ret_expected)
{
    const struct parse_run *run = judged->run;
    enum metric metric = metric_of(run, measure);
    const struct reference_figure *figure =
        reference_find(context->reference, hardware->name, parse_dialect_name(run->dialect), measure->op, measure->type,
                       judged->nodes, run->ranks > 0 ? (int)run->ranks : 0, (double)run->tokens);
    struct model_case what;
    struct model_result result;
    double value = 0;

    ret_expected->hardware = hardware;
    if (figure && has_close_tokens(run, figure))
        value = figure_value(figure, metric);
    if (value > 0) {
        ret_expected->value = value;
        ret_expected->from = "reference";
        snprintf(ret_expected->source, sizeof(ret_expected->source), "%s", figure->source);
        return true;
    }
    ret_expected->from = "model";
    snprintf(ret_expected->source, sizeof(ret_expected->source), "docs/model.md, %s", hardware->title);
    if (run->dialect == PARSE_PERFTEST && metric == METRIC_RDMA && strstr(measure->op, "both ways") == NULL &&
        measure->bytes >= SMALL_BYTES) {
        ret_expected->value = hardware->nic_gbps * hardware->nic_efficiency;
        return ret_expected->value > 0;
    }
    if (run->dialect != PARSE_DEEPEP_INTRANODE && run->dialect != PARSE_DEEPEP_INTERNODE &&
        run->dialect != PARSE_DEEPEP_V2)
        return false;
    /* Expanded, cached and reduced ones move other bytes than the model counts. */
    if (judged->nodes < 1 || (strcmp(measure->op, "dispatch") != 0 && strcmp(measure->op, "combine") != 0))
        return false;
    settings_of(judged, measure, &what);
    if (!model_predict(hardware, &what, &result))
        return false;
    ret_expected->value = metric == METRIC_RDMA ? result.rdma_logical : result.nvl_logical;
    return ret_expected->value > 0;
}

/* Rates fall with the number of nodes: what is slow on as many as there are experts for is slow on any number. */
static struct judged on_any_number(const struct judged *judged)
{
    struct judged any = *judged;
    int experts = judged->run->experts > 0 ? (int)judged->run->experts : 256;

    if (any.nodes < 1 && any.gpus > 0 && any.run->dialect == PARSE_DEEPEP_INTERNODE)
        any.nodes = experts / any.gpus > 2 ? experts / any.gpus : 2;
    return any;
}

void expect(const struct context *context, const struct judged *real, const struct parse_measure *measure,
            struct expected *ret_expected)
{
    const struct judged any = on_any_number(real), *judged = &any;
    enum metric metric = metric_of(judged->run, measure);
    double measured = metric_value(metric, measure);
    struct expected lowest = {.value = NAN, .ratio = NAN};

    *ret_expected = lowest;
    if (isnan(measured) || !(measured > 0))
        return;
    if (judged->hardware) {
        if (!expect_on(context, judged, measure, judged->hardware, ret_expected))
            ret_expected->value = NAN;
    } else if (judged->run->dialect != PARSE_NCCL_TESTS && judged->run->dialect != PARSE_PERFTEST) {
        /* On a machine that is not named, only what no known machine would be is slow. */
        for (size_t i = 0; i < reference_n_hardware(context->reference); i++) {
            struct expected trial = {.value = NAN};

            if (!expect_on(context, judged, measure, reference_hardware(context->reference, i), &trial))
                continue;
            if (isnan(lowest.value) ||
                (metric == METRIC_TIME ? trial.value > lowest.value : trial.value < lowest.value))
                lowest = trial;
        }
        *ret_expected = lowest;
        if (!isnan(lowest.value))
            ret_expected->from = "lowest known";
    }
    ret_expected->ratio = metric == METRIC_TIME ? ret_expected->value / measured : measured / ret_expected->value;
}
