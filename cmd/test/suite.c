/* SPDX-License-Identifier: Apache-2.0 */
#include "suite.h"

#include "cmd/bench/bench_host.h"
#include "cmd/test/check/check_run.h"
#include "cmd/test/check/routings.h"
#include "common/output.h"
#include "common/ranks/gpu.h"
#include "common/ranks/ranks_internal.h"

#include "base/clock.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A run with the fields that describe() and validate() of a matrix need. */
static struct check_run make_run(const struct suite_request *request)
{
    return (struct check_run){.parameters = {.matrix = check_matrix_find(request->matrix),
                                             .hidden = (int)request->hidden,
                                             .seed = request->seed,
                                             .bf16 = strcmp(request->dtype, "fp8") != 0,
                                             .fp8 = strcmp(request->dtype, "bf16") != 0,
                                             .only = (int)request->only}};
}

int suite_count(const struct suite_request *request)
{
    const struct check_run run = make_run(request);
    const struct check_matrix *matrix = run.parameters.matrix;
    int n = 0;

    for (int i = 0; matrix && i < matrix->count; i++) {
        char name[CHECK_NAME_BYTES];

        if ((!request->only || request->only == i + 1) && matrix->describe(&run, i, name))
            n++;
    }
    return n;
}

/* Rejects a name that is neither a routing nor a file, with a suggestion. */
static int reject_routing(const struct cmd *cmd, const char *name)
{
    const char *near = options_nearest(name, routing_names);

    return cmd_usage(cmd, "--routing: '%s' is neither a routing nor a file%s%s%s", name, near ? "; did you mean '" : "",
                     near ? near : "", near ? "'?" : "");
}

static int check_routing(const struct cmd *cmd, const struct suite_request *request, int nranks)
{
    const struct routing_name *name = routing_find(request->routing);
    struct routing_spec spec = {
        .kind = name ? name->kind : ROUTING_FILE,
        .seed = request->seed,
        .n_ranks = nranks,
        .n_tokens = (int)request->tokens,
        .topk = (int)request->topk,
        .n_experts = (int)request->experts,
        .path = request->routing,
    };
    struct check_error error;
    struct routing *routing;

    if (!name && access(request->routing, F_OK) != 0 && !strpbrk(request->routing, "/."))
        return reject_routing(cmd, request->routing);
    if (!routing_new(&spec, &routing, &error))
        return cmd_usage(cmd, "--routing: %s", error.text);
    routing_free(routing);
    return CMD_FINE;
}

/*
 * Least memory of all ranks if rows go to all of them: measured per element of the rows, with 4 ranks and top-8. An
 * estimate, to reject requests for which the kernel would kill a process.
 */
static double min_bytes(const struct suite_request *request, int nranks)
{
    double tokens = (double)(request->tokens ? request->tokens : 1), hidden = (double)request->hidden;

    if (strcmp(request->matrix, "lowlatency") == 0)
        return 5.0 * (double)request->experts * nranks * tokens * hidden;
    return 8.0 * (1.0 + (double)(request->topk ? request->topk : 1)) * nranks * tokens * hidden;
}

static int check_memory(const struct cmd *cmd, const struct suite_request *request, int nranks)
{
    double available = (double)machine_memory_bytes();
    double needed = min_bytes(request, nranks);
    char needed_text[MACHINE_BYTES_TEXT], available_text[MACHINE_BYTES_TEXT];

    /* Ranks of a launcher may be on several machines. */
    if (needed < 0.9 * available || ranks_world_rank() >= 0)
        return CMD_FINE;
    machine_print_bytes(needed, needed_text);
    machine_print_bytes(available, available_text);
    return cmd_usage(
        cmd, "%d rank%s with these sizes need%s at least %s of memory, but only %s are available on this machine",
        nranks, nranks == 1 ? "" : "s", nranks == 1 ? "s" : "", needed_text, available_text);
}

int suite_check(const struct cmd *cmd, const struct suite_request *request, int nranks)
{
    const struct check_run run = make_run(request);
    const char *refused = run.parameters.matrix->validate(&run);
    int result;

    if (request->experts % nranks != 0)
        return cmd_usage(cmd, "--experts %" PRId64 " cannot be spread evenly over %d rank%s", request->experts, nranks,
                         nranks == 1 ? "" : "s");
    if (request->topk > request->experts)
        return cmd_usage(cmd, "--topk %" PRId64 ": there are only %" PRId64 " experts", request->topk,
                         request->experts);
    if (refused)
        return cmd_usage(cmd, "--hidden %" PRId64 ": %s", request->hidden, refused);
    if (request->only > run.parameters.matrix->count)
        return cmd_usage(cmd, "--only %" PRId64 ": %s has %d cases", request->only, request->matrix,
                         run.parameters.matrix->count);
    if (suite_count(request) == 0)
        return cmd_usage(cmd, "--only %" PRId64 " is not a case of --dtype %s", request->only, request->dtype);
    result = check_memory(cmd, request, nranks);
    return result == CMD_FINE ? check_routing(cmd, request, nranks) : result;
}

/* --- events of the ranks --- */

struct collector {
    const struct suite_request *request;
    struct suite_result *result;
    unsigned flags;
    int done, all;
};

static void print_case(const json_t *event, int total)
{
    bool passed = json_is_true(json_object_get(event, "passed"));
    const char *detail = json_string_value(json_object_get(event, "detail"));
    char count[16];

    snprintf(count, sizeof(count), "%d", total);
    progress_hide();
    printf("[%*" JSON_INTEGER_FORMAT "/%d] %s ... ", (int)strlen(count),
           json_integer_value(json_object_get(event, "index")), total,
           json_string_value(json_object_get(event, "name")));
    out_tone(stdout, passed ? OUT_GOOD : OUT_BAD);
    fputs(passed ? "passed" : "FAILED", stdout);
    out_tone(stdout, OUT_PLAIN);
    out_line(" %.0f ms", json_number_value(json_object_get(event, "ms")));
    if (!passed && detail)
        out_line("        %s", detail);
}

static void add_case(struct collector *collector, const json_t *event)
{
    struct suite_result *result = collector->result;
    json_t *row = json_deep_copy(event);

    if (json_is_true(json_object_get(event, "passed")))
        result->passed++;
    else
        result->failed++;
    if (collector->flags & SUITE_LINES)
        print_case(event, check_matrix_find(collector->request->matrix)->count);
    json_object_del(row, "event");
    json_array_append_new(result->cases, row);
    progress_update(collector->done + result->passed + result->failed, collector->all, "%s",
                    collector->request->matrix);
}

static void on_event(void *context, const json_t *event)
{
    struct collector *collector = context;
    struct suite_result *result = collector->result;
    const char *kind = json_string_value(json_object_get(event, "event"));

    if (strcmp(kind, "case") == 0) {
        add_case(collector, event);
    } else if (strcmp(kind, "error") == 0) {
        ranks_problem_add(result->errors, event);
    }
}

static json_t *job_parameters(const struct suite_request *request)
{
    return json_pack("{s:s, s:I, s:I, s:I, s:I, s:s, s:I, s:s, s:I, s:b}", "matrix", request->matrix, "tokens",
                     (json_int_t)request->tokens, "hidden", (json_int_t)request->hidden, "topk",
                     (json_int_t)request->topk, "experts", (json_int_t)request->experts, "dtype", request->dtype,
                     "seed", (json_int_t)request->seed, "routing", request->routing, "only", (json_int_t)request->only,
                     "no_partial_reduce", (int)request->no_partial_reduce);
}

void suite_run(const struct ranks_spec *spec, const struct suite_request *request, unsigned flags, int done, int all,
               struct suite_result *ret_result)
{
    struct suite_result result = {.total = suite_count(request)};
    struct collector collector = {request, &result, flags, done, all};
    json_t *parameters = job_parameters(request);
    uint64_t start_ns = ep_now_ns();

    result.cases = json_array();
    result.errors = json_array();
    progress_update(done, all, "%s", request->matrix);
    result.code = ranks_run(spec, "check", parameters, on_event, &collector);
    result.seconds = (double)(ep_now_ns() - start_ns) / 1e9;
    json_decref(parameters);
    *ret_result = result;
}

void suite_done(struct suite_result *result)
{
    json_decref(result->cases);
    json_decref(result->errors);
    result->cases = result->errors = NULL;
}

void suite_summary(const struct suite_result *result, char *ret_text, size_t bytes)
{
    int missing = result->total - result->passed - result->failed;
    struct text text = text_in(ret_text, bytes);

    text_add(&text, "%d/%d cases passed", result->passed, result->total);
    if (result->failed)
        text_add(&text, ", %d failed", result->failed);
    if (missing > 0)
        text_add(&text, ", %d did not run", missing);
}

/* Between nodes; as ep_comm_new() chooses it. */
static const char *find_network(const struct ranks_spec *spec)
{
    const char *given = getenv("EPKIT_NETWORK");

    if (spec->nnodes < 2)
        return "none";
    if (spec->network)
        return spec->network;
    if (given && *given)
        return given;
    return spec->boot == RANKS_TCP ? "tcp" : "emulated";
}

static json_t *parameters_of(const struct ranks_spec *spec, const struct suite_request *request)
{
    static const char *const boots[] = {[RANKS_FORK] = "fork", [RANKS_THREADS] = "threads", [RANKS_TCP] = "tcp"};
    json_t *parameters = job_parameters(request);

    json_object_del(parameters, "matrix");
    if (!request->only)
        json_object_del(parameters, "only");
    json_object_set_new(parameters, "ranks", json_integer(spec->nranks));
    json_object_set_new(parameters, "nodes", json_integer(spec->nnodes));
    json_object_set_new(parameters, "boot", json_string(boots[spec->boot]));
    json_object_set_new(parameters, "network", json_string(find_network(spec)));
    json_object_set_new(parameters, "backend", json_string(spec->backend));
    json_object_set_new(parameters, "backend_why", json_string(spec->backend_why));
    return parameters;
}

json_t *suite_json(const struct ranks_spec *spec, const struct suite_request *request,
                   const struct suite_result *result)
{
    const char *word = result->code == CMD_FINE ? "passed" : result->code == CMD_UNSUPPORTED ? "unsupported" : "failed";

    return json_pack("{s:s, s:s, s:i, s:i, s:i, s:f, s:o, s:O, s:O}", "matrix", request->matrix, "result", word,
                     "passed", result->passed, "failed", result->failed, "total", result->total, "seconds",
                     result->seconds, "parameters", parameters_of(spec, request), "cases", result->cases, "errors",
                     result->errors);
}
