/* SPDX-License-Identifier: Apache-2.0 */
/* expect.c - identifies the machine of a run and the figures that this machine should reach. */
#include "base/array.h"
#include "verdict_internal.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#define GPUS 8 /* of a node, if not known */
#define MAX_GPUS 16
#define FASTEST_NIC 100.0 /* GB/s */
#define REFERENCE_HIDDEN 7168
#define SMALL_BYTES 16384 /* smaller messages do not saturate any link */

enum metric metric_of(const struct parse_run *run, const struct parse_measure *measure)
{
    static const enum metric metrics[PARSE_N_DIALECTS] = {
        [PARSE_DEEPEP_INTRANODE] = METRIC_NVL,
        [PARSE_DEEPEP_INTERNODE] = METRIC_RDMA,
        [PARSE_DEEPEP_LOW_LATENCY] = METRIC_TIME,
        [PARSE_DEEPEP_V2] = METRIC_NVL,
        [PARSE_NCCL_TESTS] = METRIC_BUS,
        [PARSE_PERFTEST] = METRIC_TIME,
        [PARSE_PROGRAM] = METRIC_TIME,
        [PARSE_EPKIT_BENCH] = METRIC_NVL,
    };

    if ((run->dialect == PARSE_DEEPEP_V2 || run->dialect == PARSE_PERFTEST || run->dialect == PARSE_PROGRAM) &&
        !isnan(measure->rdma_gbps))
        return METRIC_RDMA;
    if (run->dialect == PARSE_PROGRAM && (!isnan(measure->nvl_gbps) || !isnan(measure->bus_gbps)))
        return isnan(measure->nvl_gbps) ? METRIC_BUS : METRIC_NVL;
    if (run->dialect == PARSE_PROGRAM && !isnan(measure->alg_gbps))
        return METRIC_RATE;
    return metrics[run->dialect];
}

static const struct {
    const char *unit;
    size_t measured, published; /* offsets in a measure, and in a figure of the slowest run that was published */
} metrics[] = {
    [METRIC_NONE] = {"", 0, 0},
    [METRIC_RDMA] = {"GB/s (RDMA)", offsetof(struct parse_measure, rdma_gbps),
                     offsetof(struct reference_figure, rdma.low)},
    [METRIC_NVL] = {"GB/s (NVLink)", offsetof(struct parse_measure, nvl_gbps),
                    offsetof(struct reference_figure, nvl.low)},
    [METRIC_BUS] = {"GB/s (busbw)", offsetof(struct parse_measure, bus_gbps),
                    offsetof(struct reference_figure, busbw.low)},
    [METRIC_RATE] = {"GB/s", offsetof(struct parse_measure, alg_gbps), offsetof(struct reference_figure, busbw.low)},
    [METRIC_TIME] = {"us", offsetof(struct parse_measure, time_us), offsetof(struct reference_figure, time_us.high)},
};

double metric_value(enum metric metric, const struct parse_measure *measure)
{
    return metric == METRIC_NONE ? NAN : *(const double *)((const char *)measure + metrics[metric].measured);
}

const char *metric_unit(enum metric metric)
{
    return metrics[metric].unit;
}

static void settings_of(const struct run_verdict *verdict, const struct parse_measure *measure,
                        struct model_case *ret_case)
{
    const struct parse_run *run = verdict->run;

    *ret_case = (struct model_case){
        .nodes = verdict->nodes > 0 ? verdict->nodes : 1,
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

/*
 * The ranks of a run in one node, from its bytes: rate and time give the number of distinct ranks of a token. -1: no
 * time is printed, no number of GPUs of a node fits within 3%, or the operations do not agree.
 */
static int64_t ranks_by_bytes(const struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    int64_t ranks = -1;

    for (size_t i = 0; i < run->n_measures && run->tokens > 0; i++) {
        double bytes = run->measures[i].nvl_gbps * run->measures[i].time_us * 1e3;
        struct model_case what;
        int64_t fits = -1;

        settings_of(verdict, &run->measures[i], &what);
        for (int n = 2; n <= MAX_GPUS && fits < 0; n *= 2) {
            struct model_hardware node = {.gpus_per_node = n, .nvlink_gbps = 1};
            struct model_result result;

            if (model_predict(&node, &what, &result) && fabs(bytes / result.nvl_logical_bytes - 1) < 0.03)
                fits = n;
        }
        if (fits < 0 || (ranks > 0 && fits != ranks))
            return -1;
        ranks = fits;
    }
    return ranks;
}

/* Rates above those of the NICs, which carry half or more between nodes, are of one node. */
static bool is_above_nics(const struct run_verdict *verdict)
{
    double nic = verdict->hardware ? verdict->hardware->nic_gbps : FASTEST_NIC;

    return ANY_OF(i, verdict->run->n_measures, verdict->run->measures[i].nvl_gbps > 2 * nic);
}

static int guess_nodes(const struct context *context, const struct run_verdict *verdict)
{
    const struct parse_run *run = verdict->run;
    struct model_case what;

    settings_of(verdict, NULL, &what);
    what.topk_groups = run->topk_groups > 0 ? (int)run->topk_groups : 0;
    for (size_t i = 0; i < run->n_measures; i++) {
        int nodes = model_guess_nodes(&context->reference->hardware[0].public, &what, run->measures[i].rdma_gbps,
                                      run->measures[i].nvl_gbps);

        if (nodes > 0)
            return nodes;
    }
    return 0;
}

void identify_run(const struct context *context, const struct parse_run *run, struct run_verdict *ret_verdict)
{
    const struct verdict_options *options = context->options;
    struct run_verdict *verdict = ret_verdict;

    *verdict = (struct run_verdict){
        .run = run, .nodes_from = "none", .gpus = GPUS, .ranks = run->ranks, .worst_ratio = INFINITY};
    verdict->hardware = options->hardware;
    if (*run->device && run->dialect != PARSE_PERFTEST && reference_find_hardware(context->reference, run->device))
        verdict->hardware = reference_find_hardware(context->reference, run->device);
    if (verdict->hardware)
        verdict->gpus = verdict->hardware->gpus_per_node;
    if (run->dialect == PARSE_DEEPEP_INTRANODE) {
        verdict->nodes = 1;
        verdict->nodes_from = "log";
        if (run->ranks < 0)
            verdict->ranks = ranks_by_bytes(verdict);
    } else if (run->dialect == PARSE_PERFTEST) {
        verdict->nodes = 2;
        verdict->nodes_from = "log";
    } else if (options->nodes > 0) {
        verdict->nodes = options->nodes;
        verdict->nodes_from = "option";
    } else if (run->nodes > 0) {
        verdict->nodes = (int)run->nodes;
        verdict->nodes_from = "log";
    } else if (run->dialect == PARSE_DEEPEP_INTERNODE) {
        verdict->nodes = guess_nodes(context, verdict);
        verdict->nodes_from = verdict->nodes > 0 ? "rates" : "none";
        /* The test takes as many groups as nodes, but no more than 4. */
        if (verdict->nodes == 0 && (run->topk_groups == 2 || run->topk_groups == 3)) {
            verdict->nodes = (int)run->topk_groups;
            verdict->nodes_from = "log";
        }
    } else if (run->ranks > verdict->gpus && run->ranks_absent == 0 && run->dialect == PARSE_DEEPEP_LOW_LATENCY) {
        verdict->nodes = (int)((run->ranks + verdict->gpus - 1) / verdict->gpus);
        verdict->nodes_from = "log";
    } else if (run->dialect == PARSE_DEEPEP_LOW_LATENCY && run->ranks_absent == 0 && is_above_nics(verdict)) {
        verdict->nodes = 1;
        verdict->nodes_from = "rates";
    }
    if (verdict->ranks > 0 && verdict->nodes > 0 && verdict->ranks % verdict->nodes == 0)
        verdict->gpus = (int)(verdict->ranks / verdict->nodes);
}

/* The published figures have one hidden size; one for another number of tokens is comparable within a factor of 1.5. */
static bool has_close_tokens(const struct parse_run *run, const struct reference_figure *figure)
{
    if (run->hidden > 0 && run->hidden != REFERENCE_HIDDEN)
        return false;
    return run->tokens <= 0 || figure->tokens <= 0 || fabs(log((double)run->tokens / figure->tokens)) < log(1.5);
}

/* The peak of a sweep is not reached by small messages: 1 MiB, as a test of connections uses, takes as long as nothing.
 */
static bool has_large_messages(const struct parse_measure *measure, const struct reference_figure *figure)
{
    double largest = isnan(measure->bytes) ? 0 : measure->bytes;

    for (size_t i = 0; i < measure->n_points; i++)
        largest = measure->points[i].x > largest ? measure->points[i].x : largest;
    return largest >= figure->bytes;
}

/* The published figure of this kind of machine, else that of the model. false: neither. */
static bool expect_on(const struct context *context, const struct run_verdict *verdict,
                      const struct parse_measure *measure, const struct model_hardware *hardware,
                      struct expected *ret_expected)
{
    const struct parse_run *run = verdict->run;
    enum metric metric = metric_of(run, measure);
    const struct reference_figure *figure =
        reference_find(context->reference, hardware->name, parse_dialect_name(run->dialect), measure->op, measure->type,
                       verdict->nodes, verdict->ranks > 0 ? (int)verdict->ranks : 0, (double)run->tokens);
    struct model_case what;
    struct model_result result;
    double value = 0;

    ret_expected->hardware = hardware;
    /* Figures without a number of ranks are of whole nodes, as the model is. */
    if (verdict->ranks > 0 && verdict->nodes > 0 &&
        verdict->ranks != (int64_t)verdict->nodes * hardware->gpus_per_node && (!figure || figure->ranks == 0))
        return false;
    if (figure && metric != METRIC_NONE && has_close_tokens(run, figure) && has_large_messages(measure, figure))
        value = *(const double *)((const char *)figure + metrics[metric].published);
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
    /* Expanded, cached and reduced operations move other amounts of data than the model counts. */
    if (verdict->nodes < 1 || (strcmp(measure->op, "dispatch") != 0 && strcmp(measure->op, "combine") != 0))
        return false;
    settings_of(verdict, measure, &what);
    if (!model_predict(hardware, &what, &result))
        return false;
    ret_expected->value = metric == METRIC_RDMA ? result.rdma_logical : result.nvl_logical;
    return ret_expected->value > 0;
}

/* Rates fall with the number of nodes. A rate that is slow for the largest possible number is slow for any number. */
static struct run_verdict on_any_number(const struct run_verdict *verdict)
{
    struct run_verdict any = *verdict;
    int experts = verdict->run->experts > 0 ? (int)verdict->run->experts : 256;

    if (any.nodes < 1 && any.gpus > 0 && any.run->dialect == PARSE_DEEPEP_INTERNODE)
        any.nodes = experts / any.gpus > 2 ? experts / any.gpus : 2;
    return any;
}

void expect(const struct context *context, const struct run_verdict *real, const struct parse_measure *measure,
            struct expected *ret_expected)
{
    const struct run_verdict any = on_any_number(real), *verdict = &any;
    enum metric metric = metric_of(verdict->run, measure);
    double measured = metric_value(metric, measure);
    struct expected lowest = {.value = NAN, .ratio = NAN};

    *ret_expected = lowest;
    if (isnan(measured) || !(measured > 0))
        return;
    if (verdict->hardware) {
        if (!expect_on(context, verdict, measure, verdict->hardware, ret_expected))
            ret_expected->value = NAN;
    } else if (verdict->run->dialect != PARSE_NCCL_TESTS && verdict->run->dialect != PARSE_PERFTEST) {
        /* On an unknown machine, a rate is slow only if it is below that of every known machine. */
        for (size_t i = 0; i < context->reference->n_hardware; i++) {
            struct expected trial = {.value = NAN};

            if (!expect_on(context, verdict, measure, &context->reference->hardware[i].public, &trial))
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
