/* SPDX-License-Identifier: Apache-2.0 */
/* compare_runs.c - compares the figures of two runs. */
#include "common/text.h"
#include "report.h"

#include <math.h>
#include <string.h>

#define MIN_HISTORY 4
#define LARGE_BYTES 1073741824.0 /* messages of nccl-tests from which on the rate hardly depends on the size */

/* The main figure of a measure: of low latency the time, else the first rate, or the time. NULL: it has none. */
static json_t *figure_of(const json_t *run, const json_t *measure)
{
    const json_t *logical = json_object_get(measure, "logical_gbps");
    const struct {
        const json_t *value;
        const char *unit;
    } rates[] = {{json_object_get(logical, "rdma"), "GB/s (RDMA)"},
                 {json_object_get(measure, "busbw_gbps"), "GB/s (busbw)"},
                 {json_object_get(logical, "nvl"), "GB/s (NVLink)"},
                 {json_object_get(measure, "algbw_gbps"), "GB/s"}};
    bool is_time = strcmp(json_text(run, "dialect"), "deepep-lowlatency") == 0;

    for (size_t i = 0; i < COUNT(rates) && !is_time; i++)
        if (json_is_number(rates[i].value))
            return json_pack("{s:f, s:s, s:b}", "value", json_number_value(rates[i].value), "unit", rates[i].unit,
                             "lower_is_better", 0);
    if (!is_time && !json_is_number(json_object_get(measure, "time_us")))
        return NULL;
    return json_pack("{s:f, s:s, s:b}", "value", json_number(measure, "time_us"), "unit", "us", "lower_is_better", 1);
}

/* Is the configuration a parameter of the measurement, or the best one that a sweep found? */
static const char *place_of(const json_t *measure)
{
    const char *config = json_text(measure, "config");

    return strstr(config, "place") ? config : "";
}

/*
 * A test of connections with 1 MiB is no sweep that became slow: the figure of a table of small messages has their size
 * in its name.
 */
static const char *size_of(const json_t *run, const json_t *measure, char *ret_text, size_t bytes)
{
    double largest = json_number(measure, "bytes");

    *ret_text = '\0';
    if (strcmp(json_text(run, "dialect"), "nccl-tests") != 0)
        return ret_text;
    FOR_JSON (point, json_object_get(measure, "points"))
        largest = fmax(largest, json_number_value(json_array_get(point, 0)));
    if (largest > 0 && largest < 1048576)
        snprintf(ret_text, bytes, "up to %.0f bytes", largest);
    else if (largest > 0 && largest < LARGE_BYTES)
        snprintf(ret_text, bytes, "up to %.4g MiB", largest / 1048576);
    return ret_text;
}

json_t *report_figures(const json_t *document)
{
    const json_t *parsed = json_object_get(document, "parsed");
    json_t *figures = json_object(), *figure;
    char name[300], numbered[320], size[40];

    FOR_JSON (run, json_object_get(parsed ? parsed : document, "runs")) {
        FOR_JSON (measure, json_object_get(run, "measures")) {
            const char *device = strcmp(json_text(run, "dialect"), "perftest") == 0 ? json_text(run, "device") : "";
            const char *parts[] = {json_text(run, "title"),
                                   json_text(measure, "op"),
                                   json_text(measure, "type"),
                                   place_of(measure),
                                   device,
                                   size_of(run, measure, size, sizeof(size))};
            struct text text = text_in(name, sizeof(name));

            figure = figure_of(run, measure);
            if (!figure)
                continue;
            for (size_t k = 0; k < COUNT(parts); k++)
                if (*parts[k])
                    text_add(&text, "%s%.45s", text.n ? " " : "", parts[k]);
            snprintf(numbered, sizeof(numbered), "%s", name);
            for (int n = 2; json_object_get(figures, numbered) && n < 10000; n++)
                snprintf(numbered, sizeof(numbered), "%s #%d", name, n);
            json_object_set_new(figures, numbered, figure);
        }
    }
    return figures;
}

/* Three standard deviations of a figure's history, as a share of its mean; 0: the history is too short. */
static double noise_of(const json_t *history, const char *figure)
{
    double sum = 0, squares = 0, mean, variance;
    int n = 0;

    FOR_JSON (entry, history) {
        const json_t *value = json_object_get(json_object_get(json_object_get(entry, "figures"), figure), "value");

        if (!json_is_number(value))
            continue;
        sum += json_number_value(value);
        squares += json_number_value(value) * json_number_value(value);
        n++;
    }
    if (n < MIN_HISTORY || sum <= 0)
        return 0;
    mean = sum / n;
    variance = (squares - n * mean * mean) / (n - 1);
    return variance > 0 ? 3 * sqrt(variance) / mean : 0;
}

static json_t *compare_row(const char *name, const json_t *a, const json_t *b, double noise, int *ret_worse,
                           int *ret_better)
{
    double before = json_number(a, "value"), after = json_number(b, "value"), change = NAN;
    const char *rating = a ? "only in A" : "only in B";

    if (a && b) {
        bool is_worse, is_better;

        if (before > 0 && after > 0)
            change = json_is_true(json_object_get(a, "lower_is_better")) ? before / after - 1 : after / before - 1;
        else if (before > 0 || after <= 0)
            change = before > 0 ? -1 : 0;
        /* From zero the relative change is undefined. */
        is_better = isnan(change) || change > noise;
        is_worse = change < -noise || change <= -1;
        rating = is_worse ? "regression" : is_better ? "improvement" : "same";
        *ret_worse += is_worse;
        *ret_better += is_better;
    }
    return json_pack("{s:s, s:s, s:o, s:o, s:o, s:f, s:s}", "figure", name, "unit", json_text(a ? a : b, "unit"), "a",
                     a ? json_real(before) : json_null(), "b", b ? json_real(after) : json_null(), "change",
                     isnan(change) ? json_null() : json_real(change), "noise", noise, "rating", rating);
}

static json_t *about(const json_t *document)
{
    json_t *object = json_object();

    report_copy_members(object, document, TEXTS("folder", "date", "commit", "hardware", "nodes", "result"));
    return object;
}

json_t *report_compare(const json_t *a, const json_t *b, double noise, const json_t *history)
{
    json_t *before = json_object_get(a, "figures"), *after = json_object_get(b, "figures"), *rows = json_array();
    const char *worst = "";
    double worst_change = 0;
    bool has_failed = strcmp(json_text(b, "result"), "failed") == 0 && strcmp(json_text(a, "result"), "failed") != 0;
    int worse = has_failed, better = 0, compared = 0;
    json_t *verdict;

    FOR_MEMBERS (name, value, before) {
        double own = noise_of(history, name);

        json_array_append_new(
            rows, compare_row(name, value, json_object_get(after, name), own > 0 ? own : noise, &worse, &better));
    }
    FOR_MEMBERS (name, value, after)
        if (!json_object_get(before, name))
            json_array_append_new(rows, compare_row(name, NULL, value, noise, &worse, &better));
    FOR_JSON (row, rows) {
        const json_t *change = json_object_get(row, "change");

        compared += strncmp(json_text(row, "rating"), "only", 4) != 0;
        if (json_is_number(change) && json_number_value(change) < worst_change) {
            worst_change = json_number_value(change);
            worst = json_text(row, "figure");
        }
    }
    if (has_failed)
        verdict = json_sprintf("The later run failed, and the earlier one did not: %s", json_text(b, "verdict"));
    else if (compared == 0)
        verdict = json_string("Nothing can be compared: the two have no figure in common.");
    else if (worse > 0)
        verdict = json_sprintf("%d of %d figures are worse beyond noise; most of all %s, by %.1f%%.", worse, compared,
                               worst, -100 * worst_change);
    else if (better > 0)
        verdict = json_sprintf("No figure of %d is worse; %d %s better.", compared, better, better == 1 ? "is" : "are");
    else
        verdict = json_sprintf("No figure of %d differs beyond noise.", compared);
    return json_pack("{s:o, s:i, s:i, s:i, s:o, s:o, s:o}", "verdict", verdict, "compared", compared, "regressions",
                     worse, "improvements", better, "a", about(a), "b", about(b), "rows", rows);
}

int report_compare_print(FILE *stream, const json_t *comparison, enum out_format format)
{
    static const struct out_column columns[] = {
        {"FIGURE", "figure", 0, 0},     {"UNIT", "unit", 0, 0},       {"A", "a", 1, 0},     {"B", "b", 1, 0},
        {"CHANGE %", "change %", 1, 0}, {"NOISE %", "noise %", 1, 0}, {"", "rating", 0, 0},
    };
    json_t *rows = json_deep_copy(json_object_get(comparison, "rows"));
    int result = 0;

    FOR_JSON (row, rows) {
        if (json_is_number(json_object_get(row, "change")))
            json_object_set_new(row, "change %", json_real(100 * json_number(row, "change")));
        json_object_set_new(row, "noise %", json_real(100 * json_number(row, "noise")));
    }
    if (json_array_size(rows) > 0)
        result = out_table(stream, columns, COUNT(columns), rows, format);
    json_decref(rows);
    return result;
}
