/* SPDX-License-Identifier: Apache-2.0 */
#include "bench.h"

#include "common/json.h"

#include <stdio.h>
#include <string.h>

static const struct out_column row_columns[] = {
    {"ON", "device", 0, 0},
    {"OP", "op", 0, 0},
    {"TYPE", "type", 0, 0},
    {"RANKS", "ranks", 0, 0},
    {"TOKENS", "tokens", 0, 0},
    {"TIME us", "time_us", 1, 0},
    {"P10", "p10_us", 1, 0},
    {"P90", "p90_us", 1, 0},
    {"LOGICAL GB/s", "logical_gbps", 3, OUT_IF_PRESENT},
    {"WIRE GB/s", "wire_gbps", 3, OUT_IF_PRESENT},
    {"x memcpy", "vs_memcpy", 2, OUT_IF_PRESENT},
    {"x alltoallv", "vs_alltoallv", 2, OUT_IF_PRESENT},
};

/* As engines call them. */
static const struct out_column engine_columns[] = {
    {"ON", "device", 0, 0},       {"OP", "op", 0, 0},         {"TYPE", "type", 0, 0},
    {"LAYOUT", "layout", 0, 0},   {"MEMORY", "memory", 0, 0}, {"ROUTING", "routing", 0, 0},
    {"RANKS", "ranks", 0, 0},     {"TOKENS", "tokens", 0, 0}, {"SMS", "sms", 0, OUT_IF_PRESENT},
    {"TIME us", "time_us", 1, 0}, {"P10", "p10_us", 1, 0},    {"P90", "p90_us", 1, 0},
};

/* On GPUs: with the roofline of the machine. */
static const struct out_column gpu_columns[] = {
    {"ON", "device", 0, 0},
    {"OP", "op", 0, 0},
    {"TYPE", "type", 0, 0},
    {"RANKS", "ranks", 0, 0},
    {"TOKENS", "tokens", 0, 0},
    {"SMS", "sms", 0, 0},
    {"IDLE START us", "time_us", 1, 0},
    {"GB/s", "logical_gbps", 1, 0},
    {"QUEUED us", "queued_us", 1, 0},
    {"GB/s", "queued_gbps", 1, 0},
    {"RAW ROWS GB/s", "bare_gbps", 1, OUT_IF_PRESENT},
    {"x raw rows", "vs_bare", 2, OUT_IF_PRESENT},
    {"COPY ENGINE GB/s", "engine_all_gbps", 1, OUT_IF_PRESENT},
    {"x engine", "vs_engine_all", 2, OUT_IF_PRESENT},
    {"ONE PAIR, WIRE GB/s", "engine_pair_gbps", 1, OUT_IF_PRESENT},
};

static const struct out_column net_columns[] = {
    {"ON", "device", 0, 0},
    {"OP", "op", 0, 0},
    {"TYPE", "type", 0, 0},
    {"RANKS", "ranks", 0, 0},
    {"NODES", "nodes", 0, 0},
    {"TOKENS", "tokens", 0, 0},
    {"NET GB/s AS DeepEP PRINTS IT", "net_printed_gbps", 3, 0},
    {"NET GB/s ON THE WIRE", "net_gbps", 3, 0},
};

/* A row without nested objects: "memcpy": {"time_us", "gbps"} becomes "memcpy_us" and "memcpy_gbps". A new reference.
 */
static json_t *flatten(const json_t *row, const char *device)
{
    json_t *flat = json_copy((json_t *)row);
    char key[64];

    json_object_set_new(flat, "device", json_string(device));
    FOR_MEMBERS (name, value, row) {
        snprintf(key, sizeof(key), "%s_us", name);
        json_object_set(flat, key, json_object_get(value, "time_us"));
        snprintf(key, sizeof(key), "%s_gbps", name);
        json_object_set(flat, key, json_object_get(value, "gbps"));
    }
    return flat;
}

/* Flat rows that have `key`, or all of them if it is NULL. */
static json_t *flat_rows(const json_t *rows, const char *key, const char *device)
{
    json_t *flat = json_array();

    FOR_JSON (row, rows)
        if (!key || json_is_object(json_object_get(row, key)) || json_is_number(json_object_get(row, key)))
            json_array_append_new(flat, flatten(row, device));
    return flat;
}

static int print(FILE *stream, const struct out_column *columns, size_t n, json_t *rows, enum out_format format)
{
    int result = json_array_size(rows) ? out_table(stream, columns, n, rows, format) : 0;

    json_decref(rows);
    return result;
}

int bench_print_rows(FILE *stream, const json_t *rows, const char *device, enum out_format format)
{
    if (json_object_get(json_array_get(rows, 0), "memory"))
        return print(stream, engine_columns, COUNT(engine_columns), flat_rows(rows, NULL, device), format);
    CMD_TRY(print(stream, row_columns, COUNT(row_columns), flat_rows(rows, NULL, device), format));
    CMD_TRY(print(stream, gpu_columns, COUNT(gpu_columns), flat_rows(rows, "queued", device), format));
    return print(stream, net_columns, COUNT(net_columns), flat_rows(rows, "net_gbps", device), format);
}

static bool is_op(const json_t *row, const char *op)
{
    return strcmp(json_string_value(json_object_get(row, "op")), op) == 0;
}

/* Orders by ranks, then tokens, then bytes of a row. */
static bool larger(const json_t *row, const json_t *other)
{
    static const char *const keys[] = {"ranks", "tokens", "row_bytes"};

    for (size_t k = 0; k < COUNT(keys); k++)
        if (json_number(row, keys[k]) != json_number(other, keys[k]))
            return json_number(row, keys[k]) > json_number(other, keys[k]);
    return false;
}

const json_t *bench_largest(const json_t *rows, const char *op)
{
    const json_t *best = NULL;

    FOR_JSON (row, rows)
        if ((!op || is_op(row, op)) && (!best || larger(row, best)))
            best = row;
    return best;
}

struct bench_baseline bench_baseline_of(const json_t *row)
{
    static const struct bench_baseline memcpy_baseline = {"memcpy", "memcpy", ""};
    static const struct bench_baseline engine_baseline = {"engine_all", "the copy engine", " queued"};

    return json_object_get(row, "sms") ? engine_baseline : memcpy_baseline;
}

const json_t *bench_ratio_of(const json_t *row)
{
    char key[64];

    snprintf(key, sizeof(key), "vs_%s", bench_baseline_of(row).key);
    return json_object_get(row, key);
}

double bench_rate_of(const json_t *row)
{
    const json_t *queued = json_object_get(row, "queued");

    return queued ? json_number(queued, "gbps") : json_number(row, "logical_gbps");
}

double bench_time_of(const json_t *row)
{
    const json_t *queued = json_object_get(row, "queued");

    return json_number(queued ? queued : row, "time_us");
}

static void write_ratio(FILE *text, const json_t *row)
{
    struct bench_baseline baseline = bench_baseline_of(row);

    if (*baseline.kind)
        fprintf(text, " moves %.0f GB/s%s,", bench_rate_of(row), baseline.kind);
    else
        fputs(" runs at", text);
    fprintf(text, " %.2f of %s", json_number_value(bench_ratio_of(row)), baseline.name);
}

/* Time of a layer of the largest group and token count, rank layout. 0: not measured. */
static double layer_time(const json_t *rows, const char *memory, const char *routing)
{
    const json_t *best = NULL;
    const char *in, *of, *layout;

    FOR_JSON (row, rows)
        if (is_op(row, "layer") &&
            json_unpack((json_t *)row, "{s:s, s:s, s:s}", "memory", &in, "routing", &of, "layout", &layout) == 0 &&
            strcmp(in, memory) == 0 && strcmp(of, routing) == 0 && strcmp(layout, "rank") == 0 &&
            (!best || larger(row, best)))
            best = row;
    return best ? json_number(best, "time_us") : 0;
}

static void write_layers(FILE *text, const json_t *rows)
{
    if (layer_time(rows, "ordinary", "plan") > 0)
        fprintf(text,
                ": a layer with new routing takes %.0f us in symmetric and %.0f us in ordinary memory, with counts on "
                "the host %.0f and %.0f us",
                layer_time(rows, "symmetric", "update"), layer_time(rows, "ordinary", "update"),
                layer_time(rows, "symmetric", "plan"), layer_time(rows, "ordinary", "plan"));
}

static void write_sentence(FILE *text, const json_t *rows)
{
    static const char *const ops[] = {"dispatch", "combine", "plan", "ll-dispatch", "ll-combine", "ll-pair"};
    int n = 0;

    fprintf(text, "%d ranks", (int)json_number(bench_largest(rows, NULL), "ranks"));
    write_layers(text, rows);
    for (size_t i = 0; i < COUNT(ops); i++) {
        const json_t *row = bench_largest(rows, ops[i]);

        if (!row)
            continue;
        fprintf(text, "%s %s", n++ ? ";" : ":", ops[i]);
        if (!bench_ratio_of(row)) {
            fprintf(text, " takes %.0f us", json_number(row, "time_us"));
            continue;
        }
        write_ratio(text, row);
        if (json_object_get(row, "vs_alltoallv"))
            fprintf(text, " and %.1f times MPI_Alltoallv", json_number(row, "vs_alltoallv"));
    }
}

void bench_verdict(const json_t *rows, char *ret_text, size_t bytes)
{
    FILE *text = fmemopen(ret_text, bytes, "w");

    *ret_text = '\0';
    if (!text)
        return;
    write_sentence(text, rows);
    fclose(text);
    ret_text[bytes - 1] = '\0';
}

void bench_print_notes(const json_t *rows, const json_t *memory)
{
    const json_t *first = bench_largest(rows, "first-dispatch");
    const json_t *held = bench_largest(memory, NULL);

    if (first)
        out_line(
            "New routing: the first dispatch, including its plan, takes %.2f times as long as with an existing plan.",
            1 / json_number(first, "vs_cached"));
    if (held)
        out_line("Memory: the library uses %.2f MiB per rank in addition to %.1f MiB of inputs and outputs, %.1f%% "
                 "(%d ranks, %d tokens).",
                 json_number(held, "share") * json_number(held, "data_bytes") / (1 << 20),
                 json_number(held, "data_bytes") / (1 << 20), json_number(held, "share") * 100,
                 (int)json_number(held, "ranks"), (int)json_number(held, "tokens"));
}
