/* SPDX-License-Identifier: Apache-2.0 */
/* request.c - the launcher: requests as JSON, their results, and what a record says about its origin. */
#include "bench_case.h"

#include "bench_host.h"
#include "common/cmd.h"
#include "common/output.h"
#include "common/ranks/ranks_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/utsname.h>
#include <time.h>

/* Names of the bits in a mask, lowest bit first. */
static const char *const op_names[] = {"dispatch", "combine", "plan", "ll", "engine", NULL};
static const char *const type_names[] = {"bf16", "fp8", NULL};

static json_t *mask_to_json(unsigned mask, const char *const *names)
{
    json_t *array = json_array();

    for (int i = 0; names[i]; i++)
        if (mask & 1u << i)
            json_array_append_new(array, json_string(names[i]));
    return array;
}

static const char *routing_to_name(enum routing_kind kind)
{
    for (const struct routing_name *row = routing_names; row->name; row++)
        if (row->kind == kind)
            return row->name;
    return "?";
}

json_t *bench_request_to_json(const struct bench_request *request)
{
    json_t *tokens = json_array();

    for (int i = 0; i < request->n_token_counts; i++)
        json_array_append_new(tokens, json_integer(request->tokens[i]));
    return json_pack("{s:[i, i, i], s:o, s:o, s:s, s:I, s:o, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:b}", "bits",
                     (int)request->ops, (int)request->types, (int)request->routing, "ops",
                     mask_to_json(request->ops, op_names), "types", mask_to_json(request->types, type_names), "routing",
                     routing_to_name(request->routing), "seed", (json_int_t)request->seed, "tokens", tokens,
                     "ll_tokens", request->ll_tokens, "hidden", request->hidden, "topk", request->topk, "experts",
                     request->experts, "iters", request->iters, "baselines", (int)request->baselines, "sms",
                     request->sms, "no_partial_reduce", (int)request->no_partial_reduce);
}

int bench_request_from_json(const json_t *json, struct bench_request *ret_request)
{
    struct bench_request request = {0};
    json_t *tokens;
    json_int_t seed;
    int baselines, no_partial_reduce;

    if (json_unpack((json_t *)json, "{s:[i, i, i], s:I, s:o, s:i, s:i, s:i, s:i, s:i, s:b, s:i, s:b}", "bits",
                    &request.ops, &request.types, &request.routing, "seed", &seed, "tokens", &tokens, "ll_tokens",
                    &request.ll_tokens, "hidden", &request.hidden, "topk", &request.topk, "experts", &request.experts,
                    "iters", &request.iters, "baselines", &baselines, "sms", &request.sms, "no_partial_reduce",
                    &no_partial_reduce) != 0)
        return -1;
    if (json_array_size(tokens) > BENCH_MAX_TOKEN_COUNTS)
        return -1;
    request.seed = (uint64_t)seed;
    request.baselines = baselines != 0;
    request.no_partial_reduce = no_partial_reduce != 0;
    request.n_token_counts = (int)json_array_size(tokens);
    for (int i = 0; i < request.n_token_counts; i++)
        request.tokens[i] = (int)json_integer_value(json_array_get(tokens, (size_t)i));
    *ret_request = request;
    return 0;
}

const char *bench_check(const struct bench_request *request, int n_ranks, char *buffer, size_t buffer_bytes)
{
    bool low_latency = request->ops & BENCH_LL;
    bool fp8 = request->types & BENCH_FP8;

    if (request->experts % n_ranks)
        snprintf(buffer, buffer_bytes, "%d experts cannot be spread evenly over %d ranks", request->experts, n_ranks);
    else if (request->topk > request->experts)
        snprintf(buffer, buffer_bytes, "a token cannot select %d of %d experts", request->topk, request->experts);
    else if (request->hidden % 8)
        snprintf(buffer, buffer_bytes, "hidden %d is not a multiple of 8", request->hidden);
    else if ((low_latency || fp8) && request->hidden % EP_SCALE_BLOCK)
        snprintf(buffer, buffer_bytes, "hidden %d is not a multiple of %d, which %s needs", request->hidden,
                 EP_SCALE_BLOCK, fp8 ? "fp8" : "low latency");
    else
        return NULL;
    return buffer;
}

uint64_t bench_bytes(const struct bench_request *request, int n_ranks, bool under_mpi)
{
    bool baselines = request->baselines && (request->ops & (BENCH_DISPATCH | BENCH_COMBINE));
    int fan_out = request->topk < n_ranks ? request->topk : n_ranks;
    uint64_t row = 2 * (uint64_t)request->hidden;
    uint64_t most = 0;

    /* Token counts are measured one after the other: the largest counts. */
    for (int i = 0; i < request->n_token_counts; i++) {
        uint64_t tokens = (uint64_t)request->tokens[i] * (uint64_t)n_ranks;
        uint64_t rows = tokens * (uint64_t)fan_out;
        uint64_t bytes = tokens * row * 3 + rows * row * (baselines ? 3 : 1);
        uint64_t routes = request->ops & (BENCH_PLAN | BENCH_ENGINE) ? 1 + BENCH_VARIANTS : 1;

        /* Each rank has the choices of all ranks. */
        bytes += routes * (uint64_t)n_ranks * tokens * (uint64_t)request->topk * (sizeof(int32_t) + sizeof(float));
        /* Rows of the expanded layout, in two kinds of memory. */
        if (request->ops & BENCH_ENGINE)
            bytes += 2 * tokens * (uint64_t)request->topk * row;
        if (under_mpi && baselines)
            bytes += naive_bytes((int64_t)rows, (int64_t)rows, request->hidden, request->topk);
        most = bytes > most && (request->ops & ~(unsigned)BENCH_LL) ? bytes : most;
    }
    if (request->ops & BENCH_LL) {
        uint64_t rows = (uint64_t)request->ll_tokens * (uint64_t)n_ranks * (uint64_t)request->topk;
        uint64_t bytes = rows * row * 6;

        most = bytes > most ? bytes : most;
    }
    return most;
}

/* --- the launcher: starts the job and collects the measurements of the ranks --- */

struct collector {
    const struct ranks_spec *spec;
    json_t *result, *rows, *memory;
};

static void append_row(json_t *array, const json_t *event)
{
    json_t *row = json_copy((json_t *)event);

    json_object_del(row, "event");
    json_array_append_new(array, row);
}

static void on_event(void *context, const json_t *event)
{
    struct collector *collector = context;
    const char *kind = json_string_value(json_object_get(event, "event"));
    const char *what;
    int done, total, tokens;

    if (!kind)
        return;
    if (strcmp(kind, "row") == 0) {
        append_row(collector->rows, event);
    } else if (strcmp(kind, "memory") == 0) {
        append_row(collector->memory, event);
    } else if (strcmp(kind, "start") == 0) {
        json_object_update(collector->result, (json_t *)event);
        json_object_del(collector->result, "event");
    } else if (strcmp(kind, "step") == 0 && json_unpack((json_t *)event, "{s:i, s:i, s:s, s:i}", "done", &done, "total",
                                                        &total, "what", &what, "tokens", &tokens) == 0) {
        progress_update(done, total, "%d ranks, %d tokens: %s", collector->spec->nranks, tokens, what);
    }
}

/* Rejects a request that would run out of memory, which would kill a rank or a process of another user. */
static bool memory_suffices(const struct ranks_spec *spec, const struct bench_request *request)
{
    uint64_t needed = bench_bytes(request, spec->nranks, ranks_world_is_mpirun());
    uint64_t there = machine_memory_bytes();
    char needed_text[MACHINE_BYTES_TEXT], there_text[MACHINE_BYTES_TEXT];

    if (needed < there / 10 * 9)
        return true;
    machine_print_bytes((double)needed, needed_text);
    machine_print_bytes((double)there, there_text);
    out_error("bench: %d ranks need about %s of memory, but only %s are available on this machine", spec->nranks,
              needed_text, there_text);
    out_hint("use fewer --tokens, fewer --ranks or a smaller --hidden");
    return false;
}

int bench_collect(const struct ranks_spec *spec, const struct bench_request *request, json_t **results)
{
    struct collector collector = {.spec = spec, .result = json_object(), .rows = json_array(), .memory = json_array()};
    json_t *parameters = bench_request_to_json(request);
    int code = CMD_FAILED;

    if (memory_suffices(spec, request))
        code = ranks_run(spec, BENCH_JOB, parameters, on_event, &collector);
    json_object_set_new(collector.result, "rows", collector.rows);
    json_object_set_new(collector.result, "memory", collector.memory);
    if (code == CMD_FINE && !*results) {
        *results = json_incref(collector.result);
    } else if (code == CMD_FINE) {
        json_array_extend(json_object_get(*results, "rows"), collector.rows);
        json_array_extend(json_object_get(*results, "memory"), collector.memory);
        /* A single rank is not under MPI. */
        if (!json_is_string(json_object_get(*results, "mpi")))
            json_object_set(*results, "mpi", json_object_get(collector.result, "mpi"));
    }
    json_decref(parameters);
    json_decref(collector.result);
    return code;
}

/* --- where and by what a record was made --- */

#if defined(__clang__)
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

json_t *bench_provenance(void)
{
    return json_pack("{s:s, s:s, s:s, s:o}", "commit", EPKIT_COMMIT, "compiler", COMPILER, "build_type",
                     EPKIT_BUILD_TYPE, "date", out_time(time(NULL)));
}

json_t *machine_describe(void)
{
    json_t *machine =
        json_pack("{s:n, s:i, s:n, s:I, s:n, s:n, s:n, s:[], s:n}", "cpu", "cores", machine_cores(), "numa_nodes",
                  "memory_bytes", (json_int_t)machine_memory_bytes(), "kernel", "os", "arch", "gpus", "gpu_driver");
    struct utsname name;
    struct source *source;

    if (uname(&name) == 0) {
        json_object_set_new(machine, "kernel", out_text(name.release));
        json_object_set_new(machine, "arch", out_text(name.machine));
    }
    if (source_open(NULL, &source) == EP_OK) {
        machine_read(source, machine);
        source_free(source);
    }
    return machine;
}
