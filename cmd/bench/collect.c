/* SPDX-License-Identifier: Apache-2.0 */
/* collect.c - starts the job from the launcher and collects the measurements of the ranks. */
#include "bench.h"

#include "common/cmd.h"
#include "common/output.h"
#include "common/progress.h"
#include "common/ranks/ranks_internal.h"
#include "host.h"
#include "mpirun.h"

#include <string.h>

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

/* Are the ranks started by mpirun, which this command starts? See cmd_bench.c. */
static bool starts_mpirun(const struct ranks_spec *spec)
{
    return spec->boot == RANKS_TCP && ranks_world_rank() < 0;
}

/* Rejects a request that would run out of memory, which would kill a rank or a process of another user. */
static bool memory_suffices(const struct ranks_spec *spec, const struct bench_request *request)
{
    uint64_t needed = bench_bytes(request, spec->nranks, starts_mpirun(spec) || ranks_world_is_mpirun());
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
        code = starts_mpirun(spec) ? bench_mpirun(spec, parameters, on_event, &collector)
                                   : ranks_run(spec, BENCH_JOB, parameters, on_event, &collector);
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
